//! The fast kernels of linear layers for a few tokens against the invariant ones: every encoding, every number of tokens, odd
//! shapes, experts. Outputs are NaN before, and what lies behind them stays as it is.
use crate::common::{self, Api};
use crate::routed;
use kvist_device::weights::{Encoding, FileTensor, WeightFormat};
use kvist_device::{Activation, Device, DeviceError};
use kvist_gpu::{Args, Driver, GpuDevice, Kernel, Linear, Product, Routes, Several};
use kvist_testing::operations::{encoded, encodings, random};
use std::ops::Range;

/// Words behind the outputs.
const BEHIND: usize = 9;
const EXPERTS: usize = 3;
/// Of each token.
const USED: usize = 2;

struct Case {
    encoding: Encoding,
    outputs: usize,
    inputs: usize,
    bias: bool,
    cap: Option<f32>,
}

impl Case {
    fn name(&self) -> String {
        format!("{} {}x{}", self.encoding.name(), self.outputs, self.inputs)
    }

    /// A layer, or that of expert `e`.
    fn layer_of(&self, device: &GpuDevice<Api>, e: usize) -> Linear<Api> {
        self.layers(device, e..e + 1)
    }

    fn layer(&self, device: &GpuDevice<Api>) -> Linear<Api> {
        self.layer_of(device, 0)
    }

    /// The layers of experts as one.
    fn layers(&self, device: &GpuDevice<Api>, experts: Range<usize>) -> Linear<Api> {
        let shape = [self.outputs, self.inputs];
        let layers = experts.map(|e| {
            let bytes = encoded(self.encoding, self.outputs, self.inputs, 3 + e as u64).into();
            let tensor =
                FileTensor { name: "w", shape: &shape, encoding: self.encoding, bytes, factor: 0.75 };
            Ok::<_, DeviceError>((tensor, self.bias.then(|| random(5 + e as u64, self.outputs, 1.0))))
        });
        device.stack(layers, WeightFormat::AsStored).unwrap()
    }
}

/// What a product makes of outputs that are `before`.
struct Run<'a> {
    x: &'a [f32],
    n: usize,
    cap: Option<f32>,
    /// Whether the results are added.
    added: bool,
    /// Each row's expert, and how many of them share a row of `x`; then `n` is the number of rows.
    experts: Option<(&'a [u32], u32)>,
    before: &'a [f32],
}

fn floats(gpu: &Api, values: &[f32]) -> <Api as Driver>::Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    gpu.filled("rows", &bytes).unwrap()
}

fn read(gpu: &Api, buffer: &<Api as Driver>::Buffer, n: usize) -> Vec<f32> {
    routed::read(gpu, buffer, n).into_iter().map(f32::from_bits).collect()
}

impl Run<'_> {
    fn on(&self, device: &GpuDevice<Api>, layer: &Linear<Api>) -> Vec<f32> {
        let gpu = device.driver();
        let (x, out) = (floats(gpu, self.x), floats(gpu, self.before));
        let table = self.experts.map(|(experts, _)| routed::table_on(gpu, experts, EXPERTS));
        let (n_experts, used) = (EXPERTS as u32, USED as u32);
        let routes = self.experts.zip(table.as_ref());
        let mut recorder = Default::default();
        let product = Product {
            x: &x,
            layer,
            out: &out,
            n: self.n as u32,
            cap: self.cap,
            routes: routes.map(|((_, share), table)| Routes { table, n_experts, used, share }),
            added: self.added,
            halves: None,
        };
        product.record(gpu, &mut recorder);
        let submission = gpu.submit(&mut recorder, &[]);
        gpu.wait(&submission).unwrap();
        read(gpu, &out, self.before.len())
    }
}

/// Both results within rounding, of sums that may be a tenth of their products' size, and alike where nothing is written. Real tensor cores drop bits of sums that the emulation keeps; where
/// offsets of weights cancel large products (q2_K) that was 4e-5 of the largest result on an H100.
fn compare(what: &str, fast: &[f32], invariant: &[f32]) {
    let finite = invariant.iter().filter(|x| x.is_finite());
    let largest = finite.fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
    let tolerance = if common::index().is_some() { 2e-4 } else { 1e-5 };
    for (i, (x, y)) in fast.iter().zip(invariant).enumerate() {
        let near = (x - y).abs() <= tolerance * largest || x.to_bits() == y.to_bits();
        assert!(near, "{what}: element {i} is {x}, not {y}");
    }
}

