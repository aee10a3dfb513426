//! Tiers of a fleet: what a worker finds that another has computed, by hand, and what must hold whatever happens.
use super::loads::{self, requests};
use super::{Uneven, cache, fleet};
use kvist_cache::Prompt;
use kvist_scheduler::{Config, Recompute, Tier, Tiers, Write};
use kvist_simulator::cost::ConstantRates;
use kvist_simulator::fleet::{Change, FleetOptions, FleetRun, POLICIES, Policy, Store, WhatChanges, check};
use kvist_simulator::report::RequestOutcome;
use kvist_simulator::request::Request;
use kvist_simulator::run::Options;
use kvist_testing::SplitMix64 as Random;

const BLOCK_BYTES: u64 = 4000;

fn tier(name: &str, bytes_per_s: u64, latency_ns: u64) -> Tier {
    Tier { name: name.into(), bytes_per_s, latency_ns }
}

/// Blocks of 4 tokens have 4,000 bytes. A token is computed in 1 us.
fn tiers(list: Vec<Tier>) -> Tiers {
    Tiers {
        list,
        block_bytes: BLOCK_BYTES,
        windows: Vec::new(),
        write: Write::Through,
        max_load_bytes: 1 << 30,
        max_store_bytes: 1 << 30,
        recompute: Recompute { per_token_ns: 1000.0, per_pair_ns: 0.0, learn: false },
        grace_ns: 1_000_000,
        always: false,
    }
}

/// Random tiers, the last of them shared if asked for.
pub fn random(random: &mut Random, shared: bool, options: &mut FleetOptions) {
    let list = [tier("ram", 8_000_000_000, 2000), tier("disk", 4_000_000_000, 9000)];
    let from = random.below(2) as usize;
    let list = list[from..from + 1 + random.below(2 - from as u32) as usize].to_vec();
    let n = list.len();
    options.run.tier_capacities = (0..n).map(|_| Some(BLOCK_BYTES * u64::from(random.below(120)))).collect();
    options.durable_tiers = (0..n).map(|i| random.below(2) == 0 && !(shared && i + 1 == n)).collect();
    options.store = shared.then(|| Store {
        bytes_per_s: (random.below(3) > 0).then(|| 1_000_000_000 * (1 + u64::from(random.below(20)))),
    });
    options.run.scheduler.tiers = Some(Tiers {
        write: if random.below(2) == 0 { Write::Through } else { Write::Back { ahead_tokens: 60 } },
        grace_ns: [0, 20_000][random.below(2) as usize],
        max_load_bytes: 100_000,
        max_store_bytes: 100_000,
        ..tiers(list)
    });
}

fn request(id: u64, at_ns: u64, first_id: u64, prompt_tokens: u32) -> Request {
    let mut request = Request::new(id, at_ns, prompt_tokens, 1);
    let ids = (0..u64::from(prompt_tokens.div_ceil(8))).map(|i| first_id + i).collect();
    request.content = Prompt::Ids { ids, tokens_per_id: 8, n_tokens: prompt_tokens };
    request
}

/// Workers that take turns, over caches of 64 tokens, with one shared store of 4 GB/s links and 2 us of latency.
fn sharing(workers: u32, bytes_per_s: Option<u64>, capacity: Option<u64>) -> FleetOptions {
    let scheduler =
        Config { tiers: Some(tiers(vec![tier("store", 4_000_000_000, 2000)])), ..Config::default() };
    FleetOptions {
        run: Options { scheduler, tier_capacities: vec![capacity], ..Options::default() },
        store: Some(Store { bytes_per_s }),
        workers,
        rows: true,
        ..FleetOptions::default()
    }
}

/// 1,000 prompt tokens per millisecond, 100 generated ones.
fn simulate(requests: &[Request], options: &FleetOptions) -> FleetRun {
    fleet(requests, &cache(64), &ConstantRates::new(1000.0, 100.0).unwrap(), options)
}

fn ttft_ns(run: &FleetRun, i: usize) -> u64 {
    run.rows[i].first_token_ns.unwrap() - run.rows[i].arrival_ns
}

fn loaded(run: &FleetRun) -> u64 {
    run.report.tiers.as_ref().unwrap().record.loaded_tokens
}

