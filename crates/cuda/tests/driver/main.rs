//! What lies under the device: kernels that compile, graphs, pinned memory, failures of the driver, and the emulation itself.
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../cpu/tests/decoding/mod.rs"]
mod decoding;

mod compile;
mod emulator;
mod errors;
mod graphs;
mod pinned;
