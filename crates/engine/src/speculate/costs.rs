//! What passes cost by their number of rows, and how many draft tokens pay off in one.
use std::time::Duration;

/// Passes of up to so many rows are measured, each number of rows for itself.
const MAX_ROWS: usize = 128;
/// Weight of a new measurement.
const NEW: f64 = 0.1;
/// Of the first measurements the fastest counts: the first passes read cold memory. Before there are as many, a time is taken as
/// at most the guess below.
pub const COLD: u32 = 3;
/// A measurement is dropped after so many passes without another one of its number of rows.
const STALE: u64 = 512;
/// Guess for what one more row costs, as a share of the time of one row, until it is measured.
const ROW_SHARE: f64 = 0.03;

/// Times of passes by their number of rows, as moving averages.
#[derive(Clone, Debug)]
pub struct Costs {
    /// Index `n - 1` for `n` rows.
    times: Vec<Option<PassTime>>,
    /// Passes recorded so far.
    passes: u64,
}

/// How long passes of one number of rows take.
#[derive(Clone, Copy, Debug)]
struct PassTime {
    seconds: f64,
    measured: u32,
    /// Number of the last pass that was measured.
    last: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Costs { times: vec![None; MAX_ROWS], passes: 0 }
    }
}

impl Costs {
    /// A pass over `rows` rows took `elapsed`.
    pub fn record(&mut self, rows: usize, elapsed: Duration) {
        self.passes += 1;
        let (seconds, last) = (elapsed.as_secs_f64(), self.passes);
        let before = self.fresh(rows.max(1));
        let Some(time) = self.times.get_mut(rows.saturating_sub(1)) else { return };
        *time = Some(match before {
            None => PassTime { seconds, measured: 1, last },
            Some(PassTime { seconds: mean, measured, .. }) if measured < COLD => {
                PassTime { seconds: mean.min(seconds), measured: measured + 1, last }
            }
            // One slow pass on a busy machine moves the mean little.
            Some(PassTime { seconds: mean, measured, .. }) => {
                PassTime { seconds: mean + NEW * (seconds.min(3.0 * mean) - mean), measured, last }
            }
        });
    }

    /// What was measured for `rows` rows and is not stale: a slow time rules out drafts of that size for a while only.
    fn fresh(&self, rows: usize) -> Option<PassTime> {
        (*self.times.get(rows - 1)?).filter(|time| self.passes - time.last <= STALE)
    }

    /// The seconds for `rows` rows, once they were measured often enough.
    fn known(&self, rows: usize) -> Option<f64> {
        self.fresh(rows).filter(|time| time.measured >= COLD).map(|time| time.seconds)
    }

    /// Whether a pass over `rows` rows is a base for [`seconds`](Self::seconds): it, or a smaller one, was measured
    /// lately. If not, a pass without drafts should be measured.
    pub fn has_base(&self, rows: usize) -> bool {
        (1..=rows.clamp(1, MAX_ROWS)).any(|rows| self.known(rows).is_some())
    }

    /// Expected seconds of a pass over `rows` rows; `None` before the first measurement. Between measured numbers of rows
    /// it interpolates; beyond the largest it adds a guess per row. A pass is never expected to take longer than a larger one.
    pub fn seconds(&self, rows: usize) -> Option<f64> {
        let rows = rows.max(1);
        let at = |rows| Some((rows, self.known(rows)?));
        let below = (1..=rows.min(MAX_ROWS)).rev().find_map(at);
        let above = (rows..=MAX_ROWS).find_map(at);
        let least = (rows..=MAX_ROWS).filter_map(|rows| self.known(rows)).fold(f64::INFINITY, f64::min);
        let seconds = match (below, above) {
            (Some((n, seconds)), Some((m, more))) if m > n => {
                seconds + (more.max(seconds) - seconds) * (rows - n) as f64 / (m - n) as f64
            }
            (Some((n, seconds)), _) => {
                let one = self.known(1).unwrap_or(seconds);
                seconds + one * ROW_SHARE * (rows - n) as f64
            }
            (None, Some((m, seconds))) => seconds / (1.0 + ROW_SHARE * (m - rows) as f64),
            // Only what was measured too rarely to be relied on: the fastest of that.
            (None, None) => {
                let all = self.times.iter().flatten().map(|time| time.seconds);
                return all.min_by(f64::total_cmp);
            }
        };
        Some(seconds.min(least))
    }
}

