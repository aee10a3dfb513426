//! Bind groups, kept for later dispatches.
//!
//! A bind group keeps the memory of its buffers. So it ends with the first of them that is dropped, whichever recorder made it: what pools
//! replace is free at once, not when a model takes its next step.
use kvist_gpu::lock;
use std::collections::HashMap;
use std::sync::Mutex;

/// A pipeline, and the buffers that are bound for it; 0 where there is none.
pub type Key = (u64, Vec<u64>);

/// The bind groups of a driver.
#[derive(Debug, Default)]
pub struct BindGroups {
    all: Mutex<HashMap<Key, wgpu::BindGroup>>,
}

impl BindGroups {
    /// The bind group; `make` runs at its first use.
    pub fn get(&self, key: Key, make: impl FnOnce() -> wgpu::BindGroup) -> wgpu::BindGroup {
        lock(&self.all).entry(key).or_insert_with(make).clone()
    }

    /// Drops all that have a buffer.
    pub fn drop_those_of(&self, buffer: u64) {
        lock(&self.all).retain(|(_, buffers), _| !buffers.contains(&buffer));
    }
}
