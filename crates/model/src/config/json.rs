//! Reads `config.json` in the formats of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
//! (`rope_parameters`, `dtype`).
use super::family::{self, FAMILIES, Traits};
use super::packing::Packing;
use super::rope::{longrope_temperature, yarn_temperature};
use super::*;
use crate::files::read_text;
use serde_json::{Map, Value};
use std::path::Path;

impl ModelConfig {
    /// Reads `config.json` of a folder, and the end tokens of `generation_config.json` if that exists.
    pub fn from_folder(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("config.json");
        let mut config = Self::from_json(&path.display().to_string(), &read_text(&path)?)?;
        let path = folder.join("generation_config.json");
        if path.exists() {
            let file = path.display().to_string();
            let generation = Fields::parse(&file, &read_text(&path)?)?;
            for token in generation.tokens("eos_token_id")? {
                if !config.eos.contains(&token) {
                    config.eos.push(token);
                }
            }
        }
        Ok(config)
    }

    /// Parses the text of a `config.json`. Errors call the file `file`.
    pub fn from_json(file: &str, text: &str) -> Result<Self, Error> {
        let whole = Fields::parse(file, text)?;
        let traits = whole.family()?;
        let fields = whole.of_text()?;
        let packing = Packing::of(&whole, &fields, traits)?;
        let hidden = fields.must_size("hidden_size")?;
        let n_heads = fields.size_or("num_attention_heads", traits.heads)?;
        let n_layers = fields.must_size("num_hidden_layers")?;
        if n_layers > u16::MAX as usize {
            return Err(fields.bad("num_hidden_layers", format!("is {n_layers}, which is out of range")));
        }
        let head_dim = match fields.size("head_dim")?.or(traits.head_dim) {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && hidden.is_multiple_of(n_heads) => hidden / n_heads,
            None => {
                let problem =
                    format!("is {n_heads}, which does not divide hidden_size {hidden}; give head_dim");
                return Err(fields.bad("num_attention_heads", problem));
            }
        };
        let stored = match dtype(&fields).or(dtype(&whole)) {
            Some("float16") => Encoding::F16,
            Some("bfloat16") => Encoding::BF16,
            _ => Encoding::F32,
        };
        let context = fields.size("max_position_embeddings")?.unwrap_or(traits.context);
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(traits.biased);
        ModelConfig {
            family: traits.family,
            n_layers,
            hidden,
            n_heads,
            n_kv_heads: match fields.size("num_key_value_heads")? {
                Some(n_kv_heads) => n_kv_heads,
                // A missing field takes the family's default; `null` means no grouping.
                None if fields.object.contains_key("num_key_value_heads") => n_heads,
                None => traits.kv_heads.unwrap_or(n_heads),
            },
            head_dim,
            intermediate: fields.must_size("intermediate_size")?,
            vocab: fields.size_or("vocab_size", traits.vocab)?,
            norm_eps: fields.number("rms_norm_eps")?.unwrap_or(traits.norm_eps) as f32,
            norms_less_one: traits.gemma,
            ropes: fields.ropes(traits, head_dim, context)?,
            embedding_scale: if traits.gemma { (hidden as f32).sqrt() } else { 1.0 },
            attention_scale: fields.attention_scale(traits, head_dim)?,
            sinks: traits.sinks,
            attention_softcap: fields.softcap("attn_logit_softcapping", traits.softcaps.0)?,
            logit_softcap: fields.softcap("final_logit_softcapping", traits.softcaps.1)?,
            tie_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(traits.tied),
            qkv_bias: traits.qkv_bias.unwrap_or(attention_bias),
            o_bias: traits.qkv_bias.is_none() && attention_bias,
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: traits.qk_norm,
            post_norms: traits.post_norms,
            activation: fields.activation(traits)?,
            experts: fields.experts(traits)?,
            layers: fields.layers(traits, n_layers)?,
            context: u32::try_from(context).unwrap_or(u32::MAX),
            bos: fields.or("bos_token_id", &whole).tokens("bos_token_id")?.first().copied(),
            eos: fields.or("eos_token_id", &whole).tokens("eos_token_id")?,
            stored_dtype: stored,
            stored_linears: if packing == Some(Packing::Int8) { Encoding::Int8 } else { stored },
            stored_experts: packing.map_or(stored, Packing::encoding),
            features: 0,
        }
        .check(file)
    }
}

