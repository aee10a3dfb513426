//! Products of pairs against sums in f64, and the errors of exact ones against those of sums in f32.
use super::*;
use crate::pool::stored::{Stored, float};
use crate::pool::{Block, MAX_BLOCKS};
use kvist_device::Side;
use kvist_testing::SplitMix64;

const DTYPES: [&str; 9] = ["f32", "f16", "bf16", "q8", "q8-64", "q4", "q4-64", "t4", "t4-o"];
const HEAD_DIMS: [usize; 9] = [8, 24, 32, 40, 64, 80, 96, 128, 256];

/// Everything that multiplies rows of `dtype`, with the instruction set that prepares them.
fn each(dtype: DType) -> Vec<(Isa, Products)> {
    let mut all = Vec::new();
    for isa in Isa::tested() {
        for precision in [Precision::Exact, Precision::Rounded] {
            all.extend(isa.tiles().map(|tiles| (isa, Products::Tiles(tiles, precision))));
        }
        all.push((isa, Products::Vectors(isa)));
        all.push((isa, Products::Words(isa)));
    }
    all.retain(|(_, products)| products.multiply(dtype));
    all
}

/// Rows per call.
const ROWS: [usize; 7] = [1, 7, 8, 9, 16, 17, 37];

/// Whether tiles in plain loops, which are slow, leave out round `round` with `ROWS[i]` rows: they have each of both in some rounds.
fn is_left_out(products: Products, round: usize, i: usize) -> bool {
    matches!(products, Products::Tiles(TileIsa::Emulated(_), _)) && !(round + i).is_multiple_of(3)
}

fn shape(stored: &Stored) -> Shape {
    let Geometry { head_dim, row, group, .. } = stored.geometry;
    Shape { head_dim, row, group }
}

/// The errors of sums of products, of pairs and in f32 one after the other, over the sum of the magnitudes. Those of words over what they
/// may be at most.
#[derive(Default)]
struct Errors {
    pairs: f64,
    floats: f64,
    worst: f64,
    n: f64,
    words: f64,
    n_words: f64,
}

/// How far a sum may be off, of exact products or of two factors that are rounded by 2⁻⁸ each, as a share of the sum of the magnitudes.
fn within(precision: Precision) -> f64 {
    match precision {
        Precision::Exact => 3e-7,
        Precision::Rounded => 1.0 / 127.0,
        Precision::Words => unreachable!("their units decide"),
    }
}

/// The sum of products, and that of their magnitudes.
fn sums(first: f32, pairs: impl Iterator<Item = (f32, f32)>) -> (f64, f64) {
    pairs.fold((f64::from(first), f64::from(first.abs())), |(sum, size), (a, b)| {
        let product = f64::from(a) * f64::from(b);
        (sum + product, size + product.abs())
    })
}

impl Errors {
    fn add(
        &mut self,
        precision: Precision,
        found: f32,
        first: f32,
        pairs: impl Iterator<Item = (f32, f32)> + Clone,
    ) {
        let (exact, size) = sums(first, pairs.clone());
        if size == 0.0 {
            return assert_eq!(found, 0.0);
        }
        let error = |x: f32| (f64::from(x) - exact) / size;
        assert!(error(found).abs() < within(precision), "{precision:?}: {found} instead of {exact}");
        if precision == Precision::Rounded {
            return;
        }
        let float = pairs.fold(first, |sum, (a, b)| a.mul_add(b, sum));
        self.pairs += error(found).powi(2);
        self.floats += error(float).powi(2);
        self.worst = self.worst.max(error(found).abs());
        self.n += 1.0;
    }

    /// `at_most`: if all factors are off by half a unit, in the same direction.
    fn add_words(&mut self, found: f32, first: f32, pairs: impl Iterator<Item = (f32, f32)>, at_most: f64) {
        let (exact, size) = sums(first, pairs);
        let error = (f64::from(found) - exact).abs();
        assert!(error <= at_most + 3e-7 * size, "{found} instead of {exact}: more than {at_most:e}");
        if at_most > 0.0 {
            self.words += (error / at_most).powi(2);
            self.n_words += 1.0;
        }
    }

    /// Exact products must be as exact as f32. The errors of words must be those of many small ones: with bf16 they would be eight times
    /// as large.
    fn check(&self, what: &str) {
        let words = (self.words / self.n_words).sqrt();
        println!("{what} of words: {words:.2} of what they may be");
        assert!(words < 0.25, "{what}: {words} of what they may be");
        if self.n == 0.0 {
            return;
        }
        let mean = |squares: f64| (squares / self.n).sqrt();
        let (pairs, floats) = (mean(self.pairs), mean(self.floats));
        println!("{what}: {pairs:.1e}, at most {:.1e}; sums in f32 {floats:.1e}", self.worst);
        assert!(pairs < 1.25 * floats + 3e-8, "{what}: {pairs:e} is worse than {floats:e}");
    }
}

