//! Prompts that stay in the prefix index longer than the eviction policy would keep them.
//!
//! When a request with a [`Retention`] ends, the whole blocks of its prompt are pinned in the cache: they are hits, and no
//! victims of eviction. Retained prompts give way to requests, never the other way round. If memory is short, those whose
//! time is over go first, then those of the lowest priority. Pinned ones go last, and only for a request that could not be
//! served otherwise. Time is looked at only then: a block that nothing needs the room of may stay.
//!
//! At most half of the cache is retained. What exceeds that displaces what would go first, or is not retained.
//!
//! Tiers are told what is retained ([`Order::Keep`]), because they may have it when the cache has given it up.
use crate::entry::Lower;
use crate::log::Decision;
use crate::memory::StepTime;
use crate::scheduler::Scheduler;
use crate::tiers::{KeepOrder, Order};
use kvist_cache::{BlockId, Cache, MovePlan, Pin};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How long the cache keeps a prompt after its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// From the end of the request on, in nanoseconds of the driver's clock.
    pub ttl_ns: u64,
    /// A larger one is kept longer when memory is short.
    #[serde(default)]
    pub priority: u8,
    /// Kept before all priorities, and given up only for a request that could not be served otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pin: bool,
}

/// A prompt's blocks.
struct Retained {
    retention: Retention,
    until_ns: u64,
    salt: Arc<str>,
    /// The last block of the first layer group names the prompt.
    last: BlockId,
    n_tokens: u32,
    pin: Pinned,
}

/// The blocks of a retained prompt. They are not pinned while the cache plans to move blocks.
enum Pinned {
    Tight(Pin),
    Loose(Vec<BlockId>),
}

impl Pinned {
    fn end(self, cache: &mut Cache) {
        if let Pinned::Tight(pin) = self {
            cache.unpin(pin);
        }
    }
}

/// All retained prompts. There are few, so every operation walks over them.
#[derive(Default)]
pub(crate) struct Shelf {
    list: Vec<Retained>,
    n_tokens: u64,
}

/// More prompts are not retained at a time.
const MOST: usize = 4096;

impl Shelf {
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    fn take(&mut self, i: usize) -> Retained {
        let taken = self.list.remove(i);
        self.n_tokens -= u64::from(taken.n_tokens);
        taken
    }

    /// The one that gives way first: its index, and whether it is pinned.
    fn first(&self, now_ns: u64) -> Option<(usize, bool)> {
        let order = |one: &Retained| {
            let is_live = one.until_ns > now_ns;
            (is_live, is_live && one.retention.pin, one.retention.priority, one.until_ns)
        };
        let first = (0..self.list.len()).min_by_key(|&i| (order(&self.list[i]), i))?;
        Some((first, order(&self.list[first]).1))
    }
}

impl Shelf {
    /// Unpins all blocks, so that they may move. Nothing may be evicted until [`tighten`](Self::tighten).
    pub fn loosen(&mut self, cache: &mut Cache) {
        for one in &mut self.list {
            let loose = match &one.pin {
                Pinned::Tight(pin) => pin.blocks().to_vec(),
                Pinned::Loose(_) => continue,
            };
            std::mem::replace(&mut one.pin, Pinned::Loose(loose)).end(cache);
        }
    }

    /// Pins all blocks, after `moves`.
    pub fn tighten(&mut self, cache: &mut Cache, moves: Option<&MovePlan>) {
        let moved = moves.map(MovePlan::renamed).unwrap_or_default();
        let renamed = |block: &BlockId| moved.get(block).copied().unwrap_or(*block);
        for one in &mut self.list {
            one.last = renamed(&one.last);
            if let Pinned::Loose(blocks) = &one.pin {
                let blocks: Vec<BlockId> = blocks.iter().map(renamed).collect();
                let pin = cache.pin(&blocks).expect("the blocks were pinned, and nothing was evicted since");
                one.pin = Pinned::Tight(pin);
            }
        }
    }
}

impl Scheduler {
    /// Tokens of prompts that are retained, each prompt counted alone.
    pub fn retained_tokens(&self) -> u64 {
        self.shelf.n_tokens()
    }

