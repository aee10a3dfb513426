//! What a router may know of the prefix index: the blocks of requests without a salt of their own.
use super::wire::{Event, Medium};
use kvist_cache::{GroupId, PrefixEvent};
use std::collections::HashSet;

/// Turns the events of the prefix index into events for routers.
///
/// A salt is part of a block's hash, but no consumer of vLLM's events keeps salts apart: it would credit a block to
/// everybody. So only blocks under one salt are published, that of requests that send none. They are recognised by the
/// hashes of their parents, up to the hash of the empty prefix under that salt.
pub(super) struct PublicBlocks {
    /// Hash of the empty prefix.
    root: u64,
    /// The layer group whose blocks are published. Routers know one group.
    group: GroupId,
    block_tokens: u32,
    /// Hashes of the blocks that consumers know: of one group, so at most as many as it has blocks.
    known: HashSet<u64>,
}

impl PublicBlocks {
    pub fn new(root: u64, group: GroupId, block_tokens: u32) -> Self {
        PublicBlocks { root, group, block_tokens, known: HashSet::new() }
    }

    /// For consumers that know nothing yet.
    pub fn anew(&self) -> Self {
        PublicBlocks { known: HashSet::new(), ..*self }
    }

    /// The events for routers, in the same order. Neighbours of a chain become one event.
    pub fn translate(&mut self, events: &[PrefixEvent]) -> Vec<Event> {
        let mut out = Vec::new();
        for event in events {
            match event {
                PrefixEvent::Stored { group, hash, parent_hash, key, .. } if *group == self.group => {
                    self.stored(*hash, *parent_hash, key, &mut out);
                }
                PrefixEvent::Removed { group, hash, .. } if *group == self.group => {
                    self.removed(*hash, &mut out);
                }
                PrefixEvent::Cleared => {
                    self.known.clear();
                    out.push(Event::AllBlocksCleared);
                }
                // Routers know blocks by their hashes, which a move does not change.
                PrefixEvent::Stored { .. } | PrefixEvent::Removed { .. } | PrefixEvent::Moved { .. } => {}
            }
        }
        out
    }

    fn stored(&mut self, hash: u64, parent: u64, key: &[u32], out: &mut Vec<Event>) {
        let is_first = parent == self.root;
        // Without its parent a consumer drops the block. The parent of a public block is unknown only if all layers have
        // windows, and the parent has left them.
        if !is_first && !self.known.contains(&parent) {
            return;
        }
        self.known.insert(hash);
        if let Some(Event::BlockStored { block_hashes, token_ids, .. }) = out.last_mut()
            && block_hashes.last() == Some(&parent)
        {
            block_hashes.push(hash);
            token_ids.extend_from_slice(key);
            return;
        }
        out.push(Event::BlockStored {
            block_hashes: vec![hash],
            parent_block_hash: (!is_first).then_some(parent),
            token_ids: key.to_vec(),
            block_size: self.block_tokens,
            lora_id: None,
            medium: Medium::Cache,
            lora_name: None,
        });
    }

