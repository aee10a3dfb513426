//! `/metrics` in Prometheus' text format (0.0.4). Where the meaning is vLLM's the name is vLLM's, so that its dashboards
//! carry over; what only kvist has begins with `kvist_`.
//!
//! Times are those of the HTTP side: from the moment a request was read to the moment its tokens were handed to the
//! connection. Counters of the cache come from the engine ([`Stats`](crate::Stats)).
use crate::app::App;
use crate::job::Usage;
use crate::worker::Stats;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The media type of [`render`](Metrics::render).
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upper bounds in seconds, as vLLM has them.
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

/// Observations by upper bound.
struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: the last is beyond all.
    counts: Vec<AtomicU64>,
    sum_ns: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum_ns: AtomicU64::new(0) }
    }

    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let at = self.bounds.iter().position(|bound| seconds <= *bound).unwrap_or(self.bounds.len());
        self.counts[at].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    fn render(&self, out: &mut Text, name: &str, help: &str) {
        out.head(name, "histogram", help);
        let mut below = 0;
        for (i, count) in self.counts.iter().enumerate() {
            below += count.load(Relaxed);
            let bound = self.bounds.get(i).map_or("+Inf".to_string(), f64::to_string);
            out.line(&format!("{name}_bucket"), &[("le", &bound)], below as f64);
        }
        out.line(&format!("{name}_sum"), &[], self.sum_ns.load(Relaxed) as f64 / 1e9);
        out.line(&format!("{name}_count"), &[], below as f64);
    }
}

/// How an answer ended, for `vllm:request_success_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Stop,
    Length,
    Abort,
    Error,
}

const ENDED: [(Ended, &str); 4] =
    [(Ended::Stop, "stop"), (Ended::Length, "length"), (Ended::Abort, "abort"), (Ended::Error, "error")];

/// Statuses that are counted each; others count as the last.
const STATUSES: [u16; 14] = [200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 500, 503];

/// One figure of the engine: name, type, help, value.
pub struct Reading(&'static str, &'static str, &'static str, f64);

/// What the engine tells.
pub fn of_engine(stats: &Stats) -> Vec<Reading> {
    let share = stats.held_cells as f64 / stats.capacity_cells.max(1) as f64;
    let gauge = |name, help, value: f64| Reading(name, "gauge", help, value);
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64);
    let c = &stats.counters;
    vec![
        gauge("vllm:num_requests_running", "Requests in the batch.", stats.running as f64),
        gauge("vllm:num_requests_waiting", "Requests that wait for the batch.", stats.waiting as f64),
        gauge("vllm:kv_cache_usage_perc", "Cells held by requests, 1 is all.", share),
        count(
            "vllm:num_preemptions_total",
            "Requests that lost their place in the batch, each time.",
            c.preemptions,
        ),
        gauge("kvist_cells_held", "Cells that requests hold.", stats.held_cells as f64),
        gauge(
            "kvist_cells_idle",
            "Cells that the prefix index knows and no request holds.",
            stats.idle_cells as f64,
        ),
        gauge(
            "kvist_cells_free",
            "Cells that no request holds and the prefix index does not know.",
            stats.free_cells as f64,
        ),
        count("kvist_blocks_stored_total", "Blocks that the prefix index came to know.", stats.stored_blocks),
        count(
            "kvist_blocks_evicted_total",
            "Blocks that were evicted from the prefix index.",
            stats.evicted_blocks,
        ),
        gauge(
            "kvist_prefix_cache_recent_hit_ratio",
            "Share of the tokens of the last 1000 prompts that the prefix index supplied, 1 is all; readmissions count as prompts.",
            stats.recent_hits.ratio().unwrap_or(0.0),
        ),
        gauge("kvist_kv_bytes", "Bytes reserved for K and V.", stats.kv_bytes as f64),
        count("kvist_kv_bytes_read_total", "Bytes of K and V that attention has read.", stats.kv_bytes_read),
        Reading("kvist_busy_seconds_total", "counter", "Time spent in steps.", stats.busy_ns as f64 / 1e9),
        count("kvist_steps_total", "Steps that succeeded.", c.steps),
        count("kvist_failed_steps_total", "Steps that failed.", c.failed_steps),
        count("kvist_computed_tokens_total", "Tokens computed.", c.computed_tokens),
        count("kvist_lost_tokens_total", "Tokens lost to preemptions.", c.lost_tokens),
    ]
}

/// What was refused or closed because something was full.
pub(crate) fn of_limits(app: &App) -> Vec<Reading> {
    let (connections, known) = app.connections.count();
    let gauge = |name, help, value: usize| Reading(name, "gauge", help, value as f64);
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64);
    vec![
        count(
            "kvist_queue_full_total",
            "Requests that were refused because the queue was full for their key.",
            app.engine.rejected(),
        ),
        gauge("kvist_connections", "Connections that are there, the reserve not counted.", connections),
        gauge("kvist_connections_known", "Of these, connections that have shown a known key.", known),
        count(
            "kvist_connections_displaced_total",
            "Connections whose client was waited for, closed to make room for others.",
            app.connections.displaced(),
        ),
    ]
}

/// What the HTTP side counts.
pub struct Metrics {
    model: String,
    ttft: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prompt_tokens: AtomicU64,
    hit_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    ended: [AtomicU64; ENDED.len()],
    responses: [AtomicU64; STATUSES.len() + 1],
}

