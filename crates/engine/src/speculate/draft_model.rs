//! A smaller model with the same vocabulary as drafter.
use super::expand::{self, Candidate, Growing, Levels};
use super::texts::{CachedText, CachedTexts, make_room};
use super::{Bounds, Drafter, Proposal};
use crate::memory::CacheConfig;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use kvist_cache::{NodeId, SeqId};
use kvist_device::Registry;
use kvist_model::tokenizer::Tokenizer;
use kvist_model::{Error, Model};
use std::sync::Arc;

/// Drafts with a model of its own, over a tree cache that follows the texts of the target.
///
/// A proposal first computes the tokens that became known since the last one, of all texts in one pass, then the levels
/// of the trees, a pass per level. Nodes that the target accepted are already computed and stay.
pub struct DraftModel {
    texts: CachedTexts<Computed>,
    /// Proposals that stay empty, because the cache was too small.
    rests: u32,
    /// Tokens of the target. The draft model may have more, as padding.
    target_vocab: usize,
    /// A path with a lower probability is not followed.
    pub min_probability: f32,
}

/// What the draft cache holds of a text.
#[derive(Default)]
struct Computed {
    tokens: Vec<u32>,
    /// Nodes after them, by number: token and parent.
    nodes: Vec<(u32, Option<NodeId>)>,
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
            texts: CachedTexts::new(ModelSession::new(model, registry, &config)?),
            rests: 0,
            target_vocab: target.config().vocab,
            min_probability: 0.01,
        })
    }

    /// Follows the known tokens of a text, up to the one before the last: commits the nodes that agree, discards others.
    fn settle(&mut self, id: u64, known: &[u32]) -> Result<(), Error> {
        let until = known.len().saturating_sub(1);
        let CachedText { seq, state: Computed { tokens, nodes }, .. } =
            self.texts.open(id, Computed::default)?;
        let (seq, n) = (*seq, tokens.len());
        let same = tokens.iter().zip(&known[..until]).take_while(|(a, b)| a == b).count();
        let mut path: Vec<NodeId> = Vec::new();
        if same == n {
            let mut at = None;
            for &token in &known[same..until] {
                let child = nodes.iter().position(|node| *node == (token, at));
                let Some(child) = child.map(|child| NodeId(child as u32)) else { break };
                path.push(child);
                at = Some(child);
            }
        }
        tokens.truncate(same);
        tokens.extend(path.iter().map(|node| nodes[node.0 as usize].0));
        nodes.clear();
        self.texts.trees()?.commit_path(seq, &path)?;
        match same < n {
            true => self.texts.shorten(seq, same as u32),
            false => Ok(()),
        }
    }

    /// Computes what is known of the texts but the last tokens: at most a chunk in all, so that a long prompt does
    /// not hold up the target's step. It goes on in the next proposal.
    fn catch_up(&mut self, proposals: &[Proposal<'_>]) -> Result<(), Error> {
        let mut left = self.texts.session.config().max_step_tokens.max(1) as usize;
        for Proposal { id, tokens, .. } in proposals {
            let (session, Some(text)) = self.texts.split(*id) else { continue };
            let done = text.state.tokens.len();
            let chunk = &tokens[done..(tokens.len() - 1).min(done + left)];
            if !chunk.is_empty() {
                session.forward(&[SequenceInput::chain(text.seq, chunk)], LogitRows::None)?;
                text.state.tokens.extend(chunk);
                left -= chunk.len();
            }
        }
        Ok(())
    }

    /// After a pass that failed: a text's tokens and nodes are those that the cache holds.
    fn agree_with_cache(&mut self, id: u64) {
        let (session, Some(CachedText { seq, state, .. })) = self.texts.split(id) else { return };
        state.tokens.truncate(session.cache().next_position(*seq).unwrap_or(0) as usize);
        state.nodes.truncate(session.cache().n_nodes(*seq).unwrap_or(0) as usize);
    }

    fn try_propose(&mut self, proposals: &mut [Proposal<'_>]) -> Result<(), Error> {
        for proposal in proposals.iter() {
            self.settle(proposal.id, proposal.tokens)?;
        }
        self.catch_up(proposals)?;
        let n_computed = |id| self.texts.get(id).map(|text| text.state.tokens.len());
        let caught_up = |p: &Proposal<'_>| n_computed(p.id) == p.tokens.len().checked_sub(1);
        let proposals = &mut subset(proposals, caught_up);
        if proposals.is_empty() {
            return Ok(());
        }
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

/// Proposals without drafts after the cache was too small for all texts.
const REST: u32 = 64;

/// The proposals for which `wanted` holds.
fn subset<'s>(
    proposals: &'s mut [Proposal<'_>],
    wanted: impl Fn(&Proposal<'_>) -> bool,
) -> Vec<Proposal<'s>> {
    let wanted = proposals.iter_mut().filter(|proposal| wanted(proposal));
    let reborrow = |p: &'s mut Proposal<'_>| Proposal {
        id: p.id,
        salt: p.salt,
        tokens: p.tokens,
        bounds: p.bounds,
        tree: &mut *p.tree,
    };
    wanted.map(reborrow).collect()
}

/// The levels of the trees of some texts.
struct ModelLevels<'d, 'p> {
    drafter: &'d mut DraftModel,
    proposals: &'d [Proposal<'p>],
    /// Per text: the nodes of the growing tree that were computed, in the order of the cache's nodes.
    forwarded: Vec<Vec<u32>>,
}

