//! Linear layers beside the copy bandwidth of the same GPU, by the GPU's own clock. Prints rows of a Markdown table.
//!
//!     cargo run --release -p kvist-cuda --example linear -- --inputs 4096 --outputs 14336 --encoding q8_0 --tokens 1,2,4,8
//!
//! `--warpgroups off` measures large layers without the tensor cores of warpgroups.
//!
//! A row has: GPU, encoding, inputs x outputs, tokens, microseconds of a layer, bytes of weights per second, bytes per second of
//! a copy, the share of the one in the other, operations per second.
//!
//! A layer alone would stay in the L2 cache, so the launches go through many of the same size, one after the other. All of them
//! are between two marks, behind copies that keep the GPU busy until the host has launched everything.
mod common;
use common::copy_rate;
use kvist_cuda::{CudaDevice, CudaDriver, Installation, Options as Opening, open};
use kvist_device::weights::Encoding;
use kvist_gpu::{BufferCopy, Driver, Halves, Linear, Product, Recorder, halves_bytes};
use kvist_testing::operations::encoded;
use std::error::Error;

/// Launches between two marks: as many as take this long, within these bounds.
const ROUND_NANOSECONDS: f64 = 20e6;
const LAUNCHES: [f64; 2] = [4.0, 100.0];
const ROUNDS: usize = 9;
/// Rows of weights that are random; the others repeat them.
const RANDOM_ROWS: usize = 64;

struct Options {
    gpu: Option<usize>,
    inputs: usize,
    outputs: usize,
    encoding: Encoding,
    tokens: Vec<u32>,
    /// Of all layers together: several times what the L2 cache holds.
    bytes: usize,
    copy_bytes: u64,
    deterministic: bool,
    /// Off: large layers without the tensor cores of warpgroups, to compare the two.
    warpgroups: bool,
}

fn encoding(name: &str) -> Result<Encoding, String> {
    let found = Encoding::RESIDENT.into_iter().find(|known| known.name().eq_ignore_ascii_case(name));
    let names = || Encoding::RESIDENT.map(|known| known.name()).join(", ");
    found.ok_or_else(|| format!("unknown encoding {name}: choose one of {}", names()))
}

fn on(value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{value} is neither `on` nor `off`")),
    }
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        gpu: None,
        inputs: 4096,
        outputs: 4096,
        encoding: Encoding::Q8_0,
        tokens: vec![1],
        bytes: 512 << 20,
        copy_bytes: 1 << 30,
        deterministic: false,
        warpgroups: Opening::default().warpgroups,
    };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--gpu" => options.gpu = Some(value.parse()?),
            "--inputs" => options.inputs = value.parse()?,
            "--outputs" => options.outputs = value.parse()?,
            "--encoding" => options.encoding = encoding(&value)?,
            "--tokens" => options.tokens = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--bytes" => options.bytes = value.parse()?,
            "--copy-bytes" => options.copy_bytes = value.parse::<u64>()? / 4 * 4,
            "--deterministic" => options.deterministic = value.parse()?,
            "--warpgroups" => options.warpgroups = on(&value)?,
            _ => return Err(format!("unknown option {name}").into()),
        }
    }
    Ok(options)
}

/// Layers of the same weights, enough of them that a cache does not hold them.
fn layers(gpu: &CudaDriver, options: &Options) -> Result<Vec<Linear<CudaDriver>>, Box<dyn Error>> {
    let Options { inputs, outputs, encoding, bytes, .. } = *options;
    let row = encoding.row_bytes(inputs).filter(|bytes| *bytes > 0);
    let row = row.ok_or_else(|| format!("{inputs} inputs are not whole blocks of {}", encoding.name()))?;
    let mut weights = encoded(encoding, RANDOM_ROWS.min(outputs), inputs, 1);
    weights = weights.into_iter().cycle().take(row * outputs).collect();
    let n = bytes.div_ceil(weights.len().max(1)).max(1);
    let layer =
        |_| Linear::new(gpu, "layer", encoding, (outputs, inputs), &weights, 1.0, None).map_err(Into::into);
    (0..n).map(layer).collect()
}

/// Nanoseconds of one layer for so many tokens.
fn time(
    gpu: &CudaDriver,
    layers: &[Linear<CudaDriver>],
    tokens: u32,
    busy_bytes: u64,
) -> Result<f64, Box<dyn Error>> {
    let (inputs, outputs) = (layers[0].inputs, layers[0].outputs);
    let x: Vec<u8> =
        (0..inputs * tokens).flat_map(|i| ((i * 7 % 31) as f32 / 16.0 - 1.0).to_le_bytes()).collect();
    let x = gpu.filled("inputs", &x)?;
    let out = gpu.buffer("outputs", u64::from(outputs) * u64::from(tokens) * 4)?;
    let (from, to) = (gpu.buffer("copy", busy_bytes)?, gpu.buffer("copy", busy_bytes)?);
    let bytes = halves_bytes(tokens as usize, inputs as usize).unwrap_or(0);
    let memory = Halves::new(gpu, bytes)?;
    let mut all = layers.iter().cycle();
    let mut recorder = Default::default();
    let mut round = |launches: usize| -> Result<f64, Box<dyn Error>> {
        for _ in 0..4 {
            let (from_byte, to_byte) = (0, 0);
            gpu.copy(
                &mut recorder,
                &BufferCopy { from: &from, from_byte, to: &to, to_byte, bytes: busy_bytes },
            );
        }
        // Layers with the same inputs share these: they are not part of the time.
        let halves = Halves::write(memory.as_ref(), gpu, &mut recorder, (&x, tokens), &[&layers[0]], None);
        gpu.mark(&mut recorder);
        for layer in all.by_ref().take(launches) {
            let product =
                Product { x: &x, layer, out: &out, n: tokens, cap: None, routes: None, added: false, halves };
            product.record(gpu, &mut recorder);
        }
        gpu.mark(&mut recorder);
        let submission = gpu.submit(&mut recorder, &[]);
        gpu.wait(&submission)?;
        let marks = gpu.marks(&submission)?;
        recorder.restart();
        Ok((marks[1] - marks[0]) / launches as f64)
    };
    round(1)?; // compiles
    let launches = (ROUND_NANOSECONDS / round(2)?).clamp(LAUNCHES[0], LAUNCHES[1]) as usize;
    let mut times = (0..ROUNDS).map(|_| round(launches)).collect::<Result<Vec<f64>, _>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let Options { deterministic, warpgroups, .. } = options;
    let opening = Opening { deterministic, warpgroups, ..Default::default() };
    let device: CudaDevice = open(&Installation::of_system(), options.gpu, opening)?;
    let gpu = device.driver();
    let copy = copy_rate(gpu, options.copy_bytes)?;
    let layers = layers(gpu, &options)?;
    let Options { inputs, outputs, encoding, .. } = options;
    let bytes = encoding.row_bytes(inputs).unwrap_or(0) * outputs;
    for tokens in options.tokens {
        let nanoseconds = time(gpu, &layers, tokens, options.copy_bytes)?;
        let rate = bytes as f64 / nanoseconds * 1e9;
        let operations = 2.0 * inputs as f64 * outputs as f64 * f64::from(tokens) / nanoseconds * 1e9;
        println!(
            "| {} | {} | {inputs}x{outputs} | {tokens} | {:.2} µs | {:.0} GB/s | {:.0} GB/s | {:.0} % | {:.2} TFLOP/s |",
            device.adapter(),
            encoding.name(),
            nanoseconds / 1e3,
            rate / 1e9,
            copy / 1e9,
            100.0 * rate / copy,
            operations / 1e12
        );
    }
    Ok(())
}
