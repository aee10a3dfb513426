//! Runs the CPU backend against the conformance suite, plus cases that the suite does not cover.
use crate::decoding::*;
use kvist_cache::*;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::*;
use kvist_testing::conformance::{self, Ends, Options};

/// Tolerance: queries and weights of packed dtypes are split into two bytes. Each element is off by up to 1 part in
/// 64,000 of the largest, and a sum over head_dim or over a tile by about √64 of that. Those of q4 have one byte, which is 254 times
/// as coarse; its outputs stay within a third of that.
fn options() -> Options {
    Options { packed: 1e-4, q4: Some(Q4), ..Options::from_env() }
}

const Q4: f64 = 8e-3;

fn conforms(cpu: &Cpu, options: &Options) {
    match conformance::run(cpu, options) {
        Ok(report) => println!("{cpu:?}: {report}"),
        Err(table) => panic!("{cpu:?}: {table}"),
    }
}

/// Every instruction set of this CPU whose attention has code of its own, and tiles in plain loops. All but the best one run a subset of
/// the cases.
#[test]
fn cpu_conforms_on_every_instruction_set() {
    let best = Isa::best();
    for isa in crate::with_own_attention() {
        let one_in = match isa {
            isa if crate::is_slow(isa) => 40,
            isa if isa == best => 1,
            _ => 6,
        };
        let options = Options { one_in, ..options() };
        if isa.tiles().is_some() {
            conforms(&Cpu::new(Compute::new(isa, 2).tile_attention(true)), &options);
        }
        if crate::is_slow(isa) {
            continue; // without tiles it is the portable one
        }
        match conformance::run(&Cpu::new(Compute::new(isa, 2)), &options) {
            Ok(report) => println!("{isa}: {report}"),
            Err(table) => panic!("{isa}: {table}"),
        }
    }
}

/// With fewer bits for prompts: the suite's batches that are large enough, within the error of bf16.
#[test]
fn cpu_conforms_with_fewer_bits() {
    for isa in Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa)) {
        let one_in = if crate::is_slow(isa) { 60 } else { 4 };
        let options = Options { one_in, attention: 4e-3, packed: 4e-3, q4: Some(Q4), ..options() };
        conforms(&Cpu::new(Compute::new(isa, 2).fast_prefill(true)), &options);
    }
}

#[test]
fn cpu_conforms_when_values_are_weighed_one_by_one() {
    for isa in crate::with_own_attention().into_iter().filter(|isa| !crate::is_slow(*isa)) {
        let cpu = Cpu::new(Compute::new(isa, 2).deterministic(true));
        let one_in = if isa == Isa::best() { 5 } else { 15 };
        match conformance::run(&cpu, &Options { one_in, ..options() }) {
            Ok(report) => println!("{isa}: {report}"),
            Err(table) => panic!("{isa}: {table}"),
        }
    }
}

/// The same kernels with the other growth mode.
#[test]
fn the_concatenating_cache_conforms() {
    let options = Options { one_in: 6, ..options() };
    match conformance::run(&Cpu::default().concatenating(), &options) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
}

#[test]
fn cpu_refuses() {
    conformance::refusals(&Cpu::default()).unwrap_or_else(|table| panic!("{table}"));
    conformance::refusals(&Cpu::default().concatenating()).unwrap_or_else(|table| panic!("{table}"));
}

/// Cells are the same wherever they are imported: on every instruction set, with other threads, and where pools grow in
/// another way.
#[test]
fn cells_are_the_same_wherever_they_go() {
    let best = Cpu::new(Compute::new(Isa::best(), 2));
    let check = |to: &Cpu, same_bits: bool, one_in: usize| {
        let ends = Ends { from: &best, to, same_bits };
        conformance::transfers(ends, &Options { one_in, ..options() })
            .unwrap_or_else(|table| panic!("{table}"))
    };
    assert!(check(&best, true, 1) > 100);
    check(&Cpu::new(Compute::new(Isa::best(), 3)), true, 3);
    check(&best.clone().concatenating(), true, 3);
    for isa in Isa::available() {
        check(&Cpu::new(Compute::new(isa, 1)), isa == Isa::best(), 4);
    }
}

