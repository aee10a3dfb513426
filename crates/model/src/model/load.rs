//! Loads a decoder from files. Every tensor is checked by name and shape, and every byte is reserved in the budget
//! before it is read.
use super::decoder::{Decoder, Layer, Loaded, Mlp};
use super::draft::Weights;
use crate::config::{ModelConfig, Role, TensorSpec};
use crate::embedded;
use crate::error::Error;
use crate::files::not_there;
use crate::generation_config::SamplingDefaults;
use crate::harmony;
use crate::template::ChatTemplate;
use crate::thinking;
use crate::tokenizer::Tokenizer;
use crate::weights::{Encoding, Gguf, Source, View, WeightFormat};
use kvist_device::*;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Where a model comes from.
#[derive(Clone, Debug)]
pub enum ModelFile {
    /// The small model embedded in this program.
    Embedded,
    /// A Hugging Face folder or a .gguf file.
    Path(PathBuf),
}

#[derive(Clone, Debug)]
pub struct LoadOptions {
    pub format: WeightFormat,
    /// Map the files instead of reading them. The files must not change while they are mapped.
    pub mmap: bool,
    /// Make every run of this many layers share the K and V of its first layer, whatever the file says. Speed and
    /// memory are those of a model trained this way; its output is not meaningful. For measurements.
    pub share_kv: Option<usize>,
    /// Tokens of the longest text the model will process. Models with LongRoPE use other frequencies for texts longer
    /// than their original training context. `None`: no text is longer than that.
    pub context: Option<u32>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { format: WeightFormat::AsStored, mmap: true, share_kv: None, context: None }
    }
}

/// Weights, tokenizer and chat template. Loaded once and shared by any number of sessions.
pub struct Model {
    name: String,
    config: ModelConfig,
    layout: Layout,
    loaded: Box<dyn Weights>,
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    harmony: Option<Vec<u32>>,
    thinking: Option<Vec<u32>>,
    end_tokens: Vec<u32>,
    sampling: SamplingDefaults,
    /// The channel order of the keys, set once a cache has asked for it.
    channels: OnceLock<Arc<ChannelOrder>>,
    weights: Reservation,
}

/// A model with its headers read and its weights not loaded. Errors that the headers reveal are reported at this stage.
pub struct Opened {
    pub(crate) name: String,
    pub(crate) config: ModelConfig,
    pub(crate) source: Arc<Source>,
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    /// An error is reported only if these defaults are used.
    sampling: Result<SamplingDefaults, Error>,
}

impl Opened {
    /// Opens a model. With `mmap` it reads only the headers; without it, every file completely.
    pub fn open(file: &ModelFile, mmap: bool) -> Result<Self, Error> {
        Self::open_with(file, mmap, true)
    }

    /// Like [`open`](Self::open), but without tokenizer, chat template and sampling defaults; does not read their
    /// files. For callers that have tokens or only need sizes.
    pub fn open_without_texts(file: &ModelFile, mmap: bool) -> Result<Self, Error> {
        Self::open_with(file, mmap, false)
    }

    /// The draft model of the embedded model.
    pub fn embedded_draft() -> Result<Self, Error> {
        let name = format!("the draft model of {}", embedded::NAME);
        let source = Source::gguf_bytes(&name, embedded::DRAFT)?;
        Self::gguf(name, source, true)
    }

    fn open_with(file: &ModelFile, mmap: bool, texts: bool) -> Result<Self, Error> {
        match file {
            ModelFile::Embedded => {
                let source = Source::gguf_bytes(embedded::NAME, embedded::MODEL)?;
                Self::gguf(embedded::NAME.into(), source, texts)
            }
            ModelFile::Path(path) if path.is_dir() => Self::folder(path, mmap, texts),
            ModelFile::Path(path) if path.exists() => {
                if path.extension().is_some_and(|e| e == "safetensors") {
                    return Err(Error::NotAModel {
                        path: path.clone(),
                        what: "only a weight file; give the folder that contains it and config.json".into(),
                    });
                }
                Self::gguf(path.display().to_string(), Source::gguf_file(path, mmap)?, texts)
            }
            ModelFile::Path(path) => Err(Error::NotAModel { path: path.clone(), what: not_there(path) }),
        }
    }

