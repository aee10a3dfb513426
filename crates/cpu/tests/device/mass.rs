//! Attention mass against a naive sum of softmax weights in f64, over the rows as they are stored: every dtype, grouped
//! heads, windows, soft caps, sinks, forks, holes, and both ways to choose queries.
use crate::decoding::{A, B, Model, storages};
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_testing::SplitMix64;
use std::collections::BTreeMap;

/// A cache of one layer, and what a naive model knows of it.
struct Rig {
    model: Model,
    cache: Cache,
    pools: Box<dyn Pools>,
    random: SplitMix64,
    /// The cell of every stored position.
    stored: BTreeMap<(SeqId, u32), u32>,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
}

impl Rig {
    fn new(backend: &dyn Backend, kind: &str, model: Model, softcap: Option<f32>, with_sinks: bool) -> Rig {
        let cache = model.cache(kind, 2048);
        // Rows in f16 would be read instead of the stored ones that the naive model reads.
        let spec = PoolSpec { recent: Recent::default(), ..model.spec(cache.capacity_cells()) };
        let sinks = with_sinks.then(|| (0..model.heads.0).map(|head| head as f32 - 1.5).collect());
        let pools = backend.pools(&spec).unwrap();
        Rig { model, cache, pools, random: SplitMix64(7), stored: BTreeMap::new(), softcap, sinks }
    }

    fn rows(&mut self, tokens: u32, heads: u32) -> Vec<f32> {
        let n = (tokens * heads * self.model.head_dim) as usize;
        (0..n).map(|_| (self.random.unit() * 4.0 - 2.0) as f32).collect()
    }

    /// Runs a step and returns the worst difference from the naive model, relative to `1 + mass`.
    fn step(&mut self, spans: &[(SeqId, u32)], queries: MassQueries) -> f64 {
        let (heads, kv_heads) = self.model.heads;
        let d = self.model.head_dim as usize;
        let n: u32 = spans.iter().map(|(_, n)| n).sum();
        let (q, k, v) = (self.rows(n, heads), self.rows(n, kv_heads), self.rows(n, kv_heads));
        let starts: Vec<u32> = spans.iter().map(|(seq, _)| self.cache.next_position(*seq).unwrap()).collect();
        let chains: Vec<Span<'_>> =
            spans.iter().zip(&starts).map(|((seq, n), start)| Span::chain(*seq, *start, *n)).collect();
        let mut plan = StepPlan::default();
        let mut step = Step::begin(&mut self.cache, &StepRequest { spans: &chains }, &mut plan).unwrap();
        let mut mass = AttentionMass::default();
        let mut out = vec![f32::NAN; q.len()];
        let scale = 1.0 / (d as f32).sqrt();
        {
            let plan = step.with_reads();
            self.pools.begin(plan).unwrap();
            mass.begin(plan, queries);
            let q = Tensor::dense(&q, heads as usize, d);
            let kv = |rows| Tensor::dense(rows, kv_heads as usize, d);
            let (layer, softcap, sinks) = (LayerId(0), self.softcap, self.sinks.as_deref());
            let out = TensorMut::dense(&mut out, heads as usize, d);
            self.pools
                .attend(plan, Attend { layer, q, kv: Some((kv(&k), kv(&v))), out, scale, softcap, sinks })
                .unwrap();
            self.pools.attention_mass(plan, MassOf { layer, q, scale, softcap, sinks }, &mut mass).unwrap();
            let mut cells = plan.group(GroupId(0)).writes.iter().flat_map(|run| run.cells());
            for span in plan.spans() {
                for position in span.start..span.start + span.n_tokens {
                    self.stored.insert((span.seq, position), cells.next().unwrap());
                }
            }
        }
        step.commit();

        // The keys as they are stored.
        let mut keys = BTreeMap::new();
        for cell in self.stored.values() {
            for head in 0..kv_heads {
                let mut row = vec![0.0; d];
                self.pools.inspect(LayerId(0), Side::K, head, *cell, &mut row).unwrap();
                keys.insert((head, *cell), row);
            }
        }
        let mut expected: BTreeMap<(SeqId, u32), f64> = BTreeMap::new();
        let mut first = 0;
        for ((seq, n), start) in spans.iter().zip(&starts) {
            for i in n - queries.of(*n)..*n {
                let q = &q[(first + i) as usize * heads as usize * d..];
                self.add_naive((*seq, start + i), q, &keys, &mut expected);
            }
            first += n;
        }
        let mut found: BTreeMap<(SeqId, u32), f64> = BTreeMap::new();
        for (seq, position, mass) in mass.received(&plan, GroupId(0)) {
            assert!(self.stored.contains_key(&(seq, position)), "{seq} has no position {position}");
            *found.entry((seq, position)).or_default() += f64::from(mass);
        }
        assert!(expected.keys().all(|key| found.contains_key(key)), "a visible cell has no value");
        let error = |(key, found): (&(SeqId, u32), &f64)| {
            let expected = expected.get(key).copied().unwrap_or(0.0);
            (found - expected).abs() / (1.0 + expected)
        };
        found
            .iter()
            .map(error)
            .fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
    }

