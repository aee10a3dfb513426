//! What has been read for loads, on its way to the cache's memory: in order, and a bounded part of it between two steps.
use super::{Pending, TierDriver, cells, find};
use kvist_cache::GroupId;
use kvist_device::{HostBlock, Transfers};
use kvist_scheduler::TransferId;
use kvist_store::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of loads that are copied to the cache's memory between two steps, and one object more: a few milliseconds. Others wait for the
/// next step.
const STEP_BYTES: usize = 32 << 20;

/// What has been read for a load.
pub(super) enum Arrived {
    /// With its place in [`Found::wanted`].
    Object { id: TransferId, object: (usize, Bytes) },
    /// No more comes.
    All { id: TransferId, took: Duration },
}

/// What has been read and waits to be copied to the cache's memory, and how much of it may be before the next step. The bytes are those
/// of loads in flight, which the scheduler bounds.
pub(super) struct Arrivals {
    waiting: VecDeque<Arrived>,
    room_bytes: usize,
}

impl Default for Arrivals {
    fn default() -> Self {
        Arrivals { waiting: VecDeque::new(), room_bytes: STEP_BYTES }
    }
}

impl Arrivals {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn add(&mut self, arrived: impl IntoIterator<Item = Arrived>) {
        self.waiting.extend(arrived);
    }

    fn begin_step(&mut self) {
        self.room_bytes = STEP_BYTES;
    }

    /// The next of what may be copied before the next step. `is_wanted`: whether a load goes on; what comes for others is not copied.
    fn next(&mut self, is_wanted: impl Fn(&TransferId) -> bool) -> Option<Arrived> {
        if self.room_bytes == 0 {
            return None;
        }
        let next = self.waiting.pop_front()?;
        if let Arrived::Object { id, object } = &next
            && is_wanted(id)
        {
            self.room_bytes = self.room_bytes.saturating_sub(object.1.len());
        }
        Some(next)
    }
}

impl TierDriver {
    /// Lets another [`STEP_BYTES`] be copied to the cache's memory. Call it after every step.
    pub fn begin_step(&mut self, transfers: &mut Transfers<'_>) {
        self.arrived.begin_step();
        self.import_some(transfers);
    }

    /// Begins to copy what has arrived to the cache's memory, in order, and as much as may be copied before the next step.
    pub(super) fn import_some(&mut self, transfers: &mut Transfers<'_>) {
        while let Some(arrived) = self.arrived.next(|id| self.loads.contains_key(id)) {
            match arrived {
                Arrived::Object { id, object } => self.import(id, object, transfers),
                // It may have been abandoned.
                Arrived::All { id, took } => {
                    if let Some(load) = self.loads.remove(&id) {
                        self.end_load(id, load, took);
                    }
                }
            }
        }
        let blocks = self.loads.values_mut().flat_map(|load| &mut load.blocks);
        blocks.for_each(|block| block.settle(transfers));
    }

    /// Begins to copy an object of a load to the cache's memory, while the rest is still read.
    fn import(&mut self, id: TransferId, (at, object): (usize, Bytes), transfers: &mut Transfers<'_>) {
        let Some(load) = self.loads.get_mut(&id) else { return };
        let Some((i, groups)) = load.places.get(at) else { return };
        let Some(block) = load.blocks.get_mut(*i) else { return };
        block.n_missing -= 1;
        let mut from = 0;
        for &group in groups {
            let len = self.block_parts.part(group).map_or(0, |part| part.bytes);
            let begun = find::block_of(&load.order, group, *i).and_then(|to| {
                let bytes = (from + len <= object.len()).then(|| object.slice(from..from + len))?;
                let cells = cells(to, self.block_parts.block_tokens);
                transfers.import(GroupId(group as u16), cells, HostBlock::shared(Arc::new(bytes))).ok()
            });
            from += len;
            match begun {
                Some(begun) => block.parts.push(Pending::Begun(begun)),
                None => block.failed = true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    /// However much arrives, a step waits for no more than its part, and all comes in order.
    #[test]
    fn what_has_arrived_is_copied_in_bounded_parts() {
        const LARGEST: usize = 9 << 20;
        let bytes = Bytes::from(vec![0; LARGEST]);
        for seed in 0..20 {
            let mut random = SplitMix64(seed);
            let sizes: Vec<usize> = (0..60).map(|_| random.index(LARGEST) + 1).collect();
            let abandoned = TransferId(1);
            let of = |i: usize| TransferId((i % 3) as u64);
            let mut arrivals = Arrivals::default();
            arrivals.add(
                sizes
                    .iter()
                    .enumerate()
                    .map(|(i, &size)| Arrived::Object { id: of(i), object: (i, bytes.slice(..size)) }),
            );
            arrivals.add([Arrived::All { id: TransferId(0), took: Duration::ZERO }]);
            let (mut next, mut steps, mut has_ended) = (0, 0, false);
            while !arrivals.is_empty() {
                let (mut copied, mut last) = (0, 0);
                while let Some(arrived) = arrivals.next(|id| *id != abandoned) {
                    let Arrived::Object { id, object: (i, object) } = arrived else {
                        has_ended = next == sizes.len();
                        continue;
                    };
                    assert_eq!((i, object.len()), (next, sizes[next]), "in order");
                    next += 1;
                    if id != abandoned {
                        assert!(copied < STEP_BYTES, "one object more at most");
                        (copied, last) = (copied + object.len(), object.len());
                    }
                }
                assert!(arrivals.is_empty() || copied >= STEP_BYTES && copied < STEP_BYTES + last.max(1));
                steps += 1;
                arrivals.begin_step();
            }
            let wanted: usize =
                sizes.iter().enumerate().filter(|(i, _)| of(*i) != abandoned).map(|(_, size)| size).sum();
            assert!(has_ended && next == sizes.len());
            // A part is at most an object larger than the bound.
            assert!(
                (wanted.div_ceil(STEP_BYTES + LARGEST)..=wanted / STEP_BYTES + 1).contains(&steps),
                "{steps} steps"
            );
        }
    }
}
