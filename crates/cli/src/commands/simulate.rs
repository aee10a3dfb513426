//! `kvist simulate`: what a cache, a policy and a scheduler do to a load, before there is a machine to try it on.
mod blocks;
mod costs;
mod requests;
mod schedule;
mod show;
mod spec;
mod sweep;

use crate::options::wrong_usage;
use crate::{output, progress};
use anyhow::Context;
use blocks::BlockArgs;
use clap::{Subcommand, ValueEnum, ValueHint};
use costs::CostArgs;
use kvist_simulator::html;
use kvist_simulator::report::{self, Objectives, Report};
use kvist_simulator::request::Request;
use kvist_simulator::run::{self, Options, Part, Recorder, Run};
use kvist_simulator::zero_service::{self, BlockStream};
use requests::{RequestArgs, Requests};
use schedule::ScheduleArgs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a trace it draws chats. Examples:\n  \
        kvist simulate --hardware h100-sxm --shape llama-3.1-8b --arrivals poisson:per_s=8 --html report.html\n  \
        kvist simulate --trace conversation_trace.jsonl --capacity-blocks 200000 --slo-ttft 2s\n  \
        kvist simulate --trace conversation_trace.jsonl --zero-service --policy lru --capacity-blocks 10000 --json\n  \
        kvist simulate sweep --policies lru,lfu --capacities 10000,100000,inf --out sweep"
)]
pub struct Args {
    #[command(subcommand)]
    sweep: Option<Sweep>,
    #[command(flatten)]
    what: What,
    #[command(flatten)]
    show: ShowArgs,
    /// Seed of the workload: same seed, same bytes
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Let serving take no time: the trace against the eviction policy alone, outside the rules of a prefix index
    #[arg(long)]
    zero_service: bool,
    /// In which order a request touches its blocks, with --zero-service
    #[arg(long, value_enum, default_value_t = TouchOrder::Reverse, requires = "zero_service")]
    touch_order: TouchOrder,
}

#[derive(Subcommand)]
enum Sweep {
    /// Policies x capacities x schedulers x seeds, on all cores, resumable
    Sweep(Box<sweep::Args>),
}

/// What is simulated: shared with the sweep.
#[derive(clap::Args, Clone)]
pub struct What {
    #[command(flatten)]
    requests: RequestArgs,
    #[command(flatten)]
    blocks: BlockArgs,
    #[command(flatten)]
    schedule: ScheduleArgs,
    #[command(flatten)]
    costs: CostArgs,
    /// Promised time to the first token: 2s, 500ms
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = "Objectives")]
    slo_ttft: Option<Duration>,
    /// Promised time per token after the first
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = "Objectives")]
    slo_tpot: Option<Duration>,
}

impl What {
    pub fn objectives(&self) -> Objectives {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Objectives { ttft_s: seconds(self.slo_ttft), tpot_s: seconds(self.slo_tpot) }
    }
}

#[derive(clap::Args)]
struct ShowArgs {
    /// One JSON document on stdout
    #[arg(long, help_heading = "Results")]
    json: bool,
    /// One row per request
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Results")]
    csv: Option<PathBuf>,
    /// One page with plots, complete in itself
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Results")]
    html: Option<PathBuf>,
    /// Everything that arrived, was decided and happened to blocks, as JSON lines
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Results")]
    record: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum TouchOrder {
    /// Tail to head: tails are first in line for eviction
    Reverse,
    /// Head to tail
    Forward,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    if let Some(Sweep::Sweep(sweep)) = args.sweep {
        return sweep::run(*sweep, quiet);
    }
    let requests = args.what.requests.get(args.seed)?;
    if !quiet {
        requests.remarks.iter().for_each(|remark| output::note(remark));
    }
    if args.zero_service {
        return zero_service(&args, &requests);
    }
    let objectives = args.what.objectives();
    let watched = args.show.html.is_some();
    let done = {
        let bar = progress::bar("requests", requests.list.len() as u64, quiet);
        let mut recording = args.show.record.as_deref().map(output::FileInParts::create).transpose()?;
        let mut record = |lines: &str| match &mut recording {
            Some(file) => file.write(lines.as_bytes()),
            None => Ok(()),
        };
        let options = Options { explain: true, watch: watched, ..args.what.options() };
        let done = simulate(
            &args.what,
            &requests.list,
            &options,
            args.show.record.is_some(),
            &mut record,
            &mut |n| {
                bar.set_position(n as u64);
            },
        )?;
        bar.finish_and_clear();
        if let Some(file) = recording {
            file.finish()?;
        }
        done
    };
    let mut record = done.record;
    record.setting.insert("load".to_owned(), requests.name.clone());
    if requests.drawn {
        record.setting.insert("seed".to_owned(), args.seed.to_string());
    }
    let report = Report::of(&record, &objectives);
    if let Some(file) = &args.show.csv {
        let mut rows = Vec::new();
        report::write_csv(&mut rows, &record.requests).context("cannot write rows")?;
        output::write_file(file, &rows)?;
    }
    if let Some(file) = &args.show.html {
        let run = html::Run { name: "", record: &record, report: &report };
        let page = html::Page { title: &requests.name, runs: vec![run], ..html::Page::default() };
        output::write_file(file, page.render().as_bytes())?;
    }
    if args.show.json { output::show_json(&report) } else { output::show(&show::report(&report)) }
}

impl What {
    pub fn options(&self) -> Options {
        Options { scheduler: self.schedule.config(), max_new: self.schedule.max_new(), ..Options::default() }
    }
}

/// One run over fresh bookkeeping.
pub fn simulate(
    what: &What,
    requests: &[Request],
    options: &Options,
    recorded: bool,
    record: &mut dyn FnMut(&str) -> anyhow::Result<()>,
    progress: &mut dyn FnMut(usize),
) -> anyhow::Result<Run> {
    let cost = what.costs.get()?;
    let cache = what.blocks.cache(requests, what.costs.cache_tokens()?)?;
    let mut failed = None;
    let mut sink = |_: Part, lines: &str| {
        if failed.is_none() {
            failed = record(lines).err();
        }
    };
    let sink: Option<&mut Recorder<'_>> = if recorded { Some(&mut sink) } else { None };
    let done = run::run(requests, cache, &*cost, options, sink, progress)
        .map_err(|why| wrong_usage(why.to_string()))?;
    failed.map_or(Ok(done), Err)
}

fn zero_service(args: &Args, requests: &Requests) -> anyhow::Result<()> {
    for (given, flag) in
        [(&args.show.csv, "--csv"), (&args.show.html, "--html"), (&args.show.record, "--record")]
    {
        if given.is_some() {
            return Err(wrong_usage(format!(
                "{flag} does not go with --zero-service, where nothing takes time: take --json"
            )));
        }
    }
    let blocks = &args.what.blocks;
    let stream = BlockStream::of(&requests.list, blocks.block_tokens)?;
    let order = match args.touch_order {
        TouchOrder::Reverse => zero_service::TouchOrder::Reverse,
        TouchOrder::Forward => zero_service::TouchOrder::Forward,
    };
    let (policy, parameters) = (&blocks.policy, blocks.parameters()?);
    let result = zero_service::replay(&stream, policy, &parameters, blocks.capacity_blocks.blocks(), order)
        .map_err(|why| wrong_usage(why.to_string()))?;
    if args.show.json {
        return output::show_json(&result);
    }
    output::show(&show::zero_service(&result, &requests.name))?;
    std::io::stdout().flush().context("cannot write to stdout")
}
