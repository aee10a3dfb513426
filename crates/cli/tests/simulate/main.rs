//! `kvist simulate`, through the binary.
#[path = "../program/mod.rs"]
mod program;

mod fleet;
mod refusals;
mod runs;
