//! What a simulated user asks for.
use std::sync::Arc;

/// One request, from a trace or a workload.
///
/// 120 bytes and its ids: a trace of 12,000 requests with 290,000 ids takes some 4 MB.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Unique within a trace, and what its followers call it. Readers number requests in file order from 0.
    pub id: u64,
    /// Nanoseconds of virtual time. With a parent, the earliest moment of arrival.
    pub arrival_ns: u64,
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens the model will write: the truth, which only an oracle may look at. At least 1.
    pub output_tokens: u32,
    pub content: PromptContent,
    /// Requests with different salts share nothing. `None` is a salt of its own: the empty one.
    pub salt: Option<Arc<str>>,
    /// Virtual time by which it should have finished.
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    pub priority: i32,
    /// A request that must finish first. This one then arrives at the later of `arrival_ns` and its parent's finish
    /// plus `think_ns`. In a file the parent stands earlier; in a list it may stand anywhere.
    pub parent: Option<u64>,
    /// Nanoseconds between the parent's finish and this arrival; without a parent it means nothing.
    pub think_ns: u64,
}

impl Request {
    /// A request of its own: unknown content, no salt, no deadline, no parent.
    pub fn new(id: u64, arrival_ns: u64, prompt_tokens: u32, output_tokens: u32) -> Request {
        Request {
            id,
            arrival_ns,
            prompt_tokens,
            output_tokens,
            content: PromptContent::Unknown,
            salt: None,
            deadline_ns: None,
            priority: 0,
            parent: None,
            think_ns: 0,
        }
    }

    /// The salt by name, as the prefix index takes it.
    pub fn salt(&self) -> &str {
        self.salt.as_deref().unwrap_or("")
    }

    /// Tokens of the whole sequence once it has finished.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }
}

/// What is known of the tokens of a request. It covers at least the prompt, and goes on into the output where that
/// is known too, so that a later turn of the same chat can hit what this one wrote.
#[derive(Clone, Debug, Default)]
pub enum PromptContent {
    /// Counted only: never matches anything.
    #[default]
    Unknown,
    /// Token ids.
    Tokens(Arc<[u32]>),
    /// One opaque id per `tokens_per_id` tokens; an id stands for its tokens and for all before them. The turns of a
    /// chat share one list and differ in `n_tokens`.
    Ids {
        ids: Arc<[u64]>,
        tokens_per_id: u32,
        /// Tokens known from the start on: at most `ids.len() · tokens_per_id`. Ids beyond them are somebody else's.
        n_tokens: u32,
    },
}

/// Equal if they say the same of the same tokens, whatever their lists hold beyond.
impl PartialEq for PromptContent {
    fn eq(&self, other: &PromptContent) -> bool {
        match (self, other) {
            (PromptContent::Unknown, PromptContent::Unknown) => true,
            (PromptContent::Tokens(a), PromptContent::Tokens(b)) => a == b,
            (
                PromptContent::Ids { tokens_per_id: a, n_tokens: m, .. },
                PromptContent::Ids { tokens_per_id: b, n_tokens: n, .. },
            ) => a == b && m == n && self.ids(*m) == other.ids(*n),
            _ => false,
        }
    }
}

impl PromptContent {
    /// Tokens of which something is known.
    pub fn known_tokens(&self) -> u32 {
        match self {
            PromptContent::Unknown => 0,
            PromptContent::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            PromptContent::Ids { n_tokens, .. } => *n_tokens,
        }
    }

    /// The ids that cover the first `n_tokens` tokens, the partial last one included; `None` where content has no
    /// ids. Shorter where less is known.
    pub fn ids(&self, n_tokens: u32) -> Option<&[u64]> {
        match self {
            PromptContent::Ids { ids, tokens_per_id, n_tokens: known } => {
                let n = n_tokens.min(*known).div_ceil((*tokens_per_id).max(1)) as usize;
                Some(&ids[..n.min(ids.len())])
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_cover_what_is_known_and_no_more() {
        let ids: Arc<[u64]> = (0..10).collect();
        let content = PromptContent::Ids { ids, tokens_per_id: 16, n_tokens: 70 };
        for (n_tokens, n_ids) in [(0, 0), (1, 1), (16, 1), (17, 2), (64, 4), (65, 5), (70, 5), (1000, 5)] {
            assert_eq!(content.ids(n_tokens).map(<[u64]>::len), Some(n_ids), "{n_tokens} tokens");
        }
        assert_eq!(content.known_tokens(), 70);
        assert_eq!(PromptContent::Unknown.ids(5), None);
    }

    #[test]
    fn a_request_stays_small() {
        assert!(size_of::<Request>() <= 120, "{} bytes", size_of::<Request>());
    }
}
