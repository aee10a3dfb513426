//! What drafts may not do: take tokens or memory that other requests need, or change decisions.

use crate::common::{cells, paged};
use kvist_cache::{Cache, Kept, NodeId, Step, Vocabulary};
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;

/// Every step takes a millisecond and rejects all drafts. Answers end at `max_new`.
struct Rejecting {
    random: Random,
    /// Most draft tokens of a request; 0: no drafts.
    drafts: u32,
    /// True if the cache takes trees.
    trees: bool,
    max_batch_tokens: u32,
    /// Proposed for the next step.
    proposed: bool,
    verified: u64,
    dropped: u64,
}

impl Rejecting {
    fn new(config: &Config, drafts: u32, trees: bool) -> Rejecting {
        let max_batch_tokens = config.max_batch_tokens;
        let (proposed, verified, dropped) = (false, 0, 0);
        Rejecting { random: Random(5), drafts, trees, max_batch_tokens, proposed, verified, dropped }
    }
}

impl Executor for Rejecting {
    fn draft(&mut self, _: u64, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        let planned: u32 = batch.work.iter().map(|work| work.n_tokens).sum();
        assert_eq!(limit, self.max_batch_tokens - planned, "drafts get what the others leave");
        let mut left = limit;
        for (i, _) in batch.work.iter().enumerate().filter(|(_, work)| work.decodes) {
            let n = self.drafts.min(left);
            left -= n;
            let mut parent = |i| if self.trees { self.random.below(i + 1) } else { i };
            let parents: Vec<Option<u32>> = (0..n).map(|i| parent(i).checked_sub(1)).collect();
            drafts.push(i, &parents);
        }
        self.proposed = !drafts.is_empty();
    }

    fn execute(&mut self, _: u64, _: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        let tokens: u32 = batch.work.iter().map(|work| work.n_tokens).sum();
        assert!(tokens <= self.max_batch_tokens, "{tokens} tokens in a step");
        let verifies = (0..batch.work.len()).any(|i| !batch.draft(i).is_empty());
        self.verified += u64::from(verifies);
        self.dropped += u64::from(std::mem::take(&mut self.proposed) && !verifies);
        out.elapsed_ns = 1_000_000;
        for (i, work) in batch.work.iter().enumerate() {
            let sampled = work.samples.then_some(Sampled { token: Some(work.first), finished: false });
            let (emitted, root) = (Emitted::Tokens(std::slice::from_ref(&work.first)), [NodeId(0)]);
            match batch.draft(i) {
                [] => out.push_sampled(batch, sampled),
                _ if batch.drafts_chain(i) => {
                    out.push(Advance { kept: Kept::First(1), emitted, finished: false });
                }
                _ => out.push(Advance { kept: Kept::Path(&root), emitted, finished: false }),
            }
        }
    }
}

/// Runs random requests; gives the decisions, the counters and the executor.
fn run(config: &Config, mut cache: Cache, drafts: u32, seed: u64) -> (String, SchedulerCounters, Rejecting) {
    let mut random = Random(seed);
    let mut at = 0;
    let requests: Vec<Request> = (0..120)
        .map(|id| {
            at += u64::from(random.below(4)) * 3_000_000;
            let mut request = Request::new(id, at, 1 + random.below(60), 1 + random.below(30));
            request.deadline_ns = Some(at + u64::from(random.below(100)) * 1_000_000);
            request.priority = random.below(3) as i32;
            let family = random.below(3) * 1000;
            let own = random.below(40);
            let token = |i| family + i + if i < own { 0 } else { 10_000 * (1 + id as u32) };
            request.prompt = Prompt::Tokens((0..request.prompt_tokens).map(token).collect());
            request
        })
        .collect();
    let mut executor = Rejecting::new(config, drafts, cache.prefixes().is_some());
    let mut scheduler = Scheduler::new(config.clone(), cache, None).unwrap();
    scheduler.record();
    let mut ended = 0;
    let mut clock = VirtualClock::default();
    drive(&mut scheduler, &mut executor, &mut clock, requests, |it| {
        assert_eq!(it.accepted_tokens, 0);
        ended += 1;
    })
    .unwrap();
    assert_eq!((ended, scheduler.used_cells()), (120, 0));
    (scheduler.decisions().take(), *scheduler.counters(), executor)
}

fn configs() -> impl Iterator<Item = Config> {
    POLICIES.iter().enumerate().map(|(i, (policy, _))| Config {
        policy: (*policy).into(),
        max_batch: 5,
        max_batch_tokens: 24,
        admission: Admission::Optimistic { headroom_tokens: 0 },
        preempted: if i % 2 == 0 { Preempted::Recompute } else { Preempted::Kept },
        ..Config::default()
    })
}

/// Where memory is not short, rejected drafts change no decision: admissions, chunks and preemptions are those of a run
/// without drafts, at the same times.
#[test]
fn rejected_drafts_decide_nothing() {
    for (seed, config) in (0..).zip(configs()) {
        let cache = || paged(8000, Vocabulary::Tokens);
        let (decisions, counters, _) = run(&config, cache(), 0, seed);
        let (with_drafts, with, executor) = run(&config, cache(), 6, seed);
        assert!(with_drafts == decisions, "{}: other decisions", config.policy);
        assert!(executor.verified > 100 && executor.dropped == 0, "{} steps", executor.verified);
        assert_eq!((with.accepted_tokens, with.sampled_tokens), (0, counters.sampled_tokens));
        assert_eq!(with.computed_tokens, counters.computed_tokens + with.draft_tokens);
    }
}

/// In a cache that is too small, drafts are dropped where they do not fit. They never preempt: without a prefix index
/// every decision is that of a run without drafts.
#[test]
fn drafts_never_preempt() {
    let (mut preemptions, mut dropped) = (0, 0);
    for (seed, config) in (0..).zip(configs()) {
        let (decisions, counters, _) = run(&config, cells(100), 0, seed);
        let (with_drafts, with, executor) = run(&config, cells(100), 6, seed);
        assert!(with_drafts == decisions, "{}: other decisions", config.policy);
        assert_eq!(with.preemptions, counters.preemptions);
        (preemptions, dropped) = (preemptions + counters.preemptions, dropped + executor.dropped);
        assert!(executor.verified > 100);
    }
    assert!(preemptions > 100 && dropped > 100, "{preemptions} preemptions, {dropped} times dropped");
}

/// Drafts may evict cached blocks that no sequence uses.
#[test]
fn drafts_evict() {
    let config = Config { max_batch: 5, max_batch_tokens: 24, ..Config::default() };
    for (drafts, evictions) in [(0, 0), (16, 1)] {
        // Twelve blocks: five that the first request leaves cached, and at most six of the second one's own.
        let mut scheduler = Scheduler::new(config.clone(), paged(48, Vocabulary::Tokens), None).unwrap();
        let mut executor = Rejecting::new(&config, drafts, true);
        let requests = (0..2).map(|id| Request {
            prompt: Prompt::Tokens((100 * id..100 * id + 16).collect()),
            ..Request::new(id.into(), u64::from(id) * 10_000_000, 16, 8)
        });
        drive(&mut scheduler, &mut executor, &mut VirtualClock::default(), requests, |_| ()).unwrap();
        let counters = scheduler.counters();
        assert_eq!((counters.evictions > 0, counters.preemptions), (evictions > 0, 0));
        assert_eq!((executor.verified > 0, executor.dropped), (drafts > 0, 0));
    }
}
