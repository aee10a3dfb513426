//! Tiers below the simulated cache: stories with times computed by hand, and random loads whose runs must not depend on how
//! many steps run as one.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Prompt, Vocabulary};
use kvist_scheduler as scheduler;
use kvist_scheduler::{Config, Recompute, Tier, Tiers, Write};
use kvist_simulator::cost::{BatchShape, ConstantRates, StepCost};
use kvist_simulator::report::{Objectives, Report, RequestOutcome};
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, Part, Run, run};
use kvist_testing::reference::SplitMix64 as Random;

const IDS: Vocabulary = Vocabulary::Ids { tokens_per_id: 4 };

fn cache(capacity_tokens: u32) -> Cache {
    let group = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
    let prefix = Some(PrefixSpec { vocabulary: IDS, ..PrefixSpec::default() });
    Cache::paged(&PagedSpec { block_tokens: 4, groups: vec![group], rollback_tokens: 0, prefix }).unwrap()
}

fn tier(name: &str, bytes_per_s: u64, latency_ns: u64) -> Tier {
    Tier { name: name.into(), bytes_per_s, latency_ns }
}

/// Blocks of 4 tokens have 4,000 bytes. A token is computed in 1 us.
fn tiers(list: Vec<Tier>, write: Write) -> Tiers {
    Tiers {
        list,
        block_bytes: 4000,
        windows: Vec::new(),
        write,
        max_load_bytes: 1 << 30,
        max_store_bytes: 1 << 30,
        recompute: Recompute { per_token_ns: 1000.0, per_pair_ns: 0.0, learn: false },
        grace_ns: 1_000_000,
        always: false,
    }
}

fn request(id: u64, at_ns: u64, first_id: u64, prompt_tokens: u32) -> Request {
    let mut request = Request::new(id, at_ns, prompt_tokens, 1);
    let ids = (0..u64::from(prompt_tokens.div_ceil(4))).map(|i| first_id + i).collect();
    request.content = Prompt::Ids { ids, tokens_per_id: 4, n_tokens: prompt_tokens };
    request
}

fn simulate(requests: &[Request], cache: Cache, options: &Options) -> Run {
    // 1,000 prompt tokens per millisecond, 100 generated ones.
    let cost = ConstantRates::new(1000.0, 100.0).unwrap();
    run(requests, cache, &cost, options, None, &mut |_| ()).unwrap()
}

/// A prompt of 41 tokens, one that displaces it, and the first one again: its 40 tokens come from the tier. They are
/// 40,000 bytes: 2 us until they are found, 2 us of latency and 10 us at 4 GB/s, where computing them takes 40 us.
#[test]
fn a_displaced_prompt_is_loaded() {
    let list = vec![tier("ram", 4_000_000_000, 2000)];
    let requests = [request(0, 0, 0, 41), request(1, 1_000_000, 100, 61), request(2, 2_000_000, 0, 41)];
    let scheduler = Config { tiers: Some(tiers(list, Write::Through)), ..Config::default() };
    let options = Options { scheduler, tier_capacities: vec![None], ..Options::default() };
    let run = simulate(&requests, cache(64), &options);
    let rows = &run.record.requests;
    assert!(rows.iter().all(|row| row.outcome == RequestOutcome::Finished));
    let ttft_ns = |i: usize| rows[i].first_token_ns.unwrap() - rows[i].arrival_ns;
    let tiers = run.record.tiers.as_ref().unwrap();
    assert_eq!((rows[2].hit_tokens, tiers.loaded_tokens, tiers.loads), (0, 40, 1), "{tiers:?}");
    // The last token is computed after the load.
    assert_eq!((ttft_ns(0), ttft_ns(2)), (2000 + 41_000, 2000 + 12_000 + 1000));
    // 25 blocks: those of the first and the second prompt, 10 and 15; the third is there already.
    assert_eq!((tiers.stored_blocks, tiers.tiers[0].blocks), (25, 25));
    let report = Report::of(&run.record, &Objectives::default()).tiers.unwrap();
    assert_eq!(report.loaded_token_ratio, 40.0 / 143.0);
}

