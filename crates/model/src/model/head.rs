//! Draft heads of EAGLE: one decoder layer that predicts tokens from the hidden states of a target model.
use super::Model;
use super::load::resident_bytes;
use crate::config::{HeadConfig, ModelConfig, TensorSpec};
use crate::embedded;
use crate::error::Error;
use crate::files::read_text;
use crate::weights::{Source, WeightFormat};
use kvist_cache::LayerId;
use kvist_device::{DeviceError, Footprint, Purpose};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// A draft head whose headers have been read and fit its target. Its weights are not loaded yet.
pub struct OpenedHead {
    name: String,
    pub(super) config: HeadConfig,
    pub(super) source: Source,
    /// The tensors under the names of [`HeadConfig::tensors`]; each also has its name in the file.
    pub(super) specs: HashMap<String, TensorSpec>,
    target_ids: Option<Vec<u32>>,
}

impl OpenedHead {
    /// Opens a folder with `config.json` and safetensors. With `mmap` it reads only the headers. Refuses a head that does
    /// not fit `target`, and names the file and what differs.
    pub fn open(folder: &Path, target: &ModelConfig, mmap: bool) -> Result<Self, Error> {
        if !folder.is_dir() {
            let what = "not a folder; a draft head is a folder with config.json and safetensors".into();
            return Err(Error::NotAModel { path: folder.into(), what });
        }
        let path = folder.join("config.json");
        let config = HeadConfig::from_json(&path.display().to_string(), &read_text(&path)?, target)?;
        let source = Source::folder(folder, mmap)?;
        Self::new(folder.display().to_string(), config, source)
    }

    /// The head of the embedded model. `target` must be the embedded model.
    pub fn embedded(target: &ModelConfig) -> Result<Self, Error> {
        let (config, weights) = embedded::HEAD;
        let name = format!("the head of {}", embedded::NAME);
        let config = HeadConfig::from_json(&name, config, target)?;
        Self::new(name.clone(), config, Source::safetensors_bytes(&name, weights)?)
    }

    /// True if the folder's config calls itself a draft head. Those of EAGLE-1 often call themselves a Llama.
    pub fn is_head(folder: &Path) -> bool {
        let text = read_text(&folder.join("config.json")).unwrap_or_default();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let class = json["architectures"][0].as_str().unwrap_or_default();
        json.get("speculators_model_type").is_some() || class.to_ascii_lowercase().contains("eagle")
    }

    fn new(name: String, config: HeadConfig, source: Source) -> Result<Self, Error> {
        // SafeAILab and SGLang call the layer of EAGLE-3 `midlayer`, and speculators that of EAGLE-1 `transformer`.
        let has_layer = |name: &&str| source.has(&format!("{name}.self_attn.q_proj.weight"));
        let layer = ["midlayer", "transformer"].into_iter().find(has_layer).unwrap_or("layers.0");
        let is_fused = layer == "transformer";
        let mut specs = HashMap::new();
        for (mut spec, optional) in config.tensors() {
            let key = spec.name;
            spec.name = match key.strip_prefix("model.layers.0.") {
                Some(part) => format!("{layer}.{part}"),
                None if key.starts_with("hidden_norm") => format!("{layer}.{key}"),
                None if is_fused && key.starts_with("fc.") => format!("fusion_{key}"),
                None if is_fused && key == "model.norm.weight" => "pre_lm_head_layernorm.weight".into(),
                None if key == "embedding_norm.weight" => "embedding_layernorm.weight".into(),
                None => key.strip_prefix("model.").unwrap_or(&key).into(),
            };
            if optional && !source.has(&spec.name) {
                continue;
            }
            source.find(&spec)?;
            specs.insert(key, spec);
        }
        let target_ids = target_ids(&source, &config)?;
        Ok(OpenedHead { name, config, source, specs, target_ids })
    }

    pub fn config(&self) -> &HeadConfig {
        &self.config
    }

    /// Bytes that its weights take on `device`.
    pub fn weight_bytes(&self, device: &dyn Footprint, format: WeightFormat) -> Result<u64, Error> {
        let mut bytes = 0u64;
        for spec in self.specs.values() {
            let stored = self.source.find(spec)?.encoding;
            bytes = bytes.saturating_add(resident_bytes(device, spec, stored, format));
        }
        Ok(device.all_weight_bytes(bytes))
    }

    /// Loads the head next to `target`, on its device and in its budget. `context` is as in
    /// [`LoadOptions`](super::LoadOptions).
    pub fn load(
        self,
        target: &Model,
        format: WeightFormat,
        context: Option<u32>,
    ) -> Result<DraftHead, Error> {
        let device = target.device();
        device.supports(&self.config.layer.shape())?;
        let weights = target.budget().reserve(Purpose::Weights, self.weight_bytes(device, format)?)?;
        self.config.layer.layout().check().map_err(DeviceError::from)?;
        let loaded = target.weights().load_head(&self, format, context.unwrap_or(0))?;
        let OpenedHead { name, config, target_ids, .. } = self;
        let HeadConfig { layer, draft_vocab, taps, .. } = config;
        let model = Arc::new(Model::of_head(name, layer, loaded, weights));
        Ok(DraftHead { model, taps, draft_vocab, target_ids })
    }
}

/// A draft head on its target's device.
pub struct DraftHead {
    /// Its one layer as a model: a token's row reads the token's embedding and, as
    /// [`Given`](kvist_device::Given), the target's features or the head's own hidden state of the token before. Logits have
    /// `draft_vocab` columns. Tap 0 is the hidden state.
    pub model: Arc<Model>,
    /// The layers of the target whose outputs are the features, in order.
    pub taps: Vec<LayerId>,
    /// Tokens that the head can propose.
    pub draft_vocab: usize,
    /// The id of each of them in the target; `None` if the ids are the same.
    pub target_ids: Option<Vec<u32>>,
}

/// Reads `d2t`: the difference between a token's id in the target and in the head.
fn target_ids(source: &Source, config: &HeadConfig) -> Result<Option<Vec<u32>>, Error> {
    let (file, vocab) = (source.file(), config.layer.vocab);
    let Some(differences) = source.integers("d2t")? else {
        return match config.draft_vocab == vocab {
            true => Ok(None),
            false => Err(Error::MissingTensor { file: file.into(), name: "d2t".into() }),
        };
    };
    if differences.len() != config.draft_vocab {
        let (found, expected) = (vec![differences.len()], vec![config.draft_vocab]);
        return Err(Error::TensorShape { file: file.into(), name: "d2t".into(), found, expected });
    }
    let id = |(token, difference): (i64, &i64)| {
        let id = token.checked_add(*difference).and_then(|id| u32::try_from(id).ok());
        id.filter(|id| (*id as usize) < vocab).ok_or_else(|| {
            let what = format!("`d2t` maps draft token {token} out of the target's {vocab} tokens");
            Error::Malformed { file: file.into(), what }
        })
    };
    (0..).zip(&differences).map(id).collect::<Result<_, _>>().map(Some)
}
