//! A drafter that runs a smaller model with the same vocabulary.
use super::expand::{self, Candidate, Growing, Levels};
use super::texts::{CachedText, CachedTexts, make_room};
use super::{Bounds, DraftRequest, Drafter};
use crate::memory::CacheConfig;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use kvist_cache::{NodeId, SeqId};
use kvist_device::Registry;
use kvist_model::tokenizer::Tokenizer;
use kvist_model::{Error, Model};
use std::collections::HashMap;
use std::sync::Arc;

/// Drafts with a model of its own, over a tree cache that follows the texts of the target.
///
/// For a proposal it first computes the tokens that became known since the last one, of all texts in one pass, then the
/// levels of the trees, a pass per level. Nodes that the target accepted are already computed and stay.
pub struct DraftModel {
    texts: CachedTexts<Computed>,
    /// Texts for which the cache was too small, and how many of their proposals stay empty.
    paused: HashMap<u64, u32>,
    /// Tokens of the target. The draft model may have more, as padding.
    target_vocab: usize,
    /// A path with a lower probability is not followed.
    pub min_probability: f32,
}

/// What the draft cache contains of a text.
#[derive(Default)]
struct Computed {
    tokens: Vec<u32>,
    /// Nodes after them, by number: token and parent.
    nodes: Vec<(u32, Option<NodeId>)>,
    /// Tokens of the text that were known when it came.
    prompt: usize,
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
            paused: HashMap::new(),
            target_vocab: target.config().vocab,
            min_probability: 0.01,
        })
    }

    /// Follows the known tokens of a text, up to the one before the last: commits the nodes that agree, discards others.
    fn settle(&mut self, id: u64, known: &[u32]) -> Result<(), Error> {
        let until = known.len().saturating_sub(1);
        let shared = |text: &Computed| {
            let n = text.tokens.iter().zip(&known[..until]).take_while(|(a, b)| a == b).count();
            let begun = || Computed { tokens: known[..n].to_vec(), nodes: Vec::new(), prompt: until };
            (n > 0).then(|| (n as u32, begun()))
        };
        let new = || Computed { prompt: until, ..Computed::default() };
        let CachedText { seq, state: Computed { tokens, nodes, .. }, .. } =
            self.texts.open(id, shared, new)?;
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

    /// Computes the prompts of texts, or what came after them, up to the one before the last token: at most a chunk in all, so
    /// that a long prompt does not hold up the target's step. It goes on in the next request.
    fn catch_up(&mut self, requests: &[DraftRequest<'_>], prompts: bool) -> Result<(), Error> {
        let mut left = self.texts.session.config().max_step_tokens.max(1) as usize;
        for DraftRequest { id, tokens, .. } in requests {
            let (session, Some(text)) = self.texts.split(*id) else { continue };
            let (done, prompt) = (text.state.tokens.len(), text.state.prompt);
            let until = match (prompts, done < prompt) {
                (true, _) => prompt.max(done),
                (false, true) => continue,
                (false, false) => usize::MAX,
            };
            let chunk = &tokens[done..until.min(tokens.len() - 1).min(done + left)];
            if !chunk.is_empty() {
                session.forward(&[SequenceInput::chain(text.seq, chunk)], LogitRows::None)?;
                text.state.tokens.extend(chunk);
                left -= chunk.len();
            }
        }
        Ok(())
    }

    /// After a pass that failed: a text's tokens and nodes are those in the cache.
    fn agree_with_cache(&mut self, id: u64) {
        let (session, Some(CachedText { seq, state, .. })) = self.texts.split(id) else { return };
        state.tokens.truncate(session.cache().next_position(*seq).unwrap_or(0) as usize);
        state.nodes.truncate(session.cache().n_nodes(*seq).unwrap_or(0) as usize);
    }

    fn try_prepare(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for request in requests.iter() {
            self.settle(request.id, request.tokens)?;
        }
        self.catch_up(requests, true)
    }

    fn try_propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for request in requests.iter() {
            self.settle(request.id, request.tokens)?;
        }
        self.catch_up(requests, false)?;
        let n_computed = |id| self.texts.get(id).map(|text| text.state.tokens.len());
        let caught_up = |p: &DraftRequest<'_>| n_computed(p.id) == p.tokens.len().checked_sub(1);
        let requests = &mut subset(requests, caught_up);
        if requests.is_empty() {
            return Ok(());
        }
        let bounds: Vec<Bounds> = requests.iter().map(|request| request.bounds).collect();
        let min = self.min_probability;
        let mut levels = ModelLevels { drafter: self, requests, forwarded: vec![Vec::new(); requests.len()] };
        let grown = expand::grow(&mut levels, &bounds, min)?;
        for ((request, grown), bounds) in requests.iter_mut().zip(grown).zip(bounds) {
            grown.finish(bounds, request.tree);
        }
        Ok(())
    }

    /// Runs `attempt` for the requests whose texts the cache has room for, and that have known tokens only.
    fn with_room(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        attempt: impl Fn(&mut Self, &mut [DraftRequest<'_>]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // The target's vocabulary may be padded further than the draft model's.
        let vocab = self.texts.session.model().config().vocab;
        let is_known = |tokens: &[u32]| tokens.iter().all(|token| (*token as usize) < vocab);
        let wanted = requests.iter().filter(|p| !self.paused.contains_key(&p.id) && is_known(p.tokens));
        let wanted: Vec<u64> = wanted.map(|request| request.id).collect();
        let too_long = make_room(
            self,
            |this| &mut this.texts,
            &wanted,
            |this, ids| {
                let done = attempt(this, &mut subset(requests, |p| ids.contains(&p.id)));
                if done.is_err() {
                    ids.iter().for_each(|id| this.agree_with_cache(*id));
                }
                done
            },
        )?;
        self.paused.extend(too_long.into_iter().map(|id| (id, PAUSE)));
        Ok(())
    }
}

/// Proposals without drafts after the cache was too small for a text.
const PAUSE: u32 = 64;

/// The requests for which `wanted` is true.
fn subset<'s>(
    requests: &'s mut [DraftRequest<'_>],
    wanted: impl Fn(&DraftRequest<'_>) -> bool,
) -> Vec<DraftRequest<'s>> {
    let wanted = requests.iter_mut().filter(|request| wanted(request));
    let reborrow = |p: &'s mut DraftRequest<'_>| DraftRequest {
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
    requests: &'d [DraftRequest<'p>],
    /// Per text: the nodes of the growing tree that were computed, in the order of the cache's nodes.
    forwarded: Vec<Vec<u32>>,
}

