//! What the examples share: the bandwidth that a GPU has.
use kvist_device::DeviceError;
use kvist_gpu::{BufferCopy, Driver};

const COPIES: u32 = 20;

/// Bytes per second that a copy within the device's memory reads and writes, together.
pub fn copy_rate(gpu: &impl Driver, bytes: u64) -> Result<f64, DeviceError> {
    let (from, to) = (gpu.buffer("copy", bytes)?, gpu.buffer("copy", bytes)?);
    let copy = |recorder: &mut _| {
        gpu.copy(recorder, &BufferCopy { from: &from, from_byte: 0, to: &to, to_byte: 0, bytes });
    };
    let mut recorder = Default::default();
    (0..3).for_each(|_| copy(&mut recorder));
    gpu.mark(&mut recorder);
    (0..COPIES).for_each(|_| copy(&mut recorder));
    gpu.mark(&mut recorder);
    let submission = gpu.submit(&mut recorder, &[]);
    gpu.wait(&submission)?;
    let marks = gpu.marks(&submission)?;
    Ok(2.0 * bytes as f64 * f64::from(COPIES) / (marks[1] - marks[0]) * 1e9)
}
