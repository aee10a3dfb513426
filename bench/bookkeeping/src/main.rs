//! The bookkeeping of 4,096-token prompts, ours and kvbm-logical's, in turns in one run. One core; medians. kvbm-logical takes
//! part with two of its backends, `lru` and its default, `lineage`; in each row the faster one counts.
//!
//! What is compared, for a prompt of 4,096 tokens in blocks of 16 (256 blocks) and of 1:
//! - `hash`: what kvbm-logical computes from the tokens before it can look anything up. We compare tokens instead.
//! - `match`: find a prompt that is cached, reference its blocks, release them again; hashing included, and without.
//! - `allocate+free`: blocks for a prompt of unknown content, and back.
//! - `round`: match a cached prompt, allocate 16 blocks for what follows, free all of it.
//! - `insert`: allocate, register and release a new prompt, in a pool with free blocks.
//! - `evict`: the same in a full pool, so that as many blocks have to go.
//! - `fork`: a second holder of a running sequence of 4,096 tokens, and back.
use dynamo_tokens::TokenBlockSequence;
use kvbm_logical::{BlockManager, BlockRegistry, KvbmSequenceHashProvider, SequenceHash};
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use std::hint::black_box;
use std::time::Instant;

const PROMPT: u32 = 4096;
const N_PROMPTS: usize = 64;
const FOLLOWING_BLOCKS: u32 = 16;
const ROUNDS: usize = 15;

#[derive(Clone, Debug)]
struct Tier;

/// The backends of kvbm-logical's pool of unused blocks that decide by recency or by position. Neither reads how often a block was used, so
/// no frequency tracker is attached.
#[derive(Clone, Copy, Debug)]
enum Backend {
    Lru,
    Lineage,
}
const BACKENDS: [Backend; 2] = [Backend::Lru, Backend::Lineage];

struct Theirs {
    manager: BlockManager<Tier>,
    block_tokens: u32,
}

impl Theirs {
    fn new(backend: Backend, n_blocks: u32, block_tokens: u32) -> Self {
        let builder = BlockManager::<Tier>::builder()
            .block_count(n_blocks as usize)
            .block_size(block_tokens as usize)
            .registry(BlockRegistry::builder().build());
        let builder = match backend {
            Backend::Lru => builder.with_lru_backend(),
            Backend::Lineage => builder.with_lineage_backend(),
        };
        Theirs { manager: builder.build().expect("it can be built"), block_tokens }
    }
    fn hashes(&self, tokens: &[u32]) -> Vec<SequenceHash> {
        let sequence = TokenBlockSequence::from_slice(tokens, self.block_tokens, Some(1337));
        sequence.blocks().iter().map(|block| block.kvbm_sequence_hash()).collect()
    }
    fn insert(&self, tokens: &[u32]) {
        let sequence = TokenBlockSequence::from_slice(tokens, self.block_tokens, Some(1337));
        let blocks = sequence.blocks();
        let fresh = self.manager.allocate_blocks(blocks.len()).expect("there is room");
        let complete =
            fresh.into_iter().zip(blocks).map(|(fresh, block)| fresh.complete(block).expect("it fits"));
        drop(self.manager.register_blocks(complete.collect()));
    }
}

struct Ours {
    cache: Cache,
    plan: StepPlan,
}

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
const AT: Moment = Moment { now_ns: 0 };

impl Ours {
    fn new(n_blocks: u32, block_tokens: u32) -> Self {
        let capacity_tokens = n_blocks * block_tokens;
        let group = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: PROMPT };
        let prefix = Some(PrefixSpec::default());
        let spec = PagedSpec { block_tokens, groups: vec![group], rollback_tokens: 0, prefix };
        Ours { cache: Cache::paged(&spec).expect("it can be built"), plan: StepPlan::default() }
    }
    fn open(&mut self, content: &Content<'_>) -> u32 {
        self.cache.prefixes().expect("an index").open(A, "", content, AT).expect("it is new").hit_tokens
    }
    fn grow(&mut self, start: u32, n_tokens: u32) {
        let spans = [Span::chain(A, start, n_tokens)];
        let request = StepRequest { spans: &spans };
        if let Ok(step) = Step::begin(&mut self.cache, &request, &mut self.plan) {
            return step.commit();
        }
        self.cache.prefixes().expect("an index").evict_until_free(n_tokens, AT);
        Step::begin(&mut self.cache, &request, &mut self.plan).expect("there is room").commit();
    }
    fn close(&mut self, seq: SeqId) {
        self.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
    }
    fn insert(&mut self, tokens: &[u32]) {
        let hit = self.open(&Content::Tokens(tokens));
        self.grow(hit, PROMPT - hit);
        self.cache.prefixes().expect("an index").store(A, &Content::Tokens(tokens), AT).expect("it is open");
        self.close(A);
    }
}

/// SplitMix64.
struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn prompts(&mut self, n: usize) -> Vec<Vec<u32>> {
        (0..n).map(|_| (0..PROMPT).map(|_| (self.next() % 128_000) as u32).collect()).collect()
    }
}

/// Median microseconds per item: ours, theirs with the faster backend, and which one that is.
type Times = (f64, f64, Backend);