    fn removed(&mut self, hash: u64, out: &mut Vec<Event>) {
        if !self.known.remove(&hash) {
            return;
        }
        match out.last_mut() {
            Some(Event::BlockRemoved { block_hashes, .. }) => block_hashes.push(hash),
            _ => out.push(Event::BlockRemoved { block_hashes: vec![hash], medium: Medium::Cache }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_cache::kinds::{GroupSpec, Visibility};
    use kvist_cache::{
        Cache, Content, Moment, PagedSpec, PrefixSpec, SeqId, Span, Step, StepPlan, StepRequest,
    };
    use kvist_testing::SplitMix64;
    use std::collections::BTreeMap;

    const BLOCK: u32 = 4;

    fn cache(n_blocks: u32) -> Cache {
        let group = GroupSpec {
            capacity_tokens: n_blocks * BLOCK,
            visibility: Visibility::FULL,
            max_step_tokens: n_blocks * BLOCK,
        };
        let spec = PagedSpec {
            block_tokens: BLOCK,
            groups: vec![group],
            rollback_tokens: 0,
            prefix: Some(PrefixSpec::default()),
        };
        Cache::paged(&spec).unwrap()
    }

    /// A router in the simplest form: the whole prefix that a hash stands for.
    #[derive(Default)]
    struct Router(BTreeMap<u64, Vec<u32>>);

    impl Router {
        fn apply(&mut self, event: Event) {
            match event {
                Event::BlockStored { block_hashes, parent_block_hash, token_ids, block_size, .. } => {
                    assert_eq!(token_ids.len(), block_hashes.len() * block_size as usize);
                    let mut prefix = parent_block_hash.map_or(Vec::new(), |parent| {
                        self.0.get(&parent).expect("a consumer knows every parent").clone()
                    });
                    for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(block_size as usize)) {
                        prefix.extend(tokens);
                        assert_eq!(self.0.insert(*hash, prefix.clone()), None, "a block is stored once");
                    }
                }
                Event::BlockRemoved { block_hashes, .. } => {
                    for hash in block_hashes {
                        assert!(self.0.remove(&hash).is_some(), "only what is known is removed");
                    }
                }
                Event::AllBlocksCleared => self.0.clear(),
            }
        }

        /// Tokens that a router credits.
        fn credit(&self, prompt: &[u32]) -> u32 {
            let known: HashSet<&[u32]> = self.0.values().map(Vec::as_slice).collect();
            // The last token is always computed.
            let most = prompt.len().saturating_sub(1) / BLOCK as usize;
            let n = (1..=most).take_while(|n| known.contains(&prompt[..n * BLOCK as usize])).count();
            n as u32 * BLOCK
        }
    }

    /// Computes and stores a prompt, evicting if there is no room.
    fn run(cache: &mut Cache, seq: SeqId, salt: &str, prompt: &[u32]) {
        let at = Moment::default();
        let content = Content::Tokens(prompt);
        let mut prefixes = cache.prefixes().unwrap();
        let hit = prefixes.open(seq, salt, &content, at).unwrap().hit_tokens;
        let n_new = prompt.len() as u32 - hit;
        prefixes.evict_until_free(n_new.next_multiple_of(BLOCK), at);
        let spans = [Span::chain(seq, hit, n_new)];
        let mut plan = StepPlan::default();
        Step::begin(cache, &StepRequest { spans: &spans }, &mut plan).unwrap().commit();
        cache.prefixes().unwrap().store(seq, &content, at).unwrap();
        cache.sequences().unwrap().seq_rm(seq, 0, u32::MAX).unwrap();
    }

    /// After random prompts, evictions and clears, a router credits exactly what the cache would find, and nothing that
    /// was computed under another salt.
    #[test]
    fn a_router_credits_what_the_cache_finds() {
        for seed in 0..20 {
            let mut random = SplitMix64(seed);
            let mut cache = cache(24);
            cache.watch_prefixes(true);
            let mut public = PublicBlocks::new(cache.prefix_hash("", &[]), GroupId(0), BLOCK);
            let (mut router, mut events, mut hits) = (Router::default(), Vec::new(), 0);
            let mut prompt = |n: usize| -> Vec<u32> {
                (0..n).map(|i| if i < 12 { i as u32 / 6 } else { 0 } + random.index(2) as u32).collect()
            };
            for i in 0..200u32 {
                let n = 1 + (i as usize * 7) % 40;
                let salt = if i % 3 == 0 { "secret" } else { "" };
                let tokens = prompt(n);
                run(&mut cache, SeqId(i), salt, &tokens);
                if i % 67 == 66 {
                    cache.clear();
                }
                cache.drain_prefix_events(&mut events);
                public.translate(&events).into_iter().for_each(|event| router.apply(event));
                events.clear();
                let asked = prompt(n);
                let found = cache.lookup("", &Content::Tokens(&asked)).hit_tokens;
                assert_eq!(router.credit(&asked), found, "seed {seed}, prompt {i}");
                hits += found;
            }
            assert!(hits > 0, "the prompts share prefixes");
        }
    }

    /// A log that is turned on late tells the blocks that were there before.
    #[test]
    fn what_was_stored_before_is_published_first() {
        let mut cache = cache(24);
        let prompt: Vec<u32> = (0..13).collect();
        run(&mut cache, SeqId(1), "", &prompt);
        run(&mut cache, SeqId(2), "secret", &prompt);
        cache.watch_prefixes(true);
        let mut events = Vec::new();
        cache.drain_prefix_events(&mut events);
        let mut public = PublicBlocks::new(cache.prefix_hash("", &[]), GroupId(0), BLOCK);
        let events = public.translate(&events);
        let [Event::BlockStored { block_hashes, parent_block_hash: None, token_ids, .. }] = &events[..]
        else {
            panic!("one chain, not {events:?}")
        };
        assert_eq!((block_hashes.len(), &token_ids[..]), (3, &prompt[..12]));
    }
}
