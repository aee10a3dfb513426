//! Attention alone: combines the bookkeeping and the bytes of one cache, for callers that compute everything else
//! themselves. Any kind works over any backend. Here and in `CheckedCache` a caller could run layers in the wrong order,
//! so both check it, with the same `LayerOrder`.
use crate::caller_rows::{RowBuffer, Rows, RowsMut};
use crate::error::{DeviceError, StepError};
use crate::layout::{LayerSpec, Layout, Values};
use crate::pools::*;
use kvist_cache::*;

/// One layer of one step over rows in the caller's memory. Like [`Attend`], for any dtype and any strides.
#[derive(Debug)]
pub struct AttendRows<'a> {
    pub layer: LayerId,
    /// `n_tokens × n_heads` rows of `k_dim` elements.
    pub q: Rows<'a>,
    /// K after RoPE, and V: `n_tokens × n_kv_heads` rows of `k_dim` and of `v_dim` elements. V is `None` if the
    /// layer's values are a prefix of its keys. `kv` is `None` for a layer that borrows another layer's K and V.
    pub kv: Option<(Rows<'a>, Option<Rows<'a>>)>,
    /// `n_tokens × n_heads` rows of `v_dim` elements, overwritten completely. Rows of f16 and bf16 are rounded to nearest,
    /// ties to even.
    pub out: RowsMut<'a>,
    /// As in [`Attend`].
    pub scale: f32,
    /// As in [`Attend`].
    pub softcap: Option<f32>,
    /// As in [`Attend`].
    pub sinks: Option<&'a [f32]>,
}

impl AttendRows<'_> {
    /// Checks that the rows are those of `n` tokens in this layer.
    fn check(&self, n: usize, heads: usize, layer: &LayerSpec) -> Result<(), DeviceError> {
        let (kv_heads, k_dim, v_dim) =
            (layer.n_kv_heads as usize, layer.k_dim as usize, layer.v_dim as usize);
        self.q.check("q", [n, heads, k_dim])?;
        self.out.check("out", [n, heads, v_dim])?;
        let Some((k, v)) = &self.kv else { return Ok(()) };
        match (v, layer.values) {
            (None, Values::Stored) => return Err(DeviceError::MissingValues(self.layer)),
            (Some(_), Values::PrefixOfK) => return Err(DeviceError::UnexpectedValues(self.layer)),
            _ => {}
        }
        k.check("k", [n, kv_heads, k_dim])?;
        v.map_or(Ok(()), |v| v.check("v", [n, kv_heads, v_dim]))
    }
}

/// Scratch for rows that a backend cannot read or write in place.
struct Buffers {
    q: RowBuffer,
    k: RowBuffer,
    v: RowBuffer,
    out: RowBuffer,
}

impl Buffers {
    fn new(spec: &PoolSpec) -> Self {
        let Layout { n_heads, layers } = &spec.layout;
        let buffer = |row: fn(&LayerSpec, u64) -> u64| {
            let row = layers.iter().map(|layer| row(layer, u64::from(*n_heads))).max().unwrap_or(0);
            RowBuffer::new(row.saturating_mul(spec.max_step_tokens.into()), &spec.budget)
        };
        Buffers {
            q: buffer(|layer, heads| heads * u64::from(layer.k_dim)),
            k: buffer(|layer, _| u64::from(layer.n_kv_heads) * u64::from(layer.k_dim)),
            v: buffer(|layer, _| u64::from(layer.n_kv_heads) * u64::from(layer.v_dim)),
            out: buffer(|layer, heads| heads * u64::from(layer.v_dim)),
        }
    }
}

/// Compacts a cache: moves every sequence into one run, as far as shared cells permit. On `Err` the finished rounds
/// remain applied, and everything is still readable.
pub fn compact(cache: &mut Cache, pools: &mut dyn Pools, moves: &mut MovePlan) -> Result<(), DeviceError> {
    while let Some(round) = Relocation::begin(cache, moves) {
        pools.relocate(round.moves())?;
        round.commit();
    }
    Ok(())
}

