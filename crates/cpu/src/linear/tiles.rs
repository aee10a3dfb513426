//! Packed weights and many tokens, as products of tiles of bytes.
//!
//! ```text
//! units[16 tokens][16 outputs] = x's codes [tokens][inputs] × w's codes [inputs][outputs]     per scale of w: 32 inputs
//! y += units × scales                                             the operations of the kernels of vectors, in their order
//! ```
//!
//! The integers are exact, so a row has the same bits as one that vectors compute, in whatever batch.
//!
//! Loops, from the outside: tokens whose codes stay in the second-level cache; panels; 256 inputs, whose weights become
//! signed bytes once for all those tokens; tiles of tokens. While the vectors scale the units of a product, the matrix
//! unit computes the next three.
//!
//! Per 32 inputs, 16 tokens and 16 outputs: one product of 16 cycles with half of the matrix unit, because a product sums up
//! 32 inputs where 64 would fit; 48 vector operations (24 cycles at best), so these are the limit. Formats with a scale per
//! 16 inputs would take twice of both, which is no faster than vectors alone: they have no tiles.
//!
//! Measured on an Intel Xeon (docs/performance.md): a prompt of 512 tokens at 1.1 (q8_0) and 1.3 times (q4_K) the speed of vectors.
use super::ahead;
use super::inputs::{CODE_STEPS, GROUP, InputFormat, Inputs, TILE_CODE_ROWS, TILE_TOKENS, TileGroup};
use super::{Format, Layout, Panels, put};
use crate::Compute;
use crate::arch::{Columns, LANES, Shapes, Simd, TileIsa, TileKernel, Tiles};
use std::marker::PhantomData;
use std::ops::Range;

/// Fewest tokens for tiles. A tile takes as long for few tokens as for sixteen.
pub const TILES_FROM: usize = 9;
/// Most panels per unit of work. The inputs of some tokens stay in the second-level cache while all panels of a unit read them.
pub const PANELS: usize = 16;
/// Tokens that go through a panel together: at most so many, and at most so many bytes of codes.
const MOST_TOKENS: usize = 128;
const TOKEN_BYTES: usize = 1 << 20;
/// Products that are on their way from the matrix unit to the vectors, and one that is added. Their units take 4 KiB, so
/// that no load waits for a store whose address has the same lower bits.
const RING: usize = 4;

/// The units of a group: `[16 tokens][16 outputs]` of i32.
pub type Units = [[u8; 4 * LANES]; TILE_TOKENS];
/// The sums of a tile.
pub type Rows = [[f32; LANES]; TILE_TOKENS];

/// The format in which packed weights read `n` tokens.
pub fn input(compute: &Compute, n: usize) -> InputFormat {
    match compute.isa.tiles() {
        Some(_) if n >= TILES_FROM => InputFormat::TileCodes,
        _ => InputFormat::Codes,
    }
}

/// A packed encoding.
pub trait TileFormat: Format + Sized {
    /// Groups of 32 inputs per block of the file.
    const GROUPS: usize;

    /// The codes of a group of 32 inputs less the format's zero, as signed bytes. `scales` are those of its block.
    fn signed<S: Simd>(s: S, codes: &[u8], scales: &[u8]) -> [S::I; 8];
    /// What a chunk is added to: the sums themselves, or zeros.
    fn start<S: Simd>(s: S, rows: &Rows) -> [S::F; TILE_TOKENS];
    /// Scales the units of group `group` of a block and adds them. `scales` are those of the block.
    fn add<S: Simd>(
        s: S,
        scales: &[u8],
        group: usize,
        units: &Units,
        x: &TileGroup,
        sums: &mut [S::F; TILE_TOKENS],
    );
    /// Writes the sums, after all groups of a chunk. `scales` are those of its first block, `x` has a group per group of the chunk.
    fn finish<S: Simd>(s: S, scales: &[u8], x: &[TileGroup], sums: [S::F; TILE_TOKENS], rows: &mut Rows);
}

