//! What cached blocks are called in the stores.
//!
//! A store names a block by its content, the cache by a number, which other content has when the block was evicted. So a name is kept
//! with the index's hash of the block that it is of, and whatever puts blocks into the index has them named.
use super::events::TierBlock;
use super::parts::window_key;
use super::{Copied, TierDriver, task};
use kvist_cache::{BlockId, Cache, CachedBlock, GroupId};
use kvist_scheduler::CachedTokens;
use kvist_store::{BlockKey, KeyChain};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a cached block is called in the stores.
pub(super) struct Name {
    /// Of the index. A block with this number and another hash is another block.
    pub hash: u64,
    pub key: BlockKey,
    /// The key of the block before it; `None` at the beginning of a text.
    pub parent: Option<BlockKey>,
    /// Of the salt: its note, and the generation that the key is of.
    pub note: BlockKey,
    pub generation: u64,
    /// What events call it.
    pub told: Option<Arc<TierBlock>>,
}

/// Of a cached block in the table of names. Such a table doubles its places when seven eighths are taken: it has up to 16 for 7 entries.
pub(super) const NAME_BYTES: u64 = (16 * (size_of::<(u32, Name)>() as u64 + 1)).div_ceil(7);

impl TierDriver {
    /// The number of a cached block.
    pub(super) fn number(&self, block: &CachedBlock) -> Option<u32> {
        block.in_group(self.block_parts.naming_group())
    }

    /// The name of a block, if this block has it and none that had its number before.
    pub(super) fn name(&self, block: &CachedBlock) -> Option<&Name> {
        self.names.get(&self.number(block)?).filter(|name| name.hash == block.hash)
    }

    /// Names cached blocks.
    pub(super) fn note(&mut self, cached: &CachedTokens) {
        let block_tokens = self.block_parts.block_tokens as usize;
        let before = cached.tokens.len() - (cached.blocks.len() * block_tokens).min(cached.tokens.len());
        let (before, tokens) = cached.tokens.split_at(before);
        let note = self.note_of(&cached.salt);
        let generation = self.stores.generation(&note);
        let parent = cached.parent.as_ref().and_then(|parent| self.name(parent));
        let parent = parent.filter(|parent| parent.generation == generation).map(|parent| parent.key);
        let (mut chain, mut parent) = match parent {
            Some(parent) => (KeyChain::after(parent), Some(parent)),
            // At a text's beginning, and behind blocks that are not named, or of an earlier generation.
            None => {
                let mut chain = KeyChain::root_of(&self.fingerprint, &cached.salt, generation);
                let keys = before.chunks_exact(block_tokens).map(|tokens| chain.next(tokens));
                let parent = keys.last();
                (chain, parent)
            }
        };
        self.stores.events.begin_generation(&note, generation);
        for (i, (block, tokens)) in cached.blocks.iter().zip(tokens.chunks_exact(block_tokens)).enumerate() {
            let key = chain.next(tokens);
            let told = self.told_name(cached, i, &key, generation);
            let name = Name { hash: block.hash, key, parent: parent.replace(key), note, generation, told };
            if let Some(number) = self.number(block) {
                self.names.insert(number, name);
            }
        }
        self.stores.note_change();
    }

    /// Begins a new generation of a salt, and removes the blocks of earlier ones that are known.
    pub(super) fn forget_salt(&mut self, salt: &str, blocks: &[CachedBlock]) {
        let note = self.note_of(salt);
        let generation = self.stores.next_generation(note);
        self.stores.events.begin_generation(&note, generation);
        self.release(&note);
        // Requests that have heard of earlier blocks compute them, also those that are being loaded.
        self.prompts.retain(|_, found| found.note != note);
        let loads = self.loads.values_mut().filter(|load| load.note == note).map(|load| &mut load.blocks);
        let copies = self.copies.iter_mut().filter_map(|copies| match &mut copies.what {
            Copied::In { blocks, note: of, .. } if *of == note => Some(blocks),
            _ => None,
        });
        loads.chain(copies).flatten().for_each(|block| block.failed = true);
        let windows: Vec<usize> = self.block_parts.windows().map(|(group, _)| group).collect();
        let names = blocks.iter().filter_map(|block| Some((self.number(block)?, self.name(block)?.key)));
        let names: Vec<(u32, BlockKey)> = names.collect();
        for (number, _) in &names {
            self.names.remove(number);
        }
        let with_parts = |key: BlockKey| {
            let parts = windows.iter().map(move |&group| window_key(&key, group));
            std::iter::once(key).chain(parts).collect::<Vec<_>>()
        };
        let keys = names.into_iter().flat_map(|(_, key)| with_parts(key)).collect();
        self.stores.tell(&self.tasks, note, generation);
        self.stores.note_change();
        self.tasks.spawn(task::remove(self.stores.clone(), keys));
    }

    /// The key of the note that says what was deleted under a salt.
    pub fn note_of(&self, salt: &str) -> BlockKey {
        KeyChain::note(&self.fingerprint, salt)
    }

    /// The cached blocks and their names, as far as these ask for something in a tier: numbers in
    /// [`naming_group`](Self::naming_group), in no order.
    pub fn named_blocks(&self, cache: &Cache) -> Vec<(u32, BlockKey)> {
        let group = self.naming_group();
        let is_cached = |(block, name): &(&u32, &Name)| {
            cache.hash_of(BlockId { group, block: **block }) == Some(name.hash)
        };
        let names: Vec<(&u32, &Name)> = self.names.iter().filter(is_cached).collect();
        let current = self.stores.generations(names.iter().map(|(_, name)| &name.note));
        let named = names.iter().zip(current).filter(|((_, name), current)| name.generation >= *current);
        named.map(|((number, name), _)| (**number, name.key)).collect()
    }

    pub fn naming_group(&self) -> GroupId {
        self.block_parts.naming_group()
    }

    /// Cached blocks have other numbers now.
    pub fn moved(&mut self, renamed: &BTreeMap<BlockId, BlockId>) {
        let naming = self.block_parts.naming_group();
        let moves = || renamed.iter().filter(|(from, _)| from.group == naming);
        let moved: Vec<(u32, Option<Name>)> =
            moves().map(|(from, to)| (to.block, self.names.remove(&from.block))).collect();
        for (to, name) in moved {
            match name {
                Some(name) => self.names.insert(to, name),
                None => self.names.remove(&to),
            };
        }
        self.stores.note_change();
    }
}
