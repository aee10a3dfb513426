//! Conversations with branches: what is said, and which of it each branch's cache already holds.
//!
//! A turn renders the whole conversation, keeps the cached tokens that it still begins with, rolls back the rest
//! and feeds only what is new. Forking shares cells, undoing changes only what is said: the next turn rolls back.
use crate::answer::generate_answer;
use crate::generate::{Finish, Generation, Limits, Observer};
use crate::sampler::Sampler;
use crate::session::ModelSession;
use kvist_cache::{Refused, SeqId};
use kvist_model::Error;
use kvist_model::template::Message;

/// One line of conversation.
#[derive(Clone, Debug)]
pub struct Branch {
    pub name: String,
    pub messages: Vec<Message>,
    seq: SeqId,
    /// Tokens its sequence holds, as far as the chat fed them.
    cached: Vec<u32>,
}

/// Branches over one session.
pub struct Chat {
    session: ModelSession,
    branches: Vec<Branch>,
    current: usize,
    /// The sequence that was fed last.
    fed: Option<SeqId>,
    next_seq: u32,
    system: Option<String>,
}

/// What one turn took.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Its text is what the model says, without what it thinks.
    pub generation: Generation,
    /// What it thinks, where its format tells one from the other ([`harmony`](kvist_model::harmony)).
    pub reasoning: String,
    /// Tokens of the conversation that the cache still held.
    pub reused_tokens: usize,
}

impl Chat {
    pub fn new(session: ModelSession, system: Option<String>) -> Self {
        let main = Branch { name: "main".into(), messages: Vec::new(), seq: SeqId::ONLY, cached: Vec::new() };
        Chat { session, branches: vec![main], current: 0, fed: None, next_seq: 1, system }
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
    /// Does the model answer turns, or only continue text?
    pub fn has_template(&self) -> bool {
        self.session.model().chat_template().is_some()
    }
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }
    /// What every branch is told first, from the next turn on.
    pub fn set_system(&mut self, system: Option<String>) -> Result<(), Error> {
        if !self.has_template() {
            return Err(Error::Usage("this model has no chat template and so no system message".into()));
        }
        self.system = system;
        Ok(())
    }

    /// A new branch that shares everything with the current one, and becomes it. No KV bytes are copied.
    pub fn fork(&mut self, name: Option<&str>) -> Result<&Branch, Error> {
        let seq = SeqId(self.next_seq);
        let name = name.map_or_else(|| format!("branch-{}", self.next_seq), str::to_string);
        if self.branches.iter().any(|b| b.name == name) {
            return Err(Error::Usage(format!("there is a branch `{name}` already")));
        }
        let parent = self.current().seq;
        let sequences = self.session.cache().sequences();
        let mut sequences = sequences.ok_or_else(|| {
            Error::Usage(
                "this kind of cache holds one sequence: start with --kind cells or tree to fork".into(),
            )
        })?;
        sequences.fork(parent, seq)?;
        self.next_seq += 1;
        let branch = Branch { name, seq, ..self.current().clone() };
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

    /// Give up a branch that is not the current one, and the cells that only it holds.
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
        self.branches.remove(at);
        self.current -= usize::from(at < self.current);
        Ok(())
    }

    /// Unsay the last question and its answer on this branch; false if nothing was said.
    pub fn undo(&mut self) -> bool {
        let messages = &mut self.branches[self.current].messages;
        let question = messages.iter().rposition(|m| m.role == "user");
        question.map(|at| messages.truncate(at)).is_some()
    }

    /// The conversation as a text for people.
    pub fn transcript(&self) -> String {
        let mut text = String::new();
        for m in self.system.iter().map(|s| Message::new("system", s)).chain(self.current().messages.clone())
        {
            text += &format!("{}: {}\n\n", m.role, m.content);
        }
        text
    }

    /// Say `text` on the current branch and generate the answer. On `Err` nothing was said.
    pub fn say(
        &mut self,
        text: &str,
        sampler: &mut Sampler,
        limits: &Limits,
        observer: &mut dyn Observer,
    ) -> Result<Turn, Error> {
        let mut messages = self.current().messages.clone();
        messages.push(Message::new("user", text));
        let model = self.session.model().clone();
        let tokenizer =
            model.tokenizer().ok_or_else(|| Error::Usage("this model has no tokenizer".into()))?;
        let tokens = match model.chat_template() {
            Some(template) => {
                let mut all: Vec<Message> = self.system.iter().map(|s| Message::new("system", s)).collect();
                all.extend(messages.iter().cloned());
                tokenizer.encode(&template.render(&all, tokenizer, true)?, false)?
            }
            // One running text.
            None => {
                let whole: String = messages.iter().map(|m| m.content.as_str()).collect();
                tokenizer.encode(&whole, true)?
            }
        };
        crate::check_prompt(self.session.config(), tokens.len())?;
        let reused_tokens = self.roll_back_to(&tokens)?;
        let seq = self.current().seq;
        // Another branch may have spoken last, or this one unsaid something: what repeats is what this text repeats.
        sampler.forget();
        sampler.observe(&tokens[..reused_tokens]);
        self.fed = Some(seq);
        let new = &tokens[reused_tokens..];
        let generation =
            generate_answer(&mut self.session, seq, new, Some(tokenizer), sampler, limits, observer);
        // Whatever happened, the cache says how far it got.
        let held = self.session.cache().next_position(seq).unwrap_or(0) as usize;
        let branch = &mut self.branches[self.current];
        let mut fed = tokens.clone();
        if let Ok((generation, _)) = &generation {
            fed.extend(&generation.tokens);
        }
        fed.truncate(held);
        branch.cached = fed;
        let (generation, reasoning) = generation?;
        let unfinished_prompt = generation.finish == Finish::Cancelled && generation.tokens.is_empty();
        if !unfinished_prompt {
            messages.push(Message::new("assistant", &generation.text));
            branch.messages = messages;
        }
        Ok(Turn { generation, reasoning, reused_tokens })
    }

    /// Make the current branch hold only what `tokens` begins with, and leave at least one token to compute.
    fn roll_back_to(&mut self, tokens: &[u32]) -> Result<usize, Error> {
        let branch = &mut self.branches[self.current];
        let same = branch.cached.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let mut keep = same.min(tokens.len().saturating_sub(1));
        // While another branch was fed, the newest tokens of this one may have lost their rows in f16.
        if keep < branch.cached.len() || self.fed.is_some_and(|fed| fed != branch.seq) {
            keep = self.session.config().cut_before(u32::try_from(keep).unwrap_or(u32::MAX)) as usize;
        }
        if keep < branch.cached.len() {
            let at = u32::try_from(keep).unwrap_or(u32::MAX);
            if let Some(mut sequences) = self.session.cache().sequences() {
                sequences.seq_rm(branch.seq, at, u32::MAX)?;
                if at == 0 {
                    match sequences.seq_new(branch.seq) {
                        Err(Refused::SequenceExists(_)) => {}
                        other => other?,
                    }
                }
            } else if let Some(mut rewind) = self.session.cache().rewinds() {
                rewind.rewind(at)?;
            } else {
                // A ring has overwritten what a rollback would need: start anew.
                self.session.clear()?;
                keep = 0;
            }
            branch.cached.truncate(keep);
        }
        Ok(keep)
    }
}
