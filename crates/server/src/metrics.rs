//! `/metrics` in Prometheus' text format (0.0.4). A metric with vLLM's meaning has vLLM's name, so that dashboards for
//! vLLM work. Metrics that only kvist has begin with `kvist_`.
//!
//! Times are measured on the HTTP side: from the moment a request was read to the moment its tokens were handed to the
//! connection. Counters of the cache come from the engine ([`EngineStats`]).
mod readings;
mod sessions;

use kvist_engine::serving::Usage;
use prometheus::{
    Counter, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};
use std::collections::HashMap;
use std::time::Duration;

pub(crate) use readings::of_limits;
pub use readings::{Reading, of_cache, of_engine, of_events};
pub use sessions::of_shared_sessions;

/// The media type of [`render`](Metrics::render).
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upper bounds of the buckets in seconds, the same as vLLM's.
const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const PER_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// How an answer ended, for `vllm:request_success_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Stop,
    Length,
    Abort,
    Error,
}

impl Ended {
    const ALL: [Ended; 4] = [Ended::Stop, Ended::Length, Ended::Abort, Ended::Error];

    fn name(self) -> &'static str {
        match self {
            Ended::Stop => "stop",
            Ended::Length => "length",
            Ended::Abort => "abort",
            Ended::Error => "error",
        }
    }
}

/// Statuses with a counter of their own. All others share the counter `other`.
const STATUSES: [u16; 15] = [200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 424, 429, 431, 500, 503];

/// Counters and histograms of the HTTP side.
pub struct Metrics {
    registry: Registry,
    labels: HashMap<String, String>,
    ttft: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prompt_tokens: IntCounter,
    queried_tokens: IntCounter,
    hit_tokens: IntCounter,
    generation_tokens: IntCounter,
    ended: IntCounterVec,
    responses: IntCounterVec,
    targets: IntCounterVec,
}

