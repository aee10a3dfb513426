//! The GPU that tests run on: the emulation in `tests/emulation`, or GPU N of this machine if `KVIST_CUDA=N`.
#![allow(dead_code)] // each test uses a part of this
use kvist_cuda::{CudaDevice, CudaDriver, Installation, Options};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

/// The number that `KVIST_CUDA` names.
pub fn index() -> Option<usize> {
    let text = std::env::var("KVIST_CUDA").ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("KVIST_CUDA={text} is not the number of a GPU")))
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("kvist-cuda-emulation")
}

fn sources() -> PathBuf {
    // The same folder for the tests of other crates.
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/tests/emulation").canonicalize().unwrap()
}

/// The C++ compiler and its flags, for the kernels as for their header.
fn compiler() -> (String, String) {
    let compiler = std::env::var("KVIST_CXX").unwrap_or_else(|_| "c++".into());
    let mut flags = std::env::var("KVIST_CXXFLAGS").unwrap_or_default();
    if fused() {
        flags += " -mfma";
    }
    (compiler, flags)
}

/// Builds the emulated driver. The error says why it cannot be built.
fn build() -> Result<PathBuf, String> {
    if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        return Err("the emulation of CUDA is for Linux on x86-64 and AArch64".into());
    }
    fs::create_dir_all(folder().join("kernels")).map_err(|error| error.to_string())?;
    let header = compile_header().map_err(|error| format!("the header of the emulation: {error}"))?;
    let library = folder().join(format!("libcuda-{}.so", std::process::id()));
    let (compiler, _) = compiler();
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"])
        .arg(format!("-DCUDA_H=\"{}\"", header.display()))
        .arg(format!("-DKERNEL_FLAGS=\"{KERNEL_FLAGS}\""))
        .arg("-o")
        .arg(&library)
        .arg(sources().join("libcuda.cpp"))
        .arg("-ldl")
        .output()
        .map_err(|error| format!("there is no C++ compiler `{compiler}`: {error}"))?;
    if !output.status.success() {
        return Err(format!("the emulation does not compile:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(library)
}

/// Flags of every kernel besides those of [`compiler`].
const KERNEL_FLAGS: &str =
    "-std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -w -shared -fPIC -fvisibility=hidden";

/// A copy of `cuda.h` with its precompiled form beside it, which the compiler takes by itself: without, reading the header is half of the
/// time that a small kernel takes. A compiler that makes none, or does not trust this one, reads the header.
fn compile_header() -> std::io::Result<PathBuf> {
    let text = fs::read(sources().join("cuda.h"))?;
    let (compiler, flags) = compiler();
    let mut hasher = DefaultHasher::new();
    (&text, &compiler, &flags, KERNEL_FLAGS).hash(&mut hasher);
    let own = folder().join(format!("header-{:016x}", hasher.finish()));
    let (header, compiled) = (own.join("cuda.h"), own.join("cuda.h.gch"));
    if compiled.exists() {
        return Ok(header);
    }
    // Two processes may be here: each writes files of its own, which are whole before they get their names.
    fs::create_dir_all(&own)?;
    let part = |name: &str| own.join(format!("{name}.{}", std::process::id()));
    fs::write(part("cuda.h"), text)?;
    fs::rename(part("cuda.h"), &header)?;
    let output = Command::new(compiler)
        .args(flags.split_whitespace())
        .args(KERNEL_FLAGS.split_whitespace().filter(|flag| *flag != "-shared"))
        .args(["-x", "c++-header", "-o"])
        .args([part("cuda.h.gch"), header.clone()])
        .output();
    if output.is_ok_and(|output| output.status.success()) {
        fs::rename(part("cuda.h.gch"), compiled)?;
    }
    Ok(header)
}

/// An emulated driver of its own, with these settings (see `libcuda.cpp`). Without a C++ compiler prints why and returns
/// `None`; `KVIST_REQUIRE_CUDA=1` makes that a failure.
pub fn emulation(settings: &[(&str, &str)]) -> Option<Installation> {
    static LIBRARY: LazyLock<Option<PathBuf>> = LazyLock::new(|| match build() {
        Ok(library) => Some(library),
        Err(what) if std::env::var_os("KVIST_REQUIRE_CUDA").is_some() => panic!("{what}"),
        Err(what) => {
            // Past the capture of the test harness, so that a run without a compiler shows that nothing was tested.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "SKIPPED, the CUDA kernels were not tested: {what}");
            None
        }
    });
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let library = LIBRARY.as_ref()?;
    // A copy, so that its state and its settings are its own. The kernels are shared.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let own = folder().join(format!("run-{}-{number}", std::process::id()));
    fs::create_dir_all(&own).unwrap();
    let copy = own.join("libcuda.so");
    fs::copy(library, &copy).unwrap();
    let kernels = folder().join("kernels").display().to_string();
    let (_, flags) = compiler();
    let mut text = format!("KVIST_EMULATION={kernels}\nKVIST_CXXFLAGS={flags}\n");
    text.extend(settings.iter().map(|(name, value)| format!("{name}={value}\n")));
    fs::write(own.join("settings"), text).unwrap();
    Some(Installation { cuda: Some(copy.clone()), nvrtc: Some(copy), cache: None })
}

/// Whether one instruction computes `fmaf`. Without it the host's library does, as exactly and slower.
fn fused() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// The driver that tests use, and its number. Emulated one per test (each has a thread): calls of a driver wait for each other.
pub fn installation() -> Option<(Installation, Option<usize>)> {
    thread_local!(static OF_THREAD: Option<Installation> = emulation(&[]));
    match index() {
        Some(index) => Some((Installation::of_system(), Some(index))),
        None => OF_THREAD.with(Clone::clone).map(|installation| (installation, None)),
    }
}

/// The API that tests run on.
pub type Api = CudaDriver;

/// All forms of a kernel on a GPU and where the tests of CUDA are asked for (`just cuda`). Emulated among all other tests one in six, from
/// `first` on: each takes the C++ compiler a second or two.
pub fn some<T>(first: usize, forms: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let all = index().is_some() || std::env::var_os("KVIST_REQUIRE_CUDA").is_some();
    let (skip, step) = if all { (0, 1) } else { (first, 6) };
    forms.into_iter().skip(skip).step_by(step)
}

/// Inputs as small as this keep their digits.
pub const TINY: f32 = 1e-36;

/// Tests compare bits unless they say otherwise.
pub const DETERMINISTIC: Options =
    Options { deterministic: true, graphs: true, overlap: true, warpgroups: true, max_part_bytes: u64::MAX };

/// The API with such options.
pub fn open(options: Options) -> Option<CudaDriver> {
    let (installation, index) = installation()?;
    Some(CudaDriver::open(&installation, index, options).unwrap_or_else(|error| panic!("{error}")))
}

/// The API under [`device`], opened for itself.
pub fn driver() -> Option<Arc<CudaDriver>> {
    open(DETERMINISTIC).map(Arc::new)
}

/// The same, with kernels whose results may depend on the batch.
pub fn fast_driver() -> Option<CudaDriver> {
    open(Options { deterministic: false, ..DETERMINISTIC })
}

/// What is fast where a test does not ask for the same bits in every batch.
pub const FAST: Options = Options { deterministic: false, ..DETERMINISTIC };

/// A device with the fast kernels.
pub fn fast_device() -> Option<CudaDevice> {
    fast_device_in_parts(u64::MAX)
}

/// The same with weights and pools in parts of at most so many bytes.
pub fn fast_device_in_parts(max_part_bytes: u64) -> Option<CudaDevice> {
    open(Options { max_part_bytes, ..FAST }).map(CudaDevice::new)
}

/// A device with weights and pools in parts of at most so many bytes.
pub fn device_in_parts(max_part_bytes: u64) -> Option<CudaDevice> {
    open(Options { max_part_bytes, ..DETERMINISTIC }).map(CudaDevice::new)
}

pub fn device() -> Option<CudaDevice> {
    static DEVICE: LazyLock<Option<CudaDevice>> = LazyLock::new(|| {
        let device = device_in_parts(u64::MAX)?;
        println!("on {}", device.adapter());
        Some(device)
    });
    DEVICE.clone()
}
