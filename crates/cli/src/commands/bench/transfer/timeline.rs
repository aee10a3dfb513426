//! The picture of measured transfers: what the host and the device do, and when.
use kvist_engine::devices::{MeasuredSteps, PartSpans, StepSpans, TransferCase};
use std::fmt::Write;
use std::time::Duration;

/// Steps that are drawn.
const STEPS: usize = 4;
const LEFT: f64 = 96.0;
const WIDTH: f64 = 820.0;
const ROW: f64 = 26.0;
const PANEL: f64 = 5.0 * ROW + 56.0;
const TOP: f64 = 44.0;

/// Name, row and colour of a part.
const PARTS: [(&str, usize, &str); 5] = [
    ("pack", 0, "#4c72b0"),
    ("stage", 0, "#8fa9d1"),
    ("copy", 1, "#dd8452"),
    ("scatter", 2, "#55a868"),
    ("compute", 3, "#8172b3"),
];
const ROWS: [&str; 4] = ["host", "copy", "scatter", "compute"];

/// What a step did, as numbers of `PARTS`, and when.
fn spans(step: &StepSpans) -> Vec<(usize, (Duration, Duration))> {
    let of = |part: &PartSpans| [Some(part.pack), Some(part.stage), part.copy, part.scatter, None];
    let compute = [None, None, None, None, step.compute];
    let all = step.parts.iter().map(of).chain([compute]);
    // Blocks are not packed, so that would be a line without width.
    all.flat_map(|spans| spans.into_iter().enumerate())
        .filter_map(|(part, span)| span.map(|span| (part, span)))
        .filter(|(_, (from, to))| from < to)
        .collect()
}

/// Steps from the middle of the run, a panel for each case.
pub fn svg(title: &str, cases: &[(&TransferCase, &MeasuredSteps)]) -> String {
    let shown = |steps: &MeasuredSteps| {
        let first = steps.spans.len().saturating_sub(STEPS) / 2;
        steps.spans[first..].iter().take(STEPS).cloned().collect::<Vec<_>>()
    };
    let ends = |steps: &[StepSpans]| {
        let all = || steps.iter().flat_map(spans);
        let from = all().map(|(_, span)| span.0).min().unwrap_or_default();
        (from, all().map(|(_, span)| span.1).max().unwrap_or_default())
    };
    // All panels have the same scale.
    let longest = cases.iter().map(|(_, steps)| {
        let (from, to) = ends(&shown(steps));
        to.saturating_sub(from).as_secs_f64() * 1e3
    });
    let longest = longest.fold(1e-6, f64::max);
    let height = TOP + cases.len() as f64 * PANEL + 36.0;
    let full = LEFT + WIDTH + 16.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{full:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {full:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"14\" fill=\"#222222\">{title}</text>\n",
        title = escaped(title),
    );
    for (i, (case, steps)) in cases.iter().enumerate() {
        panel(&mut svg, TOP + i as f64 * PANEL, case, &shown(steps), ends(&shown(steps)).0, longest);
    }
    let mut x = LEFT;
    for (name, _, colour) in PARTS {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#333333\">{name}</text>",
            height - 24.0,
            x + 17.0,
            height - 14.0
        );
        x += 90.0;
    }
    svg += "</svg>\n";
    svg
}

fn panel(svg: &mut String, top: f64, case: &TransferCase, steps: &[StepSpans], zero: Duration, longest: f64) {
    let how = if case.overlap { "while the step before computes" } else { "one after the other" };
    let _ = writeln!(
        svg,
        "<text x=\"12\" y=\"{:.1}\" fill=\"#222222\">{} tokens per step, {how}</text>",
        top + 14.0,
        case.tokens
    );
    let y = |row: usize| top + 24.0 + row as f64 * ROW;
    let x = |time: Duration| LEFT + time.saturating_sub(zero).as_secs_f64() * 1e3 / longest * WIDTH;
    for (row, name) in ROWS.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555555\">{name}</text>\
             <line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#e4e4e4\"/>",
            LEFT - 8.0,
            y(row) + 16.0,
            LEFT + WIDTH,
            y(row) + ROW - 2.0,
            y(row) + ROW - 2.0
        );
    }
    for (i, step) in steps.iter().enumerate() {
        for (part, (from, to)) in spans(step) {
            let (name, row, colour) = PARTS[part];
            // Too short a part would not be seen.
            let width = (x(to) - x(from)).max(1.0);
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{colour}\" \
                 fill-opacity=\"{}\"><title>step {i}: {name}, {:.3} ms</title></rect>",
                x(from),
                y(row) + 2.0,
                ROW - 6.0,
                if i % 2 == 0 { "1" } else { "0.6" },
                to.saturating_sub(from).as_secs_f64() * 1e3
            );
        }
    }
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"{:.1}\" fill=\"#555555\">0</text>\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555555\">{longest:.2} ms</text>",
        y(4) + 12.0,
        LEFT + WIDTH,
        y(4) + 12.0
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
