//! The last bits of a model's results, as they were when `NUMERICS` of the CPU got its value: see `crates/cpu/tests/device/golden.rs`, which
//! tests kernels alone. This is the whole decoder: norms, rotations, the order of its operations.
use kvist_cache::SeqId;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu, NUMERICS};
use kvist_device::{MemoryBudget, Storage};
use kvist_engine::devices;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{LoadOptions, Model, ModelFile};
use std::sync::Arc;

/// If the decoder computes other bits now: raise `NUMERICS` in `crates/cpu/src/lib.rs` and `crates/gpu/src/lib.rs`, and then put here
/// what the test found.
const RECORDED: (u32, u64) = (6, 0xa748_45d1_f3e0_cbd4);

#[test]
fn a_model_computes_what_it_did() {
    let compute = Compute::new("portable".parse::<Isa>().unwrap(), 1).deterministic(true);
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let device = Cpu::new(compute.clone());
    let model = Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {}).unwrap();
    let cache = CacheConfig { k: Storage::F16, v: Storage::F16, ..CacheConfig::new(64) };
    let mut session = ModelSession::new(&Arc::new(model), &devices::on(&compute), &cache).unwrap();
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325; // FNV-1a
    for tokens in [(0..40).map(|i| 7 * i + 3).collect::<Vec<u32>>(), vec![12], vec![5]] {
        session.forward(&[SequenceInput::chain(SeqId(0), &tokens)], LogitRows::LastOfEach).unwrap();
        assert!(session.logits().iter().all(|logit| logit.is_finite()));
        for byte in session.logits().iter().flat_map(|logit| logit.to_bits().to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    assert_eq!((NUMERICS, format!("{hash:#018x}")), (RECORDED.0, format!("{:#018x}", RECORDED.1)));
}
