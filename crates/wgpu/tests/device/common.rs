//! The adapter that the tests run on.
use kvist_wgpu::{OpenOptions, Wgpu, WgpuDevice};
use std::sync::{Arc, LazyLock};

/// The API that tests run on.
pub type Api = Wgpu;

/// The number that `KVIST_WGPU` names.
pub fn index() -> Option<usize> {
    std::env::var("KVIST_WGPU").ok().and_then(|text| text.parse().ok())
}

/// The best adapter, or the one that `KVIST_WGPU` numbers. Without any adapter prints why and returns `None`;
/// `KVIST_REQUIRE_WGPU=1` makes that a failure.
pub fn device() -> Option<WgpuDevice> {
    static DEVICE: LazyLock<Option<WgpuDevice>> = LazyLock::new(|| {
        match kvist_wgpu::open(index()) {
            Ok(device) => {
                println!("on {}", device.adapter());
                Some(device)
            }
            Err(error) if std::env::var_os("KVIST_REQUIRE_WGPU").is_some() => panic!("{error}"),
            Err(error) => {
                // Past the capture of the test harness, so that a run without a GPU shows that nothing was tested.
                use std::io::Write;
                let _ = writeln!(std::io::stderr(), "SKIPPED, nothing on the GPU was tested: {error}");
                None
            }
        }
    });
    DEVICE.clone()
}

/// The API under [`device`], opened for itself.
pub fn driver() -> Option<Arc<Wgpu>> {
    device()?;
    Some(Arc::new(Wgpu::open(index(), &OpenOptions::default()).unwrap()))
}

/// [`device`], opened anew.
pub fn with(options: OpenOptions) -> WgpuDevice {
    kvist_wgpu::open_with(index(), &options).unwrap()
}

/// [`device`] with weights and pools in parts of so many bytes.
pub fn in_parts(max_part_bytes: u64) -> WgpuDevice {
    with(OpenOptions { max_part_bytes, ..OpenOptions::default() })
}
