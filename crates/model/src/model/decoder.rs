//! One decoder for all model families and devices. The differences between families are data.
//!
//! ```text
//! x = embedding[tokens]
//! for each layer:
//!     h = norm(x);  q = rope(h·Wq);  an owner also: k = rope(h·Wk), v = h·Wv
//!     x += attend(q, k, v)·Wo          the cache writes k and v, and reads what q may see
//!     h = norm(x);  x += mlp(h)        one, or the experts that a router picks
//! logits = norm(x)·Whead               only for the requested rows
//! ```
//! Some families also have: norms of q and k, norms after attention and MLP, GELU, softcaps, a scale of the embedding.
use super::draft::DraftInput;
use crate::config::ModelConfig;
use kvist_cache::{LayerId, StepPlan};
use kvist_device::*;
use std::sync::Arc;

/// One layer's weights.
pub(super) struct Layer<D: Device> {
    /// `None` in draft heads of EAGLE-1.
    pub attention_norm: Option<D::Vector>,
    pub q: D::Linear,
    /// `None` for a layer that reads another layer's K and V.
    pub kv: Option<(D::Linear, D::Linear)>,
    /// Per-head norms of q and k, before RoPE (Qwen3). A layer without its own K and V has only the first.
    pub q_norm: Option<D::Vector>,
    pub k_norm: Option<D::Vector>,
    pub o: D::Linear,
    /// Attention sink scores, one per head (gpt-oss).
    pub sinks: Option<D::Vector>,
    /// Norm of the attention output (Gemma 2 and 3).
    pub attention_post_norm: Option<D::Vector>,
    pub mlp_norm: D::Vector,
    pub mlp: Mlp<D>,
    /// Norm of the MLP output.
    pub mlp_post_norm: Option<D::Vector>,
    /// Index into the decoder's rotary embeddings.
    pub rope: Option<usize>,
}

pub(super) enum Mlp<D: Device> {
    Dense(GatedMlp<D>),
    Routed(Experts<D>),
}

/// The weights of a model on a device. A draft head may share embedding and output layer with its target.
pub(super) struct Decoder<D: Device> {
    pub config: ModelConfig,
    pub embedding: Arc<D::Linear>,
    /// The projection in front of the layer of a draft head.
    pub draft: Option<DraftInput<D>>,
    pub layers: Vec<Layer<D>>,
    /// `None` in draft heads of EAGLE-1.
    pub norm: Option<Arc<D::Vector>>,
    /// `None` if the embedding is also the output layer.
    pub head: Option<Arc<D::Linear>>,
    pub ropes: Vec<RopeTable>,
}

/// The buffers of a forward pass: those of [`ModelShape::buffers`].
pub(super) struct Activations<D: Device> {
    pub x: D::Buffer,
    pub h: D::Buffer,
    pub q: D::Buffer,
    pub k: D::Buffer,
    pub v: D::Buffer,
    attended: D::Buffer,
    pub projected: D::Buffer,
    gate: D::Buffer,
    up: D::Buffer,
    wanted: D::Buffer,
    /// Of draft heads.
    pub features: D::Buffer,
    pub state: D::Buffer,
    pub joined: D::Buffer,
}

impl<D: Device> Activations<D> {
    fn new(device: &D, shape: &ModelShape, limits: &StepLimits) -> Result<Self, DeviceError> {
        let [x, h, q, k, v, attended, projected, gate, up, wanted, features, state, joined] = shape.buffers();
        let buffer = |(rows, width)| device.buffer(rows, width, limits);
        Ok(Activations {
            x: buffer(x)?,
            h: buffer(h)?,
            q: buffer(q)?,
            k: buffer(k)?,
            v: buffer(v)?,
            attended: buffer(attended)?,
            projected: buffer(projected)?,
            gate: buffer(gate)?,
            up: buffer(up)?,
            wanted: buffer(wanted)?,
            features: buffer(features)?,
            state: buffer(state)?,
            joined: buffer(joined)?,
        })
    }
}

/// A decoder and its device.
pub(super) struct Loaded<D: Device> {
    pub device: Arc<D>,
    pub decoder: Arc<Decoder<D>>,
}

