//! One decoder for every family: what differs between them is data.
//!
//! ```text
//! x = embedding[tokens]
//! for each layer:
//!     h = norm(x);  q = rope(h·Wq);  an owner also: k = rope(h·Wk), v = h·Wv
//!     x += attend(q, k, v)·Wo          the cache writes k and v, and reads what q may see
//!     h = norm(x);  x += (silu(h·Wgate) * (h·Wup))·Wdown
//! logits = norm(x)·Whead               only of the rows that were asked for
//! ```
use super::rope::{Angles, RotaryEmbedding};
use crate::config::ModelConfig;
use crate::error::Error;
use crate::weights::{Embedding, Linear};
use kvist_backend::{Attend, BackendError, Layout, Tensor, TensorMut};
use kvist_cache::LayerId;
use kvist_cpu::linear::Inputs;
use kvist_cpu::{Compute, steps};

/// One layer's weights.
#[derive(Debug)]
pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    pub q: Linear,
    /// `None` for a layer that borrows K and V.
    pub kv: Option<(Linear, Linear)>,
    /// Per-head norms of q and k, before RoPE (Qwen3). A borrower has only the first.
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub o: Linear,
    pub mlp_norm: Vec<f32>,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
    pub rope: bool,
}

/// The weights of a model, ready to run. Knows nothing of caches: attention is a call it is handed.
#[derive(Debug)]
pub struct Decoder {
    pub(super) compute: Compute,
    pub(super) config: ModelConfig,
    pub(super) layout: Layout,
    pub(super) embedding: Embedding,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding is also the output layer.
    pub(super) head: Option<Linear>,
    pub(super) rope: RotaryEmbedding,
}

/// One step's tokens, and what is wanted of them.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    pub tokens: &'a [u32],
    pub positions: &'a [u32],
    /// Batch rows whose logits are computed, ascending.
    pub rows: &'a [u32],
    /// Layers whose output (the residual stream after them) is kept in [`Activations::taps`].
    pub taps: &'a [LayerId],
}

/// The buffers of a forward pass, recycled: one of these per session.
#[derive(Debug, Default)]
pub struct Activations {
    x: Vec<f32>, // [n_tokens, hidden]
    h: Vec<f32>, // [n_tokens, hidden]
    q: Vec<f32>, // [n_tokens, n_heads, head_dim]
    k: Vec<f32>, // [n_tokens, n_kv_heads, head_dim]
    v: Vec<f32>,
    attended: Vec<f32>,  // [n_tokens, n_heads, head_dim]
    projected: Vec<f32>, // [n_tokens, hidden]
    gate: Vec<f32>,      // [n_tokens, intermediate]
    up: Vec<f32>,
    angles: Angles,
    inputs: Inputs, // the input of a linear layer, as its kernel wants it
    /// `[rows, vocab]`, in the order of [`Batch::rows`].
    pub logits: Vec<f32>,
    /// `[n_tokens, hidden]` for each layer of [`Batch::taps`], in their order.
    pub taps: Vec<Vec<f32>>,
}

impl Activations {
    /// Bytes a forward pass of `n_tokens` tokens and `n_rows` rows of logits takes, the forms of the widest linear
    /// layer's input included. `None` if it overflows.
    pub fn bytes(config: &ModelConfig, n_tokens: usize, n_rows: usize) -> Option<u64> {
        let q = config.n_heads.checked_mul(config.head_dim)?;
        let kv = config.n_kv_heads.checked_mul(config.head_dim)?;
        let (hidden, wide) = (config.hidden, config.intermediate);
        // x, h, projected; q, attended; k, v; gate, up; cos, sin
        let held = [(3, hidden), (2, q), (2, kv), (2, wide), (1, config.head_dim)];
        let held = held.iter().try_fold(0usize, |sum, (n, width)| sum.checked_add(width.checked_mul(*n)?))?;
        let logits = config.vocab.checked_mul(n_rows)?;
        let floats = held.checked_mul(n_tokens)?.checked_add(logits)?;
        // The widest layer's input once more, in every form.
        let inputs = Inputs::bytes(n_tokens.max(n_rows), hidden.max(q).max(wide))?;
        u64::try_from(floats.checked_mul(size_of::<f32>())?.checked_add(inputs)?).ok()
    }
}