/// Changes the capacity of a paged cache and of its pools: `capacity_tokens`, one per layer group. See [`Cache::plan_resize`].
///
/// # Errors
/// The cache refuses, this device cannot change capacities, or has no memory. Nothing has changed then.
pub fn resize(
    cache: &mut Cache,
    pools: &mut dyn Pools,
    moves: &mut MovePlan,
    capacity_tokens: &[u32],
) -> Result<(), StepError> {
    cache.plan_resize(capacity_tokens, moves)?;
    let before = cache.capacity_cells();
    // The larger ones first: the smaller ones are never refused then.
    let larger = before.iter().zip(capacity_tokens).map(|(before, tokens)| *before.max(tokens));
    pools.resize(&larger.collect::<Vec<u32>>())?;
    if let Err(refused) = pools.relocate(moves) {
        pools.resize(&before)?;
        return Err(refused.into());
    }
    cache.resize(capacity_tokens, moves);
    Ok(pools.resize(&cache.capacity_cells())?)
}

/// Moves K and V of the kept paths to their final cells. Call it after all layers of the step have run and before its
/// commit.
pub(crate) fn move_kept(
    step: &mut Step<'_>,
    kept: &[Kept<'_>],
    pools: &mut dyn Pools,
) -> Result<(), StepError> {
    let mut moves = MovePlan::default();
    step.kept_moves(kept, &mut moves)?;
    if !moves.groups().is_empty() {
        pools.relocate(&moves)?;
    }
    Ok(())
}

/// One cache: a kind, over the pools of a backend. docs/device.md shows how to use it.
pub struct Session {
    pub cache: Cache,
    pools: Box<dyn Pools>,
    layout: Layout,
    order: LayerOrder,
    buffers: Buffers,
    plan: StepPlan,
    /// The step that [`step`](Self::step) began last.
    begun: Option<StepId>,
    moves: MovePlan,
}

impl Session {
    /// A session over `pools`, which a backend made from `spec`.
    pub fn new(cache: Cache, pools: Box<dyn Pools>, spec: &PoolSpec) -> Self {
        Session {
            cache,
            pools,
            order: LayerOrder::new(spec.layout.layers.iter().map(|layer| layer.owner)),
            buffers: Buffers::new(spec),
            layout: spec.layout.clone(),
            plan: StepPlan::default(),
            begun: None,
            moves: MovePlan::default(),
        }
    }

    /// Begins a step. On `Err` the cache has not changed.
    pub fn step(&mut self, request: &StepRequest<'_>) -> Result<SessionStep<'_>, StepError> {
        self.begun = None;
        let mut step = Step::begin(&mut self.cache, request, &mut self.plan)?;
        self.order.begin();
        self.pools.begin(step.with_reads())?;
        self.begun = Some(step.plan().id());
        let (pools, layout) = (&mut *self.pools, &self.layout);
        Ok(SessionStep { step, pools, layout, order: &mut self.order, buffers: &mut self.buffers })
    }

    /// Continues the step that was begun last and then dropped, with the layers that have run. For callers that cannot keep
    /// a borrow from one call to the next, such as C and Python. `None` if the step was committed, or abandoned: by a
    /// change of the cache, by a dry run, or by another step, even a refused one.
    pub fn resume(&mut self) -> Option<SessionStep<'_>> {
        if self.begun != Some(self.plan.id()) {
            return None;
        }
        let step = Step::of_plan(&mut self.cache, &mut self.plan)?;
        let (pools, layout) = (&mut *self.pools, &self.layout);
        Some(SessionStep { step, pools, layout, order: &mut self.order, buffers: &mut self.buffers })
    }

    /// Dry run: whether the cache would accept this step. Abandons a step that was dropped.
    pub fn can_run(&mut self, request: &StepRequest<'_>) -> Result<(), Refused> {
        self.cache.can_run(request, &mut self.plan)
    }

    /// See [`compact`].
    pub fn compact(&mut self) -> Result<(), DeviceError> {
        compact(&mut self.cache, &mut *self.pools, &mut self.moves)
    }

    /// See [`resize`].
    pub fn resize(&mut self, capacity_tokens: &[u32]) -> Result<(), StepError> {
        resize(&mut self.cache, &mut *self.pools, &mut self.moves, capacity_tokens)
    }

    pub fn pools(&self) -> &dyn Pools {
        &*self.pools
    }
}

/// A session's step in flight. Dropping it leaves the cache as it was; [`Session::resume`] continues it.
#[must_use = "a step that is dropped changes nothing"]
pub struct SessionStep<'s> {
    step: Step<'s>,
    pools: &'s mut dyn Pools,
    layout: &'s Layout,
    order: &'s mut LayerOrder,
    buffers: &'s mut Buffers,
}

