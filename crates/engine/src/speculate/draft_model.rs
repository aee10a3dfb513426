//! A smaller model with the same vocabulary as drafter.
use super::expand::{self, Candidate, Growing, Levels};
use super::{Bounds, Drafter, Proposal};
use crate::memory::CacheConfig;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use kvist_cache::{NodeId, Refused, SeqId};
use kvist_device::{Registry, StepError};
use kvist_model::tokenizer::Tokenizer;
use kvist_model::{Error, Model};
use std::collections::HashMap;
use std::sync::Arc;

/// Drafts with a model of its own, over a tree cache that follows the texts of the target.
///
/// A proposal first computes the tokens that became known since the last one, of all texts in one pass, then the levels
/// of the trees, a pass per level. Nodes that the target accepted are already computed and stay.
pub struct DraftModel {
    session: ModelSession,
    texts: HashMap<u64, Text>,
    next_seq: u32,
    clock: u64,
    /// Tokens of the target. The draft model may have more, as padding.
    target_vocab: usize,
    /// A path with a lower probability is not followed.
    pub min_probability: f32,
}

/// What the draft cache holds of a text.
struct Text {
    seq: SeqId,
    tokens: Vec<u32>,
    /// Computed nodes after them, by number: token and parent.
    nodes: Vec<(u32, Option<NodeId>)>,
    used: u64,
}

impl DraftModel {
    /// Wraps `model`, with a cache of `config` for the tokens of all texts together; its kind is ignored. Refused if the
    /// vocabulary is not that of `target`.
    pub fn new(
        model: &Arc<Model>,
        target: &Model,
        registry: &Registry,
        config: &CacheConfig,
    ) -> Result<Self, Error> {
        check_vocabulary(
            (model.config().vocab, model.tokenizer()),
            (target.config().vocab, target.tokenizer()),
        )?;
        let config = CacheConfig { kind: "tree".into(), ..config.clone() };
        Ok(DraftModel {
            session: ModelSession::new(model, registry, &config)?,
            texts: HashMap::new(),
            next_seq: 1,
            clock: 0,
            target_vocab: target.config().vocab,
            min_probability: 0.01,
        })
    }

    /// Follows the known tokens of a text, up to the one before the last: commits the nodes that agree, discards others.
    fn settle(&mut self, id: u64, known: &[u32]) -> Result<SeqId, Error> {
        self.clock += 1;
        let cache = self.session.cache();
        let text = match self.texts.entry(id) {
            std::collections::hash_map::Entry::Occupied(text) => text.into_mut(),
            std::collections::hash_map::Entry::Vacant(empty) => {
                let seq = SeqId(self.next_seq);
                self.next_seq += 1;
                cache.sequences().ok_or(Refused::Unsupported(NO_SEQUENCES))?.seq_new(seq)?;
                empty.insert(Text { seq, tokens: Vec::new(), nodes: Vec::new(), used: 0 })
            }
        };
        text.used = self.clock;
        let until = known.len().saturating_sub(1);
        let same = text.tokens.iter().zip(&known[..until]).take_while(|(a, b)| a == b).count();
        let mut path: Vec<NodeId> = Vec::new();
        if same == text.tokens.len() {
            let mut at = None;
            for &token in &known[same..until] {
                let child = text.nodes.iter().position(|node| *node == (token, at));
                let Some(child) = child.map(|child| NodeId(child as u32)) else { break };
                path.push(child);
                at = Some(child);
            }
        }
        cache.trees().ok_or(Refused::Unsupported(NO_SEQUENCES))?.commit_path(text.seq, &path)?;
        text.tokens.extend(path.iter().map(|node| text.nodes[node.0 as usize].0));
        text.nodes.clear();
        if same + path.len() < text.tokens.len() {
            let mut sequences = cache.sequences().ok_or(Refused::Unsupported(NO_SEQUENCES))?;
            sequences.seq_rm(text.seq, same as u32, u32::MAX)?;
            if same == 0 {
                sequences.seq_new(text.seq)?; // removing all tokens removes the sequence
            }
            text.tokens.truncate(same);
        }
        Ok(text.seq)
    }

    fn remove(&mut self, id: u64) {
        if let (Some(text), Some(mut sequences)) = (self.texts.remove(&id), self.session.cache().sequences())
        {
            // The sequence exists: it was made with the text.
            let _ = sequences.seq_rm(text.seq, 0, u32::MAX);
        }
    }

