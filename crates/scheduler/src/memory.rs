//! The cache as the scheduler sees it: how much room there is, and the verbs between steps. The only file that knows
//! whether the cache has a prefix index.
use crate::config::BadConfig;
use crate::request::Prompt;
use kvist_cache::{Cache, Refused, SeqId};

/// Time as the cache takes it.
#[derive(Clone, Copy)]
pub(crate) struct At {
    pub step: u64,
    pub now_ns: u64,
}

pub(crate) struct Memory {
    pub cache: Cache,
    /// Cells of the smallest group.
    capacity: u64,
    /// Cells that sequences hold, where nobody else can.
    held: u64,
    block_tokens: u32,
}

const CHECKED: &str = "the cache holds many sequences: this was checked when the scheduler was made";

impl Memory {
    pub fn new(mut cache: Cache) -> Result<Memory, BadConfig> {
        if cache.sequences().is_none() {
            return Err(BadConfig::OneSequence);
        }
        let capacity = cache.capacity_cells().into_iter().min().unwrap_or(0).into();
        Ok(Memory { cache, capacity, held: 0, block_tokens: 1 })
    }

    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
    /// Cells that a sequence of `n_tokens` fills when it shares none.
    pub fn cells(&self, n_tokens: u32) -> u64 {
        u64::from(n_tokens).next_multiple_of(self.block_tokens.into())
    }
    /// Cells that nobody has.
    pub fn free(&self) -> u64 {
        self.capacity - self.held
    }
    /// Cells that nobody needs.
    pub fn room(&self) -> u64 {
        self.free()
    }
    /// Cells that sequences hold, or an index.
    pub fn used(&self) -> u64 {
        self.capacity - self.free()
    }

    /// Tokens of the first `n_tokens` that the index could supply. Changes nothing.
    pub fn lookup(&self, _salt: &str, _prompt: &Prompt, _n_tokens: u32) -> u32 {
        0
    }

    /// Make a sequence that holds as much of the first `n_tokens` as the index supplies, and say how much that is.
    pub fn open(&mut self, seq: SeqId, _salt: &str, _prompt: &Prompt, _n_tokens: u32, _at: At) -> u32 {
        let made = self.cache.sequences().expect(CHECKED).seq_new(seq);
        assert!(made.is_ok(), "sequence numbers are never used twice: {made:?}");
        0
    }

    /// A step that added `n_tokens` has been committed.
    pub fn committed(&mut self, n_tokens: u64) {
        self.held += n_tokens;
    }

    /// Let the index know the full blocks of `seq`, of whose tokens the first `n_tokens` are known and computed.
    pub fn store(&mut self, _seq: SeqId, _prompt: &Prompt, _n_tokens: u32, _at: At) {}

    /// Forget a sequence of `n_tokens`. What an index knows stays, and can be reclaimed.
    pub fn release(&mut self, seq: SeqId, n_tokens: u32) {
        let removed: Result<(), Refused> = self.cache.sequences().expect(CHECKED).seq_rm(seq, 0, u32::MAX);
        assert!(removed.is_ok(), "a live sequence is known to the cache: {removed:?}");
        self.held -= u64::from(n_tokens);
    }

    /// Make `n_tokens` cells free in every group, as far as nobody holds them; returns what became free.
    pub fn make_room(&mut self, _n_tokens: u32, _at: At) -> u32 {
        0
    }
}
