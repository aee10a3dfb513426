//! What tiers an engine has, and what they did.
use super::events;
use super::generations::{GENERATIONS_BYTES, UNTOLD_BYTES};
use super::kept::KEPT_BYTES;
use super::names::NAME_BYTES;
use super::parts::{BlockParts, Part};
use super::recent::{MOST, Recent};
use super::writes::WRITE_BYTES;
use kvist_device::ArenaUsage;
use kvist_scheduler::{Recompute, Tier, TierCounters, Tiers, WindowBytes, Write};
use kvist_store::{BlockKey, BlockStore, Counts, Usage};
use std::sync::Arc;
use std::time::Duration;

/// One tier: a store, and how fast it is at first. What loads take is measured from then on.
#[derive(Clone)]
pub struct TierStore {
    pub store: Arc<dyn BlockStore>,
    /// How fast it is read.
    pub bytes_per_s: u64,
    /// Time until the first byte of a read.
    pub latency: Duration,
}

/// Tiers below the KV cache.
#[derive(Clone)]
pub struct TierConfig {
    /// Fastest first.
    pub stores: Vec<TierStore>,
    /// Identifies everything that K and V depend on besides the tokens and the salt: the model, how its weights are
    /// computed with, the storage of K and V. Blocks are only found by engines with the same one. An engine adds the order in
    /// which its cache stores the channels of keys, if it is not their own (`t4-o`).
    pub fingerprint: Vec<u8>,
    pub write: Write,
    /// Bytes that may be on their way from the tiers at a time, as many that may be copied out of the cache, and as many that may wait to
    /// be written to each tier.
    pub max_bytes_in_flight: u64,
    /// How long a request waits for a lookup, and for a load beyond four times its estimate.
    pub grace: Duration,
    /// Load all that a tier has, even where computing is expected to be faster.
    pub always: bool,
    /// Memory of the host to lock in place for blocks of the first tier, a store in RAM, where the cache is on a device that copies from and
    /// to such memory by itself; elsewhere it means nothing. All fit if it is the store's capacity and twice
    /// [`max_bytes_in_flight`](Self::max_bytes_in_flight): of blocks that are copied out of the cache, and of those that wait to be
    /// written to the store. A block that does not fit is in ordinary memory. 0 for none.
    pub pinned_bytes: u64,
    /// Where the stores' tasks run; `None` starts a runtime of two threads that ends with the engine. Stores that were opened on a
    /// runtime need that one.
    pub runtime: Option<tokio::runtime::Handle>,
}

impl TierConfig {
    /// Of so many blocks is remembered that tiers have them which do not tell that themselves.
    pub const REMEMBERED_BLOCKS: u64 = MOST as u64;

    /// A quarter of a second.
    pub const GRACE: Duration = Duration::from_millis(250);

    /// Writes through, 256 MiB in flight, [`GRACE`](Self::GRACE), and loads what is expected to be faster.
    pub fn new(stores: Vec<TierStore>, fingerprint: Vec<u8>) -> Self {
        TierConfig {
            stores,
            fingerprint,
            write: Write::Through,
            max_bytes_in_flight: 256 << 20,
            grace: Self::GRACE,
            always: false,
            pinned_bytes: 0,
            runtime: None,
        }
    }

