//! Means, percentiles and confidence intervals.
//!
//! Percentiles and histograms do not depend on the order of the values. Undefined figures are `None`: an empty set has
//! no mean, a single value has no interval.
mod histogram;

pub use histogram::Histogram;

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

/// Summary of a set of values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub n: u64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// Summarizes `values` and sorts them in place. `None` if there are none.
    pub fn of(values: &mut [f64]) -> Option<Spread> {
        values.sort_unstable_by(f64::total_cmp);
        Some(Spread {
            n: values.len() as u64,
            mean: mean(values)?,
            p50: percentile(values, 0.5)?,
            p90: percentile(values, 0.9)?,
            p99: percentile(values, 0.99)?,
            max: *values.last()?,
        })
    }
}

/// `None` if there are no values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Sample variance (n − 1). `None` for fewer than two values.
pub fn variance(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    Some(values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64)
}

/// The value below which a fraction `p` of `sorted` lies, interpolated between neighbours (Hyndman and Fan, "Sample
/// Quantiles in Statistical Packages", The American Statistician 50(4), 1996, type 7). `None` if there are no values.
pub fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = p.clamp(0.0, 1.0) * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(low + (high - low) * at.fract())
}

/// A mean with its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    pub n: u64,
    pub mean: f64,
    /// The 95% confidence interval is mean ± this. `None` for a single value.
    pub half_width: Option<f64>,
}

impl Estimate {
    /// The mean of independent `values`, one per seed, with a Student t interval ("The Probable Error of a Mean",
    /// Biometrika 6(1), 1908). `None` if there are no values.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let half_width = variance(values).map(|variance| {
            student_t(0.975, (values.len() - 1) as f64) * (variance / values.len() as f64).sqrt()
        });
        Some(Estimate { n: values.len() as u64, mean: mean(values)?, half_width })
    }

    /// Returns whether `value` lies in the interval; false if there is no interval.
    pub fn contains(&self, value: f64) -> bool {
        self.half_width.is_some_and(|half| (value - self.mean).abs() <= half)
    }
}

/// The `p` quantile of Student's t distribution with `freedom` degrees of freedom, at least 1.
fn student_t(p: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).expect("at least one degree of freedom").inverse_cdf(p)
}

/// The cumulative distribution of `sorted` as at most `n_points` points (value, share at or below), for a plot.
pub(crate) fn cdf(sorted: &[f64], n_points: usize) -> Vec<(f64, f64)> {
    let n = sorted.len();
    let n_points = n_points.min(n);
    (1..=n_points)
        .map(|i| {
            let at = i * n / n_points;
            (sorted[at - 1], at as f64 / n as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_as_numpy_has_them() {
        let sorted = [1.0, 2.0, 4.0, 8.0, 16.0];
        for (p, value) in [(0.0, 1.0), (0.5, 4.0), (0.9, 12.8), (0.99, 15.68), (1.0, 16.0), (0.1, 1.4)] {
            assert!((percentile(&sorted, p).unwrap() - value).abs() < 1e-12, "p{p}");
        }
        assert_eq!(percentile(&[], 0.5), None);
        assert_eq!(percentile(&[3.0], 0.99), Some(3.0));
        assert_eq!(mean(&[]), None);
        assert_eq!(variance(&[1.0]), None);
        assert_eq!(variance(&[1.0, 3.0]), Some(2.0));
    }

    /// Values from textbook tables.
    #[test]
    fn student() {
        for (p, freedom, t) in [
            (0.975, 1.0, 12.7062),
            (0.975, 4.0, 2.7764),
            (0.975, 9.0, 2.2622),
            (0.975, 30.0, 2.0423),
            (0.975, 1000.0, 1.9623),
            (0.95, 10.0, 1.8125),
            (0.995, 2.0, 9.9248),
            (0.025, 9.0, -2.2622),
            (0.5, 3.0, 0.0),
        ] {
            assert!((student_t(p, freedom) - t).abs() < 1e-4, "{p} {freedom}: {}", student_t(p, freedom));
        }
    }

    #[test]
    fn intervals() {
        let five = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!(five.mean, 3.0);
        assert!((five.half_width.unwrap() - 2.7764 * (2.5f64 / 5.0).sqrt()).abs() < 1e-3);
        assert!(five.contains(1.1) && !five.contains(0.9));
        let one = Estimate::of(&[1.0]).unwrap();
        assert_eq!(one.half_width, None);
        assert!(!one.contains(1.0));
        assert_eq!(Estimate::of(&[]), None);
    }

    #[test]
    fn distribution_functions_end_at_one() {
        let sorted: Vec<f64> = (1..=1000).map(f64::from).collect();
        let points = cdf(&sorted, 10);
        assert_eq!(points.len(), 10);
        assert_eq!(points[0], (100.0, 0.1));
        assert_eq!(points[9], (1000.0, 1.0));
        assert_eq!(cdf(&sorted[..3], 10).len(), 3);
        assert!(cdf(&[], 10).is_empty());
    }
}
