//! Every operation of a device against the scalar reference: every encoding of weights, odd shapes, every number of rows
//! that takes another kernel. Outputs are NaN before an operation.
//!
//! [`all`] runs everything; a panic names the operation, the shape and the element.
mod encoded;
mod linear;
mod rig;

use encoded::bytes;
pub use encoded::{encoded, encodings, random};
use kvist_device::weights::{Encoding, FileTensor, WeightFormat};
use kvist_device::*;
pub use linear::*;
use rig::*;

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
