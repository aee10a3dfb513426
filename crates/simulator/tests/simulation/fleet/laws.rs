//! What holds for every fleet.
use super::{Uneven, cache, fleet, loads};
use kvist_simulator::cost::ConstantRates;
use kvist_simulator::fleet::{
    Change, FleetError, FleetOptions, MAX_WORKERS, POLICIES, Policy, WhatChanges, check, run,
};
use kvist_simulator::report::RequestOutcome;
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, RunError};
use kvist_simulator::speculation::{Acceptance, Speculation};
use kvist_testing::SplitMix64;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Whatever fails and joins: a request ends once, or is unfinished because no worker was there, or never arrives because its parent
/// did not finish. The sums over workers are those of the fleet.
#[test]
fn every_request_ends_once() {
    let mut random = SplitMix64(23);
    let (mut retried, mut unfinished, mut never) = (0, 0, 0);
    for round in 0..120 {
        let policy = POLICIES[round as usize % POLICIES.len()].0;
        let mut options = loads::options(&mut random, policy, 8);
        options.changes = loads::changes(&mut random, options.workers, 1_500_000);
        options.copies = 1 + random.below(3);
        options.temperature = if policy.has_cost() { f64::from(random.below(3)) } else { 0.0 };
        let requests = loads::requests(round, 100, 20_000);
        let mut seen = 0;
        let spec = cache([400, 4000][round as usize % 2]);
        let run = run(&requests, &spec, &Uneven, &options, &mut |n| {
            assert!(n > seen, "a request ended, and the number is still {n}");
            seen = n;
        });
        let run = run.unwrap();
        let (report, n) = (&run.report, &run.report.requests);
        assert_eq!(n.total, 100 * u64::from(options.copies));
        assert_eq!(n.finished + n.refused + n.unfinished + n.never_arrived, n.total, "round {round}");
        assert_eq!(seen as u64, n.finished + n.refused);
        let with = |outcome| run.rows.iter().filter(|row| row.outcome == outcome).count() as u64;
        assert_eq!(with(RequestOutcome::Finished), n.finished);
        assert_eq!(with(RequestOutcome::Refused), n.refused);
        assert_eq!(with(RequestOutcome::Unfinished), n.unfinished);
        assert_eq!(with(RequestOutcome::NeverArrived), n.never_arrived);
        for row in run.rows.iter().filter(|row| row.outcome == RequestOutcome::Finished) {
            let times = [Some(row.arrival_ns), row.admitted_ns, row.first_token_ns, row.finished_ns];
            assert!(times.iter().all(Option::is_some) && times.is_sorted(), "{row:?}");
            let wanted = requests.iter().find(|request| request.id == row.id).map(|it| it.output_tokens);
            assert!(options.copies > 1 || wanted == Some(row.output_tokens));
        }
        // Without a worker that is there to the end, requests may be left.
        assert!(n.unfinished == 0 || alive_at_end(&options) <= 0, "round {round}");
        let left = run.rows.iter().enumerate().filter(|(_, row)| row.outcome == RequestOutcome::NeverArrived);
        for (i, _) in left {
            let request = &requests[i % 100];
            let parent = requests.iter().position(|other| Some(other.id) == request.parent);
            let parent = parent.expect("a request without a parent arrives");
            assert_ne!(run.rows[i - i % 100 + parent].outcome, RequestOutcome::Finished, "round {round}");
        }
        let sum = |of: fn(&kvist_simulator::fleet::WorkerReport) -> u64| {
            report.fleet.list.iter().map(of).sum::<u64>()
        };
        assert_eq!(sum(|worker| worker.requests), n.finished + n.refused);
        assert_eq!(
            sum(|worker| worker.computed_tokens),
            report.steps.prefill_tokens + report.steps.decode_tokens
        );
        // No worker runs two steps at a time. (The ratio is that of the times; nothing bounds it.)
        assert!(report.fleet.list.iter().all(|worker| worker.busy_ratio <= 1.0), "round {round}");
        retried += report.fleet.retried_requests;
        unfinished += n.unfinished;
        never += n.never_arrived;

        let again = fleet(&requests, &spec, &Uneven, &options);
        assert_eq!(
            (again.report, again.rows),
            (run.report, run.rows),
            "round {round}: the same gives the same"
        );
    }
    assert!(
        retried > 100 && unfinished > 0 && never > 0,
        "{retried} sent again, {unfinished} unfinished, {never} never arrived"
    );
}

fn alive_at_end(options: &FleetOptions) -> i64 {
    let change = |what| options.changes.iter().filter(|change| change.what == what).count() as i64;
    i64::from(options.workers) + change(WhatChanges::Joins) - change(WhatChanges::Fails)
}

