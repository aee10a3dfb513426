//! What devices on GPUs share: models, KV pools and attention over a [`Driver`] of buffers, kernels and submissions.
//!
//! A driver is one API: wgpu in `kvist-wgpu`, CUDA in `kvist-cuda`. It compiles the kernels that [`Kernel`] names; everything else is here.
//! Weights stay in their file's encoding and are decoded in the kernels (`weights.rs`); activations are f32 (`device.rs`).
//! K and V are stored on the device (`pools.rs`). A step is one upload, and one submission unless a driver submits it in parts; the plan's
//! reads are lowered to tables that attention walks through (`tables.rs`).
//!
//! With kernels whose sums have an order that depends on the row alone, a row's result does not depend on the rest of its batch.
//! Both drivers have faster ones too, without that promise; [`Limits::batch_invariant`] says which are used.
#![forbid(unsafe_code)]

mod device;
mod driver;
mod footprint;
mod form;
mod kernels;
mod lane;
mod linear;
mod measure;
mod pools;
mod range;
mod recents;
mod rotation;
mod several;
mod shared;
mod side;
mod stream;
mod tables;
mod taps;
#[cfg(test)]
mod test_driver;
mod unplanned;
mod weights;

pub use device::Vector;
pub use driver::*;
pub use form::Form;
pub use kernels::*;
use kvist_device::{Backend, DeviceError, PoolSpec, Pools, Usage};
pub use lane::{Job, Lane, Pinned, Section, lane_bytes};
pub use linear::{Halves, MANY_TOKENS, Product, Routes};
pub use measure::*;
pub use pools::GpuPools;
pub use several::Several;
pub use shared::*;
use std::sync::Arc;
pub use stream::{Buffer, Stream};
pub use weights::{Linear, stack};

/// Which results this crate and the kernels of its drivers compute, to the last bit. It is part of
/// [`Footprint::numerics`](kvist_device::Footprint::numerics), and so of the keys under which K and V are stored: another process reuses
/// them only if it would have computed the same ones. Raise it with every change that changes a bit of a result. No test can tell:
/// adapters differ.
pub const NUMERICS: u32 = 7;

/// A GPU: a device for models, and a backend for attention alone. Clones share it.
#[derive(Debug)]
pub struct GpuDevice<D: Driver> {
    gpu: Arc<D>,
}

impl<D: Driver> Clone for GpuDevice<D> {
    fn clone(&self) -> Self {
        GpuDevice { gpu: self.gpu.clone() }
    }
}

impl<D: Driver> GpuDevice<D> {
    pub fn new(driver: D) -> Self {
        GpuDevice { gpu: Arc::new(driver) }
    }

    /// The API under it.
    pub fn driver(&self) -> &D {
        &self.gpu
    }

    /// Measures the way of K and V from the host.
    ///
    /// # Errors
    /// There is no memory on the device.
    pub fn measurement(&self) -> Result<Measurement<D>, DeviceError> {
        Measurement::new(&self.gpu)
    }

    /// The GPU's name.
    pub fn adapter(&self) -> &str {
        &self.gpu.limits().adapter
    }

    /// Bytes that are allocated on the device, by the API's own report; `None` if it has none.
    pub fn allocated_bytes(&self) -> Option<u64> {
        self.gpu.allocated_bytes()
    }
}

impl<D: Driver> Backend for GpuDevice<D> {
    fn id(&self) -> &'static str {
        D::NAME
    }
    fn check_spec(&self, spec: &PoolSpec) -> Result<(), DeviceError> {
        pools::check(&*self.gpu, spec)
    }
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError> {
        Ok(Box::new(GpuPools::new(&self.gpu, spec)?))
    }
    /// K and V grow as [`kvist_device::reserved_cells`] says. A cache whose sequences are scattered cell by cell may need
    /// longer plans than counted here; that memory is reserved as scratch, in addition, when a step needs it, or the step is refused.
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        pools::usage(spec, cells)
    }
    fn host_bytes(&self, spec: &PoolSpec) -> Option<u64> {
        pools::host_bytes(spec)
    }
}
