//! Sessions: a model with its own cache, batches of sequences, and texts that are generated step by step.
mod drafted;
mod ffi;
mod files;
mod known;

pub(crate) use ffi::{kvist_piece, kvist_text_options, parents_of, shown, text_config};
pub(crate) use ffi::{kvist_prefix, prefix_of};

use crate::drafts::Drafts;
use crate::model::{Model, tokenizer};
use crate::status::{Failure, Outcome, kvist_status};
use known::KnownTokens;
use kvist_engine::kvist_cache::{NodeId, Refused, SeqId};
use kvist_engine::kvist_device::{StepError, Storage};
use kvist_engine::kvist_model::tokenizer::TextState;
use kvist_engine::kvist_model::{Error, Model as Weights};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::saved::LateOrigin;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::speculate::Speculator;
use kvist_engine::text::StopMatcher;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Why a text has ended, or that it has not.
#[allow(non_camel_case_types)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kvist_finish {
    /// The text goes on.
    KVIST_GOES_ON = 0,
    /// The model ended it.
    KVIST_END_OF_TEXT = 1,
    /// A stop string was generated. It is not part of the text.
    KVIST_STOP_STRING = 2,
    /// `max_tokens` were generated.
    KVIST_MAX_TOKENS = 3,
    /// The cache has no room for another token.
    KVIST_NO_ROOM = 4,
    /// The job was cancelled, or its batch was freed.
    KVIST_CANCELLED = 5,
}
use kvist_finish::*;

/// How a text is generated.
pub(crate) struct TextConfig {
    pub sampler: SamplerConfig,
    /// 0 is no limit.
    pub max_tokens: u32,
    pub stop: Vec<String>,
    pub ignore_end: bool,
}

/// Whether the last token of a text is in the cache.
#[derive(Clone, Copy)]
enum Last {
    /// Drawn from the logits of the last pass; the caller has not seen it.
    Drawn(u32),
    /// The caller has seen it. The next pass begins with it.
    Shown(u32),
}

/// A token that was drawn, what it adds to the text, and whether that ends.
#[derive(Clone)]
struct Ahead {
    token: u32,
    text: String,
    finish: kvist_finish,
}

/// A text that is being generated. A fork clones it.
#[derive(Clone)]
struct Text {
    sampler: Sampler,
    /// `None` for models without a tokenizer: tokens without text.
    stream: Option<TextState>,
    stops: StopMatcher,
    last: Last,
    /// What follows the last token and the caller has not seen: a pass with a draft draws several tokens.
    ahead: VecDeque<Ahead>,
    /// Where the text begins in the sequence: drafters learn from it when it is removed.
    begins: usize,
    /// Tokens that were drawn.
    n_tokens: u32,
    max_tokens: u32,
    ignore_end: bool,
    /// As far as the caller has seen.
    finish: kvist_finish,
}

pub(crate) struct Session {
    session: ModelSession,
    /// `None` without drafts.
    speculator: Option<Speculator>,
    origin: Arc<LateOrigin>,
    texts: HashMap<u32, Text>,
    /// The tokens of sequences, as far as callers have seen their texts: with drafts the cache may have more of a text.
    known: KnownTokens,
    /// The text of the last piece, null-terminated.
    piece: String,
}

/// A token of a text, and its end.
pub(crate) struct Piece {
    pub token: Option<u32>,
    pub finish: kvist_finish,
}

fn storage(name: Option<&str>, otherwise: Storage) -> Outcome<Storage> {
    name.map_or(Ok(otherwise), |name| name.parse().map_err(|why: String| Failure::argument(why)))
}

/// The storages of K and V: `v` is as `k` unless it is named.
pub(crate) fn storages(k: Option<&str>, v: Option<&str>) -> Outcome<(Storage, Storage)> {
    let k = storage(k, Storage::F16)?;
    Ok((k, storage(v, k.for_values())?))
}

