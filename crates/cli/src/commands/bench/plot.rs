//! One plot for every measurement: lines over a logarithmic axis.
use crate::output;
use kuva::plot::LinePlot;
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;
use std::path::Path;

/// A name, and its points.
pub type Line = (String, Vec<(f64, f64)>);

pub fn write(path: &Path, title: &str, x: &str, y: &str, lines: Vec<Line>) -> anyhow::Result<()> {
    const COLOURS: [&str; 6] = ["#4c72b0", "#c44e52", "#55a868", "#dd8452", "#8172b3", "#444444"];
    let line = |(i, (name, points)): (usize, Line)| {
        let line = LinePlot::new().with_data(points).with_color(COLOURS[i % COLOURS.len()]);
        Plot::Line(line.with_stroke_width(2.0).with_legend(name))
    };
    let plots: Vec<Plot> = lines.into_iter().enumerate().map(line).collect();
    let layout =
        Layout::auto_from_plots(&plots).with_title(title).with_x_label(x).with_y_label(y).with_log_x();
    output::write_file(path, kuva::render_to_svg(plots, layout).as_bytes())
}
