//! Plots with title and legend, as a section of the page or as a separate SVG file.
use super::escape;
use super::plot::N_COLORS;
use super::svg::{Anchor, Svg, n};
use std::fmt::Write;

/// A plot as a self-contained SVG file with a light background, for documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// File name: the title in lower case, with words joined by `-`.
    pub name: String,
    pub svg: String,
}

/// One pair of axes and its content.
pub(super) struct Panel {
    /// Heading above the panel; may be empty.
    pub name: String,
    /// Text for screen readers.
    pub alt: String,
    pub width: f64,
    pub height: f64,
    pub body: String,
}

/// Panels that belong together.
pub(super) struct Figure {
    title: String,
    about: String,
    /// Names with their colour indices.
    legend: Vec<(String, usize)>,
    panels: Vec<Panel>,
    columns: usize,
}

impl Figure {
    /// `None` if there are no panels.
    pub fn of(
        title: &str,
        about: &str,
        legend: impl IntoIterator<Item = (String, usize)>,
        panels: Vec<Panel>,
    ) -> Option<Figure> {
        let legend = legend.into_iter().collect();
        (!panels.is_empty()).then(|| Figure {
            title: title.into(),
            about: about.into(),
            legend,
            panels,
            columns: 1,
        })
    }

    /// Places two panels per row.
    pub fn in_pairs(self) -> Figure {
        Figure { columns: 2, ..self }
    }

    /// Renders the figure as a section of the page.
    pub fn html(&self) -> String {
        let mut content = String::new();
        if !self.legend.is_empty() {
            content += "<p class=\"legend\">";
            for (name, color) in &self.legend {
                let (color, name) = (color % N_COLORS, escape(name));
                let _ = write!(content, "<span><i class=\"c{color}\"></i>{name}</span>");
            }
            content += "</p>\n";
        }
        let (begin, end) = if self.columns > 1 { ("<div>", "</div>") } else { ("", "") };
        if self.columns > 1 {
            content += "<div class=\"pair\">";
        }
        for panel in &self.panels {
            content += begin;
            if !panel.name.is_empty() {
                let _ = write!(content, "<h3>{}</h3>", escape(&panel.name));
            }
            let (width, height) = (n(panel.width), n(panel.height));
            let _ = write!(
                content,
                "<div class=\"wide\"><svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">{}</svg></div>\n{end}",
                escape(&panel.alt),
                panel.body
            );
        }
        if self.columns > 1 {
            content += "</div>";
        }
        section_of(&escape(&self.title), &escape(&self.about), &content)
    }

    /// Renders the figure as a separate file.
    pub fn picture(&self) -> Picture {
        let (edge, gap) = (20.0, 28.0);
        let widest = self.panels.iter().map(|panel| panel.width).fold(0.0, f64::max);
        let columns = self.columns as f64;
        let width = edge * 2.0 + widest * columns + gap * (columns - 1.0);
        let mut body = Svg::default();
        body.text("title", Anchor::Start, [edge, 36.0], &self.title);
        let mut top = 56.0;
        if !self.legend.is_empty() {
            let mut x = edge;
            for (name, color) in &self.legend {
                // Letter widths depend on the viewer's font; this is slightly more than most need.
                let needed = 20.0 + 7.6 * name.chars().count() as f64;
                if x + needed > width - edge && x > edge {
                    (x, top) = (edge, top + 22.0);
                }
                let _ = write!(
                    body.0,
                    "<rect class=\"key c{}\" x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" rx=\"4\"/>",
                    color % N_COLORS,
                    n(x),
                    n(top)
                );
                body.text("label", Anchor::Start, [x + 19.0, top + 11.0], name);
                x += needed + 20.0;
            }
            top += 28.0;
        }
        for row in self.panels.chunks(self.columns) {
            let named = row.iter().any(|panel| !panel.name.is_empty());
            let below_name = top + if named { 26.0 } else { 0.0 };
            for (i, panel) in row.iter().enumerate() {
                let x = edge + i as f64 * (widest + gap);
                if !panel.name.is_empty() {
                    body.text("name", Anchor::Start, [x, top + 18.0], &panel.name);
                }
                let _ = write!(
                    body.0,
                    "<g transform=\"translate({} {})\">{}</g>",
                    n(x),
                    n(below_name),
                    panel.body
                );
            }
            top = below_name + row.iter().map(|panel| panel.height).fold(0.0, f64::max) + 8.0;
        }
        let height = top + 8.0;
        let alt = self.panels.first().map_or("", |panel| panel.alt.as_str());
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" role=\"img\" aria-label=\"{2}\">\n<style>\n{3}</style>\n<rect class=\"card\" width=\"{0}\" height=\"{1}\"/>\n{4}\n</svg>\n",
            n(width),
            n(height),
            escape(alt),
            style(),
            body.0
        );
        let name = self.title.to_lowercase().split_whitespace().collect::<Vec<_>>().join("-");
        Picture { name, svg }
    }
}

/// The page's light colours as literal values, without `paint-order`, because not every SVG viewer supports CSS
/// variables and similar features.
fn style() -> String {
    let sheet = include_str!("style.css");
    let color = |name: &str| {
        let begin = sheet.find(&format!("--{name}: ")).map_or(sheet.len(), |at| at + name.len() + 4);
        sheet[begin..].split(';').next().unwrap_or_default()
    };
    let (ink, soft, faint, rule, card) =
        (color("ink"), color("soft"), color("faint"), color("rule"), color("card"));
    let mut style = format!(
        "text {{ font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif; }}\n\
         .card {{ fill: {card}; }} .title {{ fill: {ink}; font-size: 21px; font-weight: 600; }} .name {{ fill: {soft}; font-size: 14px; font-weight: 600; }}\n\
         .grid {{ stroke: {rule}; }} .axis {{ stroke: {faint}; }} .tick {{ fill: {faint}; font-size: 12px; }} .label {{ fill: {soft}; font-size: 13px; }}\n\
         .line {{ fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }} .area {{ fill-opacity: .62; }}\n\
         .dot {{ fill: {card}; stroke-width: 2; }} .interval {{ stroke-width: 7; stroke-opacity: .28; stroke-linecap: round; }}\n\
         .level {{ stroke: {soft}; stroke-dasharray: 5 4; }} .waiting {{ stroke: {faint}; stroke-width: 1.4; }}\n"
    );
    for i in 0..N_COLORS {
        let c = color(&format!("c{i}"));
        let _ = writeln!(
            style,
            ".line.c{i}, .dot.c{i}, .interval.c{i} {{ stroke: {c}; }} .area.c{i}, .bar.c{i}, .key.c{i} {{ fill: {c}; }}"
        );
    }
    style
}

/// A section of the page with HTML content.
pub(super) fn section_of(title: &str, about: &str, content: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n<p class=\"about\">{about}</p>\n{content}\n</section>\n")
}