/// Another request decodes, 2 ms a token. The step that follows an arrival waits 100 us for the tier, which has nothing. It does not wait
/// for a tier that needs 600 us, and the request misses that step.
#[test]
fn an_arrival_misses_no_step_because_of_a_fast_tier() {
    // Less than a block: nothing to ask for.
    let mut long = request(0, 0, 0, 3);
    long.output_tokens = 20;
    let requests = [long, request(1, 3_000_000, 100, 41)];
    let ttft_ns = |list: Option<Vec<Tier>>| {
        let tiers = list.map(|list| tiers(list, Write::Through));
        let scheduler = Config { tiers, ..Config::default() };
        let options = Options { scheduler, tier_capacities: vec![None], ..Options::default() };
        let cost = ConstantRates::new(1000.0, 0.5).unwrap();
        let run = run(&requests, cache(1024), &cost, &options, None, &mut |_| ()).unwrap();
        let row = &run.record.requests[1];
        row.first_token_ns.unwrap() - row.arrival_ns
    };
    let without = ttft_ns(None);
    assert_eq!(ttft_ns(Some(vec![tier("disk", 1, 100_000)])), without + 100_000);
    assert_eq!(ttft_ns(Some(vec![tier("store", 1, 600_000)])), without + 2_000_000);
}

/// Written back with 16 of 64 cells kept free: the first prompt has 10 blocks. The second leaves one block free, so the last
/// three of the first prompt are copied; the third leaves one free, so three more are. When the first prompt comes again, its
/// first four blocks are in the cache, and the six others are loaded.
#[test]
fn victims_are_copied_before_memory_is_short() {
    let list = vec![tier("ram", 4_000_000_000, 2000)];
    let prompts = [(0, 41), (100, 21), (200, 13), (0, 41)];
    let request = |(id, (first_id, n)): (u64, (u64, u32))| request(id, id * 1_000_000, first_id, n);
    let requests: Vec<Request> = (0..).zip(prompts).map(request).collect();
    let scheduler =
        Config { tiers: Some(tiers(list, Write::Back { ahead_tokens: 16 })), ..Config::default() };
    let options = Options { scheduler, tier_capacities: vec![None], ..Options::default() };
    let run = simulate(&requests, cache(64), &options);
    let tiers = run.record.tiers.unwrap();
    assert_eq!((run.record.requests[3].hit_tokens, tiers.loaded_tokens), (16, 24), "{tiers:?}");
}

/// A tier that is slower than computing is not read, one without room has nothing, and a full one drops what was used
/// longest ago.
#[test]
fn what_a_tier_has_and_whether_it_is_read() {
    let slow = tier("disk", 400_000_000, 2000); // 102 us for 40 tokens
    let fast = tier("ram", 4_000_000_000, 2000);
    let requests = [request(0, 0, 0, 41), request(1, 1_000_000, 100, 61), request(2, 2_000_000, 0, 41)];
    let cases = [
        // tiers, bytes of each, tokens loaded from each, tokens declined
        (vec![slow.clone()], vec![None], vec![0], 40),
        (vec![fast.clone()], vec![Some(0)], vec![0], 0),
        (vec![fast.clone(), fast.clone()], vec![Some(15 * 4000), None], vec![0, 40], 0),
        (vec![fast.clone(), fast.clone()], vec![Some(15 * 4000), Some(24 * 4000)], vec![0, 36], 0),
        (vec![fast.clone(), fast], vec![Some(20 * 4000), None], vec![20, 20], 0),
    ];
    for (list, tier_capacities, loaded, declined) in cases {
        let shown = format!("{list:?} {tier_capacities:?}");
        let scheduler = Config { tiers: Some(tiers(list, Write::Through)), ..Config::default() };
        let options = Options { scheduler, tier_capacities, ..Options::default() };
        let record = simulate(&requests, cache(64), &options).record.tiers.unwrap();
        let by_tier: Vec<u64> = record.tiers.iter().map(|tier| tier.loaded_tokens).collect();
        assert_eq!((by_tier, record.declined_tokens), (loaded, declined), "{shown}: {record:?}");
    }
}

/// Step costs that depend on every field of a shape.
struct Uneven;

