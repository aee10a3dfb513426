//! What a fleet records while it runs: sums and histograms, so that memory does not grow with the number of requests.
use super::FleetOptions;
use super::load::Load;
use super::report::{FleetReport, FleetSummary, Imbalance, OverWorkers, WorkerReport};
use super::worker::{Member, Ticket};
use crate::cost::StepCost;
use crate::report::{
    Attainment, CacheCounts, CacheReport, Latency, RequestCounts, RequestOutcome, RequestRow, StepCounts,
    Throughput, TiersRecord, TiersReport, VERSION, ratio,
};
use crate::request::Request;
use crate::run::tiers::TierCounts;
use crate::run::{Options, note_end, setting};
use crate::statistics::{Histogram, Spread};
use kvist_scheduler::Ended;

/// Reports list single workers up to this number.
const LISTED_WORKERS: usize = 64;

#[derive(Clone, Default)]
struct WorkerTally {
    requests: u64,
    hit_tokens: u64,
    prompt_tokens: u64,
    steps: StepCounts,
    /// Whether it ever was there: a run may be over before a worker joins.
    was_there: bool,
    /// When it joined, if it is there.
    since_ns: Option<u64>,
    alive_ns: u64,
}

pub(super) struct Tally {
    total: u64,
    n_arrived: u64,
    counts: RequestCounts,
    met: u64,
    queue_ns: Histogram,
    ttft_ns: Histogram,
    tpot_ns: Histogram,
    itl_ns: Histogram,
    end_to_end_ns: Histogram,
    finished_prompt_tokens: u64,
    finished_output_tokens: u64,
    begin_ns: Option<u64>,
    end_ns: u64,
    cache: CacheCounts,
    steps: StepCounts,
    /// `None` without tiers.
    tiers: Option<TiersRecord>,
    workers: Vec<WorkerTally>,
    credited_tokens: u64,
    /// How often a request was sent again.
    pub n_retried: u64,
    /// Workers that have failed, and that have joined since the start.
    pub n_failures: u64,
    pub n_joins: u64,
    /// In the order of the requests, if asked for.
    rows: Option<Vec<RequestRow>>,
    objectives: crate::report::Objectives,
}

impl Tally {
    /// `cache`: the counts of a worker's empty cache.
    pub fn new(options: &FleetOptions, load: &Load<'_>, n_workers: u32, cache: CacheCounts) -> Tally {
        let row = |number: usize| RequestRow::expected(&load.request(number));
        Tally {
            total: load.n_requests() as u64,
            n_arrived: 0,
            counts: RequestCounts::default(),
            met: 0,
            queue_ns: Histogram::default(),
            ttft_ns: Histogram::default(),
            tpot_ns: Histogram::default(),
            itl_ns: Histogram::default(),
            end_to_end_ns: Histogram::default(),
            finished_prompt_tokens: 0,
            finished_output_tokens: 0,
            begin_ns: None,
            end_ns: 0,
            cache,
            steps: StepCounts::default(),
            tiers: None,
            workers: vec![WorkerTally::default(); n_workers as usize],
            credited_tokens: 0,
            n_retried: 0,
            n_failures: 0,
            n_joins: 0,
            rows: options.rows.then(|| (0..load.n_requests()).map(row).collect()),
            objectives: options.objectives,
        }
    }

    /// Requests that have ended.
    pub fn n_ended(&self) -> usize {
        (self.counts.finished + self.counts.refused + self.counts.cancelled) as usize
    }

    pub fn arrived(&mut self, number: usize, at_ns: u64) {
        self.n_arrived += 1;
        if let Some(rows) = &mut self.rows {
            (rows[number].arrival_ns, rows[number].outcome) = (at_ns, RequestOutcome::Unfinished);
        }
        self.begin_ns.get_or_insert(at_ns);
        self.end_ns = self.end_ns.max(at_ns);
    }

    pub fn joined(&mut self, now: u64, worker: u32) {
        let tally = &mut self.workers[worker as usize];
        (tally.was_there, tally.since_ns) = (true, Some(now));
    }

