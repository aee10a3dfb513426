//! Reads the architecture from a GGUF file's metadata.
use super::family::{self, FAMILIES, Traits};
use super::rope::yarn_temperature;
use super::*;
use crate::tokenizer::stops;
use crate::weights::{Gguf, Value};

/// True if llama.cpp's converter permutes q and k for this `general.architecture`.
pub(crate) fn gguf_permutes(architecture: &str) -> bool {
    FAMILIES.iter().any(|t| t.gguf == architecture && t.gguf_permuted)
}

impl ModelConfig {
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let m = &gguf.metadata;
        let file = gguf.file();
        let architecture = m.must_text("general.architecture")?;
        let traits = FAMILIES.iter().find(|t| t.gguf == architecture);
        let traits = traits.ok_or_else(|| Error::UnknownArchitecture {
            file: file.into(),
            found: architecture.into(),
            known: family::known(|t| t.gguf),
        })?;
        let key = |name: &str| format!("{architecture}.{name}");
        let bad =
            |field: &str, problem: String| Error::Config { file: file.into(), field: key(field), problem };

        let n_layers = m.must_size(&key("block_count"))?;
        // Every layer must have tensors in the file. Check this first, because the code below allocates memory per
        // layer.
        if n_layers > u16::MAX as usize || n_layers > gguf.n_tensors() {
            let tensors = gguf.n_tensors();
            return Err(bad("block_count", format!("is {n_layers}; the file holds {tensors} tensors")));
        }
        let hidden = m.must_size(&key("embedding_length"))?;
        let n_heads = m.must_size(&key("attention.head_count"))?;
        let head_dim = match m.size(&key("attention.key_length"))? {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && hidden.is_multiple_of(n_heads) => hidden / n_heads,
            None => {
                return Err(bad(
                    "attention.head_count",
                    format!("is {n_heads}, which does not divide {hidden}"),
                ));
            }
        };
        if m.size(&key("attention.value_length"))?.is_some_and(|v| v != head_dim) {
            return Err(bad("attention.value_length", format!("differs from key_length {head_dim}")));
        }
        let context = m.size(&key("context_length"))?.unwrap_or(2048);
        let vocab = vocab(gguf)?;
        let layers = layers(gguf, traits, n_layers)?;
        let expert = Some("blk.0.ffn_down_exps.weight").filter(|name| gguf.has(name));
        let expert = expert.unwrap_or("token_embd.weight");
        let softcap = |name: &str, silent: Option<f64>| {
            let cap = m.number(&key(name))?.or(silent).map(|cap| cap as f32);
            Ok::<_, Error>(cap.filter(|cap| *cap != 0.0))
        };
        ModelConfig {
            family: traits.family,
            n_layers,
            hidden,
            n_heads,
            n_kv_heads: m.size(&key("attention.head_count_kv"))?.unwrap_or(n_heads),
            head_dim,
            intermediate: m.must_size(&key("feed_forward_length"))?,
            vocab,
            norm_eps: m.number(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-6) as f32,
            norms_less_one: false,
            ropes: ropes(gguf, architecture, traits, head_dim, context)?,
            embedding_scale: if traits.gemma { (hidden as f32).sqrt() } else { 1.0 },
            attention_scale: 1.0 / (query_scalar(traits, n_layers, hidden, n_heads, head_dim) as f32).sqrt(),
            sinks: traits.sinks,
            attention_softcap: softcap("attn_logit_softcapping", traits.softcaps.0)?,
            logit_softcap: softcap("final_logit_softcapping", traits.softcaps.1)?,
            tie_embeddings: !gguf.has("output.weight"),
            qkv_bias: gguf.has("blk.0.attn_q.bias") || gguf.has("blk.0.attn_qkv.bias"),
            o_bias: gguf.has("blk.0.attn_output.bias"),
            mlp_bias: gguf.has("blk.0.ffn_gate.bias"),
            qk_norm: traits.qk_norm,
            post_norms: traits.post_norms,
            activation: traits.activation,
            experts: experts(gguf, architecture)?,
            layers,
            context: u32::try_from(context).unwrap_or(u32::MAX),
            bos: m.token("tokenizer.ggml.bos_token_id")?,
            eos: end_tokens(gguf, vocab)?,
            stored_dtype: gguf.tensor("token_embd.weight")?.encoding,
            stored_linears: gguf.tensor("token_embd.weight")?.encoding,
            stored_experts: gguf.tensor(expert)?.encoding,
            features: 0,
        }
        .check(file)
    }
}

