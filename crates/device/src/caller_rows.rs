//! Rows in the caller's memory: f32, f16 or bf16, at any strides between rows.
use crate::budget::{MemoryBudget, Purpose, Reservation};
use crate::error::DeviceError;
use crate::tensor::{Tensor, TensorMut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::sync::Arc;

/// Sizes and strides of a tensor of rows, in the order batch, tokens, heads, elements of a row. Strides count elements of
/// the tensor. Token `t` of a step is token `t % sizes[1]` of batch entry `t / sizes[1]`.
///
/// The strides of PyTorch and DLPack fit as they are: a `[batch, heads, tokens, dim]` tensor swaps the two axes in the
/// middle, a `[tokens, heads, dim]` tensor is a batch of one. Strides may be 0 in rows that are only read (an expanded
/// axis).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedShape {
    pub sizes: [usize; 4],
    /// The last one must be 1: the elements of a row are contiguous.
    pub strides: [usize; 4],
}

impl StridedShape {
    /// A contiguous `[tokens, heads, dim]` tensor.
    pub const fn tokens_first(tokens: usize, heads: usize, dim: usize) -> Self {
        let token = heads.saturating_mul(dim);
        StridedShape {
            sizes: [1, tokens, heads, dim],
            strides: [tokens.saturating_mul(token), token, dim, 1],
        }
    }

    /// A contiguous `[batch, heads, tokens, dim]` tensor.
    pub const fn heads_first(batch: usize, heads: usize, tokens: usize, dim: usize) -> Self {
        let head = tokens.saturating_mul(dim);
        StridedShape {
            sizes: [batch, tokens, heads, dim],
            strides: [heads.saturating_mul(head), dim, head, 1],
        }
    }

    /// Checks that this is a tensor of `n_tokens × heads` rows of `dim` elements, and that it lies within `len`
    /// elements.
    fn check(&self, what: &'static str, len: usize, needed: [usize; 3]) -> Result<(), DeviceError> {
        let [batch, tokens, heads, dim] = self.sizes;
        if batch.checked_mul(tokens) != Some(needed[0]) || [heads, dim] != needed[1..] {
            return Err(DeviceError::Sizes { what, found: self.sizes, expected: needed });
        }
        if dim > 1 && self.strides[3] != 1 {
            return Err(DeviceError::RowStride { what, stride: self.strides[3] });
        }
        let last = self.sizes.iter().zip(self.strides).try_fold(0usize, |sum, (size, stride)| {
            sum.checked_add(size.checked_sub(1)?.checked_mul(stride)?)
        });
        if self.sizes.contains(&0) || last.is_some_and(|last| last < len) {
            return Ok(());
        }
        Err(DeviceError::Shape { what, expected: self.sizes.to_vec(), elements: len })
    }

    /// Checks that no two rows share an element: every stride reaches past what the smaller ones span.
    fn check_disjoint(&self, what: &'static str) -> Result<(), DeviceError> {
        let mut axes = [0, 1, 2, 3].map(|axis| (self.strides[axis], self.sizes[axis]));
        axes.sort_unstable();
        let mut span = 1;
        for (stride, size) in axes.into_iter().filter(|(_, size)| *size > 1) {
            if stride < span {
                return Err(DeviceError::RowsOverlap { what, sizes: self.sizes, strides: self.strides });
            }
            span += (size - 1) * stride;
        }
        Ok(())
    }

    /// The strides of tokens and of heads, if the tokens of all batch entries are equally far apart.
    fn flat(&self) -> Option<(usize, usize)> {
        let [batch, token, head, _] = self.strides;
        match self.sizes {
            [1, ..] => Some((token, head)),
            [_, 1, ..] => Some((batch, head)),
            [_, tokens, ..] => (tokens.checked_mul(token) == Some(batch)).then_some((token, head)),
        }
    }

    /// The offsets of the rows, in the order batch, tokens, heads.
    fn starts(&self) -> impl Iterator<Item = usize> {
        let StridedShape { sizes, strides } = *self;
        let entries = (0..sizes[0]).map(move |entry| entry * strides[0]);
        let tokens = entries.flat_map(move |at| (0..sizes[1]).map(move |token| at + token * strides[1]));
        tokens.flat_map(move |at| (0..sizes[2]).map(move |head| at + head * strides[2]))
    }
}

