//! The scheduler's view of the cache: how many cells are available, and the operations between steps. Only this file
//! knows whether the cache has a prefix index.
use crate::config::{BadConfig, Thinned};
use kvist_cache::{
    BlockUse, Cache, CachedBlock, GroupId, Lookup, MissReason, Moment, MovePlan, Occupancy, Pin, Prompt,
    Refused, SeqId, Viewer,
};

/// When a decision is made: the index of its step, and the time.
#[derive(Clone, Copy)]
pub(crate) struct StepTime {
    pub step: u64,
    pub now_ns: u64,
}

impl StepTime {
    pub fn moment(self) -> Moment {
        Moment { now_ns: self.now_ns }
    }
}

/// Available memory is counted in one layer group: the smallest one without a sliding window, or the smallest one
/// overall if every group frees blocks that left its window. If a step does not fit another group, the cache refuses
/// the step and names that group.
pub(crate) struct Memory {
    pub cache: Cache,
    /// Index of the counted group.
    counted: usize,
    capacity: u64,
    block_tokens: u32,
    frees_out_of_window: bool,
    /// True if any group frees blocks that left its sliding window.
    windowed: bool,
    /// True if the cache has a prefix index. Nothing else makes sequences share blocks here.
    shares: bool,
    thinned: Option<Thinned>,
}

/// The layer group in which available memory is counted if the groups have these capacities, and its capacity in whole blocks.
fn counted(cache: &Cache, capacity_tokens: &[u32]) -> (usize, u64) {
    let whole_blocks = |(occupancy, tokens): (Occupancy, &u32)| {
        (occupancy.frees_out_of_window, tokens - tokens % occupancy.block_tokens)
    };
    let groups = cache.occupancy().zip(capacity_tokens).map(whole_blocks).enumerate();
    let (counted, (_, cells)) =
        groups.min_by_key(|(_, group)| *group).expect("a cache has at least one layer group");
    (counted, cells.into())
}

const CHECKED: &str = "the cache holds many sequences: this was checked when the scheduler was made";

impl Memory {
    pub fn new(mut cache: Cache, thinned: Option<Thinned>) -> Result<Memory, BadConfig> {
        if cache.sequences().is_none() {
            return Err(BadConfig::OneSequence);
        }
        // The scheduler assigns sequence ids itself, so the cache must have no sequences. Blocks in the prefix index
        // may stay.
        let n_sequences = cache.report().iter().map(|group| group.sequences.len()).max().unwrap_or(0);
        if n_sequences > 0 {
            return Err(BadConfig::NotEmpty { n_sequences });
        }
        let windowed = cache.occupancy().any(|occupancy| occupancy.frees_out_of_window);
        let capacities = cache.capacity_cells();
        let (counted, _) = counted(&cache, &capacities);
        let occupancy = cache.occupancy().nth(counted).expect("it was found there");
        Ok(Memory {
            windowed,
            // A step without tokens would never end a prompt.
            thinned: thinned.map(|of| Thinned { step_tokens: of.step_tokens.max(1), ..of }),
            shares: cache.prefixes().is_some(),
            counted,
            capacity: occupancy.capacity_cells.into(),
            block_tokens: occupancy.block_tokens,
            frees_out_of_window: occupancy.frees_out_of_window,
            cache,
        })
    }

    fn counted(&self) -> Occupancy {
        self.cache.occupancy().nth(self.counted).expect("groups do not go away")
    }

