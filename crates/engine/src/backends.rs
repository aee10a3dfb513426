//! The backends this engine was built with. A new one: one line.
use kvist_backend::Registry;

/// Every backend, and through it every `backend:kind` pair.
pub fn all() -> Registry {
    Registry::default()
        .with(Box::new(kvist_cpu::Cpu::default()))
        .with(Box::new(kvist_backend::reference::Reference))
}
