//! Yields the most likely tokens first, and sorts no more of them than needed.
//!
//! ```text
//! gap = largest − logit          weight = e^(−gap / temperature), 1 for the likeliest; next to an infinite logit all others have 0
//! bands of the gap: 0..2, 2..4, …, 30..32, 32..64, …, each found in one pass and sorted when it is needed
//! ```
//!
//! A vocabulary has 32,000 to 256,000 tokens, and a draw considers only a few of them. Sorting all of them would take
//! longer than a layer of many models. Passes over the whole vocabulary work on sixteen logits at a time, in loops that
//! compilers vectorise. They add in a fixed order that is the same on every machine.

const LANES: usize = 16;
/// Width of a band. From sixteen times this width on, bands double.
const BAND: f32 = 2.0;

/// The largest logit, or `None` if any is NaN.
pub fn largest(logits: &[f32]) -> Option<f32> {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let (mut most, mut broken) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    for chunk in chunks {
        for i in 0..LANES {
            most[i] = if chunk[i] > most[i] { chunk[i] } else { most[i] };
            broken[i] |= chunk[i].is_nan();
        }
    }
    let broken = broken.contains(&true) || rest.iter().any(|x| x.is_nan());
    (!broken).then(|| most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max))
}

/// log Σ e^logit, within 2e-6 of its value, or of 1 if that is larger; NaN if a logit is NaN, or if all are −∞.
pub fn log_sum(logits: &[f32]) -> f32 {
    /// Sums in f32 are short, so that small addends are not lost beside them.
    const PIECE: usize = 64 * LANES;
    let Some(max) = largest(logits) else { return f32::NAN };
    let sum_of = |piece: &[f32]| {
        let (chunks, rest) = piece.as_chunks::<LANES>();
        let mut sums = [0.0; LANES];
        for chunk in chunks {
            for i in 0..LANES {
                sums[i] += exp_minus(gap(max, chunk[i]));
            }
        }
        let sums = sums.iter().copied().chain(rest.iter().map(|x| exp_minus(gap(max, *x))));
        sums.map(f64::from).sum::<f64>()
    };
    let sum: f64 = logits.chunks(PIECE).map(sum_of).sum();
    if max == f32::NEG_INFINITY { f32::NAN } else { max + sum.ln() as f32 }
}

/// Distance of `x` below the largest logit; 0 for the largest, even if it is infinite.
#[inline(always)]
fn gap(max: f32, x: f32) -> f32 {
    if x == max { 0.0 } else { max - x }
}

/// e^(−x) for `x ≥ 0`, and 0 from 87 on; within 1e-6 of its value. The same on every machine; vectorises in a loop.
#[inline(always)]
pub fn exp_minus(x: f32) -> f32 {
    /// Adding this leaves the nearest integer in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let y = -(if x < 87.0 { x } else { 87.0 }) * std::f32::consts::LOG2_E;
    let shifted = y + ROUND;
    let f = y - (shifted - ROUND);
    // 2^f by its series up to f^6; the next term is 1.2e-7 at f = 1/2.
    let mut p = 1.540_353e-4;
    for c in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, std::f32::consts::LN_2] {
        p = p * f + c;
    }
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < 87.0 { (p * f + 1.0) * power } else { 0.0 }
}

/// Candidates of one draw. The buffer is reused between draws.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    max: f32,
    /// (token, gap), largest logit first, equal ones by token id. Contains all candidates with a gap below `band`.
    found: Vec<(u32, f32)>,
    /// Where the next band begins; `None` if there is none.
    band: Option<f32>,
}

impl Candidates {
    /// Has memory for all of this many tokens: each is a candidate once at most.
    pub fn with_capacity(vocab: usize) -> Self {
        Candidates { found: Vec::with_capacity(vocab), ..Candidates::default() }
    }

    /// The bytes of [`with_capacity`](Self::with_capacity).
    pub fn bytes(vocab: usize) -> Option<usize> {
        vocab.checked_mul(size_of::<(u32, f32)>())
    }

