//! The fleet compared with a simple one: every worker is looked at for every event, every decode step is run by itself, the
//! router's view is a list of news and a set of hashes per worker, and policies follow their definition, worker by worker.
use super::{Uneven, cache, fleet, loads};
use kvist_cache::{Cache, PagedSpec, PrefixEvent, Step};
use kvist_scheduler as scheduler;
use kvist_scheduler::{Batch, End, Ended, Executor, Iteration, Outcome, RequestId, Sampled, Scheduler};
use kvist_simulator::cost::{BatchShape, StepCost};
use kvist_simulator::fleet::{FleetOptions, Policy, WhatChanges};
use kvist_simulator::report::{RequestOutcome, RequestRow};
use kvist_simulator::request::Request;
use kvist_testing::SplitMix64;
use std::collections::{BTreeMap, BTreeSet};

/// Runs single steps. Requests are named by their place in the list.
struct Steps<'a> {
    requests: &'a [Request],
    generated: BTreeMap<usize, u32>,
    first: Vec<usize>,
}

impl Executor for Steps<'_> {
    fn execute(&mut self, _: u64, _: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        out.elapsed_ns = Uneven.step_ns(&BatchShape::of(&batch));
        for work in batch.work {
            let i = work.request.0 as usize;
            if !work.samples {
                out.push_sampled(batch, None);
                continue;
            }
            let generated = self.generated.entry(i).or_default();
            *generated += 1;
            if *generated == 1 {
                self.first.push(i);
            }
            let finished = *generated == self.requests[i].output_tokens;
            out.push_sampled(batch, Some(Sampled { token: None, finished }));
        }
    }
}

struct Worker<'a> {
    scheduler: Scheduler,
    steps: Steps<'a>,
    waiting: Vec<usize>,
    busy_until: Option<u64>,
    ended: Vec<Ended>,
    events: Vec<PrefixEvent>,
    /// Requests here, and tokens of each that are to be computed; 0 after the first token.
    backlog: BTreeMap<usize, u64>,
    /// What the router knows of the cache.
    known: BTreeSet<u64>,
    /// What the router has sent.
    sent: BTreeSet<u64>,
}

struct Twin<'a> {
    requests: &'a [Request],
    options: &'a FleetOptions,
    spec: &'a PagedSpec,
    workers: Vec<Option<Worker<'a>>>,
    /// (time, worker, life of the worker, hash, whether it is stored)
    news: Vec<(u64, usize, u32, u64, bool)>,
    lives: Vec<u32>,
    turn: usize,
    rows: Vec<RequestRow>,
    held: Vec<usize>,
    arrived_ns: Vec<u64>,
    n_retried: u64,
    requests_of: Vec<u64>,
}

impl<'a> Twin<'a> {
    fn join(&mut self, w: usize) {
        let mut cache = Cache::paged(self.spec).unwrap();
        cache.watch_prefixes(true);
        if self.workers.len() <= w {
            self.workers.push(None);
            self.lives.push(0);
            self.requests_of.push(0);
        }
        self.lives[w] += 1;
        self.workers[w] = Some(Worker {
            scheduler: Scheduler::new(self.options.run.scheduler.clone(), cache, None).unwrap(),
            steps: Steps { requests: self.requests, generated: BTreeMap::new(), first: Vec::new() },
            waiting: Vec::new(),
            busy_until: None,
            ended: Vec::new(),
            events: Vec::new(),
            backlog: BTreeMap::new(),
            known: BTreeSet::new(),
            sent: BTreeSet::new(),
        });
    }

    fn hashes(&self, i: usize) -> Vec<u64> {
        let request = &self.requests[i];
        let content = request.content.content(request.prompt_tokens);
        Cache::paged(self.spec).unwrap().prefix_hashes(request.salt(), &content)
    }

    /// The worker by the definition of the policy, and the tokens expected in its cache.
    fn choose(&mut self, i: usize) -> Option<(usize, u64)> {
        let alive: Vec<usize> = (0..self.workers.len()).filter(|&w| self.workers[w].is_some()).collect();
        let prompt = u64::from(self.requests[i].prompt_tokens);
        let (hashes, block) = (self.hashes(i), u64::from(self.spec.block_tokens));
        let worker = |w: usize| self.workers[w].as_ref().unwrap();
        let n_requests = |w: usize| worker(w).backlog.len();
        let usable = (prompt - 1) / block;
        let depth =
            |known: &BTreeSet<u64>| hashes.iter().take_while(|hash| known.contains(hash)).count() as u64;
        let fewest = alive.iter().copied().min_by_key(|&w| (n_requests(w), w))?;
        match self.options.policy {
            Policy::RoundRobin => {
                self.turn += 1;
                Some((alive[(self.turn - 1) % alive.len()], 0))
            }
            Policy::LeastLoaded => Some((fewest, 0)),
            Policy::PrefixAware => {
                let credit = |w: usize| depth(&worker(w).known).min(usable) * block;
                let cost = |w: usize| {
                    let backlog: u64 = worker(w).backlog.values().sum();
                    (prompt - credit(w) + backlog) * (n_requests(w) as u64 + 1)
                };
                let best = alive.iter().copied().min_by_key(|&w| (cost(w), w))?;
                Some((best, credit(best)))
            }
            Policy::CacheAware => {
                let most = alive.iter().map(|&w| n_requests(w)).max()?;
                let balanced =
                    most - n_requests(fewest) <= 32 || most as f64 <= 1.1 * n_requests(fewest) as f64;
                let matched = |w: usize| depth(&worker(w).sent);
                let longest = alive.iter().map(|&w| matched(w)).max()?;
                let (mut chosen, mut credit) = (fewest, 0);
                if balanced && 2 * longest * block > prompt {
                    let with = alive.iter().copied().filter(|&w| matched(w) == longest);
                    chosen = with.min_by_key(|&w| (n_requests(w), w))?;
                    credit = longest.min(usable) * block;
                }
                self.workers[chosen].as_mut().unwrap().sent.extend(hashes);
                Some((chosen, credit))
            }
            other => panic!("no twin of {other:?}"),
        }
    }

