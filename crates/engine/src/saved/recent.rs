//! The f16 rows of a text's newest tokens, which packed caches read instead of their packed rows ([`Recent`](kvist_device::Recent)):
//! out of a cache, and into one.
use super::copy::{CacheRows, GroupRows, Rows, SideSpec, parts, sides};
use super::seen_by;
use crate::memory::CacheConfig;
use kvist_cache::kinds::GroupSpec;
use kvist_cache::{GroupId, SeqId};
use kvist_device::{CellPosition, Layout, Storage};
use kvist_model::Error;
use kvist_model::config::ModelConfig;

/// What the f16 rows of a token consist of, in order.
pub(crate) fn recent_sides(layout: &Layout, (k, v): (Storage, Storage), group: GroupId) -> Vec<SideSpec> {
    let is_packed = |side: &SideSpec| if side.keys { k } else { v }.dtype.is_quantised();
    let packed = sides(layout, (k, v), group).into_iter().filter(is_packed);
    packed.map(|side| SideSpec { row_bytes: 2 * side.dim as usize, ..side }).collect()
}

/// Where the recent group of the query at position `n` begins; `n` if that query reads nothing in f16.
fn group_start(config: &CacheConfig, n: u32) -> u32 {
    n - n.checked_rem(config.recent.of_storages(config.k, config.v).tokens).unwrap_or(0)
}

/// The positions up to `most`, the farthest first, at which a text goes on as if all before had been computed here, if every layer
/// group has the rows `stored` and in f16 those of `recent`: a query there sees no others, and reads no others in f16.
pub(crate) fn ends(
    config: &CacheConfig,
    architecture: &ModelConfig,
    most: u32,
    (stored, recent): (&[GroupRows], &[Rows]),
) -> Vec<u32> {
    let aligned = config.cut_before(most);
    // What `--keep` removes next depends on more than the rows: it begins with a block.
    let mut ends = vec![if config.keep.is_some() { aligned } else { most }, aligned];
    ends.dedup();
    let groups = config.groups(architecture);
    ends.retain(|&n| {
        let first = group_start(config, n);
        let mut rows = groups.iter().zip(stored.iter().zip(recent));
        n > 0
            && rows.all(|(group, (stored, recent))| {
                let is_here = |position| stored.has(position) && (position < first || recent.has(position));
                seen_by(group.visibility, n).all(is_here)
            })
    });
    ends
}

/// The fewest tokens that a text of `n` can be cut to so that queries behind them see only positions among the rows.
pub(crate) fn shortest_cut(groups: &[GroupSpec], rows: &[GroupRows], n: u32) -> u32 {
    let of_group = |(group, rows): (&GroupSpec, &GroupRows)| {
        let (Some(window), GroupRows::Copied(rows)) = (group.visibility.window, rows) else { return 0 };
        // Where the last positions that follow each other begin. Those before them are sinks.
        let newest_first = rows.positions.iter().rev().skip_while(|position| **position >= n);
        let first =
            newest_first.fold(n, |first, position| if position + 1 == first { *position } else { first });
        let all = first <= group.visibility.sinks;
        if all { 0 } else { (first + window).saturating_sub(1).min(n) }
    };
    groups.iter().zip(rows).map(of_group).max().unwrap_or(0)
}

impl CacheRows<'_> {
    /// Copies the f16 rows that the cache still has of the recent group of the last token before `end`, as far as a query at the
    /// end of `seq`, at position `end`, sees their tokens.
    pub(crate) fn copy_recent(&mut self, seq: SeqId, end: u32) -> Result<Vec<Rows>, Error> {
        let first = group_start(self.config, end.saturating_sub(1));
        let groups = self.seen_at_end(seq, end);
        let mut all = Vec::new();
        for (g, seen) in groups.iter().enumerate() {
            let (id, sides) = (GroupId(g as u16), self.recent_sides_of(g));
            let mut rows = Rows { positions: Vec::new(), sides: vec![Vec::new(); sides.len()] };
            let mut token_rows = vec![0; sides.iter().map(SideSpec::width).sum()];
            let recent = seen.iter().filter(|(position, _)| *position >= first && !sides.is_empty());
            for &(position, cell) in recent {
                let pools = self.runner.network.pools_mut();
                if pools.read_recent(id, CellPosition { cell, position }, &mut token_rows)? {
                    rows.positions.push(position);
                    for (side, from, len) in parts(&sides, 1) {
                        rows.sides[side].extend(&token_rows[from..from + len]);
                    }
                }
            }
            all.push(rows);
        }
        Ok(all)
    }

    /// Gives the tokens of `seq` that a query at its end, at position `end`, reads in f16 their rows. `false` if some of them are
    /// not among `groups`, or the device keeps none.
    pub(crate) fn place_recent(&mut self, seq: SeqId, end: u32, groups: &[Rows]) -> Result<bool, Error> {
        let first = group_start(self.config, end);
        let seen = self.seen_at_end(seq, end);
        for (g, (seen, rows)) in seen.iter().zip(groups).enumerate() {
            let (id, sides) = (GroupId(g as u16), self.recent_sides_of(g));
            let mut token_rows = vec![0; sides.iter().map(SideSpec::width).sum()];
            for &(position, cell) in seen.iter().filter(|(position, _)| *position >= first) {
                let Ok(row) = rows.positions.binary_search(&position) else { return Ok(false) };
                for (side, to, len) in parts(&sides, 1) {
                    token_rows[to..to + len].copy_from_slice(&rows.sides[side][row * len..(row + 1) * len]);
                }
                let pools = self.runner.network.pools_mut();
                if !pools.write_recent(id, CellPosition { cell, position }, &token_rows)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    pub(crate) fn recent_sides_of(&self, group: usize) -> Vec<SideSpec> {
        let storages = (self.config.k, self.config.v);
        recent_sides(self.runner.model.layout(), storages, GroupId(group as u16))
    }
}
