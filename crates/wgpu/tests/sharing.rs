//! Sequences that share a trunk, on an adapter.
mod common;
#[path = "../../gpu/tests/shared/sharing.rs"]
mod shared;
