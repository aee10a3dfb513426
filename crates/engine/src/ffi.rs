//! The bytes of a file, mapped or read. The only unsafe code of this crate.
#![allow(unsafe_code)]
use crate::error::Error;
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
            return std::fs::read(path).map(Contents::Read).map_err(failed);
        }
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only and lives as long as this value. That nobody changes the file meanwhile
        // cannot be enforced; the documentation of `--no-mmap` says so, and whoever expects it reads instead.
        let map = unsafe { memmap2::Mmap::map(&file) };
        match map {
            Ok(map) => Ok(Contents::Mapped(map)),
            // Pipes and some file systems cannot be mapped, but can be read.
            Err(_) => std::fs::read(path).map(Contents::Read).map_err(failed),
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
