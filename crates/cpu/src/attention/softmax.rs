//! The weights of a tile. The running maximum is an integer, so rescaling is by powers of two.
//!
//! ```text
//! for each row:   M' = max(M, round(max s));  o, l *= 2^(M − M');  w = 2^(s − round s) · 2^(round s − M');  l[lane] += w
//! ```
//!
//! About fifteen operations per sixteen weights. A weight is at most √2; a weight 126 powers of two below the maximum
//! is 0. Norms are summed by lane, that is by position modulo 16, so that their order is that of the sequence.
//!
//! Weights that become pairs of bf16 or words take eight: `w = 2^(s − M')` with a polynomial of degree 3. The difference s − M' is rounded, so
//! those of another maximum M' differ by more than a power of two.
use crate::arch::{Kernel, LANES, Simd, Uses};

/// The maximum of a row that has seen no score.
pub const NO_SCORE: f32 = -1e30;
/// Lower bound of scores: an integer far below every real score.
const FLOOR: f32 = -1e30;

/// `2^n` for integral `n ≤ 0`, 0 below −126.
pub fn power(n: f32) -> f32 {
    if n < -126.0 { 0.0 } else { n.exp2() }
}

/// The factor that normalises the sums of a row, given an attention sink. The row's weights add up to `norm` at the
/// maximum `max`; the sink adds its own score `sink` and no value.
pub fn factor_with_sink(norm: f32, max: f32, sink: f32) -> f32 {
    let sink = sink * std::f32::consts::LOG2_E;
    let peak = if sink > max { sink } else { max };
    let shrink = power(max - peak);
    shrink / (norm * shrink + power(sink - peak))
}

/// Sum of sixteen lanes, always in the same order.
pub fn sum(lanes: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for (sum, pair) in sums.iter_mut().zip(lanes.chunks_exact(2)) {
        *sum = pair[0] + pair[1];
    }
    ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
}

/// What weights become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// They stay f32.
    Floats,
    /// The same, from the powers of [`Pairs`](Form::Pairs): some of them become pairs later.
    FloatsForPairs,
    /// Rounded to pairs of bf16, as [`RoundWeights`](crate::pool::pairs::RoundWeights) does.
    Pairs,
    /// They stay f32, from the same powers: the products turn them into words.
    FloatsForWords,
}

/// Turns scores into weights and updates the states.
pub struct Softmax<'s> {
    /// One line per row, `stride` apart. The tile's scores are in `vectors`, in units of [`LANES`]: an even number for pairs.
    pub lines: &'s mut [f32],
    pub stride: usize,
    pub vectors: std::ops::Range<usize>,
    pub softcap: Option<f32>,
    pub form: Form,
    /// One state per row: `head_dim` sums, norms by lane, maximum.
    pub states: &'s mut [f32],
    pub head_dim: usize,
}

impl Kernel for Softmax<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let state = self.head_dim + super::EXTRA;
        let rows = self.lines.chunks_exact_mut(self.stride).zip(self.states.chunks_exact_mut(state));
        for (line, state) in rows {
            let (sums, rest) = state.split_at_mut(self.head_dim);
            let (norms, max) = rest.split_at_mut(LANES);
            let (vectors, _) = line.as_chunks_mut::<LANES>();
            // Values are read in whole blocks of cells, which extend past the tile by less than a vector: give those
            // weight 0.
            vectors[self.vectors.start - 1] = [0.0; LANES];
            vectors[self.vectors.end] = [0.0; LANES];
            let vectors = &mut vectors[self.vectors.clone()];
            if let Some(cap) = self.softcap {
                vectors.iter_mut().for_each(|scores| soft_cap(s, cap, scores));
            }
            let floor = s.splat(FLOOR);
            let mut peak = floor;
            for scores in vectors.iter() {
                peak = s.max(s.load(scores), peak);
            }
            let peak = s.largest(peak).round_ties_even();
            if peak <= FLOOR && vectors.iter().flatten().all(|x| *x <= FLOOR) {
                vectors.iter_mut().for_each(|scores| *scores = [0.0; LANES]);
                continue;
            }
            if peak <= FLOOR && max[0] == NO_SCORE {
                max[0] = 0.0; // all scores are NaN, but the row has seen scores
            }
            let norms = norms.first_chunk_mut::<LANES>().expect("a state has a norm per lane");
            let mut norm = s.load(norms);
            if peak > max[0] {
                let factor = power(max[0] - peak);
                let shrink = s.splat(factor);
                max[0] = peak;
                norm = s.mul(norm, shrink);
                let (whole, tail) = sums.as_chunks_mut::<LANES>();
                for sums in whole {
                    s.store(s.mul(s.load(sums), shrink), sums);
                }
                tail.iter_mut().for_each(|x| *x *= factor);
            }
            let top = s.splat(max[0]);
            norm = match self.form {
                Form::Floats => floats(s, vectors, top, norm),
                Form::FloatsForPairs => floats_for_pairs(s, vectors, top, norm),
                Form::Pairs => pairs(s, vectors, top, norm),
                Form::FloatsForWords => floats_for_words(s, vectors, top, norm),
            };
            s.store(norm, norms);
        }
    }
}

