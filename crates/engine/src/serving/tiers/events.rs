//! What the tiers have of one salt's blocks, told as it changes: for the routers of a fleet.
//!
//! A store in RAM tells itself what comes and goes ([`BlockStore::watch`](kvist_store::BlockStore::watch)). Of other stores this is
//! known as far as the engine remembers what it has written and read there: a block is told to be gone when a read or a lookup does
//! not find it, when it is deleted, and when it is remembered no more.
//!
//! Stores know keys. What a key stands for is known while the block is cached or on its way to a tier, and from then on for as long as
//! a tier has it.
use super::TierDriver;
use super::recent::MOST;
use super::task::Stores;
use kvist_scheduler::CachedTokens;
use kvist_store::BlockKey;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A block of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierBlock {
    /// The hash by which [`PrefixEvent`](kvist_cache::PrefixEvent)s name it.
    pub hash: u64,
    /// That of the block before it; `None` for a text's first.
    pub parent: Option<u64>,
    /// Its own, not those before.
    pub tokens: Vec<u32>,
    /// Of its salt. Blocks of earlier ones are never found again.
    pub generation: u64,
}

/// What happened to a block in a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierEvent {
    /// The tier with this number, by [`TierConfig::stores`](super::TierConfig::stores), has it.
    Stored { tier: usize, block: Arc<TierBlock> },
    /// It has it no more.
    Removed { tier: usize, hash: u64 },
}

/// Hears of the events, in order. Called on whatever thread, with locks held: it must be quick, and must not use the engine.
pub type TellTier = Box<dyn Fn(TierEvent) + Send>;

/// Nothing before [`TierDriver::watch`].
#[derive(Default)]
pub(super) struct TierEvents(Mutex<Option<Watched>>);

struct Watched {
    tell: TellTier,
    salt: Arc<str>,
    note: BlockKey,
    /// Of the salt. Blocks of earlier ones are not told.
    generation: u64,
    /// The tiers whose stores tell themselves what they have, a bit for each.
    exact: u8,
    /// What the tiers have: of exact ones all that they have room for, of others what is [remembered](super::recent) of them.
    held: HashMap<BlockKey, Held>,
    /// What keys stand for, as long as a name or a write needs it. At most twice as many as are needed.
    named: HashMap<BlockKey, Weak<TierBlock>>,
    /// With more names, those that nothing needs any more are dropped.
    max_named: usize,
}

#[derive(Default)]
struct Held {
    /// The tiers that have it, a bit for each.
    tiers: u8,
    /// What it is, if that is known and it was told.
    told: Option<Arc<TierBlock>>,
}

const MIN_NAMED: usize = 1024;

/// See [`TierConfig::event_bytes`](super::TierConfig::event_bytes).
pub(super) fn bytes(n_told: u64, n_blocks: u64, block_tokens: u32) -> u64 {
    // Entries of a hash table that doubles its places when seven eighths are taken.
    let table = |n: u64, entry: usize| n.saturating_mul(16 * (entry as u64 + 1)).div_ceil(7);
    let n_held = n_told.saturating_add(MOST as u64);
    let n_named = n_held.saturating_add(n_blocks);
    let tokens = u64::from(block_tokens).saturating_mul(size_of::<u32>() as u64);
    let block = tokens.saturating_add(size_of::<TierBlock>() as u64 + ALLOCATED_BYTES);
    [
        table(n_held, size_of::<(BlockKey, Held)>()),
        table(
            n_named.saturating_mul(2).saturating_add(MIN_NAMED as u64),
            size_of::<(BlockKey, Weak<TierBlock>)>(),
        ),
        n_named.saturating_mul(block),
        // A name that nothing needs any more holds the memory of its block, without the tokens.
        n_named.saturating_mul(size_of::<TierBlock>() as u64 + ALLOCATED_BYTES),
    ]
    .into_iter()
    .fold(0, u64::saturating_add)
}

/// Counters of an `Arc`, and what an allocator adds to it and to the list of its tokens.
const ALLOCATED_BYTES: u64 = 16 + 2 * 16;

