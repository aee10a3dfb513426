//! The content of a prompt, as the prefix index sees it.

/// Tokens, or ids that stand for them.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// Token ids.
    Tokens(&'a [u32]),
    /// From a trace: one opaque id per `tokens_per_id` tokens. Blocks smaller than that are distinguished by their
    /// index within the id; larger blocks take several ids.
    Ids {
        /// In order, one for every full or partial group of `tokens_per_id` tokens.
        ids: &'a [u64],
        /// At least 1; divides the block size or is a multiple of it.
        tokens_per_id: u32,
        /// Number of tokens that the ids stand for. The last id may be partly filled.
        n_tokens: u32,
    },
    /// Only the number of tokens is known. Such content never matches and is never indexed.
    Unknown {
        /// Tokens.
        n_tokens: u32,
    },
}

/// The kind of content in an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vocabulary {
    /// [`Content::Tokens`].
    #[default]
    Tokens,
    /// [`Content::Ids`] with this many tokens per id.
    Ids {
        /// Tokens per id.
        tokens_per_id: u32,
    },
}

impl Content<'_> {
    /// Number of tokens.
    pub fn n_tokens(&self) -> u32 {
        match self {
            Content::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            Content::Ids { n_tokens, .. } | Content::Unknown { n_tokens } => *n_tokens,
        }
    }
}

/// How the blocks of one index are keyed: a fixed number of words per block, exact, not hashed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keying {
    pub block_tokens: u32,
    vocabulary: Vocabulary,
    pub n_words: usize,
}

impl Keying {
    /// `None` if block size and id size do not divide one another.
    pub fn new(block_tokens: u32, vocabulary: Vocabulary) -> Option<Self> {
        let n_words = match vocabulary {
            Vocabulary::Tokens => block_tokens as usize,
            Vocabulary::Ids { tokens_per_id: 0 } => return None,
            // Two words for the id, one for the index of the block within it.
            Vocabulary::Ids { tokens_per_id } if tokens_per_id.is_multiple_of(block_tokens) => 3,
            Vocabulary::Ids { tokens_per_id } if block_tokens.is_multiple_of(tokens_per_id) => {
                2 * (block_tokens / tokens_per_id) as usize
            }
            Vocabulary::Ids { .. } => return None,
        };
        Some(Keying { block_tokens, vocabulary, n_words })
    }

    /// Number of leading whole blocks that have a key.
    pub fn n_blocks(&self, content: &Content<'_>) -> u32 {
        match (content, self.vocabulary) {
            (Content::Tokens(_), Vocabulary::Tokens) => content.n_tokens() / self.block_tokens,
            (Content::Ids { ids, tokens_per_id: theirs, n_tokens }, Vocabulary::Ids { tokens_per_id })
                if *theirs == tokens_per_id =>
            {
                let named = (ids.len() as u64 * u64::from(tokens_per_id)).min(u64::from(*n_tokens));
                (named / u64::from(self.block_tokens)) as u32
            }
            _ => 0,
        }
    }

    /// Whether keys are tokens. Then two keys can differ in the middle.
    pub fn has_tokens(&self) -> bool {
        self.vocabulary == Vocabulary::Tokens
    }

    /// Whether content of this kind fits the index. Unknown content does: it is only counted.
    pub fn accepts(&self, content: &Content<'_>) -> bool {
        match (content, self.vocabulary) {
            (Content::Unknown { .. }, _) | (Content::Tokens(_), Vocabulary::Tokens) => true,
            (Content::Ids { tokens_per_id: theirs, .. }, Vocabulary::Ids { tokens_per_id }) => {
                *theirs == tokens_per_id
            }
            _ => false,
        }
    }

    /// The key of whole block `i`: a slice of the content, or assembled in `buffer`.
    #[inline]
    pub fn key<'a>(&self, content: &Content<'a>, i: u32, buffer: &'a mut Vec<u32>) -> &'a [u32] {
        let at = i as usize * self.block_tokens as usize;
        match *content {
            Content::Tokens(tokens) => &tokens[at..at + self.block_tokens as usize],
            Content::Ids { ids, tokens_per_id, .. } => {
                let (first, within) = (at / tokens_per_id as usize, at % tokens_per_id as usize);
                buffer.clear();
                if tokens_per_id.is_multiple_of(self.block_tokens) {
                    buffer.extend(words(ids[first]));
                    buffer.push(within as u32 / self.block_tokens);
                } else {
                    let n_ids = (self.block_tokens / tokens_per_id) as usize;
                    buffer.extend(ids[first..first + n_ids].iter().flat_map(|&id| words(id)));
                }
                buffer
            }
            Content::Unknown { .. } => unreachable!("unknown content has no blocks with keys"),
        }
    }
}

fn words(id: u64) -> [u32; 2] {
    [id as u32, (id >> 32) as u32]
}
