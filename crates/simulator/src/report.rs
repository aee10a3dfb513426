//! What came of a run, as data: first what the event loop writes down, then what is made of it.
//!
//! The loop fills a [`Record`]; [`Report::of`] computes; JSON has stable keys in a stable order, times in seconds. It
//! promises that a report is a function of the record and the objectives. It refuses figures without a basis: the
//! latency of no request is absent, not zero.
mod block_map;
mod load;
mod requests;

pub use block_map::{BlockFrame, BlockMap, BlockState};
pub use load::{Load, LoadReport, Sample, Timeline};
pub use requests::{Activity, Outcome, Phase, RequestRow, write_csv};

use crate::statistics::{Estimate, Histogram, Spread};
use serde::Serialize;
use std::collections::BTreeMap;

/// Of `--json`; it rises when a field changes its meaning or goes.
pub const VERSION: u32 = 1;

/// What an event loop writes down.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// What was simulated, by name: trace, policy, scheduler, cost model, seed. Shown as it is.
    pub setting: BTreeMap<String, String>,
    /// In the order of the requests given.
    pub requests: Vec<RequestRow>,
    /// Nanoseconds between successive tokens of a request.
    pub itl_ns: Histogram,
    pub timeline: Timeline,
    pub cache: CacheCounts,
    pub steps: StepCounts,
    /// When each request was worked on, if somebody wants to see it; empty otherwise.
    pub activity: Vec<Activity>,
    /// Where every block was at some moments, if somebody wants to see it.
    pub block_map: Option<BlockMap>,
}

/// What the cache did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CacheCounts {
    pub block_tokens: u32,
    /// `None` is without bound.
    pub capacity_blocks: Option<u64>,
    /// Whole blocks of prompts found at admission.
    pub hit_blocks: u64,
    /// Blocks of prompts, partial ones included.
    pub total_blocks: u64,
    pub hit_tokens: u64,
    pub total_tokens: u64,
    /// Requests with at least one block found.
    pub hit_requests: u64,
    pub total_requests: u64,
    pub stored_blocks: u64,
    pub evicted_blocks: u64,
    /// Why lookups ended where they did: how often, by reason.
    pub miss_reasons: BTreeMap<String, u64>,
}

/// What was computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepCounts {
    pub steps: u64,
    /// Prompt tokens computed, again after a preemption too.
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Sequences that had to give up their memory.
    pub preemptions: u64,
    /// Time in steps; the rest is idle.
    pub busy_ns: u64,
}

/// What users were promised. Seconds; `None` promises nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Objectives {
    pub ttft_s: Option<f64>,
    pub tpot_s: Option<f64>,
}

/// What is made of a [`Record`].
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
    /// Memory and batch over time, at some 500 moments.
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

/// Seconds, over finished requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Arrival to admission.
    pub queue_s: Option<Spread>,
    /// Arrival to first token.
    pub ttft_s: Option<Spread>,
    /// First to last token, per token after the first.
    pub tpot_s: Option<Spread>,
    /// Between successive tokens.
    pub itl_s: Option<Spread>,
    pub end_to_end_s: Option<Spread>,
}

/// Over the time from the first arrival to the last event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Throughput {
    pub duration_s: f64,
    pub requests_per_s: f64,
    /// Prompt tokens of finished requests, cached ones included.
    pub prompt_tokens_per_s: f64,
    pub output_tokens_per_s: f64,
    /// Finished requests that met every objective (Zhong et al., "DistServe", OSDI 2024); without objectives, all.
    pub goodput_requests_per_s: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Attainment {
    pub asked: Objectives,
    /// Requests that met every objective.
    pub met: u64,
    /// Of all requests but cancelled ones: what was refused or never finished did not meet them. Absent without
    /// requests.
    pub attainment: Option<f64>,
}

impl Report {
    pub fn of(record: &Record, objectives: &Objectives) -> Report {
        let rows = &record.requests;
        let mut counts = RequestCounts { total: rows.len() as u64, ..Default::default() };
        for row in rows {
            match row.outcome {
                Outcome::Finished => counts.finished += 1,
                Outcome::Refused => counts.refused += 1,
                Outcome::Cancelled => counts.cancelled += 1,
                Outcome::Unfinished => counts.unfinished += 1,
            }
            counts.late += u64::from(row.is_late());
        }
        let finished = || rows.iter().filter(|row| row.outcome == Outcome::Finished);
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

    /// The figures that are compared between runs, by name.
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

/// The figures of runs that differ in their seed alone, with their intervals. A figure that some run lacks is
/// estimated from those that have it.
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
