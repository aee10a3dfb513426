//! Replays one load in contiguous arenas and in a paged cache of the same size, to measure the cost of contiguous
//! allocation.
//!
//! Rules: a request allocates space for its prompt when it arrives, adds one token at a fixed interval, and frees
//! everything when its answer is complete. All tokens of an answer but the last are stored. Requests never wait and
//! are never evicted: a request that finds no space on arrival is *turned away*, and an answer that cannot grow is
//! *cut short*. A follow-up arrives after its parent ends, however it ended, so that every layout gets the same load.
//!
//! Guarantee: the same input gives the same figures, computed with the real bookkeeping of `kvist_cache`. It is not a
//! server: there is no scheduler, no shared prefix, and computing takes no time.
use crate::request::Request;
use crate::run::Arrivals;
use kvist_cache::arena::{self, ALLOCATORS, Arena, ArenaRefused, CapacityExceeded, OutOfMemory};
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedError, PagedSpec, Refused, SeqId, Span, Step, StepPlan, StepRequest};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Name of the paged cache among the [`layouts`].
pub const PAGED: &str = "paged";

/// Maximum number of blocks. An arena with `first_fit` needs 8 bytes for each.
pub const MAX_BLOCKS: u32 = 1 << 24;

/// Names accepted by [`replay`]: every allocator of the arena, and [`PAGED`].
pub fn layouts() -> impl Iterator<Item = &'static str> {
    ALLOCATORS.iter().map(|(name, _)| *name).chain([PAGED])
}

/// How much space a new sequence reserves. A paged cache ignores this and allocates blocks as needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reserve {
    /// Its prompt. The allocation must grow later and may have to move.
    Prompt,
    /// Prompt and answer, as if the answer's length were known.
    Whole,
}

/// Settings of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// At least 1.
    pub block_tokens: u32,
    /// 1 to [`MAX_BLOCKS`], and fewer than 2^32 tokens in all.
    pub capacity_blocks: u32,
    /// Virtual nanoseconds between two tokens of an answer.
    pub token_ns: u64,
    pub reserve: Reserve,
}

/// Why a replay was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayRefused {
    #[error("there is no layout `{name}`: use one of {}", layouts().collect::<Vec<_>>().join(", "))]
    UnknownLayout { name: String },
    #[error(
        "{capacity_blocks} blocks of {block_tokens} tokens: give 1 to {MAX_BLOCKS} blocks of at least one token, fewer than 2^32 tokens in all"
    )]
    BadSize { capacity_blocks: u32, block_tokens: u32 },
    #[error("an arena: {0}")]
    Arena(String),
    #[error("a paged cache: {0}")]
    Paged(String),
}

impl From<ArenaRefused> for ReplayRefused {
    fn from(why: ArenaRefused) -> Self {
        ReplayRefused::Arena(why.to_string())
    }
}
impl From<PagedError> for ReplayRefused {
    fn from(why: PagedError) -> Self {
        ReplayRefused::Paged(why.to_string())
    }
}

/// Result of one load in one layout. Every request counts in one of `finished`, `turned_away` and `cut_short`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replayed {
    pub layout: String,
    pub requests: u64,
    /// Requests that generated their whole answer.
    pub finished: u64,
    /// Requests that found no space for their initial allocation.
    pub turned_away: u64,
    /// Of these, those for which enough blocks were free, but fragmented or lost to rounding.
    pub turned_away_with_room: u64,
    /// Requests that found no space for another token.
    pub cut_short: u64,
    /// Of these, those for which enough blocks were free.
    pub cut_short_with_room: u64,
    /// Allocations that grew in place.
    pub grown_in_place: u64,
    /// Allocations that moved in order to grow.
    pub moved: u64,
    /// Blocks copied by these moves.
    pub blocks_copied: u64,
    /// Means are over the time from the first arrival to the last end.
    pub mean_requests: f64,
    pub mean_used_blocks: f64,
    pub peak_used_blocks: u32,
    /// 1 − stored tokens ÷ capacity of the allocated blocks in tokens, both summed over time.
    pub internal_fragmentation: f64,
    /// 1 − largest possible allocation ÷ free blocks, averaged over time. 0 in a paged cache, where any free block can
    /// be used.
    pub external_fragmentation: f64,
}

/// Result of a request for space.
enum Allocation {
    Granted,
    Refused {
        /// True if the free blocks would have been enough had they been contiguous.
        enough_free: bool,
    },
}

/// A storage layout for sequences.
trait Place {
    /// Creates a sequence of `prompt` tokens in space for `reserve` tokens.
    fn open(&mut self, seq: SeqId, prompt: u32, reserve: u32) -> Allocation;
    /// Appends one token.
    fn append(&mut self, seq: SeqId) -> Allocation;
    fn close(&mut self, seq: SeqId);
    fn used_blocks(&self) -> u32;
    fn external_fragmentation(&self) -> f64;
    /// Writes the layout's counters into `into`.
    fn count(&self, into: &mut Replayed);
}

