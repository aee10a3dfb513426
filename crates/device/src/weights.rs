//! Weights as files store them: the encodings, their exact conversions, and a scalar decoder.
//!
//! A device decides how it keeps a tensor in memory. It takes the file's codes ([`FileTensor::encoded`]) or floats
//! ([`FileTensor::to_f32`]).
pub mod blocks;
mod encoding;
mod exact;
pub mod round;
pub mod super_blocks;

use crate::error::DeviceError;
pub use encoding::{Encoding, WeightFormat};
use std::borrow::Cow;

/// A tensor of a file. Its rows are in the order of Hugging Face checkpoints.
#[derive(Clone, Debug)]
pub struct FileTensor<'s> {
    /// The tensor's name in the file, for errors.
    pub name: &'s str,
    /// Slowest dimension first.
    pub shape: &'s [usize],
    pub encoding: Encoding,
    /// Consecutive rows in the encoding's own blocks, as many as the shape requires.
    pub bytes: Cow<'s, [u8]>,
    /// Multiplies every element.
    pub factor: f32,
}

impl<'s> FileTensor<'s> {
    /// Elements of a row: the last dimension.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
    /// Number of rows: the product of all dimensions but the last.
    pub fn n_rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, rows)| rows.iter().product())
    }

    /// The tensor in `resident`, without the factor: f32, q8_0, int8 or the tensor's own [`Encoding::exact`]. Decodes only
    /// if the encoding changes.
    ///
    /// # Errors
    /// Other weights become q8_0 or int8, and one of them is NaN, infinite or too large for that.
    pub fn encoded(self, resident: Encoding) -> Result<Cow<'s, [u8]>, DeviceError> {
        let (name, row) = (self.name, self.row_len());
        let rounded = match resident {
            same if same == self.encoding.exact() => return Ok(exact::exact(self.encoding, self.bytes)),
            Encoding::Q8_0 => round::to_q8_0(&self.decoded()),
            Encoding::Int8 => round::to_int8(&self.decoded(), row),
            _ => Ok(self.decoded().iter().flat_map(|x| x.to_le_bytes()).collect()),
        };
        let refused =
            |error: round::NoCode| DeviceError::Weights { name: name.into(), what: error.to_string() };
        rounded.map(Cow::Owned).map_err(refused)
    }

    /// Every element as f32, with the factor.
    pub fn to_f32(self) -> Vec<f32> {
        let factor = self.factor;
        let mut all = self.decoded();
        if factor != 1.0 {
            all.iter_mut().for_each(|x| *x *= factor);
        }
        all
    }

    fn decoded(self) -> Vec<f32> {
        let encoding = self.encoding.exact();
        let bytes = exact::exact(self.encoding, self.bytes);
        let (elements, size) = encoding.block();
        let mut all = vec![0.0; bytes.len() / size * elements];
        let decode = decoder(encoding);
        bytes
            .chunks_exact(size)
            .zip(all.chunks_exact_mut(elements))
            .for_each(|(block, out)| decode(block, out));
        all
    }
}

/// The function that decodes a block of `encoding`, which is its own [`Encoding::exact`].
fn decoder(encoding: Encoding) -> fn(&[u8], &mut [f32]) {
    match encoding {
        Encoding::F16 => |x, out| out[0] = half::f16::from_le_bytes([x[0], x[1]]).to_f32(),
        Encoding::BF16 => |x, out| out[0] = half::bf16::from_le_bytes([x[0], x[1]]).to_f32(),
        Encoding::Q8_0 => blocks::decode::<blocks::Q8_0>,
        Encoding::Q4_0 => blocks::decode::<blocks::Q4_0>,
        Encoding::Q4_1 => blocks::decode::<blocks::Q4_1>,
        Encoding::Q5_0 => blocks::decode::<blocks::Q5_0>,
        Encoding::Q5_1 => blocks::decode::<blocks::Q5_1>,
        Encoding::Iq4Nl => blocks::decode::<blocks::Iq4Nl>,
        Encoding::Mxfp4 => blocks::decode::<blocks::Mxfp4>,
        Encoding::Q2K => super_blocks::decode::<super_blocks::Q2K>,
        Encoding::Q3K => super_blocks::decode::<super_blocks::Q3K>,
        Encoding::Q4K => super_blocks::decode::<super_blocks::Q4K>,
        Encoding::Q5K => super_blocks::decode::<super_blocks::Q5K>,
        Encoding::Q6K => super_blocks::decode::<super_blocks::Q6K>,
        Encoding::Iq4Xs => super_blocks::decode::<super_blocks::Iq4Xs>,
        Encoding::Table16 => super_blocks::decode::<super_blocks::Table16>,
        Encoding::Int8 => round::decode_int8,
        // f32, and encodings that are not their own exact encoding.
        _ => |x, out| out[0] = f32::from_le_bytes([x[0], x[1], x[2], x[3]]),
    }
}
