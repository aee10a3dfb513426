//! One decoder for all model families. The differences between families are data.
//!
//! ```text
//! x = embedding[tokens]
//! for each layer:
//!     h = norm(x);  q = rope(h·Wq);  an owner also: k = rope(h·Wk), v = h·Wv
//!     x += attend(q, k, v)·Wo          the cache writes k and v, and reads what q may see
//!     h = norm(x);  x += mlp(h)        one, or the experts that a router picks
//! logits = norm(x)·Whead               only of the rows that were asked for
//! ```
//! Some families also have: norms of q and k, norms after attention and MLP, GELU, softcaps, a scale of the embedding.
use super::mlp::{self, Mlp};
use super::rope::{Angles, RotaryEmbedding};
use crate::config::{Activation, ModelConfig};
use crate::error::Error;
use crate::weights::{Embedding, Linear};
use kvist_cache::LayerId;
use kvist_cpu::linear::Inputs;
use kvist_cpu::steps::Gate;
use kvist_cpu::{Compute, steps};
use kvist_device::{Attend, BackendError, Layout, Tensor, TensorMut};

/// One layer's weights.
#[derive(Debug)]
pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    pub q: Linear,
    /// `None` for a layer that reads another layer's K and V.
    pub kv: Option<(Linear, Linear)>,
    /// Per-head norms of q and k, before RoPE (Qwen3). A layer without its own K and V has only the first.
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub o: Linear,
    /// Attention sink scores, one per head (gpt-oss).
    pub sinks: Option<Vec<f32>>,
    /// Norm of the attention output (Gemma 2 and 3).
    pub attention_post_norm: Option<Vec<f32>>,
    pub mlp_norm: Vec<f32>,
    pub mlp: Mlp,
    /// Norm of the MLP output.
    pub mlp_post_norm: Option<Vec<f32>>,
    /// Index into the decoder's rotary embeddings.
    pub rope: Option<usize>,
}

