//! Where the rows of a step's arguments lie in memory.
use super::POISON;
use crate::conformance::cases::Strides;
use kvist_device::Tensor;
use std::ops::Range;

/// The location of a `[n_tokens, n_heads, head_dim]` tensor in a buffer.
#[derive(Clone, Copy)]
pub(super) struct Place {
    at: usize,
    pub token_stride: usize,
    pub head_stride: usize,
    pub n_heads: usize,
}

impl Place {
    pub fn row(&self, token: usize, head: usize, head_dim: usize) -> Range<usize> {
        let at = self.at + token * self.token_stride + head * self.head_stride;
        at..at + head_dim
    }
    pub fn tensor<'a>(&self, data: &'a [f32]) -> Tensor<'a> {
        Tensor::strided(&data[self.at..], self.token_stride, self.head_stride)
    }
}

/// Places tensors with these numbers of heads in one buffer filled with NaN.
pub(super) fn lay(
    strides: Strides,
    n_tokens: usize,
    heads: &[usize],
    head_dim: usize,
) -> (Vec<f32>, Vec<Place>) {
    let mut len = 0;
    let mut places = Vec::new();
    let fused = heads.iter().sum::<usize>() * head_dim + 3;
    for &n_heads in heads {
        let (token_stride, head_stride, size) = match strides {
            Strides::Dense => (n_heads * head_dim, head_dim, n_tokens * n_heads * head_dim),
            Strides::Fused => (fused, head_dim, n_heads * head_dim),
            Strides::HeadMajor => (head_dim, n_tokens * head_dim, n_tokens * n_heads * head_dim),
            Strides::Padded => {
                let head = head_dim + 5;
                (n_heads * head + 7, head, n_tokens * (n_heads * head + 7))
            }
        };
        places.push(Place { at: len, token_stride, head_stride, n_heads });
        len += size;
    }
    let len = if strides == Strides::Fused { n_tokens * fused } else { len };
    (vec![f32::from_bits(POISON); len], places)
}
