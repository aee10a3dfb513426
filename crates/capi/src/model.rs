//! Models: opened once, shared by any number of sessions and threads.
mod ffi;

pub(crate) use ffi::{kvist_model, model_of};

use crate::status::{Failure, Outcome};
use kvist_cpu::arch::Threads;
use kvist_engine::Error;
use kvist_engine::devices::{Compute, Place};
use kvist_engine::kvist_device::{MemoryBudget, Registry};
use kvist_engine::kvist_model::tokenizer::Tokenizer;
use kvist_engine::kvist_model::{LoadOptions, Model as Weights, ModelFile, Opened};
use kvist_engine::saved::LateOrigin;
use std::sync::Arc;

/// Most threads that a caller may ask for.
const MAX_THREADS: u32 = 1024;

/// A model and the threads it computes on.
pub(crate) struct Model {
    pub weights: Arc<Weights>,
    /// Where it runs, and what it was loaded with: a head is loaded alike.
    pub place: Place,
    pub options: LoadOptions,
    pub is_embedded: bool,
    pub registry: Registry,
    /// The backend of its caches.
    pub backend: String,
    /// What K and V of its texts depend on, for files.
    pub origin: Arc<LateOrigin>,
}

/// The threads of a caller: `n`, or those that the process shares if `n` is 0.
pub(crate) fn compute(n: u32) -> Outcome<Compute> {
    match n {
        0 => Ok(Compute::default()),
        1..=MAX_THREADS => Ok(Compute { threads: Arc::new(Threads::new(n as usize)), ..Compute::default() }),
        _ => Err(Failure::argument(format!("threads is {n}: use 1 to {MAX_THREADS}, or 0 for one per core"))),
    }
}

/// A budget of `bytes`, or none if that is 0.
pub(crate) fn budget(bytes: u64) -> Arc<MemoryBudget> {
    match bytes {
        0 => MemoryBudget::unlimited(),
        bytes => MemoryBudget::new(bytes),
    }
}

impl Model {
    /// `memory_bytes`: 0 is no limit on the CPU, and what is free on a GPU as far as its driver says so.
    fn open(
        file: &ModelFile,
        options: &LoadOptions,
        threads: u32,
        memory_bytes: u64,
        backend: &str,
    ) -> Outcome<Self> {
        let (place, backend) = Place::of_backend(backend, &compute(threads)?).map_err(Error::from)?;
        place.check_backend(&backend).map_err(Failure::argument)?;
        let unknown =
            |why| Failure::unsupported(format!("memory_bytes is 0, and what is free is not known: {why}"));
        let free = if memory_bytes == 0 { place.default_memory(None).map_err(unknown)? } else { None };
        let budget = budget(free.unwrap_or(memory_bytes));
        let opened = Opened::open(file, options.mmap)?;
        let origin = LateOrigin::new(&opened, options.format, options.context)?.into();
        let weights = place.load(opened, options, &budget, &mut |_, _| {})?;
        let (registry, options) = (place.registry(), options.clone());
        let is_embedded = matches!(file, ModelFile::Embedded);
        Ok(Model { weights: weights.into(), place, options, is_embedded, registry, backend, origin })
    }

    pub fn tokenizer(&self) -> Outcome<&Tokenizer> {
        tokenizer(&self.weights)
    }
}

pub(crate) fn tokenizer(weights: &Weights) -> Outcome<&Tokenizer> {
    weights.tokenizer().ok_or_else(|| Error::Usage("this model has no tokenizer: pass tokens".into()).into())
}
