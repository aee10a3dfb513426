//! The buffers of a step: its inputs, its activations, and results on their way to the host.
use crate::driver::{BufferCopy, Driver};
use crate::kernels::halves_bytes;
use crate::linear::Halves;
use crate::rotation::Rotation;
use crate::taps::Taps;
use kvist_cache::StepId;
use kvist_device::*;
use std::ops::Range;
use std::sync::Arc;

/// Most tokens that the device finds, for [`RowOutput::TopK`] and for draws from so many; for more, the host reads the logits.
pub const MAX_TOP: u32 = 64;
/// Words of an answer.
pub const ANSWER: u32 = 1 + 2 * MAX_TOP;

/// Activations in f32: rows of the largest step. Without a buffer if rows are empty.
#[derive(Debug)]
pub struct Buffer<D: Driver> {
    pub rows: RowsOf,
    pub width: u32,
    pub data: Option<Arc<D::Buffer>>,
}

impl<D: Driver> Buffer<D> {
    /// The buffer; an operation on rows without elements does nothing.
    pub fn get(&self) -> Option<&D::Buffer> {
        self.data.as_deref()
    }
}

/// The scratch of routed layers, for the largest step.
#[derive(Debug)]
pub struct ExpertRows<D: Driver> {
    pub odds: D::Buffer,   // [tokens, experts]
    pub routes: D::Buffer, // words, see `routes.wgsl`
    pub gate: D::Buffer,   // [tokens, used, width]
    pub up: D::Buffer,     // [tokens, used, width], then the outputs: [tokens, used, hidden]
}

/// The inputs and results of a step, and its recorded operations.
#[derive(Debug)]
pub struct Stream<D: Driver> {
    pub limits: StepLimits,
    pub step: Option<StepId>,
    pub recorder: D::Recorder,
    pub n_tokens: u32,
    pub positions: Vec<u32>,
    pub ropes: Vec<RopeTable>,
    /// Rotary embeddings that are not recorded yet, in order.
    pub rotations: Vec<Rotation<D>>,
    pub tokens: D::Buffer,
    pub angles: D::Buffer,
    pub wanted: D::Buffer,  // [max_rows] rows, then [max_rows] numbers of tokens
    pub logits: D::Buffer,  // [max_rows, vocab]
    pub answers: D::Buffer, // [max_rows, ANSWER]
    pub staging: D::Buffer, // logits, then answers
    pub experts: Option<ExpertRows<D>>,
    /// The inputs of a linear layer, and those of the experts' last layer.
    pub halves: [Option<Halves<D>>; 2],
    pub taps: Taps<D>,
    pub vocab: u32,
    /// Per wanted row: how many tokens the device finds; 0 if the host reads its logits.
    pub top: Vec<u32>,
    pub submitted: Ticket,
    /// Submitted, and not waited for yet.
    pub running: Vec<(Ticket, D::Submission)>,
    /// An error of an operation that could not return it.
    pub failed: Option<DeviceError>,
    pub output: StepOutput,
}

/// Bytes of the buffers of [`Stream`], in the order in which they are allocated.
pub struct StreamBytes {
    pub tokens: u64,
    pub angles: u64,
    pub wanted: u64,
    pub logits: u64,
    pub answers: u64,
    /// Odds, routes, gate and up of routed layers.
    pub experts: [u64; 4],
    /// [`Stream::halves`], on drivers that have them.
    pub halves: [u64; 2],
}

pub fn f32s(rows: usize, width: usize) -> Option<u64> {
    u64::try_from(rows.checked_mul(width)?.checked_mul(4)?).ok().map(|bytes| bytes.max(16))
}

