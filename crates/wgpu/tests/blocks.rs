//! Blocks of many cells, on an adapter.
mod common;
#[path = "../../gpu/tests/shared/blocks.rs"]
mod shared;