/// Turns the scores of a row into weights relative to the maximum `top`. Returns the norm with them.
#[inline(always)]
fn floats<S: Simd>(s: S, vectors: &mut [[f32; LANES]], top: S::F, mut norm: S::F) -> S::F {
    let (floor, one) = (s.splat(FLOOR), s.splat(1.0));
    for scores in vectors {
        let (mantissa, exponent) = s.exp2_parts(s.max(floor, s.load(scores)));
        let weight = s.scale_by_power(s.add(mantissa, one), s.sub(exponent, top));
        norm = s.add(norm, weight);
        s.store(weight, scores);
    }
    norm
}

/// The same, as exact as bf16 needs it.
#[inline(always)]
fn floats_for_pairs<S: Simd>(s: S, vectors: &mut [[f32; LANES]], top: S::F, mut norm: S::F) -> S::F {
    for scores in vectors {
        let weight = s.exp2_for_bf16(s.sub(s.load(scores), top));
        norm = s.add(norm, weight);
        s.store(weight, scores);
    }
    norm
}

/// The same, with another order of the sum. The loop over the powers has no sum, for which AVX2 has no registers left.
#[inline(always)]
fn floats_for_words<S: Simd>(s: S, vectors: &mut [[f32; LANES]], top: S::F, norm: S::F) -> S::F {
    for scores in vectors.iter_mut() {
        s.store(s.exp2_for_bf16(s.sub(s.load(scores), top)), scores);
    }
    let mut sums = [s.splat(0.0); 2];
    for [even, odd] in vectors.as_chunks().0 {
        sums = [s.add(sums[0], s.load(even)), s.add(sums[1], s.load(odd))];
    }
    s.add(norm, s.add(sums[0], sums[1]))
}

/// The same, and the weights become pairs.
#[inline(always)]
fn pairs<S: Simd>(s: S, vectors: &mut [[f32; LANES]], top: S::F, mut norm: S::F) -> S::F {
    debug_assert!(vectors.len().is_multiple_of(2), "{} vectors are no pairs", vectors.len());
    for [even, odd] in vectors.as_chunks_mut().0 {
        let a = s.exp2_for_bf16(s.sub(s.load(even), top));
        let b = s.exp2_for_bf16(s.sub(s.load(odd), top));
        norm = s.add(s.add(norm, a), b);
        s.store(s.as_floats(s.round_pairs(a, b)), even);
    }
    norm
}

/// `log₂ e · cap · tanh(x)`, where x is the score over `cap`.
#[inline(always)]
fn soft_cap<S: Simd>(s: S, cap: f32, scores: &mut [f32; LANES]) {
    let masked = *scores;
    let tanh = s.tanh(s.load(scores));
    s.store(s.mul(tanh, s.splat(cap * std::f32::consts::LOG2_E)), scores);
    for (capped, score) in scores.iter_mut().zip(masked) {
        if score == f32::NEG_INFINITY {
            *capped = score;
        }
    }
}
