//! GGUF files, versions 2 and 3, little endian (the format of ggml: header, metadata, tensor table, data).
//!
//! kvist has its own reader because headers are untrusted: every count and length is checked against the rest of the
//! file before use, and offsets against the end of the file.
mod metadata;
mod reader;

use super::Encoding;
use super::view::View;
use crate::error::Error;
use crate::ffi::Contents;
pub use metadata::{Metadata, Value};
use reader::Reader;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// A parsed header and the file's bytes. For a split file: the bytes of all parts; the first part has the metadata.
#[derive(Debug)]
pub struct Gguf {
    file: String,
    /// Name and bytes of each part.
    parts: Vec<(String, Arc<Contents>)>,
    pub metadata: Metadata,
    tensors: HashMap<String, TensorInfo>,
}

#[derive(Debug)]
struct TensorInfo {
    part: usize,
    shape: Vec<usize>, // slowest dimension first
    /// `Err` names an encoding that kvist does not support. It is reported only if the tensor is requested.
    encoding: Result<Encoding, String>,
    bytes: Range<usize>,
}

impl Gguf {
    /// Parses a header. Errors call the file `file`.
    pub fn parse(file: &str, contents: Arc<Contents>) -> Result<Self, Error> {
        let mut r = Reader { file, bytes: &contents, at: 0 };
        if r.take(4, "the magic")? != b"GGUF" {
            return Err(r.bad("is not a GGUF file: it does not begin with GGUF".into()));
        }
        let version = r.u32("the version")?;
        if !(2..=3).contains(&version) {
            let swapped = if (1..=3).contains(&version.swap_bytes()) { " (a big-endian file)" } else { "" };
            return Err(
                r.bad(format!("is GGUF version {version}{swapped}; kvist reads 2 and 3, little endian"))
            );
        }
        let n_tensors = r.count("the tensor count", 24)?;
        let n_values = r.count("the metadata count", 13)?;
        let mut values = BTreeMap::new();
        for _ in 0..n_values {
            let key = r.name("a metadata key")?;
            let value = r.value(&key)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(r.bad(format!("has the metadata key `{key}` twice")));
            }
        }
        let metadata = Metadata { file: file.into(), values };
        let alignment = metadata.size("general.alignment")?.unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(r.bad(format!("asks for an alignment of {alignment}; a power of two was expected")));
        }

        let mut infos = Vec::new();
        for _ in 0..n_tensors {
            infos.push(r.tensor_info()?);
        }
        let data = r.at.checked_next_multiple_of(alignment).ok_or_else(|| r.bad("is too long".into()))?;
        let mut tensors = HashMap::new();
        for (name, shape, encoding, offset) in infos {
            if !offset.is_multiple_of(alignment as u64) {
                return Err(
                    r.bad(format!("places `{name}` at {offset}, which is not aligned to {alignment}"))
                );
            }
            let start = usize::try_from(offset).ok().and_then(|o| o.checked_add(data));
            let len = match &encoding {
                Ok(encoding) => encoding.tensor_bytes(&shape).ok_or_else(|| {
                    let what = format!("shape {shape:?} is not a whole number of {} blocks", encoding.name());
                    r.bad(format!("gives `{name}` an impossible size: {what}"))
                })?,
                Err(_) => 0,
            };
            let range =
                start.and_then(|s| Some(s..s.checked_add(len)?)).filter(|range| range.end <= contents.len());
            let bytes = range.ok_or_else(|| {
                let size = contents.len();
                r.bad(format!(
                    "ends before `{name}` does: {len} bytes at offset {offset} of the data, file of {size}"
                ))
            })?;
            if tensors.insert(name.clone(), TensorInfo { part: 0, shape, encoding, bytes }).is_some() {
                return Err(r.bad(format!("holds the tensor `{name}` twice")));
            }
        }
        // Two tensors must not share bytes.
        let mut ranges: Vec<_> = tensors.iter().filter(|(_, t)| !t.bytes.is_empty()).collect();
        ranges.sort_unstable_by_key(|(name, t)| (t.bytes.start, *name));
        if let Some([(a, _), (b, _)]) =
            ranges.windows(2).find(|pair| pair[1].1.bytes.start < pair[0].1.bytes.end)
        {
            return Err(r.bad(format!("places `{b}` where `{a}` lies")));
        }
        Ok(Gguf { file: file.into(), parts: vec![(file.into(), contents)], metadata, tensors })
    }

    pub(super) fn was_read(&self) -> bool {
        self.parts.iter().any(|(_, contents)| contents.was_read())
    }

    /// Adds the tensors of another part of the same file.
    pub(super) fn join(&mut self, other: Gguf) -> Result<(), Error> {
        let first = self.parts.len();
        for (name, info) in other.tensors {
            if let Some(twin) = self.tensors.get(&name) {
                let what = format!("holds the tensor `{name}`, which {} holds too", self.parts[twin.part].0);
                return Err(Error::Malformed { file: other.file, what });
            }
            self.tensors.insert(name, TensorInfo { part: first + info.part, ..info });
        }
        self.parts.extend(other.parts);
        Ok(())
    }

    /// Parses a file in memory. Errors call it `file`.
    pub fn from_bytes(file: &str, bytes: Vec<u8>) -> Result<Self, Error> {
        Self::parse(file, Arc::new(Contents::Read(bytes)))
    }

    pub fn file(&self) -> &str {
        &self.file
    }
    /// llama.cpp's name of `general.file_type`; `None` if the key is missing or the number unknown.
    pub fn file_type(&self) -> Option<&'static str> {
        let number = self.metadata.size("general.file_type").ok()??;
        FILE_TYPES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
    }
    pub fn n_tensors(&self) -> usize {
        self.tensors.len()
    }
    /// True if there is a tensor of this GGUF name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
    /// Shape of a tensor by its GGUF name, slowest dimension first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| info.shape.as_slice())
    }

    /// A tensor by its GGUF name.
    pub fn tensor(&self, name: &str) -> Result<View<'_>, Error> {
        let missing = || Error::MissingTensor { file: self.file.clone(), name: name.into() };
        let info = self.tensors.get(name).ok_or_else(missing)?;
        let encoding = info.encoding.clone().map_err(|found| Error::TensorEncoding {
            file: self.parts[info.part].0.clone(),
            name: name.into(),
            found,
            known: Encoding::known(),
        })?;
        let (file, contents) = &self.parts[info.part];
        let view = contents.get(info.bytes.clone());
        let view = view.and_then(|bytes| View::new(name, info.shape.clone(), encoding, bytes));
        view.ok_or_else(|| Error::Malformed { file: file.clone(), what: format!("`{name}` is empty") })
    }

    /// The scale tensor stored next to a weight, which multiplies all its elements. Converters of nvfp4 write one,
    /// because its block scales have only eight bits.
    fn scale_of(&self, weight: &str) -> Result<Option<f32>, Error> {
        let Some(name) = weight.strip_suffix(".weight").map(|layer| format!("{layer}.scale")) else {
            return Ok(None);
        };
        if !self.has(&name) {
            return Ok(None);
        }
        match self.tensor(&name)?.to_f32()?[..] {
            [scale] if scale.is_finite() => Ok(Some(scale)),
            _ => Err(Error::Malformed {
                file: self.file.clone(),
                what: format!("`{name}` is not one finite number"),
            }),
        }
    }

    /// A tensor by its Hugging Face name, with its scale and with its rows as the file orders them.
    pub fn find(&self, name: &str) -> Result<View<'_>, Error> {
        let missing = || Error::MissingTensor { file: self.file.clone(), name: name.into() };
        let gguf = self.gguf_name(name).ok_or_else(missing)?;
        let view = self.tensor(&gguf).map_err(|e| match e {
            Error::MissingTensor { file, .. } => {
                Error::MissingTensor { file, name: format!("{gguf} ({name})") }
            }
            other => other,
        })?;
        Ok(match self.scale_of(&gguf)? {
            Some(scale) => view.times(scale),
            None => view,
        })
    }

    /// Restores the original order of rows: in some families llama.cpp's converter permutes the rows of q and k. `name`
    /// is the Hugging Face name.
    pub(super) fn in_order<'s>(&self, name: &str, view: View<'s>) -> Result<View<'s>, Error> {
        let key = match name.rsplit('.').nth(1) {
            Some("q_proj") => "attention.head_count",
            Some("k_proj") => "attention.head_count_kv",
            _ => return Ok(view),
        };
        let architecture = self.metadata.must_text("general.architecture")?;
        if !crate::config::gguf_permutes(architecture) {
            return Ok(view);
        }
        let heads = self.metadata.size(&format!("{architecture}.{key}"))?;
        let heads = match heads {
            Some(heads) => heads,
            None => self.metadata.must_size(&format!("{architecture}.attention.head_count"))?,
        };
        Ok(view.interleaved(heads))
    }

    /// llama.cpp's name of a Hugging Face tensor. Two names have different meanings in different families; the tensors
    /// present in the file decide.
    fn gguf_name(&self, name: &str) -> Option<String> {
        let gguf = gguf_name(name)?;
        let (layer, _) = gguf.rsplit_once('.')?;
        let (layer, module) = layer.rsplit_once('.').unwrap_or((layer, ""));
        let has = |module: &str| self.has(&format!("{layer}.{module}.weight"));
        match module {
            // `post_attention_layernorm` is the norm before the MLP, except in files that have both norms.
            "ffn_norm" if name.contains("post_attention_layernorm") && has("post_attention_norm") => {
                Some(gguf.replace("ffn_norm", "post_attention_norm"))
            }
            // In Phi-3, this tensor has the rows of both gate and up.
            "ffn_up" if name.ends_with("mlp.up_proj.weight") && !has("ffn_gate") => None,
            _ => Some(gguf),
        }
    }
}

