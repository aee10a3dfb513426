//! A step with the operations of a test, on a device and on the reference.
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::*;

pub const LIMITS: StepLimits = StepLimits { max_tokens: 70, max_rows: 35 };
/// More than a workgroup has invocations.
pub const VOCAB: usize = 601;
pub const FREQUENCIES: [f32; 3] = [1.0, 0.3, 0.01];

fn shape() -> ModelShape {
    ModelShape {
        hidden: 40,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 20,
        vocab: VOCAB,
        intermediate: 24,
        // Room for all that the operations use.
        routing: Some(Routing { n_experts: 64, used: 5, width: 64, renormalise: true }),
        rope_pairs: vec![2, FREQUENCIES.len()],
        features: 0,
    }
}

/// A device whose models use K and V in its own pools.
pub trait Runs: Device + Backend {}
impl<D: Device + Backend> Runs for D {}

/// Runs operations in a step of `n` tokens whose last half is wanted.
pub struct Running<'d, D: Device> {
    pub device: &'d D,
    pub stream: D::Stream,
    n: usize,
}

impl<D: Device> Running<'_, D> {
    pub fn buffer(&mut self, rows: &[f32]) -> D::Buffer {
        let width = rows.len() / self.n;
        let mut buffer = self.device.buffer(RowsOf::Tokens, width, &LIMITS).unwrap();
        self.device.upload(&mut self.stream, rows, &mut buffer);
        buffer
    }
    /// A buffer of NaN.
    pub fn out(&mut self, width: usize) -> D::Buffer {
        self.buffer(&vec![f32::NAN; self.n * width])
    }
    pub fn tap(&mut self, buffer: &D::Buffer) {
        self.device.tap(&mut self.stream, 0, buffer);
    }
}

/// What `operations` taps, and the logits if the step `wants` any.
pub fn run<D: Device + Backend>(
    device: &D,
    n: usize,
    wants: bool,
    operations: impl FnOnce(&mut Running<'_, D>),
) -> Vec<f32> {
    let group = GroupSpec { capacity_tokens: 128, visibility: Visibility::FULL, max_step_tokens: 70 };
    let mut cache = Cache::new(vec![kinds::build("contiguous", &group).unwrap()]);
    let spec = PoolSpec {
        layout: Layout { n_heads: 2, layers: vec![LayerSpec::new(GroupId(0), LayerId(0), 1, 8)] },
        k: Storage::F32,
        v: Storage::F32,
        capacity_cells: cache.capacity_cells(),
        max_step_tokens: 70,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let mut pools = device.kv_pools(device, &spec).unwrap();
    let rope =
        |frequencies: &[f32]| RopeTable { inverse_frequencies: frequencies.to_vec(), attention_factor: 1.25 };
    let ropes = [rope(&[0.5, 0.25]), rope(&FREQUENCIES)];
    let stream = device.stream(&shape(), &ropes, &LIMITS).unwrap();
    let mut plan = StepPlan::default();
    let spans = [Span::chain(SeqId::ONLY, 0, n as u32)];
    let mut step = kvist_cache::Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    let tokens: Vec<u32> = (0..n as u32).map(|i| (i * 11 + 5) % VOCAB as u32).collect();
    let first = if wants { n as u32 / 2 } else { n as u32 };
    let rows: Vec<WantedRow> = (first..n as u32).map(WantedRow::logits).collect();
    let mut here = Running { device, stream, n };
    let inputs =
        StepInputs { tokens: &tokens, rows: &rows, taps: &[LayerId(0)], given: Given::Nothing, mass: None };
    device.begin(&mut here.stream, &mut pools, step.with_reads(), &inputs).unwrap();
    operations(&mut here);
    device.answer_rows(&mut here.stream);
    let ticket = device.submit(&mut here.stream).unwrap();
    device.wait(&mut here.stream, ticket).unwrap();
    let output = D::output(&here.stream);
    [&output.taps[0][..], output.logits()].concat()
}

/// `tolerance`: of the largest element.
pub fn compare(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    assert!(!expected.is_empty(), "{what}");
    let largest = expected.iter().fold(1e-3f32, |max, x| max.max(x.abs()));
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        let near = (x - y).abs() <= tolerance * largest;
        assert!(near && y.is_finite(), "{what}: element {i} is {x}, not {y}");
    }
}

/// Runs the same operations on both devices. A macro, because they differ in type.
macro_rules! both {
    ($device:expr, $what:expr, $n:expr, $operations:expr) => {
        both!($device, $what, $n, $operations, false)
    };
    ($device:expr, $what:expr, $n:expr, $operations:expr, $wants:expr) => {{
        let found = run(&$device, $n, $wants, $operations);
        let expected = run(&kvist_device::reference::Reference, $n, $wants, $operations);
        // Kernels whose sums depend on the batch also round their operands, to 11 bits.
        let tolerance = if $device.info().batch_invariant { 1e-5 } else { 2e-3 };
        compare(&$what, &found, &expected, tolerance);
    }};
}

pub const ROWS: [usize; 7] = [1, 2, 4, 9, 12, 33, 70];
pub(super) use both;