/// One worker, which fails in the middle of a step, and one that joins later. The first token of the second request waits for
/// the new worker; nothing that the failed one had cached is found.
#[test]
fn a_failure_by_hand() {
    let mut requests: Vec<Request> = (0..2).map(|id| Request::new(id, 0, 100, 1)).collect();
    for request in &mut requests {
        let (ids, n_tokens) = ((0..13).collect(), 100);
        request.content = kvist_cache::Prompt::Ids { ids, tokens_per_id: 8, n_tokens };
    }
    requests[1].arrival_ns = 20_000;
    // 100 tokens: 1000 + 700 + 33 + 459 ns; a hit of 96: 4 tokens, 1000 + 28 + 33 + 35 ns.
    let spec = cache(4000);
    let options =
        |changes: &[Change]| FleetOptions { changes: changes.into(), rows: true, ..FleetOptions::default() };
    let ends = |changes: &[Change]| {
        let run = fleet(&requests, &spec, &Uneven, &options(changes));
        let rows = run.rows.iter().map(|row| (row.finished_ns, row.hit_tokens)).collect::<Vec<_>>();
        (rows, run.report.fleet.retried_requests)
    };
    assert_eq!(ends(&[]), (vec![(Some(2192), 0), (Some(21_096), 96)], 0));
    let fails = |at_ns| Change { at_ns, worker: 0, what: WhatChanges::Fails };
    let joins = |at_ns| Change { at_ns, worker: 0, what: WhatChanges::Joins };
    // At the end of its step it has delivered the answer; a moment before it has not.
    assert_eq!(ends(&[fails(2192), joins(3000)]), (vec![(Some(2192), 0), (Some(22_192), 0)], 0));
    assert_eq!(ends(&[fails(2191), joins(3000)]), (vec![(Some(5192), 0), (Some(21_096), 96)], 1));
    assert_eq!(ends(&[fails(20_500), joins(30_000)]), (vec![(Some(2192), 0), (Some(32_192), 0)], 1));
    assert_eq!(ends(&[fails(20_500)]), (vec![(Some(2192), 0), (None, 0)], 1));
    // A join that nothing waits for does not prolong the run, nor does it count, as failures after the end do not.
    let new = |worker| Change { worker, ..joins(1 << 40) };
    let changes = [fails(20_500), joins(20_600), fails(1 << 40), new(0), new(1), new(2)];
    let run = fleet(&requests, &spec, &Uneven, &options(&changes));
    assert!(run.report.throughput.duration_s < 1e-3);
    let of_fleet = &run.report.fleet;
    assert_eq!((of_fleet.failures, of_fleet.joins, of_fleet.list.len()), (1, 1, 1));
    // Of one worker: those that never joined do not halve the mean.
    assert_eq!(of_fleet.imbalance.requests, Some(1.0));
    assert_eq!(of_fleet.over_workers.requests.map(|spread| spread.n), Some(1));
}

/// A worker fails in the middle of many decode steps that were planned as one, and joins again while their end is still to
/// come. Once that end passed for one of the new life: the request was lost, and the worker busier than it was there.
#[test]
fn a_life_ignores_the_events_of_the_one_before() {
    // 10 tokens per millisecond of prefill: 1 ms. 2,000 answer tokens at 0.1 per millisecond: 20 s.
    let cost = ConstantRates::new(10.0, 0.1).unwrap();
    let mut requests = vec![Request::new(0, 0, 10, 2000), Request::new(1, 0, 10, 1)];
    requests[1].parent = Some(0);
    let second = |s: f64| (s * 1e9) as u64;
    let change = |at_s, what| Change { at_ns: second(at_s), worker: 0, what };
    for joins_s in [11.0, 10.0] {
        let changes = vec![change(10.0, WhatChanges::Fails), change(joins_s, WhatChanges::Joins)];
        let options = FleetOptions { changes, rows: true, ..FleetOptions::default() };
        let run = fleet(&requests, &cache(8000), &cost, &options);
        let ends: Vec<f64> = run.rows.iter().map(|row| row.finished_ns.unwrap() as f64 / 1e9).collect();
        assert!((ends[0] - joins_s - 20.0).abs() < 0.02, "{ends:?}");
        assert_eq!(run.report.requests.finished, 2);
        // It was there for 10 s of the first life, and from the join on; it was busy all the time.
        let worker = &run.report.fleet.list[0];
        assert!((worker.busy_s - (10.0 + ends[1] - joins_s)).abs() < 1e-6, "{worker:?}");
        assert!((worker.busy_ratio - 1.0).abs() < 1e-6, "{worker:?}");
    }
}

