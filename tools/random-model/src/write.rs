//! The two formats.
use crate::Dtype;
use crate::shape::{Kind, Shape, Spec};
use crate::{vocab, weights};
use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use safetensors::{Dtype as Stored, View};
use serde_json::json;
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

const THETA: f32 = 10000.0;
const EPS: f32 = 1e-5;

/// Written under another name and renamed when it is whole; removed if it never becomes so.
pub struct Partial {
    path: PathBuf,
    target: PathBuf,
}

impl Partial {
    pub fn new(target: &Path) -> Result<Self> {
        ensure!(
            target.symlink_metadata().is_err(),
            "`{}` is already there; remove it or give another name",
            target.display()
        );
        let name = target.file_name().with_context(|| format!("`{}` is no file name", target.display()))?;
        let mut partial = name.to_os_string();
        partial.push(format!(".{}.partial", std::process::id()));
        Ok(Partial { path: target.with_file_name(partial), target: target.into() })
    }
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// What is left at `path` is removed when this is dropped: after the rename, nothing.
    pub fn finish(self) -> Result<()> {
        std::fs::rename(&self.path, &self.target)
            .with_context(|| format!("cannot rename to `{}`", self.target.display()))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.path.is_dir() {
            let _ = std::fs::remove_dir_all(&self.path);
        } else {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What a tensor is stored as: norms stay f32, and the output keeps more bits beside 4-bit weights, as llama.cpp's
/// own quantiser has it (q6_K, or q8_0 where a row is no multiple of 256).
fn encoding(spec: &Spec, dtype: Dtype) -> GgmlDType {
    let four_bits = matches!(dtype, Dtype::Q4_0 | Dtype::Q4K);
    match (spec.kind, dtype) {
        (Kind::Norm | Kind::Router, _) => GgmlDType::F32,
        (Kind::Output, _) if four_bits && spec.shape[1].is_multiple_of(256) => GgmlDType::Q6K,
        (Kind::Output, _) if four_bits => GgmlDType::Q8_0,
        (_, Dtype::F32) => GgmlDType::F32,
        (_, Dtype::F16) => GgmlDType::F16,
        (_, Dtype::Bf16 | Dtype::Int8) => GgmlDType::BF16,
        (_, Dtype::Q8_0) => GgmlDType::Q8_0,
        (_, Dtype::Q4_0) => GgmlDType::Q4_0,
        (_, Dtype::Q4K) => GgmlDType::Q4K,
        (_, Dtype::Q6K) => GgmlDType::Q6K,
    }
}

/// llama.cpp's number of the mixture, which it only shows.
fn file_type(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Q4_0 => 2,
        Dtype::Q8_0 => 7,
        Dtype::Q4K => 14,
        Dtype::Q6K => 18,
        Dtype::Bf16 | Dtype::Int8 => 32,
    }
}

/// Every tensor is kept in its encoding until the file is written: the size of the file, and one tensor in f32.
pub fn gguf(shape: &Shape, dtype: Dtype, seed: u64, name: &str, out: &Path) -> Result<()> {
    ensure!(dtype != Dtype::Int8, "GGUF has no int8 with a scale per row: use --format safetensors");
    let specs = shape.tensors();
    for spec in &specs {
        let (encoding, row) = (encoding(spec, dtype), spec.columns());
        let block = encoding.block_size();
        ensure!(
            row.is_multiple_of(block),
            "{encoding:?} has blocks of {block}, and `{}` rows of {row}: choose sizes that are multiples of it",
            spec.gguf
        );
    }
    let partial = Partial::new(out)?;
    let file = File::create(partial.path())
        .with_context(|| format!("cannot write `{}`", partial.path().display()))?;
    let mut tensors = Vec::with_capacity(specs.len());
    for (index, spec) in specs.iter().enumerate() {
        let values = weights::values(spec, index, seed, true);
        let tensor = Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)?;
        tensors.push((spec.gguf.as_str(), QTensor::quantize(&tensor, encoding(spec, dtype))?));
    }
    let metadata = metadata(shape, dtype, name);
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (*k, v)).collect();
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    gguf_file::write(&mut writer, &metadata, &tensors)?;
    writer.flush()?;
    partial.finish()
}

