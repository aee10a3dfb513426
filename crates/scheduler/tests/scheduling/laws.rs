//! Conservation laws, checked after random arrivals, cancellations and failures over caches that are too small. Every
//! run is also replayed from its event log and must match byte for byte.
//!
//! `KVIST_OPS` sets the number of operations; a failure prints its seed.

use crate::common::cells;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, Kept, NodeId, PagedSpec, PrefixSpec, Step};
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;
use std::collections::BTreeMap;

/// `mixed` adds a sliding-window layer group with a smaller pool.
fn paged(capacity_tokens: u32, mixed: bool) -> Cache {
    let full = GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
    let visibility = Visibility { window: Some(9), sinks: 2 };
    let windowed = GroupSpec { capacity_tokens: 36, visibility, max_step_tokens: capacity_tokens };
    let prefix = Some(PrefixSpec::default());
    let groups = if mixed { vec![windowed, full] } else { vec![full] };
    Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap()
}

fn ops() -> u64 {
    std::env::var("KVIST_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000)
}

/// The reference model: the expected cost of each request, counted independently of the scheduler.
#[derive(Default)]
struct Reference {
    computed: u64,
    /// Tokens sampled in successful steps.
    sampled: u32,
    /// Position at which its next token must be computed: its end, or 0 after a loss.
    next: u32,
    again: u64,
    highest: u32,
    /// Planned tokens that were computed and not kept.
    rejected: u64,
}

struct Machine {
    config: Config,
    live: BTreeMap<RequestId, (Request, Reference)>,
    random: Random,
    fail: u32,
    steps: u64,
    /// True if the executor allows multi-step runs. It then returns no token ids.
    fuses: bool,
    /// True if the cache shares prefixes.
    shares: bool,
    /// True if each request keeps only a part of a run, and of the drafts in single steps.
    drafts: bool,
    /// Draft tokens that were verified.
    drafted: u64,
    /// Draft trees that were verified and are no chains.
    trees: u64,
    /// Requests that could have had a draft and were placed without: the drafts did not fit.
    dropped: u64,
    /// True if the last drafts were proposed for a step that has not run.
    proposed: bool,
}

/// A path from the root of a tree along random children, of at most `max` nodes.
fn random_path(parents: &[Option<NodeId>], max: u32, random: &mut Random) -> Vec<NodeId> {
    let mut path = vec![NodeId(0)];
    while (path.len() as u32) < max && random.below(5) > 0 {
        let last = path.last().copied();
        let children =
            (0..).zip(parents).filter(|(_, parent)| **parent == last).map(|(node, _)| NodeId(node));
        let children: Vec<NodeId> = children.collect();
        if children.is_empty() {
            break;
        }
        path.push(children[random.below(children.len() as u32) as usize]);
    }
    path
}

/// The answer length is a hash of the id. The reference model and the executor know it, the scheduler does not.
fn true_length(id: RequestId, max_new: u32) -> u32 {
    1 + (Random(id.0 ^ 0xabcd).next() % u64::from(max_new)) as u32
}

impl Executor for Machine {
    fn max_fused_steps(&mut self, _: u64, batch: Batch<'_>, limit: u32) -> u32 {
        if !self.fuses {
            return 1;
        }
        let left = batch.work.iter().map(|w| {
            let (request, reference) = &self.live[&w.request];
            true_length(w.request, request.max_new) - reference.sampled
        });
        limit.min(left.min().unwrap_or(1)).min(1 + self.random.below(20))
    }
    fn draft(&mut self, _: u64, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        assert!(batch.steps == 1 && limit > 0);
        let mut left = limit;
        for i in (0..batch.work.len()).filter(|&i| self.drafts && batch.work[i].decodes) {
            // A paged cache takes trees; they may be larger than what the request may generate, chains too.
            let n = self.random.below(9).min(left);
            let n = if self.shares { n } else { n.min(batch.max_new(i) - 1) };
            left -= n;
            let tree = self.shares && self.random.below(3) > 0;
            let parent = |i: u32, random: &mut Random| match tree {
                true => random.below(i + 1).checked_sub(1),
                false => i.checked_sub(1),
            };
            let parents: Vec<Option<u32>> = (0..n).map(|i| parent(i, &mut self.random)).collect();
            drafts.push(i, &parents);
        }
        self.proposed = !drafts.is_empty();
    }
    fn execute(&mut self, _: u64, _: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        let tokens: u32 = batch.work.iter().map(|w| w.n_tokens / batch.steps).sum();
        assert!(tokens <= self.config.max_batch_tokens, "{tokens} tokens in a step");
        assert!(batch.work.len() <= self.config.max_batch as usize, "{} sequences", batch.work.len());
        out.elapsed_ns = u64::from(batch.steps) * 1000;
        out.failed = self.fail > 0 && self.random.below(self.fail) == 0;
        if out.failed {
            return;
        }
        self.steps += u64::from(batch.steps);
        let verifies = (0..batch.work.len()).any(|i| !batch.draft(i).is_empty());
        self.dropped += u64::from(std::mem::take(&mut self.proposed) && !verifies);
        for (i, w) in batch.work.iter().enumerate() {
            let (request, reference) = self.live.get_mut(&w.request).expect("only live requests run");
            let again = w.first == 0 || self.shares && w.first % 4 == 0;
            assert!(w.first == reference.next || again, "{w:?} where {} was next", reference.next);
            if let Some(tokens) = batch.tokens(i) {
                let prompt = request.prompt_tokens;
                let token = |at| if at < prompt { at } else { at - prompt + 1 };
                let known = request.prompt_tokens + reference.sampled;
                let expected = (w.first..(w.first + w.n_tokens).min(known)).map(token);
                assert!(tokens.iter().copied().eq(expected), "{w:?} is fed {tokens:?}");
            }
            reference.computed += u64::from(w.n_tokens);
            let planned = w.n_tokens;
            if self.drafts && (batch.steps > 1 || !batch.draft(i).is_empty()) {
                assert!(batch.steps == 1 || batch.draft(i).is_empty());
                self.drafted += batch.draft(i).len() as u64;
                let left = true_length(w.request, request.max_new) - reference.sampled;
                let path = match batch.steps == 1 && !batch.drafts_chain(i) {
                    true => random_path(batch.draft(i), left, &mut self.random),
                    false => (0..1 + self.random.below(planned.min(left))).map(NodeId).collect(),
                };
                let kept = path.len() as u32;
                (reference.next, reference.highest) = (w.first + kept, reference.highest.max(w.first + kept));
                reference.sampled += kept;
                reference.rejected += u64::from(planned - kept);
                let tokens: Vec<u32> = (reference.sampled + 1 - kept..=reference.sampled).collect();
                let emitted = if self.fuses { Emitted::Unknown(kept) } else { Emitted::Tokens(&tokens) };
                let finished = reference.sampled == true_length(w.request, request.max_new);
                let tree = batch.steps == 1 && !batch.drafts_chain(i);
                self.trees += u64::from(tree);
                let kept = if tree { Kept::Path(&path) } else { Kept::First(kept) };
                out.push(Advance { kept, emitted, finished });
                continue;
            }
            reference.next = w.first + w.n_tokens;
            reference.again += u64::from(reference.highest.min(reference.next).saturating_sub(w.first));
            reference.highest = reference.highest.max(reference.next);
            let known = request.prompt_tokens + reference.sampled;
            assert!(reference.next < known + batch.steps, "{w:?} computes an unknown token");
            let samples = reference.next == known + batch.steps - 1;
            assert_eq!(samples, w.samples, "{w:?} of {known} known tokens");
            let sampled = samples.then(|| {
                reference.sampled += batch.steps;
                let length = true_length(w.request, request.max_new);
                assert!(reference.sampled <= length, "{w:?} goes on after its end");
                let token = (!self.fuses).then_some(reference.sampled);
                Sampled { token, finished: reference.sampled == length }
            });
            out.push_sampled(batch, sampled);
        }
    }
}

fn configs() -> Vec<Config> {
    let mut all = Vec::new();
    for (policy, _) in POLICIES {
        for lengths in [LengthSource::MaxNew, LengthSource::RunningMean] {
            for preempted in [Preempted::Recompute, Preempted::Kept] {
                let tight = Admission::Optimistic { headroom_tokens: 0 };
                for admission in [tight, Admission::Conservative] {
                    all.push(Config {
                        policy: (*policy).into(),
                        lengths,
                        max_batch: 4,
                        max_batch_tokens: 16,
                        admission,
                        preempted,
                        wait_for_prefix: lengths == LengthSource::MaxNew,
                        ageing_ns: 5_000,
                        ..Config::default()
                    });
                }
            }
        }
    }
    all
}

fn check_end(
    ended: &Ended,
    live: &mut BTreeMap<RequestId, (Request, Reference)>,
    config: &Config,
    (shares, mixed): (bool, bool),
    seed: u64,
) {
    let (request, reference) =
        live.remove(&ended.id).unwrap_or_else(|| panic!("{ended:?} ends twice; seed {seed}"));
    assert_eq!(ended.computed_tokens, reference.computed, "{ended:?} seed {seed}");
    assert_eq!(ended.generated, reference.sampled, "{ended:?} seed {seed}");
    match ended.end {
        End::Finished => {
            assert_eq!(reference.sampled, true_length(request.id, request.max_new), "{ended:?} seed {seed}");
            // Needed once, and again after every loss.
            let needed = u64::from(request.prompt_tokens + reference.sampled - 1);
            let supplied = u64::from(ended.hit_tokens) + u64::from(ended.regained_tokens);
            let done = needed + ended.lost_tokens + reference.rejected;
            assert_eq!(reference.computed + supplied, done, "{ended:?} seed {seed}");
            if !shares {
                assert_eq!((supplied, reference.again), (0, ended.lost_tokens), "{ended:?} seed {seed}");
            }
        }
        // Even the small pool has space for a window and a chunk: a request alone passes in smaller chunks.
        End::Refused(RefusalReason::CacheFull) => panic!("{ended:?} seed {seed}"),
        _ => {}
    }
    if config.admission == Admission::Conservative && config.policy == "fcfs" && !mixed {
        assert_eq!(ended.preemptions, 0, "{ended:?} seed {seed}");
    }
}

#[test]
fn every_request_ends_once_and_costs_what_it_must() {
    let configs = configs();
    let per_config = ops() / configs.len() as u64;
    let mut seen = [0u64; 4];
    let (mut hits, mut evictions, mut drafted, mut trees, mut dropped) = (0, 0, 0, [0; 2], 0);
    for (number, config) in configs.iter().enumerate() {
        for (fuses, shares, mixed) in [
            (false, false, false),
            (false, true, false),
            (false, true, true),
            (true, false, false),
            (true, true, false),
            (true, true, true),
        ] {
            let seed =
                (number as u64) << 3 | u64::from(fuses) << 2 | u64::from(shares) << 1 | u64::from(mixed);
            let mut random = Random(seed);
            let cache = || if shares { paged(96, mixed) } else { cells(96) };
            // Also a budget larger than a prompt: chunks may be larger than the pool of the window group.
            let max_batch_tokens = if mixed && number % 2 == 0 { 64 } else { config.max_batch_tokens };
            let config = &Config { max_batch_tokens, ..config.clone() };
            let mut scheduler = Scheduler::new(config.clone(), cache(), None).unwrap();
            scheduler.record();
            let mut machine = Machine {
                config: config.clone(),
                live: BTreeMap::new(),
                random: Random(!seed),
                fail: if number % 3 == 0 { 7 } else { 0 },
                steps: 0,
                fuses,
                shares,
                drafts: number % 2 == 0,
                drafted: 0,
                trees: 0,
                dropped: 0,
                proposed: false,
            };
            let (mut now, mut id, mut ends) = (0u64, 0u64, 0u64);
            for op in 0..per_config / 6 {
                match random.below(8) {
                    0 | 1 => {
                        let mut request = Request::new(id, now, 1 + random.below(40), 1 + random.below(30));
                        match random.below(20) {
                            0 => request.prompt_tokens = 90, // prompt plus answer may never fit
                            1 => request.max_new = 0,
                            2 => request.prompt_tokens = 0,
                            _ => {}
                        }
                        request.priority = random.below(5) as i32;
                        request.deadline_ns =
                            (random.below(4) > 0).then(|| now + u64::from(random.below(1 << 20)));
                        if random.below(2) == 0 {
                            request.prompt = Prompt::Tokens((0..request.prompt_tokens).collect());
                        }
                        id += 1;
                        machine.live.insert(request.id, (request.clone(), Reference::default()));
                        scheduler.arrive(now, request.clone()).unwrap();
                    }
                    2 if op % 4 == 0 => {
                        let victim = RequestId(u64::from(random.below(id as u32 + 1)));
                        let live = machine.live.contains_key(&victim);
                        assert_eq!(scheduler.cancel(now, victim), live, "seed {seed}");
                    }
                    3 if op % 4 == 0 => drop(scheduler.plan(now)),
                    _ => {
                        if let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now, &mut machine) {
                            now += elapsed_ns;
                        }
                    }
                }
                if op % 16 == 0 {
                    for (occupancy, report) in scheduler.cache().occupancy().zip(scheduler.cache().report()) {
                        let idle = report.blocks.map_or(0, |blocks| blocks.evictable * blocks.block_tokens);
                        let walked = (report.capacity_cells, report.capacity_cells - report.used_cells, idle);
                        let asked =
                            (occupancy.capacity_cells, occupancy.free_cells, occupancy.evictable_cells);
                        assert_eq!(asked, walked, "seed {seed}");
                    }
                }
                for ended in scheduler.drain_ended() {
                    ends += 1;
                    let kind = match ended.end {
                        End::Finished => 0,
                        End::Cancelled => 1,
                        End::Refused(_) => 2,
                    };
                    seen[kind] += 1;
                    seen[3] += u64::from(ended.preemptions);
                    check_end(&ended, &mut machine.live, config, (shares, mixed), seed);
                }
            }
            machine.fail = 0;
            let mut turns = 0;
            while let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now, &mut machine) {
                now += elapsed_ns;
                turns += 1;
                assert!(turns < 1_000_000, "{} requests go in circles; seed {seed}", machine.live.len());
                for ended in scheduler.drain_ended() {
                    ends += 1;
                    check_end(&ended, &mut machine.live, config, (shares, mixed), seed);
                }
            }
            for ended in scheduler.drain_ended() {
                ends += 1;
                check_end(&ended, &mut machine.live, config, (shares, mixed), seed);
            }
            let events = scheduler.events().take();
            let replayed =
                replay(events.as_bytes(), cache(), None).unwrap_or_else(|e| panic!("{e}; seed {seed}"));
            assert!(replayed == scheduler.decisions().take(), "the replay decides otherwise; seed {seed}");
            assert!(machine.live.is_empty(), "{} requests never ended; seed {seed}", machine.live.len());
            assert_eq!(ends, id, "seed {seed}");
            assert_eq!(scheduler.counters().steps, machine.steps, "seed {seed}");
            assert_eq!(scheduler.used_cells(), 0, "seed {seed}");
            for group in scheduler.cache().report() {
                assert_eq!(group.sequences.len(), 0, "seed {seed}");
                assert!(shares || group.used_cells == 0, "seed {seed}");
            }
            hits += scheduler.counters().hit_tokens;
            drafted += scheduler.counters().draft_tokens;
            trees[usize::from(mixed)] += machine.trees;
            dropped += machine.dropped;
            evictions += scheduler.counters().evictions;
        }
    }
    println!("finished, cancelled, refused, preempted: {seen:?}; {hits} tokens hit, {evictions} evictions");
    assert!(seen.iter().all(|&n| n > 100), "a path was hardly taken: {seen:?}");
    assert!(drafted > 1000 && trees.iter().all(|&n| n > 300), "{drafted} tokens and {trees:?} trees");
    assert!(dropped > 100, "{dropped} times, drafts did not fit");
    assert!(hits > 1000 && evictions > 100, "{hits} tokens hit, {evictions} evictions");
}
