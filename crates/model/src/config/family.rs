//! The model families that kvist supports. Their differences are data.
use super::Activation;

/// A model family. The table in this file lists its differences from Llama.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    SmolLm3,
    Gemma,
    Gemma2,
    Gemma3,
    Phi3,
    Mixtral,
    Qwen3Moe,
    GptOss,
}

/// The fixed properties of a family, and its defaults for what a config omits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    pub family: Family,
    /// `architectures` in config.json.
    pub class: &'static str,
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// The class of multimodal models that have this model as their `text_config`.
    pub seeing_class: Option<&'static str>,
    /// `general.architecture` of a GGUF file.
    pub gguf: &'static str,
    /// Biases on q, k and v. `None` follows `attention_bias`, which also applies to the output projection.
    pub qkv_bias: Option<bool>,
    /// Default of `attention_bias`. If true, the router and experts have biases too.
    pub biased: bool,
    /// Heads have attention sinks.
    pub sinks: bool,
    pub qk_norm: bool,
    /// Also apply RMSNorm to the outputs of attention and MLP.
    pub post_norms: bool,
    pub activation: Activation,
    /// Defaults: number of experts, experts per token, and their width if it is not `intermediate_size`.
    pub experts: Option<(usize, usize, Option<usize>)>,
    /// safetensors store norm weights minus 1, and embeddings are multiplied by the square root of their width.
    pub gemma: bool,
    /// `sliding_window` applies even without `use_sliding_window`.
    pub always_slides: bool,
    /// In models with a window, every n-th layer has full attention. `None`: the config decides.
    pub full_every: Option<usize>,
    /// Sliding-window layers have their own rotary embedding with this theta.
    pub sliding_theta: Option<f64>,
    /// `attn_logit_softcapping` and `final_logit_softcapping`.
    pub softcaps: (Option<f64>, Option<f64>),
    /// `query_pre_attn_scalar`; scores are divided by its square root. `None`: always the head dimension.
    pub query_scalar: Option<f64>,
    /// Defaults of `tie_word_embeddings` and `rope_theta`.
    pub tied: bool,
    pub theta: f64,
    /// Defaults of `rms_norm_eps` and `max_position_embeddings`.
    pub norm_eps: f64,
    pub context: usize,
    /// Default, if it is not hidden_size / heads.
    pub head_dim: Option<usize>,
    /// Defaults. With `None` the config must have these fields.
    pub heads: Option<usize>,
    pub vocab: Option<usize>,
    /// Default, if it is not the number of heads.
    pub kv_heads: Option<usize>,
    /// Defaults of `sliding_window` and of the first sliding-window layer.
    pub window: Option<u32>,
    pub first_sliding: usize,
    /// llama.cpp's converter permutes the rows of q and k.
    pub gguf_permuted: bool,
}

const LLAMA: Traits = Traits {
    family: Family::Llama,
    class: "LlamaForCausalLM",
    model_type: "llama",
    seeing_class: None,
    gguf: "llama",
    qkv_bias: None,
    biased: false,
    sinks: false,
    qk_norm: false,
    post_norms: false,
    activation: Activation::Silu,
    experts: None,
    gemma: false,
    always_slides: false,
    full_every: None,
    sliding_theta: None,
    softcaps: (None, None),
    query_scalar: None,
    tied: false,
    theta: 10_000.0,
    norm_eps: 1e-6,
    context: 2048,
    head_dim: None,
    heads: None,
    vocab: None,
    kv_heads: None,
    window: None,
    first_sliding: 0,
    gguf_permuted: true,
};

/// `base` under these names.
const fn named(
    family: Family,
    class: &'static str,
    model_type: &'static str,
    gguf: &'static str,
    base: Traits,
) -> Traits {
    Traits { family, class, model_type, gguf, ..base }
}

const GEMMA: Traits = Traits {
    activation: Activation::Gelu,
    gemma: true,
    tied: true,
    context: 8192,
    head_dim: Some(256),
    heads: Some(16),
    kv_heads: Some(16),
    vocab: Some(256_000),
    gguf_permuted: false,
    ..named(Family::Gemma, "GemmaForCausalLM", "gemma", "gemma", LLAMA)
};

