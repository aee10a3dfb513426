//! Every operation of a device against the scalar reference: every encoding of weights, odd shapes, every number of rows
//! that takes another kernel. Outputs are NaN before an operation.
//!
//! [`all`] runs everything; a panic names the operation, the shape and the element.
use crate::SplitMix64;
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::reference::Reference;
use kvist_device::weights::{Encoding, FileTensor, WeightFormat};
use kvist_device::*;

const LIMITS: StepLimits = StepLimits { max_tokens: 70, max_rows: 35 };
/// More than a workgroup has invocations.
const VOCAB: usize = 601;
const FREQUENCIES: [f32; 3] = [1.0, 0.3, 0.01];

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

pub fn random(seed: u64, n: usize, amplitude: f32) -> Vec<f32> {
    let mut random = SplitMix64(seed);
    (0..n).map(|_| amplitude * (random.unit() * 2.0 - 1.0) as f32).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A device whose models use K and V in its own pools.
pub trait Runs: Device + Backend {}
impl<D: Device + Backend> Runs for D {}

/// Runs operations in a step of `n` tokens whose last half is wanted.
struct Step_<'d, D: Device> {
    device: &'d D,
    stream: D::Stream,
    n: usize,
}

impl<D: Device> Step_<'_, D> {
    fn buffer(&mut self, rows: &[f32]) -> D::Buffer {
        let width = rows.len() / self.n;
        let mut buffer = self.device.buffer(RowsOf::Tokens, width, &LIMITS).unwrap();
        self.device.upload(&mut self.stream, rows, &mut buffer);
        buffer
    }
    /// A buffer of NaN.
    fn out(&mut self, width: usize) -> D::Buffer {
        self.buffer(&vec![f32::NAN; self.n * width])
    }
    fn tap(&mut self, buffer: &D::Buffer) {
        self.device.tap(&mut self.stream, 0, buffer);
    }
}

/// What `operations` taps, and the logits if the step `wants` any.
fn run<D: Device + Backend>(
    device: &D,
    n: usize,
    wants: bool,
    operations: impl FnOnce(&mut Step_<'_, D>),
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
    let mut here = Step_ { device, stream, n };
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
fn compare(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
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
        let expected = run(&Reference, $n, $wants, $operations);
        // Kernels whose sums depend on the batch also round their operands, to 11 bits.
        let tolerance = if $device.info().batch_invariant { 1e-5 } else { 2e-3 };
        compare(&$what, &found, &expected, tolerance);
    }};
}

const ROWS: [usize; 7] = [1, 2, 4, 9, 12, 33, 70];

/// Random blocks with scales of the usual size.
pub fn encoded(encoding: Encoding, rows: usize, inputs: usize, seed: u64) -> Vec<u8> {
    let mut random_ = SplitMix64(seed);
    let scale = |random: &mut SplitMix64| f16::from_f32(0.01 + random.unit() as f32 * 0.02).to_le_bytes();
    let values = || random(seed, rows * inputs, 1.0);
    match encoding {
        Encoding::F32 => return bytes(&values()),
        Encoding::F16 => return values().iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Encoding::BF16 => return values().iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => {}
    }
    let mut all: Vec<u8> =
        (0..encoding.row_bytes(inputs).unwrap() * rows).map(|_| random_.next() as u8).collect();
    let scales: &[usize] = match encoding {
        Encoding::Q4_1 | Encoding::Q5_1 | Encoding::Q4K | Encoding::Q5K => &[0, 2],
        Encoding::Q2K => &[80, 82],
        Encoding::Q3K => &[108],
        Encoding::Q6K => &[208],
        Encoding::Tq2_0 => &[64],
        Encoding::Mxfp4 | Encoding::Int8 => &[],
        _ => &[0],
    };
    if encoding == Encoding::Int8 {
        // A scale per row.
        for row in all.chunks_exact_mut(encoding.row_bytes(inputs).unwrap()) {
            let scale = (0.01 + random_.unit() as f32 * 0.02).to_le_bytes();
            row.chunks_exact_mut(36).for_each(|block| block[..4].copy_from_slice(&scale));
        }
    }
    for block in all.chunks_exact_mut(encoding.block().1) {
        if encoding == Encoding::Mxfp4 {
            block[0] = 118 + block[0] % 9;
        }
        for at in scales {
            block[*at..at + 2].copy_from_slice(&scale(&mut random_));
        }
    }
    all
}

