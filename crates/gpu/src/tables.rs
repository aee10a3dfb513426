//! The plan of a layer group as its kernels read it: one buffer of words that is uploaded once per step.
//!
//! ```text
//! written   [tokens]   the cell that each token of the batch is written to
//! kept      [tokens]   the slot that keeps the token's recent row, or NONE; absent without recent rows
//! order     [slots]    the token of each query slot
//! work      [.., 4]    first unit, end unit, first partial slot or DIRECT, 0
//! merges    [.., 4]    slot, first entry of `lists`, number of partials, 0
//! lists                partial slots, per merge in the order of the splits
//! units     [.., 4]    first slot, slots, first entry, end entry
//! entries   [.., 9]    cells before it in its unit, first cell, offset in the item's run, the run's length,
//!                      first slot of the item, its slots | mask << 24, a, b, its list of recent rows or NONE;
//!                      see `Seen` in attend_plan.wgsl
//! recents   [slots]    the recent group of each query slot, then the lists of entries: per cell row or NONE, recent group
//! bits                 masks of draft trees
//! ```
//!
//! A tile is up to eight neighbouring query slots. A unit is a tile and a split of the sequence's positions, with the parts of the
//! reads' items that its slots see, in order of the sequence. Splits are added up in order, whether one work item goes through all units
//! of a tile or every unit has a work item of its own. The latter happens in steps of few queries, whose tiles alone would not fill a
//! GPU. A split has 1,024 positions, so that it does not depend on the batch where it ends; where that may be, splits are as long as it
//! takes to fill the GPU with units.
//!
//! Tiles end where spans end, except in splits where several spans read the same cells: there one tile of all of them
//! reads the cells once, if that is less work (`schedule.rs`).
mod entries;
mod schedule;
#[cfg(test)]
mod tests;

use crate::kernels::ATTEND_ROWS;
use entries::{Entry, Tile, distribute, push_bits};
use kvist_cache::kinds::BLOCK_TOKENS;
use kvist_cache::{GroupId, GroupPlan, PlannedSpan, ReadItem, Reads};
use kvist_device::RecentPlan;
use schedule::{Schedule, Wide};

/// Positions per split, where results must not depend on what else a step reads.
const SPLIT: u32 = 1024;
/// Splits of other steps: at least so many positions, and whole tiles of them.
const SHORTEST_SPLIT: u32 = 128;
const SPLIT_STEP: u32 = 16;
/// Query slots per tile.
pub const TILE: u32 = 8;
/// Slots of partial states.
pub const PARTIAL_SLOTS: u32 = 512;
/// Units whose partial states there is room for, if their tiles are full, with some to spare for sequences that end within a split.
const MOST_UNITS: u32 = PARTIAL_SLOTS / TILE * 7 / 8;
const DIRECT: u32 = u32::MAX;
const NONE: u32 = u32::MAX;
/// Words of an entry.
const ENTRY: usize = crate::kernels::ENTRY_WORDS as usize;

/// What the reads of a group mean for tiles.
#[derive(Clone, Copy)]
pub struct Lowering<'p> {
    pub group: &'p GroupPlan,
    pub spans: &'p [PlannedSpan],
    /// Query heads per KV head: the least of the group's layers.
    pub per_kv: u32,
    /// Query rows of a workgroup.
    pub rows: u32,
    /// Units that fill the GPU, for workgroups of each of [`ATTEND_ROWS`](crate::ATTEND_ROWS); splits are as long as that takes. `None`:
    /// they end at fixed positions, so that results do not depend on the batch.
    pub units: Option<[u32; 3]>,
    pub recent: Option<(&'p RecentPlan, GroupId)>,
}

/// First words of the sections, and the numbers of work items and merges.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    pub words: Vec<u32>,
    pub written: u32,
    pub kept: u32,
    pub order: u32,
    pub work: u32,
    pub n_work: u32,
    pub merges: u32,
    pub n_merges: u32,
    pub lists: u32,
    pub units: u32,
    pub entries: u32,
    pub recents: u32,
    pub bits: u32,
    /// Slots of the largest tile.
    pub max_slots: u32,
    scratch: Scratch,
}

#[derive(Clone, Debug, Default)]
struct Scratch {
    /// Tiles that end where spans end.
    tiles: Vec<Tile>,
    /// Tiles of several spans.
    wide: Vec<Wide>,
    bits: Vec<u32>,
    first_bits: Vec<u32>,
    linked: Vec<bool>,
    recents: Vec<u32>,
    schedule: Schedule,
}

/// Most entries of tiles that read block by block for which pools reserve memory at the start: 9 MiB.
const USUAL_ENTRIES: u64 = 1 << 18;

