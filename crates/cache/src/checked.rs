//! The step protocol checked at run time, for callers that cannot use lifetimes: C, Python, a registry.
use crate::cache::Cache;
use crate::ids::StepId;
use crate::plan::StepPlan;
use crate::request::{Refused, StepRequest};

/// Owns a cache and at most one step in flight.
pub struct CheckedCache {
    cache: Cache,
    plan: StepPlan,
    in_flight: bool,
}

/// A call at the wrong time. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// `plan` or `commit` was called without a step in flight.
    NoStep,
    /// `begin` or another operation was called while a step is in flight.
    StepInFlight,
    /// The call was allowed, but the cache refused the request.
    Refused(Refused),
}

impl std::fmt::Display for Misuse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Misuse::NoStep => f.write_str("no step is in flight: begin one first"),
            Misuse::StepInFlight => f.write_str("a step is in flight: commit or abort it first"),
            Misuse::Refused(refused) => refused.fmt(f),
        }
    }
}
impl std::error::Error for Misuse {}

impl CheckedCache {
    /// Takes ownership of the cache. No step is in flight.
    pub fn new(cache: Cache) -> Self {
        CheckedCache { cache, plan: StepPlan::default(), in_flight: false }
    }
    /// Chooses cells for the request and fills in the reads. A refusal changes nothing and leaves no step in flight.
    pub fn begin(&mut self, request: &StepRequest<'_>) -> Result<StepId, Misuse> {
        self.cache()?;
        self.cache.prepare(request, &mut self.plan).map_err(Misuse::Refused)?;
        self.cache.fill_reads(&mut self.plan);
        self.in_flight = true;
        Ok(self.plan.id())
    }
    /// The plan of the step in flight, reads included.
    pub fn plan(&self) -> Result<&StepPlan, Misuse> {
        if self.in_flight { Ok(&self.plan) } else { Err(Misuse::NoStep) }
    }
    /// Applies the step in flight. Call it after every layer has written and read.
    pub fn commit(&mut self) -> Result<(), Misuse> {
        self.plan()?;
        self.cache.apply(&self.plan);
        self.in_flight = false;
        Ok(())
    }
    /// Abandons the step in flight, if any.
    pub fn abort(&mut self) {
        self.in_flight = false;
    }
    /// The cache, if no step is in flight. All other operations on the cache go through here.
    pub fn cache(&mut self) -> Result<&mut Cache, Misuse> {
        if self.in_flight { Err(Misuse::StepInFlight) } else { Ok(&mut self.cache) }
    }
}
