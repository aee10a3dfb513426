//! Shapes of attention: those of public models, or any other.
use crate::options::wrong_usage;
use kvist_cache::{GroupId, LayerId};
use kvist_device::{LayerSpec, Layout};
use serde::Serialize;

/// The attention parameters of a model.
#[derive(Serialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub layers: u16,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
}

/// For the head of a table.
impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shape { layers, heads, kv_heads, head_dim } = self;
        write!(f, "{layers} layers, {heads}:{kv_heads} heads of {head_dim}")
    }
}

const fn shape(layers: u16, heads: u32, kv_heads: u32, head_dim: u32) -> Shape {
    Shape { layers, heads, kv_heads, head_dim }
}

/// Values of their config.json files. a and b are the two shapes of docs/performance.md.
const NAMED: [(&str, Shape); 13] = [
    ("a", shape(12, 12, 12, 64)),
    ("b", shape(22, 32, 4, 64)),
    ("tinyllama-1.1b", shape(22, 32, 4, 64)),
    ("smollm2-135m", shape(30, 9, 3, 64)),
    ("llama-2-7b", shape(32, 32, 32, 128)),
    ("llama-3-8b", shape(32, 32, 8, 128)),
    ("llama-3.2-1b", shape(16, 32, 8, 64)),
    ("llama-3-70b", shape(80, 64, 8, 128)),
    ("mistral-7b", shape(32, 32, 8, 128)),
    ("qwen2-0.5b", shape(24, 14, 2, 64)),
    ("qwen2.5-7b", shape(28, 28, 4, 128)),
    ("qwen3-0.6b", shape(28, 16, 8, 128)),
    ("qwen3-8b", shape(36, 32, 8, 128)),
];

/// `4096,16384`, each at least 1.
pub fn parse_lengths(text: &str) -> Result<Vec<u32>, String> {
    let one = |part: &str| match part.trim().parse::<u32>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("`{}` is not a number of tokens: write them as 4096,16384", part.trim())),
    };
    text.split(',').map(one).collect()
}

#[derive(clap::Args, Clone, Debug)]
pub struct ShapeArgs {
    /// A model's attention by name: a (12 layers, 12:12 heads of 64), b (22 layers, 32:4 heads of 64), llama-3-8b, …
    #[arg(long, default_value = "a", value_name = "NAME")]
    shape: String,
    /// Layers, if they differ
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    layers: Option<u16>,
    /// Query heads, if they differ
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    heads: Option<u32>,
    /// KV heads, if they differ
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    kv_heads: Option<u32>,
    /// Elements of a head, if they differ
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    head_dim: Option<u32>,
}

impl ShapeArgs {
    pub fn get(&self) -> anyhow::Result<Shape> {
        let named = NAMED.iter().find(|(name, _)| *name == self.shape).ok_or_else(|| {
            let names: Vec<_> = NAMED.iter().map(|(name, _)| *name).collect();
            wrong_usage(format!("--shape {}: use one of {}", self.shape, names.join(", ")))
        })?;
        let base = named.1;
        let shape = Shape {
            layers: self.layers.unwrap_or(base.layers),
            heads: self.heads.unwrap_or(base.heads),
            kv_heads: self.kv_heads.unwrap_or(base.kv_heads),
            head_dim: self.head_dim.unwrap_or(base.head_dim),
        };
        shape.layout().check().map_err(|bad| wrong_usage(bad.to_string()))?;
        Ok(shape)
    }
}

impl Shape {
    pub fn layout(&self) -> Layout {
        let layer = |l| LayerSpec::new(GroupId(0), LayerId(l), self.kv_heads, self.head_dim);
        Layout { n_heads: self.heads, layers: (0..self.layers).map(layer).collect() }
    }
}
