//! Sessions: conversations and texts that can be forked, rolled back, and continued in several ways, on a
//! [serving engine](crate::serving).
//!
//! A session is a history of tokens with an owner. It uses no cache memory while nothing is generated: its full blocks
//! stay in the prefix index, under the salt that it shares with its forks. A generation is a job whose prompt is the
//! history. So a fork copies no K and V, and recomputes at most the tokens of its last, partly filled block. A fork of
//! a session that is generating takes the tokens that exist at that moment. Blocks that were evicted meanwhile are
//! recomputed, with no other effect.
//!
//! Sessions outlive their process in a directory ([`SessionKeeper`]), and go on in another one through a store that several share
//! ([`SharedSessions`]).
//!
//! [`SessionStore`] contains the sessions, [`History`] is the content of one, and a [`SessionGeneration`] continues
//! one: generated tokens become part of the session one by one. Only one change to a session runs at a time.
//!
//! ```
//! use kvist_device::MemoryBudget;
//! use kvist_engine::devices::{self, Cpu};
//! use kvist_engine::chat_format::ChatFormat;
//! use kvist_engine::memory::CacheConfig;
//! use kvist_engine::serving::{Engine, EngineConfig, Event, Job};
//! use kvist_engine::sessions::*;
//! use kvist_model::{LoadOptions, Model, ModelFile};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let budget = MemoryBudget::unlimited();
//! let options = LoadOptions::default();
//! let model = Model::load(&ModelFile::Embedded, Cpu::default(), &options, &budget, &mut |_, _| {})?;
//! let model = Arc::new(model);
//! let config = EngineConfig::new(CacheConfig::new(1024));
//! let sessions = SessionStore::new(SessionLimits::default());
//! let engine = Engine::start(model.clone(), &devices::all(), config)?;
//! let tokenizer = ModelTokenizer { format: Arc::new(ChatFormat::new(model)), max_tokens: 1024 };
//!
//! // A session made of text.
//! let owner: Arc<str> = "me".into();
//! let history = History::default().with_text(&tokenizer, "The borrow checker")?;
//! let trunk = sessions.create(Timestamp::now(), &owner, NewSession { history, ..NewSession::default() })?.id;
//!
//! // Continue it: the tokens become part of its history as they are generated.
//! let guard = sessions.claim(Timestamp::now(), &owner, trunk, true)?;
//! let prompt = guard.history.as_prompt(&tokenizer, None)?;
//! let mut generation = engine.submit(Job::new(prompt.tokens.as_slice(), 8))?;
//! let mut run = SessionGeneration::new(guard, prompt);
//! let mut done = None;
//! while let Some(event) = generation.blocking_next() {
//!     match event {
//!         Event::Token(token) => run.push(&token)?,
//!         Event::Done(end) => done = Some(end),
//!         _ => {}
//!     }
//! }
//! run.finish(&tokenizer, done.as_ref());
//!
//! // Two branches. What they share with the trunk stays in the cache.
//! let (_, history) = sessions.get(Timestamp::now(), &owner, trunk)?;
//! let branches = sessions.fork(Timestamp::now(), &owner, trunk, &history, 2, None)?;
//! assert_eq!(branches[0].shared_tokens, history.tokens.len());
//! # Ok(())
//! # }
//! ```
mod error;
mod files;
mod generation;
mod history;
mod id;
mod keeper;
mod shared;
mod store;
mod tokenizer;

pub use error::{Searched, SessionError};
pub use generation::SessionGeneration;
pub use history::{
    Cut, History, HistoryTokenizer, TOOLS, check_length, heap_bytes, heap_bytes_of_fields, with_conversation,
};
pub use id::SessionId;
pub use keeper::{KeptSession, SessionKeeper};
pub use shared::{Arrival, Found, SharedSessionCounts, SharedSessions, SharedStore, taking_over_bytes};
pub use store::{NewSession, SessionGuard, SessionInfo, SessionStore, SessionTokens, Timestamp};
pub use tokenizer::ModelTokenizer;

use std::time::Duration;

/// Limits for the sessions of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// A session expires if it was not changed, forked or generated in for this long.
    pub idle: Duration,
    /// Largest number of sessions.
    pub max_sessions: usize,
    /// Largest number of tokens in all sessions.
    pub max_tokens: u64,
}

impl Default for SessionLimits {
    /// An hour, 256 sessions, 2²⁰ tokens.
    fn default() -> Self {
        SessionLimits { idle: Duration::from_secs(3600), max_sessions: 256, max_tokens: 1 << 20 }
    }
}