    /// Retains the prompt of a request that ends, if it asks for that and its blocks are in the prefix index.
    pub(crate) fn retain(&mut self, now: StepTime, index: u32) {
        let entry = &self.entries[index as usize];
        let (Some(retention), Some(seq)) = (entry.retain, entry.seq) else { return };
        let block_tokens = self.memory.block_tokens();
        let most = self.memory.capacity() / 2;
        let mut blocks = self.memory.cache.cached_blocks(seq, 0);
        blocks.truncate((entry.prompt_tokens / block_tokens) as usize);
        if let Some(tiers) = &mut self.tiers {
            // Also what the cache has no room for.
            let (salt, blocks) = (entry.salt.clone(), blocks.clone());
            tiers.orders_mut().push(Order::Keep(KeepOrder { salt, retention, blocks }));
        }
        blocks.truncate(usize::try_from(most).unwrap_or(usize::MAX) / block_tokens as usize);
        let n_groups = self.memory.cache.n_groups();
        let whole = blocks.iter().take_while(|block| block.blocks.len() == n_groups).count();
        blocks.truncate(whole);
        let Some(last) = blocks.last().and_then(|block| block.blocks.first()).copied() else { return };
        let n_tokens = blocks.len() as u32 * block_tokens;
        let (salt, until_ns) = (entry.salt.clone(), now.now_ns.saturating_add(retention.ttl_ns));
        // The same prompt again: its time begins anew.
        if let Some(i) = self.shelf.list.iter().position(|one| one.last == last && one.salt == salt) {
            let before = self.shelf.take(i);
            before.pin.end(&mut self.memory.cache);
        }
        while self.shelf.list.len() >= MOST || self.shelf.n_tokens + u64::from(n_tokens) > most {
            let gives_way = self.shelf.first(now.now_ns).filter(|&(i, is_pinned)| {
                let there = &self.shelf.list[i];
                let is_over = there.until_ns <= now.now_ns;
                is_over || retention.pin || !is_pinned && there.retention.priority <= retention.priority
            });
            let Some((i, _)) = gives_way else { return };
            self.give_way(now, i);
        }
        let ids: Vec<BlockId> = blocks.into_iter().flat_map(|block| block.blocks).collect();
        let Ok(pin) = self.memory.cache.pin(&ids) else { return };
        self.shelf.n_tokens += u64::from(n_tokens);
        let pin = Pinned::Tight(pin);
        self.shelf.list.push(Retained { retention, until_ns, salt, last, n_tokens, pin });
    }

    fn give_way(&mut self, now: StepTime, i: usize) {
        let Retained { pin, n_tokens, .. } = self.shelf.take(i);
        pin.end(&mut self.memory.cache);
        self.blocked = None;
        // A call of `plan` that does nothing else has to be repeated by a replay, too.
        self.tiers.as_mut().into_iter().for_each(|tiers| tiers.changed = true);
        self.decide(now, Decision::Unretain { tokens: n_tokens });
    }

    /// Gives the room of one retained prompt back to eviction. `pinned`: of a pinned one too, if there is no other. Returns
    /// whether there was one.
    pub(crate) fn unretain(&mut self, now: StepTime, pinned: bool) -> bool {
        let first = self.shelf.first(now.now_ns).filter(|(_, is_pinned)| pinned || !is_pinned);
        first.map(|(i, _)| self.give_way(now, i)).is_some()
    }

    /// Drops what the prefix index has under a salt, retained prompts too, as far as no request uses it. Returns the number
    /// of dropped blocks. Call it between iterations.
    pub fn forget(&mut self, now_ns: u64, salt: &str) -> usize {
        let n = self.event();
        self.events.forget(n, now_ns, salt);
        let now = self.timestamp(now_ns);
        while let Some(i) = self.shelf.list.iter().position(|one| &*one.salt == salt) {
            self.give_way(now, i);
        }
        let Some(mut prefixes) = self.memory.cache.prefixes() else { return 0 };
        let dropped = prefixes.forget(salt, now.moment());
        let n_dropped = dropped.iter().map(|cached| cached.blocks.len()).sum();
        self.blocked = None;
        // Waiting requests that have heard of what the tiers had compute it.
        let heard = |index: &u32| {
            let entry = &self.entries[*index as usize];
            *entry.salt == *salt && entry.lower.runs().is_some()
        };
        let heard: Vec<u32> = self.waiting.iter().map(|key| key.index).filter(heard).collect();
        heard.into_iter().for_each(|index| self.set_lower(index, Lower::Done));
        if let Some(tiers) = &mut self.tiers {
            tiers.orders_mut().push(Order::Forget { salt: salt.into(), blocks: dropped });
        }
        n_dropped
    }
}

impl Retention {
    /// A retention of `ttl_ns`, without a priority.
    pub fn of(ttl_ns: u64) -> Retention {
        Retention { ttl_ns, priority: 0, pin: false }
    }
}
