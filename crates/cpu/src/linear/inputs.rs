//! The inputs of linear layers, in the forms their kernels read. Layers that share an input share its forms.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd};

/// Tokens that stand side by side.
pub const TILE: usize = 8;
/// Inputs of one scale.
pub const GROUP: usize = 32;

/// How a kernel wants its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// f32, eight tokens side by side.
    Rows,
    /// bf16 pairs, eight tokens side by side.
    Pairs,
    /// 8 bits, with a scale per 32.
    Codes,
}

/// Buffers for one batch, recycled.
#[derive(Debug, Default)]
pub struct Inputs {
    pub n: usize,
    pub width: usize,
    ready: [bool; 3],
    /// `[n / 8][width][8]`.
    pub rows: Vec<f32>,
    /// `[n / 8][width / 2][8]`.
    pub pairs: Vec<i32>,
    /// `[n][width / 4]`: four signed codes each.
    pub codes: Vec<i32>,
    /// `[n][width / 32]`.
    pub scales: Vec<f32>,
    /// `[n][width / 16]`: sums of codes.
    pub sums: Vec<i32>,
}

/// A batch of rows, and where its forms are kept.
pub struct Input<'x> {
    x: &'x [f32],
    inputs: &'x mut Inputs,
}

impl Inputs {
    /// `x: [n, width]`.
    pub fn of<'x>(&'x mut self, x: &'x [f32], width: usize) -> Input<'x> {
        (self.n, self.width, self.ready) = (x.len() / width.max(1), width, [false; 3]);
        Input { x, inputs: self }
    }

    /// Bytes the buffers may come to take for `n` rows of at most `width`; `None` if it overflows.
    pub fn bytes(n: usize, width: usize) -> Option<usize> {
        let side_by_side = n.checked_next_multiple_of(TILE)?;
        let wide = width.checked_next_multiple_of(GROUP)?;
        // f32 rows, bf16 pairs; codes, scales and sums.
        side_by_side
            .checked_mul(wide)?
            .checked_mul(4 + 2)?
            .checked_add(n.checked_mul(wide + wide / 32 * 4 + wide / 16 * 4)?)
    }
}

impl Input<'_> {
    pub fn n(&self) -> usize {
        self.inputs.n
    }
    pub fn width(&self) -> usize {
        self.inputs.width
    }

    /// The batch with `form` ready.
    pub(super) fn prepare(&mut self, compute: &Compute, form: Form) -> &Inputs {
        if !std::mem::replace(&mut self.inputs.ready[form as usize], true) {
            let Inputs { n, width, rows, pairs, codes, scales, sums, .. } = &mut *self.inputs;
            let (n, width, x) = (*n, *width, self.x);
            match form {
                Form::Rows => {
                    rows.resize(n.next_multiple_of(TILE) * width, 0.0);
                    each(compute, n.div_ceil(TILE), rows, TILE * width, |tile, rows| {
                        let x = &x[tile * TILE * width..];
                        for (t, x) in x.chunks_exact(width).take(TILE).enumerate() {
                            rows.iter_mut().skip(t).step_by(TILE).zip(x).for_each(|(y, x)| *y = *x);
                        }
                    });
                }
                Form::Pairs => {
                    let half = width.div_ceil(2);
                    pairs.resize(n.next_multiple_of(TILE) * half, 0);
                    each(compute, n.div_ceil(TILE), pairs, TILE * half, |tile, pairs| {
                        let x = &x[tile * TILE * width..];
                        let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
                        for (t, x) in x.chunks_exact(width).take(TILE).enumerate() {
                            for (pair, x) in pairs.iter_mut().skip(t).step_by(TILE).zip(x.chunks(2)) {
                                let high = x.get(1).map_or(0, |x| bits(*x) << 16);
                                *pair = (bits(x[0]) | high).cast_signed();
                            }
                        }
                    });
                }
                Form::Codes => {
                    codes.resize(n * width / 4, 0);
                    scales.resize(n * width / GROUP, 0.0);
                    sums.resize(n * width / LANES, 0);
                    let rows = codes.chunks_exact_mut(width / 4).zip(scales.chunks_exact_mut(width / GROUP));
                    let rows = rows.zip(sums.chunks_exact_mut(width / LANES)).zip(x.chunks_exact(width));
                    for (((codes, scales), sums), x) in rows {
                        compute.isa.run(Quantise { x, codes, scales, sums });
                    }
                }
            }
        }
        self.inputs
    }
}

/// `f(i, part i)`, on threads where there is enough to do.
fn each<T: Send>(
    compute: &Compute,
    n: usize,
    data: &mut [T],
    part: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    if n < 4 {
        data.chunks_exact_mut(part).take(n).enumerate().for_each(|(i, data)| f(i, data));
    } else {
        let mut nothing = [(); 64];
        let nothing = &mut nothing[..compute.threads.n().min(64)];
        compute.threads.parts(&mut data[..n * part], part, nothing, |i, data, ()| f(i, data));
    }
}

/// One row to codes: `x ≈ scale × code`, code in −127..=127. A group with what is not a finite number gets the scale
/// NaN.
struct Quantise<'q> {
    x: &'q [f32],
    codes: &'q mut [i32],
    scales: &'q mut [f32],
    sums: &'q mut [i32],
}

impl Kernel for Quantise<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let zero = s.splat(0.0);
        let (groups, _) = self.x.as_chunks::<GROUP>();
        let rows = groups.iter().zip(self.codes.as_chunks_mut::<{ GROUP / 4 }>().0);
        for (((x, codes), scale), sums) in rows.zip(self.scales).zip(self.sums.as_chunks_mut::<2>().0) {
            let [a, b] = [&x.as_chunks::<LANES>().0[0], &x.as_chunks::<LANES>().0[1]].map(|x| s.load(x));
            let magnitude = |x| s.max(x, s.sub(zero, x));
            let largest = s.largest(s.max(magnitude(a), magnitude(b)));
            // A NaN or an infinity survives a sum; `max` may lose it.
            let finite = s.sum(s.add(s.mul(a, zero), s.mul(b, zero))) == 0.0;
            let inverse = if largest > 0.0 && finite { 127.0 / largest } else { 0.0 };
            *scale = if finite { largest / 127.0 } else { f32::NAN };
            let inverse = if inverse.is_finite() { inverse } else { 0.0 }; // a subnormal group is 0
            let mut bytes = [0u8; GROUP];
            let (out, _) = bytes.as_chunks_mut::<LANES>();
            for (i, x) in [a, b].into_iter().enumerate() {
                let code = if finite { s.to_i32(s.mul(x, s.splat(inverse))) } else { s.splat_i(0) };
                s.store_low_bytes(code, &mut out[i]);
                sums[i] = s.sum(s.to_f32(code)) as i32;
            }
            for (code, bytes) in codes.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *code = i32::from_le_bytes(*bytes);
            }
        }
    }
}