    /// The worker has failed (`failed`), or the run is over. Adds what it has counted; of a step that a failure cuts short, the time
    /// until then. Tiers of a worker that has failed have no blocks in the end.
    pub fn left(&mut self, now: u64, worker: u32, member: &mut Member<'_>, run: &Options, failed: bool) {
        if let Some(mut tiers) = member.worker.tiers_record(run) {
            tiers.tiers.iter_mut().filter(|_| failed).for_each(|tier| tier.blocks = 0);
            match &mut self.tiers {
                Some(sum) => sum.add(&tiers),
                None => self.tiers = Some(tiers),
            }
        }
        let tally = &mut self.workers[worker as usize];
        if let Some(since_ns) = tally.since_ns.take() {
            tally.alive_ns += now.saturating_sub(since_ns);
        }
        let cut_off_ns = member.left_of_step_ns(now);
        let scheduler = &mut member.worker.scheduler;
        let mut steps = member.worker.executor.counts;
        steps.preemptions = scheduler.counters().preemptions;
        steps.busy_ns = steps.busy_ns.saturating_sub(cut_off_ns);
        if let Some(prefixes) = scheduler.cache_mut().prefixes() {
            let report = prefixes.report();
            self.cache.stored_blocks += report.n_stored;
            self.cache.evicted_blocks += report.n_evicted;
        }
        self.itl_ns.merge(&member.worker.executor.itl_ns);
        for sum in [&mut self.steps, &mut tally.steps] {
            sum.steps += steps.steps;
            sum.prefill_tokens += steps.prefill_tokens;
            sum.decode_tokens += steps.decode_tokens;
            sum.preemptions += steps.preemptions;
            sum.busy_ns = sum.busy_ns.saturating_add(steps.busy_ns);
        }
    }

    /// What happened to the store that all workers share: their last tier.
    pub fn note_store(&mut self, counts: &TierCounts) {
        let last = self.tiers.as_mut().and_then(|tiers| tiers.tiers.last_mut());
        last.into_iter().for_each(|tier| tier.note(counts));
    }

    /// A request has ended on `worker`.
    pub fn ended(
        &mut self,
        worker: u32,
        ticket: &Ticket,
        request: &Request,
        ended: &Ended,
        deadline: Option<u64>,
    ) {
        let mut row = RequestRow {
            id: request.id,
            arrival_ns: ticket.at_ns,
            prompt_tokens: request.prompt_tokens,
            deadline_ns: request.deadline_ns.or(deadline.map(|ns| ticket.at_ns.saturating_add(ns))),
            ..RequestRow::default()
        };
        let before = (self.cache.hit_tokens, self.cache.total_tokens);
        note_end(&mut row, ended, &mut self.cache);
        let tally = &mut self.workers[worker as usize];
        tally.requests += 1;
        tally.hit_tokens += self.cache.hit_tokens - before.0;
        tally.prompt_tokens += self.cache.total_tokens - before.1;
        self.credited_tokens += u64::from(ticket.credited_tokens);
        self.end_ns = self.end_ns.max(ended.ended_ns);
        match row.outcome {
            RequestOutcome::Finished => self.finished(&row),
            RequestOutcome::Refused => self.counts.refused += 1,
            RequestOutcome::Cancelled => self.counts.cancelled += 1,
            RequestOutcome::Unfinished | RequestOutcome::NeverArrived => {}
        }
        if let Some(rows) = &mut self.rows {
            rows[ticket.number] = row;
        }
    }

    fn finished(&mut self, row: &RequestRow) {
        self.counts.finished += 1;
        self.counts.late += u64::from(row.is_late());
        self.met += u64::from(row.meets(&self.objectives));
        self.finished_prompt_tokens += u64::from(row.prompt_tokens);
        self.finished_output_tokens += u64::from(row.output_tokens);
        let since_arrival = |moment: Option<u64>| moment.map(|ns| ns.saturating_sub(row.arrival_ns));
        for (histogram, ns) in [
            (&mut self.queue_ns, since_arrival(row.admitted_ns)),
            (&mut self.ttft_ns, since_arrival(row.first_token_ns)),
            (&mut self.end_to_end_ns, since_arrival(row.finished_ns)),
            (&mut self.tpot_ns, row.tpot_s().map(|s| (s * 1e9) as u64)),
        ] {
            ns.into_iter().for_each(|ns| histogram.record(ns));
        }
    }

