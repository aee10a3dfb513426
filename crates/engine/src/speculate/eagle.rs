//! EAGLE heads as drafters: one layer that predicts tokens from the target's hidden states (Li et al., 2024 and 2025).
//!
//! ```text
//! position            0    1    2    3    4
//! token               a    b    c    d    e     e is known and not computed
//! target's features   f₀   f₁   f₂   f₃
//! rows of the head    bf₀  cf₁  df₂  ef₃        the last one gives the roots of the tree and a hidden state h₃
//! nodes                              xh₃ yh₃ …  a node's row reads its token and its parent's hidden state
//! ```
//! The rows of nodes are discarded with the tree: once the target has accepted some, they are computed again from its own
//! features.
use super::expand::{self, Candidate, Growing, Levels};
use super::texts::{CachedTexts, make_room};
use super::{Bounds, DraftRequest, Drafter};
use crate::memory::CacheConfig;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use kvist_cache::{LayerId, NodeId, SeqId};
use kvist_device::{Given, Registry};
use kvist_model::{DraftHead, Error};

/// Drafts with an EAGLE head, over a tree cache of its own that follows the texts of the target.
pub struct Eagle {
    texts: CachedTexts<Rows>,
    taps: Vec<LayerId>,
    draft_vocab: usize,
    target_ids: Option<Vec<u32>>,
    /// A path with a lower probability is not followed.
    pub min_probability: f32,
}

/// What the head knows of a text. Its rows begin where the target's features do: a prefix that the target found in its cache
/// is absent.
struct Rows {
    /// Position in the text of the first row.
    base: u32,
    /// Rows in the cache.
    computed: u32,
    /// Features of the rows that follow: `[pending, width]`.
    features: Vec<f32>,
    /// The text's tokens, as far as they were known when the last features came: other texts may begin with them.
    known: Vec<u32>,
}

impl Rows {
    /// Position of the next row.
    fn next(&self) -> usize {
        (self.base + self.computed) as usize
    }

    /// What a text of the tokens `known`, whose features come from position `first` on, has in common with this one: the number
    /// of rows in the cache, and all rows before `first`. `None` if some are missing.
    fn shared(&self, known: &[u32], first: u32, width: usize) -> Option<(u32, Rows)> {
        let n = first.checked_sub(self.base).filter(|n| *n > 0)?;
        let end = first as usize;
        // The last of the rows reads the token at `first`, which may differ: see `continue_at`.
        let same = self.known.get(..end).is_some_and(|known_here| known.get(..end) == Some(known_here));
        if !same {
            return None;
        }
        let computed = n.min(self.computed);
        let features = self.features.get(..(n - computed) as usize * width)?.to_vec();
        Some((computed, Rows { base: self.base, computed, features, known: known[..end].to_vec() }))
    }
}

impl Eagle {
    /// Takes `head`, with a cache of `config` for the tokens of all texts together; its kind is ignored. A step of the head
    /// has at most `config.max_rows` rows of logits: one for each text, or `width` for each text while trees grow.
    pub fn new(head: &DraftHead, registry: &Registry, config: &CacheConfig) -> Result<Self, Error> {
        let config = CacheConfig { kind: "tree".into(), ..config.clone() };
        let mut session = ModelSession::new(&head.model, registry, &config)?;
        session.set_taps(&[LayerId(0)])?;
        Ok(Eagle {
            texts: CachedTexts::new(session),
            taps: head.taps.clone(),
            draft_vocab: head.draft_vocab,
            target_ids: head.target_ids.clone(),
            min_probability: 0.01,
        })
    }

    /// Elements of a token's features.
    fn width(&self) -> usize {
        self.texts.session.model().config().features
    }
    fn chunk(&self) -> usize {
        self.texts.session.config().max_step_tokens.max(1) as usize
    }

    /// Lets the text's rows continue at position `first`. Without the rows before, it begins there. After a rollback the row
    /// before has read the token that was there then; that makes a draft less likely to be right, and no text wrong.
    /// A new text takes the rows of another one that begins with the same tokens: the target, too, found those in its cache.
    fn continue_at(&mut self, id: u64, first: u32, known: &[u32]) -> Result<(), Error> {
        let width = self.width();
        let joins = |rows: &Rows| {
            let end = rows.next() + rows.features.len() / width;
            (rows.base..=end as u32).contains(&first)
        };
        if self.texts.get(id).is_some_and(|text| !joins(&text.state)) {
            self.texts.remove(id);
        }
        let new = || Rows { base: first, computed: 0, features: Vec::new(), known: Vec::new() };
        let text = self.texts.open(id, |other| other.shared(known, first, width), new)?;
        let (seq, rows) = (text.seq, &mut text.state);
        rows.known.clear();
        rows.known.extend_from_slice(known);
        let (from, computed) = (first - rows.base, rows.computed);
        rows.computed = from.min(computed);
        rows.features.truncate((from - rows.computed) as usize * width);
        match from < computed {
            true => self.texts.shorten(seq, from),
            false => Ok(()),
        }
    }

