//! Models: configs, weights in common file formats, the decoder, tokenizers and chat templates.
//!
//! [`Opened`] reads a file's headers, [`Model::load`] loads its weights on a device, and [`Model::open`] makes a network
//! that executes steps. No file and no text can make this crate panic.
#![deny(unsafe_code)]

pub mod answers;
pub mod config;
pub mod embedded;
pub mod error;
mod ffi;
mod files;
mod fingerprint;
pub mod generation_config;
mod guard;
pub mod halt;
pub mod harmony;
mod model;
pub mod template;
pub mod thinking;
pub mod tokenizer;
pub mod weights;

pub use error::Error;
pub use fingerprint::{Fingerprint, LateFingerprint, hash};
pub use model::*;
