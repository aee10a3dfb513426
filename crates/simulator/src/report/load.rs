//! Load over time: requests and blocks.
use serde::Serialize;

/// The load at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Requests that have arrived but are not in the batch, including preempted ones.
    pub queued_requests: u64,
    /// Requests in the batch.
    pub running_requests: u64,
    /// Blocks in use by requests. During a step this includes the blocks it writes, until its end.
    pub used_blocks: u64,
    /// Cached blocks that no request uses.
    pub cached_blocks: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sample {
    pub at_ns: u64,
    #[serde(flatten)]
    pub load: Load,
}

/// The load over time. Means and maxima are exact: every change in the number of requests is recorded, and the blocks
/// in use are added up for every step ([`Timeline::extend`]). Samples are exact at their times, which are those at which
/// requests arrive, are admitted, leave, or prefill; between two samples, blocks grow by decoded tokens. Only an
/// evenly thinned part of the samples is kept, so that memory does not grow with the run.
#[derive(Clone, Debug)]
pub struct Timeline {
    samples: Vec<Sample>,
    keep_one_of: u64,
    noted: u64,
    begin_ns: u64,
    last: Option<Sample>,
    /// Integrals: Σ value · ns.
    queued: u128,
    running: u128,
    used: u128,
    cached: u128,
    peak: Load,
}

/// Maximum number of samples kept; at least half as many are kept once it was reached.
const MAX_SAMPLES: usize = 4096;

impl Default for Timeline {
    fn default() -> Timeline {
        Timeline {
            samples: Vec::new(),
            keep_one_of: 1,
            noted: 0,
            begin_ns: 0,
            last: None,
            queued: 0,
            running: 0,
            used: 0,
            cached: 0,
            peak: Load::default(),
        }
    }
}

impl Timeline {
    /// Sets the load from `at_ns` on. Time never goes back: an earlier time is replaced by the last one.
    pub fn note(&mut self, at_ns: u64, load: Load) {
        let at_ns = match self.last {
            None => {
                self.begin_ns = at_ns;
                at_ns
            }
            Some(last) => {
                let at_ns = at_ns.max(last.at_ns);
                let ns = u128::from(at_ns - last.at_ns);
                self.queued += u128::from(last.load.queued_requests) * ns;
                self.running += u128::from(last.load.running_requests) * ns;
                at_ns
            }
        };
        let peak = &mut self.peak;
        peak.queued_requests = peak.queued_requests.max(load.queued_requests);
        peak.running_requests = peak.running_requests.max(load.running_requests);
        let sample = Sample { at_ns, load };
        self.last = Some(sample);
        if self.noted.is_multiple_of(self.keep_one_of) {
            if self.samples.len() == MAX_SAMPLES {
                let mut keep = false;
                self.samples.retain(|_| {
                    keep = !keep;
                    keep
                });
                self.keep_one_of *= 2;
            }
            if self.noted.is_multiple_of(self.keep_one_of) {
                self.samples.push(sample);
            }
        }
        self.noted += 1;
    }

    /// Adds `ns` nanoseconds with the blocks of `load` in use. `late_ns` corrects for blocks that were begun later: it
    /// is the sum of their delays. All time between the first and the last sample must be added exactly once.
    pub fn extend(&mut self, ns: u64, load: Load, late_ns: u128) {
        self.used += (u128::from(load.used_blocks) * u128::from(ns)).saturating_sub(late_ns);
        self.cached += u128::from(load.cached_blocks) * u128::from(ns);
        self.peak.used_blocks = self.peak.used_blocks.max(load.used_blocks);
        self.peak.cached_blocks = self.peak.cached_blocks.max(load.cached_blocks);
    }

    /// The samples kept, in time order, including the last one.
    pub fn samples(&self) -> Vec<Sample> {
        let mut samples = self.samples.clone();
        if samples.last() != self.last.as_ref() {
            samples.extend(self.last);
        }
        samples
    }

