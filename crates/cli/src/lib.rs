//! The `kvist` program, as a library, so that the Python package can carry it. Only text goes to stdout; summaries,
//! progress and logs go to stderr. Exit status: 0 success, 1 failed, 2 wrong usage.
#![forbid(unsafe_code)]

mod commands;
mod continuations;
mod interrupt;
mod json;
pub mod memory;
mod options;
mod output;
mod progress;
mod scoring;
mod source;

use clap::{Parser, Subcommand};
pub use commands::simulate::{NoResult, Simulated, simulate_with, sweep_with};
pub use options::Size;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::OnceLock;

/// A KV cache for large language models: run, chat, serve, simulate.
#[derive(Parser)]
#[command(name = "kvist", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log events (memory, loading) to stderr; give it twice for more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Write only errors to stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Continue a text, or answer a prompt
    Run(commands::run::Args),
    /// Chat; fork, switch and undo without copying the history
    Chat(commands::chat::Args),
    /// The memory that a model and its cache will take, before anything is loaded
    Plan(commands::plan::Args),
    /// The models on this machine: their names for --model, and whether they fit into its memory
    Models(commands::models::Args),
    /// The devices that models can run on, for --backend
    Devices(commands::devices::Args),
    /// What a quantised or windowed cache costs in quality, measured against a reference cache
    Eval(commands::eval::Args),
    /// Beginnings of prompts, computed once and shared by all programs on this machine
    #[command(subcommand)]
    Prefix(commands::prefix::Command),
    /// Logits of given tokens, or greedy continuations, for comparison with other runtimes
    Logits(commands::logits::Args),
    /// Serve the model over HTTP, as clients of the OpenAI API expect
    Serve(Box<commands::serve::Args>),
    /// Try a cache, a policy and a scheduler on a load under virtual time
    Simulate(Box<commands::simulate::Args>),
    /// Measurements
    #[command(subcommand)]
    Bench(commands::bench::Command),
}

impl Command {
    /// `--backend` of commands that have it, and how models are computed on it.
    fn backend(&self) -> Option<(&str, &options::ComputeArgs)> {
        match self {
            Command::Run(args) => Some((&args.cache.backend, &args.model.compute)),
            Command::Chat(args) => Some((&args.cache.backend, &args.model.compute)),
            Command::Plan(args) => Some((&args.cache.backend, &args.compute)),
            Command::Eval(args) => Some((&args.cache.backend, &args.model.compute)),
            Command::Logits(args) => Some((&args.cache.backend, &args.model.compute)),
            Command::Prefix(commands::prefix::Command::Freeze(args)) => {
                Some((&args.cache.backend, &args.model.compute))
            }
            Command::Serve(args) => Some((&args.backend, &args.model.compute)),
            Command::Models(_) | Command::Devices(_) | Command::Simulate(_) | Command::Bench(_) => None,
        }
    }
}

/// The file that holds this program, if it is not the running executable.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Says which file holds this program, if that is not the running executable: results that are kept on disk belong to it.
pub fn is_in(file: PathBuf) {
    let _ = PROGRAM.set(file); // a second call has the same file
}

/// Runs the program with these arguments, the first of which is its name, and returns the exit status. Call it once per
/// process: it starts the log, and listens for Ctrl-C.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(asked) => {
            let _ = asked.print(); // as clap's own `exit` does
            return if asked.use_stderr() { 2 } else { 0 };
        }
    };
    let quiet = cli.quiet;
    let serves = matches!(cli.command, Command::Serve(_));
    let done = log_to_stderr(cli.verbose, quiet, serves);
    let open =
        |(backend, compute): (_, &options::ComputeArgs)| options::use_backend(backend, &compute.get()?);
    let done = done.and_then(|()| cli.command.backend().map_or(Ok(()), open));
    let done = done.and_then(|()| match cli.command {
        Command::Run(args) => commands::run::run(args, quiet),
        Command::Chat(args) => commands::chat::run(args, quiet),
        Command::Plan(args) => commands::plan::run(args, quiet),
        Command::Models(args) => commands::models::run(args),
        Command::Devices(args) => commands::devices::run(args),
        Command::Prefix(command) => commands::prefix::run(command, quiet),
        Command::Eval(args) => commands::eval::run(args, quiet),
        Command::Logits(args) => commands::logits::run(args, quiet),
        Command::Serve(args) => commands::serve::run(*args, quiet),
        Command::Simulate(args) => commands::simulate::run(*args, quiet),
        Command::Bench(command) => commands::bench::run(command, quiet),
    });
    match done {
        Ok(()) => 0,
        // The reader of stdout closed the pipe (`| head`): this is not a failure, and prints no error.
        Err(error) if output::is_closed_pipe(&error) => 0,
        Err(error) => {
            output::note(&format!("kvist: {}", output::sentence(&error)));
            if options::is_wrong_usage(&error) { 2 } else { 1 }
        }
    }
}

/// Starts logging to stderr. `KVIST_LOG` takes the filters of `tracing`; `-v` is a shorthand.
fn log_to_stderr(verbose: u8, quiet: bool, serves: bool) -> anyhow::Result<()> {
    use tracing_subscriber::EnvFilter;
    // foyer, the library of the disk's tier, logs each damaged block with a backtrace, and so does kvist, in a line.
    let quiet_foyer = if verbose < 2 { ",foyer_storage=error" } else { "" };
    let default = match verbose {
        0 if quiet => "error",
        // One line for each request.
        0 if serves => "warn,kvist::server=info",
        // Hide warnings about refused memory: the program then ends with an error that says more.
        0 => "warn,kvist::memory=error",
        1 => "warn,kvist=info",
        _ => "debug",
    };
    let filter = match std::env::var("KVIST_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text).map_err(|e| {
            options::wrong_usage(format!("KVIST_LOG `{text}`: {e}; give a level, or target=level,..."))
        })?,
        _ => EnvFilter::new(format!("{default}{quiet_foyer}")),
    };
    // `tracing_subscriber` escapes control characters in log messages, as `output::note` does.
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(verbose > 0)
        .log_internal_errors(false); // printing to a stderr that cannot be written would panic
    // A server's log is read later or elsewhere, so it keeps timestamps.
    if serves {
        subscriber.init()
    } else {
        subscriber.without_time().init()
    }
    Ok(())
}
