//! Decides how many tokens to draft: as many as pay off, by measured times and acceptance.
//!
//! A pass over a tree of `k` nodes gives `1 + E(k)` tokens in the time of `1 + k` rows. `E(k)` is the sum of the nodes'
//! path probabilities: the drafter's own, corrected by how often such nodes were accepted before.
//! [`worth`](super::costs::worth) finds the `k` with the most tokens per second, over the trees of all requests of the
//! pass. [`Shapes`] chooses beforehand how deep and how wide a drafter grows its trees. [`Control`] asks a drafter only as
//! often as its trials cost a bounded share of the time.
use super::costs::Worth;
use super::shapes::Shapes;
use super::{Bounds, DraftTree, Verified};
use std::time::Duration;

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

/// The share of the time that a drafter which does not pay off may cost. It is asked again whenever this share allows, so
/// that it is noticed when it begins to pay off.
const MAX_LOSS: f64 = 0.01;
/// What a drafter may lose at first, and at most what it may lose after gains, in passes. Acceptance varies: one that
/// pays off must not be paused for one draft that was rejected.
const CREDIT: (f64, f64) = (2.0, 8.0);
/// A drafter that reads hidden states gets them again so many passes before it is asked.
const WARM_UP: f64 = 16.0;
/// Weight of a new measurement.
const NEW: f64 = 0.1;

/// Decides about the drafts of one drafter.
#[derive(Clone, Debug)]
pub struct Control {
    reliability: Reliability,
    shapes: Shapes,
    /// What the drafter may lose before it is paused, in passes without drafts.
    credit: f64,
    /// Average seconds of a proposal.
    seconds: Option<f64>,
    /// What is known of the drafts of this pass.
    proposed: Option<Proposed>,
    /// The last proposal gave no tree: a draft model may still compute what it has missed. A pause now would make that
    /// useless.
    is_behind: bool,
}

/// The drafts of a pass, and what became of them.
#[derive(Clone, Copy, Debug)]
struct Proposed {
    seconds: f64,
    nodes: usize,
    accepted: usize,
}

impl Default for Control {
    fn default() -> Self {
        Control {
            reliability: Reliability::default(),
            shapes: Shapes::default(),
            credit: CREDIT.0,
            seconds: None,
            proposed: None,
            is_behind: false,
        }
    }
}

impl Control {
    /// Whether the drafter is asked before this pass.
    pub fn asks(&self) -> bool {
        self.credit > 0.0 || self.is_behind
    }

    /// Whether the drafter needs hidden states, because it is asked now or soon.
    pub fn reads(&self) -> bool {
        self.asks() || self.credit + WARM_UP * MAX_LOSS > 0.0
    }

