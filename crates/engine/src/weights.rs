//! Weights on disk and in memory: safetensors folders and GGUF files in, linear layers out.
//!
//! Readers trust nothing: every count, length and offset of a header is checked against the file before it is
//! used, and nothing is allocated by a number that the file merely claims.
mod encoding;
mod gguf;
mod linear;
mod repack;
mod safetensors;
mod split;
mod view;

pub use encoding::{Encoding, WeightForm};
pub use gguf::{Gguf, Metadata};
pub use linear::{Embedding, Linear};
pub use view::View;

use crate::config::TensorSpec;
use crate::error::Error;
use crate::ffi::Contents;
use std::path::Path;
use std::sync::Arc;

/// Where tensors come from.
#[derive(Debug)]
pub enum Source {
    Folder(safetensors::Folder),
    Gguf(Gguf),
}

impl Source {
    /// `model.safetensors` of a folder, or the shards that `model.safetensors.index.json` names.
    pub fn folder(path: &Path, mmap: bool) -> Result<Self, Error> {
        safetensors::Folder::open(path, mmap).map(Source::Folder)
    }
    /// The file, with its other parts if it is the first of several.
    pub fn gguf_file(path: &Path, mmap: bool) -> Result<Self, Error> {
        split::open(path, mmap).map(Source::Gguf)
    }
    /// A GGUF file that is part of the program.
    pub fn gguf_bytes(name: &str, bytes: &'static [u8]) -> Result<Self, Error> {
        Gguf::parse(name, Arc::new(Contents::Static(bytes))).map(Source::Gguf)
    }
    /// What errors call it: a file or a folder.
    pub fn file(&self) -> &str {
        match self {
            Source::Folder(folder) => folder.path(),
            Source::Gguf(gguf) => gguf.file(),
        }
    }
    pub fn as_gguf(&self) -> Option<&Gguf> {
        match self {
            Source::Gguf(gguf) => Some(gguf),
            Source::Folder(_) => None,
        }
    }

    /// The tensor a model asks for, with the shape it asks for.
    pub fn find(&self, spec: &TensorSpec) -> Result<View<'_>, Error> {
        let view = match self {
            Source::Folder(folder) => folder.find(&spec.name)?,
            Source::Gguf(gguf) => gguf.find(&spec.name)?,
        };
        if view.shape != spec.shape {
            return Err(Error::TensorShape {
                file: self.file().into(),
                name: view.name,
                found: view.shape,
                expected: spec.shape.clone(),
            });
        }
        Ok(view)
    }
}