/// llama.cpp's name of a Hugging Face tensor.
fn gguf_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    if let Some(layer) =
        name.strip_prefix("model.layers.").and_then(|rest| rest.strip_suffix(".self_attn.sinks"))
    {
        return Some(format!("blk.{layer}.attn_sinks.weight"));
    }
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = part.rsplit_once('.')?;
    // Experts: one tensor each in the oldest files, else one tensor for all.
    if let Some((part, expert)) = expert(module) {
        return Some(match expert {
            Some(expert) => format!("blk.{layer}.{part}.{expert}.{kind}"),
            None => format!("blk.{layer}.{part}_exps.{kind}"),
        });
    }
    let module = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" | "mlp.router" | "block_sparse_moe.gate" => "ffn_gate_inp",
        _ => return None,
    };
    Some(format!("blk.{layer}.{module}.{kind}"))
}

/// The part of an expert and its number: `mlp.experts.3.up_proj`. There is no number in `mlp.experts.up_proj`, which
/// has all experts.
fn expert(module: &str) -> Option<(&'static str, Option<&str>)> {
    let rest = module.split_once(".experts.")?.1;
    let (expert, part) = match rest.split_once('.') {
        Some((expert, part)) => (Some(expert), part),
        None => (None, rest),
    };
    let part = match part {
        "gate_proj" | "w1" => "ffn_gate",
        "up_proj" | "w3" => "ffn_up",
        "down_proj" | "w2" => "ffn_down",
        _ => return None,
    };
    Some((part, expert))
}

/// llama.cpp's `llama_ftype`: how most tensors of a file are quantised.
const FILE_TYPES: [(usize, &str); 35] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4"),
    (39, "NVFP4"),
    (40, "Q1_0"),
];
