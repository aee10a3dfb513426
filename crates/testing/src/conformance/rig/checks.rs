//! What must be true after a step: stored rows are close to those written, outputs are attention over the stored rows, and
//! the budget records what the backend announced.
use super::*;
use crate::conformance::rows;

impl Rig<'_> {
    /// Checks that exactly the bytes are reserved in the budget that the backend announced, and never more than the
    /// bound.
    pub(super) fn check_usage(&mut self) {
        let used = self.spec.budget.usage();
        let said = self.grown.as_ref().and_then(|cells| self.backend.usage(&self.spec, cells));
        if self.grown.is_some() && said != Some(used) {
            self.bad(format!("the budget records {used:?}, the backend said {said:?}"));
        }
        let bound = self.backend.bound(&self.spec);
        let scratch = bound.map_or(0, |bound| bound.of(Purpose::Scratch));
        self.scratch_bound = self.scratch_bound.max(scratch);
        if bound.is_none_or(|bound| used.total() > bound.total() - scratch + self.scratch_bound) {
            self.bad(format!("{used:?} are used, the bound is {bound:?}"));
        }
        if self.session.pools().bytes() != used.of(Purpose::KvCache) {
            self.bad(format!("the pools say {} bytes, the budget {used:?}", self.session.pools().bytes()));
        }
    }

    /// Compares the rows that were stored, `[K, V][tokens]`, with what was written.
    pub(super) fn read_back(&mut self, layer: usize, data: &[f32], kv: &[Place], stored: [Vec<Vec<f32>>; 2]) {
        let spec = self.spec.layout.layers[layer];
        let head_dim = spec.k_dim as usize;
        let sides = [(Side::K, kv[0], self.spec.k), (Side::V, kv[1], self.spec.v)];
        for ((side, place, storage), stored) in sides.into_iter().zip(stored) {
            for (token, stored) in stored.into_iter().enumerate() {
                for (head, row) in stored.chunks_exact(head_dim).enumerate() {
                    let original = &data[place.row(token, head, head_dim)];
                    let error = if self.options.exact_rows {
                        if original == row { 0.0 } else { f64::INFINITY }
                    } else {
                        let order = self.order(layer, side, head);
                        rows::error(storage, &order, original, row)
                    };
                    if error > self.found.worst_row || error.is_nan() {
                        self.found.worst_row = error;
                    }
                    if error > 1.0 || error.is_nan() {
                        self.bad(format!(
                            "layer {layer} {side:?} head {head} token {token}: stored as {storage}, the row is {error:.2} times too far"
                        ));
                    }
                }
                // Float storages ignore the setting, and so does a backend that stores f32 only.
                let recent = if storage.dtype.is_quantised() && !self.options.exact_rows {
                    let heads =
                        (0..spec.n_kv_heads as usize).flat_map(|head| place.row(token, head, head_dim));
                    heads.map(|at| half::f16::from_f32(data[at]).to_f32()).collect()
                } else {
                    stored.clone()
                };
                self.written[layer].push(side, Row { stored, recent });
            }
        }
    }

    /// The channels of a head in stored order.
    fn order(&self, layer: usize, side: Side, head: usize) -> Vec<usize> {
        let head_dim = self.spec.layout.layers[layer].k_dim as usize;
        match &self.spec.channels {
            Some(order) if side == Side::K && self.spec.k.outliers => {
                let head = &order.layer(layer)[head * head_dim..(head + 1) * head_dim];
                head.iter().map(|c| usize::from(*c)).collect()
            }
            _ => (0..head_dim).collect(),
        }
    }

    pub(super) fn check_outputs(
        &mut self,
        layer: usize,
        (data, queries): (&[f32], &Place),
        (mut out, place): (Vec<f32>, Place),
        seen: &[Vec<Seen>],
        tokens: &[Token],
    ) {
        let spec = self.spec.layout.layers[layer];
        let head_dim = spec.k_dim as usize;
        let per_kv = (self.case.heads.0 / spec.n_kv_heads) as usize;
        let scale = self.scale(layer);
        let sinks = self.case.sinks();
        let mut bad = Vec::new();
        let mut expected = vec![0.0; head_dim];
        let recent_tokens = self.case.recent;
        let first_new = self.tokens.len() - tokens.len();
        let group = |position: u32| position.checked_div(recent_tokens);
        // Rows that are rotated before rounding have an error bound for the row as a whole.
        let turned = recent_tokens > 0 && (self.case.v.rotate || self.case.v.dtype == DType::T4);
        for (token, seen) in seen.iter().enumerate() {
            for head in 0..place.n_heads {
                let q = &data[queries.row(token, head, head_dim)];
                let kv_head = head / per_kv;
                let rows = kv_head * head_dim..(kv_head + 1) * head_dim;
                let written = &self.written[spec.owner.0 as usize];
                let visible = seen.iter().map(|seen| {
                    let value = seen.value as usize;
                    let Token { position, kept } = self.tokens[value];
                    let own = group(position).is_some() && group(position) == group(tokens[token].position);
                    let recent = own && (kept || value >= first_new);
                    (written.k[value].read(recent, &rows), written.v[value].read(recent, &rows))
                });
                let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
                let size = attention(q, visible, scale, self.case.softcap, sink, &mut expected);
                let dtypes = [self.case.k.dtype, self.case.v.dtype];
                let allowed = match self.options.q4 {
                    Some(allowed) if dtypes.contains(&DType::Q4) => allowed,
                    _ if dtypes.iter().any(|dtype| dtype.is_quantised()) => self.options.packed,
                    _ => self.options.attention,
                };
                let tolerance = size.0 * allowed;
                let tolerance = tolerance + if turned { size.1 * 2f64.powi(-11) } else { 0.0 };
                let found = &mut out[place.row(token, head, head_dim)];
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let difference = (f64::from(*found) - expected).abs();
                    // NaN fails this comparison.
                    if difference <= tolerance {
                        self.found.worst_output = self.found.worst_output.max(difference / tolerance);
                    } else {
                        bad.push(format!(
                            "layer {layer} token {token} head {head} [{i}]: {found} instead of {expected:.7} ± {tolerance:.1e}, seeing {}",
                            seen.len()
                        ));
                    }
                }
                self.found.n_outputs += head_dim;
                found.fill(f32::from_bits(POISON));
            }
        }
        bad.into_iter().for_each(|line| self.bad(line));
        if let Some(at) = out.iter().position(|x| x.to_bits() != POISON) {
            self.bad(format!("layer {layer}: element {at}, between the output rows, was written"));
        }
    }
}