struct InArena {
    arena: Arena,
    moved: u64,
}

impl InArena {
    /// Converts a refusal. `owned_blocks` blocks are already allocated to the sequence and would be freed by a move.
    fn refused(why: ArenaRefused, owned_blocks: u32) -> Allocation {
        match why {
            ArenaRefused::NoRoom { needed_blocks, free_blocks, .. } => {
                Allocation::Refused { enough_free: needed_blocks - owned_blocks <= free_blocks }
            }
            ArenaRefused::TooLong { .. } => Allocation::Refused { enough_free: false },
            other => panic!("an arena refused a sound request: {other}"),
        }
    }
}

impl Place for InArena {
    fn open(&mut self, seq: SeqId, prompt: u32, reserve: u32) -> Allocation {
        if let Err(why) = self.arena.allocate_for(seq, reserve, OutOfMemory::Reject) {
            return Self::refused(why, 0);
        }
        let append = self.arena.append(seq, prompt, CapacityExceeded::Error);
        append.ok().flatten().expect("the handle has room for the prompt").commit();
        Allocation::Granted
    }

    fn append(&mut self, seq: SeqId) -> Allocation {
        let owned_blocks = self.arena.handle(seq).map_or(0, |handle| handle.len);
        match self.arena.append(seq, 1, CapacityExceeded::Error) {
            Ok(append) => {
                let append =
                    append.expect("with `CapacityExceeded::Error` an append that does not fit is an error");
                self.moved += u64::from(append.copy().is_some());
                append.commit();
                Allocation::Granted
            }
            Err(why) => Self::refused(why, owned_blocks),
        }
    }

    fn close(&mut self, seq: SeqId) {
        self.arena.free_for(seq).expect("it was opened");
    }
    fn used_blocks(&self) -> u32 {
        self.arena.n_blocks() - self.arena.n_free_blocks()
    }
    fn external_fragmentation(&self) -> f64 {
        self.arena.external_fragmentation()
    }
    fn count(&self, into: &mut Replayed) {
        let arena::ArenaCounters { grown, blocks_copied, .. } = self.arena.report().counters;
        into.moved = self.moved;
        into.grown_in_place = grown - self.moved;
        into.blocks_copied = blocks_copied;
    }
}

struct InPages {
    cache: Cache,
    plan: StepPlan,
}

const SEQUENCES: &str = "a paged cache without an index holds sequences";

impl InPages {
    fn new(setting: &Setting) -> Result<InPages, PagedError> {
        let spec = PagedSpec {
            block_tokens: setting.block_tokens,
            groups: vec![GroupSpec {
                capacity_tokens: setting.capacity_blocks * setting.block_tokens,
                visibility: Visibility::FULL,
                max_step_tokens: 1,
            }],
            rollback_tokens: 0,
            prefix: None,
        };
        Ok(InPages { cache: Cache::paged(&spec)?, plan: StepPlan::default() })
    }

    fn extend(&mut self, seq: SeqId, n_tokens: u32) -> Allocation {
        let start = self.cache.next_position(seq).unwrap_or(0);
        let spans = [Span::chain(seq, start, n_tokens)];
        match Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut self.plan) {
            Ok(step) => {
                step.commit();
                Allocation::Granted
            }
            Err(Refused::NoSpace { .. } | Refused::PositionOverflow { .. }) => {
                Allocation::Refused { enough_free: false }
            }
            Err(other) => panic!("a paged cache refused a sound request: {other}"),
        }
    }
}

impl Place for InPages {
    fn open(&mut self, seq: SeqId, prompt: u32, _: u32) -> Allocation {
        self.cache.sequences().expect(SEQUENCES).seq_new(seq).expect("no sequence has this id");
        let allocation = self.extend(seq, prompt);
        if let Allocation::Refused { .. } = allocation {
            self.close(seq);
        }
        allocation
    }
    fn append(&mut self, seq: SeqId) -> Allocation {
        self.extend(seq, 1)
    }
    fn close(&mut self, seq: SeqId) {
        let mut sequences = self.cache.sequences().expect(SEQUENCES);
        sequences.seq_rm(seq, 0, u32::MAX).expect("it was opened");
    }
    fn used_blocks(&self) -> u32 {
        let used = |allocation: kvist_cache::Occupancy| {
            (allocation.capacity_cells - allocation.free_cells) / allocation.block_tokens
        };
        self.cache.occupancy().map(used).sum()
    }
    fn external_fragmentation(&self) -> f64 {
        0.0
    }
    fn count(&self, _: &mut Replayed) {}
}

/// Integrals over time.
#[derive(Default)]
struct Sums {
    until_ns: u64,
    duration_ns: u128,
    requests: u128,
    used_blocks: u128,
    stored_tokens: u128,
    external: f64,
}