impl Metrics {
    /// `model` is the label `model_name` of every line.
    pub fn new(model: &str) -> Result<Self, prometheus::Error> {
        let labels = HashMap::from([("model_name".to_string(), model.to_string())]);
        let registry = Registry::new_custom(None, Some(labels.clone()))?;
        let histogram = |name, help, bounds: &[f64]| {
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(bounds.to_vec()))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok::<_, prometheus::Error>(histogram)
        };
        let counter = |name, help| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        // Every label is there from the start, at 0.
        let counters = |name, help, label, values: &mut dyn Iterator<Item = String>| {
            let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
            values.for_each(|value| drop(counters.with_label_values(&[value])));
            registry.register(Box::new(counters.clone()))?;
            Ok::<_, prometheus::Error>(counters)
        };
        Ok(Metrics {
            ttft: histogram(
                "vllm:time_to_first_token_seconds",
                "Seconds from the arrival of a request to its first token.",
                TTFT,
            )?,
            inter_token: histogram(
                "vllm:inter_token_latency_seconds",
                "Seconds from one token to the next.",
                PER_TOKEN,
            )?,
            per_output_token: histogram(
                "vllm:request_time_per_output_token_seconds",
                "Seconds from the first token to the last, per token after the first.",
                PER_TOKEN,
            )?,
            whole: histogram(
                "vllm:e2e_request_latency_seconds",
                "Seconds from the arrival of a request to the end of its answer.",
                WHOLE,
            )?,
            queued: histogram(
                "vllm:request_queue_time_seconds",
                "Seconds from the arrival of a request to its admission to the batch.",
                WHOLE,
            )?,
            prompt_tokens: counter(
                "vllm:prompt_tokens_total",
                "Prompt tokens of answers that were admitted to the batch.",
            )?,
            queried_tokens: counter(
                "vllm:prefix_cache_queries_total",
                "Prompt tokens that were looked up in the prefix index.",
            )?,
            hit_tokens: counter(
                "vllm:prefix_cache_hits_total",
                "Prompt tokens that were found in the prefix index.",
            )?,
            generation_tokens: counter("vllm:generation_tokens_total", "Tokens generated.")?,
            ended: counters(
                "vllm:request_success_total",
                "Finished answers, by finish reason.",
                "finished_reason",
                &mut Ended::ALL.iter().map(|ended| ended.name().to_string()),
            )?,
            responses: counters(
                "kvist_http_responses_total",
                "HTTP responses, by status.",
                "status",
                &mut STATUSES.iter().map(u16::to_string).chain(["other".to_string()]),
            )?,
            targets: counters(
                "kvist_latency_targets_total",
                "Answers with `kvist.target_ms` that were complete by then (met), or not (missed).",
                "result",
                &mut ["met", "missed"].into_iter().map(str::to_string),
            )?,
            registry,
            labels,
        })
    }

    pub fn responded(&self, status: u16) {
        let status = if STATUSES.contains(&status) { &status.to_string() } else { "other" };
        self.responses.with_label_values(&[status]).inc();
    }
    /// One answer with a target ended; a client that gives up is not counted.
    pub fn target_ended(&self, is_met: bool) {
        self.targets.with_label_values(&[if is_met { "met" } else { "missed" }]).inc();
    }
    /// One answer entered the batch; the prefix index supplied `cached_tokens` of its prompt.
    pub fn admitted(&self, after: Duration, prompt_tokens: u64, cached_tokens: u64) {
        self.queued.observe(after.as_secs_f64());
        self.prompt_tokens.inc_by(prompt_tokens);
        self.queried_tokens.inc_by(prompt_tokens);
        self.hit_tokens.inc_by(cached_tokens);
    }
    pub fn first_token(&self, after: Duration) {
        self.ttft.observe(after.as_secs_f64());
    }
    pub fn next_token(&self, after: Duration) {
        self.inter_token.observe(after.as_secs_f64());
    }
    pub fn generated(&self, tokens: u64) {
        self.generation_tokens.inc_by(tokens);
    }

    /// One choice ended; `decode` is the time from its first token to its last.
    pub fn ended(&self, how: Ended, usage: Option<Usage>, whole: Duration, decode: Option<Duration>) {
        self.ended.with_label_values(&[how.name()]).inc();
        let Some(usage) = usage else { return };
        self.whole.observe(whole.as_secs_f64());
        if let Some(decode) = decode
            && usage.completion_tokens > 1
        {
            self.per_output_token.observe((decode / (usage.completion_tokens - 1)).as_secs_f64());
        }
    }

    /// The whole text, including the gauges and counters of the engine.
    pub fn render(&self, readings: &[Reading]) -> Result<String, prometheus::Error> {
        let engine = Registry::new_custom(None, Some(self.labels.clone()))?;
        for Reading(name, kind, help, value, labels) in readings {
            let mut opts = Opts::new(*name, *help);
            for (label, of) in labels {
                opts = opts.const_label(*label, of);
            }
            match *kind {
                "counter" => {
                    let counter = Counter::with_opts(opts)?;
                    counter.inc_by(value.max(0.0));
                    engine.register(Box::new(counter))?;
                }
                _ => {
                    let gauge = Gauge::with_opts(opts)?;
                    gauge.set(*value);
                    engine.register(Box::new(gauge))?;
                }
            }
        }
        let mut text = String::new();
        for registry in [&engine, &self.registry] {
            TextEncoder::new().encode_utf8(&registry.gather(), &mut text)?;
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_engine::serving::EngineStats;
    use kvist_engine::speculate::Counts;

    #[test]
    fn what_is_counted_is_told() {
        let metrics = Metrics::new("a \"b\"").unwrap();
        let ms = Duration::from_millis;
        metrics.first_token(ms(3));
        metrics.first_token(ms(30));
        metrics.first_token(Duration::from_secs(9_999));
        let usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 4, ..Usage::default() };
        metrics.ended(Ended::Length, Some(usage), ms(700), Some(ms(80)));
        metrics.ended(Ended::Abort, None, ms(1), None);
        metrics.responded(200);
        metrics.responded(418);
        metrics.admitted(ms(2), 7, 4);
        metrics.target_ended(true);
        let recent_hits = kvist_cache::HitCounts { n_prompts: 3, prompt_tokens: 40, hit_tokens: 16 };
        let stats = EngineStats {
            running: 2,
            used_cells: 16,
            capacity_cells: 64,
            recent_hits,
            ..EngineStats::default()
        };
        let text = metrics.render(&of_engine(&stats)).unwrap();
        assert!(!text.contains("spec_decode"), "speculation is off");
        let accepted_per_position = vec![5, 2];
        let counts =
            Counts { drafts: 6, drafted: 30, accepted: 7, accepted_per_position, ..Counts::default() };
        let stats = EngineStats { speculation: Some(counts), ..stats };
        let text = metrics.render(&of_engine(&stats)).unwrap();
        let label = "model_name=\"a \\\"b\\\"\"";
        for line in [
            format!("vllm:num_requests_running{{{label}}} 2"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.001\"}} 0"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.005\"}} 1"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.04\"}} 2"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"+Inf\"}} 3"),
            format!("vllm:time_to_first_token_seconds_count{{{label}}} 3"),
            format!("vllm:request_time_per_output_token_seconds_sum{{{label}}} 0.04"),
            format!("vllm:kv_cache_usage_perc{{{label}}} 0.25"),
            format!("kvist_prefix_cache_recent_hit_ratio{{{label}}} 0.4"),
            format!("vllm:prompt_tokens_total{{{label}}} 7"),
            format!("kvist_speculation_failed{{{label}}} 0"),
            format!("vllm:spec_decode_num_drafts_total{{{label}}} 6"),
            format!("vllm:spec_decode_num_draft_tokens_total{{{label}}} 30"),
            format!("vllm:spec_decode_num_accepted_tokens_total{{{label}}} 7"),
            format!("vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"0\",{label}}} 5"),
            format!("vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"1\",{label}}} 2"),
            format!("vllm:prefix_cache_hits_total{{{label}}} 4"),
            format!("vllm:request_success_total{{finished_reason=\"length\",{label}}} 1"),
            format!("vllm:request_success_total{{finished_reason=\"abort\",{label}}} 1"),
            format!("kvist_http_responses_total{{status=\"200\",{label}}} 1"),
            format!("kvist_latency_targets_total{{result=\"met\",{label}}} 1"),
            format!("kvist_latency_targets_total{{result=\"missed\",{label}}} 0"),
            format!("kvist_http_responses_total{{status=\"other\",{label}}} 1"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
