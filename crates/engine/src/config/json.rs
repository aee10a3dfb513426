//! `config.json`, as transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`,
//! `dtype`) write it.
use super::family::{self, FAMILIES, Traits};
use super::rope::yarn_temperature;
use super::*;
use crate::files::read_text;
use serde_json::{Map, Value};
use std::path::Path;

impl ModelConfig {
    /// `config.json` of a folder, with the end tokens of `generation_config.json` if that is there.
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

    /// The text of a `config.json`; `file` is what errors call it.
    pub fn from_json(file: &str, text: &str) -> Result<Self, Error> {
        let fields = Fields::parse(file, text)?;
        let traits = fields.family()?;
        if fields.get("quantization_config").is_some() {
            let problem = "says that the weights are packed in a way kvist does not read: take the original \
                           checkpoint with --weights q8_0, or a GGUF file";
            return Err(fields.bad("quantization_config", problem.into()));
        }
        if let Some(activation) = fields.get("hidden_act").and_then(Value::as_str)
            && activation != "silu"
        {
            return Err(fields.bad("hidden_act", format!("is `{activation}`; kvist knows silu")));
        }
        let hidden = fields.must_size("hidden_size")?;
        let n_heads = fields.must_size("num_attention_heads")?;
        let n_layers = fields.must_size("num_hidden_layers")?;
        if n_layers > u16::MAX as usize {
            return Err(fields.bad("num_hidden_layers", format!("is {n_layers}, which no model has")));
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
        let context = fields.size("max_position_embeddings")?.unwrap_or(2048);
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
        ModelConfig {
            family: traits.family,
            n_layers,
            hidden,
            n_heads,
            n_kv_heads: match fields.size("num_key_value_heads")? {
                Some(n_kv_heads) => n_kv_heads,
                // Silence means the family's first model; `null` means no grouping.
                None if fields.object.contains_key("num_key_value_heads") => n_heads,
                None => traits.kv_heads.unwrap_or(n_heads),
            },
            head_dim,
            intermediate: fields.must_size("intermediate_size")?,
            vocab: fields.must_size("vocab_size")?,
            norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: fields.rope(traits, head_dim, context)?,
            tie_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(traits.tied),
            qkv_bias: traits.qkv_bias.unwrap_or(attention_bias),
            o_bias: traits.qkv_bias.is_none() && attention_bias,
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: traits.qk_norm,
            layers: fields.layers(traits, n_layers)?,
            context: u32::try_from(context).unwrap_or(u32::MAX),
            bos: fields.tokens("bos_token_id")?.first().copied(),
            eos: fields.tokens("eos_token_id")?,
            stored_dtype: match fields.get("dtype").or(fields.get("torch_dtype")).and_then(Value::as_str) {
                Some("float16") => Encoding::F16,
                Some("bfloat16") => Encoding::BF16,
                _ => Encoding::F32,
            },
        }
        .check(file)
    }
}

/// A JSON object, with errors that name file and field. `null` is absent.
struct Fields<'f> {
    file: &'f str,
    object: Map<String, Value>,
}

