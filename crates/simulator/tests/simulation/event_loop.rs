//! The event loop on loads so small that the result can be computed by hand.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec};
use kvist_scheduler as scheduler;
use kvist_scheduler::{Config, Preempted};
use kvist_simulator::cost::{BatchShape, ConstantRates, StepCost};
use kvist_simulator::report::{Objectives, Report, RequestOutcome};
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, RunError, run};
use kvist_simulator::trace::{ReadOptions, Trace};

/// A cache of 2^20 tokens in blocks of 16.
fn paged() -> Cache {
    let capacity_tokens = 1 << 20;
    let group = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
    let spec = PagedSpec { block_tokens: 16, groups: vec![group], rollback_tokens: 0, prefix: None };
    Cache::paged(&spec).unwrap()
}

/// Three requests on one server, with prompts at 10 tokens per ms and answers at 10 ms per token: a prompt of 2,000
/// tokens with an answer of 500, one of 50 with 50, one of 10 with 10. The first token comes with the prompt's last
/// step. Alone they take 200 + 4990, 5 + 490 and 1 + 90 ms.
#[test]
fn three_requests_by_hand() {
    let ms = 1_000_000;
    let rates = ConstantRates::new(10.0, 0.1).unwrap();
    let at_once = [0, 0, 0];
    let staggered = [0, 60 * ms, 50 * ms]; // c, the middle one, before b: both during the prompt of a
    // (policy, preempted, arrivals of a, b, c, [ends of a, b, c] in µs)
    let rows: [(&str, Preempted, [u64; 3], [u64; 3]); 7] = [
        ("fcfs", Preempted::Recompute, at_once, [5_190_000, 5_281_000, 5_776_000]),
        ("sjf", Preempted::Recompute, at_once, [5_776_000, 91_000, 586_000]),
        ("srpt", Preempted::Recompute, at_once, [5_776_000, 91_000, 586_000]),
        ("fcfs", Preempted::Recompute, staggered, [5_190_000, 5_776_000, 5_685_000]),
        ("sjf", Preempted::Recompute, staggered, [5_190_000, 5_281_000, 5_776_000]),
        // a is preempted after its prompt, at 200 ms; b runs until 291, c until 786, then the other 499 tokens of a.
        ("srpt", Preempted::Kept, staggered, [5_776_000, 291_000, 786_000]),
        // It recomputes prompt and first token, 2,001 tokens in 200.1 ms, which gives its second token; 498 are left.
        ("srpt", Preempted::Recompute, staggered, [5_966_100, 291_000, 786_000]),
    ];
    let mut bad = Vec::new();
    for (policy, preempted, arrivals, ends_us) in rows {
        let requests = [(2000, 500), (10, 10), (50, 50)];
        let mut requests: Vec<Request> =
            (0..3).map(|i| Request::new(i as u64, arrivals[i], requests[i].0, requests[i].1)).collect();
        requests.sort_by_key(|r| r.arrival_ns);
        let options = Options {
            scheduler: Config {
                policy: policy.into(),
                lengths: scheduler::LengthSource::Oracle,
                max_batch: 1,
                preempted,
                ..Config::default()
            },
            watch: true,
            ..Options::default()
        };
        let done = run(&requests, paged(), &rates, &options, None, &mut |_| ()).unwrap();
        let mut ends = [0; 3];
        done.record.requests.iter().for_each(|row| ends[row.id as usize] = row.finished_ns.unwrap() / 1000);
        // Regression check: bars were once drawn for the wrong request. Activities must use the same ids as the rows.
        for row in &done.record.requests {
            let of_row = done.record.activity.iter().filter(|activity| activity.request == row.id);
            assert_eq!(of_row.map(|activity| activity.to_ns).max(), row.finished_ns, "request {}", row.id);
        }
        if ends != ends_us {
            bad.push(format!("{policy} {preempted:?} from {arrivals:?}: {ends:?}, by hand {ends_us:?}"));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Regression test: an answer of a hundred blocks was once reported as one block, because memory was sampled after it
/// had been freed.
#[test]
fn memory_grows_while_an_answer_is_written() {
    let rates = ConstantRates::new(10.0, 1.0).unwrap();
    for one_by_one in [false, true] {
        let requests = [Request::new(0, 0, 16, 1600)];
        let options = Options { one_by_one, ..Options::default() };
        let done = run(&requests, paged(), &rates, &options, None, &mut |_| ()).unwrap();
        let load = Report::of(&done.record, &Objectives::default()).load;
        // The prompt's one block for 1.6 ms, which ends with the first token. Then 1599 steps of 1 ms write positions
        // 16 to 1614, in blocks of 16: 99 blocks from the second on last 16 ms each, the last one 15.
        let integral: f64 = 1.6 + (2..=100).map(|n| f64::from(n) * 16.0).sum::<f64>() + 101.0 * 15.0;
        assert_eq!(load.peak_used_blocks, 101);
        assert!((load.mean_used_blocks - integral / 1600.6).abs() < 1e-9, "{load:?}");
        assert_eq!((load.peak_cached_blocks, load.mean_cached_blocks), (0, 0.0));
        let samples = done.record.timeline.samples();
        assert!(samples.iter().any(|sample| sample.load.used_blocks == 101), "{samples:?}");
        assert_eq!(samples.last().map(|sample| sample.load), Some(Default::default()));
    }
}

/// A follow-up that comes before its parent in order of earliest arrival still waits for it.
#[test]
fn a_follow_up_waits_for_its_parent_wherever_it_stands() {
    let text = r#"{"format":"kvist-trace","version":1}
        {"id":0,"arrival_ns":1000000000,"prompt_tokens":5,"output_tokens":5}
        {"id":1,"arrival_ns":0,"prompt_tokens":5,"output_tokens":5,"parent":0,"think_ns":7}"#;
    let trace = Trace::read_from("t", text.as_bytes(), &ReadOptions::default()).unwrap();
    let requests = trace.into_arrival_order();
    assert_eq!(requests[0].id, 1);
    let rates = ConstantRates::new(10.0, 1.0).unwrap();
    let done = run(&requests, paged(), &rates, &Options::default(), None, &mut |_| ()).unwrap();
    let [child, parent] = &done.record.requests[..] else { panic!("two requests") };
    assert_eq!(child.arrival_ns, parent.finished_ns.unwrap() + 7);
    assert_eq!(child.outcome, RequestOutcome::Finished);
}

/// A follow-up whose parent is refused never arrives. Rates were over the time from its earliest arrival on, as if the run had waited for
/// it: less than those of a fleet of one worker.
#[test]
fn a_follow_up_of_a_refused_request_never_arrives() {
    const SECOND: u64 = 1_000_000_000;
    let requests = [
        Request { parent: Some(1), ..Request::new(0, 0, 5, 5) },
        Request::new(1, 99 * SECOND, 2_000_000_000, 1), // larger than the cache
        Request { parent: Some(0), ..Request::new(2, 0, 5, 5) },
        Request::new(3, 99 * SECOND, 10, 1000),
    ];
    let rates = ConstantRates::new(10.0, 1.0).unwrap();
    let options = Options::default();
    let done = run(&requests, paged(), &rates, &options, None, &mut |_| ()).unwrap();
    let outcomes: Vec<_> = done.record.requests.iter().map(|row| row.outcome).collect();
    let (never, finished) = (RequestOutcome::NeverArrived, RequestOutcome::Finished);
    assert_eq!(outcomes, [never, RequestOutcome::Refused, never, finished]);
    let report = Report::of(&done.record, &Objectives::default());
    let n = report.requests;
    assert_eq!((n.total, n.finished, n.refused, n.unfinished, n.never_arrived), (4, 1, 1, 0, 2));
    assert_eq!(report.throughput.duration_s, 1.0);
}

/// Figures after the end of virtual time would be wrong, so the run fails.
#[test]
fn time_that_runs_out_is_an_error() {
    struct Endless;
    impl StepCost for Endless {
        fn step_ns(&self, _: &BatchShape) -> u64 {
            u64::MAX
        }
        fn name(&self) -> String {
            "endless".into()
        }
    }
    let requests = [Request::new(0, 0, 16, 16), Request::new(1, 0, 16, 16)];
    for one_by_one in [false, true] {
        let options = Options { one_by_one, ..Options::default() };
        let error = run(&requests, paged(), &Endless, &options, None, &mut |_| ());
        let cost = "endless".into();
        assert_eq!(error.unwrap_err(), RunError::OutOfTime { ended: 0, requests: 2, cost });
    }
}

/// A request for zero tokens gets one token, and no subtraction underflows.
#[test]
fn an_answer_of_no_tokens() {
    let rates = ConstantRates::new(10.0, 1.0).unwrap();
    let requests = [Request::new(0, 0, 16, 0), Request::new(1, 0, 16, 9)];
    for (max_new, outcome, output_tokens) in
        [(None, RequestOutcome::Refused, 0), (Some(40), RequestOutcome::Finished, 1)]
    {
        let options = Options { max_new, ..Options::default() };
        let done = run(&requests, paged(), &rates, &options, None, &mut |_| ()).unwrap();
        let [nothing, nine] = &done.record.requests[..] else { panic!("two requests") };
        assert_eq!((nothing.outcome, nothing.output_tokens), (outcome, output_tokens), "{max_new:?}");
        assert_eq!((nine.outcome, nine.output_tokens), (RequestOutcome::Finished, 9));
    }
}

/// Relative deadlines also apply to follow-ups, counted from their actual arrival after the parent's end.
#[test]
fn deadlines_count_from_arrival() {
    let rates = ConstantRates::new(10.0, 1.0).unwrap();
    let mut requests = [Request::new(0, 0, 16, 9), Request::new(1, 0, 16, 9), Request::new(2, 3, 16, 9)];
    requests[1].parent = Some(0);
    requests[2].deadline_ns = Some(77);
    let options = Options { deadline_ns: Some(1000), ..Options::default() };
    let done = run(&requests, paged(), &rates, &options, None, &mut |_| ()).unwrap();
    let [first, follower, own] = &done.record.requests[..] else { panic!("three requests") };
    assert_eq!((first.deadline_ns, own.deadline_ns), (Some(1000), Some(77)));
    assert!(follower.arrival_ns > 0);
    assert_eq!(follower.deadline_ns, Some(follower.arrival_ns + 1000));
}
