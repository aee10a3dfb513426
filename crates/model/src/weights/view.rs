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
    order: Order<'s>,
    /// What every element is multiplied by.
    factor: f32,
}

/// How a file holds the rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order<'s> {
    AsTheyAre,
    /// As llama.cpp's converter leaves q and k of the Llama family: of each head, the rows of its two halves in turn.
    Interleaved {
        heads: usize,
    },
    /// Floats, turned: row `r` is column `first + r × step` of so many.
    Columns {
        columns: usize,
        first: usize,
        step: usize,
    },
    /// MXFP4, whose scales are another tensor and whose codes stand in pairs: row `r` is row `first + r × step`.
    Scaled {
        scales: &'s [u8],
        first: usize,
        step: usize,
    },
}

impl<'s> View<'s> {
    /// `None` if the bytes are not what the shape needs.
    pub fn new(name: &str, shape: Vec<usize>, encoding: Encoding, bytes: &'s [u8]) -> Option<Self> {
        let fits = encoding.tensor_bytes(&shape) == Some(bytes.len()) && !bytes.is_empty();
        fits.then(|| View { name: name.into(), shape, encoding, bytes, order: Order::AsTheyAre, factor: 1.0 })
    }

    /// Rows that a file holds in another order, which must fit into its bytes.
    pub(super) fn ordered_by(
        name: &str,
        shape: Vec<usize>,
        encoding: Encoding,
        bytes: &'s [u8],
        order: Order<'s>,
    ) -> Self {
        View { name: name.into(), shape, encoding, bytes, order, factor: 1.0 }
    }

    /// As they stand in the file.
    pub(super) fn bytes(&self) -> &'s [u8] {
        self.bytes
    }

    /// Rows are those of `heads` heads with the two halves of each interleaved.
    pub(super) fn interleaved(mut self, heads: usize) -> Self {
        self.order = Order::Interleaved { heads };
        self
    }

    /// Every element is `factor` times what the bytes say.
    pub(super) fn times(mut self, factor: f32) -> Self {
        self.factor = factor;
        self
    }

    /// The same with so many dimensions: the slowest become one.
    pub(super) fn merged(mut self, dimensions: usize) -> Self {
        while self.shape.len() > dimensions.max(1) {
            let slowest = self.shape.remove(0);
            self.shape[0] *= slowest;
        }
        self
    }

    /// `n` of its rows, from `first` on. There must be so many.
    pub(super) fn rows(mut self, first: usize, n: usize) -> Self {
        let row_bytes = self.bytes.len() / self.shape[0];
        self.bytes = &self.bytes[first * row_bytes..(first + n) * row_bytes];
        self.shape[0] = n;
        self
    }

    fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The bytes with rows in the order of the Hugging Face checkpoints.
    fn ordered(&self) -> Result<Cow<'s, [u8]>, Error> {
        match self.order {
            Order::AsTheyAre => Ok(Cow::Borrowed(self.bytes)),
            Order::Interleaved { heads } => self.halves_apart(heads).map(Cow::Owned),
            Order::Columns { columns, first, step } => Ok(Cow::Owned(self.turned(columns, first, step))),
            Order::Scaled { scales, first, step } => Ok(Cow::Owned(self.scaled(scales, first, step))),
        }
    }

    fn turned(&self, columns: usize, first: usize, step: usize) -> Vec<u8> {
        let (_, size) = self.encoding.block();
        let mut turned = Vec::with_capacity(self.shape.iter().product::<usize>() * size);
        for row in 0..self.shape[0] {
            let column = size * (first + row * step);
            let elements = self.bytes.chunks_exact(columns * size).map(|line| &line[column..column + size]);
            elements.for_each(|element| turned.extend_from_slice(element));
        }
        turned
    }

    /// Blocks as ggml has them: the scale, and in each byte codes that are 16 apart where the file has neighbours.
    fn scaled(&self, scales: &[u8], first: usize, step: usize) -> Vec<u8> {
        const CODES: usize = 16;
        let per_row = self.row_len() / 32;
        let mut all = Vec::with_capacity(self.shape[0] * per_row * (1 + CODES));
        for row in 0..self.shape[0] {
            let row = (first + row * step) * per_row..(first + row * step + 1) * per_row;
            let blocks = self.bytes[row.start * CODES..row.end * CODES].chunks_exact(CODES);
            for (scale, block) in scales[row].iter().zip(blocks) {
                all.push(*scale);
                let code = |i: usize| block[i / 2] >> (4 * (i % 2)) & 15;
                all.extend((0..CODES).map(|i| code(i) | code(i + CODES) << 4));
            }
        }
        all
    }

    /// Whole rows move, so any encoding does: row `2i + h` of a head (half `h` of pair `i`) goes to row
    /// `h * dim / 2 + i`.
    fn halves_apart(&self, heads: usize) -> Result<Vec<u8>, Error> {
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
        Ok(ordered)
    }

    /// Every element as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        let mut all = self.decoded()?;
        if self.factor != 1.0 {
            all.iter_mut().for_each(|x| *x *= self.factor);
        }
        Ok(all)
    }

    /// Before the factor.
    fn decoded(&self) -> Result<Vec<f32>, Error> {
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

    /// The matrix as it will be held, before the factor: `[out, in]`. Only a change of encoding decodes it.
    fn matrix(&self, compute: &Compute, form: WeightForm) -> Result<Matrix, Error> {
        let resident = self.encoding.resident(form, self.row_len());
        let bytes = match resident {
            same if same == self.encoding.held() => repack::held(self.encoding, self.ordered()?),
            Packing::Q8_0 => Cow::Owned(repack::to_q8_0(&self.decoded()?)),
            _ => Cow::Owned(self.decoded()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        };
        let (inputs, rows) = self.shape.split_last().unwrap_or((&0, &[]));
        let packed = Matrix::pack(compute, resident, rows.iter().product(), *inputs, &bytes);
        packed.map_err(|error| Error::Malformed { file: self.name.clone(), what: error.to_string() })
    }

    pub fn to_linear(&self, compute: &Compute, form: WeightForm) -> Result<Linear, Error> {
        Ok(Linear::new(self.matrix(compute, form)?, self.factor))
    }
    pub fn to_embedding(&self, compute: &Compute, form: WeightForm) -> Result<Embedding, Error> {
        if self.factor != 1.0 {
            let what = format!("`{}` has a scale beside it; embeddings have none", self.name);
            return Err(Error::Malformed { file: self.name.clone(), what });
        }
        Ok(Embedding::new(self.matrix(compute, form)?))
    }
}