/// The rows, as vectors.
#[inline(always)]
pub fn load_rows<S: Simd>(s: S, rows: &Rows) -> [S::F; TILE_TOKENS] {
    let mut sums = [s.splat(0.0); TILE_TOKENS];
    for t in 0..TILE_TOKENS {
        sums[t] = s.load(&rows[t]);
    }
    sums
}

#[inline(always)]
pub fn store_rows<S: Simd>(s: S, sums: [S::F; TILE_TOKENS], rows: &mut Rows) {
    for t in 0..TILE_TOKENS {
        s.store(sums[t], &mut rows[t]);
    }
}

/// Signed codes: less `1 << zero_bits`, if there is a zero. Codes without one have fewer than eight bits.
#[inline(always)]
pub fn signed<S: Simd>(s: S, mut codes: [S::I; 8], zero_bits: Option<u32>) -> [S::I; 8] {
    let Some(bits) = zero_bits else { return codes };
    let sign = s.splat_i(0x8080_8080u32.cast_signed());
    for x in &mut codes {
        *x = match bits {
            7 => s.xor(*x, sign),
            // With the sign bit set, no byte borrows from the next one.
            _ => s.xor(s.sub_i(s.or(*x, sign), s.splat_i(0x0101_0101 << bits)), sign),
        };
    }
    codes
}

/// Tiles 0 and 1 are units, 4 and 5 tokens, 6 and 7 weights: 32 inputs.
struct Bytes;

impl Shapes for Bytes {
    const ROWS: [usize; 8] = [16, 16, 0, 0, 16, 16, 8, 8];
    const BYTES: [usize; 8] = [64, 64, 0, 0, 32, 32, 64, 64];
}

/// Buffers of a call, each from a cache line on.
#[repr(align(64))]
struct Room {
    /// `[groups][8 quads][16 outputs]`.
    codes: [u32; CODE_STEPS * 8 * LANES],
    /// A ring.
    units: [Units; RING],
    sums: [Rows; MOST_TOKENS / TILE_TOKENS],
}

/// All panels of a unit of work times all tokens.
struct Multiply<'k, 'o, F> {
    weights: Panels<'k>,
    inputs: &'k Inputs,
    out: &'k mut Columns<'o, f32>,
    format: PhantomData<F>,
}

/// Multiplies adjacent panels with all tokens.
pub fn multiply<F: TileFormat>(
    isa: TileIsa,
    weights: Panels<'_>,
    inputs: &Inputs,
    out: &mut Columns<'_, f32>,
) {
    isa.run(Multiply::<F> { weights, inputs, out, format: PhantomData });
}

impl<F: TileFormat> TileKernel for Multiply<'_, '_, F> {
    type Shapes = Bytes;
    type Out = ();
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Bytes>>(self, s: S, tiles: &mut T) {
        let Multiply { weights, inputs, out, .. } = self;
        let zero = [[0.0; LANES]; TILE_TOKENS];
        let mut room = Room { codes: [0; _], units: [[[0; _]; _]; _], sums: [zero; _] };
        let n_tiles = inputs.n.div_ceil(TILE_TOKENS);
        let tile_bytes = inputs.width / GROUP * size_of::<TileGroup>();
        let abreast = (TOKEN_BYTES / tile_bytes).clamp(2, MOST_TOKENS / TILE_TOKENS);
        for first in (0..n_tiles).step_by(abreast) {
            let range = first..n_tiles.min(first + abreast);
            for panel in 0..weights.n {
                panel_times::<S, T, F>(s, tiles, &weights, panel, inputs, range.clone(), &mut room);
                let tokens = range.start * TILE_TOKENS..inputs.n.min(range.end * TILE_TOKENS);
                for (token, sums) in tokens.zip(room.sums.as_flattened()) {
                    put(s, out, token, panel, s.load(sums));
                }
            }
        }
    }
}

