//! Linear layers over packed weights: `y = x·Wᵀ` for `W: [outputs, inputs]`.
//!
//! Sixteen rows of W are interleaved in a panel, so that a vector contains sixteen outputs and no horizontal sum is
//! needed. The weights are the file's own codes, reordered, and are kept once.
//!
//! ```text
//! packed   y[16] += dot4(16 rows' 4 codes, x's 4 codes) …, scaled once per block     x in 8 bits per 32 inputs
//! float    y[16] += w[16] * x[i]                                                     for each input i
//! ```
//!
//! A single token reads every panel once and is memory-bound. Many tokens are processed in tiles of eight, which share
//! each loaded vector of weights. Every output adds its inputs in order, whatever the batch, so a row's result does not
//! depend on the rest of the batch. The exceptions are bf16 products of large batches, which
//! `Compute::deterministic` avoids, and decoded weights of `Compute::fast_prefill`.
mod ahead;
mod blocks;
mod codes;
mod decode;
mod float;
mod formats;
mod inputs;
mod int8;
mod pair_tiles;
mod panels;
mod room;
mod super_blocks;
mod tiles;
mod wide;

use crate::Compute;
use crate::arch::arena::Piece;
use crate::arch::{Columns, Isa, Kernel, LANES, Simd, TileIsa, Uses};
use ahead::Ahead;
use inputs::InputFormat;
pub use inputs::{Input, Inputs};
use kvist_device::weights::{Encoding, blocks as layouts, super_blocks as super_layouts};
use panels::{Layout, Panels};
use room::Room;
use std::fmt;
use std::ops::Range;

/// The encodings that have kernels.
pub const ENCODINGS: [Encoding; 18] = Encoding::RESIDENT;

/// Evaluates `$body` with the format `$F` of an encoding of [`ENCODINGS`]. To add one, define its layout in
/// `kvist_device::weights`, and add its codes in `formats.rs` and its lines here and in
/// [`Encoding::RESIDENT`].
macro_rules! with_format {
    ($encoding:expr, $F:ident => $body:expr) => {
        match $encoding {
            Encoding::F32 => {
                type $F = float::F32;
                $body
            }
            Encoding::F16 => {
                type $F = float::F16;
                $body
            }
            Encoding::BF16 => {
                type $F = float::BF16;
                $body
            }
            Encoding::Q8_0 => {
                type $F = blocks::Blocks<layouts::Q8_0>;
                $body
            }
            Encoding::Q4_0 => {
                type $F = blocks::Blocks<layouts::Q4_0>;
                $body
            }
            Encoding::Q4_1 => {
                type $F = blocks::Blocks<layouts::Q4_1>;
                $body
            }
            Encoding::Q5_0 => {
                type $F = blocks::Blocks<layouts::Q5_0>;
                $body
            }
            Encoding::Q5_1 => {
                type $F = blocks::Blocks<layouts::Q5_1>;
                $body
            }
            Encoding::Iq4Nl => {
                type $F = blocks::Blocks<layouts::Iq4Nl>;
                $body
            }
            Encoding::Mxfp4 => {
                type $F = blocks::Blocks<layouts::Mxfp4>;
                $body
            }
            Encoding::Q2K => {
                type $F = super_blocks::SuperBlocks<super_layouts::Q2K>;
                $body
            }
            Encoding::Q3K => {
                type $F = super_blocks::SuperBlocks<super_layouts::Q3K>;
                $body
            }
            Encoding::Q4K => {
                type $F = super_blocks::SuperBlocks<super_layouts::Q4K>;
                $body
            }
            Encoding::Q5K => {
                type $F = super_blocks::SuperBlocks<super_layouts::Q5K>;
                $body
            }
            Encoding::Q6K => {
                type $F = super_blocks::SuperBlocks<super_layouts::Q6K>;
                $body
            }
            Encoding::Iq4Xs => {
                type $F = super_blocks::SuperBlocks<super_layouts::Iq4Xs>;
                $body
            }
            Encoding::Table16 => {
                type $F = super_blocks::SuperBlocks<super_layouts::Table16>;
                $body
            }
            Encoding::Int8 => {
                type $F = int8::Int8;
                $body
            }
            other => panic!("there are no kernels for {}", other.name()),
        }
    };
}

#[cfg(test)]
use with_format;

