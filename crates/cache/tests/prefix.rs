//! The prefix index by example: hits, and why they are not longer.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;

const AT: Moment = Moment { now_ns: 0 };

struct Rig {
    cache: Cache,
    plan: StepPlan,
    next: u32,
}

fn spec(block_tokens: u32, capacity_tokens: u32) -> PagedSpec {
    PagedSpec {
        block_tokens,
        groups: vec![GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: 1 }],
        rollback_tokens: 0,
        prefix: Some(PrefixSpec::default()),
    }
}

impl Rig {
    fn new(spec: &PagedSpec) -> Rig {
        Rig { cache: Cache::paged(spec).expect("it can be built"), plan: StepPlan::default(), next: 0 }
    }
    fn prefixes(&mut self) -> Prefixes<'_> {
        self.cache.prefixes().expect("an index")
    }
    /// Opens a prompt, computes all of it, stores it and removes the sequence. Returns the tokens that were hit.
    fn serve(&mut self, salt: &str, content: &Content<'_>) -> u32 {
        let seq = SeqId(self.next);
        self.next += 1;
        let hit = self.prefixes().open(seq, salt, content, AT).expect("it is new").hit_tokens;
        let rest = content.n_tokens() - hit;
        for n_tokens in [rest.min(3), rest.saturating_sub(3)] {
            if n_tokens > 0 {
                self.grow(seq, n_tokens);
            }
        }
        self.prefixes().store(seq, content, AT).expect("it is open");
        self.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
        hit
    }
    fn grow(&mut self, seq: SeqId, n_tokens: u32) {
        let start = self.cache.next_position(seq).expect("it is open");
        let spans = [Span::chain(seq, start, n_tokens)];
        let request = StepRequest { spans: &spans };
        Step::begin(&mut self.cache, &request, &mut self.plan).expect("there is room").commit();
    }
    fn why(&self, salt: &str, tokens: &[u32], viewer: Viewer) -> MissReason {
        self.cache.explain(salt, &Content::Tokens(tokens), viewer)
    }
}

fn count(n: u32) -> Vec<u32> {
    (0..n).collect()
}

/// A hit is rounded down to whole blocks, and the last token is always computed. Rounding up would give a hit of 64
/// tokens in a prompt of 50.
#[test]
fn hits_are_whole_blocks_and_never_the_last_token() {
    let mut rig = Rig::new(&spec(16, 1024));
    assert_eq!(rig.serve("", &Content::Tokens(&count(64))), 0);
    for (n_tokens, hit) in
        [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (50, 48), (64, 48), (65, 64), (200, 64)]
    {
        let found = rig.cache.lookup("", &Content::Tokens(&count(n_tokens)));
        assert_eq!(found.hit_tokens, hit, "a prompt of {n_tokens} tokens");
    }
}

#[test]
fn a_miss_says_why() {
    use Viewer::{Operator, Tenant};
    let mut rig = Rig::new(&spec(4, 40));
    let served = count(12);
    rig.serve("ours", &Content::Tokens(&served));
    let diverging = |at: u32| (0..12).map(|t| if t < at { t } else { t + 100 }).collect::<Vec<u32>>();

    let unaligned = MissReason::UnalignedTail { position: 8 };
    assert_eq!(rig.why("ours", &count(11), Tenant), unaligned, "less than a block is left");
    assert_eq!(rig.why("ours", &served, Tenant), unaligned, "the last token is always computed");
    assert_eq!(rig.why("ours", &count(20), Tenant), MissReason::NeverSeen { position: 12 }, "nobody went on");
    for at in [1, 3, 4, 6, 7] {
        let diverged = MissReason::Diverged { position: at };
        assert_eq!(rig.why("ours", &diverging(at), Tenant), diverged, "first other token at {at}");
    }
    let never = MissReason::NeverSeen { position: 0 };
    assert_eq!(rig.why("ours", &diverging(0), Tenant), never, "nothing in common");
    assert_eq!(rig.why("theirs", &served, Tenant), never, "what others ask is nobody's business");
    assert_eq!(rig.why("theirs", &served, Operator), MissReason::OtherSalt { position: 0 });

    // The prompt's blocks are evicted, last block first.
    assert_eq!(rig.prefixes().evict_until_free(32, AT), 1);
    assert_eq!(rig.why("ours", &count(20), Tenant), MissReason::Evicted { position: 8 });
    assert_eq!(rig.prefixes().evict_until_free(40, AT), 2);
    assert_eq!(rig.why("ours", &count(20), Tenant), MissReason::Evicted { position: 0 });
    assert_eq!(rig.prefixes().report().n_salts, 0, "a salt without blocks and sequences is forgotten");
}

