//! The blocks that are being read, and which of them have changed since.
//!
//! A block that is used in a region that goes soon is written again. What was read must not take the place of what was
//! put, or removed, while it was read.
use crate::BlockKey;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Only keys that are being read now are here.
#[derive(Default)]
pub(super) struct Reads(Mutex<HashMap<BlockKey, Read>>);

#[derive(Default)]
struct Read {
    n_readers: usize,
    /// Since the first of these readers began: another one, that began later, may have the new block.
    changed: bool,
}

/// One reader of a block, until it is dropped.
pub(super) struct Reading<'a> {
    reads: &'a Reads,
    pub key: BlockKey,
}

impl Reads {
    /// No code that can panic runs under the lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<BlockKey, Read>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin(&self, key: &BlockKey) -> Reading<'_> {
        self.lock().entry(*key).or_default().n_readers += 1;
        Reading { reads: self, key: *key }
    }

    /// A block was put or removed.
    pub fn note_change(&self, key: &BlockKey) {
        if let Some(read) = self.lock().get_mut(key) {
            read.changed = true;
        }
    }
}

impl Reading<'_> {
    /// Whether what was read is certainly what is there.
    pub fn is_current(&self) -> bool {
        self.reads.lock().get(&self.key).is_some_and(|read| !read.changed)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut reads = self.reads.lock();
        if let Some(read) = reads.get_mut(&self.key) {
            read.n_readers -= 1;
            if read.n_readers == 0 {
                reads.remove(&self.key);
            }
        }
    }
}
