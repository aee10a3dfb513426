//! A report as text.
use crate::options::Size;
use kvist_simulator::fleet::FleetReport;
use kvist_simulator::report::{
    Attainment, CacheReport, Latency, Report, RequestCounts, Throughput, TierRecord, TiersReport,
};
use kvist_simulator::statistics::{Estimate, Spread};
use kvist_simulator::zero_service::ZeroService;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Seconds in the unit that gives three digits.
fn seconds(s: f64) -> String {
    match s {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.2} s"),
        s => format!("{s:.0} s"),
    }
}

pub fn percent(ratio: f64) -> String {
    format!("{:.1}%", 100.0 * ratio)
}

fn row(text: &mut String, name: &str, value: String) {
    // Writing to a `String` does not fail.
    let _ = writeln!(text, "{name:<22}{value}");
}

/// What was simulated, how requests ended, and how long they took.
fn head(setting: &BTreeMap<String, String>, n: &RequestCounts, latency: &Latency) -> String {
    let mut text = String::new();
    for (name, value) in setting {
        row(&mut text, name, value.clone());
    }
    let rest = [
        (n.refused, "refused"),
        (n.cancelled, "cancelled"),
        (n.unfinished, "unfinished"),
        (n.never_arrived, "never arrived"),
        (n.late, "late"),
    ];
    let rest = rest.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}"));
    row(&mut text, "requests", format!("{} finished{}", n.finished, rest.collect::<String>()));

    let _ = writeln!(text, "\n{:<22}{:>10}{:>10}{:>10}{:>10}", "", "mean", "p50", "p90", "p99");
    for (name, spread) in [
        ("time in queue", latency.queue_s),
        ("TTFT", latency.ttft_s),
        ("TPOT", latency.tpot_s),
        ("between tokens", latency.itl_s),
        ("end to end", latency.end_to_end_s),
    ] {
        if let Some(Spread { mean, p50, p90, p99, .. }) = spread {
            let values = [mean, p50, p90, p99].map(|s| format!("{:>10}", seconds(s)));
            let _ = writeln!(text, "{name:<22}{}", values.concat());
        }
    }
    text.push('\n');
    text
}

pub fn report(report: &Report) -> String {
    let mut text = head(&report.setting, &report.requests, &report.latency);
    throughput(&mut text, &report.throughput, &report.objectives);
    let load = &report.load;
    let used = format!("; {:.0} used on average, {} at most", load.mean_used_blocks, load.peak_used_blocks);
    cache(&mut text, &report.cache, &used);
    if let Some(tiers) = &report.tiers {
        show_tiers(&mut text, report.cache.counts.total_tokens, tiers);
    }
    if let Some(speculation) = &report.speculation {
        let counts = &speculation.counts;
        row(
            &mut text,
            "drafts",
            format!(
                "{} of {} tokens accepted ({}); {:.2} tokens per request and decode step",
                counts.accepted_tokens,
                counts.draft_tokens,
                percent(speculation.acceptance),
                speculation.tokens_per_step
            ),
        );
    }
    row(
        &mut text,
        "batch",
        format!(
            "{:.1} running and {:.1} waiting on average; busy {} of the time; {} steps, {} preemptions",
            report.load.mean_running_requests,
            report.load.mean_queued_requests,
            percent(report.load.busy_ratio),
            report.steps.steps,
            report.steps.preemptions
        ),
    );
    text
}

fn throughput(text: &mut String, t: &Throughput, objectives: &Attainment) {
    row(
        text,
        "throughput",
        format!(
            "{:.2} requests/s, {:.0} prompt and {:.0} generated tokens/s over {}",
            t.requests_per_s,
            t.prompt_tokens_per_s,
            t.output_tokens_per_s,
            seconds(t.duration_s)
        ),
    );
    let promised = objectives.asked;
    if let (Some(attainment), true) =
        (objectives.attainment, promised.ttft_s.is_some() || promised.tpot_s.is_some())
    {
        let asked = [("TTFT", promised.ttft_s), ("TPOT", promised.tpot_s)];
        let asked: Vec<_> =
            asked.iter().filter_map(|(name, s)| s.map(|s| format!("{name} {}", seconds(s)))).collect();
        row(
            text,
            "goodput",
            format!(
                "{:.2} requests/s; {} of requests within {}",
                t.goodput_requests_per_s,
                percent(attainment),
                asked.join(" and ")
            ),
        );
    }
}