    /// Computes pending rows of a text, without logits, until at most `keep` are left.
    fn compute(&mut self, id: u64, known: &[u32], keep: usize) -> Result<(), Error> {
        let (width, chunk) = (self.width(), self.chunk());
        loop {
            let (session, Some(text)) = self.texts.split(id) else { return Ok(()) };
            let rows = &mut text.state;
            // A row reads the token after its position.
            let next = rows.next() + 1;
            let pending = (rows.features.len() / width).min(known.len().saturating_sub(next));
            let n = pending.saturating_sub(keep).min(chunk);
            if n == 0 {
                return Ok(());
            }
            let input = SequenceInput::chain(text.seq, &known[next..next + n]);
            let given = Given::Features(&rows.features[..n * width]);
            session.forward_given(&[input], LogitRows::None, given)?;
            rows.features.drain(..n * width);
            rows.computed += n as u32;
        }
    }

    fn try_features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        let hidden = self.texts.session.model().config().hidden;
        self.continue_at(id, first, known)?;
        let (_, Some(text)) = self.texts.split(id) else { return Ok(()) };
        let features = &mut text.state.features;
        let n = taps.first().map_or(0, |rows| rows.len() / hidden);
        features.reserve(n * hidden * taps.len());
        for row in 0..n {
            taps.iter().for_each(|rows| features.extend_from_slice(&rows[row * hidden..][..hidden]));
        }
        match features.len() / self.width() > WAITING.min(self.chunk()) {
            true => self.compute(id, known, 1),
            false => Ok(()),
        }
    }

    /// Fills the trees of the requests for the texts `ids`.
    fn try_propose(&mut self, requests: &mut [DraftRequest<'_>], ids: &[u64]) -> Result<(), Error> {
        let width = self.width();
        // Texts whose last computed token has features: the others' trees stay empty.
        let mut ready: Vec<usize> = Vec::new();
        let mut pending = 0;
        for (i, request) in requests.iter().enumerate().filter(|(_, request)| ids.contains(&request.id)) {
            let Some(text) = self.texts.get(request.id) else { continue };
            let n = text.state.features.len() / width;
            if n > 0 && text.state.next() + n + 1 == request.tokens.len() {
                ready.push(i);
                pending += n;
            }
        }
        if ready.is_empty() {
            return Ok(());
        }
        if pending > self.chunk() {
            for &i in &ready {
                self.compute(requests[i].id, requests[i].tokens, 1)?;
            }
        }
        let bounds: Vec<Bounds> = ready.iter().map(|i| requests[*i].bounds).collect();
        let (min, seqs) = (self.min_probability, self.sequences(&ready, requests));
        let hidden = self.texts.session.model().config().hidden;
        let nodes = bounds.iter().map(|bounds| Nodes::new(*bounds, hidden)).collect();
        let mut levels = HeadLevels { drafter: self, requests, ready: &ready, nodes };
        let grown = expand::grow(&mut levels, &bounds, min);
        for seq in seqs {
            self.texts.trees()?.discard(seq)?;
        }
        for ((i, grown), bounds) in ready.into_iter().zip(grown?).zip(bounds) {
            grown.finish(bounds, requests[i].tree);
        }
        Ok(())
    }

    fn sequences(&self, ready: &[usize], requests: &[DraftRequest<'_>]) -> Vec<SeqId> {
        ready.iter().filter_map(|i| Some(self.texts.get(requests[*i].id)?.seq)).collect()
    }

    /// Candidates of a row of logits, as the target numbers them.
    fn candidates(&self, row: usize, n: usize) -> Vec<Candidate> {
        let logits = &self.texts.session.logits()[row * self.draft_vocab..][..self.draft_vocab];
        let mut candidates = expand::top(logits, n);
        if let Some(ids) = &self.target_ids {
            candidates.iter_mut().for_each(|(token, _)| *token = ids[*token as usize]);
        }
        candidates
    }
}

/// Tokens of a text whose features may wait for the next tree, which computes their rows together with others.
const WAITING: usize = 64;

/// The computed nodes of a growing tree.
struct Nodes {
    /// In the order of the cache's nodes.
    computed: Vec<u32>,
    /// The hidden states: first that of the text's last row, then one for each of `computed`. `[1 + computed, hidden]`
    states: Vec<f32>,
}

impl Nodes {
    fn new(bounds: Bounds, hidden: usize) -> Self {
        let most = bounds.depth.saturating_mul(bounds.width).min(bounds.tokens) as usize;
        Nodes { computed: Vec::with_capacity(most), states: Vec::with_capacity((1 + most) * hidden) }
    }

    /// Where a node was computed; `None` for the text's last row.
    fn place(&self, node: Option<u32>) -> Option<usize> {
        self.computed.iter().position(|other| Some(*other) == node)
    }
}

/// The levels of the trees of some texts.
struct HeadLevels<'d, 'p> {
    drafter: &'d mut Eagle,
    requests: &'d [DraftRequest<'p>],
    /// Indices into `requests`.
    ready: &'d [usize],
    nodes: Vec<Nodes>,
}