/// Rows that a step reads, in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    F32(&'a [f32], StridedShape),
    F16(&'a [f16], StridedShape),
    Bf16(&'a [bf16], StridedShape),
}

/// Rows that a step writes, in the caller's memory. Elements between the rows are not written.
#[derive(Debug)]
pub enum RowsMut<'a> {
    F32(&'a mut [f32], StridedShape),
    F16(&'a mut [f16], StridedShape),
    Bf16(&'a mut [bf16], StridedShape),
}

impl<'a> Rows<'a> {
    /// See [`StridedShape::check`].
    pub(crate) fn check(&self, what: &'static str, needed: [usize; 3]) -> Result<(), DeviceError> {
        match self {
            Rows::F32(data, shape) => shape.check(what, data.len(), needed),
            Rows::F16(data, shape) => shape.check(what, data.len(), needed),
            Rows::Bf16(data, shape) => shape.check(what, data.len(), needed),
        }
    }

    /// The rows as a backend reads them: f32 rows in place, if two strides describe them; other rows converted into
    /// `buffer`. The rows have been checked.
    pub(crate) fn tensor<'t>(&self, buffer: &'t mut RowBuffer) -> Result<Tensor<'t>, DeviceError>
    where
        'a: 't,
    {
        match *self {
            Rows::F32(data, shape) => match shape.flat() {
                Some((token, head)) => Ok(Tensor::strided(data, token, head)),
                None => buffer.read(data, shape, |row, to| to.copy_from_slice(row)),
            },
            Rows::F16(data, shape) => buffer.read(data, shape, |row, to| row.convert_to_f32_slice(to)),
            Rows::Bf16(data, shape) => buffer.read(data, shape, |row, to| row.convert_to_f32_slice(to)),
        }
    }
}

impl RowsMut<'_> {
    /// Like [`Rows::check`]; also checks that the rows do not overlap.
    pub(crate) fn check(&self, what: &'static str, needed: [usize; 3]) -> Result<(), DeviceError> {
        let (len, shape) = match self {
            RowsMut::F32(data, shape) => (data.len(), shape),
            RowsMut::F16(data, shape) => (data.len(), shape),
            RowsMut::Bf16(data, shape) => (data.len(), shape),
        };
        shape.check(what, len, needed)?;
        shape.check_disjoint(what)
    }

    /// Calls `run` with f32 rows to write: those of the caller, if they are f32 and two strides describe them; otherwise
    /// those of `buffer`, which are then rounded to the caller's dtype, to nearest and ties to even. On `Err`, rows that
    /// go through the buffer have not changed. The rows have been checked.
    pub(crate) fn fill(
        self,
        buffer: &mut RowBuffer,
        run: impl FnOnce(TensorMut<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        match self {
            RowsMut::F32(data, shape) => match shape.flat() {
                Some((token, head)) => run(TensorMut::strided(data, token, head)),
                None => buffer.write(data, shape, run, |row, to| to.copy_from_slice(row)),
            },
            RowsMut::F16(data, shape) => {
                buffer.write(data, shape, run, |row, to| to.convert_from_f32_slice(row))
            }
            RowsMut::Bf16(data, shape) => {
                buffer.write(data, shape, run, |row, to| to.convert_from_f32_slice(row))
            }
        }
    }
}

/// Scratch for the rows of one argument in f32. Reserved and allocated for the largest step when it is first needed.
pub(crate) struct RowBuffer {
    rows: Vec<f32>, // [n_tokens, heads, dim], the largest of any step and layer
    largest: u64,
    reservation: Reservation,
}

impl RowBuffer {
    /// An empty buffer for at most `largest` elements.
    pub fn new(largest: u64, budget: &Arc<MemoryBudget>) -> Self {
        RowBuffer { rows: Vec::new(), largest, reservation: Reservation::empty(budget, Purpose::Scratch) }
    }

    /// The rows of a tensor of this shape, contiguous.
    fn rows(&mut self, shape: StridedShape) -> Result<&mut [f32], DeviceError> {
        let len: usize = shape.sizes.iter().product();
        if len > self.rows.len() {
            let wanted = self.largest.max(len as u64);
            let bytes = wanted.saturating_mul(4);
            self.reservation.grow(bytes - self.reservation.bytes())?;
            let refused = DeviceError::OutOfMemory { what: "converted rows", bytes };
            let more = usize::try_from(wanted).ok().map(|wanted| wanted - self.rows.len());
            if more.is_none_or(|more| self.rows.try_reserve_exact(more).is_err()) {
                self.reservation.shrink(bytes - self.rows.len() as u64 * 4);
                return Err(refused);
            }
            self.rows.resize(wanted as usize, 0.0);
        }
        Ok(&mut self.rows[..len])
    }

    /// Converts the rows in `data`.
    fn read<T>(
        &mut self,
        data: &[T],
        shape: StridedShape,
        convert: impl Fn(&[T], &mut [f32]),
    ) -> Result<Tensor<'_>, DeviceError> {
        let [_, _, heads, dim] = shape.sizes;
        let rows = self.rows(shape)?;
        for (start, row) in shape.starts().zip(rows.chunks_exact_mut(dim)) {
            convert(&data[start..start + dim], row);
        }
        Ok(Tensor::dense(rows, heads, dim))
    }

    /// Lets `run` fill the rows, then converts them to `data`.
    fn write<T>(
        &mut self,
        data: &mut [T],
        shape: StridedShape,
        run: impl FnOnce(TensorMut<'_>) -> Result<(), DeviceError>,
        convert: impl Fn(&[f32], &mut [T]),
    ) -> Result<(), DeviceError> {
        let [_, _, heads, dim] = shape.sizes;
        let rows = self.rows(shape)?;
        run(TensorMut::dense(rows, heads, dim))?;
        for (start, row) in shape.starts().zip(rows.chunks_exact(dim)) {
            convert(row, &mut data[start..start + dim]);
        }
        Ok(())
    }
}
