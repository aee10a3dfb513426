//! Measures the way of K and V that the host computed: packed, staged, copied and scattered to blocks, beside a step that
//! computes or in turns with it.
//!
//! Nothing here is needed when K and V are computed on the device. It is the way of blocks that come from the host's
//! memory or from disk, through the same [`Lane`](crate::Lane). A step's rows go in parts, so that the host packs one while the device
//! copies the one before.
mod path;

use crate::driver::{Args, BufferCopy, Driver, HostMemory};
use crate::kernels::{Kernel, Routed, encoding_number};
use kvist_device::DeviceError;
use kvist_device::weights::Encoding;
use path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where the rows of a step are before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsFrom {
    /// The host has computed them, and packs them into this memory.
    Host(HostMemory),
    /// They lie in pinned memory as a block, like those of the tier in RAM: the device copies them, and the host packs nothing.
    Blocks,
}

/// What a step transfers, and how.
#[derive(Clone, Copy, Debug)]
pub struct TransferCase {
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Tokens whose K and V arrive in a step.
    pub tokens: u32,
    /// Tokens per block of the page table.
    pub block_tokens: u32,
    pub from: RowsFrom,
    /// Whether the next step's rows are packed and copied while a step computes.
    pub overlap: bool,
    /// Matrix products of a step's computation ([`MeasureTransfers::unit`]).
    pub compute: u32,
}

impl TransferCase {
    /// Bytes of a step: K and V in f16, of all layers.
    pub fn bytes(&self) -> u64 {
        let row = u64::from(self.layers) * u64::from(self.kv_heads) * u64::from(self.head_dim);
        4u64.saturating_mul(row).saturating_mul(self.tokens.into())
    }
}

/// Beginning and end, since the first step began.
pub type Span = (Duration, Duration);

/// When a part of a step's rows moved. What happened on the device is missing where it has no clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartSpans {
    /// The host makes rows of f16 and orders them as a block; where the API allows it in the memory that the device reads. Empty for blocks.
    pub pack: Span,
    /// The host copies them to memory that the device reads, unless they are there, and submits.
    pub stage: Span,
    /// The device copies the part. Empty if kernels read the host's memory, and where the API copies by itself.
    pub copy: Option<Span>,
    /// A kernel writes the rows to their cells.
    pub scatter: Option<Span>,
}

/// When a step did what.
#[derive(Clone, Debug, Default)]
pub struct StepSpans {
    /// Of its rows, in their order. A part is copied while the next one is packed.
    pub parts: Vec<PartSpans>,
    /// When the host knew that the rows had arrived.
    pub arrived: Duration,
    /// Missing where the device has no clock.
    pub compute: Option<Span>,
}

impl StepSpans {
    /// From the beginning of the first part until the rows have arrived.
    pub fn transfer(&self) -> Span {
        (self.parts.first().map_or(self.arrived, |part| part.pack.0), self.arrived)
    }
}

/// Steps that were measured.
#[derive(Clone, Debug)]
pub struct MeasuredSteps {
    /// Of each step: from its beginning to the next one's.
    pub times: Vec<Duration>,
    pub spans: Vec<StepSpans>,
}

/// Rows and columns of the matrix of a step's computation.
const COMPUTE: u32 = 1024;

/// A measurement of any GPU.
pub trait MeasureTransfers {
    /// The GPU's name.
    fn adapter(&self) -> &str;

    /// The time of one product of a step's computation.
    ///
    /// # Errors
    /// The device has failed.
    fn unit(&self) -> Result<Duration, DeviceError>;

    /// Bytes per second of the link: the fastest of several copies of so many bytes of pinned memory to the device.
    ///
    /// # Errors
    /// There is no memory, or the device has failed.
    fn link(&self, bytes: u64, runs: u32) -> Result<f64, DeviceError>;

    /// Runs steps: `warmups` that do not count, then `runs`.
    ///
    /// # Errors
    /// There is no memory, the device has no host memory of this kind, or it has failed.
    fn steps(&self, case: &TransferCase, warmups: u32, runs: u32) -> Result<MeasuredSteps, DeviceError>;
}

/// The buffers of a measurement.
#[derive(Debug)]
pub struct Measurement<D: Driver> {
    gpu: Arc<D>,
    weights: D::Buffer,
    x: D::Buffer,
    y: D::Buffer,
}

/// Times of the device's clock, as times of the host's.
struct Epoch {
    began: Instant,
    /// What the device's clock shows when the host's shows `began`, at the earliest.
    device: Option<f64>,
}

impl Epoch {
    fn host(&self, from: Instant, to: Instant) -> Span {
        (from.duration_since(self.began), to.duration_since(self.began))
    }
    /// The device's clock has another zero. Its last mark was passed before the host had waited for it, and the tightest
    /// such bound of all steps places it.
    fn learn(&mut self, marks: &[f64], waited: Instant) {
        let Some(last) = marks.last() else { return };
        let zero = last - waited.duration_since(self.began).as_nanos() as f64;
        self.device = Some(self.device.map_or(zero, |known| known.max(zero)));
    }
    fn device(&self, marks: &[f64], at: usize) -> Option<Span> {
        let zero = self.device?;
        let time = |ns: f64| Duration::from_nanos((ns - zero).max(0.0) as u64);
        Some((time(*marks.get(at)?), time(*marks.get(at + 1)?)))
    }
}

impl<D: Driver> Measurement<D> {
    /// # Errors
    /// There is no memory on the device.
    pub fn new(gpu: &Arc<D>) -> Result<Self, DeviceError> {
        let row = |bytes: u32| u64::from(bytes * COMPUTE);
        Ok(Measurement {
            weights: gpu.buffer("weights", row(2 * COMPUTE))?,
            x: gpu.buffer("activations", row(4))?,
            y: gpu.buffer("activations", row(4))?,
            gpu: gpu.clone(),
        })
    }

