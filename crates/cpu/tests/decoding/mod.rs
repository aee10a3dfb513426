//! A model of attention layers only, and the steps that tests run on it.
#![allow(dead_code)] // each test file uses its own part
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::*;
use kvist_testing::SplitMix64;
use std::sync::Arc;

pub const A: SeqId = SeqId(0);
pub const B: SeqId = SeqId(1);

#[derive(Clone)]
pub struct Model {
    pub k: Storage,
    pub v: Storage,
    pub heads: (u32, u32), // query heads, KV heads
    pub head_dim: u32,
    pub n_layers: u16,
    pub visibility: Visibility,
    pub max_step_tokens: u32,
    pub budget: Arc<MemoryBudget>,
}

impl Default for Model {
    fn default() -> Self {
        Model {
            k: Storage::F32,
            v: Storage::F32,
            heads: (4, 2),
            head_dim: 32,
            n_layers: 2,
            visibility: Visibility::FULL,
            max_step_tokens: 200,
            budget: MemoryBudget::unlimited(),
        }
    }
}

/// Every dtype, both groups, with and without rotation.
pub fn storages() -> Vec<Storage> {
    let names = "f32 f16 bf16 q8 q8-64 q4 q4-64";
    let names = names.split(' ').flat_map(|name| [name.to_string(), format!("{name}-rot")]);
    let names = names.chain(["t4".to_string(), "t4-o".to_string()]);
    names.map(|name| name.parse().unwrap()).collect()
}

/// Creates empty sequences, for kinds that have named ones.
pub fn new(session: &mut Session, list: &[SeqId]) {
    if let Some(mut sequences) = session.cache.sequences() {
        list.iter().for_each(|seq| sequences.seq_new(*seq).unwrap());
    }
}

impl Model {
    pub fn layout(&self) -> Layout {
        let (n_kv_heads, head_dim) = (self.heads.1, self.head_dim);
        let layer = |l| LayerSpec::new(GroupId(0), LayerId(l), n_kv_heads, head_dim);
        Layout { n_heads: self.heads.0, layers: (0..self.n_layers).map(layer).collect() }
    }

    pub fn spec(&self, capacity_cells: Vec<u32>) -> PoolSpec {
        PoolSpec {
            layout: self.layout(),
            k: self.k,
            v: self.v.for_values(),
            capacity_cells,
            max_step_tokens: self.max_step_tokens,
            budget: self.budget.clone(),
            channels: None,
            recent: Recent { tokens: 16, sequences: 8 },
        }
    }

    pub fn cache(&self, kind: &str, capacity_tokens: u32) -> Cache {
        let group =
            GroupSpec { capacity_tokens, visibility: self.visibility, max_step_tokens: self.max_step_tokens };
        Cache::new(vec![kinds::build(kind, &group).unwrap()])
    }

    pub fn session(&self, backend: &dyn Backend, kind: &str, capacity_tokens: u32) -> Session {
        let cache = self.cache(kind, capacity_tokens);
        let spec = self.spec(cache.capacity_cells());
        Session::new(cache, backend.pools(&spec).unwrap(), &spec)
    }

    /// Runs one step and returns the outputs of every layer. Activations depend only on `seed`, the sequence and the
    /// position.
    pub fn step(&self, session: &mut Session, spans: &[Span<'_>], seed: u64) -> Vec<Vec<f32>> {
        let mut tokens = Vec::new();
        for span in spans {
            let n = match span.new {
                New::Chain(n) => n,
                New::Tree(parents) => parents.len() as u32,
            };
            tokens.extend((span.start..span.start + n).map(|p| u64::from(span.seq.0) << 32 | u64::from(p)));
        }
        self.step_of(session, spans, &tokens, seed)
    }

    /// The same with activations that depend on `seed` and on the index of each token.
    pub fn step_of(
        &self,
        session: &mut Session,
        spans: &[Span<'_>],
        tokens: &[u64],
        seed: u64,
    ) -> Vec<Vec<f32>> {
        self.step_kept(session, spans, tokens, seed, None)
    }

    /// The same; every span keeps only what `kept` says.
    pub fn step_kept(
        &self,
        session: &mut Session,
        spans: &[Span<'_>],
        tokens: &[u64],
        seed: u64,
        kept: Option<&[Kept<'_>]>,
    ) -> Vec<Vec<f32>> {
        let (heads, kv_heads, d) = (self.heads.0 as usize, self.heads.1 as usize, self.head_dim as usize);
        let rows = |what: u64, layer: u16, heads: usize| -> Vec<f32> {
            let row = |token: &u64| {
                let seed =
                    SplitMix64(token ^ seed << 48).next() ^ SplitMix64(what << 8 | u64::from(layer)).next();
                let mut random = SplitMix64(seed);
                (0..heads * d).map(move |_| (random.unit() * 2.0 - 1.0) as f32)
            };
            tokens.iter().flat_map(row).collect()
        };
        let mut step = session.step(&StepRequest { spans }).unwrap();
        let mut outputs = Vec::new();
        for layer in 0..self.n_layers {
            let (q, k, v) = (rows(0, layer, heads), rows(1, layer, kv_heads), rows(2, layer, kv_heads));
            outputs.push(self.attend(&mut step, layer, [&q, &k, &v]));
        }
        match kept {
            None => step.commit().unwrap(),
            Some(kept) => step.commit_kept(kept).unwrap(),
        }
        outputs
    }

    /// Attention of a layer over these queries, keys and values of the step's tokens.
    pub fn attend(&self, step: &mut SessionStep<'_>, layer: u16, [q, k, v]: [&[f32]; 3]) -> Vec<f32> {
        let (heads, kv_heads, d) = (self.heads.0 as usize, self.heads.1 as usize, self.head_dim as usize);
        let mut out = vec![f32::NAN; q.len()];
        step.attend(Attend {
            layer: LayerId(layer),
            q: Tensor::dense(q, heads, d),
            kv: Some((Tensor::dense(k, kv_heads, d), Tensor::dense(v, kv_heads, d))),
            out: TensorMut::dense(&mut out, heads, d),
            scale: 1.0 / (d as f32).sqrt(),
            softcap: None,
            sinks: None,
        })
        .unwrap();
        out
    }
}
