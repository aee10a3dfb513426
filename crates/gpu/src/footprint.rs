//! What a model takes on the device before it is there, and what the device says of itself.
use crate::GpuDevice;
use crate::driver::{Driver, Limits};
use crate::form::Form;
use crate::kernels::{ATTEND_ROWS, MAX_GROUPS, attend_workgroup_bytes};
use crate::stream::{StreamBytes, f32s};
use crate::taps;
use crate::weights;
use kvist_device::weights::{Encoding, WeightFormat};
use kvist_device::*;

impl<D: Driver> Footprint for GpuDevice<D> {
    fn info(&self) -> DeviceInfo {
        let Limits { batch_invariant, unified_memory, .. } = *self.gpu.limits();
        DeviceInfo { name: D::NAME, batch_invariant, unified_memory }
    }

    fn supports(&self, shape: &ModelShape) -> Result<(), DeviceError> {
        let dim = shape.head_dim as u32;
        let needed = attend_workgroup_bytes(Form::new(Storage::F32, dim)?, dim, ATTEND_ROWS[0], false);
        let has = self.gpu.limits().max_workgroup_bytes;
        if needed > u64::from(has) {
            let (dim, adapter) = (shape.head_dim, &self.gpu.limits().adapter);
            let what = format!("heads of {dim} need {needed} bytes of workgroup memory, {adapter} has {has}");
            return Err(DeviceError::Unsupported(what));
        }
        // A dispatch has a dimension for experts.
        match shape.routing {
            Some(Routing { n_experts, .. }) if n_experts > MAX_GROUPS as usize => {
                let what = format!(
                    "{n_experts} experts in a layer; the device {} has kernels for {MAX_GROUPS}",
                    D::NAME
                );
                Err(DeviceError::Unsupported(what))
            }
            _ => Ok(()),
        }
    }

    fn weight_bytes(&self, shape: &[usize], stored: Encoding, format: WeightFormat) -> Option<u64> {
        let (inputs, rows) = shape.split_last()?;
        let outputs = rows.iter().try_fold(1usize, |n, rows| n.checked_mul(*rows))?;
        weights::bytes(&*self.gpu, stored.resident(format, *inputs), outputs, *inputs)
    }

    fn activation_bytes(&self, shape: &ModelShape, limits: &StepLimits) -> Option<u64> {
        let buffers = shape.buffers();
        let buffers = buffers.iter().filter(|(_, width)| *width > 0);
        let sum = buffers
            .into_iter()
            .try_fold(0u64, |sum, (rows, width)| sum.checked_add(f32s(rows.max(limits), *width)?))?;
        sum.checked_add(StreamBytes::new(shape, limits, self.gpu.has_halves())?.total()?)
    }

    fn tap_bytes(&self, width: usize, limits: &StepLimits) -> Option<u64> {
        taps::tap_bytes(limits.max_tokens, width)
    }

    fn pins_blocks(&self) -> bool {
        D::HAS_ARENAS
    }

    fn host_bytes(&self, shape: &ModelShape, limits: &StepLimits) -> Option<u64> {
        StreamBytes::new(shape, limits, self.gpu.has_halves())?.host()
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.gpu.check()
    }

    fn adapter(&self) -> Option<&str> {
        Some(&self.gpu.limits().adapter)
    }

    fn numerics(&self) -> String {
        let Limits { adapter, batch_invariant, .. } = self.gpu.limits();
        let fast = if *batch_invariant { "" } else { ", fast" };
        format!("{} {adapter}, kernels {}{fast}{}", D::NAME, crate::NUMERICS, self.gpu.variant())
    }
}