/// The window group has dropped blocks that the next query would see, while the full-attention group still has them.
#[test]
fn a_window_that_has_moved_on_is_a_reason() {
    let mut spec = spec(4, 400);
    let window = Visibility { window: Some(5), sinks: 0 };
    spec.groups.push(GroupSpec { capacity_tokens: 400, visibility: window, max_step_tokens: 1 });
    let mut rig = Rig::new(&spec);
    rig.serve("", &Content::Tokens(&count(40)));
    // Once the prompt was computed, its window group had dropped everything before position 36.
    let longer = count(41);
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&longer)).hit_tokens, 40);
    let middle = Content::Tokens(&longer[..30]);
    assert_eq!(rig.cache.lookup("", &middle).hit_tokens, 0);
    assert_eq!(rig.cache.explain("", &middle, Viewer::Tenant), MissReason::WindowGone { position: 0 });
}

/// With 512 tokens per id, an id covers 32 blocks of 16. With 8 tokens per id, two ids make one block.
#[test]
fn trace_ids_are_cut_into_blocks() {
    for (tokens_per_id, block_tokens, hit) in [(512, 16, 1024), (512, 512, 1024), (8, 16, 16), (16, 16, 32)] {
        let mut spec = spec(block_tokens, 8192);
        let vocabulary = Vocabulary::Ids { tokens_per_id };
        spec.prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
        let mut rig = Rig::new(&spec);
        let content = |ids: &'static [u64], n_tokens| Content::Ids { ids, tokens_per_id, n_tokens };
        let n_tokens = 3 * tokens_per_id - 1;
        rig.serve("", &content(&[7, u64::MAX, 9], n_tokens));
        let longer = content(&[7, u64::MAX, 10, 11, 12, 13], 6 * tokens_per_id);
        assert_eq!(
            rig.cache.lookup("", &longer).hit_tokens,
            hit,
            "{tokens_per_id} in blocks of {block_tokens}"
        );
        let n_tokens = 6 * tokens_per_id;
        let coarser = Content::Ids { ids: &[7, u64::MAX, 10], tokens_per_id: 2 * tokens_per_id, n_tokens };
        assert_eq!(rig.cache.lookup("", &coarser).hit_tokens, 0, "ids of another size are other ids");
        let other = Content::Tokens(&[7; 64]);
        assert!(rig.prefixes().open(SeqId(99), "", &other, AT).is_err(), "content of another kind");
    }
    let mut odd = spec(24, 240);
    odd.prefix =
        Some(PrefixSpec { vocabulary: Vocabulary::Ids { tokens_per_id: 16 }, ..PrefixSpec::default() });
    let refused = Cache::paged(&odd).err().expect("24 and 16 do not fit").to_string();
    assert!(refused.contains("24") && refused.contains("16"), "{refused}");
}

#[test]
fn the_log_tells_the_life_of_a_block() {
    let mut rig = Rig::new(&spec(4, 16));
    rig.cache.watch(true);
    rig.serve("", &Content::Tokens(&count(5)));
    rig.serve("", &Content::Tokens(&count(6)));
    rig.prefixes().evict_until_free(16, AT);
    let (mut blocks, mut prefixes) = (Vec::new(), Vec::new());
    rig.cache.drain_events(&mut blocks, &mut prefixes);
    let life: Vec<_> = blocks
        .iter()
        .map(|e| (e.step, e.block, e.seq.map(|s| s.0), e.change.name(), e.reason.name()))
        .collect();
    let first = |step, seq, change, reason| (step, 0, Some(seq), change, reason);
    assert_eq!(
        life,
        [
            first(0, 0, "alloc", "append"),
            (1, 1, Some(0), "alloc", "append"),
            first(2, 0, "store", "store"),
            (2, 1, Some(0), "free", "remove"),
            first(2, 0, "idle", "remove"),
            first(2, 1, "hit", "open"),
            (2, 1, Some(1), "alloc", "append"),
            (3, 1, Some(1), "free", "remove"),
            first(3, 1, "idle", "remove"),
            (3, 0, None, "evict", "make_room"),
        ]
    );
    assert!(
        matches!(prefixes[..], [PrefixEvent::Stored { .. }, PrefixEvent::Removed { .. }]),
        "{prefixes:?}"
    );
}

