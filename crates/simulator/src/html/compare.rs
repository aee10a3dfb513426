//! Comparison by name: one row per name, one mark per figure. For names without a numeric axis, such as schedulers.
use super::picture::{Figure, Panel};
use super::plot::N_COLORS;
use super::scale::{Scale, Unit};
use super::svg::{Anchor, Svg};
use crate::statistics::Estimate;

/// Several quantities of the same names, one panel each.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    pub title: String,
    /// A sentence below the title.
    pub about: String,
    /// From top to bottom.
    pub names: Vec<String>,
    /// Quantities without marks are left out.
    pub quantities: Vec<Quantity>,
}

/// One quantity, with a value for each name.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantity {
    pub title: String,
    /// Label of its axis.
    pub label: String,
    pub unit: Unit,
    /// `[names, marks]`, such as a median and a high percentile. The last mark is filled, the others are rings. Empty
    /// if there is nothing to measure.
    pub marks: Vec<Vec<Estimate>>,
}

const WIDTH: f64 = 490.0;
const ROW: f64 = 32.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 44.0;
/// Width of the column in which the figures are written.
const FIGURES: f64 = 132.0;
/// Assumed width of a letter, slightly more than most need.
const LETTER: f64 = 7.2;

impl Comparison {
    /// `None` if there are no marks.
    pub(super) fn figure(&self) -> Option<Figure> {
        let panels = self.quantities.iter().filter_map(|quantity| quantity.panel(&self.names));
        Figure::of(&self.title, &self.about, [], panels.collect()).map(Figure::in_pairs)
    }
}

impl Quantity {
    fn scale(&self) -> Option<Scale> {
        let marks = || self.marks.iter().flatten();
        let max = marks().map(|m| m.mean + m.half_width.unwrap_or(0.0)).max_by(f64::total_cmp)?;
        let min = marks().map(|m| m.mean).min_by(f64::total_cmp)?;
        // Values that differ by an order of magnitude get a logarithmic axis. It has no zero, so all must be above 0.
        if self.unit == Unit::Seconds && min > 0.0 && max > 8.0 * min {
            let low = marks().map(|m| m.mean - m.half_width.unwrap_or(0.0)).filter(|low| *low > min / 2.0);
            return Some(Scale::log(low.fold(min, f64::min), max, self.unit));
        }
        Some(Scale::linear(0.0, if max > 0.0 { max } else { 1.0 }, self.unit))
    }

    fn panel(&self, names: &[String]) -> Option<Panel> {
        let scale = self.scale()?;
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let left = (LETTER * longest as f64 + 14.0).clamp(40.0, 190.0);
        let width = WIDTH - left - FIGURES;
        let bottom = TOP + ROW * names.len() as f64;
        let px = |value: f64| left + width * scale.at(value);
        let mut body = Svg::default();
        for tick in scale.ticks((width / 70.0) as usize + 1) {
            body.grid(px(tick), [TOP, bottom], &self.unit.show(tick));
        }
        body.line("axis", [left, left + width], [bottom, bottom]);
        body.text("label", Anchor::End, [left + width, bottom + 36.0], &self.label);
        for (row, (name, marks)) in names.iter().zip(&self.marks).enumerate() {
            let (y, color) = (TOP + ROW * (row as f64 + 0.5), row % N_COLORS);
            body.text("label", Anchor::End, [left - 10.0, y + 4.0], name);
            for (mark, half) in marks.iter().filter_map(|mark| Some((mark, mark.half_width?))) {
                let ends = [px(mark.mean - half), px(mark.mean + half)];
                body.line(&format!("interval c{color}"), ends, [y, y]);
            }
            if let [first, .., last] = &marks[..] {
                body.line(&format!("line c{color}"), [px(first.mean), px(last.mean)], [y, y]);
            }
            for (i, mark) in marks.iter().enumerate() {
                let class = if i + 1 == marks.len() { "bar" } else { "dot" };
                let interval = mark.half_width.map(|half| format!(" ± {}", self.unit.show(half)));
                let title = format!("{name}: {}{}", self.unit.show(mark.mean), interval.unwrap_or_default());
                body.circle(&format!("{class} c{color}"), [px(mark.mean), y], 4.5, &title);
            }
            let figures: Vec<String> = marks.iter().map(|mark| self.unit.show(mark.mean)).collect();
            body.text("label", Anchor::End, [WIDTH - 4.0, y + 4.0], &figures.join(" · "));
        }
        Some(Panel {
            name: self.title.clone(),
            alt: format!("{}, for each of {}", self.title, names.join(", ")),
            width: WIDTH,
            height: bottom + BOTTOM,
            body: body.0,
        })
    }
}
