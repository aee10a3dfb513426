//! Results to the last bit, as they were when [`NUMERICS`] got its value. K and V of other processes are reused by that number.
//!
//! The inputs are few and fixed, and the instruction set is the portable one, which computes what it does on every machine, and for products
//! of words AVX2, where the machine has it. The functions of the C library may differ: the test runs where it was recorded.
use crate::decoding::*;
use kvist_cache::Span;
use kvist_cache::kinds::Visibility;
use kvist_cpu::arch::Isa;
use kvist_cpu::linear::{Inputs, Matrix};
use kvist_cpu::{Compute, Cpu, NUMERICS};
use kvist_device::weights::Encoding;
use kvist_testing::SplitMix64;

/// The results that `NUMERICS` stands for. If a kernel computes other bits now: raise it, and then put here what the test found.
const RECORDED: u32 = 6;

/// By encoding of the weights.
const LINEAR: &[(&str, u64)] = &[
    ("F32", 0x0d55e0599facbb2d),
    ("F16", 0xfe368bfe8b2e89d5),
    ("BF16", 0x34514996d964e5d1),
    ("Q8_0", 0x943d417148ca374d),
    ("Q4_0", 0x78961c97c5bf1b79),
    ("Q4_1", 0x08d9c4a2e0f74ea5),
    ("Q5_0", 0x6646e595a8ac0a69),
    ("Q5_1", 0x8dab155bd8260491),
    ("Q2K", 0xa2c341dc9052bc85),
    ("Q3K", 0xfe9a846ddd2bbeb5),
    ("Q4K", 0xfe0a86008dacb45d),
    ("Q5K", 0xf60eafee2893284d),
    ("Q6K", 0xa87847a2a03614ed),
    ("Iq4Nl", 0x4a3279a755965e69),
    ("Iq4Xs", 0xec7d04c3a91e9e55),
    ("Mxfp4", 0x20a864ad443eaf25),
    ("Table16", 0xca25029045b7b9a5),
    ("Int8", 0x95c313e9b57e444d),
];

/// By storage of K and V.
const ATTENTION: &[(&str, u64)] = &[
    ("f32", 0x312962973969e976),
    ("f32-rot", 0xb3004dbf6e1c13cd),
    ("f16", 0xb60dae47f89f818f),
    ("f16-rot", 0x8941f85ef9523fe6),
    ("bf16", 0x06fe96bbe4bd6036),
    ("bf16-rot", 0xda75ab339d87eead),
    ("q8", 0x818cf3cb5350e385),
    ("q8-rot", 0xf215d02df45651d0),
    ("q8-64", 0xd97184148a9e431c),
    ("q8-64-rot", 0x996ff79f981da009),
    ("q4", 0xd94e3cef4d99f59f),
    ("q4-rot", 0x15ee4892a55d741c),
    ("q4-64", 0x406228de42932c89),
    ("q4-64-rot", 0xb6199b4972d02f48),
    ("t4", 0xe70161e2923dea84),
    ("t4-o", 0xa34c2606e35f8e0f),
];

/// Of prompts with `fast_prefill`, by storage of K and V.
const FAST_ATTENTION: &[(&str, u64)] =
    &[("f16", 0xe7fe7ef4aa65e9bc), ("q8", 0x452ce64bdb951fce), ("t4", 0x234f5647223900c2)];

/// The same, with AVX2.
const WORD_ATTENTION: &[(&str, u64)] = &[
    ("f16", 0xd9fa98a6cdcae423),
    ("q8", 0x715b5af660d27bcf),
    ("q4", 0x941b930f7aef3814),
    ("t4", 0x973e6758eaae58bd),
];

