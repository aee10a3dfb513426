//! Copies of cached blocks to the tiers: of victims of eviction, or of blocks as soon as they are cached; and what cached blocks store.
use super::orders::{CachedTokens, NamedBlock, Order, Run, StoreOrder, TransferId};
use super::{Store, Write};
use crate::log::Decision;
use crate::memory::StepTime;
use crate::scheduler::Scheduler;
use kvist_cache::{BlockId, CachedBlock, Content, GroupId};

impl Scheduler {
    /// A copy to the tiers has ended; `ok` is false if some of its blocks did not get there. Call it between iterations. Returns `false`,
    /// and does nothing, if there is no such copy.
    pub fn stored(&mut self, now_ns: u64, id: TransferId, ok: bool) -> bool {
        let Some(tiers) = &mut self.tiers else { return false };
        let Some(store) = tiers.stores.remove(&id) else { return false };
        tiers.store_bytes -= store.n_blocks * tiers.config.block_bytes;
        tiers.counters.failed_blocks += if ok { 0 } else { store.n_blocks };
        if ok {
            tiers.unsaved.remove(store.stay);
        } else if tiers.config.write == Write::Through {
            tiers.unsaved.add(store.stay);
        }
        self.memory.cache.unpin(store.pin);
        self.blocked = None;
        let n = self.event();
        self.events.stored(n, now_ns, id, ok);
        true
    }

    /// Blocks whose copies have ended, or were not copied in the order, were not written to a tier after all. With [`Write::Through`]
    /// they are copied when they are about to be evicted, as with `Back` every victim is. Call it between iterations.
    pub fn unsaved(&mut self, now_ns: u64, blocks: &[NamedBlock]) {
        let Some(tiers) = self.tiers.as_mut().filter(|tiers| tiers.config.write == Write::Through) else {
            return;
        };
        tiers.unsaved.add(blocks.iter().copied());
        let n = self.event();
        self.events.unsaved(n, now_ns, blocks);
    }

    /// What [`unsaved`](Self::unsaved) calls a block of a [`StoreOrder`].
    pub fn named(&self, block: &CachedBlock) -> Option<NamedBlock> {
        NamedBlock::of(block, self.memory.naming_group()?)
    }

    /// Copies the next victims of eviction to the tiers while free memory is low, and frees them. With [`Write::Through`] the tiers have
    /// most of them: only those are copied of which it is known that they do not, and nothing happens while there are none.
    pub(super) fn demote(&mut self, now: StepTime) {
        let Some(tiers) = &mut self.tiers else { return };
        let Some(naming) = self.memory.naming_group() else { return };
        let (capacity, free) = (self.memory.capacity(), self.memory.free());
        let is_through = tiers.config.write == Write::Through;
        if is_through && !tiers.unsaved.any_cached(&self.memory.cache, naming) {
            return;
        }
        let wanted = tiers.ahead_tokens(capacity);
        let (bytes, block) = (tiers.config.block_bytes, u64::from(tiers.block_tokens));
        // What is on its way out will be free too.
        let soon = tiers.store_bytes / bytes * block;
        if free + soon >= wanted || self.memory.evictable() == 0 {
            return;
        }
        let room = tiers.config.max_store_bytes.saturating_sub(tiers.store_bytes) / bytes;
        if room == 0 {
            return;
        }
        let n_tokens = u32::try_from(wanted - soon).unwrap_or(u32::MAX);
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let (mut pin, mut blocks) = self.memory.demote_until_free(n_tokens, room, now);
        let n_victims = blocks.len() as u64;
        if is_through {
            blocks.retain(|block| tiers.unsaved.take(block, naming));
            // The others are free at once.
            let ids: Vec<_> = blocks.iter().flat_map(|block| block.blocks.iter().copied()).collect();
            let cache = &mut self.memory.cache;
            let copied = cache.pin(&ids).expect("they are pinned already, so they can be once more");
            cache.unpin(std::mem::replace(&mut pin, copied));
        }
        if blocks.is_empty() {
            self.memory.cache.unpin(pin);
        } else {
            let n_blocks = blocks.len() as u64;
            let id = tiers.next_id();
            tiers.store_bytes += n_blocks * bytes;
            tiers.counters.stored_blocks += n_blocks;
            tiers.stores.insert(id, Store { pin, n_blocks, stay: Vec::new() });
            tiers.orders.push(Order::Store(StoreOrder { id, request: None, is_again: false, blocks }));
        }
        if n_victims > 0 {
            tiers.changed = true;
            self.batch_changed = true; // several steps at once could last longer than the copy
            self.decide(now, Decision::Demote { blocks: n_victims });
        }
    }

