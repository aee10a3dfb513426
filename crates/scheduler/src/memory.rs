//! The cache as the scheduler sees it: how much room there is, and the verbs between steps. The only file that knows
//! whether the cache has a prefix index.
use crate::config::BadConfig;
use crate::request::Prompt;
use kvist_cache::{
    Audience, BlockUse, Cache, Content, GroupId, Lookup, MissReason, Moment, Refused, Room, SeqId,
};

/// When a decision falls: before which step, and the time at which it began.
#[derive(Clone, Copy)]
pub(crate) struct At {
    pub step: u64,
    pub now_ns: u64,
}

impl At {
    fn moment(self) -> Moment {
        Moment { now_ns: self.now_ns }
    }
}

/// Room is counted in one layer group: the smallest of those that keep everything, or the smallest if all let go of
/// what leaves their windows. Other groups speak up when a step does not fit them.
pub(crate) struct Memory {
    pub cache: Cache,
    /// Which group.
    counted: usize,
    capacity: u64,
    block_tokens: u32,
    lets_go: bool,
    /// Does any group let go of what leaves its window?
    windowed: bool,
    /// Has it a prefix index? Nothing else makes sequences share blocks here.
    shares: bool,
}

const CHECKED: &str = "the cache holds many sequences: this was checked when the scheduler was made";

/// The first `n_tokens`, as the cache takes them.
fn content(prompt: &Prompt, n_tokens: u32) -> Content<'_> {
    let n = n_tokens as usize;
    match prompt {
        Prompt::Unknown => Content::Unknown { n_tokens },
        Prompt::Tokens(tokens) => Content::Tokens(&tokens[..n.min(tokens.len())]),
        Prompt::SharedTokens(tokens) => Content::Tokens(&tokens[..n.min(tokens.len())]),
        Prompt::Ids { ids, tokens_per_id, n_tokens: known } => {
            Content::Ids { ids, tokens_per_id: *tokens_per_id, n_tokens: n_tokens.min(*known) }
        }
    }
}

impl Memory {
    pub fn new(mut cache: Cache) -> Result<Memory, BadConfig> {
        if cache.sequences().is_none() {
            return Err(BadConfig::OneSequence);
        }
        // Sequence numbers are the scheduler's own. What an index knows may stay.
        let n_sequences = cache.report().iter().map(|group| group.sequences.len()).max().unwrap_or(0);
        if n_sequences > 0 {
            return Err(BadConfig::NotEmpty { n_sequences });
        }
        let windowed = cache.room().any(|room| room.lets_go);
        let counted = cache.room().enumerate().min_by_key(|(_, room)| (room.lets_go, room.capacity_cells));
        let (counted, room) = counted.expect("a cache has at least one layer group");
        Ok(Memory {
            windowed,
            shares: cache.prefixes().is_some(),
            counted,
            capacity: room.capacity_cells.into(),
            block_tokens: room.block_tokens,
            lets_go: room.lets_go,
            cache,
        })
    }

    fn counted(&self) -> Room {
        self.cache.room().nth(self.counted).expect("groups do not go away")
    }

    /// Does memory change in other ways than by growing while sequences decode? Windows let go of blocks, which
    /// become free or idle in the order of single steps.
    pub fn shrinks_while_decoding(&self) -> bool {
        self.windowed
    }
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
    /// Tokens that a step may write at most, as far as groups with windows have room at this moment; a block at
    /// least. No bound where no group has a window: there a prompt that is cut into pieces needs as much in the end.
    pub fn chunk_limit(&self) -> u32 {
        if !self.windowed {
            return u32::MAX;
        }
        let windows = self.cache.room().filter(|room| room.lets_go);
        let room = |room: Room| (room.free_cells.saturating_add(room.idle_cells)).max(room.block_tokens);
        windows.map(room).min().unwrap_or(u32::MAX)
    }
    /// Does `group` let go of what leaves its window?
    pub fn lets_go(&self, group: GroupId) -> bool {
        self.windowed && self.cache.room().nth(group.0.into()).is_some_and(|room| room.lets_go)
    }
    /// Cells that a sequence of `n_tokens` fills at most, when it shares none.
    pub fn cells(&self, n_tokens: u32) -> u64 {
        let cells = u64::from(n_tokens).next_multiple_of(self.block_tokens.into());
        // A windowed space never holds the whole of a long sequence.
        if self.lets_go { cells.min(self.capacity) } else { cells }
    }
    /// Cells that nobody has.
    pub fn free(&self) -> u64 {
        self.counted().free_cells.into()
    }
    /// Cells that an index knows and nobody holds.
    pub fn idle(&self) -> u64 {
        self.counted().idle_cells.into()
    }
    /// Cells that nobody needs.
    pub fn room(&self) -> u64 {
        let room = self.counted();
        u64::from(room.free_cells) + u64::from(room.idle_cells)
    }
    /// Cells that sequences hold.
    pub fn held(&self) -> u64 {
        self.capacity - self.room()
    }

