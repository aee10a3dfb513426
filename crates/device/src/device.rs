//! A device keeps weights, activations and KV pools, and computes the dozen operations of a decoder.
//!
//! A decoder is written once, generic over [`Device`] (`kvist_model::Decoder`). The type parameter ends there: callers
//! own a [`Network`](crate::Network), with one virtual call per step.
//!
//! Operations are recorded in a [`Device::Stream`]. No argument of an operation depends on the step: tokens, positions,
//! block tables and wanted rows are uploaded once, in [`Device::begin`]. A device can thus capture the operations of
//! one step and replay them for the next.
use crate::error::DeviceError;
use crate::pools::{Backend, PoolSpec, Pools, no_mass};
use crate::rows::{StepOutput, WantedRow};
use crate::step_io::*;
use crate::weights::{Encoding, FileTensor, WeightFormat};
use kvist_cache::{LayerId, StepPlan};

/// The sizes of a model that determine its buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    pub hidden: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    /// Width of the dense MLPs; 0 if there are none.
    pub intermediate: usize,
    /// The experts of routed layers.
    pub routing: Option<Routing>,
    /// Rotated pairs per head of each rotary embedding.
    pub rope_pairs: Vec<usize>,
    /// Width of the features that a draft head is given ([`Given::Features`]); 0 for other models.
    pub features: usize,
}

/// The experts of a layer: gated MLPs; each token uses a few of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    pub n_experts: usize,
    /// Experts per token.
    pub used: usize,
    /// Width of each expert.
    pub width: usize,
    /// Normalise the weights of the selected experts to a sum of 1.
    pub renormalise: bool,
}

/// How many rows a buffer has: one per token of the step, or one per wanted row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsOf {
    Tokens,
    Wanted,
}

impl RowsOf {
    /// Rows of the largest step.
    pub fn max(self, limits: &StepLimits) -> usize {
        match self {
            RowsOf::Tokens => limits.max_tokens,
            RowsOf::Wanted => limits.max_rows,
        }
    }
}

impl ModelShape {
    /// Every buffer of a decoder's forward pass, with its width in elements.
    pub fn buffers(&self) -> [(RowsOf, usize); 13] {
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let given = if self.features > 0 { self.hidden } else { 0 };
        [
            (RowsOf::Tokens, self.hidden),       // the residual stream
            (RowsOf::Tokens, self.hidden),       // normed
            (RowsOf::Tokens, q),                 // queries
            (RowsOf::Tokens, kv),                // keys
            (RowsOf::Tokens, kv),                // values
            (RowsOf::Tokens, q),                 // output of attention
            (RowsOf::Tokens, self.hidden),       // output of a block, before it is added
            (RowsOf::Tokens, self.intermediate), // gate
            (RowsOf::Tokens, self.intermediate), // up
            (RowsOf::Wanted, self.hidden),       // the rows whose logits are wanted
            (RowsOf::Tokens, self.features),     // a draft head's features
            (RowsOf::Tokens, given),             // its hidden states
            (RowsOf::Tokens, 2 * given),         // embeddings and hidden states side by side
        ]
    }

    /// Elements of all [`buffers`](Self::buffers) at the largest step. `None` on overflow.
    pub fn buffer_elements(&self, limits: &StepLimits) -> Option<usize> {
        self.buffers()
            .iter()
            .try_fold(0usize, |sum, (rows, width)| sum.checked_add(rows.max(limits).checked_mul(*width)?))
    }
}

/// The activation of a gated MLP, and how it is combined with the gated values (Shazeer, 2020).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`, `silu(x) = x * sigmoid(x)`
    Silu,
    /// `gelu(gate) * up`, tanh approximation (Hendrycks and Gimpel, 2016)
    Gelu,
    /// `g * sigmoid(1.702 g) * (u + 1)`, with `g = min(gate, limit)` and `u` = `up` clamped to ±`limit` (gpt-oss)
    Clamped { limit: f32 },
}

