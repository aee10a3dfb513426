//! `/v1/sessions`: the endpoints of [`kvist_engine::sessions`].
//!
//! Generated tokens become part of the session even if the client disconnects. Only the owner of a session learns that
//! it exists.
mod fields;
mod files;
mod generate;
mod shared;
mod tokenizer;
mod unsettled;
mod verbs;

pub(crate) use fields::SessionSchemas;
pub(crate) use files::{load, save};
pub(crate) use generate::generate;
pub(crate) use unsettled::Unsettled;
pub(crate) use verbs::{append, create, delete, fork, keep, list, rollback, show};
