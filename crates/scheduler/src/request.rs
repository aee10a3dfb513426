//! Requests, and how they end.
use crate::retain::Retention;
use crate::tiers::{MAX_TIERS, NotLoaded};
use kvist_cache::{MissReason, Prompt};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Identifies a request. Chosen by the caller; unique among live requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Identifies the request in every log.
    pub id: RequestId,
    /// Arrival time in nanoseconds of the driver's clock. Used by policies for ranking.
    pub arrival_ns: u64,
    /// Number of prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Maximum number of tokens to generate, at least 1.
    pub max_new: u32,
    /// The content of its tokens.
    #[serde(default)]
    pub prompt: Prompt,
    /// When it should be finished, on the same clock as `arrival_ns`.
    #[serde(default)]
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    #[serde(default)]
    pub priority: i32,
    /// Requests with different salts never share a prefix.
    #[serde(default)]
    pub salt: Arc<str>,
    /// Computes every prompt token, including those the prefix index could supply, because the caller wants output
    /// (such as logits) for each token. These tokens count twice against the step's token budget. The results are
    /// indexed as usual.
    #[serde(default, rename = "fresh", skip_serializing_if = "std::ops::Not::not")]
    pub skip_prefix_cache: bool,
    /// Keeps the prompt in the prefix index after the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain: Option<Retention>,
}

impl Request {
    /// A request with unknown content, no salt, no deadline, and priority 0.
    pub fn new(id: u64, arrival_ns: u64, prompt_tokens: u32, max_new: u32) -> Request {
        Request {
            id: RequestId(id),
            arrival_ns,
            prompt_tokens,
            max_new,
            prompt: Prompt::Unknown,
            deadline_ns: None,
            priority: 0,
            salt: Arc::from(""),
            skip_prefix_cache: false,
            retain: None,
        }
    }
}

/// How a request ended. Each request ends exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The executor reported the last token, or `max_new` tokens were generated.
    Finished,
    /// The caller cancelled it.
    Cancelled,
    /// It cannot be served, or cannot continue.
    Refused(RefusalReason),
}

/// Why a request is not served, or cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The prompt has no tokens.
    EmptyPrompt,
    /// `max_new` is 0.
    NothingToGenerate,
    /// `prompt_tokens + max_new` exceeds 32 bits, or the prompt content is shorter than `prompt_tokens` or
    /// inconsistent.
    Malformed,
    /// Its content is given in a different form (trace ids, or ids of a different size) than the prefix index was
    /// built for.
    ForeignContent,
    /// It would not fit the cache even alone.
    NeverFits,
    /// It was alone in the cache and filled it. The tokens generated so far are its answer.
    CacheFull,
    /// Its steps failed as many times in a row as the configuration allows.
    StepsFailed,
}

impl RefusalReason {
    /// A one-word name, for logs.
    pub fn name(self) -> &'static str {
        match self {
            RefusalReason::EmptyPrompt => "empty_prompt",
            RefusalReason::NothingToGenerate => "nothing_to_generate",
            RefusalReason::Malformed => "malformed",
            RefusalReason::ForeignContent => "foreign_content",
            RefusalReason::NeverFits => "never_fits",
            RefusalReason::CacheFull => "cache_full",
            RefusalReason::StepsFailed => "steps_failed",
        }
    }
}

/// A finished, cancelled or refused request. All times are on the driver's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The request.
    pub id: RequestId,
    /// How it ended.
    pub end: End,
    /// When it arrived.
    pub arrival_ns: u64,
    /// When it was first admitted to the batch; `None` if it never was.
    pub admitted_ns: Option<u64>,
    /// End of the step that sampled its first token.
    pub first_token_ns: Option<u64>,
    /// When it ended.
    pub ended_ns: u64,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub generated: u32,
    /// Tokens served from the prefix index at its first admission.
    pub hit_tokens: u32,
    /// Tokens served from the prefix index at later admissions, after preemptions.
    pub regained_tokens: u32,
    /// Tokens whose K and V were lost to preemptions.
    pub lost_tokens: u64,
    /// Tokens computed for it in successful steps.
    pub computed_tokens: u64,
    /// Draft tokens that were verified for it.
    pub draft_tokens: u64,
    /// Those of them that the target model accepted.
    pub accepted_tokens: u64,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Why the prefix index supplied no more at its first admission, in the detail an operator may see. `None` unless
    /// [`Scheduler::explain_misses`](crate::Scheduler::explain_misses) is on.
    pub miss: Option<MissReason>,
    /// Tokens loaded from the tiers below the KV cache, by tier. They are not part of `hit_tokens`.
    pub loaded: [u32; MAX_TIERS],
    /// Why the last tokens that a tier had, or may have had, were computed. `None` if everything was loaded.
    pub not_loaded: Option<NotLoaded>,
}