    /// A request has added its blocks from position `from` on to the prefix index: says what they store, and copies those
    /// that it has computed.
    pub(crate) fn note_cached(&mut self, index: u32, from: u32, is_computed: bool) {
        let Some(tiers) = &mut self.tiers else { return };
        let entry = &self.entries[index as usize];
        let (Some(seq), Some(naming)) = (entry.seq, self.memory.naming_group()) else { return };
        let before = from.saturating_sub(tiers.block_tokens);
        let mut blocks = self.memory.cache.cached_blocks(seq, before);
        let parent = match from {
            0 => None,
            _ if blocks.is_empty() => return,
            _ => {
                // The sequence may have a block of its own there, because the index has dropped the one that it had, or
                // has another one. Then what follows is not in the index.
                let parent = blocks.remove(0);
                match parent.in_group(naming) {
                    None => return,
                    Some(_) => Some(parent),
                }
            }
        };
        tiers.unsaved.begin_anew(&blocks, naming);
        let end = from as usize + blocks.len() * tiers.block_tokens as usize;
        if let Some(tokens) = entry.prompt.tokens().and_then(|tokens| tokens.get(..end)) {
            let (salt, blocks, tokens) = (entry.salt.clone(), blocks.clone(), tokens.to_vec());
            tiers.orders.push(Order::Cached(CachedTokens { salt, parent, blocks, tokens }));
        }
        if is_computed && tiers.config.write == Write::Through {
            self.copy(index, blocks, false);
        }
    }

    /// Copies what the KV cache has of a prompt and no tier: they have dropped it since, or never got it. Otherwise it would be gone when
    /// the cache evicts it, however often it was used here. `runs`: what the tiers have.
    pub(super) fn copy_again(&mut self, index: u32, runs: &[Run]) {
        let Some(tiers) = self.tiers.as_ref().filter(|tiers| tiers.config.write == Write::Through) else {
            return;
        };
        let entry = &self.entries[index as usize];
        let hit_tokens = self.lookup(entry).hit_tokens;
        let mut gaps = runs.iter().scan(0, |from, run| Some((std::mem::replace(from, run.until), run)));
        let Some((from, gap)) =
            gaps.find(|(_, run)| run.tier.is_none()).filter(|(from, _)| *from < hit_tokens)
        else {
            return;
        };
        let Some(tokens) = entry.prompt.tokens() else { return };
        let block_tokens = tiers.block_tokens;
        let until = gap.until.min(hit_tokens);
        // What is never evicted need not be copied.
        let stays = tiers.stays.as_ref().filter(|(salt, _)| *salt == entry.salt);
        let stays = stays.map_or(0, |(_, text)| text.iter().zip(tokens).take_while(|(a, b)| a == b).count());
        let from = from.max(stays as u32 / block_tokens * block_tokens);
        if from >= until {
            return;
        }
        let (_, mut blocks) = self.cached_text(&entry.salt, &tokens[..until as usize]);
        let n_before = (from / block_tokens) as usize;
        blocks.drain(..n_before.min(blocks.len()));
        self.copy(index, blocks, true);
    }

