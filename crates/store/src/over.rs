//! Stores that do some things otherwise than the store below them, and forward the rest.
use crate::{BlockKey, BlockStore, BoxFuture, Counts, Rank, StoreError, Usage, Watcher};
use bytes::Bytes;
use std::time::Duration;

/// A store over another one. It says what it does otherwise, and is a [`BlockStore`]: every method of that trait stands here too, and one
/// that is not overridden is forwarded.
///
/// ```
/// use kvist_store::{BlockKey, BlockStore, Ram, StoreOver};
/// /// A store that does not tell what it has.
/// struct Silent(Ram);
/// impl StoreOver for Silent {
///     fn below(&self) -> &dyn BlockStore {
///         &self.0
///     }
///     fn has(&self, _: &BlockKey) -> Option<bool> {
///         None
///     }
/// }
/// ```
pub trait StoreOver: Send + Sync {
    fn below(&self) -> &dyn BlockStore;

    fn name(&self) -> &str {
        self.below().name()
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        self.below().lookup(keys, within)
    }

    fn has(&self, key: &BlockKey) -> Option<bool> {
        self.below().has(key)
    }

    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.below().get(key)
    }

    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.below().put(key, bytes, ttl)
    }

    fn keep(&self, keys: &[BlockKey], rank: Rank, within: Duration) -> bool {
        self.below().keep(keys, rank, within)
    }

    fn release(&self, keys: &[BlockKey]) {
        self.below().release(keys);
    }

    fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        self.below().remove(key)
    }

    fn watch(&self, watcher: Watcher) -> bool {
        self.below().watch(watcher)
    }

    fn usage(&self) -> Usage {
        self.below().usage()
    }

    fn counts(&self) -> Counts {
        self.below().counts()
    }
}

impl<T: StoreOver> BlockStore for T {
    fn name(&self) -> &str {
        StoreOver::name(self)
    }
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        StoreOver::lookup(self, keys, within)
    }
    fn has(&self, key: &BlockKey) -> Option<bool> {
        StoreOver::has(self, key)
    }
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        StoreOver::get(self, key)
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        StoreOver::put(self, key, bytes, ttl)
    }
    fn keep(&self, keys: &[BlockKey], rank: Rank, within: Duration) -> bool {
        StoreOver::keep(self, keys, rank, within)
    }
    fn release(&self, keys: &[BlockKey]) {
        StoreOver::release(self, keys);
    }
    fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        StoreOver::remove(self, key)
    }
    fn watch(&self, watcher: Watcher) -> bool {
        StoreOver::watch(self, watcher)
    }
    fn usage(&self) -> Usage {
        StoreOver::usage(self)
    }
    fn counts(&self) -> Counts {
        StoreOver::counts(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KeyChain, Ram};
    use pollster::block_on;
    use std::sync::{Arc, Mutex};

    struct Plain(Ram);

    impl StoreOver for Plain {
        fn below(&self) -> &dyn BlockStore {
            &self.0
        }
    }

    /// No method is answered by the trait's own default.
    #[test]
    fn what_is_not_overridden_is_forwarded() {
        let plain = Plain(Ram::new(2 * (1000 + 88 + Ram::ENTRY_BYTES)));
        let store: &dyn BlockStore = &plain;
        let keys = KeyChain::root(b"a model", "").keys(&[1, 2, 3, 4], 1);
        let told = Arc::new(Mutex::new(Vec::new()));
        let tell = told.clone();
        assert!(store.watch(Box::new(move |key, is_here| tell.lock().unwrap().push((*key, is_here)))));
        let put = |key| block_on(store.put(key, vec![7; 1000].into(), None)).unwrap();
        put(keys[0]);
        assert!(store.keep(&keys[..1], Rank::default(), Duration::MAX));
        keys[1..3].iter().for_each(|key| put(*key));
        assert_eq!(
            keys.iter().map(|key| store.has(key)).collect::<Vec<_>>(),
            [true, false, true, false].map(Some)
        );
        store.release(&keys[..1]);
        put(keys[3]);
        assert_eq!(block_on(store.lookup(&keys, Duration::MAX)).unwrap(), 0, "it is kept no longer");
        assert_eq!(block_on(store.get(&keys[3])).unwrap().unwrap(), vec![7; 1000]);
        block_on(store.remove(&keys[3])).unwrap();
        assert_eq!(told.lock().unwrap().last(), Some(&(keys[3], false)));
        let (usage, counts) = (store.usage(), store.counts());
        assert_eq!((store.name(), usage.entries, counts.puts, counts.evicted), ("ram", Some(1), 4, 2));
        assert_eq!((usage, counts), (plain.0.usage(), plain.0.counts()));
    }
}
