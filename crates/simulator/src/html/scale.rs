//! Axis scales, and how quantities are formatted.

/// The unit of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    /// A plain number.
    Count,
    /// 1 is 100%.
    Percent,
}

impl Unit {
    /// Formats a value with at most three significant digits.
    pub(super) fn show(self, value: f64) -> String {
        match self {
            Unit::Percent => format!("{}%", digits(value * 100.0)),
            Unit::Count => {
                let (value, suffix) = match value.abs() {
                    v if v >= 1e9 => (value / 1e9, "G"),
                    v if v >= 1e6 => (value / 1e6, "M"),
                    v if v >= 1e4 => (value / 1e3, "k"),
                    _ => (value, ""),
                };
                digits(value) + suffix
            }
            Unit::Seconds => {
                let (value, suffix) = match value.abs() {
                    0.0 => (0.0, " s"),
                    v if v < 1e-6 => (value * 1e9, " ns"),
                    v if v < 1e-3 => (value * 1e6, " µs"),
                    v if v < 1.0 => (value * 1e3, " ms"),
                    v if v < 60.0 => (value, " s"),
                    v if v < 36_000.0 => return clock(value),
                    _ => (value / 3600.0, " h"),
                };
                digits(value) + suffix
            }
        }
    }
}

/// Minutes, with hours or seconds if nonzero: `8 min 20 s`.
fn clock(value: f64) -> String {
    let (sign, all) = (if value < 0.0 { "-" } else { "" }, value.abs().round() as u64);
    let parts = [(all / 3600, "h"), (all / 60 % 60, "min"), (all % 60, "s")];
    // Next to hours, seconds are omitted.
    let shown = parts.iter().skip_while(|(n, _)| *n == 0).take(2).filter(|(n, _)| *n > 0);
    let shown: Vec<String> = shown.map(|(n, unit)| format!("{n} {unit}")).collect();
    format!("{sign}{}", shown.join(" "))
}

/// Three significant digits, without trailing zeros after the decimal point.
fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        v if v >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_string() } else { text }
}

/// Maps a range of quantities to a position between 0 and 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    pub unit: Unit,
}

impl Scale {
    /// A linear axis from `low` to `high` or slightly further, to the next tick. If one end is not finite, the axis is
    /// built from the other.
    pub fn linear(low: f64, high: f64, unit: Unit) -> Scale {
        let (low, high) = finite(low, high, 0.0);
        let high = if high > low { high } else { low + low.abs().max(1.0) };
        // A share ends at 100%.
        let high = if unit == Unit::Percent && high > 0.8 && high <= 1.0 { 1.0 } else { high };
        Scale { low, high, is_log: false, unit }
    }

    /// A logarithmic axis. Both ends must be above 0.
    pub fn log(low: f64, high: f64, unit: Unit) -> Scale {
        let (low, high) = finite(low, high, 1.0);
        let low = low.max(1e-12);
        let (low, high) = if high > low * 1.01 { (low, high) } else { (low / 2.0, low * 2.0) };
        Scale { low, high, is_log: true, unit }
    }