/// Regression: two sequences that had alternated were compacted while the pools were exactly full. A move went through
/// a free cell outside the pools, and the backend panicked. The conformance suite found it.
#[test]
fn compaction_goes_through_cells_no_step_has_written() {
    for cpu in [Cpu::default(), Cpu::default().concatenating()] {
        for dtype in DType::ALL {
            let model = Model { k: Storage::new(dtype), v: Storage::new(dtype), ..Model::default() };
            let mut session = model.session(&cpu, "cells", 400);
            new(&mut session, &[A, B]);
            for i in 0..8 {
                let start = i * 16;
                let (a, b) = (Span::chain(A, start, 16), Span::chain(B, start, 16));
                model.step(&mut session, &[a, b], i.into());
            }
            assert_eq!(session.cache.report()[0].high_water, 256, "the first segment is full");
            session.compact().unwrap();
            let extents: Vec<u32> =
                session.cache.report()[0].sequences.iter().map(|seq| seq.n_extents).collect();
            assert_eq!(extents, [1, 1], "{dtype:?}");
            let out = model.step(&mut session, &[Span::chain(A, 128, 1), Span::chain(B, 128, 1)], 99);
            assert!(out.iter().flatten().all(|x| x.is_finite()));
        }
    }
}

/// A compaction that the budget refuses leaves all cells readable.
#[test]
fn a_compaction_without_bytes_is_an_error_and_no_loss() {
    let free = Model::default();
    let usage = |cells: u32| Cpu::default().usage(&free.spec(vec![400]), &[cells]).unwrap().total();
    let model = Model { budget: MemoryBudget::new(usage(256)), ..Model::default() };
    let sessions = [&model, &free].map(|model| {
        let mut session = model.session(&Cpu::default(), "cells", 400);
        new(&mut session, &[A, B]);
        for i in 0..8 {
            let start = i * 16;
            model.step(&mut session, &[Span::chain(A, start, 16), Span::chain(B, start, 16)], i.into());
        }
        session
    });
    let [mut session, mut other] = sessions;
    assert!(matches!(session.compact(), Err(DeviceError::OutOfBudget(_))));
    other.compact().unwrap();
    for session in [&mut session, &mut other] {
        session.cache.sequences().unwrap().seq_rm(A, 120, u32::MAX).unwrap();
    }
    let next = [Span::chain(A, 120, 1)];
    let (out, expected) = (model.step(&mut session, &next, 5), free.step(&mut other, &next, 5));
    for (x, y) in out.iter().flatten().zip(expected.iter().flatten()) {
        assert!((x - y).abs() <= 1e-5, "{x} is not {y}");
    }
}

