//! What a model is loaded with: threads, a place, memory, files.
use crate::errors::{Class, argument, engine};
use kvist_device::MemoryBudget;
use kvist_engine::devices::{Compute, Place};
use kvist_engine::saved::LateOrigin;
use kvist_hub::{Hub, Progress, Resolved, Settings};
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, ModelFile, Opened};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};

/// The most threads that make sense, as for `kvist --threads`.
const MAX_THREADS: usize = 1024;

/// Threads by their number: they are created once.
pub fn compute(threads: Option<usize>, deterministic: bool, fast_prefill: bool) -> PyResult<Compute> {
    static POOLS: LazyLock<Mutex<HashMap<usize, Compute>>> = LazyLock::new(Default::default);
    if deterministic && fast_prefill {
        let why = "`fast_prefill`: its results depend on the batch, so it does not go with `deterministic`: leave one out";
        return Err(argument(why));
    }
    let with = |pool: Compute| pool.deterministic(deterministic).fast_prefill(fast_prefill);
    let Some(threads) = threads else { return Ok(with(Compute::default())) };
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(argument(format!("`threads`: {threads} is not a number from 1 to {MAX_THREADS}")));
    }
    let mut pools = crate::wait::lock(&POOLS);
    let pool = pools.entry(threads).or_insert_with(|| Compute::new(Compute::default().isa, threads));
    Ok(with(pool.clone()))
}

/// The device of a backend, and what its caches call that backend.
pub fn place(backend: &str, compute: &Compute) -> PyResult<(Place, String)> {
    let (place, id) = Place::of_backend(backend, compute).map_err(|why| engine(why.into()))?;
    place.check_backend(&id).map_err(|why| argument(format!("`backend`: {why}")))?;
    Ok((place, id))
}

/// A number of bytes, as an argument gives it.
#[derive(FromPyObject)]
pub enum Bytes {
    Number(u64),
    Text(String),
}

impl Bytes {
    /// `name`: of the argument.
    pub fn get(self, name: &str) -> PyResult<u64> {
        match self {
            Bytes::Number(bytes) => Ok(bytes),
            Bytes::Text(text) => {
                let size: kvist_cli::Size =
                    text.parse().map_err(|why| argument(format!("`{name}`: {why}")))?;
                Ok(size.0)
            }
        }
    }
}

/// Downloads without a progress bar.
struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: &str, _: u64, _: u64) {}
    fn at(&mut self, _: u64) {}
    fn end(&mut self) {}
    fn note(&mut self, _: &str) {}
    fn accept(&mut self, _: &std::path::Path) -> Result<(), String> {
        Ok(())
    }
}

/// How a model was loaded: a draft model is loaded alike.
#[derive(Clone, Copy, Debug)]
pub struct Loading {
    pub format: WeightFormat,
    pub mmap: bool,
    pub offline: bool,
    pub is_embedded: bool,
}

/// Finds a model on this machine, or downloads it.
pub fn find(path: &Path, offline: bool) -> PyResult<Resolved> {
    let mut settings = Settings::from_env(&|name| std::env::var_os(name));
    settings.offline |= offline;
    Hub::new(settings).resolve(path, &mut Silent).map_err(|why| Class::Model.with(why.to_string()))
}

/// Finds the model on this machine, downloads what is missing, and loads it.
pub fn load(
    path: Option<PathBuf>,
    options: &LoadOptions,
    place: &Place,
    memory: Option<u64>,
    offline: bool,
) -> PyResult<(kvist_model::Model, LateOrigin)> {
    let (file, name) = match path {
        None => (ModelFile::Embedded, None),
        Some(path) => {
            let found = find(&path, offline)?;
            let name = (found.path != path).then(|| path.display().to_string());
            (ModelFile::Path(found.path), name)
        }
    };
    let mut opened = Opened::open(&file, options.mmap).map_err(engine)?;
    if let Some(name) = name {
        opened.rename(&name);
    }
    let origin = LateOrigin::new(&opened, options.format, options.context).map_err(engine)?;
    let memory = match memory {
        None => place.default_memory(kvist_cli::memory::available()).map_err(|why| engine(why.into()))?,
        given => given,
    };
    let budget = memory.map_or_else(MemoryBudget::unlimited, MemoryBudget::new);
    let model = place.load(opened, options, &budget, &mut |_, _| {}).map_err(engine)?;
    Ok((model, origin))
}
