//! Use counts that halve as time passes, without being updated.
//!
//! The combined recency and frequency of Lee, Choi, Kim, Noh, Min, Cho, Kim: *LRFU: a spectrum of policies that
//! subsumes the least recently used and least frequently used policies*, IEEE Transactions on Computers 50(12), 2001,
//! with its weighing function (1/2)^(λx) in time instead of in references.
//!
//! ```text
//! score of a block at time t     S(t) = Σ over its uses i of 2^−((t − t_i) / h)
//! factor out what all share      S(t) = 2^(−t/h) · Σ 2^(t_i / h)
//! so blocks compare by           L = log2 Σ 2^(t_i / h)          static between uses
//! one more use, at t             L ← log2(2^L + 2^(t/h)) = max(L, t/h) + log2(1 + 2^−|L − t/h|)
//! ```
use super::PerEntry;
use std::time::Duration;

/// `L` of every entry. 16 bytes per entry.
///
/// Times are relative to the first time seen, so precision depends on the length of the run in half-lives. After 10⁷
/// half-lives (some years, at ten seconds each), scores that differ by less than about their 10⁻⁸th part compare as
/// equal.
pub(super) struct DecayedUses {
    half_life_ns: f64,
    origin_ns: Option<u64>,
    log2_uses: PerEntry<f64>, // [entries]
}

impl DecayedUses {
    /// A half-life of 0 counts as one nanosecond.
    pub fn new(half_life: Duration) -> Self {
        let half_life_ns = (half_life.as_nanos() as f64).max(1.0);
        DecayedUses { half_life_ns, origin_ns: None, log2_uses: PerEntry::default() }
    }

    /// `t / h`.
    fn half_lives(&mut self, now_ns: u64) -> f64 {
        let origin_ns = *self.origin_ns.get_or_insert(now_ns);
        (i128::from(now_ns) - i128::from(origin_ns)) as f64 / self.half_life_ns
    }

    /// The first use of a block. Returns its `L`.
    pub fn first(&mut self, entry: u32, now_ns: u64) -> f64 {
        let now = self.half_lives(now_ns);
        self.log2_uses.set(entry, now);
        now
    }

    /// Counts one more use. Returns the block's `L`.
    pub fn again(&mut self, entry: u32, now_ns: u64) -> f64 {
        let now = self.half_lives(now_ns);
        let before = self.log2_uses.get(entry);
        let apart = (before - now).abs();
        let after = before.max(now) + (-apart).exp2().ln_1p() * std::f64::consts::LOG2_E;
        self.log2_uses.set(entry, after);
        after
    }

    pub fn remove(&mut self, entry: u32) {
        self.log2_uses.clear(entry);
    }

    pub fn relocate(&mut self, from: u32, to: u32) {
        self.log2_uses.relocate(from, to);
    }
}