impl Sums {
    /// Adds the time since the last change, during which the current state was in effect.
    fn pass(&mut self, now_ns: u64, n_live: u64, stored_tokens: u64, place: &dyn Place) {
        let ns = u128::from(now_ns - self.until_ns);
        self.until_ns = now_ns;
        if ns > 0 {
            self.duration_ns += ns;
            self.requests += ns * u128::from(n_live);
            self.used_blocks += ns * u128::from(place.used_blocks());
            self.stored_tokens += ns * u128::from(stored_tokens);
            self.external += ns as f64 * place.external_fragmentation();
        }
    }
}

/// An empty place of this layout.
fn place(layout: &str, setting: &Setting) -> Result<Box<dyn Place>, ReplayRefused> {
    let &Setting { block_tokens, capacity_blocks, .. } = setting;
    let fits = capacity_blocks.checked_mul(block_tokens).is_some_and(|tokens| tokens < u32::MAX);
    if !fits || block_tokens == 0 || !(1..=MAX_BLOCKS).contains(&capacity_blocks) {
        return Err(ReplayRefused::BadSize { capacity_blocks, block_tokens });
    }
    match arena::build(layout, capacity_blocks) {
        Ok(allocator) => Ok(Box::new(InArena { arena: Arena::new(block_tokens, allocator)?, moved: 0 })),
        Err(_) if layout == PAGED => Ok(Box::new(InPages::new(setting)?)),
        Err(_) => Err(ReplayRefused::UnknownLayout { name: layout.to_owned() }),
    }
}

/// Replays `requests` in the layout of this name. O(generated tokens · log).
///
/// # Errors
/// [`ReplayRefused`]
pub fn replay(requests: &[Request], layout: &str, setting: &Setting) -> Result<Replayed, ReplayRefused> {
    let &Setting { block_tokens, token_ns, reserve, .. } = setting;
    let mut place = place(layout, setting)?;
    let mut found =
        Replayed { layout: layout.to_owned(), requests: requests.len() as u64, ..Replayed::default() };
    let mut arrivals = Arrivals::new(requests);
    let mut sums = Sums { until_ns: arrivals.next_ns().unwrap_or(0), ..Sums::default() };
    // Next token time of each live request. At equal times tokens come before arrivals, in list order.
    let mut tokens: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut written = vec![0u32; requests.len()];
    let (mut n_live, mut stored) = (0u64, 0u64);
    loop {
        let token = tokens.peek().map(|Reverse(next)| *next);
        let arrival_ns = arrivals.next_ns();
        let Some(now) = token.map(|(at_ns, _)| at_ns).into_iter().chain(arrival_ns).min() else { break };
        sums.pass(now, n_live, stored, &*place);
        if let Some((at_ns, i)) = token.filter(|&(at_ns, _)| at_ns == now) {
            tokens.pop();
            let seq = SeqId(i as u32);
            written[i] += 1;
            let ends = written[i] >= requests[i].output_tokens;
            let allocation = if ends { Allocation::Granted } else { place.append(seq) };
            match allocation {
                Allocation::Granted if ends => found.finished += 1,
                Allocation::Granted => {
                    stored += 1;
                    found.peak_used_blocks = found.peak_used_blocks.max(place.used_blocks());
                    tokens.push(Reverse((at_ns.saturating_add(token_ns), i)));
                    continue;
                }
                Allocation::Refused { enough_free } => {
                    found.cut_short += 1;
                    found.cut_short_with_room += u64::from(enough_free);
                }
            }
            place.close(seq);
            n_live -= 1;
            stored -= u64::from(requests[i].prompt_tokens) + u64::from(written[i] - 1);
            arrivals.ended(i, now);
        } else if let Some((at_ns, i)) = arrivals.pop(now) {
            let request = &requests[i];
            let whole = request.total_tokens() - 1; // the last token of an answer is not stored
            let reserve = match reserve {
                Reserve::Prompt => request.prompt_tokens,
                Reserve::Whole => u32::try_from(whole).unwrap_or(u32::MAX),
            };
            match place.open(SeqId(i as u32), request.prompt_tokens, reserve) {
                Allocation::Granted => {
                    n_live += 1;
                    stored += u64::from(request.prompt_tokens);
                    found.peak_used_blocks = found.peak_used_blocks.max(place.used_blocks());
                    tokens.push(Reverse((at_ns.saturating_add(token_ns), i)));
                }
                Allocation::Refused { enough_free } => {
                    found.turned_away += 1;
                    found.turned_away_with_room += u64::from(enough_free);
                    arrivals.ended(i, now);
                }
            }
        }
    }
    place.count(&mut found);
    let mean = |sum: u128| if sums.duration_ns == 0 { 0.0 } else { sum as f64 / sums.duration_ns as f64 };
    found.mean_requests = mean(sums.requests);
    found.mean_used_blocks = mean(sums.used_blocks);
    if sums.used_blocks > 0 {
        let capacity = sums.used_blocks as f64 * f64::from(block_tokens);
        found.internal_fragmentation = 1.0 - sums.stored_tokens as f64 / capacity;
    }
    if sums.duration_ns > 0 {
        found.external_fragmentation = sums.external / sums.duration_ns as f64;
    }
    Ok(found)
}
