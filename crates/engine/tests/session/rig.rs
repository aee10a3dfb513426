//! What tests of files of K and V share: a model whose sessions are saved or frozen, and how they go on.
use crate::common::*;
use kvist_cache::SeqId;
use kvist_device::Storage;
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::Origin;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::weights::WeightFormat;
use kvist_model::{Model, ModelFile, Opened};
use std::path::PathBuf;
use std::sync::Arc;

/// Tokens of a cache.
pub const CONTEXT: u32 = 256;

/// A model, and a folder for its files.
pub struct Rig {
    pub model: Arc<Model>,
    pub opened: Opened,
    pub folder: tempfile::TempDir,
}

impl Rig {
    pub fn new(file: &ModelFile) -> Rig {
        let (model, opened) = (load(file.clone()).unwrap(), Opened::open(file, true).unwrap());
        Rig { model, opened, folder: tempfile::tempdir().unwrap() }
    }
    pub fn embedded() -> Rig {
        Rig::new(&ModelFile::Embedded)
    }
    pub fn config(&self, kind: &str, storage: &str, chunk: u32) -> CacheConfig {
        let storage: Storage = storage.parse().unwrap();
        // A ring needs a window. This one forgets.
        let window = (kind == "ring").then_some(64);
        CacheConfig {
            k: storage,
            v: storage.for_values(),
            window,
            max_rows: 1,
            ..exact(kind, CONTEXT, chunk)
        }
    }
    pub fn origin(&self, config: &CacheConfig) -> Origin {
        Origin::new(self.opened.fingerprint().unwrap(), WeightFormat::AsStored, config, self.model.config())
    }
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("p.kvp")
    }
}

/// The bits of the logits after each token, one by one.
pub fn go_on(session: &mut ModelSession, tokens: &[u32]) -> Vec<Vec<u32>> {
    go_on_in(session, SeqId::ONLY, tokens)
}

pub fn go_on_in(session: &mut ModelSession, seq: SeqId, tokens: &[u32]) -> Vec<Vec<u32>> {
    let one = |token: &u32| {
        session.forward(&[SequenceInput::chain(seq, &[*token])], LogitRows::LastOfEach).unwrap();
        session.logits().iter().map(|x| x.to_bits()).collect()
    };
    tokens.iter().map(one).collect()
}
