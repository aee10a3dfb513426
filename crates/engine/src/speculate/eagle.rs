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
use super::{Bounds, DraftRequest, Drafter};
use crate::memory::CacheConfig;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use kvist_cache::{LayerId, NodeId, Refused, SeqId};
use kvist_device::{Given, Registry, StepError};
use kvist_model::{DraftHead, Error};
use std::collections::HashMap;

/// Drafts with an EAGLE head, over a tree cache of its own that follows the texts of the target.
pub struct Eagle {
    session: ModelSession,
    taps: Vec<LayerId>,
    draft_vocab: usize,
    target_ids: Option<Vec<u32>>,
    texts: HashMap<u64, HeadSequence>,
    next_seq: u32,
    clock: u64,
    /// A path with a lower probability is not followed.
    pub min_probability: f32,
}

/// The rows of a text in the head's cache. They begin where the target's features do: a prefix that the target found in its
/// cache has none.
struct HeadSequence {
    seq: SeqId,
    /// Position in the text of the first row.
    base: u32,
    /// Rows in the cache.
    computed: u32,
    /// Features of the rows that follow: `[pending, width]`.
    features: Vec<f32>,
    used: u64,
}

impl HeadSequence {
    /// Position of the next row.
    fn next(&self) -> usize {
        (self.base + self.computed) as usize
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
            session,
            taps: head.taps.clone(),
            draft_vocab: head.draft_vocab,
            target_ids: head.target_ids.clone(),
            texts: HashMap::new(),
            next_seq: 1,
            clock: 0,
            min_probability: 0.01,
        })
    }

    /// Elements of a token's features.
    fn width(&self) -> usize {
        self.session.model().config().features
    }
    fn chunk(&self) -> usize {
        self.session.config().max_step_tokens.max(1) as usize
    }

    fn remove(&mut self, id: u64) {
        if let (Some(text), Some(mut sequences)) = (self.texts.remove(&id), self.session.cache().sequences())
        {
            // The sequence exists: it was made with the text.
            let _ = sequences.seq_rm(text.seq, 0, u32::MAX);
        }
    }

    /// Removes the rows of a text from row `from` on, and their features.
    fn shorten(&mut self, id: u64, from: u32) -> Result<(), Error> {
        let width = self.width();
        let Some(text) = self.texts.get_mut(&id) else { return Ok(()) };
        if from < text.computed {
            let mut sequences = self.session.cache().sequences().ok_or(Refused::Unsupported(NO_TREES))?;
            sequences.seq_rm(text.seq, from, u32::MAX)?;
            if from == 0 {
                sequences.seq_new(text.seq)?; // removing all tokens removes the sequence
            }
            text.computed = from;
        }
        text.features.truncate((from - text.computed) as usize * width);
        Ok(())
    }

    /// The text whose rows continue at position `first`. Without the rows before, it begins there. After a rollback the row
    /// before has read the token that was there then; that makes a draft less likely to be right, and no text wrong.
    fn text_at(&mut self, id: u64, first: u32) -> Result<&mut HeadSequence, Error> {
        let width = self.width();
        let joins = |text: &HeadSequence| {
            let end = text.next() + text.features.len() / width;
            (text.base..=end as u32).contains(&first)
        };
        match self.texts.get(&id) {
            Some(text) if joins(text) => {
                let from = first - text.base;
                self.shorten(id, from)?;
            }
            other => {
                if other.is_some() {
                    self.remove(id);
                }
                let seq = SeqId(self.next_seq);
                self.session.cache().sequences().ok_or(Refused::Unsupported(NO_TREES))?.seq_new(seq)?;
                self.next_seq += 1;
                let text = HeadSequence { seq, base: first, computed: 0, features: Vec::new(), used: 0 };
                self.texts.insert(id, text);
            }
        }
        self.clock += 1;
        let text = self.texts.get_mut(&id).expect("it is there or was just made");
        text.used = self.clock;
        Ok(text)
    }

    /// Computes pending rows of a text, without logits, until at most `keep` are left.
    fn compute(&mut self, id: u64, known: &[u32], keep: usize) -> Result<(), Error> {
        let (width, chunk) = (self.width(), self.chunk());
        loop {
            let Some(text) = self.texts.get_mut(&id) else { return Ok(()) };
            // A row reads the token after its position.
            let next = text.next() + 1;
            let pending = (text.features.len() / width).min(known.len().saturating_sub(next));
            let n = pending.saturating_sub(keep).min(chunk);
            if n == 0 {
                return Ok(());
            }
            let input = SequenceInput::chain(text.seq, &known[next..next + n]);
            let given = Given::Features(&text.features[..n * width]);
            self.session.forward_given(&[input], LogitRows::None, given)?;
            text.features.drain(..n * width);
            text.computed += n as u32;
        }
    }

    fn try_features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        let hidden = self.session.model().config().hidden;
        let text = self.text_at(id, first)?;
        let n = taps.first().map_or(0, |rows| rows.len() / hidden);
        text.features.reserve(n * hidden * taps.len());
        for row in 0..n {
            taps.iter().for_each(|rows| text.features.extend_from_slice(&rows[row * hidden..][..hidden]));
        }
        match text.features.len() / self.width() > WAITING.min(self.chunk()) {
            true => self.compute(id, known, 1),
            false => Ok(()),
        }
    }

    fn try_propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        let width = self.width();
        // Texts whose last computed token has features: the others' trees stay empty.
        let mut ready: Vec<usize> = Vec::new();
        let mut pending = 0;
        for (i, request) in requests.iter().enumerate() {
            let Some(text) = self.texts.get(&request.id) else { continue };
            let n = text.features.len() / width;
            if n > 0 && text.next() + n + 1 == request.tokens.len() {
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
        let nodes = seqs.iter().map(|_| Nodes::default()).collect();
        let mut levels = HeadLevels { drafter: self, requests, ready: &ready, nodes };
        let grown = expand::grow(&mut levels, &bounds, min);
        for seq in seqs {
            self.session.cache().trees().ok_or(Refused::Unsupported(NO_TREES))?.discard(seq)?;
        }
        for ((i, grown), bounds) in ready.into_iter().zip(grown?).zip(bounds) {
            grown.finish(bounds, requests[i].tree);
        }
        Ok(())
    }

    fn sequences(&self, ready: &[usize], requests: &[DraftRequest<'_>]) -> Vec<SeqId> {
        ready.iter().map(|i| self.texts[&requests[*i].id].seq).collect()
    }

    /// Removes the least recently used text that is not in `busy`. False if there is none.
    fn remove_oldest(&mut self, busy: &[u64]) -> bool {
        let unused = self.texts.iter().filter(|(id, _)| !busy.contains(id));
        let oldest = unused.min_by_key(|(_, text)| text.used).map(|(id, _)| *id);
        oldest.map(|oldest| self.remove(oldest)).is_some()
    }

    /// Candidates of a row of logits, as the target numbers them.
    fn candidates(&self, row: usize, n: usize) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let logits = &self.session.logits()[row * self.draft_vocab..][..self.draft_vocab];
        expand::top(logits, n, &mut candidates);
        if let Some(ids) = &self.target_ids {
            candidates.iter_mut().for_each(|(token, _)| *token = ids[*token as usize]);
        }
        candidates
    }
}