fn metadata(shape: &Shape, dtype: Dtype, name: &str) -> Vec<(String, Value)> {
    let size = |n: usize| Value::U32(n as u32); // `check` has seen that it fits
    let text = |t: &str| Value::String(t.into());
    let tokens = vocab::tokens(shape.vocab);
    // Normal, or control.
    let types = (0..tokens.len()).map(|id| Value::I32(if id < vocab::CONTROL.len() { 3 } else { 1 }));
    let (left, right) = vocab::MERGE;
    let experts = [("llama.expert_count", shape.experts), ("llama.expert_used_count", shape.experts_used)];
    let experts = experts.into_iter().filter(|(_, n)| *n > 0).map(|(key, n)| (key, size(n)));
    [
        ("general.architecture", text("llama")),
        ("general.name", text(name)),
        ("general.file_type", Value::U32(file_type(dtype))),
        ("general.quantization_version", Value::U32(2)),
        ("llama.block_count", size(shape.layers)),
        ("llama.context_length", size(shape.context)),
        ("llama.embedding_length", size(shape.hidden)),
        ("llama.feed_forward_length", size(shape.ff)),
        ("llama.attention.head_count", size(shape.heads)),
        ("llama.attention.head_count_kv", size(shape.kv_heads)),
        ("llama.attention.key_length", size(shape.head_dim)),
        ("llama.attention.value_length", size(shape.head_dim)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(EPS)),
        ("llama.rope.dimension_count", size(shape.head_dim)),
        ("llama.rope.freq_base", Value::F32(THETA)),
        ("llama.vocab_size", size(shape.vocab)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("gpt-2")),
        ("tokenizer.ggml.token_type", Value::Array(types.collect())),
        ("tokenizer.ggml.tokens", Value::Array(tokens.into_iter().map(Value::String).collect())),
        ("tokenizer.ggml.merges", Value::Array(vec![Value::String(format!("{left} {right}"))])),
        ("tokenizer.ggml.bos_token_id", Value::U32(vocab::BOS)),
        ("tokenizer.ggml.eos_token_id", Value::U32(vocab::EOS)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
    ]
    .into_iter()
    .chain(experts)
    .map(|(key, value)| (key.to_string(), value))
    .collect()
}

/// A tensor whose bytes are made when they are written: one at a time is in memory.
struct Lazy<'s> {
    spec: &'s Spec,
    index: usize,
    seed: u64,
    stored: Stored,
    shape: Vec<usize>,
}

impl Lazy<'_> {
    /// bf16 scales of int8 rows, whose largest code is 127 or so.
    fn scales(&self, values: &[f32]) -> Vec<bf16> {
        let largest = |row: &[f32]| row.iter().fold(0f32, |max, x| max.max(x.abs()));
        values.chunks(self.spec.shape[1]).map(|row| bf16::from_f32(largest(row) / 127.0)).collect()
    }
}

impl View for Lazy<'_> {
    fn dtype(&self) -> Stored {
        self.stored
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let values = weights::values(self.spec, self.index, self.seed, false);
        match self.stored {
            Stored::BF16 if self.shape != self.spec.shape => {
                self.scales(&values).iter().flat_map(|x| x.to_le_bytes()).collect()
            }
            Stored::I8 => {
                let rows = values.chunks(self.spec.shape[1]).zip(self.scales(&values));
                let code =
                    |x: f32, scale: bf16| ((x / scale.to_f32()).round().clamp(-127.0, 127.0) as i8) as u8;
                rows.flat_map(|(row, scale)| row.iter().map(move |x| code(*x, scale))).collect()
            }
            Stored::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            Stored::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>(),
        }
        .into()
    }
    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.stored.bitsize() / 8
    }
}

