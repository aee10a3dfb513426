//! Emulated tiles against sums in i64 and f64, and AMX, where there is one, against emulated tiles bit by bit.
use super::super::Isa;
use super::*;
use half::bf16;
use kvist_testing::SplitMix64;

/// Full tiles; and odd ones: 5 rows of A, 3 groups of four bytes deep, 7 columns.
struct Full;
impl Shapes for Full {
    const ROWS: [usize; 8] = [16; 8];
    const BYTES: [usize; 8] = [64; 8];
}
struct Odd;
impl Shapes for Odd {
    const ROWS: [usize; 8] = [5, 5, 3, 0, 0, 0, 0, 16];
    const BYTES: [usize; 8] = [28, 12, 28, 0, 0, 0, 0, 64];
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Product {
    I8,
    U8I8,
    Bf16,
}

/// `C = C₀ + A × B`, from and to rows with gaps.
struct Once<'p, Sh> {
    product: Product,
    a: &'p [u8],
    b: &'p [u8],
    c: &'p [u32],
    shapes: PhantomData<Sh>,
}

const STRIDE: usize = 80;

impl<Sh: Shapes> TileKernel for Once<'_, Sh> {
    type Shapes = Sh;
    type Out = Vec<u32>;
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Sh>>(self, _: S, tiles: &mut T) -> Vec<u32> {
        let mut out = vec![0xdead_beef; 16 * STRIDE];
        tiles.load::<0, u32>(self.c, STRIDE);
        tiles.load::<1, u8>(self.a, STRIDE);
        tiles.load::<2, u8>(self.b, STRIDE);
        match self.product {
            Product::I8 => tiles.dot_i8::<0, 1, 2>(),
            Product::U8I8 => tiles.dot_u8_i8::<0, 1, 2>(),
            Product::Bf16 => tiles.dot_bf16::<0, 1, 2>(),
        }
        tiles.store::<0, u32>(&mut out, STRIDE);
        out
    }
}

fn tile_isas() -> Vec<TileIsa> {
    Isa::tested().into_iter().filter_map(Isa::tiles).collect()
}

fn products_are_sums<Sh: Shapes>() {
    let mut random = SplitMix64(23);
    let (rows, depth, columns) = (Sh::ROWS[0], Sh::ROWS[2], Sh::BYTES[0] / 4);
    for round in 0..30 {
        let mut bytes = || -> Vec<u8> { (0..16 * STRIDE).map(|_| random.next() as u8).collect() };
        let (a, b) = (bytes(), bytes());
        let c: Vec<u32> = (0..16 * STRIDE).map(|_| random.next() as u32 % 1_000).collect();
        for product in [Product::I8, Product::U8I8] {
            let once = || Once::<Sh> { product, a: &a, b: &b, c: &c, shapes: PhantomData };
            for isa in tile_isas() {
                let out = isa.run(once());
                for (i, found) in out.iter().enumerate() {
                    let (m, n) = (i / STRIDE, i % STRIDE);
                    if m >= rows || n >= columns {
                        assert_eq!(*found, 0xdead_beef, "{isa:?}: written outside the tile");
                        continue;
                    }
                    let products = (0..4 * depth).map(|k| {
                        let (a, b) = (a[m * STRIDE + k], b[k / 4 * STRIDE + 4 * n + k % 4]);
                        let a =
                            if product == Product::I8 { i64::from(a.cast_signed()) } else { i64::from(a) };
                        a * i64::from(b.cast_signed())
                    });
                    let expected = i64::from(c[i]) + products.sum::<i64>();
                    assert_eq!(
                        i64::from(found.cast_signed()),
                        expected,
                        "{isa:?} {product:?} {round} [{m}, {n}]"
                    );
                }
            }
        }
    }
}

#[test]
fn products_of_bytes_are_sums() {
    products_are_sums::<Full>();
    products_are_sums::<Odd>();
}

