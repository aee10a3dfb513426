//! The elementwise steps between linear layers, over the rows of a flat batch. Rows are independent; large batches run
//! on several threads.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd, Uses};
use kvist_device::Activation;

/// Batches with fewer elements run on the calling thread only.
const ALONE: usize = 32 << 10;

/// Calls `f(first row, rows)` for parts of `data: [rows, width]`.
fn each_rows(compute: &Compute, data: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if data.len() < ALONE {
        return f(0, data);
    }
    let rows = (ALONE / 4 / width).max(1);
    let mut no_scratch = vec![(); compute.threads.n()]; // takes no memory
    compute.threads.parts(data, rows * width, &mut no_scratch, |part, data, ()| f(part * rows, data));
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

/// [`rms_norm`] in place: the QK norm, one row per head.
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
    const USES: Uses = Uses::Floats;
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

/// `gate = f(gate, up)`.
pub fn gated(compute: &Compute, f: Activation, gate: &mut [f32], up: &[f32]) {
    let width = LANES.min(gate.len().max(1));
    let whole = gate.len() / width * width;
    let (gate, gate_rest) = gate.split_at_mut(whole);
    each_rows(compute, gate, width, |first, gate| {
        let up = &up[first * width..first * width + gate.len()];
        compute.isa.run(Gated { f, gate, up });
    });
    compute.isa.run(Gated { f, gate: gate_rest, up: &up[whole..] });
}

struct Gated<'g> {
    f: Activation,
    gate: &'g mut [f32],
    up: &'g [f32],
}

impl Kernel for Gated<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.f {
            Activation::Silu => lanes(s, self.gate, self.up, SiluGate),
            Activation::Gelu => lanes(s, self.gate, self.up, GeluGate),
            Activation::Clamped { limit } => lanes(s, self.gate, self.up, ClampedGate { limit }),
        }
    }
}

/// Combines a gate and the gated value. A type instead of a closure, because a closure would not be compiled for the
/// kernel's instruction set, and would be called once per vector.
trait Activate: Copy {
    fn of<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F;
}

#[derive(Clone, Copy)]
struct SiluGate;
#[derive(Clone, Copy)]
struct GeluGate;
#[derive(Clone, Copy)]
struct ClampedGate {
    limit: f32,
}

impl Activate for SiluGate {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(silu(s, gate), up)
    }
}

impl Activate for GeluGate {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(gelu(s, gate), up)
    }
}

impl Activate for ClampedGate {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        clamped(s, gate, up, self.limit)
    }
}

/// `gate = f(gate, up)`, sixteen elements at a time.
#[inline(always)]
fn lanes<S: Simd>(s: S, gate: &mut [f32], up: &[f32], f: impl Activate) {
    let (gate, gate_rest) = gate.as_chunks_mut::<LANES>();
    let (up, up_rest) = up.as_chunks::<LANES>();
    for (gate, up) in gate.iter_mut().zip(up) {
        s.store(f.of(s, s.load(gate), s.load(up)), gate);
    }
    let (mut g, mut u) = ([0.0; LANES], [0.0; LANES]);
    g[..gate_rest.len()].copy_from_slice(gate_rest);
    u[..up_rest.len()].copy_from_slice(up_rest);
    s.store(f.of(s, s.load(&g), s.load(&u)), &mut g);
    let n = gate_rest.len();
    gate_rest.copy_from_slice(&g[..n]);
}

#[inline(always)]
fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    over_one_plus_exp(s, x, s.sub(s.splat(0.0), x))
}

/// `x/2 * (1 + tanh(y))`, which is `x * sigmoid(2y)`, with `y = √(2/π) * (x + 0.044715 x³)`.
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::F) -> S::F {
    let minus_twice = -2.0 * (2.0 / std::f32::consts::PI).sqrt();
    let cubic = s.fma(s.mul(x, x), s.splat(minus_twice * 0.044_715), s.splat(minus_twice));
    over_one_plus_exp(s, x, s.mul(x, cubic))
}

