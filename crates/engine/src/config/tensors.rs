//! Every tensor a model needs, by its Hugging Face name: the list that loading, checking and planning share.
use super::ModelConfig;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Embedding,
    /// `[out, in]`
    Linear,
    Norm,
    Bias,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub role: Role,
}

impl ModelConfig {
    /// All tensors, in the order of the layers. Borrowing layers have no K and V; a tied model has no `lm_head`.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut all = Vec::new();
        let mut push = |name: String, shape: &[usize], role: Role| {
            all.push(TensorSpec { name, shape: shape.to_vec(), role });
        };
        let (hidden, wide) = (self.hidden, self.intermediate);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        push("model.embed_tokens.weight".into(), &[self.vocab, hidden], Role::Embedding);
        for (l, layer) in self.layers.iter().enumerate() {
            let owns = layer.owner == l;
            let linears: [(&str, usize, usize, bool, bool); 7] = [
                ("self_attn.q_proj", q, hidden, true, self.qkv_bias),
                ("self_attn.k_proj", kv, hidden, owns, self.qkv_bias),
                ("self_attn.v_proj", kv, hidden, owns, self.qkv_bias),
                ("self_attn.o_proj", hidden, q, true, self.o_bias),
                ("mlp.gate_proj", wide, hidden, true, self.mlp_bias),
                ("mlp.up_proj", wide, hidden, true, self.mlp_bias),
                ("mlp.down_proj", hidden, wide, true, self.mlp_bias),
            ];
            for (part, rows, columns, present, bias) in linears {
                let name = format!("model.layers.{l}.{part}");
                if present {
                    push(format!("{name}.weight"), &[rows, columns], Role::Linear);
                }
                if present && bias {
                    push(format!("{name}.bias"), &[rows], Role::Bias);
                }
            }
            let norms: [(&str, usize, bool); 4] = [
                ("input_layernorm", hidden, true),
                ("post_attention_layernorm", hidden, true),
                ("self_attn.q_norm", self.head_dim, self.qk_norm),
                ("self_attn.k_norm", self.head_dim, self.qk_norm && owns),
            ];
            for (part, len, present) in norms {
                if present {
                    push(format!("model.layers.{l}.{part}.weight"), &[len], Role::Norm);
                }
            }
        }
        push("model.norm.weight".into(), &[hidden], Role::Norm);
        if !self.tie_embeddings {
            push("lm_head.weight".into(), &[self.vocab, hidden], Role::Linear);
        }
        all
    }
}
