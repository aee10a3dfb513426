//! The OpenAI API.
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod fields;
pub(crate) mod generation;
mod models;
pub(crate) mod request;
mod sampling;
pub(crate) mod scores;
pub(crate) mod stream;
pub(crate) mod tokens;

pub(crate) use chat::chat;
pub(crate) use completions::completions;
pub(crate) use generation::random_id;
pub(crate) use models::{model, models};
pub(crate) use tokens::{detokenize, tokenize};