/// One encoding of weights.
trait Format: 'static {
    /// The products of [`multiply`](Self::multiply).
    const USES: Uses = Uses::Bytes;
    /// Elements and bytes of a block in the file.
    const BLOCK: (usize, usize);
    /// Bytes that one block of 16 rows takes in a panel: codes, and scales. If there are scales, the codes are whole cache lines.
    const CODES: usize;
    const SCALES: usize;
    /// Bytes of the scales of 16 rows, if whole rows have one each.
    const ROW_SCALES: usize = 0;
    /// Whether [`multiply`](Self::multiply) reads [`InputFormat::WideCodes`]; others become wide first.
    const IS_WIDE: bool = false;
    /// Number of panels that a kernel call processes together.
    const PANELS: usize = 1;

    /// Packs the file's block of row `lane`.
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]);
    /// Decodes a block of row `lane` to f32.
    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]);
    /// The format in which the kernel for `n` tokens reads its inputs. Tiles have formats of their own.
    fn input(compute: &Compute, n: usize) -> InputFormat;
    /// Multiplies adjacent panels with all tokens of an input in a format of tiles.
    fn multiply_tiles(
        _: TileIsa,
        format: InputFormat,
        _: Panels<'_>,
        _: &Inputs,
        _: &mut Room,
        _: &mut Columns<'_, f32>,
    ) {
        unreachable!("this encoding has no kernel for {format:?}")
    }
    /// Multiplies adjacent panels, which become bytes with wide scales, with all tokens of [`InputFormat::WideCodes`].
    fn multiply_wide(_: Isa, _: Panels<'_>, _: &Inputs, _: &mut Room, _: &mut Columns<'_, f32>) {
        unreachable!("this encoding does not become wide codes")
    }
    /// Multiplies adjacent panels with the tokens that [`tokens`] says.
    fn multiply<S: Simd, const MANY: bool>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        deterministic: bool,
        out: &mut Columns<'_, f32>,
    );
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

/// Whole tiles of tokens if there are `MANY`, or the others. Each has a kernel of its own: compiled together, either was up to 10 %
/// slower.
struct Multiply<'k, 'o, F, const MANY: bool> {
    weights: &'k Panels<'k>,
    inputs: &'k Inputs,
    deterministic: bool,
    out: &'k mut Columns<'o, f32>,
    format: std::marker::PhantomData<F>,
}

impl<F: Format, const MANY: bool> Kernel for Multiply<'_, '_, F, MANY> {
    type Out = ();
    const USES: Uses = F::USES;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        F::multiply::<S, MANY>(s, self.weights, self.inputs, self.deterministic, self.out);
    }
}

/// A packed weight matrix.
pub struct Matrix {
    encoding: Encoding,
    outputs: usize,
    inputs: usize,
    panels: Piece,
    panel: usize,
}

/// Why a matrix cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadMatrix {
    /// There are no kernels for the encoding, rows are not whole blocks, the matrix is empty, or its size in bytes does
    /// not match its shape.
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

/// Rows of an encoding of [`ENCODINGS`] must be a multiple of this many elements. bf16 is stored in pairs.
pub fn row_multiple(encoding: Encoding) -> usize {
    with_format!(encoding, F => F::BLOCK.0)
}

/// Bytes of a panel with rows of `inputs` elements. `None` if there are no kernels for the encoding, if rows are not
/// whole blocks, or on overflow.
fn panel_bytes(encoding: Encoding, inputs: usize) -> Option<usize> {
    if !ENCODINGS.contains(&encoding) {
        return None;
    }
    with_format!(encoding, F => {
        let whole = inputs > 0 && inputs.is_multiple_of(F::BLOCK.0);
        Layout::<F>::bytes(whole.then_some(inputs / F::BLOCK.0)?)
    })
}

impl Matrix {
    /// Bytes of a packed matrix. `None` if there are no kernels for the encoding, if rows are not whole blocks, or on
    /// overflow.
    pub fn resident_bytes(encoding: Encoding, outputs: usize, inputs: usize) -> Option<u64> {
        let panels = outputs.div_ceil(LANES);
        u64::try_from(panels.checked_mul(panel_bytes(encoding, inputs)?)?).ok()
    }

    /// Packs `bytes`: consecutive rows in the encoding's own blocks.
    pub fn pack(
        compute: &Compute,
        encoding: Encoding,
        outputs: usize,
        inputs: usize,
        bytes: &[u8],
    ) -> Result<Self, BadMatrix> {
        let bad = || {
            BadMatrix::Shape(format!(
                "{outputs} rows of {inputs} elements are not {} bytes of {}",
                bytes.len(),
                encoding.name()
            ))
        };
        let panel = panel_bytes(encoding, inputs).ok_or_else(bad)?;
        let size = Self::resident_bytes(encoding, outputs, inputs).ok_or_else(bad)?;
        let (elements, block) = encoding.block();
        let row = inputs / elements * block;
        if outputs == 0 || outputs.checked_mul(row) != Some(bytes.len()) {
            return Err(bad());
        }
        let size = usize::try_from(size).map_err(|_| BadMatrix::OutOfMemory(size))?;
        let mut panels = compute.weights.piece(size).map_err(BadMatrix::OutOfMemory)?;
        let mut no_scratch = vec![(); compute.threads.n()];
        // Few large units, so that each page of weights is first touched by one thread.
        compute.threads.parts(panels.bytes_mut(), panel, &mut no_scratch, |i, panel, ()| {
            with_format!(encoding, F => {
                for (lane, row) in bytes[i * LANES * row..].chunks_exact(row).take(LANES).enumerate() {
                    for (b, block) in row.chunks_exact(F::BLOCK.1).enumerate() {
                        let (scales, codes) = panel.split_at_mut(Layout::<F>::codes(b).start);
                        F::pack(block, lane, &mut codes[..F::CODES], &mut scales[Layout::<F>::scales(b)]);
                    }
                }
            });
        });
        Ok(Matrix { encoding, outputs, inputs, panels, panel })
    }

