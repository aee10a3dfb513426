//! Decides which requests run in the next step: continuous batching with chunked prefill. The same code serves a real
//! engine and the simulator.
//!
//! A driver reports arrivals and cancellations to the [`Scheduler`]. [`Scheduler::plan`] builds one batch within the
//! budgets of the [`Config`]; the driver executes it, and [`Planned::complete`] records the result.
//! [`Scheduler::iterate`] does both with an [`Executor`].
//!
//! Guarantees: decisions are a pure function of the configuration and the numbered events (see [`Log`] and
//! [`replay`]), every request ends exactly once, and a step never exceeds the batch size or the token budget. The
//! scheduler never reads a clock, draws no random numbers (no policy needs one), and knows nothing about tensors.
#![forbid(unsafe_code)]

mod admit;
mod batch;
mod config;
mod drafts;
mod drive;
mod entry;
mod executor;
mod iteration;
mod lengths;
mod log;
mod memory;
mod outcome;
mod policy;
mod preempt;
mod replay;
mod request;
mod resize;
mod retain;
mod scheduler;
mod snapshot;
mod tiers;

pub use config::{Admission, BadConfig, Config, LengthSource, Preempted, PrefixOrder, Thinned, TokenWork};
pub use drafts::{BatchDrafts, Lookahead};
pub use drive::drive;
pub use executor::{Batch, Clock, Executor, Script, VirtualClock, Work};
pub use iteration::{Iteration, Planned};
pub use kvist_cache::Prompt;
pub use lengths::{Lengths, OraclePolicy, Truth};
pub use log::{GroupShape, LOG_VERSION, Log, Part, RECORDING_VERSION, Recorder, Recording};
pub use outcome::{Advance, BadOutcome, Emitted, Outcome, Sampled};
pub use policy::{BuildPolicy, POLICIES, Rank, SchedulingPolicy, View, build_policy};
pub use replay::{Replay, ReplayError, Replayed, replay};
pub use request::{End, Ended, RefusalReason, Request, RequestId};
pub use resize::ResizeRefused;
pub use retain::Retention;
pub use scheduler::{Duplicate, RequestStatus, Scheduler, SchedulerCounters};
pub use snapshot::{LiveLoad, LiveRequest, LiveSequence, Snapshot};
pub use tiers::{
    BadTiers, CachedTokens, Ends, FindOrder, KeepOrder, LoadOrder, MAX_TIERS, NamedBlock, NotLoaded, Order,
    Recompute, Run, StoreOrder, Tier, TierCounters, Tiers, TransferId, WindowBytes, Write,
};

/// The example of docs/scheduler.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/scheduler.md")]
struct Guide;
