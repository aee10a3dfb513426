//! The step protocol checked at run time, for callers that cannot use lifetimes: C, Python, a registry.
use crate::cache::Cache;
use crate::ids::{LayerId, StepId};
use crate::layer_order::{LayerError, LayerOrder};
use crate::moves::MovePlan;
use crate::plan::StepPlan;
use crate::request::{Refused, StepRequest};
use crate::step::{Kept, Step, TREE_BY_PATH};

/// Owns a cache and at most one step in flight. The caller computes attention itself; the cache checks the order of
/// steps and layers.
pub struct CheckedCache {
    cache: Cache,
    plan: StepPlan,
    layers: LayerOrder,
    in_flight: bool,
}

/// A call at the wrong time. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// `plan`, `layer` or `commit` was called without a step in flight.
    NoStep,
    /// `begin` or another operation was called while a step is in flight.
    StepInFlight,
    /// A layer ran out of order, or a step was committed before every layer had run. The step is still in flight.
    Layer(LayerError),
    /// The call was allowed, but the cache refused the request.
    Refused(Refused),
}

impl std::fmt::Display for Misuse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Misuse::NoStep => f.write_str("no step is in flight: begin one first"),
            Misuse::StepInFlight => f.write_str("a step is in flight: commit or abort it first"),
            Misuse::Layer(layer) => layer.fmt(f),
            Misuse::Refused(refused) => refused.fmt(f),
        }
    }
}
impl std::error::Error for Misuse {}

impl CheckedCache {
    /// Takes ownership of the cache of a model with these layers. No step is in flight.
    pub fn new(cache: Cache, layers: LayerOrder) -> Self {
        CheckedCache { cache, plan: StepPlan::default(), layers, in_flight: false }
    }
    /// Chooses cells for the request and fills in the reads. A refusal changes nothing and leaves no step in flight.
    pub fn begin(&mut self, request: &StepRequest<'_>) -> Result<StepId, Misuse> {
        self.cache()?;
        self.cache.prepare(request, &mut self.plan).map_err(Misuse::Refused)?;
        self.cache.fill_reads(&mut self.plan);
        self.layers.begin();
        self.in_flight = true;
        Ok(self.plan.id())
    }
    /// The plan of the step in flight, reads included.
    pub fn plan(&self) -> Result<&StepPlan, Misuse> {
        if self.in_flight { Ok(&self.plan) } else { Err(Misuse::NoStep) }
    }
    /// The plan of the step in flight, with its block tables: see [`Step::with_tables`].
    pub fn with_tables(&mut self) -> Result<&StepPlan, Misuse> {
        self.plan()?;
        self.cache.fill_tables(&mut self.plan);
        Ok(&self.plan)
    }
    /// Runs one layer of the step in flight: calls `run` with the plan if the layer may run now. `has_kv` says whether the
    /// layer writes K and V. The layer counts as run if `run` succeeds; otherwise it can be run again.
    pub fn layer<E: From<Misuse>>(
        &mut self,
        layer: LayerId,
        has_kv: bool,
        run: impl FnOnce(&StepPlan) -> Result<(), E>,
    ) -> Result<(), E> {
        let plan = self.plan()?;
        self.layers.check(layer, has_kv).map_err(Misuse::Layer)?;
        run(plan)?;
        self.layers.ran(layer);
        Ok(())
    }
    /// Applies the step in flight: the new tokens become part of their sequences. Refused unless every layer has run;
    /// the step is still in flight then. Refused also for draft trees in caches whose nodes do not outlive their step: use
    /// [`commit_kept`](Self::commit_kept), which can keep a path.
    pub fn commit(&mut self) -> Result<(), Misuse> {
        let has_trees = self.plan()?.spans.list.iter().any(|span| span.parents().is_some());
        if has_trees && self.cache.trees().is_none() {
            return Err(Misuse::Refused(Refused::Unsupported(TREE_BY_PATH)));
        }
        self.complete_step()?.commit();
        self.in_flight = false;
        Ok(())
    }
    /// Like [`commit`](Self::commit), but every span keeps only what `kept` says: see [`Step::commit_kept`]. The step is
    /// still in flight after a refusal.
    pub fn commit_kept(&mut self, kept: &[Kept<'_>]) -> Result<(), Misuse> {
        self.complete_step()?.commit_kept(kept).map_err(Misuse::Refused)?;
        self.in_flight = false;
        Ok(())
    }
    /// Writes the copies that a [`commit_kept`](Self::commit_kept) of `kept` needs to `moves`: see [`Step::kept_moves`].
    /// The step is still in flight afterwards.
    pub fn kept_moves(&mut self, kept: &[Kept<'_>], moves: &mut MovePlan) -> Result<(), Misuse> {
        self.complete_step()?.kept_moves(kept, moves).map_err(Misuse::Refused)
    }
    /// The step in flight, if every layer has run.
    fn complete_step(&mut self) -> Result<Step<'_>, Misuse> {
        self.plan()?;
        self.layers.complete().map_err(Misuse::Layer)?;
        Step::of_plan(&mut self.cache, &mut self.plan).ok_or(Misuse::NoStep)
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
