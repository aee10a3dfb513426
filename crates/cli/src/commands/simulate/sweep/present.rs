//! The results of a sweep as text, as CSV, and as plots.
use super::{Row, Table};
use crate::commands::simulate::spec::Capacity;
use crate::options::Size;
use kvist_simulator::html::{Comparison, Curve, Plot, Point, Quantity, Unit};
use kvist_simulator::statistics::Estimate;
use std::collections::BTreeSet;
use std::path::Path;

fn figure(row: &Row, name: &str) -> String {
    match row.figures.get(name) {
        None => "-".to_owned(),
        Some(Estimate { mean, half_width: Some(half), .. }) => format!("{mean:.4} ±{half:.4}"),
        Some(Estimate { mean, .. }) => format!("{mean:.4}"),
    }
}

const SHOWN: [(&str, &str); 7] = [
    ("token_hit_ratio", "token hits"),
    ("reused_token_ratio", "hits and loads"),
    ("ttft_mean_s", "TTFT mean s"),
    ("ttft_p99_s", "TTFT p99 s"),
    ("tpot_mean_s", "TPOT mean s"),
    ("goodput_requests_per_s", "goodput/s"),
    ("computed_token_imbalance", "most over mean"),
];

/// The figures that matter most, and where the page is.
pub fn text(table: &Table, out: &Path) -> String {
    let mut text = format!("{}\n\n{:<10}{:<11}{:>12}", table.load, "scheduler", "policy", "blocks");
    if table.has_tier_sizes() {
        text += &format!("{:>12}", "last tier");
    }
    if table.has_fleets() {
        text += &format!("{:>9} {:<14}", "workers", "routing");
    }
    let has = |name: &str| table.rows.iter().any(|row| row.figures.contains_key(name));
    let shown: Vec<(&str, &str)> = SHOWN.into_iter().filter(|(name, _)| has(name)).collect();
    shown.iter().for_each(|(_, title)| text += &format!("{title:>20}"));
    text.push('\n');
    for row in &table.rows {
        text += &format!("{:<10}{:<11}{:>12}", row.schedule, row.policy, row.capacity);
        if let Some(size) = &row.tier_size {
            text += &format!("{size:>12}");
        }
        if let Some(fleet) = &row.fleet {
            text += &format!("{:>9} {:<14}", fleet.workers, fleet.routing);
        }
        shown.iter().for_each(|(name, _)| text += &format!("{:>20}", figure(row, name)));
        text.push('\n');
    }
    if table.rows.iter().any(|row| row.seeds > 1) {
        text += "± is the 95% interval over seeds\n";
    }
    text + &format!("{}\n", out.join("sweep.html").display())
}

/// A line per row, after a line of column names.
pub fn csv(table: &Table) -> String {
    let names: BTreeSet<&String> = table.rows.iter().flat_map(|row| row.figures.keys()).collect();
    let tier_sizes = table.has_tier_sizes();
    let mut text = "schedule,policy,capacity_blocks".to_owned();
    text += if tier_sizes { ",tier_size" } else { "" };
    text += if table.has_fleets() { ",workers,routing,seeds" } else { ",seeds" };
    names.iter().for_each(|name| text += &format!(",{name},{name}_half_width"));
    text.push('\n');
    for row in &table.rows {
        text += &format!("{},{},{}", row.schedule, row.policy, row.capacity);
        row.tier_size.iter().for_each(|size| text += &format!(",{size}"));
        row.fleet.iter().for_each(|fleet| text += &format!(",{},{}", fleet.workers, fleet.routing));
        text += &format!(",{}", row.seeds);
        for name in &names {
            let cell = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
            let estimate = row.figures.get(*name);
            text +=
                &format!(",{},{}", cell(estimate.map(|e| e.mean)), cell(estimate.and_then(|e| e.half_width)));
        }
        text.push('\n');
    }
    text
}