fn poisoned(n: usize, outputs: usize) -> Vec<f32> {
    vec![f32::NAN; n * outputs + BEHIND]
}

fn devices() -> Option<(GpuDevice<Api>, GpuDevice<Api>)> {
    Some((common::fast_device()?, common::device()?))
}

#[test]
fn fast_layers_agree_with_the_invariant_ones() {
    let Some((fast, invariant)) = devices() else { return };
    let case =
        |encoding, outputs, inputs| Case { encoding, outputs, inputs, bias: outputs % 2 == 1, cap: None };
    for encoding in common::some(0, encodings()) {
        let cases = match encoding.block().0 {
            // Rows that begin anywhere, within 8 or 16 bytes; and more than the threads of a block load at once.
            1 => vec![
                case(encoding, 13, 37),
                case(encoding, 4, 44),
                case(encoding, 1, 40),
                case(encoding, 6, 4100),
                case(encoding, 5, 9001),
            ],
            // Tiles of 256 that are not whole, fewer and more of them than warps, and than they load ahead.
            32 => vec![case(encoding, 13, 96), case(encoding, 1, 32), case(encoding, 35, 19 * 256 + 160)],
            block => {
                vec![case(encoding, 13, block), case(encoding, 1, 2 * block), case(encoding, 35, 19 * 256)]
            }
        };
        for case in cases {
            let layers = (case.layer(&fast), case.layer(&invariant));
            for n in 1..=11 {
                if case.inputs > 4000 && ![1, 3, 8, 11].contains(&n) {
                    continue;
                }
                let x = random(n as u64, n * case.inputs, 1.0);
                let before = poisoned(n, case.outputs);
                let run = Run { x: &x, n, cap: case.cap, added: false, experts: None, before: &before };
                let found = run.on(&fast, &layers.0);
                // One token, and several.
                if [1, 8].contains(&n) {
                    assert_eq!(
                        found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                        run.on(&fast, &layers.0).iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                        "the same in every run"
                    );
                }
                compare(&format!("{} by {n}", case.name()), &found, &run.on(&invariant, &layers.1));
            }
        }
    }
}

const SOME: [(Encoding, usize); 6] = [
    (Encoding::F32, 37),
    (Encoding::F16, 44),
    (Encoding::Q3K, 512),
    (Encoding::Q8_0, 2080),
    (Encoding::Q4K, 512),
    (Encoding::Mxfp4, 288),
];

