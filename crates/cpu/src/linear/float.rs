//! f32, f16 and bf16 weights.
//!
//! ```text
//! for each input i:   y[16] += w[16] * x[i]
//! ```
//!
//! One fused multiply-add per 16 weights and token. bf16 weights are stored in pairs of inputs for CPUs with pair
//! products. These are used for large batches and round x to bf16.
//!
//! Measured on two Zen 5 cores (docs/performance.md): 0.98 of the read limit for one token; for 512 the peak of fused
//! multiply-adds, 460 GFLOP/s, and twice that in bf16 pairs.
use super::decode::{Decode, Map, TakeQuads};
use super::inputs::{InputFormat, Inputs};
use super::pair_tiles;
use super::room::Room;
use super::{Format, Panels, for_token_tiles, put, tokens};
use crate::Compute;
use crate::arch::{Columns, LANES, Simd, TileIsa, Uses};
use crate::element::Element;
pub use crate::element::{BF16, F16, F32};
use std::ops::Range;

/// Minimum batch size for bf16 products, which round the inputs.
const DOTS_FROM: usize = 16;

/// f32 and f16: a vector of a panel contains one input of sixteen rows.
macro_rules! one_by_one {
    ($F:ident) => {
        impl Format for $F {
            const USES: Uses = Uses::Floats;
            const BLOCK: (usize, usize) = (1, $F::BYTES);
            const CODES: usize = $F::BYTES * LANES;
            const SCALES: usize = 0;
            const PANELS: usize = 4;
            fn pack(block: &[u8], lane: usize, codes: &mut [u8], _: &mut [u8]) {
                codes[$F::BYTES * lane..][..$F::BYTES].copy_from_slice(block);
            }
            fn unpack(codes: &[u8], _: &[u8], lane: usize, out: &mut [f32]) {
                out[0] = <$F as Element>::decode(&codes[$F::BYTES * lane..]);
            }
            fn input(_: &Compute, _: usize) -> InputFormat {
                InputFormat::Rows
            }
            #[inline(always)]
            fn multiply<S: Simd, const MANY: bool>(
                s: S,
                weights: &Panels<'_>,
                inputs: &Inputs,
                deterministic: bool,
                out: &mut Columns<'_, f32>,
            ) {
                all::<S, Self, MANY>(s, weights, inputs, deterministic, out);
            }
        }

        impl Tile for $F {
            #[inline(always)]
            fn tile<S: Simd, const T: usize, const N: usize, const P: usize, const MANY: bool>(
                s: S,
                weights: &Panels<'_>,
                inputs: &Inputs,
                _: bool,
                tokens: (usize, usize),
                panel: usize,
            ) -> [[S::F; P]; N] {
                plain::<S, Self, T, N, P, MANY>(s, weights, inputs, tokens, panel)
            }
        }
    };
}
one_by_one!(F32);
one_by_one!(F16);

/// Prefetch distance in bytes, of all panels that a tile reads side by side.
const AHEAD: usize = 32 << 10;

/// Prefetches what a tile of several tokens reads later: its arithmetic hides the next lines from the processor. One or two
/// tokens keep memory busy by themselves, and the tiles of many read most of the panel from the cache.
#[inline(always)]
fn fetch<S: Simd, V, const T: usize, const P: usize, const MANY: bool>(s: S, vector: &V) {
    if T > 2 && !MANY {
        s.prefetch(vector, AHEAD / P);
    }
}

#[inline(always)]
fn plain<S: Simd, F: Format + Element, const T: usize, const N: usize, const P: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    (first, skipped): (usize, usize),
    panel: usize,
) -> [[S::F; P]; N] {
    let width = inputs.width;
    let x = inputs.rows_of::<T>(first);
    let mut w: [&[F::Raw]; P] = [&[]; P];
    for p in 0..P {
        w[p] = &F::vectors(weights.get(panel + p))[..width];
    }
    let mut sums = [[s.splat(0.0); P]; N];
    for i in 0..width {
        let mut v = [s.splat(0.0); P];
        for p in 0..P {
            if skipped == 0 && i.is_multiple_of(F::PER_LINE) {
                fetch::<S, _, T, P, MANY>(s, &w[p][i]);
            }
            v[p] = F::widen(s, &w[p][i]);
        }
        for t in 0..N {
            let x = s.splat(x[i][skipped + t]);
            for p in 0..P {
                sums[t][p] = s.fma(v[p], x, sums[t][p]);
            }
        }
    }
    sums
}

/// bf16: pairs of inputs are adjacent.
impl Format for BF16 {
    const USES: Uses = Uses::Pairs;
    const BLOCK: (usize, usize) = (2, 4);
    const CODES: usize = 4 * LANES;
    const SCALES: usize = 0;
    const PANELS: usize = 4;
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], _: &mut [u8]) {
        codes[4 * lane..4 * lane + 4].copy_from_slice(block);
    }
    fn unpack(codes: &[u8], _: &[u8], lane: usize, out: &mut [f32]) {
        for (out, code) in out.iter_mut().zip(codes[4 * lane..].chunks_exact(2)) {
            *out = <BF16 as Element>::decode(code);
        }
    }
    fn input(compute: &Compute, n: usize) -> InputFormat {
        match compute.isa.tiles() {
            _ if n < DOTS_FROM || compute.deterministic => InputFormat::Rows,
            Some(_) => InputFormat::TilePairs,
            None if compute.isa.multiplies_pairs() => InputFormat::Pairs,
            None => InputFormat::Rows,
        }
    }
    fn multiply_tiles(
        isa: TileIsa,
        _: InputFormat,
        weights: Panels<'_>,
        inputs: &Inputs,
        room: &mut Room,
        out: &mut Columns<'_, f32>,
    ) {
        pair_tiles::multiply::<Self>(isa, weights, inputs, room, out);
    }
    #[inline(always)]
    fn multiply<S: Simd, const MANY: bool>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        deterministic: bool,
        out: &mut Columns<'_, f32>,
    ) {
        all::<S, Self, MANY>(s, weights, inputs, deterministic, out);
    }
}

