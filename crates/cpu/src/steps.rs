//! The small steps between linear layers, each over rows of a flat batch: rows are independent, large batches go to
//! threads.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd};

/// Batches of fewer elements are not worth waking anybody for.
const ALONE: usize = 32 << 10;

/// `f(first row, rows)` over parts of `data: [rows, width]`.
fn each_rows(compute: &Compute, data: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if data.len() < ALONE {
        return f(0, data);
    }
    let rows = (ALONE / 4 / width).max(1);
    let mut nothing = vec![(); compute.threads.n()]; // takes no memory
    compute.threads.parts(data, rows * width, &mut nothing, |part, data, ()| f(part * rows, data));
}

/// Root-mean-square norm of every row of `x`: `out = weight * x / sqrt(mean(x²) + eps)` (Zhang and Sennrich, 2019).
/// Rows are as long as `weight`; `out` is as long as `x`.
pub fn rms_norm(compute: &Compute, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let dim = weight.len();
    each_rows(compute, out, dim, |first, out| {
        for (x, out) in x[first * dim..].chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
            out.copy_from_slice(x);
            compute.isa.run(Norm { x: out, weight, eps });
        }
    });
}

/// [`rms_norm`] of rows where they stand: the QK norm, one row per head.
pub fn rms_norm_in_place(compute: &Compute, x: &mut [f32], weight: &[f32], eps: f32) {
    each_rows(compute, x, weight.len(), |_, x| {
        for x in x.chunks_exact_mut(weight.len()) {
            compute.isa.run(Norm { x, weight, eps });
        }
    });
}

struct Norm<'n> {
    x: &'n mut [f32],
    weight: &'n [f32],
    eps: f32,
}

impl Kernel for Norm<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.x.len();
        let (x, rest) = self.x.as_chunks_mut::<LANES>();
        let (weight, rest_weight) = self.weight.as_chunks::<LANES>();
        let mut sums = [s.splat(0.0); 4];
        for (i, x) in x.iter().enumerate() {
            let x = s.load(x);
            sums[i % 4] = s.fma(x, x, sums[i % 4]);
        }
        let sum = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
        let sum = sum + rest.iter().map(|x| x * x).sum::<f32>();
        let scale = 1.0 / (sum / len as f32 + self.eps).sqrt();
        for (x, weight) in x.iter_mut().zip(weight) {
            s.store(s.mul(s.load(weight), s.mul(s.load(x), s.splat(scale))), x);
        }
        for (x, weight) in rest.iter_mut().zip(rest_weight) {
            *x = weight * (*x * scale);
        }
    }
}

/// `gate = silu(gate) * up` (Shazeer, 2020).
pub fn swiglu(compute: &Compute, gate: &mut [f32], up: &[f32]) {
    let width = LANES.min(gate.len().max(1));
    let whole = gate.len() / width * width;
    let (gate, gate_rest) = gate.split_at_mut(whole);
    each_rows(compute, gate, width, |first, gate| {
        let up = &up[first * width..first * width + gate.len()];
        compute.isa.run(Swiglu { gate, up });
    });
    compute.isa.run(Swiglu { gate: gate_rest, up: &up[whole..] });
}

struct Swiglu<'g> {
    gate: &'g mut [f32],
    up: &'g [f32],
}

impl Kernel for Swiglu<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gate, gate_rest) = self.gate.as_chunks_mut::<LANES>();
        let (up, up_rest) = self.up.as_chunks::<LANES>();
        for (gate, up) in gate.iter_mut().zip(up) {
            swiglu_lanes(s, gate, up);
        }
        let (mut g, mut u) = ([0.0; LANES], [0.0; LANES]);
        g[..gate_rest.len()].copy_from_slice(gate_rest);
        u[..up_rest.len()].copy_from_slice(up_rest);
        swiglu_lanes(s, &mut g, &u);
        let n = gate_rest.len();
        gate_rest.copy_from_slice(&g[..n]);
    }
}