impl SessionStep<'_> {
    pub fn plan(&self) -> &StepPlan {
        self.step.plan()
    }

    pub fn pools(&self) -> &dyn Pools {
        self.pools
    }

    /// Runs one layer over f32 rows. On `Err` the layer has not run, and the step is still in flight.
    pub fn attend(&mut self, call: Attend<'_>) -> Result<(), DeviceError> {
        self.order.check(call.layer, call.kv.is_some())?;
        let layer = call.layer;
        self.pools.attend(self.step.plan(), call)?;
        self.order.ran(layer);
        Ok(())
    }

    /// Runs one layer over the caller's rows. A backend reads and writes f32 rows in place if two strides describe them,
    /// those of tokens and of heads: always in a batch of one. Other rows are converted row by row, through scratch
    /// that the session reserves in the budget when an argument first needs it, for its largest step and layer; later
    /// steps allocate nothing.
    ///
    /// # Errors
    /// The layer is out of order, V is missing or must not be there, an argument has other sizes than the layer, an
    /// argument's strides leave its memory, or the budget refuses the scratch. The layer has not run then, `out` has not
    /// changed, and the step is still in flight.
    pub fn attend_rows(&mut self, call: AttendRows<'_>) -> Result<(), DeviceError> {
        self.order.check(call.layer, call.kv.is_some())?;
        let spec = &self.layout.layers[usize::from(call.layer.0)];
        let plan = self.step.plan();
        call.check(plan.n_tokens() as usize, self.layout.n_heads as usize, spec)?;
        let AttendRows { layer, q, kv, out, scale, softcap, sinks } = call;
        let q = q.tensor(&mut self.buffers.q)?;
        let kv = match kv {
            None => None,
            Some((k, v)) => {
                let k = k.tensor(&mut self.buffers.k)?;
                let v = v.map_or(Ok(k), |v| v.tensor(&mut self.buffers.v))?;
                Some((k, v))
            }
        };
        out.fill(&mut self.buffers.out, |out| {
            self.pools.attend(plan, Attend { layer, q, kv, out, scale, softcap, sinks })
        })?;
        self.order.ran(layer);
        Ok(())
    }

    /// Writes K and V of one layer and attends to nothing, for callers with kernels of their own. Rows are those of
    /// [`attend_rows`](Self::attend_rows).
    ///
    /// # Errors
    /// As there, and the backend cannot store without attending. The layer has not run then, and the step is still in
    /// flight.
    pub fn store_rows(&mut self, layer: LayerId, k: Rows<'_>, v: Rows<'_>) -> Result<(), DeviceError> {
        self.order.check(layer, true)?;
        let spec = &self.layout.layers[usize::from(layer.0)];
        if spec.values != Values::Stored {
            return Err(DeviceError::UnexpectedValues(layer));
        }
        let (n, heads) = (self.step.plan().n_tokens() as usize, spec.n_kv_heads as usize);
        k.check("k", [n, heads, spec.k_dim as usize])?;
        v.check("v", [n, heads, spec.v_dim as usize])?;
        let (k, v) = (k.tensor(&mut self.buffers.k)?, v.tensor(&mut self.buffers.v)?);
        self.pools.store(self.step.plan(), layer, k, v)?;
        self.order.ran(layer);
        Ok(())
    }

    /// Commits the step. Refused unless every layer has run.
    pub fn commit(self) -> Result<(), DeviceError> {
        self.order.complete()?;
        self.step.commit();
        Ok(())
    }

    /// Commits the step; every span keeps only what `kept` says ([`Step::commit_kept`]). Moves K and V where a kept path
    /// needs it. Refused unless every layer has run; on `Err` the step is abandoned.
    pub fn commit_kept(mut self, kept: &[Kept<'_>]) -> Result<(), StepError> {
        self.order.complete().map_err(DeviceError::from)?;
        move_kept(&mut self.step, kept, self.pools)?;
        Ok(self.step.commit_kept(kept)?)
    }
}
