//! The machine layer: vectors, and threads that share a slice. The crate's only unsafe code is in this module's
//! submodules.
//!
//! Kernels are written once, over [`Simd`]: vectors of [`LANES`] lanes whatever the register width, so that the bytes
//! of a pool and the order of additions are the same on every machine. A CPU feature is a value: an `Avx512` can only
//! be created after checking the CPU, and [`Isa::run`] enters a function compiled for it. Some have [`Tiles`] in addition.
#[cfg(target_arch = "x86_64")]
mod amx;
pub mod arena;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod isa;
mod mapped;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod products;
mod share;
mod simd;
mod threads;
mod tiles;
pub mod transpose;
pub mod uncached;

pub use isa::Isa;
pub use mapped::{HUGE, copy_on_write, map_huge};
use portable::Portable;
pub use portable::widen;
pub use products::{quad_of_units, quads_per_word, together};
pub use share::Columns;
pub use simd::{Kernel, LANES, Simd, Uses};
pub use threads::Threads;
pub use tiles::{Shapes, TileElement, TileIsa, TileKernel, Tiles};

#[cfg(test)]
mod tests;
