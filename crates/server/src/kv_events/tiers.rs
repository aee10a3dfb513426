//! What a router may know of the tiers below the cache: those that are this server's own.
//!
//! A store that servers share is left out. Its blocks are everybody's, so they make no server better than another one, and what has
//! become of them is not told.
use super::wire::{Event, Medium};
use kvist_engine::serving::{TierBlock, TierEvent};
use std::collections::HashMap;
use std::sync::Arc;

/// Memory that so many published blocks take, besides their names, which the engine keeps.
pub(crate) fn tier_event_bytes(n_blocks: u64) -> u64 {
    // A hash table doubles its places when seven eighths are taken.
    let entry = size_of::<(u64, Arc<TierBlock>)>() as u64 + 1;
    n_blocks.saturating_mul(16 * entry).div_ceil(7).saturating_add(4096)
}

/// Turns the events of tiers into events for routers, and keeps what routers know.
pub(super) struct PublicTiers {
    /// The fastest first.
    tiers: Vec<PublicTier>,
    block_tokens: u32,
}

struct PublicTier {
    /// `None` if it is not published.
    medium: Option<Medium>,
    /// What the tier has, as far as the engine tells it.
    here: HashMap<u64, Arc<TierBlock>>,
}

impl PublicTiers {
    /// `stores`: their names, as [`BlockStore::name`](kvist_store::BlockStore::name) has them.
    pub fn new(stores: &[String], block_tokens: u32) -> Self {
        let tier = |name: &String| {
            let medium = match name.as_str() {
                "ram" => Some(Medium::Ram),
                "disk" => Some(Medium::Disk),
                _ => None,
            };
            PublicTier { medium, here: HashMap::new() }
        };
        PublicTiers { tiers: stores.iter().map(tier).collect(), block_tokens }
    }

    /// Appends the event for routers. Neighbours of a chain become one event.
    pub fn translate(&mut self, event: TierEvent, out: &mut Vec<Event>) {
        match event {
            TierEvent::Stored { tier, block } => {
                let Some(tier) = self.tiers.get_mut(tier) else { return };
                let Some(medium) = tier.medium else { return };
                store(&block, medium, self.block_tokens, out);
                tier.here.insert(block.hash, block);
            }
            TierEvent::Removed { tier, hash } => {
                let Some(tier) = self.tiers.get_mut(tier) else { return };
                let (Some(_), Some(medium)) = (tier.here.remove(&hash), tier.medium) else { return };
                match out.last_mut() {
                    Some(Event::BlockRemoved { block_hashes, medium: last }) if *last == medium => {
                        block_hashes.push(hash);
                    }
                    _ => out.push(Event::BlockRemoved { block_hashes: vec![hash], medium }),
                }
            }
        }
    }

    /// Appends all that routers know, for those that know nothing. A router wants to hear of a block's parent first: so in chains,
    /// and the slowest tier first, which has most.
    pub fn content(&self, out: &mut Vec<Event>) {
        for PublicTier { medium, here } in self.tiers.iter().rev() {
            let Some(medium) = medium else { continue };
            let mut children: HashMap<u64, Vec<&TierBlock>> = HashMap::new();
            let mut next: Vec<&TierBlock> = Vec::new();
            for block in here.values() {
                match block.parent.filter(|parent| here.contains_key(parent)) {
                    Some(parent) => children.entry(parent).or_default().push(block),
                    None => next.push(block),
                }
            }
            while let Some(block) = next.pop() {
                store(block, *medium, self.block_tokens, out);
                next.extend(children.remove(&block.hash).unwrap_or_default());
            }
        }
    }
}

