//! Speculation changes when tokens are generated, and never how many.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Prompt, Vocabulary};
use kvist_scheduler as scheduler;
use kvist_scheduler::{Admission, Config, Replay, TokenWork};
use kvist_simulator::cost::{BatchShape, StepCost};
use kvist_simulator::report::{Objectives, Report};
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, Part, Run, run};
use kvist_simulator::speculation::{Acceptance, DraftSpec, Observed, Speculation};
use kvist_testing::reference::SplitMix64 as Random;
use std::cell::RefCell;
use std::sync::Arc;

const TOKENS_PER_ID: u32 = 8;

fn paged(capacity_tokens: u32) -> Cache {
    let groups =
        vec![GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens }];
    let vocabulary = Vocabulary::Ids { tokens_per_id: TOKENS_PER_ID };
    let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
    Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap()
}

/// A step that takes the same time whatever it computes, and notes what that is.
#[derive(Default)]
struct Noted(RefCell<Vec<BatchShape>>);

const STEP_NS: u64 = 1_000_000;

impl StepCost for Noted {
    fn step_ns(&self, batch: &BatchShape) -> u64 {
        self.0.borrow_mut().push(*batch);
        STEP_NS
    }
    fn name(&self) -> String {
        "fixed".into()
    }
}

fn requests(seed: u64, n: u32) -> Vec<Request> {
    let mut random = Random(seed);
    let mut at = 0;
    let mut all = Vec::new();
    for id in 0..u64::from(n) {
        at += u64::from(random.below(3)) * u64::from(random.below(20_000_000));
        let mut request = Request::new(id, at, 1 + random.below(120), 1 + random.below(60));
        let (family, shared) = (u64::from(random.below(4)) << 32, random.below(12));
        let ids = (0..request.prompt_tokens.div_ceil(TOKENS_PER_ID)).map(|i| {
            let own = if i < shared { 0 } else { id + 1 };
            family + (own << 10) + u64::from(i)
        });
        let (ids, n_tokens) = (ids.collect(), request.prompt_tokens);
        request.content = Prompt::Ids { ids, tokens_per_id: TOKENS_PER_ID, n_tokens };
        request.salt = (random.below(3) == 0).then(|| Arc::from("tenant"));
        request.deadline_ns = (random.below(3) > 0).then(|| at + u64::from(random.below(300_000_000)));
        if id > 0 && random.below(3) == 0 {
            request.parent = Some(u64::from(random.below(id as u32)));
        }
        all.push(request);
    }
    all
}

fn speculation(text: &str) -> Speculation {
    let DraftSpec { acceptance, draft_ns } = text.parse().unwrap();
    Speculation { acceptance: acceptance.unwrap(), draft_ns, seed: 3 }
}

fn options(policy: &str, speculation: Option<Speculation>) -> Options {
    let scheduler = Config {
        policy: policy.into(),
        max_batch: 5,
        max_batch_tokens: 32,
        admission: Admission::Optimistic { headroom_tokens: 0 },
        work: TokenWork { prefill_ns: 10, decode_ns: 1200 },
        ..Config::default()
    };
    Options { scheduler, max_new: Some(40), explain: true, watch: true, speculation, ..Options::default() }
}

struct Recorded {
    run: Run,
    events: String,
    decisions: String,
}

fn recorded(requests: &[Request], capacity: u32, cost: &dyn StepCost, options: &Options) -> Recorded {
    let (mut events, mut decisions) = (String::new(), String::new());
    let mut hear = |part: Part, lines: &str| match part {
        Part::Events => events += lines,
        Part::Decisions => decisions += lines,
        _ => {}
    };
    let run = run(requests, paged(capacity), cost, options, Some(&mut hear), &mut |_| ()).unwrap();
    Recorded { run, events, decisions }
}

fn report(run: &Run) -> Report {
    Report::of(&run.record, &Objectives::default())
}