/// Users choose salts, so unused ones must be removed, even where all groups have windows that have moved on.
#[test]
fn salts_go_with_their_last_block_and_sequence() {
    let mut spec = spec(4, 1000);
    spec.groups[0].visibility.window = Some(4);
    let mut rig = Rig::new(&spec);
    for user in 0..50u32 {
        let tokens: Vec<u32> = (0..8).map(|i| user * 100 + i).collect();
        let (seq, salt) = (SeqId(user), format!("user {user}"));
        rig.prefixes().open(seq, &salt, &Content::Tokens(&tokens), AT).expect("it is new");
        rig.grow(seq, 8);
        rig.prefixes().store(seq, &Content::Tokens(&tokens), AT).expect("it is open");
        rig.grow(seq, 20);
        rig.prefixes().evict_until_free(u32::MAX, AT);
        rig.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
        rig.prefixes().evict_until_free(u32::MAX, AT);
    }
    assert_eq!(rig.cache.report()[0].used_cells, 0);
    assert_eq!(rig.prefixes().report().n_salts, 0);
}

/// A block cannot hold two contents. A call that says so is refused before anything is stored.
#[test]
fn content_that_lies_is_refused() {
    let mut rig = Rig::new(&spec(4, 400));
    let (a, b) = ([1u32; 13], [2u32; 13]);
    rig.prefixes().open(SeqId(0), "", &Content::Tokens(&a), AT).expect("it is new");
    rig.grow(SeqId(0), 12);
    rig.cache.sequences().expect("many").fork(SeqId(0), SeqId(1)).expect("it is new");
    assert_eq!(rig.prefixes().store(SeqId(0), &Content::Tokens(&a), AT), Ok(Stored { n_new: 3, n_known: 0 }));
    let refused = Refused::OtherContent { seq: SeqId(1), position: 0 };
    assert_eq!(rig.prefixes().store(SeqId(1), &Content::Tokens(&b), AT), Err(refused));
    assert_eq!(rig.prefixes().store(SeqId(1), &Content::Tokens(&a), AT), Ok(Stored { n_new: 0, n_known: 3 }));
    for seq in [0, 1].map(SeqId) {
        rig.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
    }
    rig.prefixes().evict_until_free(u32::MAX, AT);
    assert_eq!(rig.cache.report()[0].used_cells, 0);
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&a)).hit_tokens, 0);
}

/// Regression test: `store` checked new blocks only. A caller that passed other tokens for blocks it had stored
/// before got `Ok`, and `OtherContent` never occurred.
#[test]
fn content_that_contradicts_what_was_stored_is_refused() {
    let (honest, seq) = (count(12), SeqId(0));
    let lie = |at: usize| {
        let mut tokens = honest.clone();
        tokens[at] += 100;
        tokens
    };
    let mut rig = Rig::new(&spec(4, 400));
    rig.prefixes().open(seq, "", &Content::Tokens(&honest), AT).expect("it is new");
    rig.grow(seq, 8);
    let stored = |n_new, n_known| Ok(Stored { n_new, n_known });
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&honest[..8]), AT), stored(2, 0));
    rig.grow(seq, 4);
    let before = (rig.cache.report(), rig.prefixes().report());
    for (at, block) in [(0, 0), (3, 0), (4, 4), (7, 4)] {
        let refused = Err(Refused::OtherContent { seq, position: block });
        assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&lie(at)), AT), refused, "a lie at {at}");
        let shorter = &lie(at)[..8];
        assert_eq!(rig.prefixes().store(seq, &Content::Tokens(shorter), AT), refused, "and nothing new");
        let tail = rig.prefixes().store_from(seq, block, &Content::Tokens(&lie(at)), AT);
        assert_eq!(tail, refused, "the block from which on it hands over");
    }
    assert_eq!((rig.cache.report(), rig.prefixes().report()), before, "a refusal changed something");
    // If several blocks differ, the error names the first.
    let all: Vec<u32> = honest.iter().map(|t| t + 100).collect();
    let refused = Err(Refused::OtherContent { seq, position: 0 });
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&all), AT), refused);
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&honest[..3]), AT), stored(0, 0), "no whole block");
    assert_eq!(
        rig.prefixes().store(seq, &Content::Tokens(&honest[..7]), AT),
        stored(0, 1),
        "a shorter truth"
    );

    // Stored blocks before `from` are not compared.
    assert_eq!(rig.prefixes().store_from(seq, 8, &Content::Tokens(&lie(5)), AT), stored(1, 0));
    assert_eq!(rig.prefixes().store_from(seq, 4, &Content::Tokens(&honest), AT), stored(0, 2));
    assert_eq!(rig.prefixes().store_from(seq, u32::MAX, &Content::Tokens(&honest), AT), stored(0, 0));
    assert_eq!(
        rig.cache.lookup("", &Content::Tokens(&count(13))).hit_tokens,
        12,
        "the truth is what is stored"
    );
    // After a rollback, other tokens are allowed.
    rig.cache.sequences().expect("many").seq_rm(seq, 4, u32::MAX).expect("it is open");
    rig.grow(seq, 8);
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&lie(5)), AT), stored(2, 1));
}

