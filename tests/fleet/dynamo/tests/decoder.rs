//! What kvist encodes, Dynamo decodes: nothing is dropped, everything means the same, and Dynamo's radix tree finds what a naive
//! router finds. `KVIST_ROUNDS` for more.
//!
//! `public` and `wire` are kvist's own source files: what turns the events of the prefix index into messages.
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEventData, LocalBlockHash, RouterEvent, StorageTier,
    WorkerWithDpRank, compute_block_hash_for_seq,
};
use dynamo_kv_router::zmq_wire::{RawKvEvent, ZmqEventNormalizer, decode_event_batch};
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{
    Cache, Content, GroupId, Moment, PagedSpec, PrefixSpec, SeqId, Span, Step, StepPlan, StepRequest,
};
use kvist_testing::SplitMix64;
use public::PublicBlocks;
use std::collections::{BTreeSet, HashMap};
use wire::{Event, Medium};

#[path = "../../../../crates/server/src/kv_events/public.rs"]
#[allow(dead_code)] // What only the server calls.
mod public;
#[path = "../../../../crates/server/src/kv_events/wire.rs"]
mod wire;

/// The only one that kvist has.
const RANK: u32 = 0;

fn rounds(default: u64) -> u64 {
    std::env::var("KVIST_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(default)
}

/// Dynamo's names of kvist's media.
fn tier(medium: Medium) -> (&'static str, StorageTier) {
    match medium {
        Medium::Cache => ("GPU", StorageTier::Device),
        Medium::Ram => ("CPU", StorageTier::HostPinned),
        Medium::Disk => ("STORAGE", StorageTier::Disk),
    }
}

/// A worker as Dynamo's listener for it is: messages in, changes of a radix tree out.
struct Listener {
    worker: WorkerWithDpRank,
    normalizer: ZmqEventNormalizer,
    block_tokens: u32,
    n_messages: u64,
}

impl Listener {
    fn new(worker: u64, block_tokens: u32) -> Self {
        let normalizer = ZmqEventNormalizer::new(block_tokens);
        Listener { worker: WorkerWithDpRank::new(worker, RANK), normalizer, block_tokens, n_messages: 0 }
    }

    /// What Dynamo makes of a message with these events. Compares everything on its way.
    fn hear(&mut self, events: &[Event]) -> Vec<RouterEvent> {
        let mut heard = Vec::new();
        let time_s = 1.7e9 + self.n_messages as f64 * 0.125;
        let payload = wire::batch(time_s, events).unwrap();
        let batch = decode_event_batch(&payload).expect("Dynamo decodes every batch");
        assert_eq!((batch.ts, batch.data_parallel_rank), (time_s, Some(RANK as i32)));
        assert_eq!(batch.events.len(), events.len());
        for (sent, raw) in events.iter().zip(batch.events) {
            assert_decoded(sent, &raw);
            let raw = self.normalizer.preprocess_with_reason(raw, self.worker).expect("nothing is filtered");
            let placed = self.normalizer.normalize_preprocessed(raw, self.n_messages, self.worker);
            let event = placed.and_then(|placed| placed.into_router_event()).expect("nothing is dropped");
            assert_eq!((event.worker_id, event.event.dp_rank), (self.worker.worker_id, RANK));
            let medium = match sent {
                Event::BlockStored { medium, .. } | Event::BlockRemoved { medium, .. } => *medium,
                Event::AllBlocksCleared => Medium::Cache,
            };
            assert_eq!(event.storage_tier, tier(medium).1);
            self.assert_converted(sent, &event.event.data);
            heard.push(event);
        }
        self.n_messages += 1;
        heard
    }

    fn pass(&mut self, events: &[Event], tree: &mut RadixTree) {
        for event in self.hear(events) {
            tree.apply_event(event).expect("the tree takes every event");
        }
    }

    fn assert_converted(&self, sent: &Event, data: &KvCacheEventData) {
        match (sent, data) {
            (
                Event::BlockStored { block_hashes, parent_block_hash, token_ids, lora_name, .. },
                KvCacheEventData::Stored(stored),
            ) => {
                let parent = stored.parent_hash.map(|hash| hash.0);
                assert_eq!((parent, stored.start_position), (*parent_block_hash, None));
                let hashes: Vec<u64> = stored.blocks.iter().map(|block| block.block_hash.0).collect();
                assert_eq!(hashes, *block_hashes);
                // The hashes that Dynamo looks prompts up by.
                let of_tokens: Vec<LocalBlockHash> =
                    stored.blocks.iter().map(|block| block.tokens_hash).collect();
                assert_eq!(of_tokens, hashes_of(token_ids, self.block_tokens, lora_name.as_deref()));
                assert!(stored.blocks.iter().all(|block| block.mm_extra_info.is_none()));
            }
            (Event::BlockRemoved { block_hashes, .. }, KvCacheEventData::Removed(removed)) => {
                let expected = block_hashes.iter().map(|&hash| ExternalSequenceBlockHash(hash));
                assert_eq!(removed.block_hashes, expected.collect::<Vec<_>>());
            }
            (Event::AllBlocksCleared, KvCacheEventData::Cleared) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn hashes_of(tokens: &[u32], block_tokens: u32, lora_name: Option<&str>) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, block_tokens, BlockHashOptions { lora_name, ..Default::default() })
}

/// Everything but `lora_id`, which Dynamo does not read.
fn assert_decoded(sent: &Event, raw: &RawKvEvent) {
    match (sent, raw) {
        (
            Event::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                medium,
                lora_name,
                ..
            },
            RawKvEvent::BlockStored {
                block_hashes: hashes,
                parent_block_hash: parent,
                token_ids: tokens,
                block_size: size,
                medium: where_it_is,
                lora_name: adapter,
                cache_namespace: None,
                block_mm_infos: None,
                is_eagle: None | Some(false),
                group_idx: None,
                kv_cache_spec_kind: None,
                kv_cache_spec_sliding_window: None,
                locality: None,
                ownership: None,
                session_id: None,
            },
        ) => {
            assert_eq!(hashes.iter().map(|hash| hash.into_u64()).collect::<Vec<_>>(), *block_hashes);
            assert_eq!((parent.map(|hash| hash.into_u64()), tokens), (*parent_block_hash, token_ids));
            assert_eq!((*size as u64, adapter), (u64::from(*block_size), lora_name));
            assert_eq!(where_it_is.as_deref(), Some(tier(*medium).0));
        }
        (
            Event::BlockRemoved { block_hashes, medium },
            RawKvEvent::BlockRemoved {
                block_hashes: hashes,
                medium: where_it_was,
                group_idx: None,
                kv_cache_spec_kind: None,
                kv_cache_spec_sliding_window: None,
                locality: None,
                ownership: None,
            },
        ) => {
            assert_eq!(hashes.iter().map(|hash| hash.into_u64()).collect::<Vec<_>>(), *block_hashes);
            assert_eq!(where_it_was.as_deref(), Some(tier(*medium).0));
        }
        (Event::AllBlocksCleared, RawKvEvent::AllBlocksCleared { ownership: None }) => {}
        other => panic!("{other:?}"),
    }
}

/// Numbers around which MessagePack changes how it writes integers and lengths, among any.
fn number(random: &mut SplitMix64) -> u64 {
    let edges = [0, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, 0x7fff_ffff, 0xffff_ffff, 1 << 32];
    let large = [(1 << 63) - 1, 1 << 63, u64::MAX];
    match random.below(3) {
        0 => random.pick(&edges),
        1 => random.pick(&large),
        _ => random.next() >> random.below(64),
    }
}

fn token(random: &mut SplitMix64) -> u32 {
    number(random) as u32
}

/// Different numbers.
fn hashes(n: usize, random: &mut SplitMix64) -> Vec<u64> {
    let mut hashes = BTreeSet::new();
    while hashes.len() < n {
        hashes.insert(number(random));
    }
    let mut hashes: Vec<u64> = hashes.into_iter().collect();
    let first = random.index(n);
    hashes.rotate_left(first);
    hashes
}

/// Events as their type allows them: also what the prefix index never says, such as adapters.
#[test]
fn every_event_means_the_same() {
    for seed in 0..rounds(300) {
        let mut random = SplitMix64(seed);
        let block_size = random.pick(&[1, 2, 15, 16, 17, 128, 256]);
        let mut listener = Listener::new(number(&mut random), block_size);
        let event = |random: &mut SplitMix64| {
            let n = random.pick(&[1, 1, 2, 15, 16, 17, 40]);
            let mut block_hashes = hashes(n + 1, random);
            let parent = block_hashes.pop();
            let medium = random.pick(&[Medium::Cache, Medium::Ram, Medium::Disk]);
            match random.below(4) {
                0 => Event::AllBlocksCleared,
                1 => Event::BlockRemoved { block_hashes, medium },
                _ => Event::BlockStored {
                    block_hashes,
                    parent_block_hash: parent.filter(|_| random.below(2) == 0),
                    token_ids: (0..n as u32 * block_size).map(|_| token(random)).collect(),
                    block_size,
                    lora_id: (random.below(4) == 0).then(|| token(random)),
                    medium,
                    lora_name: (random.below(4) == 0).then(|| "adapter \u{e9}".to_owned()),
                },
            }
        };
        for _ in 0..10 {
            let n = random.pick(&[0, 1, 1, 2, 15, 16, 17]);
            let events: Vec<Event> = (0..n).map(|_| event(&mut random)).collect();
            assert_eq!(listener.hear(&events).len(), n);
        }
    }
}

/// More of everything than two bytes can count.
#[test]
fn long_events_mean_the_same() {
    let (mut listener, mut tree) = (Listener::new(1, 1), RadixTree::new());
    let n = 70_000u32;
    let stored = Event::BlockStored {
        block_hashes: (1..=u64::from(n)).map(|hash| hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect(),
        parent_block_hash: None,
        token_ids: (0..n).map(|token| token.wrapping_mul(0x9e37_79b9)).collect(),
        block_size: 1,
        lora_id: None,
        medium: Medium::Cache,
        lora_name: None,
    };
    let Event::BlockStored { block_hashes, token_ids, .. } = stored.clone() else { unreachable!() };
    listener.pass(&[stored], &mut tree);
    assert_eq!(score(&tree, &listener, &token_ids), n);
    listener.pass(&[Event::BlockRemoved { block_hashes, medium: Medium::Cache }], &mut tree);
    assert_eq!(score(&tree, &listener, &token_ids), 0);
}

/// Blocks of a prompt that the tree credits to a worker.
fn score(tree: &RadixTree, listener: &Listener, prompt: &[u32]) -> u32 {
    let found = tree.find_matches(hashes_of(prompt, listener.block_tokens, None), false);
    found.scores.get(&listener.worker).copied().unwrap_or(0)
}

/// A router in the simplest form: the whole prefix that a hash stands for.
#[derive(Default)]
struct NaiveRouter(HashMap<u64, Vec<u32>>);

impl NaiveRouter {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::BlockStored { block_hashes, parent_block_hash, token_ids, block_size, .. } => {
                let mut prefix = parent_block_hash.map_or(Vec::new(), |parent| self.0[&parent].clone());
                for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(*block_size as usize)) {
                    prefix.extend(tokens);
                    self.0.insert(*hash, prefix.clone());
                }
            }
            Event::BlockRemoved { block_hashes, .. } => {
                block_hashes.iter().for_each(|hash| drop(self.0.remove(hash)));
            }
            Event::AllBlocksCleared => self.0.clear(),
        }
    }

    fn score(&self, prompt: &[u32], block_tokens: u32) -> u32 {
        let has = |n: &u32| self.0.values().any(|prefix| *prefix == prompt[..(n * block_tokens) as usize]);
        (1..=prompt.len() as u32 / block_tokens).take_while(has).count() as u32
    }
}

