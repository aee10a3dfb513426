//! Conversations with branches. Tracks the messages of each branch and the tokens that are already in its cache.
//!
//! Each turn renders the whole conversation, keeps the cached tokens that match its beginning, rolls back the rest and
//! computes only the new tokens. A fork shares KV cells. An undo changes only the messages; the next turn rolls the
//! cache back, and so does saving.
use crate::answer::generate_answer;
use crate::frozen::{self, FrozenPrefix};
use crate::generate::{GenerateArgs, Generation, GenerationEnd, Limits, Observer, Speculation};
use crate::sampler::Sampler;
use crate::saved::{self, Origin, SavedMessage, SavedSession, SavedText};
use crate::session::ModelSession;
use crate::speculate::Speculator;
use kvist_cache::SeqId;
use kvist_model::Error;
use kvist_model::template::Message;
use std::path::Path;

/// One branch of a conversation.
#[derive(Clone, Debug)]
pub struct Branch {
    pub name: String,
    pub messages: Vec<Message>,
    seq: SeqId,
    /// The tokens in the sequence's cache, as far as the chat computed them.
    cached: Vec<u32>,
    /// How many of them come before the last answer.
    before_answer: usize,
    /// `cached` may have what `messages` has not: it was undone, or not answered.
    has_more: bool,
}

/// The branches of a conversation over one session.
pub struct Chat {
    session: ModelSession,
    branches: Vec<Branch>,
    current: usize,
    /// The sequence that was extended last.
    fed: Option<SeqId>,
    next_seq: u32,
    system: Option<String>,
    /// What every branch begins with, if it is a frozen plain text. Without a template nothing else would bring it back.
    begun: Vec<u32>,
    speculator: Option<Speculator>,
}

/// The result of one turn.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The text is the model's final answer, without its reasoning.
    pub generation: Generation,
    /// The model's reasoning, if its format separates reasoning from the answer ([`harmony`](kvist_model::harmony)).
    pub reasoning: String,
    /// Tokens of the conversation that were reused from the cache.
    pub reused_tokens: usize,
}

impl Chat {
    pub fn new(session: ModelSession, system: Option<String>) -> Self {
        let main = Branch {
            name: "main".into(),
            messages: Vec::new(),
            seq: SeqId::ONLY,
            cached: Vec::new(),
            before_answer: 0,
            has_more: false,
        };
        let (branches, speculator) = (vec![main], None);
        Chat { session, branches, current: 0, fed: None, next_seq: 1, system, begun: Vec::new(), speculator }
    }

    /// From now on, verifies drafts of `speculator`; `None` turns drafts off. Its drafters learn from answers that are undone or
    /// dropped, and free what they store for a dropped branch.
    pub fn speculate(&mut self, speculator: impl Into<Option<Speculator>>) {
        self.speculator = speculator.into();
    }
    pub fn speculator(&mut self) -> Option<&mut Speculator> {
        self.speculator.as_mut()
    }

    /// Reports the last answer of a branch to the drafters: it is removed, alone or with the branch.
    fn forget_answer(&mut self, branch: usize, with_branch: bool) {
        let Branch { seq, cached, before_answer, .. } = &mut self.branches[branch];
        let (id, kept) = (u64::from(seq.0), std::mem::replace(before_answer, cached.len())); // reported once
        match &mut self.speculator {
            Some(speculator) if with_branch => speculator.end(id, "", cached, kept),
            Some(speculator) => speculator.removed(id, "", cached, kept),
            None => {}
        }
    }

