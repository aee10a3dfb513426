//! The OpenAI API.
pub(crate) mod chat;
pub(crate) mod completions;
mod document;
pub(crate) mod fields;
pub(crate) mod generation;
pub(crate) mod generation_request;
mod merged;
mod models;
pub(crate) mod parts;
mod render;
pub(crate) mod request;
mod sampling;
pub(crate) mod score_memory;
pub(crate) mod scores;
pub(crate) mod stream;
mod token_ids;
pub(crate) mod tokens;
pub(crate) mod writer;

pub(crate) use chat::chat;
pub(crate) use completions::completions;
pub(crate) use models::{model, models};
pub(crate) use render::{render_chat, render_completions};
pub(crate) use tokens::{detokenize, tokenize};
