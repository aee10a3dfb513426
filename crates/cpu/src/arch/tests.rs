//! Every operation of every instruction set against the portable implementation, which defines the result; and threads
//! that start, stop, panic and overlap.
use super::*;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// [`Simd::dot_codes`] of the first `Q` quads and of `N` tokens. The inputs of a token are those of the one before, one quad on.
#[inline(always)]
fn dots<S: Simd, const Q: usize, const N: usize>(
    s: S,
    bits: u32,
    quads: &[S::I],
    ys: &[[u8; 4]],
    start: i32,
) -> [S::I; N] {
    let y = |q: usize, token: usize| i32::from_le_bytes(ys[(q + token) % Q]);
    s.dot_codes(bits, quads.first_chunk::<Q>().unwrap(), y, [s.splat_i(start); N])
}

/// All operations of a kernel on one input. Returns lanes as bits.
struct Everything<'e> {
    x: &'e [f32; 16],
    y: &'e [f32; 16],
    bytes: &'e [u8; 64],
    more: &'e [u8; 64],
}

impl Kernel for Everything<'_> {
    type Out = Vec<(&'static str, [f32; 16])>;
    const USES: Uses = Uses::Pairs;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Out {
        let mut all = Vec::new();
        let (x, y) = (s.load(self.x), s.load(self.y));
        let mut put = |name, v: S::F| {
            let mut lanes = [f32::NAN; 16];
            s.store(v, &mut lanes);
            all.push((name, lanes));
        };
        let half: &[u8; 32] = self.bytes.first_chunk().unwrap();
        put("load", x);
        put("f32 bytes", s.load_f32_bytes(self.bytes));
        put("f16", s.load_f16(half));
        put("bf16", s.load_bf16(half));
        put("add", s.add(x, y));
        put("sub", s.sub(x, y));
        put("mul", s.mul(x, y));
        put("div", s.div(x, y));
        put("fma", s.fma(x, y, s.splat(0.5)));
        put("max", s.max(x, y));
        put("round", s.round(x));
        put("mul_nonzero", s.mul_nonzero(s.max(s.splat(0.0), x), s.splat(f32::NAN)));
        let powers = s.round(s.mul(y, s.splat(12.0)));
        put("scale_by_power", s.scale_by_power(y, powers));
        let (mantissa, exponent) = s.exp2_parts(y);
        put("exp2 mantissa", mantissa);
        put("exp2 exponent", exponent);
        put("exp2 for bf16", s.exp2_for_bf16(s.sub(s.splat(0.0), s.max(x, s.sub(s.splat(0.0), x)))));
        put("as floats", s.as_floats(s.load_i(&self.x.map(f32::to_bits))));
        put("sum", s.splat(s.sum(s.round(y))));
        put("largest", s.splat(s.largest(y)));
        let (a, b) = (s.load_bytes(self.bytes), s.load_bytes(self.more));
        // Integers of up to 24 bits survive a conversion to f32.
        let low = |x: S::I| s.to_f32(s.byte::<0>(x));
        put("dot4", s.to_f32(s.dot4(s.splat_i(-77), a, b)));
        for (name, units) in
            [("small units", [1, -2, 3, -4]), ("large units", [32_639, -32_000, 32_000, -32_639])]
        {
            let of = |units| quad_of_units(S::WORD_DOTS, units);
            let mut sums = [[[s.splat_i(0); 2]]];
            s.dot_units(&mut sums, &[a], |_, part| of(units)[part]);
            s.dot_units(&mut sums, &[s.low_nibbles(a)], |_, part| of([units[3], 0, 77, units[0]])[part]);
            put(name, s.to_f32(s.sum_of_units(sums[0][0])));
        }
        let ys = self.more.map(|x| if x == 128 { 129 } else { x }).as_chunks::<4>().0[..8].to_vec();
        let sum: i32 = ys.as_flattened().iter().map(|x| i32::from(x.cast_signed())).sum();
        for (name, bits) in [
            ("codes of 1", 1),
            ("codes of 2", 2),
            ("codes of 3", 3),
            ("codes of 4", 4),
            ("codes of 5", 5),
            ("codes of 6", 6),
            ("codes of 7", 7),
            ("codes of 8", 8),
        ] {
            let quad = |q: i32| s.field(s.xor(a, s.splat_i(q.wrapping_mul(0x3b7f_1d05))), 0, bits, 0);
            let quads: [S::I; 8] = [0, 1, 2, 3, 4, 5, 6, 7].map(quad);
            let start = -(sum << (bits - 1));
            let start = |n: usize| match bits {
                8 => ys[..n].as_flattened().iter().map(|x| -128 * i32::from(x.cast_signed())).sum(),
                _ => start,
            };
            let eight = dots::<S, 8, 4>(s, bits, &quads, &ys, start(8));
            let two_of_eight = dots::<S, 8, 2>(s, bits, &quads, &ys, start(8));
            let one_of_eight = dots::<S, 8, 1>(s, bits, &quads, &ys, start(8));
            let four = dots::<S, 4, 4>(s, bits, &quads, &ys, start(4));
            let one = dots::<S, 1, 2>(s, bits, &quads, &ys, start(1));
            for sum in eight.into_iter().chain(two_of_eight).chain(one_of_eight).chain(four).chain(one) {
                put(name, s.to_f32(sum));
            }
            // The largest codes and the smallest, with the largest inputs and the smallest.
            for code in [(1 << bits) - 1, 0] {
                let quads = [s.splat_i(i32::from_le_bytes([code as u8; 4])); 8];
                for x in [127i8, -127] {
                    let start = -((32 * i32::from(x)) << (bits - 1));
                    let [sum] = dots::<S, 8, 1>(s, bits, &quads, &[[x.cast_unsigned(); 4]; 8], start);
                    put(name, s.to_f32(sum));
                }
            }
        }
        // Eight products, as many as may be added up: of random codes, and of the largest with the largest and the smallest.
        let fifteens = s.splat_i(0x0f0f_0f0f);
        for (name, codes, x) in [
            ("nibbles", s.low_nibbles(a), None),
            ("largest nibbles", fifteens, Some([127u8; 4])),
            ("smallest nibbles", fifteens, Some([129; 4])),
        ] {
            let mut products = s.splat_i(0);
            for y in &ys {
                products = s.dot_nibbles(products, codes, i32::from_le_bytes(x.unwrap_or(*y)));
            }
            put(name, s.to_f32(s.add_nibbles(s.splat_i(-5), products)));
        }
        for (name, words) in [("words", b), ("smallest words", s.splat_i(-0x7fff_8000)), ("equal words", a)] {
            // Sums may have all 32 bits.
            let mut sums = [0; LANES];
            s.store_i(s.dot_words(s.splat_i(-77), a, words), &mut sums);
            put(name, s.load(&sums.map(|sum| (sum >> 16) as f32)));
            put(name, s.load(&sums.map(|sum| (sum & 0xffff) as f32)));
        }
        let mut pairs = [0; LANES];
        s.store_i(s.word_pairs(a, s.sub_i(s.splat_i(0), b)), &mut pairs);
        put("low words", s.load(&pairs.map(|pair| (pair & 0xffff) as f32)));
        put("high words", s.load(&pairs.map(|pair| (pair >> 16) as f32)));
        put("byte 1", s.to_f32(s.byte::<1>(a)));
        put("byte 2", s.to_f32(s.byte::<2>(a)));
        put("byte 3", s.to_f32(s.byte::<3>(a)));
        let table: &[u8; 16] = self.bytes.first_chunk().unwrap();
        let sixes = s.sixes([a, b, s.times_256(b)]);
        for (name, x) in [
            ("low nibbles", s.low_nibbles(a)),
            ("high nibbles", s.high_nibbles(a)),
            ("sixes 0", sixes[0]),
            ("sixes 1", sixes[1]),
            ("sixes 2", sixes[2]),
            ("sixes 3", sixes[3]),
            ("field down", s.field(a, 3, 2, 1)),
            ("field up", s.field(a, 2, 1, 4)),
            ("whole field", s.field(a, 0, 8, 0)),
            ("lookup", s.lookup(table, s.low_nibbles(b))),
            ("or", s.or(a, b)),
            ("xor", s.xor(a, b)),
        ] {
            for (n, x) in [x, s.over_256(x)].into_iter().enumerate() {
                put(name, low(x));
                put(name, s.to_f32(s.over_256(s.over_256(s.sub_i(x, s.splat_i(n as i32))))));
            }
        }
        put("add_i", s.to_f32(s.add_i(s.byte::<0>(a), s.byte::<1>(b))));
        put("mul_i", s.to_f32(s.mul_i(s.byte::<0>(a), s.byte::<1>(b))));
        put("shift_left", s.to_f32(s.shift_left(s.byte::<3>(a), 7)));
        put("times_256", s.to_f32(s.times_256(s.byte::<3>(a))));
        put("to_i32", s.to_f32(s.to_i32(s.mul(y, s.splat(100.0)))));
        let mut bytes = [0; 16];
        s.store_low_bytes(a, &mut bytes);
        put("low bytes", s.to_f32(s.load_i8(&bytes)));
        let (even, odd) = s.widen_pairs(a);
        put("even", even);
        put("odd", odd);
        put("cut", s.cut(x));
        let mut pairs = [0; 16];
        s.store_i(s.cut_pairs(x, y), &mut pairs);
        for (name, at) in [("even of cut pairs", 0), ("odd of cut pairs", 16)] {
            put(name, s.load(&pairs.map(|pair| (pair >> at & 0xffff) as f32)));
        }
        s.store_i(s.round_pairs(x, y), &mut pairs);
        for (name, at) in [("even of rounded pairs", 0), ("odd of rounded pairs", 16)] {
            put(name, s.load(&pairs.map(|pair| (pair >> at & 0xffff) as f32)));
        }
        all
    }
}

