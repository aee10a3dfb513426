//! Measured transfers, over CUDA.
mod common;
#[path = "../../gpu/tests/shared/measure.rs"]
mod shared;
