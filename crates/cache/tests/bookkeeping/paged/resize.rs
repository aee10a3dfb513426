//! Capacities that change, chosen at random.
use super::drive::{Drive, GARBAGE};
use kvist_cache::*;
use kvist_testing::reference::Choices;
use std::collections::BTreeSet;

impl Drive {
    /// Resizes every group, and moves the bytes as a device would.
    pub(super) fn resize(&mut self, choices: &mut Choices<'_>) {
        let block = self.block();
        let groups = 0..self.spec.groups.len();
        // As small as it gets, a little less, or any.
        let mut any = |g: usize| match choices.below(3) {
            0 => choices.of(&[3, 8, 16, 24, 40, 57, 100, 160]) + choices.below(9),
            n => (self.used(g).len() as u32 * block + choices.below(2 * block)).saturating_sub(n - 1),
        };
        let capacities: Vec<u32> = groups.clone().map(&mut any).collect();
        self.log.push(format!("resize to {capacities:?}"));
        let obstacles: Vec<Refused> =
            groups.clone().filter_map(|g| self.obstacle(g, capacities[g])).collect();
        let is_small = |refused: &&Refused| matches!(refused, Refused::TooSmall { .. });
        let expected = obstacles.iter().find(|refused| !is_small(refused)).or(obstacles.first());
        let mut moves = MovePlan::default();
        let planned = self.cache.plan_resize(&capacities, &mut moves);
        assert_eq!(planned.as_ref().err(), expected);
        if planned.is_err() || choices.one_in(8) {
            return; // a plan that is dropped leaves no trace: `compare` sees it
        }
        let before: Vec<_> = groups.clone().map(|g| self.tables(g)).collect();
        for (group, copies) in moves.groups() {
            let memory = &mut self.memories[group.0 as usize];
            self.n_resized += copies.len() as u32;
            for copy in copies {
                let from = copy.from as usize..(copy.from + copy.len) as usize;
                memory.copy_within(from, copy.to as usize);
            }
        }
        self.cache.resize(&capacities, &moves);
        let cells: Vec<u32> = capacities.iter().map(|tokens| tokens / block * block).collect();
        assert_eq!(self.cache.capacity_cells(), cells);
        for (g, &cells) in cells.iter().enumerate() {
            self.spec.groups[g].capacity_tokens = capacities[g];
            self.memories[g].resize(cells as usize, GARBAGE);
            // Blocks below the new capacity stay where they are.
            for (seq, table) in self.tables(g) {
                for (is, was) in table.into_iter().zip(&before[g][&seq]) {
                    let stays = was.is_none_or(|block| (block + 1) * self.spec.block_tokens <= cells);
                    assert!(is == *was || !stays, "{was:?} moved to {is:?}");
                    assert!(is.is_none_or(|block| block * self.spec.block_tokens < cells));
                }
            }
        }
    }

    /// Blocks in use or cached.
    fn used(&self, g: usize) -> BTreeSet<u32> {
        self.in_use(g).keys().chain(self.known[g].keys()).copied().collect()
    }

    /// Why group `g` cannot have this capacity.
    fn obstacle(&self, g: usize, capacity: u32) -> Option<Refused> {
        let (block, group) = (self.block(), GroupId(g as u16));
        let n_blocks = capacity / block;
        if n_blocks == 0 {
            return Some(Refused::Unsupported("a layer group needs room for one block at least"));
        }
        let pinned = self.exports.iter().flat_map(|export| export.pin.blocks());
        let pinned = pinned.filter(|id| id.group == group).map(|id| id.block);
        let in_transfer = pinned.chain(self.loading(g)).filter(|&block| block >= n_blocks).min();
        if let Some(block) = in_transfer {
            return Some(Refused::InTransfer(BlockId { group, block }));
        }
        let (in_use, used) = (self.in_use(g).len() as u32, self.used(g).len() as u32);
        let (capacity, evictable) = (n_blocks * block, (used - in_use) * block);
        (used > n_blocks).then_some(Refused::TooSmall { group, capacity, used: used * block, evictable })
    }
}
