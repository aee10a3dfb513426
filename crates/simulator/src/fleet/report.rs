//! The results of a fleet as data. Its fields mean what those of a single run's [`Report`](crate::report::Report) mean,
//! over all workers.
use crate::report::{Attainment, CacheReport, Latency, RequestCounts, StepCounts, Throughput, TiersReport};
use crate::statistics::Spread;
use serde::Serialize;
use std::collections::BTreeMap;

/// Figures of a fleet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FleetReport {
    pub version: u32,
    pub setting: BTreeMap<String, String>,
    pub requests: RequestCounts,
    /// Sums over the workers' caches. `capacity_blocks` is that of one worker.
    pub cache: CacheReport,
    /// From histograms: means and maxima are exact, percentiles off by less than 0.8%.
    pub latency: Latency,
    pub throughput: Throughput,
    pub objectives: Attainment,
    /// Sums over the workers, work that a failure lost included. A step that a failure cut short was busy until then.
    pub steps: StepCounts,
    /// Sums over the workers' tiers; capacities are those of one worker, and `peak_blocks` is the most of one. Of a store that all
    /// share the figures are its own. Absent without tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiers: Option<TiersReport>,
    pub fleet: FleetSummary,
}

/// What concerns the fleet as a whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FleetSummary {
    /// Workers at the start.
    pub workers: u32,
    pub view_delay_s: f64,
    /// Workers that failed, and that joined after the start. Those that would have done so after the end do not count.
    pub failures: u64,
    pub joins: u64,
    /// How often a request was sent again because its worker had failed.
    pub retried_requests: u64,
    /// Prompt tokens that the router expected in the caches of the workers it chose; 0 for policies that expect none. Compare
    /// with `hit_tokens`: the difference is what the router did not know, or knew too late.
    pub credited_tokens: u64,
    pub imbalance: Imbalance,
    pub over_workers: OverWorkers,
    /// Every worker that ever was there, if there are no more than 64.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub list: Vec<WorkerReport>,
}

/// The most that a worker has of something, over the mean of all workers that ever were there: 1 if all have the same. Absent if none has any.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Imbalance {
    pub requests: Option<f64>,
    pub computed_tokens: Option<f64>,
    /// Time in steps.
    pub busy: Option<f64>,
}

/// How workers differ.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OverWorkers {
    pub requests: Option<Spread>,
    pub computed_tokens: Option<Spread>,
    pub busy_ratio: Option<Spread>,
    pub token_hit_ratio: Option<Spread>,
}

/// One worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkerReport {
    pub worker: u32,
    /// Requests that ended here.
    pub requests: u64,
    /// Prompt and answer tokens.
    pub computed_tokens: u64,
    pub busy_s: f64,
    /// Share of the time in which the worker was there.
    pub busy_ratio: f64,
    pub token_hit_ratio: f64,
}

impl FleetReport {
    /// The figures used to compare runs, by name: those of a single run that a fleet has, and its own.
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
            ("retried_requests", self.fleet.retried_requests as f64),
        ];
        let imbalance = &self.fleet.imbalance;
        for (name, value) in [
            ("attainment", self.objectives.attainment),
            ("request_imbalance", imbalance.requests),
            ("computed_token_imbalance", imbalance.computed_tokens),
            ("busy_imbalance", imbalance.busy),
            ("busy_ratio", self.fleet.over_workers.busy_ratio.map(|spread| spread.mean)),
        ] {
            figures.extend(value.map(|value| (name, value)));
        }
        figures.extend(self.tiers.iter().flat_map(TiersReport::figures));
        figures.extend(self.latency.figures());
        figures
    }
}