/// What kernels decode. No file is in `Table16`: instead of it, encodings that become it.
pub fn encodings() -> Vec<Encoding> {
    let mut all = Encoding::RESIDENT.to_vec();
    all.retain(|encoding| *encoding != Encoding::Table16);
    all.extend([Encoding::Iq2Xxs, Encoding::Tq2_0, Encoding::Q1_0]);
    all
}

/// Every operation, with weights in these encodings.
pub fn all<D: Runs>(device: &D, encodings: &[Encoding]) {
    linear_layers(device, encodings, 13);
    linear_layers_together(device);
    linear_layers_give_a_row_the_same_bits_in_every_batch(device, encodings);
    embeddings(device, encodings);
    norms_of_rows_and_heads(device);
    rope_gates_sums_and_columns(device);
    experts_of_every_token(device);
    logits_of_the_wanted_rows(device);
    ties_and_nan_among_logits(device);
}

/// Linear layers with so many outputs.
pub fn linear_layers(device: &impl Runs, encodings: &[Encoding], outputs: usize) {
    for (i, &encoding) in encodings.iter().enumerate() {
        let inputs = match encoding.block().0 {
            1 => [37, 40 + i][i % 2],
            32 => 96,
            block => 2 * block,
        };
        // Outputs are odd, so that the last word of scales is half used.
        let weights = encoded(encoding, outputs, inputs, i as u64 + 1);
        let shape = [outputs, inputs];
        let tensor =
            |factor| FileTensor { name: "w", shape: &shape, encoding, bytes: (&weights[..]).into(), factor };
        for n in if i < 3 { &ROWS[..] } else { &[1, 9, 33] } {
            let x = random(77, n * inputs, 1.0);
            let bias = n.is_multiple_of(2).then(|| random(5, outputs, 1.0));
            let what = format!("{} {outputs}x{inputs} by {n}", encoding.name());
            macro_rules! product {
                () => {
                    |s| {
                        let layer = s.device.linear(tensor(0.5), WeightFormat::AsStored, bias.clone());
                        let (layer, x, mut out) = (layer.unwrap(), s.buffer(&x), s.out(outputs));
                        s.device.matmul(&mut s.stream, &x, &mut [(&layer, &mut out)]);
                        // Once more, to what is there.
                        let mut scratch = s.out(outputs);
                        s.device.matmul_add(&mut s.stream, &x, &layer, None, &mut scratch, &mut out);
                        s.tap(&out);
                    }
                };
            }
            // The reference multiplies its weights by no factor: it is in them.
            both!(*device, what, *n, product!());
        }
    }
}

/// Layers that share their inputs, of one encoding and of two, and the gate of an MLP.
pub fn linear_layers_together<D: Runs>(device: &D) {
    [512, 2304].into_iter().for_each(|inputs| layers_of_the_same_inputs(device, inputs));
}

