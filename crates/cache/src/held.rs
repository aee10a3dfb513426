//! The step protocol checked at run time, for callers without lifetimes: C, Python, a registry.
use crate::cache::Cache;
use crate::ids::StepId;
use crate::plan::StepPlan;
use crate::request::{Refused, StepRequest};

/// Owns a cache and at most one step in flight.
pub struct Held {
    cache: Cache,
    plan: StepPlan,
    in_flight: bool,
}

/// A verb that came at the wrong time. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// `plan` or `commit` without a step.
    NoStep,
    /// A verb, or a second `begin`, while a step is in flight.
    StepInFlight,
    /// It came at the right time, and the cache refused it.
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

impl Held {
    /// Takes the cache, idle.
    pub fn new(cache: Cache) -> Self {
        Held { cache, plan: StepPlan::default(), in_flight: false }
    }
    /// Place the request and fill its reads. A refusal changes nothing, and no step is in flight after it.
    pub fn begin(&mut self, request: &StepRequest<'_>) -> Result<StepId, Misuse> {
        self.idle()?;
        self.cache.prepare(request, &mut self.plan).map_err(Misuse::Refused)?;
        self.cache.fill_reads(&mut self.plan);
        self.in_flight = true;
        Ok(self.plan.id())
    }
    /// The step in flight, reads included.
    pub fn plan(&self) -> Result<&StepPlan, Misuse> {
        if self.in_flight { Ok(&self.plan) } else { Err(Misuse::NoStep) }
    }
    /// Every layer has written and read: make the step in flight true.
    pub fn commit(&mut self) -> Result<(), Misuse> {
        self.plan()?;
        self.cache.apply(&self.plan);
        self.in_flight = false;
        Ok(())
    }
    /// Abandon the step in flight, if there is one.
    pub fn abort(&mut self) {
        self.in_flight = false;
    }
    /// The cache between steps: every verb of every face goes through here.
    pub fn idle(&mut self) -> Result<&mut Cache, Misuse> {
        if self.in_flight { Err(Misuse::StepInFlight) } else { Ok(&mut self.cache) }
    }
}
