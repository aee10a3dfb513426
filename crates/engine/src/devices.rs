//! The devices and backends compiled into this engine. To add one, add one line.
pub use kvist_cpu::{Compute, Cpu};
use kvist_device::Registry;

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
