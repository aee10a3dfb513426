//! Combines the bookkeeping and the bytes of one cache at run time: any kind over any backend.
use crate::error::{BackendError, StepError};
use crate::layout::Layout;
use crate::pools::*;
use kvist_cache::*;

/// Which layers have run in this step. Checks that a step commits only after every layer has succeeded.
#[derive(Debug)]
pub struct Layers {
    layout: Layout,
    done: Vec<bool>,
}

impl Layers {
    pub fn new(layout: Layout) -> Self {
        let done = vec![false; layout.layers.len()];
        Layers { layout, done }
    }
    pub fn begin(&mut self) {
        self.done.fill(false);
    }
    /// Checks that this call may run now. A layer that owns K and V passes them once; a layer that borrows passes
    /// none and runs after its owner.
    pub fn admit(&self, call: &Attend<'_>) -> Result<(), BackendError> {
        let l = call.layer.0 as usize;
        let n_layers = self.done.len();
        let spec =
            self.layout.layers.get(l).ok_or(BackendError::UnknownLayer { layer: call.layer, n_layers })?;
        let owner = spec.owner.0 as usize;
        let good = if owner == l { call.kv.is_some() } else { call.kv.is_none() && self.done[owner] };
        if good && !self.done[l] { Ok(()) } else { Err(BackendError::LayerOrder(call.layer)) }
    }
    pub fn note(&mut self, layer: LayerId) {
        self.done[layer.0 as usize] = true;
    }
    /// Checks that every layer has run.
    pub fn complete(&self) -> Result<(), BackendError> {
        match self.done.iter().position(|done| !done) {
            None => Ok(()),
            Some(l) => Err(BackendError::LayerOrder(LayerId(l as u16))),
        }
    }
}

/// Executes the plans of one cache: the pools, and the check that layers run in order. The cache itself may be owned
/// elsewhere.
pub struct Runner {
    pools: Box<dyn Pools>,
    layers: Layers,
}

impl Runner {
    pub fn new(pools: Box<dyn Pools>, layout: Layout) -> Self {
        Runner { pools, layers: Layers::new(layout) }
    }
    /// Begins a step. On `Err` the step must not be committed.
    pub fn begin(&mut self, step: &mut Step<'_>) -> Result<(), BackendError> {
        self.layers.begin();
        self.pools.begin(step.with_reads())
    }
    /// Runs one layer of the step that began last.
    pub fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), BackendError> {
        self.layers.admit(&call)?;
        let layer = call.layer;
        self.pools.attend(plan, call)?;
        self.layers.note(layer);
        Ok(())
    }
    /// Returns `Err` unless every layer has run. Only then may the step be committed.
    pub fn complete(&self) -> Result<(), BackendError> {
        self.layers.complete()
    }
    pub fn pools(&self) -> &dyn Pools {
        &*self.pools
    }
}

/// One cache: a kind, over the pools of a backend.
pub struct Session {
    pub cache: Cache,
    runner: Runner,
    plan: StepPlan,
    moves: MovePlan,
}

impl Session {
    pub fn new(cache: Cache, pools: Box<dyn Pools>, layout: Layout) -> Self {
        let runner = Runner::new(pools, layout);
        Session { cache, runner, plan: StepPlan::default(), moves: MovePlan::default() }
    }

    /// Begins a step. On `Err` nothing has changed.
    pub fn step(&mut self, request: &StepRequest<'_>) -> Result<SessionStep<'_>, StepError> {
        let mut step = Step::begin(&mut self.cache, request, &mut self.plan)?;
        self.runner.begin(&mut step)?;
        Ok(SessionStep { step, runner: &mut self.runner })
    }

    /// Dry run: whether the cache would accept this step.
    pub fn can_run(&mut self, request: &StepRequest<'_>) -> Result<(), Refused> {
        self.cache.can_run(request, &mut self.plan)
    }

    /// Compacts the cache: moves every sequence into one run, as far as shared cells permit. On `Err` the finished
    /// rounds remain applied, and everything is still readable.
    pub fn compact(&mut self) -> Result<(), BackendError> {
        while let Some(round) = Relocation::begin(&mut self.cache, &mut self.moves) {
            self.runner.pools.relocate(round.moves())?;
            round.commit();
        }
        Ok(())
    }

    pub fn pools(&self) -> &dyn Pools {
        self.runner.pools()
    }
}

/// A session's step in flight. Dropping it leaves the cache as it was.
#[must_use = "a step that is dropped is abandoned"]
pub struct SessionStep<'s> {
    step: Step<'s>,
    runner: &'s mut Runner,
}

impl SessionStep<'_> {
    pub fn plan(&self) -> &StepPlan {
        self.step.plan()
    }
    /// Runs one layer.
    pub fn attend(&mut self, call: Attend<'_>) -> Result<(), BackendError> {
        self.runner.attend(self.step.plan(), call)
    }
    /// Commits the step. Refused unless every layer has run.
    pub fn commit(self) -> Result<(), BackendError> {
        self.runner.complete()?;
        self.step.commit();
        Ok(())
    }
}
