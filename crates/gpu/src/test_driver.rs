//! A driver for tests. Its buffers lie in the host's memory. It copies and writes, computes nothing, and refuses an allocation when it is
//! told to.
use crate::driver::{Args, BufferCopy, Driver, HostMemory, Limits, Recorder};
use crate::kernels::Kernel;
use crate::shared::lock;
use kvist_device::DeviceError;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub struct TestDriver {
    limits: Limits,
    /// Allocations before the next refusal.
    until_refusal: Mutex<Option<u32>>,
    allocated: Arc<AtomicU64>,
}

#[derive(Debug)]
pub struct TestBuffer {
    bytes: Mutex<Vec<u8>>,
    allocated: Arc<AtomicU64>,
}

impl Drop for TestBuffer {
    fn drop(&mut self) {
        self.allocated.fetch_sub(lock(&self.bytes).len() as u64, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub struct Nothing;

impl Recorder for Nothing {
    fn restart(&mut self) {}
}

impl TestDriver {
    /// A driver with parts of at most so many bytes.
    pub fn new(max_part_bytes: u64) -> Arc<Self> {
        Arc::new(TestDriver {
            limits: Limits {
                max_binding_bytes: u64::MAX,
                max_part_bytes,
                max_workgroup_bytes: 1 << 20,
                max_attend_rows: 32,
                batch_invariant: true,
                unified_memory: true,
                adapter: "no GPU".into(),
            },
            until_refusal: Mutex::default(),
            allocated: Arc::default(),
        })
    }

    /// Refuses one allocation, after `n` that are not refused.
    pub fn refuse_after(&self, n: u32) {
        *lock(&self.until_refusal) = Some(n);
    }

    /// Whether the refusal is still to come; it is called off.
    pub fn refuse_no_more(&self) -> bool {
        lock(&self.until_refusal).take().is_some()
    }
}

impl Driver for TestDriver {
    const NAME: &'static str = "test";
    type Buffer = TestBuffer;
    type Recorder = Nothing;
    type Submission = ();

    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn allocated_bytes(&self) -> Option<u64> {
        Some(self.allocated.load(Ordering::Relaxed))
    }
    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn buffer(&self, what: &'static str, bytes: u64) -> Result<TestBuffer, DeviceError> {
        let mut until = lock(&self.until_refusal);
        *until = match *until {
            Some(0) => {
                *until = None;
                return Err(DeviceError::OutOfMemory { what, bytes });
            }
            until => until.map(|n| n - 1),
        };
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        Ok(TestBuffer { bytes: Mutex::new(vec![0; bytes as usize]), allocated: self.allocated.clone() })
    }
    fn staging(&self, what: &'static str, bytes: u64) -> Result<TestBuffer, DeviceError> {
        self.buffer(what, bytes)
    }
    fn write(&self, buffer: &TestBuffer, at: u64, bytes: &[u8]) {
        lock(&buffer.bytes)[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    fn record(&self, _: &mut Nothing, _: &Kernel, _: &[Option<&TestBuffer>], _: Args, _: [u32; 3]) {}
    fn copy(&self, _: &mut Nothing, copy: &BufferCopy<'_, Self>) {
        let bytes = lock(&copy.from.bytes)[copy.from_byte as usize..][..copy.bytes as usize].to_vec();
        self.write(copy.to, copy.to_byte, &bytes);
    }
    fn submit(&self, recorder: &mut Nothing, copies: &[BufferCopy<'_, Self>]) {
        copies.iter().for_each(|copy| self.copy(recorder, copy));
    }
    fn wait(&self, (): &()) -> Result<(), DeviceError> {
        Ok(())
    }
    fn wait_all(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn is_done(&self, (): &()) -> bool {
        true
    }
    fn read(
        &self,
        staging: &TestBuffer,
        range: Range<u64>,
        read: impl FnOnce(&[u8]),
    ) -> Result<(), DeviceError> {
        read(&lock(&staging.bytes)[range.start as usize..range.end as usize]);
        Ok(())
    }
    fn host_buffer(&self, what: &'static str, bytes: u64, _: HostMemory) -> Result<TestBuffer, DeviceError> {
        self.buffer(what, bytes)
    }
    fn fill(&self, buffer: &TestBuffer, bytes: &[u8]) -> Result<(), DeviceError> {
        self.write(buffer, 0, bytes);
        Ok(())
    }
}