impl Session {
    fn new(model: &Model, config: &CacheConfig, drafts: Option<Drafts>) -> Outcome<Self> {
        let speculator = drafts.map(|drafts| {
            let plan = MemoryPlan::of_session(model.weights.config(), &model.registry, config)?;
            drafts.speculator(model, config, 1, plan.session_bound())
        });
        let speculator = speculator.transpose()?;
        let session = ModelSession::new(&model.weights, &model.registry, config)?;
        let (origin, known) = (model.origin.clone(), KnownTokens::default());
        Ok(Session { session, speculator, origin, texts: HashMap::new(), known, piece: String::new() })
    }

    /// Adds `tokens` to `seq` and draws the next token, which `next` will return. A token that the caller has seen last is
    /// part of the text and comes first. On `Err` the sequence is as it was, unless `progress` stopped the pass, or the error says that
    /// the sequence is empty now.
    fn prompt(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        config: TextConfig,
        progress: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Outcome<()> {
        let mut sampler = Sampler::new(config.sampler)?;
        self.settle(seq)?;
        let seen = match self.texts.get(&seq.0) {
            Some(Text { last: Last::Shown(token), .. }) => Some(*token),
            _ => None,
        };
        let all: Vec<u32> = seen.into_iter().chain(tokens.iter().copied()).collect();
        let held = self.length(seq)?;
        kvist_engine::check_prompt(self.session.config(), held as usize + all.len())?;
        let done = match self.read(seq, &all, &mut |done| progress(done, all.len())) {
            Ok(done) => done,
            Err(why) => return Err(self.take_back(seq, held, why.into())),
        };
        self.texts.remove(&seq.0);
        self.known.add(seq, &all[..done]);
        if done < all.len() {
            return Err(Failure::new(
                kvist_status::KVIST_STOPPED,
                "the progress callback stopped the prompt",
            ));
        }
        sampler.observe(&all);
        self.begin_text(seq, &all, sampler, config)
    }

    /// Removes the chunks that a prompt added to the first `held` tokens before it failed. Where windows have lost what these tokens
    /// are followed by, the sequence is emptied, and its text ends: it must not go on behind other tokens.
    fn take_back(&mut self, seq: SeqId, held: u32, why: Failure) -> Failure {
        if self.session.cache().next_position(seq) == Some(held) {
            return why;
        }
        let left = self.session.truncate(seq, held).unwrap_or(0);
        if left == held {
            return why;
        }
        self.known.truncate(seq, 0);
        self.texts.remove(&seq.0);
        let gone =
            "the sequence is empty now, because its window had passed over what it held before the prompt";
        Failure { text: format!("{}; {gone}", why.text), ..why }
    }

    /// Draws the first token of a text after `all`, from the logits of the last pass.
    fn begin_text(
        &mut self,
        seq: SeqId,
        all: &[u32],
        mut sampler: Sampler,
        config: TextConfig,
    ) -> Outcome<()> {
        let drawn = sampler.sample(self.session.logits_row(0))?;
        let stream = self.session.model().tokenizer().map(|tokenizer| TextState::after(tokenizer, all, &[]));
        let text = Text {
            sampler,
            stream,
            stops: StopMatcher::new(&config.stop),
            last: Last::Drawn(drawn),
            ahead: VecDeque::new(),
            begins: self.known.stored(seq).len(),
            n_tokens: 0,
            max_tokens: config.max_tokens,
            ignore_end: config.ignore_end,
            finish: KVIST_GOES_ON,
        };
        self.texts.insert(seq.0, text);
        Ok(())
    }

    /// The next token of the text of `seq`. Its text is in `self.piece`.
    fn next(&mut self, seq: SeqId) -> Outcome<Piece> {
        self.piece.clear();
        let text = self.texts.get_mut(&seq.0).ok_or_else(|| {
            Failure::order(format!(
                "sequence {seq} has no text to go on with: call kvist_session_prompt first"
            ))
        })?;
        if text.finish != KVIST_GOES_ON {
            return Ok(Piece { token: None, finish: text.finish });
        }
        match (text.last, text.ahead.is_empty()) {
            (Last::Drawn(token), _) => text.take(self.session.model(), token)?,
            (Last::Shown(last), false) => self.known.add(seq, &[last]),
            (Last::Shown(last), true) => match self.pass(seq, last) {
                Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) => {
                    return self.end_without_room(seq);
                }
                other => other?,
            },
        }
        let text = self.texts.get_mut(&seq.0);
        let Some((text, next)) = text.and_then(|text| text.ahead.pop_front().map(|next| (text, next))) else {
            return Err(Failure::order("the pass drew no token"));
        };
        (text.last, text.finish) = (Last::Shown(next.token), next.finish);
        self.piece += &next.text;
        Ok(Piece { token: Some(next.token), finish: next.finish })
    }