/// Extreme rows: finite ones stay finite, the others become visible errors, and nothing panics.
#[test]
fn strange_rows_are_stored_or_seen() {
    let with = |at: usize, x: f32| {
        let mut row = [0.25f32; 80];
        row[at] = x;
        row
    };
    let rows: [(&str, [f32; 80], bool); 14] = [
        ("zero", [0.0; 80], true),
        ("minus zero", [-0.0; 80], true),
        ("one constant", [1.5; 80], true),
        ("a negative constant", [-1.5; 80], true),
        ("tiny", [1e-30; 80], true),
        ("subnormal", [1e-42; 80], true),
        ("subnormal f16", [3e-7; 80], true),
        ("huge, also when a block of 16 turns into one spike", [16_000.0; 80], true),
        ("one spike", with(79, 60_000.0), true),
        ("one negative spike", with(0, -60_000.0), true),
        ("a NaN", with(40, f32::NAN), false),
        ("a NaN in the short group", with(79, f32::NAN), false),
        ("infinity", with(3, f32::INFINITY), false),
        ("minus infinity", with(64, f32::NEG_INFINITY), false),
    ];
    let mut bad = Vec::new();
    for storage in storages() {
        for (what, row, finite) in &rows {
            let model = Model {
                k: storage,
                v: storage,
                heads: (1, 1),
                head_dim: 80,
                n_layers: 1,
                ..Model::default()
            };
            let mut session = model.session(&Cpu::default(), "contiguous", 4);
            let q = [0.0f32; 80];
            let mut out = [f32::NAN; 80];
            let spans = [Span::chain(A, 0, 1)];
            let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
            step.attend(Attend {
                layer: LayerId(0),
                q: Tensor::dense(&q, 1, 80),
                kv: Some((Tensor::dense(row, 1, 80), Tensor::dense(row, 1, 80))),
                out: TensorMut::dense(&mut out, 1, 80),
                scale: 1.0,
                softcap: None,
                sinks: None,
            })
            .unwrap();
            step.commit().unwrap();
            let largest = row.iter().fold(0f32, |max, x| max.max(x.abs()));
            for side in [Side::K, Side::V] {
                let mut stored = [0.0; 80];
                session.pools().inspect(LayerId(0), side, 0, 0, &mut stored).unwrap();
                // One q4 step of the range, rotated over at most the block of 16; f16 parameters.
                let near = |x: f32, y: f32| (x - y).abs() <= largest * 0.3 + 1e-5;
                let length =
                    |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let off = length(&mut stored.iter().zip(row).map(|(x, y)| x - y));
                // A row that is rotated as a whole has its error as a whole.
                let kept = match storage.dtype == DType::T4 {
                    true => off <= 0.2 * length(&mut row.iter().copied()) + 1e-4,
                    false => stored.iter().zip(row).all(|(x, y)| near(*x, *y)),
                };
                let seen = stored.iter().any(|x| !x.is_finite());
                if *finite && !kept || !finite && !seen {
                    bad.push(format!("{storage} {side:?} {what}: {stored:?}"));
                }
            }
            let seen = out.iter().any(|x| !x.is_finite());
            if seen == *finite {
                bad.push(format!("{storage} {what}: attention gives {out:?}"));
            }
        }
    }
    assert!(bad.is_empty(), "{} bad rows:\n{}", bad.len(), bad.join("\n"));
}

/// Rows shorter than any model's, with every remainder: partial groups, halves and words of codes.
#[test]
fn heads_of_a_few_elements_are_stored_and_read() {
    let free = |head_dim| Model { head_dim, ..Model::default() };
    // A last group of 32 or 64 may have one element, or three.
    for head_dim in (1..=21).chain([33, 35, 65, 97]) {
        let mut exact = free(head_dim).session(&Cpu::default(), "contiguous", 40);
        let spans = [Span::chain(A, 0, 33)];
        let expected = free(head_dim).step(&mut exact, &spans, 3);
        for (k, v) in storages().into_iter().map(|storage| (storage, storage)) {
            let model = Model { k, v, ..free(head_dim) };
            let mut session = model.session(&Cpu::default(), "contiguous", 40);
            let out = model.step(&mut session, &spans, 3);
            // Values lie between -1 and 1.
            let off = out.iter().flatten().zip(expected.iter().flatten()).map(|(x, y)| (x - y).abs());
            let worst = off.fold(0f32, |worst, x| if x > worst || x.is_nan() { x } else { worst });
            assert!(worst < 0.5, "{k} with heads of {head_dim}: {worst}");
        }
    }
}

/// A row with NaN reaches every query that sees it, and no other. A masked cell has weight 0, and 0 × NaN would still
/// be NaN.
#[test]
fn a_broken_row_is_seen_by_those_who_see_it() {
    // Enough rows for products of pairs.
    let fast = Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa));
    let fast = fast.map(|isa| (Cpu::new(Compute::new(isa, 2).fast_prefill(true)), 70));
    let both_sides = |storage| [(storage, Side::K), (storage, Side::V)];
    for (cpu, tokens) in std::iter::once((Cpu::default(), 10)).chain(fast) {
        for (storage, side) in storages().into_iter().flat_map(both_sides) {
            check_a_broken_row(&cpu, tokens, storage, side);
        }
    }
}

