//! What the model is: sizes, and the tensors that follow from them.
use anyhow::{Result, bail, ensure};

#[derive(Clone, Debug)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ff: usize,
    /// Of a layer, and of a token; 0: dense layers.
    pub experts: usize,
    pub experts_used: usize,
    pub vocab: usize,
    pub context: usize,
}

/// 134M parameters, every head with its own K and V: where attention weighs most against the matrices.
pub const A: Shape = Shape {
    layers: 12,
    hidden: 768,
    heads: 12,
    kv_heads: 12,
    head_dim: 64,
    ff: 2048,
    experts: 0,
    experts_used: 0,
    vocab: 32000,
    context: 32768,
};

/// 1.1G parameters, eight query heads to a KV head: the sizes of TinyLlama.
pub const B: Shape = Shape {
    layers: 22,
    hidden: 2048,
    heads: 32,
    kv_heads: 4,
    head_dim: 64,
    ff: 5632,
    experts: 0,
    experts_used: 0,
    vocab: 32000,
    context: 32768,
};

/// 256 bytes, two control tokens and the text of one merge.
const MIN_VOCAB: usize = 259;
/// Above this it is a mistyped size.
const MAX_PARAMETERS: u128 = 16_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ones, f32.
    Norm,
    Matrix,
    /// f32, as llama.cpp's converter writes it.
    Router,
    /// Rows of q and k: GGUF orders those of a head otherwise than Hugging Face does.
    Rotated {
        heads: usize,
    },
    Output,
}

/// One tensor under both of its names.
#[derive(Clone, Debug)]
pub struct Spec {
    pub hf: String,
    pub gguf: String,
    pub shape: Vec<usize>,
    pub kind: Kind,
}

impl Spec {
    /// Elements of a row: the last dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// A linear layer of a decoder block.
    pub fn is_linear(&self) -> bool {
        self.kind != Kind::Norm && self.hf.starts_with("model.layers.")
    }
}

impl Shape {
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("ff", self.ff),
            ("context", self.context),
        ];
        for (name, size) in sizes {
            ensure!(size > 0, "--{name} is 0");
            // Both formats store them in 32 bits.
            ensure!(u32::try_from(size).is_ok(), "--{name} is {size}, which no model has");
        }
        ensure!(self.layers <= usize::from(u16::MAX), "--layers is {}, which no model has", self.layers);
        ensure!(
            self.heads.is_multiple_of(self.kv_heads),
            "--heads {} is no multiple of --kv-heads {}",
            self.heads,
            self.kv_heads
        );
        ensure!(self.head_dim.is_multiple_of(2), "--head-dim is {}; rope turns pairs", self.head_dim);
        ensure!(
            self.vocab >= MIN_VOCAB && u32::try_from(self.vocab).is_ok(),
            "--vocab is {}; the tokenizer needs {MIN_VOCAB} at least, and ids have 32 bits",
            self.vocab
        );
        let (n, used) = (self.experts, self.experts_used);
        ensure!(
            used <= n && (used > 0) == (n > 0),
            "--experts-used is {used}; it must be from 1 to --experts ({n})"
        );
        ensure!(n <= usize::from(u16::MAX), "--experts is {n}, which no model has");
        let n = self.parameters();
        if n > MAX_PARAMETERS {
            bail!("these sizes make {n} parameters; more than {MAX_PARAMETERS} are taken for a mistake");
        }
        Ok(())
    }

    /// Cannot overflow: every factor has 32 bits, layers and experts 16.
    pub fn parameters(&self) -> u128 {
        let [layers, hidden, ff, vocab] = [self.layers, self.hidden, self.ff, self.vocab].map(|n| n as u128);
        let q = self.heads as u128 * self.head_dim as u128;
        let kv = self.kv_heads as u128 * self.head_dim as u128;
        let (experts, routers) = (self.experts.max(1) as u128, self.experts as u128);
        let layer = (2 * q + 2 * kv + 3 * ff * experts + routers + 2).saturating_mul(hidden);
        layers.saturating_mul(layer) + (2 * vocab + 1) * hidden
    }

    pub fn tensors(&self) -> Vec<Spec> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let spec = |hf: String, gguf: String, shape: &[usize], kind| Spec {
            hf: format!("{hf}.weight"),
            gguf: format!("{gguf}.weight"),
            shape: shape.to_vec(),
            kind,
        };
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        let embedding = [self.vocab, self.hidden];
        let mut all = vec![spec("model.embed_tokens".into(), "token_embd".into(), &embedding, Kind::Matrix)];
        for l in 0..self.layers {
            for (hf, gguf, shape, kind) in [
                ("input_layernorm", "attn_norm", &[self.hidden][..], Kind::Norm),
                ("self_attn.q_proj", "attn_q", &[q, self.hidden], Kind::Rotated { heads }),
                ("self_attn.k_proj", "attn_k", &[kv, self.hidden], Kind::Rotated { heads: kv_heads }),
                ("self_attn.v_proj", "attn_v", &[kv, self.hidden], Kind::Matrix),
                ("self_attn.o_proj", "attn_output", &[self.hidden, q], Kind::Matrix),
                ("post_attention_layernorm", "ffn_norm", &[self.hidden], Kind::Norm),
            ] {
                all.push(spec(format!("model.layers.{l}.{hf}"), format!("blk.{l}.{gguf}"), shape, kind));
            }
            let (n, ff, hidden) = (self.experts, self.ff, self.hidden);
            let layers = [
                ("mlp.gate_proj", "ffn_gate", [n, ff, hidden]),
                ("mlp.up_proj", "ffn_up", [n, ff, hidden]),
                ("mlp.down_proj", "ffn_down", [n, hidden, ff]),
            ];
            for (hf, gguf, shape) in layers {
                let (hf, gguf) = (format!("model.layers.{l}.{hf}"), format!("blk.{l}.{gguf}"));
                all.push(match n {
                    0 => spec(hf, gguf, &shape[1..], Kind::Matrix),
                    // The layers of all experts are one tensor.
                    _ => spec(hf, format!("{gguf}_exps"), &shape, Kind::Matrix),
                });
            }
            if n > 0 {
                let (hf, gguf) = (format!("model.layers.{l}.mlp.gate"), format!("blk.{l}.ffn_gate_inp"));
                all.push(spec(hf, gguf, &[n, hidden], Kind::Router));
            }
        }
        all.push(spec("model.norm".into(), "output_norm".into(), &[self.hidden], Kind::Norm));
        all.push(spec("lm_head".into(), "output".into(), &embedding, Kind::Output));
        all
    }
}