fn layers_of_the_same_inputs<D: Runs>(device: &D, inputs: usize) {
    let names = [Encoding::Q4K, Encoding::Q8_0, Encoding::Q8_0, Encoding::Q8_0, Encoding::Q8_0];
    let sizes = [7, 18, 18, 3, 33];
    let weights: Vec<_> =
        names.iter().zip(sizes).map(|(encoding, outputs)| encoded(*encoding, outputs, inputs, 8)).collect();
    for n in [1, 2] {
        let (x, scale) = (random(79, n * inputs, 1.0), random(80, inputs, 1.0));
        macro_rules! together {
            () => {
                |s| {
                    let layer = |i: usize| {
                        let (shape, bytes) = ([sizes[i], inputs], (&weights[i][..]).into());
                        let tensor =
                            FileTensor { name: "w", shape: &shape, encoding: names[i], bytes, factor: 1.0 };
                        s.device.linear(tensor, WeightFormat::AsStored, None).unwrap()
                    };
                    let all = [0, 1, 2, 3, 4].map(layer);
                    let (x, mut h) = (s.buffer(&x), s.out(inputs));
                    let mut outs = sizes.map(|outputs| s.out(outputs));
                    let mut pairs: Vec<_> = all.iter().zip(&mut outs).collect();
                    s.device.matmul(&mut s.stream, &x, &mut pairs);
                    outs.iter().for_each(|out| s.tap(out));
                    let weight = s.device.vector(scale.clone()).unwrap();
                    let norm = Norm { weight: &weight, eps: 1e-5 };
                    let [mut gate, mut up] = [s.out(18), s.out(18)];
                    let layers = [(&all[1], &mut gate), (&all[2], &mut up)];
                    s.device.norm_gated(&mut s.stream, &x, norm, &mut h, Activation::Silu, layers);
                    s.tap(&gate);
                    for of in [1..4, 0..5] {
                        let mut outs: Vec<_> = of.clone().map(|i| s.out(sizes[i])).collect();
                        let mut pairs: Vec<_> = all[of].iter().zip(&mut outs).collect();
                        s.device.norm_matmul(&mut s.stream, &x, norm, &mut h, &mut pairs);
                        outs.iter().for_each(|out| s.tap(out));
                    }
                }
            };
        }
        both!(*device, format!("layers together by {n}"), n, together!());
    }
}

/// One row at a time, a few at a time or tile by tile: a row's sums have the same order.
pub fn linear_layers_give_a_row_the_same_bits_in_every_batch<D: Runs>(device: &D, encodings: &[Encoding]) {
    for (i, &encoding) in encodings.iter().enumerate() {
        let (outputs, inputs) = (45, encoding.block().0.max(5) * 3);
        let weights = encoded(encoding, outputs, inputs, i as u64 + 9);
        let shape = [outputs, inputs];
        let x = random(78, 70 * inputs, 1.0);
        let bias = random(6, outputs, 1.0);
        let rows = |first: usize, n: usize| -> Vec<u32> {
            let x = &x[first * inputs..(first + n) * inputs];
            let product = |s: &mut Step_<'_, D>| {
                let (bytes, factor) = ((&weights[..]).into(), 0.75);
                let tensor = FileTensor { name: "w", shape: &shape, encoding, bytes, factor };
                let layer = s.device.linear(tensor, WeightFormat::AsStored, Some(bias.clone())).unwrap();
                let (x, mut out) = (s.buffer(x), s.out(outputs));
                s.device.matmul(&mut s.stream, &x, &mut [(&layer, &mut out)]);
                s.tap(&out);
            };
            run(device, n, false, product).iter().map(|x| x.to_bits()).collect()
        };
        let all = rows(0, 70);
        for (first, n) in [(0, 1), (69, 1), (31, 3), (40, 8), (5, 12), (20, 33)] {
            let alone = rows(first, n);
            assert!(alone == all[first * outputs..(first + n) * outputs], "{} {first} {n}", encoding.name());
        }
    }
}

/// The bits of linear layers and norms, with sums of many lengths: to compare devices whose sums have the same order.
pub fn bits_of_sums<D: Runs>(device: &D) -> Vec<(String, Vec<u32>)> {
    let mut all = Vec::new();
    let mut add =
        |what: String, found: Vec<f32>| all.push((what, found.iter().map(|x| x.to_bits()).collect()));
    let outputs = 19;
    for (encoding, inputs) in
        [(Encoding::F32, 1), (Encoding::F32, 37), (Encoding::Q8_0, 1024), (Encoding::Q4K, 512)]
    {
        let weights = encoded(encoding, outputs, inputs, 4);
        for n in ROWS {
            let x = random(n as u64, n * inputs, 1.0);
            let product = |s: &mut Step_<'_, D>| {
                let (name, shape, bytes) = ("w", &[outputs, inputs], (&weights[..]).into());
                let tensor = FileTensor { name, shape, encoding, bytes, factor: 1.0 };
                let layer = s.device.linear(tensor, WeightFormat::AsStored, None).unwrap();
                let (x, mut out) = (s.buffer(&x), s.out(outputs));
                s.device.matmul(&mut s.stream, &x, &mut [(&layer, &mut out)]);
                s.tap(&out);
            };
            add(format!("{} {inputs} by {n}", encoding.name()), run(device, n, false, product));
        }
    }
    for len in [1, 7, 128, 300, 2048] {
        let (x, weight) = (random(1, 3 * len, 3.0), random(2, len, 1.0));
        let norm = |s: &mut Step_<'_, D>| {
            let weight = s.device.vector(weight.clone()).unwrap();
            let (x, mut out) = (s.buffer(&x), s.out(len));
            s.device.rms_norm(&mut s.stream, &x, Norm { weight: &weight, eps: 1e-5 }, &mut out);
            s.tap(&out);
        };
        add(format!("norm of {len}"), run(device, 3, false, norm));
    }
    all
}

