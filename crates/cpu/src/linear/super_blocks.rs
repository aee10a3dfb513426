//! The kernel of formats with super-blocks of 256 weights. Groups have small integer scales, and the super-block one
//! float scale.
//!
//! ```text
//! w = d × sc × (code − zero) [− dmin × m]          8 groups of 32, or 16 of 16; sc in 8 bits with a sign, m in 6
//!
//! per group:        units = Σ dot4(code, x's codes) − zero × Σ x's codes
//! per 32 inputs:    a += Σ (units × sc) × x's scale, a sum of one or two groups   [b += m × Σ x]
//! per super-block:  y += d × a [− dmin × b]
//! ```
//!
//! Per 32 inputs of 16 rows: 8 products of 64 bytes per token.
//!
//! Measured on two Zen 4 cores (docs/performance.md): one token of q4_K and q6_K at 0.97 to 0.98 of the read limit while memory is slow,
//! at 0.8 while it is fast; 512 tokens at 590 GFLOP/s, 0.9 of q8_0's rate.
use super::codes::Codes;
use super::decode::{self, Decode, Map, TakeQuads};
use super::inputs::{
    self, InputFormat, Inputs, MINUS_32_SUMS, NEGATIVE_SUM, TILE_SCALES, TILE_SUMS, TILE_TOKENS, TileGroup,
    scale_of, sum_of,
};
use super::pair_tiles;
use super::room::Room;
use super::tiles::{self, Rows, TileFormat, Units, load_rows, store_rows};
use super::{Format, Layout, Panels, for_token_tiles, for_tokens_together, put, tokens, wide};
use crate::Compute;
use crate::arch::{Columns, Isa, LANES, Simd, TileIsa, widen};
use kvist_device::weights::super_blocks::{SUPER, SuperBlock, Values};
use std::marker::PhantomData;

/// An encoding with super-blocks, and its layout in panels.
pub trait PackedSuperBlock: SuperBlock {
    type Codes: Codes;
}

/// Makes a [`PackedSuperBlock`] a `Format`. Scales of a super-block: sc `[groups][16]`, m `[groups][16]`, d `[16]`,
/// dmin `[16]`, its own table `[16]`.
pub struct SuperBlocks<F>(PhantomData<F>);

impl<F: PackedSuperBlock> SuperBlocks<F> {
    const HAS_MINIMA: bool = F::ZERO_BITS.is_none();
    const OWN_TABLE: bool = matches!(F::VALUES, Values::OwnTable);
    const GROUPS: usize = if F::HALVES { 16 } else { 8 };
    /// Bytes before d, and those of d and dmin: two f16, or one f32 of the same size.
    const SMALL: usize = Self::GROUPS * LANES * if Self::HAS_MINIMA { 2 } else { 1 };
    const LARGE: usize = 2 * LANES * if Self::HAS_MINIMA || Self::OWN_TABLE { 2 } else { 1 };

    #[inline(always)]
    fn table(scales: &[u8]) -> Option<[u8; 16]> {
        match F::VALUES {
            Values::Codes => None,
            Values::Table(table) => Some(table),
            Values::OwnTable => scales.last_chunk().copied(),
        }
    }
}