    /// Does a step that grows by this many cells want evictions first? Which group, what it needs, and what there is if
    /// all that nobody holds is evicted: as the cache would say, had it been asked for the step. Only where this can be
    /// told without it: in a single group that keeps everything, where sequences share nothing but full blocks.
    pub fn shortfall(&self, growth: u64) -> Option<(GroupId, u32, u32)> {
        if self.lets_go || self.cache.n_groups() > 1 {
            return None;
        }
        let room = self.counted();
        let (needed, available) =
            (u32::try_from(growth).ok()?, room.free_cells.saturating_add(room.idle_cells));
        (room.free_cells < needed && needed <= available).then_some((self.group(), needed, available))
    }

    /// Could the index know such content at all?
    pub fn accepts(&self, prompt: &Prompt) -> bool {
        self.cache.accepts(&content(prompt, 0))
    }

    /// What the index could supply of the first `n_tokens`. Changes nothing.
    pub fn lookup(&self, salt: &str, prompt: &Prompt, n_tokens: u32) -> Lookup {
        self.cache.lookup(salt, &content(prompt, n_tokens))
    }

    /// While this number stays the same, lookups find as many tokens as before.
    pub fn prefix_version(&self) -> u64 {
        self.cache.prefix_version()
    }

    /// Can sequences share blocks?
    pub fn shares(&self) -> bool {
        self.shares
    }
    /// Of each block of the counted group, how many sequences hold it. Walks the pool.
    pub fn holders(&self) -> Vec<u32> {
        let holders = |block| if let BlockUse::Held(n) = block { n } else { 0 };
        self.cache.block_uses(self.group()).map(holders).collect()
    }
    /// The blocks that `seq` holds there, each with its place in the sequence.
    pub fn blocks_of(&self, seq: SeqId) -> impl Iterator<Item = (u64, u32)> {
        let table = self.cache.block_table(self.group(), seq).unwrap_or_default();
        (0..).zip(table).filter_map(|(i, block)| Some((i, block?)))
    }
    fn group(&self) -> GroupId {
        GroupId(self.counted as u16)
    }

    /// Why it would supply no more.
    pub fn explain(&self, salt: &str, prompt: &Prompt, n_tokens: u32) -> MissReason {
        self.cache.explain(salt, &content(prompt, n_tokens), Audience::Operator)
    }

    /// Make a sequence that holds as much of the first `n_tokens` as the index supplies, and say how much that is.
    /// `is_first`: the prompt had none before.
    pub fn open(
        &mut self,
        seq: SeqId,
        salt: &str,
        prompt: &Prompt,
        n_tokens: u32,
        at: At,
        is_first: bool,
    ) -> u32 {
        let (content, moment) = (content(prompt, n_tokens), at.moment());
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

    /// Let the index know the full blocks of `seq`, of whose tokens the first `n_tokens` are known and computed, and the
    /// first `stored` were handed over before. Returns how many blocks it did not know.
    pub fn store(&mut self, seq: SeqId, prompt: &Prompt, stored: u32, n_tokens: u32, at: At) -> u32 {
        let Some(mut prefixes) = self.cache.prefixes() else { return 0 };
        let done = prefixes.store_from(seq, stored, &content(prompt, n_tokens), at.moment());
        done.unwrap_or_else(|refused| panic!("sequence {seq} is live and its content was checked: {refused}"))
            .n_new
    }

    /// Forget a sequence. What an index knows stays, and can be reclaimed.
    pub fn release(&mut self, seq: SeqId) {
        let removed: Result<(), Refused> = self.cache.sequences().expect(CHECKED).seq_rm(seq, 0, u32::MAX);
        assert!(removed.is_ok(), "a live sequence is known to the cache: {removed:?}");
    }

    /// Make `n_tokens` cells free in every group, as far as nobody holds them; returns the blocks evicted.
    pub fn make_room(&mut self, n_tokens: u32, at: At) -> u32 {
        self.cache.prefixes().map_or(0, |mut prefixes| prefixes.make_room(n_tokens, at.moment()))
    }
}
