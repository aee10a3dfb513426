//! How far a stored row may be from the row written. Derived from the definition of each storage, not from any
//! backend's code.
//!
//! | dtype | error of an element, at most | because |
//! |---|---|---|
//! | f32 | 0 | stored as it is |
//! | f16 | 2⁻¹¹·\|x\| + 2⁻²⁵ | 11 significant bits, rounded to nearest; below 2⁻¹⁴ a fixed step of 2⁻²⁴ |
//! | bf16 | 2⁻⁸·\|x\| | 8 significant bits |
//! | q8 | M·(1/254 + 2⁻¹⁰) + 2⁻¹⁸ | half a step of M/127, M the group's largest magnitude; a scale that f16 rounded down cuts off at most 127 steps' 2⁻¹¹ |
//! | q4 | R/30·(1 + 2⁻¹⁰) + R·2⁻¹¹ + 2·(2⁻¹¹·\|m\| + 2⁻²⁵) | half a step of R/15, R the group's range; scale and minimum m are f16 |
//! | t4 | what its definition gives, and 2⁻¹⁰ of the row's length for a scale in f16 and for ties | see `t4` |
//!
//! A rotated row is bounded as a whole: the rotation preserves lengths, so the length of its error is at most the
//! length of the bounds in the rotated basis, plus 10⁻⁶ of the row's own length for rotating it there and back in
//! f32.
use kvist_cache::{GroupId, LayerId};
use kvist_device::{DType, DeviceError, LayerSpec, Layout, Pools, Side, Storage};

/// The fraction of the bound that `stored` uses: above 1 it is too far off. NaN stays NaN. `order` lists the channels
/// in stored order: with outliers, the strongest first.
pub fn error(storage: Storage, order: &[usize], written: &[f32], stored: &[f32]) -> f64 {
    if storage.dtype == DType::T4 {
        return t4_error(storage, order, written, stored);
    }
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
    parts.fold(0.0, worse)
}

/// The larger value; NaN counts as the largest.
fn worse(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
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
        let (min, max) =
            group.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), x| (l.min(*x), m.max(*x)));
        let magnitude = min.abs().max(max.abs());
        let bound = match storage.dtype {
            DType::F32 => 0.0,
            // `t4_error` measures the row as a whole.
            DType::T4 => f64::INFINITY,
            DType::F16 => ulp * magnitude + 2f64.powi(-25),
            DType::BF16 => 2f64.powi(-8) * magnitude,
            DType::Q8 => magnitude * (1.0 / 254.0 + 2.0 * ulp) + 2f64.powi(-18),
            DType::Q4 => {
                let range = max - min;
                let minimum = ulp * min.abs() + 2f64.powi(-25);
                range / 30.0 * (1.0 + 2.0 * ulp) + range * ulp + 2.0 * minimum
            }
        };
        all.extend(group.iter().map(|_| bound));
    }
    all
}

/// The levels of `t4`: those with the least mean square error for a normal distribution (Max, 1960; Lloyd, 1982). 127
/// stands for 2.7326 standard deviations.
const T4_LEVELS: [f64; 8] = [6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0];

/// Outliers are bounded like q8 in one group. The other channels are rotated, and the result is compared with the
/// definition.
fn t4_error(storage: Storage, order: &[usize], written: &[f32], stored: &[f32]) -> f64 {
    let n = storage.n_outliers(written.len() as u32) as usize;
    let take = |row: &[f32], channels: &[usize]| -> Vec<f64> {
        channels.iter().map(|c| f64::from(row[*c])).collect()
    };
    let (outliers, others) = order.split_at(n);
    let (wide, wide_stored) = (take(written, outliers), take(stored, outliers));
    let eights = Storage { group: n.max(1) as u32, ..Storage::Q8 };
    let parts = bounds(eights, &wide).into_iter().zip(wide.iter().zip(&wide_stored));
    let worst = parts.map(|(bound, (x, y))| part((x - y).abs(), bound)).fold(0.0, worse);
    let length = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (row, found) = (take(written, others), take(stored, others));
    let own = length(&row);
    let defined = t4(&row);
    let off = |y: &[f64]| length(&row.iter().zip(y).map(|(x, y)| x - y).collect::<Vec<_>>());
    let allowed = 1e-3 * own + 2f64.powi(-18) * (row.len() as f64).sqrt();
    // How much farther from the row than the definition's result, beyond rounding. Lost signs would show here too.
    let farther = part(worse(0.0, off(&found) - off(&defined)), allowed);
    let elsewhere = length(&found.iter().zip(&defined).map(|(x, y)| x - y).collect::<Vec<_>>());
    // A tie may be rounded either way: one level of one element.
    let elsewhere = part(elsewhere, allowed + 0.7 * own / (row.len().max(1) as f64).sqrt());
    worse(worse(worst, farther), elsewhere)
}

