//! Linear layers, and the bits of their sums.
use super::rig::*;
use super::{encoded, random};
use kvist_device::weights::{Encoding, FileTensor, WeightFormat};
use kvist_device::*;

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
            let product = |s: &mut Running<'_, D>| {
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
            let product = |s: &mut Running<'_, D>| {
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
        let norm = |s: &mut Running<'_, D>| {
            let weight = s.device.vector(weight.clone()).unwrap();
            let (x, mut out) = (s.buffer(&x), s.out(len));
            s.device.rms_norm(&mut s.stream, &x, Norm { weight: &weight, eps: 1e-5 }, &mut out);
            s.tap(&out);
        };
        add(format!("norm of {len}"), run(device, 3, false, norm));
    }
    all
}
