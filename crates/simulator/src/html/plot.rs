//! Axes and plot content as SVG. Colours are CSS variables, so that a plot follows the page's theme.
use super::escape;
use super::picture::Panel;
use super::scale::Scale;
use super::svg::{Anchor, Svg, n};
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
    body: Svg,
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
            body: Svg::default(),
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
            self.body.line("grid", [self.left, right], [at, at]);
            self.body.text("tick", Anchor::End, [self.left - 8.0, at + 4.0], &self.y.unit.show(tick));
        }
        for tick in self.x.ticks((self.inner_width / 84.0) as usize + 1) {
            let at = self.px(tick);
            self.body.line("axis", [at, at], [bottom, bottom + 5.0]);
            self.body.text("tick", Anchor::Middle, [at, bottom + 18.0], &self.x.unit.show(tick));
        }
        self.body.line("axis", [self.left, right], [bottom, bottom]);
    }

    pub fn labels(&mut self, x: &str, y: &str) {
        let right = self.left + self.inner_width;
        self.body.text("label", Anchor::End, [right, self.height - 8.0], x);
        if !y.is_empty() {
            self.body.text("label", Anchor::Start, [self.left, self.top - 11.0], y);
        }
    }

    /// Draws a dashed horizontal line.
    pub fn level(&mut self, y: f64, name: &str) {
        let at = self.py(y);
        self.body.line("level", [self.left, self.left + self.inner_width], [at, at]);
        let label = format!("{name}: {}", self.y.unit.show(y));
        self.body.text("label halo", Anchor::Start, [self.left + 8.0, at + 16.0], &label);
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
            self.body.0,
            "<path class=\"{class} c{}\" d=\"{path}\"><title>{}</title></path>",
            color % N_COLORS,
            escape(name)
        );
    }

    pub fn line(&mut self, series: &Series<'_>) {
        let path = self.path(series.points.iter().copied());
        self.named_path("line", series.color, &path, series.name);
    }

    /// Draws a step function: each value stays until the next point.
    pub fn steps(&mut self, series: &Series<'_>) {
        let path = self.path(step_function(&series.points).into_iter());
        self.named_path("line", series.color, &path, series.name);
    }

    /// Fills the area between two step functions with the same x values.
    pub fn area(&mut self, name: &str, color: usize, low: &[(f64, f64)], high: &[(f64, f64)]) {
        let outline = step_function(high).into_iter().chain(step_function(low).into_iter().rev());
        let path = self.path(outline) + "Z";
        self.named_path("area", color, &path, name);
    }

    pub fn dots(&mut self, series: &Series<'_>) {
        let class = format!("dot c{}", series.color % N_COLORS);
        for (x, y) in &series.points {
            let title = format!("{}: {} at {}", series.name, self.y.unit.show(*y), self.x.unit.show(*x));
            let at = [self.px(*x), self.py(*y)];
            self.body.circle(&class, at, 3.5, &title);
        }
    }

    /// Draws interval bars from (x, y, half width).
    pub fn intervals(&mut self, color: usize, points: impl Iterator<Item = (f64, f64, f64)>) {
        let class = format!("interval c{}", color % N_COLORS);
        for (x, y, half) in points {
            let (x, ends) = (self.px(x), [self.py(y - half), self.py(y + half)]);
            self.body.line(&class, [x, x], ends);
        }
    }

    /// Returns the finished plot. `alt` is the text for screen readers.
    pub fn finish(self, alt: &str) -> Panel {
        Panel {
            name: String::new(),
            alt: alt.into(),
            width: self.width,
            height: self.height,
            body: self.body.0,
        }
    }
}

/// The corner points of a step function.
fn step_function(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut corners = Vec::with_capacity(points.len() * 2);
    for (i, (x, y)) in points.iter().enumerate() {
        if i > 0 {
            corners.push((*x, points[i - 1].1));
        }
        corners.push((*x, *y));
    }
    corners
}
