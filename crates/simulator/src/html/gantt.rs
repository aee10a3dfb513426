//! Requests as bars: waiting, prefill, decode.
use super::Run;
use super::picture::{Figure, Panel};
use super::scale::{Scale, Unit};
use super::svg::{Anchor, Svg};
use crate::report::{Activity, Phase, RequestRow};
use std::fmt::Write;

/// Maximum rows in a picture.
const MAX_ROWS: usize = 60;

const LEFT: f64 = 56.0;
const WIDTH: f64 = 1000.0;
const INNER: f64 = WIDTH - LEFT - 16.0;
/// Colour indices of the legend.
const READING: usize = 0;
const WRITING: usize = 2;

pub(super) fn figure(runs: &[Run<'_>]) -> Option<Figure> {
    // All runs show the same requests, so that they can be compared. The first run chooses them.
    let (first, chosen) = runs.iter().map(|run| (run, choose(run))).find(|(_, ids)| !ids.is_empty())?;
    let is_part = chosen.len() < first.record.requests.len();
    let of_runs: Vec<Vec<RequestRow>> = runs.iter().map(|run| rows(run, &chosen)).collect();
    let mut panels = Vec::new();
    for (run, rows) in runs.iter().zip(&of_runs).filter(|(_, rows)| !rows.is_empty()) {
        // If all requests are shown, all runs share one time axis.
        let on_axis = || of_runs.iter().filter(|other| !is_part || std::ptr::eq(*other, rows)).flatten();
        let begin = on_axis().map(|row| row.arrival_ns).min().unwrap_or(0);
        let end = on_axis().filter_map(|row| row.finished_ns).max().unwrap_or(begin);
        let x = Scale::linear(begin as f64 / 1e9, end.max(begin + 1) as f64 / 1e9, Unit::Seconds);
        let name = if runs.len() > 1 { run.name.to_owned() } else { String::new() };
        panels.push(Panel { name, ..picture(rows, &run.record.activity, &x) });
    }
    let which = if is_part {
        let total = first.record.requests.len();
        format!(" Shown are {} of {total} requests, around the longest queue.", chosen.len())
    } else {
        String::new()
    };
    Figure::of(
        "Requests",
        &format!("One bar per request, from arrival to its last token; the thin part is waiting.{which}"),
        [("reading the prompt", READING), ("writing", WRITING)].map(|(name, color)| (name.to_owned(), color)),
        panels,
    )
}

/// Ids of the requests to show, sorted: all that finished, or those around the moment when most requests were waiting.
fn choose(run: &Run<'_>) -> Vec<u64> {
    let mut rows: Vec<(u64, u64)> = run
        .record
        .requests
        .iter()
        .filter(|row| row.finished_ns.is_some())
        .map(|row| (row.arrival_ns, row.id))
        .collect();
    rows.sort_unstable();
    if rows.len() > MAX_ROWS {
        let samples = run.record.timeline.samples();
        // If several peaks are equal, take the first.
        let peak = samples.iter().rev().max_by_key(|s| s.load.queued_requests).map_or(0, |s| s.at_ns);
        let at = rows.partition_point(|(arrival_ns, _)| *arrival_ns < peak);
        let from = at.saturating_sub(MAX_ROWS / 2).min(rows.len() - MAX_ROWS);
        rows = rows[from..from + MAX_ROWS].to_vec();
    }
    let mut ids: Vec<u64> = rows.into_iter().map(|(_, id)| id).collect();
    ids.sort_unstable();
    ids
}

/// The rows of those `ids` (sorted) that finished, in order of arrival.
fn rows(run: &Run<'_>, ids: &[u64]) -> Vec<RequestRow> {
    let chosen = |row: &&RequestRow| row.finished_ns.is_some() && ids.binary_search(&row.id).is_ok();
    let mut rows: Vec<RequestRow> = run.record.requests.iter().filter(chosen).copied().collect();
    rows.sort_by_key(|row| row.arrival_ns);
    rows
}

fn picture(rows: &[RequestRow], activity: &[Activity], x: &Scale) -> Panel {
    let pitch = if rows.len() <= 12 { 26.0 } else { 10.0 };
    let bar = pitch * 0.66;
    let top = 8.0;
    let bottom = top + pitch * rows.len() as f64;
    let px = |ns: u64| LEFT + INNER * x.at(ns as f64 / 1e9);
    let mut body = Svg::default();
    for tick in x.ticks(10) {
        body.grid(LEFT + INNER * x.at(tick), [top, bottom], &x.unit.show(tick));
    }
    for (i, row) in rows.iter().enumerate() {
        let y = top + pitch * i as f64 + (pitch - bar) / 2.0;
        let Some(end) = row.finished_ns else { continue };
        let _ = write!(body.0, "<g><title>{}</title>", summary(row));
        if rows.len() <= 12 || i % 5 == 0 {
            body.text("tick", Anchor::End, [LEFT - 8.0, y + bar / 2.0 + 4.0], &row.id.to_string());
        }
        let middle = y + bar / 2.0;
        body.line("waiting", [px(row.arrival_ns), px(end)], [middle, middle]);
        let mut part = |from: u64, to: u64, color: usize| {
            let width = (px(to) - px(from)).max(if to > from { 0.6 } else { 0.0 });
            body.rect(&format!("bar c{color}"), [px(from), y], [width, bar]);
        };
        let mut has_activity = false;
        for span in activity.iter().filter(|span| span.request == row.id) {
            has_activity = true;
            part(span.from_ns, span.to_ns, if span.phase == Phase::Prefill { READING } else { WRITING });
        }
        if !has_activity {
            let admitted = row.admitted_ns.unwrap_or(row.arrival_ns);
            let first = row.first_token_ns.unwrap_or(end);
            part(admitted, first, READING);
            part(first, end, WRITING);
        }
        body.0 += "</g>";
    }
    let alt = "Requests over time".into();
    Panel { name: String::new(), alt, width: WIDTH, height: bottom + 24.0, body: body.0 }
}

/// What a pointer over the request shows.
fn summary(row: &RequestRow) -> String {
    let seconds = |s: Option<f64>| s.map_or("–".to_string(), |s| Unit::Seconds.show(s));
    let mut text = format!(
        "request {}: {} prompt tokens, {} of them cached, {} written; first token after {}, last after {}",
        row.id,
        row.prompt_tokens,
        row.hit_tokens,
        row.output_tokens,
        seconds(row.ttft_s()),
        seconds(row.end_to_end_s())
    );
    if row.preemptions > 0 {
        let _ = write!(text, "; preempted {} times", row.preemptions);
    }
    if row.is_late() {
        text += "; late";
    }
    text
}
