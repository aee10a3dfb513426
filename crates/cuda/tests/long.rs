//! Long contexts, over CUDA.
mod common;
#[path = "../../gpu/tests/shared/long.rs"]
mod shared;
