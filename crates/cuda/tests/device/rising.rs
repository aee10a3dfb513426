//! Scores that rise along the context: the fast kernel lets its maxima lag behind the scores, and rescales its sums when a score is too
//! far above. Compared with the invariant kernel.
use crate::common::{device, fast_device};
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::*;
use kvist_testing::SplitMix64;

const HEADS: [u32; 2] = [4, 1];
const DIM: u32 = 64;
const TOKENS: u32 = 330;
const STEP: u32 = 110;
/// Powers of two by which a kernel's maximum may lag (`LAG` in attend_mma.cu).
const LAG: f32 = 8.0;

/// Rows whose products with each other are `rise` per position, in powers of two, and a little noise.
fn rows(what: u64, heads: u32, positions: std::ops::Range<u32>, each: impl Fn(u32) -> f32) -> Vec<f32> {
    let mut random = SplitMix64(what << 32 | u64::from(positions.start));
    let mut rows = Vec::new();
    for position in positions {
        for _ in 0..heads {
            rows.push(each(position));
            rows.extend((1..DIM).map(|_| (random.unit() * 0.5 - 0.25) as f32));
        }
    }
    rows
}

/// The outputs of a prompt in steps and of one more token, `[tokens, heads * dim]`.
fn outputs(backend: &dyn Backend, storage: Storage, rise: f32, sinks: Option<&[f32]>) -> Vec<f32> {
    let layer = LayerId(0);
    let visibility = Visibility::FULL;
    let group = GroupSpec { capacity_tokens: TOKENS + 32, visibility, max_step_tokens: STEP };
    let cache = Cache::new(vec![kinds::build("paged", &group).unwrap()]);
    let spec = PoolSpec {
        layout: Layout { n_heads: HEADS[0], layers: vec![LayerSpec::new(GroupId(0), layer, HEADS[1], DIM)] },
        k: storage,
        v: storage,
        capacity_cells: cache.capacity_cells(),
        max_step_tokens: STEP,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let mut session = Session::new(cache, backend.pools(&spec).unwrap(), &spec);
    session.cache.sequences().unwrap().seq_new(SeqId(0)).unwrap();
    let mut all = Vec::new();
    for (first, n) in (0..TOKENS).step_by(STEP as usize).map(|first| (first, STEP)).chain([(TOKENS, 1)]) {
        let positions = first..first + n;
        let q = rows(0, HEADS[0], positions.clone(), |_| 1.0);
        let scale = 0.125;
        let k =
            rows(1, HEADS[1], positions.clone(), |at| at as f32 * rise / std::f32::consts::LOG2_E / scale);
        let v = rows(2, HEADS[1], positions, |at| (at % 7) as f32 - 3.0);
        let mut out = vec![f32::NAN; q.len()];
        let dense = |rows, heads: u32| Tensor::dense(rows, heads as usize, DIM as usize);
        let spans = [Span::chain(SeqId(0), first, n)];
        let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
        step.attend(Attend {
            layer,
            q: dense(&q, HEADS[0]),
            kv: Some((dense(&k, HEADS[1]), dense(&v, HEADS[1]))),
            out: TensorMut::dense(&mut out, HEADS[0] as usize, DIM as usize),
            scale,
            softcap: None,
            sinks,
        })
        .unwrap();
        step.commit().unwrap();
        all.extend(out);
    }
    all
}

/// A warp has every fourth group of 16 cells, so its scores rise by 64 positions at a time: by more than the lag, by just as much, and by a
/// half of it, so that every other group is far above. And falling ones, whose first group is the largest.
#[test]
fn maxima_follow_scores_that_rise() {
    let (Some(fast), Some(exact)) = (fast_device(), device()) else { return };
    let sinks = [0.5, 30.0, 60.0, -3.0];
    for storage in ["f16", "q8"] {
        let rises =
            [(LAG + 1.5, None), (LAG, Some(&sinks[..])), (LAG / 2.0 + 0.2, None), (-LAG, Some(&sinks[..]))];
        for (by, sinks) in rises {
            let of = |backend: &dyn Backend| outputs(backend, storage.parse().unwrap(), by / 64.0, sinks);
            let (found, expected) = (of(&fast), of(&exact));
            // Values are up to 3. Scores are up to 50: rounding of queries to f16 changes weights by some 1 %.
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = (found - expected).abs();
                assert!(error <= 0.03, "{storage} {by} sinks {sinks:?}, {i}: {found}, not {expected}");
            }
        }
    }
}
