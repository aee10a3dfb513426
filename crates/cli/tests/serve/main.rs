//! `kvist serve` as a process. `tests/tiers/` and `tests/gpu.rs` have what it takes features to build.
#[path = "../program/mod.rs"]
mod program;

mod endurance;
mod kept_sessions;
mod lifecycle;