/// Words for which pools reserve memory at the start: all that the largest step needs, as far as sequences consist of whole blocks, and
/// [`USUAL_ENTRIES`] are enough for them. Caches whose sequences are scattered cell by cell may need more.
pub fn usual_words(capacity: u32, max_step_tokens: u32, recent_tokens: u32) -> u64 {
    let tokens = u64::from(max_step_tokens);
    // Texts that are generated side by side take blocks in turn, so each block may be a run of its own, with an entry in every tile of
    // queries. A split has one more at its end, and a unit.
    let runs = capacity.div_ceil(BLOCK_TOKENS) + capacity / (SPLIT / 2) + 2;
    let by_blocks = (u64::from(max_step_tokens.div_ceil(TILE)) * u64::from(runs)).min(USUAL_ENTRIES);
    let entries = by_blocks.max(u64::from(capacity / 4)) + 8 * tokens + 64;
    let recents = if recent_tokens > 0 { tokens * (2 + 2 * u64::from(recent_tokens)) } else { 0 };
    ENTRY as u64 * entries + recents
}

/// Positions per split: so many that `units` tiles of splits are about what the step reads.
fn split(reads: &Reads, n_tiles: usize, units: Option<u32>) -> u32 {
    let Some(units) = units.map(|units| units.clamp(1, MOST_UNITS)) else { return SPLIT };
    if n_tiles >= units as usize {
        return SPLIT; // the tiles fill the GPU
    }
    let tiles_of = |item: &ReadItem| u64::from(item.n_queries.div_ceil(TILE));
    let cells: u64 = reads.items.iter().map(|item| u64::from(item.run.len) * tiles_of(item)).sum();
    let positions = cells.div_ceil(units.into()).next_multiple_of(SPLIT_STEP.into());
    u32::try_from(positions).unwrap_or(u32::MAX / 2).clamp(SHORTEST_SPLIT, 1 << 24)
}

impl Tables {
    /// Lowers the plan of a group.
    pub fn lower(&mut self, plan: Lowering<'_>) {
        let Scratch { tiles, wide, bits, first_bits, linked, recents, schedule } = &mut self.scratch;
        let (reads, order) = (&plan.group.reads, &plan.group.reads.order);
        push_bits(reads, bits, first_bits);
        schedule::cut(reads, plan.spans, linked, tiles, wide);
        let wanted = wide.iter().map(|wide| wide.slots() * plan.per_kv).max().unwrap_or(1);
        let of_rows = ATTEND_ROWS.iter().position(|rows| *rows >= wanted).unwrap_or(ATTEND_ROWS.len() - 1);
        let split = split(reads, tiles.len(), plan.units.map(|units| units[of_rows]));
        distribute(reads, first_bits, split, tiles);
        distribute(reads, first_bits, split, wide);
        recents.clear();
        if let Some((recent, _)) = plan.recent {
            recents.extend(order.iter().map(|token| recent.group_of(*token)));
            for tile in tiles.iter_mut().chain(wide.iter_mut().map(AsMut::as_mut)) {
                let slots = tile.first_slot as usize..(tile.first_slot + tile.n_slots) as usize;
                tile.low = order[slots].iter().map(|token| recent.low_of(*token)).min().unwrap_or(0);
            }
        }
        schedule.make(
            tiles,
            wide,
            (plan.per_kv, plan.rows),
            |entry: &Entry, low: u32, out: &mut Vec<Entry>| match plan.recent {
                None => out.push(entry.without_recents()),
                Some((recent, group)) => entry.push_with_recents(low, recents, out, |cell| {
                    recent.row_of(group, cell).map_or([NONE; 2], |(row, near)| [row, near])
                }),
            },
        );

        let words = &mut self.words;
        words.clear();
        self.written = 0;
        words.extend(plan.group.writes.iter().flat_map(|run| run.cells()));
        self.kept = words.len() as u32;
        if let Some((recent, group)) = plan.recent {
            let n = words.len();
            words.resize(2 * n, NONE);
            for (token, slot) in recent.kept(group) {
                if let Some(word) = words.get_mut(n + *token as usize) {
                    *word = *slot;
                }
            }
        }
        let mut section = |first: &mut u32, items: &mut dyn Iterator<Item = u32>| {
            *first = words.len() as u32;
            words.extend(items);
        };
        section(&mut self.order, &mut order.iter().copied());
        section(&mut self.work, &mut schedule.work.iter().flatten().copied());
        section(&mut self.merges, &mut schedule.merges.iter().flatten().copied());
        section(&mut self.lists, &mut schedule.lists.iter().copied());
        section(&mut self.units, &mut schedule.units.iter().flatten().copied());
        section(&mut self.entries, &mut schedule.entries.iter().flat_map(|entry| entry.0));
        section(&mut self.recents, &mut recents.iter().copied());
        section(&mut self.bits, &mut bits.iter().copied());
        (self.n_work, self.n_merges) = (schedule.work.len() as u32, schedule.merges.len() as u32);
        self.max_slots = schedule.units.iter().map(|unit| unit[1]).max().unwrap_or(0);
    }
}
