//! Hashes of what a model's results depend on.
use crate::error::Error;
use crate::model::Opened;
use serde::{Deserialize, Serialize};

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

impl Opened {
    /// Reads all weights once: some seconds for a large model.
    ///
    /// # Errors
    /// A tensor is missing, or the tokenizer cannot be written down.
    pub fn fingerprint(&self) -> Result<Fingerprint, Error> {
        let mut weights = blake3::Hasher::new();
        for spec in self.config.tensors() {
            let view = self.source.find(&spec)?;
            // Lengths in front, so that no two lists of tensors have the same bytes.
            for text in [&spec.name, &format!("{:?}", view.shape), view.encoding.name()] {
                weights.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
            }
            for bytes in view.stored() {
                weights.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
            }
        }
        let tokenizer = match self.tokenizer() {
            Some(tokenizer) => hash(&[tokenizer.definition()?.as_bytes()]),
            None => String::new(),
        };
        Ok(Fingerprint {
            weights: weights.finalize().to_hex().to_string(),
            tokenizer,
            config: hash(&[format!("{:?}", self.config).as_bytes()]),
        })
    }
}
