//! What a model is: its config, its weights in the formats that people have, the decoder, the tokenizer and the chat template.
//!
//! [`Opened`] reads what a file says of itself, [`Model::load`] holds its weights, [`Decoder::forward`] computes a step over
//! attention that the caller hands it. No file and no text can make it panic.
#![deny(unsafe_code)]

pub mod config;
pub mod embedded;
pub mod error;
mod ffi;
mod files;
pub mod generation_config;
mod guard;
pub mod halt;
pub mod harmony;
mod model;
pub mod template;
pub mod tokenizer;
pub mod weights;

pub use error::Error;
pub use model::*;
