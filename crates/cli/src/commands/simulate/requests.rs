//! What arrives: a trace, or a workload that is drawn.
use super::spec::{self, ArrivalShape};
use crate::options::wrong_usage;
use clap::{ValueEnum, ValueHint};
use kvist_simulator::request::Request;
use kvist_simulator::trace::{Format, ReadOptions, Trace};
use kvist_simulator::workload::{Agents, Chats, Contents, Lengths, Prefixes, Workload};
use std::path::PathBuf;

const TRACE: &str = "Load: a trace";
const WORKLOAD: &str = "Load: drawn";

#[derive(clap::Args, Clone)]
pub struct RequestArgs {
    /// Requests of this file: Mooncake, Azure, BurstGPT, Bailian or our own, plain, gzip or zstd
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = TRACE)]
    trace: Option<PathBuf>,
    /// Its format, if the first line does not tell: mooncake, azure, burstgpt, bailian, kvist
    #[arg(long, value_name = "FORMAT", value_parser = format, requires = "trace", help_heading = TRACE)]
    format: Option<Format>,
    /// Count bad rows and go on
    #[arg(long, requires = "trace", help_heading = TRACE)]
    lenient: bool,
    /// The first so many requests
    #[arg(long, value_name = "N", requires = "trace", help_heading = TRACE)]
    limit: Option<usize>,
    /// Let turns of a chat wait for the answer before, instead of arriving when they did
    #[arg(long, requires = "trace", help_heading = TRACE)]
    follow_parents: bool,
    /// How requests share what they say
    #[arg(long, value_enum, default_value_t = Sharing::Chats, conflicts_with = "trace", help_heading = WORKLOAD)]
    workload: Sharing,
    /// Requests to draw
    #[arg(long, default_value_t = 1000, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    requests: usize,
    /// Chats, agents or single requests that arrive per second
    #[arg(long, default_value_t = 1.0, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    rate: f64,
    /// poisson, even, gamma:variation=X, on-off:on_s=X,off_s=X, at-once
    #[arg(long, default_value = "poisson", value_name = "SHAPE", conflicts_with = "trace", help_heading = WORKLOAD)]
    arrivals: ArrivalShape,
    /// Tokens a user adds: N, exponential:mean=N, uniform:least=N,most=N, lognormal:mean=N,variation=X,
    /// hyperexponential:mean=N,variation=X
    #[arg(
        long, default_value = "lognormal:mean=400,variation=1.5", value_name = "LENGTHS", value_parser = spec::lengths,
        conflicts_with = "trace", help_heading = WORKLOAD
    )]
    prompt_tokens: Lengths,
    /// Tokens of an answer, likewise
    #[arg(
        long, default_value = "lognormal:mean=250,variation=1", value_name = "LENGTHS", value_parser = spec::lengths,
        conflicts_with = "trace", help_heading = WORKLOAD
    )]
    output_tokens: Lengths,
    /// Tokens that all chats or agents begin with, or of each prefix
    #[arg(long, default_value_t = 500, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    system_tokens: u32,
    /// Turns of a chat, as lengths are given
    #[arg(
        long, default_value = "uniform:least=1,most=8", value_name = "LENGTHS", value_parser = spec::lengths,
        conflicts_with = "trace", help_heading = WORKLOAD
    )]
    turns: Lengths,
    /// Mean time that a user thinks between turns
    #[arg(
        long, default_value = "20s", value_name = "TIME", value_parser = spec::duration, conflicts_with = "trace",
        help_heading = WORKLOAD
    )]
    think: std::time::Duration,
    /// Agents that each answer starts
    #[arg(long, default_value_t = 4, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    fan_out: u32,
    /// Generations of agents below the first
    #[arg(long, default_value_t = 2, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    depth: u32,
    /// Prefixes to choose from
    #[arg(long, default_value_t = 100, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    prefixes: u32,
    /// How much more popular the first prefix is: popularity falls with rank to this power
    #[arg(long, default_value_t = 1.0, value_name = "X", conflicts_with = "trace", help_heading = WORKLOAD)]
    zipf: f64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Sharing {
    /// Turns that grow
    Chats,
    /// Trees of requests that begin like their parents
    Agents,
    /// A few prompts that many begin with
    Prefixes,
    /// Nothing in common
    Unknown,
}

fn format(name: &str) -> Result<Format, String> {
    let known = || Format::ALL.map(Format::name).join(", ");
    Format::by_name(name).ok_or_else(|| format!("no format is called so: take one of {}", known()))
}

/// What arrives, and what to say about it.
pub struct Requests {
    pub list: Vec<Request>,
    /// For titles.
    pub name: String,
    /// From a seed?
    pub drawn: bool,
    pub remarks: Vec<String>,
}

/// Ids of drawn content: fine enough for any block size that is a power of two.
const TOKENS_PER_ID: u32 = 16;

impl RequestArgs {
    pub fn is_drawn(&self) -> bool {
        self.trace.is_none()
    }

    /// The requests of `seed`, in order of arrival. A trace has no seed.
    pub fn get(&self, seed: u64) -> anyhow::Result<Requests> {
        let Some(file) = &self.trace else { return self.draw(seed) };
        let options = ReadOptions {
            format: self.format,
            lenient: self.lenient,
            limit: self.limit,
            follow_parents: self.follow_parents,
        };
        let trace = Trace::read(file, &options)?;
        let mut remarks = Vec::new();
        if trace.skipped.rows > 0 {
            remarks.push(format!("{} rows were skipped:", trace.skipped.rows));
            remarks.extend(trace.skipped.first.iter().map(|why| format!("  {why}")));
        }
        if trace.failed_rows > 0 {
            remarks.push(format!("{} rows are of requests that failed, and left out", trace.failed_rows));
        }
        let name = file.file_name().map_or_else(|| file.display().to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Requests { list: trace.into_arrival_order(), name, drawn: false, remarks })
    }

    fn draw(&self, seed: u64) -> anyhow::Result<Requests> {
        let (system_tokens, tokens_per_id) = (self.system_tokens, TOKENS_PER_ID);
        let contents = match self.workload {
            Sharing::Chats => Contents::Chats(Chats {
                turns: self.turns,
                think_s: self.think.as_secs_f64(),
                system_tokens,
                tokens_per_id,
            }),
            Sharing::Agents => {
                Contents::Agents(Agents { fan_out: self.fan_out, depth: self.depth, system_tokens, tokens_per_id })
            }
            Sharing::Prefixes => Contents::Prefixes(Prefixes {
                n_prefixes: self.prefixes,
                exponent: self.zipf,
                prefix_tokens: system_tokens,
                own_prompt: true,
                tokens_per_id,
            }),
            Sharing::Unknown => Contents::Unknown,
        };
        let workload = Workload {
            n_requests: self.requests,
            arrivals: self.arrivals.at_rate(self.rate),
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            contents,
        };
        let list = workload.generate(seed).map_err(|why| wrong_usage(why.to_string()))?;
        let kind = match self.workload {
            Sharing::Chats => "chats",
            Sharing::Agents => "agents",
            Sharing::Prefixes => "requests with popular prefixes",
            Sharing::Unknown => "unrelated requests",
        };
        let name = format!("{kind}, {} arriving per second, {} requests", self.rate, list.len());
        Ok(Requests { list, name, drawn: true, remarks: Vec::new() })
    }
}
