//! One tensor of a file, not yet copied.
use super::encoding::{Encoding, WeightForm};
use super::linear::{Embedding, Linear};
use super::repack;
use crate::error::Error;
use kvist_cpu::Compute;
use kvist_cpu::linear::{Matrix, Packing};
use std::borrow::Cow;

/// Checked: `bytes` is exactly what shape and encoding need.
#[derive(Clone, Debug)]
pub struct View<'s> {
    /// As the file names it.
    pub name: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub encoding: Encoding,
    bytes: &'s [u8],
    /// The rows stand as llama.cpp's converter leaves q and k of the Llama family: this is the number of heads.
    interleaved_heads: Option<usize>,
}

impl<'s> View<'s> {
    /// `None` if the bytes are not what the shape needs.
    pub fn new(name: &str, shape: Vec<usize>, encoding: Encoding, bytes: &'s [u8]) -> Option<Self> {
        let fits = encoding.tensor_bytes(&shape) == Some(bytes.len()) && !bytes.is_empty();
        fits.then(|| View { name: name.into(), shape, encoding, bytes, interleaved_heads: None })
    }

    /// Rows are those of `heads` heads with the two halves of each interleaved.
    pub(super) fn interleaved(mut self, heads: usize) -> Self {
        self.interleaved_heads = Some(heads);
        self
    }

    fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The bytes with rows in the order of the Hugging Face checkpoints. Whole rows move, so any encoding does.
    ///
    /// Row `2i + h` of a head (half `h` of pair `i`) goes to row `h * dim / 2 + i`.
    fn ordered(&self) -> Result<Cow<'s, [u8]>, Error> {
        let Some(heads) = self.interleaved_heads else { return Ok(Cow::Borrowed(self.bytes)) };
        // A bias is a column: its rows are single elements.
        let rows = self.shape[..(self.shape.len() - 1).max(1)].iter().product::<usize>();
        let per_head = rows / heads.max(1);
        if per_head == 0 || per_head * heads != rows || !per_head.is_multiple_of(2) {
            return Err(Error::Malformed {
                file: self.name.clone(),
                what: format!("{rows} rows do not divide into {heads} heads of an even size"),
            });
        }
        let row_bytes = self.bytes.len() / rows;
        let mut ordered = Vec::with_capacity(self.bytes.len());
        for head in 0..heads {
            for half in 0..2 {
                for pair in 0..per_head / 2 {
                    let row = head * per_head + 2 * pair + half;
                    ordered.extend_from_slice(&self.bytes[row * row_bytes..(row + 1) * row_bytes]);
                }
            }
        }
        Ok(Cow::Owned(ordered))
    }

    /// Every element as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        let bytes = self.ordered()?;
        let halves =
            |decode: fn([u8; 2]) -> f32| bytes.chunks_exact(2).map(|b| decode([b[0], b[1]])).collect();
        Ok(match self.encoding {
            Encoding::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Encoding::F16 => halves(|b| half::f16::from_le_bytes(b).to_f32()),
            Encoding::BF16 => halves(|b| half::bf16::from_le_bytes(b).to_f32()),
            encoding => {
                let (packing, bytes) = (encoding.held(), repack::held(encoding, bytes));
                let (elements, size) = packing.block();
                let mut all = vec![0.0; bytes.len() / size * elements];
                packing.decode(&bytes, &mut all);
                all
            }
        })
    }

    /// The matrix as it will be held: `[out, in]`. Only a change of encoding decodes it.
    fn matrix(&self, compute: &Compute, form: WeightForm) -> Result<Matrix, Error> {
        let resident = self.encoding.resident(form, self.row_len());
        let bytes = match resident {
            same if same == self.encoding.held() => repack::held(self.encoding, self.ordered()?),
            Packing::Q8_0 => Cow::Owned(repack::to_q8_0(&self.to_f32()?)),
            _ => Cow::Owned(self.to_f32()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        };
        let (inputs, rows) = self.shape.split_last().unwrap_or((&0, &[]));
        let packed = Matrix::pack(compute, resident, rows.iter().product(), *inputs, &bytes);
        packed.map_err(|error| Error::Malformed { file: self.name.clone(), what: error.to_string() })
    }

    pub fn to_linear(&self, compute: &Compute, form: WeightForm) -> Result<Linear, Error> {
        Ok(Linear::new(self.matrix(compute, form)?))
    }
    pub fn to_embedding(&self, compute: &Compute, form: WeightForm) -> Result<Embedding, Error> {
        Ok(Embedding::new(self.matrix(compute, form)?))
    }
}
