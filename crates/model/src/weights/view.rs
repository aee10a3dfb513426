//! A view of one tensor in a file; nothing is copied yet.
use crate::error::Error;
use kvist_device::weights::{Encoding, FileTensor, round};
use std::borrow::Cow;

/// A tensor of a file. `bytes` is exactly as long as shape and encoding require.
#[derive(Clone, Debug)]
pub struct View<'s> {
    /// The tensor's name in the file.
    pub name: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub encoding: Encoding,
    bytes: &'s [u8],
    order: Order<'s>,
    /// Multiplies every element.
    factor: f32,
}

/// The order of a tensor's rows in the file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order<'s> {
    AsTheyAre,
    /// As llama.cpp's converter writes q and k of the Llama family: for each head, the rows of its two halves
    /// alternate.
    Interleaved {
        heads: usize,
    },
    /// Transposed floats: row `r` is column `first + r × step` of `columns`.
    Columns {
        columns: usize,
        first: usize,
        step: usize,
    },
    /// MXFP4 with scales in a separate tensor and codes in neighbouring pairs: row `r` is the file's row
    /// `first + r × step`.
    Scaled {
        scales: &'s [u8],
        first: usize,
        step: usize,
    },
    /// Signed bytes with scales in a separate tensor: floats of `encoding`, one per row, or one for all rows.
    RowScaled {
        scales: &'s [u8],
        encoding: Encoding,
    },
}

impl<'s> View<'s> {
    /// The bytes in the file: those of the elements, and their scales if these are a tensor of their own.
    pub(crate) fn stored(&self) -> [&[u8]; 2] {
        match self.order {
            Order::Scaled { scales, .. } | Order::RowScaled { scales, .. } => [self.bytes, scales],
            _ => [self.bytes, &[]],
        }
    }

    /// `None` if the number of bytes does not match the shape.
    pub fn new(name: &str, shape: Vec<usize>, encoding: Encoding, bytes: &'s [u8]) -> Option<Self> {
        let fits = encoding.tensor_bytes(&shape) == Some(bytes.len()) && !bytes.is_empty();
        fits.then(|| View { name: name.into(), shape, encoding, bytes, order: Order::AsTheyAre, factor: 1.0 })
    }

    /// A tensor whose rows are in another order in the file. They must lie inside its bytes.
    pub(super) fn ordered_by(
        name: &str,
        shape: Vec<usize>,
        encoding: Encoding,
        bytes: &'s [u8],
        order: Order<'s>,
    ) -> Self {
        View { name: name.into(), shape, encoding, bytes, order, factor: 1.0 }
    }

    /// The bytes as in the file.
    pub(super) fn bytes(&self) -> &'s [u8] {
        self.bytes
    }

    /// Marks the rows as those of `heads` heads with the two halves of each interleaved.
    pub(super) fn interleaved(mut self, heads: usize) -> Self {
        self.order = Order::Interleaved { heads };
        self
    }

    /// Multiplies every element by `factor`.
    pub(super) fn times(mut self, factor: f32) -> Self {
        self.factor = factor;
        self
    }

    /// Reduces the number of dimensions by merging the slowest ones.
    pub(super) fn merged(mut self, dimensions: usize) -> Self {
        while self.shape.len() > dimensions.max(1) {
            let slowest = self.shape.remove(0);
            self.shape[0] *= slowest;
        }
        self
    }

    /// The `n` rows from `first` on. Panics if there are fewer.
    pub(super) fn rows(mut self, first: usize, n: usize) -> Self {
        let row_bytes = self.bytes.len() / self.shape[0];
        self.bytes = &self.bytes[first * row_bytes..(first + n) * row_bytes];
        if let Order::RowScaled { scales, encoding } = &mut self.order {
            let size = encoding.block().1;
            if scales.len() > size {
                *scales = &scales[first * size..(first + n) * size];
            }
        }
        self.shape[0] = n;
        self
    }

    fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The bytes with rows in the order of Hugging Face checkpoints.
    fn ordered(&self) -> Result<Cow<'s, [u8]>, Error> {
        match self.order {
            Order::AsTheyAre => Ok(Cow::Borrowed(self.bytes)),
            Order::Interleaved { heads } => self.halves_apart(heads).map(Cow::Owned),
            Order::Columns { columns, first, step } => Ok(Cow::Owned(self.transposed(columns, first, step))),
            Order::Scaled { scales, first, step } => Ok(Cow::Owned(self.scaled(scales, first, step))),
            Order::RowScaled { scales, encoding } => Ok(Cow::Owned(self.row_scaled(scales, encoding))),
        }
    }

    fn transposed(&self, columns: usize, first: usize, step: usize) -> Vec<u8> {
        let (_, size) = self.encoding.block();
        let mut transposed = Vec::with_capacity(self.shape.iter().product::<usize>() * size);
        for row in 0..self.shape[0] {
            let column = size * (first + row * step);
            let elements = self.bytes.chunks_exact(columns * size).map(|line| &line[column..column + size]);
            elements.for_each(|element| transposed.extend_from_slice(element));
        }
        transposed
    }

    /// Converts to ggml's blocks: the scale, then bytes with two codes that are 16 apart. In the file the two codes of
    /// a byte are neighbours.
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

    /// Converts to blocks that repeat the scale of their row.
    fn row_scaled(&self, scales: &'s [u8], encoding: Encoding) -> Vec<u8> {
        let shape = [scales.len() / encoding.block().1];
        let name = &self.name;
        let scales = FileTensor { name, shape: &shape, encoding, bytes: scales.into(), factor: 1.0 }.to_f32();
        let row = self.row_len();
        let (_, block) = self.encoding.block();
        let mut all = Vec::with_capacity(self.bytes.len() / 32 * block);
        for (row, scale) in self.bytes.chunks_exact(row).zip(scales.iter().cycle()) {
            round::put_int8(*scale, row, &mut all);
        }
        all
    }

    /// Moves whole rows, so it works for any encoding: row `2i + h` of a head (half `h` of pair `i`) goes to row
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

    /// Whether the elements are to be multiplied by a separate factor.
    pub(crate) fn has_factor(&self) -> bool {
        self.factor != 1.0
    }

    /// The tensor as devices read it: rows in the order of Hugging Face checkpoints.
    pub fn tensor(&self) -> Result<FileTensor<'_>, Error> {
        let (name, shape, bytes) = (&self.name, &self.shape, self.ordered()?);
        Ok(FileTensor { name, shape, encoding: self.encoding, bytes, factor: self.factor })
    }

    /// Every element as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        Ok(self.tensor()?.to_f32())
    }
}
