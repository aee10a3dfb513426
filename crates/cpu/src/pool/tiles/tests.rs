//! Products of tiles against sums in f64, and their errors against those of sums in f32.
use super::*;
use crate::arch::Isa;
use crate::element::{BF16, F16, F32};
use kvist_testing::SplitMix64;

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const HEAD_DIMS: [usize; 9] = [8, 24, 32, 40, 64, 80, 96, 128, 256];

fn tiles() -> Vec<(Isa, TileIsa)> {
    Isa::tested().into_iter().filter_map(|isa| Some((isa, isa.tiles()?))).collect()
}

/// All tiles, in both precisions.
fn each() -> impl Iterator<Item = ((Isa, TileIsa), Precision)> {
    let both = |tiles| [Precision::Exact, Precision::Rounded].map(|precision| (tiles, precision));
    tiles().into_iter().flat_map(both)
}

fn float(random: &mut SplitMix64) -> f32 {
    (random.unit() * 2.0 - 1.0) as f32
}

/// Random elements as `dtype` stores them: their bytes, and what they are.
fn stored(dtype: DType, n: usize, random: &mut SplitMix64) -> (Vec<u8>, Vec<f32>) {
    fn of<E: Element>(n: usize, random: &mut SplitMix64) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0; n * E::BYTES];
        for code in bytes.chunks_exact_mut(E::BYTES) {
            assert!(E::encode(float(random) * 2f32.powi(random.below(8) as i32 - 4), code));
        }
        let values = bytes.chunks_exact(E::BYTES).map(E::decode).collect();
        (bytes, values)
    }
    match dtype {
        DType::F32 => of::<F32>(n, random),
        DType::F16 => of::<F16>(n, random),
        _ => of::<BF16>(n, random),
    }
}

/// The errors of sums of products, of tiles and in f32 one after the other, over the sum of the magnitudes.
#[derive(Default)]
struct Errors {
    tiles: f64,
    floats: f64,
    worst: f64,
    n: f64,
}

/// How far a sum may be off: each of two rounded factors by 2⁻⁸.
fn within(precision: Precision) -> f64 {
    match precision {
        Precision::Exact => 3e-7,
        Precision::Rounded => 1.0 / 127.0,
    }
}

impl Errors {
    fn add(&mut self, precision: Precision, found: f32, first: f32, pairs: impl Iterator<Item = (f32, f32)>) {
        let (mut exact, mut float, mut size) = (f64::from(first), first, f64::from(first.abs()));
        for (a, b) in pairs {
            exact += f64::from(a) * f64::from(b);
            size += (f64::from(a) * f64::from(b)).abs();
            float = a.mul_add(b, float);
        }
        if size == 0.0 {
            return assert_eq!(found, 0.0);
        }
        let error = |x: f32| (f64::from(x) - exact) / size;
        assert!(error(found).abs() < within(precision), "{precision:?}: {found} instead of {exact}");
        if precision == Precision::Rounded {
            return;
        }
        self.tiles += error(found).powi(2);
        self.floats += error(float).powi(2);
        self.worst = self.worst.max(error(found).abs());
        self.n += 1.0;
    }

    /// Tiles must be as exact as f32.
    fn check(&self, what: &str) {
        let mean = |squares: f64| (squares / self.n).sqrt();
        let (tiles, floats) = (mean(self.tiles), mean(self.floats));
        println!("{what}: {tiles:.1e}, at most {:.1e}; sums in f32 {floats:.1e}", self.worst);
        assert!(tiles < 1.25 * floats + 3e-8, "{what}: {tiles:e} is worse than {floats:e}");
    }
}

