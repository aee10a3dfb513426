//! Writes a Llama model, or a mixture of experts, of any size with random weights: speed does not depend on what the weights say.
mod shape;
mod vocab;
mod weights;
mod write;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use shape::Shape;
use std::path::PathBuf;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// 134M parameters: 12 layers, hidden 768, 12 heads of 64 with a KV head each
    A,
    /// 1.1G parameters: 22 layers, hidden 2048, 32 heads of 64 on 4 KV heads
    B,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A folder as Hugging Face has it
    Safetensors,
    /// One file
    Gguf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    /// The output in q6_K, or q8_0 if --hidden is no multiple of 256
    #[value(name = "q4_0")]
    Q4_0,
    /// The output in q6_K, or q8_0 if --hidden is no multiple of 256
    #[value(name = "q4_k")]
    Q4K,
    #[value(name = "q6_k")]
    Q6K,
    /// Linear layers in W8A8 of compressed-tensors, embedding and output in bf16; for --format safetensors
    Int8,
}

/// A Llama model with random weights, for measuring speed. The same seed makes the same model in either format.
#[derive(Debug, Parser)]
#[command(name = "random-model", version)]
struct Args {
    /// The sizes to start from; those below replace single ones
    #[arg(long, value_enum, default_value = "a")]
    preset: Preset,
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long)]
    hidden: Option<usize>,
    #[arg(long)]
    heads: Option<usize>,
    #[arg(long)]
    kv_heads: Option<usize>,
    #[arg(long)]
    head_dim: Option<usize>,
    /// Width of the MLP
    #[arg(long)]
    ff: Option<usize>,
    /// Experts of a layer, each an MLP of width --ff, for --format gguf
    #[arg(long)]
    experts: Option<usize>,
    /// Experts that each token uses
    #[arg(long)]
    experts_used: Option<usize>,
    #[arg(long)]
    vocab: Option<usize>,
    /// The longest text the model claims to be made for
    #[arg(long)]
    context: Option<usize>,
    #[arg(long, value_enum, default_value = "gguf")]
    format: Format,
    /// What embedding, matrices and output are stored in; norms are f32
    #[arg(long, value_enum, default_value = "f16")]
    dtype: Dtype,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A .gguf file or a folder, not there yet
    out: PathBuf,
}

impl Args {
    fn shape(&self) -> Shape {
        let base = match self.preset {
            Preset::A => shape::A,
            Preset::B => shape::B,
        };
        Shape {
            layers: self.layers.unwrap_or(base.layers),
            hidden: self.hidden.unwrap_or(base.hidden),
            heads: self.heads.unwrap_or(base.heads),
            kv_heads: self.kv_heads.unwrap_or(base.kv_heads),
            head_dim: self.head_dim.unwrap_or(base.head_dim),
            ff: self.ff.unwrap_or(base.ff),
            experts: self.experts.unwrap_or(base.experts),
            experts_used: self.experts_used.unwrap_or(base.experts_used),
            vocab: self.vocab.unwrap_or(base.vocab),
            context: self.context.unwrap_or(base.context),
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let shape = args.shape();
    shape.check()?;
    let millions = shape.parameters() as f64 / 1e6;
    match args.format {
        Format::Gguf => {
            let name = format!("random-{millions:.0}m");
            write::gguf(&shape, args.dtype, args.seed, &name, &args.out)?;
        }
        Format::Safetensors => write::safetensors(&shape, args.dtype, args.seed, &args.out)?,
    }
    println!("{}: {millions:.1} million parameters", args.out.display());
    Ok(())
}
