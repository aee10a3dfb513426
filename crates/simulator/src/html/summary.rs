//! The settings of a run, and its figures.
use super::picture::section_of;
use super::scale::Unit;
use super::{Run, escape};
use crate::report::Report;
use std::fmt::Write;

/// Tiles for one run, a table for several; then the settings.
pub(super) fn sections(runs: &[Run<'_>]) -> String {
    match runs {
        [] => String::new(),
        [run] => format!("<section class=\"tiles\">{}</section>\n{}", tiles(run.report), setting(run)),
        runs => section_of("Side by side", "The same load, under each.", &table(runs)),
    }
}

/// Name, value, explanation.
type Figure = (&'static str, Option<String>, String);

fn figures(report: &Report) -> Vec<Figure> {
    let seconds = |value: f64| Unit::Seconds.show(value);
    let percent = |value: f64| Unit::Percent.show(value);
    let count = |value: f64| Unit::Count.show(value);
    let l = &report.latency;
    let cache = &report.cache;
    vec![
        (
            "Tokens found in the cache",
            (cache.counts.total_tokens > 0).then(|| percent(cache.token_hit_ratio)),
            format!(
                "{} of blocks, {} of requests",
                percent(cache.block_hit_ratio),
                percent(cache.request_hit_ratio)
            ),
        ),
        (
            "Tokens loaded from tiers",
            report.tiers.as_ref().map(|tiers| percent(tiers.loaded_token_ratio)),
            report.tiers.as_ref().map_or(String::new(), |tiers| {
                let share = |tier: &crate::report::TierRecord| {
                    let of_all = tier.loaded_tokens as f64 / cache.counts.total_tokens.max(1) as f64;
                    format!("{} {}", escape(&tier.name), percent(of_all))
                };
                let shares: Vec<String> = tiers.record.tiers.iter().map(share).collect();
                let reused = percent(tiers.reused_token_ratio);
                format!("{}; {reused} were not computed", shares.join(", "))
            }),
        ),
        (
            "Time to first token",
            l.ttft_s.map(|s| seconds(s.p50)),
            l.ttft_s.map_or(String::new(), |s| format!("p90 {}, p99 {}", seconds(s.p90), seconds(s.p99))),
        ),
        (
            "Time per output token",
            l.tpot_s.map(|s| seconds(s.p50)),
            l.tpot_s.map_or(String::new(), |s| format!("p90 {}, p99 {}", seconds(s.p90), seconds(s.p99))),
        ),
        (
            "End to end",
            l.end_to_end_s.map(|s| seconds(s.p50)),
            l.end_to_end_s
                .map_or(String::new(), |s| format!("p90 {}, p99 {}", seconds(s.p90), seconds(s.p99))),
        ),
        (
            "Throughput",
            Some(format!("{}/s", count(report.throughput.output_tokens_per_s))),
            format!("output tokens; {} requests/s", count(report.throughput.requests_per_s)),
        ),
        (
            "Goodput",
            Some(format!("{}/s", count(report.throughput.goodput_requests_per_s))),
            report
                .objectives
                .attainment
                .map_or(String::new(), |a| format!("requests; {} met every objective", percent(a))),
        ),
        (
            "Tokens per decode step",
            report.speculation.as_ref().map(|it| format!("{:.2}", it.tokens_per_step)),
            report.speculation.as_ref().map_or(String::new(), |it| {
                format!(
                    "per request; {} of {} draft tokens accepted",
                    percent(it.acceptance),
                    count(it.counts.draft_tokens as f64)
                )
            }),
        ),
        (
            "Finished",
            Some(count(report.requests.finished as f64)),
            format!(
                "of {} requests; {} refused",
                count(report.requests.total as f64),
                count(report.requests.refused as f64)
            ),
        ),
        (
            "In the batch",
            Some(count(report.load.mean_running_requests)),
            format!(
                "on average; {} waiting, at most {}",
                count(report.load.mean_queued_requests),
                count(report.load.peak_queued_requests as f64)
            ),
        ),
    ]
}

fn tiles(report: &Report) -> String {
    let mut tiles = String::new();
    for (name, value, about) in figures(report) {
        let Some(value) = value else { continue };
        let _ = write!(tiles, "<div><h3>{name}</h3><strong>{value}</strong><p>{about}</p></div>");
    }
    tiles
}

fn table(runs: &[Run<'_>]) -> String {
    let mut table = String::from("<div class=\"wide\"><table><thead><tr><th></th>");
    for run in runs {
        let _ = write!(table, "<th>{}</th>", escape(run.name));
    }
    table += "</tr></thead><tbody>";
    let columns: Vec<Vec<Figure>> = runs.iter().map(|run| figures(run.report)).collect();
    let n_rows = columns.first().map_or(0, Vec::len);
    for row in 0..n_rows {
        if columns.iter().all(|column| column[row].1.is_none()) {
            continue;
        }
        let _ = write!(table, "<tr><th>{}</th>", columns[0][row].0);
        for column in &columns {
            let (_, value, about) = &column[row];
            let _ = write!(
                table,
                "<td><strong>{}</strong><small>{about}</small></td>",
                value.as_deref().unwrap_or("–")
            );
        }
        table += "</tr>";
    }
    table + "</tbody></table></div>"
}

/// The settings of the simulation, and why lookups missed.
fn setting(run: &Run<'_>) -> String {
    let mut lists = String::new();
    let mut list = |title: &str, rows: &mut dyn Iterator<Item = (String, String)>| {
        let mut entries = String::new();
        for (name, value) in rows {
            let _ = write!(entries, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value));
        }
        if !entries.is_empty() {
            let _ = write!(lists, "<div><h3>{title}</h3><dl>{entries}</dl></div>");
        }
    };
    let report = run.report;
    list("What was simulated", &mut report.setting.iter().map(|(k, v)| (k.clone(), v.clone())));
    let misses = &report.cache.counts.miss_reasons;
    list(
        "Why lookups ended",
        &mut misses.iter().map(|(k, v)| (k.replace('_', " "), Unit::Count.show(*v as f64))),
    );
    let counts = [
        ("blocks evicted", report.cache.counts.evicted_blocks),
        ("blocks stored", report.cache.counts.stored_blocks),
        ("preemptions", report.steps.preemptions),
        ("steps", report.steps.steps),
        ("prompt tokens computed", report.steps.prefill_tokens),
    ];
    list("Work", &mut counts.iter().map(|(k, v)| (k.to_string(), Unit::Count.show(*v as f64))));
    format!("<section class=\"lists\">{lists}</section>\n")
}