/// Copies of a load share nothing and come within a minute; each finds in the caches what the load finds by itself, and has
/// as much time until its deadlines.
#[test]
fn copies_are_the_load_again() {
    let mut requests = loads::requests(5, 80, 1_000_000);
    // The others are over long before the next copy comes. This one makes the load half an hour long.
    requests.push(Request::new(999, 1_800_000_000_000, 50, 20));
    let mut random = SplitMix64(6);
    let mut options = loads::options(&mut random, Policy::SessionHash, 1);
    options.run.scheduler.wait_for_prefix = false;
    let spec = cache(u32::MAX);
    let one = fleet(&requests, &spec, &Uneven, &options);
    options.copies = 4;
    let four = fleet(&requests, &spec, &Uneven, &options);
    assert_eq!(four.report.cache.counts.hit_tokens, 4 * one.report.cache.counts.hit_tokens);
    assert_eq!(four.report.cache.counts.stored_blocks, 4 * one.report.cache.counts.stored_blocks);
    assert!(one.report.cache.counts.hit_tokens > 0);
    // Once copies had the deadlines of the first, and were late.
    assert_eq!(four.report.requests.late, 4 * one.report.requests.late);
    assert!(one.report.requests.late > 0 && one.report.requests.late < one.report.requests.finished);
    assert!(one.report.requests.never_arrived > 0);
    for (copy, rows) in four.rows.chunks(81).enumerate() {
        let shift_ns = 15_000_000_000 * copy as u64;
        let later = |ns: Option<u64>| ns.map(|ns| ns + shift_ns);
        for (row, of_one) in rows.iter().zip(&one.rows) {
            assert_eq!(row.arrival_ns, of_one.arrival_ns + shift_ns);
            assert_eq!(row.deadline_ns, later(of_one.deadline_ns));
            assert_eq!(row.finished_ns, later(of_one.finished_ns));
        }
    }
    let ids: BTreeSet<u64> = four.rows.iter().map(|row| row.id).collect();
    assert_eq!(ids.len(), 4 * 81);
}

#[test]
fn what_is_refused() {
    let change = |at_ns, worker, what| Change { at_ns, worker, what };
    let good = FleetOptions { workers: 2, ..FleetOptions::default() };
    let with = |change_it: &dyn Fn(&mut FleetOptions)| {
        let mut options = good.clone();
        change_it(&mut options);
        check(&options).map_err(|why| why.to_string())
    };
    let fails = WhatChanges::Fails;
    let joins = WhatChanges::Joins;
    let acceptance = Acceptance::PerDepth { tokens: 2, accept: vec![0.5] };
    let drafts = Speculation { acceptance, draft_ns: 0, seed: 1 };
    type Edit<'a> = &'a dyn Fn(&mut FleetOptions);
    let rows: &[(Edit<'_>, &str)] = &[
        (&|o| o.workers = 0, "workers: found 0; expected 1 to 65536"),
        (&|o| o.workers = MAX_WORKERS + 1, "found 65537"),
        (&|o| o.copies = 0, "copies of the load: found 0"),
        (&|o| o.temperature = 1.0, "no cost to draw by"),
        (&|o| (o.policy, o.temperature) = (Policy::PrefixAware, f64::NAN), "NaN"),
        (&|o| (o.policy, o.temperature) = (Policy::PrefixAware, -1.0), "at least 0"),
        (
            &|o| o.changes = vec![change(1_500_000_000, 2, fails)],
            "worker 2 fails at 1.5 s, but there is no such worker",
        ),
        (&|o| o.changes = vec![change(5, 1, fails), change(5, 1, fails)], "it has failed before"),
        (&|o| o.changes = vec![change(5, 1, joins)], "it is there already"),
        (&|o| o.changes = vec![change(5, 3, joins)], "new workers take the next number"),
        (&|o| o.run.speculation = Some(drafts.clone()), "speculative decoding"),
        (&|o| o.run.scheduler.lengths = kvist_scheduler::LengthSource::Oracle, "true lengths"),
        (&|o| o.run.explain = true, "explanations"),
        (&|o| o.run.watch = true, "activity"),
    ];
    for (edit, said) in rows {
        let why = with(edit).expect_err(said);
        assert!(why.contains(said), "{why}, without {said}");
    }
    assert_eq!(
        with(&|o| o.changes = vec![change(9, 2, joins), change(9, 3, joins), change(10, 2, fails)]),
        Ok(())
    );
    // In order of time, not of the list.
    assert_eq!(with(&|o| o.changes = vec![change(9, 1, joins), change(3, 1, fails)]), Ok(()));

    let requests = loads::requests(1, 5, 100);
    let copied = FleetOptions { copies: u32::MAX, ..good.clone() };
    let why = run(&requests, &cache(400), &Uneven, &copied, &mut |_| ()).unwrap_err().to_string();
    assert!(
        why.contains("4294967295 copies of a load of 5 requests") && why.contains("at most 20000000"),
        "{why}"
    );
    let none = run(&[], &cache(400), &Uneven, &copied, &mut |_| ());
    assert!(matches!(none, Err(FleetError::TooManyCopies { .. })));

    let stopped = FleetOptions {
        run: Options { stop: Some(Arc::new(AtomicBool::new(true))), ..Options::default() },
        ..good
    };
    let result = run(&requests, &cache(400), &Uneven, &stopped, &mut |_| ());
    assert_eq!(result.unwrap_err(), FleetError::Run(RunError::Stopped));
}
