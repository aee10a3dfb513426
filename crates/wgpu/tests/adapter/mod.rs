//! The adapter that tests run on, and how many of their cases it has. kvist-engine's tests use it, too.
use std::sync::LazyLock;

/// The number that `KVIST_WGPU` names.
pub fn index() -> Option<usize> {
    kvist_testing::wgpu_adapter().flatten()
}

/// Every how many-th case is run: `KVIST_ONE_IN`; without it all on a GPU, and one in 20 on lavapipe.
pub fn one_in() -> usize {
    static ONE_IN: LazyLock<usize> = LazyLock::new(|| {
        let wanted =
            std::env::var("KVIST_ONE_IN").ok().map(|text| text.parse().expect("KVIST_ONE_IN is a number"));
        let on_cpu = || {
            let all = kvist_wgpu::adapters();
            let of_number = |number: usize| index().is_none_or(|index| number == index);
            let mut tested =
                all.iter().filter(|adapter| adapter.missing.is_none() && of_number(adapter.index));
            tested.all(|adapter| adapter.kind == "cpu")
        };
        wanted.unwrap_or_else(|| if on_cpu() { 20 } else { 1 })
    });
    *ONE_IN
}