/// The number of tokens in the vocabulary: the rows of the embeddings.
fn vocab(gguf: &Gguf) -> Result<usize, Error> {
    let file = gguf.file().into();
    match gguf.shape("token_embd.weight") {
        Some([vocab, _]) => Ok(*vocab),
        Some(shape) => {
            let what = format!("`token_embd.weight` has the shape {shape:?}; a matrix was expected");
            Err(Error::Malformed { file, what })
        }
        None => {
            let name = "token_embd.weight (model.embed_tokens.weight)".into();
            Err(Error::MissingTensor { file, name })
        }
    }
}

/// The window, the K and V, RoPE and the MLP of every layer.
fn layers(gguf: &Gguf, traits: &Traits, n_layers: usize) -> Result<Vec<LayerConfig>, Error> {
    let m = &gguf.metadata;
    let key = |name: &str| format!("{}.{name}", traits.gguf);
    let bad_owner =
        |problem: String| Error::Config { file: gguf.file().into(), field: key("kv_owner_layer"), problem };
    let window = match m.size(&key("attention.sliding_window"))? {
        Some(window) => Some(window).filter(|w| *w > 0).map(|w| u32::try_from(w).unwrap_or(u32::MAX)),
        // Gemma 2 files may omit it.
        None if traits.family == Family::Gemma2 => traits.window,
        None => None,
    };
    let slides = sliding_layers(gguf, traits, n_layers)?;
    let owners = m.ints(&key("kv_owner_layer"))?;
    if let Some(owners) = owners.filter(|owners| owners.len() != n_layers) {
        return Err(bad_owner(format!("lists {} of {n_layers} layers", owners.len())));
    }
    let mut layers = Vec::with_capacity(n_layers);
    for (l, slides) in slides.into_iter().enumerate() {
        let owner = match owners.and_then(|owners| owners.get(l)) {
            Some(owner) => usize::try_from(*owner).map_err(|_| bad_owner(format!("holds {owner}")))?,
            None => l,
        };
        // llama.cpp runs SmolLM3 without RoPE in every fourth layer.
        let rope = traits.family != Family::SmolLm3 || !(l + 1).is_multiple_of(4);
        let window = window.filter(|_| slides);
        let rope = rope.then_some(usize::from(window.is_some() && traits.sliding_theta.is_some()));
        let routed = gguf.has(&format!("blk.{l}.ffn_gate_inp.weight"));
        layers.push(LayerConfig { window, owner, rope, routed });
    }
    Ok(layers)
}

fn experts(gguf: &Gguf, architecture: &str) -> Result<Option<Experts>, Error> {
    let m = &gguf.metadata;
    let key = |name: &str| format!("{architecture}.{name}");
    let Some(n) = m.size(&key("expert_count"))?.filter(|n| *n > 0) else { return Ok(None) };
    let width = match m.size(&key("expert_feed_forward_length"))? {
        Some(width) => width,
        None => m.must_size(&key("feed_forward_length"))?,
    };
    let used = m.must_size(&key("expert_used_count"))?;
    let bias = gguf.has("blk.0.ffn_gate_inp.bias");
    let routing = Routing { n_experts: n, used, width, renormalise: true };
    Ok(Some(Experts { routing, bias }))
}

/// Which layers have the sliding window, if the file defines one.
fn sliding_layers(gguf: &Gguf, traits: &Traits, n_layers: usize) -> Result<Vec<bool>, Error> {
    let m = &gguf.metadata;
    let key = format!("{}.attention.sliding_window_pattern", traits.gguf);
    let Some(silent) = traits.full_every else { return Ok(vec![true; n_layers]) };
    // Either a list of booleans, or a number n: every n-th layer has full attention.
    if let Some(Value::Ints(list)) = m.get(&key) {
        if list.len() != n_layers {
            let problem = format!("lists {} of {n_layers} layers", list.len());
            return Err(Error::Config { file: gguf.file().into(), field: key, problem });
        }
        return Ok(list.iter().map(|slides| *slides != 0).collect());
    }
    let every = m.size(&key)?.unwrap_or(silent).max(1);
    Ok((0..n_layers).map(|l| !(l + 1).is_multiple_of(every)).collect())
}

