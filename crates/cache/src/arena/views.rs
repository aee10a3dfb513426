//! The addresses of a handle's K and V in the arena's two buffers: offsets and strides, counted in elements.
//!
//! Blocks with all heads together have no dense `[heads, tokens, head_dim]` view of a handle: the step from the last
//! token of a block to the first of the next differs from the step within a block. A [`View`] therefore has four
//! strides; [`View::dense`] returns three strides if the buffer order allows it.
use super::Handle;
use std::marker::PhantomData;

/// The order of a buffer's dimensions, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferOrder {
    /// `[layers, blocks, heads, block_tokens, head_dim]`: a block of a layer is contiguous, cheap to copy.
    BlockMajor,
    /// `[heads, layers, blocks, block_tokens, head_dim]`: a handle of a head is contiguous, cheap to read.
    HeadMajor,
}

/// The shape of one buffer. K and V have one buffer each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub struct BufferLayout {
    pub order: BufferOrder,
    pub n_layers: u32,
    pub n_blocks: u32,
    pub n_kv_heads: u32,
    pub block_tokens: u32,
    pub head_dim: u32,
}

/// Marks views of the buffer of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys;
/// Marks views of the buffer of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Values;

/// A strided view of the tokens of one handle, in one layer of K or V: `[blocks, heads, block_tokens, head_dim]`. The
/// elements of `head_dim` are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<S> {
    /// Offset of head 0 of token 0 in the buffer.
    pub first: u64,
    /// Tokens that may be read.
    pub n_tokens: u32,
    /// Number of heads.
    pub n_heads: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Elements per row (head_dim).
    pub head_dim: u32,
    /// Step from one block to the next.
    pub block_stride: u64,
    /// Step from one head to the next.
    pub head_stride: u64,
    /// Step from one token to the next within a block.
    pub token_stride: u64,
    side: PhantomData<S>,
}

impl BufferLayout {
    /// Elements of one buffer. `None` if they exceed 64 bits.
    pub fn elements(&self) -> Option<u64> {
        let factors = [self.n_layers, self.n_blocks, self.n_kv_heads, self.block_tokens, self.head_dim];
        factors.iter().try_fold(1u64, |product, &factor| product.checked_mul(u64::from(factor)))
    }

    /// Bytes of K and V together. `None` if they exceed 64 bits.
    pub fn bytes(&self, bytes_per_element: u32) -> Option<u64> {
        self.elements()?.checked_mul(2)?.checked_mul(u64::from(bytes_per_element))
    }

    /// The K view of `handle` in `layer`. `None` if there is no such layer, if the handle exceeds the buffer or stores
    /// fewer than `n_tokens` tokens, or if the layout has no elements or more than 64 bits can count.
    pub fn keys(&self, layer: u32, handle: Handle, n_tokens: u32) -> Option<View<Keys>> {
        self.view(layer, handle, n_tokens)
    }

    /// The V view of `handle` in `layer`. See [`keys`](Self::keys).
    pub fn values(&self, layer: u32, handle: Handle, n_tokens: u32) -> Option<View<Values>> {
        self.view(layer, handle, n_tokens)
    }

    fn view<S>(&self, layer: u32, handle: Handle, n_tokens: u32) -> Option<View<S>> {
        let within = u64::from(handle.start) + u64::from(handle.len) <= u64::from(self.n_blocks);
        let fits = u64::from(n_tokens) <= handle.tokens(self.block_tokens);
        self.elements().filter(|&elements| elements > 0)?; // so no product below overflows: each divides it
        if layer >= self.n_layers || !within || !fits {
            return None;
        }
        let [n_layers, n_blocks, n_heads] = [self.n_layers, self.n_blocks, self.n_kv_heads].map(u64::from);
        let head_of_block = u64::from(self.block_tokens) * u64::from(self.head_dim);
        let (layer_stride, block_stride, head_stride) = match self.order {
            BufferOrder::BlockMajor => {
                (n_blocks * n_heads * head_of_block, n_heads * head_of_block, head_of_block)
            }
            BufferOrder::HeadMajor => {
                (n_blocks * head_of_block, head_of_block, n_layers * n_blocks * head_of_block)
            }
        };
        Some(View {
            first: u64::from(layer) * layer_stride + u64::from(handle.start) * block_stride,
            n_tokens,
            n_heads: self.n_kv_heads,
            block_tokens: self.block_tokens,
            head_dim: self.head_dim,
            block_stride,
            head_stride,
            token_stride: u64::from(self.head_dim),
            side: PhantomData,
        })
    }
}

impl<S> View<S> {
    /// Offset of the row of `head` at `token` (counted in the sequence, from 0); `head_dim` elements from there.
    pub fn row(&self, head: u32, token: u32) -> Option<u64> {
        if head >= self.n_heads || token >= self.n_tokens {
            return None;
        }
        let block = u64::from(token / self.block_tokens) * self.block_stride;
        let slot = u64::from(token % self.block_tokens) * self.token_stride;
        Some(self.first + block + u64::from(head) * self.head_stride + slot)
    }

    /// Strides of a `[heads, tokens, head_dim]` view, if there is one: the step between blocks must continue the step
    /// between tokens, or the view must lie in one block.
    pub fn dense(&self) -> Option<[u64; 3]> {
        let one_block = self.n_tokens <= self.block_tokens;
        let seamless = self.block_stride == u64::from(self.block_tokens) * self.token_stride;
        (one_block || seamless).then_some([self.head_stride, self.token_stride, 1])
    }

    /// The rows of `head` as contiguous pieces: offset and number of tokens.
    pub fn pieces(&self, head: u32) -> impl Iterator<Item = (u64, u32)> {
        let step = if self.dense().is_some() { self.n_tokens.max(1) } else { self.block_tokens };
        (0..self.n_tokens)
            .step_by(step as usize)
            .filter_map(move |token| Some((self.row(head, token)?, step.min(self.n_tokens - token))))
    }
}
