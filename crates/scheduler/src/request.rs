//! What a user asks for, and what became of it.
use kvist_cache::MissReason;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A request. Chosen by the caller, unique for the life of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What is known of the tokens of a request, prompt first. It may go on into the output (a trace knows the next turn
/// of a chat); only what has been computed is ever stored, and where something else is sampled, that counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// Counted only: never matches anything.
    #[default]
    Unknown,
    /// Token ids. Sampled tokens are appended.
    Tokens(Vec<u32>),
    /// Token ids that several requests share; copied when a token is sampled that they do not foretell.
    SharedTokens(Arc<[u32]>),
    /// One opaque id per `tokens_per_id` tokens; an id stands for its tokens and for all before them.
    Ids {
        /// In order.
        ids: Arc<[u64]>,
        /// At least 1.
        tokens_per_id: u32,
        /// Tokens that the ids stand for: at most `ids.len() · tokens_per_id`.
        n_tokens: u32,
    },
}

impl Prompt {
    /// Of the first `n_tokens`, how many from the first are known to be the same: whole ids, where there are ids.
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

    /// Token ids, if they are known.
    pub(crate) fn tokens(&self) -> Option<&[u32]> {
        match self {
            Prompt::Tokens(tokens) => Some(tokens),
            Prompt::SharedTokens(tokens) => Some(tokens),
            Prompt::Unknown | Prompt::Ids { .. } => None,
        }
    }

    /// Behind the first `end` tokens comes this one. Room for more grows by an eighth: doubling would take as much again as
    /// a long prompt.
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
    /// Its name in every log.
    pub id: RequestId,
    /// When it arrived, in nanoseconds of the driver's clock. Policies rank by it.
    pub arrival_ns: u64,
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens it may generate at most, at least 1.
    pub max_new: u32,
    /// What its tokens are.
    #[serde(default)]
    pub prompt: Prompt,
    /// When it should have finished, on the clock of `arrival_ns`.
    #[serde(default)]
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    #[serde(default)]
    pub priority: i32,
    /// Requests with different salts share no prefix.
    #[serde(default)]
    pub salt: Arc<str>,
    /// Compute every token, also those that the prefix index could supply, where something is wanted of each: in
    /// the budget of a step they count twice. What it computes is indexed as ever.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fresh: bool,
}

impl Request {
    /// Unknown content, no salt, no deadline, priority 0.
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

/// How a request ended. It ends exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The executor said so, or `max_new` tokens were generated.
    Finished,
    /// The user went away.
    Cancelled,
    /// It can not be served, or not further.
    Refused(Reason),
}

/// Why a request is not served, or not further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A prompt of no tokens.
    EmptyPrompt,
    /// `max_new` is 0.
    NothingToGenerate,
    /// Prompt and `max_new` together pass the last 32-bit position, or the prompt has other tokens than it says.
    Malformed,
    /// Its tokens are given in another way (ids of a trace, or of another size) than the prefix index was made for.
    ForeignContent,
    /// Even alone it would not fit the cache.
    NeverFits,
    /// Alone in the cache, it filled it. What it generated until then is its answer.
    CacheFull,
    /// Its steps failed as often in a row as the configuration allows.
    StepsFailed,
}

impl Reason {
    /// One word, for logs.
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

/// What became of a request, on the clock of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which one.
    pub id: RequestId,
    /// How.
    pub end: End,
    /// When it had arrived.
    pub arrival_ns: u64,
    /// When it first held a place in the batch; `None` if it never did.
    pub admitted_ns: Option<u64>,
    /// The end of the step that sampled its first token.
    pub first_token_ns: Option<u64>,
    /// When it ended.
    pub ended_ns: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub generated: u32,
    /// Tokens that the prefix index supplied on its first admission.
    pub hit_tokens: u32,
    /// Tokens that it supplied on later ones.
    pub regained_tokens: u32,
    /// Tokens whose K and V were lost to preemptions.
    pub lost_tokens: u64,
    /// Tokens computed for it, in steps that succeeded.
    pub computed_tokens: u64,
    /// How often it lost its place in the batch.
    pub preemptions: u32,
    /// Why the prefix index supplied no more on its first admission, as an operator may know it; if that was asked.
    pub miss: Option<MissReason>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first sampled token made a copy, and doubled it.
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