/// A decoder with KV pools and buffers.
pub(super) struct Running<D: Device> {
    pub device: Arc<D>,
    decoder: Arc<Decoder<D>>,
    pub stream: D::Stream,
    pools: D::Pools,
    pub activations: Activations<D>,
    last_submission: Ticket,
}

impl<D: Device> LoadedModel for Loaded<D> {
    fn device(&self) -> &dyn Footprint {
        &*self.device
    }
    fn open(
        &self,
        backend: &dyn Backend,
        spec: &PoolSpec,
        limits: &StepLimits,
    ) -> Result<Box<dyn Network>, DeviceError> {
        let Loaded { device, decoder } = self;
        let shape = decoder.config.shape();
        Ok(Box::new(Running {
            device: device.clone(),
            decoder: decoder.clone(),
            stream: device.stream(&shape, &decoder.ropes, limits)?,
            pools: device.kv_pools(backend, spec)?,
            activations: Activations::new(&**device, &shape, limits)?,
            last_submission: Ticket::START,
        }))
    }
}

impl<D: Device> Network for Running<D> {
    fn submit(&mut self, plan: &StepPlan, inputs: &StepInputs<'_>) -> Result<Ticket, DeviceError> {
        self.device.begin(&mut self.stream, &mut self.pools, plan, inputs)?;
        self.run_layers(plan, inputs)?;
        self.run_head();
        self.last_submission = self.device.submit(&mut self.stream)?;
        Ok(self.last_submission)
    }
    fn is_done(&self, ticket: Ticket) -> bool {
        self.device.is_done(&self.stream, ticket)
    }
    fn wait(&mut self, ticket: Ticket) -> Result<LayersRan, DeviceError> {
        self.device.wait(&mut self.stream, ticket)
    }
    fn output(&self) -> &StepOutput {
        D::output(&self.stream)
    }
    fn output_mut(&mut self) -> &mut StepOutput {
        D::output_mut(&mut self.stream)
    }
    fn recompute_rows(&mut self, rows: &[WantedRow]) -> Result<(), DeviceError> {
        self.device.want_rows(&mut self.stream, rows);
        self.run_head();
        self.last_submission = self.device.submit(&mut self.stream)?;
        self.device.wait(&mut self.stream, self.last_submission).map(drop)
    }
    fn pools(&self) -> &dyn Pools {
        self.pools.as_ref()
    }
    fn pools_mut(&mut self) -> &mut dyn Pools {
        self.pools.as_mut()
    }
    fn last_submission(&self) -> Ticket {
        self.last_submission
    }
}

impl<D: Device> Decoder<D> {
    pub fn norm<'a>(&self, weight: &'a D::Vector) -> Norm<'a, D> {
        Norm { weight, eps: self.config.norm_eps }
    }
}

impl<D: Device> Running<D> {
    /// The layers of one step: from its tokens to the residual stream.
    fn run_layers(&mut self, plan: &StepPlan, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        let decoder = self.decoder.clone();
        let (hidden, features) = (decoder.config.hidden, decoder.config.features);
        self.upload_given(decoder.draft.as_ref(), hidden, features, inputs)?;
        let scale = decoder.config.embedding_scale;
        self.device.embed(&mut self.stream, &decoder.embedding, scale, &mut self.activations.x);
        self.keep_taps(inputs.taps, EMBEDDING);
        for (l, layer) in decoder.layers.iter().enumerate() {
            let id = LayerId(l as u16);
            match &decoder.draft {
                None => self.project(&decoder, layer),
                Some(draft) => self.project_draft(&decoder, draft, layer, inputs.given),
            }
            self.run_attention(&decoder, plan, id, layer, inputs.mass.is_some())?;
            self.run_mlp(&decoder, layer);
            self.keep_taps(inputs.taps, id);
        }
        Ok(())
    }

    /// Keeps the residual stream for the taps that name `id`.
    fn keep_taps(&mut self, taps: &[LayerId], id: LayerId) {
        for (i, _) in taps.iter().enumerate().filter(|(_, tap)| **tap == id) {
            self.device.tap(&mut self.stream, i, &self.activations.x);
        }
    }

