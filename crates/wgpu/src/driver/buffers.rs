//! Buffers: made, and mapped into the host's memory.
use super::Wgpu;
use super::bind_groups::BindGroups;
use kvist_device::DeviceError;
use kvist_gpu::Driver;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};

/// A buffer on the device. Its id never names another buffer.
#[derive(Debug)]
pub struct Buf {
    pub(super) raw: wgpu::Buffer,
    pub(super) id: u64,
    pub(super) bind_groups: Arc<BindGroups>,
    /// Whether there may be bind groups with it.
    pub(super) is_bound: AtomicBool,
}

impl Drop for Buf {
    fn drop(&mut self) {
        if *self.is_bound.get_mut() {
            self.bind_groups.drop_those_of(self.id);
        }
    }
}

impl Wgpu {
    pub(super) fn buffer_for(
        &self,
        what: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<Buf, DeviceError> {
        let storage = usage.contains(wgpu::BufferUsages::STORAGE);
        if storage && bytes > self.limits.max_binding_bytes {
            let most = self.limits.max_binding_bytes;
            return Err(DeviceError::Unsupported(format!(
                "the {what} takes {bytes} bytes in one piece, and this adapter binds at most {most}: use shorter \
                 steps or less context"
            )));
        }
        let usage = match usage {
            wgpu::BufferUsages::STORAGE => {
                usage | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST
            }
            wgpu::BufferUsages::MAP_READ => usage | wgpu::BufferUsages::COPY_DST,
            host => host,
        };
        // Kernels read some buffers in vectors of 16 bytes.
        let size = bytes.next_multiple_of(16).max(16);
        let out_of_memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(what),
            size,
            usage,
            mapped_at_creation: false,
        });
        match pollster::block_on(out_of_memory.pop()) {
            None => {
                let bind_groups = self.bind_groups.clone();
                Ok(Buf { raw, id: self.id(), bind_groups, is_bound: AtomicBool::new(false) })
            }
            Some(_) => Err(DeviceError::OutOfMemory { what, bytes }),
        }
    }

    /// Maps bytes of a buffer that no submission uses any more.
    pub(super) fn map(
        &self,
        buffer: &wgpu::Buffer,
        mode: wgpu::MapMode,
        range: Range<u64>,
    ) -> Result<(), DeviceError> {
        let (mapped, result) = mpsc::channel();
        buffer.slice(range).map_async(mode, move |done| {
            let _ = mapped.send(done); // the receiver is gone if this call has failed
        });
        // The buffer is free, so this does not wait for steps that are in flight.
        let _ = self.device.poll(wgpu::PollType::Poll);
        if let Ok(Ok(())) = result.try_recv() {
            return self.check();
        }
        self.poll(None)?;
        // The poll of another thread may have taken the mapping, and not have called back yet.
        match result.recv_timeout(self.patience) {
            Ok(Ok(())) => Ok(()),
            other => Err(self.failure.keep(format!("a buffer could not be mapped: {other:?}"))),
        }
    }
}