    /// The bounds of the next trees, inside `most`.
    pub fn bounds(&mut self, most: Bounds) -> Bounds {
        self.shapes.bounds(most)
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

    /// The drafter took `elapsed` for trees of `depth` levels, 0 if there are none, of which `worth` was taken: `nodes` are
    /// the depths of these nodes, with the probabilities of their paths.
    pub fn chosen(
        &mut self,
        elapsed: Duration,
        depth: u32,
        worth: &Worth,
        nodes: impl Iterator<Item = (u32, f64)>,
    ) {
        let seconds = elapsed.as_secs_f64();
        // One slow proposal on a busy machine counts little.
        let seconds = self.seconds.map_or(seconds, |mean| seconds.min(3.0 * mean));
        self.seconds = Some(self.seconds.map_or(seconds, |mean| mean + NEW * (seconds - mean)));
        self.proposed = Some(Proposed { seconds, nodes: 0, accepted: 0 });
        self.is_behind = depth == 0;
        self.shapes.record(elapsed, depth, worth, nodes);
    }

    /// The pass is over, in which each of `texts` gives a token without drafts; `time` are the seconds of a pass over so many
    /// rows. What the drafts cost counts against what was accepted of them: trees that were dropped gain nothing.
    pub fn passed(&mut self, texts: usize, time: impl Fn(usize) -> Option<f64>) {
        if self.credit <= 0.0 {
            self.credit += MAX_LOSS;
        }
        let (Some(proposed), Some(plain)) = (self.proposed.take(), time(texts)) else { return };
        let rows = time(texts + proposed.nodes).unwrap_or(plain) - plain;
        let gained = proposed.accepted as f64 / texts.max(1) as f64;
        let lost = (proposed.seconds + rows) / plain - gained;
        self.credit = (self.credit - lost).min(CREDIT.1);
    }

    /// Learns from a verified tree.
    pub fn record(&mut self, tree: &DraftTree, verified: &Verified) {
        if let Some(proposed) = &mut self.proposed {
            proposed.nodes += tree.len();
            proposed.accepted += verified.path.len();
        }
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
    use super::super::costs::{Costs, worth};
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

    /// Passes of 10 ms, and `row` more for each row after the first.
    fn costs(row: f64) -> Costs {
        let mut costs = Costs::default();
        (1..=9).for_each(|n| (0..3).for_each(|_| costs.record(n, ms(10.0 + row * (n - 1) as f64))));
        costs
    }

    /// A pass whose drafter took `drafting` milliseconds for a chain of 8, of which `accepted` are.
    fn pass(control: &mut Control, costs: &Costs, drafting: f64, accepted: u32) -> bool {
        let asks = control.asks();
        if asks {
            let tree = chain(8, 0.5);
            let worth = worth(costs, 1, 1, &control.paths(&tree)).unwrap();
            control.chosen(ms(drafting), 8, &worth, std::iter::empty());
            let path: Vec<u32> = (0..accepted).collect();
            control.record(&tree, &Verified { tokens: vec![5; path.len() + 1], path, finished: false });
        }
        control.passed(1, |rows| costs.seconds(rows));
        asks
    }

    /// Where one more row costs little, long drafts pay off; where it costs as much as a pass, none do.
    #[test]
    fn drafts_are_as_long_as_they_pay() {
        let cut = |row: f64, probability| {
            let paths = Control::default().paths(&chain(8, probability));
            worth(&costs(row), 1, 1, &paths).unwrap().nodes
        };
        assert_eq!(cut(0.0, 0.5), 8);
        assert_eq!(cut(10.0, 0.9), 0);
        let (few, many) = (cut(1.0, 0.5), cut(1.0, 0.8));
        assert!(0 < few && few < many && many <= 8, "{few} {many}");
    }

    /// A drafter that promises too much is believed less and less.
    #[test]
    fn promises_are_checked() {
        let (costs, mut control) = (costs(1.0), Control::default());
        for _ in 0..100 {
            control.record(&chain(8, 0.9), &Verified { path: vec![], tokens: vec![5], finished: false });
        }
        assert_eq!(worth(&costs, 1, 1, &control.paths(&chain(8, 0.9))).unwrap().nodes, 0);
    }

    /// The trials of an expensive drafter that never pays off cost a bounded share of the time, however long it paid off before.
    #[test]
    fn a_drafter_that_loses_is_asked_rarely() {
        let (costs, mut control) = (costs(1.0), Control::default());
        for _ in 0..100_000 {
            assert!(pass(&mut control, &costs, 5.0, 8));
        }
        let asked = (0..10_000).filter(|_| pass(&mut control, &costs, 5.0, 0)).count();
        // A trial costs 0.5 passes for the drafter and 0.8 for the rows.
        let lost = 1.3 * asked as f64;
        assert!(lost > 0.5 * MAX_LOSS * 1e4, "it is tried again: {asked} times");
        assert!(lost < MAX_LOSS * 1e4 + CREDIT.1 + 2.0, "{lost} of 10000 passes lost");
        // And it is asked often as soon as it pays off again.
        let asked = (0..2000).filter(|_| pass(&mut control, &costs, 5.0, 4)).count();
        assert!(asked > 1500, "{asked} of 2000");
    }

    /// One that pays off on average is hardly ever paused, though most of its drafts are rejected.
    #[test]
    fn bad_luck_is_no_loss() {
        let (costs, mut control) = (costs(0.2), Control::default());
        let asked =
            (0..10_000).filter(|i| pass(&mut control, &costs, 1.0, 8 * u32::from(i % 8 == 7))).count();
        assert!(asked > 8000, "{asked} of 10000");
    }

    /// A draft model that computes what it has missed is asked until it has a tree.
    #[test]
    fn catching_up_is_not_cut_short() {
        let (costs, mut control) = (costs(1.0), Control::default());
        let nothing = worth(&costs, 1, 1, &[]).unwrap();
        for _ in 0..20 {
            assert!(control.asks());
            control.chosen(ms(30.0), 0, &nothing, std::iter::empty());
            control.passed(1, |rows| costs.seconds(rows));
        }
        assert!(pass(&mut control, &costs, 30.0, 0));
        assert!(!control.asks());
    }
}
