//! The results of a run as data: first what the event loop records, then what is computed from it.
//!
//! The loop fills a [`Record`]; [`Report::of`] computes the rest. The JSON has stable keys in a stable order, with
//! times in seconds. A report is a function of the record and the objectives. Figures without data are absent, not
//! zero: for example, the latency of no requests.
mod load;
mod requests;

pub use load::{Load, LoadReport, Sample, Timeline};
pub use requests::{Activity, Phase, RequestOutcome, RequestRow, write_csv};

use crate::statistics::{Estimate, Histogram, Spread};
use serde::Serialize;
use std::collections::BTreeMap;

/// Version of the `--json` format. Incremented when a field changes its meaning or is removed.
pub const VERSION: u32 = 1;

/// The data that an event loop records.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// What was simulated, by name: trace, policy, scheduler, cost model, seed. Shown verbatim.
    pub setting: BTreeMap<String, String>,
    /// In the order of the input requests.
    pub requests: Vec<RequestRow>,
    /// Nanoseconds between successive tokens of a request.
    pub itl_ns: Histogram,
    pub timeline: Timeline,
    pub cache: CacheCounts,
    pub steps: StepCounts,
    /// When each request was worked on, if recorded; empty otherwise.
    pub activity: Vec<Activity>,
}

/// Cache counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CacheCounts {
    pub block_tokens: u32,
    /// `None`: unbounded.
    pub capacity_blocks: Option<u64>,
    /// Whole prompt blocks found in the cache at admission.
    pub hit_blocks: u64,
    /// Prompt blocks, including partial ones.
    pub total_blocks: u64,
    pub hit_tokens: u64,
    pub total_tokens: u64,
    /// Requests with at least one hit block.
    pub hit_requests: u64,
    pub total_requests: u64,
    pub stored_blocks: u64,
    pub evicted_blocks: u64,
    /// How often lookups ended for each reason.
    pub miss_reasons: BTreeMap<String, u64>,
}

/// Counters of computed steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepCounts {
    pub steps: u64,
    /// Prompt tokens computed, including recomputation after a preemption.
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Time spent in steps; the rest is idle.
    pub busy_ns: u64,
}

/// Service level objectives in seconds; `None` sets no objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Objectives {
    pub ttft_s: Option<f64>,
    pub tpot_s: Option<f64>,
}

/// Figures computed from a [`Record`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub version: u32,
    pub setting: BTreeMap<String, String>,
    pub requests: RequestCounts,
    pub cache: CacheReport,
    pub latency: Latency,
    pub throughput: Throughput,
    pub objectives: Attainment,
    pub load: LoadReport,
    pub steps: StepCounts,
    /// Memory and batch size over time, at about 500 moments.
    pub timeline: Vec<Sample>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RequestCounts {
    pub total: u64,
    pub finished: u64,
    pub refused: u64,
    pub cancelled: u64,
    /// Still running or waiting at the end.
    pub unfinished: u64,
    /// Finished, but after their deadline.
    pub late: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheReport {
    #[serde(flatten)]
    pub counts: CacheCounts,
    pub block_hit_ratio: f64,
    pub token_hit_ratio: f64,
    pub request_hit_ratio: f64,
}

/// In seconds, over finished requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Arrival to admission.
    pub queue_s: Option<Spread>,
    /// Arrival to first token.
    pub ttft_s: Option<Spread>,
    /// First to last token, divided by the tokens after the first.
    pub tpot_s: Option<Spread>,
    /// Time between successive tokens.
    pub itl_s: Option<Spread>,
    pub end_to_end_s: Option<Spread>,
}

/// Rates over the time from the first arrival to the last event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Throughput {
    pub duration_s: f64,
    pub requests_per_s: f64,
    /// Prompt tokens of finished requests, including cached ones.
    pub prompt_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
    /// Rate of finished requests that met every objective (Zhong et al., "DistServe", OSDI 2024); all of them without
    /// objectives.
    pub goodput_requests_per_s: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Attainment {
    pub asked: Objectives,
    /// Number of requests that met every objective.
    pub met: u64,
    /// Share of all requests except cancelled ones; refused and unfinished requests count as not meeting them. Absent
    /// if there are no requests.
    pub attainment: Option<f64>,
}

