//! The devices and backends compiled into this engine. Programs choose a device only here.
pub use kvist_cpu::{Compute, Cpu};
use kvist_device::{MemoryBudget, Registry};
use kvist_model::{Error, LoadOptions, Model, Opened};
use std::sync::Arc;

/// Loads a model on the device of [`on`], with these threads and this instruction set. See [`Opened::load`].
pub fn load(
    opened: Opened,
    compute: &Compute,
    options: &LoadOptions,
    budget: &Arc<MemoryBudget>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Model, Error> {
    opened.load(Cpu::new(compute.clone()), options, budget, progress)
}

/// All backends, and through them every `backend:kind` pair, on this process's own threads.
pub fn all() -> Registry {
    on(&Compute::default())
}

/// All backends, on the given threads and instruction set.
pub fn on(compute: &Compute) -> Registry {
    Registry::of(Cpu::new(compute.clone()))
        .with(Box::new(Cpu::new(compute.clone())))
        .with(Box::new(kvist_device::reference::Reference))
}
