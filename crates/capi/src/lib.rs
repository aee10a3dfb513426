//! kvist for C. `include/kvist.h` is made from this crate; docs/c.md explains how to use it.
//!
//! Every exported function checks its arguments, catches panics, and returns a status; the text of a thread's last error is kept
//! for it. A handle is a value behind a lock that is only ever tried, so a second
//! thread gets an error instead of a race. Pointers from C are read in the `ffi.rs` files alone.
#![deny(unsafe_code)]

mod batch;
mod cache;
mod drafts;
mod ffi;
mod handle;
mod model;
mod session;
mod status;
