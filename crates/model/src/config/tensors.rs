//! Lists every tensor that a model needs, by its Hugging Face name. Loading, checking and planning share this list.
use super::{Family, ModelConfig};

/// The role of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Embedding,
    /// `[out, in]`
    Linear,
    /// Selects the experts of each token: `[n experts, in]`
    Router,
    /// One expert's weight: `[out, in]`
    Expert,
    Norm,
    Bias,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub role: Role,
    /// An alternative location: rows of a larger tensor.
    pub within: Option<Within>,
}

/// Rows in a larger tensor: the tensor's name within the layer, its number of rows, and the first row wanted.
type Place = (&'static str, usize, usize);

/// A projection: name within the layer, shape, whether the layer has it, whether it has a bias, and its alternative
/// location in some checkpoints.
type Projection = (&'static str, [usize; 2], bool, bool, Option<Place>);

/// Rows of a tensor that some checkpoints merge from several: q, k and v, or gate and up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Within {
    pub name: String,
    /// The tensor's number of rows, and (`first`) the first row wanted.
    pub rows: usize,
    pub first: usize,
}

impl ModelConfig {
    /// Gate, up and down projections of a layer with one MLP.
    pub(crate) fn mlp_names(&self, l: usize) -> [String; 3] {
        ["gate_proj", "up_proj", "down_proj"].map(|part| format!("model.layers.{l}.mlp.{part}"))
    }
    pub(crate) fn router_name(&self, l: usize) -> String {
        match self.family {
            Family::Mixtral => format!("model.layers.{l}.block_sparse_moe.gate"),
            Family::GptOss => format!("model.layers.{l}.mlp.router"),
            _ => format!("model.layers.{l}.mlp.gate"),
        }
    }
    /// Gate, up and down projections of an expert.
    pub(crate) fn expert_names(&self, l: usize, expert: usize) -> [String; 3] {
        let (module, parts) = match self.family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        parts.map(|part| format!("model.layers.{l}.{module}.experts.{expert}.{part}"))
    }

    /// All tensors, in layer order. Layers that use another layer's KV have no K and V; a tied model has no `lm_head`.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut all = Vec::new();
        let mut push = |name: String, shape: &[usize], role: Role, within: Option<Within>| {
            all.push(TensorSpec { name, shape: shape.to_vec(), role, within });
        };
        let (hidden, wide) = (self.hidden, self.intermediate);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        push("model.embed_tokens.weight".into(), &[self.vocab, hidden], Role::Embedding, None);
        for (l, layer) in self.layers.iter().enumerate() {
            let owns = layer.owner == l;
            let qkv = |first| owns.then_some(("self_attn.qkv_proj", q + 2 * kv, first));
            let gate_up = |first| Some(("mlp.gate_up_proj", 2 * wide, first));
            let dense = !layer.routed;
            let linears: [Projection; 7] = [
                ("self_attn.q_proj", [q, hidden], true, self.qkv_bias, qkv(0)),
                ("self_attn.k_proj", [kv, hidden], owns, self.qkv_bias, qkv(q)),
                ("self_attn.v_proj", [kv, hidden], owns, self.qkv_bias, qkv(q + kv)),
                ("self_attn.o_proj", [hidden, q], true, self.o_bias, None),
                ("mlp.gate_proj", [wide, hidden], dense, self.mlp_bias, gate_up(0)),
                ("mlp.up_proj", [wide, hidden], dense, self.mlp_bias, gate_up(wide)),
                ("mlp.down_proj", [hidden, wide], dense, self.mlp_bias, None),
            ];
            for (part, shape, present, bias, within) in linears {
                let named = |part: &str, kind: &str| format!("model.layers.{l}.{part}.{kind}");
                let within = |kind: &str| {
                    within.map(|(whole, rows, first)| Within { name: named(whole, kind), rows, first })
                };
                if present {
                    push(named(part, "weight"), &shape, Role::Linear, within("weight"));
                }
                if present && bias {
                    push(named(part, "bias"), &shape[..1], Role::Bias, within("bias"));
                }
            }
            if let Some(experts) = self.experts.filter(|_| layer.routed) {
                let router = self.router_name(l);
                push(format!("{router}.weight"), &[experts.routing.n_experts, hidden], Role::Router, None);
                if experts.bias {
                    push(format!("{router}.bias"), &[experts.routing.n_experts], Role::Bias, None);
                }
                let width = experts.routing.width;
                for expert in 0..experts.routing.n_experts {
                    let shapes = [[width, hidden], [width, hidden], [hidden, width]];
                    let parts = self.expert_names(l, expert).into_iter().zip(shapes);
                    for ((name, shape), part) in parts.zip(["gate_proj", "up_proj", "down_proj"]) {
                        let (rows, first) = (experts.routing.n_experts * shape[0], expert * shape[0]);
                        let within = |kind: &str| {
                            let name = format!("model.layers.{l}.mlp.experts.{part}.{kind}");
                            Some(Within { name, rows, first })
                        };
                        push(format!("{name}.weight"), &shape, Role::Expert, within("weight"));
                        if experts.bias {
                            push(format!("{name}.bias"), &shape[..1], Role::Bias, within("bias"));
                        }
                    }
                }
            }
            if self.sinks {
                push(format!("model.layers.{l}.self_attn.sinks"), &[self.n_heads], Role::Bias, None);
            }
            let norms: [(&str, usize, bool); 6] = [
                ("input_layernorm", hidden, true),
                ("post_attention_layernorm", hidden, true),
                ("pre_feedforward_layernorm", hidden, self.post_norms),
                ("post_feedforward_layernorm", hidden, self.post_norms),
                ("self_attn.q_norm", self.head_dim, self.qk_norm),
                ("self_attn.k_norm", self.head_dim, self.qk_norm && owns),
            ];
            for (part, len, present) in norms {
                if present {
                    push(format!("model.layers.{l}.{part}.weight"), &[len], Role::Norm, None);
                }
            }
        }
        push("model.norm.weight".into(), &[hidden], Role::Norm, None);
        if !self.tie_embeddings {
            push("lm_head.weight".into(), &[self.vocab, hidden], Role::Linear, None);
        }
        all
    }
}
