//! Tiers below the cache. A random driver moves "bytes" late, not at all, or wrongly, and every cell of the cache is
//! compared with what it must contain: a plain list of cells, each with the hash of the tokens up to its position. Every
//! run is replayed from its event log and must match byte for byte.
//!
//! `KVIST_OPS` sets the number of operations; a failure prints its seed.
mod drive;
mod memory;

use crate::common::{cells, group, machine};
use drive::Drive;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, MissReason, PagedSpec, PrefixSpec, Vocabulary};
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;

const BLOCK: u32 = 4;

fn tiers(write: Write) -> Tiers {
    let tier = |name: &str, bytes_per_s, latency_ns| Tier { name: name.into(), bytes_per_s, latency_ns };
    Tiers {
        list: vec![tier("ram", 1_000_000_000, 100), tier("disk", 10_000_000, 2000)],
        block_bytes: 4,
        windows: Vec::new(),
        write,
        max_load_bytes: 64,
        max_store_bytes: 64,
        recompute: Recompute { per_token_ns: 500.0, per_pair_ns: 1.0, learn: false },
        grace_ns: 3000,
        always: false,
    }
}

fn paged(capacity_tokens: u32, n_groups: usize) -> Cache {
    let groups = vec![group(capacity_tokens); n_groups];
    let prefix = Some(PrefixSpec::default());
    Cache::paged(&PagedSpec { block_tokens: BLOCK, groups, rollback_tokens: 0, prefix }).unwrap()
}

/// A group with a window before one that keeps every token.
fn windowed(capacity_tokens: u32) -> Cache {
    let visibility = Visibility { window: Some(10), sinks: 3 };
    let groups = vec![GroupSpec { visibility, ..group(capacity_tokens) }, group(capacity_tokens)];
    let prefix = Some(PrefixSpec::default());
    Cache::paged(&PagedSpec { block_tokens: BLOCK, groups, rollback_tokens: 0, prefix }).unwrap()
}

fn mix(hash: u64, token: u32) -> u64 {
    Random(hash ^ u64::from(token).wrapping_mul(0x9E37)).next()
}

fn configs() -> Vec<Config> {
    let write = [Write::Through, Write::Back { ahead_tokens: 24 }, Write::Back { ahead_tokens: 0 }];
    let mut configs = Vec::new();
    for (i, write) in write.into_iter().enumerate() {
        for (j, (policy, _)) in POLICIES.iter().enumerate() {
            configs.push(Config {
                policy: (*policy).into(),
                max_batch: 4,
                max_batch_tokens: 24,
                admission: match (i + j) % 3 {
                    0 => Admission::Conservative,
                    _ => Admission::Optimistic { headroom_tokens: 8 },
                },
                preempted: if j % 2 == 0 { Preempted::Recompute } else { Preempted::Kept },
                prefix_order: [PrefixOrder::Off, PrefixOrder::Ties, PrefixOrder::Window(3)][(i + j) % 3],
                wait_for_prefix: (i + j) % 2 == 0,
                max_failures: 4,
                tiers: Some(Tiers {
                    recompute: Recompute { learn: j == 1, ..tiers(write).recompute },
                    // Sometimes most loads need several parts.
                    max_load_bytes: if (i + j) % 2 == 0 { 64 } else { 12 },
                    always: (i + j) % 4 == 3,
                    ..tiers(write)
                }),
                ..Config::default()
            });
        }
    }
    configs
}