impl StreamBytes {
    pub fn new(shape: &ModelShape, limits: &StepLimits, has_halves: bool) -> Option<Self> {
        let (tokens, rows) = (limits.max_tokens, limits.max_rows);
        let pairs = shape.rope_pairs.iter().try_fold(0usize, |sum, n| sum.checked_add(*n))?;
        let experts = match shape.routing {
            Some(Routing { n_experts, used, width, .. }) => {
                let rows = tokens.checked_mul(used)?;
                let routes = f32s(rows, 3)?.checked_add(f32s(n_experts, 1)?)?.checked_add(4)?;
                [f32s(tokens, n_experts)?, routes, f32s(rows, width)?, f32s(rows, width.max(shape.hidden))?]
            }
            None => [0; 4],
        };
        let halves = match has_halves {
            true => {
                let widest = shape.buffers().iter().map(|(_, width)| *width).max()?;
                let of_experts =
                    |routing: &Routing| halves_bytes(tokens.checked_mul(routing.used)?, routing.width);
                [halves_bytes(tokens, widest)?, shape.routing.as_ref().map_or(Some(0), of_experts)?]
            }
            false => [0; 2],
        };
        Some(StreamBytes {
            tokens: f32s(tokens, 1)?,
            angles: f32s(tokens, pairs.checked_mul(2)?)?,
            wanted: f32s(rows, 2)?,
            logits: f32s(rows, shape.vocab)?,
            answers: f32s(rows, ANSWER as usize)?,
            experts,
            halves,
        })
    }
    /// Bytes in the host's memory: staging of what is uploaded, and of what is read back.
    pub fn host(&self) -> Option<u64> {
        let all = [self.tokens, self.angles, self.wanted, self.logits, self.answers];
        all.iter().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes))
    }
    pub fn total(&self) -> Option<u64> {
        // All but the experts' rows and the halves twice: once more on the host.
        let host = self.host()?;
        self.experts
            .iter()
            .chain(&self.halves)
            .try_fold(host.checked_mul(2)?, |sum, bytes| sum.checked_add(*bytes))
    }
}

impl<D: Driver> Stream<D> {
    pub fn new(
        gpu: &D,
        shape: &ModelShape,
        ropes: &[RopeTable],
        limits: &StepLimits,
    ) -> Result<Self, DeviceError> {
        let overflow = || DeviceError::OutOfMemory { what: "activations", bytes: u64::MAX };
        let bytes = StreamBytes::new(shape, limits, gpu.has_halves()).ok_or_else(overflow)?;
        let buffer = |bytes| gpu.buffer("inputs and results of a step", bytes);
        let [odds, routes, gate, up] = bytes.experts;
        let experts = match shape.routing {
            Some(_) => Some(ExpertRows {
                odds: buffer(odds)?,
                routes: buffer(routes)?,
                gate: buffer(gate)?,
                up: buffer(up)?,
            }),
            None => None,
        };
        Ok(Stream {
            limits: *limits,
            step: None,
            recorder: D::Recorder::default(),
            n_tokens: 0,
            positions: Vec::with_capacity(limits.max_tokens),
            ropes: ropes.to_vec(),
            rotations: Vec::new(),
            tokens: buffer(bytes.tokens)?,
            angles: buffer(bytes.angles)?,
            wanted: buffer(bytes.wanted)?,
            logits: buffer(bytes.logits)?,
            answers: buffer(bytes.answers)?,
            staging: gpu.staging("results of a step", bytes.logits + bytes.answers)?,
            experts,
            halves: [Halves::new(gpu, bytes.halves[0])?, Halves::new(gpu, bytes.halves[1])?],
            taps: Taps::default(),
            vocab: u32::try_from(shape.vocab).map_err(|_| overflow())?,
            top: Vec::new(),
            submitted: Ticket::START,
            running: Vec::new(),
            failed: None,
            output: StepOutput::with_capacity(limits.max_rows, shape.vocab),
        })
    }

    /// Notes what the wanted rows ask for, and uploads it.
    pub fn want_rows(&mut self, gpu: &D, rows: &[WantedRow]) {
        self.output.want(rows);
        let most = MAX_TOP.min(self.vocab.saturating_sub(1));
        self.top.clear();
        self.top.extend(rows.iter().map(|wanted| match wanted.output {
            RowOutput::Argmax => 1,
            RowOutput::TopK(k) if k <= most => k,
            RowOutput::Sample(SampleParams { temperature: 0.0, .. }) => 1,
            RowOutput::Sample(SampleParams { top_k, .. }) if top_k <= most => top_k,
            _ => 0,
        }));
        let words = rows.iter().map(|wanted| wanted.row).chain(self.top.iter().copied());
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        if !bytes.is_empty() {
            gpu.write(&self.wanted, 0, &bytes);
        }
    }

    /// Uploads cos and sin of every token, for every rotary embedding: `[tokens, pairs]` each.
    pub fn upload_angles(&self, gpu: &D) {
        let mut bytes = Vec::new();
        for table in &self.ropes {
            let angles = |f: fn(f32) -> f32| {
                self.positions.iter().flat_map(move |position| {
                    // In f32, as transformers computes it.
                    let angle =
                        move |frequency: &f32| f(*position as f32 * frequency) * table.attention_factor;
                    table.inverse_frequencies.iter().map(angle)
                })
            };
            bytes.extend(angles(f32::cos).chain(angles(f32::sin)).flat_map(f32::to_le_bytes));
        }
        if !bytes.is_empty() {
            gpu.write(&self.angles, 0, &bytes);
        }
    }