#[test]
fn every_instruction_set_agrees_with_the_portable_one() {
    let mut random = kvist_testing::SplitMix64(5);
    let mut next = || random.next() as u32;
    for round in 0..400 {
        let strange = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            1e-40,
            65_504.0,
            -3e38,
            0.5,
            1.5,
            2.5,
            4_194_304.5,
            -5e6,
            -0.3,
        ];
        let mut float = |i: usize| match round % 4 {
            0 => strange[(next() as usize + i) % strange.len()],
            _ => (next() % 40_001) as f32 / 100.0 - 200.0,
        };
        let x: [f32; 16] = std::array::from_fn(&mut float);
        let y: [f32; 16] = std::array::from_fn(|_| (next() % 20_001) as f32 / 1_000.0 - 10.0);
        let [bytes, more]: [[u8; 64]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| next() as u8));
        let all = |isa: Isa| isa.run(Everything { x: &x, y: &y, bytes: &bytes, more: &more });
        let expected = all(Isa::Portable(Portable));
        for isa in Isa::available() {
            for ((name, found), (_, expected)) in all(isa).iter().zip(&expected) {
                for (found, expected) in found.iter().zip(expected) {
                    let same = found == expected || found.is_nan() && expected.is_nan();
                    // One rounding or two; a sum in another order.
                    let near = (found - expected).abs() <= 2e-7 * (expected.abs() + 1.0) * 200.0;
                    let rounded = matches!(*name, "fma" | "exp2 mantissa" | "exp2 exponent") && near;
                    // Two polynomials; below −126 one may be 0 already.
                    let difference = (found - expected).abs();
                    let coarse = *name == "exp2 for bf16" && difference <= 1.6e-4 * expected.abs() + 3e-38;
                    assert!(
                        same || rounded || coarse,
                        "{isa} {name}: {found} instead of {expected} for {x:?} {y:?}"
                    );
                }
            }
        }
    }
}

