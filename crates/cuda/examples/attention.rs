//! Decode attention beside the copy bandwidth of the same GPU, by the GPU's own clock. Prints rows of a Markdown table.
//!
//!     cargo run --release -p kvist-cuda --example attention -- --tokens 32768 --k f16 --v f16 --branches 8
//!
//! The shape is one layer of a Llama 3 8B: 32 query heads on 8 KV heads of 128. The kernels of attention run 20 times in one graph, as
//! they run in the layers of a decode step; `--alone true` launches each of them 20 times by itself. K and V of 32k tokens in f16
//! are larger than the L2 cache of any GPU; smaller ones are not, and would show the cache's bandwidth.
mod common;
use common::copy_rate;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{GroupId, LayerId, SeqId, Span, StepRequest};
use kvist_cuda::{CudaDevice, Installation, Options as Opening, open};
use kvist_device::*;
use std::error::Error;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const CHUNK: usize = 512;
const REPEATS: u32 = 20;
const KERNELS: [&str; 2] = ["attend", "merge"];

struct Options {
    gpu: Option<usize>,
    tokens: usize,
    k: Storage,
    v: Storage,
    branches: usize,
    copy_bytes: u64,
    deterministic: bool,
    alone: bool,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        gpu: None,
        tokens: 32768,
        k: Storage::F16,
        v: Storage::F16,
        branches: 1,
        copy_bytes: 1 << 30,
        deterministic: false,
        alone: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--gpu" => options.gpu = Some(value.parse()?),
            "--tokens" => options.tokens = value.parse()?,
            "--k" => options.k = value.parse()?,
            "--v" => options.v = value.parse()?,
            "--branches" => options.branches = value.parse::<usize>()?.max(1),
            "--deterministic" => options.deterministic = value.parse()?,
            "--alone" => options.alone = value.parse()?,
            "--copy-bytes" => options.copy_bytes = value.parse::<u64>()? / 4 * 4,
            _ => return Err(format!("unknown option {name}").into()),
        }
    }
    Ok(options)
}

/// Random numbers of which it matters only that they are not all alike.
fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Nanoseconds of attention in a step of one token for every branch of a trunk, and the bytes of K and V that lie under it.
fn attention(device: &CudaDevice, options: &Options) -> Result<(f64, u64), Box<dyn Error>> {
    let Options { tokens, k, v, branches, .. } = *options;
    let spec = PoolSpec {
        layout: Layout {
            n_heads: HEADS as u32,
            layers: vec![LayerSpec::new(GroupId(0), LayerId(0), KV_HEADS as u32, DIM as u32)],
        },
        k,
        v,
        capacity_cells: vec![],
        max_step_tokens: CHUNK as u32,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let capacity = u32::try_from(tokens + 16 * (branches + 2))?;
    let group =
        GroupSpec { capacity_tokens: capacity, visibility: Visibility::FULL, max_step_tokens: CHUNK as u32 };
    let registry = Registry::of(device.clone()).with(Box::new(device.clone()));
    let mut session = registry.session("cuda", "paged", &[group], &spec)?;
    const TRUNK: SeqId = SeqId(0);
    session.cache.sequences().ok_or("this kind of cache has no branches")?.seq_new(TRUNK)?;
    let (q, kv) = (noise(CHUNK * HEADS * DIM), noise(CHUNK * KV_HEADS * DIM));
    let mut out = vec![0.0; q.len()];
    let mut step = |spans: &[Span<'_>], n: usize| -> Result<(), Box<dyn Error>> {
        let heads = StridedShape::tokens_first(n, HEADS, DIM);
        let kv_heads = StridedShape::tokens_first(n, KV_HEADS, DIM);
        let rows = &kv[..n * KV_HEADS * DIM];
        let mut step = session.step(&StepRequest { spans })?;
        step.attend_rows(AttendRows {
            layer: LayerId(0),
            q: Rows::F32(&q[..n * HEADS * DIM], heads),
            kv: Some((Rows::F32(rows, kv_heads), Some(Rows::F32(rows, kv_heads)))),
            out: RowsMut::F32(&mut out[..n * HEADS * DIM], heads),
            scale: 1.0 / (DIM as f32).sqrt(),
            softcap: None,
            sinks: None,
        })?;
        step.commit()?;
        Ok(())
    };
    for first in (0..tokens).step_by(CHUNK) {
        let n = CHUNK.min(tokens - first);
        step(&[Span::chain(TRUNK, first as u32, n as u32)], n)?;
    }
    let all: Vec<SeqId> = (0..branches as u32).map(|i| SeqId(1 + i)).collect();
    for branch in &all {
        let mut sequences = session.cache.sequences().ok_or("this kind of cache has no branches")?;
        sequences.fork(TRUNK, *branch)?;
    }
    let gpu = device.driver();
    match options.alone {
        true => gpu.measure(REPEATS),
        false => gpu.measure_together(&KERNELS, REPEATS),
    }
    let spans: Vec<_> = all.iter().map(|branch| Span::chain(*branch, tokens as u32, 1)).collect();
    let mut decode = || -> Result<f64, Box<dyn Error>> {
        let heads = StridedShape::tokens_first(branches, HEADS, DIM);
        let kv_heads = StridedShape::tokens_first(branches, KV_HEADS, DIM);
        let rows = &kv[..branches * KV_HEADS * DIM];
        let mut step = session.step(&StepRequest { spans: &spans })?;
        step.attend_rows(AttendRows {
            layer: LayerId(0),
            q: Rows::F32(&q[..branches * HEADS * DIM], heads),
            kv: Some((Rows::F32(rows, kv_heads), Some(Rows::F32(rows, kv_heads)))),
            out: RowsMut::F32(&mut out[..branches * HEADS * DIM], heads),
            scale: 1.0 / (DIM as f32).sqrt(),
            softcap: None,
            sinks: None,
        })?;
        drop(step); // the same step again
        let times = gpu.measured()?;
        Ok(times.iter().filter(|time| KERNELS.contains(&time.kernel)).map(|time| time.nanoseconds).sum())
    };
    decode()?; // compiles
    let mut times = (0..9).map(|_| decode()).collect::<Result<Vec<f64>, _>>()?;
    times.sort_by(f64::total_cmp);
    gpu.measure(0);
    let cell = LayerSpec::new(GroupId(0), LayerId(0), KV_HEADS as u32, DIM as u32).cell_bytes(k, v)
        * KV_HEADS as u64;
    Ok((times[times.len() / 2], (tokens + branches) as u64 * cell))
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let opening = Opening { deterministic: options.deterministic, ..Default::default() };
    let device = open(&Installation::of_system(), options.gpu, opening)?;
    let copy = copy_rate(device.driver(), options.copy_bytes)?;
    let (nanoseconds, bytes) = attention(&device, &options)?;
    let Options { tokens, k, v, branches, .. } = options;
    let rate = bytes as f64 / nanoseconds * 1e9;
    println!(
        "| {} | {tokens} | {k} | {v} | {branches} | {:.1} µs | {:.0} GB/s | {:.0} GB/s | {:.0} % |",
        device.adapter(),
        nanoseconds / 1e3,
        rate / 1e9,
        copy / 1e9,
        100.0 * rate / copy
    );
    Ok(())
}
