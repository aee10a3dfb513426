//! Blocks of many cells, on a GPU.
mod common;
#[path = "../../gpu/tests/shared/blocks.rs"]
mod shared;
