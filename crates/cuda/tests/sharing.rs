//! Sequences that share a trunk, over CUDA.
mod common;
#[path = "../../gpu/tests/shared/sharing.rs"]
mod shared;
