//! Quantises weights to 8 bits: q8_0 with a scale per 32 weights, int8 with a scale per row.

/// A weight that no codes can stand for: NaN, infinite, or beyond the largest scale.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a weight of magnitude {0} cannot be stored in 8 bits: use --weights as-stored")]
pub(super) struct NoCode(f32);

/// Quantises to q8_0 with ggml's rounding.
pub(super) fn to_q8_0(x: &[f32]) -> Result<Vec<u8>, NoCode> {
    let mut all = Vec::with_capacity(x.len() / 32 * 34);
    for x in x.chunks_exact(32) {
        let largest = largest(x);
        let d = largest / 127.0;
        let scale = half::f16::from_f32(d);
        if !scale.is_finite() {
            return Err(NoCode(largest));
        }
        all.extend(scale.to_le_bytes());
        all.extend(codes(x, d));
    }
    Ok(all)
}

/// Quantises rows of `row` elements, a multiple of 32, to [`Encoding::Int8`](super::Encoding::Int8): `w = scale × code`,
/// codes of −127 to 127.
pub(super) fn to_int8(x: &[f32], row: usize) -> Result<Vec<u8>, NoCode> {
    let mut all = Vec::with_capacity(x.len() / 32 * 36);
    for x in x.chunks_exact(row) {
        let largest = largest(x);
        if !largest.is_finite() {
            return Err(NoCode(largest));
        }
        let scale = largest / 127.0;
        let codes: Vec<u8> = codes(x, scale).collect();
        put_int8(scale, &codes, &mut all);
    }
    Ok(all)
}

/// Appends a row of signed codes with its scale, as blocks of [`Encoding::Int8`](super::Encoding::Int8). The number of codes
/// must be a multiple of 32.
pub fn put_int8(scale: f32, codes: &[u8], out: &mut Vec<u8>) {
    for codes in codes.chunks_exact(32) {
        out.extend(scale.to_le_bytes());
        out.extend_from_slice(codes);
    }
}

/// The scale of a block's row.
pub fn scale_of_int8(block: &[u8]) -> [u8; 4] {
    std::array::from_fn(|i| block[i])
}

pub(super) fn decode_int8(block: &[u8], out: &mut [f32]) {
    let scale = f32::from_le_bytes(scale_of_int8(block));
    out.iter_mut().zip(&block[4..]).for_each(|(out, code)| *out = scale * f32::from(code.cast_signed()));
}

/// The largest magnitude, or NaN, which `max` would drop.
#[inline]
pub fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |max, x| if x.abs() > max || x.is_nan() { x.abs() } else { max })
}

fn codes(x: &[f32], scale: f32) -> impl Iterator<Item = u8> {
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    x.iter().map(move |x| ((x * inverse).round() as i8).cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::super::{Encoding, FileTensor};

    #[test]
    fn int8_has_a_scale_per_row_and_stays_within_half_a_step() {
        let shape = [3, 64];
        let mut x: Vec<f32> = (0..192).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect();
        x[64..128].iter_mut().for_each(|x| *x *= 100.0);
        x[128..].fill(0.0);
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let tensor = |encoding, bytes| FileTensor { name: "w", shape: &shape, encoding, bytes, factor: 1.0 };
        let packed = tensor(Encoding::F32, bytes.into()).encoded(Encoding::Int8).unwrap().into_owned();
        assert_eq!(packed.len(), Encoding::Int8.tensor_bytes(&shape).unwrap());
        let back = tensor(Encoding::Int8, packed.clone().into()).to_f32();
        for (row, (x, back)) in x.chunks(64).zip(back.chunks(64)).enumerate() {
            let scale = x.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
            assert!(x.iter().zip(back).all(|(x, back)| (x - back).abs() <= scale * 0.5001), "row {row}");
        }
        // Codes that are there already stay.
        assert_eq!(tensor(Encoding::Int8, packed.clone().into()).encoded(Encoding::Int8).unwrap(), packed);
    }

    /// They would become 0, or whatever else a cast makes of them.
    #[test]
    fn weights_without_codes_are_refused_by_name() {
        let shape = [3, 64];
        let encoded = |value: f32, encoding| {
            let mut x = [0.5f32; 192];
            x[100] = value;
            let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            let tensor = FileTensor {
                name: "w",
                shape: &shape,
                encoding: Encoding::F32,
                bytes: bytes.into(),
                factor: 1.0,
            };
            tensor.encoded(encoding).map(drop).map_err(|error| error.to_string())
        };
        let refused = |magnitude: &str| {
            let what = "cannot be stored in 8 bits: use --weights as-stored";
            Err(format!("tensor `w`: a weight of magnitude {magnitude} {what}"))
        };
        for encoding in [Encoding::Q8_0, Encoding::Int8] {
            assert_eq!(encoded(f32::NAN, encoding), refused("NaN"), "{encoding:?}");
            assert_eq!(encoded(-f32::INFINITY, encoding), refused("inf"), "{encoding:?}");
            assert_eq!(encoded(1e6, encoding), Ok(()), "{encoding:?}");
        }
        // The scale of q8_0 is an f16.
        assert_eq!(encoded(-1e7, Encoding::Q8_0), refused("10000000"));
        assert_eq!(encoded(-1e7, Encoding::Int8), Ok(()));
        // Others hold whatever the file has.
        assert_eq!(encoded(f32::NAN, Encoding::F32), Ok(()));
    }
}