    /// Computes the last token of a text and draws the next one, or several if there is a draft.
    fn pass(&mut self, seq: SeqId, last: u32) -> Result<(), Error> {
        if self.speculator.is_some() {
            return self.drafted_pass(seq, last);
        }
        let Session { session, texts, known, .. } = self;
        session.forward(&[SequenceInput::chain(seq, &[last])], LogitRows::LastOfEach)?;
        known.add(seq, &[last]);
        let Some(text) = texts.get_mut(&seq.0) else { return Ok(()) };
        let token = text.sampler.sample(session.logits_row(0))?;
        text.take(session.model(), token)
    }

    /// The cache has no room for another token of the text.
    fn end_without_room(&mut self, seq: SeqId) -> Outcome<Piece> {
        let Session { session, texts, piece, .. } = self;
        if let Some(text) = texts.get_mut(&seq.0) {
            text.finish = text.end(session.model(), KVIST_NO_ROOM, piece)?;
        }
        Ok(Piece { token: None, finish: KVIST_NO_ROOM })
    }

    /// One pass over new tokens of several sequences. Their texts end here: the caller chooses tokens now.
    fn forward(&mut self, inputs: &[SequenceInput<'_>], rows: LogitRows) -> Outcome<()> {
        for input in inputs {
            self.settle(input.seq)?;
        }
        self.session.forward(inputs, rows)?;
        for input in inputs {
            self.texts.remove(&input.seq.0);
            match input.parents {
                None => self.known.add(input.seq, input.tokens),
                Some(_) => self.known.draft(input.seq, input.tokens),
            }
        }
        Ok(())
    }

    /// Tokens of a sequence in the cache, of its text those before the last one that the caller has seen.
    fn length(&mut self, seq: SeqId) -> Outcome<u32> {
        let held = self.session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        Ok(self.seen_length(seq).unwrap_or(held))
    }

    /// Refuses a second sequence in a session that keeps only some tokens: its cache has room for one text.
    fn only_one(&mut self) -> Outcome<()> {
        let Some(keep) = self.session.config().keep else { return Ok(()) };
        match self.session.report().iter().any(|group| !group.sequences.is_empty()) {
            false => Ok(()),
            true => Err(Failure::unsupported(format!(
                "a session that keeps only {keep} has one sequence: for several, leave keep out"
            ))),
        }
    }

    fn open(&mut self, seq: SeqId) -> Outcome<()> {
        self.only_one()?;
        Ok(self.sequences()?.seq_new(seq)?)
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Outcome<()> {
        self.only_one()?;
        if self.session.cache().next_position(to).is_some() {
            return Err(Refused::SequenceExists(to).into());
        }
        self.sequences()?.fork(from, to)?;
        self.known.fork(from, to);
        if let Some(text) = self.texts.get(&from.0).cloned() {
            self.texts.insert(to.0, text);
        }
        Ok(())
    }

    /// Shortens `seq` to its first `n_tokens`.
    fn rollback(&mut self, seq: SeqId, n_tokens: u32) -> Outcome<()> {
        self.settle(seq)?;
        self.session.check_cut(seq, n_tokens)?;
        truncate(self.session.cache(), seq, n_tokens)?;
        self.learn(seq, Some(n_tokens));
        self.known.truncate(seq, n_tokens);
        self.texts.remove(&seq.0);
        Ok(())
    }

    fn remove(&mut self, seq: SeqId) -> Outcome<()> {
        self.length(seq)?;
        self.sequences()?.seq_rm(seq, 0, u32::MAX)?;
        self.learn(seq, None);
        self.known.truncate(seq, 0);
        self.texts.remove(&seq.0);
        Ok(())
    }

    fn accept(&mut self, seq: SeqId, path: &[NodeId]) -> Outcome<()> {
        self.settle(seq)?;
        let trees = self.session.cache().trees();
        trees.ok_or_else(no_trees)?.commit_path(seq, path)?;
        self.known.accept(seq, path);
        Ok(())
    }

    fn sequences(&mut self) -> Outcome<kvist_engine::kvist_cache::Sequences<'_>> {
        self.session.cache().sequences().ok_or_else(one_sequence)
    }

    fn encode(&self, text: &str, special: bool) -> Outcome<Vec<u32>> {
        Ok(tokenizer(self.session.model())?.encode(text, special)?)
    }
}

pub(crate) fn one_sequence() -> Failure {
    Failure::unsupported("this kind of cache holds one sequence, 0: use cells, tree or paged for several")
}

pub(crate) fn no_trees() -> Failure {
    Failure::unsupported("draft trees do not outlive their step in this kind of cache: use tree")
}

/// Shortens `seq` to its first `n_tokens`, in any kind that can. A sequence of 0 tokens stays, empty.
pub(crate) fn truncate(
    cache: &mut kvist_engine::kvist_cache::Cache,
    seq: SeqId,
    n_tokens: u32,
) -> Outcome<()> {
    let held = cache.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
    if n_tokens > held {
        return Err(Refused::CannotGrow { len: held, asked: n_tokens }.into());
    }
    if let Some(mut sequences) = cache.sequences() {
        sequences.seq_rm(seq, n_tokens, u32::MAX)?;
        // A sequence that loses all its tokens is removed, but one that had none is not.
        return match sequences.seq_new(seq) {
            Err(Refused::SequenceExists(_)) => Ok(()),
            other => Ok(other?),
        };
    }
    match cache.rewinds() {
        Some(mut rewind) => Ok(rewind.rewind(n_tokens)?),
        None if n_tokens == 0 => {
            cache.clear();
            Ok(())
        }
        None => Err(Failure::unsupported(
            "a ring overwrites what a rollback needs: only a rollback to 0 is possible",
        )),
    }
}

impl Text {
    /// Adds a token that was drawn to those ahead, and decides whether the text ends with it.
    fn take(&mut self, model: &Weights, token: u32) -> Result<(), Error> {
        self.sampler.observe(&[token]);
        self.n_tokens += 1;
        let mut text = String::new();
        let finish = self.add(model, token, &mut text)?;
        self.ahead.push_back(Ahead { token, text, finish });
        Ok(())
    }

