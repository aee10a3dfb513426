//! `kvist simulate arena`: compares a load in contiguous handles and in a paged cache: moves, refusals, wasted memory.
use super::requests::RequestArgs;
use super::{show, spec};
use crate::options::wrong_usage;
use crate::output;
use clap::ValueEnum;
use kvist_simulator::arena::{self, Replayed, Setting};
use kvist_simulator::report::VERSION;
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

#[derive(clap::Args)]
#[command(
    after_help = "No request waits, nothing is shared, and computing takes no time: docs/arena.md. Example:\n  \
    kvist simulate arena --trace conversation_trace.jsonl --capacity-blocks 20000"
)]
pub struct Args {
    #[command(flatten)]
    requests: RequestArgs,
    /// Blocks of every layout
    #[arg(long, value_name = "N", help_heading = "Layouts")]
    capacity_blocks: u32,
    /// Tokens per block
    #[arg(long, default_value_t = 16, value_name = "N", help_heading = "Layouts")]
    block_tokens: u32,
    /// Allocators of the arena, and paged [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', help_heading = "Layouts")]
    layouts: Vec<String>,
    /// Space that the handle of a new sequence reserves
    #[arg(long, value_enum, default_value_t = Reserve::Prompt, help_heading = "Layouts")]
    reserve: Reserve,
    /// Time between two tokens of an answer
    #[arg(
        long, default_value = "20ms", value_name = "TIME", value_parser = spec::duration, help_heading = "Layouts"
    )]
    token_time: Duration,
    /// Seed of the workload: same seed, same bytes
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Print one JSON document on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Reserve {
    /// Its prompt: the handle must grow
    Prompt,
    /// Prompt and answer, as if its length were known
    Whole,
}

#[derive(Serialize)]
struct Table {
    version: u32,
    load: String,
    block_tokens: u32,
    capacity_blocks: u32,
    token_ns: u64,
    reserve: arena::Reserve,
    layouts: Vec<Replayed>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let setting = Setting {
        block_tokens: args.block_tokens,
        capacity_blocks: args.capacity_blocks,
        token_ns: u64::try_from(args.token_time.as_nanos()).unwrap_or(u64::MAX),
        reserve: match args.reserve {
            Reserve::Prompt => arena::Reserve::Prompt,
            Reserve::Whole => arena::Reserve::Whole,
        },
    };
    let names = match &args.layouts[..] {
        [] => arena::layouts().map(str::to_owned).collect(),
        names => names.to_vec(),
    };
    // Check the arguments before a trace is read.
    for name in &names {
        arena::replay(&[], name, &setting).map_err(|why| wrong_usage(why.to_string()))?;
    }
    let requests = args.requests.get(args.seed)?;
    if !quiet {
        requests.remarks.iter().for_each(|remark| output::note(remark));
    }
    let layouts: Result<Vec<Replayed>, _> =
        names.iter().map(|name| arena::replay(&requests.list, name, &setting)).collect();
    let Setting { block_tokens, capacity_blocks, token_ns, reserve } = setting;
    let load = requests.name;
    let table =
        Table { version: VERSION, load, block_tokens, capacity_blocks, token_ns, reserve, layouts: layouts? };
    if args.json { output::show_json(&table) } else { output::show(&text(&table)) }
}

/// (label, how to format its value)
type Line = (&'static str, fn(&Replayed) -> String);

fn text(table: &Table) -> String {
    let mut text = format!(
        "{}; a token every {} ms, no request waits\n{} blocks of {} tokens; handles for {}\n\n",
        table.load,
        table.token_ns as f64 / 1e6,
        table.capacity_blocks,
        table.block_tokens,
        match table.reserve {
            arena::Reserve::Prompt => "the prompt, which grow",
            arena::Reserve::Whole => "prompt and answer",
        }
    );
    // Writing to a `String` does not fail.
    let _ = write!(text, "{:<34}", "");
    table.layouts.iter().for_each(|layout| text += &format!("{:>12}", layout.layout));
    text.push('\n');
    let lines: [Line; 14] = [
        ("requests", |r| r.requests.to_string()),
        ("finished", |r| r.finished.to_string()),
        ("turned away", |r| r.turned_away.to_string()),
        ("  though enough blocks were free", |r| r.turned_away_with_room.to_string()),
        ("cut short", |r| r.cut_short.to_string()),
        ("  though a block was free", |r| r.cut_short_with_room.to_string()),
        ("handles grown in place", |r| r.grown_in_place.to_string()),
        ("handles moved", |r| r.moved.to_string()),
        ("blocks copied", |r| r.blocks_copied.to_string()),
        ("sequences, mean", |r| format!("{:.1}", r.mean_requests)),
        ("blocks used, mean", |r| format!("{:.0}", r.mean_used_blocks)),
        ("blocks used, at most", |r| r.peak_used_blocks.to_string()),
        ("internal fragmentation", |r| show::percent(r.internal_fragmentation)),
        ("external fragmentation", |r| show::percent(r.external_fragmentation)),
    ];
    for (name, show) in lines {
        let _ = write!(text, "{name:<34}");
        table.layouts.iter().for_each(|layout| text += &format!("{:>12}", show(layout)));
        text.push('\n');
    }
    text
}