impl HeadLevels<'_, '_> {
    /// Computes the pending rows of all texts. Returns the number of rows of each.
    fn roots(&mut self) -> Result<Vec<usize>, Error> {
        let (width, texts) = (self.drafter.width(), &mut self.drafter.texts);
        let (mut inputs, mut features, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for request in self.ready.iter().map(|i| &self.requests[*i]) {
            let Some(text) = texts.get(request.id) else { continue };
            inputs.push(SequenceInput::chain(text.seq, &request.tokens[text.state.next() + 1..]));
            features.extend_from_slice(&text.state.features);
            rows.push(text.state.features.len() / width);
        }
        texts.session.forward_given(&inputs, LogitRows::LastOfEach, Given::Features(&features))?;
        for (i, n) in self.ready.iter().zip(&rows) {
            if let (_, Some(text)) = texts.split(self.requests[*i].id) {
                text.state.computed += *n as u32;
                text.state.features.clear();
            }
        }
        Ok(rows)
    }

    /// Computes the leaves. Gives the number of rows of each text.
    fn leaves(&mut self, growing: &[Growing]) -> Result<Vec<usize>, Error> {
        let seqs = self.drafter.sequences(self.ready, self.requests);
        let session = &mut self.drafter.texts.session;
        let hidden = session.model().config().hidden;
        let rows: usize = growing.iter().map(|growing| growing.leaves.len()).sum();
        let (mut batch, mut states) = (Vec::new(), Vec::with_capacity(rows * hidden));
        for (growing, nodes) in growing.iter().zip(&mut self.nodes) {
            let n = growing.leaves.len();
            let (mut tokens, mut parents) = (Vec::with_capacity(n), Vec::with_capacity(n));
            for &node in &growing.leaves {
                let parent = nodes.place(growing.parent(node));
                states.extend_from_slice(
                    &nodes.states[parent.map_or(0, |place| place + 1) * hidden..][..hidden],
                );
                tokens.push(growing.token(node));
                parents.push(parent.map(|place| NodeId(place as u32)));
            }
            nodes.computed.extend(&growing.leaves);
            batch.push((tokens, parents));
        }
        let inputs: Vec<SequenceInput<'_>> = seqs
            .iter()
            .zip(&batch)
            .filter(|(_, (tokens, _))| !tokens.is_empty())
            .map(|(seq, (tokens, parents))| SequenceInput::draft_tree(*seq, tokens, parents))
            .collect();
        session.forward_given(&inputs, LogitRows::All, Given::States(&states))?;
        Ok(batch.iter().map(|(tokens, _)| tokens.len()).collect())
    }
}

impl Levels for HeadLevels<'_, '_> {
    fn level(&mut self, growing: &[Growing], first: bool) -> Result<Vec<Vec<Vec<Candidate>>>, Error> {
        let rows = if first { self.roots()? } else { self.leaves(growing)? };
        let session = &self.drafter.texts.session;
        let hidden = session.model().config().hidden;
        let (mut row, mut logits, mut out) = (0, 0, Vec::new());
        for ((n, nodes), request) in
            rows.into_iter().zip(&mut self.nodes).zip(self.ready.iter().map(|i| &self.requests[*i]))
        {
            // Of the pending rows, only the last one matters.
            let seen = if first { row + n - 1..row + n } else { row..row + n };
            nodes.states.extend_from_slice(&session.tap(0)[seen.start * hidden..seen.end * hidden]);
            let width = request.bounds.width as usize;
            out.push(
                seen.clone().zip(logits..).map(|(_, row)| self.drafter.candidates(row, width)).collect(),
            );
            logits += seen.len();
            row += n;
        }
        Ok(out)
    }
}

impl Drafter for Eagle {
    fn taps(&self) -> &[LayerId] {
        &self.taps
    }

    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        let busy: Vec<u64> = requests.iter().map(|request| request.id).collect();
        // Texts for which there is no room have no drafts, and begin anew with the features that come next.
        make_room(self, |this| &mut this.texts, &busy, |this, ids| this.try_propose(requests, ids)).map(drop)
    }

    fn features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        let attempt = |this: &mut Self, _: &[u64]| this.try_features(id, first, known, taps);
        make_room(self, |this| &mut this.texts, &[id], attempt).map(drop)
    }

    fn end(&mut self, id: u64, _salt: &str, _tokens: &[u32], _prompt: usize) {
        self.texts.remove(id);
    }
}