/// Scalar attention in f64. Returns (1 + S) × V, the scale of its rounding errors, and the length of the longest
/// value.
fn attention<'r>(
    q: &[f32],
    visible: impl Iterator<Item = (&'r [f32], &'r [f32])> + Clone,
    scale: f32,
    softcap: Option<f32>,
    sink: f64,
    out: &mut [f64],
) -> (f64, f64) {
    let scale = f64::from(scale);
    let norm = |row: &[f32]| dot(row, row).sqrt();
    let (mut scores, mut size, mut largest, mut longest) = (Vec::new(), 0f64, 0f64, 0f64);
    for (k, v) in visible.clone() {
        let score = dot(q, k) * scale;
        scores.push(softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()));
        size = size.max(scale.abs() * norm(q) * norm(k));
        longest = longest.max(norm(v));
        largest = v.iter().fold(largest, |largest, x| largest.max(f64::from(x.abs())));
    }
    let peak = scores.iter().copied().fold(sink, f64::max);
    let mut sum = (sink - peak).exp();
    out.fill(0.0);
    for (score, (_, v)) in scores.iter().zip(visible) {
        let weight = (score - peak).exp();
        sum += weight;
        out.iter_mut().zip(v).for_each(|(out, v)| *out += weight * f64::from(*v));
    }
    out.iter_mut().for_each(|out| *out /= sum);
    ((1.0 + size) * largest, longest)
}

/// Dot product with four partial sums, so that the suite runs in seconds.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0f64; 4];
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        sums[i % 4] += f64::from(*x) * f64::from(*y);
    }
    sums.iter().sum()
}