#[test]
fn experts_softcaps_and_parts() {
    let Some((fast, invariant)) = devices() else { return };
    for (encoding, inputs) in SOME {
        let case = Case { encoding, outputs: 21, inputs, bias: true, cap: Some(100.0) };
        let Some(in_parts) =
            common::fast_device_in_parts(encoding.row_bytes(inputs).unwrap() as u64 * 5 + 64)
        else {
            return;
        };
        let layers = (case.layer(&fast), case.layer(&invariant), case.layer(&in_parts));
        assert!(layers.2.parts.len() > 3, "{} parts", layers.2.parts.len());
        for n in [1, 3, 8, 11] {
            let x = random(n as u64, n * inputs, 1.0);
            let values: Vec<f32> = random(9, n * case.outputs, 1.0);
            let filled = [values, vec![f32::NAN; BEHIND]].concat();
            let nan = poisoned(n, case.outputs);
            for added in [false, true] {
                let what = format!("{} by {n}, added: {added}", case.name());
                let before = if added { &filled } else { &nan };
                let run = Run { x: &x, n, cap: case.cap, added, experts: None, before };
                let expected = run.on(&invariant, &layers.1);
                compare(&what, &run.on(&fast, &layers.0), &expected);
                compare(&format!("{what}, in parts"), &run.on(&in_parts, &layers.2), &expected);
            }
        }
        // Experts against each one's layer by itself.
        let all = 0..EXPERTS;
        let stacks = [&fast, &invariant, &in_parts].map(|device| case.layers(device, all.clone()));
        assert!(stacks[2].parts.len() > 3 * EXPERTS, "{} parts", stacks[2].parts.len());
        let alone: Vec<_> = all.map(|e| case.layer_of(&invariant, e)).collect();
        // A few rows, and tiles of them.
        for (tokens, share) in [(1, USED), (2, 1), (5, USED), (11, USED), (20, 1)] {
            let n = tokens * USED;
            let experts = routed::experts(tokens, USED, EXPERTS, tokens as u64);
            let n_x = n / share;
            let x = random(n as u64, n_x * inputs, 1.0);
            let before = poisoned(n, case.outputs);
            let row = |r: usize| {
                let x = &x[r / share * inputs..][..inputs];
                let before = poisoned(1, case.outputs);
                let run = Run { x, n: 1, cap: case.cap, added: false, experts: None, before: &before };
                run.on(&invariant, &alone[experts[r] as usize])[..case.outputs].to_vec()
            };
            let expected: Vec<f32> = (0..n).flat_map(row).chain([f32::NAN; BEHIND]).collect();
            let experts = Some((&experts[..], share as u32));
            let run = Run { x: &x, n, cap: case.cap, added: false, experts, before: &before };
            let what = format!("{} by {n} rows of experts", case.name());
            compare(&what, &run.on(&fast, &stacks[0]), &expected);
            compare(&format!("{what}, in parts"), &run.on(&in_parts, &stacks[2]), &expected);
            let found = run.on(&invariant, &stacks[1]);
            let same = found
                .iter()
                .zip(&expected)
                .all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan());
            assert!(same, "{what}: not the bits of one expert by itself");
        }
    }
}

/// Inputs of any size keep their digits: each token, and each part of a row, has its own.
#[test]
fn inputs_of_every_size() {
    let Some((fast, invariant)) = devices() else { return };
    for (encoding, inputs) in SOME {
        let case = Case { encoding, outputs: 17, inputs, bias: false, cap: None };
        let layers = (case.layer(&fast), case.layer(&invariant));
        let (n, outputs) = (8, case.outputs);
        let mut x = random(4, n * inputs, 1.0);
        for (row, size) in
            x.chunks_exact_mut(inputs).zip([common::TINY, 1e-30, 1e-6, 1.0, 7e4, 1e20, 1e30, 0.0f32])
        {
            row.iter_mut().for_each(|x| *x *= size);
        }
        let before = poisoned(n, outputs);
        let run = Run { x: &x, n, cap: None, added: false, experts: None, before: &before };
        let (found, expected) = (run.on(&fast, &layers.0), run.on(&invariant, &layers.1));
        for t in 0..n {
            let row = t * outputs..(t + 1) * outputs;
            compare(&format!("{} token {t}", case.name()), &found[row.clone()], &expected[row]);
        }
        // One large input beside small ones costs them nothing in other rows; what is not a number shows.
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut x = random(4, n * inputs, 1.0);
            x[inputs + 1] = wrong;
            let found = Run { x: &x, ..run }.on(&fast, &layers.0);
            for (t, row) in found[..n * outputs].chunks_exact(outputs).enumerate() {
                assert!(row.iter().all(|x| x.is_finite() == (t != 1)), "{}: token {t}: {row:?}", case.name());
            }
        }
    }
}

/// One token has kernels of its own: rows of more chunks than one, units that are not whole rounds, inputs of any size.
#[test]
fn one_token() {
    let Some((fast, invariant)) = devices() else { return };
    for encoding in common::some(1, encodings()) {
        let block = encoding.block().0;
        let shapes = [(17, 2 * 4096 + 1024 + block), (16, 3 * block), (3, 11 * 256)];
        for (outputs, inputs) in shapes {
            let case = Case { encoding, outputs, inputs, bias: outputs == 17, cap: None };
            let layers = (case.layer(&fast), case.layer(&invariant));
            for size in [common::TINY, 1.0, 1e30, 0.0f32] {
                let mut x = random(11, inputs, 1.0);
                x.iter_mut().for_each(|x| *x *= size);
                x[inputs / 2] *= 100.0;
                let before = poisoned(1, outputs);
                let run = Run { x: &x, n: 1, cap: None, added: false, experts: None, before: &before };
                let what = format!("{} by one token of {size}", case.name());
                compare(&what, &run.on(&fast, &layers.0), &run.on(&invariant, &layers.1));
            }
            for wrong in [f32::NAN, f32::INFINITY] {
                let mut x = random(4, inputs, 1.0);
                x[inputs - 2] = wrong;
                let before = poisoned(1, outputs);
                let found = Run { x: &x, n: 1, cap: None, added: false, experts: None, before: &before }
                    .on(&fast, &layers.0);
                let row = &found[..outputs];
                assert!(row.iter().all(|x| !x.is_finite()), "{}: {wrong} in {row:?}", case.name());
            }
        }
    }
}

