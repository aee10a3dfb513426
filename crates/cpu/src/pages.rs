//! Memory in whole pages: of a file, or zeroed memory from anonymous maps, on huge pages if the system provides them. With 4 KiB
//! pages, streaming a large cache spends a third of the time in address translation.
use crate::arch::{HUGE, copy_on_write, map_huge};
use kvist_device::Reservation;
use memmap2::MmapMut;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Whole cache lines of zeroed memory.
#[derive(Debug)]
pub struct Pages {
    map: MmapMut,
    /// Where they begin in the map.
    start: usize,
    len: usize,
    /// Given back after the map is gone, and after all others who keep it.
    _memory: Option<Arc<Reservation>>,
}

impl Pages {
    /// Allocates `len` bytes, 64-byte aligned. On failure returns the number of bytes the system refused. Does not
    /// touch the pages: the thread that writes a page first has it on its own memory node.
    pub fn new(len: usize) -> Result<Self, u64> {
        Pages::of(len, true)
    }

    /// Like [`new`](Self::new), with or without huge pages. What follows the last whole huge page lies on small ones, so that it
    /// does not take the memory of a huge one.
    pub fn of(len: usize, huge: bool) -> Result<Self, u64> {
        let (map, start) = match huge && len >= HUGE {
            true => map_huge(len, true)?,
            false => (MmapMut::map_anon(len.max(1)).map_err(|_| len as u64)?, 0),
        };
        Ok(Pages { map, start, len, _memory: None })
    }

    /// The first `len` bytes of a file, shared with all processes that map it. Pages that are written to become copies of
    /// this process. `memory` is what a file that lies in memory takes of the budget.
    pub fn of_file(file: &File, len: usize, memory: Option<Arc<Reservation>>) -> std::io::Result<Self> {
        Ok(Pages { map: copy_on_write(file, len)?, start: 0, len, _memory: memory })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map[self.start..][..self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.len]
    }
}

/// The `wanted` bytes of slabs, in their order, all of them mutable at once. Panics if two of them overlap or one lies outside its
/// slab.
pub fn disjoint<'p>(slabs: &'p mut [Pages], wanted: &[(usize, Range<usize>)]) -> Vec<&'p mut [u8]> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_unstable_by_key(|i| (wanted[*i].0, wanted[*i].1.start, wanted[*i].1.end));
    let mut order = order.into_iter().peekable();
    let mut parts = Vec::new();
    parts.resize_with(wanted.len(), Default::default);
    for (s, slab) in slabs.iter_mut().enumerate() {
        let (mut rest, mut at) = (slab.bytes_mut(), 0);
        while let Some(i) = order.next_if(|i| wanted[*i].0 == s) {
            let Range { start, end } = wanted[i].1;
            let part = start.checked_sub(at).and_then(|gap| {
                rest.split_off_mut(..gap)?;
                rest.split_off_mut(..end.checked_sub(start)?)
            });
            parts[i] = part.expect("parts lie in their slab and do not overlap");
            at = end;
        }
    }
    assert!(order.next().is_none(), "a part of a slab that is not there");
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slabs() -> Vec<Pages> {
        [100, 0, 50].map(|len| Pages::new(len).unwrap()).into()
    }

    #[test]
    fn parts_are_the_wanted_ones_in_their_order() {
        let mut slabs = slabs();
        let wanted = [(2, 0..50), (0, 40..50), (0, 50..50), (1, 0..0), (0, 99..100), (0, 0..40), (0, 50..60)];
        for (i, part) in disjoint(&mut slabs, &wanted).into_iter().enumerate() {
            assert_eq!(part.len(), wanted[i].1.len());
            part.fill(i as u8 + 1);
        }
        for (i, (slab, range)) in wanted.iter().enumerate() {
            assert!(slabs[*slab].bytes()[range.clone()].iter().all(|byte| *byte == i as u8 + 1), "{i}");
        }
        assert!(slabs[0].bytes()[60..99].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_overlaps_or_lies_outside_is_refused() {
        for wanted in [vec![(0, 0..10), (0, 9..20)], vec![(0, 90..101)], vec![(3, 0..1)], vec![(1, 0..1)]] {
            let refused = std::panic::catch_unwind(|| disjoint(&mut slabs(), &wanted).len());
            assert!(refused.is_err(), "{wanted:?}");
        }
    }
}