const GEMMA2: Traits = Traits {
    post_norms: true,
    always_slides: true,
    full_every: Some(2),
    softcaps: (Some(50.0), Some(30.0)),
    query_scalar: Some(256.0),
    heads: Some(8),
    kv_heads: Some(4),
    window: Some(4096),
    ..named(Family::Gemma2, "Gemma2ForCausalLM", "gemma2", "gemma2", GEMMA)
};

/// SmolLM and SmolLM2 are Llama models, and so are Mistral's in GGUF files. Phi-4 is a Phi-3 model.
pub(super) const FAMILIES: [Traits; 12] = [
    LLAMA,
    Traits {
        qkv_bias: Some(false),
        always_slides: true,
        kv_heads: Some(8),
        window: Some(4096),
        ..named(Family::Mistral, "MistralForCausalLM", "mistral", "mistral", LLAMA)
    },
    Traits {
        qkv_bias: Some(true),
        kv_heads: Some(32),
        window: Some(4096),
        first_sliding: 28,
        gguf_permuted: false,
        ..named(Family::Qwen2, "Qwen2ForCausalLM", "qwen2", "qwen2", LLAMA)
    },
    Traits {
        qk_norm: true,
        head_dim: Some(128),
        kv_heads: Some(32),
        window: Some(4096),
        first_sliding: 28,
        gguf_permuted: false,
        ..named(Family::Qwen3, "Qwen3ForCausalLM", "qwen3", "qwen3", LLAMA)
    },
    Traits {
        qk_norm: true,
        experts: Some((128, 8, Some(768))),
        kv_heads: Some(4),
        window: Some(4096),
        first_sliding: 28,
        context: 32_768,
        gguf_permuted: false,
        ..named(Family::Qwen3Moe, "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe", LLAMA)
    },
    // GGUF files store it as Llama with experts.
    Traits {
        qkv_bias: Some(false),
        experts: Some((8, 2, None)),
        always_slides: true,
        kv_heads: Some(8),
        theta: 1_000_000.0,
        norm_eps: 1e-5,
        context: 131_072,
        ..named(Family::Mixtral, "MixtralForCausalLM", "mixtral", "llama", LLAMA)
    },
    Traits {
        biased: true,
        sinks: true,
        activation: Activation::Clamped { limit: 7.0 },
        experts: Some((128, 4, None)),
        always_slides: true,
        full_every: Some(2),
        head_dim: Some(64),
        kv_heads: Some(8),
        theta: 150_000.0,
        norm_eps: 1e-5,
        context: 131_072,
        window: Some(128),
        gguf_permuted: false,
        ..named(Family::GptOss, "GptOssForCausalLM", "gpt_oss", "gpt-oss", LLAMA)
    },
    Traits {
        tied: true,
        theta: 2_000_000.0,
        kv_heads: Some(4),
        ..named(Family::SmolLm3, "SmolLM3ForCausalLM", "smollm3", "smollm3", LLAMA)
    },
    GEMMA,
    GEMMA2,
    Traits {
        seeing_class: Some("Gemma3ForConditionalGeneration"),
        qk_norm: true,
        full_every: Some(6),
        sliding_theta: Some(10_000.0),
        softcaps: (None, None),
        theta: 1_000_000.0,
        context: 131_072,
        vocab: Some(262_208),
        ..named(Family::Gemma3, "Gemma3ForCausalLM", "gemma3_text", "gemma3", GEMMA2)
    },
    Traits {
        qkv_bias: Some(false),
        always_slides: true,
        norm_eps: 1e-5,
        context: 4096,
        heads: Some(32),
        vocab: Some(32_064),
        gguf_permuted: false,
        ..named(Family::Phi3, "Phi3ForCausalLM", "phi3", "phi3", LLAMA)
    },
];

impl Family {
    /// Its `model_type` in config.json, without the `_text` suffix that multimodal models add.
    pub fn name(self) -> &'static str {
        let name =
            FAMILIES.iter().find(|traits| traits.family == self).map_or("", |traits| traits.model_type);
        name.trim_end_matches("_text")
    }
}

/// The supported architectures, for an error message.
pub(super) fn known(name: fn(&Traits) -> &'static str) -> String {
    let mut names: Vec<_> = FAMILIES.iter().map(name).collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