    pub fn encoding(&self) -> Encoding {
        self.encoding
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
        with_format!(self.encoding, F => {
            for (b, out) in out.chunks_exact_mut(F::BLOCK.0).enumerate() {
                F::unpack(&panel[Layout::<F>::codes(b)], &panel[Layout::<F>::scales(b)], lane, out);
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
        with_format!(self.encoding, F => {
            let format = F::input(compute, n);
            let tiles = compute.isa.tiles().filter(|_| format.is_tiles());
            let becomes_wide = format == InputFormat::WideCodes && !F::IS_WIDE;
            let mut rooms = input.take_rooms(compute);
            let inputs = input.prepare(compute, format);
            // Units of about 64 KiB, so that a thread that loses its core causes little delay.
            let at_once = ((64 << 10) / self.panel).next_multiple_of(F::PANELS).max(F::PANELS);
            // Tiles read the inputs again for each unit, so units are larger, as long as every thread has one.
            let per_thread = self.outputs.div_ceil(LANES).div_ceil(compute.threads.n()).next_multiple_of(2);
            let at_once = match () {
                _ if tiles.is_some() => tiles::PANELS.min(per_thread),
                _ if becomes_wide => wide::UNIT.min(per_thread),
                _ => at_once,
            };
            let bytes = self.panels.bytes();
            compute.threads.columns(out, self.outputs, at_once * LANES, &mut rooms, |unit, mut out, room| {
                let first = unit * at_once;
                let outputs = (self.outputs - first * LANES).min(at_once * LANES);
                let n = outputs.div_ceil(LANES);
                let weights = Panels {
                    bytes: &bytes[first * self.panel..(first + n) * self.panel],
                    n,
                    panel: self.panel,
                    blocks: self.inputs / F::BLOCK.0,
                };
                if let Some(isa) = tiles {
                    return F::multiply_tiles(isa, format, weights, inputs, room, &mut out);
                }
                if becomes_wide {
                    return F::multiply_wide(compute.isa, weights, inputs, room, &mut out);
                }
                let (deterministic, format) = (format != InputFormat::Pairs, std::marker::PhantomData);
                let (weights, out) = (&weights, &mut out);
                if inputs.n > inputs::TILE {
                    compute.isa.run(Multiply::<F, true> { weights, inputs, deterministic, out, format });
                }
                if !tokens::<false>(inputs.n).is_empty() {
                    compute.isa.run(Multiply::<F, false> { weights, inputs, deterministic, out, format });
                }
            });
            input.put_rooms(rooms);
        });
    }
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} [{}, {}]", self.encoding, self.outputs, self.inputs)
    }
}

/// The tokens that a kernel computes, of `n`: whole tiles if `MANY`, else all of one tile or what whole ones leave.
fn tokens<const MANY: bool>(n: usize) -> Range<usize> {
    let whole = n / inputs::TILE * inputs::TILE;
    match MANY {
        true => 0..whole,
        false if n > inputs::TILE => whole..n,
        false => 0..n,
    }
}

/// Processes the tokens `$tokens` in tiles: `$kernel::<S, T>(…, first token)` for T of 8, 4, 2 and 1, or of 8 alone if `$whole`.
macro_rules! for_token_tiles {
    ($tokens:expr, $whole:expr, $first:ident, $T:ident => $body:expr) => {{
        let std::ops::Range { start: mut $first, end } = $tokens;
        while $first < end {
            let left = end - $first;
            $first += if $whole || left >= 8 {
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

/// Runs `$body` for every `$N` tokens of `$T` from `$first` on, in order: those whose products with `$n_quads` quads of codes of
/// `$bits` bits share loads.
macro_rules! for_tokens_together {
    ($S:ident, $bits:expr, $n_quads:literal, $first:ident < $T:ident, $N:ident => $body:expr) => {{
        let mut $first = 0;
        while $first < $T {
            $first += if const { crate::arch::together::<$S>($bits, $n_quads, $T) == 4 && $T.is_multiple_of(4) } {
                const $N: usize = 4;
                $body;
                $N
            } else if const { crate::arch::together::<$S>($bits, $n_quads, $T) >= 2 && $T.is_multiple_of(2) } {
                const $N: usize = 2;
                $body;
                $N
            } else {
                const $N: usize = 1;
                $body;
                $N
            };
        }
    }};
}
use for_tokens_together;
