//! Long contexts, on an adapter.
mod common;
#[path = "../../gpu/tests/shared/long.rs"]
mod shared;