pub fn embeddings<D: Runs>(device: &D, encodings: &[Encoding]) {
    for (i, &encoding) in encodings.iter().enumerate() {
        let width = encoding.block().0.max(45);
        let weights = encoded(encoding, VOCAB, width.next_multiple_of(encoding.block().0), i as u64);
        let shape = [VOCAB, width.next_multiple_of(encoding.block().0)];
        macro_rules! embed {
            () => {
                |s| {
                    let (bytes, factor) = ((&weights[..]).into(), 1.0);
                    let tensor = FileTensor { name: "w", shape: &shape, encoding, bytes, factor };
                    let table = s.device.linear(tensor, WeightFormat::AsStored, None).unwrap();
                    let mut out = s.out(shape[1]);
                    s.device.embed(&mut s.stream, &table, 1.5, &mut out);
                    s.tap(&out);
                }
            };
        }
        both!(*device, format!("embedding in {}", encoding.name()), 7, embed!());
    }
}

pub fn norms_of_rows_and_heads<D: Runs>(device: &D) {
    for (n, width, len) in
        [(1, 40, 40), (5, 300, 300), (16, 60, 20), (3, 257, 257), (2, 1, 1), (2, 2052, 2052), (1, 9004, 9004)]
    {
        let (x, weight) = (random(1, n * width, 3.0), random(2, len, 1.0));
        macro_rules! norm {
            ($in_place:expr) => {
                |s| {
                    let weight = s.device.vector(weight.clone()).unwrap();
                    let norm = Norm { weight: &weight, eps: 1e-5 };
                    let mut x = s.buffer(&x);
                    if $in_place {
                        s.device.norm_in_place(&mut s.stream, &mut x, norm);
                        s.tap(&x);
                    } else {
                        let mut out = s.out(width);
                        s.device.rms_norm(&mut s.stream, &x, norm, &mut out);
                        s.tap(&out);
                    }
                }
            };
        }
        both!(*device, format!("in place {n} {width} {len}"), n, norm!(true));
        if width == len {
            both!(*device, format!("norm {n} {width}"), n, norm!(false));
        }
    }
}

pub fn rope_gates_sums_and_columns<D: Runs>(device: &D) {
    for n in ROWS {
        let (x, y) = (random(3, n * 60, 2.0), random(4, n * 60, 2.0));
        macro_rules! on_x {
            (|$s:ident, $x:ident, $y:ident| $body:block) => {
                |$s| {
                    let (mut $x, $y) = ($s.buffer(&x), $s.buffer(&y));
                    $body
                    $s.tap(&$x);
                }
            };
        }
        for rope in [0, 1] {
            let what = format!("rope {rope} of {n}");
            both!(*device, what, n, on_x!(|s, a, _b| { s.device.rope(&mut s.stream, &mut a, 20, rope) }));
        }
        for activation in [Activation::Silu, Activation::Gelu, Activation::Clamped { limit: 1.2 }] {
            let what = format!("{activation:?} of {n}");
            both!(
                *device,
                what,
                n,
                on_x!(|s, a, b| { s.device.gated(&mut s.stream, activation, &mut a, &b) })
            );
        }
        both!(
            *device,
            format!("sum of {n}"),
            n,
            on_x!(|s, a, b| { s.device.add(&mut s.stream, &mut a, &b) })
        );
        macro_rules! concat {
            () => {
                |s| {
                    let (a, b, mut out) = (s.buffer(&x), s.buffer(&y[..n * 7]), s.out(67));
                    s.device.concat(&mut s.stream, &a, &b, &mut out);
                    s.tap(&out);
                }
            };
        }
        both!(*device, format!("columns of {n}"), n, concat!());
    }
}

