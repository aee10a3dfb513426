//! Compares the event loop with slower, simpler computations of the same result.
use kvist_cache::Prompt;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Step, Vocabulary};
use kvist_scheduler as scheduler;
use kvist_scheduler::{
    Admission, Batch, Config, Executor, Preempted, PrefixOrder, Sampled, Scheduler, TokenWork,
};
use kvist_simulator::cost::{BatchShape, ConstantRates, StepCost};
use kvist_simulator::report::{Objectives, Report, RequestOutcome};
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, Part, Run, RunError, run};
use kvist_testing::reference::SplitMix64 as Random;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn paged(capacity_tokens: u32, block_tokens: u32, vocabulary: Option<Vocabulary>) -> Cache {
    let group = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
    let prefix = vocabulary.map(|vocabulary| PrefixSpec { vocabulary, ..PrefixSpec::default() });
    Cache::paged(&PagedSpec { block_tokens, groups: vec![group], rollback_tokens: 0, prefix }).unwrap()
}

/// A full-attention layer group beside a sliding-window group with a smaller pool.
fn mixed(capacity_tokens: u32, vocabulary: Vocabulary) -> Cache {
    let full = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
    let visibility = Visibility { window: Some(20), sinks: 4 };
    let windowed = GroupSpec { capacity_tokens: capacity_tokens / 2, visibility, ..full };
    let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
    let groups = vec![windowed, full];
    Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap()
}

/// Step costs that depend on every field of a shape.
struct Uneven;

impl StepCost for Uneven {
    fn step_ns(&self, b: &BatchShape) -> u64 {
        1000 + 7 * b.prefill_tokens
            + 90 * b.decode_sequences
            + b.context_tokens() / 3
            + b.attention_pairs / 11
    }
    fn name(&self) -> String {
        "uneven".into()
    }
}

/// Chats and single requests, some of which arrive at the same moment.
fn requests(seed: u64, n: u32) -> Vec<Request> {
    let mut random = Random(seed);
    let mut at = 0;
    let mut all: Vec<Request> = Vec::new();
    for id in 0..u64::from(n) {
        at += u64::from(random.below(3)) * u64::from(random.below(40_000));
        let mut request = Request::new(id, at, 1 + random.below(120), 1 + random.below(60));
        let family = u64::from(random.below(4)) << 32;
        let n_tokens = request.prompt_tokens + random.below(30);
        let shared = random.below(12);
        // The first ids are shared by the family, the others are the request's own.
        let ids = (0..n_tokens.div_ceil(8)).map(|i| {
            let own = if i < shared { 0 } else { id + 1 };
            family + (own << 10) + u64::from(i)
        });
        request.content = Prompt::Ids { ids: ids.collect(), tokens_per_id: 8, n_tokens };
        request.salt = (random.below(3) == 0).then(|| Arc::from("tenant"));
        request.priority = random.below(3) as i32;
        request.deadline_ns = (random.below(3) > 0).then(|| at + u64::from(random.below(3_000_000)));
        if id > 0 && random.below(3) == 0 {
            request.parent = Some(u64::from(random.below(id as u32)));
            request.think_ns = u64::from(random.below(50_000));
        }
        all.push(request);
    }
    all
}

fn settings() -> Vec<(Config, u32)> {
    let mut all = Vec::new();
    for (i, (policy, _)) in scheduler::POLICIES.iter().enumerate() {
        for (j, preempted) in [Preempted::Recompute, Preempted::Kept].into_iter().enumerate() {
            for capacity in [400, 4000] {
                let config = Config {
                    policy: (*policy).into(),
                    lengths: [scheduler::LengthSource::RunningMean, scheduler::LengthSource::Oracle][j],
                    max_batch: 5,
                    max_batch_tokens: 32,
                    admission: if capacity == 400 && i % 2 == 0 {
                        Admission::Conservative
                    } else {
                        Admission::Optimistic { headroom_tokens: 8 * i as u32 }
                    },
                    preempted,
                    prefix_order: [PrefixOrder::Off, PrefixOrder::Ties, PrefixOrder::Window(3)][i % 3],
                    work: TokenWork { prefill_ns: 10, decode_ns: 1200 },
                    ageing_ns: 100_000,
                    max_failures: 1,
                    wait_for_prefix: false,
                    thinned: None,
                    tiers: None,
                };
                all.push((config, capacity));
            }
        }
    }
    all
}

/// A run with its logs.
struct Recorded {
    run: Run,
    events: String,
    decisions: String,
    blocks: String,
}

