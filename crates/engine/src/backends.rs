//! The backends this engine was built with. A new one: one line.
use kvist_backend::Registry;
use kvist_cpu::Compute;

/// Every backend, and through it every `backend:kind` pair, on this process's own threads.
pub fn all() -> Registry {
    on(&Compute::default())
}

/// The same, on these threads and this instruction set.
pub fn on(compute: &Compute) -> Registry {
    Registry::default()
        .with(Box::new(kvist_cpu::Cpu::new(compute.clone())))
        .with(Box::new(kvist_backend::reference::Reference))
}
