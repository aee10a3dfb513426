//! Which tier has which blocks of a prompt.
use super::Report;
use super::parts::{BlockParts, window_key};
use super::task::{LookupTimes, Stores, Wanted};
use crate::serving::thread::Command;
use kvist_scheduler::{Ends, LoadOrder, MAX_TIERS, RequestId, Run};
use kvist_store::{BlockKey, KeyChain};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;

/// A prompt to look up.
pub struct Lookup {
    pub request: RequestId,
    pub tokens: Vec<u32>,
    pub fingerprint: Arc<[u8]>,
    pub salt: Arc<str>,
    pub block_parts: Arc<BlockParts>,
    pub n_tokens: u32,
    pub hit_tokens: u32,
}

/// What the tiers have of a prompt.
#[derive(Debug)]
pub struct Found {
    pub runs: Vec<Run>,
    /// Of the prompt's salt: where its generation is noted, and the one that was looked up.
    pub note: BlockKey,
    pub generation: u64,
    /// Of the blocks of the prompt.
    keys: Vec<BlockKey>,
    /// For each group with a window, by its number, and each block: the tier that has its part, as far as was looked.
    windows: Vec<(usize, Vec<Option<u8>>)>,
}

impl Found {
    /// What a load reads, block by block in the order of [`objects_of`]. `None` if it is not all known.
    pub fn wanted(&self, order: &LoadOrder, block_parts: &BlockParts) -> Option<Vec<Wanted>> {
        let block = block_parts.block_tokens;
        let first = (order.positions.start / block) as usize;
        let keys = self.keys.get(first..(order.positions.end / block) as usize)?;
        let mut wanted = Vec::with_capacity(keys.len());
        for (i, key) in keys.iter().enumerate() {
            let end = order.positions.start + (i as u32 + 1) * block;
            for (groups, window) in objects_of(order, block_parts, i) {
                let bytes = groups.iter().filter_map(|&group| Some(block_parts.part(group)?.bytes)).sum();
                let (tier, key) = match window {
                    None => (order.runs.iter().find(|run| run.until >= end)?.tier?, *key),
                    Some(group) => {
                        let (_, tiers) = self.windows.iter().find(|(of, _)| *of == group)?;
                        ((*tiers.get(first + i)?)?, window_key(key, group))
                    }
                };
                wanted.push(Wanted { tier: tier.into(), key, bytes });
            }
        }
        Some(wanted)
    }
}

/// The block of `group` that block `i` of a load is written to; `None` if its window will have moved on.
pub fn block_of(order: &LoadOrder, group: usize, i: usize) -> Option<u32> {
    order.blocks.get(group)?.get(i).copied().flatten()
}

/// The objects that block `i` of a load consists of: the layer groups of each, and the group if it has a window.
pub fn objects_of<'a>(
    order: &'a LoadOrder,
    block_parts: &'a BlockParts,
    i: usize,
) -> impl Iterator<Item = (Vec<usize>, Option<usize>)> + 'a {
    let whole = block_parts.whole().map(|(group, _)| group).collect();
    let windows = block_parts.windows().map(|(group, _)| group);
    let windows = windows.filter(move |&group| block_of(order, group, i).is_some());
    std::iter::once((whole, None)).chain(windows.map(|group| (vec![group], Some(group))))
}

/// Reports which tier has which blocks of a prompt.
pub async fn find(stores: Arc<Stores>, lookup: Lookup, reports: Sender<Command>) {
    let (note, times) = (KeyChain::note(&lookup.fingerprint, &lookup.salt), stores.lookup_times());
    let found = loop {
        let generation = stores.generation(&note);
        let found = find_in(&stores, &lookup, note, generation, times).await;
        // A tier may have told of a later generation.
        if stores.generation(&note) == generation {
            break found;
        }
    };
    let _ = reports.send(Command::Tier(Report::Found { request: lookup.request, found }));
}

