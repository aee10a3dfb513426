//! The small steps between linear layers, each over rows of a flat batch.

/// Root-mean-square norm of every row of `x`: `out = weight * x / sqrt(mean(x²) + eps)` (Zhang and Sennrich,
/// 2019). Rows are as long as `weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let dim = weight.len();
    for (x, out) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
        let scale = inverse_rms(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = w * (x * scale);
        }
    }
}

/// [`rms_norm`] of rows where they stand: the QK norm, one row per head.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    for x in x.chunks_exact_mut(weight.len()) {
        let scale = inverse_rms(x, eps);
        for (x, w) in x.iter_mut().zip(weight) {
            *x = w * (*x * scale);
        }
    }
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    // Eight independent sums: one alone would wait for itself at every addition.
    let mut sums = [0f32; 8];
    let chunks = x.chunks_exact(8);
    let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    let mean = (sums.iter().sum::<f32>() + rest) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// `gate = silu(gate) * up` (Shazeer, 2020).
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
}

/// `x += y`.
pub fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// The largest value's index and its distance from the second largest. `None` if nothing compares: no logits,
/// or a NaN among them.
pub fn top_two(logits: &[f32]) -> Option<(u32, f32)> {
    let (mut best, mut second) = (None::<(usize, f32)>, f32::NEG_INFINITY);
    for (i, &x) in logits.iter().enumerate() {
        if x.is_nan() {
            return None;
        }
        match best {
            Some((_, b)) if x <= b => second = second.max(x),
            _ => {
                second = best.map_or(second, |(_, b)| b);
                best = Some((i, x));
            }
        }
    }
    best.map(|(i, x)| (i as u32, x - second))
}