    /// Memory of the host that so many tiers below a cache of so many blocks take to know what is where, at most: names of cached blocks,
    /// and which of them no tier has; what was written, dropped, kept and deleted; and for each of `n_in_flight` objects that may wait to
    /// be written to a tier, the task that does it. The bytes of these objects are not part of it, nor the stores' own memory, nor what
    /// [events](Self::event_bytes) and [requests](Self::request_bytes) need.
    pub fn bookkeeping_bytes(n_tiers: usize, n_blocks: u64, n_in_flight: u64) -> u64 {
        let of_writes = WRITE_BYTES.saturating_mul(n_in_flight);
        let of_tiers = UNTOLD_BYTES.saturating_add(of_writes).saturating_mul(n_tiers as u64);
        let of_block = NAME_BYTES + Tiers::UNSAVED_BYTES;
        let of_blocks = of_block.saturating_mul(n_blocks).saturating_add(4096);
        [2 * Recent::<u8>::BYTES, KEPT_BYTES, GENERATIONS_BYTES, of_tiers, of_blocks]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// Memory that [events of tiers](super::TierEvent) take at most, besides that. `n_told`: blocks that fit into stores which tell
    /// themselves what they have; what others have is known of as many as are remembered. `n_blocks`: of the cache.
    pub fn event_bytes(n_told: u64, n_blocks: u64, block_tokens: u32) -> u64 {
        events::bytes(n_told, n_blocks, block_tokens)
    }

    /// Memory that a request of so many tokens takes at most, for what the tiers have of its prompt, and while they are asked: a copy of
    /// its tokens, and the keys of its blocks for each tier.
    pub fn request_bytes(n_tiers: usize, n_tokens: u64, block_tokens: u32) -> u64 {
        let of_block = size_of::<BlockKey>() as u64 * (2 + n_tiers as u64) + 4 * WINDOWS;
        let of_blocks = of_block.saturating_mul(n_tokens.div_ceil(block_tokens.max(1).into()));
        n_tokens.saturating_mul(size_of::<u32>() as u64).saturating_add(of_blocks).saturating_add(4096)
    }

    /// What the scheduler has to know. `multiply_adds`: of a token, and of a token and a position that it sees.
    pub(crate) fn scheduled(&self, block_parts: &BlockParts, multiply_adds: (f64, f64)) -> Tiers {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let tier = |tier: &TierStore| Tier {
            name: tier.store.name().to_owned(),
            bytes_per_s: tier.bytes_per_s.max(1),
            latency_ns: nanoseconds(tier.latency),
        };
        let window = |part: &Part| WindowBytes {
            tokens: part.visibility.window.unwrap_or(u32::MAX),
            block_bytes: part.bytes as u64,
        };
        Tiers {
            list: self.stores.iter().map(tier).collect(),
            block_bytes: block_parts.block_bytes() as u64,
            windows: block_parts.windows().map(|(_, part)| window(part)).collect(),
            write: self.write,
            max_load_bytes: self.max_bytes_in_flight,
            max_store_bytes: self.max_bytes_in_flight,
            recompute: Recompute {
                per_token_ns: multiply_adds.0 * GUESSED_NS,
                per_pair_ns: multiply_adds.1 * GUESSED_NS,
                learn: true,
            },
            grace_ns: nanoseconds(self.grace),
            always: self.always,
        }
    }
}

/// Layer groups with windows that a model has at most, in practice.
const WINDOWS: u64 = 2;

/// Of a multiply-add, until the first prompts have been measured: a few cores.
const GUESSED_NS: f64 = 0.01;

/// What the tiers did, and what they hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierStats {
    pub counters: TierCounters,
    /// Bytes on their way from and to the tiers.
    pub load_bytes: u64,
    pub store_bytes: u64,
    /// Pinned memory of blocks ([`TierConfig::pinned_bytes`]); of no bytes if the system has refused it, `None` if it is not asked for.
    pub pinned: Option<ArenaUsage>,
    /// Fastest first.
    pub stores: Vec<StoreStats>,
}

/// One store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreStats {
    pub name: String,
    pub usage: Usage,
    /// Operations that failed.
    pub errors: u64,
    /// Blocks, and parts of blocks in windows, that were not written to it because more than
    /// [`max_bytes_in_flight`](TierConfig::max_bytes_in_flight) waited for it already, or because the blocks before them were not.
    pub unwritten_blocks: u64,
    /// What the store itself counts.
    pub counts: Counts,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::tiers::names::Name;
    use crate::serving::tiers::task::Stores;
    use crate::serving::tiers::test_store::{TestStore, config};
    use crate::serving::tiers::writes::InText;
    use kvist_store::{KeyChain, Rank};
    use std::collections::HashMap;

    /// Everything that is remembered, at its bound, against what an allocator counts.
    #[test]
    fn the_bound_of_the_bookkeeping_holds() {
        let keys = KeyChain::root(b"a model", "").keys(&(0..MOST as u32 + 100).collect::<Vec<_>>(), 1);
        let mut stores = None;
        let allocated = allocation_counter::measure(|| {
            let full = Arc::new(Stores::new(&config([TestStore::new(0)])));
            full.fill(&keys);
            stores = Some(full);
        });
        let bound = TierConfig::bookkeeping_bytes(0, 0, 0);
        let bytes = allocated.bytes_current as u64;
        assert!((bound / 4..bound).contains(&bytes), "{bytes} of {bound}");
        stores.take();
        let allocated = allocation_counter::measure(|| {
            let full = Arc::new(Stores::new(&config([TestStore::new(0)])));
            full.fill_untold();
            stores = Some(full);
        });
        let bound = UNTOLD_BYTES;
        let bytes = allocated.bytes_current as u64;
        assert!((bound / 4..bound).contains(&bytes), "{bytes} of {bound}");
        drop(stores);
    }

    #[test]
    fn the_bound_of_the_names_holds() {
        for n in [1_000u32, 14_337, 60_000] {
            let mut names = None;
            let allocated = allocation_counter::measure(|| {
                let key = KeyChain::root(b"a model", "").next(&[1]);
                let name =
                    |i| (i, Name { hash: 0, key, parent: Some(key), note: key, generation: 0, told: None });
                names = Some((0..n).map(name).fold(HashMap::new(), |mut names, (i, name)| {
                    names.insert(i, name);
                    names
                }));
            });
            let bound = NAME_BYTES * u64::from(n) + 4096;
            let bytes = allocated.bytes_current as u64;
            assert!((bound / 3..bound).contains(&bytes), "{n} names: {bytes} of {bound}");
            drop(names);
        }
    }

    impl Stores {
        fn fill(self: &Arc<Self>, keys: &[BlockKey]) {
            for &key in keys {
                self.remember(key, 0);
                // What has no room is remembered as dropped.
                assert!(
                    self.may_write_to(
                        std::iter::once(0),
                        key,
                        1 << 40,
                        Some(InText { block: key, parent: None })
                    )
                    .is_empty()
                );
                self.next_generation(key);
                self.keep((key, u64::MAX), &[key], Rank::default(), Duration::from_secs(3600));
            }
        }
    }
}
