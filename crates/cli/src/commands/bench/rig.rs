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
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    _reservation: Reservation,
}

/// What rows are for.
#[derive(Clone, Copy, Debug)]
enum Side {
    Q,
    K,
    V,
}

impl Rows {
    /// Generates the rows of `n` tokens from `position` on.
    fn generate(&mut self, shape: &Shape, layer: u16, position: u32, n: usize) {
        let head_dim = shape.head_dim as usize;
        let sides = [
            (Side::Q, &mut self.q, shape.heads),
            (Side::K, &mut self.k, shape.kv_heads),
            (Side::V, &mut self.v, shape.kv_heads),
        ];
        for (side, rows, heads) in sides {
            let rows = rows.chunks_exact_mut(heads as usize * head_dim).take(n);
            (position..).zip(rows).for_each(|(position, row)| generate(layer, side, position, row));
        }
    }
}

/// A row of a token: all heads. Every layer, side and position has another stream of values, the same in every run.
fn generate(layer: u16, side: Side, position: u32, row: &mut [f32]) {
    let seed = mix((u64::from(layer) * 3 + side as u64) << 32 | u64::from(position));
    (0..).zip(row).for_each(|(i, x)| *x = element(seed, i));
}

/// Element `i` of a stream of pseudo-random values, uniform in −1..1.
pub fn element(seed: u64, i: u64) -> f32 {
    let state = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (mix(state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
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
        let bytes = (2 * elements(shape.heads) + 2 * elements(shape.kv_heads)).saturating_mul(4);
        let reservation = budget.reserve(Purpose::Activations, bytes)?;
        let zeros = |n: u32| vec![0.0; elements(n) as usize];
        let (q, out) = (zeros(shape.heads), zeros(shape.heads));
        let (k, v) = (zeros(shape.kv_heads), zeros(shape.kv_heads));
        let rows = Rows { q, k, v, out, _reservation: reservation };
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
            attend(&mut *self.pools, plan, at, &self.setup, &mut self.rows)?;
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

    /// Runs one step over all layers, and commits it if `commit`. Returns the time of attention.
    pub fn step(&mut self, spans: &[Span<'_>], commit: bool) -> anyhow::Result<Duration> {
        let position = spans.first().map_or(0, |span| span.start);
        let mut step = Step::begin(&mut self.cache, &StepRequest { spans }, &mut self.plan)?;
        let plan = step.with_reads();
        self.pools.begin(plan)?;
        let taken = attend(&mut *self.pools, plan, position, &self.setup, &mut self.rows)?;
        if commit {
            step.commit();
        }
        Ok(taken)
    }
}

/// Attention of all layers. Returns its time, without that of generating the rows.
fn attend(
    pools: &mut dyn Pools,
    plan: &StepPlan,
    position: u32,
    setup: &Setup,
    rows: &mut Rows,
) -> anyhow::Result<Duration> {
    let Shape { layers, heads, kv_heads, head_dim } = setup.shape;
    let n = plan.n_tokens() as usize;
    let (heads, kv_heads, head_dim) = (heads as usize, kv_heads as usize, head_dim as usize);
    let (of_q, of_kv) = (n * heads * head_dim, n * kv_heads * head_dim);
    let mut taken = Duration::ZERO;
    for layer in 0..layers {
        rows.generate(&setup.shape, layer, position, n);
        let Rows { q, k, v, out, .. } = rows;
        let started = Instant::now();
        pools.attend(
            plan,
            Attend {
                layer: LayerId(layer),
                q: Tensor::dense(&q[..of_q], heads, head_dim),
                kv: Some((
                    Tensor::dense(&k[..of_kv], kv_heads, head_dim),
                    Tensor::dense(&v[..of_kv], kv_heads, head_dim),
                )),
                out: TensorMut::dense(&mut out[..of_q], heads, head_dim),
                scale: 1.0 / (head_dim as f32).sqrt(),
                softcap: setup.softcap,
                sinks: None,
            },
        )?;
        taken += started.elapsed();
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Regression: K and V of all layers were the same rows, and wide heads repeated each other.
    #[test]
    fn rows_differ_by_layer_side_and_token() {
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let mut rows = HashSet::new();
        for layer in 0..8 {
            for side in [Side::Q, Side::K, Side::V] {
                for position in 0..100 {
                    let (mut row, mut again) = ([0.0; 8], [0.0; 8]);
                    generate(layer, side, position, &mut row);
                    generate(layer, side, position, &mut again);
                    assert_eq!(row, again);
                    assert!(row.iter().all(|x| (-1.0..1.0).contains(x)));
                    assert!(rows.insert(bits(&row)), "layer {layer}, {side:?}, token {position}");
                }
            }
        }
        // A row of many wide heads repeats none of them.
        let mut row = vec![0.0; 4096 * 1024];
        generate(0, Side::K, 0, &mut row);
        let heads: HashSet<_> = row.chunks(1024).map(bits).collect();
        assert_eq!(heads.len(), 4096);
    }
}
