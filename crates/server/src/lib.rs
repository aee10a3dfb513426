//! kvist over HTTP: one model, many users, one cache that they share as far as their salts allow.
//!
//! One thread owns the scheduler, the cache and the weights, and takes one turn after the other ([`Engine`]); everything
//! else talks to it through [`Job`]s and [`Event`]s. It promises that a request that nobody waits for any more holds
//! nothing after the next step, and that no memory is taken beyond the plan that was printed at the start.
#![forbid(unsafe_code)]

mod job;
mod worker;

pub use job::*;
pub use worker::{Engine, EngineConfig, Generation, State, Stats, Watch};
