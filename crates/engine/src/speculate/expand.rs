//! Trees from a model's probabilities, level by level, after EAGLE-2 (Li et al., 2024): at each level the most probable
//! paths are continued, and of all nodes the most probable are kept.
use super::{Bounds, DraftTree};
use kvist_model::Error;

/// A token and its probability.
pub type Candidate = (u32, f32);

/// The most probable `n` tokens of a row of logits, with their probabilities. Ties go to the lower id.
pub fn top(logits: &[f32], n: usize, out: &mut Vec<Candidate>) {
    out.clear();
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (token, &logit) in logits.iter().enumerate() {
        sum += (logit - largest).exp();
        if out.len() < n || out.last().is_some_and(|(_, last)| logit > *last) {
            let at = out.partition_point(|(_, other)| *other >= logit);
            out.insert(at, (token as u32, logit));
            out.truncate(n);
        }
    }
    out.iter_mut().for_each(|(_, logit)| *logit = (*logit - largest).exp() / sum);
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
            self.leaves.extend((first..self.tree.len() as u32).filter(|n| self.paths[*n as usize] >= min));
            self.leaves.sort_by(|a, b| self.paths[*b as usize].total_cmp(&self.paths[*a as usize]));
            self.leaves.truncate(bounds.width as usize);
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