    fn add(&mut self, model: &Weights, token: u32, piece: &mut String) -> Result<kvist_finish, Error> {
        if !self.ignore_end && model.end_tokens().contains(&token) {
            return self.end(model, KVIST_END_OF_TEXT, piece);
        }
        if let (Some(stream), Some(tokenizer)) = (&mut self.stream, model.tokenizer()) {
            let new = stream.push(tokenizer, token)?;
            if self.stops.push(&new, piece).is_some() {
                return Ok(KVIST_STOP_STRING);
            }
        }
        if self.max_tokens > 0 && self.n_tokens >= self.max_tokens {
            return self.end(model, KVIST_MAX_TOKENS, piece);
        }
        Ok(KVIST_GOES_ON)
    }

    /// Ends the text, with the characters that were held back.
    fn end(
        &mut self,
        model: &Weights,
        finish: kvist_finish,
        piece: &mut String,
    ) -> Result<kvist_finish, Error> {
        if let (Some(stream), Some(tokenizer)) = (&mut self.stream, model.tokenizer()) {
            let rest = stream.finish(tokenizer)?;
            if self.stops.push(&rest, piece).is_some() {
                return Ok(KVIST_STOP_STRING);
            }
            self.stops.finish(piece);
        }
        Ok(finish)
    }
}
