//! What happens after a failure: every later call returns the first one, nothing panics, and no result is read.
use super::*;
use kvist_gpu::{GpuDevice, Recorder};
use std::time::Instant;

/// The adapter that is tested, opened anew.
fn open(options: &OpenOptions) -> Option<Wgpu> {
    kvist_testing::wgpu_adapter()
        .map(|index| Wgpu::open(index, options).unwrap_or_else(|error| panic!("{error}")))
}

/// Every call of a driver that has failed.
fn assert_failed(gpu: &Wgpu, staging: &Buf, part: &str) {
    let first = gpu.check().unwrap_err();
    assert!(first.to_string().contains(part), "{first}");
    let mut recorder = Recording::default();
    let a = gpu.buffer("a", 64);
    if let Ok(a) = &a {
        gpu.write(a, 0, &[1; 64]);
        gpu.record(&mut recorder, &Kernel::Add, &[Some(a), Some(a)], Args::new(&[16]), [1, 1, 1]);
    }
    let submission = gpu.submit(&mut recorder, &[]);
    let later = [
        gpu.wait(&submission),
        gpu.wait_all(),
        gpu.read(staging, 0..16, |_| panic!("no result is read")),
        gpu.filled("b", &[0; 16]).map(drop),
        gpu.check(),
    ];
    for (i, later) in later.into_iter().enumerate() {
        assert_eq!(later.unwrap_err().to_string(), first.to_string(), "call {i}");
    }
    recorder.restart();
}

#[test]
fn after_a_lost_device_every_call_returns_that() {
    let Some(gpu) = open(&OpenOptions::default()) else { return };
    let staging = gpu.staging("results", 16).unwrap();
    gpu.device.destroy();
    let _ = gpu.device.poll(wgpu::PollType::Poll); // the callback
    assert_failed(&gpu, &staging, "the device was lost");
}

#[test]
fn after_a_kernel_that_does_not_compile_every_call_returns_that() {
    let Some(gpu) = open(&OpenOptions::default()) else { return };
    let staging = gpu.staging("results", 16).unwrap();
    let (a, b) = (gpu.filled("a", &[0; 64]).unwrap(), gpu.filled("b", &[0; 64]).unwrap());
    // An array of no sums.
    let broken = Kernel::Matmul { encoding: 0, tokens: 0, routed: kvist_gpu::Routed::No };
    let mut recorder = Recording::default();
    let buffers = [Some(&a), Some(&a), None, Some(&b), None];
    gpu.record(&mut recorder, &broken, &buffers, Args::default(), [1, 1, 1]);
    gpu.submit(&mut recorder, &[]);
    assert_failed(&gpu, &staging, "matmul");
}

/// A submission that runs for longer than the device's patience: the first of many that has not ended when it is asked for.
#[test]
fn after_a_submission_that_hangs_every_call_returns_that() {
    let Some(gpu) = open(&OpenOptions { patience: Duration::ZERO, ..OpenOptions::default() }) else { return };
    let staging = gpu.staging("results", 16).unwrap();
    let n = 1u32 << 21;
    let (a, b) = (gpu.buffer("a", u64::from(4 * n)).unwrap(), gpu.buffer("b", u64::from(4 * n)).unwrap());
    let began = Instant::now();
    let mut recorder = Recording::default();
    loop {
        for _ in 0..20 {
            gpu.record(&mut recorder, &Kernel::Add, &[Some(&a), Some(&b)], Args::new(&[n]), [n / 64, 1, 1]);
        }
        let submission = gpu.submit(&mut recorder, &[]);
        if gpu.wait(&submission).is_err() {
            break;
        }
        // Only a safety net.
        assert!(began.elapsed() < Duration::from_secs(600), "every submission ended at once");
    }
    assert_failed(&gpu, &staging, "did not end within 0 s");
}

/// A model's device says it too: what is refused is an error of the request, not an answer.
#[test]
fn a_failed_device_refuses_pools() {
    use kvist_device::{Backend, LayerSpec, Layout, MemoryBudget, PoolSpec, Recent, Storage, Usage};
    let Some(gpu) = open(&OpenOptions::default()) else { return };
    gpu.failure.keep("a test");
    let device = GpuDevice::new(gpu);
    let spec = PoolSpec {
        layout: Layout {
            n_heads: 2,
            layers: vec![LayerSpec::new(kvist_cache::GroupId(0), kvist_cache::LayerId(0), 2, 32)],
        },
        k: Storage::F16,
        v: Storage::F16,
        capacity_cells: vec![64],
        max_step_tokens: 8,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let error = device.pools(&spec).map(drop).unwrap_err();
    assert!(error.to_string().contains("a test"), "{error}");
    assert_eq!(spec.budget.usage(), Usage::default());
}

/// Vulkan knows its heaps; an adapter through another API need not.
#[test]
fn an_adapter_says_how_much_memory_it_has() {
    let Some(gpu) = open(&OpenOptions::default()) else { return };
    if gpu.adapter.get_info().backend != wgpu::Backend::Vulkan {
        return;
    }
    let memory = gpu.memory().unwrap();
    assert!(memory.total_bytes >= 64 << 20, "{memory:?}");
    assert!(memory.free_bytes.is_none_or(|free| free > 0), "{memory:?}");
    let listed = crate::adapters();
    let same =
        listed.iter().filter_map(|found| found.memory).any(|found| found.total_bytes == memory.total_bytes);
    assert!(same, "{memory:?} is of none of {listed:?}");
}

/// A buffer that pools had replaced kept its memory until the model's next step, whose recorder had bound it.
#[test]
fn a_dropped_buffer_is_free_whoever_has_bound_it() {
    let Some(gpu) = open(&OpenOptions::default()) else { return };
    let mut recorder = Recording::default();
    let kept = gpu.filled("kept", &[0; 64]).unwrap();
    let mut bind = |bytes: u64| {
        let buffer = gpu.buffer("dropped", bytes).unwrap();
        gpu.record(&mut recorder, &Kernel::Add, &[Some(&kept), Some(&buffer)], Args::new(&[16]), [1, 1, 1]);
        let submission = gpu.submit(&mut recorder, &[]);
        gpu.wait(&submission).unwrap();
        buffer
    };
    drop(bind(64)); // compiles the kernel
    let before = gpu.allocated_bytes();
    let buffer = bind(1 << 20);
    assert!(before.is_none() || gpu.allocated_bytes() > before);
    drop(buffer);
    assert_eq!(gpu.allocated_bytes(), before);
    gpu.check().unwrap();
}
