//! How deep and how wide a drafter's trees pay off.
//!
//! A draft model or a head computes a pass for each level of its trees, for all nodes of the level. So levels that hardly
//! ever help must not be grown, and whether more nodes on a level are worth their time depends on the machine. Both are
//! measured: for chains and for trees, what each level gains and costs.
use super::Bounds;
use super::costs::{COLD, Worth};
use std::time::Duration;

/// Weight of a new measurement.
const NEW: f64 = 0.1;
/// Of so many proposals, one has the shape that seems worse, to notice when it becomes better.
const RETRY: u64 = 32;

/// What is known of the trees of a drafter.
#[derive(Clone, Debug, Default)]
pub struct Shapes {
    chains: Shape,
    trees: Shape,
    proposals: u64,
    /// Whether the last proposal was of chains.
    chain: bool,
}

/// Trees of one width.
#[derive(Clone, Debug, Default)]
struct Shape {
    /// By depth: how many nodes are taken for a text, and how many of them are expected to be accepted.
    levels: Vec<Level>,
    /// Seconds that a level takes.
    seconds: f64,
    measured: u32,
    /// The number of levels that give the most tokens per second.
    depth: usize,
    /// Tokens per second at that depth, as a multiple of those without drafts. `None` before the first proposal.
    speedup: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    nodes: f64,
    accepted: f64,
}

impl Shapes {
    /// The bounds of the next trees, inside `most`: of the shape that is faster, and one level deeper than pays off, to notice
    /// when that becomes more.
    pub fn bounds(&mut self, most: Bounds) -> Bounds {
        self.proposals += 1;
        self.chain = most.width == 1
            || match (self.trees.speedup, self.chains.speedup) {
                (None, _) => false,
                (_, None) => true,
                (Some(trees), Some(chains)) => (chains > trees) != self.proposals.is_multiple_of(RETRY),
            };
        let shape = if self.chain { &self.chains } else { &self.trees };
        let depth = match shape.speedup {
            None => most.depth,
            Some(_) => most.depth.min(u32::try_from(shape.depth + 1).unwrap_or(u32::MAX)),
        };
        Bounds { width: if self.chain { 1 } else { most.width }, depth, ..most }
    }

    /// A proposal of trees of `depth` levels, 0 if there were none, took `elapsed`. `nodes` are the depths of the nodes
    /// that were taken, counted from 0, with the probabilities of their paths.
    pub fn record(
        &mut self,
        elapsed: Duration,
        depth: u32,
        worth: &Worth,
        nodes: impl Iterator<Item = (u32, f64)>,
    ) {
        if depth == 0 {
            return;
        }
        let mut levels = vec![Level { nodes: 0.0, accepted: 0.0 }; depth as usize];
        for (depth, path) in nodes {
            if let Some(level) = levels.get_mut(depth as usize) {
                level.nodes += 1.0 / worth.gains;
                level.accepted += path / worth.gains;
            }
        }
        let shape = if self.chain { &mut self.chains } else { &mut self.trees };
        shape.learn(&levels, elapsed.as_secs_f64() / f64::from(depth));
        shape.choose(worth);
    }
}

impl Shape {
    fn learn(&mut self, levels: &[Level], seconds: f64) {
        let toward = |mean: &mut f64, new: f64| *mean += NEW * (new - *mean);
        self.measured += 1;
        match self.measured {
            1 => self.seconds = seconds,
            2..=COLD => self.seconds = self.seconds.min(seconds),
            _ => {
                let most = 3.0 * self.seconds;
                toward(&mut self.seconds, seconds.min(most));
            }
        }
        for (depth, new) in levels.iter().enumerate() {
            match self.levels.get_mut(depth) {
                Some(level) => {
                    toward(&mut level.nodes, new.nodes);
                    toward(&mut level.accepted, new.accepted);
                }
                None => self.levels.push(*new),
            }
        }
    }

