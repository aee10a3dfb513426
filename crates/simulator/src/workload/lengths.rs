//! Length distributions.
use super::arrivals::exponential;
use super::{BadParameter, Random, at_most};
use rand::Rng;
use rand_distr::LogNormal;

/// A distribution of lengths in tokens. Draws are rounded to whole tokens, at least 1, which slightly changes the
/// moments of short lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    Deterministic {
        tokens: u32,
    },
    Exponential {
        mean: f64,
    },
    /// Exponential with one of two means: `short` with probability `share_short`, otherwise `long`. More variable than
    /// exponential.
    Hyperexponential {
        short: f64,
        long: f64,
        share_short: f64,
    },
    /// Whole numbers from `min` to `max`, equally likely.
    Uniform {
        min: u32,
        max: u32,
    },
    /// Lognormal, specified by mean and coefficient of variation of the length itself.
    Lognormal {
        mean: f64,
        variation: f64,
    },
}

/// Maximum draw; longer sequences exceed any context.
const MAX_TOKENS: f64 = 16_777_216.0;

impl Lengths {
    /// A hyperexponential with this mean and coefficient of variation (at least 1) whose two parts carry equal load
    /// ("balanced means": Whitt, "Approximating a Point Process by a Renewal Process", Operations Research 30(1),
    /// 1982).
    pub fn balanced(mean: f64, variation: f64) -> Lengths {
        let squared = variation.max(1.0).powi(2);
        let share_short = 0.5 * (1.0 + ((squared - 1.0) / (squared + 1.0)).sqrt());
        Lengths::Hyperexponential {
            short: mean / (2.0 * share_short),
            long: mean / (2.0 * (1.0 - share_short)),
            share_short,
        }
    }

    pub(super) fn check(&self, parameter: &'static str) -> Result<(), BadParameter> {
        let length = |tokens: f64| at_most(parameter, tokens, MAX_TOKENS, "at most 16777216");
        match *self {
            Lengths::Deterministic { tokens: 0 } | Lengths::Uniform { min: 0, .. } => {
                Err(BadParameter::new(parameter, 0, "at least 1"))
            }
            Lengths::Deterministic { tokens } => length(tokens.into()),
            Lengths::Exponential { mean } => length(mean),
            Lengths::Hyperexponential { short, long, share_short } => {
                length(short)?;
                length(long)?;
                if (0.0..=1.0).contains(&share_short) {
                    Ok(())
                } else {
                    Err(BadParameter::new(parameter, share_short, "a share from 0 to 1"))
                }
            }
            Lengths::Uniform { min, max } if max < min => {
                Err(BadParameter::new(parameter, format!("{min} to {max}"), "the smaller number first"))
            }
            Lengths::Uniform { max, .. } => length(max.into()),
            Lengths::Lognormal { mean, variation } => {
                length(mean)?;
                at_most(parameter, variation, 1000.0, "a variation of at most 1000")
            }
        }
    }

    /// Mean and variance, before rounding.
    pub fn moments(&self) -> (f64, f64) {
        match *self {
            Lengths::Deterministic { tokens } => (f64::from(tokens), 0.0),
            Lengths::Exponential { mean } => (mean, mean * mean),
            Lengths::Hyperexponential { short, long, share_short } => {
                let mean = share_short * short + (1.0 - share_short) * long;
                let square = 2.0 * (share_short * short * short + (1.0 - share_short) * long * long);
                (mean, square - mean * mean)
            }
            Lengths::Uniform { min, max } => {
                let n = f64::from(max) - f64::from(min) + 1.0;
                ((f64::from(min) + f64::from(max)) / 2.0, (n * n - 1.0) / 12.0)
            }
            Lengths::Lognormal { mean, variation } => (mean, (mean * variation).powi(2)),
        }
    }

    /// Draws a length, before rounding. The parameters must have passed [`Lengths::check`].
    fn draw(&self, random: &mut Random) -> f64 {
        match *self {
            Lengths::Deterministic { tokens } => f64::from(tokens),
            Lengths::Exponential { mean } => mean * exponential(random),
            Lengths::Hyperexponential { short, long, share_short } => {
                let mean = if random.random::<f64>() < share_short { short } else { long };
                mean * exponential(random)
            }
            Lengths::Uniform { min, max } => f64::from(random.random_range(min..=max)),
            Lengths::Lognormal { mean, variation } => random
                .sample(LogNormal::from_mean_cv(mean, variation).expect("`check` demands positive numbers")),
        }
    }

    pub(super) fn draw_tokens(&self, random: &mut Random) -> u32 {
        self.draw(random).round().clamp(1.0, MAX_TOKENS) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::{mean, variance};

    #[test]
    fn moments() {
        for lengths in [
            Lengths::Deterministic { tokens: 100 },
            Lengths::Exponential { mean: 300.0 },
            Lengths::Hyperexponential { short: 100.0, long: 2000.0, share_short: 0.9 },
            Lengths::balanced(500.0, 2.0),
            Lengths::Uniform { min: 10, max: 1000 },
            Lengths::Lognormal { mean: 400.0, variation: 0.8 },
        ] {
            lengths.check("lengths").unwrap();
            let mut random = super::super::stream(17, 0);
            let (m, v) = lengths.moments();
            let n = 400_000;
            let drawn: Vec<f64> = (0..n).map(|_| lengths.draw(&mut random)).collect();
            let (mean, variance) = (mean(&drawn).unwrap(), variance(&drawn).unwrap());
            assert!((mean - m).abs() <= 4.0 * (v / f64::from(n)).sqrt(), "{lengths:?}: mean {mean}, not {m}");
            assert!((variance - v).abs() <= 0.05 * v, "{lengths:?}: variance {variance}, not {v}");
            let tokens: Vec<f64> = (0..n).map(|_| f64::from(lengths.draw_tokens(&mut random))).collect();
            let rounded = crate::statistics::mean(&tokens).unwrap();
            assert!((rounded / m - 1.0).abs() < 0.02, "{lengths:?}: {rounded} tokens, not {m}");
        }
    }

    #[test]
    fn balanced_has_the_variation_it_was_asked_for() {
        for variation in [1.0, 2.0, 5.0] {
            let (mean, variance) = Lengths::balanced(70.0, variation).moments();
            assert!((mean - 70.0).abs() < 1e-9);
            assert!((variance.sqrt() / mean - variation).abs() < 1e-9, "{variation}");
        }
    }

    #[test]
    fn parameters_that_make_no_distribution() {
        for lengths in [
            Lengths::Deterministic { tokens: 0 },
            Lengths::Exponential { mean: 0.0 },
            Lengths::Hyperexponential { short: 1.0, long: 1.0, share_short: 1.5 },
            Lengths::Uniform { min: 5, max: 4 },
            Lengths::Uniform { min: 0, max: 4 },
            Lengths::Lognormal { mean: f64::NAN, variation: 1.0 },
        ] {
            assert!(lengths.check("lengths").is_err(), "{lengths:?}");
        }
    }
}
