//! Everything a decision depends on besides the events, by name. It stands in the first line of every log.
use crate::policy::build_policy;
use serde::{Deserialize, Serialize};

/// The configuration of a scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Name of a policy: see [`POLICIES`](crate::POLICIES).
    pub policy: String,
    /// Where the policy's expectation of output lengths comes from.
    pub lengths: LengthSource,
    /// Sequences in the batch at most, at least 1.
    pub max_batch: u32,
    /// Tokens in a step at most, at least `max_batch`, so that every decode finds a place.
    pub max_batch_tokens: u32,
    /// When a request may enter the batch.
    pub admission: Admission,
    /// What a preempted request keeps.
    pub preempted: Preempted,
    /// May a prefix hit overtake?
    pub prefix_order: PrefixOrder,
    /// What a policy that weighs work believes a token to cost.
    pub work: TokenWork,
    /// Waiting time that is worth one level of priority, in nanoseconds. Only `priority` reads it.
    pub ageing_ns: u64,
    /// Steps in a row that may fail before their requests are refused, at least 1.
    pub max_failures: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            policy: "fcfs".into(),
            lengths: LengthSource::MaxNew,
            max_batch: 256,
            max_batch_tokens: 8192,
            admission: Admission::Optimistic { headroom_tokens: 128 },
            preempted: Preempted::Recompute,
            prefix_order: PrefixOrder::Off,
            work: TokenWork::default(),
            ageing_ns: 1_000_000_000,
            max_failures: 3,
        }
    }
}

/// Where expectations of output lengths come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthSource {
    /// Predicted: every request writes as much as it may.
    MaxNew,
    /// Predicted: the mean of all that finished so far, `max_new` before the first.
    RunningMean,
    /// The truth, which only a simulator knows.
    Oracle,
}

impl LengthSource {
    /// As reports say it.
    pub fn name(self) -> &'static str {
        match self {
            LengthSource::MaxNew => "predicted (max_new)",
            LengthSource::RunningMean => "predicted (running_mean)",
            LengthSource::Oracle => "oracle",
        }
    }
}

/// When a waiting request may enter the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Admission {
    /// When its tokens so far fit beside those that the batch still has to compute, and `headroom_tokens` remain.
    /// What is generated later may run out of space: then the lowest-ranked request is preempted.
    Optimistic {
        /// Tokens that stay free at an admission beside others.
        headroom_tokens: u32,
    },
    /// When prompt and `max_new` of everything in the batch fit at once, as if nothing were shared. Then answers never
    /// outgrow the cache, unless a layer group with a window has a smaller pool than the smallest group that keeps
    /// everything: memory is counted in the latter, and who ranks last is preempted when the former is full.
    Conservative,
}

/// What a preempted request keeps. Generated tokens are always kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preempted {
    /// Nothing: it returns with a longer prompt and computes it again, less what the prefix index still has.
    Recompute,
    /// Its place in the cache, until somebody in the batch needs the space.
    Kept,
}

/// May a longer prefix hit overtake?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixOrder {
    /// Never.
    Off,
    /// The longest hit goes first among those of equal rank (the first 64 of them). The head is overtaken at most 64 times.
    Ties,
    /// The longest hit goes first among the first `n` of the queue. The head is overtaken at most `n` times.
    Window(u32),
}

/// What a token is believed to cost, in nanoseconds. Constant rates: good enough to compare requests, and never used
/// for time itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenWork {
    /// A token of a prompt.
    pub prefill_ns: u64,
    /// A generated token.
    pub decode_ns: u64,
}

impl Default for TokenWork {
    fn default() -> Self {
        TokenWork { prefill_ns: 100_000, decode_ns: 10_000_000 }
    }
}

/// A configuration that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadConfig {
    /// No such policy.
    #[error("there is no scheduling policy {0:?}: take one of {1}")]
    UnknownPolicy(String, String),
    /// A number out of its range.
    #[error("{field} is {got}: {expected}")]
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// What it is.
        got: u64,
        /// What to try.
        expected: &'static str,
    },
    /// Oracle lengths without a truth, or a truth that nobody asked for.
    #[error("lengths is {0:?}, but {1}")]
    Truth(LengthSource, &'static str),
    /// The kind of cache holds one sequence.
    #[error("this kind of cache holds one sequence: take paged, cells or tree")]
    OneSequence,
    /// Somebody else's sequences are in the cache.
    #[error("the cache holds {n_sequences} sequences already: give the scheduler a cache that holds none")]
    NotEmpty {
        /// How many.
        n_sequences: usize,
    },
}

impl Config {
    /// Is there such a policy, and are all numbers in their ranges? Whether the truth is given where it must be shows
    /// when a scheduler is made.
    pub fn check(&self) -> Result<(), BadConfig> {
        let out = |field, got: u32, expected| BadConfig::OutOfRange { field, got: got.into(), expected };
        if self.max_batch == 0 {
            return Err(out("max_batch", 0, "a batch holds at least 1 sequence"));
        }
        if self.max_batch_tokens < self.max_batch {
            let expected = "it must be at least max_batch, so that every decode finds a place";
            return Err(out("max_batch_tokens", self.max_batch_tokens, expected));
        }
        if self.max_failures == 0 {
            return Err(out("max_failures", 0, "allow at least 1 failure before requests are refused"));
        }
        if self.prefix_order == PrefixOrder::Window(0) {
            return Err(out("prefix_order window", 0, "a window holds at least 1 request, or take off"));
        }
        build_policy(self).map(|_| ())
    }
}
