//! Synthetic requests: arrivals, lengths and contents drawn from distributions.
//!
//! A [`Workload`] describes the requests; [`Workload::generate`] draws them. The same description and seed give the
//! same requests on any number of threads and whatever else is drawn, because each aspect (arrivals, lengths,
//! contents) has its own stream of random numbers. A seed is required, and parameters that form no valid distribution
//! are refused.
mod arrivals;
mod contents;
mod lengths;
mod spec;

pub use arrivals::Arrivals;
pub use contents::{Agents, Chats, Contents, Prefixes};
pub use lengths::Lengths;
pub use spec::BadSpec;
pub(crate) use spec::Spec;

use crate::request::Request;
use contents::RequestGenerator;
use rand::SeedableRng;

/// Describes a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Number of requests to generate. The last chat or agent tree is cut off at this number, so its last request may
    /// lack follow-ups.
    pub n_requests: usize,
    pub arrivals: Arrivals,
    /// Prompt tokens of a request; in a chat, the tokens the user adds in one turn.
    pub prompt_tokens: Lengths,
    pub output_tokens: Lengths,
    pub contents: Contents,
}

/// A parameter that forms no valid distribution.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{parameter} is {found}: expected {expected}")]
pub struct BadParameter {
    pub parameter: &'static str,
    pub found: String,
    pub expected: &'static str,
}

impl BadParameter {
    fn new(parameter: &'static str, found: impl ToString, expected: &'static str) -> BadParameter {
        BadParameter { parameter, found: found.to_string(), expected }
    }
}

/// Returns an error unless `value` is finite and above 0.
fn positive(parameter: &'static str, value: f64) -> Result<(), BadParameter> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(BadParameter::new(parameter, value, "a finite number above 0"))
    }
}

/// Returns an error unless `value` is finite, above 0 and at most `max`; `expected` describes that limit.
fn at_most(
    parameter: &'static str,
    value: f64,
    max: f64,
    expected: &'static str,
) -> Result<(), BadParameter> {
    positive(parameter, value)?;
    if value <= max { Ok(()) } else { Err(BadParameter::new(parameter, value, expected)) }
}

/// Maximum requests of a workload; they take 12 GB.
const MAX_REQUESTS: usize = 100_000_000;

/// The generator of all draws: xoshiro256++ (Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", ACM
/// TOMS 47(4), 2021). Its output does not depend on the machine.
type Random = rand_xoshiro::Xoshiro256PlusPlus;

/// Random number streams, one per aspect, so that changing one aspect leaves the others as they are.
const ARRIVALS: usize = 0;
const PROMPTS: usize = 1;
const OUTPUTS: usize = 2;
const CONTENTS: usize = 3;
/// Errors of estimated lengths, which belong to a run.
pub(crate) const ESTIMATES: usize = 4;

/// Stream `number` of `seed`. The streams of a seed are 2^128 draws apart, so they never overlap.
pub(crate) fn stream(seed: u64, number: usize) -> Random {
    let mut random = Random::seed_from_u64(seed);
    (0..number).for_each(|_| random.jump());
    random
}

impl Workload {
    /// Generates the requests of `seed` in order of arrival, with ids from 0. Follow-ups come after their parents.
    ///
    /// # Errors
    /// [`BadParameter`]
    pub fn generate(&self, seed: u64) -> Result<Vec<Request>, BadParameter> {
        if self.n_requests > MAX_REQUESTS {
            let expected = "at most 100000000";
            return Err(BadParameter::new("the number of requests", self.n_requests, expected));
        }
        self.arrivals.check()?;
        self.prompt_tokens.check("prompt tokens")?;
        self.output_tokens.check("output tokens")?;
        let mut arrivals = self.arrivals.times(stream(seed, ARRIVALS));
        let mut prompts = stream(seed, PROMPTS);
        let mut outputs = stream(seed, OUTPUTS);
        let mut contents = RequestGenerator::new(&self.contents, stream(seed, CONTENTS))?;
        let mut requests = Vec::new();
        while requests.len() < self.n_requests {
            let arrival_ns = arrivals.next_ns();
            if arrival_ns > i64::MAX as u64 {
                let found = format!("past 292 years, after {} requests", requests.len());
                let expected = "times below 2^63 ns: give a higher rate, or fewer requests";
                return Err(BadParameter::new("the time of arrival", found, expected));
            }
            contents.generate(
                arrival_ns,
                &mut || self.prompt_tokens.draw_tokens(&mut prompts),
                &mut || self.output_tokens.draw_tokens(&mut outputs),
                &mut requests,
            );
        }
        // Follow-ups come after their parents, so truncation never removes the parent of a remaining request.
        requests.truncate(self.n_requests);
        Ok(requests)
    }
}

#[cfg(test)]
mod tests {
    use super::stream;
    use rand::RngCore;

    #[test]
    fn streams_differ_and_repeat() {
        let first = |seed, number| {
            let mut random = stream(seed, number);
            [(); 3].map(|()| random.next_u64())
        };
        assert_eq!(first(1, 2), first(1, 2));
        let mut all: Vec<_> =
            (0..50).flat_map(|seed| (0..4).map(move |number| first(seed, number))).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 200);
    }
}