/// Regression test: a group of window 1 keeps no blocks, and its presence suppressed every hit, although no query
/// needs anything from it.
#[test]
fn a_window_of_one_asks_for_nothing() {
    let mut spec = spec(4, 400);
    let window = |window| Visibility { window: Some(window), sinks: 0 };
    spec.groups.push(GroupSpec { capacity_tokens: 400, visibility: window(1), max_step_tokens: 1 });
    let prompt = count(41);
    for sinks in [0, 3] {
        spec.groups[1].visibility.sinks = sinks;
        let mut rig = Rig::new(&spec);
        rig.serve("", &Content::Tokens(&prompt[..40]));
        assert_eq!(rig.serve("", &Content::Tokens(&prompt)), 40, "{sinks} sinks");
        rig.prefixes().evict_until_free(u32::MAX, AT);
        assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt)).hit_tokens, 0);
    }
    // If no group needs any block, a prompt without blocks in any group is not a hit.
    spec.groups[0].visibility = window(1);
    spec.groups[1].visibility = window(1);
    let mut rig = Rig::new(&spec);
    let seq = SeqId(0);
    rig.prefixes().open(seq, "", &Content::Tokens(&prompt), AT).expect("it is new");
    rig.grow(seq, 40);
    rig.prefixes().store(seq, &Content::Tokens(&prompt), AT).expect("it is open");
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt)).hit_tokens, 0);
    // A group with a wider window next to it decides.
    spec.groups[0].visibility = window(5);
    let mut rig = Rig::new(&spec);
    rig.serve("", &Content::Tokens(&prompt[..40]));
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt)).hit_tokens, 40);
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt[..30])).hit_tokens, 0);
}

/// Regression test: a fork of an empty sequence returned `Ok` although its target existed, and the copy belonged to
/// no salt, so other tenants could hit what it stored.
#[test]
fn a_fork_of_an_empty_sequence_is_a_fork() {
    let mut rig = Rig::new(&spec(4, 400));
    let (empty, live, copy, idle) = (SeqId(0), SeqId(1), SeqId(2), SeqId(3));
    let tokens = count(9);
    rig.prefixes().open(empty, "ours", &Content::Tokens(&tokens), AT).expect("it is new");
    rig.prefixes().open(live, "theirs", &Content::Tokens(&tokens), AT).expect("it is new");
    rig.prefixes().open(idle, "theirs", &Content::Tokens(&tokens), AT).expect("it is new");
    rig.grow(live, 9);
    let occupied = Err(Refused::Occupied { seq: live, position: 8 });
    assert_eq!(rig.cache.sequences().expect("many").fork(empty, live), occupied);
    assert_eq!(rig.cache.next_position(live), Some(9));
    assert_eq!(rig.cache.sequences().expect("many").fork(empty, copy), Ok(()));
    assert_eq!(rig.cache.sequences().expect("many").fork(empty, idle), Ok(()), "it holds nothing");
    assert_eq!(rig.cache.sequences().expect("many").seq_cp(live, empty, 3, 3), Ok(()), "an empty range");
    for (seq, salt) in [(copy, "ours"), (idle, "theirs"), (empty, "ours")] {
        rig.grow(seq, 9);
        rig.prefixes().store(seq, &Content::Tokens(&tokens), AT).expect("it is open");
        assert_eq!(rig.cache.lookup(salt, &Content::Tokens(&tokens)).hit_tokens, 8, "{seq} under {salt}");
        assert_eq!(rig.cache.lookup("", &Content::Tokens(&tokens)).hit_tokens, 0, "{seq} is no stranger's");
        rig.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
        rig.prefixes().evict_until_free(u32::MAX, AT);
    }
}