    /// Position from 0 to 1 within the range; values outside are clamped.
    pub fn at(&self, value: f64) -> f64 {
        let part = if self.is_log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) }
    }

    /// About `n` round tick values within the range.
    pub fn ticks(&self, n: usize) -> Vec<f64> {
        if self.is_log {
            let decades = (self.high / self.low).log10();
            let steps: &[f64] = if decades <= 1.5 {
                &[1.0, 2.0, 3.0, 5.0]
            } else if decades <= 3.0 {
                &[1.0, 3.0]
            } else {
                &[1.0]
            };
            // With many decades, some get no tick.
            let every = ((decades / n as f64).ceil() as i32).max(1);
            let first = self.low.log10().floor() as i32;
            let last = self.high.log10().ceil() as i32;
            let decades = (first..=last).filter(|d| d.rem_euclid(every) == 0);
            let ticks = decades.flat_map(|d| steps.iter().map(move |step| step * 10f64.powi(d)));
            let is_time = self.unit == Unit::Seconds && self.high > MINUTE;
            let ticks = ticks.filter(|t| !is_time || *t < MINUTE);
            let ticks = ticks.chain(round_times(is_time, least_ratio(steps, every)));
            let ticks: Vec<f64> =
                ticks.filter(|t| (self.low * 0.999..=self.high * 1.001).contains(t)).collect();
            // A range too small to contain three such ticks is almost linear, so linear ticks are used.
            if ticks.len() >= 3 { ticks } else { Scale { is_log: false, ..*self }.ticks(n.min(5)) }
        } else {
            let step = (self.high - self.low) / n as f64;
            let step = match self.unit {
                Unit::Seconds => round_time(step),
                _ => round_step(step),
            };
            let first = (self.low / step).ceil() as i64;
            let last = (self.high / step * 1.000_001).floor() as i64;
            (first..=last).take(MAX_TICKS).map(|i| i as f64 * step).collect()
        }
    }
}

/// Maximum number of ticks. It also bounds the loop if the range is so small that adding a step has no effect.
const MAX_TICKS: usize = 24;

/// Replaces a non-finite end by the other end, or both by `otherwise`.
fn finite(low: f64, high: f64, otherwise: f64) -> (f64, f64) {
    match (low.is_finite(), high.is_finite()) {
        (true, true) => (low, high),
        (true, false) => (low, low),
        (false, true) => (high, high),
        (false, false) => (otherwise, otherwise),
    }
}

const MINUTE: f64 = 60.0;
/// Round times in seconds, as on a clock.
const TIMES: [f64; 18] = [
    15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0, 7200.0, 10_800.0, 18_000.0,
    21_600.0, 36_000.0, 43_200.0, 86_400.0, 172_800.0,
];

/// The next round value of at least `step`. Beyond ten seconds it is a clock time, where a decimal value would be 8
/// min 20 s.
fn round_time(step: f64) -> f64 {
    let round = TIMES.into_iter().find(|time| *time >= step * 0.999_999).filter(|_| step > 10.0);
    round.unwrap_or_else(|| round_step(step))
}

/// The smallest ratio of two neighbouring ticks, for ticks at `steps` in every decade of `every`.
fn least_ratio(steps: &[f64], every: i32) -> f64 {
    let next = steps.iter().skip(1).copied().chain([10f64.powi(every)]);
    steps.iter().zip(next).map(|(a, b)| b / a).fold(f64::INFINITY, f64::min)
}

/// Clock times from a minute on, at least about `ratio` apart.
fn round_times(wanted: bool, ratio: f64) -> impl Iterator<Item = f64> {
    const LOG: [f64; 9] = [60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 10_800.0, 36_000.0, 86_400.0];
    let mut last = 0.0;
    LOG.into_iter().filter(move |time| {
        // Clock times are not powers of ten, so they may be a little closer.
        let far = wanted && *time >= last * ratio * 0.6;
        if far {
            last = *time;
        }
        far
    })
}

