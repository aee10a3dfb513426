//! What tiers keep before other blocks: retained prompts.
//!
//! A tier may get a block of a retained prompt later: when the cache gives it up, or when a slower tier is read. So what is kept is
//! remembered here by key, and a store is told after it has written a block.
use super::TierDriver;
use super::parts::window_key;
use super::recent::Recent;
use super::task::{OneStore, Stores};
use kvist_scheduler::KeepOrder;
use kvist_store::{BlockKey, Keep, Rank};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Kept blocks by key, as far as they are remembered. The stores are told while it is locked, so that they hear of everything in the
/// order in which it is remembered here.
#[derive(Default)]
pub struct Kept(Mutex<Recent<Option<OfSalt>>>);

#[derive(Clone, Copy)]
pub(super) struct OfSalt {
    note: BlockKey,
    keep: Keep<Instant>,
}

/// That are remembered of kept blocks.
pub(super) const KEPT_BYTES: u64 = Recent::<Option<OfSalt>>::BYTES;

impl OfSalt {
    /// The time that is left, if there is any.
    fn within(&self) -> Option<Duration> {
        match self.keep.until {
            None => Some(Duration::MAX),
            Some(until) => {
                Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
            }
        }
    }
}

impl Kept {
    /// No method leaves it half changed, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Recent<Option<OfSalt>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stores {
    /// Keeps blocks of a salt, also those that tiers get later. `generation`: that of their keys. After it nothing asks for them, and
    /// nothing is kept.
    pub(super) fn keep(
        &self,
        (note, generation): (BlockKey, u64),
        keys: &[BlockKey],
        rank: Rank,
        within: Duration,
    ) {
        let of_salt = OfSalt { note, keep: Keep { rank, until: Instant::now().checked_add(within) } };
        let mut kept = self.kept.lock();
        if generation < self.generation(&note) {
            return;
        }
        let mut forgotten = Vec::new();
        for key in keys {
            forgotten.extend(kept.add(*key));
            let Some(before) = kept.get_mut(key) else { continue };
            // As a store decides.
            if before.is_none_or(|before| before.within().is_none() || of_salt.keep > before.keep) {
                *before = Some(of_salt);
            }
        }
        self.each(|one| {
            one.store.keep(keys, rank, within);
            // A deletion would not find them.
            one.store.release(&forgotten);
        });
    }

    /// A tier has a block from now on.
    pub(super) fn keep_written(&self, one: &OneStore, key: &BlockKey) {
        let kept = self.kept.lock();
        let of_salt = kept.get(key).copied().flatten();
        if let Some((of_salt, within)) = of_salt.and_then(|of_salt| Some((of_salt, of_salt.within()?))) {
            one.store.keep(&[*key], of_salt.keep.rank, within);
        }
    }

    /// Nothing asks for the blocks of a salt any more.
    pub(super) fn release(&self, note: &BlockKey) {
        let is_of_it = |kept: &mut Option<OfSalt>| kept.take_if(|of_salt| of_salt.note == *note).is_some();
        let mut kept = self.kept.lock();
        let keys = kept.keys_where(is_of_it);
        self.each(|one| one.store.release(&keys));
    }
}

impl TierDriver {
    /// Keeps the blocks of a retained prompt.
    pub(super) fn keep(&self, order: &KeepOrder) {
        let with_parts = |key: BlockKey| {
            let parts = self.block_parts.windows().map(move |(group, _)| window_key(&key, group));
            std::iter::once(key).chain(parts)
        };
        let note = self.note_of(&order.salt);
        let generation = self.stores.generation(&note);
        let names = order.blocks.iter().filter_map(|block| self.name(block));
        // What was deleted while the request ran is not asked for any more.
        let names = names.filter(|name| name.generation >= generation).map(|name| name.key);
        let keys: Vec<BlockKey> = names.flat_map(with_parts).collect();
        let rank = Rank { pin: order.retention.pin, priority: order.retention.priority };
        self.stores.keep((note, generation), &keys, rank, Duration::from_nanos(order.retention.ttl_ns));
    }

