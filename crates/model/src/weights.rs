//! Weights on disk. Reads safetensors folders and GGUF files.
//!
//! Files are not trusted: every count, length and offset in a header is checked against the file before use, and no
//! allocation is sized by an unchecked number.
mod gguf;
mod gpt_oss;
mod safetensors;
mod split;
mod view;

pub use gguf::{Gguf, Metadata, Value};
pub use kvist_device::weights::{Encoding, WeightFormat};
pub use view::View;

use crate::config::TensorSpec;
use crate::error::Error;
use crate::ffi::Contents;
use std::path::Path;
use std::sync::Arc;

/// A source of tensors.
#[derive(Debug)]
pub enum Source {
    Folder(safetensors::Folder),
    Gguf(Gguf),
}

impl Source {
    /// Opens `model.safetensors` in a folder, or the shards that `model.safetensors.index.json` names.
    pub fn folder(path: &Path, mmap: bool) -> Result<Self, Error> {
        safetensors::Folder::open(path, mmap).map(Source::Folder)
    }
    /// Opens the file, and the other parts if it is the first of several.
    pub fn gguf_file(path: &Path, mmap: bool) -> Result<Self, Error> {
        split::open(path, mmap).map(Source::Gguf)
    }
    /// A GGUF file embedded in the program.
    pub fn gguf_bytes(name: &str, bytes: &'static [u8]) -> Result<Self, Error> {
        Gguf::parse(name, Arc::new(Contents::Static(bytes))).map(Source::Gguf)
    }
    /// A safetensors file embedded in the program.
    pub(crate) fn safetensors_bytes(name: &str, bytes: &'static [u8]) -> Result<Self, Error> {
        safetensors::Folder::of_bytes(name, bytes).map(Source::Folder)
    }
    /// The name to use in errors: a file or a folder.
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

    /// True if files were read into memory, and not mapped.
    pub(crate) fn was_read(&self) -> bool {
        match self {
            Source::Folder(folder) => folder.was_read(),
            Source::Gguf(gguf) => gguf.was_read(),
        }
    }

    /// True if there is a tensor of this name, in whatever encoding.
    pub(crate) fn has(&self, name: &str) -> bool {
        !matches!(self.view(name), Err(Error::MissingTensor { .. }))
    }

    /// A tensor of integers (i32 or i64) with one dimension; `None` if there is none of this name.
    pub(crate) fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, Error> {
        match self {
            Source::Folder(folder) => folder.integers(name),
            Source::Gguf(_) => Ok(None),
        }
    }

    /// Finds a tensor and checks its shape.
    pub fn find(&self, spec: &TensorSpec) -> Result<View<'_>, Error> {
        let mut shape = spec.shape.clone();
        let (view, first) = match (self.view(&spec.name), &spec.within) {
            (Err(missing @ Error::MissingTensor { .. }), Some(within)) => {
                if let Source::Folder(folder) = self
                    && let Some(view) = gpt_oss::find(folder, spec)?
                {
                    return Ok(view);
                }
                shape[0] = within.rows;
                // On failure, report the name that most files use.
                let view = self.view(&within.name).map_err(|_| missing)?;
                (view.merged(shape.len()), Some(within.first))
            }
            (view, _) => (view?, None),
        };
        if view.shape != shape {
            let (name, found) = (view.name, view.shape);
            return Err(Error::TensorShape { file: self.file().into(), name, found, expected: shape });
        }
        let view = match first {
            Some(first) => view.rows(first, spec.shape[0]),
            None => view,
        };
        match self {
            Source::Folder(_) => Ok(view),
            Source::Gguf(gguf) => gguf.in_order(&spec.name, view),
        }
    }

    /// A tensor by its Hugging Face name, with its rows as the file orders them.
    fn view(&self, name: &str) -> Result<View<'_>, Error> {
        match self {
            Source::Folder(folder) => folder.find(name),
            Source::Gguf(gguf) => gguf.find(name),
        }
    }
}