/// `used`: what is known of the blocks in use.
fn cache(text: &mut String, cache: &CacheReport, used: &str) {
    row(
        text,
        "prefix cache",
        format!(
            "hit {} of tokens, {} of blocks, {} of requests",
            percent(cache.token_hit_ratio),
            percent(cache.block_hit_ratio),
            percent(cache.request_hit_ratio)
        ),
    );
    let counts = &cache.counts;
    let capacity = counts.capacity_blocks.map_or("without bound".to_owned(), |n| format!("{n} blocks"));
    row(
        text,
        "blocks",
        format!(
            "{capacity} of {} tokens; {} stored, {} evicted{used}",
            counts.block_tokens, counts.stored_blocks, counts.evicted_blocks
        ),
    );
    let mut reasons: Vec<(&String, &u64)> = counts.miss_reasons.iter().collect();
    reasons.sort_by_key(|(name, n)| (std::cmp::Reverse(**n), name.as_str()));
    if !reasons.is_empty() {
        let reasons: Vec<_> =
            reasons.iter().map(|(name, n)| format!("{} {n}", name.replace('_', " "))).collect();
        row(text, "hits ended because", reasons.join(", "));
    }
}

/// A fleet.
pub fn fleet(report: &FleetReport) -> String {
    let mut text = head(&report.setting, &report.requests, &report.latency);
    throughput(&mut text, &report.throughput, &report.objectives);
    cache(&mut text, &report.cache, ", over all workers");
    if let Some(tiers) = &report.tiers {
        show_tiers(&mut text, report.cache.counts.total_tokens, tiers);
    }
    let fleet = &report.fleet;
    let mut changes = format!("{} at the start", fleet.workers);
    for (n, what) in [(fleet.failures, "failed"), (fleet.joins, "joined")] {
        if n > 0 {
            let _ = write!(changes, ", {n} {what}");
        }
    }
    if fleet.failures > 0 {
        let _ = write!(changes, "; {} requests were sent again", fleet.retried_requests);
    }
    row(&mut text, "workers", changes);
    if fleet.credited_tokens > 0 {
        let (expected, found) = (fleet.credited_tokens, report.cache.counts.hit_tokens);
        row(&mut text, "router", format!("expected {expected} cached tokens, {found} were found"));
    }
    let over = &fleet.over_workers;
    if let Some(busy) = over.busy_ratio {
        let (mean, most) = (percent(busy.mean), percent(busy.max));
        row(&mut text, "busy", format!("{mean} of the time on average, {most} at most"));
    }
    let imbalance = &fleet.imbalance;
    let values = [
        ("requests", imbalance.requests),
        ("computed tokens", imbalance.computed_tokens),
        ("time in steps", imbalance.busy),
    ];
    let values = values.iter().filter_map(|(name, x)| x.map(|x| format!("{x:.2} of {name}")));
    row(&mut text, "most over mean", values.collect::<Vec<_>>().join(", "));
    text
}

