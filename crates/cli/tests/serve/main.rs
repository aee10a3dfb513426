//! `kvist serve` as a process. `tests/tiers/` tests it over stores, and `tests/gpu.rs` on GPUs.
#[path = "../program/mod.rs"]
mod program;

mod endurance;
mod kept_sessions;
mod lifecycle;
