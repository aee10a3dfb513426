//! `kvist bench rivals`: plots the comparison that `bench/rivals/compare.py` wrote, as bars.
use super::plot;
use crate::options::*;
use anyhow::Context;
use clap::ValueHint;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The output of compare.py: bench/rivals.json
    #[arg(value_name = "FILE.json", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Plot kvist's speed relative to each rival, row by row
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    title: String,
    /// How many times as fast kvist is as each rival.
    times_as_fast: BTreeMap<String, f64>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let name = args.file.display();
    let text = std::fs::read_to_string(&args.file).with_context(|| format!("{name} cannot be read"))?;
    let rows: Vec<Row> = serde_json::from_str(&text)
        .with_context(|| format!("{name} is not a comparison: use what bench/rivals/compare.py wrote"))?;
    let good = |x: &f64| x.is_finite() && *x > 0.0;
    if let Some(row) = rows.iter().find(|row| !row.times_as_fast.values().all(good)) {
        return Err(wrong_usage(format!("{name}: `{}` has a ratio that is not above 0", row.title)));
    }
    let bars: Vec<(String, f64)> = rows
        .iter()
        .flat_map(|row| {
            row.times_as_fast.iter().map(move |(rival, times)| (format!("{}: {rival}", row.title), *times))
        })
        .collect();
    if bars.is_empty() {
        return Err(wrong_usage(format!("{name} contains no comparison")));
    }
    plot::write_bars(&args.plot, "kvist beside rivals", "times as fast", bars)
}