/// All sides take turns. `theirs` is called with the index of a backend.
fn compare(n_items: usize, mut ours: impl FnMut(usize), mut theirs: impl FnMut(usize, usize)) -> Times {
    let mut times = [const { Vec::new() }; 1 + BACKENDS.len()];
    for _ in 0..ROUNDS {
        for (side, times) in times.iter_mut().enumerate() {
            let begin = Instant::now();
            match side.checked_sub(1) {
                None => (0..n_items).for_each(&mut ours),
                Some(backend) => (0..n_items).for_each(|i| theirs(backend, i)),
            }
            times.push(begin.elapsed().as_secs_f64() * 1e6 / n_items as f64);
        }
    }
    let [ours, lru, lineage] = times.map(|mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    });
    if lru < lineage { (ours, lru, Backend::Lru) } else { (ours, lineage, Backend::Lineage) }
}

fn row(block_tokens: u32, what: &str, (ours, theirs, backend): Times) {
    println!(
        "| {block_tokens} | {what} | {ours:.2} | {:.0} | {theirs:.2} ({backend:?}) | {:.1}× |",
        1e6 / ours,
        theirs / ours
    );
}

fn main() {
    println!("| block | work on 4,096 tokens | kvist µs | kvist per second | kvbm-logical µs | ratio |");
    println!("|---|---|---|---|---|---|");
    for block_tokens in [16, 1] {
        let per_prompt = PROMPT / block_tokens;
        let mut random = Random(7);
        let prompts = random.prompts(N_PROMPTS);
        let n_blocks = per_prompt * (N_PROMPTS as u32 + 2);
        let mut ours = Ours::new(n_blocks, block_tokens);
        let theirs = BACKENDS.map(|backend| Theirs::new(backend, n_blocks, block_tokens));
        for prompt in &prompts {
            ours.insert(prompt);
            theirs.iter().for_each(|theirs| theirs.insert(prompt));
        }
        let hashes: Vec<_> = prompts.iter().map(|prompt| theirs[0].hashes(prompt)).collect();
        let wanted = (per_prompt - 1) * block_tokens; // the last token is always computed
        let check = |hit: u32| assert_eq!(hit, wanted);
        let n = N_PROMPTS;

        let hash = compare(
            n,
            |_| (),
            |backend, i| {
                black_box(theirs[backend].hashes(&prompts[i]));
            },
        );
        println!("| {block_tokens} | hash | none | | {:.2} | |", hash.1);
        let look_up = compare(
            n,
            |i| check(ours.cache.lookup("", &Content::Tokens(&prompts[i])).hit_tokens),
            |backend, i| {
                assert_eq!(theirs[backend].manager.match_blocks(&hashes[i]).len(), per_prompt as usize)
            },
        );
        row(block_tokens, "look up (theirs: match without hashing)", look_up);
        let matched = compare(
            n,
            |i| {
                check(ours.open(&Content::Tokens(&prompts[i])));
                ours.close(A);
            },
            |backend, i| {
                let theirs = &theirs[backend];
                assert_eq!(
                    theirs.manager.match_blocks(&theirs.hashes(&prompts[i])).len(),
                    per_prompt as usize
                )
            },
        );
        row(block_tokens, "match, hashing included", matched);
        let allocated = compare(
            n,
            |_| {
                ours.open(&Content::Unknown { n_tokens: PROMPT });
                ours.grow(0, PROMPT);
                ours.close(A);
            },
            |backend, _| {
                drop(theirs[backend].manager.allocate_blocks(per_prompt as usize).expect("there is room"))
            },
        );
        row(block_tokens, "allocate+free", allocated);
        let round = compare(
            n,
            |i| {
                let hit = ours.open(&Content::Tokens(&prompts[i]));
                check(hit);
                ours.grow(hit, FOLLOWING_BLOCKS * block_tokens);
                ours.close(A);
            },
            |backend, i| {
                let theirs = &theirs[backend];
                let matched = theirs.manager.match_blocks(&theirs.hashes(&prompts[i]));
                let fresh = theirs.manager.allocate_blocks(FOLLOWING_BLOCKS as usize).expect("there is room");
                drop((matched, fresh));
            },
        );
        row(block_tokens, "round: match+allocate+free", round);

        let hit = ours.open(&Content::Tokens(&prompts[0]));
        ours.grow(hit, PROMPT - hit);
        let matched = theirs.each_ref().map(|theirs| theirs.manager.match_blocks(&hashes[0]));
        let forked = compare(
            n,
            |_| {
                ours.cache.sequences().expect("many").fork(A, B).expect("it is free");
                ours.close(B);
            },
            |backend, _| {
                drop(black_box(matched[backend].iter().map(|block| block.clone()).collect::<Vec<_>>()))
            },
        );
        row(block_tokens, "fork", forked);
        drop(matched);
        ours.close(A);

        // Room for everything that the rounds bring, and then for a quarter of it.
        for (what, share) in [("insert", 1), ("evict", 4)] {
            let fresh = random.prompts(n * ROUNDS);
            let n_blocks = per_prompt * (fresh.len() as u32 / share + 2);
            let mut ours = Ours::new(n_blocks, block_tokens);
            let theirs = BACKENDS.map(|backend| Theirs::new(backend, n_blocks, block_tokens));
            if share > 1 {
                for prompt in &random.prompts(fresh.len() / share as usize + 2) {
                    ours.insert(prompt);
                    theirs.iter().for_each(|theirs| theirs.insert(prompt));
                }
            }
            let (mut next, mut their_next) = (fresh.iter(), BACKENDS.map(|_| fresh.iter()));
            let times = compare(
                n,
                |_| ours.insert(next.next().expect("enough prompts")),
                |backend, _| theirs[backend].insert(their_next[backend].next().expect("enough prompts")),
            );
            row(block_tokens, what, times);
        }
    }
}
