//! Hashes of what a model's results depend on.
use crate::config::ModelConfig;
use crate::error::Error;
use crate::model::Opened;
use crate::tokenizer::Tokenizer;
use crate::weights::Source;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock};

/// BLAKE3 hashes, in hexadecimal digits. Two models with equal fingerprints compute the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Of every tensor: name, shape, encoding and bytes.
    pub weights: String,
    /// Of the vocabulary, the merges and the rules of the tokenizer; empty without one.
    pub tokenizer: String,
    /// Of the architecture, as this version of kvist reads it.
    pub config: String,
}

/// The BLAKE3 hash of bytes, one part after the other.
pub fn hash(parts: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().to_hex().to_string()
}

/// The fingerprint of a model that has been loaded, for programs that learn late whether they need it. It is computed when it is
/// first asked for.
#[derive(Debug)]
pub struct LateFingerprint {
    /// Mapped files; `None` once they are hashed.
    source: Option<Arc<Source>>,
    config: ModelConfig,
    known: OnceLock<Fingerprint>,
}

impl LateFingerprint {
    /// `tokenizer` is that of the model.
    ///
    /// # Errors
    /// As [`Opened::fingerprint`].
    pub fn get(&self, tokenizer: Option<&Tokenizer>) -> Result<&Fingerprint, Error> {
        if let (None, Some(source)) = (self.known.get(), &self.source) {
            // Two threads may hash the same bytes; one of both results stays.
            let _ = self.known.set(fingerprint(source, &self.config, tokenizer)?);
        }
        self.known.get().ok_or_else(|| Error::Usage("the model has no fingerprint".into()))
    }
}

impl Opened {
    /// Reads all weights once: some seconds for a large model.
    ///
    /// # Errors
    /// A tensor is missing, or the tokenizer cannot be written down.
    pub fn fingerprint(&self) -> Result<Fingerprint, Error> {
        fingerprint(&self.source, &self.config, self.tokenizer())
    }

    /// The fingerprint, for later. Mapped files stay mapped, which takes no memory of its own; they must not change as long as
    /// it lives. Files that were read are hashed now, so that their bytes need not be kept.
    ///
    /// # Errors
    /// As [`fingerprint`](Self::fingerprint).
    pub fn late_fingerprint(&self) -> Result<LateFingerprint, Error> {
        let was_read = self.source.was_read();
        let known = if was_read { OnceLock::from(self.fingerprint()?) } else { OnceLock::new() };
        let source = (!was_read).then(|| self.source.clone());
        Ok(LateFingerprint { source, config: self.config.clone(), known })
    }
}

fn fingerprint(
    source: &Source,
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
) -> Result<Fingerprint, Error> {
    let mut weights = blake3::Hasher::new();
    for spec in config.tensors() {
        let view = source.find(&spec)?;
        // Lengths in front, so that no two lists of tensors have the same bytes.
        for text in [&spec.name, &format!("{:?}", view.shape), view.encoding.name()] {
            weights.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        for bytes in view.stored() {
            weights.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        }
    }
    let tokenizer = match tokenizer {
        Some(tokenizer) => hash(&[tokenizer.definition()?.as_bytes()]),
        None => String::new(),
    };
    Ok(Fingerprint {
        weights: weights.finalize().to_hex().to_string(),
        tokenizer,
        config: hash(&[format!("{config:?}").as_bytes()]),
    })
}
