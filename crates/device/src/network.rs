//! A model on a device, without type parameters: the network that executes steps, and a step in flight.
use crate::device::Footprint;
use crate::error::{DeviceError, StepError};
use crate::pools::{Backend, PoolSpec, Pools};
use crate::rows::{StepOutput, WantedRow};
use crate::step_io::*;
use crate::transfer::{HostBlock, Transfer, TransferRefused};
use kvist_cache::{CellRun, GroupId, Kept, Step, StepPlan};

/// A model's weights on a device.
pub trait LoadedModel: Send + Sync {
    /// The device that the weights are on.
    fn device(&self) -> &dyn Footprint;
    /// A network with empty KV pools in `backend`, and buffers for the largest step.
    fn open(
        &self,
        backend: &dyn Backend,
        spec: &PoolSpec,
        limits: &StepLimits,
    ) -> Result<Box<dyn Network>, DeviceError>;
}

/// A model with KV pools, ready to execute the steps of one cache. A runtime that executes whole graphs may implement
/// this trait directly.
pub trait Network: Send {
    /// Starts a step. The plan must have its reads. On `Err` the step must not be committed.
    fn submit(&mut self, plan: &StepPlan, inputs: &StepInputs<'_>) -> Result<Ticket, DeviceError>;
    /// Whether the submission has finished. Never blocks.
    fn is_done(&self, ticket: Ticket) -> bool;
    /// Waits for the submission.
    fn wait(&mut self, ticket: Ticket) -> Result<LayersRan, DeviceError>;
    /// The output of the last step that was waited for.
    fn output(&self) -> &StepOutput;
    /// [`output`](Self::output), for samplers that modify logits in place.
    fn output_mut(&mut self) -> &mut StepOutput;
    /// Replaces the wanted rows by other rows of the last step, and waits for their results. The rows are ascending and
    /// at most [`StepLimits::max_rows`].
    fn recompute_rows(&mut self, rows: &[WantedRow]) -> Result<(), DeviceError>;
    fn pools(&self) -> &dyn Pools;
    fn pools_mut(&mut self) -> &mut dyn Pools;
    /// The last submission, or [`Ticket::START`] before the first.
    fn last_submission(&self) -> Ticket;
    /// Starts transfers that follow the last submission. While a step is in flight, use [`InFlight::transfers`].
    fn transfers(&mut self) -> Transfers<'_> {
        let after = self.last_submission();
        Transfers { pools: self.pools_mut(), after }
    }
}

/// Copies between the pools of a network and the host, concurrent with its steps. The cache must have
/// [pinned](kvist_cache::Cache::pin) the blocks that are exported, and be [loading](kvist_cache::Cache::load) those that are
/// imported.
pub struct Transfers<'n> {
    pools: &'n mut dyn Pools,
    /// The submission that they follow.
    after: Ticket,
}

impl Transfers<'_> {
    /// See [`Pools::block_bytes`].
    pub fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        self.pools.block_bytes(group, cells)
    }
    /// See [`Pools::export`].
    pub fn export(
        &mut self,
        group: GroupId,
        cells: CellRun,
        into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.pools.export(self.after, group, cells, into)
    }
    /// See [`Pools::import`].
    pub fn import(
        &mut self,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.pools.import(self.after, group, cells, from)
    }
    /// See [`Pools::finished`].
    pub fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        self.pools.finished(transfer)
    }
}

/// A step that a network executes. It owns the cache's [`Step`], so nothing can change the cache until
/// [`finish`](Self::finish) returns it. Dropping or leaking it abandons the step: only free cells were written.
///
/// ```compile_fail,E0499
/// use kvist_cache::{Cache, SeqId, Step, StepPlan, StepRequest};
/// use kvist_device::{InFlight, Network, StepInputs};
/// fn f(cache: &mut Cache, plan: &mut StepPlan, request: &StepRequest<'_>, net: &mut dyn Network, inputs: &StepInputs<'_>) {
///     let step = Step::begin(cache, request, plan).unwrap();
///     let in_flight = InFlight::submit(step, net, inputs).unwrap();
///     cache.sequences().unwrap().seq_rm(SeqId(0), 0, 9).unwrap(); // the step in flight borrows the cache
///     in_flight.finish().unwrap().commit();
/// }
/// ```
///
/// A step with bytes commits only after it has finished:
///
/// ```compile_fail,E0599
/// use kvist_device::InFlight;
/// fn f(in_flight: InFlight<'_, '_>) {
///     in_flight.commit();
/// }
/// ```
#[must_use = "a step that is dropped is abandoned"]
pub struct InFlight<'c, 'n> {
    step: Step<'c>,
    ticket: Ticket,
    /// The submission before this one.
    before: Ticket,
    network: &'n mut dyn Network,
}

impl<'c, 'n> InFlight<'c, 'n> {
    /// Submits a step. On `Err` the step is abandoned.
    pub fn submit(
        mut step: Step<'c>,
        network: &'n mut dyn Network,
        inputs: &StepInputs<'_>,
    ) -> Result<Self, StepError> {
        let before = network.last_submission();
        let ticket = network.submit(step.with_reads(), inputs)?;
        Ok(InFlight { step, ticket, before, network })
    }
    /// Whether [`finish`](Self::finish) would return at once.
    pub fn is_done(&self) -> bool {
        self.network.is_done(self.ticket)
    }
    /// Transfers while the step runs. They follow the submission before this step: their blocks were pinned or loading when
    /// the step was planned, so it does not write them, and does not read those that are loading.
    pub fn transfers(&mut self) -> Transfers<'_> {
        Transfers { pools: self.network.pools_mut(), after: self.before }
    }
    /// Waits until every layer has run. The results are in [`Network::output`]. On `Err` the step is abandoned.
    pub fn finish(self) -> Result<Computed<'c>, DeviceError> {
        let LayersRan(step) = self.network.wait(self.ticket)?;
        match step == self.step.plan().id() {
            true => Ok(Computed { step: self.step }),
            false => Err(DeviceError::StalePlan),
        }
    }
}

/// A step whose layers have all run.
#[must_use = "a step that is dropped is abandoned"]
pub struct Computed<'c> {
    step: Step<'c>,
}

impl Computed<'_> {
    /// The plan of the step.
    pub fn plan(&self) -> &StepPlan {
        self.step.plan()
    }
    /// Applies the step: the new tokens become part of their sequences.
    pub fn commit(self) {
        self.step.commit();
    }
    /// Applies the step; every span keeps only what `kept` says ([`Step::commit_kept`]). First moves K and V of kept paths
    /// to their cells in `pools`, which are those of the [`Network`] that computed the step. On `Err` the step is
    /// abandoned.
    pub fn commit_kept(mut self, kept: &[Kept<'_>], pools: &mut dyn Pools) -> Result<(), StepError> {
        self.move_kept(kept, pools)?;
        Ok(self.step.commit_kept(kept)?)
    }
    /// Moves K and V of kept paths to their cells in `pools`, and commits nothing: for drivers whose scheduler commits the
    /// step, with the same `kept`. Only cells that were free before the step change.
    pub fn move_kept(&mut self, kept: &[Kept<'_>], pools: &mut dyn Pools) -> Result<(), StepError> {
        crate::session::move_kept(&mut self.step, kept, pools)
    }
}