    /// Computes what is known of the texts but the last tokens, in chunks.
    fn prefill(&mut self, proposals: &[Proposal<'_>]) -> Result<(), Error> {
        let chunk = self.session.config().max_step_tokens.max(1) as usize;
        for Proposal { id, tokens, .. } in proposals {
            let text = &self.texts[id];
            // The last tokens of all texts are computed together, and may take a chunk with them.
            let until = tokens.len() - 1;
            let (seq, mut done) = (text.seq, text.tokens.len());
            while done < until {
                let end = until.min(done + chunk);
                self.session.forward(&[SequenceInput::chain(seq, &tokens[done..end])], LogitRows::None)?;
                self.texts.get_mut(id).expect("it was settled").tokens.extend(&tokens[done..end]);
                done = end;
            }
        }
        Ok(())
    }

    fn try_propose(&mut self, proposals: &mut [Proposal<'_>]) -> Result<(), Error> {
        for proposal in proposals.iter() {
            self.settle(proposal.id, proposal.tokens)?;
        }
        self.prefill(proposals)?;
        let bounds: Vec<Bounds> = proposals.iter().map(|proposal| proposal.bounds).collect();
        let min = self.min_probability;
        let mut levels =
            ModelLevels { drafter: self, proposals, forwarded: vec![Vec::new(); proposals.len()] };
        let grown = expand::grow(&mut levels, &bounds, min)?;
        for ((proposal, grown), bounds) in proposals.iter_mut().zip(grown).zip(bounds) {
            grown.finish(bounds, proposal.tree);
        }
        Ok(())
    }
}

const NO_SEQUENCES: &str = "the draft cache needs sequences and draft trees";

/// The levels of the trees of some texts.
struct ModelLevels<'d, 'p> {
    drafter: &'d mut DraftModel,
    proposals: &'d [Proposal<'p>],
    /// Per text: the nodes of the growing tree that were computed, in the order of the cache's nodes.
    forwarded: Vec<Vec<u32>>,
}

impl Levels for ModelLevels<'_, '_> {
    fn level(&mut self, growing: &[Growing], first: bool) -> Result<Vec<Vec<Vec<Candidate>>>, Error> {
        let DraftModel { session, texts, target_vocab, .. } = &mut *self.drafter;
        let mut batch: Vec<(SeqId, Vec<u32>, Vec<Option<NodeId>>)> = Vec::new();
        for (i, (proposal, growing)) in self.proposals.iter().zip(growing).enumerate() {
            let text = texts.get_mut(&proposal.id).expect("it was settled");
            if first {
                let last = proposal.tokens[proposal.tokens.len() - 1];
                batch.push((text.seq, vec![last], Vec::new()));
                text.tokens.push(last);
                continue;
            }
            let forwarded = &mut self.forwarded[i];
            let (mut tokens, mut parents) = (Vec::new(), Vec::new());
            for &node in &growing.frontier {
                let parent = growing.parent(node);
                let parent = forwarded.iter().position(|other| Some(*other) == parent);
                tokens.push(growing.token(node));
                parents.push(parent.map(|parent| NodeId(parent as u32)));
            }
            // A root's parent is the last known token, and stands for no node.
            text.nodes.extend(tokens.iter().copied().zip(parents.iter().copied()));
            forwarded.extend(&growing.frontier);
            batch.push((text.seq, tokens, parents));
        }
        let inputs: Vec<SequenceInput<'_>> = batch
            .iter()
            .filter(|(_, tokens, _)| !tokens.is_empty())
            .map(|(seq, tokens, parents)| match first {
                true => SequenceInput::chain(*seq, tokens),
                false => SequenceInput::draft_tree(*seq, tokens, parents),
            })
            .collect();
        session.forward(&inputs, LogitRows::All)?;
        let mut row = 0;
        let mut out = Vec::with_capacity(batch.len());
        for ((_, tokens, _), proposal) in batch.iter().zip(self.proposals) {
            let mut of_text = Vec::with_capacity(tokens.len());
            for _ in tokens {
                let mut candidates = Vec::new();
                let logits = session.logits_row(row);
                let logits = &logits[..logits.len().min(*target_vocab)];
                expand::top(logits, proposal.bounds.width as usize, &mut candidates);
                of_text.push(candidates);
                row += 1;
            }
            out.push(of_text);
        }
        Ok(out)
    }
}

impl Drafter for DraftModel {
    fn name(&self) -> &'static str {
        "draft"
    }

    fn propose(&mut self, proposals: &mut [Proposal<'_>]) -> Result<(), Error> {
        // A draft cache that is full forgets the text that was used longest ago. If nothing is left to forget, or the
        // texts are longer than the draft model's context, there is no draft.
        loop {
            let failed = match self.try_propose(proposals) {
                Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) => true,
                other => return other,
            };
            // Bookkeeping of a failed pass may run ahead of the cache: start these texts over.
            proposals.iter().for_each(|proposal| self.remove(proposal.id));
            proposals.iter_mut().for_each(|proposal| proposal.tree.clear());
            let oldest = self.texts.iter().min_by_key(|(_, text)| text.used).map(|(id, _)| *id);
            match oldest.filter(|_| failed) {
                Some(oldest) => self.remove(oldest),
                None => return Ok(()),
            }
        }
    }

    fn end(&mut self, id: u64, _salt: &str, _tokens: &[u32], _prompt: usize) {
        self.remove(id);
    }

    fn bytes(&self) -> u64 {
        self.session.kv_bytes()
    }
}

/// Refuses a draft model whose tokens mean something else than the target's, by size of the vocabulary and tokenizer of both. Sizes may differ by padding where both have
/// tokenizers.
pub fn check_vocabulary(
    (theirs, draft): (usize, Option<&Tokenizer>),
    (ours, target): (usize, Option<&Tokenizer>),
) -> Result<(), Error> {
    let Some((draft, target)) = draft.zip(target) else {
        return match theirs == ours {
            true => Ok(()),
            false => Err(Error::Usage(format!(
                "the draft model has a vocabulary of {theirs} tokens, the target one of {ours}: use a draft model of the same family"
            ))),
        };
    };
    let n = draft.vocab_size().max(target.vocab_size()) as u32;
    let differs = (0..n).map(|token| (token, draft.name(token), target.name(token))).find(|(_, a, b)| a != b);
    let name = |name: Option<String>| name.map_or("missing".into(), |name| format!("{name:?}"));
    match differs {
        None => Ok(()),
        Some((token, theirs, ours)) => Err(Error::Usage(format!(
            "the draft model has another tokenizer: its token {token} is {}, the target's is {}; use a draft model of the same family",
            name(theirs),
            name(ours)
        ))),
    }
}
