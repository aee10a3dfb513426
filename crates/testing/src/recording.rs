//! A device that computes nothing: like a GPU whose operations are captured, it records them, and it counts what it
//! allocates. Its outputs are zero.
//!
//! It stores K and V in the dtypes that are asked for, and weights in their file's encoding, so its memory plan is that
//! of a real device.
use kvist_cache::{CellRun, GroupId, LayerId, MovePlan, StepId, StepPlan};
use kvist_device::weights::{Encoding, FileTensor, WeightFormat};
use kvist_device::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What happened on a device, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Everything that depends on the step was uploaded.
    Upload,
    /// An operation was recorded.
    Op(&'static str),
    Submit,
    /// The host waited for results.
    Wait,
    /// The host read results.
    Read,
    /// An export or an import began, which follows this submission.
    Transfer(Ticket),
}

/// The events of a device, and the bytes that it has allocated by purpose.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    pub events: Vec<Event>,
    pub allocated: Usage,
    /// Why the device has failed, if it was told to.
    failure: Option<String>,
}

/// The device and the backend `recording`.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    log: Log,
}

#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Recorded>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn note(&self, event: Event) {
        self.lock().events.push(event);
    }
    fn allocate(&self, purpose: Purpose, bytes: u64) {
        let mut log = self.lock();
        log.allocated = log.allocated.with(purpose, log.allocated.of(purpose) + bytes);
    }
}

impl Recording {
    /// What has happened since the last call; the allocated bytes stay.
    pub fn take(&self) -> Recorded {
        let mut log = self.log.lock();
        Recorded { events: std::mem::take(&mut log.events), allocated: log.allocated, failure: None }
    }
    /// From now on the device has failed, as a GPU that was lost: no submission ends well.
    pub fn fail(&self, why: &str) {
        self.log.lock().failure = Some(why.into());
    }
    fn op(&self, name: &'static str) {
        self.log.note(Event::Op(name));
    }
}

/// The vocabulary of a head, or anything else that has outputs.
pub struct Linear {
    outputs: usize,
}

pub struct Stream {
    limits: StepLimits,
    step: Option<StepId>,
    submitted: Ticket,
    waited: Ticket,
    output: StepOutput,
    log: Log,
}

/// Bytes of what a step uploads: tokens, positions, wanted rows.
fn upload_bytes(limits: &StepLimits) -> Option<u64> {
    let rows = limits.max_rows.checked_mul(size_of::<WantedRow>())?;
    u64::try_from(limits.max_tokens.checked_mul(8)?.checked_add(rows)?).ok()
}

impl Footprint for Recording {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { name: "recording", batch_invariant: true, unified_memory: false }
    }
    fn supports(&self, shape: &ModelShape) -> Result<(), DeviceError> {
        match shape.head_dim.is_multiple_of(2) {
            true => Ok(()),
            false => {
                let what = format!("the device `recording` has no attention for head_dim {}", shape.head_dim);
                Err(DeviceError::Unsupported(what))
            }
        }
    }
    fn weight_bytes(&self, shape: &[usize], stored: Encoding, format: WeightFormat) -> Option<u64> {
        let resident = stored.resident(format, *shape.last()?);
        u64::try_from(resident.tensor_bytes(shape)?).ok()
    }
    fn activation_bytes(&self, shape: &ModelShape, limits: &StepLimits) -> Option<u64> {
        let logits = limits.max_rows.checked_mul(shape.vocab)?;
        let floats = u64::try_from(shape.buffer_elements(limits)?.checked_add(logits)?).ok()?;
        floats.checked_mul(4)?.checked_add(upload_bytes(limits)?)
    }
    fn check(&self) -> Result<(), DeviceError> {
        let failure = self.log.lock().failure.clone();
        failure.map_or(Ok(()), |what| Err(DeviceError::Failed { device: "recording", what }))
    }
}

impl Device for Recording {
    type Linear = Linear;
    type Stack = Vec<Linear>;
    type Vector = ();
    type Buffer = ();
    type Stream = Stream;
    type Pools = StubPools;

