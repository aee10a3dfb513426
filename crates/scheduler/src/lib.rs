//! Decides which requests run in the next step: continuous batching with chunked prefill. The same code serves a real
//! engine and the simulator.
//!
//! A driver reports arrivals and cancellations to the [`Scheduler`] and calls [`Scheduler::turn`] with the current
//! time. Each turn builds one batch within the budgets of the [`Config`], passes it to an [`Executor`], and records
//! the result.
//!
//! Guarantees: decisions are a pure function of the configuration and the numbered events (see [`Log`] and
//! [`replay`]), every request ends exactly once, and a step never exceeds the batch size or the token budget. The
//! scheduler never reads a clock, draws no random numbers (no policy needs one), and knows nothing about tensors.
#![forbid(unsafe_code)]

mod admit;
mod batch;
mod cache_shape;
mod config;
mod drive;
mod dry_run;
mod entry;
mod executor;
mod fused_steps;
mod lengths;
mod log;
mod memory;
mod policy;
mod preempt;
mod recording;
mod replay;
mod request;
mod scheduler;
mod snapshot;

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
