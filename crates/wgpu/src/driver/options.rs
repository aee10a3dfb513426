//! What an adapter is opened with.
use std::time::Duration;

/// How an adapter is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Most bytes of a part of weights or of a pool, even if the adapter could bind more. For tests: most adapters bind more
    /// than any test needs.
    pub max_part_bytes: u64,
    /// Whether kernels use subgroups, where the adapter has them. With [`deterministic`](Self::deterministic), results have the same
    /// bits without them.
    pub subgroups: bool,
    /// Whether kernels multiply by cooperative matrices, where the adapter has them.
    pub cooperative: bool,
    /// Kernels whose results depend on nothing but a row's own inputs; they are slower.
    pub deterministic: bool,
    /// How long a submission may run before it counts as hung.
    pub patience: Duration,
}

impl Default for OpenOptions {
    /// `KVIST_WGPU_SUBGROUPS=0` and `KVIST_WGPU_COOPERATIVE=0` in the environment turn these off.
    fn default() -> Self {
        let on = |name: &str| std::env::var_os(name).is_none_or(|value| value != "0");
        OpenOptions {
            max_part_bytes: u64::MAX,
            subgroups: on("KVIST_WGPU_SUBGROUPS"),
            cooperative: on("KVIST_WGPU_COOPERATIVE"),
            deterministic: false,
            patience: Duration::from_secs(600),
        }
    }
}