    /// Submits what was recorded, and copies of what the host reads of it.
    ///
    /// # Errors
    /// There is no memory for the taps. Nothing is submitted then.
    pub fn submit(&mut self, gpu: &D) -> Result<D::Submission, DeviceError> {
        let row = u64::from(self.vocab) * 4;
        let n = self.top.len() as u64;
        let mut copies = Vec::new();
        // Rows of logits that are neighbours are one copy.
        let mut first = 0;
        for run in self.top.chunk_by(|a, b| (*a == 0) == (*b == 0)) {
            if run[0] == 0 {
                copies.push(copy(
                    &self.logits,
                    first * row,
                    &self.staging,
                    first * row,
                    run.len() as u64 * row,
                ));
            }
            first += run.len() as u64;
        }
        if self.top.iter().any(|k| *k > 0) {
            let answers = n * u64::from(ANSWER) * 4;
            copies.push(copy(&self.answers, 0, &self.staging, n * row, answers));
        }
        copies.extend(self.taps.copies(gpu, self.n_tokens)?);
        Ok(gpu.submit(&mut self.recorder, &copies))
    }

    pub fn n(&self, rows: RowsOf) -> u32 {
        match rows {
            RowsOf::Tokens => self.n_tokens,
            RowsOf::Wanted => self.output.wanted().len() as u32,
        }
    }
    pub fn fail(&mut self, error: DeviceError) {
        self.failed.get_or_insert(error);
    }
}

/// A copy that `submit` appends.
fn copy<'a, D: Driver>(
    from: &'a D::Buffer,
    from_byte: u64,
    to: &'a D::Buffer,
    to_byte: u64,
    bytes: u64,
) -> BufferCopy<'a, D> {
    BufferCopy { from, from_byte, to, to_byte, bytes }
}

/// What the host keeps of a wanted row until all have been read.
enum Read {
    /// Of the logits that were read.
    Logits(Range<usize>),
    Top(Range<usize>),
    Token(u32),
    Nan,
}

/// Reads what the wanted rows ask for from the staging buffer.
pub fn read_rows<D: Driver>(gpu: &D, s: &mut Stream<D>) -> Result<(), DeviceError> {
    let Stream { output, staging, top, vocab, .. } = s;
    let (vocab, n) = (*vocab as usize, top.len());
    let (mut logits, mut found, mut rows) = (Vec::<f32>::new(), Vec::<(u32, f32)>::new(), Vec::new());
    let all = if top.iter().any(|k| *k > 0) { ANSWER as usize } else { 0 };
    let first = if top.contains(&0) { 0 } else { n * vocab };
    gpu.read(staging, 4 * first as u64..4 * (n * (vocab + all)) as u64, |bytes| {
        let words = bytes.as_chunks::<4>().0;
        let word = |i: usize| u32::from_le_bytes(words[i - first]);
        for (i, (k, wanted)) in top.iter().zip(output.wanted()).enumerate() {
            let answer = n * vocab + i * ANSWER as usize;
            let here = match k {
                0 => &words[i * vocab - first..][..vocab],
                _ => &[],
            };
            rows.push(match (k, wanted.output) {
                (0, _) => {
                    let first = logits.len();
                    logits.extend(here.iter().map(|x| f32::from_le_bytes(*x)));
                    Read::Logits(first..logits.len())
                }
                _ if word(answer) == u32::MAX => Read::Nan,
                (_, RowOutput::Argmax) => Read::Token(word(answer + 1)),
                _ => {
                    let first = found.len();
                    let entry =
                        |j: usize| (word(answer + 1 + 2 * j), f32::from_bits(word(answer + 2 + 2 * j)));
                    found.extend((0..*k as usize).map(entry));
                    Read::Top(first..found.len())
                }
            });
        }
    })?;
    let answer = |row: &Read| match row {
        Read::Logits(range) => DeviceRow::OfLogits(&logits[range.clone()]),
        Read::Top(range) => DeviceRow::TopK(&found[range.clone()]),
        Read::Token(token) => DeviceRow::Token(*token),
        Read::Nan => DeviceRow::Failed(NoToken::Nan),
    };
    output.answer_from(vocab, rows.iter().map(answer));
    Ok(())
}