fn ops() -> u64 {
    std::env::var("KVIST_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(120_000)
}

#[test]
fn restored_cells_contain_what_was_computed_and_a_replay_decides_the_same() {
    let (mut done, mut seed) = (0, 0);
    let (mut n_loaded, mut n_failed, mut n_late, mut n_skipped, mut n_demoted, mut n_moved, mut n_regained) =
        (0, 0, 0, 0, 0, 0, 0);
    let (mut n_loaded_in_windows, mut n_abandoned, mut n_busy, mut n_parts, mut n_victims) = (0, 0, 0, 0, 0);
    while done < ops() {
        for config in configs() {
            seed += 1;
            println!("seed {seed}, {}", config.policy);
            let (cache, has_window) = match seed % 3 {
                0 => (paged(120, 1), false),
                1 => (paged(120, 2), false),
                _ => (windowed(120), true),
            };
            let mut drive = Drive::new(seed, config.clone(), cache);
            let mut next_id = 0;
            for _ in 0..400 {
                drive.operate(&mut next_id);
            }
            drive.finish();
            done += 400;
            let counters = drive.scheduler.tier_counters().unwrap();
            let loaded: u64 = counters.loaded_tokens.iter().sum();
            let by_request: u64 = drive.ended.iter().flat_map(|ended| ended.loaded).map(u64::from).sum();
            assert_eq!(loaded, by_request + counters.regained_tokens);
            n_regained += counters.regained_tokens;
            assert_eq!(drive.ended.len() as u64, next_id, "every request ends once");
            n_loaded += drive.n_loaded;
            n_loaded_in_windows += if has_window { drive.n_loaded } else { 0 };
            n_moved += drive.n_moved;
            n_abandoned += drive.n_abandoned;
            n_parts += drive.n_parts;
            n_victims += drive.n_victims;
            n_busy +=
                drive.ended.iter().filter(|ended| ended.not_loaded == Some(NotLoaded::Busy)).count() as u64;
            n_failed += counters.failed_loads;
            n_late += counters.late_loads;
            n_skipped += counters.skipped_blocks;
            n_demoted += counters.stored_blocks;
            // What was computed, supplied and loaded is what was cached or lost.
            for ended in drive.ended.iter().filter(|ended| ended.end == End::Finished) {
                let supplied =
                    u64::from(ended.hit_tokens + ended.regained_tokens + ended.loaded.iter().sum::<u32>());
                let cached = u64::from(ended.prompt_tokens + ended.generated - 1);
                assert_eq!(ended.computed_tokens + supplied, cached + ended.lost_tokens, "{ended:?}");
            }
            let replayed = replay(drive.events.as_bytes(), None, None).unwrap();
            let differs = drive.decisions.lines().zip(replayed.lines()).find(|(a, b)| a != b);
            assert_eq!(differs, None);
            assert_eq!(drive.decisions.len(), replayed.len());
        }
    }
    let counts = [
        n_loaded,
        n_failed,
        n_late,
        n_skipped,
        n_demoted,
        n_moved,
        n_regained,
        n_loaded_in_windows,
        n_abandoned,
        n_parts,
        n_victims,
    ];
    assert!(n_busy > 0, "no load found too little room, or none said so");
    assert!(
        counts.iter().all(|n| *n > 20),
        "loaded, failed, late, skipped, stored, moved, regained, loaded in windows, abandoned, loaded in part, copied as victims: {counts:?}"
    );
}

/// Stories, one at a time: a scheduler with tiers, one request of 13 tokens whose first 12 are in the second tier.
fn story(config: Config) -> Scheduler {
    let mut scheduler = Scheduler::new(config, paged(80, 1), None).unwrap();
    let mut request = Request::new(0, 0, 13, 1);
    request.prompt = Prompt::Tokens((0..13).collect());
    let (prompt, salt) = (request.prompt.clone(), request.salt.clone());
    scheduler.arrive(0, request).unwrap();
    let find = FindOrder { request: RequestId(0), salt, prompt, n_tokens: 12, hit_tokens: 0 };
    assert_eq!(scheduler.drain_orders(), [Order::Find(find)]);
    scheduler
}

fn config() -> Config {
    Config { tiers: Some(tiers(Write::Through)), ..Config::default() }
}

fn whole(tier: u8) -> Vec<Run> {
    vec![Run::new(Some(tier), 12)]
}

fn computed(scheduler: &Scheduler) -> u64 {
    scheduler.counters().computed_tokens
}

#[test]
fn a_request_waits_for_its_lookup_and_no_longer_than_the_grace() {
    let mut s = story(config());
    assert_eq!(s.lookup_deadline_ns(), Some(500_000));
    assert_eq!(s.iterate(0, &mut machine(1)), Iteration::NothingToDo);
    assert_eq!(s.next_tier_deadline_ns(), Some(3000));
    assert_eq!(s.lookup_deadline_ns(), None, "a step waits once");
    assert_eq!(s.iterate(2999, &mut machine(1)), Iteration::NothingToDo);
    assert_eq!(s.iterate(3000, &mut machine(1)), Iteration::Ran { steps: 1, elapsed_ns: 1 });
    assert_eq!((computed(&s), s.next_tier_deadline_ns()), (13, None));
    assert_eq!(s.drain_ended().next().unwrap().not_loaded, Some(NotLoaded::Unanswered));
    s.found(3001, RequestId(0), whole(1)); // too late: nothing happens
    assert!(!matches!(s.drain_orders()[..], [Order::Load(_)]));
}

fn load(s: &mut Scheduler) -> LoadOrder {
    s.found(10, RequestId(0), whole(1));
    assert_eq!(s.lookup_deadline_ns(), None, "it is answered");
    assert_eq!(s.iterate(10, &mut machine(1)), Iteration::NothingToDo, "it is loading");
    let mut orders = s.drain_orders();
    assert_eq!((orders.len(), s.n_loading(), s.bytes_in_flight().0), (1, 1, 12));
    let Some(Order::Load(order)) = orders.pop() else { panic!("no load") };
    assert_eq!((order.positions.clone(), order.runs.clone()), (0..12, whole(1)));
    order
}

#[test]
fn loaded_tokens_are_not_computed() {
    let mut s = story(config());
    s.explain_misses(true);
    let order = load(&mut s);
    assert!(s.loaded(3000, order.id, true, 2990));
    s.iterate(3000, &mut machine(1));
    let ended = s.drain_ended().next().unwrap();
    assert_eq!(
        (computed(&s), ended.hit_tokens, ended.loaded, ended.admitted_ns),
        (1, 0, [0, 12, 0, 0], Some(3000))
    );
    assert_eq!(ended.not_loaded, None);
    assert_eq!(ended.miss, Some(MissReason::UnalignedTail { position: 12 }), "why no more was loaded");
    // The next request with this prompt hits, and nothing is loaded again.
    let mut request = Request::new(1, 4000, 13, 1);
    request.prompt = Prompt::Tokens((0..13).collect());
    s.arrive(4000, request).unwrap();
    s.found(4000, RequestId(1), whole(1));
    s.iterate(4000, &mut machine(1));
    let ended = s.drain_ended().next().unwrap();
    assert_eq!((ended.hit_tokens, ended.loaded), (12, [0; MAX_TIERS]));
}

/// Regression: what the cache had and answered from was not used in the tiers. When they had dropped it, and the cache evicted it, it was
/// gone.
#[test]
fn what_the_cache_has_and_no_tier_is_copied_again() {
    let back = Write::Back { ahead_tokens: 0 };
    let none = |until| Run::new(None, until);
    for (write, runs, expected) in [
        (Write::Through, vec![none(12)], Some(0..3)),
        (Write::Through, vec![Run::new(Some(1), 4), none(12)], Some(1..3)),
        (Write::Through, vec![Run::new(Some(1), 4), none(8), Run::new(Some(0), 12)], Some(1..2)),
        (Write::Through, whole(0), None),
        (Write::Through, vec![none(16)], Some(0..3)), // more than it was asked for
        (back, vec![none(12)], None),
    ] {
        for n_tokens in [13, 15] {
            let mut s = story(Config { tiers: Some(tiers(write)), ..Config::default() });
            s.found(0, RequestId(0), Vec::new());
            s.iterate(0, &mut machine(1));
            let of_first = s.drain_orders().into_iter().find_map(|order| match order {
                Order::Cached(cached) => Some(cached.blocks),
                _ => None,
            });
            let of_first = of_first.expect("three blocks are cached");
            let mut request = Request::new(1, 10, n_tokens, 1);
            request.prompt = Prompt::Tokens((0..n_tokens).collect());
            s.arrive(10, request).unwrap();
            // The cache has all of it, so the request does not wait. With `back` nothing has to be asked then.
            let asks = matches!(&s.drain_orders()[..], [Order::Find(find)] if find.hit_tokens == 12);
            assert_eq!(asks, write == Write::Through);
            s.found(11, RequestId(1), runs.clone());
            let again = s.drain_orders().into_iter().find_map(|order| match order {
                Order::Store(store) => Some(store),
                _ => None,
            });
            let blocks = again.as_ref().map(|store| store.blocks.clone());
            assert_eq!(blocks, expected.clone().map(|range| of_first[range].to_vec()), "{runs:?}");
            assert!(again.is_none_or(|store| store.is_again && store.request == Some(RequestId(1))));
            s.iterate(12, &mut machine(1));
            assert_eq!(computed(&s), 13 + u64::from(n_tokens) - 12);
        }
    }
}

/// What the cache never evicts is not copied, however often it is looked up.
#[test]
fn a_text_that_stays_in_the_cache_is_not_copied_again() {
    for (stays, first) in [(8, Some(8)), (7, Some(4)), (12, None)] {
        let mut s = story(config());
        s.found(0, RequestId(0), Vec::new());
        s.iterate(0, &mut machine(1));
        s.note_pinned_text("", &(0..stays).collect::<Vec<_>>());
        s.drain_orders();
        let mut request = Request::new(1, 10, 13, 1);
        request.prompt = Prompt::Tokens((0..13).collect());
        s.arrive(10, request).unwrap();
        s.found(11, RequestId(1), vec![Run::new(None, 12)]);
        let again = s.drain_orders().into_iter().find_map(|order| match order {
            Order::Store(store) => Some(12 - 4 * store.blocks.len() as u32),
            _ => None,
        });
        assert_eq!(again, first, "{stays} tokens stay");
    }
}

/// A tier may have all of a prompt before it has what the windows of a model see at its end.
#[test]
fn a_later_answer_says_where_a_load_may_end() {
    let mut s = story(config());
    let answer = |ends| vec![Run { ends, ..Run::new(Some(1), 12) }];
    s.found(0, RequestId(0), answer(Ends::Nowhere));
    s.found(1, RequestId(0), answer(Ends::AtEnd));
    s.iterate(1, &mut machine(1));
    let loads = s.drain_orders().into_iter().filter(|order| matches!(order, Order::Load(_))).count();
    assert_eq!(loads, 1);
}

/// 12 tokens are 12 bytes; with 4 in flight they come in three parts, and a part that fails is computed with the rest.
#[test]
fn what_exceeds_the_bound_is_loaded_in_parts() {
    for fails in [None, Some(0), Some(2)] {
        let config = Config { tiers: Some(Tiers { max_load_bytes: 4, ..tiers(Write::Through) }), ..config() };
        let mut s = story(config);
        s.found(0, RequestId(0), whole(0));
        let mut loaded = 0;
        for part in 0..3u32 {
            let now = 10 + u64::from(part);
            s.iterate(now, &mut machine(1));
            let load = s.drain_orders().into_iter().find_map(|order| match order {
                Order::Load(load) => Some(load),
                _ => None,
            });
            let Some(load) = load else { break };
            assert_eq!(
                (load.positions.clone(), s.bytes_in_flight().0),
                (4 * part..4 * part + 4, 4),
                "{fails:?}"
            );
            let ok = fails != Some(part);
            s.loaded(now, load.id, ok, 1);
            loaded += if ok { 4 } else { 0 };
        }
        assert_eq!(loaded, 4 * fails.unwrap_or(3));
        while s.iterate(20, &mut machine(1)) != Iteration::NothingToDo {}
        let ended = s.drain_ended().next().unwrap();
        assert_eq!((ended.loaded[0], computed(&s)), (loaded, u64::from(13 - loaded)), "{fails:?}");
    }
}

#[test]
fn a_failed_load_is_computed() {
    let mut s = story(config());
    let order = load(&mut s);
    assert!(s.loaded(20, order.id, false, 10));
    s.iterate(20, &mut machine(1));
    assert_eq!((computed(&s), s.tier_counters().unwrap().failed_loads), (13, 1));
    let ended = s.drain_ended().next().unwrap();
    assert_eq!((ended.loaded, ended.not_loaded), ([0; MAX_TIERS], Some(NotLoaded::Failed)));
}

/// One block in the middle of a long prompt that a tier had dropped made the whole prompt be computed.
#[test]
fn what_has_arrived_of_a_failed_load_is_kept() {
    let mut s = story(config());
    s.record();
    let order = load(&mut s);
    // Blocks have four tokens.
    assert!(s.loaded_part(20, order.id, 9, 10));
    s.iterate(20, &mut machine(1));
    let counters = s.tier_counters().unwrap();
    assert_eq!(
        (computed(&s), counters.failed_loads, counters.wasted_tokens, counters.loaded_tokens[1]),
        (5, 1, 4, 8)
    );
    let ended = s.drain_ended().next().unwrap();
    assert_eq!((ended.loaded[1], ended.not_loaded), (8, Some(NotLoaded::Failed)));
    // The block that was computed is being copied.
    assert_eq!((s.used_cells(), s.bytes_in_flight()), (4, (0, 4)));
    let events = s.events().take();
    assert!(events.contains(r#""ok":false,"took":10,"tokens":8}"#), "{events}");
}

#[test]
fn a_late_load_is_computed_and_its_blocks_are_free_when_it_ends() {
    let mut s = story(config());
    let order = load(&mut s);
    // 2,000 ns of latency and 12 bytes at 10 MB/s: 3,200 ns. Four times that, and the grace.
    let deadline = 10 + 4 * 3200 + 3000;
    assert_eq!(s.next_tier_deadline_ns(), Some(deadline));
    assert_eq!(s.iterate(deadline - 1, &mut machine(1)), Iteration::NothingToDo);
    s.iterate(deadline, &mut machine(1));
    assert_eq!((computed(&s), s.tier_counters().unwrap().late_loads), (13, 1));
    assert!(s.drain_orders().contains(&Order::Abandon { load: order.id }));
    assert_eq!(s.drain_ended().next().unwrap().not_loaded, Some(NotLoaded::Late));
    let free = s.free_cells();
    assert!(s.loaded(deadline + 5, order.id, true, deadline), "its bytes come after all");
    assert_eq!(s.tier_counters().unwrap().failed_loads, 0);
    assert_eq!(s.free_cells(), free + 12);
}

#[test]
fn a_cancelled_request_frees_its_load_when_it_ends() {
    let mut s = story(config());
    let order = load(&mut s);
    assert!(s.cancel(11, RequestId(0)));
    assert_eq!(s.drain_ended().next().unwrap().end, End::Cancelled);
    assert_eq!((s.free_cells(), s.n_loading()), (68, 0));
    assert_eq!(s.drain_orders(), [Order::Abandon { load: order.id }]);
    assert!(s.loaded(12, order.id, false, 1));
    assert_eq!((s.free_cells(), s.bytes_in_flight()), (80, (0, 0)));
    let counters = s.tier_counters().unwrap();
    assert_eq!(
        (counters.wasted_tokens, counters.failed_loads),
        (12, 0),
        "it was stopped, and has not failed"
    );
}

/// The tiers did not answer, and then another request has computed the same prompt: nothing had to be loaded.
#[test]
fn a_request_that_the_cache_has_in_the_end_gives_no_reason() {
    let mut s = story(Config { max_batch: 1, ..config() });
    let mut request = Request::new(1, 0, 13, 1);
    request.prompt = Prompt::Tokens((0..13).collect());
    s.arrive(0, request).unwrap();
    // Both lookups are late; the first request runs alone.
    while s.iterate(3000, &mut machine(1)) != Iteration::NothingToDo {}
    let ended: Vec<Ended> = s.drain_ended().collect();
    let why = |i: usize| (ended[i].hit_tokens, ended[i].not_loaded);
    assert_eq!((why(0), why(1)), ((0, Some(NotLoaded::Unanswered)), (12, None)));
}

/// Computing 12 tokens takes 6 us and a little; loading them 3.2 us from the disk. With a compute time of 200 ns per token
/// the disk is slower, and the memory tier still faster.
#[test]
fn the_faster_way_is_taken() {
    for (per_token_ns, tier, loads) in
        [(500.0, 1, true), (200.0, 1, false), (200.0, 0, true), (5.0, 0, false)]
    {
        let recompute = Recompute { per_token_ns, per_pair_ns: 0.0, learn: false };
        let tiers = Some(Tiers { recompute, ..tiers(Write::Through) });
        let mut s = story(Config { tiers, ..config() });
        s.found(0, RequestId(0), whole(tier));
        s.iterate(0, &mut machine(1));
        let orders = s.drain_orders();
        let loading = orders.iter().any(|order| matches!(order, Order::Load(_)));
        assert_eq!((loading, computed(&s) > 0), (loads, !loads), "{per_token_ns} ns, tier {tier}");
        assert_eq!(s.tier_counters().unwrap().declined_tokens, if loads { 0 } else { 12 });
        let why = s.drain_ended().next().and_then(|ended| ended.not_loaded);
        assert_eq!(why, (!loads).then_some(NotLoaded::Slower));
    }
}

/// Loading takes much longer than computing, and is done all the same. It is estimated nevertheless: the request waits for it as long
/// as for any load, and for the next one longer, because this one was slow.
#[test]
fn a_tier_that_is_always_loaded_from_is_waited_for_by_its_estimate() {
    let recompute = Recompute { per_token_ns: 5.0, per_pair_ns: 0.0, learn: false };
    let tiers = Some(Tiers { recompute, always: true, ..tiers(Write::Through) });
    let mut s = story(Config { tiers, ..config() });
    let first = load(&mut s);
    // 2,000 ns of latency and 12 bytes at 10 MB/s; four times that, and the grace.
    assert_eq!(s.next_tier_deadline_ns(), Some(10 + 4 * 3200 + 3000));
    assert!(s.loaded(10_000, first.id, true, 8 * 3200));
    s.iterate(10_000, &mut machine(1));
    assert_eq!((computed(&s), s.tier_counters().unwrap().declined_tokens), (1, 0));
    let mut request = Request::new(1, 20_000, 13, 1);
    request.prompt = Prompt::Tokens((100..113).collect());
    s.arrive(20_000, request).unwrap();
    s.found(20_000, RequestId(1), whole(1));
    s.iterate(20_000, &mut machine(1));
    assert_eq!(s.n_loading(), 1);
    // An average: (3 * 1 + 8) / 4 times the estimate.
    assert_eq!(s.next_tier_deadline_ns(), Some(20_000 + 4 * (3200 * 11 / 4) + 3000));
}

/// Loads that are cancelled, or fail, at once do not make a tier look fast.
#[test]
fn a_load_that_ends_early_says_nothing_about_the_speed() {
    for cancelled in [true, false] {
        let mut s = story(config());
        let first = load(&mut s);
        if cancelled {
            s.cancel(11, RequestId(0));
        }
        assert!(s.loaded(12, first.id, cancelled, 1));
        s.iterate(12, &mut machine(1));
        let mut request = Request::new(1, 20_000, 13, 1);
        request.prompt = Prompt::Tokens((100..113).collect());
        s.arrive(20_000, request).unwrap();
        s.found(20_000, RequestId(1), whole(1));
        s.iterate(20_000, &mut machine(1));
        assert_eq!(s.next_tier_deadline_ns(), Some(20_000 + 4 * 3200 + 3000), "cancelled: {cancelled}");
    }
}

/// A tier that is slower than configured is believed only for a while: loads that took 100 times their estimate make
/// computing faster, and each prompt that is computed although the tier had it brings the estimate nearer to the
/// configuration.
#[test]
fn a_slow_tier_is_avoided_and_tried_again() {
    let recompute = Recompute { per_token_ns: 300.0, per_pair_ns: 0.0, learn: false };
    let tiers = Some(Tiers { recompute, ..tiers(Write::Through) });
    let mut s = story(Config { tiers, ..config() });
    let order = load(&mut s);
    assert!(s.loaded(10 + 12_000, order.id, true, 12_000));
    s.iterate(12_010, &mut machine(1));
    let mut declined = 0;
    for id in 1.. {
        let mut request = Request::new(id, 20_000, 13, 1);
        request.prompt = Prompt::Tokens((0..13).map(|token| token + 100 * id as u32).collect());
        s.arrive(20_000, request).unwrap();
        s.found(20_000, RequestId(id), whole(1));
        s.iterate(20_000, &mut machine(1));
        let orders = s.drain_orders();
        for order in &orders {
            if let Order::Store(store) = order {
                s.stored(20_000, store.id, true);
            }
        }
        if s.n_loading() > 0 {
            break;
        }
        declined += 1;
        assert!(declined < 100, "it is never tried again");
    }
    assert!(declined > 0, "the estimate did not change");
}

/// At most 64 bytes are on their way; the request behind waits for the first load, and one without a load overtakes.
#[test]
fn bytes_in_flight_are_bounded() {
    let mut s = Scheduler::new(config(), paged(400, 1), None).unwrap();
    for id in 0..3 {
        let mut request = Request::new(id, 0, 61, 1);
        request.prompt = Prompt::Tokens((0..61).map(|token| token + 100 * id as u32).collect());
        s.arrive(0, request).unwrap();
    }
    let run = |until| vec![Run::new(Some(0), until)];
    for (id, runs) in [(0, run(60)), (1, run(60)), (2, Vec::new())] {
        s.found(0, RequestId(id), runs);
    }
    s.iterate(0, &mut machine(1));
    let orders = s.drain_orders();
    let loads: Vec<_> = orders
        .iter()
        .filter_map(|order| if let Order::Load(load) = order { Some(load) } else { None })
        .collect();
    let bytes: u64 = loads.iter().map(|load| load.positions.len() as u64).sum();
    assert_eq!((bytes, s.bytes_in_flight().0), (64, 64), "{loads:?}");
    assert!(s.drain_ended().any(|ended| ended.id == RequestId(2)), "the one without a load is not held up");
}

/// Prompts of 20 tokens that share nothing, one after the other, which no tier has. `copy` is called with every copy to the tiers.
fn eight_prompts(s: &mut Scheduler, mut copy: impl FnMut(&mut Scheduler, u64, StoreOrder)) {
    for id in 0..8u64 {
        let now = id * 100_000;
        let mut request = Request::new(id, now, 20, 1);
        request.prompt = Prompt::Tokens((0..20).map(|token| token + 100 * id as u32).collect());
        s.arrive(now, request).unwrap();
        s.found(now, RequestId(id), Vec::new());
        for _ in 0..4 {
            s.iterate(now, &mut machine(1));
            for order in s.drain_orders() {
                if let Order::Store(store) = order {
                    copy(s, now, store);
                }
            }
        }
    }
}

/// With write-back, the victims are copied before memory is short, and the hit is gone only then.
#[test]
fn write_back_copies_the_next_victims() {
    let tiers = Some(tiers(Write::Back { ahead_tokens: 20 }));
    let mut s = Scheduler::new(Config { tiers, ..Config::default() }, paged(80, 1), None).unwrap();
    let mut stored = Vec::new();
    eight_prompts(&mut s, |s, now, store| {
        assert_eq!(store.request, None);
        stored.extend(store.blocks.iter().map(|block| block.hash));
        assert!(s.stored(now, store.id, true));
    });
    assert_eq!(s.counters().evictions, 0, "no step had to evict");
    let of_first = s.cache().prefix_hashes("", &kvist_cache::Content::Tokens(&(0..20).collect::<Vec<_>>()));
    assert!(of_first.iter().all(|hash| stored.contains(hash)), "the oldest prompt is copied");
}

/// Regression: with write-through, a block whose copy was left out or failed, and that no prompt hit before its eviction, was gone.
#[test]
fn write_through_copies_the_victims_that_the_tiers_lack() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum How {
        /// Only two blocks may be on their way.
        Skipped,
        /// Every copy of computed blocks fails.
        Failed,
        /// It is copied, and cannot be written.
        Unwritten,
        Written,
    }
    for how in [How::Skipped, How::Failed, How::Unwritten, How::Written] {
        let max_store_bytes = if how == How::Skipped { 8 } else { 64 };
        let tiers = Some(Tiers { max_store_bytes, ..tiers(Write::Through) });
        let mut s = Scheduler::new(Config { tiers, ..Config::default() }, paged(80, 1), None).unwrap();
        let (mut stored, mut of_victims) = (Vec::new(), 0);
        eight_prompts(&mut s, |s, now, store| {
            let is_victim = store.request.is_none();
            let ok = is_victim || how != How::Failed;
            let is_written = is_victim || matches!(how, How::Skipped | How::Written);
            of_victims += if is_victim { store.blocks.len() } else { 0 };
            if is_written {
                stored.extend(store.blocks.iter().map(|block| block.hash));
            }
            assert!(s.stored(now, store.id, ok));
            if ok && !is_written {
                let named: Vec<_> = store.blocks.iter().map(|block| s.named(block).unwrap()).collect();
                s.unsaved(now, &named);
            }
        });
        let of_first =
            s.cache().prefix_hashes("", &kvist_cache::Content::Tokens(&(0..20).collect::<Vec<_>>()));
        assert_eq!(of_first.len(), 5);
        for hash in &of_first {
            assert_eq!(stored.iter().filter(|one| *one == hash).count(), 1, "{how:?}: the oldest prompt");
        }
        // Nothing is evicted ahead of time where the tiers have it all.
        assert_eq!(
            (of_victims == 0, s.counters().evictions == 0),
            (how == How::Written, how != How::Written),
            "{how:?}"
        );
    }
}

/// A block whose number has other content by now is not copied in its place.
#[test]
fn what_is_cached_no_more_is_not_copied() {
    let mut s = story(config());
    s.found(0, RequestId(0), Vec::new());
    s.iterate(0, &mut machine(1));
    let orders = s.drain_orders();
    let Some(Order::Store(store)) = orders.last() else { panic!("{orders:?}") };
    let named: Vec<_> = store.blocks.iter().map(|block| s.named(block).unwrap()).collect();
    assert!(s.stored(0, store.id, true));
    s.unsaved(0, &named);
    assert!(s.forget(1, "") > 0);
    s.drain_orders();
    for id in 1..8u64 {
        let mut request = Request::new(id, id, 20, 1);
        request.prompt = Prompt::Tokens((0..20).map(|token| token + 100 * id as u32).collect());
        s.arrive(id, request).unwrap();
        s.found(id, RequestId(id), Vec::new());
        for _ in 0..4 {
            s.iterate(id, &mut machine(1));
            for order in s.drain_orders() {
                let Order::Store(store) = order else { continue };
                assert!(store.request.is_some(), "{store:?}");
                assert!(s.stored(id, store.id, true));
            }
        }
    }
    assert!(s.counters().evictions > 0);
}

/// Copies in flight are memory that comes back: a request that needs it waits instead of being refused.
#[test]
fn nothing_is_refused_while_copies_hold_memory() {
    let mut s = Scheduler::new(config(), paged(20, 1), None).unwrap();
    let request = |id: u64, n: u32| {
        let mut request = Request::new(id, 0, n, 1);
        request.prompt = Prompt::Tokens((0..n).map(|token| token + 100 * id as u32).collect());
        request
    };
    s.arrive(0, request(0, 16)).unwrap();
    s.found(0, RequestId(0), Vec::new());
    s.iterate(0, &mut machine(1));
    let orders = s.drain_orders();
    let Some(Order::Store(store)) = orders.last() else { panic!("{orders:?}") };
    assert_eq!((store.request, store.blocks.len()), (Some(RequestId(0)), 4));
    s.drain_ended();
    s.arrive(1, request(1, 18)).unwrap();
    s.found(1, RequestId(1), Vec::new());
    assert_eq!(s.iterate(1, &mut machine(1)), Iteration::NothingToDo);
    assert_eq!(s.drain_ended().count(), 0);
    assert!(s.stored(2, store.id, true));
    s.iterate(2, &mut machine(1));
    assert_eq!(s.drain_ended().map(|ended| ended.end).collect::<Vec<_>>(), [End::Finished]);
}

#[test]
fn tiers_that_cannot_be_used_are_refused() {
    let refusal = |tiers: Tiers, cache: Cache| {
        let config = Config { tiers: Some(tiers), ..Config::default() };
        Scheduler::new(config, cache, None).map(|_| ()).unwrap_err().to_string()
    };
    let base = || tiers(Write::Through);
    let windowed = GroupSpec { visibility: Visibility { window: Some(8), sinks: 0 }, ..group(80) };
    let prefix = Some(PrefixSpec { vocabulary: Vocabulary::Tokens, ..PrefixSpec::default() });
    let windowed = PagedSpec { block_tokens: 4, groups: vec![windowed], rollback_tokens: 0, prefix };
    let plain = PagedSpec { groups: vec![group(80)], prefix: None, ..windowed.clone() };
    for (found, expected) in [
        (refusal(Tiers { list: Vec::new(), ..base() }, paged(80, 1)), "there are 0 tiers"),
        (refusal(Tiers { block_bytes: 0, ..base() }, paged(80, 1)), "block_bytes of the tiers is 0"),
        (
            refusal(
                Tiers {
                    recompute: Recompute { per_token_ns: f64::NAN, per_pair_ns: 0.0, learn: false },
                    ..base()
                },
                paged(80, 1),
            ),
            "per_token_ns of the tiers is NaN",
        ),
        (refusal(base(), cells(80)), "tiers need a cache with a prefix index"),
        (refusal(base(), Cache::paged(&plain).unwrap()), "tiers need a cache with a prefix index"),
        (refusal(base(), Cache::paged(&windowed).unwrap()), "some layers that see the whole text"),
    ] {
        assert!(found.contains(expected), "{found}");
    }
}
