//! The Hadamard rotation of stored rows. It spreads an outlier over its block before the block is quantised (QuaRot:
//! Ashkboos et al., 2024). The normalised matrix is symmetric and orthogonal, so it is its own inverse and preserves
//! dot products.

/// Rotate `row` in place, block by block, over the largest power of two that divides its length.
pub fn rotate(row: &mut [f32]) {
    let block = 1 << row.len().trailing_zeros();
    let norm = 1.0 / (block as f32).sqrt();
    for block in row.chunks_exact_mut(block) {
        walsh_hadamard(block);
        block.iter_mut().for_each(|x| *x *= norm);
    }
}

/// Rotates the whole of `row` in place, for any length: the largest power of two from its start, then as many elements
/// from its end, so that every element is rotated. Flips some signs before each rotation, so that a regular row (say a
/// constant one) does not turn into a spike.
pub fn rotate_whole(row: &mut [f32]) {
    let Some(block) = row.len().checked_ilog2().map(|n| 1 << n) else { return };
    flip_signs(row);
    rotate(&mut row[..block]);
    if block < row.len() {
        flip_signs(row);
        let start = row.len() - block;
        rotate(&mut row[start..]);
    }
}

/// The inverse of [`rotate_whole`].
pub fn rotate_whole_back(row: &mut [f32]) {
    let Some(block) = row.len().checked_ilog2().map(|n| 1 << n) else { return };
    if block < row.len() {
        let start = row.len() - block;
        rotate(&mut row[start..]);
        flip_signs(row);
    }
    rotate(&mut row[..block]);
    flip_signs(row);
}

/// Flips the signs of about half of the elements, always the same ones.
fn flip_signs(row: &mut [f32]) {
    /// Precomputed for the usual head sizes.
    static SIGNS: [u32; 256] = {
        let (mut signs, mut i) = ([0; 256], 0);
        while i < signs.len() {
            signs[i] = sign(i as u32);
            i += 1;
        }
        signs
    };
    let (usual, others) = row.split_at_mut(row.len().min(SIGNS.len()));
    for (x, sign) in usual.iter_mut().zip(&SIGNS) {
        *x = f32::from_bits(x.to_bits() ^ sign);
    }
    for (x, i) in others.iter_mut().zip(SIGNS.len() as u32..) {
        *x = f32::from_bits(x.to_bits() ^ sign(i));
    }
}

/// The sign bit to flip for element `i`, or 0.
const fn sign(i: u32) -> u32 {
    let mixed = (i + 1).wrapping_mul(0x9e37_79b1);
    (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b) & 1 << 31
}

/// The fast Walsh–Hadamard transform: log₂ n rounds of butterflies.
fn walsh_hadamard(x: &mut [f32]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_any_length_is_turned_and_turned_back() {
        for len in [0, 1, 2, 3, 24, 40, 56, 64, 80, 96, 112, 224] {
            let mut x = vec![0.0; len];
            if let Some(last) = x.last_mut() {
                *last = 1.0;
            }
            let mut y = x.clone();
            rotate_whole(&mut y);
            let length: f32 = y.iter().map(|x| x * x).sum();
            assert!(len == 0 || (length - 1.0).abs() < 1e-5, "length {length} at {len}");
            // One element is spread over at least half of the row.
            assert!(y.iter().filter(|y| **y != 0.0).count() >= len.div_ceil(2), "{len}");
            rotate_whole_back(&mut y);
            for (a, b) in x.iter().zip(&y) {
                assert!((a - b).abs() < 1e-6, "{a} came back as {b} at {len}");
            }
        }
    }

    #[test]
    fn it_is_its_own_inverse_and_keeps_lengths() {
        for len in [1, 2, 32, 64, 80, 96, 128, 256] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 37 % 11) as f32 - 5.0) * 0.3).collect();
            let mut y = x.clone();
            rotate(&mut y);
            let length = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>();
            assert!((length(&x) - length(&y)).abs() < 1e-3 * length(&x), "length at {len}");
            assert!(len < 2 || x != y, "nothing turned at {len}");
            rotate(&mut y);
            for (a, b) in x.iter().zip(&y) {
                assert!((a - b).abs() < 1e-5, "{a} came back as {b} at {len}");
            }
        }
    }
}
