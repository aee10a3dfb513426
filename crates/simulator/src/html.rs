//! A report as one HTML page with SVG plots, in light and dark, with no external resources.
//!
//! The page is a function of its input, byte for byte, and names are escaped. It needs no JavaScript. This module
//! computes no figures; they come from [`Report`]. It draws what compares requests, runs and sweeps. The dashboard
//! draws what happened to every block: it plays a recording of the run.
mod compare;
mod gantt;
mod load;
mod picture;
mod plot;
mod scale;
mod summary;
mod svg;

use crate::report::{Record, Report};
use crate::statistics::cdf;
use picture::{Figure, Panel};
use plot::{Frame, Series};
use scale::Scale;
use std::fmt::Write;

pub use compare::{Comparison, Quantity};
pub use picture::Picture;
pub use scale::Unit;

/// One run, with the name that identifies it on the page.
pub struct Run<'a> {
    pub name: &'a str,
    pub record: &'a Record,
    pub report: &'a Report,
}

/// One quantity against another over the runs of a sweep, as curves on one pair of axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    pub title: String,
    /// A sentence below the title.
    pub about: String,
    /// Label of the x axis, which is logarithmic and shows counts.
    pub x_label: String,
    /// Label of the y axis, which begins at 0.
    pub y_label: String,
    pub unit: Unit,
    pub curves: Vec<Curve>,
    /// A dashed horizontal line and its label: the level at which all curves end.
    pub level: Option<(String, f64)>,
}

/// A line with points.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub name: String,
    /// Points with `x` of 0 or below are left out, because the axis is logarithmic.
    pub points: Vec<Point>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// Half width of the 95% interval over seeds, if there is one.
    pub half_width: Option<f64>,
}

/// The contents of a page.
#[derive(Default)]
pub struct Page<'a> {
    pub title: &'a str,
    /// A sentence below the title.
    pub about: &'a str,
    /// Shown side by side, in this order.
    pub runs: Vec<Run<'a>>,
    /// Shown before the plots.
    pub comparison: Option<Comparison>,
    /// Plots without points are left out.
    pub plots: Vec<Plot>,
}

impl Page<'_> {
    /// Renders the complete page.
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
        self.figures().iter().for_each(|figure| page += &figure.html());
        if !self.runs.is_empty() {
            let about = "Every block over time, and which requests share it: add --record run.jsonl to the command, and \
                         drop that file on the dashboard, the page of kvist serve.";
            page += &picture::section_of("Block map", about, "");
        }
        page += "</main>\n<footer>Made by kvist. Times are virtual.</footer>\n</body>\n</html>\n";
        page
    }

    /// All SVG figures, in page order.
    fn figures(&self) -> Vec<Figure> {
        let plots = self.plots.iter().filter_map(Plot::figure);
        let others = [self.latencies(), load::figure(&self.runs), gantt::figure(&self.runs)];
        let comparison = self.comparison.as_ref().and_then(Comparison::figure);
        comparison.into_iter().chain(plots).chain(others.into_iter().flatten()).collect()
    }

    /// The plots of the page as separate files with a light background: everything but tiles and tables.
    pub fn pictures(&self) -> Vec<Picture> {
        self.figures().iter().map(Figure::picture).collect()
    }

    fn latencies(&self) -> Option<Figure> {
        let mut panels = Vec::new();
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
            let Some(max) = xs().max_by(f64::total_cmp) else { continue };
            // A logarithmic axis has no zero, so zero durations are drawn at the left edge.
            let min = xs().filter(|x| *x > 0.0).fold(max, f64::min).max(max / 1e6);
            let x = Scale::log(min, max, Unit::Seconds);
            let mut frame = Frame::new(490.0, 270.0, x, Scale::linear(0.0, 1.0, Unit::Percent));
            frame.labels(about, "");
            for series in &series {
                frame.steps(series);
            }
            panels.push(Panel { name: name.into(), ..frame.finish(name) });
        }
        let several = self.runs.len() > 1;
        let legend = self.runs.iter().enumerate().filter(|_| several);
        Figure::of(
            "Latency",
            "The share of requests that took at most this long. A steep curve means predictable times; a long tail \
             to the right means that some requests wait long.",
            legend.map(|(color, run)| (run.name.to_owned(), color)),
            panels,
        )
        .map(Figure::in_pairs)
    }
}

impl Plot {
    /// `None` if there are no points.
    fn figure(&self) -> Option<Figure> {
        let curves = self.curves.iter().map(|curve| {
            let points = curve.points.iter().filter(|p| p.x > 0.0).copied();
            (&curve.name, points.collect::<Vec<Point>>())
        });
        let curves: Vec<_> = curves.collect();
        let points = || curves.iter().flat_map(|(_, points)| points);
        let min = points().map(|p| p.x).min_by(f64::total_cmp)?;
        let max = points().map(|p| p.x).fold(min, f64::max);
        let level = self.level.as_ref().map_or(0.0, |(_, y)| *y);
        let top = points().map(|p| p.y + p.half_width.unwrap_or(0.0)).fold(level, f64::max);
        let x = Scale::log(min, max, Unit::Count);
        let y = Scale::linear(0.0, if top > 0.0 { top } else { 1.0 }, self.unit);
        let mut frame = Frame::new(1000.0, 380.0, x, y);
        frame.labels(&self.x_label, &self.y_label);
        if let Some((name, y)) = &self.level {
            frame.level(*y, name);
        }
        for (color, (name, points)) in curves.iter().enumerate() {
            let series = Series { name, color, points: points.iter().map(|p| (p.x, p.y)).collect() };
            frame.intervals(color, points.iter().filter_map(|p| Some((p.x, p.y, p.half_width?))));
            frame.line(&series);
            frame.dots(&series);
        }
        let legend = curves.iter().enumerate().map(|(color, (name, _))| ((*name).clone(), color));
        Figure::of(&self.title, &self.about, legend, vec![frame.finish(&self.title)])
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Ttft,
    Tpot,
    Itl,
    EndToEnd,
}

/// Maximum points of a distribution function on a plot; more are not visible.
const CDF_POINTS: usize = 200;

impl Kind {
    fn cdf(self, record: &Record) -> Vec<(f64, f64)> {
        use crate::report::{RequestOutcome, RequestRow};
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
        let finished = record.requests.iter().filter(|row| row.outcome == RequestOutcome::Finished);
        let mut values: Vec<f64> = finished.filter_map(of).collect();
        values.sort_unstable_by(f64::total_cmp);
        cdf(&values, CDF_POINTS)
    }
}

/// Escapes text for HTML, including quoted attributes.
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
