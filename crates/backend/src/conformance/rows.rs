//! How far a stored row may be from the row written. Written from the definition of each storage, not from any
//! backend's code.
//!
//! | dtype | error of an element, at most | because |
//! |---|---|---|
//! | f32 | 0 | stored as it is |
//! | f16 | 2⁻¹¹·\|x\| + 2⁻²⁵ | 11 significant bits, rounded to nearest; below 2⁻¹⁴ a fixed step of 2⁻²⁴ |
//! | bf16 | 2⁻⁸·\|x\| | 8 significant bits |
//! | q8 | M·(1/254 + 2⁻¹⁰) + 2⁻¹⁸ | half a step of M/127, M the group's largest magnitude; a scale that f16 rounded down cuts off at most 127 steps' 2⁻¹¹ |
//! | q4 | R/30·(1 + 2⁻¹⁰) + R·2⁻¹¹ + 2·(2⁻¹¹·\|m\| + 2⁻²⁵) | half a step of R/15, R the group's range; scale and minimum m are f16 |
//!
//! A rotated row is bounded as a whole: the rotation keeps lengths, so the length of its error is at most the length
//! of the bounds in the rotated basis, and 10⁻⁶ of the row's own for turning it there and back in f32.
use crate::{DType, Storage};

/// The part of the bound that `stored` uses up: above 1 it is too far. NaN stays NaN.
pub fn error(storage: Storage, written: &[f32], stored: &[f32]) -> f64 {
    let mut row: Vec<f64> = written.iter().map(|x| f64::from(*x)).collect();
    let differences = || written.iter().zip(stored).map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs());
    if storage.rotate {
        let length = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let own = length(&row);
        rotate(&mut row);
        let allowed = length(&bounds(storage, &row)) + 1e-6 * own;
        return part(length(&differences().collect::<Vec<_>>()), allowed);
    }
    let parts = bounds(storage, &row).into_iter().zip(differences()).map(|(bound, d)| part(d, bound));
    parts.fold(0.0, |worst, part| if part > worst || part.is_nan() { part } else { worst })
}

fn part(difference: f64, allowed: f64) -> f64 {
    if difference == 0.0 { 0.0 } else { difference / allowed }
}

fn bounds(storage: Storage, row: &[f64]) -> Vec<f64> {
    let ulp = 2f64.powi(-11);
    let group = match storage.dtype {
        DType::Q8 | DType::Q4 => storage.group as usize,
        _ => 1,
    };
    let mut all = Vec::with_capacity(row.len());
    for group in row.chunks(group) {
        let (least, most) =
            group.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), x| (l.min(*x), m.max(*x)));
        let magnitude = least.abs().max(most.abs());
        let bound = match storage.dtype {
            DType::F32 => 0.0,
            DType::F16 => ulp * magnitude + 2f64.powi(-25),
            DType::BF16 => 2f64.powi(-8) * magnitude,
            DType::Q8 => magnitude * (1.0 / 254.0 + 2.0 * ulp) + 2f64.powi(-18),
            DType::Q4 => {
                let range = most - least;
                let minimum = ulp * least.abs() + 2f64.powi(-25);
                range / 30.0 * (1.0 + 2.0 * ulp) + range * ulp + 2.0 * minimum
            }
        };
        all.extend(group.iter().map(|_| bound));
    }
    all
}

/// The normalised Hadamard matrix (Sylvester's), block-diagonal over the largest power of two that divides the length.
fn rotate(row: &mut [f64]) {
    let block = 1 << row.len().trailing_zeros();
    for block in row.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                for i in 0..half {
                    (pair[i], pair[i + half]) = (pair[i] + pair[i + half], pair[i] - pair[i + half]);
                }
            }
            half *= 2;
        }
        let norm = (block.len() as f64).sqrt();
        block.iter_mut().for_each(|x| *x /= norm);
    }
}
