//! The bytes of a file, mapped or read. This module has the only unsafe code of the crate.
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
    /// True if the bytes are in memory of their own.
    pub fn was_read(&self) -> bool {
        matches!(self, Contents::Read(_))
    }
    /// Map the file, or read it whole.
    pub fn open(path: &Path, mmap: bool) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_path_buf(), source };
        if !mmap {
            return files::read(path).map(Contents::Read);
        }
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only and lives as long as this value. Changes to the file by other processes cannot
        // be prevented; the documentation of `--no-mmap` says so, and the option reads the file instead.
        let map = unsafe { memmap2::Mmap::map(&file) };
        match map {
            // A pipe has no length, but can be read.
            Ok(map) if !map.is_empty() => Ok(Contents::Mapped(map)),
            // Some file systems cannot map but can read. Mapping an empty file fails there.
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
