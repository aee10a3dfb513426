//! Decides how many tokens to draft: as many as pay off, by measured times and acceptance.
//!
//! A pass over a tree of `k` nodes gives `1 + E(k)` tokens in the time of `1 + k` rows. `E(k)` is the sum of the nodes'
//! path probabilities: the drafter's own, corrected by how often such nodes were accepted before. [`worth`] finds the `k`
//! with the most tokens per second, over the trees of all requests of the pass. [`Control`] pauses a drafter that takes
//! more time than it saves.
use super::{DraftTree, Verified};
use std::time::Duration;

/// Passes of up to so many rows are measured, each number of rows for itself.
const MAX_ROWS: usize = 128;
/// Weight of a new measurement.
const NEW: f64 = 0.1;
/// Guess for what one more row costs, as a share of the time of one row, until it is measured.
const ROW_SHARE: f64 = 0.03;

/// Times of passes by their number of rows, as moving averages.
#[derive(Clone, Debug)]
pub struct Costs {
    /// Seconds; index `n - 1` for `n` rows.
    seconds: Vec<Option<f64>>,
}

impl Default for Costs {
    fn default() -> Self {
        Costs { seconds: vec![None; MAX_ROWS] }
    }
}

impl Costs {
    /// A pass over `rows` rows took `elapsed`.
    pub fn record(&mut self, rows: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let Some(mean) = self.seconds.get_mut(rows.saturating_sub(1)) else { return };
        // One slow pass on a busy machine moves the mean little.
        *mean = Some(mean.map_or(seconds, |mean| mean + NEW * (seconds.min(3.0 * mean) - mean)));
    }

    /// Expected seconds of a pass over `rows` rows; `None` before the first measurement. Between measured numbers of rows
    /// it interpolates; beyond the largest it adds a guess per row.
    pub fn seconds(&self, rows: usize) -> Option<f64> {
        let measured = |range: std::ops::Range<usize>| {
            range.filter_map(|i| Some((i + 1, (*self.seconds.get(i)?)?))).collect::<Vec<_>>()
        };
        let at = rows.max(1) - 1;
        let below = measured(0..(at + 1).min(MAX_ROWS)).pop();
        let above = measured(at.min(MAX_ROWS)..MAX_ROWS).first().copied();
        Some(match (below, above) {
            (Some((n, seconds)), Some((m, more))) if m > n => {
                // A larger pass is never expected to be cheaper than a smaller one.
                seconds + (more.max(seconds) - seconds) * (rows - n) as f64 / (m - n) as f64
            }
            (Some((n, seconds)), _) => {
                let one = self.seconds[0].unwrap_or(seconds);
                seconds + one * ROW_SHARE * (rows - n) as f64
            }
            (None, Some((m, seconds))) => seconds / (1.0 + ROW_SHARE * (m - rows) as f64),
            (None, None) => return None,
        })
    }
}

/// How many draft tokens pay off in a pass that has `rows` rows and gives `gains` tokens without them. `paths` are the
/// probabilities of the candidates' paths, in descending order; the first ones are taken. Returns their number, how many of
/// them are expected to be accepted, and the seconds of the pass without and with them. Takes all if no pass was measured
/// yet.
pub fn worth(costs: &Costs, rows: usize, gains: usize, paths: &[f64]) -> (usize, f64, f64, f64) {
    let Some(plain) = costs.seconds(rows) else { return (paths.len(), paths.iter().sum(), 1.0, 1.0) };
    let gains = gains as f64;
    let (mut expected, mut best) = (0.0, (0, 0.0, plain, plain));
    let mut rate = gains / plain;
    for (i, path) in paths.iter().enumerate() {
        expected += path;
        let seconds = costs.seconds(rows + i + 1).unwrap_or(plain);
        if (gains + expected) / seconds > rate {
            rate = (gains + expected) / seconds;
            best = (i + 1, expected, plain, seconds);
        }
    }
    best
}

/// Bins of predicted probability.
const BINS: usize = 8;
/// How many observations the prediction itself counts for.
const PRIOR: f64 = 4.0;
/// Older observations fade, so that a new kind of text is noticed.
const FADE: f64 = 0.98;

/// How often nodes are accepted, by the probability that their drafter gave them.
#[derive(Clone, Copy, Debug, Default)]
struct Reliability {
    tried: [f64; BINS],
    accepted: [f64; BINS],
}

impl Reliability {
    fn bin(probability: f32) -> usize {
        ((probability * BINS as f32) as usize).min(BINS - 1)
    }
    fn corrected(&self, probability: f32) -> f64 {
        let bin = Self::bin(probability);
        (self.accepted[bin] + PRIOR * f64::from(probability)) / (self.tried[bin] + PRIOR)
    }
    fn record(&mut self, probability: f32, accepted: bool) {
        let bin = Self::bin(probability);
        self.tried[bin] = self.tried[bin] * FADE + 1.0;
        self.accepted[bin] = self.accepted[bin] * FADE + f64::from(u8::from(accepted));
    }
}

/// Passes without drafts after a drafter did not pay off: the first time, and at most.
const PAUSE: (u32, u32) = (16, 1024);

