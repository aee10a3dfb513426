//! int8: signed bytes with one scale per row.
//!
//! ```text
//! w = scale × code
//!
//! units += dot4(w's codes, x's codes)                         64 quads of 256 inputs
//! y += units × (w's scale × x's scale)                        once per 256 inputs
//! ```
//!
//! x has a scale per token and 256 inputs: an extreme value costs accuracy among its 256 neighbours only, and the scales take
//! three operations of 67. The kernel is that of `wide.rs`. A single token reads the weights at 0.96 to 0.99 of the read limit.
use super::codes::{Codes, Planes};
use super::decode::{self, Decode, Map, TakeQuads};
use super::inputs::{self, GROUP, InputFormat, Inputs};
use super::room::Room;
use super::wide::{self, Bytes, Step};
use super::{Ahead, Format, Layout, Panels, for_token_tiles, pair_tiles, tokens};
use crate::Compute;
use crate::arch::{Columns, LANES, Simd, TileIsa};
use kvist_device::weights::round;

/// The code that stands for 0 in panels: products of bytes want one unsigned factor.
const ZERO: f32 = 128.0;

/// Codes as in q8_0, after the scales of sixteen rows.
pub struct Int8;

impl Format for Int8 {
    const BLOCK: (usize, usize) = (32, 36);
    const CODES: usize = Planes::<8, 0>::BYTES;
    const SCALES: usize = 0;
    const ROW_SCALES: usize = 4 * LANES;
    const IS_WIDE: bool = true;
    const PANELS: usize = 2;

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        Planes::<8, 0>::put(&std::array::from_fn(|i| block[4 + i] ^ 128), lane, codes);
        let scale = f32::from_le_bytes(round::scale_of_int8(block));
        // A NaN whose lower bits are 0: rounding to bf16 keeps it a NaN.
        let scale = if scale.is_nan() { f32::NAN } else { scale };
        scales[4 * lane..4 * lane + 4].copy_from_slice(&scale.to_le_bytes());
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let scale = f32::from_le_bytes(std::array::from_fn(|i| scales[4 * lane + i]));
        for (out, code) in out.iter_mut().zip(Planes::<8, 0>::get(codes, lane)) {
            *out = scale * (f32::from(code) - ZERO);
        }
    }

    fn input(compute: &Compute, n: usize) -> InputFormat {
        pair_tiles::input(compute, n).unwrap_or(InputFormat::WideCodes)
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
        _: bool,
        out: &mut Columns<'_, f32>,
    ) {
        for panel in (0..weights.n).step_by(Self::PANELS) {
            let two = weights.n - panel > 1;
            for_token_tiles!(tokens::<MANY>(inputs.n), MANY, first, T => {
                if T == inputs::TILE && two {
                    tile::<S, T, 2, MANY>(s, weights, inputs, first, panel, out);
                } else {
                    // Few tokens wait for memory: one stream.
                    tile::<S, T, 1, MANY>(s, weights, inputs, first, panel, out);
                    if two {
                        tile::<S, T, 1, MANY>(s, weights, inputs, first, panel + 1, out);
                    }
                }
            });
        }
    }
}

/// `T` tokens times `P` panels from panel `panel` on.
#[inline(always)]
fn tile<S: Simd, const T: usize, const P: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let mut panels = Stored::<S, T, P, MANY> {
        codes: [&[]; P],
        scales: [s.splat(0.0); P],
        ahead: weights.ahead::<T, MANY>(inputs.n, first, P),
    };
    for p in 0..P {
        let stored = weights.get(panel + p);
        panels.codes[p] = stored[Layout::<Int8>::span(0..weights.blocks)].as_chunks().0;
        panels.scales[p] = s.load_f32_bytes(&stored[Layout::<Int8>::scales(0)].as_chunks().0[0]);
    }
    wide::tile::<S, _, T, P>(s, &panels, inputs, first, panel, out);
}

/// Weights as they lie in panels.
struct Stored<'w, S: Simd, const T: usize, const P: usize, const MANY: bool> {
    codes: [&'w [Step]; P],
    scales: [S::F; P],
    ahead: Ahead<T, MANY>,
}

impl<S: Simd, const T: usize, const P: usize, const MANY: bool> Bytes<S, P> for Stored<'_, S, T, P, MANY> {
    #[inline(always)]
    fn codes(&self, panel: usize, step: usize) -> &Step {
        &self.codes[panel][step]
    }
    #[inline(always)]
    fn scale(&self, _: S, panel: usize, _: usize) -> S::F {
        self.scales[panel]
    }
    #[inline(always)]
    fn prefetch(&self, s: S, codes: &Step) {
        // Fewer have less arithmetic per line than those of other encodings.
        if T == inputs::TILE {
            self.ahead.prefetch(s, codes);
        }
    }
}

/// For kernels of tiles, which multiply pairs of bf16.
impl Decode for Int8 {
    const INPUTS: usize = GROUP;

    #[inline(always)]
    fn decode<S: Simd>(
        s: S,
        codes: &[u8],
        scales: &[u8],
        _: usize,
        map: Map<S>,
        take: &mut impl TakeQuads<S>,
    ) {
        let affine = map.of(s, affine(s, scales));
        for quad in Planes::<8, 0>::load(s, codes).into_iter().enumerate() {
            decode::quad(s, quad, affine, take);
        }
    }

    #[inline(always)]
    fn bound<S: Simd>(s: S, scales: &[u8], _: usize) -> S::F {
        decode::bound(s, affine(s, scales), decode::range_of_codes(8, None), Some(7))
    }
}

/// Weights are `scale × code + zero`.
#[inline(always)]
fn affine<S: Simd>(s: S, scales: &[u8]) -> [S::F; 2] {
    let scale = s.load_f32_bytes(&scales.as_chunks().0[0]);
    [scale, s.mul(scale, s.splat(-ZERO))]
}
