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

/// Advice for a path that does not exist. Two names that do not start with a dot may be meant as a repository of the
/// Hub.
pub fn not_there(path: &Path) -> String {
    let advice = "not there; give a Hugging Face folder or a .gguf file";
    let names: Option<Vec<&str>> = path.components().map(|part| part.as_os_str().to_str()).collect();
    match names.as_deref() {
        Some([owner, name]) if !["/", ".", ".."].contains(owner) && !name.ends_with(".gguf") => format!(
            "{advice}. If a repository of the Hugging Face Hub is meant, the kvist program downloads it as hf:{owner}/{name}"
        ),
        _ => advice.into(),
    }
}
