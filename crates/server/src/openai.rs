//! The OpenAI API.
pub(crate) mod chat;
pub(crate) mod completions;
mod document;
pub(crate) mod fields;
pub(crate) mod generation;
pub(crate) mod generation_request;
mod models;
pub(crate) mod parts;
pub(crate) mod request;
mod sampling;
pub(crate) mod score_memory;
pub(crate) mod scores;
pub(crate) mod stream;
pub(crate) mod tokens;
pub(crate) mod writer;

pub(crate) use chat::chat;
pub(crate) use completions::completions;
pub(crate) use models::{model, models};
pub(crate) use tokens::{detokenize, tokenize};
