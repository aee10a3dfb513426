//! `kvist bench`: measurements. Every row reports the machine, the number of runs and the limit it is compared with.
mod attention;
mod calibrate;
mod fork;
mod ladder;
mod layout;
mod linear;
mod machine;
mod measure;
mod passes;
mod plot;
mod predict;
mod rig;
mod rivals;
mod roofline;
mod shape;
mod speculate;
mod synthetic;
mod transfer;

use clap::Subcommand;

#[derive(Subcommand)]
pub enum Command {
    /// No cache, a concatenating cache, preallocated, int8, cross-layer sharing, both: what each step is worth
    Ladder(ladder::Args),
    /// Only attention, over a filled cache: one query, a chunk of a prompt, branches of a trunk, a tree
    Attention(attention::Args),
    /// Tokens per second of a model at a depth
    Decode(passes::DecodeArgs),
    /// Drafters in turns with plain decoding: tokens per pass, and the speedup
    Speculate(speculate::Args),
    /// Tokens per second of a prompt
    Prefill(passes::PrefillArgs),
    /// Attention of each dtype between the limits of memory and of arithmetic
    Roofline(roofline::Args),
    /// Draw what `just rivals` measured
    Rivals(rivals::Args),
    /// Only packed linear layers
    Linear(linear::Args),
    /// The cost of a fork, and of a step of all branches compared with a step of one
    Fork(fork::Args),
    /// The effect of row order and huge pages on reading
    Layout(layout::Args),
    /// Step costs of this machine and model, as a table for `kvist simulate --costs`
    Calibrate(calibrate::Args),
    /// A load served for real, compared with its simulation from such a table
    Predict(predict::Args),
    /// The cache of a model without the model: generated K and V through the real pools, growth by growth
    Synthetic(synthetic::Args),
    /// K and V from the host's memory to blocks on a GPU: packed, staged, copied and scattered
    Transfer(transfer::Args),
}

pub fn run(command: Command, quiet: bool) -> anyhow::Result<()> {
    match command {
        Command::Ladder(args) => ladder::run(args, quiet),
        Command::Attention(args) => attention::run(args, quiet),
        Command::Decode(args) => passes::decode(args, quiet),
        Command::Speculate(args) => speculate::run(args, quiet),
        Command::Prefill(args) => passes::prefill(args, quiet),
        Command::Roofline(args) => roofline::run(args, quiet),
        Command::Rivals(args) => rivals::run(args),
        Command::Linear(args) => linear::run(args, quiet),
        Command::Fork(args) => fork::run(args, quiet),
        Command::Layout(args) => layout::run(args, quiet),
        Command::Calibrate(args) => calibrate::run(args, quiet),
        Command::Predict(args) => predict::run(args, quiet),
        Command::Synthetic(args) => synthetic::run(args, quiet),
        Command::Transfer(args) => transfer::run(args, quiet),
    }
}
