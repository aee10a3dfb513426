//! The kernel of formats with one scale per 32 codes.
//!
//! ```text
//! w = scale × (code − zero) [+ minimum]
//!
//! for each block:  units = Σ over 8 quads dot4(code, x's codes) − zero × Σ x's codes
//!                  y += units × (scale × x's scale) [+ minimum × Σ x]
//! ```
//!
//! Eight products of 64 bytes per block of 16 rows and token, a product and a multiply-add for the scales.
//!
//! Measured on two Zen 4 cores (docs/performance.md): one token of q8_0 and q4_0 at 0.97 of the read limit while memory is slow, at
//! 0.85 while it is fast. On Zen 5, 512 tokens at 1.2 TFLOP/s. Two panels that share the broadcast values of x were slower: for 8
//! and 16 tokens by 10 to 20 %, and no faster for 512, where the products themselves are the limit. With AVX2 (Zen 3) the products of 64
//! tokens of q4_0 take three fifths of the time, as long as their instructions need at least; scaling takes a quarter, unpacking a seventh.
use super::codes::Codes;
use super::decode::{self, Decode, Map, TakeQuads};
use super::inputs::{
    InputFormat, Inputs, NEGATIVE_SUM, TILE_SCALES, TILE_SUMS, TILE_TOKENS, TileGroup, scale_of, sum_of,
};
use super::pair_tiles;
use super::room::Room;
use super::tiles::{self, Rows, TileFormat, Units, load_rows, store_rows};
use super::{Format, Layout, Panels, for_token_tiles, for_tokens_together, put, tokens, wide};
use crate::Compute;
use crate::arch::{Columns, Isa, LANES, Simd, TileIsa, widen};
use kvist_device::weights::blocks::Block;
use std::marker::PhantomData;

/// An encoding with one scale per 32 codes, and its layout in panels.
pub trait PackedBlock: Block {
    type Codes: Codes;
    #[inline(always)]
    fn load_scale<S: Simd>(s: S, scales: &[u8; 32]) -> S::F {
        if Self::BF16_SCALE { s.load_bf16(scales) } else { s.load_f16(scales) }
    }
}

/// Makes a [`PackedBlock`] a `Format`. Scales of 16 rows, then their minima.
pub struct Blocks<F>(PhantomData<F>);

impl<F: PackedBlock> Blocks<F> {
    const HAS_MINIMUM: bool = F::ZERO_BITS.is_none();
}

impl<F: PackedBlock> Format for Blocks<F> {
    const BLOCK: (usize, usize) = (32, F::BYTES);
    const CODES: usize = F::Codes::BYTES;
    const SCALES: usize = 2 * LANES * if Self::HAS_MINIMUM { 2 } else { 1 };

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        F::Codes::put(&F::codes(block), lane, codes);
        // The minimum, if any, is an f16 after the scale.
        let both = [F::scale(block), F::minimum(block)];
        for (scales, bytes) in scales.chunks_exact_mut(2 * LANES).zip(both) {
            scales[2 * lane..2 * lane + 2].copy_from_slice(&if F::BF16_SCALE {
                bytes
            } else {
                decode::one_nan(bytes)
            });
        }
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let at = |row: usize| u16::from_le_bytes([scales[2 * (row + lane)], scales[2 * (row + lane) + 1]]);
        let scale = if F::BF16_SCALE { f32::from_bits(u32::from(at(0)) << 16) } else { widen(at(0)) };
        let minimum = if Self::HAS_MINIMUM { widen(at(LANES)) } else { 0.0 };
        let zero = F::ZERO_BITS.map_or(0, |bits| 1i32 << bits);
        for (out, code) in out.iter_mut().zip(F::Codes::get(codes, lane)) {
            let code = F::TABLE.map_or(code, |table| table[usize::from(code)]);
            *out = scale * (i32::from(code) - zero) as f32 + minimum;
        }
    }

    fn input(compute: &Compute, n: usize) -> InputFormat {
        pair_tiles::input(compute, n).or(wide::input(compute, n)).unwrap_or(tiles::input(compute, n))
    }

    fn multiply_tiles(
        isa: TileIsa,
        format: InputFormat,
        weights: Panels<'_>,
        inputs: &Inputs,
        room: &mut Room,
        out: &mut Columns<'_, f32>,
    ) {
        match format {
            InputFormat::TilePairs => pair_tiles::multiply::<Self>(isa, weights, inputs, room, out),
            _ => tiles::multiply::<Self>(isa, weights, inputs, out),
        }
    }

    fn multiply_wide(
        isa: Isa,
        weights: Panels<'_>,
        inputs: &Inputs,
        room: &mut Room,
        out: &mut Columns<'_, f32>,
    ) {
        wide::multiply::<Self>(isa, weights, inputs, room, out);
    }

    #[inline(always)]
    fn multiply<S: Simd, const MANY: bool>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        _: bool,
        out: &mut Columns<'_, f32>,
    ) {
        for panel in 0..weights.n {
            for_token_tiles!(tokens::<MANY>(inputs.n), MANY, first, T => {
                tile::<S, F, T, MANY>(s, weights, inputs, first, panel, out);
            });
        }
    }
}

/// Adds the units of a block: `[scale, minimum]` are those of the weights, `x` the scale and the sum of the inputs.
#[inline(always)]
fn add<S: Simd, F: PackedBlock>(s: S, units: S::I, [scale, minimum]: [S::F; 2], x: [f32; 2], sum: &mut S::F) {
    *sum = s.fma(s.to_f32(units), s.mul(scale, s.splat(x[0])), *sum);
    if F::ZERO_BITS.is_none() {
        *sum = s.fma(minimum, s.splat(x[1]), *sum);
    }
}