impl Tile for BF16 {
    #[inline(always)]
    fn tile<S: Simd, const T: usize, const N: usize, const P: usize, const MANY: bool>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        deterministic: bool,
        (first, skipped): (usize, usize),
        panel: usize,
    ) -> [[S::F; P]; N] {
        let half = inputs.width / 2;
        let mut w: [&[[u8; 64]]; P] = [&[]; P];
        for p in 0..P {
            w[p] = &weights.get(panel + p).as_chunks().0[..half];
        }
        let mut sums = [[s.splat(0.0); P]; N];
        if deterministic {
            let x = &inputs.rows_of::<T>(first).as_chunks::<2>().0[..half];
            for i in 0..half {
                for p in 0..P {
                    if skipped == 0 {
                        fetch::<S, _, T, P, MANY>(s, &w[p][i]);
                    }
                    let (even, odd) = s.widen_pairs(s.load_bytes(&w[p][i]));
                    for t in 0..N {
                        sums[t][p] = s.fma(even, s.splat(x[i][0][skipped + t]), sums[t][p]);
                        sums[t][p] = s.fma(odd, s.splat(x[i][1][skipped + t]), sums[t][p]);
                    }
                }
            }
        } else {
            let x = inputs.pairs_of::<T>(first);
            for i in 0..half {
                let mut v = [s.splat_i(0); P];
                for p in 0..P {
                    v[p] = s.load_bytes(&w[p][i]);
                }
                for t in 0..N {
                    let x = s.splat_i(x[i][skipped + t]);
                    for p in 0..P {
                        sums[t][p] = s.dot2(sums[t][p], v[p], x);
                    }
                }
            }
        }
        sums
    }
}

impl Decode for BF16 {
    const INPUTS: usize = 2;
    const ARE_PAIRS: bool = true;
    fn decode<S: Simd>(_: S, _: &[u8], _: &[u8], _: usize, _: Map<S>, _: &mut impl TakeQuads<S>) {
        unreachable!("bf16 weights are pairs")
    }
    fn bound<S: Simd>(_: S, _: &[u8], _: usize) -> S::F {
        unreachable!("bf16 weights are pairs")
    }
}

/// The differences between the float types.
trait Tile {
    /// Sums of `N` tokens times `P` panels, starting at `panel`. `tokens` are the first one of a tile of `T`, and those of the tile
    /// that are skipped.
    fn tile<S: Simd, const T: usize, const N: usize, const P: usize, const MANY: bool>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        deterministic: bool,
        tokens: (usize, usize),
        panel: usize,
    ) -> [[S::F; P]; N];
}

/// Multiplies all panels, in groups of four and one, with all tokens.
#[inline(always)]
fn all<S: Simd, F: Tile, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    deterministic: bool,
    out: &mut Columns<'_, f32>,
) {
    let mut panel = 0;
    while panel < weights.n {
        panel += if weights.n - panel >= 4 {
            for_token_tiles!(tokens::<MANY>(inputs.n), MANY, first, T => if const { T * 4 <= S::ACCUMULATORS } {
                panels::<S, F, T, T, 4, MANY>(s, weights, inputs, deterministic, first, panel..panel + 4, out);
            } else if const { T * 2 <= S::ACCUMULATORS } {
                panels::<S, F, T, T, 2, MANY>(s, weights, inputs, deterministic, first, panel..panel + 4, out);
            } else {
                by_panel::<S, F, T, MANY>(s, weights, inputs, deterministic, first, panel..panel + 4, out);
            });
            4
        } else {
            for_token_tiles!(tokens::<MANY>(inputs.n), MANY, first, T => {
                by_panel::<S, F, T, MANY>(s, weights, inputs, deterministic, first, panel..panel + 1, out);
            });
            1
        };
    }
}

/// One panel at a time, with as many tokens as have registers for their sums.
#[inline(always)]
fn by_panel<S: Simd, F: Tile, const T: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    deterministic: bool,
    first: usize,
    these: Range<usize>,
    out: &mut Columns<'_, f32>,
) {
    if const { T <= S::ACCUMULATORS } {
        panels::<S, F, T, T, 1, MANY>(s, weights, inputs, deterministic, first, these, out);
    } else {
        // Eight tokens: registers hold the sums of four on every machine.
        const { assert!(S::ACCUMULATORS >= 4) };
        panels::<S, F, T, 4, 1, MANY>(s, weights, inputs, deterministic, first, these, out);
    }
}

/// `P` panels times `N` tokens at a time, for all panels and tokens of a tile of `T`.
#[inline(always)]
fn panels<S: Simd, F: Tile, const T: usize, const N: usize, const P: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    deterministic: bool,
    first: usize,
    these: Range<usize>,
    out: &mut Columns<'_, f32>,
) {
    debug_assert!(T.is_multiple_of(N));
    for panel in these.step_by(P) {
        for skipped in (0..T).step_by(N) {
            let sums =
                F::tile::<S, T, N, P, MANY>(s, weights, inputs, deterministic, (first, skipped), panel);
            for t in 0..N {
                for p in 0..P {
                    put(s, out, first + skipped + t, panel + p, sums[t][p]);
                }
            }
        }
    }
}