/// (figure, title, a sentence, label of the y axis, its unit)
const PLOTS: [(&str, &str, &str, &str, Unit); 4] = [
    (
        "token_hit_ratio",
        "Hit ratio against capacity",
        "Hit ratio of a cache of this size. Where a curve flattens, more memory no longer pays off.",
        "prompt tokens found in the cache",
        Unit::Percent,
    ),
    (
        "ttft_p90_s",
        "Time to first token against capacity",
        "Nine of ten requests waited at most this long for their first token.",
        "time to first token, p90",
        Unit::Seconds,
    ),
    (
        "tpot_p90_s",
        "Time per output token against capacity",
        "Nine of ten requests wrote at least this fast.",
        "time per output token, p90",
        Unit::Seconds,
    ),
    (
        "goodput_requests_per_s",
        "Goodput against capacity",
        "Requests that met every objective; without objectives, all that finished.",
        "requests per second",
        Unit::Count,
    ),
];

/// (title, label of the axis, its unit, figures)
const COMPARED: [(&str, &str, Unit, &[&str]); 6] = [
    ("Time to first token", "arrival to first token", Unit::Seconds, &["ttft_p50_s", "ttft_p99_s"]),
    (
        "Time per output token",
        "mean of a request, after its first",
        Unit::Seconds,
        &["tpot_p50_s", "tpot_p99_s"],
    ),
    ("End to end", "arrival to last token", Unit::Seconds, &["end_to_end_p50_s", "end_to_end_p99_s"]),
    ("Time in queue", "arrival to first admission", Unit::Seconds, &["queue_p50_s", "queue_p99_s"]),
    ("Goodput", "requests per second that met every objective", Unit::Count, &["goodput_requests_per_s"]),
    ("Hit ratio", "prompt tokens found in the cache", Unit::Percent, &["token_hit_ratio"]),
];

impl Table {
    fn has_tier_sizes(&self) -> bool {
        self.rows.iter().any(|row| row.tier_size.is_some())
    }
    fn has_fleets(&self) -> bool {
        self.rows.iter().any(|row| row.fleet.is_some())
    }
    fn has_fleet_sizes(&self) -> bool {
        let size = |row: &Row| row.fleet.as_ref().map(|fleet| fleet.workers);
        self.rows.iter().any(|row| size(row) != size(&self.rows[0]))
    }
    fn has_several(&self, of: fn(&Row) -> &str) -> bool {
        self.rows.iter().any(|row| of(row) != of(&self.rows[0]))
    }
    /// The name of a row: what differs between rows, of these.
    fn name_of(&self, row: &Row, parts: &[fn(&Row) -> &str]) -> String {
        let parts = parts.iter().filter(|of| self.has_several(**of)).map(|of| of(row));
        parts.collect::<Vec<_>>().join(", ")
    }
}

/// All rows side by side. `None` if capacities differ, or if there is only one row.
pub fn comparison(table: &Table) -> Option<Comparison> {
    let curves = table.has_several(|row| &row.capacity) || table.has_tier_sizes() || table.has_fleet_sizes();
    if table.rows.len() < 2 || curves {
        return None;
    }
    let name = |row: &Row| {
        let name = table.name_of(row, &[|row| &row.schedule, routing, |row| &row.policy]);
        if name.is_empty() { row.policy.clone() } else { name }
    };
    let quantities = COMPARED.iter().map(|(title, label, unit, figures)| Quantity {
        title: (*title).to_owned(),
        label: (*label).to_owned(),
        unit: *unit,
        marks: table
            .rows
            .iter()
            .map(|row| figures.iter().filter_map(|figure| row.figures.get(*figure).copied()).collect())
            .collect(),
    });
    let intervals = table.rows.iter().any(|row| row.seeds > 1);
    let shade = if intervals { " The shade behind a mark is its 95% interval over seeds." } else { "" };
    Some(Comparison {
        title: "Side by side".to_owned(),
        about: format!("Of times, the ring is the median and the disc the 99th percentile.{shade}"),
        names: table.rows.iter().map(name).collect(),
        quantities: quantities.collect(),
    })
}

fn routing(row: &Row) -> &str {
    row.fleet.as_ref().map_or("", |fleet| &fleet.routing)
}

