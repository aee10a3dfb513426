//! `kvist simulate` as functions, for programs that carry this library. They take the same options as the command, and
//! write nothing to stdout and stderr.
use super::requests::Requests;
use super::{What, fleet, html, report, simulate as run_one, sweep as command, zero};
use crate::{options, output};
use clap::Parser;
use kvist_simulator::report::Report;
use kvist_simulator::run::Options;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why there is no result.
#[derive(Debug)]
pub enum NoResult {
    /// An option is wrong.
    WrongUsage(String),
    Failed(String),
    /// The caller stopped the run.
    Stopped,
}

/// The result of one run.
#[derive(Debug, Default)]
pub struct Simulated {
    /// What `--json` prints.
    pub report: String,
    /// What `kvist simulate` prints.
    pub text: String,
    /// What `--csv` writes. Empty with `--zero-service`. The page and the pictures are
    /// empty there too, and with `--workers`. With
    /// `--scale` there are no rows.
    pub requests_csv: String,
    /// What `--html` writes.
    pub page: String,
    /// What `--svg` writes: names without `.svg`, and contents.
    pub pictures: Vec<(String, String)>,
    /// Remarks on the load and on the options.
    pub remarks: Vec<String>,
}

#[derive(Parser)]
#[command(name = "simulate", no_binary_name = true)]
struct One {
    #[command(flatten)]
    what: What,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Parser)]
#[command(name = "sweep", no_binary_name = true)]
struct Sweep {
    #[command(flatten)]
    args: command::Args,
}

fn parse<T: Parser>(arguments: &[String]) -> Result<T, NoResult> {
    T::try_parse_from(arguments).map_err(|why| {
        if !why.use_stderr() {
            return NoResult::WrongUsage("--help is for the program: run `kvist simulate --help`".into());
        }
        let text = why.to_string();
        let first = text.split("\n\nUsage:").next().unwrap_or_default();
        let first = first.split("\n\nFor more information").next().unwrap_or_default();
        NoResult::WrongUsage(first.trim_start_matches("error: ").trim_end().to_owned())
    })
}

fn outcome<T>(done: anyhow::Result<T>, stop: &AtomicBool) -> Result<T, NoResult> {
    done.map_err(|error| match error {
        _ if stop.load(Ordering::Relaxed) => NoResult::Stopped,
        error if options::is_wrong_usage(&error) => NoResult::WrongUsage(output::sentence(&error)),
        error => NoResult::Failed(output::sentence(&error)),
    })
}

/// `kvist simulate` with these arguments, `--flag=value` each. The run ends early once `stop` is true.
pub fn simulate(arguments: &[String], stop: &Arc<AtomicBool>) -> Result<Simulated, NoResult> {
    let One { mut what, seed } = parse(arguments)?;
    what.stop = Some(stop.clone());
    outcome(result(&mut what, seed), stop)
}

/// `kvist simulate sweep` with these arguments. Returns the table as JSON; the files are in the folder of `--out`.
pub fn sweep(arguments: &[String], stop: &Arc<AtomicBool>) -> Result<String, NoResult> {
    let Sweep { args } = parse(arguments)?;
    outcome(command::quietly(args, stop.clone()), stop)
}

/// A fleet has no page and no pictures; a sweep has.
fn result_of_fleet(
    what: &What,
    requests: &Requests,
    seed: u64,
    remarks: Vec<String>,
) -> anyhow::Result<Simulated> {
    let keep_rows = what.fleet.scale() == 1; // a scaled load may have more requests than memory
    let mut run = fleet::simulate(what, &requests.list, &what.fleet_options(seed, keep_rows), &mut |_| ())?;
    fleet::describe(&mut run, what, requests, seed);
    let mut rows = Vec::new();
    report::write_csv(&mut rows, &run.rows)?;
    Ok(Simulated {
        report: serde_json::to_string(&run.report)?,
        text: super::show::fleet(&run.report),
        requests_csv: String::from_utf8(rows)?,
        remarks,
        ..Simulated::default()
    })
}

fn result(what: &mut What, seed: u64) -> anyhow::Result<Simulated> {
    what.read_inputs(true)?;
    let requests = what.requests.get(seed)?;
    let mut remarks = requests.remarks.clone();
    if what.zero.zero_service {
        let result = zero::replay(what, &requests.list)?;
        let text = super::show::zero_service(&result, &requests.name);
        let report = serde_json::to_string(&result)?;
        return Ok(Simulated { report, text, remarks, ..Simulated::default() });
    }
    let requests = requests.in_order_of_arrival();
    what.check(&requests.list)?;
    remarks.extend(what.schedule.remark(&requests.list));
    remarks.extend(what.beyond_measurements(&requests.list)?);
    if what.fleet.is_on() {
        return result_of_fleet(what, &requests, seed, remarks);
    }
    let options = Options { explain: true, watch: true, ..what.options(seed) };
    let done = run_one(what, &requests.list, &options, false, &mut |_| Ok(()), &mut |_| ())?;
    let mut record = done.record;
    what.describe_layers(&mut record.setting);
    record.setting.insert("load".to_owned(), requests.name.clone());
    if requests.drawn {
        record.setting.insert("seed".to_owned(), seed.to_string());
    }
    let summary = Report::of(&record, &what.objectives());
    let mut rows = Vec::new();
    report::write_csv(&mut rows, &record.requests)?;
    let drawn = html::Run { name: &what.schedule.schedule, record: &record, report: &summary };
    let page = html::Page { title: &requests.name, runs: vec![drawn], ..html::Page::default() };
    let pictures = page.pictures().into_iter().map(|picture| (picture.name, picture.svg));
    Ok(Simulated {
        report: serde_json::to_string(&summary)?,
        text: super::show::report(&summary),
        requests_csv: String::from_utf8(rows)?,
        page: page.render(),
        pictures: pictures.collect(),
        remarks,
    })
}
