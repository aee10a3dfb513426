//! Pools whose device has no memory left, and what their budget says then.
use super::*;
use crate::test_driver::TestDriver;
use kvist_cache::kinds::{self, GroupSpec, Visibility};

const G: GroupId = GroupId(0);
const CELLS: u32 = 512;

/// Two layers, with K and V of different sizes.
fn spec(budget: &Arc<MemoryBudget>) -> PoolSpec {
    PoolSpec {
        layout: Layout { n_heads: 4, layers: (0..2).map(|l| LayerSpec::new(G, LayerId(l), 2, 32)).collect() },
        k: Storage::F32,
        v: Storage::F16,
        capacity_cells: vec![CELLS],
        max_step_tokens: 64,
        budget: budget.clone(),
        channels: None,
        recent: Recent::default(),
    }
}

fn cache(kind: &str) -> Cache {
    let group = GroupSpec { capacity_tokens: CELLS, visibility: Visibility::FULL, max_step_tokens: 64 };
    let mut cache = Cache::new(vec![kinds::build(kind, &group).unwrap()]);
    if let Some(mut sequences) = cache.sequences() {
        sequences.seq_new(SeqId(0)).unwrap();
    }
    cache
}

/// Begins and commits a step of `n` tokens, if the pools take it.
fn step(
    pools: &mut GpuPools<TestDriver>,
    cache: &mut Cache,
    seq: SeqId,
    start: u32,
    n: u32,
) -> Result<(), DeviceError> {
    let mut plan = StepPlan::default();
    let spans = [Span::chain(seq, start, n)];
    let mut step = Step::begin(cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    pools.begin(step.with_reads())?;
    step.commit();
    Ok(())
}

/// Both sides of every layer have as many cells, and the budget says what the buffers have.
fn check_sides(pools: &GpuPools<TestDriver>, after: &str) {
    let owned = pools.layers.iter().flatten();
    let bytes: u64 = owned.clone().map(|owned| owned.bytes(owned.cells()).unwrap()).sum();
    assert_eq!(pools.bytes(), bytes, "{after}");
    for owned in owned {
        assert_eq!(owned.k.cells, owned.v.cells, "{after}");
    }
}

/// The keys of a layer had grown and its values had not: kernels of attention, which are told one number of cells, read wrong values.
#[test]
fn no_side_grows_or_shrinks_alone() {
    let gpu = TestDriver::new(u64::MAX);
    for n in 0.. {
        let budget = MemoryBudget::unlimited();
        let (mut pools, mut cache) = (GpuPools::new(&gpu, &spec(&budget)).unwrap(), cache("contiguous"));
        for at in (0..256).step_by(64) {
            step(&mut pools, &mut cache, SeqId::ONLY, at, 64).unwrap();
        }
        let marked = |pools: &GpuPools<TestDriver>| {
            let mut row = [0.0; 32];
            pools.inspect(LayerId(1), Side::V, 1, 15, &mut row).unwrap();
            row
        };
        let v = &pools.layers[1].as_ref().unwrap().v;
        gpu.write(&v.parts[0].2, 0, &[0x3c, 0x3c].repeat((v.bytes(v.cells).unwrap() / 2) as usize));
        pools.stale();
        let before = marked(&pools);
        gpu.refuse_after(n);
        let grown = step(&mut pools, &mut cache, SeqId::ONLY, 256, 64);
        let was_refused = !gpu.refuse_no_more();
        assert_eq!(grown.is_err(), was_refused);
        check_sides(&pools, &format!("growth that allocation {n} refuses"));
        assert_eq!(marked(&pools), before, "what was stored stays");
        if grown.is_err() {
            step(&mut pools, &mut cache, SeqId::ONLY, 256, 64).unwrap();
        }
        check_sides(&pools, "growth");
        assert_eq!(marked(&pools), before);
        // Fewer cells than there are: what has no room for the copy stays as it is.
        assert_eq!(pools.layers[0].as_ref().unwrap().cells(), CELLS);
        gpu.refuse_after(n + 1); // after the plan
        let resized = pools.resize(&[32]);
        gpu.refuse_no_more();
        resized.unwrap();
        check_sides(&pools, &format!("fewer cells, without allocation {n}"));
        drop(pools);
        assert_eq!((budget.usage(), gpu.allocated_bytes()), (Usage::default(), Some(0)));
        if !was_refused {
            assert_eq!(n, 4, "two layers have four sides");
            break;
        }
    }
}

/// Pools opened, and a text was refused where it needed a buffer that is too large to be bound.
#[test]
fn a_capacity_that_cannot_be_bound_is_refused_at_the_start() {
    // A head of the keys has 128 bytes per cell.
    let budget = MemoryBudget::unlimited();
    let error = GpuPools::new(&TestDriver::new(128 * u64::from(CELLS) - 1), &spec(&budget)).unwrap_err();
    assert!(error.to_string().contains("use a shorter context"), "{error}");
    assert_eq!(budget.usage(), Usage::default());
    GpuPools::new(&TestDriver::new(128 * u64::from(CELLS)), &spec(&budget)).unwrap();
}

/// A text of which every second token was removed: a chunk behind it has an entry in every tile for each cell, which needs a long plan.
fn scattered(pools: &mut GpuPools<TestDriver>, cache: &mut Cache) -> Result<(), DeviceError> {
    for at in (0..384).step_by(64) {
        step(pools, cache, SeqId(0), at, 64).unwrap();
    }
    for at in (1..383).step_by(2) {
        cache.sequences().unwrap().seq_rm(SeqId(0), at, at + 1).unwrap();
    }
    step(pools, cache, SeqId(0), 384, 64)
}

/// A longer plan came out of what K and V were promised.
#[test]
fn long_plans_leave_what_keys_and_values_were_promised() {
    let gpu = TestDriver::new(u64::MAX);
    let bound = usage(&spec(&MemoryBudget::unlimited()), &[CELLS]).unwrap();
    for (more, fits) in [(1 << 20, true), (1000, false)] {
        let process = MemoryBudget::new(bound.total() + more);
        let promised = process.promise(&bound).unwrap();
        let (mut pools, mut cache) = (GpuPools::new(&gpu, &spec(&promised)).unwrap(), cache("cells"));
        let kv_left = |pools: &GpuPools<TestDriver>| bound.of(Purpose::KvCache) - pools.bytes();
        let ran = scattered(&mut pools, &mut cache);
        assert_eq!(ran.is_ok(), fits, "{ran:?}");
        assert_eq!(promised.free(), kv_left(&pools));
        if fits {
            assert!(process.free() < more, "the plan is longer than usual");
            // All cells, and a plan of the usual length.
            pools.resize(&[CELLS]).unwrap();
            step(&mut pools, &mut cache, SeqId(0), 448, 1).unwrap();
        }
        assert_eq!((promised.free(), process.free()), (kv_left(&pools), more));
    }
    // The device itself has no memory for it.
    let process = MemoryBudget::new(bound.total() + (1 << 20));
    let promised = process.promise(&bound).unwrap();
    let (mut pools, mut cache) = (GpuPools::new(&gpu, &spec(&promised)).unwrap(), cache("cells"));
    pools.grow(|_| CELLS).unwrap();
    gpu.refuse_after(0);
    scattered(&mut pools, &mut cache).unwrap_err();
    assert_eq!(process.free(), 1 << 20);
    step(&mut pools, &mut cache, SeqId(0), 384, 64).unwrap();
    assert!(process.free() < 1 << 20);
}