fn products_of_floats_are_sums<Sh: Shapes>() {
    let mut random = SplitMix64(29);
    let (rows, depth, columns) = (Sh::ROWS[0], Sh::ROWS[2], Sh::BYTES[0] / 4);
    for round in 0..30 {
        let mut float =
            || (random.below(20_001) as f32 / 10_000.0 - 1.0) * if round % 2 == 0 { 1.0 } else { 1e-20 };
        let mut halves =
            || -> Vec<u8> { (0..8 * STRIDE).flat_map(|_| bf16::from_f32(float()).to_le_bytes()).collect() };
        let (a, b) = (halves(), halves());
        let c: Vec<u32> = (0..16 * STRIDE).map(|_| float().to_bits()).collect();
        for isa in tile_isas() {
            let out =
                isa.run(Once::<Sh> { product: Product::Bf16, a: &a, b: &b, c: &c, shapes: PhantomData });
            for m in 0..rows {
                for n in 0..columns {
                    let at = |x: &[u8], i: usize| f64::from(bf16::from_le_bytes([x[i], x[i + 1]]));
                    let products = (0..2 * depth)
                        .map(|k| at(&a, m * STRIDE + 2 * k) * at(&b, k / 2 * STRIDE + 4 * n + k % 2 * 2));
                    let start = f64::from(f32::from_bits(c[m * STRIDE + n]));
                    let size = products.clone().map(f64::abs).sum::<f64>() + start.abs();
                    let (found, expected) =
                        (f64::from(f32::from_bits(out[m * STRIDE + n])), start + products.sum::<f64>());
                    // Subnormal numbers are dropped, product by product.
                    let within = size * 1e-6 + 64.0 * f64::from(f32::MIN_POSITIVE);
                    assert!(
                        (found - expected).abs() <= within,
                        "{isa:?}: {found}, not {expected} ± {within}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_of_bf16_are_sums() {
    products_of_floats_are_sums::<Full>();
    products_of_floats_are_sums::<Odd>();
}

/// Any bits: subnormal numbers, infinities, NaN.
#[test]
fn tiles_are_what_their_emulation_says() {
    let mut random = SplitMix64(31);
    for round in 0..200 {
        // Half of the rounds have exponents near the middle, where sums round; the others any bits.
        let mut half = || match round % 2 {
            0 => (random.next() as u16 & 0x80ff) | 0x3f00 | (random.next() as u16 & 0x0380),
            _ => random.next() as u16,
        };
        let mut halves = || -> Vec<u8> { (0..8 * STRIDE).flat_map(|_| half().to_le_bytes()).collect() };
        let (a, b) = (halves(), halves());
        let c: Vec<u32> = (0..16 * STRIDE)
            .map(|_| {
                if round % 4 == 3 {
                    random.next() as u32
                } else {
                    (random.below(2_000) as f32 - 1e3).to_bits()
                }
            })
            .collect();
        let once = || Once::<Full> { product: Product::Bf16, a: &a, b: &b, c: &c, shapes: PhantomData };
        let expected = TileIsa::Emulated(Portable).run(once());
        for isa in tile_isas() {
            for (found, expected) in isa.run(once()).iter().zip(&expected) {
                let [x, y] = [*found, *expected].map(f32::from_bits);
                assert!(
                    found == expected || x.is_nan() && y.is_nan(),
                    "{isa:?} round {round}: {x:e}, not {y:e}"
                );
            }
        }
    }
}

#[test]
fn short_slices_are_refused() {
    for isa in tile_isas() {
        let enough = vec![0u8; 15 * STRIDE + 64];
        let c = vec![0u32; 16 * STRIDE];
        let run = |a: &[u8], b: &[u8], c: &[u32]| {
            let once = Once::<Full> { product: Product::I8, a, b, c, shapes: PhantomData };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| isa.run(once))).is_ok()
        };
        assert!(run(&enough, &enough, &c));
        assert!(!run(&enough[1..], &enough, &c), "{isa:?}");
        assert!(!run(&enough, &enough[1..], &c), "{isa:?}");
        assert!(!run(&enough, &enough, &c[..15 * STRIDE + 15]), "{isa:?}");
        assert!(run(&enough, &enough, &c), "{isa:?}: usable after a panic");
    }
}

/// A kernel inside a kernel would lose its tiles.
#[test]
fn tiles_are_not_configured_twice() {
    struct Nested(TileIsa);
    impl TileKernel for Nested {
        type Shapes = Full;
        type Out = bool;
        #[inline(always)]
        fn run<S: Simd, T: Tiles<Full>>(self, _: S, _: &mut T) -> bool {
            let c = vec![0u32; 16 * STRIDE];
            let a = vec![0u8; 16 * STRIDE];
            let once = Once::<Full> { product: Product::I8, a: &a, b: &a, c: &c, shapes: PhantomData };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.0.run(once))).is_ok()
        }
    }
    for isa in tile_isas() {
        assert!(!isa.run(Nested(isa)), "{isa:?}");
    }
}
