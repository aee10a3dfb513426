//! Requests, and how they end.
use kvist_cache::MissReason;
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

/// What is known about a request's tokens, starting with the prompt. The content may extend into the output (a trace
/// knows the next turn of a chat). Only computed tokens are ever stored in the prefix index, and if a different token
/// is sampled, the sampled one counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// Only the number of tokens is known. Never matches a prefix.
    #[default]
    Unknown,
    /// Token ids. Sampled tokens are appended.
    Tokens(Vec<u32>),
    /// Token ids shared by several requests. Copied when a sampled token differs from them or extends them.
    SharedTokens(Arc<[u32]>),
    /// One opaque id per `tokens_per_id` tokens. An id identifies its own tokens and all tokens before them.
    Ids {
        /// The ids, in order.
        ids: Arc<[u64]>,
        /// At least 1.
        tokens_per_id: u32,
        /// Tokens covered by the ids: at most `ids.len() · tokens_per_id`.
        n_tokens: u32,
    },
}

impl Prompt {
    /// Length of the common prefix with `other` within the first `n_tokens`. Content given as ids is compared id by
    /// id.
    pub(crate) fn in_common(&self, other: &Prompt, n_tokens: u32) -> u32 {
        fn same<T: PartialEq>(a: &[T], b: &[T], n: u32) -> u32 {
            a.iter().zip(b).take(n as usize).take_while(|(a, b)| a == b).count() as u32
        }
        match (self, other) {
            (Prompt::Ids { ids: a, tokens_per_id, .. }, Prompt::Ids { ids: b, .. }) => {
                let n_ids = n_tokens.div_ceil(*tokens_per_id);
                same(a, b, n_ids).saturating_mul(*tokens_per_id).min(n_tokens)
            }
            _ => match (self.tokens(), other.tokens()) {
                (Some(a), Some(b)) => same(a, b, n_tokens),
                _ => 0,
            },
        }
    }

    /// The token ids, if known.
    pub(crate) fn tokens(&self) -> Option<&[u32]> {
        match self {
            Prompt::Tokens(tokens) => Some(tokens),
            Prompt::SharedTokens(tokens) => Some(tokens),
            Prompt::Unknown | Prompt::Ids { .. } => None,
        }
    }

    /// Sets the token at position `end` and drops everything after it. Capacity grows by an eighth, because doubling
    /// would allocate as much again as a long prompt.
    pub(crate) fn push(&mut self, end: usize, token: u32) {
        let more = end / 8 + 16;
        if let Prompt::SharedTokens(shared) = self {
            let mut own = Vec::with_capacity(end + more);
            own.extend_from_slice(&shared[..end]);
            *self = Prompt::Tokens(own);
        }
        if let Prompt::Tokens(tokens) = self {
            tokens.truncate(end);
            if tokens.len() == tokens.capacity() {
                tokens.reserve_exact(more);
            }
            tokens.push(token);
        }
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fresh: bool,
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
            fresh: false,
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
    Refused(Reason),
}

/// Why a request is not served, or cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
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

impl Reason {
    /// A one-word name, for logs.
    pub fn name(self) -> &'static str {
        match self {
            Reason::EmptyPrompt => "empty_prompt",
            Reason::NothingToGenerate => "nothing_to_generate",
            Reason::Malformed => "malformed",
            Reason::ForeignContent => "foreign_content",
            Reason::NeverFits => "never_fits",
            Reason::CacheFull => "cache_full",
            Reason::StepsFailed => "steps_failed",
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
    /// How often it was preempted.
    pub preemptions: u32,
    /// Why the prefix index supplied no more at its first admission, in the detail an operator may see. `None` unless
    /// [`Scheduler::explain_misses`](crate::Scheduler::explain_misses) is on.
    pub miss: Option<MissReason>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: the first sampled token used to copy the prompt and double its memory.
    #[test]
    fn an_answer_takes_little_beside_its_prompt() {
        for n in [0, 1, 1000, 100_000] {
            let shared: Arc<[u32]> = vec![1; n].into();
            let mut prompt = Prompt::SharedTokens(shared);
            for token in 0..2000 {
                let end = n + token as usize;
                prompt.push(end, token);
                let Prompt::Tokens(tokens) = &prompt else { panic!("not its own: {prompt:?}") };
                assert_eq!((tokens.len(), tokens[end]), (end + 1, token));
                assert!(tokens.capacity() <= end + end / 8 + 16, "{} for {end}", tokens.capacity());
            }
        }
    }

    #[test]
    fn what_prompts_have_in_common() {
        let ids =
            |ids: &[u64]| Prompt::Ids { ids: ids.into(), tokens_per_id: 4, n_tokens: 4 * ids.len() as u32 };
        let (a, b) = (ids(&[1, 2, 3, 4]), ids(&[1, 2, 9, 4]));
        assert_eq!([16, 8, 7, 3, 0].map(|n| a.in_common(&b, n)), [8, 8, 7, 3, 0]);
        let (a, b) = (Prompt::Tokens(vec![1, 2, 3]), Prompt::SharedTokens([1, 2, 4].into()));
        assert_eq!([3, 2, 1].map(|n| a.in_common(&b, n)), [2, 2, 1]);
        assert_eq!((a.in_common(&Prompt::Unknown, 3), ids(&[1]).in_common(&a, 3)), (0, 0));
    }
}