/// From −126 to 1/2 the error is below 8e-5 (a maximum is rounded, so a score may be half above it); what a row does not see has no
/// weight.
#[test]
fn powers_for_bf16_are_powers() {
    struct Powers<'x>(&'x [f32; 16]);
    impl Kernel for Powers<'_> {
        type Out = [f32; 16];
        const USES: Uses = Uses::Floats;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; 16] {
            let mut out = [f32::NAN; 16];
            s.store(s.exp2_for_bf16(s.load(self.0)), &mut out);
            out
        }
    }
    for isa in Isa::available() {
        for step in 0..20_000 {
            let x: [f32; 16] =
                std::array::from_fn(|lane| 0.5 - ((step * 16 + lane) as f32) * 126.5 / 320_000.0);
            for (x, found) in x.into_iter().zip(isa.run(Powers(&x))) {
                let exact = f64::from(x).exp2();
                assert!((f64::from(found) - exact).abs() < 8e-5 * exact, "{isa}: 2^{x} = {found}");
            }
        }
        let mut beyond = [f32::NEG_INFINITY; 16];
        beyond[..4].copy_from_slice(&[-127.0, -1e4, -1e30, f32::MIN]);
        assert_eq!(isa.run(Powers(&beyond)), [0.0; 16], "{isa}");
        assert!(isa.run(Powers(&[f32::NAN; 16])).iter().all(|x| x.is_nan()), "{isa}");
    }
}