#[inline(always)]
fn swiglu_lanes<S: Simd>(s: S, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let x = s.load(gate);
    // e^-x, where beyond ±126 powers of two it is 0 or too large for silu to be anything but 0; a NaN passes.
    let negative = s.max(s.splat(-126.0), s.mul(x, s.splat(-std::f32::consts::LOG2_E)));
    let negative = s.sub(zero, s.max(s.splat(-126.0), s.sub(zero, negative)));
    let (mantissa, exponent) = s.exp2_parts(negative);
    let e = s.scale_by_power(s.add(mantissa, one), exponent);
    s.store(s.mul(s.div(x, s.add(e, one)), s.load(up)), gate);
}

/// `x += y`.
pub fn add(compute: &Compute, x: &mut [f32], y: &[f32]) {
    each_rows(compute, x, 1, |first, x| {
        for (x, y) in x.iter_mut().zip(&y[first..]) {
            *x += y;
        }
    });
}

/// Turn the pairs `(i, i + half)` of every row of `x: [n_tokens, n_heads, head_dim]` by the angles of its token
/// (rotary position embedding; Su et al., 2021). `cos` and `sin` are `[n_tokens, half]`.
pub fn rotate_pairs(
    compute: &Compute,
    x: &mut [f32],
    n_heads: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    half: usize,
) {
    each_rows(compute, x, n_heads * head_dim, |first, x| {
        for (i, token) in x.chunks_exact_mut(n_heads * head_dim).enumerate() {
            let angles = (first + i) * half..(first + i + 1) * half;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            compute.isa.run(RotatePairs { token, head_dim, cos, sin });
        }
    });
}

struct RotatePairs<'r> {
    token: &'r mut [f32],
    head_dim: usize,
    cos: &'r [f32],
    sin: &'r [f32],
}

impl Kernel for RotatePairs<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let half = self.cos.len();
        for row in self.token.chunks_exact_mut(self.head_dim) {
            let (low, high) = row[..2 * half].split_at_mut(half);
            for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Isa;

    fn ramp(n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * size).collect()
    }

    #[test]
    fn steps_are_what_they_say_at_any_width() {
        for isa in Isa::available() {
            let compute = Compute::new(isa, 2);
            for (rows, dim) in [(1, 1), (3, 7), (2, 16), (5, 40), (300, 130)] {
                let (x, weight) = (ramp(rows * dim, 3.0), ramp(dim, 1.0));
                let mut out = vec![f32::NAN; x.len()];
                rms_norm(&compute, &x, &weight, 1e-5, &mut out);
                for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact(dim)) {
                    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / dim as f64;
                    for ((x, w), out) in x.iter().zip(&weight).zip(out) {
                        let expected = f64::from(*x * w) / (mean + 1e-5).sqrt();
                        assert!(
                            (f64::from(*out) - expected).abs() <= 1e-5,
                            "{isa} norm {dim}: {out} {expected}"
                        );
                    }
                }
                let (mut gate, up) = (ramp(rows * dim, 90.0), ramp(rows * dim, 2.0));
                let before = gate.clone();
                swiglu(&compute, &mut gate, &up);
                for ((gate, x), up) in gate.iter().zip(before).zip(up) {
                    let x = f64::from(x);
                    let expected = x / (1.0 + (-x).exp()) * f64::from(up);
                    let within = (1e-6 + 2e-7 * x.abs()) * expected.abs() + 1e-30; // the exponent is rounded
                    assert!(
                        (f64::from(*gate) - expected).abs() <= within,
                        "{isa} silu({x}): {gate} {expected}"
                    );
                }
            }
            let mut strange = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0];
            swiglu(&compute, &mut strange, &[1.0; 5]);
            assert!(
                strange[0].is_nan()
                    && strange[1] == f32::INFINITY
                    && strange[3] == 200.0
                    && strange[4].abs() < 1e-30
            );
        }
    }
}
