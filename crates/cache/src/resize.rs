//! Changing the capacity of a paged cache while sequences live.
//!
//! Growing changes a number. Shrinking needs the blocks above the new capacity to be free: those in use or cached move to free
//! blocks below it. As with every move of bytes, the plan is data: [`Cache::plan_resize`] changes nothing, the device copies
//! ([`MovePlan`]), and [`Cache::resize`] renames the blocks. All targets are free, so a plan that is dropped leaves no trace.
use crate::cache::Cache;
use crate::ids::GroupId;
use crate::moves::MovePlan;
use crate::plan::CellCopy;
use crate::request::Refused;

const NO_BLOCKS: &str = "this kind of cache cannot change its capacity: use paged";

impl Cache {
    /// Plans the moves that capacities of `capacity_tokens`, one per layer group, need. Each is rounded down to whole blocks.
    ///
    /// # Errors
    /// A block that would have to move is in transfer ([`Refused::InTransfer`]); a group has no blocks, or its capacity is unlimited; or
    /// else, a group uses more blocks than it would have ([`Refused::TooSmall`]: evict, or remove sequences). Nothing has changed then.
    pub fn plan_resize(&self, capacity_tokens: &[u32], moves: &mut MovePlan) -> Result<(), Refused> {
        moves.epoch = self.epoch;
        moves.groups.clear();
        if capacity_tokens.len() != self.groups.len() {
            return Err(Refused::Unsupported("a capacity for every layer group is needed"));
        }
        let mut small = None;
        for (g, (kind, &capacity)) in self.groups.iter().zip(capacity_tokens).enumerate() {
            let blocks = kind.blocks().ok_or(Refused::Unsupported(NO_BLOCKS))?;
            let (group, block_tokens) = (GroupId(g as u16), kind.occupancy().block_tokens);
            let copy =
                |(from, to)| CellCopy { from: from * block_tokens, to: to * block_tokens, len: block_tokens };
            match blocks.plan_resize(group, capacity) {
                Ok(renamed) if renamed.is_empty() => {}
                Ok(renamed) => moves.groups.push((group, renamed.into_iter().map(copy).collect())),
                Err(too_small @ Refused::TooSmall { .. }) => small = small.or(Some(too_small)),
                Err(refused) => return Err(refused),
            }
        }
        small.map_or(Ok(()), Err)
    }

    /// Changes the capacities after the copies of `moves` were made. Sequences, cached prefixes and their eviction order stay the
    /// same; the numbers of the moved blocks change.
    ///
    /// # Panics
    /// If the cache has changed since `moves` was planned for these capacities.
    pub fn resize(&mut self, capacity_tokens: &[u32], moves: &MovePlan) {
        assert_eq!(moves.epoch, self.epoch, "the cache has changed since the resize was planned");
        self.epoch += 1;
        for (g, (kind, &capacity)) in self.groups.iter_mut().zip(capacity_tokens).enumerate() {
            let group = GroupId(g as u16);
            let block_tokens = kind.occupancy().block_tokens;
            let copies = moves.groups.iter().filter(|(of, _)| *of == group).flat_map(|(_, copies)| copies);
            let renamed: Vec<(u32, u32)> =
                copies.map(|copy| (copy.from / block_tokens, copy.to / block_tokens)).collect();
            kind.blocks_mut().expect("`plan_resize` found blocks").resize(capacity, &renamed);
            if let Some(index) = &mut self.index {
                let kind_blocks = kind.blocks().expect("`plan_resize` found blocks");
                renamed.iter().for_each(|&(from, to)| index.moved(kind_blocks, group, from, to));
            }
            if let Some(spec) = self.spec.as_mut().and_then(|spec| spec.groups.get_mut(g)) {
                spec.capacity_tokens = capacity;
            }
        }
    }
}
