//! Values that are not finite change nothing for those who do not see them, not even bits.
use crate::decoding::*;
use kvist_cache::*;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::*;
use kvist_testing::SplitMix64;

const BROKEN: [f32; 2] = [f32::NAN, f32::NEG_INFINITY];

fn model(storage: Storage, head_dim: u32) -> Model {
    Model { k: storage, v: storage, heads: (2, 1), head_dim, n_layers: 1, ..Model::default() }
}

fn session(cpu: &Cpu, model: &Model) -> Session {
    let mut session = model.session(cpu, "paged", 640);
    new(&mut session, &[A, B]);
    session
}

/// A step of so many tokens of `A` and then of `B`. The value of token `spoilt.0` of the step has the element `spoilt.1`. Returns the bits
/// of every token's output.
fn step(
    session: &mut Session,
    model: &Model,
    (a, b): (u32, u32),
    spoilt: Option<(usize, f32)>,
) -> Vec<Vec<u32>> {
    let chain = |seq, n| (n > 0).then(|| Span::chain(seq, session.cache.next_position(seq).unwrap(), n));
    let spans: Vec<_> = [chain(A, a), chain(B, b)].into_iter().flatten().collect();
    let (n, dim) = ((a + b) as usize, model.head_dim as usize);
    let mut random = SplitMix64(n as u64);
    let mut rows =
        |n: usize| -> Vec<f32> { (0..n * dim).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect() };
    let (q, k, mut v) = (rows(2 * n), rows(n), rows(n));
    if let Some((token, value)) = spoilt {
        v[token * dim + 3] = value;
    }
    let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
    let out = model.attend(&mut step, 0, [&q, &k, &v]);
    step.commit().unwrap();
    out.chunks(2 * dim).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// In the same steps and in later ones, on every instruction set and with all kernels that a storage has.
#[test]
fn a_sequence_keeps_its_bits_beside_a_broken_one() {
    let isas = crate::with_own_attention().into_iter().filter(|isa| !crate::is_slow(*isa));
    let cpus = isas.flat_map(|isa| {
        let compute = Compute::new(isa, 1);
        [compute.clone(), compute.clone().deterministic(true), compute.fast_prefill(true)]
    });
    for cpu in cpus.map(Cpu::new) {
        for storage in storages() {
            // Rows of whole vectors, and not.
            for head_dim in [64, 72] {
                let model = model(storage, head_dim);
                let run = |value: f32| {
                    let mut session = session(&cpu, &model);
                    let mut of_a = step(&mut session, &model, (40, 40), Some((47, value)));
                    of_a.truncate(40);
                    of_a.extend(step(&mut session, &model, (20, 1), None).drain(..20));
                    of_a.extend(step(&mut session, &model, (1, 0), None));
                    of_a
                };
                let whole = run(0.5);
                for value in BROKEN {
                    assert!(run(value) == whole, "{cpu:?} {storage} {head_dim}: {value}");
                }
            }
        }
    }
}

/// Where results depend on nothing but what a query sees, this holds inside of a sequence too: some rows of a kernel's call see the
/// broken cell, and others do not.
#[test]
fn earlier_tokens_keep_their_bits() {
    for deterministic in [false, true] {
        let cpu = Cpu::new(Compute::new(Isa::best(), 1).deterministic(deterministic));
        let kept = |storage: &Storage| deterministic || !storage.dtype.is_quantised();
        for (storage, head_dim) in storages().into_iter().filter(kept).flat_map(|it| [(it, 64), (it, 72)]) {
            let model = model(storage, head_dim);
            let run = |value: f32| step(&mut session(&cpu, &model), &model, (40, 0), Some((30, value)));
            let whole = run(0.5);
            for value in BROKEN {
                let found = run(value);
                let what = format!("{cpu:?} {storage} {head_dim}: {value}");
                assert!(found[..30] == whole[..30], "{what}");
                let seen = found[30..].iter().all(|row| row.iter().any(|x| !f32::from_bits(*x).is_finite()));
                assert!(seen, "{what}");
            }
        }
    }
}

/// A file is finite if its own cells are, whatever else the pools have stored.
#[test]
fn images_say_whether_their_own_values_are_finite() {
    for storage in storages() {
        let (cpu, model) = (Cpu::default(), model(storage, 72));
        let mut session = session(&cpu, &model);
        step(&mut session, &model, (40, 0), None);
        step(&mut session, &model, (0, 40), Some((7, f32::NAN)));
        let finite = |cells: u32| session.pools().image(LayerId(0), Side::V, cells).unwrap().finite;
        assert_eq!([finite(32), finite(40), finite(80)], [true, true, false], "{storage}");
    }
}
