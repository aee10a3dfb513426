//! `/v1/sessions`: conversations and texts that are forked, rolled back, and go on in several ways.
//!
//! A session is a history of tokens that a key owns. It holds no memory while nothing is generated: its full blocks stay
//! in the prefix index, under the salt that it shares with its forks, and a generation is a job whose prompt is the
//! history. So a fork copies no K and V, and computes at most the tokens of its last, partly filled block anew; a fork
//! of a session that generates takes the tokens that are there. Blocks that were evicted meanwhile are computed again,
//! and nothing else changes.
//!
//! It promises that what is generated becomes part of the session token by token, whatever becomes of the client; that
//! there is one change to a session at a time; and that only its owner learns that it exists.
mod fields;
mod generate;
mod history;
mod store;
mod verbs;

pub(crate) use fields::SessionSchemas;
pub(crate) use generate::generate;
pub(crate) use store::{Rest, SessionId, Store};
pub(crate) use verbs::{append, create, delete, fork, keep, list, look, rollback};
