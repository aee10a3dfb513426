//! Simulated requests.
use std::sync::Arc;

/// One request, from a trace or a workload.
///
/// 120 bytes and its ids: a trace of 12,000 requests with 290,000 ids takes some 4 MB.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Unique within a trace; follow-ups refer to it. Readers number requests from 0 in file order.
    pub id: u64,
    /// Arrival in nanoseconds of virtual time. With a parent, the earliest possible arrival.
    pub arrival_ns: u64,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Tokens the model will generate, at least 1. This is the truth, which only an oracle may use.
    pub output_tokens: u32,
    pub content: PromptContent,
    /// Requests with different salts share nothing. `None` is the same as the empty salt.
    pub salt: Option<Arc<str>>,
    /// Virtual time by which it should be finished.
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    pub priority: i32,
    /// A request that must finish first. This one then arrives at the later of `arrival_ns` and the parent's finish
    /// plus `think_ns`. In a file the parent comes earlier; in a list it may be anywhere.
    pub parent: Option<u64>,
    /// Nanoseconds between the parent's finish and this arrival. Ignored without a parent.
    pub think_ns: u64,
}

impl Request {
    /// A request with unknown content, no salt, no deadline and no parent.
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

    /// The salt as the prefix index expects it.
    pub fn salt(&self) -> &str {
        self.salt.as_deref().unwrap_or("")
    }

    /// Tokens of the whole sequence when finished.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }
}

/// What is known about the tokens of a request. Covers at least the prompt, and the output as far as it is known, so
/// that a later turn of the same chat can hit the tokens generated here.
#[derive(Clone, Debug, Default)]
pub enum PromptContent {
    /// Only the number of tokens is known. Never matches a prefix.
    #[default]
    Unknown,
    /// Token ids.
    Tokens(Arc<[u32]>),
    /// One opaque id per `tokens_per_id` tokens. An id identifies its own tokens and all tokens before them. The turns
    /// of a chat share one list and differ in `n_tokens`.
    Ids {
        ids: Arc<[u64]>,
        tokens_per_id: u32,
        /// Known tokens from the start: at most `ids.len() · tokens_per_id`. Ids beyond them belong to other requests.
        n_tokens: u32,
    },
}

/// Equal if both describe the same tokens; ids beyond `n_tokens` are ignored.
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
    /// Number of tokens about which something is known.
    pub fn known_tokens(&self) -> u32 {
        match self {
            PromptContent::Unknown => 0,
            PromptContent::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            PromptContent::Ids { n_tokens, .. } => *n_tokens,
        }
    }

    /// The ids that cover the first `n_tokens` tokens, including a partial last one. Shorter if fewer are known;
    /// `None` if the content has no ids.
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