/// Curves over the number of workers: one for each routing policy, capacity, policy and scheduler.
fn plots_over_fleets(table: &Table) -> Vec<Plot> {
    let curves = |figure: &str| {
        let mut curves: Vec<Curve> = Vec::new();
        for row in &table.rows {
            let parts: [fn(&Row) -> &str; 4] =
                [routing, |row| &row.policy, |row| &row.schedule, |row| &row.capacity];
            let name = table.name_of(row, &parts);
            let name = if name.is_empty() { routing(row).to_owned() } else { name };
            let (Some(fleet), Some(estimate)) = (&row.fleet, row.figures.get(figure)) else { continue };
            add_point(&mut curves, name, f64::from(fleet.workers), *estimate);
        }
        curves
    };
    let imbalance = (
        "computed_token_imbalance",
        "Imbalance against capacity",
        "The tokens that the busiest worker computed, over the mean of all workers. At 1 all computed the same.",
        "most over mean",
        Unit::Count,
    );
    let plots = PLOTS.into_iter().chain([imbalance]).map(|(name, title, about, y_label, unit)| Plot {
        title: title.replace("capacity", "the number of workers"),
        about: about.replace(
            "a cache of this size. Where a curve flattens, more memory no longer pays off.",
            "all workers together.",
        ),
        x_label: "workers".to_owned(),
        y_label: y_label.to_owned(),
        unit,
        curves: curves(name),
        level: None,
    });
    plots.collect()
}

/// Adds a point to the curve of this name, in order of `x`.
fn add_point(curves: &mut Vec<Curve>, name: String, x: f64, estimate: Estimate) {
    let point = Point { x, y: estimate.mean, half_width: estimate.half_width };
    match curves.iter_mut().find(|curve| curve.name == name) {
        Some(curve) => {
            curve.points.push(point);
            curve.points.sort_by(|a, b| a.x.total_cmp(&b.x));
        }
        None => curves.push(Curve { name, points: vec![point] }),
    }
}

/// Curves over the size of the last tier: one for each fleet, capacity, policy and scheduler.
fn plots_over_tiers(table: &Table) -> Vec<Plot> {
    let parts: [fn(&Row) -> &str; 4] = [routing, |row| &row.policy, |row| &row.schedule, |row| &row.capacity];
    let curves = |figure: &str| {
        let mut curves: Vec<Curve> = Vec::new();
        for row in &table.rows {
            let workers = row.fleet.as_ref().filter(|_| table.has_fleet_sizes());
            let workers = workers.map(|fleet| format!("{} workers", fleet.workers));
            let name = table.name_of(row, &parts);
            let name = workers.into_iter().chain(Some(name).filter(|name| !name.is_empty()));
            let name = name.collect::<Vec<_>>().join(", ");
            let name = if name.is_empty() { row.policy.clone() } else { name };
            let size = row.tier_size.as_ref().and_then(|size| size.parse::<Size>().ok());
            let (Some(size), Some(estimate)) = (size, row.figures.get(figure)) else { continue };
            add_point(&mut curves, name, size.0 as f64 / f64::from(1u32 << 30), *estimate);
        }
        curves
    };
    // A level belongs to one curve.
    let mut endless = table.rows.iter().filter(|row| row.tier_size.as_deref() == Some("inf"));
    let endless = endless.next().filter(|_| endless.next().is_none());
    let reused = (
        "reused_token_ratio",
        "Reuse against the size of the last tier",
        "Prompt tokens that were found in the cache or loaded from a tier. Where a curve flattens, more room no longer pays off.",
        "prompt tokens not computed",
        Unit::Percent,
    );
    let plots = [reused].into_iter().chain(PLOTS.into_iter().skip(1));
    let plots = plots.map(|(name, title, about, y_label, unit)| Plot {
        title: title.replace("capacity", "the size of the last tier"),
        about: about.to_owned(),
        x_label: "size of the last tier in GiB".to_owned(),
        y_label: y_label.to_owned(),
        unit,
        curves: curves(name),
        level: endless.and_then(|row| Some(("without bound".to_owned(), row.figures.get(name)?.mean))),
    });
    plots.collect()
}

/// The blocks of a row's cache, of which `auto` stands for so many; `None` without bound.
fn blocks(row: &Row, auto: Option<u32>) -> Option<u32> {
    match row.capacity.parse() {
        Ok(Capacity::Blocks(n)) => Some(n),
        Ok(Capacity::Hardware) => auto,
        Ok(Capacity::Endless) | Err(_) => None,
    }
}

