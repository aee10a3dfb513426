//! NumPy arrays as the rows that the engine's kernels take, where they lie. The only unsafe code of this crate.
#![allow(unsafe_code)]
use crate::errors::argument;
use half::{bf16, f16};
use kvist_device::{Rows, RowsMut, StridedShape};
use numpy::ndarray::{ArrayView4, ArrayViewMut4};
use numpy::{PyReadonlyArray4, PyReadwriteArray4};
use pyo3::prelude::*;

/// Rows to read, `[batch, tokens, heads, dim]` at any strides. bf16, which NumPy lacks, comes as uint16.
#[derive(FromPyObject)]
pub enum Read<'py> {
    F32(PyReadonlyArray4<'py, f32>),
    F16(PyReadonlyArray4<'py, f16>),
    Bf16(PyReadonlyArray4<'py, u16>),
}

/// Rows to write.
#[derive(FromPyObject)]
pub enum Write<'py> {
    F32(PyReadwriteArray4<'py, f32>),
    F16(PyReadwriteArray4<'py, f16>),
    Bf16(PyReadwriteArray4<'py, u16>),
}

/// Sizes and strides, and the number of elements from the first to the last.
fn shape(sizes: &[usize], strides: &[isize]) -> PyResult<(StridedShape, usize)> {
    let mut shape = StridedShape { sizes: [0; 4], strides: [0; 4] };
    shape.sizes.copy_from_slice(sizes);
    let mut extent = usize::from(!sizes.contains(&0));
    for (axis, (&size, &stride)) in sizes.iter().zip(strides).enumerate() {
        // The stride of an axis with one entry is never used.
        let stride = if size <= 1 {
            usize::from(axis == 3)
        } else {
            usize::try_from(stride).map_err(|_| negative())?
        };
        shape.strides[axis] = stride;
        extent += extent.min(1) * size.saturating_sub(1) * stride;
    }
    Ok((shape, extent))
}

fn negative() -> PyErr {
    argument("an array with negative strides: make it contiguous first")
}

/// The elements of a view, with those between its rows.
fn elements<'v, T, U>(view: &ArrayView4<'v, T>) -> PyResult<(&'v [U], StridedShape)> {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    let (shape, extent) = shape(view.shape(), view.strides())?;
    // SAFETY: the view is of one NumPy array, whose memory spans from its first element to the one at the largest index: with
    // strides that are not negative that is `extent` elements, all within one allocation and initialised. The array is borrowed
    // as read-only for as long as the view. U is T, or bf16 for u16: of the same size and alignment, and valid for every bit
    // pattern.
    Ok((unsafe { std::slice::from_raw_parts(view.as_ptr().cast(), extent) }, shape))
}

/// As [`elements`], to be written.
fn elements_mut<'v, T, U>(mut view: ArrayViewMut4<'v, T>) -> PyResult<(&'v mut [U], StridedShape)> {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    let (shape, extent) = shape(view.shape(), view.strides())?;
    // SAFETY: as in `elements`; the array is borrowed exclusively. Of the elements between its rows, which may belong to
    // another array, the kernels write none (`RowsMut`), and rows that overlap are refused.
    Ok((unsafe { std::slice::from_raw_parts_mut(view.as_mut_ptr().cast(), extent) }, shape))
}

impl Read<'_> {
    pub fn rows(&self) -> PyResult<Rows<'_>> {
        Ok(match self {
            Read::F32(array) => {
                let (data, shape) = elements(&array.as_array())?;
                Rows::F32(data, shape)
            }
            Read::F16(array) => {
                let (data, shape) = elements(&array.as_array())?;
                Rows::F16(data, shape)
            }
            Read::Bf16(array) => {
                let (data, shape) = elements::<u16, bf16>(&array.as_array())?;
                Rows::Bf16(data, shape)
            }
        })
    }
}

impl Write<'_> {
    pub fn rows(&mut self) -> PyResult<RowsMut<'_>> {
        Ok(match self {
            Write::F32(array) => {
                let (data, shape) = elements_mut(array.as_array_mut())?;
                RowsMut::F32(data, shape)
            }
            Write::F16(array) => {
                let (data, shape) = elements_mut(array.as_array_mut())?;
                RowsMut::F16(data, shape)
            }
            Write::Bf16(array) => {
                let (data, shape) = elements_mut::<u16, bf16>(array.as_array_mut())?;
                RowsMut::Bf16(data, shape)
            }
        })
    }
}