    fn folder(path: &Path, mmap: bool, texts: bool) -> Result<Self, Error> {
        let config = ModelConfig::from_folder(path)?;
        let source = Arc::new(Source::folder(path, mmap)?);
        let name = path.display().to_string();
        let mut opened = Opened {
            name,
            config,
            source,
            tokenizer: None,
            template: None,
            sampling: Ok(SamplingDefaults::default()),
        };
        if texts {
            opened.tokenizer = Tokenizer::from_folder(path)?;
            opened.template = ChatTemplate::from_folder(path)?;
            opened.sampling = SamplingDefaults::from_folder(path);
        }
        Ok(opened)
    }

    fn gguf(name: String, source: Source, texts: bool) -> Result<Self, Error> {
        let gguf = source.as_gguf().ok_or_else(|| Error::Usage("not a GGUF source".into()))?;
        let config = ModelConfig::from_gguf(gguf)?;
        let (tokenizer, template, sampling) = match texts {
            true => (
                Tokenizer::from_gguf(gguf)?,
                ChatTemplate::from_gguf(gguf)?,
                SamplingDefaults::from_gguf(gguf),
            ),
            false => (None, None, Ok(SamplingDefaults::default())),
        };
        Ok(Opened { name, config, source: Arc::new(source), tokenizer, template, sampling })
    }

    pub fn name(&self) -> &str {
        &self.name
    }
    /// Uses another name than the path, for example when the path is a hash or a commit. Errors still name the file.
    pub fn rename(&mut self, name: &str) {
        self.name = name.into();
    }
    /// How the weights are stored: the file type that a GGUF file names (`Q4_K_M`), or else the encoding of most weight
    /// bytes (`bf16`).
    pub fn stored_as(&self) -> Result<String, Error> {
        if let Some(name) = self.source.as_gguf().and_then(Gguf::file_type) {
            return Ok(name.into());
        }
        let mut bytes: Vec<(Encoding, usize)> = Vec::new();
        for spec in self.config.tensors() {
            let encoding = self.source.find(&spec)?.encoding;
            let more = encoding.stored_bytes(&spec.shape).unwrap_or(0);
            match bytes.iter_mut().find(|(known, _)| *known == encoding) {
                Some((_, sum)) => *sum = sum.saturating_add(more),
                None => bytes.push((encoding, more)),
            }
        }
        let max = bytes.iter().max_by_key(|(_, sum)| *sum);
        Ok(max.map_or(self.config.stored_dtype, |(encoding, _)| *encoding).name().into())
    }
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }
    /// See [`Tokenizer::guess_pretokenizer`].
    pub fn guess_pretokenizer(&mut self) {
        if let Some(tokenizer) = &mut self.tokenizer {
            tokenizer.guess_pretokenizer();
        }
    }
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
    /// See [`ChatTemplate::set_defaults`].
    ///
    /// # Errors
    /// The model has no chat template, or the template sets one of the names.
    pub fn set_template_kwargs(&mut self, kwargs: Map<String, Value>) -> Result<(), Error> {
        let none = || Error::Usage("this model has no chat template".into());
        self.template.as_mut().ok_or_else(none)?.set_defaults(kwargs)
    }

    /// The model's recommended sampling defaults, or the error in them.
    pub fn sampling(&self) -> Result<&SamplingDefaults, &Error> {
        self.sampling.as_ref()
    }

    /// Bytes the weights will take on a device in this format. [`Model::load`] reserves this amount.
    pub fn weight_bytes(&self, device: &dyn Footprint, format: WeightFormat) -> Result<u64, Error> {
        let bytes = self.config.tensors().iter().try_fold(0u64, |sum, spec| {
            let bytes = resident_bytes(device, spec, self.source.find(spec)?.encoding, format);
            sum.checked_add(bytes).ok_or_else(|| Error::Usage("the weights overflow 64 bits".into()))
        })?;
        Ok(device.all_weight_bytes(bytes))
    }

    /// Loads the weights on `device`, whose memory `budget` counts. Fails if they do not fit, or if the device cannot
    /// run the whole model. Calls `progress` with (tensors done, tensors in total).
    pub fn load<D: Device>(
        self,
        device: D,
        options: &LoadOptions,
        budget: &Arc<MemoryBudget>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Model, Error> {
        let mut opened = self;
        if let Some(run) = options.share_kv {
            for (l, layer) in opened.config.layers.iter_mut().enumerate() {
                layer.owner = l - l % run.max(1);
            }
        }
        device.supports(&opened.config.shape())?;
        let weights = budget.reserve(Purpose::Weights, opened.weight_bytes(&device, options.format)?)?;
        let Opened { name, config, source, tokenizer, template, sampling } = opened;
        let specs = config.tensors();
        let total = specs.len();
        let mut loader = Loader {
            specs: specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect(),
            source: &source,
            format: options.format,
            device: &device,
            norms_less_one: config.norms_less_one,
            context: options.context.unwrap_or(0),
            done: 0,
            total,
            progress,
        };
        let layout = config.layout();
        layout.check().map_err(DeviceError::from)?;
        let decoder = loader.decoder(&config)?;
        let mut end_tokens = config.eos.clone();
        if let Some(tokenizer) = &tokenizer {
            end_tokens.extend(tokenizer.eos());
            harmony::correct_ends(tokenizer, &mut end_tokens);
        }
        let marks = tokenizer.as_ref().zip(template.as_ref());
        let harmony = marks.and_then(|(tokenizer, template)| harmony::marks(tokenizer, template));
        let thinking = marks.filter(|_| harmony.is_none());
        let thinking = thinking.and_then(|(tokenizer, template)| thinking::marks(tokenizer, template));
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let sampling = sampling.unwrap_or_default();
        let channels = OnceLock::new();
        let loaded = Box::new(Loaded { device: Arc::new(device), decoder: Arc::new(decoder) });
        Ok(Model {
            name,
            config,
            layout,
            loaded,
            tokenizer,
            template,
            harmony,
            thinking,
            end_tokens,
            sampling,
            channels,
            weights,
        })
    }
}