impl Levels for ModelLevels<'_, '_> {
    fn level(&mut self, growing: &[Growing], first: bool) -> Result<Vec<Vec<Vec<Candidate>>>, Error> {
        let DraftModel { texts, target_vocab, .. } = &mut *self.drafter;
        let mut batch: Vec<(SeqId, Vec<u32>, Vec<Option<NodeId>>)> = Vec::new();
        for (i, (proposal, growing)) in self.proposals.iter().zip(growing).enumerate() {
            let CachedText { seq, state, .. } = texts.split(proposal.id).1.expect("it was settled");
            if first {
                let last = proposal.tokens[proposal.tokens.len() - 1];
                batch.push((*seq, vec![last], Vec::new()));
                state.tokens.push(last);
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
            state.nodes.extend(tokens.iter().copied().zip(parents.iter().copied()));
            forwarded.extend(&growing.frontier);
            batch.push((*seq, tokens, parents));
        }
        let inputs: Vec<SequenceInput<'_>> = batch
            .iter()
            .filter(|(_, tokens, _)| !tokens.is_empty())
            .map(|(seq, tokens, parents)| match first {
                true => SequenceInput::chain(*seq, tokens),
                false => SequenceInput::draft_tree(*seq, tokens, parents),
            })
            .collect();
        let session = &mut texts.session;
        session.forward(&inputs, LogitRows::All)?;
        let mut row = 0;
        let mut out = Vec::with_capacity(batch.len());
        for ((_, tokens, _), proposal) in batch.iter().zip(self.proposals) {
            let mut of_text = Vec::with_capacity(tokens.len());
            for _ in tokens {
                let logits = session.logits_row(row);
                let logits = &logits[..logits.len().min(*target_vocab)];
                of_text.push(expand::top(logits, proposal.bounds.width as usize));
                row += 1;
            }
            out.push(of_text);
        }
        Ok(out)
    }
}

impl Drafter for DraftModel {
    fn propose(&mut self, proposals: &mut [Proposal<'_>]) -> Result<(), Error> {
        if self.rests > 0 {
            self.rests -= 1;
            return Ok(());
        }
        // The target's vocabulary may be padded further than the draft model's.
        let vocab = self.texts.session.model().config().vocab;
        let known = |p: &Proposal<'_>| p.tokens.iter().all(|token| (*token as usize) < vocab);
        let proposals = &mut subset(proposals, known);
        let busy: Vec<u64> = proposals.iter().map(|proposal| proposal.id).collect();
        let fits = make_room(
            self,
            |this| &mut this.texts,
            &busy,
            |this| {
                let proposed = this.try_propose(proposals);
                if proposed.is_err() {
                    busy.iter().for_each(|id| this.agree_with_cache(*id));
                }
                proposed
            },
        )?;
        if !fits {
            self.rests = REST; // no drafts for a while
        }
        Ok(())
    }

    fn end(&mut self, id: u64, _salt: &str, _tokens: &[u32], _prompt: usize) {
        self.texts.remove(id);
    }
}

/// Refuses a draft model whose tokens mean something else than the target's, by size of the vocabulary and tokenizer
/// of both. Sizes may differ by padding where both have tokenizers.
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
