//! Configs of draft heads: EAGLE-3 (Li et al., 2025), and EAGLE-1 and 2, as `speculators` and as SafeAILab write them.
use super::json::Fields;
use super::{ModelConfig, Role, TensorSpec};
use crate::error::Error;
use kvist_cache::LayerId;
use kvist_device::EMBEDDING;
use serde_json::Value;

/// What a draft head does with a token's embedding and the hidden state before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// EAGLE-1 and 2: `fc` fuses the two. `None` leaves it to the file.
    Eagle1 {
        /// Whether the embedding, what enters attention, and what enters the output layer are normed.
        norms: Option<bool>,
        /// Whether `fc` has a bias.
        bias: Option<bool>,
    },
    /// `fc` fuses three features of the target into a hidden state. Attention reads the normed embedding and the normed
    /// hidden state side by side.
    Eagle3 {
        /// What attention and MLP are added to: the hidden state after its norm (true) or before it.
        norm_before_residual: bool,
    },
}

/// A draft head's config, checked against the target's.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadConfig {
    pub kind: HeadKind,
    /// The head's one layer. Its vocabulary is the target's.
    pub layer: ModelConfig,
    /// Tokens that the head can propose.
    pub draft_vocab: usize,
    /// The layers of the target whose outputs are the features, in order.
    pub taps: Vec<LayerId>,
}

const SPECULATORS: &str = "speculators_model_type";
const EAGLE_3: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];
const EAGLE_1: [&str; 3] = ["LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM"];
const LAYER: &str = "transformer_layer_config";
const FEATURES: &str = "eagle_aux_hidden_state_layer_ids";

impl HeadConfig {
    /// Parses the text of a head's `config.json`, which errors call `file`. Refuses a head for another model than `target`.
    pub fn from_json(file: &str, text: &str, target: &ModelConfig) -> Result<Self, Error> {
        let whole = Fields::parse(file, text)?;
        let name = |field: &str| whole.get(field).and_then(Value::as_str);
        let class = whole.list("architectures")?.and_then(|list| list.first()).and_then(Value::as_str);
        let has_draft_vocab = whole.get("draft_vocab_size").is_some();
        let unknown = |found: &str| Error::UnknownArchitecture {
            file: file.into(),
            found: found.into(),
            known: format!(
                "as draft heads `eagle3` and `eagle` of speculators, {}, and for EAGLE-1 and 2 {}",
                EAGLE_3.join(", "),
                EAGLE_1.join(", ")
            ),
        };
        let (is_eagle_3, nested) = match (name(SPECULATORS), class) {
            (Some("eagle3"), _) => (true, true),
            (Some("eagle"), _) => (false, true),
            (Some(other), _) => return Err(unknown(other)),
            (None, Some(class)) if EAGLE_3.contains(&class) => (true, false),
            (None, Some(class)) if EAGLE_1.contains(&class) => (has_draft_vocab, false),
            (None, other) => return Err(unknown(other.unwrap_or("(none named)"))),
        };
        let layer = match (nested, whole.get(LAYER)) {
            (false, _) => Self::layer(file, &whole, target)?,
            (true, Some(Value::Object(object))) => {
                let file = format!("{file}: {LAYER}");
                Self::layer(&file, &Fields { file: &file, object: object.clone() }, target)?
            }
            (true, _) => return Err(whole.bad(LAYER, "is missing; it describes the head's layer".into())),
        };
        for field in ["target_hidden_size", "target_vocab_size"] {
            let expected = if field == "target_hidden_size" { target.hidden } else { target.vocab };
            check(&whole, field, whole.size(field)?.unwrap_or(expected), expected)?;
        }
        let draft_vocab = whole.size("draft_vocab_size")?.unwrap_or(layer.vocab);
        if draft_vocab == 0 || draft_vocab > layer.vocab {
            let problem = format!("is {draft_vocab}; the target has {} tokens", layer.vocab);
            return Err(whole.bad("draft_vocab_size", problem));
        }
        let taps = match is_eagle_3 {
            true => taps(&whole, target)?,
            false => vec![LayerId(target.n_layers as u16 - 1)],
        };
        let kind = match is_eagle_3 {
            true => {
                let norm_before_residual = whole.flag("norm_before_residual")?.unwrap_or(false);
                HeadKind::Eagle3 { norm_before_residual }
            }
            false => HeadKind::Eagle1 {
                norms: whole.flag("layernorms")?.or(nested.then_some(false)),
                bias: whole.flag("fusion_bias")?.or(nested.then_some(false)),
            },
        };
        let features = taps.len() * target.hidden;
        Ok(HeadConfig { kind, layer: ModelConfig { features, ..layer }, draft_vocab, taps })
    }