fn show_tiers(text: &mut String, prompt_tokens: u64, tiers: &TiersReport) {
    let (record, total) = (&tiers.record, prompt_tokens.max(1) as f64);
    let share = |tokens: u64| percent(tokens as f64 / total);
    let of_tier = |tier: &TierRecord| format!("{} from {}", share(tier.loaded_tokens), tier.name);
    let loaded: Vec<String> = record.tiers.iter().map(of_tier).collect();
    let reused = percent(tiers.reused_token_ratio);
    row(
        text,
        "loaded",
        format!("{} of tokens; with the cache's hits {reused} were not computed", loaded.join(", ")),
    );
    let mean_s = record.load_ns as f64 / 1e9 / record.loads.max(1) as f64;
    row(
        text,
        "loads",
        format!(
            "{}, {} on average; {} late, {} failed; {} of tokens computed because that was faster",
            record.loads,
            seconds(mean_s),
            record.late_loads,
            record.failed_loads,
            share(record.declined_tokens)
        ),
    );
    for tier in &record.tiers {
        let capacity = tier.capacity_bytes.map_or("without bound".to_owned(), |n| Size(n).to_string());
        row(
            text,
            &format!("tier {}", tier.name),
            format!(
                "{capacity}; {} blocks at most, {} written, {} dropped",
                tier.peak_blocks, tier.written_blocks, tier.dropped_blocks
            ),
        );
    }
}

/// A mean with its interval, if it has one.
fn with_interval(estimate: &Estimate, show: fn(f64) -> String) -> String {
    let half = estimate.half_width.map_or(String::new(), |half| format!(" ±{}", show(half)));
    show(estimate.mean) + &half
}

/// Figures of a report over several seeds.
pub fn over_seeds(load: &str, n_seeds: u64, figures: &BTreeMap<&'static str, Estimate>) -> String {
    let mut text = format!("{load}, {n_seeds} seeds; ± is the 95% interval of the mean over them\n\n");
    let _ = writeln!(text, "{:<22}{:>20}{:>20}{:>20}{:>20}", "", "mean", "p50", "p90", "p99");
    for (name, figure) in [
        ("time in queue", "queue"),
        ("TTFT", "ttft"),
        ("TPOT", "tpot"),
        ("between tokens", "itl"),
        ("end to end", "end_to_end"),
    ] {
        let values = ["mean", "p50", "p90", "p99"].map(|which| {
            let estimate = figures.get(format!("{figure}_{which}_s").as_str());
            estimate.map_or("-".to_owned(), |it| with_interval(it, seconds))
        });
        let values = values.map(|value| format!("{value:>20}"));
        let _ = writeln!(text, "{name:<22}{}", values.concat());
    }
    text.push('\n');
    let number: fn(f64) -> String = |value| format!("{value:.3}");
    for (name, show) in [
        ("requests_per_s", number),
        ("output_tokens_per_s", number),
        ("goodput_requests_per_s", number),
        ("attainment", percent),
        ("token_hit_ratio", percent),
        ("loaded_token_ratio", percent),
        ("reused_token_ratio", percent),
        ("block_hit_ratio", percent),
        ("request_hit_ratio", percent),
        ("evicted_blocks", number),
        ("mean_used_blocks", number),
        ("mean_batch_requests", number),
        ("mean_queue_requests", number),
        ("busy_ratio", percent),
        ("preemptions", number),
        ("draft_tokens", number),
        ("accepted_tokens", number),
        ("tokens_per_step", number),
    ] {
        if let Some(estimate) = figures.get(name) {
            let _ = writeln!(text, "{:<26}{}", name.replace('_', " "), with_interval(estimate, show));
        }
    }
    text
}

pub fn zero_service(result: &ZeroService, trace: &str) -> String {
    let hits = &result.cache;
    let capacity = result.capacity_blocks.map_or("without bound".to_owned(), |n| format!("{n} blocks"));
    format!(
        "{trace}, {} requests, serving takes no time\n\
         policy                {}, {capacity} of {} tokens\n\
         hit                   {} of {} blocks ({}), {} of tokens, {} of requests\n\
         at any position       {} blocks\n\
         evicted               {}; {} different blocks in all\n",
        result.requests,
        result.policy,
        result.block_tokens,
        hits.hit_blocks,
        hits.total_blocks,
        percent(hits.hit_blocks as f64 / (hits.total_blocks.max(1)) as f64),
        percent(hits.token_hit_ratio),
        percent(hits.hit_requests as f64 / result.requests.max(1) as f64),
        hits.any_position_hit_blocks,
        hits.evicted_blocks,
        result.distinct_blocks
    )
}