    /// Adds the weights of one query of every head, `q`, to those of its sequence.
    fn add_naive(
        &self,
        (seq, at): (SeqId, u32),
        q: &[f32],
        keys: &BTreeMap<(u32, u32), Vec<f32>>,
        mass: &mut BTreeMap<(SeqId, u32), f64>,
    ) {
        let Visibility { window, sinks } = self.model.visibility;
        let (heads, kv_heads) = self.model.heads;
        let d = self.model.head_dim as usize;
        let seen: Vec<(u32, u32)> = self
            .stored
            .range((seq, 0)..=(seq, at))
            .map(|((_, position), cell)| (*position, *cell))
            .filter(|(position, _)| window.is_none_or(|window| at - position < window || *position < sinks))
            .collect();
        for head in 0..heads {
            let q = &q[head as usize * d..][..d];
            let mut scores = Vec::new();
            for (_, cell) in &seen {
                let row = &keys[&(head / (heads / kv_heads), *cell)];
                let dot: f64 = q.iter().zip(row).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let score = dot * f64::from(1.0 / (d as f32).sqrt());
                scores
                    .push(self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()));
            }
            let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head as usize]).exp()).unwrap_or(0.0);
            let sum = scores.iter().map(|score| score.exp()).sum::<f64>() + sink;
            for ((position, _), score) in seen.iter().zip(scores) {
                *mass.entry((seq, *position)).or_default() += score.exp() / sum;
            }
        }
    }

    fn remove(&mut self, seq: SeqId, from: u32, until: u32) {
        self.cache.sequences().unwrap().seq_rm(seq, from, until).unwrap();
        self.stored.retain(|(of, position), _| *of != seq || *position < from || *position >= until);
    }

    fn fork(&mut self) {
        self.cache.sequences().unwrap().fork(A, B).unwrap();
        let copies: Vec<_> =
            self.stored.iter().map(|((_, position), cell)| ((B, *position), *cell)).collect();
        self.stored.extend(copies);
    }

    /// A prompt, tokens one by one, a branch in the same steps, and tokens out of the middle.
    fn drive(&mut self, kind: &str) -> f64 {
        use MassQueries::{All, Last};
        let many = self.cache.sequences().is_some();
        if many {
            self.cache.sequences().unwrap().seq_new(A).unwrap();
        }
        let mut worst: f64 = 0.0;
        let mut step = |rig: &mut Rig, spans: &[(SeqId, u32)], queries| {
            worst = worst.max(rig.step(spans, queries));
            worst = if worst.is_nan() { f64::INFINITY } else { worst };
        };
        step(self, &[(A, 131)], All);
        step(self, &[(A, 1)], All);
        step(self, &[(A, 70)], Last(32));
        if many {
            self.fork();
            step(self, &[(A, 3), (B, 18)], All);
            step(self, &[(A, 1), (B, 1)], All);
            if kind != "paged" {
                self.remove(A, 5, 40);
                self.remove(A, 77, 78);
                self.remove(B, 131, 150);
            }
            step(self, &[(B, 9), (A, 20)], Last(4));
            step(self, &[(A, 1), (B, 1)], Last(32));
        }
        step(self, &[(A, 200)], Last(1));
        worst
    }
}

fn tolerance(k: Storage) -> f64 {
    // Kernels of packed keys round the query to two bytes per element, beside q4 to one.
    match k.dtype {
        DType::Q4 => 5e-3,
        dtype if dtype.is_quantised() => 1e-3,
        _ => 2e-5,
    }
}

