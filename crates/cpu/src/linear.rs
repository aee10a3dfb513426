//! Linear layers over packed weights: `y = x·Wᵀ` for `W: [outputs, inputs]`.
//!
//! Sixteen rows of W are interleaved in a panel, so that a vector holds sixteen outputs and no horizontal sum is
//! needed. The weights are the file's own codes, reordered, and are kept once.
//!
//! ```text
//! packed   y[16] += dot4(16 rows' 4 codes, x's 4 codes) …, scaled once per block     x in 8 bits per 32 inputs
//! float    y[16] += w[16] * x[i]                                                     for each input i
//! ```
//!
//! A single token reads every panel once and is memory-bound. Many tokens are processed in tiles of eight, which share
//! each loaded vector of weights. Every output adds its inputs in order, whatever the batch, so a row's result does not
//! depend on the rest of the batch. The exception is bf16 products of large batches; `Compute::deterministic` avoids
//! them.
mod blocks;
mod codes;
mod float;
mod inputs;
mod k_quants;
mod simple;
mod super_blocks;

use crate::Compute;
use crate::arch::{Columns, Kernel, LANES, Simd};
use crate::pages::Pages;
pub use inputs::{Input, Inputs};
use std::fmt;

/// Prefetch distance for packed weights in bytes. Hardware prefetching stops at every 4 KiB page, and a few bytes keep
/// a core busy. A thread's parts are adjacent, so it later uses what it prefetched past the end of one. Float weights
/// are streams that the hardware prefetcher follows.
const AHEAD: usize = 8192;

/// Encodings of weights, with their names in GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Iq4Nl,
    Mxfp4,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Xs,
    /// At most 16 values, in kvist's own format. ggml's rarer formats are converted to it without loss when they are
    /// read.
    Few,
}

/// Evaluates `$body` with the type `$F` of `$packing`. To add a format, add a type in `simple.rs` or `k_quants.rs`, and
/// its line here and in [`Packing::NAMES`].
macro_rules! with_format {
    ($packing:expr, $F:ident => $body:expr) => {
        match $packing {
            Packing::F32 => {
                type $F = float::F32;
                $body
            }
            Packing::F16 => {
                type $F = float::F16;
                $body
            }
            Packing::BF16 => {
                type $F = float::BF16;
                $body
            }
            Packing::Q8_0 => {
                type $F = blocks::Blocks<simple::Q8_0>;
                $body
            }
            Packing::Q4_0 => {
                type $F = blocks::Blocks<simple::Q4_0>;
                $body
            }
            Packing::Q4_1 => {
                type $F = blocks::Blocks<simple::Q4_1>;
                $body
            }
            Packing::Q5_0 => {
                type $F = blocks::Blocks<simple::Q5_0>;
                $body
            }
            Packing::Q5_1 => {
                type $F = blocks::Blocks<simple::Q5_1>;
                $body
            }
            Packing::Iq4Nl => {
                type $F = blocks::Blocks<simple::Iq4Nl>;
                $body
            }
            Packing::Mxfp4 => {
                type $F = blocks::Blocks<simple::Mxfp4>;
                $body
            }
            Packing::Q2K => {
                type $F = super_blocks::SuperBlocks<k_quants::Q2K>;
                $body
            }
            Packing::Q3K => {
                type $F = super_blocks::SuperBlocks<k_quants::Q3K>;
                $body
            }
            Packing::Q4K => {
                type $F = super_blocks::SuperBlocks<k_quants::Q4K>;
                $body
            }
            Packing::Q5K => {
                type $F = super_blocks::SuperBlocks<k_quants::Q5K>;
                $body
            }
            Packing::Q6K => {
                type $F = super_blocks::SuperBlocks<k_quants::Q6K>;
                $body
            }
            Packing::Iq4Xs => {
                type $F = super_blocks::SuperBlocks<k_quants::Iq4Xs>;
                $body
            }
            Packing::Few => {
                type $F = super_blocks::SuperBlocks<k_quants::Few>;
                $body
            }
        }
    };
}

/// One encoding of weights.
trait Format: 'static {
    /// Elements and bytes of a block in the file.
    const BLOCK: (usize, usize);
    /// Bytes that one block of 16 rows takes in a panel: codes (whole cache lines), and scales.
    const CODES: usize;
    const SCALES: usize;
    /// The input format that the kernel reads.
    const FORM: inputs::Form;
    /// Number of panels that a kernel call processes together.
    const PANELS: usize = 1;

    /// Packs the file's block of row `lane`.
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]);
    /// Decodes a block of row `lane` to f32.
    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]);
    /// Multiplies adjacent panels with all tokens.
    fn multiply<S: Simd>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        deterministic: bool,
        out: &mut Columns<'_, f32>,
    );
}

/// The first two bytes, which are an f16.
fn pair(bytes: &[u8]) -> [u8; 2] {
    [bytes[0], bytes[1]]
}

/// Adjacent panels.
struct Panels<'p> {
    bytes: &'p [u8],
    n: usize,
    panel: usize,
    /// Blocks per row.
    blocks: usize,
}