    /// The report, and the rows if they were kept.
    pub fn finish(
        mut self,
        options: &FleetOptions,
        cost: &dyn StepCost,
        routing: &str,
    ) -> (FleetReport, Vec<RequestRow>) {
        self.counts.total = self.total;
        self.counts.unfinished = self.n_arrived - self.n_ended() as u64;
        self.counts.never_arrived = self.total - self.n_arrived;
        let begin_ns = self.begin_ns.unwrap_or(0);
        let duration_s = self.end_ns.saturating_sub(begin_ns) as f64 / 1e9;
        let per_s = |n: u64| if duration_s > 0.0 { n as f64 / duration_s } else { 0.0 };
        let asked = self.total - self.counts.cancelled;
        let mut setting = setting(&options.run, cost);
        setting.insert("routing".to_owned(), routing.to_owned());
        if options.copies > 1 {
            setting.insert("scale".to_owned(), options.copies.to_string());
        }
        let spread = |histogram: &Histogram| histogram.spread(1e9);
        let report = FleetReport {
            version: VERSION,
            setting,
            latency: Latency {
                queue_s: spread(&self.queue_ns),
                ttft_s: spread(&self.ttft_ns),
                tpot_s: spread(&self.tpot_ns),
                itl_s: spread(&self.itl_ns),
                end_to_end_s: spread(&self.end_to_end_ns),
            },
            throughput: Throughput {
                duration_s,
                requests_per_s: per_s(self.counts.finished),
                prompt_tokens_per_s: per_s(self.finished_prompt_tokens),
                output_tokens_per_s: per_s(self.finished_output_tokens),
                goodput_requests_per_s: per_s(self.met),
            },
            objectives: Attainment {
                asked: self.objectives,
                met: self.met,
                attainment: (asked > 0).then(|| self.met as f64 / asked as f64),
            },
            steps: self.steps,
            tiers: self.tiers.as_ref().map(|tiers| TiersReport::of(tiers, &self.cache)),
            fleet: self.summary(options),
            cache: CacheReport {
                block_hit_ratio: ratio(self.cache.hit_blocks, self.cache.total_blocks),
                token_hit_ratio: ratio(self.cache.hit_tokens, self.cache.total_tokens),
                request_hit_ratio: ratio(self.cache.hit_requests, self.cache.total_requests),
                counts: self.cache,
            },
            requests: self.counts,
        };
        (report, self.rows.unwrap_or_default())
    }

    fn summary(&self, options: &FleetOptions) -> FleetSummary {
        let workers: Vec<WorkerReport> = (0..)
            .zip(&self.workers)
            .filter(|(_, tally)| tally.was_there)
            .map(|(i, tally)| tally.report(i))
            .collect();
        let over = |of: fn(&WorkerReport) -> f64| workers.iter().map(of).collect::<Vec<f64>>();
        let spread = |of| Spread::of(&mut over(of));
        let imbalance = |of| {
            let values = over(of);
            let (sum, most) = values.iter().fold((0.0, 0.0f64), |(sum, most), v| (sum + v, most.max(*v)));
            (sum > 0.0).then(|| most * values.len() as f64 / sum)
        };
        FleetSummary {
            workers: options.workers,
            view_delay_s: options.view_delay_ns as f64 / 1e9,
            failures: self.n_failures,
            joins: self.n_joins,
            retried_requests: self.n_retried,
            credited_tokens: self.credited_tokens,
            imbalance: Imbalance {
                requests: imbalance(|worker| worker.requests as f64),
                computed_tokens: imbalance(|worker| worker.computed_tokens as f64),
                busy: imbalance(|worker| worker.busy_s),
            },
            over_workers: OverWorkers {
                requests: spread(|worker| worker.requests as f64),
                computed_tokens: spread(|worker| worker.computed_tokens as f64),
                busy_ratio: spread(|worker| worker.busy_ratio),
                token_hit_ratio: spread(|worker| worker.token_hit_ratio),
            },
            list: if workers.len() <= LISTED_WORKERS { workers } else { Vec::new() },
        }
    }
}

impl WorkerTally {
    fn report(&self, worker: u32) -> WorkerReport {
        WorkerReport {
            worker,
            requests: self.requests,
            computed_tokens: self.steps.prefill_tokens + self.steps.decode_tokens,
            busy_s: self.steps.busy_ns as f64 / 1e9,
            busy_ratio: ratio(self.steps.busy_ns, self.alive_ns),
            token_hit_ratio: ratio(self.hit_tokens, self.prompt_tokens),
        }
    }
}
