//! What the scheduler knows of one live request, and where it stands.
use crate::policy::{Rank, View};
use crate::request::*;
use kvist_cache::{MissReason, SeqId};
use std::sync::Arc;

/// A place in an ordered queue. Total: no two requests have the same `arrival`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub rank: Rank,
    /// Number of its arrival.
    pub arrival: u64,
    pub slot: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The slot is free.
    Vacant,
    /// In `waiting`, under this key; in `holders` too if it has a sequence.
    Waiting(Key),
    Running,
}

/// A lookup that need not be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub hit_tokens: u32,
    pub of_tokens: u32,
    pub version: u64,
}

pub(crate) struct Entry {
    // What every step touches.
    pub state: State,
    /// Its sequence, while it holds cells.
    pub seq: Option<SeqId>,
    /// Tokens of its sequence.
    pub cached: u32,
    /// Prompt and generated tokens.
    pub known: u32,
    pub prompt_tokens: u32,
    pub max_new: u32,
    /// Tokens of the step that is being formed.
    pub share: u32,
    /// Tokens of which the prefix index has been told.
    pub stored: u32,
    pub computed: u64,
    // What only changes of its state touch.
    pub id: RequestId,
    pub number: u64,
    pub arrival_ns: u64,
    pub deadline_ns: Option<u64>,
    pub priority: i32,
    pub expected_new: u32,
    pub salt: Arc<str>,
    pub prompt: Prompt,
    /// The index supplies it with nothing.
    pub fresh: bool,
    /// What conservative admission has set aside for it.
    pub reserved: u64,
    /// What the index was last found to supply, in tokens, of how many and at which version of it.
    pub found: Option<Found>,
    /// How often a prefix hit overtook it at the head of the queue.
    pub overtaken: u32,
    pub admitted_ns: Option<u64>,
    pub first_token_ns: Option<u64>,
    pub hit_tokens: u32,
    pub regained_tokens: u32,
    pub lost_tokens: u64,
    pub preemptions: u32,
    pub miss: Option<MissReason>,
}

impl Entry {
    pub fn generated(&self) -> u32 {
        self.known - self.prompt_tokens
    }

    pub fn view(&self) -> View {
        View {
            id: self.id,
            arrival_ns: self.arrival_ns,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached,
            generated: self.generated(),
            max_new: self.max_new,
            expected_new: self.expected_new,
            deadline_ns: self.deadline_ns,
            priority: self.priority,
        }
    }

    pub fn ended(&self, end: End, at_ns: u64) -> Ended {
        Ended {
            id: self.id,
            end,
            arrival_ns: self.arrival_ns,
            admitted_ns: self.admitted_ns,
            first_token_ns: self.first_token_ns,
            ended_ns: at_ns,
            prompt_tokens: self.prompt_tokens,
            generated: self.generated(),
            hit_tokens: self.hit_tokens,
            regained_tokens: self.regained_tokens,
            lost_tokens: self.lost_tokens,
            computed_tokens: self.computed,
            preemptions: self.preemptions,
            miss: self.miss,
        }
    }

    /// Tokens, from the first, whose content is known and could be indexed once computed.
    pub fn known_content(&self) -> u32 {
        self.content().min(self.known)
    }

    /// Tokens, from the first, that the index is asked for.
    pub fn wanted_content(&self) -> u32 {
        if self.fresh { 0 } else { self.known_content() }
    }

    /// [`Entry::known_content`], with what a trace knows of the answer.
    fn content(&self) -> u32 {
        match &self.prompt {
            Prompt::Unknown => 0,
            Prompt::Tokens(tokens) => tokens.len() as u32,
            Prompt::SharedTokens(tokens) => tokens.len() as u32,
            Prompt::Ids { n_tokens, .. } => *n_tokens,
        }
    }

    /// Decode steps until the index has to be told of a block: a run of steps ends there, or others would be told
    /// too late.
    pub fn steps_to_store(&self, block_tokens: u32) -> u32 {
        let full = (self.cached - self.cached % block_tokens).saturating_add(block_tokens);
        if full <= self.content() { full - self.cached } else { u32::MAX }
    }

    /// A sampled token becomes content, if everything before it is. Where a trace says something else of this place,
    /// what was sampled counts, and nothing of what the trace says behind it.
    pub fn append(&mut self, token: Option<u32>) {
        let Some(token) = token else { return };
        let end = self.known as usize;
        let Some(tokens) = self.prompt.tokens() else { return };
        if tokens.len() < end || tokens.get(end) == Some(&token) {
            return;
        }
        self.prompt.push(end, token);
    }
}