/// One rotary position embedding (Su et al., 2021), in the half-split form of the Hugging Face checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// `[pairs]`: the first `2 × pairs` elements of a head are rotated.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies cos and sin (YaRN); 1 otherwise.
    pub attention_factor: f32,
}

/// The properties of a device that schedulers and guarantees depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: &'static str,
    /// Whether a row's results depend only on that row, never on the rest of its batch. Guarantees such as "the same
    /// text alone and in a batch" hold only on such devices.
    pub batch_invariant: bool,
    /// Whether the device computes in the host's memory. Its budget is then the host's or a part of it.
    pub unified_memory: bool,
}

/// The bytes that a model takes on a device, before anything is loaded. The part of a device without type parameters.
pub trait Footprint: Send + Sync {
    fn info(&self) -> DeviceInfo;

    /// Refuses a model that the device cannot run as a whole, and names what is missing. There is no silent fallback.
    fn supports(&self, shape: &ModelShape) -> Result<(), DeviceError>;

    /// Bytes in memory of a linear layer's weights without its bias, or of an embedding table. `None` on overflow, or
    /// if rows are not whole blocks.
    fn weight_bytes(&self, shape: &[usize], stored: Encoding, format: WeightFormat) -> Option<u64>;

    /// Most bytes in memory of all weights of a model, which have `weights` bytes together: more than these where the device divides
    /// memory into larger parts.
    fn all_weight_bytes(&self, weights: u64) -> u64 {
        weights
    }

    /// Bytes of the buffers, uploads and outputs of the largest step: exactly what [`Device::buffer`] and
    /// [`Device::stream`] allocate for a decoder of this shape. `None` on overflow.
    fn activation_bytes(&self, shape: &ModelShape, limits: &StepLimits) -> Option<u64>;

    /// Bytes that [taps](StepInputs::taps) take in addition, from the first step that has some on, if a token's rows of all of them have
    /// `width` elements. A device that counts none says 0. `None` on overflow.
    fn tap_bytes(&self, _width: usize, _limits: &StepLimits) -> Option<u64> {
        Some(0)
    }

    /// How many of the [`activation_bytes`](Self::activation_bytes) lie in the host's memory, on a device that has its own:
    /// what is uploaded and read back. `None` on overflow.
    fn host_bytes(&self, _shape: &ModelShape, _limits: &StepLimits) -> Option<u64> {
        Some(0)
    }

    /// Whether the device still works. A failure stays.
    ///
    /// # Errors
    /// The first failure: nothing computed since is returned. The process has to be started again.
    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Whether steps can return how much attention each cell receives ([`StepInputs::mass`]).
    fn returns_attention_mass(&self) -> bool {
        false
    }

    /// Whether blocks can be in memory of the host that is locked for them, and that the device copies from and to by itself
    /// ([`Pools::pin_host`](crate::Pools::pin_host)).
    fn pins_blocks(&self) -> bool {
        false
    }

    /// The name of the GPU; `None` for the CPU.
    fn adapter(&self) -> Option<&str> {
        None
    }

    /// What the last bits of results depend on, besides inputs: the device, its instruction set, settings. Results that are
    /// compared or exchanged bit by bit come from devices with the same one.
    fn numerics(&self) -> String {
        format!("{} {}", self.info().name, self.adapter().unwrap_or_default())
    }
}

/// A gated MLP's weights.
pub struct GatedMlp<D: Device> {
    pub gate: D::Linear,
    pub up: D::Linear,
    pub down: D::Linear,
}

/// The weights of one expert's linear layer, and its bias.
pub type ExpertTensor<'t> = (FileTensor<'t>, Option<Vec<f32>>);