/// The draft tokens that pay off in a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worth {
    /// How many of the candidates.
    pub nodes: usize,
    /// How many of those are expected to be accepted.
    pub accepted: f64,
    /// Tokens that the pass gives without drafts.
    pub gains: f64,
    /// Expected seconds of the pass without drafts.
    pub plain: f64,
    /// Expected seconds of the pass with the nodes.
    pub seconds: f64,
}

/// How many draft tokens pay off in a pass that has `rows` rows and gives `gains` tokens without them. `paths` are the
/// probabilities of the candidates' paths, in descending order; the first ones are taken. `None` if no pass was measured
/// yet.
pub fn worth(costs: &Costs, rows: usize, gains: usize, paths: &[f64]) -> Option<Worth> {
    let plain = costs.seconds(rows)?;
    let gains = gains as f64;
    let mut best = Worth { nodes: 0, accepted: 0.0, gains, plain, seconds: plain };
    let (mut accepted, mut rate) = (0.0, gains / plain);
    for (i, path) in paths.iter().enumerate() {
        accepted += path;
        let seconds = costs.seconds(rows + i + 1)?;
        if (gains + accepted) / seconds > rate {
            rate = (gains + accepted) / seconds;
            best = Worth { nodes: i + 1, accepted, seconds, ..best };
        }
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: f64) -> Duration {
        Duration::from_secs_f64(n / 1e3)
    }

    fn often(costs: &mut Costs, rows: usize, time: f64) {
        (0..COLD).for_each(|_| costs.record(rows, ms(time)));
    }

    fn near(costs: &Costs, rows: usize, expected: f64) {
        let seconds = costs.seconds(rows).unwrap();
        assert!((seconds * 1e3 - expected).abs() < 1e-6, "{rows} rows: {seconds}");
    }

    #[test]
    fn costs_are_interpolated() {
        let mut costs = Costs::default();
        assert_eq!(costs.seconds(3), None);
        assert!(!costs.has_base(3));
        often(&mut costs, 1, 10.0);
        assert!(costs.has_base(1) && costs.has_base(1000));
        often(&mut costs, 5, 14.0);
        for (rows, expected) in [(1, 10.0), (3, 12.0), (5, 14.0), (15, 17.0), (1000, 14.0 + 995.0 * 0.3)] {
            near(&costs, rows, expected);
        }
        // A larger pass that is faster shows that a smaller one is too.
        often(&mut costs, 9, 8.0);
        for (rows, expected) in [(1, 8.0), (5, 8.0), (9, 8.0)] {
            near(&costs, rows, expected);
        }
    }

    /// A pass that was slow once does not rule out its number of rows, nor do many of them forever.
    #[test]
    fn slow_passes_are_forgotten() {
        let mut costs = Costs::default();
        costs.record(1, ms(500.0)); // cold
        (1..COLD).for_each(|_| costs.record(1, ms(10.0)));
        near(&costs, 1, 10.0);
        costs.record(5, ms(80.0));
        near(&costs, 5, 11.2); // one measurement is not believed
        often(&mut costs, 5, 80.0);
        near(&costs, 5, 80.0);
        (0..=STALE).for_each(|_| costs.record(1, ms(10.0)));
        near(&costs, 5, 11.2);
        // Without a plain pass for as long, one is needed.
        (0..=STALE).for_each(|_| costs.record(7, ms(12.0)));
        assert!(!costs.has_base(1) && costs.has_base(7));
    }
}