/// Curves over capacity, over the number of workers, or over the size of a tier. `auto`: the blocks that this capacity
/// stands for; `None` without bound.
pub fn plots(table: &Table, auto: Option<u32>) -> Vec<Plot> {
    if table.has_tier_sizes() {
        return plots_over_tiers(table);
    }
    if table.has_fleet_sizes() {
        return plots_over_fleets(table);
    }
    let curves = |figure: &str| {
        let mut curves: Vec<Curve> = Vec::new();
        for row in &table.rows {
            let name = table.name_of(row, &[routing, |row| &row.policy, |row| &row.schedule]);
            let name = if name.is_empty() { row.policy.clone() } else { name };
            let (Some(x), Some(estimate)) = (blocks(row, auto), row.figures.get(figure)) else { continue };
            add_point(&mut curves, name, x.into(), *estimate);
        }
        curves
    };
    // Without a bound nothing is evicted, so all policies give the same result. Schedulers and routers still differ.
    let several = table.has_several(|row| &row.schedule) || table.has_several(routing);
    let endless = table.rows.iter().find(|row| blocks(row, auto).is_none()).filter(|_| !several);
    let plots = PLOTS.iter().map(|(name, title, about, y_label, unit)| Plot {
        title: (*title).to_owned(),
        about: (*about).to_owned(),
        x_label: "capacity in blocks".to_owned(),
        y_label: (*y_label).to_owned(),
        unit: *unit,
        curves: curves(name),
        level: endless.and_then(|row| Some(("without bound".to_owned(), row.figures.get(*name)?.mean))),
    });
    plots.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::simulate::sweep::FleetCell;

    fn row(routing: Option<&str>, capacity: &str, hits: f64) -> Row {
        let estimate = Estimate { n: 1, mean: hits, half_width: None };
        Row {
            schedule: "fcfs".into(),
            policy: "lru".into(),
            capacity: capacity.into(),
            tier_size: None,
            fleet: routing.map(|routing| FleetCell { workers: 2, routing: routing.into() }),
            seeds: 1,
            figures: [("token_hit_ratio".to_owned(), estimate)].into(),
        }
    }

    /// Its name and its points.
    type Drawn = (String, Vec<(f64, f64)>);

    fn hits(rows: Vec<Row>, auto: Option<u32>) -> (Vec<Drawn>, Option<f64>) {
        let plots = plots(&Table { version: 1, load: "load".into(), rows }, auto);
        let points = |curve: &Curve| curve.points.iter().map(|point| (point.x, point.y)).collect();
        let curves = plots[0].curves.iter().map(|curve| (curve.name.clone(), points(curve))).collect();
        (curves, plots[0].level.as_ref().map(|(_, level)| *level))
    }

    /// The points of all routers were joined by one line, which went up and down at each capacity.
    #[test]
    fn routers_have_curves_of_their_own() {
        let rows = ["10", "20", "inf"].into_iter().zip(1..).flat_map(|(capacity, at)| {
            [row(Some("one"), capacity, f64::from(at)), row(Some("other"), capacity, f64::from(10 * at))]
        });
        let curve = |name: &str, of: f64| (name.to_owned(), vec![(10.0, of), (20.0, 2.0 * of)]);
        assert_eq!(hits(rows.collect(), None), (vec![curve("one", 1.0), curve("other", 10.0)], None));
    }

    #[test]
    fn what_fits_into_the_machine_is_a_point_of_the_curve() {
        let rows = || vec![row(None, "10", 1.0), row(None, "auto", 3.0), row(None, "20", 2.0)];
        let curve = |points: &[(f64, f64)]| vec![("lru".to_owned(), points.to_vec())];
        assert_eq!(hits(rows(), Some(30)), (curve(&[(10.0, 1.0), (20.0, 2.0), (30.0, 3.0)]), None));
        // Of a machine whose memory is unknown.
        assert_eq!(hits(rows(), None), (curve(&[(10.0, 1.0), (20.0, 2.0)]), Some(3.0)));
    }
}
