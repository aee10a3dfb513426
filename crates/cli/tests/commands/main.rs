//! The commands that end by themselves, and `kvist chat`, through the real binary.
#[path = "../../../hub/tests/loopback/mod.rs"]
mod loopback;
#[path = "../program/mod.rs"]
mod program;

mod bad_input;
mod bench;
mod chat;
mod keep;
mod kills;
mod models;
mod output;
mod plan;
mod prefix;
mod readme;
mod saved;
#[cfg(target_os = "linux")]
mod terminal;