/// Regression test: hit ratios covered only the whole time since the start, so they did not show how a server does
/// now.
#[test]
fn hits_are_counted_over_the_last_prompts_too() {
    let mut rig = Rig::new(&spec(4, 400));
    assert_eq!(
        (rig.prefixes().report().opened.ratio(), rig.prefixes().report().recent),
        (None, HitCounts::default())
    );
    let n_recent = RECENT_PROMPTS as u64;
    for _ in 0..=n_recent {
        rig.serve("", &Content::Tokens(&count(9)));
    }
    rig.serve("", &Content::Unknown { n_tokens: 7 });
    rig.serve("", &Content::Tokens(&[]));
    let again =
        rig.prefixes().open_again(SeqId(7), "", &Content::Tokens(&count(9)), AT).expect("it is closed");
    assert_eq!(again.hit_tokens, 8);
    rig.cache.sequences().expect("many").seq_rm(SeqId(7), 0, u32::MAX).expect("it is open");
    let report = rig.prefixes().report();
    let counts =
        |n_prompts, hits| HitCounts { n_prompts, prompt_tokens: 9 * n_prompts, hit_tokens: 8 * hits };
    assert_eq!(report.opened, counts(n_recent + 1, n_recent));
    assert_eq!(report.recent, counts(n_recent, n_recent), "the first one, which found nothing, is long ago");
    assert_eq!(report.recent.ratio(), Some(8.0 / 9.0));
    for n in 0..n_recent {
        rig.serve("another", &Content::Tokens(&[n as u32 + 1_000; 3]));
    }
    let recent = HitCounts { n_prompts: n_recent, prompt_tokens: 3 * n_recent, hit_tokens: 0 };
    assert_eq!(rig.prefixes().report().recent, recent);
    assert_eq!(rig.prefixes().report().opened.hit_tokens, 8 * n_recent);
}

/// Routers and cache tiers compare prefix hashes with their own. The hashes are the same in every run, every version
/// and on every machine, and depend on each bit of a token.
#[test]
fn names_of_prefixes_are_pinned() {
    let rig = Rig::new(&spec(3, 30));
    let hash = |salt, tokens: &[u32]| rig.cache.prefix_hash(salt, tokens);
    assert_eq!(hash("", &[]), 0xe220_a839_7b1d_cdaf);
    let pinned = [
        ("", vec![0, 0, 0], 0x4e08_f9af_d2fd_2e59),
        ("", vec![1, 2, 3], 0x8aa2_8fe5_a372_35ef),
        ("", vec![1, 2, 3, 4, 5, 6], 0xec7e_e9d7_1f51_b888),
        ("tenant", vec![1, 2, 3], 0x11e0_72d6_c928_4145),
        ("tenant", vec![u32::MAX, u32::MAX, u32::MAX], 0x9508_6af8_a764_05a9),
    ];
    for (salt, tokens, expected) in pinned {
        assert_eq!(hash(salt, &tokens), expected, "{salt} {tokens:?}: {:#x}", hash(salt, &tokens));
    }
    let mut seen = std::collections::BTreeSet::new();
    let names = (0..3).flat_map(|at| (0..32).map(move |bit| (at, bit)));
    for (at, bit) in names {
        let mut tokens = [7; 3];
        tokens[at] ^= 1 << bit;
        assert!(seen.insert(hash("", &tokens)), "bit {bit} of token {at} does not count");
    }
    assert_eq!(hash("", &[1, 2, 3, 9]), hash("", &[1, 2, 3]), "whole blocks only");
    assert_ne!(hash("a", &[1, 2, 3]), hash("b", &[1, 2, 3]));
}