    /// Starts a draw from logits whose largest is `max`: all of them, or the `top_k` most likely if that is not 0.
    pub fn begin(&mut self, logits: &[f32], max: f32, top_k: usize) {
        self.max = max;
        self.found.clear();
        self.band = Some(0.0);
        if top_k > 0 && top_k < logits.len() {
            self.band = None;
            self.keep_largest(logits, top_k);
        }
    }

    /// Starts a draw from the most likely tokens and their logits alone, in the order of [`get`](Self::get).
    pub fn begin_with(&mut self, top: &[(u32, f32)]) {
        self.max = top.first().map_or(0.0, |(_, logit)| *logit);
        self.found.clear();
        self.found.extend(top.iter().map(|(token, logit)| (*token, gap(self.max, *logit))));
        self.band = None;
    }

    /// True if there may be candidates beyond those found so far.
    pub fn more(&self) -> bool {
        self.band.is_some()
    }

    /// Token and gap of the `i`-th most likely candidate. Finds more candidates if needed.
    pub fn get(&mut self, logits: &[f32], i: usize) -> Option<(u32, f32)> {
        while i >= self.found.len() && self.band.is_some() {
            self.next_band(logits);
        }
        self.found.get(i).copied()
    }

    /// Keeps the first `n` candidates only.
    pub fn truncate(&mut self, n: usize) {
        self.found.truncate(n);
        self.band = None;
    }

    /// The sum of the weights of all candidates.
    pub fn total(&self, logits: &[f32], temperature: f32) -> f32 {
        if !self.more() {
            return self.found.iter().map(|(_, gap)| exp_minus(gap / temperature)).sum();
        }
        let weight = |x: f32| exp_minus(gap(self.max, x) / temperature);
        let (chunks, rest) = logits.as_chunks::<LANES>();
        let mut sums = [0.0; LANES];
        for chunk in chunks {
            for i in 0..LANES {
                sums[i] += weight(chunk[i]);
            }
        }
        sums.iter().sum::<f32>() + rest.iter().map(|x| weight(*x)).sum::<f32>()
    }

    fn next_band(&mut self, logits: &[f32]) {
        let Some(from) = self.band else { return };
        let to = if from < 16.0 * BAND { from + BAND } else { 2.0 * from };
        // Beyond this the weight of a candidate is negligible at any practical temperature.
        let last = to > 1e4;
        let (max, first) = (self.max, self.found.len());
        let inside = |x: f32| {
            let gap = gap(max, x);
            (gap >= from) & ((gap < to) | last)
        };
        self.collect(logits, inside);
        self.found[first..].sort_unstable_by(order(logits));
        self.band = (!last).then_some(to);
    }

    /// Appends the tokens whose logit is `inside`. A block without any costs one vector comparison.
    #[inline(always)]
    fn collect(&mut self, logits: &[f32], inside: impl Fn(f32) -> bool) {
        for (block, chunk) in logits.chunks(LANES).enumerate() {
            if chunk.iter().fold(false, |any, x| any | inside(*x)) {
                for (i, x) in chunk.iter().enumerate().filter(|(_, x)| inside(**x)) {
                    self.found.push(((block * LANES + i) as u32, gap(self.max, *x)));
                }
            }
        }
    }

    /// Finds the k largest in one pass with a rising threshold: a token below the k-th best so far cannot be in the
    /// result.
    fn keep_largest(&mut self, logits: &[f32], k: usize) {
        let room = k + k.max(64);
        let mut bar = f32::NEG_INFINITY;
        for (block, chunk) in logits.chunks(LANES).enumerate() {
            let max = self.max;
            // Later tokens of equal logits do not displace earlier ones. Before the first cut there is no threshold.
            let inside = |x: f32| (x > bar) | (bar == f32::NEG_INFINITY);
            if !chunk.iter().fold(false, |any, x| any | inside(*x)) {
                continue;
            }
            for (i, x) in chunk.iter().enumerate().filter(|(_, x)| inside(**x)) {
                self.found.push(((block * LANES + i) as u32, gap(max, *x)));
            }
            if self.found.len() >= room {
                self.found.select_nth_unstable_by(k - 1, order(logits));
                self.found.truncate(k);
                bar = logits[self.found[k - 1].0 as usize];
            }
        }
        self.found.sort_unstable_by(order(logits));
        self.found.truncate(k);
    }
}

