//! A linear layer in tiles of f16 against the kernel whose sums have a fixed order.
use crate::common::Api;
use crate::routed;
use kvist_device::DeviceError;
use kvist_device::weights::Encoding;
use kvist_device::weights::{FileTensor, WeightFormat};
use kvist_gpu::{Driver, GemmTile, Halves, Kernel, Linear, Product, Routed, Routes, halves_bytes, stack};
use kvist_testing::operations::{encoded, random};

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The sum of the squares of a row.
fn square(row: &[f32]) -> f64 {
    row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()
}

/// A linear layer and its inputs.
pub struct Case {
    pub encoding: Encoding,
    pub outputs: usize,
    pub inputs: usize,
    pub tokens: usize,
    pub x: Vec<f32>,
    pub weights: Vec<u8>,
    pub bias: Option<Vec<f32>>,
    pub cap: Option<f32>,
    pub routed: Routed,
    /// Routed rows with the same row of `x`: [`USED`], or one.
    pub share: usize,
}

const EXPERTS: usize = 5;
/// Of each token.
pub const USED: usize = 2;

impl Case {
    pub fn new(encoding: Encoding, outputs: usize, inputs: usize, tokens: usize) -> Self {
        let seed = (outputs * 31 + inputs) as u64;
        let mut x = random(seed, tokens * inputs, 1.0);
        // As in real models: some channels are far larger than all others, and rows differ.
        for (t, row) in x.chunks_exact_mut(inputs).enumerate() {
            row[3 % inputs] *= if t % 3 == 0 { 1e5 } else { 30.0 };
            let size = [1.0, 1e-3, 1e3, 1.0, 1e15, 1e-15][t % 6];
            row.iter_mut().for_each(|x| *x *= size);
            if t == 7 {
                row.fill(0.0);
            }
        }
        let mut weights = encoded(encoding, outputs, inputs, seed);
        if encoding == Encoding::Table16 {
            let blocks = weights.chunks_exact_mut(encoding.block().1);
            blocks.for_each(|block| block[..4].copy_from_slice(&0.015f32.to_le_bytes()));
        }
        Case {
            encoding,
            outputs,
            inputs,
            tokens,
            x,
            weights,
            bias: None,
            cap: None,
            routed: Routed::No,
            share: USED,
        }
    }

    /// The kernel that computes it with a tile.
    pub fn kernel(&self, tile: GemmTile) -> Kernel {
        let encoding = Encoding::RESIDENT.iter().position(|known| *known == self.encoding).unwrap();
        Kernel::Gemm { encoding: encoding as u32, routed: self.routed, tile }
    }

    /// Rows of the output: more than one for a token that goes to more than one expert.
    fn rows(&self) -> usize {
        self.tokens * if self.routed == Routed::Experts { self.share } else { 1 }
    }

    /// The layer, or those of all experts, which differ in their scale.
    fn layer(&self, gpu: &Api) -> Linear<Api> {
        let shape = [self.outputs, self.inputs];
        let layer = |(e, weights): (u64, Vec<u8>)| {
            let bias = self.bias.as_ref().map(|bias| bias.iter().map(|b| b + e as f32).collect());
            let tensor = FileTensor {
                name: "w",
                shape: &shape,
                encoding: self.encoding,
                bytes: weights.into(),
                factor: 0.5,
            };
            Ok::<_, DeviceError>((tensor, bias))
        };
        let seed = (self.outputs * 31 + self.inputs) as u64;
        let all = (0..EXPERTS as u64).map(|e| match e {
            0 => (e, self.weights.clone()),
            e => (e, encoded(self.encoding, self.outputs, self.inputs, seed + e)),
        });
        let n = if self.routed == Routed::Experts { EXPERTS } else { 1 };
        let all: Vec<_> = all.take(n).map(layer).collect();
        stack(gpu, all.into_iter(), WeightFormat::AsStored).unwrap()
    }

