//! Asks the drafters, decides how much of their proposals is verified, and counts what was accepted.
use super::control::{Control, Costs, worth};
use super::{Bounds, DraftRequest, DraftTree, Drafter, Verified};
use kvist_cache::LayerId;
use kvist_model::Error;
use std::time::{Duration, Instant};

/// Settings of a [`Speculator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpeculationConfig {
    pub bounds: Bounds,
    /// Draft as much as pays off, by measured acceptance and times of passes; otherwise always as much as `bounds` allow.
    pub adaptive: bool,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        SpeculationConfig { bounds: Bounds { tokens: 16, depth: 6, width: 4 }, adaptive: true }
    }
}

/// What speculation has achieved.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Passes of the target that emitted tokens, with or without a draft; a pass counts once for each text in it.
    pub target_passes: u64,
    /// Passes that verified a draft.
    pub drafts: u64,
    /// Draft tokens that were verified.
    pub drafted: u64,
    /// Draft tokens that were accepted.
    pub accepted: u64,
    /// How many drafts were accepted up to each depth and further: index 0 is the first draft token.
    pub accepted_per_position: Vec<u64>,
}

impl Counts {
    /// Adds a verified tree.
    pub fn record(&mut self, tree: &DraftTree, verified: &Verified) {
        self.target_passes += 1;
        if tree.is_empty() {
            return;
        }
        self.drafts += 1;
        self.drafted += tree.len() as u64;
        self.accepted += verified.path.len() as u64;
        let depth = self.accepted_per_position.len().max(tree.max_depth() as usize);
        self.accepted_per_position.resize(depth, 0);
        self.accepted_per_position[..verified.path.len()].iter_mut().for_each(|n| *n += 1);
    }
}

/// A text that may be continued by a draft.
#[derive(Clone, Copy, Debug)]
pub struct DraftContext<'a> {
    /// As in [`DraftRequest`].
    pub id: u64,
    pub salt: &'a str,
    pub tokens: &'a [u32],
    /// Tokens that may still be generated.
    pub max_new: u32,
}

/// A proposal, and which drafter made it.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    pub tree: DraftTree,
    drafter: usize,
}

/// One or several drafters, with their measurements.
pub struct Speculator {
    drafters: Vec<(Box<dyn Drafter>, Control)>,
    config: SpeculationConfig,
    costs: Costs,
    counts: Counts,
    taps: Vec<LayerId>,
}

impl Speculator {
    /// Asks drafters in this order: a text goes to the next one if those before proposed nothing.
    pub fn new(drafters: Vec<Box<dyn Drafter>>, config: SpeculationConfig) -> Self {
        let taps = drafters.iter().flat_map(|drafter| drafter.taps()).copied().collect();
        let drafters = drafters.into_iter().map(|drafter| (drafter, Control::default())).collect();
        Speculator { drafters, config, costs: Costs::default(), counts: Counts::default(), taps }
    }