impl<'f> Fields<'f> {
    fn parse(file: &'f str, text: &str) -> Result<Self, Error> {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Ok(Fields { file, object }),
            Ok(_) => Err(Error::Malformed { file: file.into(), what: "not a JSON object".into() }),
            Err(e) => Err(Error::Malformed { file: file.into(), what: format!("not JSON: {e}") }),
        }
    }
    fn bad(&self, field: &str, problem: String) -> Error {
        Error::Config { file: self.file.into(), field: field.into(), problem }
    }
    fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }
    fn size(&self, field: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.map(Some).ok_or_else(|| self.bad(field, format!("is {value}; a size was expected")))
    }
    fn must_size(&self, field: &str) -> Result<usize, Error> {
        self.size(field)?.ok_or_else(|| self.bad(field, "is missing".into()))
    }
    fn number(&self, field: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.bad(field, format!("is {value}; a number was expected")))
    }
    fn flag(&self, field: &str) -> Result<Option<bool>, Error> {
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
    fn list(&self, field: &str) -> Result<Option<&Vec<Value>>, Error> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_array().map(Some).ok_or_else(|| self.bad(field, format!("is {value}; a list was expected")))
    }

    fn family(&self) -> Result<&'static Traits, Error> {
        let classes = self.list("architectures")?.map_or(&[][..], Vec::as_slice);
        let class = classes.iter().filter_map(Value::as_str).next();
        let model_type = self.get("model_type").and_then(Value::as_str);
        let found = match class {
            Some(class) => FAMILIES.iter().find(|t| t.class == class),
            None => FAMILIES.iter().find(|t| Some(t.model_type) == model_type),
        };
        found.ok_or_else(|| Error::UnknownArchitecture {
            file: self.file.into(),
            found: class.or(model_type).unwrap_or("(none named)").into(),
            known: family::known(|t| t.class),
        })
    }

    fn layers(&self, traits: &Traits, n_layers: usize) -> Result<Vec<LayerConfig>, Error> {
        let slides = traits.always_slides || self.flag("use_sliding_window")?.unwrap_or(false);
        let window = match self.size("sliding_window")? {
            // Silence means the family's first window; `null` means none.
            None if slides && !self.object.contains_key("sliding_window") => traits.window,
            Some(window) if slides => Some(u32::try_from(window).unwrap_or(u32::MAX)),
            _ => None,
        };
        let first_sliding = match traits.always_slides {
            true => 0,
            false => self.size("max_window_layers")?.unwrap_or(traits.first_sliding),
        };
        // Mistral windows every layer and has no list of types.
        let types = if traits.always_slides { None } else { self.list("layer_types")? };
        let owners = self.list("kv_owner_layer")?;
        let no_rope = self.list("no_rope_layers")?;
        for (field, list) in [("layer_types", types), ("kv_owner_layer", owners)] {
            if let Some(list) = list.filter(|list| list.len() != n_layers) {
                return Err(self.bad(field, format!("lists {} layers of {n_layers}", list.len())));
            }
        }
        let interval = match traits.family {
            Family::SmolLm3 => Some(self.size("no_rope_layer_interval")?.unwrap_or(4).max(1)),
            _ => None,
        };
        let mut layers = Vec::with_capacity(n_layers);
        for l in 0..n_layers {
            // The list may be longer than the model.
            let rope = match no_rope.and_then(|r| r.get(l)) {
                Some(value) => value.as_u64() != Some(0) && value.as_bool() != Some(false),
                None => interval.is_none_or(|n| !(l + 1).is_multiple_of(n)),
            };
            let sliding = match types.and_then(|t| t.get(l)) {
                None if traits.family == Family::SmolLm3 => !rope,
                None => l >= first_sliding,
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
            layers.push(LayerConfig { window: window.filter(|_| sliding), owner, rope });
        }
        Ok(layers)
    }

    fn rope(&self, traits: &Traits, head_dim: usize, context: usize) -> Result<Rope, Error> {
        let (field, parameters) = match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(value), _) => ("rope_parameters", value.clone()),
            (None, Some(value)) => ("rope_scaling", value.clone()),
            (None, None) => ("rope_scaling", Value::Object(Map::new())),
        };
        let Value::Object(object) = parameters else {
            return Err(self.bad(field, "is no JSON object".into()));
        };
        let file = format!("{}: {field}", self.file);
        let p = Fields { file: &file, object };
        // One set per type of layer, or something newer: read as if it were one set it would be a plain rope.
        if let Some((name, value)) = p.object.iter().find(|(_, value)| value.is_object()) {
            return Err(p.bad(name, format!("is {value}; kvist knows one rope for all layers")));
        }
        let partial = p.number("partial_rotary_factor")?.or(self.number("partial_rotary_factor")?);
        let dim = (head_dim as f64 * partial.unwrap_or(1.0)) as usize;
        let theta = p.number("rope_theta")?.or(self.number("rope_theta")?).unwrap_or(traits.theta);
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
            "yarn" => {
                let original = original.unwrap_or(context as f64);
                let factor = p.number("factor")?.unwrap_or(context as f64 / original);
                // As in transformers, 0 is as good as absent.
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
                let problem = format!("is `{other}`; kvist knows default, linear, llama3 and yarn");
                return Err(p.bad("rope_type", problem));
            }
        };
        Ok(Rope { theta, dim, scaling })
    }
}