pub fn safetensors(shape: &Shape, dtype: Dtype, seed: u64, out: &Path) -> Result<()> {
    let (stored, stored_name) = match dtype {
        Dtype::F32 => (Stored::F32, "float32"),
        Dtype::F16 => (Stored::F16, "float16"),
        Dtype::Bf16 | Dtype::Int8 => (Stored::BF16, "bfloat16"),
        _ => bail!("safetensors hold f32, f16, bf16 or int8; the block formats are GGUF's"),
    };
    ensure!(shape.experts == 0, "models with --experts are written as GGUF: use --format gguf");
    let partial = Partial::new(out)?;
    let folder = partial.path();
    std::fs::create_dir(folder).with_context(|| format!("cannot make `{}`", folder.display()))?;
    let specs = shape.tensors();
    let scale_names: Vec<String> = specs.iter().map(|spec| format!("{}_scale", spec.hf)).collect();
    let tensors = specs.iter().zip(&scale_names).enumerate().flat_map(|(index, (spec, scales))| {
        let lazy = |stored, shape| Lazy { spec, index, seed, stored, shape };
        let whole = |stored| (spec.hf.as_str(), lazy(stored, spec.shape.clone()));
        match spec.kind {
            Kind::Norm => vec![whole(Stored::F32)],
            _ if dtype == Dtype::Int8 && spec.is_linear() => {
                vec![whole(Stored::I8), (scales.as_str(), lazy(Stored::BF16, vec![spec.shape[0], 1]))]
            }
            _ => vec![whole(stored)],
        }
    });
    let format = [("format".to_string(), "pt".to_string())].into();
    safetensors::serialize_to_file(tensors, Some(format), &folder.join("model.safetensors"))?;
    let write = |name: &str, value: &serde_json::Value| -> Result<()> {
        Ok(std::fs::write(folder.join(name), format!("{value:#}\n"))?)
    };
    let mut config = config(shape, stored_name);
    if dtype == Dtype::Int8 {
        config["quantization_config"] = w8a8();
    }
    write("config.json", &config)?;
    // The crate makes the file readable for its owner only, but the weights are no secret.
    let usual = std::fs::metadata(folder.join("config.json"))?.permissions();
    std::fs::set_permissions(folder.join("model.safetensors"), usual)?;
    write("tokenizer.json", &tokenizer(shape))?;
    let [bos, eos] = vocab::CONTROL;
    write("tokenizer_config.json", &json!({"bos_token": bos, "eos_token": eos}))?;
    partial.finish()
}

fn config(shape: &Shape, stored: &str) -> serde_json::Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": stored,
        "hidden_act": "silu",
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": false,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ff,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "bos_token_id": vocab::BOS,
        "eos_token_id": vocab::EOS,
    })
}

/// 8 bits for weights, with a scale per row, and for activations, with a scale per token.
fn w8a8() -> serde_json::Value {
    let args = |strategy: &str, dynamic: bool| json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": strategy, "dynamic": dynamic});
    json!({
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": args("channel", false),
            "input_activations": args("token", true),
        }},
    })
}

fn tokenizer(shape: &Shape) -> serde_json::Value {
    let tokens = vocab::tokens(shape.vocab);
    let ids: serde_json::Map<String, serde_json::Value> =
        tokens.into_iter().zip(0u32..).map(|(text, id)| (text, id.into())).collect();
    let control = [vocab::BOS, vocab::EOS].map(|id| {
        json!({"id": id, "content": vocab::CONTROL[id as usize], "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    });
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let bos = vocab::CONTROL[vocab::BOS as usize];
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": control,
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [vocab::BOS], "tokens": [bos]}},
        },
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids,
            "merges": [[vocab::MERGE.0, vocab::MERGE.1]],
        },
    })
}