    /// Chooses the depth. Of `worth`, the times of a pass count: without drafts, and what a node adds to it.
    fn choose(&mut self, worth: &Worth) {
        let texts = worth.gains;
        let row = if worth.nodes > 0 { (worth.seconds - worth.plain) / worth.nodes as f64 } else { 0.0 };
        let (mut tokens, mut seconds) = (1.0, worth.plain);
        let (mut depth, mut best) = (0, 0.0);
        for (n, level) in (1..).zip(&self.levels) {
            tokens += level.accepted;
            seconds += self.seconds + row * texts * level.nodes;
            let speedup = tokens * worth.plain / seconds;
            if speedup > best {
                (depth, best) = (n, speedup);
            }
        }
        // No drafts at all would be better: then a proposal tries one level.
        self.depth = if best > 1.0 { depth } else { 0 };
        self.speedup = Some(best);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Bounds = Bounds { tokens: 16, depth: 8, width: 4 };

    /// A drafter whose tokens are right with a probability, first children more often than others; a level takes `level`
    /// seconds and `sibling` more for each node after the first, a node in the pass `row`. Times in passes.
    fn run(right: f64, level: f64, sibling: f64, row: f64) -> (Bounds, f64) {
        let mut shapes = Shapes::default();
        let mut bounds = MOST;
        for _ in 0..400 {
            bounds = shapes.bounds(MOST);
            let width = f64::from(bounds.width);
            let found = 1.0 - (1.0 - right).powf(width.sqrt());
            let nodes: Vec<(u32, f64)> = (0..bounds.depth)
                .flat_map(|depth| {
                    (0..bounds.width).map(move |_| (depth, found.powi(depth as i32 + 1) / width))
                })
                .collect();
            let accepted = nodes.iter().map(|(_, path)| path).sum();
            let seconds = 1.0 + row * nodes.len() as f64;
            let worth = Worth { nodes: nodes.len(), accepted, gains: 1.0, plain: 1.0, seconds };
            let elapsed = f64::from(bounds.depth) * (level + sibling * (width - 1.0));
            shapes.record(Duration::from_secs_f64(elapsed), bounds.depth, &worth, nodes.into_iter());
        }
        let shape = if shapes.chain { &shapes.chains } else { &shapes.trees };
        (bounds, shape.speedup.unwrap_or_default())
    }

    #[test]
    fn levels_are_grown_as_far_as_they_pay() {
        // Levels cost nothing: all of them.
        assert_eq!(run(0.7, 0.0, 0.0, 0.0).0.depth, 8);
        // A level that costs a pass never pays: one is tried.
        assert_eq!(run(0.9, 1.0, 0.0, 0.0).0.depth, 1);
        // In between, more levels for a better drafter.
        let (poor, good) = (run(0.5, 0.15, 0.1, 0.02).0.depth, run(0.8, 0.15, 0.1, 0.02).0.depth);
        assert!(1 < poor && poor < good && good < 8, "{poor} {good}");
    }

    #[test]
    fn width_is_what_is_faster() {
        // Siblings that cost nothing are welcome; where each costs as much as a level, chains win.
        assert_eq!(run(0.6, 0.1, 0.0, 0.0).0.width, 4);
        assert_eq!(run(0.6, 0.1, 0.1, 0.05).0.width, 1);
    }

    /// A drafter that becomes good is noticed, one level at a time.
    #[test]
    fn depth_follows_the_text() {
        let mut shapes = Shapes::default();
        let mut depths = Vec::new();
        for i in 0..600 {
            let right: f64 = if i < 200 { 0.05 } else { 0.9 };
            let bounds = shapes.bounds(Bounds { width: 1, ..MOST });
            let nodes: Vec<(u32, f64)> = (0..bounds.depth).map(|d| (d, right.powi(d as i32 + 1))).collect();
            let accepted = nodes.iter().map(|(_, path)| path).sum();
            let seconds = 1.0 + 0.03 * nodes.len() as f64;
            let worth = Worth { nodes: nodes.len(), accepted, gains: 1.0, plain: 1.0, seconds };
            let elapsed = Duration::from_secs_f64(0.1 * f64::from(bounds.depth));
            shapes.record(elapsed, bounds.depth, &worth, nodes.into_iter());
            depths.push(bounds.depth);
        }
        assert_eq!((depths[0], depths[199], depths[599]), (8, 1, 8), "{depths:?}");
    }
}
