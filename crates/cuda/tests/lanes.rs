//! Blocks between the host and cells of pools, over CUDA.
mod common;
#[path = "../../gpu/tests/shared/lanes.rs"]
mod shared;
