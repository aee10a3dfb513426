//! `kvist bench`: measurements.
mod ladder;

use clap::Subcommand;

#[derive(Subcommand)]
pub enum Command {
    /// No cache, a concatenating cache, preallocated, int8, cross-layer sharing, both: what each step is worth
    Ladder(ladder::Args),
}

pub fn run(command: Command, quiet: bool) -> anyhow::Result<()> {
    match command {
        Command::Ladder(args) => ladder::run(args, quiet),
    }
}