async fn find_in(
    stores: &Arc<Stores>,
    lookup: &Lookup,
    note: BlockKey,
    generation: u64,
    times: LookupTimes,
) -> Found {
    let block = lookup.block_parts.block_tokens as usize;
    let tokens = lookup.tokens.get(..lookup.n_tokens as usize).unwrap_or_default();
    let keys = KeyChain::root_of(&lookup.fingerprint, &lookup.salt, generation).keys(tokens, block);
    let hit = (lookup.hit_tokens as usize / block).min(keys.len());
    // The other half is for the windows.
    let of_whole = if lookup.block_parts.has_windows() { times.first_half() } else { times };
    // All are asked, and at the same time as the tiers are searched, because each takes a round trip.
    let notes = Notes { of: note, times: of_whole, read: Arc::default() };
    let all: JoinSet<bool> = (0..stores.n()).map(|tier| notes.clone().read(stores.clone(), tier)).collect();
    let mut runs = search(stores, &keys, (hit, block), of_whole, &notes).await;
    all.join_all().await;
    let at = runs.last().map_or(0, |run| run.until as usize / block);
    let mut windows = Windows::new(stores, &lookup.block_parts, &keys, times);
    if lookup.block_parts.has_windows() {
        let mut ends = windows.ends(hit..at, usize::MAX).await;
        if hit > 0 {
            // The cache may evict what it has while the request waits: a preempted one has all of its blocks there now, and few later.
            // Otherwise the last end has to do, because each is a round trip.
            let most = if hit < at { 1 } else { usize::MAX };
            ends.append(&mut windows.ends(0..at, most).await);
        }
        runs = cut(&runs, &ends, block as u32);
    }
    let windows = windows.tiers;
    Found { runs, note, generation, keys, windows }
}

/// The notes of a salt, each read once for a lookup.
#[derive(Clone)]
struct Notes {
    of: BlockKey,
    times: LookupTimes,
    read: Arc<[OnceCell<bool>; MAX_TIERS]>,
}

impl Notes {
    /// Whether the note of a tier is known.
    async fn read(self, stores: Arc<Stores>, tier: usize) -> bool {
        let read = || stores.read_note(tier, self.of, self.times);
        match self.read.get(tier) {
            Some(note) => *note.get_or_init(read).await,
            None => false,
        }
    }
}

/// Which tier has which blocks of layer groups that see all of a text. `hit`: so many the cache has.
async fn search(
    stores: &Arc<Stores>,
    keys: &[BlockKey],
    (hit, block): (usize, usize),
    times: LookupTimes,
    notes: &Notes,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut at = 0;
    // A part that was found in time is of use; more is not asked for then, because it would be late.
    while at < keys.len() && (at == 0 || !times.are_over()) {
        let (mut found, mut all_answered) = ((None, 0), true);
        for tier in 0..stores.n() {
            // Without the note the blocks may be deleted ones.
            let (is_read, answer) = tokio::join!(
                notes.clone().read(stores.clone(), tier),
                stores.lookup(tier, &keys[at..], times)
            );
            let answer = answer.filter(|_| is_read);
            all_answered &= answer.is_some();
            if let Some(n) = answer.filter(|n| *n > 0) {
                found = (Some(tier as u8), n);
                break;
            }
        }
        let (tier, n) = match found {
            // The cache has the blocks before its hit; later ones are of no use after a gap.
            (None, _) if at < hit => (None, hit - at),
            (None, _) => {
                if all_answered {
                    keys[at..].iter().for_each(|key| stores.forget(key)); // they are written again
                }
                break;
            }
            found => found,
        };
        at += n;
        runs.push(Run::new(tier, (at * block) as u32));
    }
    runs
}

/// What the tiers have for the groups with windows.
struct Windows<'a> {
    stores: &'a Stores,
    block_parts: &'a BlockParts,
    keys: &'a [BlockKey],
    times: LookupTimes,
    tiers: Vec<(usize, Vec<Option<u8>>)>,
}