impl Report {
    pub fn of(record: &Record, objectives: &Objectives) -> Report {
        let rows = &record.requests;
        let mut counts = RequestCounts { total: rows.len() as u64, ..Default::default() };
        for row in rows {
            match row.outcome {
                RequestOutcome::Finished => counts.finished += 1,
                RequestOutcome::Refused => counts.refused += 1,
                RequestOutcome::Cancelled => counts.cancelled += 1,
                RequestOutcome::Unfinished => counts.unfinished += 1,
            }
            counts.late += u64::from(row.is_late());
        }
        let finished = || rows.iter().filter(|row| row.outcome == RequestOutcome::Finished);
        let spread = |of: fn(&RequestRow) -> Option<f64>| {
            Spread::of(&mut finished().filter_map(of).collect::<Vec<_>>())
        };
        let latency = Latency {
            queue_s: spread(RequestRow::queue_s),
            ttft_s: spread(RequestRow::ttft_s),
            tpot_s: spread(RequestRow::tpot_s),
            itl_s: record.itl_ns.spread(1e9),
            end_to_end_s: spread(RequestRow::end_to_end_s),
        };
        let met = finished().filter(|row| row.meets(objectives)).count() as u64;
        let asked = counts.total - counts.cancelled;
        let begin_ns = rows.iter().map(|row| row.arrival_ns).min().unwrap_or(0);
        let end_ns = rows.iter().filter_map(|row| row.finished_ns).max().unwrap_or(begin_ns);
        let duration_s = end_ns.max(record.timeline.end_ns()).saturating_sub(begin_ns) as f64 / 1e9;
        let per_s = |n: u64| if duration_s > 0.0 { n as f64 / duration_s } else { 0.0 };
        let throughput = Throughput {
            duration_s,
            requests_per_s: per_s(counts.finished),
            prompt_tokens_per_s: per_s(finished().map(|row| u64::from(row.prompt_tokens)).sum()),
            output_tokens_per_s: per_s(finished().map(|row| u64::from(row.output_tokens)).sum()),
            goodput_requests_per_s: per_s(met),
        };
        let cache = &record.cache;
        Report {
            version: VERSION,
            setting: record.setting.clone(),
            requests: counts,
            cache: CacheReport {
                block_hit_ratio: ratio(cache.hit_blocks, cache.total_blocks),
                token_hit_ratio: ratio(cache.hit_tokens, cache.total_tokens),
                request_hit_ratio: ratio(cache.hit_requests, cache.total_requests),
                counts: cache.clone(),
            },
            latency,
            throughput,
            objectives: Attainment {
                asked: *objectives,
                met,
                attainment: (asked > 0).then(|| met as f64 / asked as f64),
            },
            load: record.timeline.report(record.steps.busy_ns),
            steps: record.steps,
            timeline: record.timeline.thinned(500),
        }
    }

    /// The figures used to compare runs, by name.
    pub fn figures(&self) -> Vec<(&'static str, f64)> {
        let mut figures = vec![
            ("requests_per_s", self.throughput.requests_per_s),
            ("output_tokens_per_s", self.throughput.output_tokens_per_s),
            ("goodput_requests_per_s", self.throughput.goodput_requests_per_s),
            ("block_hit_ratio", self.cache.block_hit_ratio),
            ("token_hit_ratio", self.cache.token_hit_ratio),
            ("request_hit_ratio", self.cache.request_hit_ratio),
            ("evicted_blocks", self.cache.counts.evicted_blocks as f64),
            ("preemptions", self.steps.preemptions as f64),
            ("mean_queue_requests", self.load.mean_queued_requests),
            ("mean_batch_requests", self.load.mean_running_requests),
            ("mean_used_blocks", self.load.mean_used_blocks),
            ("busy_ratio", self.load.busy_ratio),
        ];
        figures.extend(self.objectives.attainment.map(|attainment| ("attainment", attainment)));
        let l = &self.latency;
        for (spread, names) in [
            (l.queue_s, ["queue_mean_s", "queue_p50_s", "queue_p90_s", "queue_p99_s"]),
            (l.ttft_s, ["ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"]),
            (l.tpot_s, ["tpot_mean_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s"]),
            (l.itl_s, ["itl_mean_s", "itl_p50_s", "itl_p90_s", "itl_p99_s"]),
            (
                l.end_to_end_s,
                ["end_to_end_mean_s", "end_to_end_p50_s", "end_to_end_p90_s", "end_to_end_p99_s"],
            ),
        ] {
            let Some(s) = spread else { continue };
            figures.extend(names.into_iter().zip([s.mean, s.p50, s.p90, s.p99]));
        }
        figures
    }
}

/// The figures of runs that differ only in their seed, with confidence intervals. If some runs lack a figure, it is
/// estimated from the others.
pub fn over_seeds<K: Ord>(figures: impl IntoIterator<Item = (K, f64)>) -> BTreeMap<K, Estimate> {
    let mut values: BTreeMap<K, Vec<f64>> = BTreeMap::new();
    for (name, value) in figures {
        values.entry(name).or_default().push(value);
    }
    values.into_iter().filter_map(|(name, values)| Some((name, Estimate::of(&values)?))).collect()
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