#[inline(always)]
fn clamped<S: Simd>(s: S, gate: S::F, up: S::F, limit: f32) -> S::F {
    let zero = s.splat(0.0);
    // The smaller of the two; NaN passes through.
    let gate = s.sub(zero, s.max(s.splat(-limit), s.sub(zero, gate)));
    let swish = over_one_plus_exp(s, gate, s.mul(gate, s.splat(-1.702)));
    s.mul(swish, s.add(s.clamp(up, limit), s.splat(1.0)))
}

/// `x / (1 + e^y)`
#[inline(always)]
fn over_one_plus_exp<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
    s.div(x, s.add(s.exp(y), s.splat(1.0)))
}

/// `x *= by`.
pub fn scale(compute: &Compute, x: &mut [f32], by: f32) {
    each_rows(compute, x, 1, |_, x| x.iter_mut().for_each(|x| *x *= by));
}

/// `x = cap * tanh(x / cap)`.
pub fn softcap(compute: &Compute, x: &mut [f32], cap: f32) {
    let width = LANES.min(x.len().max(1));
    let whole = x.len() / width * width;
    let (x, rest) = x.split_at_mut(whole);
    each_rows(compute, x, width, |_, x| compute.isa.run(SoftCap { x, cap }));
    compute.isa.run(SoftCap { x: rest, cap });
}

struct SoftCap<'x> {
    x: &'x mut [f32],
    cap: f32,
}

impl Kernel for SoftCap<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (x, rest) = self.x.as_chunks_mut::<LANES>();
        for x in x {
            s.store(capped(s, s.load(x), self.cap), x);
        }
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        s.store(capped(s, s.load(&last), self.cap), &mut last);
        let n = rest.len();
        rest.copy_from_slice(&last[..n]);
    }
}

#[inline(always)]
fn capped<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    s.mul(s.tanh(s.mul(x, s.splat(1.0 / cap))), s.splat(cap))
}

/// `x += y`.
pub fn add(compute: &Compute, x: &mut [f32], y: &[f32]) {
    each_rows(compute, x, 1, |first, x| {
        for (x, y) in x.iter_mut().zip(&y[first..]) {
            *x += y;
        }
    });
}

/// Rotates the pairs `(i, i + half)` of every row of `x: [n_tokens, n_heads, head_dim]` by the angles of its token
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
    const USES: Uses = Uses::Floats;
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
                let up = ramp(rows * dim, 2.0);
                for (f, size) in [
                    (Activation::Silu, 90.0),
                    (Activation::Gelu, 12.0),
                    (Activation::Clamped { limit: 1.5 }, 9.0),
                ] {
                    let before = ramp(rows * dim, size);
                    let mut gate = before.clone();
                    gated(&compute, f, &mut gate, &up);
                    for ((gate, x), up) in gate.iter().zip(before).zip(&up) {
                        let (mut x, mut up) = (f64::from(x), f64::from(*up));
                        let y = match f {
                            Activation::Silu => x,
                            Activation::Gelu => {
                                2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))
                            }
                            Activation::Clamped { limit } => {
                                (x, up) =
                                    (x.min(limit.into()), up.clamp(-f64::from(limit), limit.into()) + 1.0);
                                1.702 * x
                            }
                        };
                        let expected = x / (1.0 + (-y).exp()) * up;
                        let within = (1e-6 + 2e-7 * y.abs()) * expected.abs() + 1e-30; // the exponent is rounded
                        assert!(
                            (f64::from(*gate) - expected).abs() <= within,
                            "{isa} {f:?}({x}): {gate} {expected}"
                        );
                    }
                }
                let before = ramp(rows * dim, 90.0);
                let (mut capped, mut scaled) = (before.clone(), before.clone());
                softcap(&compute, &mut capped, 30.0);
                scale(&compute, &mut scaled, 0.3);
                for ((x, capped), scaled) in before.iter().zip(capped).zip(scaled) {
                    let expected = 30.0 * (f64::from(*x) / 30.0).tanh();
                    assert!((f64::from(capped) - expected).abs() <= 1e-5, "{isa} {x}: {capped} {expected}");
                    assert_eq!(scaled, x * 0.3);
                }
            }
            let mut strange = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0];
            gated(&compute, Activation::Silu, &mut strange, &[1.0; 5]);
            assert!(
                strange[0].is_nan()
                    && strange[1] == f32::INFINITY
                    && strange[3] == 200.0
                    && strange[4].abs() < 1e-30
            );
        }
    }
}