impl<'a> Windows<'a> {
    fn new(
        stores: &'a Stores,
        block_parts: &'a BlockParts,
        keys: &'a [BlockKey],
        times: LookupTimes,
    ) -> Windows<'a> {
        let tiers = block_parts.windows().map(|(group, _)| (group, vec![None; keys.len()])).collect();
        Windows { stores, block_parts, keys, times, tiers }
    }

    /// Where, after so many blocks, a load may end: where the tiers have all that the windows see there, besides what the
    /// cache has, before `blocks`. From the last block on, as far apart as a window is long, because a load rarely ends
    /// elsewhere. At most `most` of them.
    async fn ends(&mut self, blocks: Range<usize>, most: usize) -> BTreeSet<usize> {
        let (mut ends, mut end) = (BTreeSet::new(), blocks.end);
        while end > blocks.start && ends.len() < most && !self.times.have_passed() {
            let mut gap = None;
            for i in 0..self.tiers.len() {
                gap = gap.max(self.gap(i, blocks.start..end).await);
            }
            end = match gap {
                // Nothing that sees this block can be loaded.
                Some(gap) => gap,
                None => {
                    ends.insert(end);
                    end.saturating_sub(self.block_parts.shortest_window() as usize)
                }
            };
        }
        ends
    }

    /// The first block of the range that the `i`-th window sees at its end, and that no tier has.
    async fn gap(&mut self, i: usize, blocks: Range<usize>) -> Option<usize> {
        let (group, tiers) = &mut self.tiers[i];
        let sees = |block: usize| self.block_parts.sees(*group, blocks.end as u32, block as u32);
        let seen: Vec<usize> =
            blocks.clone().filter(|&block| sees(block) && tiers[block].is_none()).collect();
        let keys: Vec<BlockKey> = seen.iter().map(|&block| window_key(&self.keys[block], *group)).collect();
        let mut at = 0;
        while at < seen.len() {
            let (before, mut all_answered) = (at, true);
            for tier in 0..self.stores.n() {
                let answer = self.stores.lookup(tier, &keys[at..], self.times).await;
                all_answered &= answer.is_some();
                let n = answer.unwrap_or(0);
                seen[at..at + n].iter().for_each(|&block| tiers[block] = Some(tier as u8));
                at += n;
                if at == seen.len() {
                    return None;
                }
            }
            if at == before {
                if all_answered {
                    self.stores.forget(&keys[at]); // it is written again
                }
                return Some(seen[at]);
            }
        }
        None
    }
}

/// Cuts runs where a load may end.
fn cut(runs: &[Run], ends: &BTreeSet<usize>, block_tokens: u32) -> Vec<Run> {
    let mut from = 0;
    let mut parts = Vec::new();
    for run in runs {
        let until = (run.until / block_tokens) as usize;
        let within = ends.range(from + 1..=until).copied();
        parts.extend(within.map(|end| Run {
            tier: run.tier,
            until: end as u32 * block_tokens,
            ends: Ends::AtEnd,
        }));
        if !ends.contains(&until) {
            parts.push(Run { ends: Ends::Nowhere, ..*run });
        }
        from = until;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_where_loads_may_end() {
        let runs = [Run::new(None, 8), Run::new(Some(0), 24), Run::new(Some(1), 32)];
        let ends = BTreeSet::from([3, 5, 8]);
        let expected = [
            (None, 8, Ends::Nowhere),
            (Some(0), 12, Ends::AtEnd),
            (Some(0), 20, Ends::AtEnd),
            (Some(0), 24, Ends::Nowhere),
            (Some(1), 32, Ends::AtEnd),
        ];
        let expected: Vec<Run> =
            expected.map(|(tier, until, ends)| Run { tier, until, ends }).into_iter().collect();
        assert_eq!(cut(&runs, &ends, 4), expected);
    }
}
