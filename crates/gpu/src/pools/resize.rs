//! Capacities that change.
use super::{GpuPools, Group, ScratchBytes, check, usage};
use crate::driver::{Driver, Recorder};
use kvist_cache::{CellRun, GroupId};
use kvist_device::{DeviceError, PoolSpec, Purpose};

const OVERFLOW: DeviceError = DeviceError::OutOfMemory { what: "scratch of attention", bytes: u64::MAX };

impl<D: Driver> GpuPools<D> {
    pub(super) fn change_capacity(&mut self, capacity_cells: &[u32]) -> Result<(), DeviceError> {
        let spec = PoolSpec { capacity_cells: capacity_cells.to_vec(), ..self.spec.clone() };
        check(&*self.gpu, &spec)?;
        let capacity = |group: GroupId| capacity_cells[usize::from(group.0)];
        let bound = |spec: &PoolSpec| {
            let scratch = self.scratch_bytes(spec).and_then(|bytes| bytes.total());
            let kv = usage(spec, &spec.capacity_cells).map(|usage| usage.of(Purpose::KvCache));
            kv.and_then(|kv| kv.checked_add(scratch?))
                .ok_or(DeviceError::OutOfMemory { what: "KV cache", bytes: u64::MAX })
        };
        let (before, after) = (bound(&self.spec)?, bound(&spec)?);
        let more = after.saturating_sub(before);
        spec.budget.extend(Purpose::KvCache, more)?;
        self.resize_scratch(&spec).inspect_err(|_| spec.budget.shorten(more))?;
        self.ledger.resize(capacity_cells.iter().copied().max().unwrap_or(0));
        for group in (0..spec.layout.n_groups() as u16).map(GroupId) {
            let have = self.cells_of(group);
            if let Some(recents) = self.recents.as_mut().filter(|_| capacity(group) < have) {
                recents.plan.forget(group, CellRun { start: capacity(group), len: have - capacity(group) });
            }
        }
        self.replace_buffers();
        // Blocks may be moved in parts of another size.
        self.transfers.drop_lane();
        for (layer, owned) in spec.layout.layers.iter().zip(&mut self.layers) {
            let capacity = capacity(layer.group);
            let Some(owned) = owned.as_mut().filter(|owned| owned.cells() > capacity) else { continue };
            let have = owned.bytes(owned.cells()).unwrap_or(0);
            // A layer that has no room for the copy stays as it is.
            if owned.resize(&*self.gpu, &mut self.recorder, capacity).is_ok() {
                self.ledger.release(have - owned.bytes(owned.cells()).unwrap_or(have));
            }
        }
        self.spec = spec;
        self.spec.budget.shorten(before.saturating_sub(after));
        Ok(())
    }

    /// Before buffers are replaced: nothing uses them, and nothing that was recorded names them.
    pub(super) fn replace_buffers(&mut self) {
        self.transfers.settle_all();
        self.recorder.restart();
        self.stale();
    }

    /// What the scratch needs for a capacity. The recent rows stay as many as they are. `None` on overflow.
    fn scratch_bytes(&self, spec: &PoolSpec) -> Option<ScratchBytes> {
        let recents = self.recents.as_ref().map_or(0, |recents| recents.bytes);
        Some(ScratchBytes { recents, ..ScratchBytes::new(spec)? })
    }

    /// Plans of the length that the capacity needs. On `Err` nothing has changed.
    fn resize_scratch(&mut self, spec: &PoolSpec) -> Result<(), DeviceError> {
        let bytes = self.scratch_bytes(spec).ok_or(OVERFLOW)?;
        let (before, after) = (self.scratch.bytes(), bytes.total().ok_or(OVERFLOW)?);
        self.scratch.grow(after.saturating_sub(before))?;
        let plan = |(bytes, group): (&u64, &Group<D>)| {
            let is_other = bytes / 4 != group.capacity_words;
            is_other.then(|| self.gpu.buffer("plan of a step", *bytes)).transpose()
        };
        let plans: Result<Vec<_>, DeviceError> = bytes.plans.iter().zip(&self.groups).map(plan).collect();
        let plans = plans.inspect_err(|_| self.scratch.shrink(after.saturating_sub(before)))?;
        for ((plan, bytes), group) in plans.into_iter().zip(&bytes.plans).zip(&mut self.groups) {
            if let Some(plan) = plan {
                (group.plan, group.capacity_words) = (plan, bytes / 4);
            }
        }
        self.scratch.shrink(before.saturating_sub(after));
        self.long_plans.shrink(u64::MAX);
        Ok(())
    }
}