    /// Records the computation of a step: products of a matrix of 1,024 × 1,024 in f16 with a vector, one after the other.
    fn compute(&self, recorder: &mut D::Recorder, n: u32) {
        let encoding = encoding_number(Encoding::F16).unwrap_or(0);
        let kernel = Kernel::Matmul { encoding, tokens: 1, routed: Routed::No };
        // As `Product` has them: no softcap, bias or experts; a row of the result for each row of `x`.
        let args = Args::new(&[COMPUTE / 4, 0, 0, COMPUTE, COMPUTE, 0, COMPUTE, 1]).f32(1.0);
        let args = args.f32(0.0).u32(0).u32(0).u32(1).f32(1.0);
        let outputs = self.gpu.product_tile(&kernel).0;
        self.gpu.mark(recorder);
        for i in 0..n {
            let (x, y) = if i % 2 == 0 { (&self.x, &self.y) } else { (&self.y, &self.x) };
            let buffers = [Some(&self.weights), Some(x), None, Some(y), None];
            self.gpu.record(recorder, &kernel, &buffers, args, [COMPUTE.div_ceil(outputs), 1, 1]);
        }
        self.gpu.mark(recorder);
    }
}

impl<D: Driver> MeasureTransfers for Measurement<D> {
    fn adapter(&self) -> &str {
        &self.gpu.limits().adapter
    }

    fn unit(&self) -> Result<Duration, DeviceError> {
        const N: u32 = 50;
        let mut recorder = D::Recorder::default();
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let began = Instant::now();
            self.compute(&mut recorder, N);
            let submission = self.gpu.submit(&mut recorder, &[]);
            self.gpu.wait(&submission)?;
            best = best.min(began.elapsed() / N);
        }
        Ok(best)
    }

    fn link(&self, bytes: u64, runs: u32) -> Result<f64, DeviceError> {
        let from = self.gpu.host_buffer("a measured copy", bytes, HostMemory::Pinned)?;
        let to = self.gpu.buffer("a measured copy", bytes)?;
        let mut recorder = D::Recorder::default();
        let mut best = f64::INFINITY;
        for _ in 0..runs.max(1) {
            let began = Instant::now();
            self.gpu.mark(&mut recorder);
            let copy = BufferCopy { from: &from, from_byte: 0, to: &to, to_byte: 0, bytes };
            self.gpu.copy(&mut recorder, &copy);
            self.gpu.mark(&mut recorder);
            let submission = self.gpu.submit(&mut recorder, &[]);
            self.gpu.wait(&submission)?;
            let host = began.elapsed().as_nanos() as f64;
            let marks = self.gpu.marks(&submission)?;
            let device = marks.first().zip(marks.last()).map(|(from, to)| to - from);
            best = best.min(device.filter(|ns| *ns > 0.0).unwrap_or(host));
        }
        Ok(bytes as f64 / (best / 1e9))
    }

    fn steps(&self, case: &TransferCase, warmups: u32, runs: u32) -> Result<MeasuredSteps, DeviceError> {
        let mut path = Path::new(&self.gpu, case)?;
        let mut recorder = D::Recorder::default();
        let n = warmups + runs;
        let mut epoch = Epoch { began: Instant::now(), device: None };
        let mut starts = Vec::new();
        let mut steps = Vec::new();
        let mut next = None;
        for step in 0..n {
            starts.push(Instant::now());
            let started = match next.take() {
                Some(started) => started,
                None => path.transfer(&epoch, step)?,
            };
            // A step computes with its rows: they have arrived before.
            let mut parts = Vec::with_capacity(started.len());
            for (spans, job) in started {
                let moved = path.wait(job)?;
                epoch.learn(&moved, Instant::now());
                parts.push((spans, moved));
            }
            let arrived = epoch.host(epoch.began, Instant::now()).1;
            self.compute(&mut recorder, case.compute);
            let computed = self.gpu.submit(&mut recorder, &[]);
            if case.overlap {
                // The rows of the next step, while this one computes.
                next = Some(path.transfer(&epoch, step + 1)?);
            }
            self.gpu.wait(&computed)?;
            let waited = Instant::now();
            let marks = self.gpu.marks(&computed)?;
            epoch.learn(&marks, waited);
            steps.push((parts, arrived, marks));
        }
        starts.push(Instant::now());
        let starts = &starts[warmups as usize..];
        let times = starts.windows(2).map(|pair| pair[1].duration_since(pair[0])).collect();
        // Times count from the first step that is measured.
        let first = steps.get(warmups as usize).and_then(|(parts, ..)| parts.first());
        let zero = first.map_or(Duration::ZERO, |(host, _)| host.pack.0);
        let since = |(from, to): Span| (from.saturating_sub(zero), to.saturating_sub(zero));
        let is_copied = matches!(case.from, RowsFrom::Blocks | RowsFrom::Host(HostMemory::Pinned));
        let part = |(host, moved): &(PartSpans, Vec<f64>)| PartSpans {
            pack: since(host.pack),
            stage: since(host.stage),
            copy: epoch.device(moved, 0).filter(|_| is_copied).map(since),
            scatter: epoch.device(moved, 1).map(since),
        };
        let spans = steps.iter().skip(warmups as usize).map(|(parts, arrived, computed)| StepSpans {
            parts: parts.iter().map(part).collect(),
            arrived: arrived.saturating_sub(zero),
            compute: epoch.device(computed, 0).map(since),
        });
        Ok(MeasuredSteps { times, spans: spans.collect() })
    }
}