/// Queries against blocks of keys, in the middle of longer lines, which stay as they are elsewhere.
#[test]
fn scores_are_products() {
    for dtype in FLOATS {
        let mut errors = Errors::default();
        let mut random = SplitMix64(3);
        for (round, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            for n in [1, 7, 8, 9, 16, 17, 37] {
                let (n_blocks, first, rows) = (1 + (round + n) % 6, n % 3, n + 3);
                let (bytes, keys) = stored(dtype, n_blocks * head_dim * LANES, &mut random);
                let block = |codes| Block { codes, params: &[], ahead: 64 };
                let list: Vec<Block<'_>> = bytes.chunks_exact(bytes.len() / n_blocks).map(block).collect();
                let blocks = Blocks {
                    head_dim,
                    group: 0,
                    row: head_dim * bytes.len() / keys.len(),
                    list: &list,
                    lanes: 0..n_blocks * LANES,
                    may_have_nan: false,
                    exact: false,
                };
                let queries: Vec<f32> = (0..rows * head_dim).map(|_| float(&mut random)).collect();
                let (stride, at) = (n_blocks * LANES + 9, 5);
                let mut bits: [Vec<Vec<u32>>; 2] = Default::default();
                for ((isa, tiles), precision) in each() {
                    let mut split = vec![u32::MAX; split_len(head_dim, rows)];
                    for (at, row) in queries.chunks_exact(head_dim).enumerate() {
                        isa.run(SplitRow { precision, row, at, rows, split: &mut split });
                    }
                    let mut packed = vec![u32::MAX; packed_len(head_dim, dtype)];
                    let mut run = |first: usize, n: usize, data: &mut [f32]| {
                        let queries = SplitQueries { precision, split: &split, rows, first, n };
                        scores(tiles, dtype, queries, &blocks, Lines { data, stride, at }, &mut packed);
                    };
                    let mut lines = vec![f32::NAN; n * stride];
                    run(first, n, &mut lines);
                    for (q, line) in lines.chunks_exact(stride).enumerate() {
                        let query = &queries[(first + q) * head_dim..][..head_dim];
                        for (cell, score) in line[at..at + n_blocks * LANES].iter().enumerate() {
                            let key =
                                |i: usize| keys[cell / LANES * head_dim * LANES + i * LANES + cell % LANES];
                            errors.add(precision, *score, 0.0, (0..head_dim).map(|i| (query[i], key(i))));
                        }
                        let outside = line[..at].iter().chain(&line[at + n_blocks * LANES..]);
                        assert!(outside.into_iter().all(|x| x.is_nan()));
                        // Alone, a query has the same scores.
                        let mut alone = vec![f32::NAN; stride];
                        run(first + q, 1, &mut alone);
                        assert!(alone.iter().zip(line).all(|(a, b)| a.to_bits() == b.to_bits()));
                    }
                    bits[precision as usize].push(lines.iter().map(|x| x.to_bits()).collect());
                }
                for bits in bits {
                    assert!(bits.windows(2).all(|two| two[0] == two[1]), "emulated tiles differ");
                }
            }
        }
        errors.check(&format!("scores of {dtype:?}"));
    }
}