impl std::ops::Deref for Recorded {
    type Target = Run;
    fn deref(&self) -> &Run {
        &self.run
    }
}

fn recorded(requests: &[Request], cache: Cache, cost: &dyn StepCost, options: &Options) -> Recorded {
    let (mut events, mut decisions, mut blocks) = (String::new(), String::new(), String::new());
    let mut hear = |part: Part, lines: &str| match part {
        Part::Events => events += lines,
        Part::Decisions => decisions += lines,
        Part::Blocks => blocks += lines,
        Part::Header | Part::Misses => {}
    };
    let run = run(requests, cache, cost, options, Some(&mut hear), &mut |_| ()).unwrap();
    Recorded { run, events, decisions, blocks }
}

fn options(config: &Config, one_by_one: bool) -> Options {
    Options {
        scheduler: config.clone(),
        length_error: None,
        max_new: Some(40),
        deadline_ns: None,
        one_by_one,
        explain: true,
        itl: true,
        watch: true,
        speculation: None,
        tier_capacities: Vec::new(),
        tier_orders: Vec::new(),
        stop: None,
    }
}

fn shown(run: &Run) -> String {
    let objectives = Objectives { ttft_s: Some(1e-3), tpot_s: Some(1e-5) };
    let report = serde_json::to_string(&Report::of(&run.record, &objectives)).unwrap();
    let samples = serde_json::to_string(&run.record.timeline.samples()).unwrap();
    let rows = serde_json::to_string(&run.record.requests).unwrap();
    format!("{:?}\n{report}\n{samples}\n{rows}", run.counters)
}

/// Memory over time in `group`, from a recording alone: mean and peak of blocks in use, mean and peak of cached
/// blocks. For changes at the same moment, the peak is taken step by step, as they are recorded.
fn memory_as_recorded(recorded: &Recorded, group: u64) -> [f64; 4] {
    let mut states: BTreeMap<u64, &str> = BTreeMap::new();
    let count = |states: &BTreeMap<u64, &str>, wanted: &str| {
        states.values().filter(|state| **state == wanted).count() as f64
    };
    let lines: Vec<serde_json::Value> =
        recorded.blocks.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let samples = recorded.record.timeline.samples();
    let (begin, end) = (samples[0].at_ns as f64, recorded.record.timeline.end_ns() as f64);
    let mut last = (begin, 0.0, 0.0);
    let (mut integrals, mut peaks) = ([0.0; 2], [0.0f64; 2]);
    let mut now = |at: f64, states: &BTreeMap<u64, &str>| {
        let (from, used, cached) = last;
        integrals[0] += used * (at - from);
        integrals[1] += cached * (at - from);
        if at > from {
            peaks = [peaks[0].max(used), peaks[1].max(cached)];
        }
        last = (at, count(states, "held"), count(states, "cached"));
    };
    for line in &lines {
        let n = line["blocks"].as_array().unwrap().len();
        assert!(n > 0 && line["step"].is_u64(), "{line}");
        for event in line["blocks"].as_array().unwrap() {
            if event[0] != group {
                continue;
            }
            let (change, block) = (event[1].as_str().unwrap(), event[2].as_u64().unwrap());
            assert_eq!(event.as_array().unwrap().len(), if change == "copy_on_write" { 6 } else { 5 });
            match change {
                "alloc" | "copy_on_write" | "share" | "hit" => states.insert(block, "held"),
                "free" | "evict" => states.remove(&block),
                "idle" => states.insert(block, "cached"),
                _ => None,
            };
        }
        now(line["at"].as_u64().unwrap() as f64, &states);
    }
    now(end, &states);
    [integrals[0] / (end - begin), peaks[0], integrals[1] / (end - begin), peaks[1]]
}