#[test]
fn units_are_stored_as_quads() {
    struct Store([i32; 16]);
    impl Kernel for Store {
        type Out = ([[u8; 16]; 2], bool);
        const USES: Uses = Uses::Bytes;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Out {
            let [mut first, mut second] = [[1; 16]; 2];
            s.store_units(s.load_i(&self.0.map(i32::cast_unsigned)), [&mut first, &mut second]);
            ([first, second], S::WORD_DOTS)
        }
    }
    let units = std::array::from_fn(|i| [32_638, -32_639, 127, 128, -128, -129, 0, -1][i % 8] + i as i32 / 8);
    for isa in Isa::tested() {
        let (stored, words) = isa.run(Store(units));
        for (q, quad) in units.as_chunks::<4>().0.iter().enumerate() {
            let found = stored.map(|bytes| i32::from_le_bytes(bytes.as_chunks().0[q]));
            assert_eq!(found, quad_of_units(words, *quad), "{isa}: quad {q}");
        }
    }
}

#[test]
fn pairs_of_bf16_are_multiplied() {
    struct Dot([u8; 64], [u8; 64]);
    impl Kernel for Dot {
        type Out = [f32; 16];
        const USES: Uses = Uses::Pairs;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; 16] {
            let mut out = [0.0; 16];
            s.store(s.dot2(s.splat(0.25), s.load_bytes(&self.0), s.load_bytes(&self.1)), &mut out);
            out
        }
    }
    let pairs = |f: fn(usize) -> f32| -> [u8; 64] {
        let bytes = (0..32).flat_map(|i| half::bf16::from_f32(f(i)).to_le_bytes());
        bytes.collect::<Vec<u8>>().try_into().unwrap()
    };
    let (a, b) = (pairs(|i| i as f32), pairs(|i| 3.0 - i as f32));
    for isa in Isa::available() {
        let expected: Vec<f32> = (0..16)
            .map(|i| (2 * i..2 * i + 2).map(|j| j as f32 * (3.0 - j as f32)).sum::<f32>() + 0.25)
            .collect();
        assert_eq!(isa.run(Dot(a, b)).as_slice(), expected, "{isa}");
    }
}

#[test]
fn an_unknown_instruction_set_is_refused_by_name() {
    let error = "sse9".parse::<Isa>().unwrap_err();
    assert!(error.contains("sse9") && error.contains("portable"), "{error}");
    for isa in Isa::available() {
        assert_eq!(isa.name().parse::<Isa>(), Ok(isa));
    }
}

#[test]
fn every_part_is_taken_once_by_one_thread() {
    for n in [1, 2, 3, 8] {
        let threads = Threads::new(n);
        let mut scratch = vec![0usize; n];
        for round in 0..2_000 {
            let (width, part) = (round % 70 + 1, round % 9 + 1);
            let mut data = vec![0u32; 3 * width];
            threads.columns(&mut data, width, part, &mut scratch, |i, mut columns, mine| {
                *mine += 1;
                for row in 0..3 {
                    for x in columns.row(row) {
                        *x += 1 + i as u32;
                    }
                }
            });
            for row in data.chunks_exact(width) {
                assert!(
                    row.iter().enumerate().all(|(at, x)| *x == 1 + (at / part) as u32),
                    "{n} threads, round {round}"
                );
            }
            if round % 500 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2)); // workers sleep, and wake again
            }
        }
        let parts: usize = (0..2_000).map(|round: usize| (round % 70 + 1).div_ceil(round % 9 + 1)).sum();
        assert_eq!(scratch.iter().sum::<usize>(), parts);
    }
}

#[test]
fn a_panic_is_passed_on_and_the_threads_live() {
    let threads = Threads::new(3);
    let mut scratch = [(); 3];
    for round in 0..50 {
        let mut data = [0u8; 64];
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            threads.parts(&mut data, 1, &mut scratch, |i, _, ()| assert!(i != round, "part {i}"));
        }));
        assert!(done.is_err(), "round {round}");
    }
    // Parallelism is real: two parts that wait for each other need two threads.
    let (mut data, met) = ([0u8; 2], std::sync::Barrier::new(2));
    threads.parts(&mut data, 1, &mut scratch, |_, _, ()| {
        met.wait();
    });
    let mut data = [1u8; 100];
    threads.parts(&mut data, 3, &mut scratch, |_, part, ()| part.fill(2));
    assert_eq!(data, [2; 100]);
}

#[test]
fn whoever_finds_the_threads_taken_works_alone() {
    let threads = Threads::new(2);
    let count = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let (mut data, mut scratch) = ([0u8; 40], [(); 2]);
                    threads.parts(&mut data, 1, &mut scratch, |_, part, ()| {
                        part[0] += 1;
                        count.fetch_add(1, Relaxed);
                    });
                    assert_eq!(data, [1; 40]);
                }
            });
        }
    });
    assert_eq!(count.load(Relaxed), 4 * 500 * 40);
}
