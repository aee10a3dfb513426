//! `/v1/sessions`: conversations and texts that can be forked, rolled back, and continued in several ways.
//!
//! A session is a history of tokens that a key owns. It owns no memory while nothing is generated: its full blocks stay
//! in the prefix index, under the salt that it shares with its forks. A generation is a job whose prompt is the
//! history. So a fork copies no K and V, and recomputes at most the tokens of its last, partly filled block. A fork of
//! a session that is generating takes the tokens that exist at that moment. Blocks that were evicted meanwhile are
//! recomputed, with no other effect.
//!
//! Generated tokens become part of the session one by one, even if the client disconnects. Only one change to a session
//! runs at a time. Only the owner of a session learns that it exists.
mod fields;
mod generate;
mod history;
mod store;
mod verbs;

pub(crate) use fields::SessionSchemas;
pub(crate) use generate::generate;
pub(crate) use store::{Rest, SessionId, Store};
pub(crate) use verbs::{append, create, delete, fork, keep, list, look, rollback};