/// Tokens of a text whose features may wait for the next tree, which computes their rows together with others.
const WAITING: usize = 64;

const NO_TREES: &str = "the head's cache needs sequences and draft trees";

/// True if the head's cache is full.
fn is_full(result: &Result<(), Error>) -> bool {
    matches!(result, Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))))
}

/// The computed nodes of a growing tree.
#[derive(Default)]
struct Nodes {
    /// In the order of the cache's nodes.
    computed: Vec<u32>,
    /// The hidden states: first that of the text's last row, then one for each of `computed`. `[1 + computed, hidden]`
    states: Vec<f32>,
}

impl Nodes {
    /// The place of a node among the computed ones; `None` for the text's last row.
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
        let Eagle { session, texts, .. } = &mut *self.drafter;
        let width = session.model().config().features;
        let (mut inputs, mut features, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for request in self.ready.iter().map(|i| &self.requests[*i]) {
            let text = &texts[&request.id];
            inputs.push(SequenceInput::chain(text.seq, &request.tokens[text.next() + 1..]));
            features.extend_from_slice(&text.features);
            rows.push(text.features.len() / width);
        }
        session.forward_given(&inputs, LogitRows::LastOfEach, Given::Features(&features))?;
        for (request, n) in self.ready.iter().map(|i| &self.requests[*i]).zip(&rows) {
            let text = texts.get_mut(&request.id).expect("it is ready");
            text.computed += *n as u32;
            text.features.clear();
        }
        Ok(rows)
    }

    /// Computes the leaves of all trees. Returns the number of rows of each text.
    fn leaves(&mut self, growing: &[Growing]) -> Result<Vec<usize>, Error> {
        let seqs = self.drafter.sequences(self.ready, self.requests);
        let session = &mut self.drafter.session;
        let hidden = session.model().config().hidden;
        let (mut batch, mut states) = (Vec::new(), Vec::new());
        for (growing, nodes) in growing.iter().zip(&mut self.nodes) {
            let (mut tokens, mut parents) = (Vec::new(), Vec::new());
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
        let session = &self.drafter.session;
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
        loop {
            let result = self.try_propose(requests);
            if !is_full(&result) {
                return result;
            }
            // These texts are too long together for the head's cache. They get no drafts, and start again with the features
            // that come next.
            if !self.remove_oldest(&busy) {
                busy.iter().for_each(|id| self.remove(*id));
                return Ok(());
            }
        }
    }

    fn features(&mut self, id: u64, first: u32, known: &[u32], taps: &[&[f32]]) -> Result<(), Error> {
        loop {
            let result = self.try_features(id, first, known, taps);
            if !is_full(&result) {
                return result;
            }
            if !self.remove_oldest(&[id]) {
                self.remove(id);
                return Ok(());
            }
        }
    }

    fn end(&mut self, id: u64, _salt: &str, _tokens: &[u32], _prompt: usize) {
        self.remove(id);
    }

    fn bytes(&self) -> u64 {
        let waiting: usize =
            self.texts.values().map(|text| text.features.capacity() * size_of::<f32>()).sum();
        self.session.kv_bytes() + waiting as u64
    }
}
