//! Blocks that are removed while they are written: a write that ends after the removal would bring its block back.
//!
//! A task that writes a block, or reads it to write it elsewhere, has a [`Ticket`] from before its bytes are read until after they are
//! written. A removal is seen by the tickets of its block, and their writes are undone.
use kvist_store::BlockKey;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Removals {
    /// Of blocks that have tickets.
    blocks: Mutex<HashMap<BlockKey, Block>>,
}

#[derive(Default)]
struct Block {
    tickets: u32,
    removals: u64,
}

/// The permission to write a block, as long as it is not removed.
pub struct Ticket {
    removals: Arc<Removals>,
    pub key: BlockKey,
    /// How often it had been removed.
    before: u64,
}

impl Removals {
    fn lock(&self) -> MutexGuard<'_, HashMap<BlockKey, Block>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn ticket(self: &Arc<Self>, key: BlockKey) -> Ticket {
        let mut blocks = self.lock();
        let block = blocks.entry(key).or_default();
        block.tickets += 1;
        Ticket { removals: self.clone(), key, before: block.removals }
    }

    /// What is being written under this key is to be removed. Call it before and after the removal itself.
    pub fn remove(&self, key: &BlockKey) {
        if let Some(block) = self.lock().get_mut(key) {
            block.removals += 1;
        }
    }
}

impl Ticket {
    pub fn is_removed(&self) -> bool {
        self.removals.lock().get(&self.key).is_some_and(|block| block.removals != self.before)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut blocks = self.removals.lock();
        if let Some(block) = blocks.get_mut(&self.key) {
            block.tickets -= 1;
            if block.tickets == 0 {
                blocks.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_sees_removals_since_it_was_given() {
        let removals = Arc::new(Removals::default());
        let [key, other] = [1, 2].map(|byte| BlockKey::from_bytes([byte; 32]));
        removals.remove(&key);
        let (first, another) = (removals.ticket(key), removals.ticket(other));
        assert!(!first.is_removed());
        removals.remove(&key);
        let second = removals.ticket(key);
        assert_eq!([&first, &second, &another].map(Ticket::is_removed), [true, false, false]);
        drop(first);
        removals.remove(&key);
        assert!(second.is_removed());
        drop((second, another));
        assert!(removals.lock().is_empty());
    }
}
