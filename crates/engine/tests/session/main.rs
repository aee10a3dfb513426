//! A model and its cache, called directly: logits, text, branches, drafts, and sessions in files. Nothing here has a scheduler,
//! but heads of EAGLE, which draft in its steps too.
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../model/tests/common/mod.rs"]
mod models;
#[path = "../oracle/mod.rs"]
mod oracle;

// The model.
mod devices;
mod memory;
// The functions of the C library may differ: it runs where its results were recorded.
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
mod numerics;
mod parity;

// A session and its cache.
mod branches;
mod frozen;
mod keep;
mod kinds;
mod rig;
mod saved;
mod saved_states;

// Text.
mod eagle;
mod examples;
mod grammar;
mod sampler;
mod speculation;
mod stepwise;
