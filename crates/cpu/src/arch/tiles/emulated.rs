//! Tiles in memory, and their products in plain loops.
use super::{Shapes, TileElement, Tiles, check_dot, check_rows, check_tile};
use std::marker::PhantomData;

pub struct EmulatedTiles<Sh> {
    tiles: [[[u8; 64]; 16]; 8],
    shapes: PhantomData<Sh>,
}

/// Subnormal numbers become 0, with their sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

impl<Sh: Shapes> EmulatedTiles<Sh> {
    pub fn new() -> Self {
        EmulatedTiles { tiles: [[[0; 64]; 16]; 8], shapes: PhantomData }
    }

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
