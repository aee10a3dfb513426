//! What was recorded and not submitted yet.
use super::clock::Clock;
use kvist_gpu::Recorder;

/// Dispatches since the last submission, in one compute pass. wgpu puts a barrier between two that use the same buffer.
#[derive(Debug, Default)]
pub struct Recording {
    pub pass: Option<wgpu::ComputePass<'static>>,
    pub encoder: Option<wgpu::CommandEncoder>,
    pub clock: Option<Clock>,
    pub n_marks: u32,
    /// Dispatches since the last submission, and submissions since the step began.
    pub n_dispatches: u32,
    pub n_early: u32,
}

impl Recorder for Recording {
    fn restart(&mut self) {
        self.pass = None;
        self.encoder = None;
        self.n_marks = 0;
        (self.n_dispatches, self.n_early) = (0, 0);
    }
}
