//! What the scheduler stores per live request, and the request's state.
use crate::policy::{Rank, View};
use crate::request::*;
use crate::retain::Retention;
use crate::tiers::{MAX_TIERS, NotLoaded, Run};
use kvist_cache::{MissReason, Prompt, SeqId};
use std::sync::Arc;

/// Position in an ordered queue. A total order, because no two requests have the same `arrival` number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub rank: Rank,
    /// Sequence number of the arrival.
    pub arrival: u64,
    pub index: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The entry is unused.
    Vacant,
    /// In `waiting` under this key, and also in `paused` if it still has a sequence in the cache.
    Waiting(Key),
    Running,
    /// Its blocks are being loaded from a tier.
    Loading,
}

/// What is known of a request's blocks in the tiers below the KV cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lower {
    /// Nothing, and nothing will be: there are no tiers, or the request is loaded or computed.
    #[default]
    Done,
    /// The driver looks its prompt up. The request waits until then.
    Asked { until_ns: u64 },
    /// The tiers have this of its prompt, and whether to load it is not decided.
    Found { runs: Vec<Run> },
    /// Nothing of it is loaded, as long as the KV cache has the first `hit` tokens: the tiers have no more, or to compute it is faster.
    Declined { runs: Vec<Run>, hit: u32 },
}

impl Lower {
    /// What the tiers have of the prompt, if that may be loaded.
    pub fn runs(&self) -> Option<&[Run]> {
        match self {
            Lower::Found { runs } | Lower::Declined { runs, .. } => Some(runs),
            Lower::Done | Lower::Asked { .. } => None,
        }
    }
}

/// A cached prefix lookup, so that it need not be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub hit_tokens: u32,
    pub of_tokens: u32,
    pub version: u64,
}

pub(crate) struct Entry {
    // Fields that every step uses.
    pub state: State,
    /// Its sequence, if it has cells in the cache.
    pub seq: Option<SeqId>,
    /// Tokens of its sequence that are in the cache.
    pub cached: u32,
    /// Prompt plus generated tokens.
    pub known: u32,
    pub prompt_tokens: u32,
    pub max_new: u32,
    /// Tokens of this request in the step being built.
    pub scheduled: u32,
    /// Tokens already added to the prefix index.
    pub stored: u32,
    pub computed: u64,
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
    // Fields used only when the request changes state.
    pub id: RequestId,
    pub number: u64,
    pub arrival_ns: u64,
    pub deadline_ns: Option<u64>,
    pub priority: i32,
    pub expected_new: u32,
    pub salt: Arc<str>,
    pub prompt: Prompt,
    /// True if the prefix index must not supply any of its tokens.
    pub skip_prefix_cache: bool,
    pub retain: Option<Retention>,
    /// Cells reserved for it by conservative admission.
    pub reserved: u64,
    /// The last prefix lookup: hit length, length looked up, and index version.
    pub found: Option<Found>,
    /// How often a request with a longer prefix hit overtook it at the head of the queue.
    pub overtaken: u32,
    pub admitted_ns: Option<u64>,
    pub first_token_ns: Option<u64>,
    pub hit_tokens: u32,
    pub regained_tokens: u32,
    pub lost_tokens: u64,
    pub preemptions: u32,
    pub miss: Option<MissReason>,
    /// True once it has had a sequence.
    pub was_opened: bool,
    pub lower: Lower,
    /// When the tiers were last asked for its prompt, and until where they had it.
    pub asked_ns: u64,
    pub found_until: u32,
    /// Until where it was decided to compute what a tier has.
    pub declined_until: u32,
    /// Tokens loaded from tiers before it first lost its cells, by tier. Later ones are regained.
    pub loaded: [u32; MAX_TIERS],
    /// Why not more.
    pub not_loaded: Option<NotLoaded>,
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
            draft_tokens: self.draft_tokens,
            accepted_tokens: self.accepted_tokens,
            preemptions: self.preemptions,
            miss: self.miss,
            loaded: self.loaded,
            not_loaded: self.not_loaded,
        }
    }

    /// Number of tokens, from the first, whose content is known and which can be indexed once computed.
    pub fn known_content(&self) -> u32 {
        self.prompt.known_tokens().min(self.known)
    }

    /// Number of tokens, from the first, to look up in the prefix index.
    pub fn wanted_content(&self) -> u32 {
        if self.skip_prefix_cache { 0 } else { self.known_content() }
    }

    /// Decode steps until the next block must be added to the prefix index. A multi-step run ends there, because
    /// otherwise other requests would see the block too late.
    pub fn steps_to_store(&self, block_tokens: u32) -> u32 {
        let full = (self.cached - self.cached % block_tokens).saturating_add(block_tokens);
        // The ids of emitted tokens extend a content that is known to its end.
        let grows = self.prompt.tokens().is_some_and(|tokens| tokens.len() >= self.known as usize);
        if grows || full <= self.prompt.known_tokens() { full - self.cached } else { u32::MAX }
    }

    /// Appends an emitted token, and to the content, provided the content of all earlier tokens is known. If a trace
    /// predicts a different token at this position, the emitted one replaces it and the rest of the trace's content is
    /// dropped.
    pub fn append(&mut self, token: u32) {
        let end = self.known as usize;
        self.known += 1;
        let Some(tokens) = self.prompt.tokens() else { return };
        if tokens.len() < end || tokens.get(end) == Some(&token) {
            return;
        }
        self.prompt.push(end, token);
    }
}
