//! Plots of measurements: lines over a logarithmic axis, a roofline, bars.
use crate::output;
use kuva::plot::{BarPlot, LinePlot, ScatterPlot};
use kuva::render::annotations::ReferenceLine;
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;
use std::path::Path;

/// A name, and its points.
pub type Line = (String, Vec<(f64, f64)>);

const COLOURS: [&str; 7] = ["#4c72b0", "#c44e52", "#55a868", "#dd8452", "#8172b3", "#444444", "#937860"];

fn line(colour: usize, (name, points): Line) -> Plot {
    let line = LinePlot::new().with_data(points).with_color(COLOURS[colour % COLOURS.len()]);
    Plot::Line(line.with_stroke_width(2.0).with_legend(name))
}

fn save(path: &Path, plots: Vec<Plot>, layout: Layout) -> anyhow::Result<()> {
    output::write_file(path, kuva::render_to_svg(plots, layout).as_bytes())
}

pub fn write(path: &Path, title: &str, x: &str, y: &str, lines: Vec<Line>) -> anyhow::Result<()> {
    let plots: Vec<Plot> = lines.into_iter().enumerate().map(|(i, points)| line(i, points)).collect();
    let layout =
        Layout::auto_from_plots(&plots).with_title(title).with_x_label(x).with_y_label(y).with_log_x();
    save(path, plots, layout)
}

/// The first `n_roofs` are lines, the others points; both axes are logarithmic.
pub fn write_roofline(path: &Path, title: &str, lines: Vec<Line>, n_roofs: usize) -> anyhow::Result<()> {
    let one = |(i, (name, points)): (usize, Line)| match i.checked_sub(n_roofs) {
        None => line([5, 4, 3, 6][i % 4], (name, points)),
        Some(i) => {
            let points = ScatterPlot::new().with_data(points).with_color(COLOURS[i % 3]).with_size(5.0);
            Plot::Scatter(points.with_legend(name))
        }
    };
    let plots: Vec<Plot> = lines.into_iter().enumerate().map(one).collect();
    let layout = Layout::auto_from_plots(&plots)
        .with_title(title)
        .with_x_label("operations per byte read")
        .with_y_label("GFLOP/s")
        .with_log_scale();
    save(path, plots, layout)
}

/// Horizontal bars, the first on top, with a line at 1.
pub fn write_bars(path: &Path, title: &str, x: &str, bars: Vec<(String, f64)>) -> anyhow::Result<()> {
    let height = 120.0 + 24.0 * bars.len() as f64;
    let plot = BarPlot::new().with_bars(bars.into_iter().rev()).with_color(COLOURS[0]).with_horizontal(true);
    let plots = vec![Plot::Bar(plot)];
    let layout = Layout::auto_from_plots(&plots)
        .with_title(title)
        .with_x_label(x)
        .with_width(900.0)
        .with_height(height)
        .with_reference_line(ReferenceLine::vertical(1.0));
    save(path, plots, layout)
}
