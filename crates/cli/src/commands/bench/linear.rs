//! `kvist bench linear`: packed linear layers alone, over so many matrices that none stays in a processor cache.
use super::machine::{Machine, ReadLimit, Spread, Watch};
use super::measure::RunsArgs;
use super::shape::parse_lengths;
use crate::options::*;
use crate::{interrupt, json, output};
use kvist_cpu::linear::{ENCODINGS, Inputs, Matrix, row_multiple};
use kvist_device::weights::Encoding;
use serde::Serialize;
use std::time::Instant;

#[derive(clap::Args)]
#[command(mut_arg("runs", |runs| runs.default_value("7")))]
pub struct Args {
    /// Encodings by ggml's names: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, mxfp4, q2_K to q6_K, iq4_xs;
    /// and few, to which iq1 to iq3 and tq are converted
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_value = "q8_0,q4_0,bf16")]
    weights: Vec<String>,
    /// Outputs of the layer
    #[arg(long, default_value_t = 5632, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    outputs: u32,
    /// Inputs of the layer: a multiple of the block size, which is 32 or 256
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    inputs: u32,
    /// Tokens of a batch; one row for each
    #[arg(long, value_name = "T,T,…", default_value = "1,4,16,512", value_parser = parse_lengths)]
    tokens: std::vec::Vec<u32>,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    measure: RunsArgs,
}

/// Larger than any processor cache.
const BYTES: u64 = 256 << 20;

#[derive(Serialize)]
struct Row {
    version: u32,
    weights: &'static str,
    outputs: u32,
    inputs: u32,
    tokens: u32,
    /// One product.
    #[serde(flatten)]
    spread: Spread,
    bytes_read: u64,
    gb_per_s: f64,
    read_limit_gb_per_s: f64,
    share_of_limit: f64,
    /// Multiplications and additions, two per weight and token.
    gflop_per_s: f64,
    machine: Machine,
}

impl Row {
    fn show(&self, json: bool, first: bool) -> anyhow::Result<()> {
        if json {
            return output::show_json_line(self);
        }
        let Row { machine, weights, outputs, inputs, tokens, .. } = self;
        if first {
            output::show(&format!(
                "{machine}; {outputs} outputs of {inputs} inputs\n\n| weights | tokens | ms | read | of the limit | GFLOP/s |\n|---|--:|--:|--:|--:|--:|\n"
            ))?;
        }
        output::show(&format!(
            "| {weights} | {tokens} | {:.3} | {:.1} GB/s | {:.0} % | {:.0} |\n",
            self.spread.median_ms,
            self.gb_per_s,
            self.share_of_limit * 100.0,
            self.gflop_per_s
        ))
    }
}

/// The encoding of this name, whatever its case.
fn encoding(name: &str) -> anyhow::Result<Encoding> {
    let found = ENCODINGS.into_iter().find(|known| known.name().eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        let known = ENCODINGS.map(|encoding| encoding.name()).join(", ");
        wrong_usage(format!("--weights {name}: use one of {known}"))
    })
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let compute = args.compute.get()?;
    let chosen = args.weights.iter().map(|name| encoding(name)).collect::<anyhow::Result<Vec<_>>>()?;
    interrupt::listen();
    let mut first = true;
    for encoding in chosen {
        let name = encoding.name();
        let (outputs, inputs) = (args.outputs as usize, args.inputs as usize);
        let bytes = Matrix::resident_bytes(encoding, outputs, inputs).ok_or_else(|| {
            wrong_usage(format!("--inputs {inputs}: {name} needs whole blocks of {}", row_multiple(encoding)))
        })?;
        let tokens = args.tokens.iter().copied().max().unwrap_or(1) as u64;
        // The file, its packed copies, the inputs in all their forms, the outputs.
        let needed = (bytes * 2 + BYTES)
            .saturating_add(tokens.saturating_mul(4).saturating_mul(outputs as u64 + 4 * inputs as u64));
        if crate::memory::available().is_some_and(|free| needed > free) {
            anyhow::bail!(
                "{} are needed for these shapes: use fewer --tokens, --outputs or --inputs",
                Bytes(needed)
            );
        }
        // Small positive codes and scales: any bytes that decode to numbers will do.
        let row_bytes = encoding.row_bytes(inputs).unwrap_or(0); // whole blocks, as checked above
        let file = vec![0x11u8; outputs * row_bytes];
        let n = (BYTES / bytes + 1).min(64) as usize;
        let pack = |_| Matrix::pack(&compute, encoding, outputs, inputs, &file);
        let matrices = (0..n).map(pack).collect::<Result<Vec<_>, _>>()?;
        for tokens in &args.tokens {
            let x = vec![0.5f32; *tokens as usize * inputs];
            let mut out = vec![0.0f32; *tokens as usize * outputs];
            let mut forms = Inputs::default();
            let mut limit = ReadLimit::new(&compute, bytes * n as u64)?;
            let watch = Watch::start();
            // Large batches take long and are not limited by memory: use fewer matrices.
            let some = if *tokens >= 64 { &matrices[..1] } else { &matrices[..] };
            let runs = args.measure.measure(&compute, Some(&mut limit), quiet, || {
                let started = Instant::now();
                for matrix in some {
                    matrix.multiply(&compute, &mut forms.of(&x, inputs), &mut out);
                }
                Ok(Some(started.elapsed() / some.len() as u32))
            })?;
            let spread = Spread::of(&runs);
            let row = Row {
                version: json::VERSION,
                weights: name,
                outputs: args.outputs,
                inputs: args.inputs,
                tokens: *tokens,
                bytes_read: bytes,
                gb_per_s: bytes as f64 / spread.median_ms / 1e6,
                read_limit_gb_per_s: limit.rate() / 1e9,
                share_of_limit: limit.ms(bytes) / spread.median_ms,
                gflop_per_s: 2.0 * f64::from(*tokens) * (outputs * inputs) as f64 / spread.median_ms / 1e6,
                spread,
                machine: watch.machine(&compute),
            };
            row.show(args.measure.json, first)?;
            first = false;
            if interrupt::interrupted() {
                return Ok(());
            }
        }
    }
    Ok(())
}