    /// Queries, keys and values of the normed residual stream.
    pub fn project(&mut self, decoder: &Decoder<D>, layer: &Layer<D>) {
        let Running { device, stream, activations: a, .. } = self;
        let norm = layer.attention_norm.as_ref().map(|norm| decoder.norm(norm));
        let mut project = |outs: &mut [(&D::Linear, &mut D::Buffer)]| match norm {
            Some(norm) => device.norm_matmul(stream, &a.x, norm, &mut a.h, outs),
            None => device.matmul(stream, &a.x, outs),
        };
        match &layer.kv {
            Some((k, v)) => project(&mut [(&layer.q, &mut a.q), (k, &mut a.k), (v, &mut a.v)]),
            None => project(&mut [(&layer.q, &mut a.q)]),
        }
    }

    fn run_attention(
        &mut self,
        decoder: &Decoder<D>,
        plan: &StepPlan,
        id: LayerId,
        layer: &Layer<D>,
        mass: bool,
    ) -> Result<(), DeviceError> {
        let Running { device, stream, pools, activations: a, .. } = self;
        let config = &decoder.config;
        let stores_kv = layer.kv.is_some();
        let queries_and_keys = [(&mut a.q, &layer.q_norm), (&mut a.k, &layer.k_norm)];
        for (x, norm) in queries_and_keys.into_iter().take(1 + usize::from(stores_kv)) {
            if let Some(norm) = norm {
                device.norm_in_place(stream, x, decoder.norm(norm));
            }
            if let Some(rope) = layer.rope {
                device.rope(stream, x, config.head_dim, rope);
            }
        }
        device.attend(
            stream,
            pools,
            plan,
            LayerAttention {
                layer: id,
                q: &a.q,
                kv: stores_kv.then_some((&a.k, &a.v)),
                out: &mut a.attended,
                head_dim: config.head_dim,
                scale: config.attention_scale,
                softcap: config.attention_softcap,
                sinks: layer.sinks.as_ref(),
            },
        )?;
        if mass {
            let queries = LayerQueries {
                layer: id,
                q: &a.q,
                head_dim: config.head_dim,
                scale: config.attention_scale,
                softcap: config.attention_softcap,
                sinks: layer.sinks.as_ref(),
            };
            device.attention_mass(stream, pools, plan, queries)?;
        }
        let post_norm = layer.attention_post_norm.as_ref().map(|norm| decoder.norm(norm));
        device.matmul_add(stream, &a.attended, &layer.o, post_norm, &mut a.projected, &mut a.x);
        Ok(())
    }

    fn run_mlp(&mut self, decoder: &Decoder<D>, layer: &Layer<D>) {
        let Running { device, stream, activations: a, .. } = self;
        let activation = decoder.config.activation;
        let norm = decoder.norm(&layer.mlp_norm);
        let post_norm = layer.mlp_post_norm.as_ref().map(|norm| decoder.norm(norm));
        match &layer.mlp {
            Mlp::Dense(mlp) => {
                let layers = [(&mlp.gate, &mut a.gate), (&mlp.up, &mut a.up)];
                device.norm_gated(stream, &a.x, norm, &mut a.h, activation, layers);
                device.matmul_add(stream, &a.gate, &mlp.down, post_norm, &mut a.projected, &mut a.x);
            }
            Mlp::Routed(experts) => {
                device.rms_norm(stream, &a.x, norm, &mut a.h);
                device.experts(stream, &a.h, experts, activation, &mut a.projected);
                if let Some(norm) = post_norm {
                    device.norm_in_place(stream, &mut a.projected, norm);
                }
                device.add(stream, &mut a.x, &a.projected);
            }
        }
    }

    /// Computes what the wanted rows ask for. With a vocabulary of 128k tokens, the logits of all rows would cost more than
    /// the layers.
    fn run_head(&mut self) {
        let Running { device, decoder, stream, activations: a, .. } = self;
        let head = decoder.head.as_ref().unwrap_or(&decoder.embedding);
        device.wanted_rows(stream, &a.x, &mut a.wanted);
        if let Some(norm) = &decoder.norm {
            device.norm_in_place(stream, &mut a.wanted, decoder.norm(norm));
        }
        device.logits(stream, &a.wanted, head, decoder.config.logit_softcap);
        device.answer_rows(stream);
    }
}
