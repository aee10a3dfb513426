//! GGUF files in parts, as llama.cpp's `gguf-split` writes them. `NAME-00001-of-00003.gguf` has the metadata and the
//! others only tensors. In each part, `split.no`, `split.count` and `split.tensors.count` give its number and the
//! totals.
use super::gguf::Gguf;
use crate::error::Error;
use crate::ffi::Contents;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The part number in a file name has five digits.
const MAX_PARTS: usize = 99_999;

/// Opens a file, and the other parts next to it if it is the first of several.
pub(super) fn open(path: &Path, mmap: bool) -> Result<Gguf, Error> {
    let one = |path: &Path| Gguf::parse(&path.display().to_string(), Arc::new(Contents::open(path, mmap)?));
    let mut whole = one(path)?;
    let count = whole.metadata.size("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(whole);
    }
    let bad = |file: &str, what: String| Error::Malformed { file: file.into(), what };
    let number = whole.metadata.must_size("split.no")?;
    if number >= count || count > MAX_PARTS {
        let what = format!(
            "says that it is one of {count} parts, and its number from 0 is {number}; {MAX_PARTS} parts are possible"
        );
        return Err(bad(whole.file(), what));
    }
    if path.file_name().is_some_and(|name| name.to_str().is_none()) {
        let what = format!(
            "is one of {count} parts, which are found by their names, and its name is not UTF-8: rename all of them"
        );
        return Err(bad(whole.file(), what));
    }
    let name_of = name(path, number, count).ok_or_else(|| {
        let ending = format!("-{:05}-of-{count:05}.gguf", number + 1);
        bad(
            whole.file(),
            format!("is one of {count} parts, whose name should end in {ending}: give it its old name back"),
        )
    })?;
    if number != 0 {
        let first = name_of(0);
        let what = format!("is part {} of {count}; give the first one, {}", number + 1, first.display());
        return Err(bad(whole.file(), what));
    }
    let expected = whole.metadata.size("split.tensors.count")?;
    for number in 1..count {
        let path = name_of(number);
        if !path.exists() {
            let what = format!("is the first of {count} parts; {} is not there", path.display());
            return Err(bad(whole.file(), what));
        }
        let part = one(&path)?;
        let found = (part.metadata.size("split.no")?, part.metadata.size("split.count")?);
        if found != (Some(number), Some(count)) {
            let says = |n: Option<usize>| n.map_or("nothing".into(), |n| n.to_string());
            let what = format!(
                "should be part {} of {count}; its split.no is {} and its split.count {}",
                number + 1,
                says(found.0),
                says(found.1)
            );
            return Err(bad(part.file(), what));
        }
        whole.join(part)?;
    }
    let found = whole.n_tensors();
    match expected {
        Some(expected) if expected != found => {
            Err(bad(whole.file(), format!("says that its parts hold {expected} tensors; they hold {found}")))
        }
        _ => Ok(whole),
    }
}

/// Returns the names of all parts, given that of part `number` (from 0). `None` if `path` is not named like a part.
fn name(path: &Path, number: usize, count: usize) -> Option<impl Fn(usize) -> PathBuf> {
    let ending = move |number: usize| format!("-{:05}-of-{count:05}.gguf", number + 1);
    let stem = path.file_name()?.to_str()?.strip_suffix(&ending(number))?.to_string();
    let path = path.to_path_buf();
    Some(move |number| path.with_file_name(stem.clone() + &ending(number)))
}