/// Weighted sums over places with gaps, from blocks in any order. What is not in a place may be anything, weights
/// outside the valid vectors too.
#[test]
fn sums_are_products() {
    for dtype in FLOATS {
        let mut errors = Errors::default();
        let mut random = SplitMix64(4);
        for (round, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            for n in [1, 7, 8, 9, 16, 17, 37] {
                let n_places = STEP * (1 + (round + n) % MAX_STEPS);
                let n_blocks = n_places / 8;
                let (bytes, values) = stored(dtype, n_blocks * LANES * head_dim, &mut random);
                let row = head_dim * bytes.len() / values.len();
                let mut places = Places::new();
                places.clear(n_places);
                let mut seen: Vec<Option<usize>> = vec![None; n_places]; // place to row of `values`
                let valid = 1..n_places / LANES - usize::from(n % 2 == 0 && n_places > 2 * LANES);
                let mut place = LANES + random.index(3);
                while place < valid.end * LANES {
                    let (block, lane) = (random.index(n_blocks), random.index(LANES));
                    let len = (1 + random.index(LANES)).min(LANES - lane).min(valid.end * LANES - place);
                    let codes = &bytes[block * LANES * row..(block + 1) * LANES * row];
                    assert!(places.add(codes, lane..lane + len, place));
                    assert!(!places.add(codes, lane..lane + 1, place), "a place is taken once");
                    (0..len).for_each(|i| seen[place + i] = Some(block * LANES + lane + i));
                    place += len + random.index(3);
                }
                let (stride, at, state) = (n_places + 7, 3, head_dim + 5);
                let lines: Vec<f32> = (0..n * stride)
                    .map(|i| {
                        let place = (i % stride).wrapping_sub(at);
                        match place / LANES {
                            v if !valid.contains(&v) => f32::NAN,
                            _ => random.unit() as f32 * 1.4,
                        }
                    })
                    .collect();
                let before: Vec<f32> = (0..n * state).map(|_| float(&mut random)).collect();
                let mut bits: [Vec<Vec<u32>>; 2] = Default::default();
                for ((_, tiles), precision) in each() {
                    let mut packed = vec![u32::MAX; packed_len(head_dim, dtype)];
                    let mut split = vec![u32::MAX; WEIGHTS_LEN];
                    let mut run = |query: usize, n: usize, data: &mut [f32]| {
                        let data_at = query * stride;
                        let weights =
                            Weights { precision, data: &lines[data_at..], stride, at, valid: valid.clone() };
                        let sums = Sums { n, data, first: 0, stride: state };
                        let room = Room { packed: &mut packed, split: &mut split };
                        let shape = ValueShape { head_dim, row };
                        accumulate(tiles, dtype, &places, shape, weights, sums, room);
                    };
                    let mut sums = before.clone();
                    run(0, n, &mut sums);
                    for (q, (sums, before)) in
                        sums.chunks_exact(state).zip(before.chunks_exact(state)).enumerate()
                    {
                        for i in 0..head_dim {
                            let pairs = seen.iter().enumerate().filter_map(|(place, seen)| {
                                Some((lines[q * stride + at + place], values[(*seen)? * head_dim + i]))
                            });
                            errors.add(precision, sums[i], before[i], pairs);
                        }
                        assert_eq!(sums[head_dim..], before[head_dim..]);
                        let mut alone = before.to_vec();
                        run(q, 1, &mut alone);
                        assert!(alone.iter().zip(sums).all(|(a, b)| a.to_bits() == b.to_bits()));
                    }
                    bits[precision as usize].push(sums.iter().map(|x| x.to_bits()).collect());
                }
                for bits in bits {
                    assert!(bits.windows(2).all(|two| two[0] == two[1]), "emulated tiles differ");
                }
            }
        }
        errors.check(&format!("sums of {dtype:?}"));
    }
}

/// Three parts are all of a number, and what cannot be cut stays visible.
#[test]
fn parts_add_up() {
    let mut random = SplitMix64(5);
    for isa in Isa::tested() {
        let mut row: Vec<f32> =
            (0..300).map(|_| float(&mut random) * 2f32.powi(random.below(200) as i32 - 100)).collect();
        row.extend([0.0, -0.0, f32::MAX, f32::MIN, f32::NAN, f32::INFINITY]);
        let (rows, at) = (4, 2);
        let mut split = vec![0; split_len(row.len(), rows)];
        isa.run(SplitRow { precision: Precision::Exact, row: &row, at, rows, split: &mut split });
        for (i, x) in row.iter().enumerate() {
            let part = |part: usize| {
                let pair = whole_lines(&split)
                    [(i / STEP * LEFT_PARTS + part) * plane(rows) + at * LANES + i % LANES];
                f32::from_bits(if i % STEP < LANES { pair << 16 } else { pair & 0xffff_0000 })
            };
            let sum = part(0) + part(1) + part(2);
            assert!(sum == *x || !x.is_finite() && !sum.is_finite(), "{isa}: {sum} instead of {x}");
        }
    }
}