    fn linear(
        &self,
        tensor: FileTensor<'_>,
        format: WeightFormat,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear, DeviceError> {
        let outputs = tensor.n_rows();
        let weights = tensor.encoding.resident(format, tensor.row_len());
        let bytes = tensor.encoded(weights)?.len() + 4 * bias.map_or(0, |bias| bias.len());
        self.log.allocate(Purpose::Weights, bytes as u64);
        Ok(Linear { outputs })
    }
    fn stack<'t, E: From<DeviceError>>(
        &self,
        layers: impl ExactSizeIterator<Item = Result<ExpertTensor<'t>, E>>,
        format: WeightFormat,
    ) -> Result<Vec<Linear>, E> {
        stack_each(layers, |tensor, bias| self.linear(tensor, format, bias))
    }
    fn vector(&self, values: Vec<f32>) -> Result<(), DeviceError> {
        self.log.allocate(Purpose::Weights, 4 * values.len() as u64);
        Ok(())
    }
    fn buffer(&self, rows: RowsOf, width: usize, limits: &StepLimits) -> Result<(), DeviceError> {
        self.log.allocate(Purpose::Activations, 4 * (rows.max(limits) * width) as u64);
        Ok(())
    }
    fn stream(
        &self,
        shape: &ModelShape,
        _: &[RopeTable],
        limits: &StepLimits,
    ) -> Result<Stream, DeviceError> {
        let bytes = upload_bytes(limits).unwrap_or(u64::MAX) + 4 * (limits.max_rows * shape.vocab) as u64;
        self.log.allocate(Purpose::Activations, bytes);
        let output = StepOutput::with_capacity(limits.max_rows, shape.vocab);
        Ok(Stream {
            limits: *limits,
            step: None,
            submitted: Ticket::START,
            waited: Ticket::START,
            output,
            log: self.log.clone(),
        })
    }
    /// Accepts only its own backend: its attention cannot read the host's memory.
    fn kv_pools(&self, backend: &dyn Backend, spec: &PoolSpec) -> Result<StubPools, DeviceError> {
        if backend.id() != Backend::id(self) {
            let what = format!("the device `recording` cannot attend over K and V in `{}`", backend.id());
            return Err(DeviceError::Unsupported(what));
        }
        spec.check_kv_only("recording")?;
        let cells = vec![0; spec.capacity_cells.len()];
        let transfers = FinishedTransfers::default();
        Ok(StubPools { spec: spec.clone(), cells, transfers, log: self.log.clone() })
    }

    fn begin(
        &self,
        s: &mut Stream,
        pools: &mut StubPools,
        plan: &StepPlan,
        inputs: &StepInputs<'_>,
    ) -> Result<(), DeviceError> {
        inputs.check(plan, &s.limits)?;
        pools.begin(plan)?;
        self.want_rows(s, inputs.rows);
        s.step = Some(plan.id());
        Ok(())
    }
    fn want_rows(&self, s: &mut Stream, rows: &[WantedRow]) {
        self.log.note(Event::Upload);
        s.output.want(rows);
    }
    fn upload(&self, _: &mut Stream, _: &[f32], (): &mut ()) {
        self.log.note(Event::Upload);
    }
    fn embed(&self, _: &mut Stream, _: &Linear, _: f32, _: &mut ()) {
        self.op("embed");
    }
    fn rms_norm(&self, _: &mut Stream, (): &(), _: Norm<'_, Self>, (): &mut ()) {
        self.op("rms_norm");
    }
    fn norm_in_place(&self, _: &mut Stream, (): &mut (), _: Norm<'_, Self>) {
        self.op("norm_in_place");
    }
    fn matmul(&self, _: &mut Stream, (): &(), _: &mut [(&Linear, &mut ())]) {
        self.op("matmul");
    }
    fn rope(&self, _: &mut Stream, (): &mut (), _: usize, _: usize) {
        self.op("rope");
    }
    fn gated(&self, _: &mut Stream, _: Activation, (): &mut (), (): &()) {
        self.op("gated");
    }
    fn experts(&self, _: &mut Stream, (): &(), _: &Experts<Self>, _: Activation, (): &mut ()) {
        self.op("experts");
    }
    fn concat(&self, _: &mut Stream, (): &(), (): &(), (): &mut ()) {
        self.op("concat");
    }
    fn add(&self, _: &mut Stream, (): &mut (), (): &()) {
        self.op("add");
    }
    fn attend(
        &self,
        _: &mut Stream,
        _: &mut StubPools,
        _: &StepPlan,
        _: LayerAttention<'_, Self>,
    ) -> Result<(), DeviceError> {
        self.op("attend");
        Ok(())
    }
    fn tap(&self, _: &mut Stream, _: usize, (): &()) {
        self.op("tap");
    }
    fn wanted_rows(&self, _: &mut Stream, (): &(), (): &mut ()) {
        self.op("wanted_rows");
    }
    fn logits(&self, s: &mut Stream, (): &(), head: &Linear, _: Option<f32>) {
        self.op("logits");
        s.output.all_logits(head.outputs).fill(0.0);
    }
    /// Chooses on the device.
    fn answer_rows(&self, s: &mut Stream) {
        self.op("answer_rows");
        s.output.answer_rows();
    }
    fn norm_matmul(
        &self,
        _: &mut Stream,
        (): &(),
        _: Norm<'_, Self>,
        (): &mut (),
        _: &mut [(&Linear, &mut ())],
    ) {
        self.op("norm_matmul");
    }
    fn matmul_add(
        &self,
        _: &mut Stream,
        (): &(),
        _: &Linear,
        _: Option<Norm<'_, Self>>,
        (): &mut (),
        (): &mut (),
    ) {
        self.op("matmul_add");
    }

