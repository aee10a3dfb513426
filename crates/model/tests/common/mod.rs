//! Shared code of this crate's integration tests.
#![allow(dead_code)] // each test binary uses its part
use kvist_cpu::{Compute, Cpu};
use kvist_device::MemoryBudget;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The fixtures of this crate. The tests of `kvist-engine` and `kvist-server` include this file too.
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

/// A model with f32 weights. Packed weights round activations to 8 bits, which turns a last-bit difference into one of
/// a percent; near-ties would no longer be near.
pub fn load_f32(file: &ModelFile) -> Arc<Model> {
    let options = LoadOptions { format: WeightFormat::F32, mmap: false, ..LoadOptions::default() };
    let budget = MemoryBudget::unlimited();
    Arc::new(Model::load(file, Cpu::default(), &options, &budget, &mut |_, _| {}).unwrap())
}

/// The embedded model with f32 weights.
pub fn f32_model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| load_f32(&ModelFile::Embedded))
}