fn dtype<'f>(fields: &'f Fields<'_>) -> Option<&'f str> {
    fields.get("dtype").or(fields.get("torch_dtype")).and_then(Value::as_str)
}

/// A JSON object. Errors name the file and the field. `null` counts as absent.
pub(super) struct Fields<'f> {
    pub(super) file: &'f str,
    pub(super) object: Map<String, Value>,
}

impl<'f> Fields<'f> {
    pub(super) fn parse(file: &'f str, text: &str) -> Result<Self, Error> {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Ok(Fields { file, object }),
            Ok(_) => Err(Error::Malformed { file: file.into(), what: "not a JSON object".into() }),
            Err(e) => Err(Error::Malformed { file: file.into(), what: format!("not JSON: {e}") }),
        }
    }
    pub(super) fn bad(&self, field: &str, problem: String) -> Error {
        Error::Config { file: self.file.into(), field: field.into(), problem }
    }
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }
    pub(super) fn size(&self, field: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.map(Some).ok_or_else(|| self.bad(field, format!("is {value}; a size was expected")))
    }
    fn must_size(&self, field: &str) -> Result<usize, Error> {
        self.size_or(field, None)
    }
    /// The field, or the family's default `silent`. Fails if both are missing.
    fn size_or(&self, field: &str, silent: Option<usize>) -> Result<usize, Error> {
        self.size(field)?.or(silent).ok_or_else(|| self.bad(field, "is missing".into()))
    }
    /// `self` if it has this field, else `others`.
    fn or<'s>(&'s self, field: &str, others: &'s Self) -> &'s Self {
        if self.get(field).is_some() { self } else { others }
    }
    /// The fields of the text model: this object, or its `text_config` in a multimodal model.
    fn of_text(&self) -> Result<Fields<'f>, Error> {
        match self.get("text_config") {
            None => Ok(Fields { file: self.file, object: self.object.clone() }),
            Some(Value::Object(object)) => Ok(Fields { file: self.file, object: object.clone() }),
            Some(_) => Err(self.bad("text_config", "is not a JSON object".into())),
        }
    }
    fn number(&self, field: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.bad(field, format!("is {value}; a number was expected")))
    }
    pub(super) fn flag(&self, field: &str) -> Result<Option<bool>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.bad(field, format!("is {value}; true or false was expected")))
    }
    /// One token or a list of them.
    fn tokens(&self, field: &str) -> Result<Vec<u32>, Error> {
        let token = |value: &Value| {
            let token = value.as_u64().and_then(|n| u32::try_from(n).ok());
            token.ok_or_else(|| self.bad(field, format!("holds {value}; token ids were expected")))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(token).collect(),
            Some(value) => Ok(vec![token(value)?]),
        }
    }
    fn numbers(&self, field: &str) -> Result<Vec<f32>, Error> {
        let list = self.list(field)?.ok_or_else(|| self.bad(field, "is missing".into()))?;
        let numbers = list.iter().map(|value| value.as_f64().map(|x| x as f32));
        numbers.collect::<Option<_>>().ok_or_else(|| self.bad(field, "must be a list of numbers".into()))
    }
    pub(super) fn list(&self, field: &str) -> Result<Option<&Vec<Value>>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_array().map(Some).ok_or_else(|| self.bad(field, format!("is {value}; a list was expected")))
    }

    fn family(&self) -> Result<&'static Traits, Error> {
        let classes = self.list("architectures")?.map_or(&[][..], Vec::as_slice);
        let class = classes.iter().filter_map(Value::as_str).next();
        let model_type = self.get("model_type").and_then(Value::as_str);
        let found = match class {
            Some(class) => FAMILIES.iter().find(|t| t.class == class || t.seeing_class == Some(class)),
            None => FAMILIES.iter().find(|t| Some(t.model_type) == model_type),
        };
        found.ok_or_else(|| Error::UnknownArchitecture {
            file: self.file.into(),
            found: class.or(model_type).unwrap_or("(none named)").into(),
            known: family::known(|t| t.class),
        })
    }

    /// A missing field takes the family's default; `null` means none.
    fn softcap(&self, field: &str, silent: Option<f64>) -> Result<Option<f32>, Error> {
        let silent = if self.object.contains_key(field) { None } else { silent };
        Ok(self.number(field)?.or(silent).map(|cap| cap as f32))
    }

    fn attention_scale(&self, traits: &Traits, head_dim: usize) -> Result<f32, Error> {
        let scalar = match traits.query_scalar {
            Some(silent) => self.number("query_pre_attn_scalar")?.unwrap_or(silent),
            None => head_dim as f64,
        };
        Ok(1.0 / (scalar as f32).sqrt())
    }

    fn experts(&self, traits: &Traits) -> Result<Option<Experts>, Error> {
        let Some((n, used, width)) = traits.experts else { return Ok(None) };
        let given = self.size("num_local_experts")?.or(self.size("num_experts")?);
        let routing = Routing {
            n_experts: given.unwrap_or(n),
            used: self.size("num_experts_per_tok")?.unwrap_or(used),
            width: match width {
                Some(width) => self.size("moe_intermediate_size")?.unwrap_or(width),
                None => self.must_size("intermediate_size")?,
            },
            // Qwen configs may omit it.
            renormalise: match traits.family {
                Family::Qwen3Moe => self.flag("norm_topk_prob")?.unwrap_or(false),
                _ => true,
            },
        };
        Ok(Some(Experts { routing, bias: traits.biased }))
    }

    fn activation(&self, traits: &Traits) -> Result<Activation, Error> {
        if let Activation::Clamped { limit } = traits.activation {
            let limit = self.number("swiglu_limit")?.map_or(limit, |limit| limit as f32);
            return Ok(Activation::Clamped { limit });
        }
        let field = if self.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
        match self.get(field).map(|value| value.as_str().unwrap_or_default()) {
            None => Ok(traits.activation),
            Some("silu") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::Gelu),
            // The first Gemma files say plain GELU but mean the tanh approximation.
            Some("gelu") if traits.gemma => Ok(Activation::Gelu),
            Some(other) => {
                Err(self.bad(field, format!("is `{other}`; kvist supports silu and gelu_pytorch_tanh")))
            }
        }
    }

    fn layers(&self, traits: &Traits, n_layers: usize) -> Result<Vec<LayerConfig>, Error> {
        let slides = traits.always_slides || self.flag("use_sliding_window")?.unwrap_or(false);
        let window = match self.size("sliding_window")? {
            // A missing field takes the family's default window; `null` means none.
            None if slides && !self.object.contains_key("sliding_window") => traits.window,
            Some(window) if slides => Some(u32::try_from(window).unwrap_or(u32::MAX)),
            _ => None,
        };
        let first_sliding = match traits.always_slides {
            true => 0,
            false => self.size("max_window_layers")?.unwrap_or(traits.first_sliding),
        };
        let full_every = match traits.full_every {
            Some(silent) => Some(self.size("sliding_window_pattern")?.unwrap_or(silent).max(1)),
            None => None,
        };
        // Mistral has a window in every layer and no list of layer types.
        let windows_all = traits.always_slides && full_every.is_none();
        let types = if windows_all { None } else { self.list("layer_types")? };
        let owners = self.list("kv_owner_layer")?;
        let no_rope = self.list("no_rope_layers")?;
        for (field, list) in [("layer_types", types), ("kv_owner_layer", owners)] {
            if let Some(list) = list.filter(|list| list.len() != n_layers) {
                return Err(self.bad(field, format!("lists {} of {n_layers} layers", list.len())));
            }
        }
        let interval = match traits.family {
            Family::SmolLm3 => Some(self.size("no_rope_layer_interval")?.unwrap_or(4).max(1)),
            _ => None,
        };
        // Qwen's dense layers: those in the list, and those whose number is no multiple of `decoder_sparse_step`.
        let dense = self.list("mlp_only_layers")?.map_or(&[][..], Vec::as_slice);
        let sparse_step = self.size("decoder_sparse_step")?.unwrap_or(1).max(1);
        let mut layers = Vec::with_capacity(n_layers);
        for l in 0..n_layers {
            let routed = traits.experts.is_some()
                && (l + 1).is_multiple_of(sparse_step)
                && !dense.iter().any(|layer| layer.as_u64() == Some(l as u64));
            // The list may be longer than the model.
            let rope = match no_rope.and_then(|r| r.get(l)) {
                Some(value) => value.as_u64() != Some(0) && value.as_bool() != Some(false),
                None => interval.is_none_or(|n| !(l + 1).is_multiple_of(n)),
            };
            let sliding = match types.and_then(|t| t.get(l)) {
                None if traits.family == Family::SmolLm3 => !rope,
                None => l >= first_sliding && full_every.is_none_or(|n| !(l + 1).is_multiple_of(n)),
                Some(Value::String(kind)) if kind == "full_attention" => false,
                Some(Value::String(kind)) if kind == "sliding_attention" => true,
                Some(other) => {
                    return Err(self.bad("layer_types", format!("holds {other}, which kvist does not run")));
                }
            };
            let owner = match owners.and_then(|o| o.get(l)) {
                None => l,
                Some(value) => value.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(|| {
                    self.bad("kv_owner_layer", format!("holds {value}; a layer was expected"))
                })?,
            };
            let rope = rope.then_some(usize::from(sliding && traits.sliding_theta.is_some()));
            layers.push(LayerConfig { window: window.filter(|_| sliding), owner, rope, routed });
        }
        Ok(layers)
    }

    /// The field that defines the scaling, and its value. As in transformers 5, `rope_scaling` comes before
    /// `rope_parameters` unless it is empty: it is what users add to extend the context.
    fn rope_parameters(&self, traits: &Traits) -> (&'static str, Value) {
        let is_empty = |value: &&Value| value.as_object().is_some_and(Map::is_empty);
        let scaling = self.get("rope_scaling").filter(|value| !is_empty(value));
        match (self.get("rope_parameters"), scaling) {
            // With one set per layer type, it changes the one of full attention.
            (Some(Value::Object(new)), Some(Value::Object(scaling)))
                if traits.sliding_theta.is_some()
                    && new.get("full_attention").is_some_and(Value::is_object) =>
            {
                let mut all = new.clone();
                if let Some(Value::Object(full)) = all.get_mut("full_attention") {
                    full.extend(scaling.clone());
                }
                ("rope_parameters", Value::Object(all))
            }
            (_, Some(value)) => ("rope_scaling", value.clone()),
            (Some(value), None) => ("rope_parameters", value.clone()),
            // gpt-oss defines its scaling in the family.
            (None, None) if traits.family == Family::GptOss => {
                let stretch = r#"{"rope_type": "yarn", "factor": 32.0, "truncate": false,
                                  "original_max_position_embeddings": 4096}"#;
                ("rope_scaling", serde_json::from_str(stretch).unwrap_or_default())
            }
            (None, None) => ("rope_scaling", Value::Object(Map::new())),
        }
    }

    /// The rotary embedding of all layers. If sliding-window layers have their own, it is the second.
    fn ropes(&self, traits: &Traits, head_dim: usize, context: usize) -> Result<Vec<Rope>, Error> {
        let (field, parameters) = self.rope_parameters(traits);
        let Value::Object(object) = parameters else {
            return Err(self.bad(field, "is not a JSON object".into()));
        };
        let file = format!("{}: {field}", self.file);
        let all = Fields { file: &file, object };
        let theta = self.number("rope_theta")?.unwrap_or(traits.theta);
        let rope = |p: &Fields<'_>, theta: f64| self.rope(traits, p, theta, head_dim, context);
        let Some(sliding_theta) = traits.sliding_theta else {
            // One set per layer type, or a newer format. Reading it as a single set would silently give plain RoPE.
            if let Some((name, value)) = all.object.iter().find(|(_, value)| value.is_object()) {
                return Err(all.bad(
                    name,
                    format!("is {value}; kvist supports only one RoPE for all layers of this family"),
                ));
            }
            return Ok(vec![rope(&all, theta)?]);
        };
        let sliding_theta = self.number("rope_local_base_freq")?.unwrap_or(sliding_theta);
        // New files have it per layer type; in old files it is that of the full-attention layers.
        let of = |name: &str| match all.get(name) {
            Some(Value::Object(object)) => Ok(Some(Fields { file: &file, object: object.clone() })),
            Some(value) => Err(all.bad(name, format!("is {value}; a JSON object was expected"))),
            None => Ok(None),
        };
        let (full, sliding) = (of("full_attention")?, of("sliding_attention")?);
        let nothing = Fields { file: &file, object: Map::new() };
        let is_new = full.is_some() || sliding.is_some();
        let full = full.as_ref().unwrap_or(if is_new { &nothing } else { &all });
        Ok(vec![rope(full, theta)?, rope(sliding.as_ref().unwrap_or(&nothing), sliding_theta)?])
    }

    fn rope(
        &self,
        traits: &Traits,
        p: &Fields<'_>,
        theta: f64,
        head_dim: usize,
        context: usize,
    ) -> Result<Rope, Error> {
        let partial = p.number("partial_rotary_factor")?.or(self.number("partial_rotary_factor")?);
        let dim = (head_dim as f64 * partial.unwrap_or(1.0)) as usize;
        let theta = p.number("rope_theta")?.unwrap_or(theta);
        let kind = p.get("rope_type").or(p.get("type")).and_then(Value::as_str).unwrap_or("default");
        let must =
            |name: &str| p.number(name)?.ok_or_else(|| p.bad(name, format!("is missing; {kind} needs it")));
        let original = p.number("original_max_position_embeddings")?;
        let original = original.or(self.number("original_max_position_embeddings")?);
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: must("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: must("factor")?,
                low_freq_factor: must("low_freq_factor")?,
                high_freq_factor: must("high_freq_factor")?,
                original_context: original.unwrap_or(context as f64),
            },
            // The first Phi-3 files call it su or yarn.
            kind if kind == "longrope" || traits.family == Family::Phi3 && ["su", "yarn"].contains(&kind) => {
                let original = original.unwrap_or(context as f64);
                let factor = p.number("factor")?.unwrap_or(context as f64 / original);
                RopeScaling::Long {
                    short: p.numbers("short_factor")?,
                    long: p.numbers("long_factor")?,
                    original_context: original,
                    attention_factor: match p.number("attention_factor")? {
                        Some(given) => given,
                        None => longrope_temperature(factor, original),
                    },
                }
            }
            "yarn" => {
                let original = original.unwrap_or(context as f64);
                let factor = p.number("factor")?.unwrap_or(context as f64 / original);
                // As in transformers, 0 counts as absent.
                let nonzero = |x: Option<f64>, default| x.filter(|x| *x != 0.0).unwrap_or(default);
                let attention_factor =
                    match (p.number("attention_factor")?, p.number("mscale")?, p.number("mscale_all_dim")?) {
                        (Some(given), _, _) => given,
                        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                            yarn_temperature(factor, m) / yarn_temperature(factor, all)
                        }
                        _ => yarn_temperature(factor, 1.0),
                    };
                RopeScaling::Yarn {
                    factor,
                    original_context: original,
                    beta_fast: nonzero(p.number("beta_fast")?, 32.0),
                    beta_slow: nonzero(p.number("beta_slow")?, 1.0),
                    attention_factor,
                    truncate: p.flag("truncate")?.unwrap_or(true),
                }
            }
            other => {
                let problem =
                    format!("is `{other}`; kvist supports default, linear, llama3, yarn and longrope");
                return Err(p.bad("rope_type", problem));
            }
        };
        Ok(Rope { theta, dim, scaling })
    }
}