    pub fn session(&self) -> &ModelSession {
        &self.session
    }
    pub fn branches(&self) -> &[Branch] {
        &self.branches
    }
    pub fn current(&self) -> &Branch {
        &self.branches[self.current]
    }
    /// True if the model has a chat template. Without one it only continues text.
    pub fn has_template(&self) -> bool {
        self.session.model().chat_template().is_some()
    }
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }
    /// Sets the system message of every branch, from the next turn on. Fails if the model has no chat template.
    pub fn set_system(&mut self, system: Option<String>) -> Result<(), Error> {
        if !self.has_template() {
            return Err(Error::Usage("this model has no chat template and so no system message".into()));
        }
        self.system = system;
        Ok(())
    }

    /// Creates a branch that shares everything with the current one, and switches to it. Copies no KV bytes.
    pub fn fork(&mut self, name: Option<&str>) -> Result<&Branch, Error> {
        if let Some(keep) = self.session.config().keep {
            return Err(Error::Usage(format!(
                "the cache has room for one text that keeps {keep}: start without --keep to fork"
            )));
        }
        let seq = SeqId(self.next_seq);
        let name = name.map_or_else(|| format!("branch-{}", self.next_seq), str::to_string);
        if self.branches.iter().any(|b| b.name == name) {
            return Err(Error::Usage(format!("there is a branch `{name}` already")));
        }
        let parent = self.current().seq;
        let sequences = self.session.cache().sequences();
        let mut sequences = sequences.ok_or_else(|| {
            Error::Usage(
                "this kind of cache holds one sequence: start with --kind cells, tree or paged to fork"
                    .into(),
            )
        })?;
        sequences.fork(parent, seq)?;
        self.next_seq += 1;
        // The last answer is that of the other branch.
        let before_answer = self.current().cached.len();
        let branch = Branch { name, seq, before_answer, ..self.current().clone() };
        self.branches.push(branch);
        self.current = self.branches.len() - 1;
        Ok(self.current())
    }

    pub fn switch(&mut self, name: &str) -> Result<(), Error> {
        let known = || self.branches.iter().map(|b| b.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = self.branches.iter().position(|b| b.name == name);
        self.current = found
            .ok_or_else(|| Error::Usage(format!("there is no branch `{name}`; there are {}", known())))?;
        Ok(())
    }

    /// Drops a branch other than the current one and frees the cells that only this branch uses.
    pub fn drop_branch(&mut self, name: &str) -> Result<(), Error> {
        let known = || self.branches.iter().map(|b| b.name.as_str()).collect::<Vec<_>>().join(", ");
        let at = self.branches.iter().position(|b| b.name == name);
        let at =
            at.ok_or_else(|| Error::Usage(format!("there is no branch `{name}`; there are {}", known())))?;
        if at == self.current {
            return Err(Error::Usage(format!("you are on `{name}`: /switch to another branch first")));
        }
        let seq = self.branches[at].seq;
        if let Some(mut sequences) = self.session.cache().sequences() {
            sequences.seq_rm(seq, 0, u32::MAX)?;
        }
        self.forget_answer(at, true);
        self.branches.remove(at);
        self.current -= usize::from(at < self.current);
        Ok(())
    }

    /// Removes the last question and its answer from this branch. Returns false if there is no question.
    pub fn undo(&mut self) -> bool {
        let messages = &self.current().messages;
        let Some(question) = messages.iter().rposition(|m| m.role == "user") else { return false };
        self.forget_answer(self.current, false);
        let branch = &mut self.branches[self.current];
        branch.messages.truncate(question);
        branch.has_more = true;
        true
    }

    /// Saves the current branch. See [`saved::save`]. What was undone, or was not answered, is not saved: the branch is rolled back to
    /// its messages first. What a roll-back loses of them is computed again, if nothing is left.
    ///
    /// # Errors
    /// There is nothing to save, or it cannot be saved.
    pub fn save(&mut self, origin: &Origin, path: &Path) -> Result<(), Error> {
        let nothing = || Error::Usage("there is nothing to save yet".into());
        if self.current().has_more {
            if self.current().messages.is_empty() {
                return Err(nothing());
            }
            let tokens = self.tokens_of(&self.current().messages, false)?;
            // Nothing is left of a ring, of a text shorter than a recent group, or where a window's tokens are gone.
            if self.roll_back_to(&tokens)? == 0 {
                self.compute(&tokens)?;
            }
            self.branches[self.current].has_more = false;
        }
        let Branch { seq, cached, messages, .. } = self.current().clone();
        if cached.is_empty() {
            return Err(nothing());
        }
        let system = self.system.iter().map(|system| Message::new("system", system));
        let begun = self.begun_text()?.map(|text| Message::new("user", &text));
        let messages = system.chain(begun).chain(messages);
        let messages: Vec<_> = messages.map(|message| SavedMessage::from(&message)).collect();
        saved::save(&mut self.session, seq, SavedText { tokens: &cached, messages: &messages }, origin, path)
    }

    /// Goes on with a saved conversation, in a chat that has none yet. Its system message replaces this chat's.
    /// Returns how many tokens need not be computed again.
    ///
    /// # Errors
    /// The session cannot be resumed here: see [`saved::resume`]. The chat is unchanged then.
    pub fn resume(&mut self, saved: &SavedSession, origin: &Origin) -> Result<usize, Error> {
        let Branch { seq, .. } = *self.current();
        if self.branches.len() > 1 || !self.current().messages.is_empty() {
            return Err(Error::Usage("this conversation has begun already: resume in a new one".into()));
        }
        if saved.messages().is_empty() {
            return Err(Error::Usage(
                "the session is a text and no conversation: use `kvist run --resume`".into(),
            ));
        }
        let n = saved::resume(&mut self.session, seq, saved, origin, usize::MAX)?;
        let mut others: Vec<Message> = saved.messages().iter().map(Message::from).collect();
        self.system =
            others.first().filter(|message| message.role == "system").map(|first| first.content.clone());
        if self.system.is_some() {
            others.remove(0);
        }
        let branch = &mut self.branches[self.current];
        (branch.messages, branch.cached, branch.before_answer) = (others, saved.tokens()[..n].to_vec(), n);
        Ok(n)
    }

    /// Begins with a frozen prefix, in a chat that has no messages yet. Its system message replaces this chat's. Returns how many
    /// tokens need not be computed.
    ///
    /// # Errors
    /// The prefix cannot be used here: see [`frozen::begin_with`]. The chat is unchanged then.
    pub fn begin_with(&mut self, prefix: &FrozenPrefix, origin: &Origin) -> Result<usize, Error> {
        let Branch { seq, .. } = *self.current();
        if self.branches.len() > 1 || !self.current().messages.is_empty() {
            return Err(Error::Usage("this conversation has begun already: a prefix comes first".into()));
        }
        if prefix.system().is_some() != self.has_template() {
            return Err(Error::Usage(match prefix.system() {
                Some(_) => "the prefix is a system message, and this model has no chat template".into(),
                None => "the prefix is a text and no system message: freeze it without --raw".into(),
            }));
        }
        let n = frozen::begin_with(&mut self.session, seq, prefix, origin, usize::MAX)?;
        self.system = prefix.system().map(str::to_string);
        if !self.has_template() {
            self.begun = prefix.tokens().to_vec();
        }
        let branch = &mut self.branches[self.current];
        (branch.cached, branch.before_answer) = (prefix.tokens()[..n].to_vec(), n);
        Ok(n)
    }

    /// The plain text that the conversation begins with.
    fn begun_text(&self) -> Result<Option<String>, Error> {
        let tokenizer = self.session.model().tokenizer().filter(|_| !self.begun.is_empty());
        tokenizer.map(|tokenizer| tokenizer.decode(&self.begun)).transpose()
    }

    /// The conversation as readable text.
    pub fn transcript(&self) -> String {
        let mut text = String::new();
        for m in self.system.iter().map(|s| Message::new("system", s)).chain(self.current().messages.clone())
        {
            text += &format!("{}: {}\n\n", m.role, m.content);
        }
        text
    }

    /// Adds the user message `text` to the current branch and generates the answer. On `Err` the messages are
    /// unchanged.
    pub fn send(
        &mut self,
        text: &str,
        sampler: &mut Sampler,
        limits: &Limits,
        observer: &mut dyn Observer,
    ) -> Result<Turn, Error> {
        let mut messages = self.current().messages.clone();
        messages.push(Message::new("user", text));
        let tokens = self.tokens_of(&messages, true)?;
        crate::check_prompt(self.session.config(), tokens.len())?;
        let reused_tokens = self.roll_back_to(&tokens)?;
        let seq = self.current().seq;
        // Another branch may have run last, or a message was undone: reset the sampler's history to this text's tokens.
        sampler.forget();
        sampler.observe(&tokens[..reused_tokens]);
        self.fed = Some(seq);
        let (before, new) = tokens.split_at(reused_tokens);
        let model = self.session.model().clone();
        let speculation = self.speculator.as_mut().map(|speculator| Speculation { speculator });
        let session = &mut self.session;
        let tokenizer = model.tokenizer();
        let generation = generate_answer(
            GenerateArgs { session, seq, before, prompt: new, tokenizer, sampler, limits, speculation },
            observer,
        );
        // On success and on failure, the cache knows how many tokens it stores.
        let cached = self.session.cache().next_position(seq).unwrap_or(0) as usize;
        let branch = &mut self.branches[self.current];
        let mut fed = tokens.clone();
        if let Ok((generation, _)) = &generation {
            fed.extend(&generation.tokens);
        }
        fed.truncate(cached);
        branch.before_answer = tokens.len().min(cached);
        branch.cached = fed;
        branch.has_more = true;
        let (generation, reasoning) = generation?;
        let unfinished_prompt = generation.finish == GenerationEnd::Cancelled && generation.tokens.is_empty();
        if !unfinished_prompt {
            messages.push(Message::new("assistant", &generation.text));
            branch.messages = messages;
            branch.has_more = false;
        }
        Ok(Turn { generation, reasoning, reused_tokens })
    }

    /// The tokens of `messages` behind what every branch begins with, ready for an answer or not.
    fn tokens_of(&self, messages: &[Message], ready: bool) -> Result<Vec<u32>, Error> {
        let model = self.session.model();
        let tokenizer =
            model.tokenizer().ok_or_else(|| Error::Usage("this model has no tokenizer".into()))?;
        if let Some(template) = model.chat_template() {
            let system = self.system.iter().map(|s| Message::new("system", s));
            let all: Vec<Message> = system.chain(messages.iter().cloned()).collect();
            return tokenizer.encode(&template.render(&all, tokenizer, ready)?, false);
        }
        // Without a template the messages are one continuous text.
        let whole: String = messages.iter().map(|m| m.content.as_str()).collect();
        Ok(match &self.begun[..] {
            [] => tokenizer.encode(&whole, true)?,
            begun => [begun, &tokenizer.encode(&whole, false)?].concat(),
        })
    }

    /// Computes `tokens` in the current branch, whose cache is empty. On `Err` it has the first of them, as many as were computed.
    fn compute(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let seq = self.current().seq;
        self.fed = Some(seq);
        let computed = self.session.prefill(seq, tokens, &mut |_| true);
        let cached = self.session.cache().next_position(seq).unwrap_or(0) as usize;
        let branch = &mut self.branches[self.current];
        (branch.cached, branch.before_answer) = (tokens[..cached].to_vec(), cached);
        computed.map(drop)
    }

    /// Rolls the current branch back to the tokens it shares with the beginning of `tokens`. Leaves at least one token
    /// to compute. Returns the number of cached tokens kept.
    fn roll_back_to(&mut self, tokens: &[u32]) -> Result<usize, Error> {
        let branch = &mut self.branches[self.current];
        let same = branch.cached.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let mut keep = same.min(tokens.len().saturating_sub(1));
        // A generation that failed may have left tokens of an answer behind those in `cached`.
        let held = self.session.cache().next_position(branch.seq).unwrap_or(0) as usize;
        // While another branch was fed, the newest tokens of this branch may have lost their recent rows in f16.
        if keep < held || self.fed.is_some_and(|fed| fed != branch.seq) {
            keep = self.session.config().cut_before(u32::try_from(keep).unwrap_or(u32::MAX)) as usize;
        }
        if keep < held {
            let at = u32::try_from(keep).unwrap_or(u32::MAX);
            keep = self.session.truncate(branch.seq, at)? as usize;
            branch.cached.truncate(keep);
            branch.before_answer = branch.before_answer.min(keep);
        }
        Ok(keep)
    }
}
