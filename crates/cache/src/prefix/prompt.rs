//! What is known about the tokens of a request, owned: the one type that traces, schedulers and servers use.
use super::content::{Content, Vocabulary};
use std::ops::Range;
use std::sync::Arc;

/// What is known about a request's tokens, starting with the prompt. The content may extend into the output (a trace
/// knows the next turn of a chat). Only computed tokens are ever stored in the prefix index, and if a different token
/// is sampled, the sampled one counts. [`content`](Self::content) borrows it for the index.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Prompt {
    /// Only the number of tokens is known. Never matches a prefix.
    #[default]
    Unknown,
    /// Token ids. Sampled tokens are appended.
    Tokens(Vec<u32>),
    /// Token ids shared by several requests. Copied when a sampled token differs from them or extends them.
    SharedTokens(Arc<[u32]>),
    /// One opaque id per `tokens_per_id` tokens. An id identifies its own tokens and all tokens before them. The turns
    /// of a chat may share one list and differ in `n_tokens`.
    Ids {
        /// The ids, in order. Those beyond `n_tokens` belong to other requests.
        ids: Arc<[u64]>,
        /// At least 1.
        tokens_per_id: u32,
        /// Known tokens from the start: at most `ids.len() · tokens_per_id`.
        n_tokens: u32,
    },
}

/// Equal if both describe the same tokens, shared or not; ids beyond `n_tokens` are ignored.
impl PartialEq for Prompt {
    fn eq(&self, other: &Prompt) -> bool {
        self.vocabulary() == other.vocabulary()
            && self.known_tokens() == other.known_tokens()
            && self.tokens() == other.tokens()
            && self.ids(u32::MAX) == other.ids(u32::MAX)
    }
}

impl Prompt {
    /// Number of tokens, from the first, about which something is known.
    pub fn known_tokens(&self) -> u32 {
        match self {
            Prompt::Unknown => 0,
            Prompt::Tokens(_) | Prompt::SharedTokens(_) => {
                self.tokens().map_or(0, |tokens| u32::try_from(tokens.len()).unwrap_or(u32::MAX))
            }
            Prompt::Ids { n_tokens, .. } => *n_tokens,
        }
    }

    /// The token ids, if known.
    pub fn tokens(&self) -> Option<&[u32]> {
        match self {
            Prompt::Tokens(tokens) => Some(tokens),
            Prompt::SharedTokens(tokens) => Some(tokens),
            Prompt::Unknown | Prompt::Ids { .. } => None,
        }
    }

    /// The opaque ids that cover the first `n_tokens` tokens, including a partial last one. Shorter if fewer are known;
    /// `None` if the content has no such ids.
    pub fn ids(&self, n_tokens: u32) -> Option<&[u64]> {
        match self {
            Prompt::Ids { ids, tokens_per_id, n_tokens: known } => {
                let n = n_tokens.min(*known).div_ceil((*tokens_per_id).max(1)) as usize;
                Some(&ids[..n.min(ids.len())])
            }
            _ => None,
        }
    }

    /// The kind of index that can store this content; `None` if any can, because nothing is known.
    pub fn vocabulary(&self) -> Option<Vocabulary> {
        match self {
            Prompt::Unknown => None,
            Prompt::Tokens(_) | Prompt::SharedTokens(_) => Some(Vocabulary::Tokens),
            Prompt::Ids { tokens_per_id, .. } => Some(Vocabulary::Ids { tokens_per_id: *tokens_per_id }),
        }
    }

    /// The first `n_tokens`, or fewer if fewer are known, as the prefix index takes them.
    pub fn content(&self, n_tokens: u32) -> Content<'_> {
        match self {
            Prompt::Ids { ids, tokens_per_id, n_tokens: known } => {
                Content::Ids { ids, tokens_per_id: *tokens_per_id, n_tokens: n_tokens.min(*known) }
            }
            _ => match self.tokens() {
                Some(tokens) => Content::Tokens(&tokens[..tokens.len().min(n_tokens as usize)]),
                None => Content::Unknown { n_tokens },
            },
        }
    }

    /// Length of the common prefix with `other` within the first `n_tokens`. Content given as ids is compared id by
    /// id.
    pub fn in_common(&self, other: &Prompt, n_tokens: u32) -> u32 {
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

    /// Returns whether both are known to have the same tokens at these positions, which content given as ids compares
    /// id by id.
    pub fn has_in_common(&self, other: &Prompt, range: Range<u32>) -> bool {
        fn same<T: PartialEq>(a: &[T], b: &[T], from: u32, until: u32) -> bool {
            let range = from as usize..until as usize;
            a.get(range.clone()).zip(b.get(range)).is_some_and(|(a, b)| a == b)
        }
        if let (Prompt::Ids { ids: a, tokens_per_id, .. }, Prompt::Ids { ids: b, .. }) = (self, other) {
            let known = self.known_tokens().min(other.known_tokens());
            let (from, until) = (range.start / tokens_per_id, range.end.div_ceil(*tokens_per_id));
            return self.vocabulary() == other.vocabulary() && range.end <= known && same(a, b, from, until);
        }
        let tokens = self.tokens().zip(other.tokens());
        tokens.is_some_and(|(a, b)| same(a, b, range.start, range.end))
    }

    /// Sets the token at position `end` and drops everything after it. Capacity grows by an eighth, because doubling
    /// would allocate as much again as a long prompt.
    pub fn push(&mut self, end: usize, token: u32) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_cover_what_is_known_and_no_more() {
        let ids: Arc<[u64]> = (0..10).collect();
        let content = Prompt::Ids { ids, tokens_per_id: 16, n_tokens: 70 };
        for (n_tokens, n_ids) in [(0, 0), (1, 1), (16, 1), (17, 2), (64, 4), (65, 5), (70, 5), (1000, 5)] {
            assert_eq!(content.ids(n_tokens).map(<[u64]>::len), Some(n_ids), "{n_tokens} tokens");
        }
        assert_eq!(content.known_tokens(), 70);
        assert_eq!(Prompt::Unknown.ids(5), None);
    }

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
        assert!(a.has_in_common(&b, 0..2) && a.has_in_common(&b, 1..2) && !a.has_in_common(&b, 7..7));
        assert!(
            !a.has_in_common(&b, 1..3) && !a.has_in_common(&b, 2..4) && !a.has_in_common(&ids(&[1]), 0..1)
        );
        let (a, b) = (ids(&[1, 2, 3, 4]), ids(&[1, 2, 9, 4]));
        assert!(a.has_in_common(&b, 0..8) && a.has_in_common(&b, 12..16) && !a.has_in_common(&b, 7..9));
        assert!(!a.has_in_common(&b, 12..17));
    }
}
