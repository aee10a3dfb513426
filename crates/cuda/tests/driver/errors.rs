//! What goes wrong outside of this program is an error that says what to do: no driver, no compiler, no GPU, no memory, a kernel
//! that fails. After a failure nothing is computed, and no result is read.
use crate::common::{DETERMINISTIC, emulation};
use kvist_cuda::{CudaDriver, Installation, devices};
use kvist_device::DeviceError;
use kvist_gpu::{Args, Driver, Kernel};

fn message(settings: &[(&str, &str)]) -> Option<String> {
    let installation = emulation(settings)?;
    Some(CudaDriver::open(&installation, None, DETERMINISTIC).map(drop).unwrap_err().to_string())
}

#[test]
fn what_is_missing_is_named_with_advice() {
    let nothing = Installation { cuda: Some("/no/libcuda".into()), nvrtc: None, cache: None };
    let error = devices(&nothing).map(drop).unwrap_err().to_string();
    assert!(error.contains("/no/libcuda") && error.contains("install NVIDIA's driver"), "{error}");
    assert!(error.contains("--backend cpu"), "{error}");

    let Some(emulated) = emulation(&[]) else { return };
    let no_compiler = Installation { nvrtc: Some("/no/libnvrtc".into()), ..emulated.clone() };
    let error = CudaDriver::open(&no_compiler, None, DETERMINISTIC).map(drop).unwrap_err().to_string();
    assert!(error.contains("/no/libnvrtc") && error.contains("pip install nvidia-cuda-nvrtc"), "{error}");
    let error = CudaDriver::open(&emulated, Some(3), DETERMINISTIC).map(drop).unwrap_err().to_string();
    assert!(error.contains("no GPU 3, the machine has 1"), "{error}");

    for (settings, expected) in [
        (("KVIST_EMULATION_DEVICES", "0"), "no GPU"),
        (("KVIST_EMULATION_FAIL", "cuInit:100"), "no GPU"),
        (("KVIST_EMULATION_FAIL", "cuInit:999"), "the driver does not start (CUDA error 999"),
        (("KVIST_EMULATION_CAPABILITY", "75"), "compute capability is 7.5, kvist needs 8.0"),
        (("KVIST_EMULATION_VERSION", "12040"), "the driver supports CUDA 12.4: install a newer driver"),
        (("KVIST_EMULATION_FAIL", "cuStreamCreate:2"), "CUDA_ERROR_OUT_OF_MEMORY"),
    ] {
        let error = message(&[settings]).unwrap();
        assert!(error.contains(expected), "{settings:?}: {error}");
    }
}

#[test]
fn devices_are_listed_with_their_memory() {
    let Some(installation) =
        emulation(&[("KVIST_EMULATION_DEVICES", "2"), ("KVIST_EMULATION_BYTES", "50000000")])
    else {
        return;
    };
    let found = devices(&installation).unwrap();
    assert_eq!(found.len(), 2);
    let second = &found[1];
    assert_eq!((second.index, second.compute_capability), (1, (9, 0)));
    assert_eq!((second.total_bytes, second.free_bytes), (50_000_000, Some(50_000_000)));
    assert_eq!(second.missing, None);
}

#[test]
fn memory_is_refused_zeroed_and_given_back() {
    let Some(installation) = emulation(&[("KVIST_EMULATION_BYTES", "1000000")]) else { return };
    let gpu = CudaDriver::open(&installation, None, DETERMINISTIC).unwrap();
    let before = gpu.memory().unwrap();
    for _ in 0..1000 {
        let buffer = gpu.buffer("test", 900_000).unwrap();
        assert_eq!(gpu.memory().unwrap().0, before.0 - 900_000);
        match gpu.buffer("second", 200_000) {
            Err(DeviceError::OutOfMemory { what: "second", bytes: 200_000 }) => {}
            other => panic!("{other:?}"),
        }
        drop(buffer);
        assert_eq!(gpu.memory().unwrap(), before);
    }
    // The emulation hands out memory that is full of ones.
    let buffer = gpu.buffer("zeros", 64).unwrap();
    gpu.read_back(&[(&buffer, 0, 64)], |bytes| assert_eq!(bytes, [0; 64])).unwrap();
    gpu.check().unwrap();
    let error = gpu.buffer("all", 1 << 33).unwrap_err().to_string();
    assert!(error.contains("shorter steps or less context"), "{error}");
}

