//! Machines and models as numbers, each with its source. To add one, add an entry to a table.

/// Peak performance of a machine. Real kernels reach a fraction of it: see [`super::Roofline::efficiency`].
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    pub name: String,
    /// Dense (not sparse). A multiply-add counts as two.
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
    pub memory_bytes: u64,
    /// Source of the figures.
    pub source: String,
}

/// (name, peak FLOP/s, memory bytes/s, memory bytes, source)
type HardwareRow = (&'static str, f64, f64, u64, &'static str);

const GB: u64 = 1_000_000_000;

const HARDWARE: &[HardwareRow] = &[
    (
        "h200-sxm",
        989.5e12,
        4.8e12,
        141 * GB,
        "NVIDIA H200 Tensor Core GPU datasheet: BF16 1,979 TFLOPS with sparsity, halved; 4.8 TB/s",
    ),
    (
        "h100-sxm",
        989.5e12,
        3.35e12,
        80 * GB,
        "NVIDIA H100 Tensor Core GPU datasheet: BF16 1,979 TFLOPS with sparsity, halved; 3.35 TB/s",
    ),
    (
        "a100-sxm-80gb",
        312e12,
        2.039e12,
        80 * GB,
        "NVIDIA A100 Tensor Core GPU datasheet: BF16 312 TFLOPS dense; 2,039 GB/s",
    ),
    (
        "l40s",
        362.05e12,
        864e9,
        48 * GB,
        "NVIDIA L40S datasheet: BF16 733 TFLOPS with sparsity, 362.05 dense; 864 GB/s",
    ),
    (
        "rtx-4090",
        165.2e12,
        1.008e12,
        24 * GB,
        "NVIDIA Ada GPU architecture whitepaper, appendix A: BF16 tensor, FP32 accumulate, 165.2 TFLOPS dense; 1,008 GB/s",
    ),
    (
        "epyc-9654",
        7.37e12,
        460.8e9,
        384 * GB,
        "AMD EPYC 9654: 96 cores × 2.4 GHz × 32 f32 FLOP per cycle (two 256-bit FMA); 12 channels DDR5-4800, 460.8 GB/s; memory as fitted",
    ),
];

impl Hardware {
    /// Names accepted by [`Hardware::preset`].
    pub fn names() -> impl Iterator<Item = &'static str> {
        HARDWARE.iter().map(|row| row.0)
    }

    pub fn preset(name: &str) -> Option<Hardware> {
        let &(name, flops_per_s, bytes_per_s, memory_bytes, source) =
            HARDWARE.iter().find(|r| r.0 == name)?;
        Some(Hardware { name: name.into(), flops_per_s, bytes_per_s, memory_bytes, source: source.into() })
    }
}

/// The shape of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    pub name: String,
    /// All weights, including the embedding table, without those of routed experts.
    pub parameters: u64,
    /// Parameters of the embedding table, which is looked up, not multiplied. 0 if the output layer uses the same
    /// table.
    pub lookup_parameters: u64,
    pub layers: u32,
    pub query_heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// 2.0 for bf16; 0.5625 for 4-bit weights with one scale per 32.
    pub bytes_per_weight: f64,
    /// Bytes per value of K or V.
    pub bytes_per_kv_value: f64,
    /// Those of the layers that have a sliding window; `None` if every layer sees every position.
    pub windowed: Option<WindowedLayers>,
    /// Those of the layers that read the K and V of another layer, and store none.
    pub borrowing_layers: u32,
    /// Routed experts; `None` for a dense model.
    pub experts: Option<ExpertShape>,
    /// Source of the figures.
    pub source: String,
}

/// Layers with a sliding window. If their windows differ, the largest stands for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowedLayers {
    pub layers: u32,
    /// Positions that a query sees, its own included.
    pub window: u32,
}