/// Bytes one tensor takes on a device.
pub(super) fn resident_bytes(
    device: &dyn Footprint,
    spec: &TensorSpec,
    stored: Encoding,
    format: WeightFormat,
) -> u64 {
    let bytes = match spec.role {
        Role::Embedding | Role::Linear | Role::Router | Role::Expert => {
            device.weight_bytes(&spec.shape, stored, format_of(spec, format))
        }
        Role::Norm | Role::Bias => Some(spec.shape.iter().map(|n| *n as u64).product::<u64>() * 4),
    };
    bytes.unwrap_or(u64::MAX)
}

/// Router weights are few and stay as stored: a small error in them would select another expert.
fn format_of(spec: &TensorSpec, format: WeightFormat) -> WeightFormat {
    match (spec.role, format) {
        (Role::Router, WeightFormat::Q8_0 | WeightFormat::Int8) => WeightFormat::AsStored,
        _ => format,
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model {}", self.name)
    }
}

impl Model {
    /// [`Opened::open`] and [`Opened::load`].
    pub fn load<D: Device>(
        file: &ModelFile,
        device: D,
        options: &LoadOptions,
        budget: &Arc<MemoryBudget>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        Opened::open(file, options.mmap)?.load(device, options, budget, progress)
    }

    pub fn name(&self) -> &str {
        &self.name
    }
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// A draft head on the same device, as a model of its own.
    pub(super) fn of_head(
        name: String,
        config: ModelConfig,
        loaded: Box<dyn Weights>,
        weights: Reservation,
    ) -> Self {
        Model {
            name,
            layout: config.layout(),
            config,
            loaded,
            tokenizer: None,
            template: None,
            harmony: None,
            thinking: None,
            end_tokens: Vec::new(),
            sampling: SamplingDefaults::default(),
            channels: OnceLock::new(),
            weights,
        }
    }
    pub(super) fn weights(&self) -> &dyn Weights {
        &*self.loaded
    }
    /// The device that the weights are on.
    pub fn device(&self) -> &dyn Footprint {
        self.loaded.device()
    }
    /// A network over these weights; see [`LoadedModel::open`].
    pub fn open(
        &self,
        backend: &dyn Backend,
        spec: &PoolSpec,
        limits: &StepLimits,
    ) -> Result<Box<dyn Network>, DeviceError> {
        self.loaded.open(backend, spec, limits)
    }
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
    /// The control tokens of the [Harmony format](crate::harmony), if the model uses it.
    pub fn harmony(&self) -> Option<&[u32]> {
        self.harmony.as_deref()
    }
    /// The tokens around [reasoning](crate::thinking), if the model's answers may begin with it.
    pub fn thinking(&self) -> Option<&[u32]> {
        self.thinking.as_deref()
    }
    /// Tokens that end a text.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }
    /// The model's recommended sampling defaults; empty if they are invalid ([`Opened::sampling`] has the error).
    pub fn sampling(&self) -> &SamplingDefaults {
        &self.sampling
    }
    /// The channel order of its keys, set once it has been computed.
    pub fn channels(&self) -> &OnceLock<Arc<ChannelOrder>> {
        &self.channels
    }
    /// The budget that the weights were reserved from. Sessions reserve from it too.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        self.weights.budget()
    }
}