impl StepCost for Uneven {
    fn step_ns(&self, b: &BatchShape) -> u64 {
        1000 + 400 * b.prefill_tokens
            + 90 * b.decode_sequences
            + b.context_tokens() / 3
            + b.attention_pairs / 11
    }
    fn name(&self) -> String {
        "uneven".into()
    }
}

fn load(seed: u64) -> Vec<Request> {
    let mut random = Random(seed);
    let mut at = 0;
    let mut requests = Vec::new();
    for id in 0..150u64 {
        at += u64::from(random.below(40_000));
        let mut request = Request::new(id, at, 1 + random.below(120), 1 + random.below(40));
        let family = u64::from(random.below(6)) << 32;
        let n_tokens = request.prompt_tokens + random.below(30);
        let shared = random.below(30);
        let ids = (0..n_tokens.div_ceil(4)).map(|i| {
            let own = if i < shared { 0 } else { id + 1 };
            family + (own << 10) + u64::from(i)
        });
        request.content = Prompt::Ids { ids: ids.collect(), tokens_per_id: 4, n_tokens };
        requests.push(request);
    }
    requests
}

#[test]
fn several_steps_at_once_give_what_single_steps_give() {
    let (mut loaded, mut dropped) = (0, 0);
    for seed in 0..24u64 {
        let (policy, _) = scheduler::POLICIES[seed as usize % scheduler::POLICIES.len()];
        let write = if seed % 2 == 0 { Write::Through } else { Write::Back { ahead_tokens: 60 } };
        let list = vec![tier("ram", 8_000_000_000, 2000), tier("disk", 4_000_000_000, 9000)];
        let config = Config {
            policy: policy.into(),
            max_batch: 5,
            max_batch_tokens: 48,
            wait_for_prefix: seed % 3 == 0,
            tiers: Some(Tiers {
                grace_ns: if seed % 4 == 0 { 0 } else { 20_000 },
                max_load_bytes: 100_000,
                max_store_bytes: 100_000,
                ..tiers(list, write)
            }),
            ..Config::default()
        };
        let options = |one_by_one| Options {
            scheduler: config.clone(),
            max_new: Some(40),
            one_by_one,
            tier_capacities: vec![Some(100_000), Some(300_000)],
            ..Options::default()
        };
        let requests = load(seed);
        let [fused, single] = [false, true]
            .map(|single| run(&requests, cache(400), &Uneven, &options(single), None, &mut |_| ()).unwrap());
        assert!(fused.turns < single.turns, "seed {seed}: nothing ran as one");
        let shown = |run: &Run| {
            let report = Report::of(&run.record, &Objectives::default());
            format!("{:?}\n{}", run.counters, serde_json::to_string(&report).unwrap())
        };
        let [a, b] = [shown(&fused), shown(&single)];
        let differ = a.bytes().zip(b.bytes()).position(|(a, b)| a != b);
        let around = |text: &str| {
            differ.map(|at| text[at.saturating_sub(200)..].chars().take(300).collect::<String>())
        };
        assert_eq!(around(&a), around(&b), "seed {seed}, {policy}, {write:?}");
        assert_eq!(a.len(), b.len());
        assert!(fused.record.requests.iter().all(|row| row.outcome == RequestOutcome::Finished));
        // A recorded run decides the same, and its event log alone reproduces the decisions.
        let (mut events, mut decisions) = (String::new(), String::new());
        let mut hear = |part: Part, lines: &str| match part {
            Part::Events => events += lines,
            Part::Decisions => decisions += lines,
            Part::Header | Part::Misses | Part::Blocks => {}
        };
        let recorded = run(&requests, cache(400), &Uneven, &options(false), Some(&mut hear), &mut |_| ());
        assert_eq!(shown(&recorded.unwrap()), shown(&single));
        assert!(scheduler::replay(events.as_bytes(), None, None).unwrap() == decisions, "seed {seed}");
        let tiers = fused.record.tiers.unwrap();
        loaded += tiers.loaded_tokens;
        dropped += tiers.tiers[1].dropped_blocks;
    }
    assert!(loaded > 1000 && dropped > 100, "{loaded} loaded, {dropped} dropped");
}
