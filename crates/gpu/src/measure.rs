//! Measures the way of K and V that the host computed: packed, staged, copied and scattered to blocks, beside a step that
//! computes or in turns with it.
//!
//! Nothing here is needed when K and V are computed on the device. It is the way of blocks that come from the host's
//! memory or from disk, through the same [`Lane`].
use crate::driver::{Args, BufferCopy, Driver, HostMemory};
use crate::kernels::{Kernel, Routed, encoding_number};
use crate::lane::{Job, Lane, Section};
use kvist_device::weights::Encoding;
use kvist_device::{DeviceError, f16};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    pub memory: HostMemory,
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

/// When the parts of a step ran. Those on the device are missing where it has no clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepSpans {
    /// The host makes rows of f16 and orders them as a block.
    pub pack: Span,
    /// The host copies the block to memory that the device reads, and submits.
    pub stage: Span,
    /// When the host knew that the rows had arrived.
    pub arrived: Duration,
    /// The device copies the block. Empty if kernels read the host's memory, and where the API copies by itself.
    pub copy: Option<Span>,
    /// A kernel writes the rows to their cells.
    pub scatter: Option<Span>,
    pub compute: Option<Span>,
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
/// Cells of the pool that steps write to, at least.
const CELLS: u32 = 1024;

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
        let args = Args::new(&[COMPUTE / 4, 0, 0, COMPUTE, COMPUTE, 0, COMPUTE, 1]).f32(1.0);
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
        let mut steps: Vec<(StepSpans, Vec<f64>, Vec<f64>)> = Vec::new(); // spans of the host; marks: transfer, compute
        let mut next = None;
        for step in 0..n {
            starts.push(Instant::now());
            let (mut spans, job) = match next.take() {
                Some(started) => started,
                None => path.transfer(&epoch, step)?,
            };
            // A step computes with its rows: they have arrived before.
            let moved = path.lane.wait(job)?;
            let arrived = Instant::now();
            epoch.learn(&moved, arrived);
            spans.arrived = epoch.host(epoch.began, arrived).1;
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
            steps.push((spans, moved, marks));
        }
        starts.push(Instant::now());
        let starts = &starts[warmups as usize..];
        // Times count from the first step that is measured.
        let zero = steps.get(warmups as usize).map_or(Duration::ZERO, |(spans, ..)| spans.pack.0);
        let since = |(from, to): Span| (from.saturating_sub(zero), to.saturating_sub(zero));
        let times = starts.windows(2).map(|pair| pair[1].duration_since(pair[0])).collect();
        let spans = steps.into_iter().skip(warmups as usize).map(|(host, moved, computed)| StepSpans {
            pack: since(host.pack),
            stage: since(host.stage),
            arrived: host.arrived.saturating_sub(zero),
            copy: epoch.device(&moved, 0).filter(|_| case.memory == HostMemory::Pinned).map(since),
            scatter: epoch.device(&moved, 1).map(since),
            compute: epoch.device(&computed, 0).map(since),
        });
        Ok(MeasuredSteps { times, spans: spans.collect() })
    }
}

/// The way of a step's rows.
struct Path<D: Driver> {
    case: TransferCase,
    lane: Lane<D>,
    /// K and V of each layer: `[heads, cells, row]`.
    pools: Vec<D::Buffer>,
    cells: u32,
    /// First cell of each block of the page table, in the order of positions: no two neighbours lie beside each other.
    blocks: Vec<u32>,
    rows: Vec<f32>, // [tokens, heads, dim]: what the host computed for one side of a layer
    block: Vec<u8>,
}

impl<D: Driver> Path<D> {
    fn new(gpu: &Arc<D>, case: &TransferCase) -> Result<Self, DeviceError> {
        let too_much = || DeviceError::OutOfMemory { what: "KV cache", bytes: u64::MAX };
        let blocks = CELLS.max(2 * case.tokens).div_ceil(case.block_tokens).next_power_of_two().max(4);
        let cells = blocks.checked_mul(case.block_tokens).ok_or_else(too_much)?;
        // Kernels count bytes of a block in 32 bits.
        let bytes = case.bytes();
        if bytes > u64::from(u32::MAX / 2) {
            return Err(DeviceError::Unsupported(format!(
                "{bytes} bytes in a step: less than 2 GiB are possible"
            )));
        }
        let row_words = case.head_dim.div_ceil(2);
        let words = [case.kv_heads, cells, row_words];
        let words =
            words.iter().try_fold(1u64, |n, by| n.checked_mul(u64::from(*by))).ok_or_else(too_much)?;
        // Odd numbers are coprime to a power of two, so every block is named once.
        let order = |i: u32| {
            (u64::from(i) * u64::from(blocks / 2 + 1) % u64::from(blocks)) as u32 * case.block_tokens
        };
        Ok(Path {
            lane: Lane::new(gpu, case.memory, 3, case.bytes() + 8 * u64::from(case.layers), case.tokens)?,
            pools: (0..2 * case.layers)
                .map(|_| gpu.buffer("KV cache", words * 4))
                .collect::<Result<_, _>>()?,
            cells,
            blocks: (0..blocks).map(order).collect(),
            rows: vec![0.5; (case.tokens * case.kv_heads * case.head_dim) as usize],
            block: Vec::with_capacity(case.bytes() as usize),
            case: *case,
        })
    }

    /// Packs, stages and submits the rows of a step.
    fn transfer(&mut self, epoch: &Epoch, step: u32) -> Result<(StepSpans, Job), DeviceError> {
        let case = self.case;
        let began = Instant::now();
        self.block.clear();
        for side in 0..2 * case.layers {
            self.rows[0] = (step * 64 + side) as f32;
            self.block.extend(self.rows.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()));
            self.block.resize(self.block.len().next_multiple_of(4), 0);
        }
        let cell = |token: u32| {
            let position = u64::from(step) * u64::from(case.tokens) + u64::from(token);
            let position = (position % u64::from(self.cells)) as u32;
            self.blocks[(position / case.block_tokens) as usize] + position % case.block_tokens
        };
        let cells: Vec<u32> = (0..case.tokens).map(cell).collect();
        let packed = Instant::now();
        let row_bytes = 2 * case.head_dim;
        let side = (case.tokens * case.kv_heads * row_bytes).next_multiple_of(4);
        let section = |(i, pool)| Section {
            first_byte: i * side,
            row_bytes,
            block_heads: case.kv_heads,
            first_head: 0,
            heads: case.kv_heads,
            words: row_bytes.div_ceil(4),
            cells: self.cells,
            pool,
        };
        let sections: Vec<_> = (0u32..).zip(&self.pools).map(section).collect();
        let job = self.lane.upload(&self.block, &cells, &sections, true)?;
        let staged = Instant::now();
        let spans = StepSpans {
            pack: epoch.host(began, packed),
            stage: epoch.host(packed, staged),
            ..StepSpans::default()
        };
        Ok((spans, job))
    }
}
