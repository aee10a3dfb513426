//! Compares the scheduler with a simple reference model: vectors that are re-sorted on every access, no
//! queues, no flags, no slab. Both get the same random arrivals, cancellations and steps, and their decisions are
//! compared after every turn.
//!
//! The reference does its own accounting in cells: a request needs as much space as it has tokens.
use kvist_cache::Cache;
use kvist_cache::kinds::{Cells, GroupSpec, Visibility};
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;

#[derive(Clone)]
struct Job {
    request: Request,
    number: usize,
    running: bool,
    /// Admission order; running jobs are sorted by it.
    entered: usize,
    /// Tokens in the cache, and whether it has a sequence at all.
    cached: u32,
    has_cells: bool,
    generated: u32,
    share: Option<u32>,
}

struct Reference {
    config: Config,
    policy: Box<dyn SchedulingPolicy>,
    capacity: u32,
    jobs: Vec<Job>,
    n_entered: usize,
    said: Vec<String>,
}

impl Reference {
    fn known(job: &Job) -> u32 {
        job.request.prompt_tokens + job.generated
    }
    fn rank_with(&self, job: &Job, cached: u32, generated: u32) -> Rank {
        self.policy.rank(&View {
            id: job.request.id,
            arrival_ns: job.request.arrival_ns,
            prompt_tokens: job.request.prompt_tokens,
            cached_tokens: cached,
            generated,
            max_new: job.request.max_new,
            expected_new: job.request.max_new,
            deadline_ns: job.request.deadline_ns,
            priority: job.request.priority,
        })
    }
    fn key(&self, i: usize) -> (Rank, usize) {
        (self.rank_with(&self.jobs[i], self.jobs[i].cached, self.jobs[i].generated), self.jobs[i].number)
    }
    fn victim_key(&self, i: usize) -> (Rank, usize) {
        let (rank, number) = self.key(i);
        let job = &self.jobs[i];
        let (arrived, without_cells) = (self.rank_with(job, 0, 0), self.rank_with(job, 0, job.generated));
        (rank.min(arrived).min(without_cells), number)
    }
    fn free(&self) -> u32 {
        self.capacity - self.jobs.iter().map(|job| job.cached).sum::<u32>()
    }
    fn running(&self) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.jobs.len()).filter(|&i| self.jobs[i].running).collect();
        all.sort_by_key(|&i| self.jobs[i].entered);
        all
    }
    fn waiting(&self) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.jobs.len()).filter(|&i| !self.jobs[i].running).collect();
        all.sort_by_key(|&i| self.key(i));
        all
    }
    fn worst_running(&self) -> Option<usize> {
        self.running().into_iter().max_by_key(|&i| self.victim_key(i))
    }
    fn worst_with_cells(&self) -> Option<usize> {
        self.waiting().into_iter().rfind(|&i| self.jobs[i].has_cells)
    }

    fn preempt(&mut self, i: usize, why: &str, keep: bool) {
        self.said.push(format!("preempt {} for {why}", self.jobs[i].request.id));
        let job = &mut self.jobs[i];
        (job.running, job.share) = (false, None);
        if !keep {
            (job.cached, job.has_cells) = (0, false);
        }
    }
    fn drop_cache(&mut self, i: usize) {
        self.said.push(format!("drop {}", self.jobs[i].request.id));
        (self.jobs[i].cached, self.jobs[i].has_cells) = (0, false);
    }
    fn end(&mut self, i: usize, how: &str) {
        self.said.push(format!("end {} {how}", self.jobs[i].request.id));
        self.jobs.remove(i);
    }
    /// Preempts the worst running job for one with `key`, if rank and policy allow. Returns whether it did.
    fn make_way(&mut self, key: (Rank, usize), why: &str) -> bool {
        match self.worst_running() {
            Some(worst) if self.policy.preempts() && self.victim_key(worst).0 > key.0 => {
                self.preempt(worst, why, self.config.preempted == Preempted::Kept);
                true
            }
            _ => false,
        }
    }

    fn enter(&mut self, i: usize) -> bool {
        let job = &self.jobs[i];
        let running = self.running();
        let fits = match self.config.admission {
            Admission::Conservative => {
                let whole = |job: &Job| job.request.prompt_tokens + job.request.max_new - 1;
                let reserved: u32 = self.jobs.iter().filter(|job| job.has_cells).map(whole).sum();
                job.has_cells || reserved + whole(job) <= self.capacity
            }
            Admission::Optimistic { headroom_tokens } => {
                let mut demand = Reference::known(job) - job.cached;
                if !running.is_empty() {
                    demand += headroom_tokens;
                    demand += running
                        .iter()
                        .map(|&r| Reference::known(&self.jobs[r]) + 1 - self.jobs[r].cached)
                        .sum::<u32>();
                }
                demand <= self.free()
            }
        };
        if fits {
            let verb = if job.has_cells { "resume" } else { "admit" };
            self.said.push(format!("{verb} {}", job.request.id));
            if !job.has_cells {
                self.n_entered += 1;
                self.jobs[i].entered = self.n_entered;
            }
            (self.jobs[i].running, self.jobs[i].has_cells) = (true, true);
        }
        fits
    }

    /// The next admission, if there is one. A failed attempt is rolled back, including any preemptions made for it.
    fn admit(&mut self) -> Option<usize> {
        let (jobs, n_entered, n_said) = (self.jobs.clone(), self.n_entered, self.said.len());
        let admitted = self.try_to_admit(!self.running().is_empty());
        if admitted.is_none() && jobs.iter().any(|job| job.running) {
            (self.jobs, self.n_entered) = (jobs, n_entered);
            self.said.truncate(n_said);
        }
        admitted
    }

    fn try_to_admit(&mut self, others_run: bool) -> Option<usize> {
        loop {
            let head = *self.waiting().first()?;
            let key = self.key(head);
            if self.running().len() >= self.config.max_batch as usize && !self.make_way(key, "rank") {
                return None;
            }
            loop {
                let head = self.waiting().into_iter().find(|&i| self.key(i).1 == key.1)?;
                if self.enter(head) {
                    return Some(head);
                }
                if let Some(worst) = self.worst_with_cells().filter(|&w| self.victim_key(w) > key) {
                    self.drop_cache(worst);
                } else if self.make_way(key, "memory") {
                } else if others_run {
                    return None;
                } else if let Some(worst) =
                    self.waiting().into_iter().rfind(|&i| self.jobs[i].has_cells && i != head)
                {
                    self.drop_cache(worst);
                } else {
                    self.end(head, "never_fits");
                    break;
                }
            }
        }
    }

    fn build_batch(&mut self, mut admit: bool) {
        self.jobs.iter_mut().for_each(|job| job.share = None);
        for i in self.running() {
            if Reference::known(&self.jobs[i]) - self.jobs[i].cached == 1 {
                self.jobs[i].share = Some(1);
            }
        }
        loop {
            let used: u32 = self.jobs.iter().filter_map(|job| job.share).sum();
            let token_budget = self.config.max_batch_tokens - used;
            let full = self.running().len() >= self.config.max_batch as usize;
            if token_budget == 0 && !(admit && self.policy.preempts() && full) {
                break;
            }
            let mut unserved: Vec<usize> =
                self.running().into_iter().filter(|&i| self.jobs[i].share.is_none()).collect();
            unserved.sort_by_key(|&i| self.key(i));
            let prefill = unserved.first().copied();
            let head = self.waiting().first().copied().filter(|_| admit);
            let head =
                head.filter(|&h| prefill.is_none_or(|p| self.policy.preempts() && self.key(h) < self.key(p)));
            let served = match head {
                Some(_) => match self.admit() {
                    Some(i) => i,
                    None => {
                        admit = false;
                        continue;
                    }
                },
                None => match prefill {
                    Some(i) => i,
                    None => break,
                },
            };
            let used: u32 = self.jobs.iter().filter_map(|job| job.share).sum();
            let left = Reference::known(&self.jobs[served]) - self.jobs[served].cached;
            self.jobs[served].share = Some(left.min(self.config.max_batch_tokens - used));
        }
    }

    /// Runs one turn. `length` returns how many tokens a request generates.
    fn turn(&mut self, length: impl Fn(&Request) -> u32) {
        let mut admit = true;
        loop {
            self.build_batch(admit);
            let needed: u32 = self.jobs.iter().filter_map(|job| job.share).sum();
            if needed <= self.free() {
                break;
            }
            if let Some(worst) = self.worst_with_cells() {
                self.drop_cache(worst);
            } else {
                let worst = self.worst_running().expect("a step has a request");
                if self.running().len() > 1 {
                    self.preempt(worst, "memory", false);
                } else {
                    self.end(worst, "cache_full");
                }
            }
            admit = self.running().is_empty();
        }
        let mut ended = Vec::new();
        for i in self.running() {
            let Some(share) = self.jobs[i].share.filter(|&share| share > 0) else { continue };
            let job = &mut self.jobs[i];
            job.cached += share;
            if job.cached == Reference::known(job) {
                job.generated += 1;
                if job.generated == length(&job.request) {
                    ended.push(job.number);
                }
            }
        }
        for number in ended {
            let i = self.jobs.iter().position(|job| job.number == number).expect("it ran");
            self.end(i, "finished");
        }
    }
}

