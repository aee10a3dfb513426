//! Trees from a model's probabilities, level by level, after EAGLE-2 (Li et al., 2024): at each level the most probable
//! paths are continued, and of all nodes the most probable are kept.
use super::{Bounds, DraftTree};
use kvist_model::Error;

/// A token and its probability.
pub type Candidate = (u32, f32);

/// Elements that are looked at together.
const LANES: usize = 16;

/// The most probable `n` tokens of a row of logits, with their probabilities. Ties go to the lower id.
pub fn top(logits: &[f32], n: usize) -> Vec<Candidate> {
    let mut out: Vec<Candidate> = Vec::with_capacity(n + 1);
    // The logit that a token has to exceed.
    let mut least = f32::NEG_INFINITY;
    for (chunk, first) in logits.chunks(LANES).zip((0..).step_by(LANES)) {
        // Most chunks have no candidate.
        if out.len() == n && !chunk.iter().fold(false, |any, logit| any | (*logit > least)) {
            continue;
        }
        for (token, &logit) in (first..).zip(chunk) {
            if out.len() < n || logit > least {
                let at = out.partition_point(|(_, other)| *other >= logit);
                out.insert(at, (token, logit));
                out.truncate(n);
                least = out.last().map_or(f32::INFINITY, |(_, last)| *last);
            }
        }
    }
    let largest = out.first().map_or(0.0, |(_, largest)| *largest);
    let sum = sum_of_exp(logits, largest);
    out.iter_mut().for_each(|(_, logit)| *logit = exp(*logit - largest) / sum);
    out
}

/// `Σ e^(logit − largest)`. `largest` must be the largest of them.
fn sum_of_exp(logits: &[f32], largest: f32) -> f32 {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, logit) in sums.iter_mut().zip(chunk) {
            *sum += exp(logit - largest);
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|logit| exp(logit - largest)).sum::<f32>()
}

/// `eˣ` for x ≤ 0, to five digits; 0 below −87. Without branches and calls, so that loops over it are vectorised: rows of
/// logits are long.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // eˣ = 2ⁿ·2ᶠ, n an integer and f in [−½, ½]. Adding and subtracting this number rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let y = x * std::f32::consts::LOG2_E;
    let y = if y > -126.0 { y } else { -126.0 };
    let shifted = y + ROUND;
    let f = y - (shifted - ROUND);
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    // The Taylor series of 2ᶠ.
    let series = [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, 6.931_472e-1, 1.0];
    let value = series[1..].iter().fold(series[0], |sum, c| sum * f + c) * power;
    if y > -126.0 { value } else { 0.0 }
}

/// A draft tree that grows level by level.
#[derive(Debug, Default)]
pub struct Growing {
    /// All nodes so far, with the probability of their path.
    tree: DraftTree,
    paths: Vec<f32>,
    /// Nodes of the last level that get children, by descending probability.
    pub leaves: Vec<u32>,
    depth: u32,
}

impl Growing {
    pub fn token(&self, node: u32) -> u32 {
        self.tree.tokens()[node as usize]
    }
    pub fn parent(&self, node: u32) -> Option<u32> {
        self.tree.parents()[node as usize]
    }

    /// Adds the candidates after each of the leaves (at first: after the last known token), and chooses the nodes to follow
    /// next. `leaves` is empty when the tree is deep enough.
    pub fn grow(&mut self, candidates: &[Vec<Candidate>], bounds: Bounds, min: f32) {
        let parents =
            if self.depth == 0 { vec![None] } else { self.leaves.iter().copied().map(Some).collect() };
        let first = self.tree.len() as u32;
        let met: usize = candidates.iter().map(Vec::len).sum();
        self.tree.reserve(met);
        self.paths.reserve(met);
        for (parent, candidates) in parents.into_iter().zip(candidates) {
            let before = parent.map_or(1.0, |parent: u32| self.paths[parent as usize]);
            for &(token, probability) in candidates.iter().take(bounds.width as usize) {
                self.tree.push(parent, token, probability);
                self.paths.push(before * probability);
            }
        }
        self.depth += 1;
        self.leaves.clear();
        if self.depth < bounds.depth {
            // What follows a node is at most as probable as the node. So nothing that follows one outside the most probable
            // `bounds.tokens` can be among them at the end.
            let least = self.least(bounds.tokens as usize);
            let follows = |node: &u32| {
                let path = self.paths[*node as usize];
                path >= min && path > least
            };
            self.leaves.extend((first..self.tree.len() as u32).filter(follows));
            self.leaves.sort_by(|a, b| self.paths[*b as usize].total_cmp(&self.paths[*a as usize]));
            self.leaves.truncate(bounds.width as usize);
        }
    }