    /// Copies cached blocks of the request at `index` to the tiers, as many as may be on their way.
    fn copy(&mut self, index: u32, mut blocks: Vec<CachedBlock>, is_again: bool) {
        let (Some(tiers), Some(naming)) = (&mut self.tiers, self.memory.naming_group()) else { return };
        let request = self.entries[index as usize].id;
        let bytes = tiers.config.block_bytes;
        let room = tiers.config.max_store_bytes.saturating_sub(tiers.store_bytes) / bytes;
        let room = usize::try_from(room).unwrap_or(usize::MAX).min(blocks.len());
        tiers.counters.skipped_blocks += (blocks.len() - room) as u64;
        let named = |block: &CachedBlock| NamedBlock::of(block, naming);
        tiers.unsaved.add(blocks.drain(room..).filter_map(|block| named(&block)));
        let ids: Vec<_> = blocks.iter().flat_map(|block| block.blocks.iter().copied()).collect();
        if ids.is_empty() {
            return;
        }
        let Ok(pin) = self.memory.cache.pin(&ids) else { return };
        let n_blocks = blocks.len() as u64;
        let id = tiers.next_id();
        tiers.store_bytes += n_blocks * bytes;
        tiers.counters.stored_blocks += n_blocks;
        let stay = blocks.iter().filter_map(named).collect();
        tiers.stores.insert(id, Store { pin, n_blocks, stay });
        tiers.orders.push(Order::Store(StoreOrder { id, request: Some(request), is_again, blocks }));
    }

    /// Says that the driver itself has put a text into the prefix index, so that its blocks have names. Call it between iterations.
    pub fn note_text(&mut self, salt: &str, text: &[u32]) {
        let blocks = self.name_text(salt, text);
        if let (Some(tiers), Some(naming)) = (&mut self.tiers, self.memory.naming_group())
            && tiers.config.write == Write::Through
        {
            // The tiers may have it: the driver looks before it copies.
            tiers.unsaved.add(blocks.iter().filter_map(|block| NamedBlock::of(block, naming)));
        }
    }

    /// The same of a text that the cache never evicts: it is not copied to tiers.
    pub fn note_pinned_text(&mut self, salt: &str, text: &[u32]) {
        self.name_text(salt, text);
        if let Some(tiers) = &mut self.tiers {
            tiers.stays = Some((salt.into(), text.to_vec()));
        }
    }

    fn name_text(&mut self, salt: &str, text: &[u32]) -> Vec<CachedBlock> {
        let (n_tokens, blocks) = self.cached_text(salt, text);
        if let Some(tiers) = &mut self.tiers {
            let (salt, tokens) = (salt.into(), text[..n_tokens].to_vec());
            let cached = CachedTokens { salt, parent: None, blocks: blocks.clone(), tokens };
            tiers.orders.push(Order::Cached(cached));
        }
        blocks
    }

    /// The blocks of a text that the KV cache has, from the first on, and how many tokens they are.
    fn cached_text(&self, salt: &str, text: &[u32]) -> (usize, Vec<CachedBlock>) {
        let Some(naming) = self.memory.naming_group() else { return (0, Vec::new()) };
        let cache = &self.memory.cache;
        // A hit leaves a token to compute: this one is not part of the text.
        let with_next: Vec<u32> = text.iter().copied().chain([0]).collect();
        let blocks_of = |group| {
            let blocks = cache.lookup_blocks(GroupId(group), salt, &Content::Tokens(&with_next));
            blocks.into_iter().map(move |block| Some(BlockId { group: GroupId(group), block: block? }))
        };
        let mut groups: Vec<_> = (0..cache.n_groups() as u16).map(blocks_of).collect();
        let cached = |hash| {
            let blocks = groups.iter_mut().filter_map(|group| group.next().flatten()).collect();
            Some(CachedBlock { hash, blocks }).filter(|block| block.in_group(naming).is_some())
        };
        let hashes = cache.prefix_hashes(salt, &Content::Tokens(text));
        let blocks: Vec<CachedBlock> = hashes.into_iter().map_while(cached).collect();
        (blocks.len() * self.memory.block_tokens() as usize, blocks)
    }
}