/// Multi-step runs, single steps, and a replay of the recording give the same bytes. Memory figures agree with the
/// block events. Also checks Little's law.
#[test]
fn steps_at_once_and_one_by_one_are_the_same() {
    let (mut turns, mut steps, mut preemptions, mut hits) = (0, 0, 0, 0);
    for (number, (config, capacity)) in settings().iter().enumerate() {
        for seed in 0..4 {
            let requests = requests(seed * 1000 + number as u64, 150);
            let vocabulary = Vocabulary::Ids { tokens_per_id: 8 };
            let cache = || {
                if seed == 3 { mixed(*capacity, vocabulary) } else { paged(*capacity, 4, Some(vocabulary)) }
            };
            let even = ConstantRates::new(700.0, 4.0).unwrap();
            let cost: &dyn StepCost = if seed == 2 { &even } else { &Uneven };
            let at_once = run(&requests, cache(), cost, &options(config, false), None, &mut |_| ()).unwrap();
            // Recorded runs use single steps, whether requested or not.
            let slowly = recorded(&requests, cache(), cost, &options(config, seed % 2 == 0));
            let (a, b) = (shown(&at_once), shown(&slowly));
            let differs = a.bytes().zip(b.bytes()).position(|(a, b)| a != b);
            let around = differs.map(|at| [&a, &b].map(|s| s.get(at.saturating_sub(150)..at + 50)));
            assert!(a == b, "setting {number}, seed {seed}: other figures: {around:?}");
            if seed == 0 {
                let again = recorded(&requests, cache(), cost, &options(config, false));
                assert!(again.decisions == slowly.decisions && again.blocks == slowly.blocks);
                assert!(again.events == slowly.events);
            }
            let load = Report::of(&at_once.record, &Objectives::default()).load;
            let [used, peak_used, cached, peak_cached] = [
                load.mean_used_blocks,
                load.peak_used_blocks as f64,
                load.mean_cached_blocks,
                load.peak_cached_blocks as f64,
            ];
            // In the mixed cache, the second group has no sliding window.
            let counted = memory_as_recorded(&slowly, u64::from(seed == 3));
            for (reported, counted) in [used, peak_used, cached, peak_cached].into_iter().zip(counted) {
                assert!(
                    (reported - counted).abs() <= 1e-9 * counted,
                    "setting {number}, seed {seed}: {reported}, and by the recording {counted}"
                );
            }
            if seed < 3 {
                turns += at_once.turns;
                steps += at_once.counters.steps;
            }
            preemptions += at_once.counters.preemptions;
            hits += at_once.counters.hit_tokens;
            assert_eq!(slowly.turns, at_once.counters.steps + slowly.counters.failed_steps);

            let lengths: Arc<[u32]> = requests.iter().map(|r| r.output_tokens).collect();
            let oracle = config.lengths == scheduler::LengthSource::Oracle;
            let truth = oracle.then(|| Box::new(Lengths(lengths)) as Box<dyn scheduler::Truth>);
            let replayed = scheduler::replay(slowly.events.as_bytes(), cache(), truth).unwrap();
            assert!(
                replayed == slowly.decisions,
                "setting {number}, seed {seed}: the replay decides otherwise"
            );

            let response: u64 = at_once
                .record
                .requests
                .iter()
                .filter_map(|row| Some(row.finished_ns? - row.arrival_ns))
                .sum();
            let all = at_once.record.requests.iter().all(|row| row.outcome == RequestOutcome::Finished);
            if all {
                // L = λW over the whole run, from empty to empty: requests · mean response = ∫ requests dt.
                let timeline = &at_once.record.timeline;
                let begin = timeline.samples()[0].at_ns;
                let integral = timeline.mean_requests() * (timeline.end_ns() - begin) as f64;
                assert!(
                    (integral - response as f64).abs() <= 1e-9 * integral,
                    "{integral} is not {response}"
                );
            }
        }
    }
    println!("{turns} turns of {steps} steps, {preemptions} preemptions, {hits} tokens hit");
    assert!(turns * 3 < steps * 2, "{turns} turns of {steps} steps: hardly any were run at once");
    assert!(preemptions > 100 && hits > 1000, "{preemptions} preemptions, {hits} tokens hit");
}

struct Lengths(Arc<[u32]>);

impl scheduler::Truth for Lengths {
    fn output_tokens(&self, id: scheduler::RequestId) -> u32 {
        self.0[id.0 as usize]
    }
}

/// A model of an engine: it gets token ids and returns some, one step at a time.
struct Engine {
    /// Prompt and answer of each request.
    texts: Vec<Arc<[u32]>>,
    lengths: Vec<u32>,
    prompts: Vec<u32>,
}

impl Executor for Engine {
    fn execute(&mut self, _: u64, mut step: Step<'_>, batch: Batch<'_>, out: &mut scheduler::Outcome) {
        let reads = step.with_reads(); // an engine reads KV data
        assert!(reads.has_reads() && batch.steps == 1);
        let mut shape = BatchShape::default();
        for (i, work) in batch.work.iter().enumerate() {
            let request = work.request.0 as usize;
            let (first, end) = (work.first as usize, (work.first + work.n_tokens) as usize);
            assert_eq!(batch.tokens(i), Some(&self.texts[request][first..end]), "{work:?}");
            if work.decodes {
                shape.add_decode(work.first.into());
            } else {
                shape.add_prefill(work.first.into(), work.n_tokens.into());
            }
            let sampled = work.samples.then(|| {
                let finished = end as u32 + 1 == self.prompts[request] + self.lengths[request];
                Sampled { token: Some(self.texts[request][end]), finished }
            });
            out.push_sampled(batch, sampled);
        }
        out.elapsed_ns = Uneven.step_ns(&shape);
    }
}