    /// At most `n` + 1 samples: from every stretch the one with the most requests, so that no peak is lost, plus the
    /// last one.
    pub(crate) fn thinned(&self, n: usize) -> Vec<Sample> {
        let samples = self.samples();
        let stretch = samples.len().div_ceil(n.max(1)).max(1);
        let requests = |s: &&Sample| s.load.queued_requests + s.load.running_requests;
        let mut kept: Vec<Sample> =
            samples.chunks(stretch).filter_map(|chunk| chunk.iter().max_by_key(requests).copied()).collect();
        if kept.last() != samples.last() {
            kept.extend(samples.last().copied());
        }
        kept
    }

    /// Time of the last sample.
    pub fn end_ns(&self) -> u64 {
        self.last.map_or(0, |last| last.at_ns)
    }

    /// Mean number of requests in the system over time: the L of Little's law.
    pub fn mean_requests(&self) -> f64 {
        self.over_time(self.queued + self.running)
    }

    fn over_time(&self, integral: u128) -> f64 {
        let ns = self.end_ns().saturating_sub(self.begin_ns);
        if ns == 0 { 0.0 } else { integral as f64 / ns as f64 }
    }

    pub(super) fn report(&self, busy_ns: u64) -> LoadReport {
        LoadReport {
            mean_queued_requests: self.over_time(self.queued),
            peak_queued_requests: self.peak.queued_requests,
            mean_running_requests: self.over_time(self.running),
            peak_running_requests: self.peak.running_requests,
            mean_used_blocks: self.over_time(self.used),
            peak_used_blocks: self.peak.used_blocks,
            mean_cached_blocks: self.over_time(self.cached),
            peak_cached_blocks: self.peak.cached_blocks,
            busy_ratio: self.over_time(u128::from(busy_ns)),
        }
    }
}

/// Means are time averages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LoadReport {
    pub mean_queued_requests: f64,
    pub peak_queued_requests: u64,
    /// Batch occupancy.
    pub mean_running_requests: f64,
    pub peak_running_requests: u64,
    pub mean_used_blocks: f64,
    pub peak_used_blocks: u64,
    pub mean_cached_blocks: f64,
    pub peak_cached_blocks: u64,
    /// Fraction of time spent in steps.
    pub busy_ratio: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thinning the samples does not change the means.
    #[test]
    fn means_are_exact_however_many_moments() {
        let mut timeline = Timeline::default();
        let (mut at, mut integral) = (500u64, 0u128);
        for i in 0..100_000u64 {
            let load = Load { queued_requests: i % 7, used_blocks: i, ..Load::default() };
            timeline.note(at, load);
            let ns = i % 5;
            timeline.extend(ns, load, 0);
            integral += u128::from(ns) * u128::from(i % 7);
            at += ns;
        }
        timeline.note(at, Load::default());
        let report = timeline.report(1000);
        assert_eq!(report.mean_queued_requests, integral as f64 / (at - 500) as f64);
        assert_eq!(report.peak_used_blocks, 99_999);
        assert_eq!(report.busy_ratio, 1000.0 / (at - 500) as f64);
        let samples = timeline.samples();
        assert!((MAX_SAMPLES / 2..=MAX_SAMPLES + 1).contains(&samples.len()), "{}", samples.len());
        assert!(samples.windows(2).all(|pair| pair[0].at_ns <= pair[1].at_ns));
        assert_eq!(samples.last().map(|s| s.at_ns), Some(at));
        let thin = timeline.thinned(100);
        assert!((50..=101).contains(&thin.len()) && thin.last() == samples.last(), "{}", thin.len());
        assert!(thin.iter().all(|s| samples.contains(s)) && timeline.thinned(1).len() <= 2);
    }

    #[test]
    fn nothing_happened() {
        let timeline = Timeline::default();
        assert_eq!(timeline.report(0), LoadReport::default());
        assert!(timeline.samples().is_empty());
    }
}
