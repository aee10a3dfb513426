//! What must be true after every operation.
use super::drive::Drive;
use kvist_cache::*;
use std::collections::BTreeSet;

impl Drive {
    /// What the cache says of every block, and that no bytes in transfer were touched.
    fn compare_blocks(&self) {
        for g in 0..self.spec.groups.len() {
            let (in_use, used) = (self.in_use(g), self.used_by_sequences(g));
            let of = |block: &u32| match (used.get(block), in_use.get(block), self.known[g].get(block)) {
                (Some(&n), _, _) => BlockUse::InUse(n),
                (None, Some(_), _) => BlockUse::InTransfer,
                (None, None, Some(_)) => BlockUse::Evictable,
                (None, None, None) => BlockUse::Free,
            };
            let uses: Vec<BlockUse> = self.cache.block_uses(GroupId(g as u16)).collect();
            let expected: Vec<BlockUse> = (0..uses.len() as u32).map(|block| of(&block)).collect();
            assert_eq!(uses, expected, "blocks of group {g}");
            for block in self.loading(g) {
                let shown = used.contains_key(&block) || self.known[g].contains_key(&block);
                assert!(!shown && in_use[&block] == 1, "loading block {block} of group {g} can be read");
            }
        }
        for (id, bytes) in self.exports.iter().flat_map(|export| &export.bytes) {
            assert_eq!(&self.bytes(*id), bytes, "{id:?} was written while it was pinned");
        }
    }

    pub(super) fn compare(&mut self) {
        self.compare_blocks();
        for seq in (0..7).map(SeqId) {
            let next = self.sequences.get(&seq).map(|s| s.tokens.len() as u32);
            assert_eq!(self.cache.next_position(seq), next, "next position of {seq}");
        }
        let block = self.block();
        for (g, report) in self.cache.report().into_iter().enumerate() {
            let (in_use, blocks) = (self.in_use(g), report.blocks.expect("a paged group"));
            let used: BTreeSet<u32> = in_use.keys().chain(self.known[g].keys()).copied().collect();
            let evictable = self.known[g].keys().filter(|block| !in_use.contains_key(block)).count() as u32;
            assert_eq!(blocks.total - blocks.free, used.len() as u32, "blocks in use in group {g}");
            assert_eq!(blocks.evictable, evictable, "evictable blocks of group {g}");
            let n = blocks.counters;
            assert_eq!(n, self.counters[g], "counters of group {g}");
            let (came, left) = (n.allocated + n.copied_on_write, n.freed + n.evicted);
            assert_eq!(came - left, u64::from(blocks.total - blocks.free), "{n:?}");
            // Cell by cell: the cells of a block that some sequence has filled, or all of them if the block is
            // cached.
            let mut filled: BTreeSet<(u32, u32)> = BTreeSet::new();
            for (seq, table) in self.tables(g) {
                let len = self.sequences[&seq].tokens.len() as u32;
                for p in 0..len {
                    filled.extend(table[(p / block) as usize].map(|at| (at, p % block)));
                }
            }
            let in_use = self.used_by_sequences(g);
            let is_full = |at: &&u32| self.known[g].contains_key(at) || !in_use.contains_key(at);
            filled.extend(in_use.keys().filter(is_full).flat_map(|&at| (0..block).map(move |i| (at, i))));
            assert_eq!(
                blocks.unused_cells,
                in_use.len() as u32 * block - filled.len() as u32,
                "in group {g}"
            );
            assert_eq!(blocks.external_fragmentation(), 0.0);
            assert!((0.0..1.0).contains(&blocks.internal_fragmentation()), "{blocks:?}");
            let top = used.last().map_or(0, |top| top + 1);
            assert_eq!(report.high_water, top * block, "high water of group {g}");
            // Every block stores what its sequences and the index claim.
            for (seq, table) in self.tables(g) {
                let sequence = self.sequences[&seq].clone();
                let cells = self.cache.stored_cells(GroupId(g as u16), seq).into_iter();
                let cells = cells.flat_map(|(first, run)| (first..).zip(run.cells()));
                let len = sequence.tokens.len() as u32;
                let in_table =
                    (0..len).filter_map(|p| Some((p, table[(p / block) as usize]? * block + p % block)));
                assert!(cells.eq(in_table), "cells of {seq} in group {g}");
                for (i, at) in table.into_iter().enumerate() {
                    let Some(at) = at else { continue };
                    for p in i * block as usize..((i + 1) * block as usize).min(sequence.tokens.len()) {
                        let wanted = self.prefixes.number(sequence.salt, &sequence.tokens[..=p]);
                        let cell = at as usize * block as usize + p % block as usize;
                        assert_eq!(self.memories[g][cell], wanted, "position {p} of {seq} in group {g}");
                    }
                }
            }
            for (at, known) in &self.known[g] {
                let last = (at + 1) as usize * block as usize - 1;
                assert_eq!(self.memories[g][last], known.prefix, "indexed block {at} of group {g}");
            }
        }
    }
}