impl<F: PackedSuperBlock> Format for SuperBlocks<F> {
    const BLOCK: (usize, usize) = (SUPER, F::BYTES);
    const CODES: usize = 8 * F::Codes::BYTES;
    const SCALES: usize = Self::SMALL + Self::LARGE + if Self::OWN_TABLE { 16 } else { 0 };

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        for (i, codes) in codes.chunks_exact_mut(F::Codes::BYTES).enumerate() {
            F::Codes::put(&F::codes(block, i), lane, codes);
        }
        let (small, large) = scales.split_at_mut(Self::SMALL);
        for i in 0..Self::GROUPS {
            let (scale, minimum) = F::scale(block, i);
            small[i * LANES + lane] = scale.cast_unsigned();
            if Self::HAS_MINIMA {
                small[(Self::GROUPS + i) * LANES + lane] = minimum;
            }
        }
        let (factors, table) = large.split_at_mut(Self::LARGE);
        let found = F::factors(block);
        if Self::OWN_TABLE {
            let d = f32::from_le_bytes([found[0][0], found[0][1], found[1][0], found[1][1]]);
            let d = if d.is_nan() { f32::NAN } else { d };
            factors[4 * lane..4 * lane + 4].copy_from_slice(&d.to_le_bytes());
            table.copy_from_slice(&F::table(block));
            return;
        }
        for (factors, factor) in factors.chunks_exact_mut(2 * LANES).zip(found) {
            factors[2 * lane..2 * lane + 2].copy_from_slice(&decode::one_nan(factor));
        }
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let (small, large) = scales.split_at(Self::SMALL);
        let factor = |row: usize| match Self::OWN_TABLE {
            true => f32::from_le_bytes([0, 1, 2, 3].map(|i| large[4 * row + i])),
            false => widen(u16::from_le_bytes([large[2 * row], large[2 * row + 1]])),
        };
        let table = Self::table(scales);
        let zero = F::ZERO_BITS.map_or(0, |bits| 1i32 << bits);
        for (i, out) in out.chunks_exact_mut(32).enumerate() {
            let codes = F::Codes::get(&codes[i * F::Codes::BYTES..(i + 1) * F::Codes::BYTES], lane);
            for (j, (out, code)) in out.iter_mut().zip(codes).enumerate() {
                let group = if F::HALVES { 2 * i + j / 16 } else { i };
                let scale = factor(lane) * f32::from(small[group * LANES + lane].cast_signed());
                let code = table.map_or(code, |table| table[usize::from(code)]);
                *out = scale * (i32::from(code) - zero) as f32;
                if Self::HAS_MINIMA {
                    *out -= factor(LANES + lane) * f32::from(small[(Self::GROUPS + group) * LANES + lane]);
                }
            }
        }
    }

    fn input(compute: &Compute, n: usize) -> InputFormat {
        let exact = if F::HALVES { InputFormat::Codes } else { tiles::input(compute, n) };
        pair_tiles::input(compute, n).or(wide::input(compute, n)).unwrap_or(exact)
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

/// Of formats with a scale per 32 inputs; the others have no tiles of bytes.
impl<F: PackedSuperBlock> TileFormat for SuperBlocks<F> {
    const GROUPS: usize = 8;

    #[inline(always)]
    fn signed<S: Simd>(s: S, codes: &[u8], scales: &[u8]) -> [S::I; 8] {
        let w = load::<S, F>(s, codes, Self::table(scales).as_ref());
        tiles::signed(s, w, F::ZERO_BITS)
    }

    #[inline(always)]
    fn start<S: Simd>(s: S, _: &Rows) -> [S::F; TILE_TOKENS] {
        [s.splat(0.0); TILE_TOKENS]
    }

    #[inline(always)]
    fn add<S: Simd>(
        s: S,
        scales: &[u8],
        group: usize,
        units: &Units,
        x: &TileGroup,
        sums: &mut [S::F; TILE_TOKENS],
    ) {
        let [scale, _] = Self::group_factors(s, scales[..Self::SMALL].as_chunks().0, group);
        for t in 0..TILE_TOKENS {
            let x = f32::from_bits(x[TILE_SCALES][t].cast_unsigned());
            add::<S>(s, s.load_bytes(&units[t]), scale, x, &mut sums[t]);
        }
    }

    /// The minima come last, because the sums of both would not fit the registers.
    #[inline(always)]
    fn finish<S: Simd>(s: S, scales: &[u8], x: &[TileGroup], scaled: [S::F; TILE_TOKENS], rows: &mut Rows) {
        let mut least = [s.splat(0.0); TILE_TOKENS];
        if F::ZERO_BITS.is_none() {
            for (i, x) in x.iter().enumerate() {
                let [_, minimum] = Self::group_factors(s, scales[..Self::SMALL].as_chunks().0, i);
                for t in 0..TILE_TOKENS {
                    least[t] =
                        s.fma(minimum, s.splat(f32::from_bits(x[TILE_SUMS][t].cast_unsigned())), least[t]);
                }
            }
        }
        let mut sums = load_rows(s, rows);
        Self::add_block(s, scales, &scaled, &least, &mut sums);
        store_rows(s, sums, rows);
    }
}

impl<F: PackedSuperBlock> SuperBlocks<F> {
    /// The scale and the minimum of a group: at most seven bits and a sign, and six bits.
    #[inline(always)]
    fn group_factors<S: Simd>(s: S, small: &[[u8; LANES]], group: usize) -> [S::F; 2] {
        let minimum = match F::ZERO_BITS {
            None => s.to_f32(s.load_i8(&small[Self::GROUPS + group])),
            Some(_) => s.splat(0.0),
        };
        [s.to_f32(s.load_i8(&small[group])), minimum]
    }

    /// Adds a super-block.
    #[inline(always)]
    fn add_block<S: Simd, const T: usize>(
        s: S,
        scales: &[u8],
        scaled: &[S::F; T],
        least: &[S::F; T],
        sums: &mut [S::F; T],
    ) {
        let [d, dmin] = Self::block_factors(s, scales);
        for t in 0..T {
            sums[t] = s.fma(d, scaled[t], sums[t]);
            if F::ZERO_BITS.is_none() {
                sums[t] = s.sub(sums[t], s.mul(dmin, least[t]));
            }
        }
    }

    /// d and dmin.
    #[inline(always)]
    fn block_factors<S: Simd>(s: S, scales: &[u8]) -> [S::F; 2] {
        let large = scales[Self::SMALL..].as_chunks::<{ 2 * LANES }>().0;
        let d = match large.as_flattened().first_chunk() {
            Some(wide) if Self::OWN_TABLE => s.load_f32_bytes(wide),
            _ => s.load_f16(&large[0]),
        };
        [d, if Self::HAS_MINIMA { s.load_f16(&large[1]) } else { s.splat(0.0) }]
    }
}

impl<F: PackedSuperBlock> SuperBlocks<F> {
    /// Weights of a group are `scale × code + zero`.
    #[inline(always)]
    fn affine<S: Simd>(s: S, scales: &[u8], group: usize) -> [S::F; 2] {
        let [d, dmin] = Self::block_factors(s, scales);
        let [scale, minimum] = Self::group_factors(s, scales[..Self::SMALL].as_chunks::<LANES>().0, group);
        let scale = s.mul(d, scale);
        let zero = match F::ZERO_BITS {
            Some(bits) => s.mul(scale, s.splat(-((1 << bits) as f32))),
            None => s.sub(s.splat(0.0), s.mul(dmin, minimum)),
        };
        [scale, zero]
    }
}

impl<F: PackedSuperBlock> Decode for SuperBlocks<F> {
    const INPUTS: usize = SUPER;

    #[inline(always)]
    fn decode<S: Simd>(
        s: S,
        codes: &[u8],
        scales: &[u8],
        group: usize,
        map: Map<S>,
        take: &mut impl TakeQuads<S>,
    ) {
        let per_group = Self::GROUPS / 8;
        let quads = load::<S, F>(s, codes, Self::table(scales).as_ref());
        for part in 0..per_group {
            let affine = map.of(s, Self::affine(s, scales, per_group * group + part));
            for quad in 8 / per_group * part..8 / per_group * (part + 1) {
                decode::quad(s, (quad, quads[quad]), affine, take);
            }
        }
    }

    #[inline(always)]
    fn bound<S: Simd>(s: S, scales: &[u8], group: usize) -> S::F {
        let per_group = Self::GROUPS / 8;
        let codes = decode::range_of_codes(F::Codes::BITS, Self::table(scales).as_ref());
        // What is not a number is d or dmin, and so in every group.
        let mut bound = s.splat(0.0);
        for part in 0..per_group {
            let affine = Self::affine(s, scales, per_group * group + part);
            bound = decode::larger(s, bound, decode::bound(s, affine, codes, F::ZERO_BITS));
        }
        bound
    }
}

/// Adds the units of a group: `scale` is that of the weights, `x` that of the inputs. Units times a scale have less than 24
/// bits, so the product is exact.
#[inline(always)]
fn add<S: Simd>(s: S, units: S::I, scale: S::F, x: f32, scaled: &mut S::F) {
    *scaled = s.fma(s.mul(s.to_f32(units), scale), s.splat(x), *scaled);
}

/// Bits of what [`load`] returns: what codes stand for in a table has eight.
const fn bits_of<F: PackedSuperBlock>() -> u32 {
    let codes = matches!(F::VALUES, Values::Codes);
    const { assert!(F::Codes::BITS < 8 || matches!(F::ZERO_BITS, Some(7)), "the zero of 8 bits is 128") };
    if codes { F::Codes::BITS } else { 8 }
}

/// The codes of a group of 32, or what they stand for in the table.
#[inline(always)]
fn load<S: Simd, F: PackedSuperBlock>(s: S, codes: &[u8], table: Option<&[u8; 16]>) -> [S::I; 8] {
    let mut w = F::Codes::load(s, codes);
    if let Some(table) = table {
        for quad in &mut w {
            *quad = s.lookup(table, *quad);
        }
    }
    w
}

#[inline(always)]
fn tile<S: Simd, F: PackedSuperBlock, const T: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let ahead = weights.ahead::<T, MANY>(inputs.n, first, 1);
    let x = inputs.groups_of::<T>(first).as_chunks::<8>().0;
    let mut sums = [s.splat(0.0); T];
    const { assert!(Layout::<SuperBlocks<F>>::BLOCKS == 1, "a chunk is a super-block") };
    for (chunk, x) in weights.chunks::<SuperBlocks<F>>(panel).zip(x) {
        let (codes, scales) = Layout::<SuperBlocks<F>>::of_chunk(chunk, 0);
        ahead.prefetch(s, &chunk[..Layout::<SuperBlocks<F>>::SCALES]);
        let small = scales[..SuperBlocks::<F>::SMALL].as_chunks::<LANES>().0;
        let table = SuperBlocks::<F>::table(scales);
        let (mut scaled, mut least) = ([s.splat(0.0); T], [s.splat(0.0); T]);
        for (i, x) in x.iter().enumerate() {
            let codes = &codes[i * F::Codes::BYTES..(i + 1) * F::Codes::BYTES];
            ahead.prefetch(s, codes);
            let w = load::<S, F>(s, codes, table.as_ref());
            if F::HALVES {
                halves::<S, F, T>(s, &w, small, i, x, &mut scaled, &mut least);
            } else {
                let [scale, minimum] = SuperBlocks::<F>::group_factors(s, small, i);
                for_tokens_together!(S, bits_of::<F>(), 8, first < T, N => {
                    let mut starts = [s.splat_i(0); N];
                    for n in 0..N {
                        if let Some(bits) = F::ZERO_BITS {
                            starts[n] = s.shift_left(s.splat_i(x[NEGATIVE_SUM][first + n]), bits);
                        }
                    }
                    let units = s.dot_codes(bits_of::<F>(), &w, |q, n| x[q][first + n], starts);
                    for n in 0..N {
                        let t = first + n;
                        add(s, units[n], scale, scale_of(x, t), &mut scaled[t]);
                        if F::ZERO_BITS.is_none() {
                            least[t] = s.fma(minimum, s.splat(sum_of(x, t)), least[t]);
                        }
                    }
                });
            }
        }
        SuperBlocks::<F>::add_block(s, scales, &scaled, &least, &mut sums);
    }
    for (t, sums) in sums.into_iter().enumerate() {
        put(s, out, first + t, panel, sums);
    }
}