    /// What a kernel computes with poisoned outputs, or with others for one that adds. `None` as the tile: the usual one.
    fn run(&self, gpu: &Api, tile: Option<GemmTile>) -> Vec<f32> {
        let (n, n_out) = (self.rows() as u32, self.rows() * self.outputs);
        let layer = self.layer(gpu);
        let x = gpu.filled("x", &bytes(&self.x)).unwrap();
        // The last one has no rows.
        let experts = routed::experts(self.rows() / USED, USED, EXPERTS - 1, 8);
        let table = routed::table_on(gpu, &experts, EXPERTS);
        let (n_experts, used) = (EXPERTS as u32, USED as u32);
        let routes = Routes { table: &table, n_experts, used, share: self.share as u32 };
        let routes = (self.routed == Routed::Experts).then_some(routes);
        let adds = self.routed == Routed::Sum;
        // A row behind the end, which stays as it is.
        let before = match adds {
            true => random(1, n_out + self.outputs, 1.0),
            false => vec![f32::NAN; n_out + self.outputs],
        };
        let out = gpu.filled("out", &bytes(&before)).unwrap();
        let room = halves_bytes(self.tokens, self.inputs).unwrap();
        let halves = gpu.buffer("halves", room).unwrap();
        gpu.write(&halves, 0, &vec![0xff; room as usize]);
        let halves = Halves::of(halves, room);
        let mut recorder = <Api as Driver>::Recorder::default();
        let inputs = (&x, self.tokens as u32);
        let written = Halves::write(Some(&halves), gpu, &mut recorder, inputs, &[&layer], routes);
        assert!(tile.is_none_or(|tile| !tile.halves) || written.is_some(), "no inputs in f16");
        let written = tile.and(written);
        let cap = self.cap;
        let product =
            Product { x: &x, layer: &layer, out: &out, n, cap, routes, added: adds, halves: written };
        match tile {
            Some(tile) => product.record_as(gpu, &mut recorder, &self.kernel(tile)),
            None => product.record(gpu, &mut recorder),
        }
        let submission = gpu.submit(&mut recorder, &[]);
        gpu.wait(&submission).unwrap();
        let mut found = Vec::new();
        gpu.read_back(&[(&out, 0, before.len() as u64 * 4)], |bytes| {
            found.extend(bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)));
        })
        .unwrap();
        for (found, before) in found[n_out..].iter().zip(&before[n_out..]) {
            assert_eq!(found.to_bits(), before.to_bits(), "written behind the last row");
        }
        found.truncate(n_out);
        found
    }

    /// Compares row by row; the error of a row is relative to its norm. Returns the usual one. Single rows, whose products nearly
    /// cancel, may have more.
    pub fn check(&self, gpu: &Api, tile: GemmTile) -> f64 {
        let (found, expected) = (self.run(gpu, Some(tile)), self.run(gpu, None));
        let (mut squares, mut n) = (0f64, 0f64);
        let rows = found.chunks_exact(self.outputs).zip(expected.chunks_exact(self.outputs));
        for (t, (found, expected)) in rows.enumerate() {
            let what = format!("{} {tile:?} {:?}, token {t}", self.encoding.name(), self.routed);
            assert!(expected.iter().all(|x| x.is_finite()), "{what}: the case itself");
            let difference: Vec<f32> = found.iter().zip(expected).map(|(x, y)| x - y).collect();
            let error = (square(&difference) / square(expected).max(1e-60)).sqrt();
            // Written so that NaN fails.
            assert!(error <= 2e-3, "{what}: error {error}\n{found:?}\n{expected:?}");
            (squares, n) = (squares + error * error, n + 1.0);
        }
        let usual = (squares / n.max(1.0)).sqrt();
        assert!(usual <= 6e-4, "{} {tile:?}: error {usual}", self.encoding.name());
        usual
    }
}

/// Rows of one block, of some steps, and of some steps and a part of one.
pub fn inputs(encoding: Encoding) -> [usize; 3] {
    match encoding.block().0 {
        1 => [37, 516, 130],
        32 => [32, 512, 416],
        _ => [256, 512, 768],
    }
}
