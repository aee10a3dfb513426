//! Capacities that change.
use super::{CpuPools, Owned, cells_of, kv_bytes};
use crate::attention::Scratch;
use crate::pages::Pages;
use kvist_cache::{CellRun, GroupId};
use kvist_device::{DeviceError, PoolSpec, Purpose};

impl CpuPools {
    pub(super) fn change_capacity(&mut self, capacity_cells: &[u32]) -> Result<(), DeviceError> {
        let spec = PoolSpec { capacity_cells: capacity_cells.to_vec(), ..self.spec.clone() };
        let needed = spec.layout.n_groups();
        if capacity_cells.len() < needed {
            let len = capacity_cells.len();
            return Err(DeviceError::OutOfRange { what: "capacity of layer group", index: needed - 1, len });
        }
        // Without the recent rows: they stay as many as they are.
        let bound = |spec: &PoolSpec| {
            let kv = kv_bytes(spec, self.growth, &spec.capacity_cells);
            let scratch = Scratch::bytes(spec, &self.compute);
            kv.and_then(|kv| kv.checked_add(scratch?))
                .ok_or(DeviceError::OutOfMemory { what: "KV cache", bytes: u64::MAX })
        };
        let (before, after) = (bound(&self.spec)?, bound(&spec)?);
        spec.budget.extend(Purpose::KvCache, after.saturating_sub(before))?;
        let largest = |spec: &PoolSpec| spec.capacity_cells.iter().copied().max().unwrap_or(0);
        // A longer context is split into more parts.
        let resized = self.scratch.resize(&spec, &self.compute);
        resized.inspect_err(|_| spec.budget.shorten(after.saturating_sub(before)))?;
        self.ledger.resize(largest(&spec));
        for group in (0..needed as u16).map(GroupId) {
            let (have, capacity) =
                (cells_of(&spec.layout, &self.layers, group), capacity_cells[usize::from(group.0)]);
            if let Some(recent) = self.recent.as_mut().filter(|_| capacity < have) {
                recent.forget(group, CellRun { start: capacity, len: have - capacity });
            }
        }
        for l in 0..self.layers.len() {
            let capacity = capacity_cells[usize::from(spec.layout.layers[l].group.0)];
            self.cut(l, capacity);
        }
        self.drop_unused_slabs();
        self.spec = spec;
        self.spec.budget.shorten(before.saturating_sub(after));
        Ok(())
    }

    /// Drops the segments of a layer above `capacity` cells, and moves the rest of the one in which it lies.
    fn cut(&mut self, l: usize, capacity: u32) {
        let Some(owned) = self.layers[l].as_mut() else { return };
        // Segments begin with whole blocks: a last one that ended within a block gets the cells of that block.
        if owned.keys.cells() < capacity {
            owned.sides().into_iter().for_each(|side| side.fill_last_block());
            return;
        }
        let before = owned.bytes();
        owned.sides().into_iter().for_each(|side| side.drop_segments_from(capacity));
        self.ledger.release(before - owned.bytes());
        let Some(part) = owned.keys.last_segment().filter(|part| part.end() > capacity) else { return };
        let less = CellRun { start: part.start, len: capacity - part.start };
        let side_bytes = owned.sides().map(|side| side.shape.bytes(less.len).unwrap_or(u64::MAX));
        let bytes = side_bytes.iter().map(|bytes| bytes.next_multiple_of(64)).fold(0, u64::saturating_add);
        let (before, kept) = (owned.bytes(), side_bytes[0] + side_bytes[1]);
        // Old and new memory exist side by side while the rows are copied.
        let budget = &self.spec.budget;
        if budget.extend(Purpose::KvCache, kept).is_err() || self.ledger.grow(kept).is_err() {
            return;
        }
        let Some(slab) = usize::try_from(bytes).ok().and_then(|bytes| Pages::new(bytes).ok()) else {
            self.ledger.shrink(kept);
            return budget.shorten(kept);
        };
        self.slabs.push(slab);
        let (new, mut at) = (self.slabs.len() - 1, 0);
        for (side, bytes) in owned.sides().into_iter().zip(side_bytes) {
            side.shorten_last_segment(less.len, new, at, &mut self.slabs);
            at += bytes.next_multiple_of(64) as usize;
        }
        self.ledger.release(before + kept - owned.bytes());
        self.spec.budget.shorten(kept);
    }

    /// Drops the slabs that no segment lies in.
    fn drop_unused_slabs(&mut self) {
        let mut new_index: Vec<Option<usize>> = vec![None; self.slabs.len()];
        for owned in self.layers.iter().flatten() {
            [&owned.keys, &owned.values]
                .into_iter()
                .flat_map(|side| side.slabs())
                .for_each(|slab| new_index[slab] = Some(0));
        }
        let used = new_index.iter_mut().flatten();
        used.enumerate().for_each(|(i, index)| *index = i);
        let mut old = new_index.iter();
        self.slabs.retain(|_| old.next().is_some_and(|index| index.is_some()));
        for owned in self.layers.iter_mut().flatten() {
            owned.sides().into_iter().for_each(|side| side.renumber_slabs(&new_index));
        }
    }
}

impl Owned {
    fn sides(&mut self) -> [&mut crate::pool::RowStore; 2] {
        [&mut self.keys, &mut self.values]
    }
    /// Bytes of all segments, as the ledger counts them.
    fn bytes(&self) -> u64 {
        let bytes = |side: &crate::pool::RowStore| side.shape.bytes(side.cells()).unwrap_or(u64::MAX);
        bytes(&self.keys) + bytes(&self.values)
    }
}