/// Golden test: with the same arrivals, an engine-like executor and the simulator's lead to the same decisions, and
/// replaying the engine's recording reproduces them. In half of the runs some layers have a window.
#[test]
fn an_engine_and_the_simulator_decide_alike() {
    let (mut preemptions, mut hits) = ([0; 2], [0; 2]);
    for run in 0..12 {
        let (seed, windows) = (run / 2, run as usize % 2);
        let mut random = Random(seed);
        let mut at = 0;
        let mut requests = Vec::new();
        for id in 0..120 {
            at += u64::from(random.below(30_000));
            let mut request = Request::new(id, at, 1 + random.below(90), 1 + random.below(40));
            let shared = random.below(60);
            let own = random.below(1000);
            let tokens =
                (0..request.total_tokens() as u32).map(|i| if i < shared { i } else { i * 31 + own });
            request.content = Prompt::SharedTokens(tokens.collect());
            requests.push(request);
        }
        let config = Config {
            policy: ["fcfs", "srpt", "sjf"][seed as usize % 3].into(),
            lengths: scheduler::LengthSource::RunningMean,
            max_batch: 6,
            max_batch_tokens: 48,
            work: TokenWork { prefill_ns: 10, decode_ns: 1200 },
            admission: Admission::Optimistic { headroom_tokens: 0 },
            ..Config::default()
        };
        let cache = || match windows {
            0 => paged(200, 4, Some(Vocabulary::Tokens)),
            _ => mixed(200, Vocabulary::Tokens),
        };
        let options = Options { scheduler: config.clone(), max_new: Some(64), ..Options::default() };
        let simulated = recorded(&requests, cache(), &Uneven, &options);

        let texts: Vec<Arc<[u32]>> = requests
            .iter()
            .map(|r| match &r.content {
                Prompt::SharedTokens(tokens) => tokens.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        let mut engine = Engine {
            texts: texts.clone(),
            lengths: requests.iter().map(|r| r.output_tokens).collect(),
            prompts: requests.iter().map(|r| r.prompt_tokens).collect(),
        };
        let arrivals = requests.iter().zip(&texts).map(|(r, text)| {
            let mut request = scheduler::Request::new(r.id, r.arrival_ns, r.prompt_tokens, 64);
            request.prompt = scheduler::Prompt::Tokens(text[..r.prompt_tokens as usize].to_vec());
            request
        });
        let mut served = Scheduler::new(config, cache(), None).unwrap();
        served.record();
        let mut clock = scheduler::VirtualClock::default();
        let mut n_ended = 0;
        scheduler::drive(&mut served, &mut engine, &mut clock, arrivals, |_| n_ended += 1).unwrap();
        assert_eq!(n_ended, requests.len());
        let decisions = served.decisions().take();
        preemptions[windows] += served.counters().preemptions;
        hits[windows] += served.counters().hit_tokens;
        let first = decisions.lines().zip(simulated.decisions.lines()).find(|(a, b)| a != b);
        assert_eq!(first, None, "seed {seed}");
        assert_eq!(decisions.len(), simulated.decisions.len(), "seed {seed}");
        let events = served.events().take();
        assert!(scheduler::replay(events.as_bytes(), cache(), None).unwrap() == decisions, "seed {seed}");
    }
    let enough = preemptions.iter().all(|n| *n > 20) && hits.iter().all(|n| *n > 1000);
    assert!(enough, "{preemptions:?} preemptions, {hits:?} tokens hit");
}

#[test]
fn a_run_can_be_stopped() {
    let stop = Arc::new(AtomicBool::new(false));
    let options = Options { stop: Some(stop.clone()), ..Options::default() };
    let mut ended = 0;
    let mut progress = |n: usize| {
        assert!(!stop.load(Ordering::Relaxed), "it goes on after the stop");
        ended = n;
        stop.store(n >= 5, Ordering::Relaxed);
    };
    let cache = paged(4096, 4, Some(Vocabulary::Ids { tokens_per_id: 8 }));
    let stopped = run(&requests(3, 60), cache, &Uneven, &options, None, &mut progress);
    assert_eq!(stopped.err(), Some(RunError::Stopped));
    assert!((5..60).contains(&ended));
}
