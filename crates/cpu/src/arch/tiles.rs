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
//! [`EmulatedTiles`] computes the same in plain loops, so that kernels over tiles are tested on every machine.
use super::{Portable, Simd};
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
            TileIsa::Emulated(s) => {
                let mut tiles = EmulatedTiles { tiles: [[[0; 64]; 16]; 8], shapes: PhantomData };
                let out = kernel.run(s, &mut tiles);
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

/// Tiles in memory.
pub struct EmulatedTiles<Sh> {
    tiles: [[[u8; 64]; 16]; 8],
    shapes: PhantomData<Sh>,
}

/// Subnormal numbers become 0, with their sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

impl<Sh: Shapes> EmulatedTiles<Sh> {
    /// Replaces every element of C by `f(element, the row of A, the column of B)`, in groups of four bytes.
    fn each<const C: usize, const A: usize, const B: usize>(
        &mut self,
        f: impl Fn([u8; 4], &[[u8; 4]], &[[u8; 4]]) -> [u8; 4],
    ) {
        const { check_dot::<Sh>(C, A, B) }
        let (a, b) = (self.tiles[A], self.tiles[B]);
        let depth = Sh::ROWS[B];
        for (row, c) in self.tiles[C].iter_mut().enumerate().take(Sh::ROWS[C]) {
            for (n, c) in c.as_chunks_mut::<4>().0.iter_mut().enumerate().take(Sh::BYTES[C] / 4) {
                let mut column = [[0; 4]; 16];
                column.iter_mut().zip(&b).for_each(|(to, b)| *to = b.as_chunks().0[n]);
                *c = f(*c, &a[row].as_chunks().0[..depth], &column[..depth]);
            }
        }
    }
}

fn dot_bytes(c: [u8; 4], products: impl Iterator<Item = i32>) -> [u8; 4] {
    products.fold(i32::from_le_bytes(c), i32::wrapping_add).to_le_bytes()
}

impl<Sh: Shapes> Tiles<Sh> for EmulatedTiles<Sh> {
    fn load<const T: usize, E: TileElement>(&mut self, from: &[E], stride: usize) {
        check_rows::<Sh, T, E>(from.len(), stride);
        for (row, tile) in self.tiles[T].iter_mut().enumerate().take(Sh::ROWS[T]) {
            let row = &from[row * stride..][..Sh::BYTES[T] / size_of::<E>()];
            // SAFETY: a `TileElement` has no padding, so its bytes are initialised; the length is the row's.
            let bytes = unsafe { std::slice::from_raw_parts(row.as_ptr().cast::<u8>(), Sh::BYTES[T]) };
            tile[..Sh::BYTES[T]].copy_from_slice(bytes);
        }
    }
    fn zero<const T: usize>(&mut self) {
        const { check_tile::<Sh>(T) }
        self.tiles[T] = [[0; 64]; 16];
    }
    fn store<const T: usize, E: TileElement>(&mut self, to: &mut [E], stride: usize) {
        check_rows::<Sh, T, E>(to.len(), stride);
        for (row, tile) in self.tiles[T].iter().enumerate().take(Sh::ROWS[T]) {
            let row = &mut to[row * stride..][..Sh::BYTES[T] / size_of::<E>()];
            // SAFETY: any bytes are valid `TileElement`s; the length is the row's.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(row.as_mut_ptr().cast::<u8>(), Sh::BYTES[T]) };
            bytes.copy_from_slice(&tile[..Sh::BYTES[T]]);
        }
    }
    fn dot_i8<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.each::<C, A, B>(|c, a, b| {
            let pairs = a.as_flattened().iter().zip(b.as_flattened());
            dot_bytes(c, pairs.map(|(a, b)| i32::from(a.cast_signed()) * i32::from(b.cast_signed())))
        });
    }
    fn dot_u8_i8<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.each::<C, A, B>(|c, a, b| {
            let pairs = a.as_flattened().iter().zip(b.as_flattened());
            dot_bytes(c, pairs.map(|(a, b)| i32::from(*a) * i32::from(b.cast_signed())))
        });
    }
    fn dot_bf16<const C: usize, const A: usize, const B: usize>(&mut self) {
        self.each::<C, A, B>(|c, a, b| {
            let halves = |x: &[u8; 4]| {
                [0, 2].map(|i| flush(f32::from_bits(u32::from(u16::from_le_bytes([x[i], x[i + 1]])) << 16)))
            };
            let mut sums = [0f32; 2];
            for (a, b) in a.iter().map(halves).zip(b.iter().map(halves)) {
                for i in 0..2 {
                    sums[i] = flush(a[i].mul_add(b[i], sums[i]));
                }
            }
            flush(flush(f32::from_le_bytes(c)) + flush(sums[0] + sums[1])).to_le_bytes()
        });
    }
}

#[cfg(test)]
mod tests;
