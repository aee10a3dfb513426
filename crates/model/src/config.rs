//! Model architectures, read from either version of `config.json` or from the metadata of a GGUF file.
mod family;
mod gguf;
mod head;
mod json;
mod packing;
mod rope;
mod tensors;

pub use family::Family;
pub(crate) use gguf::gguf_permutes;
pub use head::{HeadConfig, HeadKind};
pub use rope::{Rope, RopeScaling};
pub use tensors::{Role, TensorSpec};

use crate::error::Error;
use crate::weights::Encoding;
pub use kvist_device::Activation;
use kvist_device::Routing;

/// The validated architecture of one model: sizes are positive and divide each other where they must, and every layer
/// that shares its KV names a valid owner.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    pub n_layers: usize,
    pub hidden: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub norm_eps: f32,
    /// Checkpoints store norm weights minus 1 (Gemma in safetensors).
    pub norms_less_one: bool,
    /// The rotary embeddings, which layers refer to by index.
    pub ropes: Vec<Rope>,
    /// Multiplies the token embeddings; 1 for most models.
    pub embedding_scale: f32,
    /// Multiplies attention scores.
    pub attention_scale: f32,
    /// Attention sinks: every head of every layer has a learned extra score without a value, which takes a share of the
    /// softmax.
    pub sinks: bool,
    /// `cap × tanh(score / cap)`, for attention scores and for logits.
    pub attention_softcap: Option<f32>,
    pub logit_softcap: Option<f32>,
    /// The embedding is also the output layer.
    pub tie_embeddings: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on the attention output projection.
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// RMSNorm over each head of q and k, before RoPE.
    pub qk_norm: bool,
    /// Also apply RMSNorm to the outputs of attention and MLP.
    pub post_norms: bool,
    /// Activation function of the MLP's gate.
    pub activation: Activation,
    /// Experts of the layers that are [routed](LayerConfig::routed).
    pub experts: Option<Experts>,
    pub layers: Vec<LayerConfig>,
    /// Number of positions the model was trained on.
    pub context: u32,
    pub bos: Option<u32>,
    pub eos: Vec<u32>,
    /// The dtype of the weights, as the checkpoint declares it.
    pub stored_dtype: Encoding,
    /// The dtype of the linear layers' weights, except those of the output layer.
    pub stored_linears: Encoding,
    /// The dtype of the experts' weights.
    pub stored_experts: Encoding,
    /// Width of the target's features that a draft head takes; 0 for other models.
    pub features: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Number of positions a query sees, its own included; `None` for all.
    pub window: Option<u32>,
    /// The layer whose K and V this layer uses: itself, or a lower layer.
    pub owner: usize,
    /// Index of the rotary embedding for q and k; `None` for NoPE layers.
    pub rope: Option<usize>,
    /// True if the layer has experts instead of one MLP.
    pub routed: bool,
}

/// The experts of routed layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    pub routing: Routing,
    /// The router and all experts have biases.
    pub bias: bool,
}

/// Upper bound on sizes, larger than any model's. Below it no product of two sizes overflows.
const ABSURD: usize = 1 << 28;

/// Upper bound on experts over all layers. Each expert has its own tensor names, which take memory before the weight
/// files are read.
const MAX_EXPERTS: usize = 1 << 17;

impl ModelConfig {
    /// Width of a layer's MLP, or of all experts that a token uses together.
    pub fn mlp_width(&self, layer: &LayerConfig) -> usize {
        match self.experts {
            Some(Experts { routing, .. }) if layer.routed => routing.used.saturating_mul(routing.width),
            _ => self.intermediate,
        }
    }

    /// Validates a config from any source.
    fn check(self, file: &str) -> Result<Self, Error> {
        let checked = (self.check_sizes())
            .and_then(|()| self.check_layers())
            .and_then(|()| self.check_experts())
            .and_then(|()| self.check_scales())
            .and_then(|()| self.ropes.iter().try_for_each(|rope| rope.check(self.head_dim)));
        match checked {
            Ok(()) => Ok(self),
            Err((field, problem)) => Err(Error::Config { file: file.into(), field: field.into(), problem }),
        }
    }

    fn check_sizes(&self) -> Checked {
        let sizes = [
            ("num_hidden_layers", self.n_layers),
            ("hidden_size", self.hidden),
            ("num_attention_heads", self.n_heads),
            ("num_key_value_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate),
            ("vocab_size", self.vocab),
            ("max_position_embeddings", self.context.min(ABSURD as u32) as usize), // huge for "no limit"
        ];
        for (field, size) in sizes {
            if size == 0 || size > ABSURD {
                return Err((field, format!("is {size}, which is out of range")));
            }
        }
        if self.n_layers > u16::MAX as usize {
            let problem = format!("is {}; kvist runs at most {}", self.n_layers, u16::MAX);
            return Err(("num_hidden_layers", problem));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let (heads, kv) = (self.n_heads, self.n_kv_heads);
            let problem = format!("is {kv}, which does not divide the {heads} query heads");
            return Err(("num_key_value_heads", problem));
        }
        if !self.head_dim.is_multiple_of(2) {
            let problem = format!("is {}; rotary embeddings need an even one", self.head_dim);
            return Err(("head_dim", problem));
        }
        if self.n_heads.saturating_mul(self.head_dim) > ABSURD {
            let problem = format!("is {} for {} heads, which is out of range", self.head_dim, self.n_heads);
            return Err(("head_dim", problem));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(("rms_norm_eps", format!("is {}", self.norm_eps)));
        }
        Ok(())
    }

    /// Checks windows, and which layers borrow K and V from which.
    fn check_layers(&self) -> Checked {
        if self.layers.len() != self.n_layers {
            let problem = format!("lists {} of {} layers", self.layers.len(), self.n_layers);
            return Err(("layer_types", problem));
        }
        for (l, layer) in self.layers.iter().enumerate() {
            if layer.window == Some(0) {
                return Err(("sliding_window", "is 0: a query must see itself".into()));
            }
            let owner = layer.owner;
            if owner > l || self.layers[owner].owner != owner {
                let problem =
                    format!("lets layer {l} borrow from {owner}, which is not an owner layer below it");
                return Err(("kv_owner_layer", problem));
            }
            if self.layers[owner].window != layer.window {
                let problem = format!("lets layer {l} borrow from {owner}, which has another window");
                return Err(("kv_owner_layer", problem));
            }
        }
        Ok(())
    }

    fn check_experts(&self) -> Checked {
        let Some(Experts { routing: Routing { n_experts: n, used, width, .. }, .. }) = self.experts else {
            return Ok(());
        };
        if n == 0 || n.saturating_mul(self.n_layers) > MAX_EXPERTS {
            return Err((
                "num_experts",
                format!("is {n} in {} layers, which is out of range", self.n_layers),
            ));
        }
        if used == 0 || used > n {
            return Err(("num_experts_per_tok", format!("is {used} of {n} experts")));
        }
        if width == 0 || width > ABSURD {
            return Err(("moe_intermediate_size", format!("is {width}, which is out of range")));
        }
        Ok(())
    }

    fn check_scales(&self) -> Checked {
        for (field, value) in [
            ("query_pre_attn_scalar", Some(self.attention_scale)),
            ("attn_logit_softcapping", self.attention_softcap),
            ("final_logit_softcapping", self.logit_softcap),
        ] {
            if value.is_some_and(|value| !value.is_finite() || value <= 0.0) {
                return Err((field, "must be a number above 0".into()));
            }
        }
        Ok(())
    }
}

/// `Err` has the field and what is wrong with it.
type Checked = Result<(), (&'static str, String)>;