/// −zero × the sum of a half's codes, from −32 times the sum.
#[inline(always)]
fn start_of_half<F: PackedSuperBlock>(minus_32_sum: i32) -> i32 {
    match F::ZERO_BITS {
        Some(bits) if bits >= 5 => minus_32_sum << (bits - 5),
        Some(bits) => minus_32_sum >> (5 - bits),
        None => 0,
    }
}

/// 32 inputs whose two halves have separate scales. The halves are added before the scale of the inputs; of q2_K, q3_K and q6_K, that
/// sum has at most 24 bits and is exact.
#[inline(always)]
fn halves<S: Simd, F: PackedSuperBlock, const T: usize>(
    s: S,
    w: &[S::I; 8],
    small: &[[u8; LANES]],
    i: usize,
    x: &inputs::Group<T>,
    scaled: &mut [S::F; T],
    least: &mut [S::F; T],
) {
    let low = SuperBlocks::<F>::group_factors(s, small, 2 * i);
    let high = SuperBlocks::<F>::group_factors(s, small, 2 * i + 1);
    let codes = w.as_chunks::<4>().0;
    for_tokens_together!(S, bits_of::<F>(), 4, first < T, N => {
        let (mut low_starts, mut high_starts) = ([s.splat_i(0); N], [s.splat_i(0); N]);
        for n in 0..N {
            low_starts[n] = s.splat_i(start_of_half::<F>(x[MINUS_32_SUMS][first + n]));
            high_starts[n] = s.splat_i(start_of_half::<F>(x[MINUS_32_SUMS + 1][first + n]));
        }
        let low_units = s.dot_codes(bits_of::<F>(), &codes[0], |q, n| x[q][first + n], low_starts);
        let high_units = s.dot_codes(bits_of::<F>(), &codes[1], |q, n| x[4 + q][first + n], high_starts);
        for n in 0..N {
            let t = first + n;
            let units = s.mul(s.to_f32(low_units[n]), low[0]);
            let units = s.fma(s.to_f32(high_units[n]), high[0], units);
            scaled[t] = s.fma(units, s.splat(scale_of(x, t)), scaled[t]);
            if F::ZERO_BITS.is_none() {
                for (half, [_, minimum]) in [low, high].into_iter().enumerate() {
                    let sum = x[MINUS_32_SUMS + half][t] as f32 * (scale_of(x, t) / -32.0);
                    least[t] = s.fma(minimum, s.splat(sum), least[t]);
                }
            }
        }
    });
}