    /// The path probability of the `n`-th of the most probable nodes; 0 if there are fewer.
    fn least(&self, n: usize) -> f32 {
        match n.checked_sub(1) {
            Some(last) if last < self.paths.len() => {
                *self.paths.clone().select_nth_unstable_by(last, |a, b| b.total_cmp(a)).1
            }
            _ => 0.0,
        }
    }

    /// The most probable nodes, at most `bounds.tokens`. A path is at most as probable as its beginning, so parents stay.
    pub fn finish(mut self, bounds: Bounds, out: &mut DraftTree) {
        let mut nodes: Vec<u32> = (0..self.tree.len() as u32).collect();
        // Stable: parents come before their children.
        nodes.sort_by(|a, b| self.paths[*b as usize].total_cmp(&self.paths[*a as usize]));
        nodes.truncate(bounds.tokens as usize);
        nodes.sort_unstable();
        self.tree.keep(&nodes);
        *out = self.tree;
    }
}

/// The source of the candidates of each level.
pub trait Levels {
    /// The candidates after each leaf of each tree. The first call is about the last known tokens: no tree has leaves then.
    fn level(&mut self, growing: &[Growing], first: bool) -> Result<Vec<Vec<Vec<Candidate>>>, Error>;
}

/// Grows trees of several texts together.
pub fn grow(levels: &mut dyn Levels, bounds: &[Bounds], min: f32) -> Result<Vec<Growing>, Error> {
    let mut growing: Vec<Growing> = bounds.iter().map(|_| Growing::default()).collect();
    let deepest = bounds.iter().map(|bounds| bounds.depth).max().unwrap_or(0);
    for level in 0..deepest {
        let candidates = levels.level(&growing, level == 0)?;
        for ((growing, candidates), bounds) in growing.iter_mut().zip(&candidates).zip(bounds) {
            growing.grow(candidates, *bounds, min);
        }
        if growing.iter().all(|growing| growing.leaves.is_empty()) {
            break;
        }
    }
    Ok(growing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    #[test]
    fn probabilities_are_those_of_a_softmax() {
        let mut random = SplitMix64(3);
        for n in [1, 5, 16, 40, 1000] {
            let logits: Vec<f32> = (0..n).map(|_| random.below(2000) as f32 / 60.0 - 9.0).collect();
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
            let mut expected: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            expected.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: ties go to the lower id
            for width in [1, 4, 64] {
                let found = top(&logits, width);
                assert_eq!(found.len(), width.min(n as usize));
                for ((token, probability), (same, logit)) in found.into_iter().zip(&expected) {
                    let exact = f64::from(logit - largest).exp() / sum;
                    assert_eq!(token, *same);
                    assert!(
                        (f64::from(probability) - exact).abs() < 1e-5 * exact + 1e-12,
                        "{probability} {exact}"
                    );
                }
            }
        }
        for x in (0..8800).map(|i| -0.01 * i as f32) {
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) - exact).abs() <= 1e-5 * exact + 1e-37, "e^{x}");
        }
        assert_eq!((exp(0.0), exp(-200.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
    }

    /// Rows of a fixed table, whatever the path.
    struct Table {
        random: SplitMix64,
        rows: usize,
    }

    impl Levels for Table {
        fn level(&mut self, growing: &[Growing], first: bool) -> Result<Vec<Vec<Vec<Candidate>>>, Error> {
            let mut row = |path: u64| {
                self.rows += 1;
                let mut random = SplitMix64(self.random.0 ^ path);
                let logits: Vec<f32> = (0..50).map(|_| random.below(100) as f32 / 8.0).collect();
                top(&logits, 4)
            };
            let path = |growing: &Growing, node: u32| {
                let up = std::iter::successors(Some(node), |node| growing.parent(*node));
                up.fold(7, |path: u64, node| path.wrapping_mul(51).wrapping_add(growing.token(node).into()))
            };
            let one = |growing: &Growing| match first {
                true => vec![row(0)],
                false => growing.leaves.iter().map(|node| row(path(growing, *node))).collect(),
            };
            Ok(growing.iter().map(one).collect())
        }
    }

    /// Nodes that cannot be among the most probable ones are not followed, and the tree is the same as if they were.
    #[test]
    fn only_what_can_matter_is_followed() {
        let bounds = Bounds { tokens: 10, depth: 6, width: 4 };
        let (mut rows, mut all_rows) = (0, 0);
        for seed in 0..50 {
            let tree = |tokens: u32, rows: &mut usize| {
                let mut table = Table { random: SplitMix64(seed), rows: 0 };
                let grown = grow(&mut table, &[Bounds { tokens, ..bounds }], 0.0).unwrap().remove(0);
                *rows += table.rows;
                let mut tree = DraftTree::default();
                grown.finish(bounds, &mut tree);
                tree
            };
            assert_eq!(tree(10, &mut rows), tree(1000, &mut all_rows), "seed {seed}");
        }
        assert!(rows < all_rows, "{rows} of {all_rows} rows");
    }
}