/// One engine's cache, and what each side knows of it.
struct Worker {
    cache: Cache,
    public: PublicBlocks,
    listener: Listener,
    naive: NaiveRouter,
    n_prompts: u32,
}

impl Worker {
    /// `window`: of a second layer group, whose blocks are not published.
    fn new(number: u64, block_tokens: u32, n_blocks: u32, window: Option<u32>) -> Self {
        let group = |visibility| GroupSpec {
            capacity_tokens: n_blocks * block_tokens,
            visibility,
            max_step_tokens: n_blocks * block_tokens,
        };
        let windowed = window.map(|window| group(Visibility { window: Some(window), sinks: 0 }));
        let spec = PagedSpec {
            block_tokens,
            groups: std::iter::once(group(Visibility::FULL)).chain(windowed).collect(),
            rollback_tokens: 0,
            prefix: Some(PrefixSpec::default()),
        };
        let mut cache = Cache::paged(&spec).unwrap();
        cache.watch_prefixes(true);
        let public = PublicBlocks::new(cache.prefix_hash("", &[]), GroupId(0), block_tokens);
        let listener = Listener::new(number, block_tokens);
        Worker { cache, public, listener, naive: NaiveRouter::default(), n_prompts: 0 }
    }

    /// Computes a prompt, some tokens at a time, and stores its whole blocks; the least recently used ones make room.
    fn run(&mut self, salt: &str, prompt: &[u32], chunk: u32) {
        let (at, content) = (Moment::default(), Content::Tokens(prompt));
        let seq = SeqId(self.n_prompts);
        self.n_prompts += 1;
        let mut prefixes = self.cache.prefixes().unwrap();
        let mut computed = prefixes.open(seq, salt, &content, at).unwrap().hit_tokens;
        let n_new = prompt.len() as u32 - computed;
        prefixes.evict_until_free(n_new.next_multiple_of(self.listener.block_tokens), at);
        while computed < prompt.len() as u32 {
            let n = chunk.min(prompt.len() as u32 - computed);
            let spans = [Span::chain(seq, computed, n)];
            let mut plan = StepPlan::default();
            Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut plan).unwrap().commit();
            computed += n;
            let content = Content::Tokens(&prompt[..computed as usize]);
            self.cache.prefixes().unwrap().store(seq, &content, at).unwrap();
        }
        self.cache.sequences().unwrap().seq_rm(seq, 0, u32::MAX).unwrap();
    }

    /// Publishes what has happened. Returns the number of events.
    fn publish(&mut self, tree: &mut RadixTree) -> usize {
        let mut happened = Vec::new();
        self.cache.drain_prefix_events(&mut happened);
        let events = self.public.translate(&happened);
        self.listener.pass(&events, tree);
        events.iter().for_each(|event| self.naive.apply(event));
        events.len()
    }
}