/// A panel times some tiles of tokens, into the sums of `room`.
#[inline(always)]
fn panel_times<S: Simd, T: Tiles<Bytes>, F: TileFormat>(
    s: S,
    tiles: &mut T,
    weights: &Panels<'_>,
    panel: usize,
    inputs: &Inputs,
    range: Range<usize>,
    room: &mut Room,
) {
    let panel = weights.get(panel);
    let Room { codes: signed, units, sums } = room;
    sums[..range.len()].fill([[0.0; LANES]; TILE_TOKENS]);
    let per_chunk = CODE_STEPS / F::GROUPS;
    for chunk in 0..weights.blocks.div_ceil(per_chunk) {
        let blocks = chunk * per_chunk..weights.blocks.min((chunk + 1) * per_chunk);
        let n = blocks.len() * F::GROUPS;
        unpack::<S, F>(s, panel, blocks.clone(), signed);
        let scales_of = |block: usize| &panel[Layout::<F>::scales(blocks.start + block)];
        // Products run ahead of the vectors, also from one tile into the next, unless a tile has too few.
        let into_next = n >= RING - 1;
        let (mut x, mut at) = (inputs.tile_codes(range.start, chunk), 0);
        for (i, (tile, rows)) in range.clone().zip(&mut *sums).enumerate() {
            // The same chunk of the next panel.
            ahead::prefetch_part(s, &panel[Layout::<F>::span(blocks.clone())], weights.panel, i, range.len());
            let next_x = match tile + 1 < range.end {
                true => inputs.tile_codes(tile + 1, chunk),
                false => &[],
            };
            if i == 0 || !into_next {
                for group in 0..n.min(RING - 1) {
                    product(tiles, signed, x, group, &mut units[(at + group) % RING]);
                }
            }
            let mut tile_sums = F::start(s, rows);
            for group in 0..n {
                let ahead = group + RING - 1;
                let slot = (at + RING - 1) % RING;
                if ahead < n {
                    product(tiles, signed, x, ahead, &mut units[slot]);
                } else if into_next && ahead - n < next_x.len() {
                    product(tiles, signed, next_x, ahead - n, &mut units[slot]);
                }
                let scales = scales_of(group / F::GROUPS);
                F::add(s, scales, group % F::GROUPS, &units[at % RING], &x[group], &mut tile_sums);
                at += 1;
            }
            F::finish(s, scales_of(0), x, tile_sums, rows);
            x = next_x;
        }
    }
}

/// The signed codes of some blocks of a panel.
#[inline(always)]
fn unpack<S: Simd, F: TileFormat>(s: S, panel: &[u8], blocks: Range<usize>, signed: &mut [u32]) {
    let groups = blocks.flat_map(|block| {
        let (codes, scales) = (&panel[Layout::<F>::codes(block)], &panel[Layout::<F>::scales(block)]);
        codes.chunks_exact(F::CODES / F::GROUPS).map(move |codes| (codes, scales))
    });
    for ((codes, scales), out) in groups.zip(signed.as_chunks_mut().0.as_chunks_mut::<8>().0) {
        for (quad, line) in F::signed(s, codes, scales).into_iter().zip(out) {
            s.store_i(quad, line);
        }
    }
}

/// The units of a group of a chunk.
#[inline(always)]
fn product<T: Tiles<Bytes>>(tiles: &mut T, codes: &[u32], x: &[TileGroup], group: usize, units: &mut Units) {
    let (x, codes) = (x[group][..TILE_CODE_ROWS].as_flattened(), &codes[group * 8 * LANES..]);
    let units = units.as_flattened_mut();
    if group.is_multiple_of(2) {
        one::<T, 0, 4, 6>(tiles, x, codes, units);
    } else {
        one::<T, 1, 5, 7>(tiles, x, codes, units);
    }
}

#[inline(always)]
fn one<T: Tiles<Bytes>, const C: usize, const A: usize, const B: usize>(
    tiles: &mut T,
    x: &[i32],
    codes: &[u32],
    units: &mut [u8],
) {
    tiles.zero::<C>();
    tiles.load::<A, i32>(x, 8);
    tiles.load::<B, u32>(codes, LANES);
    tiles.dot_i8::<C, A, B>();
    tiles.store::<C, u8>(units, 4 * LANES);
}