/// [`Device::stack`] of a device that keeps the experts' layers one by one.
///
/// # Errors
/// The first one, of `layers` or of `load`.
pub fn stack_each<'t, L, E: From<DeviceError>>(
    layers: impl Iterator<Item = Result<ExpertTensor<'t>, E>>,
    load: impl Fn(FileTensor<'t>, Option<Vec<f32>>) -> Result<L, DeviceError>,
) -> Result<Vec<L>, E> {
    let load = |layer: Result<ExpertTensor<'t>, E>| layer.and_then(|(tensor, bias)| Ok(load(tensor, bias)?));
    layers.map(load).collect()
}

/// A mixture of experts. `p = softmax(x·Wrouter)`, `y = Σ pᵢ · expertᵢ(x)` over the top few experts.
pub struct Experts<D: Device> {
    /// `[n_experts, hidden]`
    pub router: D::Linear,
    pub gate: D::Stack,
    pub up: D::Stack,
    pub down: D::Stack,
    pub routing: Routing,
}

/// An RMS norm: its weights and epsilon.
pub struct Norm<'a, D: Device> {
    pub weight: &'a D::Vector,
    pub eps: f32,
}

impl<D: Device> Clone for Norm<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for Norm<'_, D> {}

/// The attention of one layer.
pub struct LayerAttention<'a, D: Device> {
    pub layer: LayerId,
    /// `[n_tokens, n_heads, head_dim]`, after RoPE.
    pub q: &'a D::Buffer,
    /// `[n_tokens, n_kv_heads, head_dim]` each, K after RoPE. `None` for a layer that reads another layer's K and V.
    pub kv: Option<(&'a D::Buffer, &'a D::Buffer)>,
    /// `[n_tokens, n_heads, head_dim]`, overwritten.
    pub out: &'a mut D::Buffer,
    pub head_dim: usize,
    /// Multiplies every score.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// One extra score per query head, without a value (gpt-oss).
    pub sinks: Option<&'a D::Vector>,
}

/// The queries of one layer, as in [`LayerAttention`], for [`Device::attention_mass`].
#[allow(missing_docs)]
pub struct LayerQueries<'a, D: Device> {
    pub layer: LayerId,
    pub q: &'a D::Buffer,
    pub head_dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub sinks: Option<&'a D::Vector>,
}