    /// The layer, as the config of a Llama of one layer.
    fn layer(file: &str, fields: &Fields<'_>, target: &ModelConfig) -> Result<ModelConfig, Error> {
        let mut object = fields.object.clone();
        object.insert("architectures".into(), Value::from(vec!["LlamaForCausalLM"]));
        object.insert("num_hidden_layers".into(), 1.into());
        object.insert("tie_word_embeddings".into(), false.into());
        object.remove("layer_types");
        let layer = ModelConfig::from_json(file, &Value::Object(object).to_string())?;
        check(fields, "hidden_size", layer.hidden, target.hidden)?;
        check(fields, "vocab_size", layer.vocab, target.vocab)?;
        Ok(layer)
    }

    /// The head's tensors by the names that a Llama of one layer would give them, and whether a head may lack them.
    pub(crate) fn tensors(&self) -> Vec<(TensorSpec, bool)> {
        let hidden = self.layer.hidden;
        // What EAGLE-1 may have or not, as its config says: `None` where it does not say.
        let (eagle_1, norms, bias) = match self.kind {
            HeadKind::Eagle1 { norms, bias } => (true, norms, bias),
            HeadKind::Eagle3 { .. } => (false, None, None),
        };
        let spec = |name: &str, shape: &[usize], role| TensorSpec {
            name: name.into(),
            shape: shape.to_vec(),
            role,
            within: None,
        };
        let taken = if eagle_1 { 2 * hidden } else { self.layer.features };
        let mut all = vec![(spec("fc.weight", &[hidden, taken], Role::Linear), false)];
        if bias != Some(false) {
            all.push((spec("fc.bias", &[hidden], Role::Bias), bias.is_none()));
        }
        if !eagle_1 {
            all.push((spec("hidden_norm.weight", &[hidden], Role::Norm), false));
        } else if norms == Some(true) {
            all.push((spec("embedding_norm.weight", &[hidden], Role::Norm), false));
        }
        for mut spec in self.layer.tensors() {
            spec.within = None;
            let part = |names: &[&str]| names.iter().any(|name| spec.name.ends_with(name));
            if part(&["q_proj.weight", "k_proj.weight", "v_proj.weight"]) && !eagle_1 {
                spec.shape[1] = 2 * hidden;
            }
            if part(&["lm_head.weight"]) {
                spec.shape[0] = self.draft_vocab;
            }
            let is_norm = part(&["model.norm.weight", "input_layernorm.weight"]);
            // The embedding that comes with a head of EAGLE-1 is the target's.
            if eagle_1 && (part(&["embed_tokens.weight"]) || is_norm && norms == Some(false)) {
                continue;
            }
            let optional = part(&["embed_tokens.weight"])
                || part(&["lm_head.weight"]) && self.draft_vocab == self.layer.vocab
                || is_norm && eagle_1 && norms.is_none();
            all.push((spec, optional));
        }
        all
    }
}

fn check(fields: &Fields<'_>, field: &str, found: usize, expected: usize) -> Result<(), Error> {
    match found == expected {
        true => Ok(()),
        false => {
            let problem =
                format!("is {found}, and the target's is {expected}: this head belongs to another model");
            Err(fields.bad(field, problem))
        }
    }
}

/// The tapped layers of an EAGLE-3 head. A config names the layers that the features enter, counted from 0; the number of
/// layers stands for the output of the last one.
fn taps(whole: &Fields<'_>, target: &ModelConfig) -> Result<Vec<LayerId>, Error> {
    let n = target.n_layers;
    let inner = match whole.get("eagle_config") {
        Some(Value::Object(object)) => Some(Fields { file: whole.file, object: object.clone() }),
        _ => None,
    };
    let given = match &inner {
        Some(inner) if whole.get(FEATURES).is_none() => inner.list(FEATURES)?,
        _ => whole.list(FEATURES)?,
    };
    let ids: Vec<u64> = match given {
        Some(ids) if ids.is_empty() => return Err(whole.bad(FEATURES, "names no layer".into())),
        Some(ids) => {
            let id = |id: &Value| id.as_u64().filter(|id| *id <= n as u64);
            let ids: Option<_> = ids.iter().map(id).collect();
            ids.ok_or_else(|| {
                let found = Value::from(given.cloned().unwrap_or_default());
                whole.bad(
                    FEATURES,
                    format!("is {found}; the target has the layers 0 to {n}, {n} being what leaves the last"),
                )
            })?
        }
        None if n < 5 => {
            return Err(
                whole.bad(FEATURES, format!("is missing, and there is no rule for a target of {n} layers"))
            );
        }
        None => [2, n / 2, n - 3].map(|id| id as u64).to_vec(),
    };
    if let Some(twice) = ids.iter().enumerate().find(|(i, id)| ids[..*i].contains(id)) {
        return Err(whole.bad(FEATURES, format!("names layer {} twice", twice.1)));
    }
    let tap = |id: u64| if id == 0 { EMBEDDING } else { LayerId(id as u16 - 1) };
    Ok(ids.into_iter().map(tap).collect())
}