pub(super) struct Loader<'p, D> {
    pub device: &'p D,
    pub specs: HashMap<String, TensorSpec>,
    pub source: &'p Source,
    pub format: WeightFormat,
    pub norms_less_one: bool,
    /// Tokens of the longest text.
    pub context: u32,
    pub done: usize,
    pub total: usize,
    pub progress: &'p mut dyn FnMut(usize, usize),
}

impl<D: Device> Loader<'_, D> {
    fn spec(&self, name: &str) -> Option<TensorSpec> {
        self.specs.get(name).cloned()
    }
    fn tick(&mut self) {
        self.done += 1;
        (self.progress)(self.done, self.total);
    }
    /// A norm or a bias; `None` if the model lacks it.
    fn values(&mut self, name: &str) -> Result<Option<Vec<f32>>, Error> {
        let Some(spec) = self.spec(name) else { return Ok(None) };
        self.tick();
        Ok(Some(self.source.find(&spec)?.to_f32()?))
    }
    /// The weights of a norm; `None` if the model lacks it.
    pub fn norm(&mut self, name: &str) -> Result<Option<D::Vector>, Error> {
        let mut norm = self.values(&format!("{name}.weight"))?;
        if self.norms_less_one {
            norm.iter_mut().flatten().for_each(|weight| *weight += 1.0);
        }
        Ok(norm.map(|norm| self.device.vector(norm)).transpose()?)
    }
    pub fn must_norm(&mut self, name: &str) -> Result<D::Vector, Error> {
        let missing = self.missing(format!("{name}.weight"));
        self.norm(name)?.ok_or(missing)
    }
    /// A linear layer with its bias, if any; `None` if the model lacks it.
    pub fn linear(&mut self, name: &str) -> Result<Option<D::Linear>, Error> {
        let Some(spec) = self.spec(&format!("{name}.weight")) else { return Ok(None) };
        self.tick();
        let bias = self.values(&format!("{name}.bias"))?;
        self.weights(&spec, bias).map(Some)
    }
    pub fn must(&mut self, name: &str) -> Result<D::Linear, Error> {
        let missing = self.missing(format!("{name}.weight"));
        self.linear(name)?.ok_or(missing)
    }
    pub fn embedding(&mut self) -> Result<D::Linear, Error> {
        let name = "model.embed_tokens.weight";
        let spec = self.spec(name).ok_or_else(|| self.missing(name.into()))?;
        self.tick();
        let view = self.source.find(&spec)?;
        if view.has_factor() {
            let what = format!("`{}` has a separate scale; embeddings have none", view.name);
            return Err(Error::Malformed { file: view.name, what });
        }
        self.weights(&spec, None)
    }
    fn weights(&self, spec: &TensorSpec, bias: Option<Vec<f32>>) -> Result<D::Linear, Error> {
        let view: View<'_> = self.source.find(spec)?;
        Ok(self.device.linear(view.tensor()?, format_of(spec, self.format), bias)?)
    }
    fn missing(&self, name: String) -> Error {
        Error::MissingTensor { file: self.source.file().into(), name }
    }

    fn mlp(&mut self, config: &ModelConfig, l: usize) -> Result<Mlp<D>, Error> {
        let Some(how) = config.experts.filter(|_| config.layers[l].routed) else {
            return Ok(Mlp::Dense(self.gated(config.mlp_names(l))?));
        };
        let router = self.must(&config.router_name(l))?;
        let mut stack = |part: usize| {
            let names = (0..how.routing.n_experts).map(|expert| config.expert_names(l, expert)[part].clone());
            self.stack(names)
        };
        let [gate, up, down] = [stack(0)?, stack(1)?, stack(2)?];
        Ok(Mlp::Routed(Experts { router, gate, up, down, routing: how.routing }))
    }
    /// The same linear layer of every expert, by name.
    fn stack(&mut self, names: impl Iterator<Item = String>) -> Result<D::Stack, Error> {
        let (source, mut views, mut biases) = (self.source, Vec::new(), Vec::new());
        for name in names {
            let weight = format!("{name}.weight");
            let spec = self.spec(&weight).ok_or_else(|| self.missing(weight))?;
            self.tick();
            views.push(source.find(&spec)?);
            biases.push(self.values(&format!("{name}.bias"))?);
        }
        let layers = views.iter().zip(biases).map(|(view, bias)| Ok::<_, Error>((view.tensor()?, bias)));
        self.device.stack(layers, self.format)
    }
    fn gated(&mut self, [gate, up, down]: [String; 3]) -> Result<GatedMlp<D>, Error> {
        Ok(GatedMlp { gate: self.must(&gate)?, up: self.must(&up)?, down: self.must(&down)? })
    }

    pub fn layer(&mut self, config: &ModelConfig, l: usize) -> Result<Layer<D>, Error> {
        let name = |part: &str| format!("model.layers.{l}.{part}");
        let k = self.linear(&name("self_attn.k_proj"))?;
        let v = self.linear(&name("self_attn.v_proj"))?;
        // If there is a norm after attention, the norm before the MLP has another name.
        let (attention_post_norm, mlp_norm) = match config.post_norms {
            true => (self.norm(&name("post_attention_layernorm"))?, "pre_feedforward_layernorm"),
            false => (None, "post_attention_layernorm"),
        };
        let sinks = self.values(&name("self_attn.sinks"))?;
        Ok(Layer {
            attention_norm: self.norm(&name("input_layernorm"))?,
            q: self.must(&name("self_attn.q_proj"))?,
            kv: k.zip(v),
            q_norm: self.norm(&name("self_attn.q_norm"))?,
            k_norm: self.norm(&name("self_attn.k_norm"))?,
            o: self.must(&name("self_attn.o_proj"))?,
            sinks: sinks.map(|sinks| self.device.vector(sinks)).transpose()?,
            attention_post_norm,
            mlp_norm: self.must_norm(&name(mlp_norm))?,
            mlp_post_norm: self.norm(&name("post_feedforward_layernorm"))?,
            mlp: self.mlp(config, l)?,
            rope: config.layers[l].rope,
        })
    }

    fn decoder(&mut self, config: &ModelConfig) -> Result<Decoder<D>, Error> {
        let embedding = Arc::new(self.embedding()?);
        let layers = (0..config.n_layers).map(|l| self.layer(config, l)).collect::<Result<_, _>>()?;
        let norm = Some(Arc::new(self.must_norm("model.norm")?));
        let head = self.linear("lm_head")?.map(Arc::new);
        let ropes = config.ropes.iter().map(|rope| rope.table(self.context)).collect();
        Ok(Decoder { config: config.clone(), embedding, draft: None, layers, norm, head, ropes })
    }
}
