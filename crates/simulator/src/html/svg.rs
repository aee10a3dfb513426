//! SVG elements as text.
use super::escape;
use std::fmt::Write;

/// Where the point that a text is given lies in the text.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// The elements of a drawing, from back to front. Positions are in pixels from the left and from the top, to a tenth.
#[derive(Default)]
pub(super) struct Svg(pub String);

impl Svg {
    pub fn line(&mut self, class: &str, [x1, x2]: [f64; 2], [y1, y2]: [f64; 2]) {
        let [x1, x2, y1, y2] = [x1, x2, y1, y2].map(n);
        let _ = write!(self.0, "<line class=\"{class}\" x1=\"{x1}\" x2=\"{x2}\" y1=\"{y1}\" y2=\"{y2}\"/>");
    }

    pub fn text(&mut self, class: &str, anchor: Anchor, [x, y]: [f64; 2], text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let (x, y, text) = (n(x), n(y), escape(text));
        let _ = write!(self.0, "<text class=\"{class}\"{anchor} x=\"{x}\" y=\"{y}\">{text}</text>");
    }

    /// A disc of this radius. A pointer over it shows `title`.
    pub fn circle(&mut self, class: &str, [x, y]: [f64; 2], radius: f64, title: &str) {
        let (x, y, title) = (n(x), n(y), escape(title));
        let _ = write!(
            self.0,
            "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{radius}\"><title>{title}</title></circle>"
        );
    }

    pub fn rect(&mut self, class: &str, [x, y]: [f64; 2], [width, height]: [f64; 2]) {
        let [x, y, width, height] = [x, y, width, height].map(n);
        let _ = write!(
            self.0,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
        );
    }

    /// A vertical grid line with a label below it.
    pub fn grid(&mut self, x: f64, [top, bottom]: [f64; 2], label: &str) {
        self.line("grid", [x, x], [top, bottom]);
        self.text("tick", Anchor::Middle, [x, bottom + 16.0], label);
    }
}

/// Formats a coordinate to a tenth of a pixel.
pub(super) fn n(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}