/// A step that does not fit says how to make it fit, and doing so works.
#[test]
fn no_space_says_what_to_try() {
    let mut rig = Rig::new(&spec(16, 64));
    rig.serve("", &Content::Tokens(&count(32)));
    let seq = SeqId(7);
    rig.prefixes().open(seq, "", &Content::Unknown { n_tokens: 80 }, AT).expect("it is new");
    let (spans, long) = ([Span::chain(seq, 0, 48)], [Span::chain(seq, 0, 80)]);
    let (request, long) = (StepRequest { spans: &spans }, StepRequest { spans: &long });
    let refused = rig.cache.can_run(&request, &mut rig.plan).expect_err("32 cells are evictable");
    let of = |needed, reclaimable| Refused::NoSpace { group: GroupId(0), needed, free: 32, reclaimable };
    assert_eq!(refused, of(48, 32));
    assert_eq!(
        refused.to_string(),
        "the step needs 48 cells of layer group 0, and 32 are free; 32 more are held by the index alone: make room for 48, and try again"
    );
    let refused = rig.cache.can_run(&long, &mut rig.plan).expect_err("it never fits");
    assert_eq!(refused, of(80, 32));
    assert!(refused.to_string().contains("which is not enough: remove or shorten sequences"), "{refused}");
    let exact = of(64, 32).to_string();
    assert!(exact.ends_with("make room for 64, and try again"), "{exact}");
    let none = of(48, 0).to_string();
    assert!(
        none.ends_with("32 are free: remove or shorten sequences, or take fewer tokens at once"),
        "{none}"
    );
    assert_eq!(rig.prefixes().evict_until_free(48, AT), 1);
    assert_eq!(rig.cache.can_run(&request, &mut rig.plan), Ok(()));
}

/// Regression test: a capacity below one block made a cache without cells, in which nothing ever fits.
#[test]
fn a_group_holds_at_least_one_block() {
    let error = Cache::paged(&spec(16, 15)).err().expect("no block fits").to_string();
    assert!(error.contains("less than one block") && error.contains("smaller blocks"), "{error}");
    let cache = Cache::paged(&spec(16, 16)).expect("one block fits");
    assert_eq!(cache.capacity_cells(), [16]);
}

#[test]
fn drafts_are_counted_and_a_sequence_of_drafts_stays() {
    let mut rig = Rig::new(&spec(4, 400));
    let seq = SeqId(0);
    rig.prefixes().open(seq, "salt", &Content::Tokens(&[1]), AT).expect("it is new");
    rig.grow(seq, 3);
    let accept = |rig: &mut Rig, drafted, accepted| {
        rig.cache.sequences().expect("many").accept(seq, drafted, accepted)
    };
    assert_eq!(accept(&mut rig, 2, 3), Err(Refused::AcceptsMore { seq, drafted: 2, accepted: 3 }));
    assert_eq!(accept(&mut rig, 4, 1), Err(Refused::DraftsMore { seq, held: 3, drafted: 4 }));
    assert_eq!(accept(&mut rig, 2, 1), Ok(()));
    assert_eq!(rig.cache.next_position(seq), Some(2));
    assert_eq!(accept(&mut rig, 2, 0), Ok(()));
    assert_eq!(rig.cache.next_position(seq), Some(0));
    // The sequence still has its salt.
    rig.grow(seq, 5);
    rig.prefixes().store(seq, &Content::Tokens(&count(5)), AT).expect("it is open");
    assert_eq!(rig.cache.lookup("salt", &Content::Tokens(&count(5))).hit_tokens, 4);
}

/// A capacity limit also holds where it is the largest that blocks of this size can count, and the very last position
/// works like any other.
#[test]
fn the_largest_sizes_are_sizes() {
    let block_tokens = 1 << 20;
    let mut rig = Rig::new(&spec(block_tokens, u32::MAX / block_tokens * block_tokens));
    assert_eq!(rig.prefixes().report().policy, Some("lru"));
    let mut rig = Rig::new(&spec(block_tokens, u32::MAX));
    assert_eq!(rig.prefixes().report().policy, None, "without a bound nothing is evicted");

    let mut spec = spec(u32::MAX / 2, u32::MAX);
    spec.groups[0].visibility.window = Some(5);
    spec.prefix = None;
    let mut rig = Rig::new(&spec);
    rig.cache.sequences().expect("many").seq_new(SeqId(0)).expect("it is new");
    rig.grow(SeqId(0), u32::MAX - 1);
    let spans = [Span::chain(SeqId(0), u32::MAX - 1, 1)];
    let request = StepRequest { spans: &spans };
    let done = Step::begin(&mut rig.cache, &request, &mut rig.plan).map(Step::commit);
    assert!(matches!(done, Ok(()) | Err(Refused::NoSpace { .. })), "{done:?}");
}