/// Whatever is accepted, every request ends as without speculation, with as many tokens; no step is larger than its
/// budget, counts agree with the scheduler's, and a recording replays to the byte.
#[test]
fn tokens_are_conserved() {
    let mut dropped = 0;
    for (number, (policy, _)) in scheduler::POLICIES.iter().enumerate() {
        for capacity in [400, 40_000] {
            let requests = requests(number as u64, 150);
            let off = recorded(&requests, capacity, &Noted::default(), &options(policy, None));
            assert_eq!(off.run.record.speculation, None);
            for text in ["tokens=4,accept=0.7,draft_ms=0.1", "tokens=30,accept=1", "tokens=3,accept=0.9/0.1"]
            {
                let options = options(policy, Some(speculation(text)));
                let cost = Noted::default();
                let on = recorded(&requests, capacity, &cost, &options);
                for (on, off) in on.run.record.requests.iter().zip(&off.run.record.requests) {
                    assert_eq!((on.outcome, on.output_tokens), (off.outcome, off.output_tokens), "{text}");
                }
                let (counters, counts) = (on.run.counters, on.run.record.speculation.clone().unwrap());
                assert_eq!(counters.sampled_tokens, off.run.counters.sampled_tokens);
                assert_eq!(
                    (counters.drafts, counters.draft_tokens, counters.accepted_tokens),
                    (counts.drafts, counts.draft_tokens, counts.accepted_tokens)
                );
                assert_eq!(counts.accepted_per_position.iter().sum::<u64>(), counts.accepted_tokens);
                assert_eq!(counts.generated_tokens, on.run.record.steps.decode_tokens);
                assert!(counts.accepted_tokens > 500 && counters.steps < off.run.counters.steps);
                let gaps = |run: &Run| report(run).latency.itl_s.unwrap().n;
                assert_eq!(gaps(&on.run), gaps(&off.run));
                for shape in cost.0.borrow().iter() {
                    let tokens = shape.prefill_tokens + shape.decode_sequences + shape.draft_tokens;
                    assert!(tokens <= 32, "{shape:?}");
                }
                dropped += on.events.matches("\"drafts\"").count() as u64
                    - cost.0.borrow().iter().filter(|shape| shape.draft_tokens > 0).count() as u64;
                let replayed = scheduler::replay(on.events.as_bytes(), paged(capacity), None).unwrap();
                assert!(replayed == on.decisions, "{policy}, {text}: the replay decides otherwise");
                let again = recorded(&requests, capacity, &Noted::default(), &options);
                assert!(again.events == on.events && again.decisions == on.decisions);
            }
        }
    }
    assert!(dropped > 100, "{dropped} times, drafts did not fit");
}

/// If every draft is accepted, a decode step generates a whole draft and one token more.
#[test]
fn steps_are_fewer_by_what_is_accepted() {
    for (n, output) in [(1, 101), (4, 101), (4, 100), (9, 2), (16, 1)] {
        let requests = [Request::new(0, 0, 20, output)];
        let spec = speculation(&format!("tokens={n},accept=1,draft_ms=0.5"));
        for max_new in [None, Some(1000)] {
            let options = Options { speculation: Some(spec.clone()), max_new, ..Options::default() };
            let cost = Noted::default();
            let run = run(&requests, paged(4000), &cost, &options, None, &mut |_| ()).unwrap();
            let decodes = u64::from(output - 1).div_ceil(n + 1);
            let drafts = cost.0.borrow().iter().filter(|shape| shape.draft_tokens > 0).count() as u64;
            assert_eq!(run.counters.steps, 1 + decodes, "{n}, {output}, {max_new:?}");
            let row = run.record.requests[0];
            assert_eq!(row.finished_ns, Some((1 + decodes) * STEP_NS + drafts * STEP_NS / 2));
            assert_eq!(row.output_tokens, output);
        }
    }
    // What a step verifies: three drafts behind 11 cached tokens and the last known one.
    let spec = Some(speculation("tokens=3,accept=0"));
    let (cost, options) = (Noted::default(), Options { speculation: spec, ..Options::default() });
    run(&[Request::new(0, 0, 11, 6)], paged(4000), &cost, &options, None, &mut |_| ()).unwrap();
    let expected = BatchShape {
        decode_sequences: 1,
        decode_context_tokens: 12 + 3,
        draft_tokens: 3,
        attention_pairs: 12 + 13 + 14 + 15,
        ..BatchShape::default()
    };
    assert_eq!(cost.0.borrow()[1], expected);
}