impl Panels<'_> {
    /// Codes and scales of panel `i`.
    #[inline(always)]
    fn get<F: Format>(&self, i: usize) -> (&[u8], &[u8]) {
        let (codes, scales) =
            self.bytes[i * self.panel..(i + 1) * self.panel].split_at(self.blocks * F::CODES);
        (codes, &scales[..self.blocks * F::SCALES])
    }
}

/// Writes sixteen outputs of panel `i` of a unit, or as many as remain.
#[inline(always)]
fn put<S: Simd>(s: S, out: &mut Columns<'_, f32>, token: usize, panel: usize, sums: S::F) {
    let row = &mut out.row(token)[panel * LANES..];
    match row.first_chunk_mut() {
        Some(whole) => s.store(sums, whole),
        None => {
            let mut lanes = [0.0; LANES];
            s.store(sums, &mut lanes);
            let n = row.len();
            row.copy_from_slice(&lanes[..n]);
        }
    }
}

struct Multiply<'k, 'o, F> {
    weights: Panels<'k>,
    inputs: &'k Inputs,
    deterministic: bool,
    out: Columns<'o, f32>,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Kernel for Multiply<'_, '_, F> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        F::multiply(s, &self.weights, self.inputs, self.deterministic, &mut self.out);
    }
}

/// A packed weight matrix.
pub struct Matrix {
    packing: Packing,
    outputs: usize,
    inputs: usize,
    panels: Pages,
    panel: usize,
}

/// Why a matrix cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadMatrix {
    /// Rows are not whole blocks, the matrix is empty, or its size in bytes does not match its shape.
    Shape(String),
    /// The system refused this many bytes.
    OutOfMemory(u64),
}

impl fmt::Display for BadMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadMatrix::Shape(what) => f.write_str(what),
            BadMatrix::OutOfMemory(bytes) => write!(f, "the system refused {bytes} bytes for weights"),
        }
    }
}
impl std::error::Error for BadMatrix {}

impl Packing {
    /// All encodings with their names in GGUF files. [`Packing::Few`] does not occur in files.
    pub const NAMES: [(&str, Packing); 17] = [
        ("f32", Packing::F32),
        ("f16", Packing::F16),
        ("bf16", Packing::BF16),
        ("q8_0", Packing::Q8_0),
        ("q4_0", Packing::Q4_0),
        ("q4_1", Packing::Q4_1),
        ("q5_0", Packing::Q5_0),
        ("q5_1", Packing::Q5_1),
        ("iq4_nl", Packing::Iq4Nl),
        ("mxfp4", Packing::Mxfp4),
        ("q2_K", Packing::Q2K),
        ("q3_K", Packing::Q3K),
        ("q4_K", Packing::Q4K),
        ("q5_K", Packing::Q5K),
        ("q6_K", Packing::Q6K),
        ("iq4_xs", Packing::Iq4Xs),
        ("few", Packing::Few),
    ];

    /// Bytes of a panel with rows of `inputs` elements. `None` if rows are not whole blocks, or on overflow.
    fn panel_bytes(self, inputs: usize) -> Option<usize> {
        with_format!(self, F => {
            let whole = inputs > 0 && inputs.is_multiple_of(F::BLOCK.0);
            let bytes = whole.then_some(inputs / F::BLOCK.0)?.checked_mul(F::CODES + F::SCALES)?;
            bytes.checked_next_multiple_of(64)
        })
    }

    /// Bytes of a packed matrix. `None` if rows are not whole blocks, or on overflow.
    pub fn resident_bytes(self, outputs: usize, inputs: usize) -> Option<u64> {
        let panels = outputs.div_ceil(LANES);
        u64::try_from(panels.checked_mul(self.panel_bytes(inputs)?)?).ok()
    }

    /// Decodes whole blocks of the file to f32. Panics unless `out` has as many elements as `bytes` encodes.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        with_format!(self, F => {
            assert!(out.len() * F::BLOCK.1 == bytes.len() * F::BLOCK.0, "elements of whole blocks");
            let mut panel = [0; F::CODES + F::SCALES];
            let (codes, scales) = panel.split_at_mut(F::CODES);
            for (block, out) in bytes.chunks_exact(F::BLOCK.1).zip(out.chunks_exact_mut(F::BLOCK.0)) {
                F::pack(block, 0, codes, scales);
                F::unpack(codes, scales, 0, out);
            }
        });
    }

    /// Elements of one block, and its bytes in the file.
    pub fn block(self) -> (usize, usize) {
        with_format!(self, F => F::BLOCK)
    }
}