/// Layers in one launch have the bits that each has by itself, and the gate of an MLP those of its own kernel.
#[test]
fn several_layers_in_one_launch() {
    let Some((fast, _)) = devices() else { return };
    let gpu = fast.driver();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for encoding in common::some(2, encodings()) {
        let inputs = 2048 + encoding.block().0.max(8);
        let layer = |outputs: usize| {
            Case { encoding, outputs, inputs, bias: outputs % 2 == 1, cap: None }.layer(&fast)
        };
        let x = random(3, inputs, 1.0);
        let alone = |layer: &Linear<Api>| {
            let before = poisoned(1, layer.outputs as usize);
            Run { x: &x, n: 1, cap: None, added: false, experts: None, before: &before }.on(&fast, layer)
        };
        let row = floats(gpu, &x);
        for sizes in [&[35, 16, 1][..], &[2, 33]] {
            let layers: Vec<_> = sizes.iter().map(|outputs| layer(*outputs)).collect();
            if !gpu.has_several(layers[0].encoding) {
                continue;
            }
            let outs: Vec<_> = sizes.iter().map(|outputs| floats(gpu, &poisoned(1, *outputs))).collect();
            let pairs: Vec<_> = layers.iter().zip(&outs).collect();
            let mut recorder = Default::default();
            Several { x: &row, norm: None, layers: &pairs, activation: None, routes: None }
                .record(gpu, &mut recorder);
            gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
            for (layer, out) in &pairs {
                let found = read(gpu, out, layer.outputs as usize + BEHIND);
                assert_eq!(bits(&found), bits(&alone(layer)), "{} {sizes:?}", encoding.name());
            }
            if gpu.max_normed_inputs() == 0 {
                continue;
            }
            // With a norm before: the results of its own kernel, but for rounding.
            let (weights, eps) = (random(5, inputs, 1.0), 1e-3);
            let normed = normed(&x, &weights, eps);
            let weights = floats(gpu, &weights);
            let outs: Vec<_> = sizes.iter().map(|outputs| floats(gpu, &poisoned(1, *outputs))).collect();
            let pairs: Vec<_> = layers.iter().zip(&outs).collect();
            let norm = Some((&weights, eps));
            Several { x: &row, norm, layers: &pairs, activation: None, routes: None }
                .record(gpu, &mut recorder);
            gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
            for (layer, out) in pairs {
                let n = layer.outputs as usize;
                let before = poisoned(1, n);
                let run = Run { x: &normed, n: 1, cap: None, added: false, experts: None, before: &before };
                let (found, expected) = (read(gpu, out, n + BEHIND), run.on(&fast, layer));
                let most = expected[..n].iter().fold(0f32, |most, x| most.max(x.abs()));
                for (found, expected) in found[..n].iter().zip(&expected) {
                    let error = (found - expected).abs();
                    assert!(error <= 4e-6 * most, "{} {sizes:?}: {found}, not {expected}", encoding.name());
                }
                assert!(found[n..].iter().all(|x| x.is_nan()), "behind the outputs");
            }
        }
        let pair = [layer(21), layer(21)];
        let activations = [Activation::Silu, Activation::Gelu, Activation::Clamped { limit: 0.5 }];
        for activation in activations.into_iter().filter(|_| gpu.has_several(pair[0].encoding)) {
            let outs = [floats(gpu, &poisoned(1, 21)), floats(gpu, &poisoned(1, 21))];
            let layers = [(&pair[0], &outs[0]), (&pair[1], &outs[1])];
            let mut recorder = Default::default();
            let gate = Some(activation);
            let several = Several { x: &row, norm: None, layers: &layers, activation: gate, routes: None };
            several.record(gpu, &mut recorder);
            gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
            let found = read(gpu, &outs[0], 21 + BEHIND);
            assert!(read(gpu, &outs[1], 21 + BEHIND).iter().all(|x| x.is_nan()), "not written");
            let expected = gated(gpu, activation, &alone(&pair[0])[..21], &alone(&pair[1])[..21]);
            assert_eq!(bits(&found[..21]), bits(&expected), "{} {activation:?}", encoding.name());
            assert!(found[21..].iter().all(|x| x.is_nan()), "behind the outputs");
        }
    }
}