impl Metrics {
    /// `model` is the label `model_name` of every line.
    pub fn new(model: &str) -> Self {
        Metrics {
            model: model.into(),
            ttft: Histogram::new(TTFT),
            inter_token: Histogram::new(PER_TOKEN),
            per_output_token: Histogram::new(PER_TOKEN),
            whole: Histogram::new(WHOLE),
            queued: Histogram::new(WHOLE),
            prompt_tokens: AtomicU64::new(0),
            hit_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            ended: Default::default(),
            responses: Default::default(),
        }
    }

    pub fn responded(&self, status: u16) {
        let at = STATUSES.iter().position(|s| *s == status).unwrap_or(STATUSES.len());
        self.responses[at].fetch_add(1, Relaxed);
    }
    /// One answer entered the batch; `cached` of its prompt's tokens were supplied.
    pub fn admitted(&self, after: Duration, prompt_tokens: u64, cached_tokens: u64) {
        self.queued.observe(after);
        self.prompt_tokens.fetch_add(prompt_tokens, Relaxed);
        self.hit_tokens.fetch_add(cached_tokens, Relaxed);
    }
    pub fn first_token(&self, after: Duration) {
        self.ttft.observe(after);
    }
    pub fn next_token(&self, after: Duration) {
        self.inter_token.observe(after);
    }
    pub fn generated(&self, tokens: u64) {
        self.generation_tokens.fetch_add(tokens, Relaxed);
    }

    /// One choice is over; `decode` is the time from its first token to its last.
    pub fn ended(&self, how: Ended, usage: Option<Usage>, whole: Duration, decode: Option<Duration>) {
        let at = ENDED.iter().position(|(e, _)| *e == how).unwrap_or(0);
        self.ended[at].fetch_add(1, Relaxed);
        let Some(usage) = usage else { return };
        self.whole.observe(whole);
        if let Some(decode) = decode
            && usage.completion_tokens > 1
        {
            self.per_output_token.observe(decode / (usage.completion_tokens - 1));
        }
    }

    /// Everything, with the gauges and counters of the engine.
    pub fn render(&self, engine: &[Reading]) -> String {
        let mut out = Text { out: String::new(), model: escape(&self.model) };
        for Reading(name, kind, help, value) in engine {
            out.head(name, kind, help);
            out.line(name, &[], *value);
        }
        let counters = [
            (
                "vllm:prompt_tokens_total",
                "Prompt tokens of answers that entered the batch.",
                &self.prompt_tokens,
            ),
            ("vllm:generation_tokens_total", "Tokens generated.", &self.generation_tokens),
            (
                "vllm:prefix_cache_queries_total",
                "Prompt tokens that were looked up in the prefix index.",
                &self.prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits_total",
                "Prompt tokens that the prefix index supplied.",
                &self.hit_tokens,
            ),
        ];
        for (name, help, value) in counters {
            out.head(name, "counter", help);
            out.line(name, &[], value.load(Relaxed) as f64);
        }
        out.head("vllm:request_success_total", "counter", "Answers that ended, by how.");
        for ((_, name), value) in ENDED.iter().zip(&self.ended) {
            out.line("vllm:request_success_total", &[("finished_reason", name)], value.load(Relaxed) as f64);
        }
        let histograms = [
            ("vllm:time_to_first_token_seconds", "From the request to its first token.", &self.ttft),
            ("vllm:inter_token_latency_seconds", "From one token to the next.", &self.inter_token),
            (
                "vllm:request_time_per_output_token_seconds",
                "From the first token to the last, per token after the first.",
                &self.per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "From the request to its end.", &self.whole),
            ("vllm:request_queue_time_seconds", "From the request to its place in the batch.", &self.queued),
        ];
        for (name, help, histogram) in histograms {
            histogram.render(&mut out, name, help);
        }
        out.head("kvist_http_responses_total", "counter", "Responses by status.");
        for (i, value) in self.responses.iter().enumerate() {
            let status = STATUSES.get(i).map_or("other".to_string(), u16::to_string);
            out.line("kvist_http_responses_total", &[("status", &status)], value.load(Relaxed) as f64);
        }
        out.out
    }
}

struct Text {
    out: String,
    model: String,
}

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let _ = write!(self.out, "{name}{{model_name=\"{}\"", self.model);
        for (label, text) in labels {
            let _ = write!(self.out, ",{label}=\"{}\"", escape(text));
        }
        let _ = writeln!(self.out, "}} {value}");
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_told() {
        let metrics = Metrics::new("a \"b\"");
        let ms = Duration::from_millis;
        metrics.first_token(ms(3));
        metrics.first_token(ms(30));
        metrics.first_token(Duration::from_secs(9_999));
        let usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 4, preemptions: 0 };
        metrics.ended(Ended::Length, Some(usage), ms(700), Some(ms(80)));
        metrics.ended(Ended::Abort, None, ms(1), None);
        metrics.responded(200);
        metrics.responded(418);
        metrics.admitted(ms(2), 7, 4);
        let recent_hits = kvist_cache::HitCounts { n_prompts: 3, prompt_tokens: 40, hit_tokens: 16 };
        let stats = Stats { running: 2, held_cells: 16, capacity_cells: 64, recent_hits, ..Stats::default() };
        let text = metrics.render(&of_engine(&stats));
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
            format!("vllm:prefix_cache_hits_total{{{label}}} 4"),
            format!("vllm:request_success_total{{{label},finished_reason=\"length\"}} 1"),
            format!("vllm:request_success_total{{{label},finished_reason=\"abort\"}} 1"),
            format!("kvist_http_responses_total{{{label},status=\"200\"}} 1"),
            format!("kvist_http_responses_total{{{label},status=\"other\"}} 1"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