impl Matrix {
    /// Packs `bytes`: consecutive rows in the encoding's own blocks.
    pub fn pack(
        compute: &Compute,
        packing: Packing,
        outputs: usize,
        inputs: usize,
        bytes: &[u8],
    ) -> Result<Self, BadMatrix> {
        let bad = || {
            BadMatrix::Shape(format!(
                "{outputs} rows of {inputs} elements are not {} bytes of {packing:?}",
                bytes.len()
            ))
        };
        let panel = packing.panel_bytes(inputs).ok_or_else(bad)?;
        let size = packing.resident_bytes(outputs, inputs).ok_or_else(bad)?;
        let (elements, block) = packing.block();
        let row = inputs / elements * block;
        if outputs == 0 || outputs.checked_mul(row) != Some(bytes.len()) {
            return Err(bad());
        }
        let size = usize::try_from(size).map_err(|_| BadMatrix::OutOfMemory(size))?;
        let mut panels = Pages::new(size).map_err(BadMatrix::OutOfMemory)?;
        let mut nothing = vec![(); compute.threads.n()];
        // Few large units, so that each page of weights is first touched by one thread.
        compute.threads.parts(panels.bytes_mut(), panel, &mut nothing, |i, panel, ()| {
            with_format!(packing, F => {
                let blocks = inputs / F::BLOCK.0;
                let (codes, scales) = panel.split_at_mut(blocks * F::CODES);
                for (lane, row) in bytes[i * LANES * row..].chunks_exact(row).take(LANES).enumerate() {
                    for (b, block) in row.chunks_exact(F::BLOCK.1).enumerate() {
                        let codes = &mut codes[b * F::CODES..(b + 1) * F::CODES];
                        F::pack(block, lane, codes, &mut scales[b * F::SCALES..(b + 1) * F::SCALES]);
                    }
                }
            });
        });
        Ok(Matrix { packing, outputs, inputs, panels, panel })
    }

    pub fn packing(&self) -> Packing {
        self.packing
    }
    pub fn outputs(&self) -> usize {
        self.outputs
    }
    pub fn inputs(&self) -> usize {
        self.inputs
    }
    /// Bytes in memory.
    pub fn bytes(&self) -> u64 {
        self.panels.bytes().len() as u64
    }

    /// Decodes row `row` to f32 into `out: [inputs]`. Panics if there is no such row.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.outputs && out.len() == self.inputs, "row {row} of {}", self.outputs);
        let (panel, lane) = (row / LANES, row % LANES);
        let panel = &self.panels.bytes()[panel * self.panel..(panel + 1) * self.panel];
        with_format!(self.packing, F => {
            let (codes, scales) = panel.split_at(self.inputs / F::BLOCK.0 * F::CODES);
            for (b, out) in out.chunks_exact_mut(F::BLOCK.0).enumerate() {
                let (codes, scales) = (&codes[b * F::CODES..], &scales[b * F::SCALES..]);
                F::unpack(&codes[..F::CODES], &scales[..F::SCALES], lane, out);
            }
        });
    }

    /// `out: [n, outputs]` becomes `input: [n, inputs]` times the transposed matrix. Panics on other shapes.
    pub fn multiply(&self, compute: &Compute, input: &mut Input<'_>, out: &mut [f32]) {
        let n = input.n();
        assert!(input.width() == self.inputs && out.len() == n * self.outputs, "shapes of a linear layer");
        if n == 0 {
            return;
        }
        with_format!(self.packing, F => {
            let dots = F::FORM == inputs::Form::Rows && float::uses_dots::<F>(compute, n);
            let inputs = input.prepare(compute, if dots { inputs::Form::Pairs } else { F::FORM });
            // Units of about 64 KiB, so that a thread that loses its core causes little delay.
            let at_once = ((64 << 10) / self.panel).next_multiple_of(F::PANELS).max(F::PANELS);
            let (mut nothing, bytes) = (vec![(); compute.threads.n()], self.panels.bytes()); // takes no memory
            compute.threads.columns(out, self.outputs, at_once * LANES, &mut nothing, |unit, out, ()| {
                let first = unit * at_once;
                let outputs = (self.outputs - first * LANES).min(at_once * LANES);
                let n = outputs.div_ceil(LANES);
                let weights = Panels {
                    bytes: &bytes[first * self.panel..(first + n) * self.panel],
                    n,
                    panel: self.panel,
                    blocks: self.inputs / F::BLOCK.0,
                };
                compute.isa.run(Multiply::<F> {
                    weights, inputs, deterministic: !dots, out, format: std::marker::PhantomData
                });
            });
        });
    }
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} [{}, {}]", self.packing, self.outputs, self.inputs)
    }
}

/// Processes the tokens of `inputs` in tiles: `$kernel::<S, T>(…, first token)` for T of 8, 4, 2 and 1.
macro_rules! for_token_tiles {
    ($n:expr, $first:ident, $T:ident => $body:expr) => {{
        let mut $first = 0;
        while $first < $n {
            let left = $n - $first;
            $first += if left >= 8 {
                const $T: usize = 8;
                $body;
                $T
            } else if left >= 4 {
                const $T: usize = 4;
                $body;
                $T
            } else if left >= 2 {
                const $T: usize = 2;
                $body;
                $T
            } else {
                const $T: usize = 1;
                $body;
                $T
            };
        }
    }};
}
use for_token_tiles;
