//! What tests compare with. No product crate depends on this one.
//!
//! [`reference`](mod@reference) contains a reference model of every kind of cache: vectors and loops, written from the
//! rules and not from the code under test, and a driver that performs random operations on both. [`conformance`] is the
//! suite that every backend must pass, and [`operations`] compares those of a device. [`recording`] is a device that
//! computes nothing and records what it is asked to do. [`servers`] starts servers that stores of blocks use.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod gate;
pub mod operations;
pub mod recording;
pub mod reference;
pub mod servers;

pub use reference::SplitMix64;