impl Watched {
    fn change(&mut self, key: &BlockKey, tier: usize, is_here: bool) {
        let bit = 1 << tier;
        if is_here {
            let generation = self.generation;
            let held = self.held.entry(*key).or_default();
            if held.tiers & bit != 0 {
                return;
            }
            held.tiers |= bit;
            match &held.told {
                Some(block) => (self.tell)(TierEvent::Stored { tier, block: block.clone() }),
                None => {
                    let known = self.named.get(key).and_then(Weak::upgrade);
                    held.name(known.filter(|block| block.generation >= generation), &self.tell);
                }
            }
        } else if let Some(held) = self.held.get_mut(key).filter(|held| held.tiers & bit != 0) {
            held.tiers &= !bit;
            if let Some(block) = &held.told {
                (self.tell)(TierEvent::Removed { tier, hash: block.hash });
            }
            if held.tiers == 0 {
                self.held.remove(key);
            }
        }
    }
}

impl Held {
    /// Tells what it is.
    fn name(&mut self, block: Option<Arc<TierBlock>>, tell: &TellTier) {
        if let Some(block) = &block {
            self.each_tier(|tier| tell(TierEvent::Stored { tier, block: block.clone() }));
        }
        self.told = block;
    }

    fn each_tier(&self, act: impl FnMut(usize)) {
        (0..u8::BITS as usize).filter(|tier| self.tiers & (1 << tier) != 0).for_each(act);
    }
}

impl TierEvents {
    /// No method leaves it half changed, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Option<Watched>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine has written a block to a tier, has read it there, or knows that it is gone.
    pub fn noticed(&self, key: &BlockKey, tier: usize, is_here: bool) {
        if let Some(watched) = &mut *self.lock()
            && watched.exact & (1 << tier) == 0
        {
            watched.change(key, tier, is_here);
        }
    }

    /// What a store itself tells.
    fn told(&self, key: &BlockKey, tier: usize, is_here: bool) {
        if let Some(watched) = &mut *self.lock() {
            watched.change(key, tier, is_here);
        }
    }

    /// Whether a salt's blocks are watched.
    fn wants(&self, salt: &str) -> bool {
        self.lock().as_ref().is_some_and(|watched| *watched.salt == *salt)
    }

    /// A key stands for this block, for as long as anything else refers to that.
    fn name(&self, key: &BlockKey, block: &Arc<TierBlock>) {
        let mut watched = self.lock();
        let generation = block.generation;
        let Some(watched) = watched.as_mut().filter(|watched| generation >= watched.generation) else {
            return;
        };
        if watched.named.len() >= watched.max_named {
            watched.named.retain(|_, block| block.strong_count() > 0);
            watched.max_named = MIN_NAMED.max(2 * watched.named.len());
        }
        watched.named.insert(*key, Arc::downgrade(block));
        if let Some(held) = watched.held.get_mut(key).filter(|held| held.told.is_none()) {
            held.name(Some(block.clone()), &watched.tell);
        }
    }

    /// Blocks of earlier generations are gone.
    pub fn begin_generation(&self, note: &BlockKey, generation: u64) {
        let mut watched = self.lock();
        let Some(watched) = watched.as_mut().filter(|watched| watched.note == *note) else { return };
        if generation <= watched.generation {
            return;
        }
        watched.generation = generation;
        for held in watched.held.values_mut() {
            if let Some(block) = held.told.take_if(|block| block.generation < generation) {
                held.each_tier(|tier| (watched.tell)(TierEvent::Removed { tier, hash: block.hash }));
            }
        }
    }
}