/// 1, 2, 2.5 or 5 times a power of ten, at least `step`.
fn round_step(step: f64) -> f64 {
    let magnitude = 10f64.powf(step.log10().floor());
    let round = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|r| r * magnitude >= step * 0.999_999);
    round.unwrap_or(10.0) * magnitude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written() {
        for (unit, value, text) in [
            (Unit::Seconds, 0.0, "0 s"),
            (Unit::Seconds, 0.000_5, "500 µs"),
            (Unit::Seconds, 0.0123, "12.3 ms"),
            (Unit::Seconds, 1.5, "1.5 s"),
            (Unit::Seconds, 59.3, "59.3 s"),
            (Unit::Seconds, 83.24, "1 min 23 s"),
            (Unit::Seconds, 500.0, "8 min 20 s"),
            (Unit::Seconds, 1800.0, "30 min"),
            (Unit::Seconds, 3599.7, "1 h"),
            (Unit::Seconds, 9_045.0, "2 h 30 min"),
            (Unit::Seconds, 36_000.0, "10 h"),
            (Unit::Count, 9_999.0, "9999"),
            (Unit::Count, 10_000.0, "10k"),
            (Unit::Count, 2_500_000.0, "2.5M"),
            (Unit::Percent, 0.3664, "36.6%"),
            (Unit::Percent, 1.0, "100%"),
        ] {
            assert_eq!(unit.show(value), text);
        }
    }

    #[test]
    fn ticks_are_round_and_few() {
        let close =
            |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9);
        let linear = Scale::linear(0.0, 0.43, Unit::Percent).ticks(5);
        assert!(close(&linear, &[0.0, 0.1, 0.2, 0.3, 0.4]), "{linear:?}");
        let log = Scale::log(30.0, 200_000.0, Unit::Count).ticks(8);
        assert!(close(&log, &[100.0, 1000.0, 10_000.0, 100_000.0]), "{log:?}");
        for (low, high) in [(0.0, 1e-9), (5.0, 5.0), (0.0, 1e18), (3.0, 4.0)] {
            for scale in [Scale::linear(low, high, Unit::Count), Scale::log(low, high, Unit::Count)] {
                let ticks = scale.ticks(6);
                assert!((1..=24).contains(&ticks.len()), "{scale:?}: {ticks:?}");
                assert!(ticks.iter().all(|t| scale.at(*t).is_finite()));
            }
        }
    }

    /// Regression test: an hour used to be divided at 500 s, 1,000 s, 1,500 s.
    #[test]
    fn minutes_are_divided_as_clocks_do() {
        let shown = |scale: Scale, n| {
            scale.ticks(n).into_iter().map(|tick| scale.unit.show(tick)).collect::<Vec<_>>().join(", ")
        };
        let hour = Scale::linear(0.0, 3600.0, Unit::Seconds);
        assert_eq!(shown(hour, 7), "0 s, 10 min, 20 min, 30 min, 40 min, 50 min, 1 h");
        let minutes = Scale::linear(0.0, 700.0, Unit::Seconds);
        assert_eq!(shown(minutes, 10), "0 s, 2 min, 4 min, 6 min, 8 min, 10 min");
        assert_eq!(shown(Scale::linear(0.0, 40.0, Unit::Seconds), 5), "0 s, 10 s, 20 s, 30 s, 40 s");
        let log = Scale::log(0.5, 4000.0, Unit::Seconds);
        assert_eq!(shown(log, 6), "1 s, 10 s, 1 min, 10 min, 1 h");
        assert_eq!(shown(Scale::log(20.0, 700.0, Unit::Seconds), 6), "30 s, 1 min, 2 min, 5 min, 10 min");
    }

    /// Odd input gives neither NaN nor an endless loop.
    #[test]
    fn what_is_no_quantity() {
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1.0, 5e-324, 1e300, -1e300];
        for low in odd {
            for high in odd {
                for scale in [Scale::linear(low, high, Unit::Count), Scale::log(low, high, Unit::Count)] {
                    assert!(scale.ticks(6).len() <= 100, "{scale:?}");
                    for value in odd {
                        assert!((0.0..=1.0).contains(&scale.at(value)), "{scale:?} at {value}");
                    }
                }
            }
        }
    }

    #[test]
    fn pixels() {
        let linear = Scale::linear(0.0, 10.0, Unit::Count);
        assert_eq!([-1.0, 0.0, 5.0, 10.0, 11.0].map(|v| linear.at(v)), [0.0, 0.0, 0.5, 1.0, 1.0]);
        let log = Scale::log(1.0, 100.0, Unit::Count);
        assert!(
            [(0.0, 0.0), (10.0, 0.5), (100.0, 1.0)].iter().all(|(v, at)| (log.at(*v) - at).abs() < 1e-12)
        );
    }
}