/// The decision log in the reference's terms.
fn words(log: &str) -> Vec<String> {
    let mut said = Vec::new();
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("every line is JSON");
        for verb in ["admit", "resume", "preempt", "drop", "end"] {
            if let Some(id) = line.get(verb) {
                said.push(match verb {
                    "preempt" => format!("preempt {id} for {}", line["for"].as_str().unwrap_or("?")),
                    "end" => format!("end {id} {}", line["how"].as_str().unwrap_or("?")),
                    _ => format!("{verb} {id}"),
                });
            }
        }
    }
    said
}

fn length(request: &Request) -> u32 {
    1 + (Random(request.id.0 ^ 0xabcd).next() % u64::from(request.max_new)) as u32
}

#[test]
fn decides_as_the_reference_scheduler() {
    let ops: u64 = std::env::var("KVIST_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let mut configs = Vec::new();
    for (policy, _) in POLICIES {
        for preempted in [Preempted::Recompute, Preempted::Kept] {
            for admission in [
                Admission::Optimistic { headroom_tokens: 0 },
                Admission::Optimistic { headroom_tokens: 9 },
                Admission::Conservative,
            ] {
                for max_batch_tokens in [4, 16, 16] {
                    configs.push(Config {
                        policy: (*policy).into(),
                        max_batch: 4,
                        max_batch_tokens,
                        admission,
                        preempted,
                        ageing_ns: 3_000,
                        work: TokenWork { prefill_ns: 100, decode_ns: 900 },
                        ..Config::default()
                    });
                }
            }
        }
    }
    let per_config = ops / configs.len() as u64;
    let mut verbs = std::collections::BTreeMap::<String, u64>::new();
    for (seed, config) in configs.iter().enumerate() {
        let capacity = [90, 250][seed % 2];
        let group =
            GroupSpec { capacity_tokens: capacity, visibility: Visibility::FULL, max_step_tokens: capacity };
        let cache = Cache::new(vec![Box::new(Cells::new(&group))]);
        let mut scheduler = Scheduler::new(config.clone(), cache, None).unwrap();
        scheduler.record();
        scheduler.decisions().take();
        let policy = build_policy(config).unwrap();
        let mut reference =
            Reference { config: config.clone(), policy, capacity, jobs: vec![], n_entered: 0, said: vec![] };
        let mut random = Random(seed as u64);
        let mut now = 0;
        let mut all: Vec<Request> = Vec::new();
        for _ in 0..per_config {
            match random.below(9) {
                0 | 1 => {
                    let id = all.len() as u64;
                    let mut request = Request::new(id, now, 1 + random.below(35), 1 + random.below(30));
                    request.priority = random.below(4) as i32;
                    request.deadline_ns =
                        (random.below(4) > 0).then(|| now + u64::from(random.below(60_000)));
                    all.push(request.clone());
                    scheduler.arrive(now, request.clone()).unwrap();
                    reference.jobs.push(Job {
                        request,
                        number: all.len(),
                        running: false,
                        entered: 0,
                        cached: 0,
                        has_cells: false,
                        generated: 0,
                        share: None,
                    });
                }
                2 if random.below(3) == 0 && !reference.jobs.is_empty() => {
                    let i = random.below(reference.jobs.len() as u32) as usize;
                    assert!(scheduler.cancel(now, reference.jobs[i].request.id));
                    reference.end(i, "cancelled");
                    let used: u32 = reference.jobs.iter().map(|job| job.cached).sum();
                    assert_eq!(
                        scheduler.used_cells(),
                        u64::from(used),
                        "memory is free before the next step"
                    );
                }
                _ => {
                    reference.turn(length);
                    let mut sampled = vec![0u32; 0];
                    sampled.resize(all.len(), 0);
                    let mut script = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
                        out.elapsed_ns = 1000;
                        out.sample_each(batch, |w| {
                            let request = &all[w.request.0 as usize];
                            // Known tokens after this step, minus the prompt.
                            let generated = w.first + w.n_tokens + 1 - request.prompt_tokens;
                            Sampled { token: None, finished: generated == length(request) }
                        });
                    });
                    if let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now, &mut script) {
                        now += elapsed_ns;
                    }
                }
            }
            let said = words(&scheduler.decisions().take());
            assert_eq!(said, reference.said, "seed {seed}, {config:?}");
            for word in reference.said.drain(..) {
                *verbs.entry(word.split(' ').next().unwrap_or("").into()).or_default() += 1;
            }
            let running = reference.running().len();
            assert_eq!(
                (scheduler.n_running(), scheduler.n_waiting()),
                (running, reference.jobs.len() - running)
            );
        }
    }
    println!("{verbs:?}");
    for verb in ["admit", "resume", "preempt", "drop", "end"] {
        assert!(verbs.get(verb).is_some_and(|&n| n > 100), "{verb} was hardly ever said: {verbs:?}");
    }
}
