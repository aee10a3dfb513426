//! Models on an NVIDIA GPU if `KVIST_CUDA` numbers one, otherwise the CUDA kernels emulated on the host.
//!
//! Without a C++ compiler the tests print that nothing was tested; `KVIST_REQUIRE_CUDA=1` makes that a failure.
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../cuda/tests/common/mod.rs"]
mod emulated;
#[path = "../engines/mod.rs"]
mod engines;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../../../model/tests/common/mod.rs"]
mod models;

mod serving;

use emulated::{DETERMINISTIC, device};
use kvist_engine::devices::{CudaDevice as Gpu, Place};

const NAME: &str = "cuda";

/// Whether the kernels are emulated.
fn slow() -> bool {
    emulated::index().is_none()
}

fn place(device: &Gpu) -> Place {
    Place::Cuda(device.clone())
}

/// A device whose memory no other test uses.
fn device_of_its_own() -> Option<Gpu> {
    match emulated::index() {
        Some(_) => emulated::device_in_parts(u64::MAX),
        None => emulated::emulation(&[]).map(|own| kvist_cuda::open(&own, None, DETERMINISTIC).unwrap()),
    }
}

/// What `kvist plan` says is on the device is what a full session takes there, by the emulation's own count: the host's part
/// once had only a step's inputs and results, not the tables of plans nor the buffers of transfers.
#[test]
fn the_devices_part_of_a_plan_is_what_the_device_allocates() {
    use common::*;
    use kvist_device::{MemoryBudget, Storage};
    use kvist_engine::memory::{CacheConfig, MemoryPlan};
    use kvist_engine::saved::{Origin, SavedText, save};
    use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
    use kvist_model::{ModelFile, Opened};
    if emulated::index().is_some() {
        return; // a real driver allocates in pages
    }
    // Graphs are the driver's own, and not in the budget.
    let Some(own) = emulated::emulation(&[]) else { return };
    let options = kvist_cuda::Options { graphs: false, ..DETERMINISTIC };
    let device = kvist_cuda::open(&own, None, options).unwrap();
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let model = gpu::load_on(&device, &file, &MemoryBudget::unlimited());
    let registry = place(&device).registry();
    for storage in [Storage::F32, Storage::Q8] {
        let config = CacheConfig { k: storage, v: storage, ..gpu::on(exact("contiguous", 64, 16)) };
        let plan = MemoryPlan::of_session(model.config(), &registry, &config).unwrap();
        let before = device.driver().memory().unwrap().0;
        let mut session = ModelSession::new(&model, &registry, &config).unwrap();
        for chunk in 0..4 {
            let tokens = [chunk + 3; 16];
            let input = SequenceInput::chain(kvist_cache::SeqId::ONLY, &tokens);
            session.forward(&[input], LogitRows::LastOfEach).unwrap();
        }
        // Makes the buffers of transfers.
        let fingerprint = Opened::open_without_texts(&file, true).unwrap().fingerprint().unwrap();
        let origin = Origin::new(fingerprint, texts().format, &config, model.config());
        let (folder, text) = (tempfile::tempdir().unwrap(), SavedText { tokens: &[3; 64], messages: &[] });
        save(&mut session, kvist_cache::SeqId::ONLY, text, &origin, &folder.path().join("session")).unwrap();
        let taken = before - device.driver().memory().unwrap().0;
        assert_eq!(taken, plan.session_bound() - plan.host_bytes, "{storage}: {plan:?}");
    }
}

/// The kernels whose sums depend on the batch, over models: logits near those of the invariant kernels, in every chunk.
#[test]
fn fast_kernels_agree_with_the_invariant_ones() {
    use common::*;
    use kvist_device::{MemoryBudget, Storage};
    use kvist_engine::memory::CacheConfig;
    use kvist_engine::session::ModelSession;
    use kvist_model::ModelFile;
    let (Some(device), Some(fast)) = (emulated::device(), emulated::fast_device()) else { return };
    let files = ["parity/llama-gqa", "gguf/llama-q8_0", "gguf/llama-q4_k", "gguf/qwen3-moe-f32"];
    let mut n = 0;
    for name in files {
        let case = fixtures(name);
        let gguf = case.join("model.gguf");
        let file = ModelFile::Path(if gguf.exists() { gguf } else { case });
        let tokens: Vec<u32> = (0..40).map(|i| i * 11 % 50 + 3).collect();
        for storage in [Storage::F16, Storage::Q8] {
            let run = |device: &Gpu, kind: &str, chunk: u32| {
                let model = gpu::load_on(device, &file, &MemoryBudget::unlimited());
                let config = gpu::on(CacheConfig { k: storage, v: storage, ..exact(kind, 64, chunk) });
                let mut session = ModelSession::new(&model, &place(device).registry(), &config).unwrap();
                logits(&mut session, &tokens)
            };
            let expected = run(&device, "contiguous", 40);
            let size = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (kind, chunk) in [("contiguous", 40), ("paged", 1), ("cells", 7)] {
                let difference = max_difference(&run(&fast, kind, chunk), &expected);
                assert!(
                    difference <= 1e-2 * size,
                    "{name} {storage} {kind} by {chunk}: {difference} of {size}"
                );
                n += 1;
            }
        }
    }
    assert_eq!(n, 24);
}

/// Models decode over graphs with the bits of kernels that are launched one by one.
#[test]
fn graphs_change_no_bit_of_a_model() {
    use common::*;
    use kvist_device::MemoryBudget;
    use kvist_engine::memory::CacheConfig;
    use kvist_engine::session::ModelSession;
    use kvist_model::ModelFile;
    let Some((installation, index)) = emulated::installation() else { return };
    let open = |graphs, deterministic| {
        let options = kvist_cuda::Options { graphs, deterministic, ..DETERMINISTIC };
        kvist_cuda::open(&installation, index, options).unwrap()
    };
    let pairs = [true, false].map(|deterministic| [open(true, deterministic), open(false, deterministic)]);
    for (case, kind, storage, chunk, deterministic) in [
        ("parity/llama-shared-kv", "contiguous", "f16", 1, true),
        ("parity/llama-shared-kv", "paged", "q8", 3, true),
        // Kernels that load weights before they wait.
        ("gguf/llama-q8_0/model.gguf", "paged", "f16", 1, false),
        ("gguf/llama-q4_0/model.gguf", "contiguous", "q8", 6, false),
    ] {
        let devices = &pairs[usize::from(!deterministic)];
        let file = ModelFile::Path(fixtures(case));
        let tokens: Vec<u32> = (0..60).map(|i| i * 7 % 40 + 3).collect();
        let storage = storage.parse().unwrap();
        let bits = devices.each_ref().map(|device| {
            let model = gpu::load_on(device, &file, &MemoryBudget::unlimited());
            let config = CacheConfig { k: storage, v: storage, ..gpu::on(exact(kind, 64, chunk)) };
            let mut session = ModelSession::new(&model, &place(device).registry(), &config).unwrap();
            logits(&mut session, &tokens).iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        });
        assert!(bits[0] == bits[1], "{case} {kind} by {chunk}");
    }
    let [with, without] = pairs[0].each_ref().map(|device| device.driver().counts());
    assert_eq!((with.graphs, without.graphs), (59 + 19, 0), "all steps but the first of each: {with:?}");
    let fast = pairs[1].each_ref().map(|device| device.driver().counts().graphs);
    assert!(fast[0] > 50 && fast[1] == 0, "{fast:?}");
    assert!(with.launches < without.launches / 10, "{with:?} and {without:?}");
}
