//! Parses the value of `--model`.
use crate::Error;
use std::fmt;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// A folder or a file. Parsing does not check that it exists.
    Path(PathBuf),
    Hub(HubName),
    /// `llama3.2:1b`, `user/model`, `hf.co/org/name:Q8_0`.
    Ollama(String),
    /// `ORG/NAME[:QUANT|:FILE]`.
    LmStudio(String),
    /// A file in llama.cpp's cache.
    LlamaCpp(String),
}

/// A model of the Hugging Face Hub: `hf:ORG/NAME[@REVISION][:QUANT|:FILE]`. All parts are checked to be safe in
/// URLs and file paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    pub owner: String,
    pub name: String,
    /// A branch, a tag or a commit; `None` means `main`.
    pub revision: Option<String>,
    /// A quantisation, or a file name that ends in `.gguf`.
    pub pick: Option<String>,
}

impl Name {
    pub fn parse(typed: &Path) -> Result<Name, Error> {
        let Some(text) = typed.to_str() else { return Ok(Name::Path(typed.into())) };
        let of = |prefix: &str| text.strip_prefix(prefix);
        if let Some(name) = of("hf:") {
            return HubName::parse(name)
                .map(Name::Hub)
                .map_err(|problem| Error::Name { typed: text.into(), problem });
        }
        let named = |name: &str, make: fn(String) -> Name, example: &str| match name {
            "" => {
                Err(Error::Name { typed: text.into(), problem: format!("names no model; write {example}") })
            }
            name => Ok(make(name.into())),
        };
        if let Some(name) = of("ollama:") {
            named(name, Name::Ollama, "ollama:llama3.2:1b")
        } else if let Some(name) = of("lmstudio:") {
            named(name, Name::LmStudio, "lmstudio:ORG/NAME or lmstudio:ORG/NAME:Q4_K_M")
        } else if let Some(name) = of("llama.cpp:") {
            named(name, Name::LlamaCpp, "llama.cpp:FILE.gguf")
        } else {
            Ok(Name::Path(typed.into()))
        }
    }
}

impl HubName {
    /// Parses the text after `hf:`.
    pub(crate) fn parse(text: &str) -> Result<HubName, String> {
        let form = "write hf:ORG/NAME, hf:ORG/NAME:Q4_K_M or hf:ORG/NAME:FILE.gguf";
        let (repo, pick) = match text.split_once(':') {
            Some((repo, pick)) => (repo, Some(pick)),
            None => (text, None),
        };
        let (repo, revision) = match repo.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (repo, None),
        };
        let (owner, name) = repo.split_once('/').ok_or_else(|| format!("has no owner; {form}"))?;
        for (part, what) in [(owner, "owner"), (name, "name")] {
            if !is_repo_part(part) {
                return Err(format!("`{part}` cannot be the {what} of a repository; {form}"));
            }
        }
        if let Some(revision) = revision.filter(|revision| !is_safe_path(revision)) {
            return Err(format!("`{revision}` cannot be a revision; write a branch, a tag or a commit"));
        }
        match pick {
            Some("") => return Err(format!("ends in a colon; {form}")),
            Some(pick) if !is_safe_path(pick) => {
                return Err(format!("`{pick}` is neither a quantisation nor a file; {form}"));
            }
            Some(pick) if pick.to_lowercase().ends_with(".safetensors") => {
                return Err(format!(
                    "kvist takes the whole folder of a safetensors model: write hf:{owner}/{name}"
                ));
            }
            _ => {}
        }
        Ok(HubName {
            owner: owner.into(),
            name: name.into(),
            revision: revision.map(Into::into),
            pick: pick.map(Into::into),
        })
    }

    /// `ORG/NAME`
    pub fn repo(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
    /// True if a file is requested, false for a quantisation.
    pub(crate) fn picks_file(&self) -> bool {
        self.pick.as_ref().is_some_and(|pick| pick.to_lowercase().ends_with(".gguf"))
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}/{}", self.owner, self.name)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        self.pick.as_ref().map_or(Ok(()), |pick| write!(f, ":{pick}"))
    }
}

/// The Hub's own rule for names, without those that have a special meaning in a file path.
fn is_repo_part(part: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty()
        && part.len() <= 96
        && part.chars().all(fits)
        && !part.starts_with('.')
        && !part.contains("..")
}

/// Returns whether this is a relative path that stays below the folder it is joined to, on every operating
/// system.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let name = |part: &str| {
        let odd = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
        !part.is_empty() && part != "." && part != ".." && !part.contains(odd)
    };
    !path.is_empty() && path.len() <= 1024 && path.split('/').all(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Name, Error> {
        Name::parse(Path::new(text))
    }

    #[test]
    fn names_are_what_they_look_like() {
        for path in
            ["./hf:a/b", "model.gguf", "Qwen/Qwen3-0.6B", "C:\\models\\x.gguf", "/a/b", "hf", "https:x"]
        {
            assert_eq!(parse(path).unwrap(), Name::Path(path.into()), "{path}");
        }
        let hub = |revision: Option<&str>, pick: Option<&str>| {
            Name::Hub(HubName {
                owner: "Qwen".into(),
                name: "Qwen3-0.6B".into(),
                revision: revision.map(Into::into),
                pick: pick.map(Into::into),
            })
        };
        for (text, expected) in [
            ("hf:Qwen/Qwen3-0.6B", hub(None, None)),
            ("hf:Qwen/Qwen3-0.6B:q8_0", hub(None, Some("q8_0"))),
            ("hf:Qwen/Qwen3-0.6B:sub/x-q8_0.gguf", hub(None, Some("sub/x-q8_0.gguf"))),
            ("hf:Qwen/Qwen3-0.6B@refs/pr/3", hub(Some("refs/pr/3"), None)),
            ("hf:Qwen/Qwen3-0.6B@v1.0:F16", hub(Some("v1.0"), Some("F16"))),
        ] {
            let name = parse(text).unwrap();
            assert_eq!(name, expected, "{text}");
            let Name::Hub(name) = name else { panic!("{text}") };
            assert_eq!(name.to_string(), text);
        }
        assert_eq!(parse("ollama:llama3.2:1b").unwrap(), Name::Ollama("llama3.2:1b".into()));
        assert_eq!(parse("lmstudio:a/b:Q8_0").unwrap(), Name::LmStudio("a/b:Q8_0".into()));
        assert_eq!(parse("llama.cpp:x.gguf").unwrap(), Name::LlamaCpp("x.gguf".into()));
    }

    #[test]
    fn what_is_no_name_is_refused_and_says_how_to_write_one() {
        for (text, expected) in [
            ("hf:", "has no owner; write hf:ORG/NAME"),
            ("hf:gpt2", "has no owner"),
            ("hf:/x", "cannot be the owner"),
            ("hf:a/b/c", "cannot be the name"),
            ("hf:../etc", "cannot be the owner"),
            ("hf:a/..", "cannot be the name"),
            ("hf:a/b:", "ends in a colon"),
            ("hf:a/b:../../x.gguf", "neither a quantisation nor a file"),
            ("hf:a/b:/x.gguf", "neither a quantisation nor a file"),
            ("hf:a/b@:Q8_0", "cannot be a revision"),
            ("hf:a/b@../x", "cannot be a revision"),
            ("hf:a/b:model.safetensors", "write hf:a/b"),
            ("ollama:", "write ollama:llama3.2:1b"),
            ("lmstudio:", "names no model"),
            ("llama.cpp:", "names no model"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.is_wrong_name() && error.to_string().contains(expected), "{text}: {error}");
        }
    }
}
