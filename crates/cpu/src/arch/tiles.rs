//! Matrix registers: eight tiles of up to 16 rows of 64 bytes, and products of whole tiles.
//!
//! ```text
//! C[m][n] += Σk A[m][k] * B[k][n]      A: [rows][4 bytes × depth]   B: [depth][4 bytes × columns]   C: [rows][columns]
//! ```
//!
//! The elements of A and B are groups of four bytes along the summed dimension: four codes, or a pair of bf16. A vector
//! of a panel of weights or keys (sixteen rows' groups side by side) is therefore a row of B as it is.
//!
//! Tiles are configured for the time of one call of [`TileIsa::run`], with the [`Shapes`] that the kernel names: the
//! compiler checks that the shapes of a product agree, and no state of the thread is left behind. Every slice is
//! checked against the shape before it is read or written.
//!
//! With the feature `testing`, `EmulatedTiles` computes the same in plain loops, so that kernels over tiles are tested on every
//! machine.
#![cfg_attr(not(any(target_arch = "x86_64", feature = "testing")), allow(dead_code, unused_variables))] // nothing has tiles then

#[cfg(feature = "testing")]
mod emulated;

#[cfg(feature = "testing")]
use super::Portable;
use super::Simd;
#[cfg(feature = "testing")]
use emulated::EmulatedTiles;
use std::cell::Cell;
use std::marker::PhantomData;

/// Rows and bytes per row of each tile register. Tiles that are not used have no rows.
pub trait Shapes: 'static {
    /// At most 16.
    const ROWS: [usize; 8];
    /// At most 64, a multiple of 4.
    const BYTES: [usize; 8];
}

/// Elements that tiles are loaded from and stored to: any bits are valid.
pub trait TileElement: Copy + sealed::Sealed {}

mod sealed {
    /// # Safety
    /// Any bits are a value, and there is no padding.
    pub unsafe trait Sealed {}
    macro_rules! plain {
        ($($T:ty),+) => {
            // SAFETY: numbers have neither padding nor invalid values.
            $(unsafe impl Sealed for $T {}
            impl super::TileElement for $T {})+
        };
    }
    plain!(u8, i8, u16, u32, i32, f32);
}

/// The tile registers of the running thread, `0..8`.
pub trait Tiles<Sh: Shapes> {
    /// Fills tile `T` from rows that are `stride` elements apart. Panics if the last row exceeds `from`.
    fn load<const T: usize, E: TileElement>(&mut self, from: &[E], stride: usize);
    fn zero<const T: usize>(&mut self);
    /// Writes tile `T` to rows that are `stride` elements apart. Panics if the last row exceeds `to`.
    fn store<const T: usize, E: TileElement>(&mut self, to: &mut [E], stride: usize);
    /// `C += A × B` in i32, wrapping; A and B are i8.
    fn dot_i8<const C: usize, const A: usize, const B: usize>(&mut self);
    /// `C += A × B` in i32, wrapping; A is u8, B is i8.
    fn dot_u8_i8<const C: usize, const A: usize, const B: usize>(&mut self);
    /// `C += A × B` in f32; A and B are bf16. Even and odd elements are summed apart, each product added with one
    /// rounding, then both sums to C. Subnormal numbers count as 0, in and out.
    fn dot_bf16<const C: usize, const A: usize, const B: usize>(&mut self);
}

/// Code over tiles and vectors. `run` must be `#[inline(always)]`, and so must everything it calls, as in
/// [`Kernel`](super::Kernel).
pub trait TileKernel {
    type Shapes: Shapes;
    type Out;
    fn run<S: Simd, T: Tiles<Self::Shapes>>(self, s: S, tiles: &mut T) -> Self::Out;
}

/// What has tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileIsa {
    #[cfg(feature = "testing")]
    Emulated(Portable),
    #[cfg(target_arch = "x86_64")]
    Amx(super::amx::Amx),
}

impl TileIsa {
    /// Runs `kernel` with tiles of its shapes. Panics if called inside such a kernel.
    #[inline]
    pub fn run<K: TileKernel>(self, kernel: K) -> K::Out {
        const { check_shapes::<K::Shapes>() }
        let in_use = InUse::new();
        match self {
            #[cfg(feature = "testing")]
            TileIsa::Emulated(s) => {
                let out = kernel.run(s, &mut EmulatedTiles::new());
                drop(in_use);
                out
            }
            #[cfg(target_arch = "x86_64")]
            TileIsa::Amx(amx) => amx.run_tiles(kernel, &in_use),
        }
    }
}

thread_local! {
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

/// The tiles of this thread, taken until dropped: a second kernel would configure them under the first one.
pub(super) struct InUse(PhantomData<*const ()>);

impl InUse {
    #[inline(always)]
    fn new() -> Self {
        assert!(!IN_USE.replace(true), "a kernel of this thread is using the tiles");
        InUse(PhantomData)
    }
}

impl Drop for InUse {
    #[inline(always)]
    fn drop(&mut self) {
        IN_USE.set(false);
    }
}

const fn check_shapes<Sh: Shapes>() {
    let mut t = 0;
    while t < 8 {
        assert!(Sh::ROWS[t] <= 16 && Sh::BYTES[t] <= 64 && Sh::BYTES[t].is_multiple_of(4));
        assert!((Sh::ROWS[t] == 0) == (Sh::BYTES[t] == 0));
        t += 1;
    }
}

/// The tile exists.
pub(super) const fn check_tile<Sh: Shapes>(t: usize) {
    assert!(t < 8 && Sh::ROWS[t] > 0);
}

/// The shapes of a product agree, and its tiles differ.
pub(super) const fn check_dot<Sh: Shapes>(c: usize, a: usize, b: usize) {
    check_tile::<Sh>(c);
    check_tile::<Sh>(a);
    check_tile::<Sh>(b);
    assert!(c != a && c != b && a != b);
    assert!(Sh::ROWS[c] == Sh::ROWS[a] && Sh::BYTES[c] == Sh::BYTES[b] && Sh::BYTES[a] == 4 * Sh::ROWS[b]);
}

/// Asserts that the rows of tile `T`, `stride` elements apart, fit `len` elements.
#[inline(always)]
pub(super) fn check_rows<Sh: Shapes, const T: usize, E>(len: usize, stride: usize) {
    let row = const {
        check_tile::<Sh>(T);
        assert!(Sh::BYTES[T].is_multiple_of(size_of::<E>()));
        Sh::BYTES[T] / size_of::<E>()
    };
    let needed = stride.checked_mul(Sh::ROWS[T] - 1).and_then(|start| start.checked_add(row));
    let fits = stride >= row && needed.is_some_and(|needed| needed <= len);
    assert!(fits, "{} rows of {row} elements, {stride} apart, in a slice of {len}", Sh::ROWS[T]);
}

#[cfg(test)]
mod tests;
