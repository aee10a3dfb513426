//! The families kvist runs. What differs between them is data.

/// A model family. Its differences from Llama are what the table in this file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    SmolLm3,
}

/// What a family fixes where its config is silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    pub family: Family,
    /// `architectures` in config.json.
    pub class: &'static str,
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// `general.architecture` of a GGUF file.
    pub gguf: &'static str,
    /// Biases on q, k and v; `None` follows `attention_bias`, which also covers the output.
    pub qkv_bias: Option<bool>,
    pub qk_norm: bool,
    /// `sliding_window` counts without `use_sliding_window`.
    pub always_slides: bool,
    /// `tie_word_embeddings` and `rope_theta` where config.json is silent.
    pub tied: bool,
    pub theta: f64,
    /// Where config.json is silent and it is not hidden_size / heads.
    pub head_dim: Option<usize>,
    /// Where config.json is silent and it is not the number of heads.
    pub kv_heads: Option<usize>,
    /// `sliding_window` and the first layer that slides, where config.json is silent.
    pub window: Option<u32>,
    pub first_sliding: usize,
    /// llama.cpp's converter permutes the rows of q and k.
    pub gguf_permuted: bool,
}

const LLAMA: Traits = Traits {
    family: Family::Llama,
    class: "LlamaForCausalLM",
    model_type: "llama",
    gguf: "llama",
    qkv_bias: None,
    qk_norm: false,
    always_slides: false,
    tied: false,
    theta: 10_000.0,
    head_dim: None,
    kv_heads: None,
    window: None,
    first_sliding: 0,
    gguf_permuted: true,
};

/// SmolLM and SmolLM2 are Llama models; so are Mistral's in a GGUF file.
pub(super) const FAMILIES: [Traits; 5] = [
    LLAMA,
    Traits {
        family: Family::Mistral,
        class: "MistralForCausalLM",
        model_type: "mistral",
        gguf: "mistral",
        qkv_bias: Some(false),
        always_slides: true,
        kv_heads: Some(8),
        window: Some(4096),
        ..LLAMA
    },
    Traits {
        family: Family::Qwen2,
        class: "Qwen2ForCausalLM",
        model_type: "qwen2",
        gguf: "qwen2",
        qkv_bias: Some(true),
        kv_heads: Some(32),
        window: Some(4096),
        first_sliding: 28,
        gguf_permuted: false,
        ..LLAMA
    },
    Traits {
        family: Family::Qwen3,
        class: "Qwen3ForCausalLM",
        model_type: "qwen3",
        gguf: "qwen3",
        qk_norm: true,
        head_dim: Some(128),
        kv_heads: Some(32),
        window: Some(4096),
        first_sliding: 28,
        gguf_permuted: false,
        ..LLAMA
    },
    Traits {
        family: Family::SmolLm3,
        class: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        gguf: "smollm3",
        tied: true,
        theta: 2_000_000.0,
        kv_heads: Some(4),
        ..LLAMA
    },
];

/// The known architectures, for an error.
pub(super) fn known(name: fn(&Traits) -> &'static str) -> String {
    FAMILIES.iter().map(name).collect::<Vec<_>>().join(", ")
}
