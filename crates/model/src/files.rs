//! Reads whole files. Reports empty files as such: they are left behind by interrupted downloads and failed copies.
use crate::error::Error;
use std::path::Path;

/// The bytes of a file. Fails if it is empty.
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read { path: path.to_path_buf(), source };
    let bytes = std::fs::read(path).map_err(failed)?;
    if bytes.is_empty() { Err(Error::Empty { path: path.to_path_buf() }) } else { Ok(bytes) }
}

/// The text of a file. Fails if it is empty.
pub fn read_text(path: &Path) -> Result<String, Error> {
    String::from_utf8(read(path)?).map_err(|error| Error::Malformed {
        file: path.display().to_string(),
        what: format!("not UTF-8 text: {}", error.utf8_error()),
    })
}