impl Decoder {
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// What multiplies.
    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Run one step. `attend` is called once per layer, in order; an error of it ends the pass. Tokens must lie
    /// inside the vocabulary.
    pub fn forward(
        &self,
        batch: Batch<'_>,
        attend: &mut dyn FnMut(Attend<'_>) -> Result<(), BackendError>,
        a: &mut Activations,
    ) -> Result<(), Error> {
        let (c, compute) = (&self.config, &self.compute);
        let (n, hidden, head_dim) = (batch.tokens.len(), c.hidden, c.head_dim);
        let (heads, kv_heads) = (c.n_heads, c.n_kv_heads);
        let scale = 1.0 / (head_dim as f32).sqrt();

        self.embedding.gather(batch.tokens, &mut a.x);
        a.h.resize(n * hidden, 0.0);
        a.attended.resize(n * heads * head_dim, 0.0);
        a.taps.resize_with(batch.taps.len(), Vec::new);
        self.rope.angles(batch.positions, &mut a.angles);

        for (l, layer) in self.layers.iter().enumerate() {
            steps::rms_norm(compute, &a.x, &layer.attention_norm, c.norm_eps, &mut a.h);
            let mut h = a.inputs.of(&a.h, hidden);
            layer.q.forward(compute, &mut h, &mut a.q);
            if let Some(norm) = &layer.q_norm {
                steps::rms_norm_in_place(compute, &mut a.q, norm, c.norm_eps);
            }
            if layer.rope {
                self.rope.apply(compute, &a.angles, &mut a.q, heads, head_dim);
            }
            let mut kv = None;
            if let Some((k, v)) = &layer.kv {
                k.forward(compute, &mut h, &mut a.k);
                v.forward(compute, &mut h, &mut a.v);
                if let Some(norm) = &layer.k_norm {
                    steps::rms_norm_in_place(compute, &mut a.k, norm, c.norm_eps);
                }
                if layer.rope {
                    self.rope.apply(compute, &a.angles, &mut a.k, kv_heads, head_dim);
                }
                kv = Some((Tensor::dense(&a.k, kv_heads, head_dim), Tensor::dense(&a.v, kv_heads, head_dim)));
            }
            attend(Attend {
                layer: LayerId(l as u16),
                q: Tensor::dense(&a.q, heads, head_dim),
                kv,
                out: TensorMut::dense(&mut a.attended, heads, head_dim),
                scale,
                softcap: None,
            })?;
            layer.o.forward(compute, &mut a.inputs.of(&a.attended, heads * head_dim), &mut a.projected);
            steps::add(compute, &mut a.x, &a.projected);

            steps::rms_norm(compute, &a.x, &layer.mlp_norm, c.norm_eps, &mut a.h);
            let mut h = a.inputs.of(&a.h, hidden);
            layer.gate.forward(compute, &mut h, &mut a.gate);
            layer.up.forward(compute, &mut h, &mut a.up);
            steps::swiglu(compute, &mut a.gate, &a.up);
            layer.down.forward(compute, &mut a.inputs.of(&a.gate, c.intermediate), &mut a.projected);
            steps::add(compute, &mut a.x, &a.projected);

            for (kept, _) in a.taps.iter_mut().zip(batch.taps).filter(|(_, tap)| tap.0 as usize == l) {
                kept.clear();
                kept.extend_from_slice(&a.x);
            }
        }

        // Logits of the wanted rows only: at 128k tokens of vocabulary the rest would cost more than the layers.
        self.logits(batch.rows, a);
        Ok(())
    }

    /// Logits of these rows of the pass that `a` was last in, in place of those that are there. Ascending. For more rows
    /// than there is room for at once.
    pub fn logits(&self, rows: &[u32], a: &mut Activations) {
        let (compute, hidden) = (&self.compute, self.config.hidden);
        for (i, &row) in rows.iter().enumerate() {
            let row = row as usize * hidden..(row as usize + 1) * hidden;
            let normed = &mut a.h[i * hidden..(i + 1) * hidden];
            steps::rms_norm(compute, &a.x[row], &self.norm, self.config.norm_eps, normed);
        }
        a.logits.clear();
        if !rows.is_empty() {
            let mut rows = a.inputs.of(&a.h[..rows.len() * hidden], hidden);
            match &self.head {
                Some(head) => head.forward(compute, &mut rows, &mut a.logits),
                None => self.embedding.logits(compute, &mut rows, &mut a.logits),
            }
        }
    }
}
