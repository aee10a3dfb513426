//! The CPU as a device: K and V storage, attention, packed linear layers, and the memory that they take.
#[path = "../decoding/mod.rs"]
mod decoding;

mod conformance;
mod determinism;
mod fast_prefill;
// The functions of the C library may differ: it runs where its results were recorded.
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
mod golden;
mod linear;
mod mass;
mod memory;
mod reads_bounded;
mod rows;
mod store;
mod transfers;