    fn send(&mut self, now: u64, i: usize) {
        for &(at_ns, w, life, hash, stored) in self.news.iter().filter(|news| news.0 <= now) {
            if let Some(worker) = self.workers[w].as_mut().filter(|_| self.lives[w] == life) {
                if stored {
                    worker.known.insert(hash)
                } else {
                    worker.known.remove(&hash)
                };
            }
            assert!(at_ns <= now);
        }
        self.news.retain(|news| news.0 > now);
        match self.choose(i) {
            None => self.held.push(i),
            Some((w, credit)) => {
                let worker = self.workers[w].as_mut().unwrap();
                worker.backlog.insert(i, u64::from(self.requests[i].prompt_tokens) - credit);
                worker.waiting.push(i);
            }
        }
    }

    /// Reports requests that ended by `now`. Returns those that finished.
    fn deliver(&mut self, w: usize, now: u64) -> Vec<usize> {
        let worker = self.workers[w].as_mut().unwrap();
        let (ended, later) = worker.ended.drain(..).partition(|ended: &Ended| ended.ended_ns <= now);
        worker.ended = later;
        let mut finished = Vec::new();
        for end in ended {
            let i = end.id.0 as usize;
            worker.backlog.remove(&i);
            self.requests_of[w] += 1;
            let row = &mut self.rows[i];
            assert_eq!(row.outcome, RequestOutcome::Unfinished, "request {i} ended twice");
            row.arrival_ns = self.arrived_ns[i];
            row.admitted_ns = end.admitted_ns;
            row.first_token_ns = end.first_token_ns;
            row.finished_ns = (end.end == End::Finished).then_some(end.ended_ns);
            row.output_tokens = end.generated;
            row.hit_tokens = end.hit_tokens;
            row.preemptions = end.preemptions;
            let default_ns = self.options.run.deadline_ns.map(|ns| row.arrival_ns + ns);
            row.deadline_ns = self.requests[i].deadline_ns.or(default_ns);
            row.outcome = match end.end {
                End::Finished => RequestOutcome::Finished,
                _ => RequestOutcome::Refused,
            };
            if end.end == End::Finished {
                finished.push(i);
            }
        }
        finished
    }