/// The scales and the minima of a block.
#[inline(always)]
fn factors<S: Simd, F: PackedBlock>(s: S, scales: &[[u8; 2 * LANES]]) -> [S::F; 2] {
    let minimum = if F::ZERO_BITS.is_none() { s.load_f16(&scales[1]) } else { s.splat(0.0) };
    [F::load_scale(s, &scales[0]), minimum]
}

impl<F: PackedBlock> TileFormat for Blocks<F> {
    const GROUPS: usize = 1;

    #[inline(always)]
    fn signed<S: Simd>(s: S, codes: &[u8], _: &[u8]) -> [S::I; 8] {
        tiles::signed(s, load::<S, F>(s, codes), F::ZERO_BITS)
    }

    #[inline(always)]
    fn start<S: Simd>(s: S, rows: &Rows) -> [S::F; TILE_TOKENS] {
        load_rows(s, rows)
    }

    #[inline(always)]
    fn add<S: Simd>(
        s: S,
        scales: &[u8],
        _: usize,
        units: &Units,
        x: &TileGroup,
        sums: &mut [S::F; TILE_TOKENS],
    ) {
        let factors = factors::<S, F>(s, scales.as_chunks().0);
        let at = |row: usize, t: usize| f32::from_bits(x[row][t].cast_unsigned());
        for t in 0..TILE_TOKENS {
            let x = [at(TILE_SCALES, t), at(TILE_SUMS, t)];
            add::<S, F>(s, s.load_bytes(&units[t]), factors, x, &mut sums[t]);
        }
    }

    #[inline(always)]
    fn finish<S: Simd>(s: S, _: &[u8], _: &[TileGroup], sums: [S::F; TILE_TOKENS], rows: &mut Rows) {
        store_rows(s, sums, rows);
    }
}

impl<F: PackedBlock> Blocks<F> {
    /// Weights are `scale × code + zero`.
    #[inline(always)]
    fn affine<S: Simd>(s: S, scales: &[u8]) -> [S::F; 2] {
        let [scale, minimum] = factors::<S, F>(s, scales.as_chunks().0);
        [scale, F::ZERO_BITS.map_or(minimum, |bits| s.mul(scale, s.splat(-((1 << bits) as f32))))]
    }
}

impl<F: PackedBlock> Decode for Blocks<F> {
    const INPUTS: usize = 32;

    #[inline(always)]
    fn decode<S: Simd>(
        s: S,
        codes: &[u8],
        scales: &[u8],
        _: usize,
        map: Map<S>,
        take: &mut impl TakeQuads<S>,
    ) {
        let affine = map.of(s, Self::affine(s, scales));
        for quad in load::<S, F>(s, codes).into_iter().enumerate() {
            decode::quad(s, quad, affine, take);
        }
    }

    #[inline(always)]
    fn bound<S: Simd>(s: S, scales: &[u8], _: usize) -> S::F {
        let [scale, zero] = Self::affine(s, scales);
        let table = F::TABLE.as_ref();
        decode::bound(s, [scale, zero], decode::range_of_codes(F::Codes::BITS, table), F::ZERO_BITS)
    }
}

/// Bits of what [`load`] returns: what codes stand for in a table has eight.
const fn bits_of<F: PackedBlock>() -> u32 {
    const {
        assert!(
            F::Codes::BITS < 8 && F::TABLE.is_none() || matches!(F::ZERO_BITS, Some(7)),
            "the zero of 8 bits is 128"
        )
    };
    if F::TABLE.is_some() { 8 } else { F::Codes::BITS }
}

/// The codes of a block, or what they stand for in the table.
#[inline(always)]
fn load<S: Simd, F: PackedBlock>(s: S, codes: &[u8]) -> [S::I; 8] {
    let mut w = F::Codes::load(s, codes);
    if let Some(table) = &F::TABLE {
        for quad in &mut w {
            *quad = s.lookup(table, *quad);
        }
    }
    w
}

#[inline(always)]
fn tile<S: Simd, F: PackedBlock, const T: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let ahead = weights.ahead::<T, MANY>(inputs.n, first, 1);
    let mut sums = [s.splat(0.0); T];
    let chunks = weights.chunks::<Blocks<F>>(panel);
    for (chunk, x) in chunks.zip(inputs.groups_of::<T>(first).chunks(Layout::<Blocks<F>>::BLOCKS)) {
        ahead.prefetch(s, &chunk[..Layout::<Blocks<F>>::SCALES]);
        for (i, x) in x.iter().enumerate() {
            let (codes, scales) = Layout::<Blocks<F>>::of_chunk(chunk, i);
            ahead.prefetch(s, codes);
            let factors = factors::<S, F>(s, scales.as_chunks().0); // before the codes, as in memory
            let w = load::<S, F>(s, codes);
            for_tokens_together!(S, bits_of::<F>(), 8, first < T, N => {
                let mut starts = [s.splat_i(0); N];
                for n in 0..N {
                    let t = first + n;
                    if let Some(bits) = F::ZERO_BITS {
                        starts[n] = s.shift_left(s.splat_i(x[NEGATIVE_SUM][t]), bits);
                    }
                }
                let units = s.dot_codes(bits_of::<F>(), &w, |q, n| x[q][first + n], starts);
                for n in 0..N {
                    let t = first + n;
                    add::<S, F>(s, units[n], factors, [scale_of(x, t), sum_of(x, t)], &mut sums[t]);
                }
            });
        }
    }
    for (t, sums) in sums.into_iter().enumerate() {
        put(s, out, first + t, panel, sums);
    }
}