    /// True if sequences can also free memory while decoding. Blocks that leave a sliding window become free, or
    /// cached and unused, at a particular step, so such steps must run one by one.
    pub fn shrinks_while_decoding(&self) -> bool {
        self.windowed || self.thinned.is_some()
    }
    /// The group whose block numbers name cached blocks for tiers: the first one that keeps every token. `None` if there is
    /// none.
    pub fn naming_group(&self) -> Option<GroupId> {
        let keeps_all = |occupancy: Occupancy| !occupancy.frees_out_of_window && self.thinned.is_none();
        self.cache.occupancy().position(keeps_all).map(|group| GroupId(group as u16))
    }
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
    /// Maximum tokens that a step may write, given the space available right now in groups whose sequences do not keep all
    /// tokens (of windows, and thinned ones); at least one block. Unbounded if no group has a window: there a prompt needs
    /// the same total space however it is chunked.
    pub fn chunk_limit(&self) -> u32 {
        if !self.windowed && self.thinned.is_none() {
            return u32::MAX;
        }
        // Cells of thinned sequences become free between chunks, too.
        let shrinks = |occupancy: &Occupancy| self.thinned.is_some() || occupancy.frees_out_of_window;
        let windows = self.cache.occupancy().filter(shrinks);
        let chunk = |occupancy: Occupancy| {
            (occupancy.free_cells.saturating_add(occupancy.evictable_cells)).max(occupancy.block_tokens)
        };
        let limit = self.thinned.map_or(u32::MAX, |thinned| thinned.step_tokens);
        windows.map(chunk).min().unwrap_or(u32::MAX).min(limit)
    }
    /// True if `group` frees blocks that left its sliding window (`frees_out_of_window`).
    pub fn frees_out_of_window(&self, group: GroupId) -> bool {
        self.windowed
            && self
                .cache
                .occupancy()
                .nth(group.0.into())
                .is_some_and(|occupancy| occupancy.frees_out_of_window)
    }
    /// Maximum cells that a sequence of `n_tokens` needs if it shares no blocks.
    pub fn cells(&self, n_tokens: u32) -> u64 {
        let most = self.thinned.map_or(u32::MAX, |Thinned { sequence_tokens, step_tokens }| {
            sequence_tokens.saturating_add(step_tokens)
        });
        let cells = u64::from(n_tokens.min(most)).next_multiple_of(self.block_tokens.into());
        // A sliding-window group never has to store the whole of a long sequence.
        if self.frees_out_of_window { cells.min(self.capacity) } else { cells }
    }
    /// Free cells.
    pub fn free(&self) -> u64 {
        self.counted().free_cells.into()
    }
    /// Cells of cached blocks that no sequence uses (ref_count 0). They can be evicted.
    pub fn evictable(&self) -> u64 {
        self.counted().evictable_cells.into()
    }
    /// Available cells: free plus evictable.
    pub fn available(&self) -> u64 {
        let occupancy = self.counted();
        u64::from(occupancy.free_cells) + u64::from(occupancy.evictable_cells)
    }
    /// Cells in use by sequences.
    pub fn used(&self) -> u64 {
        self.capacity - self.available()
    }

    /// Returns whether the prefix index can store this kind of content.
    pub fn accepts(&self, prompt: &Prompt) -> bool {
        self.cache.accepts(&prompt.content(0))
    }

    /// The prefix hit that the index would give for the first `n_tokens`. Changes nothing.
    pub fn lookup(&self, salt: &str, prompt: &Prompt, n_tokens: u32) -> Lookup {
        self.cache.lookup(salt, &prompt.content(n_tokens))
    }

    /// As long as this number stays the same, lookups return the same hit lengths.
    pub fn prefix_version(&self) -> u64 {
        self.cache.prefix_version()
    }

    /// Returns whether sequences can share blocks.
    pub fn shares(&self) -> bool {
        self.shares
    }
    /// For each block of the counted group, the number of sequences that use it (ref_count). Walks the whole pool.
    pub fn ref_counts(&self) -> Vec<u32> {
        let ref_count = |block| if let BlockUse::InUse(n) = block { n } else { 0 };
        self.cache.block_uses(self.group()).map(ref_count).collect()
    }
    /// The blocks of `seq` in the counted group, each with its index in the block table.
    pub fn blocks_of(&self, seq: SeqId) -> impl Iterator<Item = (u64, u32)> {
        let table = self.cache.block_table(self.group(), seq).unwrap_or_default();
        (0..).zip(table).filter_map(|(i, block)| Some((i, block?)))
    }
    fn group(&self) -> GroupId {
        GroupId(self.counted as u16)
    }