/// The length of a row, the sum of its magnitudes, and the largest.
fn sizes(row: &[f32]) -> [f64; 3] {
    let magnitudes = || row.iter().map(|x| f64::from(x.abs()));
    [magnitudes().map(|x| x * x).sum::<f64>().sqrt(), magnitudes().sum(), magnitudes().fold(0.0, f64::max)]
}

/// How much larger than that of the row itself the unit of a packed row may be, which its parameters bound.
fn looseness(dtype: DType) -> f64 {
    if dtype.is_quantised() { 4.0 } else { 1.0 }
}

/// Queries against blocks of keys, in the middle of longer lines, which stay as they are elsewhere.
#[test]
fn scores_are_products() {
    for storage in DTYPES {
        let mut errors = Errors::default();
        let mut random = SplitMix64(3);
        for (round, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            for (i, n) in ROWS.into_iter().enumerate() {
                let (n_blocks, first, rows) = (1 + (2 * round + n) % MAX_BLOCKS, n % 3, n + 3);
                let keys = Stored::new(Side::K, storage, head_dim, n_blocks, &mut random);
                let dtype = keys.geometry.storage.dtype;
                let list: Vec<Block<'_>> = (0..n_blocks).map(|i| keys.block(i)).collect();
                let Shape { row, group, .. } = shape(&keys);
                let blocks = Blocks {
                    head_dim,
                    group,
                    row,
                    list: &list,
                    lanes: 0..n_blocks * LANES,
                    may_have_nan: false,
                    exact: false,
                };
                let queries: Vec<f32> = (0..rows * head_dim).map(|_| float(&mut random)).collect();
                let (stride, at) = (n_blocks * LANES + 9, 5);
                let mut bits: [Vec<Vec<u32>>; 2] = Default::default();
                for (isa, products) in each(dtype) {
                    if is_left_out(products, round, i) {
                        continue;
                    }
                    let precision = products.precision();
                    let mut split = vec![u32::MAX; split_len(head_dim, rows, precision)];
                    for (at, row) in queries.chunks_exact(head_dim).enumerate() {
                        isa.run(SplitRow { precision, row, at, rows, split: &mut split });
                    }
                    let mut packed = vec![u32::MAX; packed_len(head_dim, dtype, precision)];
                    let mut run = |first: usize, n: usize, data: &mut [f32]| {
                        let queries = SplitQueries { split: &split, rows, first, n };
                        let asked = Asked { queries, packed: &mut packed };
                        scores(products, dtype, asked, &blocks, Lines { data, stride, at });
                    };
                    let mut lines = vec![f32::NAN; n * stride];
                    run(first, n, &mut lines);
                    for (q, line) in lines.chunks_exact(stride).enumerate() {
                        let query = &queries[(first + q) * head_dim..][..head_dim];
                        for (score, key) in line[at..].iter().zip(&keys.rows) {
                            let pairs = query.iter().copied().zip(key.iter().copied());
                            if precision != Precision::Words {
                                errors.add(precision, *score, 0.0, pairs);
                                continue;
                            }
                            let ([query, query_sum, _], [key, key_sum, _]) = (sizes(query), sizes(key));
                            let key = key * looseness(dtype);
                            let n = head_dim as f64;
                            let units = query * key_sum + key * query_sum + n * query * key / 64_000.0;
                            errors.add_words(*score, 0.0, pairs, units / 64_000.0);
                        }
                        let outside = line[..at].iter().chain(&line[at + n_blocks * LANES..]);
                        assert!(outside.into_iter().all(|x| x.is_nan()));
                        // Alone, a query has the same scores.
                        let mut alone = vec![f32::NAN; stride];
                        run(first + q, 1, &mut alone);
                        assert!(alone.iter().zip(line).all(|(a, b)| a.to_bits() == b.to_bits()));
                    }
                    if matches!(products, Products::Tiles(..)) {
                        bits[precision as usize].push(lines.iter().map(|x| x.to_bits()).collect());
                    }
                }
                for bits in bits {
                    assert!(bits.windows(2).all(|two| two[0] == two[1]), "emulated tiles differ");
                }
            }
        }
        errors.check(&format!("scores of {storage}"));
    }
}