/// A device: the memory and the operations of a decoder.
///
/// Buffers contain rows; a buffer's number of rows follows from the step ([`RowsOf`]). Operations overwrite `out`.
pub trait Device: Footprint + Sized + 'static {
    /// The weights of a linear layer with its bias, or an embedding table.
    type Linear: Send + Sync;
    /// The same linear layer of every expert: all gates, all ups, or all downs.
    type Stack: Send + Sync;
    /// The weights of a norm, or attention sinks.
    type Vector: Send + Sync;
    /// Activations, in the device's own element type.
    type Buffer: Send;
    /// Records the operations of a step, or executes them at once.
    type Stream: Send;
    /// The device's own pools, or those of any host backend.
    type Pools: AsRef<dyn Pools> + AsMut<dyn Pools> + Send;

    /// Loads `[outputs, inputs]` weights, and the bias of the outputs if the layer has one. An embedding table has none
    /// and no factor.
    fn linear(
        &self,
        tensor: FileTensor<'_>,
        format: WeightFormat,
        bias: Option<Vec<f32>>,
    ) -> Result<Self::Linear, DeviceError>;
    /// Loads the same linear layer of every expert, in order of expert number.
    ///
    /// # Errors
    /// The first error of the iterator. As [`linear`](Self::linear), or the layers differ in shape, encoding or factor, and the device
    /// needs them alike.
    fn stack<'t, E: From<DeviceError>>(
        &self,
        layers: impl ExactSizeIterator<Item = Result<ExpertTensor<'t>, E>>,
        format: WeightFormat,
    ) -> Result<Self::Stack, E>;
    fn vector(&self, values: Vec<f32>) -> Result<Self::Vector, DeviceError>;

    fn buffer(&self, rows: RowsOf, width: usize, limits: &StepLimits) -> Result<Self::Buffer, DeviceError>;
    fn stream(
        &self,
        shape: &ModelShape,
        ropes: &[RopeTable],
        limits: &StepLimits,
    ) -> Result<Self::Stream, DeviceError>;
    /// Makes KV pools for this device's attention. A host device accepts any host backend; others accept only
    /// their own.
    fn kv_pools(&self, backend: &dyn Backend, spec: &PoolSpec) -> Result<Self::Pools, DeviceError>;

    /// Starts a step: the pools grow, and everything that depends on the step is uploaded, once. On `Err` nothing
    /// visible has changed.
    fn begin(
        &self,
        stream: &mut Self::Stream,
        pools: &mut Self::Pools,
        plan: &StepPlan,
        inputs: &StepInputs<'_>,
    ) -> Result<(), DeviceError>;
    /// Replaces the wanted rows of the current step, ascending and at most as many as the limits allow.
    fn want_rows(&self, stream: &mut Self::Stream, rows: &[WantedRow]);

    /// Copies rows of the host into a buffer: as many as the step has tokens. Part of the step's uploads, like
    /// [`begin`](Self::begin), which precedes it.
    fn upload(&self, stream: &mut Self::Stream, rows: &[f32], out: &mut Self::Buffer);

    /// The rows of the step's tokens, times `scale`.
    fn embed(&self, stream: &mut Self::Stream, table: &Self::Linear, scale: f32, out: &mut Self::Buffer);
    /// `out = weight * x / sqrt(mean(x²) + eps)` for every row (Zhang and Sennrich, 2019).
    fn rms_norm(
        &self,
        stream: &mut Self::Stream,
        x: &Self::Buffer,
        norm: Norm<'_, Self>,
        out: &mut Self::Buffer,
    );
    /// [`rms_norm`](Self::rms_norm) in place, over rows as long as the weights: heads of q and k, or whole rows.
    fn norm_in_place(&self, stream: &mut Self::Stream, x: &mut Self::Buffer, norm: Norm<'_, Self>);
    /// `out = x·Wᵀ + b` for each of the layers, which share their input.
    fn matmul(
        &self,
        stream: &mut Self::Stream,
        x: &Self::Buffer,
        outs: &mut [(&Self::Linear, &mut Self::Buffer)],
    );
    /// Rotates every head of `x: [n_tokens, heads, head_dim]` by the angles of its token, from rotary embedding `rope`.
    fn rope(&self, stream: &mut Self::Stream, x: &mut Self::Buffer, head_dim: usize, rope: usize);
    /// `gate = activation(gate, up)`
    fn gated(
        &self,
        stream: &mut Self::Stream,
        activation: Activation,
        gate: &mut Self::Buffer,
        up: &Self::Buffer,
    );
    /// `out` = the weighted sum of the outputs of each token's experts, added in order of expert number.
    fn experts(
        &self,
        stream: &mut Self::Stream,
        x: &Self::Buffer,
        layer: &Experts<Self>,
        activation: Activation,
        out: &mut Self::Buffer,
    );
    /// Every row of `out` is the row of `a`, then that of `b`.
    fn concat(&self, stream: &mut Self::Stream, a: &Self::Buffer, b: &Self::Buffer, out: &mut Self::Buffer);
    /// `x += y`
    fn add(&self, stream: &mut Self::Stream, x: &mut Self::Buffer, y: &Self::Buffer);
    /// Writes the layer's K and V into the cells of the plan, then attends over exactly the cells that its reads name.
    fn attend(
        &self,
        stream: &mut Self::Stream,
        pools: &mut Self::Pools,
        plan: &StepPlan,
        call: LayerAttention<'_, Self>,
    ) -> Result<(), DeviceError>;
    /// Adds the attention that cells receive in this layer to the step's output ([`StepOutput::mass`]). Called after
    /// [`attend`](Self::attend), and only if the step asks for it.
    fn attention_mass(
        &self,
        stream: &mut Self::Stream,
        pools: &mut Self::Pools,
        plan: &StepPlan,
        call: LayerQueries<'_, Self>,
    ) -> Result<(), DeviceError> {
        let _ = (stream, pools, plan, call);
        Err(no_mass())
    }
    /// Keeps `x`, the residual stream after a layer, as tap `i` of the step's output.
    fn tap(&self, stream: &mut Self::Stream, i: usize, x: &Self::Buffer);
    /// Gathers the wanted rows of `x` into `out`.
    fn wanted_rows(&self, stream: &mut Self::Stream, x: &Self::Buffer, out: &mut Self::Buffer);
    /// The logits of the wanted rows, with a softcap if the model has one.
    fn logits(&self, stream: &mut Self::Stream, x: &Self::Buffer, head: &Self::Linear, softcap: Option<f32>);

    /// Computes the step's output from the logits: for each wanted row what it asks for ([`RowOutput`](crate::RowOutput)). By
    /// default the host computes it, row by row, which suits devices that compute while they record. A device with threads draws tokens
    /// on all of them ([`StepOutput::answer_rows_on`](crate::StepOutput::answer_rows_on)). Others override this with operations of their
    /// own, and read back only the results.
    fn answer_rows(&self, stream: &mut Self::Stream) {
        Self::output_mut(stream).answer_rows();
    }

    /// [`rms_norm`](Self::rms_norm) of `x`, then [`matmul`](Self::matmul) of that. `h` is room for the normed rows; what is there afterwards
    /// is undefined, because a device may not write them at all.
    fn norm_matmul(
        &self,
        stream: &mut Self::Stream,
        x: &Self::Buffer,
        norm: Norm<'_, Self>,
        h: &mut Self::Buffer,
        outs: &mut [(&Self::Linear, &mut Self::Buffer)],
    ) {
        self.rms_norm(stream, x, norm, h);
        self.matmul(stream, h, outs);
    }
    /// `h = norm(x)`, and then the gate of an MLP: `gate = activation(h·Wᵀ + b, up)`, where `up` is the other layer of `h`. What is in
    /// `h` and `up` afterwards is undefined.
    fn norm_gated(
        &self,
        stream: &mut Self::Stream,
        x: &Self::Buffer,
        norm: Norm<'_, Self>,
        h: &mut Self::Buffer,
        activation: Activation,
        [gate, up]: [(&Self::Linear, &mut Self::Buffer); 2],
    ) {
        self.norm_matmul(stream, x, norm, h, &mut [(gate.0, &mut *gate.1), (up.0, &mut *up.1)]);
        self.gated(stream, activation, gate.1, up.1);
    }
    /// `sum += norm(x·Wᵀ + b)`; `projected` is scratch, for the product before the norm. Most models have no norm here.
    fn matmul_add(
        &self,
        stream: &mut Self::Stream,
        x: &Self::Buffer,
        layer: &Self::Linear,
        norm: Option<Norm<'_, Self>>,
        projected: &mut Self::Buffer,
        sum: &mut Self::Buffer,
    ) {
        self.matmul(stream, x, &mut [(layer, projected)]);
        if let Some(norm) = norm {
            self.norm_in_place(stream, projected, norm);
        }
        self.add(stream, sum, projected);
    }

    /// Submits the recorded operations. A device that computes while it records has finished at this point.
    fn submit(&self, stream: &mut Self::Stream) -> Result<Ticket, DeviceError>;
    /// Whether the submission has finished. Never blocks.
    fn is_done(&self, stream: &Self::Stream, ticket: Ticket) -> bool;
    /// Waits for the submission. Its results are in [`output`](Self::output) afterwards.
    fn wait(&self, stream: &mut Self::Stream, ticket: Ticket) -> Result<LayersRan, DeviceError>;
    /// The output of the last step that was waited for.
    fn output(stream: &Self::Stream) -> &StepOutput;
    /// [`output`](Self::output), for samplers that modify logits in place.
    fn output_mut(stream: &mut Self::Stream) -> &mut StepOutput;
}
