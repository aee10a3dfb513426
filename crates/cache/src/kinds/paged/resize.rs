//! A capacity that changes while sequences live.
use super::Paged;
use crate::block_kind::{NONE, ResizeBlocks};
use crate::events::{Change, ChangeReason};
use crate::ids::GroupId;
use crate::request::Refused;
use crate::transfers::BlockId;
use std::collections::BTreeMap;

impl ResizeBlocks for Paged {
    fn plan_resize(&self, group: GroupId, capacity_tokens: u32) -> Result<Vec<(u32, u32)>, Refused> {
        let n_blocks = self.whole_blocks(capacity_tokens);
        if self.unlimited || capacity_tokens == u32::MAX {
            return Err(Refused::Unsupported("a cache of unlimited capacity has no other capacity"));
        }
        if n_blocks == 0 {
            return Err(Refused::Unsupported("a layer group needs room for one block at least"));
        }
        if let Some(block) = self.blocks.in_transfer_from(n_blocks) {
            return Err(Refused::InTransfer(BlockId { group, block }));
        }
        let n_used = self.blocks.capacity() - self.blocks.n_free();
        if n_used > n_blocks {
            return Err(Refused::TooSmall {
                group,
                capacity: n_blocks * self.block_tokens,
                used: n_used * self.block_tokens,
                evictable: self.blocks.n_evictable() * self.block_tokens,
            });
        }
        Ok(self.blocks.moves_below(n_blocks))
    }

    fn resize(&mut self, capacity_tokens: u32, moves: &[(u32, u32)]) {
        let moved: BTreeMap<u32, u32> = moves.iter().copied().collect();
        let mut n_versions = self.n_versions;
        for table in self.sequences.values_mut().filter(|_| !moved.is_empty()) {
            let mut changes = false;
            for block in table.blocks.iter_mut().filter(|block| **block != NONE) {
                if let Some(&to) = moved.get(block) {
                    (*block, changes) = (to, true);
                }
            }
            if changes {
                n_versions += 1;
                table.version = n_versions;
            }
        }
        self.n_versions = n_versions;
        self.blocks.resize(self.whole_blocks(capacity_tokens), moves);
        for &(from, to) in moves {
            self.events.push(to, None, Change::Move { from }, ChangeReason::Resize);
        }
    }
}
