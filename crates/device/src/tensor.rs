//! Activations as passed to a backend: rows with token and head strides.
use crate::error::DeviceError;

/// `[n_tokens, n_heads, head_dim]` f32 rows. They need not be dense: K may be part of a fused QKV buffer.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    data: &'a [f32],
    token_stride: usize,
    head_stride: usize,
}

/// Like [`Tensor`], writable.
#[derive(Debug)]
pub struct TensorMut<'a> {
    data: &'a mut [f32],
    token_stride: usize,
    head_stride: usize,
}

/// Checks that `n_tokens × n_heads` rows of `head_dim` at these strides lie within `len` elements.
fn check(
    what: &'static str,
    len: usize,
    strides: (usize, usize),
    shape: (usize, usize, usize),
) -> Result<(), DeviceError> {
    let (n_tokens, n_heads, head_dim) = shape;
    let needed = match (n_tokens.checked_sub(1), n_heads.checked_sub(1)) {
        (Some(t), Some(h)) => t
            .checked_mul(strides.0)
            .and_then(|t| t.checked_add(h.checked_mul(strides.1)?)?.checked_add(head_dim)),
        _ => Some(0),
    };
    match needed {
        Some(needed) if needed <= len => Ok(()),
        _ => Err(DeviceError::Shape { what, expected: vec![n_tokens, n_heads, head_dim], elements: len }),
    }
}

impl<'a> Tensor<'a> {
    /// Strides in elements.
    pub fn strided(data: &'a [f32], token_stride: usize, head_stride: usize) -> Self {
        Tensor { data, token_stride, head_stride }
    }
    pub fn dense(data: &'a [f32], n_heads: usize, head_dim: usize) -> Self {
        Tensor { data, token_stride: n_heads * head_dim, head_stride: head_dim }
    }
    /// Checks that every row of the shape lies inside the data.
    pub fn check(
        &self,
        what: &'static str,
        n_tokens: usize,
        n_heads: usize,
        head_dim: usize,
    ) -> Result<(), DeviceError> {
        check(what, self.data.len(), (self.token_stride, self.head_stride), (n_tokens, n_heads, head_dim))
    }
    /// One row. [`check`](Self::check) guarantees that it exists.
    pub fn row(&self, token: usize, head: usize, head_dim: usize) -> &'a [f32] {
        &self.data[token * self.token_stride + head * self.head_stride..][..head_dim]
    }
}

impl<'a> TensorMut<'a> {
    /// Strides in elements.
    pub fn strided(data: &'a mut [f32], token_stride: usize, head_stride: usize) -> Self {
        TensorMut { data, token_stride, head_stride }
    }
    pub fn dense(data: &'a mut [f32], n_heads: usize, head_dim: usize) -> Self {
        TensorMut { data, token_stride: n_heads * head_dim, head_stride: head_dim }
    }
    /// Checks that every row of the shape lies inside the data.
    pub fn check(
        &self,
        what: &'static str,
        n_tokens: usize,
        n_heads: usize,
        head_dim: usize,
    ) -> Result<(), DeviceError> {
        check(what, self.data.len(), (self.token_stride, self.head_stride), (n_tokens, n_heads, head_dim))
    }
    /// One row. [`check`](Self::check) guarantees that it exists.
    pub fn row(&mut self, token: usize, head: usize, head_dim: usize) -> &mut [f32] {
        &mut self.data[token * self.token_stride + head * self.head_stride..][..head_dim]
    }
}
