//! Weighted sums of packed values against sums in f64: what dominates the weights, and what must not be seen.
use super::*;
use crate::arch::Isa;
use crate::pool::rows::param_at;
use crate::pool::stored::{Stored, float};
use crate::pool::{Sums, accumulate as weigh};
use kvist_device::Side;
use kvist_testing::SplitMix64;
use std::ops::Range;

const STORAGES: [&str; 5] = ["q8", "q8-64", "q4", "q4-64", "t4"];

/// The sums of `weights: [rows][cells]` over the visible cells.
fn sums(
    isa: Isa,
    values: &Stored,
    lanes: Range<usize>,
    weights: &[Vec<f32>],
    may_have_nan: bool,
) -> Vec<Vec<f32>> {
    let (geometry, stride) = (values.geometry, weights[0].len());
    let list: Vec<Block<'_>> = (0..stride / LANES).map(|i| values.block(i)).collect();
    let (head_dim, group, row) = (geometry.head_dim, geometry.group, geometry.row);
    let blocks = Blocks { head_dim, group, row, list: &list, lanes, may_have_nan, exact: false };
    let mut data = weights.concat();
    let mut out = vec![0.0; weights.len() * head_dim];
    let sums = Sums { n: weights.len(), data: &mut out, first: 0, stride: head_dim };
    let lines = Lines { data: &mut data, stride, at: 0 };
    weigh(isa, geometry.storage.dtype, lines, blocks, sums, &mut Quads::default());
    out.chunks(head_dim).map(<[f32]>::to_vec).collect()
}

/// How far from the exact sum one may be, beyond a hundredth of the sum of magnitudes. (That much only where one product outweighs all
/// others together tenfold, and its own elements are small.) Of q4, with units of one byte: two steps of the codes of the row with
/// the largest product, whose own rounding is up to half a step.
fn allowed(storage: &str, weights: &[f32], rows: &[Vec<f32>]) -> f64 {
    if !storage.starts_with("q4") {
        return 0.0;
    }
    let step = |row: &Vec<f32>| {
        let (min, max) = row.iter().fold((f32::MAX, f32::MIN), |(min, max), x| (x.min(min), x.max(max)));
        (max - min) / 15.0
    };
    let steps = weights.iter().zip(rows).map(|(weight, row)| weight * step(row));
    2.0 * f64::from(steps.fold(0.0, f32::max))
}

fn compare(what: &str, storage: &str, found: &[Vec<f32>], weights: &[Vec<f32>], rows: &[Vec<f32>]) {
    for (row, (found, weights)) in found.iter().zip(weights).enumerate() {
        let allowed = allowed(storage, weights, rows);
        for (d, found) in found.iter().enumerate() {
            let seen = || weights.iter().zip(rows).filter(|(weight, _)| **weight != 0.0);
            let terms = || seen().map(|(weight, row)| f64::from(*weight) * f64::from(row[d]));
            let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let off = (f64::from(*found) - sum).abs();
            assert!(
                off <= allowed + 1e-2 * size + 1e-9,
                "{what}: row {row}, element {d}: {found}, not {sum} (of {size})"
            );
        }
    }
}

/// An attention sink has nearly all the weight and small values. The other cells must not be rounded away beside it.
#[test]
fn a_sink_leaves_the_others_exact() {
    let mut random = SplitMix64(31);
    for storage in STORAGES {
        for (head_dim, n_blocks, sink) in [(64, 3, 0.01), (128, 18, 0.001), (80, 16, 0.1), (96, 7, 0.01)] {
            let values = Stored::of(Side::V, storage, head_dim, n_blocks, |cell| {
                let size = if cell == 1 { sink } else { 1.0 };
                (0..head_dim).map(|_| size * float(&mut random)).collect()
            });
            let cells = n_blocks * LANES;
            let weights: Vec<Vec<f32>> = (0..11)
                .map(|_| {
                    let rest = 0.01 / cells as f32;
                    let mut row: Vec<f32> = (0..cells).map(|_| rest * (0.5 + random.unit() as f32)).collect();
                    row[1] = 0.99;
                    row
                })
                .collect();
            for isa in Isa::tested() {
                let found = sums(isa, &values, 0..cells, &weights, false);
                let what = format!("{isa} {storage} {head_dim}");
                compare(&what, storage, &found, &weights, &values.rows);
            }
        }
    }
}

