//! The configuration: everything that decisions depend on besides the events. It is written in the first line of every
//! log.
use crate::policy::build_policy;
use crate::tiers::{BadTiers, Tiers};
use serde::{Deserialize, Serialize};

/// The configuration of a scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Name of a policy: see [`POLICIES`](crate::POLICIES).
    pub policy: String,
    /// How the policy estimates output lengths.
    pub lengths: LengthSource,
    /// Maximum sequences in the batch, at least 1.
    pub max_batch: u32,
    /// Maximum tokens in a step. At least `max_batch`, so that every decoding request fits.
    pub max_batch_tokens: u32,
    /// When a request may enter the batch.
    pub admission: Admission,
    /// What a preempted request keeps.
    pub preempted: Preempted,
    /// Whether a waiting request with a longer prefix hit may overtake the head of the queue.
    pub prefix_order: PrefixOrder,
    /// Assumed cost of a token, for policies that rank by remaining work.
    pub work: TokenWork,
    /// Waiting time in nanoseconds that is worth one priority level. Only the `priority` policy uses it.
    pub ageing_ns: u64,
    /// Whether a request waits while a request of the batch computes blocks that both prompts begin with, until they
    /// are stored in the prefix index. Of several requests with one prompt, the first computes it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wait_for_prefix: bool,
    /// Number of failed steps in a row after which the requests of the step are refused, at least 1.
    pub max_failures: u32,
    /// Bounds of sequences whose driver removes tokens from them between steps; `None` if nothing is removed. The removals
    /// are no events, so a replay does not repeat them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinned: Option<Thinned>,
    /// Tiers below the cache; `None` for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Tiers>,
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
            wait_for_prefix: false,
            max_failures: 3,
            thinned: None,
            tiers: None,
        }
    }
}

/// Bounds of sequences that lose tokens from their middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thinned {
    /// Most tokens that a sequence stores between two steps, at least 1.
    pub sequence_tokens: u32,
    /// Most prompt tokens of a step, over all requests, at least 1.
    pub step_tokens: u32,
}

/// Where estimates of output lengths come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthSource {
    /// Predicted: every request generates `max_new` tokens.
    MaxNew,
    /// Predicted: the mean over all finished requests; `max_new` until the first one finishes.
    RunningMean,
    /// The true length, which only a simulator knows.
    Oracle,
}

impl LengthSource {
    /// The name used in reports.
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
    /// A request is admitted when its current tokens fit together with those that the batch has yet to compute, with
    /// `headroom_tokens` left over. Tokens generated later may run out of space; then the lowest-ranked request is
    /// preempted.
    Optimistic {
        /// Tokens that must stay free when the batch is not empty.
        headroom_tokens: u32,
    },
    /// A request is admitted when prompt and `max_new` of every request in the batch fit at the same time, as if no
    /// block were shared. Generation then never runs out of space, with one exception: memory is counted in the
    /// smallest layer group without a sliding window, so if a sliding-window group has an even smaller pool, it can
    /// fill up, and the lowest-ranked request is preempted.
    Conservative,
}

/// What a preempted request keeps. Generated tokens are always kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preempted {
    /// No cache: on readmission it recomputes its prompt and generated tokens, except what the prefix index still has.
    Recompute,
    /// Its cached tokens, until a running request needs the space. The request is then called paused.
    Kept,
}

/// Whether a longer prefix hit may overtake the head of the waiting queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixOrder {
    /// Never.
    Off,
    /// Among the first 64 requests of equal rank, the longest hit goes first. The head is overtaken at most 64 times.
    Ties,
    /// Among the first `n` waiting requests, the longest hit goes first. The head is overtaken at most `n` times.
    Window(u32),
}

/// Assumed cost of a token in nanoseconds. The rates are constant. They only serve to compare requests and are never
/// used to measure time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenWork {
    /// A prompt token.
    pub prefill_ns: u64,
    /// A generated token.
    pub decode_ns: u64,
}

impl Default for TokenWork {
    fn default() -> Self {
        TokenWork { prefill_ns: 100_000, decode_ns: 10_000_000 }
    }
}

/// An invalid configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadConfig {
    /// There is no policy of this name.
    #[error("there is no scheduling policy {0:?}: use one of {1}")]
    UnknownPolicy(String, String),
    /// A number is out of range.
    #[error("{field} is {got}: {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        got: u64,
        /// What is allowed.
        expected: &'static str,
    },
    /// `oracle` without true lengths, or true lengths without `oracle`.
    #[error("lengths is {0:?}, but {1}")]
    Truth(LengthSource, &'static str),
    /// This kind of cache supports only one sequence.
    #[error("this kind of cache holds one sequence: use paged, cells or tree")]
    OneSequence,
    /// The cache already contains sequences, which the scheduler did not create.
    #[error("the cache has {n_sequences} sequences already: give the scheduler an empty cache")]
    NotEmpty {
        /// How many sequences.
        n_sequences: usize,
    },
    /// The tiers cannot be used.
    #[error(transparent)]
    Tiers(#[from] BadTiers),
}

impl Config {
    /// Checks that the policy exists and that all numbers are in range. Whether true lengths are given as `lengths`
    /// requires is checked by `Scheduler::new`.
    pub fn check(&self) -> Result<(), BadConfig> {
        let out = |field, got: u32, expected| BadConfig::OutOfRange { field, got: got.into(), expected };
        if self.max_batch == 0 {
            return Err(out("max_batch", 0, "a batch holds at least 1 sequence"));
        }
        if self.max_batch_tokens < self.max_batch {
            let expected = "it must be at least max_batch, so that every decoding sequence fits into a step";
            return Err(out("max_batch_tokens", self.max_batch_tokens, expected));
        }
        if self.max_failures == 0 {
            return Err(out("max_failures", 0, "allow at least 1 failure before requests are refused"));
        }
        if self.prefix_order == PrefixOrder::Window(0) {
            return Err(out(
                "prefix_order window",
                0,
                "a window holds at least 1 request; use off to disable it",
            ));
        }
        if let Some(tiers) = &self.tiers {
            tiers.check()?;
        }
        build_policy(self).map(|_| ())
    }
}
