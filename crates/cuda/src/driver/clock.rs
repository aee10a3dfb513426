//! Times of marks, all since the same point.
use super::{CudaDriver, Submission};
use crate::ffi::Event;
use kvist_device::DeviceError;
use kvist_gpu::lock;
use std::sync::Arc;

/// The driver tells the time between two events in milliseconds, as a single float: after a minute that is exact to microseconds only. So
/// times count from an event that is not long ago.
const LONG_NANOSECONDS: f64 = 1e9;

/// Marks of which the time of the first one is known.
#[derive(Debug)]
pub(super) struct Clock {
    marks: Arc<Vec<Event>>,
    nanoseconds: f64,
}

impl CudaDriver {
    pub(super) fn times(&self, submission: &Submission) -> Result<Vec<f64>, DeviceError> {
        let Some(first) = submission.marks.first() else { return Ok(Vec::new()) };
        let between = |start: &Event, mark: &Event| {
            self.kept("time of a mark", mark.since(start)).map(|ms| f64::from(ms) * 1e6)
        };
        let mut clock = lock(&self.clock);
        let passed = match clock.as_ref().and_then(|clock| Some((clock, clock.marks.first()?))) {
            Some((clock, start)) => Some((clock.nanoseconds, between(start, first)?)),
            None => None,
        };
        let zero = passed.map_or(0.0, |(known, passed)| known + passed);
        if passed.is_none_or(|(_, passed)| passed > LONG_NANOSECONDS) {
            *clock = Some(Clock { marks: submission.marks.clone(), nanoseconds: zero });
        }
        submission.marks.iter().map(|mark| Ok(zero + between(first, mark)?)).collect()
    }
}
