//! WHO runs next: continuous batching with chunked prefill, for an engine and for a simulator alike.
//!
//! A driver tells the [`Scheduler`] what arrives and who goes away, and calls [`Scheduler::turn`] with the time; each
//! turn forms one step within the budgets of the [`Config`], has an [`Executor`] run it, and learns what came of it.
//!
//! It promises that its decisions are a pure function of the configuration and the numbered events (see [`Log`] and
//! [`replay`]), that every request ends exactly once, and that neither budget nor batch is ever exceeded.
//! It refuses to read a clock, to draw random numbers (no policy needs one), and to know a tensor.
#![forbid(unsafe_code)]

mod admit;
mod cache_shape;
mod config;
mod drive;
mod entry;
mod executor;
mod foresee;
mod form;
mod lengths;
mod log;
mod memory;
mod policy;
mod recording;
mod relief;
mod replay;
mod request;
mod scheduler;
mod snapshot;
mod way;

pub use config::{Admission, BadConfig, Config, LengthSource, Preempted, PrefixOrder, TokenWork};
pub use drive::drive;
pub use executor::{Batch, Clock, Executor, Outcome, Sampled, Script, VirtualClock, Work};
pub use lengths::{Lengths, OraclePolicy, Truth};
pub use log::{LOG_VERSION, Log};
pub use policy::{BuildPolicy, POLICIES, Policy, Rank, View, build_policy};
pub use recording::{GroupShape, Part, RECORDING_VERSION, Recorder, Recording};
pub use replay::{Replay, ReplayError, Turned, replay};
pub use request::{End, Ended, Prompt, Reason, Request, RequestId};
pub use scheduler::{Counters, Duplicate, Scheduler, Standing, Turn};
pub use snapshot::{LiveRequest, LiveSequence, Snapshot};

/// The example of docs/scheduler.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/scheduler.md")]
struct Guide;
