//! Asks the drafters, decides how much of their proposals is verified, and counts what was accepted.
use super::control::Control;
use super::costs::{Costs, worth};
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
        SpeculationConfig { bounds: Bounds { tokens: 16, depth: 8, width: 4 }, adaptive: true }
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
    /// The error of a drafter, which ended speculation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
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
    drafters: Vec<Measured>,
    config: SpeculationConfig,
    costs: Costs,
    counts: Counts,
    /// Those of the drafters that read hidden states now.
    taps: Vec<LayerId>,
    /// Texts of the pass.
    texts: usize,
}

/// A drafter, and what is known of its drafts.
struct Measured {
    drafter: Box<dyn Drafter>,
    control: Control,
    /// Whether it gets hidden states now. A drafter that loses is not asked for a while and does not need them.
    reads: bool,
}

impl Speculator {
    /// Asks drafters in this order: a text goes to the next one if those before proposed nothing.
    pub fn new(drafters: Vec<Box<dyn Drafter>>, config: SpeculationConfig) -> Self {
        let new = |drafter| Measured { drafter, control: Control::default(), reads: true };
        let drafters: Vec<Measured> = drafters.into_iter().map(new).collect();
        let (costs, counts) = (Costs::default(), Counts::default());
        let mut this = Speculator { drafters, config, costs, counts, taps: Vec::new(), texts: 0 };
        this.collect_taps();
        this
    }

    fn collect_taps(&mut self) {
        self.taps.clear();
        let reading = self.drafters.iter().filter(|measured| measured.reads);
        self.taps.extend(reading.flat_map(|measured| measured.drafter.taps()));
    }

