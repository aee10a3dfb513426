//! Measured transfers, on an adapter.
mod common;
#[path = "../../gpu/tests/shared/measure.rs"]
mod shared;