/// Worker 0 computes 41 tokens: 2 us until nothing is found, 41 us. Its ten blocks are written after that, 40,000 bytes in 10 us
/// and 2 us of latency, so they are there 55 us after its arrival. Worker 1 loads them: 2 us until they are found, 12 us, and
/// 1 us for the last token. A nanosecond earlier it finds nothing, and computes all.
#[test]
fn a_worker_loads_what_another_has_computed() {
    for (at_ns, expected) in [(55_000, (40, 15_000)), (54_999, (0, 43_000))] {
        let run = simulate(&[request(0, 0, 0, 41), request(1, at_ns, 0, 41)], &sharing(2, None, None));
        assert_eq!((loaded(&run), ttft_ns(&run, 1)), expected, "{at_ns}");
        assert_eq!((ttft_ns(&run, 0), run.rows[1].hit_tokens), (43_000, 0));
        let list = &run.report.fleet.list;
        assert_eq!((list[0].requests, list[1].requests), (1, 1));
    }
    // Without a store between them, it computes them too.
    let mut own = sharing(2, None, None);
    own.store = None;
    let run = simulate(&[request(0, 0, 0, 41), request(1, 500_000, 0, 41)], &own);
    assert_eq!((loaded(&run), ttft_ns(&run, 1)), (0, 43_000));
}

/// A worker that fails takes what it is writing with it. What it has written stays.
#[test]
fn blocks_of_a_dead_worker_are_still_there() {
    let requests = [request(0, 0, 0, 41), request(1, 100_000, 0, 41)];
    for (at_ns, expected) in [(55_000, 40), (54_999, 0)] {
        let mut options = sharing(2, None, None);
        options.changes = vec![Change { at_ns, worker: 0, what: WhatChanges::Fails }];
        assert_eq!(loaded(&simulate(&requests, &options)), expected, "{at_ns}");
    }
}

/// The tier of a worker's own that is durable is there when it joins again, and another one is not.
#[test]
fn a_durable_tier_comes_back() {
    let requests = [request(0, 0, 0, 41), request(1, 300_000, 0, 41)];
    let change = |at_ns, what| Change { at_ns, worker: 0, what };
    for (durable, expected) in [(true, 40), (false, 0)] {
        let options = FleetOptions {
            store: None,
            durable_tiers: vec![durable],
            changes: vec![change(100_000, WhatChanges::Fails), change(200_000, WhatChanges::Joins)],
            ..sharing(1, None, None)
        };
        let run = simulate(&requests, &options);
        assert_eq!(loaded(&run), expected);
        // Both lives together: ten blocks were written once, or begun to be written again when the run was over.
        let tier = &run.report.tiers.unwrap().record.tiers[0];
        assert_eq!((tier.blocks, tier.written_blocks), if durable { (10, 10) } else { (0, 20) });
    }
}

/// What has been written by the moment of a failure is in the durable tier, also if the worker is in the middle of a step: it hears of
/// the end of a transfer only when its next step begins. The blocks of request 0 are there at 55 us, and the step of request 1 goes on
/// until 64 us.
#[test]
fn a_durable_tier_has_what_was_written_during_the_last_step() {
    let requests = [request(0, 0, 0, 41), request(1, 45_000, 1000, 17), request(2, 300_000, 0, 41)];
    let change = |at_ns, what| Change { at_ns, worker: 0, what };
    for (at_ns, expected) in [(60_000, 40), (55_000, 40), (54_999, 0)] {
        let options = FleetOptions {
            store: None,
            durable_tiers: vec![true],
            changes: vec![change(at_ns, WhatChanges::Fails), change(200_000, WhatChanges::Joins)],
            ..sharing(1, None, None)
        };
        let run = simulate(&requests, &options);
        assert_eq!((loaded(&run), run.report.fleet.retried_requests), (expected, 1), "{at_ns}");
    }
}

/// A store of 12 blocks: the 7 of worker 1 push out the last 5 of worker 0, and worker 2 finds the first 5.
#[test]
fn a_full_store_evicts_for_all() {
    let requests = [request(0, 0, 0, 41), request(1, 100_000, 1000, 29), request(2, 300_000, 0, 41)];
    let run = simulate(&requests, &sharing(3, None, Some(12 * BLOCK_BYTES)));
    assert_eq!(loaded(&run), 20);
    let store = &run.report.tiers.unwrap().record.tiers[0];
    // Worker 2 begins to write the five that are missing again, and the run is over.
    assert_eq!((store.peak_blocks, store.written_blocks, store.dropped_blocks), (12, 22, 5));
}