/// Decides about the drafts of one drafter.
#[derive(Clone, Debug, Default)]
pub struct Control {
    reliability: Reliability,
    /// Average seconds that the drafter takes for a proposal.
    proposal: f64,
    /// Passes until the drafter is asked again.
    paused_for: u32,
    /// Passes of the last pause.
    last_pause: u32,
}

impl Control {
    /// Whether the drafter is asked before this pass. Call it once per pass.
    pub fn asks(&mut self) -> bool {
        self.paused_for = self.paused_for.saturating_sub(1);
        self.paused_for == 0
    }

    /// The probability that each node of `tree` is accepted together with its path, as far as is known.
    pub fn paths(&self, tree: &DraftTree) -> Vec<f64> {
        let mut paths: Vec<f64> = Vec::with_capacity(tree.len());
        for (parent, probability) in tree.parents().iter().zip(tree.probabilities()) {
            let before = parent.map_or(1.0, |parent| paths[parent as usize]);
            paths.push(before * self.reliability.corrected(*probability));
        }
        paths
    }

    /// The drafter took `elapsed` for its trees. The chosen nodes are expected to give `expected` accepted tokens, in a pass
    /// that takes `plain` seconds without them and `seconds` with them. Pauses the drafter if it does not pay off.
    pub fn chosen(&mut self, elapsed: Duration, expected: f64, rows: f64, plain: f64, seconds: f64) {
        let elapsed = elapsed.as_secs_f64();
        self.proposal =
            if self.proposal == 0.0 { elapsed } else { self.proposal + NEW * (elapsed - self.proposal) };
        // A drafter that costs next to nothing is not paused.
        let loses =
            (rows + expected) / (seconds + self.proposal) < rows / plain && self.proposal > 0.005 * plain;
        self.last_pause = if loses { (2 * self.last_pause).clamp(PAUSE.0, PAUSE.1) } else { 0 };
        self.paused_for = self.last_pause;
    }

    /// Learns from a verified tree.
    pub fn record(&mut self, tree: &DraftTree, verified: &Verified) {
        // Nodes whose parent was accepted were tried. Of siblings, those after the accepted one too: they were rejected.
        let mut parents =
            std::iter::once(None).chain(verified.path.iter().map(|node| Some(*node))).collect::<Vec<_>>();
        if verified.finished {
            parents.pop(); // nothing was drawn after the last token
        }
        for node in 0..tree.len() as u32 {
            if parents.contains(&tree.parents()[node as usize]) {
                self.reliability.record(tree.probabilities()[node as usize], verified.path.contains(&node));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: f64) -> Duration {
        Duration::from_secs_f64(n / 1e3)
    }

    fn chain(n: usize, probability: f32) -> DraftTree {
        let mut tree = DraftTree::default();
        for i in 0..n {
            tree.push(i.checked_sub(1).map(|p| p as u32), i as u32, probability);
        }
        tree
    }

    #[test]
    fn costs_are_interpolated() {
        let mut costs = Costs::default();
        assert_eq!(costs.seconds(3), None);
        costs.record(1, ms(10.0));
        costs.record(5, ms(14.0));
        let near = |rows, expected: f64| {
            let seconds = costs.seconds(rows).unwrap();
            assert!((seconds * 1e3 - expected).abs() < 1e-6, "{rows} rows: {seconds}");
        };
        near(1, 10.0);
        near(3, 12.0);
        near(5, 14.0);
        near(15, 17.0);
        near(1000, 14.0 + 995.0 * 0.3);
    }

    /// Where one more row costs little, long drafts pay off; where it costs as much as a pass, none do.
    #[test]
    fn drafts_are_as_long_as_they_pay() {
        let cut = |row: f64, probability| {
            let (mut costs, tree) = (Costs::default(), chain(8, probability));
            (1..=9).for_each(|n| costs.record(n, ms(10.0 + row * (n - 1) as f64)));
            worth(&costs, 1, 1, &Control::default().paths(&tree)).0
        };
        assert_eq!(cut(0.0, 0.5), 8);
        assert_eq!(cut(10.0, 0.9), 0);
        let (few, many) = (cut(1.0, 0.5), cut(1.0, 0.8));
        assert!(0 < few && few < many && many <= 8, "{few} {many}");
    }

    /// A drafter that promises too much is believed less and less.
    #[test]
    fn promises_are_checked() {
        let (mut costs, mut control) = (Costs::default(), Control::default());
        (1..=9).for_each(|n| costs.record(n, ms(10.0 + (n - 1) as f64)));
        for _ in 0..100 {
            control.record(&chain(8, 0.9), &Verified { path: vec![], tokens: vec![5], finished: false });
        }
        assert_eq!(worth(&costs, 1, 1, &control.paths(&chain(8, 0.9))).0, 0);
    }

    /// An expensive drafter that never pays off is asked less and less often.
    #[test]
    fn a_drafter_that_loses_is_paused() {
        let (mut costs, mut control, mut asked) = (Costs::default(), Control::default(), 0);
        (1..=9).for_each(|n| costs.record(n, ms(10.0 + (n - 1) as f64)));
        for _ in 0..1000 {
            if control.asks() {
                asked += 1;
                let (_, expected, plain, seconds) = worth(&costs, 1, 1, &control.paths(&chain(8, 0.1)));
                control.chosen(ms(5.0), expected, 1.0, plain, seconds);
            }
        }
        assert!((2..=8).contains(&asked), "asked {asked} times");
    }
}