/// By logits, of which no one is NaN, and not by gaps: two logits may be equally far from the largest one after rounding, and a device
/// compares logits.
fn order(logits: &[f32]) -> impl Fn(&(u32, f32), &(u32, f32)) -> std::cmp::Ordering {
    let of = |token: u32| logits[token as usize];
    move |a, b| of(b.0).partial_cmp(&of(a.0)).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_e() {
        for i in 0..200_000 {
            let x = i as f32 * 5e-4;
            let (found, expected) = (f64::from(exp_minus(x)), (-f64::from(x)).exp());
            let near = (found - expected).abs() <= 1e-5 * expected;
            assert!(if x < 87.0 { near } else { found == 0.0 }, "e^-{x}: {found}, not {expected}");
        }
        assert_eq!(exp_minus(0.0), 1.0);
        assert_eq!(exp_minus(f32::INFINITY), 0.0);
    }

    #[test]
    fn sums_are_those_of_f64() {
        let mut random = kvist_testing::SplitMix64(5);
        for n in [1, 2, 15, 16, 17, 1023, 1024, 1025, 50_000] {
            // Equal ones, ones that differ, and a single large one.
            for spread in [0.0, 1.0, 30.0, 300.0] {
                let mut logits: Vec<f32> = (0..n).map(|_| (random.unit() as f32 - 0.5) * spread).collect();
                logits[n / 2] += spread;
                logits[n / 3] = if n > 2 { f32::NEG_INFINITY } else { 1.0 };
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
                let expected = f64::from(max) + sum.ln();
                let found = f64::from(log_sum(&logits));
                let near = (found - expected).abs() <= 2e-6 * expected.abs().max(1.0);
                assert!(near, "{n} of {spread}: {found}, not {expected}");
            }
        }
        assert!(log_sum(&[]).is_nan() && log_sum(&[0.0, f32::NAN]).is_nan());
        assert!(log_sum(&[f32::NEG_INFINITY; 3]).is_nan());
        assert_eq!(log_sum(&[f32::INFINITY, 1.0]), f32::INFINITY);
    }

    /// Found piece by piece, the order is that of sorting everything.
    #[test]
    fn the_order_is_that_of_a_sort() {
        let mut random = kvist_testing::SplitMix64(3);
        let mut next = || random.next() as u32;
        let mut candidates = Candidates::default();
        for round in 0..300 {
            let n = 1 + next() as usize % 700;
            // Coarse values, so that many are equal; some infinite.
            let mut logit = || match next() % 50 {
                0 => f32::NEG_INFINITY,
                1 => -1e6 * (next() % 7) as f32,
                _ => (next() % 400) as f32 * 0.25 - 50.0,
            };
            let mut logits: Vec<f32> = (0..n).map(|_| logit()).collect();
            match round % 40 {
                0 => logits.fill(f32::NEG_INFINITY),
                1 => logits[n / 2] = f32::INFINITY,
                _ => {}
            }
            let max = largest(&logits).unwrap();
            let mut sorted: Vec<u32> = (0..n as u32).collect();
            let of = |token: &u32| logits[*token as usize];
            sorted.sort_by(|a, b| of(b).partial_cmp(&of(a)).unwrap().then(a.cmp(b)));
            for k in [0, 1, 2, 40, n / 2, n - 1, n, n + 1] {
                candidates.begin(&logits, max, k);
                let all = if k == 0 { n } else { k.min(n) };
                let found: Vec<_> = (0..).map_while(|i| candidates.get(&logits, i)).collect();
                let tokens: Vec<u32> = found.iter().map(|(token, _)| *token).collect();
                assert_eq!(tokens, sorted[..all], "round {round}, k {k} of {logits:?}");
                let gaps = found.iter().all(|(token, gap)| {
                    let x = logits[*token as usize];
                    *gap == if x == max { 0.0 } else { max - x }
                });
                assert!(gaps, "round {round}, k {k}");
            }
        }
    }
}