impl TierDriver {
    /// Tells what the tiers have of this salt's blocks, from now on. Blocks that are stored and not cached by then are told once they
    /// are cached again. Returns the names of the tiers' stores.
    pub fn watch(&mut self, salt: &str, tell: TellTier) -> Vec<String> {
        let note = self.note_of(salt);
        let watched = Watched {
            tell,
            salt: salt.into(),
            note,
            generation: self.stores.generation(&note),
            exact: 0,
            held: HashMap::new(),
            named: HashMap::new(),
            max_named: MIN_NAMED,
        };
        *self.stores.events.lock() = Some(watched);
        let mut names = Vec::new();
        for tier in 0..self.stores.n() {
            let Some(one) = self.stores.one(tier) else { continue };
            names.push(one.store.name().to_owned());
            // A store must not keep itself alive.
            let stores: Weak<Stores> = Arc::downgrade(&self.stores);
            let tells = one.store.watch(Box::new(move |key, is_here| {
                if let Some(stores) = stores.upgrade() {
                    stores.events.told(key, tier, is_here);
                }
            }));
            if let Some(watched) = self.stores.events.lock().as_mut().filter(|_| tells) {
                watched.exact |= 1 << tier;
            }
        }
        names
    }

    /// What the `i`-th of these blocks is called in events, if they are watched. They are told from [`tell_names`](Self::tell_names)
    /// on.
    pub(super) fn told_name(
        &mut self,
        cached: &CachedTokens,
        i: usize,
        key: &BlockKey,
        generation: u64,
    ) -> Option<Arc<TierBlock>> {
        let block_tokens = self.block_parts.block_tokens as usize;
        if !self.stores.events.wants(&cached.salt) {
            return None;
        }
        let n_before = (cached.tokens.len() / block_tokens).checked_sub(cached.blocks.len())? + i;
        let parent = match i.checked_sub(1) {
            Some(before) => cached.blocks.get(before),
            None => cached.parent.as_ref(),
        };
        let parent = parent.map(|parent| parent.hash);
        if parent.is_some() != (n_before > 0) {
            return None;
        }
        let tokens = cached.tokens.get(n_before * block_tokens..(n_before + 1) * block_tokens)?.to_vec();
        let block = Arc::new(TierBlock { hash: cached.blocks.get(i)?.hash, parent, tokens, generation });
        self.new_names.push((*key, block.clone()));
        Some(block)
    }

    /// Call it after the events of the cache that say that the blocks were cached: a router drops a block whose parent it has
    /// not heard of, and a tier may be faster than the end of a step.
    pub fn tell_names(&mut self) {
        for (key, block) in self.new_names.drain(..) {
            self.stores.events.name(&key, &block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_store::KeyChain;

    /// What a store that tells itself has, and what is cached, at the bound, against what an allocator counts.
    #[test]
    fn the_bound_of_the_events_holds() {
        const BLOCK: usize = 16;
        let (n_held, n_cached) = (MOST + 5000, 9000);
        let keys =
            KeyChain::root(b"a model", "").keys(&(0..(n_held + n_cached) as u32).collect::<Vec<_>>(), 1);
        let mut kept = None;
        let allocated = allocation_counter::measure(|| {
            let watched = Watched {
                tell: Box::new(|_| ()),
                salt: "".into(),
                note: keys[0],
                generation: 0,
                exact: 1,
                held: HashMap::new(),
                named: HashMap::new(),
                max_named: MIN_NAMED,
            };
            let events = TierEvents(Mutex::new(Some(watched)));
            let mut cached = Vec::new();
            for (i, key) in keys.iter().enumerate() {
                // With names that nothing needs any more in between.
                let tokens = vec![7; BLOCK];
                let block = Arc::new(TierBlock { hash: i as u64, parent: None, tokens, generation: 0 });
                events.name(&KeyChain::after(*key).next(&[1]), &Arc::new(TierBlock::clone(&block)));
                events.name(key, &block);
                if i < n_held { events.told(key, 0, true) } else { cached.push(block) }
            }
            kept = Some((events, cached));
        });
        let bound = bytes((n_held - MOST) as u64, n_cached as u64, BLOCK as u32);
        let measured = allocated.bytes_current as u64;
        assert!((bound / 3..bound).contains(&measured), "{measured} of {bound}");
        drop(kept);
    }
}
