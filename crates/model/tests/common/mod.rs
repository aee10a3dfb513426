//! Shared code of this crate's integration tests.
#![allow(dead_code)] // each test binary uses its part
use kvist_cpu::{Compute, Cpu};
use kvist_device::MemoryBudget;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The fixtures of this crate. The tests of `kvist-engine` include this file too.
pub fn fixtures(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(kind)
}

/// The sub-folders, sorted. Fails if there are none.
pub fn cases(kind: &str) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(fixtures(kind)).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.is_dir());
    all.sort();
    assert!(!all.is_empty(), "no fixtures of {kind}");
    all
}

/// Load options for texts of the fixtures' length.
pub fn texts() -> LoadOptions {
    LoadOptions { context: Some(128), ..LoadOptions::default() }
}

/// The threads that [`load`] puts a model on: row arithmetic is independent of the batch.
pub fn compute() -> Compute {
    Compute::default().deterministic(true)
}

/// For tests that compare texts.
pub fn load(file: ModelFile) -> Result<Arc<Model>, kvist_model::Error> {
    load_in(file, WeightFormat::AsStored)
}

pub fn load_in(file: ModelFile, format: WeightFormat) -> Result<Arc<Model>, kvist_model::Error> {
    let options = LoadOptions { format, ..texts() };
    Model::load(&file, Cpu::new(compute()), &options, &MemoryBudget::unlimited(), &mut |_, _| {})
        .map(Arc::new)
}
