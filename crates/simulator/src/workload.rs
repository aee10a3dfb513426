//! Synthetic requests: arrivals, lengths and contents drawn from distributions.
//!
//! A [`Workload`] describes the requests; [`Workload::generate`] draws them. The same description and seed give the
//! same requests on any number of threads and whatever else is drawn, because each aspect (arrivals, lengths,
//! contents) has its own stream of random numbers. A seed is required, and parameters that form no valid distribution
//! are refused.
mod arrivals;
mod contents;
mod lengths;
mod random;
mod spec;

pub use arrivals::Arrivals;
pub use contents::{Agents, Chats, Contents, Prefixes, Zipf};
pub use lengths::Lengths;
pub use random::Random;
pub use spec::BadSpec;

use crate::request::Request;
use contents::Weaver;

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

/// Returns an error unless `value` is finite, above 0 and at most `most`; `expected` describes that limit.
fn at_most(
    parameter: &'static str,
    value: f64,
    most: f64,
    expected: &'static str,
) -> Result<(), BadParameter> {
    positive(parameter, value)?;
    if value <= most { Ok(()) } else { Err(BadParameter::new(parameter, value, expected)) }
}

/// Maximum requests of a workload; they take 12 GB.
const MOST_REQUESTS: usize = 100_000_000;

/// Random number streams, one per aspect, so that changing one aspect leaves the others as they are.
const ARRIVALS: u64 = 0;
const PROMPTS: u64 = 1;
const OUTPUTS: u64 = 2;
const CONTENTS: u64 = 3;

impl Workload {
    /// Generates the requests of `seed` in order of arrival, with ids from 0. Follow-ups come after their parents.
    ///
    /// # Errors
    /// [`BadParameter`]
    pub fn generate(&self, seed: u64) -> Result<Vec<Request>, BadParameter> {
        if self.n_requests > MOST_REQUESTS {
            let expected = "at most 100000000";
            return Err(BadParameter::new("the number of requests", self.n_requests, expected));
        }
        self.arrivals.check()?;
        self.prompt_tokens.check("prompt tokens")?;
        self.output_tokens.check("output tokens")?;
        let mut arrivals = self.arrivals.times(Random::new(seed, ARRIVALS));
        let mut prompts = Random::new(seed, PROMPTS);
        let mut outputs = Random::new(seed, OUTPUTS);
        let mut weaver = Weaver::new(&self.contents, Random::new(seed, CONTENTS))?;
        let mut requests = Vec::new();
        while requests.len() < self.n_requests {
            let arrival_ns = arrivals.next_ns();
            if arrival_ns > i64::MAX as u64 {
                let found = format!("past 292 years, after {} requests", requests.len());
                let expected = "times below 2^63 ns: give a higher rate, or fewer requests";
                return Err(BadParameter::new("the time of arrival", found, expected));
            }
            weaver.weave(
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
