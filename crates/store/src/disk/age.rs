//! Which region is overwritten next: the one that was written the longest ago, by whichever process.
//!
//! foyer's own FIFO knows only the order in which regions were filled since it was opened, and takes those that it finds then in any
//! order. But it numbers all that it writes and goes on with the numbers when it is opened again, and a region begins with an index that
//! has them.
use crate::regions::PAGE;
use foyer::{EvictionInfo, EvictionPicker};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use twox_hash::XxHash64;

/// The number of what a region begins with, or None if it is empty or its index is damaged: then foyer takes it for empty. An index has a
/// checksum of what follows it, the number of its entries in 4 bytes, and the entries: a hash, the number, and where the block is.
fn first_number(page: &[u8]) -> Option<u64> {
    let be = |at: usize| page.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes);
    let (checksum, number) = (be(0)?, be(20)?);
    let is_whole = page.len() as u64 == PAGE && XxHash64::oneshot(0, &page[8..]) == checksum;
    is_whole.then_some(number)
}

/// The age of a region: the smaller, the longer ago it was written. None if there is nothing in it, or no such file.
pub(super) fn age(region: &Path) -> io::Result<Option<u64>> {
    let mut page = Vec::new();
    match File::open(region) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?.take(PAGE).read_to_end(&mut page)?,
    };
    Ok(first_number(&page))
}

/// Overwrites the oldest region first.
#[derive(Debug)]
pub(super) struct OldestFirst {
    /// Of the regions that were found when the store was opened, by their number. None once they are written again.
    found: Vec<Option<u64>>,
    queue: VecDeque<u32>,
    /// So many of the next to go, and of the empty ones, are old: what is read from there is written again.
    n_old: usize,
}

impl OldestFirst {
    pub fn new(found: Vec<Option<u64>>, n_old: usize) -> OldestFirst {
        OldestFirst { found, queue: VecDeque::new(), n_old }
    }

    fn found(&self, region: u32) -> Option<u64> {
        self.found.get(region as usize).copied().flatten()
    }

    fn push(&mut self, region: u32) {
        let younger = |other: &u32| self.found(*other) > self.found(region);
        let at = self.found(region).and_then(|_| self.queue.iter().position(younger));
        self.queue.insert(at.unwrap_or(self.queue.len()), region);
    }

    fn take(&mut self, region: u32) {
        self.queue.retain(|other| *other != region);
        if let Some(age) = self.found.get_mut(region as usize) {
            *age = None;
        }
    }
}

impl EvictionPicker for OldestFirst {
    fn pick(&mut self, info: EvictionInfo<'_>) -> Option<u32> {
        for region in self.queue.iter().take(self.n_old.saturating_sub(info.clean)) {
            if let Some(block) = info.blocks.get(*region as usize) {
                block.statistics().probation.store(true, Relaxed);
            }
        }
        self.queue.front().copied()
    }

    fn on_block_evictable(&mut self, _: EvictionInfo<'_>, region: u32) {
        self.push(region);
    }

    fn on_block_evict(&mut self, _: EvictionInfo<'_>, region: u32) {
        self.take(region);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_or_damaged_page_has_no_number() {
        let mut page = vec![0; PAGE as usize];
        assert_eq!(first_number(&page), None);
        page[27] = 3;
        let checksum = XxHash64::oneshot(0, &page[8..]);
        page[..8].copy_from_slice(&checksum.to_be_bytes());
        assert_eq!(first_number(&page), Some(3));
        for cut in [0, 7, 27, page.len() - 1] {
            assert_eq!(first_number(&page[..cut]), None);
        }
        for bit in [0, 70, 8 * 27, 8 * PAGE as usize - 1] {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(first_number(&page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn what_was_found_goes_by_age_and_before_all_that_is_written_later() {
        let mut picker = OldestFirst::new(vec![Some(40), None, Some(7), Some(90), Some(0)], 0);
        for region in [3, 0, 4, 2] {
            picker.push(region);
        }
        assert_eq!(picker.queue, [4, 2, 0, 3]);
        picker.take(4);
        picker.push(1);
        picker.push(4);
        assert_eq!(picker.queue, [2, 0, 3, 1, 4]);
    }
}