/// f32, or bf16 where f32 would not take the kernels that others take.
fn floats<D: Runs>(device: &D) -> Encoding {
    if device.info().batch_invariant { Encoding::F32 } else { Encoding::BF16 }
}

fn encoded_floats(encoding: Encoding, values: &[f32]) -> Vec<u8> {
    match encoding {
        Encoding::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => bytes(values),
    }
}

pub fn experts_of_every_token<D: Runs>(device: &D) {
    for (n, used, renormalise) in [(1, 2, true), (3, 1, false), (9, 2, false), (16, 5, true), (41, 1, true)] {
        // Which experts a token uses must not depend on rounding: the router is exact.
        experts::<D, 40, 24, 5>(device, (Encoding::F32, floats(device)), n, (used, renormalise));
    }
    // In blocks, and a router that rounds, whose inputs the layers of experts may share: more experts than rows, and many rows.
    experts::<D, 64, 32, 60>(device, (Encoding::BF16, Encoding::Q8_0), 6, (2, true));
    experts::<D, 64, 32, 6>(device, (Encoding::BF16, Encoding::Q8_0), 64, (3, false));
}

fn experts<D: Runs, const HIDDEN: usize, const WIDTH: usize, const N_EXPERTS: usize>(
    device: &D,
    (router, encoding): (Encoding, Encoding),
    n: usize,
    (used, renormalise): (usize, bool),
) {
    let x = random(8, n * HIDDEN, 1.0);
    macro_rules! experts {
        () => {
            |s| {
                let tensor = |to: Encoding, shape: &'static [usize; 2], seed: u64| {
                    let (name, factor, [outputs, inputs]) = ("w", 1.0, *shape);
                    let bytes = match to {
                        Encoding::Q8_0 => encoded(to, outputs, inputs, seed),
                        _ => encoded_floats(to, &random(seed, outputs * inputs, 0.5)),
                    };
                    let bias = random(seed + 100, outputs, 0.5);
                    (FileTensor { name, shape, encoding: to, bytes: bytes.into(), factor }, bias)
                };
                let stack = |shape, seed: u64| {
                    let experts = (1..N_EXPERTS as u64 + 1).map(|e| {
                        let (tensor, bias) = tensor(encoding, shape, 10 * e + seed);
                        Ok::<_, DeviceError>((tensor, Some(bias)))
                    });
                    s.device.stack(experts.collect::<Vec<_>>().into_iter(), WeightFormat::AsStored).unwrap()
                };
                let (mut router, mut bias) = tensor(router, &[N_EXPERTS, HIDDEN], 1);
                if router.encoding != Encoding::F32 {
                    // Rounding must change no choice and hardly a weight: every other of the first experts is far ahead of the others.
                    router.bytes = encoded_floats(router.encoding, &random(1, N_EXPERTS * HIDDEN, 0.05)).into();
                    let is_ahead = |e: usize| e % 2 == 1 && e < 2 * used;
                    bias.iter_mut().enumerate().for_each(|(e, b)| *b += if is_ahead(e) { 40.0 } else { 0.0 });
                }
                let layer = Experts {
                    router: s.device.linear(router, WeightFormat::AsStored, Some(bias)).unwrap(),
                    gate: stack(&[WIDTH, HIDDEN], 0),
                    up: stack(&[WIDTH, HIDDEN], 1),
                    down: stack(&[HIDDEN, WIDTH], 2),
                    routing: Routing { n_experts: N_EXPERTS, used, width: WIDTH, renormalise },
                };
                let (x, mut out) = (s.buffer(&x), s.out(HIDDEN));
                s.device.experts(&mut s.stream, &x, &layer, Activation::Silu, &mut out);
                s.tap(&out);
            }
        };
    }
    both!(*device, format!("experts: {used} of {N_EXPERTS} for each of {n}"), n, experts!());
}