impl Levels for ModelLevels<'_, '_> {
    fn level(&mut self, growing: &[Growing], first: bool) -> Result<Vec<Vec<Vec<Candidate>>>, Error> {
        let DraftModel { texts, target_vocab, .. } = &mut *self.drafter;
        let mut batch: Vec<(SeqId, Vec<u32>, Vec<Option<NodeId>>)> = Vec::new();
        for (i, (request, growing)) in self.requests.iter().zip(growing).enumerate() {
            let CachedText { seq, state, .. } = texts.split(request.id).1.expect("it was settled");
            if first {
                let last = request.tokens[request.tokens.len() - 1];
                batch.push((*seq, vec![last], Vec::new()));
                state.tokens.push(last);
                continue;
            }
            let forwarded = &mut self.forwarded[i];
            let (mut tokens, mut parents) = (Vec::new(), Vec::new());
            for &node in &growing.leaves {
                let parent = growing.parent(node);
                let parent = forwarded.iter().position(|other| Some(*other) == parent);
                tokens.push(growing.token(node));
                parents.push(parent.map(|parent| NodeId(parent as u32)));
            }
            // A root's parent is the last known token, and stands for no node.
            state.nodes.extend(tokens.iter().copied().zip(parents.iter().copied()));
            forwarded.extend(&growing.leaves);
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
        for ((_, tokens, _), request) in batch.iter().zip(self.requests) {
            let mut of_text = Vec::with_capacity(tokens.len());
            for _ in tokens {
                let logits = session.logits_row(row);
                let logits = &logits[..logits.len().min(*target_vocab)];
                of_text.push(expand::top(logits, request.bounds.width as usize));
                row += 1;
            }
            out.push(of_text);
        }
        Ok(out)
    }
}

impl Drafter for DraftModel {
    fn prepare(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for DraftRequest { id, .. } in requests.iter() {
            if let Some(left) = self.paused.get_mut(id) {
                *left -= 1;
                if *left == 0 {
                    self.paused.remove(id);
                }
            }
        }
        self.with_room(requests, Self::try_prepare)
    }

    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        self.with_room(requests, Self::try_propose)
    }

    fn end(&mut self, id: u64, _salt: &str, _tokens: &[u32], _prompt: usize) {
        self.texts.remove(id);
        self.paused.remove(&id);
    }
}

/// Refuses a draft model whose tokens mean something else than the target's. Compares the sizes of the vocabularies and
/// the tokenizers; where both models have tokenizers, sizes may differ by padding.
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