/// The weights of a model, ready to run. It knows nothing of caches: the caller passes attention in as a function.
#[derive(Debug)]
pub struct Decoder {
    pub(super) compute: Compute,
    pub(super) config: ModelConfig,
    pub(super) layout: Layout,
    pub(super) embedding: Embedding,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` if the embedding is also the output layer.
    pub(super) head: Option<Linear>,
    pub(super) ropes: Vec<RotaryEmbedding>,
}

/// The tokens of one step, and the outputs wanted.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    pub tokens: &'a [u32],
    pub positions: &'a [u32],
    /// Batch rows whose logits are computed, ascending.
    pub rows: &'a [u32],
    /// Layers whose output (the residual stream after them) is copied to [`Activations::taps`].
    pub taps: &'a [LayerId],
}

/// The buffers of a forward pass, one set per session. They are reused between passes.
#[derive(Debug, Default)]
pub struct Activations {
    x: Vec<f32>, // [n_tokens, hidden]
    h: Vec<f32>, // [n_tokens, hidden]
    q: Vec<f32>, // [n_tokens, n_heads, head_dim]
    k: Vec<f32>, // [n_tokens, n_kv_heads, head_dim]
    v: Vec<f32>,
    attended: Vec<f32>,  // [n_tokens, n_heads, head_dim]
    projected: Vec<f32>, // [n_tokens, hidden]
    mlp: mlp::Buffers,
    angles: Vec<Angles>, // one per rotary embedding
    inputs: Inputs,      // the input of a linear layer, converted for its kernel
    /// `[rows, vocab]`, in the order of [`Batch::rows`].
    pub logits: Vec<f32>,
    /// `[n_tokens, hidden]` for each layer of [`Batch::taps`], in their order.
    pub taps: Vec<Vec<f32>>,
}

impl Activations {
    /// Bytes that a forward pass of `n_tokens` tokens and `n_rows` rows of logits needs, including the converted inputs
    /// of the widest linear layer. `None` on overflow.
    pub fn bytes(config: &ModelConfig, n_tokens: usize, n_rows: usize) -> Option<u64> {
        let q = config.n_heads.checked_mul(config.head_dim)?;
        let kv = config.n_kv_heads.checked_mul(config.head_dim)?;
        let hidden = config.hidden;
        // x, h, projected; q, attended; k, v; cos, sin of each rotary embedding
        let held = [(3, hidden), (2, q), (2, kv), (config.ropes.len(), config.head_dim)];
        let held = held.iter().try_fold(0usize, |sum, (n, width)| sum.checked_add(width.checked_mul(*n)?))?;
        let logits = config.vocab.checked_mul(n_rows)?;
        let floats = held.checked_mul(n_tokens)?.checked_add(logits)?;
        // The widest layer's input again, in every converted format.
        let dense = if config.layers.iter().all(|layer| layer.routed) { 0 } else { config.intermediate };
        let inputs = Inputs::bytes(n_tokens.max(n_rows), hidden.max(q).max(dense))?;
        let mlp = mlp::Buffers::bytes(n_tokens, hidden, dense, config.experts.as_ref())?;
        u64::try_from(floats.checked_mul(size_of::<f32>())?.checked_add(inputs)?.checked_add(mlp)?).ok()
    }
}

impl Decoder {
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// The threads and instruction set that run the model.
    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Runs one step. Calls `attend` once per layer, in order; an error from it ends the pass. Tokens must lie inside
    /// the vocabulary.
    pub fn forward(
        &self,
        batch: Batch<'_>,
        attend: &mut dyn FnMut(Attend<'_>) -> Result<(), BackendError>,
        a: &mut Activations,
    ) -> Result<(), Error> {
        let (c, compute) = (&self.config, &self.compute);
        let (n, hidden, head_dim) = (batch.tokens.len(), c.hidden, c.head_dim);
        let (heads, kv_heads) = (c.n_heads, c.n_kv_heads);
        let gate = match c.activation {
            Activation::Silu => Gate::Silu,
            Activation::Gelu => Gate::Gelu,
            Activation::Clamped { limit } => Gate::Clamped { limit },
        };

        self.embedding.gather(batch.tokens, &mut a.x);
        if c.embedding_scale != 1.0 {
            steps::scale(compute, &mut a.x, c.embedding_scale);
        }
        a.h.resize(n * hidden, 0.0);
        a.attended.resize(n * heads * head_dim, 0.0);
        a.taps.resize_with(batch.taps.len(), Vec::new);
        a.angles.resize_with(self.ropes.len(), Angles::default);
        for (rope, angles) in self.ropes.iter().zip(&mut a.angles) {
            rope.angles(batch.positions, angles);
        }

        for (l, layer) in self.layers.iter().enumerate() {
            steps::rms_norm(compute, &a.x, &layer.attention_norm, c.norm_eps, &mut a.h);
            let mut h = a.inputs.of(&a.h, hidden);
            layer.q.forward(compute, &mut h, &mut a.q);
            if let Some(norm) = &layer.q_norm {
                steps::rms_norm_in_place(compute, &mut a.q, norm, c.norm_eps);
            }
            let turn = |x: &mut [f32], n_heads: usize| {
                if let Some(rope) = layer.rope {
                    self.ropes[rope].apply(compute, &a.angles[rope], x, n_heads, head_dim);
                }
            };
            turn(&mut a.q, heads);
            let mut kv = None;
            if let Some((k, v)) = &layer.kv {
                k.forward(compute, &mut h, &mut a.k);
                v.forward(compute, &mut h, &mut a.v);
                if let Some(norm) = &layer.k_norm {
                    steps::rms_norm_in_place(compute, &mut a.k, norm, c.norm_eps);
                }
                turn(&mut a.k, kv_heads);
                kv = Some((Tensor::dense(&a.k, kv_heads, head_dim), Tensor::dense(&a.v, kv_heads, head_dim)));
            }
            attend(Attend {
                layer: LayerId(l as u16),
                q: Tensor::dense(&a.q, heads, head_dim),
                kv,
                out: TensorMut::dense(&mut a.attended, heads, head_dim),
                scale: c.attention_scale,
                softcap: c.attention_softcap,
                sinks: layer.sinks.as_deref(),
            })?;
            layer.o.forward(compute, &mut a.inputs.of(&a.attended, heads * head_dim), &mut a.projected);
            if let Some(norm) = &layer.attention_post_norm {
                steps::rms_norm_in_place(compute, &mut a.projected, norm, c.norm_eps);
            }
            steps::add(compute, &mut a.x, &a.projected);

            steps::rms_norm(compute, &a.x, &layer.mlp_norm, c.norm_eps, &mut a.h);
            layer.mlp.forward(compute, gate, &a.h, &mut a.inputs, &mut a.mlp, &mut a.projected);
            if let Some(norm) = &layer.mlp_post_norm {
                steps::rms_norm_in_place(compute, &mut a.projected, norm, c.norm_eps);
            }
            steps::add(compute, &mut a.x, &a.projected);

            for (kept, _) in a.taps.iter_mut().zip(batch.taps).filter(|(_, tap)| tap.0 as usize == l) {
                kept.clear();
                kept.extend_from_slice(&a.x);
            }
        }

        // Compute logits of the wanted rows only: with a vocabulary of 128k tokens, the other rows would cost more than
        // the layers.
        self.logits(batch.rows, a);
        Ok(())
    }

    /// Computes the logits of these rows of the last pass that used `a`, and replaces those in `a.logits`. Rows are
    /// ascending. Call it repeatedly if the rows do not fit into `a` at once.
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
            if let Some(cap) = self.config.logit_softcap {
                steps::softcap(compute, &mut a.logits, cap);
            }
        }
    }
}