/// Checks every kind, and the shapes in turn.
fn check(backend: &dyn Backend, k: Storage, what: &str) {
    let shapes: [((u32, u32), u32); 4] = [((4, 2), 32), ((3, 1), 64), ((6, 6), 40), ((9, 3), 80)];
    let window = Visibility { window: Some(60), sinks: 3 };
    let masks = [(Visibility::FULL, None, false), (window, Some(3.0), false), (window, None, true)];
    for (i, kind) in ["contiguous", "cells", "tree", "paged"].into_iter().enumerate() {
        for (j, (visibility, softcap, sinks)) in masks.into_iter().enumerate() {
            let (heads, head_dim) = shapes[(i + j) % shapes.len()];
            if !head_dim.is_multiple_of(32) && k.dtype.has_groups() || k.rotate && !head_dim.is_power_of_two()
            {
                continue;
            }
            let v = Storage::F16;
            let model = Model { k, v, heads, head_dim, n_layers: 1, visibility, ..Model::default() };
            // Windows release blocks of `paged`, which the naive model does not follow; conformance does.
            if kind == "paged" && visibility != Visibility::FULL {
                continue;
            }
            let worst = Rig::new(backend, kind, model, softcap, sinks).drive(kind);
            assert!(
                worst < tolerance(k),
                "{what} {kind} K {k} {heads:?} of {head_dim}, case {j}: off by {worst}"
            );
        }
    }
}

#[test]
fn every_dtype_gives_the_naive_mass() {
    for isa in Isa::available() {
        for k in storages() {
            check(&Cpu::new(Compute::new(isa, 2)), k, &format!("{isa}"));
        }
    }
}

#[test]
fn products_of_tiles_give_the_naive_mass() {
    for isa in Isa::tested() {
        // Products of bf16 pairs, in two or three terms, where there are tiles.
        for k in [Storage::F32, Storage::F16, Storage::BF16] {
            let cpu = Cpu::new(Compute::new(isa, 1).tile_attention(true));
            let model = Model { k, n_layers: 1, ..Model::default() };
            let worst = Rig::new(&cpu, "cells", model, None, false).drive("cells");
            assert!(worst < 2e-3, "{isa} K {k}: off by {worst}");
        }
    }
}

#[test]
fn the_reference_gives_the_naive_mass() {
    check(&Reference, Storage::F32, "reference");
}

/// Threads share the work, and do not change a bit; a long sequence crosses splits.
#[test]
fn mass_does_not_depend_on_threads() {
    let run = |threads: usize| {
        let cpu = Cpu::new(Compute::new(*Isa::available().last().unwrap(), threads));
        let model = Model { k: Storage::F16, n_layers: 1, ..Model::default() };
        let mut rig = Rig::new(&cpu, "contiguous", model, None, false);
        for _ in 0..8 {
            assert!(rig.step(&[(A, 199)], MassQueries::Last(2)) < 2e-5);
        }
        let mut plan = StepPlan::default();
        let spans = [Span::chain(A, 8 * 199, 150)];
        let mut step = Step::begin(&mut rig.cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
        let (q, kv) = (vec![0.3; 150 * 4 * 32], vec![0.1; 150 * 2 * 32]);
        let mut out = vec![0.0; q.len()];
        let mut mass = AttentionMass::default();
        let plan = step.with_reads();
        rig.pools.begin(plan).unwrap();
        mass.begin(plan, MassQueries::All);
        let (layer, scale, softcap, sinks) = (LayerId(0), 0.2, None, None);
        let (q, kv) = (Tensor::dense(&q, 4, 32), Tensor::dense(&kv, 2, 32));
        let out = TensorMut::dense(&mut out, 4, 32);
        rig.pools.attend(plan, Attend { layer, q, kv: Some((kv, kv)), out, scale, softcap, sinks }).unwrap();
        rig.pools.attention_mass(plan, MassOf { layer, q, scale, softcap, sinks }, &mut mass).unwrap();
        mass.received(plan, GroupId(0)).map(|(_, _, mass)| mass.to_bits()).collect::<Vec<_>>()
    };
    let alone = run(1);
    assert!([2, 3, 5].into_iter().all(|threads| run(threads) == alone));
}