    pub fn config(&self) -> &SpeculationConfig {
        &self.config
    }
    /// Layers whose output the drafters read: pass them to [`features`](Self::features) after every pass. They change
    /// in [`propose`](Self::propose) only: drafters that do not pay off read nothing for a while.
    pub fn taps(&self) -> &[LayerId] {
        &self.taps
    }
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
    /// The counts, which begin anew.
    pub fn take_counts(&mut self) -> Counts {
        let failure = self.counts.failure.clone();
        std::mem::replace(&mut self.counts, Counts { failure, ..Counts::default() })
    }
    /// Drops the drafters after one of them has failed: from now on nothing is proposed. The counts stay, and say why.
    pub fn stop(&mut self, why: &Error) {
        self.drafters.clear();
        self.taps.clear();
        self.counts.failure = Some(why.to_string());
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
        self.texts = texts.len();
        let adaptive = self.config.adaptive;
        let rows = texts.len() + other_rows;
        if adaptive {
            self.drafters.iter_mut().for_each(|measured| measured.reads = measured.control.reads());
            self.collect_taps();
            // Without the time of a pass without drafts nothing says whether they pay off.
            if !self.costs.has_base(texts.len()) {
                return Ok(());
            }
        }
        let mut bounds = self.config.bounds;
        // Where the limit is small, trees are cut anyway: larger ones than twice their share are not grown.
        let share = (2 * limit as usize).div_ceil(texts.len().max(1));
        bounds.tokens = bounds.tokens.min(limit).min(u32::try_from(share).unwrap_or(u32::MAX));
        bounds.width = if chains { 1 } else { bounds.width };
        for (n, Measured { drafter, control, .. }) in self.drafters.iter_mut().enumerate() {
            let open = |(text, draft): (&DraftContext<'_>, &Draft)| draft.tree.is_empty() && text.max_new > 1;
            if !texts.iter().zip(drafts.iter()).any(open) || adaptive && !control.asks() {
                continue;
            }
            let shape = if adaptive { control.bounds(bounds) } else { bounds };
            let mut requests = Vec::with_capacity(texts.len());
            for (text, draft) in texts.iter().zip(drafts.iter_mut()) {
                if !draft.tree.is_empty() || text.max_new < 2 {
                    continue;
                }
                draft.drafter = n;
                let bounds = Bounds { depth: shape.depth.min(text.max_new - 1), ..shape };
                let DraftContext { id, salt, tokens, .. } = *text;
                requests.push(DraftRequest { id, salt, tokens, bounds, tree: &mut draft.tree });
            }
            drafter.prepare(&mut requests)?;
            let started = Instant::now();
            drafter.propose(&mut requests)?;
            let elapsed = started.elapsed();
            if adaptive {
                choose(&self.costs, control, n, drafts, (rows, texts.len()), elapsed);
            }
        }
        let n_nodes: usize = drafts.iter().map(|draft| draft.tree.len()).sum();
        if n_nodes > limit as usize {
            let mut nodes = candidates(drafts, |_| true, |draft| draft.tree.paths());
            nodes.truncate(limit as usize);
            keep(drafts, |_| true, &nodes);
        }
        Ok(())
    }

    /// Passes on the rows of tapped layers for tokens of text `id` that were computed and kept; see [`Drafter::features`].
    pub fn features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        let mut taps = taps;
        for Measured { drafter, .. } in self.drafters.iter_mut().filter(|measured| measured.reads) {
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
        let measured = self.drafters.get_mut(draft.drafter);
        if let Some(Measured { control, .. }) = measured.filter(|_| !draft.tree.is_empty()) {
            control.record(&draft.tree, verified);
        }
    }

    /// The pass is over, and its drafts are [recorded](Self::record). It took `elapsed` over `rows` rows, drafts included; `None`
    /// if it had other rows than those of texts that decode.
    pub fn passed(&mut self, time: Option<(usize, Duration)>) {
        if let Some((rows, elapsed)) = time {
            self.costs.record(rows, elapsed);
        }
        for Measured { control, .. } in &mut self.drafters {
            control.passed(self.texts, |rows| self.costs.seconds(rows));
        }
    }

    /// Drops everything that is stored for text `id`.
    pub fn forget(&mut self, id: u64) {
        self.end(id, "", &[], 0);
    }

    /// Tokens of text `id` are removed, and the text goes on; see [`Drafter::removed`].
    pub fn removed(&mut self, id: u64, salt: &str, tokens: &[u32], kept: usize) {
        for Measured { drafter, .. } in &mut self.drafters {
            drafter.removed(id, salt, tokens, kept);
        }
    }

    /// Text `id` has ended; see [`Drafter::end`].
    pub fn end(&mut self, id: u64, salt: &str, tokens: &[u32], prompt: usize) {
        for Measured { drafter, .. } in &mut self.drafters {
            drafter.end(id, salt, tokens, prompt);
        }
    }
}

/// A node of one of several trees: the probability of its path, its depth, the tree, and the node.
type CandidateNode = (f64, u32, usize, u32);

/// The nodes of the trees that `of` selects, the most probable paths first. `paths` gives the probabilities of a tree's nodes.
/// Parents come before their children.
fn candidates(
    drafts: &[Draft],
    of: impl Fn(&Draft) -> bool,
    paths: impl Fn(&Draft) -> Vec<f64>,
) -> Vec<CandidateNode> {
    let mut nodes: Vec<CandidateNode> = Vec::new();
    for (i, draft) in drafts.iter().enumerate().filter(|(_, draft)| of(draft)) {
        let depths = draft.tree.depths();
        nodes.extend((0..).zip(paths(draft)).zip(depths).map(|((node, path), depth)| (path, depth, i, node)));
    }
    // Of equal paths the shorter one first, so that no text gets all of them.
    nodes.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    nodes
}

/// Removes all nodes but `nodes` from the trees that `of` selects.
fn keep(drafts: &mut [Draft], of: impl Fn(&Draft) -> bool, nodes: &[CandidateNode]) {
    for (i, draft) in drafts.iter_mut().enumerate().filter(|(_, draft)| of(draft)) {
        let mut kept: Vec<u32> =
            nodes.iter().filter(|(_, _, tree, _)| *tree == i).map(|(.., node)| *node).collect();
        kept.sort_unstable();
        draft.tree.keep(&kept);
    }
}

/// Removes the nodes that do not pay off from drafter `n`'s trees, in a pass that has `rows` rows and gives `gains` tokens
/// without any trees. The drafter took `elapsed` for them.
fn choose(
    costs: &Costs,
    control: &mut Control,
    n: usize,
    drafts: &mut [Draft],
    (rows, gains): (usize, usize),
    elapsed: Duration,
) {
    let own = |draft: &Draft| draft.drafter == n;
    let others: usize = drafts.iter().filter(|draft| !own(draft)).map(|draft| draft.tree.len()).sum();
    let mut nodes = candidates(drafts, own, |draft| control.paths(&draft.tree));
    let paths: Vec<f64> = nodes.iter().map(|(path, ..)| *path).collect();
    let Some(worth) = worth(costs, rows + others, gains, &paths) else { return };
    let depth = drafts.iter().filter(|draft| own(draft)).map(|draft| draft.tree.max_depth()).max();
    nodes.truncate(worth.nodes);
    let taken = nodes.iter().map(|(path, depth, ..)| (*depth, *path));
    control.chosen(elapsed, depth.unwrap_or(0), &worth, taken);
    keep(drafts, own, &nodes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(nodes: &[(Option<u32>, f32)]) -> Draft {
        let mut draft = Draft::default();
        nodes.iter().for_each(|(parent, probability)| {
            draft.tree.push(*parent, 7, *probability);
        });
        draft
    }

    /// Trees that are too large together lose their least probable paths, wherever these stand in the trees.
    #[test]
    fn the_least_probable_nodes_are_cut() {
        let mut drafts = [
            draft(&[(None, 0.5), (Some(0), 0.1), (None, 0.4), (Some(2), 0.9)]),
            draft(&[(None, 0.3), (Some(0), 1.0), (Some(1), 1.0)]),
        ];
        let mut nodes = candidates(&drafts, |_| true, |draft| draft.tree.paths());
        nodes.truncate(5);
        keep(&mut drafts, |_| true, &nodes);
        assert_eq!(drafts[0].tree.probabilities(), [0.5, 0.4, 0.9]);
        assert_eq!(drafts[0].tree.parents(), [None, None, Some(1)]);
        assert_eq!(drafts[1].tree.probabilities(), [0.3, 1.0]);
    }

    /// Texts whose drafters are equally sure share the limit.
    #[test]
    fn equal_chains_share_the_limit() {
        let chain = [(None, 1.0), (Some(0), 1.0), (Some(1), 1.0), (Some(2), 1.0)];
        let mut drafts = [draft(&chain), draft(&chain)];
        let mut nodes = candidates(&drafts, |_| true, |draft| draft.tree.paths());
        nodes.truncate(4);
        keep(&mut drafts, |_| true, &nodes);
        assert_eq!(drafts.map(|draft| draft.tree.len()), [2, 2]);
    }
}