    /// Why the prefix index would supply no more.
    pub fn explain(&self, salt: &str, prompt: &Prompt, n_tokens: u32) -> MissReason {
        self.cache.explain(salt, &prompt.content(n_tokens), Viewer::Operator)
    }

    /// Creates a sequence from the prefix hit on the first `n_tokens` and returns the hit length in tokens.
    /// `is_first`: this prompt was not opened before.
    pub fn open(
        &mut self,
        seq: SeqId,
        salt: &str,
        prompt: &Prompt,
        n_tokens: u32,
        now: StepTime,
        is_first: bool,
    ) -> u32 {
        let (content, moment) = (prompt.content(n_tokens), now.moment());
        let opened = match self.cache.prefixes() {
            Some(mut prefixes) => match is_first {
                true => prefixes.open(seq, salt, &content, moment),
                false => prefixes.open_again(seq, salt, &content, moment),
            }
            .map(|found| found.hit_tokens),
            None => self.cache.sequences().expect(CHECKED).seq_new(seq).map(|()| 0),
        };
        opened
            .unwrap_or_else(|refused| panic!("sequence {seq} is new and its content was checked: {refused}"))
    }

    /// Adds the full blocks of `seq` to the prefix index. The first `n_tokens` tokens are known and computed; the
    /// first `stored` of them were added by earlier calls. Returns how many blocks were new to the index.
    pub fn store(&mut self, seq: SeqId, prompt: &Prompt, stored: u32, n_tokens: u32, now: StepTime) -> u32 {
        let Some(mut prefixes) = self.cache.prefixes() else { return 0 };
        let done = prefixes.store_from(seq, stored, &prompt.content(n_tokens), now.moment());
        done.unwrap_or_else(|refused| panic!("sequence {seq} is live and its content was checked: {refused}"))
            .n_new
    }

    /// Removes a sequence. Its indexed blocks stay cached and can be evicted once no sequence uses them.
    pub fn release(&mut self, seq: SeqId) {
        let removed: Result<(), Refused> = self.cache.sequences().expect(CHECKED).seq_rm(seq, 0, u32::MAX);
        assert!(removed.is_ok(), "a live sequence is known to the cache: {removed:?}");
    }

    /// Evicts unused cached blocks until `n_tokens` cells are free in every group, as far as possible. Returns the
    /// number of blocks evicted.
    pub fn evict_until_free(&mut self, n_tokens: u32, now: StepTime) -> u32 {
        self.cache.prefixes().map_or(0, |mut prefixes| prefixes.evict_until_free(n_tokens, now.moment()))
    }

    /// Evicts unused cached blocks until the rest has room in these capacities, as far as possible. Returns the number of
    /// blocks evicted.
    pub fn evict_down_to(&mut self, capacity_tokens: &[u32], now: StepTime) -> u32 {
        let moment = now.moment();
        self.cache.prefixes().map_or(0, |mut prefixes| prefixes.evict_down_to(capacity_tokens, moment))
    }

    /// What [`capacity`](Self::capacity) would be.
    pub fn capacity_of(&self, capacity_tokens: &[u32]) -> u64 {
        counted(&self.cache, capacity_tokens).1
    }

    /// Changes the capacity, after the moves.
    pub fn resize(&mut self, capacity_tokens: &[u32], moves: &MovePlan) {
        self.cache.resize(capacity_tokens, moves);
        (self.counted, self.capacity) = counted(&self.cache, capacity_tokens);
        let occupancy = self.counted();
        (self.block_tokens, self.frees_out_of_window) =
            (occupancy.block_tokens, occupancy.frees_out_of_window);
    }

    /// Like [`evict_until_free`](Self::evict_until_free), for at most `max_blocks` blocks, which stay pinned until they
    /// are copied to a tier. Only for caches with a prefix index.
    pub fn demote_until_free(
        &mut self,
        n_tokens: u32,
        max_blocks: u32,
        now: StepTime,
    ) -> (Pin, Vec<CachedBlock>) {
        let prefixes = self.cache.prefixes();
        let mut prefixes = prefixes.expect("tiers need a prefix index: this was checked when they were made");
        prefixes.demote_until_free(n_tokens, max_blocks, now.moment())
    }
}
