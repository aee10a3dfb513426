//! The CPU as a device: K and V storage, attention, packed linear layers, and the memory that they take.
#[path = "../decoding/mod.rs"]
mod decoding;

mod broken;
mod conformance;
mod determinism;
mod fast_prefill;
// The functions of the C library may differ: it runs where its results were recorded.
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
mod golden;
mod linear;
mod mass;
mod memory;
mod reads_bounded;
mod rows;
mod store;
mod transfers;

/// The instruction sets that are tested and whose attention has code of its own. AVX-512 with products of pairs differs from AVX-512
/// in nothing but these products, which attention uses for `--fast-prefill` alone.
fn with_own_attention() -> Vec<kvist_cpu::arch::Isa> {
    let mut all = kvist_cpu::arch::Isa::tested();
    if all.iter().any(|isa| isa.name() == "avx512-bf16") {
        all.retain(|isa| isa.name() != "avx512");
    }
    all
}

/// Whether `Compute::fast_prefill` changes attention.
fn has_fast_attention(isa: kvist_cpu::arch::Isa) -> bool {
    isa.tiles().is_some() || isa.multiplies_pairs() || isa.multiplies_word_pairs()
}

/// Tiles in plain loops: they run a part of the cases.
fn is_slow(isa: kvist_cpu::arch::Isa) -> bool {
    matches!(isa, kvist_cpu::arch::Isa::EmulatedTiles(_))
}