    fn submit(&self, s: &mut Stream) -> Result<Ticket, DeviceError> {
        self.check()?;
        self.log.note(Event::Submit);
        s.submitted = Ticket(s.submitted.0 + 1);
        Ok(s.submitted)
    }
    /// A submission runs until the host waits for it.
    fn is_done(&self, s: &Stream, ticket: Ticket) -> bool {
        ticket <= s.waited
    }
    fn wait(&self, s: &mut Stream, ticket: Ticket) -> Result<LayersRan, DeviceError> {
        self.log.note(Event::Wait);
        s.waited = s.waited.max(ticket);
        s.step.map(LayersRan).ok_or(DeviceError::StalePlan)
    }
    fn output(s: &Stream) -> &StepOutput {
        s.log.note(Event::Read);
        &s.output
    }
    fn output_mut(s: &mut Stream) -> &mut StepOutput {
        s.log.note(Event::Read);
        &mut s.output
    }
}

impl Backend for Recording {
    fn id(&self) -> &'static str {
        "recording"
    }
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError> {
        Ok(Box::new(self.kv_pools(self, spec)?))
    }
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        let mut kv = 0u64;
        for (_, layer) in spec.layout.owners() {
            let group = layer.group.0 as usize;
            let cells = reserved_cells(*cells.get(group)?, *spec.capacity_cells.get(group)?);
            let row = layer.cell_bytes(spec.k, spec.v);
            let layer = u64::from(cells).checked_mul(layer.n_kv_heads.into())?.checked_mul(row)?;
            kv = kv.checked_add(layer)?;
        }
        Some(Usage::default().with(Purpose::KvCache, kv))
    }
}

/// Pools that only grow. What they export is zero.
pub struct StubPools {
    spec: PoolSpec,
    /// Cells in use, per group.
    cells: Vec<u32>,
    transfers: FinishedTransfers,
    log: Log,
}

impl StubPools {
    fn grow(&mut self, cells_end: impl Fn(GroupId) -> u32) {
        let before = self.bytes();
        for (g, cells) in self.cells.iter_mut().enumerate() {
            *cells = (*cells).max(cells_end(GroupId(g as u16)));
        }
        self.log.allocate(Purpose::KvCache, self.bytes() - before);
    }
}

impl AsRef<dyn Pools> for StubPools {
    fn as_ref(&self) -> &(dyn Pools + 'static) {
        self
    }
}
impl AsMut<dyn Pools> for StubPools {
    fn as_mut(&mut self) -> &mut (dyn Pools + 'static) {
        self
    }
}

impl Pools for StubPools {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        self.grow(|group| plan.group(group).cells_end);
        Ok(())
    }
    fn attend(&mut self, _: &StepPlan, _: Attend<'_>) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("the recording device attends only within a model".into()))
    }
    fn relocate(&mut self, moves: &MovePlan) -> Result<(), DeviceError> {
        self.grow(|group| moves.cells_end(group));
        Ok(())
    }
    fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        self.spec.block_bytes(group, cells)
    }
    fn export(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        mut into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        let have = self.cells.get(usize::from(group.0)).copied().unwrap_or(0);
        let checked = self.spec.check_transfer(group, cells, have, into.bytes().len());
        if checked.is_ok() {
            into.bytes_mut().fill(0);
            self.log.note(Event::Transfer(after));
        }
        self.transfers.add(into, checked)
    }
    fn import(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        let capacity = self.spec.capacity_cells.get(usize::from(group.0)).copied().unwrap_or(0);
        let checked = self.spec.check_transfer(group, cells, capacity, from.bytes().len());
        if checked.is_ok() {
            self.grow(|grown| if grown == group { cells.end() } else { 0 });
            self.log.note(Event::Transfer(after));
        }
        self.transfers.add(from, checked)
    }
    fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        self.transfers.take(transfer)
    }
    fn inspect(&self, _: LayerId, _: Side, _: u32, _: u32, row: &mut [f32]) -> Result<(), DeviceError> {
        row.fill(0.0);
        Ok(())
    }
    fn bytes(&self) -> u64 {
        let backend = Recording::default();
        backend.usage(&self.spec, &self.cells).map_or(u64::MAX, |usage| usage.of(Purpose::KvCache))
    }
    fn counters(&self) -> KvCounters {
        KvCounters::default()
    }
}