/// Two sequences of so many tokens in one step.
fn check_a_broken_row(cpu: &Cpu, tokens: u32, storage: Storage, side: Side) {
    let (k, v) = (storage, storage);
    let model = Model { k, v, heads: (2, 1), head_dim: 64, n_layers: 1, ..Model::default() };
    let mut session = model.session(cpu, "cells", 600);
    new(&mut session, &[A, B]);
    let (of_a, d) = (tokens as usize, 64);
    let n = 2 * of_a;
    let (q, mut k, mut v) = (vec![0.5f32; n * 2 * d], vec![0.5f32; n * d], vec![1.0f32; n * d]);
    let broken = if side == Side::K { &mut k } else { &mut v };
    broken[7 * d + 3] = f32::NAN; // a token of A
    let spans = [Span::chain(A, 0, tokens), Span::chain(B, 0, tokens)];
    let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
    let out = model.attend(&mut step, 0, [&q, &k, &v]);
    step.commit().unwrap();
    for (token, out) in out.chunks_exact(d).enumerate() {
        let (token, head) = (token / 2, token % 2);
        let what = format!("{storage} {side:?}: token {token} head {head}");
        let sees = (7..of_a).contains(&token);
        assert_eq!(out.iter().any(|x| x.is_nan()), sees, "{what}: {out:?}");
        // A NaN score breaks the whole row; a NaN value only its group, the elements it was rotated with, or with words the whole row.
        assert!(!sees || side == Side::V || out.iter().all(|x| x.is_nan()), "{what}: {out:?}");
    }
}

#[test]
fn threads_change_nothing() {
    for storage in storages() {
        let model = Model { k: storage, v: storage, heads: (8, 4), n_layers: 1, ..Model::default() };
        let run = |n_threads: usize| {
            let cpu = Cpu::new(Compute::new(Isa::best(), n_threads));
            let mut session = model.session(&cpu, "contiguous", 4_000);
            let mut all = model.step(&mut session, &[Span::chain(A, 0, 130)], 1);
            all.extend(model.step(&mut session, &[Span::chain(A, 130, 1)], 2));
            for chunk in 0..14 {
                all.extend(model.step(&mut session, &[Span::chain(A, 131 + 200 * chunk, 200)], 3));
            }
            // Several splits: threads process them one by one.
            all.extend(model.step(&mut session, &[Span::chain(A, 2_931, 1)], 4));
            all
        };
        let bits = |n| run(n).iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let one = bits(1);
        for n in [2, 3, 5] {
            assert!(one == bits(n), "{storage}: one and {n} threads differ");
        }
    }
}

/// The same rows, independent of how they arrive.
#[test]
fn chunks_change_next_to_nothing() {
    chunks(false);
}

#[test]
fn chunks_change_nothing_at_all_when_asked() {
    chunks(true);
}

fn chunks(deterministic: bool) {
    let cpu = Cpu::new(Compute::default().deterministic(deterministic));
    let n = 150;
    for kind in ["contiguous", "cells", "tree"] {
        for storage in storages() {
            let model = Model { k: storage, v: storage, n_layers: 1, ..Model::default() };
            let run = |chunks: &[u32]| {
                let mut session = model.session(&cpu, kind, 400);
                new(&mut session, &[A]);
                let mut start = 0;
                let mut out = Vec::new();
                for len in chunks.iter().cycle() {
                    let len = (*len).min(n - start);
                    if len == 0 {
                        break;
                    }
                    out.extend(model.step(&mut session, &[Span::chain(A, start, len)], 7).remove(0));
                    start += len;
                }
                out
            };
            let whole = run(&[n]);
            for chunks in [&[1][..], &[7], &[64], &[65], &[149, 1], &[3, 100, 17]] {
                let out = run(chunks);
                assert_eq!(out.len(), whole.len());
                let worst = out.iter().zip(&whole).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
                // Packed values are weighted tile by tile, and chunks cut tiles.
                let allowed = match storage.dtype {
                    _ if deterministic => 0.0,
                    DType::Q4 => 5e-3,
                    dtype if dtype.is_quantised() => 1e-4,
                    _ => 0.0,
                };
                assert!(worst <= allowed, "{kind} {storage} in chunks of {chunks:?}: {worst}");
            }
        }
    }
}
