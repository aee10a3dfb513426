//! Blocks between the host and cells of pools, on an adapter.
mod common;
#[path = "../../gpu/tests/shared/lanes.rs"]
mod shared;
