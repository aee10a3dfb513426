//! Dense numbers for blocks of equal content.
use super::NoBlocks;
use crate::request::Request;
use ahash::RandomState;
use kvist_cache::Content;
use std::collections::HashMap;

/// A value that no block number takes.
const NONE: u32 = u32::MAX;

/// Assigns 0, 1, 2, … in order of first use. The maps are used for lookups only and never iterated.
///
/// An id is hashed once per request that contains it, no matter how many blocks it is cut into.
pub(super) struct Numbers {
    block_tokens: u32,
    next: u32,
    salts: HashMap<String, u32>,
    /// Of the first request with ids. Ids of another number of tokens stand for other texts.
    tokens_per_id: Option<u32>,
    /// (salt, id) → its block numbers in `of_ids`.
    ids: HashMap<(u32, u64), Place, RandomState>,
    /// For each id, one number per block; [`NONE`] for blocks not seen yet.
    of_ids: Vec<u32>,
    tokens: HashMap<TokenBlock, u32>,
}

/// Where the block numbers of an id are. Room for those that were needed, not for all that a file claims an id to cover.
#[derive(Clone, Copy, Default)]
struct Place {
    begin: usize,
    len: usize,
}

/// Salt, number of the previous block, tokens.
type TokenBlock = (u32, Option<u32>, Box<[u32]>);

impl Numbers {
    /// Creates a numbering for blocks of `block_tokens`, at least 1.
    pub fn new(block_tokens: u32) -> Numbers {
        Numbers {
            block_tokens,
            next: 0,
            salts: HashMap::new(),
            tokens_per_id: None,
            ids: HashMap::with_hasher(RandomState::with_seed(0)),
            of_ids: Vec::new(),
            tokens: HashMap::new(),
        }
    }

    /// How many numbers were assigned.
    pub fn distinct(&self) -> u32 {
        self.next
    }

    /// Appends the block numbers of a prompt.
    pub fn append(&mut self, request: &Request, blocks: &mut Vec<u32>) -> Result<(), NoBlocks> {
        let salt = match self.salts.get(request.salt()) {
            Some(salt) => *salt,
            None => {
                let salt = self.salts.len() as u32;
                self.salts.insert(request.salt().to_string(), salt);
                salt
            }
        };
        match request.content.content(request.prompt_tokens) {
            Content::Unknown { .. } => Err(NoBlocks::Unknown { request: request.id }),
            Content::Ids { tokens_per_id, .. } => self.append_ids(request, salt, tokens_per_id, blocks),
            Content::Tokens(prompt) => {
                let mut before = None;
                for block in prompt.chunks(self.block_tokens as usize) {
                    let number = *self.tokens.entry((salt, before, block.into())).or_insert(self.next);
                    self.count(number)?;
                    blocks.push(number);
                    before = Some(number);
                }
                Ok(())
            }
        }
    }

    fn append_ids(
        &mut self,
        request: &Request,
        salt: u32,
        tokens_per_id: u32,
        blocks: &mut Vec<u32>,
    ) -> Result<(), NoBlocks> {
        let block_tokens = self.block_tokens;
        let before = *self.tokens_per_id.get_or_insert(tokens_per_id);
        if before != tokens_per_id {
            return Err(NoBlocks::Mixed { request: request.id, tokens_per_id, before });
        }
        let ids = request.content.ids(request.prompt_tokens).unwrap_or(&[]);
        if ids.len() as u64 * u64::from(tokens_per_id) < u64::from(request.prompt_tokens) {
            return Err(NoBlocks::Unknown { request: request.id });
        }
        let n_blocks = request.prompt_tokens.div_ceil(block_tokens) as usize;
        if tokens_per_id.is_multiple_of(block_tokens) {
            let per_id = (tokens_per_id / block_tokens) as usize;
            for (i, id) in ids.iter().enumerate() {
                let here = per_id.min(n_blocks - i * per_id);
                self.append_id((salt, *id), per_id, here, blocks)?;
            }
        } else if block_tokens.is_multiple_of(tokens_per_id) {
            // A block is identified by its last id, which stands for all tokens before it.
            for group in ids.chunks((block_tokens / tokens_per_id) as usize) {
                self.append_id((salt, group[group.len() - 1]), 1, 1, blocks)?;
            }
        } else {
            return Err(NoBlocks::BlockSize { request: request.id, tokens_per_id, block_tokens });
        }
        Ok(())
    }

    /// Appends the first `n` of the `per_id` blocks of an id.
    fn append_id(
        &mut self,
        id: (u32, u64),
        per_id: usize,
        n: usize,
        blocks: &mut Vec<u32>,
    ) -> Result<(), NoBlocks> {
        let place = self.ids.entry(id).or_default();
        if place.len < n {
            // To the end, and twice as long, so that an id of which ever more is seen is seldom moved.
            let len = n.max(2 * place.len).min(per_id);
            let seen = place.begin..place.begin + place.len;
            *place = Place { begin: self.of_ids.len(), len };
            self.of_ids.extend_from_within(seen);
            self.of_ids.resize(place.begin + len, NONE);
        }
        let begin = place.begin;
        for at in begin..begin + n {
            if self.of_ids[at] == NONE {
                self.of_ids[at] = self.next;
                self.count(self.next)?;
            }
            blocks.push(self.of_ids[at]);
        }
        Ok(())
    }

    /// Marks `number` as in use.
    fn count(&mut self, number: u32) -> Result<(), NoBlocks> {
        if number == self.next {
            self.next = self.next.checked_add(1).filter(|n| *n < NONE).ok_or(NoBlocks::TooMany)?;
        }
        Ok(())
    }
}