/// Gate and up layers of experts in one launch: each routed row has the bits of its expert's own layers, and of the gate's own kernel.
#[test]
fn experts_gates_in_one_launch() {
    let Some((fast, _)) = devices() else { return };
    let gpu = fast.driver();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (i, encoding) in common::some(3, encodings()).enumerate() {
        let (outputs, inputs) = (21, 512 + encoding.block().0.max(8));
        let case = Case { encoding, outputs, inputs, bias: i % 2 == 1, cap: None };
        let [gate, up] = [0..EXPERTS, EXPERTS..2 * EXPERTS].map(|experts| case.layers(&fast, experts));
        if !gpu.has_several(gate.encoding) {
            continue;
        }
        for (tokens, share) in [(1, USED), (5, USED), (3, 1)] {
            let n = tokens * USED;
            let experts = routed::experts(tokens, USED, EXPERTS, tokens as u64);
            let x = random(n as u64, n / share * inputs, 1.0);
            let table = routed::table_on(gpu, &experts, EXPERTS);
            let (n_experts, used) = (EXPERTS as u32, USED as u32);
            let routes = Routes { table: &table, n_experts, used, share: share as u32 };
            let outs = [(); 2].map(|()| floats(gpu, &poisoned(n, outputs)));
            let layers = [(&gate, &outs[0]), (&up, &outs[1])];
            let (x_there, activation) = (floats(gpu, &x), Activation::Silu);
            let mut recorder = Default::default();
            let routes = Some((routes, n as u32));
            let several =
                Several { x: &x_there, norm: None, layers: &layers, activation: Some(activation), routes };
            several.record(gpu, &mut recorder);
            gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
            let found = read(gpu, &outs[0], n * outputs + BEHIND);
            for (r, expert) in experts.iter().enumerate() {
                let x = &x[r / share * inputs..][..inputs];
                let alone = |e: usize| {
                    let before = poisoned(1, outputs);
                    let run = Run { x, n: 1, cap: None, added: false, experts: None, before: &before };
                    run.on(&fast, &case.layer_of(&fast, e))[..outputs].to_vec()
                };
                let e = *expert as usize;
                let expected = gated(gpu, activation, &alone(e), &alone(EXPERTS + e));
                let row = &found[r * outputs..][..outputs];
                assert_eq!(bits(row), bits(&expected), "{} row {r} of {n}, share {share}", case.name());
            }
            assert!(found[n * outputs..].iter().all(|x| x.is_nan()), "behind the outputs");
            assert!(read(gpu, &outs[1], n * outputs).iter().all(|x| x.is_nan()), "not written");
        }
    }
}

/// A row through a norm.
fn normed(x: &[f32], weights: &[f32], eps: f32) -> Vec<f32> {
    let square: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let scale = 1.0 / (square / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weights).map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32).collect()
}

/// The gate's own kernel.
fn gated(gpu: &Api, activation: Activation, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let (number, limit) = match activation {
        Activation::Silu => (0, 0.0),
        Activation::Gelu => (1, 0.0),
        Activation::Clamped { limit } => (2, limit),
    };
    let (out, up) = (floats(gpu, gate), floats(gpu, up));
    let mut recorder = Default::default();
    let args = Args::new(&[gate.len() as u32, number]).f32(limit);
    let groups = [gate.len().div_ceil(64) as u32, 1, 1];
    gpu.record(&mut recorder, &Kernel::Gated, &[Some(&up), Some(&out)], args, groups);
    gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
    read(gpu, &out, gate.len())
}
