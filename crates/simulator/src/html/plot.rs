//! Axes and plot content as SVG. Colours are CSS variables, so that a plot follows the page's theme.
use super::escape;
use super::picture::Panel;
use super::scale::{Scale, Unit};
use std::fmt::Write;

/// Number of series colours; further series reuse them from the start.
pub(super) const N_COLORS: usize = 8;

/// A line of a plot.
pub(super) struct Series<'a> {
    pub name: &'a str,
    pub color: usize,
    /// Ascending by x.
    pub points: Vec<(f64, f64)>,
}

/// A plot under construction.
pub(super) struct Frame {
    width: f64,
    height: f64,
    left: f64,
    top: f64,
    inner_width: f64,
    inner_height: f64,
    x: Scale,
    y: Scale,
    body: String,
}

impl Frame {
    pub fn new(width: f64, height: f64, x: Scale, y: Scale) -> Frame {
        let (left, right, top, bottom) = (56.0, 16.0, 26.0, 44.0);
        let mut frame = Frame {
            width,
            height,
            left,
            top,
            inner_width: width - left - right,
            inner_height: height - top - bottom,
            x,
            y,
            body: String::new(),
        };
        frame.axes();
        frame
    }

    fn px(&self, x: f64) -> f64 {
        self.left + self.inner_width * self.x.at(x)
    }
    fn py(&self, y: f64) -> f64 {
        self.top + self.inner_height * (1.0 - self.y.at(y))
    }

    fn axes(&mut self) {
        let bottom = self.top + self.inner_height;
        let right = self.left + self.inner_width;
        for tick in self.y.ticks((self.inner_height / 44.0) as usize + 1) {
            let at = self.py(tick);
            let _ = write!(
                self.body,
                "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/><text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{}\">{}</text>",
                n(self.left),
                n(right),
                n(at),
                n(at),
                n(self.left - 8.0),
                n(at + 4.0),
                self.y.unit.show(tick)
            );
        }
        for tick in self.x.ticks((self.inner_width / 84.0) as usize + 1) {
            let at = self.px(tick);
            let _ = write!(
                self.body,
                "<line class=\"axis\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"/><text class=\"tick\" text-anchor=\"middle\" x=\"{0}\" y=\"{3}\">{4}</text>",
                n(at),
                n(bottom),
                n(bottom + 5.0),
                n(bottom + 18.0),
                self.x.unit.show(tick)
            );
        }
        let _ = write!(
            self.body,
            "<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{2}\" y2=\"{2}\"/>",
            n(self.left),
            n(right),
            n(bottom)
        );
    }

    pub fn labels(&mut self, x: &str, y: &str) {
        let _ = write!(
            self.body,
            "<text class=\"label\" text-anchor=\"end\" x=\"{}\" y=\"{}\">{}</text>",
            n(self.left + self.inner_width),
            n(self.height - 8.0),
            escape(x)
        );
        if !y.is_empty() {
            let _ = write!(
                self.body,
                "<text class=\"label\" x=\"{}\" y=\"{}\">{}</text>",
                n(self.left),
                n(self.top - 11.0),
                escape(y)
            );
        }
    }

    /// Draws a dashed horizontal line.
    pub fn level(&mut self, y: f64, name: &str) {
        let at = self.py(y);
        let right = self.left + self.inner_width;
        let _ = write!(
            self.body,
            "<line class=\"level\" x1=\"{}\" x2=\"{}\" y1=\"{2}\" y2=\"{2}\"/><text class=\"label halo\" x=\"{3}\" y=\"{4}\">{5}: {6}</text>",
            n(self.left),
            n(right),
            n(at),
            n(self.left + 8.0),
            n(at + 16.0),
            escape(name),
            self.y.unit.show(y)
        );
    }

    fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let mut path = String::new();
        for (i, (x, y)) in points.enumerate() {
            let _ = write!(path, "{}{},{}", if i == 0 { "M" } else { "L" }, n(self.px(x)), n(self.py(y)));
        }
        path
    }

    fn named_path(&mut self, class: &str, color: usize, path: &str, name: &str) {
        let _ = write!(
            self.body,
            "<path class=\"{class} c{}\" d=\"{path}\"><title>{}</title></path>",
            color % N_COLORS,
            escape(name)
        );
    }

    pub fn line(&mut self, series: &Series<'_>) {
        let path = self.path(series.points.iter().copied());
        self.named_path("line", series.color, &path, series.name);
    }

    /// Draws a step function: each value holds until the next point.
    pub fn steps(&mut self, series: &Series<'_>) {
        let path = self.path(held(&series.points).into_iter());
        self.named_path("line", series.color, &path, series.name);
    }

    /// Fills the area between two step functions with the same x values.
    pub fn area(&mut self, name: &str, color: usize, low: &[(f64, f64)], high: &[(f64, f64)]) {
        let outline = held(high).into_iter().chain(held(low).into_iter().rev());
        let path = self.path(outline) + "Z";
        self.named_path("area", color, &path, name);
    }

    pub fn dots(&mut self, series: &Series<'_>) {
        for (x, y) in &series.points {
            let _ = write!(
                self.body,
                "<circle class=\"dot c{}\" cx=\"{}\" cy=\"{}\" r=\"3.5\"><title>{}: {} at {}</title></circle>",
                series.color % N_COLORS,
                n(self.px(*x)),
                n(self.py(*y)),
                escape(series.name),
                self.y.unit.show(*y),
                self.x.unit.show(*x)
            );
        }
    }

    /// Draws interval bars from (x, y, half width).
    pub fn intervals(&mut self, color: usize, points: impl Iterator<Item = (f64, f64, f64)>) {
        for (x, y, half) in points {
            let _ = write!(
                self.body,
                "<line class=\"interval c{}\" x1=\"{1}\" x2=\"{1}\" y1=\"{2}\" y2=\"{3}\"/>",
                color % N_COLORS,
                n(self.px(x)),
                n(self.py(y - half)),
                n(self.py(y + half))
            );
        }
    }

    /// Returns the finished plot. `said` is the text for screen readers.
    pub fn finish(self, said: &str) -> Panel {
        Panel {
            name: String::new(),
            said: said.into(),
            width: self.width,
            height: self.height,
            body: self.body,
        }
    }
}

/// The corner points of a step function.
fn held(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut corners = Vec::with_capacity(points.len() * 2);
    for (i, (x, y)) in points.iter().enumerate() {
        if i > 0 {
            corners.push((*x, points[i - 1].1));
        }
        corners.push((*x, *y));
    }
    corners
}

/// Formats a coordinate to a tenth of a pixel.
pub(super) fn n(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

/// A time axis from 0 to `seconds`.
pub(super) fn time_axis(seconds: f64) -> Scale {
    Scale::linear(0.0, seconds, Unit::Seconds)
}
