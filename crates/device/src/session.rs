//! Attention alone: combines the bookkeeping and the bytes of one cache, for callers that compute everything else
//! themselves. Any kind works over any backend. Only here can a caller run layers in the wrong order, so only here is
//! the order checked.
use crate::error::{BackendError, StepError};
use crate::layout::Layout;
use crate::pools::*;
use kvist_cache::*;

/// Which layers have run in this step. Checks that a step commits only after every layer has succeeded.
#[derive(Debug)]
struct Layers {
    layout: Layout,
    done: Vec<bool>,
}

impl Layers {
    fn new(layout: Layout) -> Self {
        let done = vec![false; layout.layers.len()];
        Layers { layout, done }
    }
    fn begin(&mut self) {
        self.done.fill(false);
    }
    /// Checks that this call may run now. A layer that owns K and V passes them once; a layer that borrows passes
    /// none and runs after its owner.
    fn admit(&self, call: &Attend<'_>) -> Result<(), BackendError> {
        let l = call.layer.0 as usize;
        let n_layers = self.done.len();
        let spec =
            self.layout.layers.get(l).ok_or(BackendError::UnknownLayer { layer: call.layer, n_layers })?;
        let owner = spec.owner.0 as usize;
        let good = if owner == l { call.kv.is_some() } else { call.kv.is_none() && self.done[owner] };
        if good && !self.done[l] { Ok(()) } else { Err(BackendError::LayerOrder(call.layer)) }
    }
    fn note(&mut self, layer: LayerId) {
        self.done[layer.0 as usize] = true;
    }
    /// Checks that every layer has run.
    fn complete(&self) -> Result<(), BackendError> {
        match self.done.iter().position(|done| !done) {
            None => Ok(()),
            Some(l) => Err(BackendError::LayerOrder(LayerId(l as u16))),
        }
    }
}

/// Compacts a cache: moves every sequence into one run, as far as shared cells permit. On `Err` the finished rounds
/// remain applied, and everything is still readable.
pub fn compact(cache: &mut Cache, pools: &mut dyn Pools, moves: &mut MovePlan) -> Result<(), BackendError> {
    while let Some(round) = Relocation::begin(cache, moves) {
        pools.relocate(round.moves())?;
        round.commit();
    }
    Ok(())
}

/// One cache: a kind, over the pools of a backend.
pub struct Session {
    pub cache: Cache,
    pools: Box<dyn Pools>,
    layers: Layers,
    plan: StepPlan,
    moves: MovePlan,
}

impl Session {
    pub fn new(cache: Cache, pools: Box<dyn Pools>, layout: Layout) -> Self {
        let layers = Layers::new(layout);
        Session { cache, pools, layers, plan: StepPlan::default(), moves: MovePlan::default() }
    }

    /// Begins a step. On `Err` nothing has changed.
    pub fn step(&mut self, request: &StepRequest<'_>) -> Result<SessionStep<'_>, StepError> {
        let mut step = Step::begin(&mut self.cache, request, &mut self.plan)?;
        self.layers.begin();
        self.pools.begin(step.with_reads())?;
        Ok(SessionStep { step, pools: &mut *self.pools, layers: &mut self.layers })
    }

    /// Dry run: whether the cache would accept this step.
    pub fn can_run(&mut self, request: &StepRequest<'_>) -> Result<(), Refused> {
        self.cache.can_run(request, &mut self.plan)
    }

    /// See [`compact`].
    pub fn compact(&mut self) -> Result<(), BackendError> {
        compact(&mut self.cache, &mut *self.pools, &mut self.moves)
    }

    pub fn pools(&self) -> &dyn Pools {
        &*self.pools
    }
}

/// A session's step in flight. Dropping it leaves the cache as it was.
#[must_use = "a step that is dropped is abandoned"]
pub struct SessionStep<'s> {
    step: Step<'s>,
    pools: &'s mut dyn Pools,
    layers: &'s mut Layers,
}

impl SessionStep<'_> {
    pub fn plan(&self) -> &StepPlan {
        self.step.plan()
    }
    /// Runs one layer.
    pub fn attend(&mut self, call: Attend<'_>) -> Result<(), BackendError> {
        self.layers.admit(&call)?;
        let layer = call.layer;
        self.pools.attend(self.step.plan(), call)?;
        self.layers.note(layer);
        Ok(())
    }
    /// Commits the step. Refused unless every layer has run.
    pub fn commit(self) -> Result<(), BackendError> {
        self.layers.complete()?;
        self.step.commit();
        Ok(())
    }
}
