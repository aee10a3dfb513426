//! Arrival processes.
use super::{BadParameter, Random, at_most, positive};
use rand::Rng;
use rand_distr::{Exp1, Gamma};

/// An arrival process. Rates are mean requests per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// One request every 1/rate seconds, the first after one interval.
    Deterministic { per_s: f64 },
    /// Independent users: exponentially distributed intervals.
    Poisson { per_s: f64 },
    /// Gamma-distributed intervals with this coefficient of variation. Above 1 is burstier than Poisson, as real
    /// traces are (Wang et al., "BurstGPT", 2024); below 1 is smoother.
    Gamma { per_s: f64, variation: f64 },
    /// Poisson at rate `per_s` while on, no arrivals while off; both phases last an exponentially distributed time.
    /// This is an interrupted Poisson process (Kuczura, "The Interrupted Poisson Process as an Overflow Process", Bell
    /// System Technical Journal 52(3), 1973).
    OnOff { per_s: f64, on_s: f64, off_s: f64 },
    /// All requests arrive at time 0.
    AtOnce,
}

impl Arrivals {
    pub(super) fn check(&self) -> Result<(), BadParameter> {
        match *self {
            Arrivals::Deterministic { per_s } | Arrivals::Poisson { per_s } => {
                positive("the arrival rate", per_s)
            }
            Arrivals::Gamma { per_s, variation } => {
                positive("the arrival rate", per_s)?;
                at_most("the variation of arrivals", variation, 1000.0, "at most 1000")?;
                if variation < 1e-3 {
                    let expected = "at least 0.001, or deterministic arrivals";
                    return Err(BadParameter::new("the variation of arrivals", variation, expected));
                }
                Ok(())
            }
            Arrivals::OnOff { per_s, on_s, off_s } => {
                positive("the arrival rate", per_s)?;
                positive("the mean time on", on_s)?;
                positive("the mean time off", off_s)?;
                // Phases without an arrival are drawn one by one, so there must not be too many of them.
                let per_phase = per_s * on_s;
                if per_phase < 1e-3 {
                    let expected = "at least 0.001: give a higher rate, or a longer time on";
                    return Err(BadParameter::new(
                        "the mean number of arrivals while on",
                        per_phase,
                        expected,
                    ));
                }
                Ok(())
            }
            Arrivals::AtOnce => Ok(()),
        }
    }

    /// Mean interval in seconds.
    pub fn mean_interval_s(&self) -> f64 {
        match *self {
            Arrivals::Deterministic { per_s }
            | Arrivals::Poisson { per_s }
            | Arrivals::Gamma { per_s, .. } => 1.0 / per_s,
            Arrivals::OnOff { per_s, on_s, off_s } => (on_s + off_s) / on_s / per_s,
            Arrivals::AtOnce => 0.0,
        }
    }

    pub(super) fn times(self, random: Random) -> Times {
        let on_left_s = 0.0; // drawn with the first arrival
        Times { arrivals: self, random, now_s: 0.0, on_left_s, begun: false }
    }
}

/// Iterator over arrival times, in order.
pub(super) struct Times {
    arrivals: Arrivals,
    random: Random,
    now_s: f64,
    /// Time left in the current on phase.
    on_left_s: f64,
    begun: bool,
}

impl Times {
    pub fn next_ns(&mut self) -> u64 {
        let interval_s = match self.arrivals {
            Arrivals::Deterministic { per_s } => 1.0 / per_s,
            Arrivals::Poisson { per_s } => exponential(&mut self.random) / per_s,
            Arrivals::Gamma { per_s, variation } => {
                let shape = variation.powi(-2);
                let gamma = Gamma::new(shape, 1.0).expect("`check` bounds the variation");
                self.random.sample(gamma) / shape / per_s
            }
            Arrivals::OnOff { per_s, on_s, off_s } => {
                if !self.begun {
                    self.on_left_s = exponential(&mut self.random) * on_s;
                    self.begun = true;
                }
                let mut waited_s = 0.0;
                loop {
                    let interval_s = exponential(&mut self.random) / per_s;
                    if interval_s <= self.on_left_s {
                        self.on_left_s -= interval_s;
                        break waited_s + interval_s;
                    }
                    // The interval drawn beyond the end of the phase is dropped, because the exponential distribution
                    // is memoryless.
                    waited_s += self.on_left_s + exponential(&mut self.random) * off_s;
                    self.on_left_s = exponential(&mut self.random) * on_s;
                }
            }
            Arrivals::AtOnce => 0.0,
        };
        self.now_s += interval_s;
        (self.now_s * 1e9).round() as u64
    }
}

/// Exponential with mean 1.
pub(super) fn exponential(random: &mut Random) -> f64 {
    random.sample(Exp1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::{mean, variance};

    /// Compares mean and variance of intervals with theory. For on-off with rate λ and phases that end at rates a =
    /// 1/on and b = 1/off, the interval is hyperexponential (Kuczura 1973); its variance follows from the two moments
    /// E[X] = (a + b)/(λb) and E[X²] = 2((a + b)² + λa)/(λb)².
    #[test]
    fn moments_of_intervals() {
        let on_off = |per_s: f64, on_s: f64, off_s: f64| {
            let (a, b) = (1.0 / on_s, 1.0 / off_s);
            2.0 * ((a + b).powi(2) + per_s * a) / (per_s * b).powi(2) - ((a + b) / (per_s * b)).powi(2)
        };
        for (arrivals, expected_variance) in [
            (Arrivals::Deterministic { per_s: 4.0 }, 0.0),
            (Arrivals::Poisson { per_s: 4.0 }, 1.0 / 16.0),
            (Arrivals::Gamma { per_s: 4.0, variation: 2.0 }, 4.0 / 16.0),
            (Arrivals::Gamma { per_s: 4.0, variation: 0.5 }, 0.25 / 16.0),
            (Arrivals::OnOff { per_s: 10.0, on_s: 1.0, off_s: 3.0 }, on_off(10.0, 1.0, 3.0)),
            (Arrivals::AtOnce, 0.0),
        ] {
            arrivals.check().unwrap();
            let n = 300_000;
            let mut times = arrivals.times(super::super::stream(3, 0));
            let mut last = 0;
            let intervals: Vec<f64> = (0..n)
                .map(|_| {
                    let at = times.next_ns();
                    let interval = at - last;
                    last = at;
                    interval as f64 / 1e9
                })
                .collect();
            let (m, v) = (mean(&intervals).unwrap(), variance(&intervals).unwrap());
            let standard_error = (expected_variance / f64::from(n)).sqrt();
            let expected = arrivals.mean_interval_s();
            assert!(
                (m - expected).abs() <= 4.0 * standard_error + 1e-9,
                "{arrivals:?}: mean {m}, not {expected}"
            );
            assert!(
                (v - expected_variance).abs() <= 0.04 * expected_variance + 1e-12,
                "{arrivals:?}: variance {v}, not {expected_variance}"
            );
        }
    }

    #[test]
    fn parameters_that_make_no_process() {
        for arrivals in [
            Arrivals::Poisson { per_s: 0.0 },
            Arrivals::Deterministic { per_s: f64::NAN },
            Arrivals::Gamma { per_s: 1.0, variation: -1.0 },
            Arrivals::OnOff { per_s: 1.0, on_s: 1.0, off_s: f64::INFINITY },
        ] {
            assert!(arrivals.check().is_err(), "{arrivals:?}");
        }
    }
}
