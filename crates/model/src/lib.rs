//! Models: configs, weights in common file formats, the decoder, tokenizers and chat templates.
//!
//! [`Opened`] reads a file's headers, [`Model::load`] loads its weights, and [`Decoder::forward`] computes a step with
//! an attention function that the caller provides. No file and no text can make this crate panic.
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
