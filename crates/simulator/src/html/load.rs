//! Plots of memory and batch size over time.
use super::Run;
use super::picture::{Figure, Panel};
use super::plot::{Frame, Series};
use super::scale::{Scale, Unit};
use crate::report::Load;

/// Maximum moments on a plot; more are not visible.
const MAX_POINTS: usize = 500;

const USED: usize = 0;
const CACHED: usize = 2;
const RUNNING: usize = 3;
const QUEUED: usize = 1;

pub(super) fn figure(runs: &[Run<'_>]) -> Option<Figure> {
    let mut panels = Vec::new();
    for run in runs {
        let samples = run.record.timeline.thinned(MAX_POINTS);
        let (Some(first), Some(last)) = (samples.first(), samples.last()) else { continue };
        let begin_ns = first.at_ns;
        let x = Scale::linear(0.0, last.at_ns.saturating_sub(begin_ns) as f64 / 1e9, Unit::Seconds);
        let points = |of: &dyn Fn(&Load) -> u64| -> Vec<(f64, f64)> {
            samples.iter().map(|s| ((s.at_ns - begin_ns) as f64 / 1e9, of(&s.load) as f64)).collect()
        };
        let max = |points: &[(f64, f64)]| points.iter().map(|p| p.1).fold(0.0, f64::max);
        let name = if runs.len() > 1 { run.name.to_owned() } else { String::new() };

        let used = points(&|load| load.used_blocks);
        let total = points(&|load| load.used_blocks + load.cached_blocks);
        let capacity = run.report.cache.counts.capacity_blocks.map(|n| n as f64);
        // A capacity far above the used blocks would flatten the curve, so it is not drawn.
        let top = capacity.filter(|c| *c < max(&total) * 4.0).unwrap_or(0.0).max(max(&total)) * 1.04;
        let mut frame = Frame::new(1000.0, 220.0, x, Scale::linear(0.0, top, Unit::Count));
        frame.labels("", "blocks");
        let zero: Vec<(f64, f64)> = used.iter().map(|p| (p.0, 0.0)).collect();
        frame.area("cached", CACHED, &used, &total);
        frame.area("held by requests", USED, &zero, &used);
        if let Some(capacity) = capacity.filter(|c| *c <= top) {
            frame.level(capacity, "capacity");
        }
        panels.push(Panel { name, ..frame.finish("Blocks over time") });

        let running = points(&|load| load.running_requests);
        let queued = points(&|load| load.queued_requests);
        let top = max(&running).max(max(&queued)) * 1.04;
        let mut frame = Frame::new(1000.0, 190.0, x, Scale::linear(0.0, top, Unit::Count));
        frame.labels("virtual time", "requests");
        frame.steps(&Series { name: "waiting", color: QUEUED, points: queued });
        frame.steps(&Series { name: "in the batch", color: RUNNING, points: running });
        panels.push(frame.finish("Requests over time"));
    }
    let legend = [
        ("blocks held by requests", USED),
        ("blocks cached", CACHED),
        ("requests in the batch", RUNNING),
        ("requests waiting", QUEUED),
    ];
    Figure::of(
        "Memory and batch over time",
        "Where blocks reach the capacity and requests wait, memory is what is missing; where they wait below it, time is.",
        legend.map(|(name, color)| (name.to_owned(), color)),
        panels,
    )
}