/// FNV-1a.
fn hash(values: impl IntoIterator<Item = f32>) -> u64 {
    let bytes = values.into_iter().flat_map(|value| value.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn portable(deterministic: bool) -> Compute {
    Compute::new("portable".parse::<Isa>().unwrap(), 1).deterministic(deterministic)
}

/// Compares what was computed with what was recorded, for all entries at once.
fn compare(what: &str, recorded: &[(&str, u64)], found: Vec<(String, u64)>) {
    let lines =
        || found.iter().map(|(name, hash)| format!("    (\"{name}\", {hash:#018x}),\n")).collect::<String>();
    let same = found.iter().map(|(name, hash)| (name.as_str(), *hash)).eq(recorded.iter().copied());
    assert!(
        same && NUMERICS == RECORDED,
        "{what}: NUMERICS is {NUMERICS}, and results were recorded for {RECORDED}. If a kernel computes other bits now, raise it in \
         crates/cpu/src/lib.rs, and record\n{}",
        lines()
    );
}

/// Some of a file's encodings: each way to compute, and each super-block.
#[test]
fn linear_layers_compute_what_they_did() {
    let encodings = [
        Encoding::F32,
        Encoding::F16,
        Encoding::BF16,
        Encoding::Q8_0,
        Encoding::Q4_0,
        Encoding::Q4_1,
        Encoding::Q5_0,
        Encoding::Q5_1,
        Encoding::Q2K,
        Encoding::Q3K,
        Encoding::Q4K,
        Encoding::Q5K,
        Encoding::Q6K,
        Encoding::Iq4Nl,
        Encoding::Iq4Xs,
        Encoding::Mxfp4,
        Encoding::Table16,
        Encoding::Int8,
    ];
    let (outputs, inputs) = (37, 512);
    let mut found = Vec::new();
    for encoding in encodings {
        let mut random = SplitMix64(7);
        let (elements, bytes) = encoding.block();
        // Read as f16 or as f32, two or four such bytes are a number below 1, wherever the scales are.
        let mut block = || (0..bytes).map(|_| random.next() as u8 & 0x3b).collect::<Vec<u8>>();
        let mut file: Vec<u8> = (0..outputs * inputs / elements).flat_map(|_| block()).collect();
        if encoding == Encoding::Table16 {
            // One table for all rows.
            file.chunks_exact_mut(bytes)
                .for_each(|block| (4..20).for_each(|i| block[i] = (i * 53 % 256) as u8));
        }
        let x: Vec<f32> = (0..9 * inputs).map(|_| random.unit() as f32 * 2.0 - 1.0).collect();
        let mut all = Vec::new();
        for deterministic in [false, true] {
            let compute = portable(deterministic);
            let matrix = Matrix::pack(&compute, encoding, outputs, inputs, &file).unwrap();
            for n in [1, 9] {
                let mut out = vec![f32::NAN; n * outputs];
                matrix.multiply(&compute, &mut Inputs::default().of(&x[..n * inputs], inputs), &mut out);
                all.extend(out);
            }
        }
        assert!(all.iter().all(|value| value.is_finite()), "{encoding:?}");
        found.push((format!("{encoding:?}"), hash(all)));
    }
    compare("Linear layers", LINEAR, found);
}

/// A prompt in two chunks, single queries, and a short batch, in every storage.
#[test]
fn attention_computes_what_it_did() {
    let mut found = Vec::new();
    for storage in storages() {
        let mut all = Vec::new();
        for (deterministic, window) in [(false, None), (true, Some(70))] {
            let visibility = Visibility { window, sinks: 2 };
            let model = Model { k: storage, v: storage, head_dim: 64, visibility, ..Model::default() };
            let mut session = model.session(&Cpu::new(portable(deterministic)), "cells", 400);
            new(&mut session, &[A]);
            for (at, n) in [(0, 90), (90, 70), (160, 1), (161, 3)] {
                all.extend(model.step(&mut session, &[Span::chain(A, at, n)], 1).into_iter().flatten());
            }
        }
        assert!(all.iter().all(|value| value.is_finite()), "{storage}");
        found.push((storage.to_string(), hash(all)));
    }
    compare("Attention", ATTENTION, found);
}

/// The same prompt with fewer bits, by tiles in plain loops: they round as vectors do, and add in another order.
#[test]
fn prompts_with_fewer_bits_compute_what_they_did() {
    let isa = Isa::tested().into_iter().find(|isa| matches!(isa, Isa::EmulatedTiles(_))).unwrap();
    compare("Attention with fewer bits", FAST_ATTENTION, prompts_with_fewer_bits(isa, FAST_ATTENTION));
}

/// By words, where the machine has such products.
#[test]
fn prompts_in_words_compute_what_they_did() {
    if let Ok(isa) = "avx2".parse() {
        compare("Attention in words", WORD_ATTENTION, prompts_with_fewer_bits(isa, WORD_ATTENTION));
    }
}

fn prompts_with_fewer_bits(isa: Isa, recorded: &[(&str, u64)]) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for (storage, _) in recorded {
        let kv: kvist_device::Storage = storage.parse().unwrap();
        let model = Model { k: kv, v: kv, head_dim: 64, ..Model::default() };
        let cpu = Cpu::new(Compute::new(isa, 1).fast_prefill(true));
        let mut session = model.session(&cpu, "cells", 400);
        new(&mut session, &[A]);
        let steps = [(0, 90), (90, 70)];
        let all = steps.map(|(at, n)| model.step(&mut session, &[Span::chain(A, at, n)], 1));
        found.push((storage.to_string(), hash(all.into_iter().flatten().flatten())));
    }
    found
}