/// Beside one large weight, hundreds have a third of a unit of one byte each. Rounded one by one they would be 0, and two fifths of all
/// weight would be lost. Some elements are the same in all cells, so that nothing but the sum of weights counts; the error of the
/// others is noise.
#[test]
fn small_weights_count_beside_a_large_one() {
    let mut random = SplitMix64(41);
    for storage in STORAGES {
        for (head_dim, n_blocks, large) in
            [(128, 18, 0), (64, 16, 100), (48, 17, 271), (64, 4, 20), (64, 2, 3)]
        {
            let values = Stored::of(Side::V, storage, head_dim, n_blocks, |_| {
                (0..head_dim).map(|d| if d % 8 == 0 { 1.0 } else { float(&mut random) }).collect()
            });
            let cells = n_blocks * LANES;
            let small = 0.33 / 126.0;
            let weights: Vec<Vec<f32>> = (0..9)
                .map(|row| {
                    let small = small * (1.0 + row as f32 / 40.0);
                    let mut weights = vec![small; cells];
                    weights[large] = 1.0;
                    weights
                })
                .collect();
            for isa in Isa::tested() {
                let found = sums(isa, &values, 0..cells, &weights, false);
                for (row, (found, weights)) in found.iter().zip(&weights).enumerate() {
                    for (d, found) in found.iter().enumerate() {
                        let terms = || weights.iter().zip(&values.rows).map(|(w, row)| f64::from(w * row[d]));
                        let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                        let noise = if d % 8 == 0 { 0.0 } else { allowed(storage, weights, &values.rows) };
                        let off = (f64::from(*found) - sum).abs();
                        assert!(
                            off <= noise + 0.02 * size,
                            "{isa} {storage} {head_dim}: row {row}, element {d}: {found}, not {sum} (of {size})"
                        );
                    }
                }
            }
        }
    }
}

/// Cells outside of the visible ones may contain anything, and cells of another sequence may be broken.
#[test]
fn what_is_not_seen_does_not_count() {
    let mut random = SplitMix64(37);
    for storage in STORAGES {
        let (head_dim, n_blocks) = (64, 5);
        let cells = n_blocks * LANES;
        let broken = |values: &mut Stored, cell: usize| {
            for p in 0..values.geometry.params {
                let at = cell / LANES * values.geometry.block_params() + param_at(p, cell % LANES).start;
                values.params[at..at + 2].fill(0xff);
            }
        };
        let mut values = Stored::new(Side::V, storage, head_dim, n_blocks, &mut random);
        let lanes = 3..cells - 5;
        let weight = |random: &mut SplitMix64, cell: usize| match lanes.contains(&cell) {
            true => random.unit() as f32,
            false => 0.0,
        };
        let mut weights: Vec<Vec<f32>> =
            (0..9).map(|_| (0..cells).map(|cell| weight(&mut random, cell)).collect()).collect();
        (0..lanes.start).chain(lanes.end..cells).for_each(|cell| broken(&mut values, cell));
        for isa in Isa::tested() {
            let found = sums(isa, &values, lanes.clone(), &weights, false);
            compare(&format!("{isa} {storage}"), storage, &found, &weights, &values.rows);
        }
        // Only the last row sees the broken cell.
        broken(&mut values, 20);
        weights[..8].iter_mut().for_each(|row| row[20] = 0.0);
        for isa in Isa::tested() {
            let found = sums(isa, &values, lanes.clone(), &weights, true);
            let what = format!("{isa} {storage}, a broken cell");
            compare(&what, storage, &found[..8], &weights, &values.rows);
            assert!(found[8].iter().all(|x| x.is_nan()), "{isa} {storage}: {:?}", found[8]);
        }
    }
}