/// x += y over 16 elements, and what comes back.
fn add(gpu: &CudaDriver) -> Result<Vec<f32>, DeviceError> {
    let bytes = |x: f32| x.to_le_bytes().repeat(16);
    let (x, y) = (gpu.filled("x", &bytes(1.0))?, gpu.filled("y", &bytes(2.0))?);
    let mut recorder = Default::default();
    gpu.record(&mut recorder, &Kernel::Add, &[Some(&y), Some(&x)], Args::new(&[16]), [1, 1, 1]);
    let submission = gpu.submit(&mut recorder, &[]);
    gpu.wait(&submission)?;
    let mut found = Vec::new();
    gpu.read_back(&[(&x, 0, 64)], |bytes| {
        found = bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    })?;
    Ok(found)
}

#[test]
fn a_failure_is_kept_and_nothing_is_read_after_it() {
    for (failure, expected) in [
        ("cuLaunchKernel:700:1", "launch of add: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("nvrtcCompileProgram:6", "the kernel add does not compile"),
        ("cuModuleLoadDataEx:200", "the kernel add cannot be loaded: CUDA_ERROR_INVALID_IMAGE"),
        ("cuEventQuery:719:9", "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuMemcpyDtoHAsync_v2:700:1", "copy: CUDA_ERROR_ILLEGAL_ADDRESS"),
    ] {
        let Some(installation) = emulation(&[("KVIST_EMULATION_FAIL", failure)]) else { return };
        let gpu = CudaDriver::open(&installation, None, DETERMINISTIC).unwrap();
        let mut results = (0..12).map(|_| add(&gpu));
        let error = results.find_map(Result::err).unwrap_or_else(|| panic!("{failure} did not show"));
        assert!(error.to_string().contains(expected), "{failure}: {error}");
        let again = results.next().unwrap().unwrap_err();
        assert_eq!(again.to_string(), error.to_string(), "{failure}: the first error is kept");
    }
    if let Some(installation) = emulation(&[]) {
        let gpu = CudaDriver::open(&installation, None, DETERMINISTIC).unwrap();
        assert_eq!(add(&gpu).unwrap(), [3.0; 16], "without a failure it adds");
    }
}

/// Compiled kernels are kept in a folder, used by the next process, and compiled anew if a file is damaged.
#[test]
fn compiled_kernels_are_kept() {
    let Some(installation) = emulation(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cached = Installation { cache: Some(folder.path().join("deep").join("er")), ..installation };
    let open = |installation: &Installation| CudaDriver::open(installation, None, DETERMINISTIC).unwrap();
    let files = || -> Vec<_> {
        std::fs::read_dir(cached.cache.as_ref().unwrap()).unwrap().map(|file| file.unwrap().path()).collect()
    };
    assert_eq!(add(&open(&cached)).unwrap(), [3.0; 16]);
    assert_eq!(files().len(), 1, "{:?}", files());
    // Another driver that cannot compile.
    let settings = [("KVIST_EMULATION_FAIL", "nvrtcCompileProgram:6")];
    let broken = Installation { cache: cached.cache.clone(), ..emulation(&settings).unwrap() };
    assert_eq!(add(&open(&broken)).unwrap(), [3.0; 16], "from the folder");
    std::fs::write(&files()[0], "damaged").unwrap();
    assert!(add(&open(&broken)).is_err(), "it has to compile");
    assert_eq!(add(&open(&cached)).unwrap(), [3.0; 16], "compiled anew");
    assert_eq!(add(&open(&broken)).unwrap(), [3.0; 16], "and kept");
    // A folder that cannot be written is no failure.
    let nowhere = Installation { cache: Some("/proc/no/such/folder".into()), ..cached.clone() };
    assert_eq!(add(&open(&nowhere)).unwrap(), [3.0; 16]);
}
