//! Pools without a model: generated rows through the real kinds and kernels.
use super::shape::Shape;
use kvist_cache::kinds::{self, BLOCK_TOKENS, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_cpu::{Compute, Cpu};
use kvist_device::*;
use kvist_engine::memory::RECENT_TOKENS;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shared prefix, or the only sequence.
pub const TRUNK: SeqId = SeqId(0);
/// Tokens written at once when a cache is filled.
const CHUNK: u32 = 512;

/// What to build.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub shape: Shape,
    pub kind: &'static str,
    pub k: Storage,
    pub v: Storage,
    pub visibility: Visibility,
    pub softcap: Option<f32>,
    /// Capacity in tokens.
    pub capacity: u32,
    pub max_step_tokens: u32,
}

pub struct Rig {
    setup: Setup,
    cache: Cache,
    /// A cache whose queries see one position: fills pools without the cost of attention.
    narrow: Cache,
    pools: Box<dyn Pools>,
    plan: StepPlan,
    rows: Rows,
}

/// Activations of the largest step.
struct Rows {
    q: Vec<f32>,
    kv: Vec<f32>,
    out: Vec<f32>,
    _reservation: Reservation,
}

/// A pseudo-random value, uniform in −1..1, by counter: an element has the same value whenever it is generated.
pub fn element(layer: u64, position: u64, head: u64, lane: u64) -> f32 {
    let counter = (layer << 48 ^ position << 16 ^ head << 8 ^ lane).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mix(counter) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a good hash of 64 bits.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl Rig {
    pub fn new(compute: &Compute, setup: Setup, budget: &Arc<MemoryBudget>) -> anyhow::Result<Self> {
        let Setup { shape, k, v, .. } = setup;
        let chunk = setup.max_step_tokens.max(CHUNK.min(setup.capacity));
        let cache = |kind: &str, visibility: Visibility| {
            let group = GroupSpec { capacity_tokens: setup.capacity, visibility, max_step_tokens: chunk };
            anyhow::Ok(Cache::new(vec![kinds::build(kind, &group)?]))
        };
        let spec = PoolSpec {
            layout: shape.layout(),
            k,
            v,
            capacity_cells: vec![setup.capacity],
            max_step_tokens: chunk,
            budget: budget.clone(),
            channels: None,
            recent: Recent { tokens: RECENT_TOKENS, sequences: 1 },
        };
        let pools = Cpu::new(compute.clone()).pools(&spec)?;
        let elements = |n: u32| u64::from(chunk) * u64::from(n) * u64::from(shape.head_dim);
        // q, k, v and the outputs of the largest step.
        let bytes = (2 * elements(shape.heads) + elements(shape.kv_heads)).saturating_mul(4);
        let reservation = budget.reserve(Purpose::Activations, bytes)?;
        let ramp = |n: u32| (0..elements(n)).map(|i| element(0, i, 1, 2)).collect();
        let q: Vec<f32> = ramp(shape.heads);
        let rows = Rows { out: vec![0.0; q.len()], q, kv: ramp(shape.kv_heads), _reservation: reservation };
        let mut rig = Rig {
            cache: cache(setup.kind, setup.visibility)?,
            narrow: cache("contiguous", Visibility { window: Some(1), sinks: 0 })?,
            pools,
            plan: StepPlan::default(),
            rows,
            setup,
        };
        if let Some(mut sequences) = rig.cache.sequences() {
            sequences.seq_new(TRUNK)?;
        }
        Ok(rig)
    }

    pub fn cache(&mut self) -> &mut Cache {
        &mut self.cache
    }
    pub fn counters(&self) -> KvCounters {
        self.pools.counters()
    }
    pub fn bytes(&self) -> u64 {
        self.pools.bytes()
    }

    /// Fills the trunk with `tokens` tokens, with attention over only one position each. `progress` gets the number of
    /// tokens so far; if it returns false, filling stops.
    pub fn fill(&mut self, tokens: u32, progress: &mut dyn FnMut(u32) -> bool) -> anyhow::Result<bool> {
        let mut at = 0;
        while at < tokens {
            let n = CHUNK.min(tokens - at);
            let spans = [Span::chain(TRUNK, at, n)];
            let request = StepRequest { spans: &spans };
            let mut wide = StepPlan::default();
            let step = Step::begin(&mut self.cache, &request, &mut wide)?;
            let expected = step.plan().group(GroupId(0)).writes.clone();
            step.commit();
            let mut step = Step::begin(&mut self.narrow, &request, &mut self.plan)?;
            let plan = step.with_reads();
            anyhow::ensure!(plan.group(GroupId(0)).writes == expected, "the kinds place cells differently");
            self.pools.begin(plan)?;
            attend(&mut *self.pools, plan, &self.setup, &mut self.rows)?;
            step.commit();
            at += n;
            if !progress(at) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As [`fill`](Self::fill), for a paged cache with scattered blocks: the trunk's blocks alternate with those of
    /// another sequence.
    pub fn scatter(&mut self, tokens: u32, progress: &mut dyn FnMut(u32) -> bool) -> anyhow::Result<bool> {
        let other = SeqId(TRUNK.0 + 1);
        if let Some(mut sequences) = self.cache.sequences() {
            sequences.seq_new(other)?;
        }
        let mut at = 0;
        while at < tokens {
            let n = BLOCK_TOKENS.min(tokens - at);
            for seq in [TRUNK, other] {
                self.step(&[Span::chain(seq, at, n)], true)?;
            }
            at += n;
            if !progress(at) {
                return Ok(false);
            }
        }
        let mut runs = StepPlan::default();
        let spans = [Span::chain(TRUNK, tokens, 1)];
        let mut step = Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut runs)?;
        let items = &step.with_reads().group(GroupId(0)).reads.items;
        let longest = items.iter().map(|item| item.run.len).max().unwrap_or(0);
        anyhow::ensure!(
            longest <= BLOCK_TOKENS + 1,
            "blocks of {longest} neighbouring cells are not scattered"
        );
        Ok(true)
    }

    /// Runs one step over all layers, and commits it if `commit`. Returns the time of the layers.
    pub fn step(&mut self, spans: &[Span<'_>], commit: bool) -> anyhow::Result<Duration> {
        let mut step = Step::begin(&mut self.cache, &StepRequest { spans }, &mut self.plan)?;
        let plan = step.with_reads();
        self.pools.begin(plan)?;
        let started = Instant::now();
        attend(&mut *self.pools, plan, &self.setup, &mut self.rows)?;
        let taken = started.elapsed();
        if commit {
            step.commit();
        }
        Ok(taken)
    }

    /// Generates rows of K, V and q, for a step of one sequence.
    pub fn generate(&mut self, layer: u16, position: u32, n: u32) {
        let Shape { heads, kv_heads, head_dim, .. } = self.setup.shape;
        let fill = |rows: &mut [f32], heads: u32, side: u64| {
            let row = heads as usize * head_dim as usize;
            for (t, row) in rows.chunks_exact_mut(row).take(n as usize).enumerate() {
                for (i, x) in row.iter_mut().enumerate() {
                    let (head, lane) = (i as u64 / u64::from(head_dim), i as u64 % u64::from(head_dim));
                    *x = element(u64::from(layer) * 2 + side, u64::from(position) + t as u64, head, lane);
                }
            }
        };
        fill(&mut self.rows.q, heads, 1);
        fill(&mut self.rows.kv, kv_heads, 0);
    }
}

fn attend(pools: &mut dyn Pools, plan: &StepPlan, setup: &Setup, rows: &mut Rows) -> anyhow::Result<()> {
    let Shape { layers, heads, kv_heads, head_dim } = setup.shape;
    let n = plan.n_tokens() as usize;
    let (heads, kv_heads, head_dim) = (heads as usize, kv_heads as usize, head_dim as usize);
    let (q, kv) = (&rows.q[..n * heads * head_dim], &rows.kv[..n * kv_heads * head_dim]);
    for layer in 0..layers {
        pools.attend(
            plan,
            Attend {
                layer: LayerId(layer),
                q: Tensor::dense(q, heads, head_dim),
                kv: Some((Tensor::dense(kv, kv_heads, head_dim), Tensor::dense(kv, kv_heads, head_dim))),
                out: TensorMut::dense(&mut rows.out[..n * heads * head_dim], heads, head_dim),
                scale: 1.0 / (head_dim as f32).sqrt(),
                softcap: setup.softcap,
                sinks: None,
            },
        )?;
    }
    Ok(())
}