    fn run(requests: &'a [Request], spec: &'a PagedSpec, options: &'a FleetOptions) -> Twin<'a> {
        let row = |request: &Request| RequestRow {
            id: request.id,
            arrival_ns: request.arrival_ns,
            prompt_tokens: request.prompt_tokens,
            deadline_ns: request.deadline_ns,
            outcome: RequestOutcome::NeverArrived,
            ..RequestRow::default()
        };
        let mut twin = Twin {
            requests,
            options,
            spec,
            workers: Vec::new(),
            news: Vec::new(),
            lives: Vec::new(),
            turn: 0,
            rows: requests.iter().map(row).collect(),
            held: Vec::new(),
            arrived_ns: vec![0; requests.len()],
            n_retried: 0,
            requests_of: Vec::new(),
        };
        (0..options.workers as usize).for_each(|w| twin.join(w));
        let child_of = |i: usize, parent: usize| requests[i].parent == Some(requests[parent].id);
        let is_root = |i: usize| !(0..requests.len()).any(|parent| child_of(i, parent));
        let mut arrivals: Vec<(u64, usize)> =
            (0..requests.len()).filter(|&i| is_root(i)).map(|i| (requests[i].arrival_ns, i)).collect();
        let mut changes = options.changes.clone();
        changes.sort_by_key(|change| change.at_ns);
        let mut now = 0;
        loop {
            let steps = twin.workers.iter().flatten().filter_map(|worker| worker.busy_until).min();
            let arrival = arrivals.iter().map(|arrival| arrival.0).min();
            let change = changes.first().map(|change| change.at_ns.max(now));
            if steps.is_none() && arrival.is_none() && (twin.held.is_empty() || change.is_none()) {
                return twin;
            }
            now = [steps, arrival, change].into_iter().flatten().min().unwrap();
            for w in 0..twin.workers.len() {
                let Some(worker) = twin.workers[w].as_mut().filter(|worker| worker.busy_until == Some(now))
                else {
                    continue;
                };
                worker.busy_until = None;
                for i in worker.steps.first.drain(..) {
                    worker.backlog.insert(i, 0);
                }
                let at_ns = now + options.view_delay_ns;
                for event in worker.events.drain(..) {
                    let (hash, stored) = match event {
                        PrefixEvent::Stored { hash, .. } => (hash, true),
                        PrefixEvent::Removed { hash, .. } => (hash, false),
                        other => panic!("{other:?}"),
                    };
                    twin.news.push((at_ns, w, twin.lives[w], hash, stored));
                }
                for parent in twin.deliver(w, now) {
                    for i in (0..requests.len()).filter(|&i| child_of(i, parent)) {
                        arrivals.push((requests[i].arrival_ns.max(now + requests[i].think_ns), i));
                    }
                }
            }
            while changes.first().is_some_and(|change| change.at_ns <= now) {
                let change = changes.remove(0);
                let w = change.worker as usize;
                if change.what == WhatChanges::Joins {
                    twin.join(w);
                    std::mem::take(&mut twin.held).into_iter().for_each(|i| twin.send(now, i));
                } else {
                    let failed = twin.workers[w].take().unwrap();
                    let mut again: Vec<usize> = failed.backlog.into_keys().collect();
                    again.sort_by_key(|&i| (twin.arrived_ns[i], i));
                    twin.n_retried += again.len() as u64;
                    again.into_iter().for_each(|i| twin.send(now, i));
                }
            }
            arrivals.sort_unstable();
            while arrivals.first().is_some_and(|arrival| arrival.0 <= now) {
                let (at_ns, i) = arrivals.remove(0);
                twin.arrived_ns[i] = at_ns;
                (twin.rows[i].arrival_ns, twin.rows[i].outcome) = (at_ns, RequestOutcome::Unfinished);
                twin.send(now, i);
            }
            for w in 0..twin.workers.len() {
                let Some(worker) = twin.workers[w].as_mut().filter(|worker| worker.busy_until.is_none())
                else {
                    continue;
                };
                for i in std::mem::take(&mut worker.waiting) {
                    let (request, at_ns) = (&requests[i], twin.arrived_ns[i]);
                    let mut new = scheduler::Request::new(i as u64, at_ns, request.prompt_tokens, 0);
                    new.max_new = options.run.max_new.unwrap_or(0).max(request.output_tokens);
                    new.prompt = request.content.clone();
                    let default_ns = options.run.deadline_ns.map(|ns| at_ns + ns);
                    new.deadline_ns = request.deadline_ns.or(default_ns);
                    new.priority = request.priority;
                    new.salt = request.salt().into();
                    worker.steps.generated.remove(&i);
                    assert_eq!(new.id, RequestId(i as u64));
                    worker.scheduler.arrive(now, new).unwrap();
                }
                let iteration = worker.scheduler.iterate(now, &mut worker.steps);
                if let Iteration::Ran { elapsed_ns, .. } = iteration {
                    worker.busy_until = Some(now + elapsed_ns);
                }
                worker.ended.extend(worker.scheduler.drain_ended());
                worker.scheduler.cache_mut().drain_prefix_events(&mut worker.events);
                assert!(twin.deliver(w, now).is_empty(), "what ends at once is refused");
            }
        }
    }
}

#[test]
fn random_fleets() {
    let rounds = std::env::var("KVIST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    let mut random = SplitMix64(17);
    let (mut retried, mut credited, mut hits, mut evicted) = (0, 0, 0, 0);
    for round in 0..rounds {
        let requests = loads::requests(round, 60 + random.below(120), [4_000, 30_000][round as usize % 2]);
        for policy in [Policy::RoundRobin, Policy::LeastLoaded, Policy::PrefixAware, Policy::CacheAware] {
            let most = [4, 80][round as usize % 2];
            let mut options = loads::options(&mut random, policy, most);
            options.changes = loads::changes(&mut random, options.workers, 2_000_000);
            let spec = cache([400, 1000, 4000][round as usize % 3]);
            let run = fleet(&requests, &spec, &Uneven, &options);
            let twin = Twin::run(&requests, &spec, &options);
            for (row, expected) in run.rows.iter().zip(&twin.rows) {
                assert_eq!(row, expected, "round {round}, {policy:?}");
            }
            assert_eq!(run.report.fleet.retried_requests, twin.n_retried, "round {round}, {policy:?}");
            retried += twin.n_retried;
            credited += run.report.fleet.credited_tokens;
            hits += run.report.cache.counts.hit_tokens;
            evicted += run.report.cache.counts.evicted_blocks;
            if run.report.fleet.list.len() == twin.requests_of.len() {
                let of_workers: Vec<u64> =
                    run.report.fleet.list.iter().map(|worker| worker.requests).collect();
                assert_eq!(of_workers, twin.requests_of, "round {round}, {policy:?}");
            }
        }
    }
    let seen = [retried, credited, hits, evicted];
    assert!(seen.iter().all(|n| *n > 100), "the loads show too little: {seen:?}");
}