#[test]
fn watchers_hear_that_all_is_forgotten() {
    let mut rig = Rig::new(&spec(4, 100));
    rig.cache.watch(true);
    rig.prefixes().open(SeqId(0), "", &Content::Tokens(&[1]), AT).expect("it is new");
    rig.grow(SeqId(0), 9);
    rig.cache.clear();
    let (mut blocks, mut prefixes) = (Vec::new(), Vec::new());
    rig.cache.drain_events(&mut blocks, &mut prefixes);
    assert_eq!(blocks.iter().filter(|event| event.change == Change::Free).count(), 3);
    assert_eq!(prefixes, [PrefixEvent::Cleared]);
}

/// A fork keeps its own copies of blocks for which its sibling switched to those of the index, and shares with it the
/// later blocks, which the index learned from the sibling. So evictable blocks may all be inner nodes, with no evictable
/// leaf. Then the lowest of them are evicted, least recently used first, and the index drops the blocks below them
/// that are in use.
#[test]
fn evictable_blocks_above_one_in_use_can_be_evicted() {
    let mut rig = Rig::new(&spec(4, 64));
    let chains = ["a", "b", "c"];
    let tokens = count(12);
    let (sibling, fork) = (|i: u32| SeqId(100 + i), |i: u32| SeqId(200 + i));
    let mut tables = Vec::new();
    for (i, salt) in (0..).zip(chains) {
        rig.prefixes().open(sibling(i), salt, &Content::Tokens(&tokens), AT).expect("it is new");
        rig.grow(sibling(i), 12);
        rig.cache.sequences().expect("many").fork(sibling(i), fork(i)).expect("it is open");
        rig.serve(salt, &Content::Tokens(&tokens[..8]));
        rig.prefixes().store(sibling(i), &Content::Tokens(&tokens), AT).expect("it is open");
        let table = rig.cache.block_table(GroupId(0), sibling(i)).expect("it is open");
        assert_ne!(table[..2], rig.cache.block_table(GroupId(0), fork(i)).expect("it is open")[..2]);
        tables.push(table);
    }
    for i in [2, 0, 1] {
        rig.cache.sequences().expect("many").seq_rm(sibling(i), 0, u32::MAX).expect("it is open");
    }
    rig.cache.watch(true);
    assert_eq!(rig.prefixes().evict_until_free(7 * 4, AT), 6);
    let (mut blocks, mut removed) = (Vec::new(), Vec::new());
    rig.cache.drain_events(&mut blocks, &mut removed);
    let gone: Vec<u32> = blocks.iter().filter(|e| e.change == Change::Evict).map(|e| e.block).collect();
    let block = |i: usize, n: usize| tables[i][n].expect("nothing has left a window");
    assert_eq!(gone, [block(2, 1), block(2, 0), block(0, 1), block(0, 0), block(1, 1), block(1, 0)]);
    assert_eq!(removed.len(), 9, "and three that are held");
    assert!(chains.iter().all(|salt| rig.cache.lookup(salt, &Content::Tokens(&tokens)).hit_tokens == 0));
    assert_eq!(rig.cache.report()[0].blocks.expect("paged").free, 7);
}

/// Token counts of a paged sequence, the high-water mark, and ranges that end where the sequence does.
#[test]
fn a_paged_sequence_is_as_long_as_what_it_holds() {
    let mut rig = Rig::new(&spec(4, 64));
    let seq = SeqId(5);
    assert_eq!(rig.cache.seq_len(seq), None);
    rig.cache.sequences().unwrap().seq_new(seq).unwrap();
    rig.grow(seq, 5);
    assert_eq!((rig.cache.seq_len(seq), rig.plan.group(GroupId(0)).cells_end), (Some(5), 8));
    assert!(matches!(rig.cache.sequences().unwrap().seq_rm(seq, 1, 4), Err(Refused::NotHere(_))));
    rig.cache.sequences().unwrap().seq_rm(seq, 3, 5).unwrap();
    assert_eq!(rig.cache.seq_len(seq), Some(3));

    // A window of 6: at position 14 a query sees positions from 9 on, and the two blocks before are gone.
    let mut windowed = spec(4, 64);
    windowed.groups[0].visibility.window = Some(6);
    let mut rig = Rig::new(&windowed);
    rig.cache.sequences().unwrap().seq_new(seq).unwrap();
    rig.grow(seq, 5);
    rig.grow(seq, 9);
    assert_eq!((rig.cache.next_position(seq), rig.cache.seq_len(seq)), (Some(14), Some(6)));
}