/// The routed experts of all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertShape {
    /// Weights of all experts of all layers.
    pub parameters: u64,
    pub bytes_per_weight: f64,
    /// Experts of a layer, at least 1.
    pub per_layer: u32,
    /// Experts of a layer that a token uses.
    pub per_token: u32,
}

impl ExpertShape {
    /// The share of the experts that a token uses.
    pub(crate) fn used_share(&self) -> f64 {
        f64::from(self.per_token) / f64::from(self.per_layer)
    }

    /// The share of the experts that at least one of `n_tokens` tokens uses, on average, if each token chooses evenly and for
    /// itself.
    pub(crate) fn read_share(&self, n_tokens: u64) -> f64 {
        1.0 - (1.0 - self.used_share()).powf(n_tokens as f64)
    }
}

/// (name, parameters, lookup parameters, [layers, query heads, KV heads, head dim], source)
type ModelRow = (&'static str, u64, u64, [u32; 4], &'static str);

const MODELS: &[ModelRow] = &[
    (
        "llama-2-7b",
        6_738_415_616,
        131_072_000,
        [32, 32, 32, 128],
        "config.json of meta-llama/Llama-2-7b-hf (vocabulary 32,000 × 4,096)",
    ),
    (
        "llama-3.1-8b",
        8_030_261_248,
        525_336_576,
        [32, 32, 8, 128],
        "config.json of meta-llama/Llama-3.1-8B (vocabulary 128,256 × 4,096)",
    ),
    (
        "llama-3.1-70b",
        70_553_706_496,
        1_050_673_152,
        [80, 64, 8, 128],
        "config.json of meta-llama/Llama-3.1-70B (vocabulary 128,256 × 8,192)",
    ),
    (
        "qwen2.5-7b",
        7_615_616_512,
        544_997_376,
        [28, 28, 4, 128],
        "config.json of Qwen/Qwen2.5-7B (vocabulary 152,064 × 3,584)",
    ),
    ("qwen2.5-0.5b", 494_032_768, 0, [24, 14, 2, 64], "config.json of Qwen/Qwen2.5-0.5B (tied embeddings)"),
];

impl ModelShape {
    /// Names accepted by [`ModelShape::preset`].
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODELS.iter().map(|row| row.0)
    }

    /// Weights, K and V in 16 bits. The fields are public, so callers can change that.
    pub fn preset(name: &str) -> Option<ModelShape> {
        let &(name, parameters, lookup_parameters, [layers, query_heads, kv_heads, head_dim], source) =
            MODELS.iter().find(|r| r.0 == name)?;
        Some(ModelShape {
            name: name.into(),
            parameters,
            lookup_parameters,
            layers,
            query_heads,
            kv_heads,
            head_dim,
            bytes_per_weight: 2.0,
            bytes_per_kv_value: 2.0,
            windowed: None,
            borrowing_layers: 0,
            experts: None,
            source: source.into(),
        })
    }

    /// Bytes of K and V per token of one layer: 2 · KV heads · head dim · bytes.
    pub(crate) fn layer_kv_bytes(&self) -> f64 {
        2.0 * f64::from(self.kv_heads) * f64::from(self.head_dim) * self.bytes_per_kv_value
    }

    /// Bytes of K and V per token over all layers that store them.
    pub fn kv_bytes_per_token(&self) -> f64 {
        f64::from(self.layers.saturating_sub(self.borrowing_layers)) * self.layer_kv_bytes()
    }

    /// Layers that see every position, and layers with a window.
    pub(crate) fn layers_by_sight(&self) -> (f64, f64) {
        let windowed = self.windowed.map_or(0, |windowed| windowed.layers.min(self.layers));
        (f64::from(self.layers - windowed), f64::from(windowed))
    }

    pub fn weight_bytes(&self) -> f64 {
        let experts = self.experts.map_or(0.0, |it| it.parameters as f64 * it.bytes_per_weight);
        self.parameters as f64 * self.bytes_per_weight + experts
    }
}
