//! What tests compare with. No product crate depends on this one.
//!
//! [`reference`](mod@reference) contains a reference model of every kind of cache: vectors and loops, written from the
//! rules and not from the code under test, and a driver that performs random operations on both. [`conformance`] is the
//! suite that every backend must pass, and [`operations`] compares those of a device. [`recording`] is a device that
//! computes nothing and records what it is asked to do. [`servers`] starts servers that stores of blocks use.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod gate;
pub mod operations;
pub mod recording;
pub mod reference;
pub mod servers;

pub use reference::SplitMix64;
use std::io::Write;
use std::sync::LazyLock;

/// An order of the channels of a model's keys, other than the one that is measured: with the last pairs first.
pub fn other_channels(layout: &kvist_device::Layout) -> kvist_device::ChannelOrder {
    let layer = |(l, layer): (usize, &kvist_device::LayerSpec)| match layout.owns(l) {
        true => (0..layer.n_kv_heads * layer.k_dim).map(f64::from).collect(),
        false => Vec::new(),
    };
    let energies: Vec<Vec<f64>> = layout.layers.iter().enumerate().map(layer).collect();
    kvist_device::ChannelOrder::of_energies(layout, &energies).expect("there is one for every layout")
}

/// The adapter that tests over wgpu run on: with `KVIST_REQUIRE_WGPU=1` the best one, with `KVIST_WGPU=1` the one of that number. Without
/// either `None`, and a line says so: `cargo test` leaves GPUs alone. Tests fail if there is no such adapter.
///
/// # Panics
/// `KVIST_WGPU` is not a number.
pub fn wgpu_adapter() -> Option<Option<usize>> {
    static ADAPTER: LazyLock<Option<Option<usize>>> = LazyLock::new(|| {
        let number = std::env::var("KVIST_WGPU").ok();
        let number =
            number.map(|text| text.parse().unwrap_or_else(|_| panic!("KVIST_WGPU={text} is not a number")));
        if number.is_none() && std::env::var_os("KVIST_REQUIRE_WGPU").is_none() {
            // Past the capture of the test harness.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED, nothing is tested on a GPU: set KVIST_REQUIRE_WGPU=1 to test there"
            );
            return None;
        }
        Some(number)
    });
    *ADAPTER
}