/// `query_pre_attn_scalar`, which GGUF files do not store. It is the head dimension except in the largest models of
/// Gemma 2 and 3. As in llama.cpp, these are recognised by their number of layers.
fn query_scalar(traits: &Traits, n_layers: usize, hidden: usize, n_heads: usize, head_dim: usize) -> usize {
    match (traits.family, n_layers) {
        (Family::Gemma2, 46) | (Family::Gemma3, 62) => hidden / n_heads.max(1),
        _ => head_dim,
    }
}

/// The end tokens of a text, of a turn, of a message and of what is filled in, those in Ollama's list, and those that
/// their text marks: any of them ends the model's output.
fn end_tokens(gguf: &Gguf, vocab: usize) -> Result<Vec<u32>, Error> {
    let m = &gguf.metadata;
    let mut all = Vec::new();
    for name in ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"] {
        all.extend(m.token(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    let listed = m.ints("tokenizer.ggml.eos_token_ids")?.unwrap_or_default();
    all.extend(listed.iter().filter_map(|token| u32::try_from(*token).ok()));
    let tokens = m.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    // The model has no logits for tokens beyond its embeddings.
    all.extend(stops::end_tokens(tokens.get(..vocab).unwrap_or(tokens)));
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|token| seen.insert(*token));
    Ok(all)
}

/// The rotary embedding of all layers. If sliding-window layers have their own, it is the second.
fn ropes(
    gguf: &Gguf,
    architecture: &str,
    traits: &Traits,
    head_dim: usize,
    context: usize,
) -> Result<Vec<Rope>, Error> {
    let mut full = rope(gguf, architecture, traits.theta, head_dim, context)?;
    if let (Family::GptOss, RopeScaling::Yarn { truncate, .. }) = (traits.family, &mut full.scaling) {
        *truncate = false; // GGUF files do not store this
    }
    let Some(silent) = traits.sliding_theta else { return Ok(vec![full]) };
    let theta = gguf.metadata.number(&format!("{architecture}.rope.freq_base_swa"))?.unwrap_or(silent);
    let sliding = Rope { theta, scaling: RopeScaling::None, ..full.clone() };
    Ok(vec![full, sliding])
}

fn rope(gguf: &Gguf, architecture: &str, theta: f64, head_dim: usize, context: usize) -> Result<Rope, Error> {
    let m = &gguf.metadata;
    let key = |name: &str| format!("{architecture}.rope.{name}");
    let bad =
        |field: &str, problem: String| Error::Config { file: gguf.file().into(), field: key(field), problem };
    // As in llama.cpp, old files have another key, and 0 means none.
    let factor = match m.number(&key("scaling.factor"))? {
        None => m.number(&key("scale_linear"))?,
        factor => factor,
    };
    let factor = factor.filter(|factor| *factor != 0.0);
    let original = m.number(&key("scaling.original_context_length"))?.unwrap_or(context as f64);
    // A factor without a type is linear, as in llama.cpp.
    let scaling = match m.text(&key("scaling.type"))?.unwrap_or("linear") {
        // Phi-3's factors for short and for long texts.
        _ if gguf.has("rope_factors_long.weight") => RopeScaling::Long {
            short: gguf.tensor("rope_factors_short.weight")?.to_f32()?,
            long: gguf.tensor("rope_factors_long.weight")?.to_f32()?,
            original_context: original,
            attention_factor: m.number(&key("scaling.attn_factor"))?.unwrap_or(1.0),
        },
        // Llama 3's ramp, stored as one factor per frequency.
        _ if gguf.has("rope_freqs.weight") => {
            RopeScaling::Factors(gguf.tensor("rope_freqs.weight")?.to_f32()?)
        }
        "none" => RopeScaling::None,
        "linear" => factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }),
        "yarn" => {
            let factor = factor.ok_or_else(|| bad("scaling.factor", "is missing".into()))?;
            let given = m.number(&key("scaling.attn_factor"))?.unwrap_or(1.0);
            RopeScaling::Yarn {
                factor,
                original_context: original,
                beta_fast: m.number(&key("scaling.yarn_beta_fast"))?.unwrap_or(32.0),
                beta_slow: m.number(&key("scaling.yarn_beta_slow"))?.unwrap_or(1.0),
                attention_factor: given * yarn_temperature(factor, 1.0),
                truncate: true,
            }
        }
        other => {
            let problem = format!("is `{other}`; kvist supports none, linear, yarn and rope_freqs.weight");
            return Err(bad("scaling.type", problem));
        }
    };
    Ok(Rope {
        theta: m.number(&key("freq_base"))?.unwrap_or(theta),
        dim: m.size(&key("dimension_count"))?.unwrap_or(head_dim),
        scaling,
    })
}