/// Weighted sums over places with gaps, from blocks in any order. Values that are in no place may be anything.
#[test]
fn sums_are_products() {
    for storage in DTYPES.into_iter().filter(|storage| *storage != "t4-o") {
        let mut errors = Errors::default();
        let mut random = SplitMix64(4);
        for (round, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            for (i, n) in ROWS.into_iter().enumerate() {
                let n_places = STEP * (1 + (round + n) % MAX_STEPS);
                let n_blocks = n_places / 8;
                let values = Stored::new(Side::V, storage, head_dim, n_blocks, &mut random);
                let dtype = values.geometry.storage.dtype;
                let mut places = Places::new();
                places.clear(n_places);
                let mut seen: Vec<Option<usize>> = vec![None; n_places]; // place to row of `values`
                let mut place = random.index(3);
                while place < n_places {
                    let (block, lane) = (random.index(n_blocks), random.index(LANES));
                    let len = (1 + random.index(LANES)).min(LANES - lane).min(n_places - place);
                    assert!(places.add(values.block(block), lane..lane + len, place));
                    let again = places.add(values.block(block), lane..lane + 1, place);
                    assert!(!again, "a place is taken once");
                    (0..len).for_each(|i| seen[place + i] = Some(block * LANES + lane + i));
                    place += len + random.index(3);
                }
                let (stride, at, state) = (n_places + 7, 3, head_dim + 5);
                let inside = |i: usize| (at..at + n_places).contains(&(i % stride));
                let weight = |i: usize| if inside(i) { random.unit() as f32 * 1.4 } else { f32::NAN };
                let lines: Vec<f32> = (0..n * stride).map(weight).collect();
                let before: Vec<f32> = (0..n * state).map(|_| float(&mut random)).collect();
                let mut bits: [Vec<Vec<u32>>; 2] = Default::default();
                for (isa, products) in each(dtype) {
                    if is_left_out(products, round, i) {
                        continue;
                    }
                    let precision = products.precision();
                    let mut weights = lines.clone();
                    if precision == Precision::Rounded {
                        // Vectors of a line begin at its place 0.
                        for line in weights.chunks_exact_mut(stride) {
                            let (lines, vectors) = (&mut line[at..], 0..n_places / LANES);
                            isa.run(RoundWeights { stride: lines.len(), lines, vectors });
                        }
                    }
                    let mut packed = vec![u32::MAX; packed_len(head_dim, dtype, precision)];
                    let mut split = vec![u32::MAX; weights_len(precision)];
                    let mut run = |query: usize, n: usize, data: &mut [f32]| {
                        let weights = Weights { data: &weights[query * stride..], stride, at };
                        let sums = Sums { n, data, first: 0, stride: state };
                        let room = Room { packed: &mut packed, split: &mut split };
                        accumulate(products, dtype, (&places, shape(&values)), None, weights, sums, room);
                    };
                    let mut sums = before.clone();
                    run(0, n, &mut sums);
                    for (q, (sums, before)) in
                        sums.chunks_exact(state).zip(before.chunks_exact(state)).enumerate()
                    {
                        for i in 0..head_dim {
                            let pairs = seen.iter().enumerate().filter_map(|(place, seen)| {
                                Some((lines[q * stride + at + place], values.rows[(*seen)?][i]))
                            });
                            if precision != Precision::Words {
                                errors.add(precision, sums[i], before[i], pairs);
                                continue;
                            }
                            let products = seen.iter().enumerate().filter_map(|(place, seen)| {
                                let largest = sizes(&values.rows[(*seen)?])[2] * looseness(dtype);
                                Some(f64::from(lines[q * stride + at + place]) * largest)
                            });
                            let (sum, largest) =
                                products.fold((0.0, 0f64), |(sum, most), x| (sum + x, most.max(x)));
                            let unit = (sum / 250_000.0).max(largest / 32_000.0);
                            let at_most = sum / (2.0 * 8_191.0) + unit / 2.0 * n_places as f64;
                            errors.add_words(sums[i], before[i], pairs, at_most);
                        }
                        assert_eq!(sums[head_dim..], before[head_dim..]);
                        let mut alone = before.to_vec();
                        run(q, 1, &mut alone);
                        assert!(alone.iter().zip(sums).all(|(a, b)| a.to_bits() == b.to_bits()));
                    }
                    if matches!(products, Products::Tiles(..)) {
                        bits[precision as usize].push(sums.iter().map(|x| x.to_bits()).collect());
                    }
                }
                for bits in bits {
                    assert!(bits.windows(2).all(|two| two[0] == two[1]), "emulated tiles differ");
                }
            }
        }
        errors.check(&format!("sums of {storage}"));
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
        let mut split = vec![0; split_len(row.len(), rows, Precision::Exact)];
        isa.run(SplitRow { precision: Precision::Exact, row: &row, at, rows, split: &mut split });
        for (i, x) in row.iter().enumerate() {
            let part = |part: usize| {
                let pair = split[(i / STEP * LEFT_PARTS + part) * plane(rows) + at * LANES + i % LANES];
                f32::from_bits(if i % STEP < LANES { pair << 16 } else { pair & 0xffff_0000 })
            };
            let sum = part(0) + part(1) + part(2);
            assert!(sum == *x || !x.is_finite() && !sum.is_finite(), "{isa}: {sum} instead of {x}");
        }
    }
}