/// Three workers load 40,000 bytes each at the same time: with 4 GB/s for each that takes 12 us, with 3 GB/s for all 42.
#[test]
fn workers_share_the_bandwidth_of_the_store() {
    let mut requests = vec![request(0, 0, 0, 41)];
    requests.extend((1..4).map(|id| request(id, 1_000_000, 0, 41)));
    for (total, load_us) in [(None, 12), (Some(3_000_000_000), 42), (Some(6_000_000_000), 22)] {
        let run = simulate(&requests, &sharing(4, total, None));
        assert_eq!(loaded(&run), 120);
        for i in 1..4 {
            assert_eq!(ttft_ns(&run, i), 2000 + load_us * 1000 + 1000, "{total:?}");
        }
        assert_eq!(run.report.tiers.unwrap().record.load_ns, 3 * load_us * 1000);
    }
}

/// Whatever is shared, written back, durable, full, slow, or fails: every request ends once, the same gives the same, steps that run
/// as one change nothing, and each prompt token of a request that was not preempted or sent again was hit, loaded or computed.
#[test]
fn random_fleets_with_tiers() {
    let mut random_numbers = Random(41);
    let (mut loads_seen, mut dropped, mut retried, mut exact) = (0, 0, 0, 0);
    for round in 0..90u64 {
        let policy = POLICIES[round as usize % POLICIES.len()].0;
        let mut options = loads::options(&mut random_numbers, policy, 6);
        random(&mut random_numbers, round % 3 > 0, &mut options);
        if round % 2 == 0 {
            options.changes = loads::changes(&mut random_numbers, options.workers, 2_000_000);
        }
        let requests = requests(round, 120, 20_000);
        let spec = cache([400, 1000][round as usize % 2]);
        let together = fleet(&requests, &spec, &Uneven, &options);
        let again = fleet(&requests, &spec, &Uneven, &options);
        assert_eq!((&again.report, &again.rows), (&together.report, &together.rows), "round {round}");
        options.run.one_by_one = true;
        let single = fleet(&requests, &spec, &Uneven, &options);
        assert_eq!(together.rows, single.rows, "round {round}");
        assert_eq!(together.report, single.report, "round {round}");

        let (report, n) = (&together.report, together.report.requests);
        assert_eq!(n.finished + n.refused + n.unfinished + n.never_arrived, n.total, "round {round}");
        let record = &report.tiers.as_ref().unwrap().record;
        let from_tiers: u64 = record.tiers.iter().map(|tier| tier.loaded_tokens).sum();
        assert_eq!(from_tiers, record.loaded_tokens);
        if report.steps.preemptions == 0 && report.fleet.retried_requests == 0 && n.refused == 0 {
            let prompt: u64 = together.rows.iter().map(|row| u64::from(row.prompt_tokens)).sum();
            let unfinished = together.rows.iter().filter(|row| row.outcome != RequestOutcome::Finished);
            let unfinished: u64 = unfinished.map(|row| u64::from(row.prompt_tokens)).sum();
            let computed = report.steps.prefill_tokens;
            let found = report.cache.counts.hit_tokens + record.loaded_tokens;
            assert_eq!(found + computed, prompt - unfinished, "round {round}");
            exact += 1;
        }
        loads_seen += record.loaded_tokens;
        dropped += record.tiers.iter().map(|tier| tier.dropped_blocks).sum::<u64>();
        retried += report.fleet.retried_requests;
    }
    let seen = [loads_seen, dropped, retried, exact];
    assert!(loads_seen > 1000 && dropped > 100 && retried > 20 && exact > 0, "{seen:?}");
}

#[test]
fn tiers_that_do_not_fit_together() {
    let why = |edit: &dyn Fn(&mut FleetOptions)| {
        let mut options = sharing(2, None, None);
        edit(&mut options);
        check(&options).map_err(|why| why.to_string())
    };
    assert_eq!(why(&|_| ()), Ok(()));
    assert_eq!(why(&|o| o.policy = Policy::LeastLoaded), Ok(()));
    for (edit, said) in [
        (&(|o: &mut FleetOptions| o.run.scheduler.tiers = None) as &dyn Fn(&mut FleetOptions), "no tiers"),
        (&|o| o.store = Some(Store { bytes_per_s: Some(0) }), "1 byte/s at least"),
        (&|o| o.durable_tiers = vec![true], "cannot be durable"),
        (&|o| (o.store, o.durable_tiers) = (None, vec![false, true]), "not there"),
    ] {
        let found = why(edit).expect_err(said);
        assert!(found.contains(said), "{found}");
    }
}