    pub fn config(&self) -> &SpeculationConfig {
        &self.config
    }
    /// Layers whose output the drafters read: pass them to [`features`](Self::features) after every pass.
    pub fn taps(&self) -> &[LayerId] {
        &self.taps
    }
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }
    /// Drops the drafters: from now on nothing is proposed. The counts stay.
    pub fn stop(&mut self) {
        self.drafters.clear();
        self.taps.clear();
    }

    /// Proposes drafts for a pass that computes one token of each text and `other_rows` more. At most `limit` draft tokens
    /// in all. `drafts` gets one entry per text.
    pub fn propose(
        &mut self,
        texts: &[DraftContext<'_>],
        other_rows: usize,
        limit: u32,
        chains: bool,
        drafts: &mut Vec<Draft>,
    ) -> Result<(), Error> {
        drafts.resize_with(texts.len(), Draft::default);
        drafts.iter_mut().for_each(|draft| draft.tree.clear());
        let mut bounds = self.config.bounds;
        bounds.tokens = bounds.tokens.min(limit);
        bounds.width = if chains { 1 } else { bounds.width };
        let adaptive = self.config.adaptive;
        for (n, (drafter, control)) in self.drafters.iter_mut().enumerate() {
            let open = |(text, draft): (&DraftContext<'_>, &Draft)| draft.tree.is_empty() && text.max_new > 1;
            if !texts.iter().zip(drafts.iter()).any(open) || adaptive && !control.asks() {
                continue;
            }
            let started = Instant::now();
            let mut requests = Vec::with_capacity(texts.len());
            for (text, draft) in texts.iter().zip(drafts.iter_mut()) {
                if !draft.tree.is_empty() || text.max_new < 2 {
                    continue;
                }
                draft.drafter = n;
                let bounds = Bounds { depth: bounds.depth.min(text.max_new - 1), ..bounds };
                let DraftContext { id, salt, tokens, .. } = *text;
                requests.push(DraftRequest { id, salt, tokens, bounds, tree: &mut draft.tree });
            }
            drafter.propose(&mut requests)?;
            let elapsed = started.elapsed();
            if adaptive {
                let rows = texts.len() + other_rows;
                Self::choose(&self.costs, control, n, drafts, rows, texts.len(), elapsed);
            }
        }
        share(drafts, limit);
        Ok(())
    }

    /// Removes the nodes that do not pay off from drafter `n`'s trees.
    fn choose(
        costs: &Costs,
        control: &mut Control,
        n: usize,
        drafts: &mut [Draft],
        rows: usize,
        gains: usize,
        elapsed: Duration,
    ) {
        let rows = rows
            + drafts.iter().filter(|draft| draft.drafter != n).map(|draft| draft.tree.len()).sum::<usize>();
        let mut nodes: Vec<(f64, usize, u32)> = Vec::new();
        for (i, draft) in drafts.iter().enumerate().filter(|(_, draft)| draft.drafter == n) {
            nodes.extend((0..).zip(control.paths(&draft.tree)).map(|(node, path)| (path, i, node)));
        }
        // Stable, so a parent stays before a child of the same probability.
        nodes.sort_by(|a, b| b.0.total_cmp(&a.0));
        let paths: Vec<f64> = nodes.iter().map(|(path, ..)| *path).collect();
        let (kept, expected, plain, seconds) = worth(costs, rows, gains, &paths);
        control.chosen(elapsed, expected, gains as f64, plain, seconds);
        nodes.truncate(kept);
        for (i, draft) in drafts.iter_mut().enumerate().filter(|(_, draft)| draft.drafter == n) {
            let mut kept: Vec<u32> =
                nodes.iter().filter(|(_, tree, _)| *tree == i).map(|(.., node)| *node).collect();
            kept.sort_unstable();
            draft.tree.keep(&kept);
        }
    }

    /// Passes on the rows of tapped layers for tokens of text `id` that were computed and kept; see [`Drafter::features`].
    pub fn features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        let mut taps = taps;
        for (drafter, _) in &mut self.drafters {
            let (own, others) = taps.split_at(drafter.taps().len().min(taps.len()));
            taps = others;
            if !own.is_empty() {
                drafter.features(id, first, known, own)?;
            }
        }
        Ok(())
    }

    /// A draft was verified, perhaps an empty one.
    pub fn record(&mut self, draft: &Draft, verified: &Verified) {
        self.counts.record(&draft.tree, verified);
        if let Some((_, control)) = self.drafters.get_mut(draft.drafter).filter(|_| !draft.tree.is_empty()) {
            control.record(&draft.tree, verified);
        }
    }

    /// A pass over `rows` rows, drafts included, took `elapsed`.
    pub fn passed(&mut self, rows: usize, elapsed: Duration) {
        self.costs.record(rows, elapsed);
    }

    /// Drops everything that is stored for text `id`.
    pub fn forget(&mut self, id: u64) {
        self.end(id, "", &[], 0);
    }

    /// Text `id` has ended; see [`Drafter::end`].
    pub fn end(&mut self, id: u64, salt: &str, tokens: &[u32], prompt: usize) {
        self.drafters.iter_mut().for_each(|(drafter, _)| drafter.end(id, salt, tokens, prompt));
    }
}

/// Removes nodes until all trees together have at most `limit`: from the largest tree, the node added last.
fn share(drafts: &mut [Draft], limit: u32) {
    let mut total: usize = drafts.iter().map(|draft| draft.tree.len()).sum();
    while total > limit as usize {
        let largest = drafts.iter_mut().max_by_key(|draft| draft.tree.len());
        let Some(largest) = largest else { return };
        largest.tree.truncate(largest.tree.len() - 1);
        total -= 1;
    }
}