/// The definition of `t4`: flip some signs, rotate, take the nearest levels for the row's root mean square, scale the
/// levels to the row's length, and rotate back. In f64, except for a scale that f16 cannot represent.
fn t4(row: &[f64]) -> Vec<f64> {
    let n = row.len();
    if n == 0 {
        return Vec::new();
    }
    let power = 1 << n.ilog2();
    let mixed = |i: usize| (i as u32 + 1).wrapping_mul(0x9e37_79b1);
    let sign = |i: usize| match (mixed(i) ^ mixed(i) >> 15).wrapping_mul(0x85eb_ca6b) >> 31 {
        0 => 1.0,
        _ => -1.0,
    };
    let flip = |row: &mut [f64]| row.iter_mut().enumerate().for_each(|(i, x)| *x *= sign(i));
    let mut turned = row.to_vec();
    flip(&mut turned);
    rotate(&mut turned[..power]);
    if power < n {
        flip(&mut turned);
        rotate(&mut turned[n - power..]);
    }
    let mean_square = turned.iter().map(|x| x * x).sum::<f64>() / n as f64;
    let unit = mean_square.sqrt() * 2.7326 / 127.0;
    if unit == 0.0 {
        return vec![0.0; n];
    }
    let level = |x: &f64| {
        let nearest =
            |a: &&f64, b: &&f64| (**a - x.abs() / unit).abs().total_cmp(&(**b - x.abs() / unit).abs());
        x.signum() * T4_LEVELS.iter().min_by(nearest).copied().unwrap_or(0.0)
    };
    let mut levels: Vec<f64> = turned.iter().map(level).collect();
    let scale =
        (turned.iter().map(|x| x * x).sum::<f64>() / levels.iter().map(|x| x * x).sum::<f64>()).sqrt();
    levels.iter_mut().for_each(|x| *x *= scale.min(65_504.0));
    if power < n {
        rotate(&mut levels[n - power..]);
        flip(&mut levels);
    }
    rotate(&mut levels[..power]);
    flip(&mut levels);
    levels
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

/// The rows of one layer as they are read back, `[K, V][tokens][kv_heads * head_dim]`; `None` for borrowing layers.
pub type StoredRows = Option<[Vec<Vec<f32>>; 2]>;

/// Reads the rows of cells back, layer by layer. `cells` returns those of a layer group.
pub fn stored<'c>(
    pools: &dyn Pools,
    layout: &Layout,
    cells: impl Fn(GroupId) -> &'c [u32],
) -> Result<Vec<StoredRows>, DeviceError> {
    let rows = |l: usize, spec: &LayerSpec, side| {
        let row = |cell: &u32| {
            let head_dim = spec.k_dim as usize;
            let mut row = vec![0.0; spec.n_kv_heads as usize * head_dim];
            for (head, row) in (0..).zip(row.chunks_exact_mut(head_dim)) {
                pools.inspect(LayerId(l as u16), side, head, *cell, row)?;
            }
            Ok(row)
        };
        cells(spec.group).iter().map(row).collect::<Result<Vec<_>, DeviceError>>()
    };
    let layers = layout.layers.iter().enumerate().map(|(l, spec)| match layout.owns(l) {
        true => Ok(Some([rows(l, spec, Side::K)?, rows(l, spec, Side::V)?])),
        false => Ok(None),
    });
    layers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_t4_that_is_no_number_is_too_far() {
        let row: Vec<f32> = (0..32).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
        let order: Vec<usize> = (0..32).rev().collect();
        let exact: Vec<f32> = {
            let others: Vec<f64> = order[8..].iter().map(|c| f64::from(row[*c])).collect();
            let mut stored = row.clone();
            order[8..].iter().zip(t4(&others)).for_each(|(c, x)| stored[*c] = x as f32);
            stored
        };
        assert!(error(Storage::T4_O, &order, &row, &exact) < 1.0);
        for broken in 0..32 {
            let mut stored = exact.clone();
            stored[broken] = f32::NAN;
            assert!(error(Storage::T4_O, &order, &row, &stored).is_nan(), "{broken}");
        }
    }
}