fn store(block: &TierBlock, medium: Medium, block_tokens: u32, out: &mut Vec<Event>) {
    if let Some(Event::BlockStored { block_hashes, token_ids, medium: last, .. }) = out.last_mut()
        && *last == medium
        && block_hashes.last().copied() == block.parent
    {
        block_hashes.push(block.hash);
        token_ids.extend_from_slice(&block.tokens);
        return;
    }
    out.push(Event::BlockStored {
        block_hashes: vec![block.hash],
        parent_block_hash: block.parent,
        token_ids: block.tokens.clone(),
        block_size: block_tokens,
        lora_id: None,
        medium,
        lora_name: None,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;
    use std::collections::{BTreeMap, BTreeSet};

    /// A router in the simplest form: the whole prefix of each block that it has heard of, and where the blocks are.
    #[derive(Default)]
    struct Router {
        prefixes: BTreeMap<u64, Vec<u32>>,
        here: BTreeSet<(&'static str, u64)>,
    }

    fn name(medium: Medium) -> &'static str {
        match medium {
            Medium::Cache => "cache",
            Medium::Ram => "ram",
            Medium::Disk => "disk",
        }
    }

    impl Router {
        fn apply(&mut self, events: &[Event]) {
            for event in events {
                match event {
                    Event::BlockStored {
                        block_hashes,
                        parent_block_hash,
                        token_ids,
                        block_size,
                        medium,
                        ..
                    } => {
                        assert_eq!(token_ids.len(), block_hashes.len() * *block_size as usize);
                        let mut prefix = parent_block_hash.map_or(Vec::new(), |parent| {
                            self.prefixes.get(&parent).cloned().unwrap_or_default()
                        });
                        for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(*block_size as usize))
                        {
                            prefix.extend(tokens);
                            self.prefixes.entry(*hash).or_insert_with(|| prefix.clone());
                            assert!(self.here.insert((name(*medium), *hash)), "stored once");
                        }
                    }
                    Event::BlockRemoved { block_hashes, medium } => {
                        for hash in block_hashes {
                            assert!(
                                self.here.remove(&(name(*medium), *hash)),
                                "only what is known is removed"
                            );
                        }
                    }
                    Event::AllBlocksCleared => self.here.clear(),
                }
            }
        }
    }

    /// A binary tree of blocks: block `i` follows block `i / 2`.
    fn block(i: u64) -> Arc<TierBlock> {
        let parent = (i > 1).then_some(100 + i / 2);
        Arc::new(TierBlock { hash: 100 + i, parent, tokens: vec![i as u32, 7], generation: 0 })
    }

    fn prefix(i: u64) -> Vec<u32> {
        let before = if i > 1 { prefix(i / 2) } else { Vec::new() };
        [before, vec![i as u32, 7]].concat()
    }

    /// A router that hears everything, and one that hears the content now, know the same: what is in the tiers that are published.
    #[test]
    fn routers_know_what_the_tiers_have() {
        let names = ["ram", "disk", "redis"].map(String::from);
        for seed in 0..20 {
            let mut random = SplitMix64(seed);
            let mut tiers = PublicTiers::new(&names, 2);
            let (mut router, mut here) = (Router::default(), BTreeSet::new());
            for _ in 0..300 {
                let mut events = Vec::new();
                for _ in 0..1 + random.index(6) {
                    let (tier, i) = (random.index(3), 1 + random.index(60) as u64);
                    if here.insert((tier, i)) {
                        tiers.translate(TierEvent::Stored { tier, block: block(i) }, &mut events);
                    } else {
                        here.remove(&(tier, i));
                        tiers.translate(TierEvent::Removed { tier, hash: 100 + i }, &mut events);
                    }
                }
                router.apply(&events);
                let published = here.iter().filter(|(tier, _)| *tier < 2);
                let expected: BTreeSet<_> =
                    published.map(|&(tier, i)| (["ram", "disk"][tier], 100 + i)).collect();
                assert_eq!(router.here, expected, "seed {seed}");
                let (mut late, mut content) = (Router::default(), Vec::new());
                tiers.content(&mut content);
                late.apply(&content);
                assert_eq!(late.here, expected);
                let whole = |(_, hash): &&(&str, u64)| {
                    // All blocks before it are in one of its tiers or a slower one.
                    let mut before = (hash - 100) / 2;
                    let mut is_whole = true;
                    while before > 0 {
                        is_whole &= here.contains(&(1, before));
                        before /= 2;
                    }
                    is_whole
                };
                for (_, hash) in expected.iter().filter(whole) {
                    assert_eq!(late.prefixes[hash], prefix(hash - 100));
                }
            }
        }
    }

    #[test]
    fn the_bound_of_the_published_blocks_holds() {
        for n in [500u64, 29_000, 57_345] {
            let blocks: Vec<_> = (0..n).map(block).collect();
            let (mut tiers, mut events) = (PublicTiers::new(&["ram".to_owned()], 2), Vec::new());
            let allocated = allocation_counter::measure(|| {
                for block in blocks {
                    tiers.translate(TierEvent::Stored { tier: 0, block }, &mut events);
                    events = Vec::new();
                }
            });
            let (bound, bytes) = (tier_event_bytes(n), allocated.bytes_current as u64);
            assert!((bound / 3..bound).contains(&bytes), "{n} blocks: {bytes} of {bound}");
        }
    }
}