    /// Keeps nothing of a salt any more.
    pub(super) fn release(&self, note: &BlockKey) {
        self.stores.release(note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::tiers::recent::MOST;
    use crate::serving::tiers::test_store::{TestStore, config, keys};
    use crate::serving::tiers::writes::put;
    use kvist_store::{BlockStore, Bytes, KeyChain, Ram};
    use std::sync::Arc;

    const HOUR: Duration = Duration::from_secs(3600);
    const PIN: Rank = Rank { pin: true, priority: 0 };

    /// A tier with room for four blocks, and keys of many.
    fn tier() -> (Arc<Ram>, Arc<Stores>, Vec<BlockKey>) {
        let ram = Arc::new(Ram::new(4 * (512 + 88 + 100)));
        let mut config = config([TestStore::new(0)]);
        config.stores[0].store = ram.clone();
        (ram, Arc::new(Stores::new(&config)), keys(20))
    }

    async fn write(stores: &Arc<Stores>, keys: &[BlockKey]) {
        for &key in keys {
            let writing = stores.may_write(0, key, 100).unwrap();
            put(writing, Bytes::from(vec![7; 100])).await;
        }
    }

    async fn has(ram: &Ram, key: BlockKey) -> bool {
        ram.lookup(&[key], Duration::MAX).await.unwrap() == 1
    }

    #[tokio::test]
    async fn a_tier_keeps_what_it_has_and_what_it_gets() {
        let (ram, stores, keys) = tier();
        write(&stores, &keys[..1]).await;
        stores.keep((keys[19], 0), &keys[..2], PIN, HOUR);
        write(&stores, &keys[1..10]).await;
        assert!(has(&ram, keys[0]).await && has(&ram, keys[1]).await && !has(&ram, keys[2]).await);
        // Of another salt.
        stores.release(&keys[18]);
        write(&stores, &keys[10..14]).await;
        assert!(has(&ram, keys[0]).await);
        stores.release(&keys[19]);
        write(&stores, &keys[14..18]).await;
        assert!(!has(&ram, keys[0]).await && !has(&ram, keys[1]).await);
        // It is forgotten for blocks that come later, too.
        write(&stores, &keys[..1]).await;
        assert!(stores.kept.lock().get(&keys[0]).copied().flatten().is_none());
    }

    #[tokio::test]
    async fn what_is_over_is_not_kept() {
        let (ram, stores, keys) = tier();
        stores.keep((keys[19], 0), &keys[..1], PIN, Duration::ZERO);
        write(&stores, &keys[..5]).await;
        assert!(!has(&ram, keys[0]).await);
        // A smaller rank does not take the place of a larger one, unless that is over.
        let low = Rank { pin: false, priority: 3 };
        stores.keep((keys[19], 0), &keys[..1], low, HOUR);
        stores.keep((keys[19], 0), &keys[..1], PIN, HOUR);
        stores.keep((keys[19], 0), &keys[..1], low, HOUR);
        assert_eq!(stores.kept.lock().get(&keys[0]).copied().flatten().map(|kept| kept.keep.rank), Some(PIN));
    }
    /// Regression: it stayed kept, and no deletion found it.
    #[tokio::test]
    async fn what_is_not_remembered_is_not_kept() {
        let (ram, stores, keys) = tier();
        write(&stores, &keys[..1]).await;
        stores.keep((keys[19], 0), &keys[..1], PIN, HOUR);
        let others = KeyChain::root(b"another model", "").keys(&(0..MOST as u32).collect::<Vec<_>>(), 1);
        stores.keep((keys[18], 0), &others[1..], PIN, HOUR);
        write(&stores, &keys[1..9]).await;
        assert!(has(&ram, keys[0]).await);
        stores.keep((keys[18], 0), &others[..1], PIN, HOUR);
        write(&stores, &keys[9..17]).await;
        assert!(!has(&ram, keys[0]).await);
    }

    /// Regression: it stayed kept here, where nothing asked for it any more.
    #[tokio::test(start_paused = true)]
    async fn what_another_process_deletes_is_not_kept() {
        let (ram, stores, keys) = tier();
        let note = keys[19];
        write(&stores, &keys[..1]).await;
        stores.keep((note, 0), &keys[..2], PIN, HOUR);
        ram.put(note, Bytes::copy_from_slice(&5u64.to_le_bytes()), None).await.unwrap();
        assert!(stores.read_note(0, note, stores.lookup_times()).await);
        assert_eq!(stores.generation(&note), 5);
        // It comes too late.
        stores.keep((note, 4), &keys[..2], PIN, HOUR);
        write(&stores, &keys[1..12]).await;
        assert!(!has(&ram, keys[0]).await && !has(&ram, keys[1]).await);
        stores.keep((note, 5), &keys[11..12], PIN, HOUR);
        write(&stores, &keys[2..11]).await;
        assert!(has(&ram, keys[11]).await);
    }

    #[tokio::test]
    async fn of_equal_ranks_the_later_end_counts() {
        let (_, stores, keys) = tier();
        let until = || stores.kept.lock().get(&keys[0]).copied().flatten().map(|kept| kept.keep.until);
        stores.keep((keys[19], 0), &keys[..1], PIN, 2 * HOUR);
        let later = until();
        stores.keep((keys[19], 0), &keys[..1], PIN, HOUR);
        assert_eq!(until(), later);
        stores.keep((keys[19], 0), &keys[..1], PIN, Duration::MAX);
        assert_eq!(until(), Some(None));
    }
}
