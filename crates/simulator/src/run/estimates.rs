//! Estimates of output lengths with errors, for policies that weigh work. Between an oracle and the predictions of a server
//! lies a predictor that is right on average: this is one.
use crate::request::Request;
use crate::workload::{ESTIMATES, stream};
use kvist_scheduler::{RequestId, Truth};
use rand::Rng;
use rand_distr::LogNormal;
use std::sync::Arc;

/// How wrong estimates are: the true length times a log-normal factor of mean 1, drawn for each request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthError {
    /// Coefficient of variation of the factor: its standard deviation, because its mean is 1. 0 is the truth.
    pub variation: f64,
    pub seed: u64,
}

impl LengthError {
    /// The largest coefficient of variation.
    pub const MAX_VARIATION: f64 = 1000.0;

    /// Whether `variation` is a number from 0 to [`MAX_VARIATION`](Self::MAX_VARIATION).
    pub fn is_valid(variation: f64) -> bool {
        (0.0..=LengthError::MAX_VARIATION).contains(&variation)
    }
}

/// What a scheduler that is told lengths gets: the true ones, or estimates. By list index.
pub(super) struct Lengths(Arc<[u32]>);

impl Lengths {
    /// The lengths of `requests`, with this error. The draws belong to a seed and a place in the list, so they do not depend on
    /// what is scheduled.
    pub fn of(requests: &[Request], error: Option<LengthError>) -> Lengths {
        let truth = requests.iter().map(|request| request.output_tokens);
        let Some(error) = error else { return Lengths(truth.collect()) };
        // The program refuses an error that is not valid; here it is ignored.
        let Ok(factor) = LogNormal::from_mean_cv(1.0, error.variation) else {
            return Lengths(truth.collect());
        };
        let mut random = stream(error.seed, ESTIMATES);
        let estimates = truth.map(|tokens| (f64::from(tokens) * random.sample(factor)).round());
        Lengths(estimates.map(|tokens| tokens.clamp(1.0, f64::from(u32::MAX)) as u32).collect())
    }
}

impl Truth for Lengths {
    fn output_tokens(&self, id: RequestId) -> u32 {
        self.0[id.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::{mean, variance};

    #[test]
    fn errors_have_the_variation_that_was_asked_for() {
        let requests: Vec<Request> = (0..200_000).map(|id| Request::new(id, 0, 1, 10_000)).collect();
        let of = |error: Option<LengthError>| Lengths::of(&requests, error).0;
        let error = |variation, seed| Some(LengthError { variation, seed });
        assert!(of(None) == of(error(0.0, 1)) && of(None).iter().all(|tokens| *tokens == 10_000));
        for variation in [0.2, 1.0] {
            let factors: Vec<f64> =
                of(error(variation, 7)).iter().map(|tokens| f64::from(*tokens) / 10_000.0).collect();
            let (mean, spread) = (mean(&factors).unwrap(), variance(&factors).unwrap().sqrt());
            assert!((mean - 1.0).abs() < 0.01 * (1.0 + variation), "cv {variation}: mean {mean}");
            assert!((spread / variation - 1.0).abs() < 0.05, "cv {variation}: found {spread}");
        }
        assert!(of(error(0.5, 7)) == of(error(0.5, 7)) && of(error(0.5, 7)) != of(error(0.5, 8)));
    }
}