pub fn logits_of_the_wanted_rows<D: Runs>(device: &D) {
    let encoding = floats(device);
    let weights = encoded_floats(encoding, &random(9, VOCAB * 40, 1.0));
    for (n, cap) in [(1, None), (2, Some(3.0)), (7, Some(30.0)), (16, None), (30, None)] {
        let x = random(10, n * 40, 1.0);
        macro_rules! logits {
            () => {
                |s| {
                    let (name, factor) = ("w", 1.0);
                    let shape = [VOCAB, 40];
                    let tensor =
                        FileTensor { name, shape: &shape, encoding, bytes: (&weights[..]).into(), factor };
                    let head = s.device.linear(tensor, WeightFormat::AsStored, None).unwrap();
                    let x = s.buffer(&x);
                    let mut wanted = s.device.buffer(RowsOf::Wanted, 40, &LIMITS).unwrap();
                    s.device.wanted_rows(&mut s.stream, &x, &mut wanted);
                    s.device.logits(&mut s.stream, &wanted, &head, cap);
                    s.tap(&x);
                }
            };
        }
        both!(*device, format!("logits of {n}, {cap:?}"), n, logits!(), true);
    }
}

/// A row with NaN gives no token; of equal logits the lowest token is the most likely.
pub fn ties_and_nan_among_logits<D: Runs>(device: &D) {
    let x = [1.0f32];
    let answers = |logits: &[f32], output: RowOutput| -> String {
        let weights = bytes(logits);
        let mut result = String::new();
        run(device, 1, true, |s| {
            let (name, encoding, factor) = ("w", Encoding::F32, 1.0);
            let shape = [VOCAB, 1];
            let tensor = FileTensor { name, shape: &shape, encoding, bytes: (&weights[..]).into(), factor };
            let head = s.device.linear(tensor, WeightFormat::AsStored, None).unwrap();
            let x = s.buffer(&x);
            s.device.want_rows(&mut s.stream, &[WantedRow { row: 0, output }]);
            s.device.logits(&mut s.stream, &x, &head, None);
            s.device.answer_rows(&mut s.stream);
            let ticket = s.device.submit(&mut s.stream).unwrap();
            s.device.wait(&mut s.stream, ticket).unwrap();
            let output = D::output_mut(&mut s.stream);
            result = output.rows().map(|row| format!("{row:?}")).collect();
            s.tap(&x);
        });
        result
    };
    // Many different ones, few, and all equal: the device finds them together, or one after the other. A draw is the host's.
    let mut host = HostSampler::default();
    for levels in [1 << 20, 9, 1] {
        let logits: Vec<f32> = random(levels, VOCAB, 1.0)
            .iter()
            .map(|x| (x * levels as f32).round() / levels as f32 * 8.0 + 0.0)
            .collect();
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        for k in [1, 2, 40, 64, 65, VOCAB as u32] {
            let found = answers(&logits, RowOutput::TopK(k));
            assert_eq!(found, format!("TopK({:?})", &sorted[..k as usize]), "{levels} levels");
            for uniform in [0.1, 0.9] {
                let params = SampleParams { temperature: 0.7, top_k: k, top_p: 0.95, min_p: 0.01, uniform };
                let drawn = host.sample(&logits, &params).unwrap();
                let found = answers(&logits, RowOutput::Sample(params));
                assert_eq!(found, format!("Token({drawn})"), "{levels} levels, {params:?}");
            }
        }
    }
    let mut logits: Vec<f32> = (0..VOCAB).map(|i| (i % 7) as f32).collect();
    assert_eq!(answers(&logits, RowOutput::Argmax), "Token(6)");
    assert_eq!(answers(&logits, RowOutput::TopK(3)), "TopK([(6, 6.0), (13, 6.0), (20, 6.0)])");
    logits[36] = f32::NAN;
    assert_eq!(answers(&logits, RowOutput::Argmax), "Failed(Nan)");
    assert_eq!(answers(&logits, RowOutput::TopK(3)), "Failed(Nan)");
    let nothing = [f32::NEG_INFINITY; VOCAB];
    assert_eq!(answers(&nothing, RowOutput::Argmax), "Token(0)");
}
