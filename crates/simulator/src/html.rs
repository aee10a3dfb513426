//! A report as one page: plots drawn as SVG, in light and dark, and nothing fetched from anywhere.
//!
//! It promises that the page is a function of what it is given, byte for byte, and that names are escaped. Without
//! JavaScript everything is there but the scrubbing of block maps. It refuses to compute: figures come from
//! [`Report`].
mod blocks;
mod gantt;
mod load;
mod plot;
mod scale;
mod summary;

use crate::report::{Record, Report};
use crate::statistics::cdf;
use plot::{Frame, Series};
use scale::{Scale, Unit};
use std::fmt::Write;

/// One run, under the name that tells it from the others on the page.
pub struct Run<'a> {
    pub name: &'a str,
    pub record: &'a Record,
    pub report: &'a Report,
}

/// A quantity against another, as a line with points: hit ratio against capacity, over the runs of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub name: String,
    pub points: Vec<Point>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// Of the 95% interval over seeds, where there is one.
    pub half_width: Option<f64>,
}

/// What goes on a page.
#[derive(Default)]
pub struct Page<'a> {
    pub title: &'a str,
    /// A sentence below the title.
    pub about: &'a str,
    /// Compared side by side, in this order.
    pub runs: Vec<Run<'a>>,
    /// Token hit ratio (0 to 1) against capacity in blocks.
    pub hit_ratio: Vec<Curve>,
    /// Where all curves of `hit_ratio` end: the ratio of a cache without bound.
    pub without_bound: Option<f64>,
}

impl Page<'_> {
    /// The page, complete.
    pub fn render(&self) -> String {
        let mut page = String::new();
        let title = escape(self.title);
        page += "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
        page += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
        page += "<meta name=\"color-scheme\" content=\"light dark\">\n";
        let _ = writeln!(
            page,
            "<title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>",
            include_str!("html/style.css")
        );
        let _ = writeln!(page, "<header><p class=\"mark\">kvist simulate</p><h1>{title}</h1>");
        if !self.about.is_empty() {
            let _ = writeln!(page, "<p class=\"about\">{}</p>", escape(self.about));
        }
        page += "</header>\n<main>\n";
        page += &summary::sections(&self.runs);
        page += &self.hit_ratios();
        page += &self.latencies();
        page += &load::section(&self.runs);
        page += &gantt::section(&self.runs);
        page += &blocks::section(&self.runs);
        page += "</main>\n<footer>Made by kvist. Times are virtual.</footer>\n</body>\n</html>\n";
        page
    }

    fn hit_ratios(&self) -> String {
        let xs = || self.hit_ratio.iter().flat_map(|curve| &curve.points).map(|p| p.x).filter(|x| *x > 0.0);
        let Some(least) = xs().min_by(f64::total_cmp) else { return String::new() };
        let most = xs().fold(least, f64::max);
        let best = self.hit_ratio.iter().flat_map(|c| &c.points).map(|p| p.y + p.half_width.unwrap_or(0.0));
        let top = best.fold(self.without_bound.unwrap_or(0.0), f64::max);
        let x = Scale::log(least, most, Unit::Count);
        let y = Scale::linear(0.0, if top > 0.0 { top } else { 1.0 }, Unit::Percent);
        let mut frame = Frame::new(1000.0, 380.0, x, y);
        frame.labels("capacity in blocks", "tokens found in the cache");
        if let Some(bound) = self.without_bound {
            frame.level(bound, "without bound");
        }
        let series: Vec<Series> = self
            .hit_ratio
            .iter()
            .enumerate()
            .map(|(color, curve)| Series {
                name: &curve.name,
                color,
                points: curve.points.iter().filter(|p| p.x > 0.0).map(|p| (p.x, p.y)).collect(),
            })
            .collect();
        for (curve, series) in self.hit_ratio.iter().zip(&series) {
            let points = curve.points.iter().filter(|p| p.x > 0.0);
            frame.intervals(series.color, points.filter_map(|p| Some((p.x, p.y, p.half_width?))));
            frame.line(series);
            frame.dots(series);
        }
        let legend = plot::legend(series.iter().map(|s| (s.name, s.color)));
        figure(
            "Hit ratio against capacity",
            "What each policy finds in a cache of this size. Where a curve bends, more memory stops paying.",
            &format!("{legend}{}", frame.finish("Token hit ratio against capacity")),
        )
    }

    fn latencies(&self) -> String {
        let mut panels = String::new();
        for (name, about, of) in [
            ("Time to first token", "arrival to first token", Kind::Ttft),
            ("Time per output token", "mean of a request, after its first", Kind::Tpot),
            ("Between tokens", "every gap of every request", Kind::Itl),
            ("End to end", "arrival to last token", Kind::EndToEnd),
        ] {
            let series: Vec<Series> = self
                .runs
                .iter()
                .enumerate()
                .map(|(color, run)| Series { name: run.name, color, points: of.cdf(run.record) })
                .filter(|series| !series.points.is_empty())
                .collect();
            let xs = || series.iter().flat_map(|s| &s.points).map(|p| p.0);
            let Some(most) = xs().max_by(f64::total_cmp) else { continue };
            // A logarithm has no zero: what took no time stands at the left edge.
            let least = xs().filter(|x| *x > 0.0).fold(most, f64::min).max(most / 1e6);
            let x = Scale::log(least, most, Unit::Seconds);
            let mut frame = Frame::new(490.0, 270.0, x, Scale::linear(0.0, 1.0, Unit::Percent));
            frame.labels(about, "");
            for series in &series {
                frame.steps(series);
            }
            let _ = write!(panels, "<div><h3>{name}</h3>{}</div>", frame.finish(name));
        }
        if panels.is_empty() {
            return panels;
        }
        let legend = if self.runs.len() > 1 {
            plot::legend(self.runs.iter().enumerate().map(|(color, run)| (run.name, color)))
        } else {
            String::new()
        };
        figure(
            "Latency",
            "The share of requests that took at most so long. Steep is predictable; a long tail to the right is somebody waiting.",
            &format!("{legend}<div class=\"pair\">{panels}</div>"),
        )
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Ttft,
    Tpot,
    Itl,
    EndToEnd,
}

/// Points of a distribution function on a plot: more cannot be seen.
const CDF_POINTS: usize = 200;

impl Kind {
    fn cdf(self, record: &Record) -> Vec<(f64, f64)> {
        use crate::report::{Outcome, RequestRow};
        let of: fn(&RequestRow) -> Option<f64> = match self {
            Kind::Ttft => RequestRow::ttft_s,
            Kind::Tpot => RequestRow::tpot_s,
            Kind::EndToEnd => RequestRow::end_to_end_s,
            Kind::Itl => {
                let points = record.itl_ns.cdf(1e9);
                let every = points.len().div_ceil(CDF_POINTS).max(1);
                let last = points.len().saturating_sub(1);
                let kept = points.into_iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last);
                return kept.map(|(_, point)| point).collect();
            }
        };
        let finished = record.requests.iter().filter(|row| row.outcome == Outcome::Finished);
        let mut values: Vec<f64> = finished.filter_map(of).collect();
        values.sort_unstable_by(f64::total_cmp);
        cdf(&values, CDF_POINTS)
    }
}

/// A section of the page.
fn figure(title: &str, about: &str, content: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n<p class=\"about\">{about}</p>\n{content}\n</section>\n")
}

/// Text that is safe in HTML, also in a quoted attribute.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            c => safe.push(c),
        }
    }
    safe
}
