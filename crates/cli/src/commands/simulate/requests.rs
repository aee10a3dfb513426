//! The load: a trace, or a generated workload.
use crate::options::wrong_usage;
use clap::ValueHint;
use kvist_simulator::request::Request;
use kvist_simulator::trace::{Format, ReadOptions, Trace};
use kvist_simulator::workload::{Arrivals, Contents, Lengths, Workload};
use std::path::PathBuf;

const TRACE: &str = "Load: a trace";
const WORKLOAD: &str = "Load: drawn";

#[derive(clap::Args, Clone)]
pub struct RequestArgs {
    /// Read requests from this file: Mooncake, Azure, BurstGPT, Bailian or our own, plain, gzip or zstd
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = TRACE)]
    trace: Option<PathBuf>,
    /// Its format, if the first line does not show it: mooncake, azure, burstgpt, bailian, kvist
    #[arg(long, value_name = "FORMAT", value_parser = format, requires = "trace", help_heading = TRACE)]
    format: Option<Format>,
    /// Count bad rows and continue
    #[arg(long, requires = "trace", help_heading = TRACE)]
    lenient: bool,
    /// Only this many requests, from the first on
    #[arg(long, value_name = "N", requires = "trace", help_heading = TRACE)]
    limit: Option<usize>,
    /// Each turn of a chat arrives after the previous answer, instead of at the recorded time
    #[arg(long, requires = "trace", help_heading = TRACE)]
    follow_parents: bool,
    /// Number of requests to generate; the last chat or agent is cut off there
    #[arg(long, default_value_t = 1000, value_name = "N", conflicts_with = "trace", help_heading = WORKLOAD)]
    requests: usize,
    /// When requests, or whole chats, arrive: poisson:per_s=X, gamma:per_s=X,variation=X,
    /// on_off:per_s=X,on_s=X,off_s=X, deterministic:per_s=X, at_once
    #[arg(
        long, default_value = "poisson:per_s=2", value_name = "ARRIVALS", conflicts_with = "trace",
        help_heading = WORKLOAD
    )]
    arrivals: Arrivals,
    /// What requests share: chats:..., agents:..., prefixes:..., unknown (docs/traces.md)
    #[arg(
        long, default_value = "chats:least_turns=1,most_turns=8,think_s=20,system_tokens=512",
        value_name = "CONTENTS", conflicts_with = "trace", help_heading = WORKLOAD
    )]
    contents: Contents,
    /// Tokens of a request's own prompt, or that the user adds in a turn: deterministic:tokens=N, exponential:mean=N,
    /// lognormal:mean=N,variation=X, balanced:mean=N,variation=X, uniform:least=N,most=N
    #[arg(
        long, default_value = "lognormal:mean=400,variation=1.5", value_name = "LENGTHS", conflicts_with = "trace",
        help_heading = WORKLOAD
    )]
    prompt_tokens: Lengths,
    /// Tokens of an answer, likewise
    #[arg(
        long, default_value = "lognormal:mean=250,variation=1", value_name = "LENGTHS", conflicts_with = "trace",
        help_heading = WORKLOAD
    )]
    output_tokens: Lengths,
}

fn format(name: &str) -> Result<Format, String> {
    let known = || Format::ALL.map(Format::name).join(", ");
    Format::by_name(name).ok_or_else(|| format!("there is no such format: use one of {}", known()))
}

/// The requests, and a description of them.
pub struct Requests {
    /// For a trace, in the order of the file.
    pub list: Vec<Request>,
    /// For titles.
    pub name: String,
    /// True if generated from a seed.
    pub drawn: bool,
    pub remarks: Vec<String>,
}

impl Requests {
    /// Sorts by arrival; requests of the same moment keep the order of the file.
    pub fn in_order_of_arrival(mut self) -> Requests {
        self.list.sort_by_key(|request| request.arrival_ns);
        self
    }
}

impl RequestArgs {
    pub fn is_drawn(&self) -> bool {
        self.trace.is_none()
    }

    /// The requests for `seed`. A trace ignores the seed.
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
        let name =
            file.file_name().map_or_else(|| file.display().to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Requests { list: trace.requests, name, drawn: false, remarks })
    }

    fn draw(&self, seed: u64) -> anyhow::Result<Requests> {
        let workload = Workload {
            n_requests: self.requests,
            arrivals: self.arrivals,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            contents: self.contents.clone(),
        };
        let list = workload.generate(seed).map_err(|why| wrong_usage(why.to_string()))?;
        let kind = match self.contents {
            Contents::Unknown => "unrelated requests",
            Contents::Prefixes(_) => "requests with popular prefixes",
            Contents::Chats(_) => "requests of chats",
            Contents::Agents(_) => "requests of agents",
        };
        let name = format!("{} {kind}", list.len());
        Ok(Requests { list, name, drawn: true, remarks: Vec::new() })
    }
}
