//! The OpenAI API, as its clients speak it.
mod chat;
mod completions;
mod generation;
mod models;
pub(crate) mod request;
mod stream;
mod tokens;

pub(crate) use chat::chat;
pub(crate) use completions::completions;
pub(crate) use generation::random_seed;
pub(crate) use models::{model, models};
pub(crate) use tokens::{detokenize, tokenize};