/// With a probability of p, a chain of n drafts gives (1 - p^(n + 1)) / (1 - p) tokens (Leviathan et al., 2023).
#[test]
fn tokens_per_step_are_those_of_theory() {
    for (n, p) in [(1, 0.5), (4, 0.7), (4, 0.9), (8, 0.5)] {
        let requests: Vec<Request> = (0..20).map(|id| Request::new(id, 0, 10, 2000)).collect();
        let spec = speculation(&format!("tokens={n},accept={p}"));
        let options = Options { speculation: Some(spec), ..Options::default() };
        let run = run(&requests, paged(1 << 17), &Noted::default(), &options, None, &mut |_| ()).unwrap();
        let found = report(&run).speculation.unwrap().tokens_per_step;
        let expected = (1.0 - f64::powi(p, n + 1)) / (1.0 - p);
        assert!((found - expected).abs() < 0.02 * expected, "{n}, {p}: {found}, expected {expected}");
    }
}

/// If drafts cost nothing and none is accepted, everything is as without them.
#[test]
fn rejected_drafts_change_no_decision() {
    for (number, (policy, _)) in scheduler::POLICIES.iter().enumerate() {
        let requests = requests(100 + number as u64, 150);
        let off = recorded(&requests, 40_000, &Noted::default(), &options(policy, None));
        let spec = Some(speculation("tokens=6,accept=0"));
        let on = recorded(&requests, 40_000, &Noted::default(), &options(policy, spec));
        assert!(on.run.counters.draft_tokens > 1000 && on.run.counters.accepted_tokens == 0);
        assert!(on.decisions == off.decisions, "{policy}: other decisions");
        let (mut on, off) = (report(&on.run), report(&off.run));
        let speculation = on.speculation.take().unwrap();
        assert_eq!((speculation.acceptance, speculation.tokens_per_step), (0.0, 1.0));
        assert!(on.setting.remove("speculation").is_some());
        assert_eq!(on, off, "{policy}");
    }
}

/// Drafts as a recording has them give about the tokens per step that it has.
#[test]
fn as_recorded() {
    let requests: Vec<Request> = (0..20).map(|id| Request::new(id, 0, 10, 500)).collect();
    let options = |speculation| Options { speculation: Some(speculation), ..Options::default() };
    let source =
        recorded(&requests, 40_000, &Noted::default(), &options(speculation("tokens=4,accept=0.8/0.6")));
    let mut observed = Observed::default();
    let mut lines = source.events.lines();
    let mut replay = Replay::begin(lines.next().unwrap(), Some(paged(40_000)), None).unwrap();
    for line in lines {
        replay.event(line, Some(&mut |replayed| observed.add(&replayed))).unwrap();
    }
    assert!(!observed.is_empty());
    let acceptance = Acceptance::Observed(observed);
    for seed in [1, 2] {
        let speculation = Speculation { acceptance: acceptance.clone(), draft_ns: 0, seed };
        let run = recorded(&requests, 40_000, &Noted::default(), &options(speculation)).run;
        let (found, recorded) = (report(&run), report(&source.run));
        let per_step = |report: &Report| report.speculation.as_ref().unwrap().tokens_per_step;
        let (found, recorded) = (per_step(&found), per_step(&recorded));
        assert!((found - recorded).abs() < 0.02 * recorded, "{seed}: {found}, recorded {recorded}");
    }
}
