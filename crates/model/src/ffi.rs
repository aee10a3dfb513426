//! The bytes of a file, mapped or read. The only unsafe code of this crate.
#![allow(unsafe_code)]
use crate::error::Error;
use crate::files;
use std::fs::File;
use std::path::Path;

/// A file's bytes.
#[derive(Debug)]
pub enum Contents {
    Mapped(memmap2::Mmap),
    Read(Vec<u8>),
    Static(&'static [u8]),
}

impl Contents {
    /// Map the file, or read it whole.
    pub fn open(path: &Path, mmap: bool) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_path_buf(), source };
        if !mmap {
            return files::read(path).map(Contents::Read);
        }
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only and lives as long as this value. That nobody changes the file meanwhile
        // cannot be enforced; the documentation of `--no-mmap` says so, and whoever expects it reads instead.
        let map = unsafe { memmap2::Mmap::map(&file) };
        match map {
            // A pipe has no length, and can be read.
            Ok(map) if !map.is_empty() => Ok(Contents::Mapped(map)),
            // Some file systems cannot map, but can be read; an empty file is an error there.
            _ => files::read(path).map(Contents::Read),
        }
    }
}

impl std::ops::Deref for Contents {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Contents::Mapped(map) => map,
            Contents::Read(bytes) => bytes,
            Contents::Static(bytes) => bytes,
        }
    }
}