/// Three workers in one tree: prompts that share beginnings, under salts too, in chunks; evictions, clears.
#[test]
fn the_radix_tree_finds_what_a_naive_router_finds() {
    let (mut found, mut removed, mut n_events) = (0, 0, 0);
    for seed in 0..rounds(20) {
        let mut random = SplitMix64(seed);
        let block_tokens = random.pick(&[1, 4, 16, 32]);
        let n_blocks = 24 + random.below(40);
        // A prompt has at most two thirds of the cache.
        let longest = (n_blocks * block_tokens * 2 / 3) as usize;
        let mut tree = RadixTree::new();
        let mut workers: Vec<Worker> = (0..3)
            .map(|number| {
                let window = (random.below(2) == 0).then(|| 1 + random.below(3 * block_tokens));
                Worker::new(number, block_tokens, n_blocks, window)
            })
            .collect();
        let beginnings: Vec<Vec<u32>> =
            (0..4).map(|_| (0..longest).map(|_| token(&mut random)).collect()).collect();
        let prompt = |random: &mut SplitMix64| {
            let mut prompt = random.pick(&[0, 1, 2, 3].map(|n| &beginnings[n])).clone();
            prompt.truncate(1 + random.index(longest - 1));
            let from = random.index(prompt.len() + 1);
            prompt[from..].iter_mut().for_each(|token| *token ^= random.below(2));
            prompt
        };
        for _ in 0..100 {
            let worker = random.index(3);
            for _ in 0..random.below(4) {
                let salt = random.pick(&["", "", "salt"]);
                let (prompt, chunk) = (prompt(&mut random), 1 + random.below(n_blocks * block_tokens));
                workers[worker].run(salt, &prompt, chunk);
            }
            if random.below(30) == 0 {
                workers[worker].cache.clear();
            }
            let before = workers[worker].naive.0.len();
            n_events += workers[worker].publish(&mut tree);
            removed += usize::from(workers[worker].naive.0.len() < before);
            let asked = prompt(&mut random);
            for worker in &workers {
                let score = score(&tree, &worker.listener, &asked);
                assert_eq!(score, worker.naive.score(&asked, block_tokens), "seed {seed}");
                found += score;
            }
        }
    }
    println!("{n_events} events, {found} blocks found");
    assert!(found > 0 && removed > 0, "prompts share beginnings, and blocks are evicted");
}
