//! Data for plots: when each request was worked on.
use crate::report::{Activity, Phase};
use kvist_scheduler::Work;

/// Activity of requests. Consecutive steps without a gap are merged into one entry.
#[derive(Default)]
pub(super) struct Watched {
    pub activity: Vec<Activity>,
    /// Per request: index of its last entry in `activity`.
    last: Vec<Option<usize>>,
}

impl Watched {
    pub fn note(&mut self, work: &Work, from_ns: u64, to_ns: u64) {
        let request = work.request.0 as usize;
        let phase = if work.decodes { Phase::Decode } else { Phase::Prefill };
        if self.last.len() <= request {
            self.last.resize(request + 1, None);
        }
        if let Some(open) = self.last[request].map(|at| &mut self.activity[at])
            && (open.phase, open.to_ns) == (phase, from_ns)
        {
            open.to_ns = to_ns;
            return;
        }
        self.last[request] = Some(self.activity.len());
        self.activity.push(Activity { request: work.request.0, phase, from_ns, to_ns });
    }
}
