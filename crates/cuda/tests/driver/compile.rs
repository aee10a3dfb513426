//! NVRTC compiles every kernel that the engine can ask for. Needs no GPU: `KVIST_NVRTC` names libnvrtc.so.13, `just cuda` fetches
//! it. To PTX; with `KVIST_PTXAS=1` to machine code, which takes twice as long, and prints registers and spilled bytes of every
//! kernel that spills.
use kvist_cuda::{
    Compiler, Installation,
    kernels::{self, Target},
};
use kvist_gpu::Kernel;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

/// Shared memory of a block, opted in: of 8.6 and 8.9, the least of all, and of 9.0.
const SHARED_BYTES: [u32; 2] = [99 << 10, 227 << 10];
/// Sizes of heads for which every storage is compiled: an odd one, and the most usual one.
const DIMS: [u32; 2] = [33, 128];
/// Other sizes.
const OTHERS: [u32; 5] = [20, 64, 80, 256, 512];

fn compiler(capability: (i32, i32)) -> Option<Compiler> {
    static SAID: LazyLock<()> = LazyLock::new(|| {
        use std::io::Write;
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED, no kernel was compiled: set KVIST_NVRTC, or run `just cuda`"
        );
    });
    let installation = Installation { cache: None, ..Installation::of_system() };
    match Compiler::new(&installation, capability, i32::MAX) {
        Ok(compiler) => Some(compiler),
        Err(error) if std::env::var_os("KVIST_NVRTC").is_some() => panic!("{error}"),
        Err(_) => {
            *SAID;
            None
        }
    }
}

#[test]
fn every_kernel_compiles() {
    let all = kernels::all(&DIMS, &OTHERS);
    for capability in [(8, 0), (9, 0), (10, 0)] {
        let Some(compiler) = compiler(capability) else { return };
        // Code for 9.0 alone can have the instructions of warpgroups.
        let has_warpgroups = capability == (9, 0);
        assert_eq!(compiler.has_warpgroups(), has_warpgroups);
        let exactly = if has_warpgroups { "a" } else { "" };
        assert_eq!(compiler.target(), format!("sm_{}{}{exactly}", capability.0, capability.1));
        let mut sources: Vec<(String, &'static str, String)> = Vec::new();
        for kernel in &all {
            let kinds = [(false, false), (true, false), (true, has_warpgroups)];
            let targets = SHARED_BYTES.into_iter().flat_map(|max_shared_bytes| {
                kinds.map(|(fast, warpgroups)| Target { max_shared_bytes, fast, warpgroups })
            });
            for target in targets {
                if matches!(kernel, Kernel::Attend { rows, .. } if *rows > kernels::ROWS && !target.is_fast(kernel))
                {
                    continue; // the driver asks for no such blocks
                }
                let mut source = target.source(kernel);
                if let (Kernel::Attend { .. }, false, Some(bytes)) =
                    (kernel, target.is_fast(kernel), target.shared_bytes(kernel))
                {
                    // What a launch asks for is what the kernel uses.
                    let used = "4u * (STAGES * TILE_WORDS + (1u + PLAIN) * ROWS * Q_STRIDE)";
                    source += &format!("static_assert({used} == {bytes}u, \"dynamic shared memory\");\n");
                }
                if !sources.iter().any(|(_, _, other)| *other == source) {
                    sources.push((format!("{kernel:?} for {target:?}"), kernels::function(kernel), source));
                }
            }
        }
        let (next, bad) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let assemble = std::env::var_os("KVIST_PTXAS").is_some();
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
                scope.spawn(|| {
                    while let Some((what, name, source)) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let compiled = match assemble {
                            true => compiler.compile(name, source, &["--ptxas-options=--verbose"]),
                            false => compiler.ptx(name, source).map(|image| (image, String::new())),
                        };
                        match compiled {
                            Ok((image, log)) => {
                                assert!(image.len() > 500, "{what}: an image of {} bytes", image.len());
                                if assemble && !log.contains(" 0 bytes spill stores") {
                                    println!("{} {what}:\n{log}", compiler.target());
                                }
                            }
                            Err(error) => bad.lock().unwrap().push(format!("{what}: {error}")),
                        }
                    }
                });
            }
        });
        let bad = bad.into_inner().unwrap();
        assert!(
            bad.is_empty(),
            "{} of {} for {}:\n{}",
            bad.len(),
            sources.len(),
            compiler.target(),
            bad.join("\n")
        );
        println!("{} kernels for {} by NVRTC {:?}", sources.len(), compiler.target(), compiler.version());
    }
}

/// A GPU between two versions that NVRTC knows takes the older one's code; a newer generation takes PTX.
#[test]
fn every_gpu_gets_code_that_it_can_run() {
    let target = |capability| compiler(capability).map(|compiler| compiler.target().to_string());
    if target((8, 0)).is_none() {
        return;
    }
    assert_eq!(target((8, 6)).unwrap(), "sm_86");
    assert_eq!(target((8, 5)).unwrap(), "sm_80");
    assert!(target((99, 0)).unwrap().starts_with("compute_"));
    let installation = Installation { cache: None, ..Installation::of_system() };
    let old_gpu = Compiler::new(&installation, (3, 0), i32::MAX).unwrap_err().to_string();
    assert!(old_gpu.contains("3.0"), "{old_gpu}");
    let old_driver = Compiler::new(&installation, (9, 0), 11040).unwrap_err().to_string();
    assert!(
        old_driver.contains("the driver supports CUDA 11.4") && old_driver.contains("newer driver"),
        "{old_driver}"
    );
}

/// A source that does not compile gives the compiler's log.
#[test]
fn a_log_says_what_is_wrong() {
    let Some(compiler) = compiler((9, 0)) else { return };
    let error =
        compiler.compile("bad", "extern \"C\" __global__ void bad() { missing(); }", &[]).unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
}
