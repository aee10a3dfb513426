//! Arguments that several functions share.
use crate::errors::{argument, engine};
use kvist_device::{Recent, Storage};
use kvist_engine::generate::Limits;
use kvist_engine::keep::KeepConfig;
use kvist_engine::memory::{CacheConfig, RECENT_SEQUENCES, RECENT_TOKENS, step_tokens};
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::saved::CacheOrigin;
use kvist_model::Model;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value;
use std::time::{SystemTime, UNIX_EPOCH};

/// Tokens to generate, unless given.
const MAX_TOKENS: usize = 256;

/// A text, or the ids of its tokens.
#[derive(FromPyObject)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// The tokens. `begins` says whether the text begins here, and so gets the marks of a beginning.
    pub fn encode(self, model: &Model, begins: bool) -> PyResult<Vec<u32>> {
        match self {
            Prompt::Tokens(tokens) => Ok(tokens),
            Prompt::Text(text) => tokenizer(model)?.encode(&text, begins).map_err(engine),
        }
    }
}

pub fn tokenizer(model: &Model) -> PyResult<&kvist_model::tokenizer::Tokenizer> {
    model.tokenizer().ok_or_else(|| argument("this model has no tokenizer: give token ids"))
}

#[derive(FromPyObject)]
enum Stops {
    One(String),
    Many(Vec<String>),
}

/// Keyword arguments, each of which must be taken.
pub struct Options<'py> {
    function: &'static str,
    left: Option<Bound<'py, PyDict>>,
}

impl<'py> Options<'py> {
    pub fn of(function: &'static str, options: Option<&Bound<'py, PyDict>>) -> PyResult<Self> {
        Ok(Options { function, left: options.map(|options| options.copy()).transpose()? })
    }

    /// The value of an option; `None` if it is absent or `None`.
    pub fn take<T>(&mut self, name: &str) -> PyResult<Option<T>>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let Some(left) = &self.left else { return Ok(None) };
        let Some(value) = left.get_item(name)? else { return Ok(None) };
        left.del_item(name)?;
        if value.is_none() {
            return Ok(None);
        }
        let wrong = |error: PyErr| {
            let text = error.value(value.py()).to_string();
            match error.is_instance_of::<PyTypeError>(value.py()) {
                true => PyTypeError::new_err(format!("`{name}`: {text}")),
                false => argument(format!("`{name}`: {text}")),
            }
        };
        value.extract::<T>().map(Some).map_err(|error| wrong(Into::<PyErr>::into(error)))
    }

    /// Refuses arguments that are left.
    pub fn end(self) -> PyResult<()> {
        let Some(left) = self.left else { return Ok(()) };
        match left.keys().iter().next() {
            None => Ok(()),
            Some(name) => Err(PyTypeError::new_err(format!(
                "{}() got an unexpected keyword argument '{name}'",
                self.function
            ))),
        }
    }
}

/// How tokens are drawn, and when a text ends.
pub struct Wanted {
    pub sampling: SamplerConfig,
    pub limits: Limits,
}

impl Wanted {
    pub fn take(options: &mut Options<'_>, model: &Model) -> PyResult<Self> {
        let seed = options.take("seed")?.unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            now.map_or(0, |time| time.as_nanos() as u64)
        });
        let shipped = SamplerConfig::of_model(model.sampling(), seed);
        let sampling = SamplerConfig {
            temperature: options.take("temperature")?.unwrap_or(shipped.temperature),
            top_k: options.take("top_k")?.unwrap_or(shipped.top_k),
            top_p: options.take("top_p")?.unwrap_or(shipped.top_p),
            min_p: options.take("min_p")?.unwrap_or(shipped.min_p),
            repetition_penalty: options.take("repeat_penalty")?.unwrap_or(shipped.repetition_penalty),
            repetition_window: options.take("repeat_last")?.unwrap_or(shipped.repetition_window),
            ..shipped
        };
        let stop = match options.take("stop")? {
            None => Vec::new(),
            Some(Stops::One(stop)) => vec![stop],
            Some(Stops::Many(stops)) => stops,
        };
        if stop.iter().any(String::is_empty) {
            return Err(argument("`stop`: an empty string matches everywhere: give at least one character"));
        }
        let limits = Limits {
            max_tokens: options.take("max_tokens")?.unwrap_or(MAX_TOKENS),
            stop,
            ignore_eos: options.take("ignore_eos")?.unwrap_or(false),
            no_cache: false,
        };
        Sampler::new(sampling).map_err(engine)?; // refuses bad parameters
        Ok(Wanted { sampling, limits })
    }

    pub fn sampler(&self) -> PyResult<Sampler> {
        Sampler::new(self.sampling).map_err(engine)
    }
}

/// What a cache is like, unless arguments say otherwise.
pub struct CacheDefaults {
    backend: String,
    context: u32,
    k: Storage,
    v: Option<Storage>,
    recent: u32,
}

impl CacheDefaults {
    /// On the CPU.
    pub fn new(context: u32) -> Self {
        CacheDefaults { backend: "cpu".into(), context, k: Storage::F16, v: None, recent: RECENT_TOKENS }
    }

    /// On another backend.
    pub fn on(self, backend: &str) -> Self {
        CacheDefaults { backend: backend.into(), ..self }
    }

    /// As a file's K and V are stored, with room for its tokens and as many more as a generation has by default. Names that this
    /// kvist does not know are refused later, by the comparison with the file.
    pub fn of_file(self, origin: &CacheOrigin, tokens: usize) -> Self {
        let needed = u32::try_from(tokens).unwrap_or(u32::MAX).saturating_add(MAX_TOKENS as u32);
        let (k, v) = (origin.k.parse().unwrap_or(self.k), origin.v.parse().ok());
        // Storages without recent groups have 0 of them, and are compared as such.
        let recent = if origin.recent > 0 { origin.recent } else { self.recent };
        CacheDefaults { context: self.context.max(needed), k, v, recent, ..self }
    }
}

/// `keep`: which tokens stay of a text that outgrows its cache.
pub fn keep(options: &mut Options<'_>) -> PyResult<Option<KeepConfig>> {
    let text: Option<String> = options.take("keep")?;
    text.map(|text| text.parse().map_err(|why| argument(format!("`keep`: {why}")))).transpose()
}

/// How a cache stores K and V.
pub fn cache_config(
    options: &mut Options<'_>,
    kind: &str,
    defaults: &CacheDefaults,
) -> PyResult<CacheConfig> {
    let storage = |text: Option<String>, name: &str| -> PyResult<Option<Storage>> {
        text.map(|text| text.parse().map_err(|why| argument(format!("`{name}`: {why}")))).transpose()
    };
    let kv = options.take("kv")?;
    let kv = storage(kv, "kv")?;
    let k = kv.unwrap_or(defaults.k);
    let kv_v = options.take("kv_v")?;
    let default_v = defaults.v.filter(|_| kv.is_none()).unwrap_or(k.for_values());
    let v = storage(kv_v, "kv_v")?.unwrap_or(default_v);
    if v.outliers {
        return Err(argument(format!("`kv_v`: {v} is for keys alone; use {}", v.for_values())));
    }
    let context_tokens = options.take("context")?.unwrap_or(defaults.context);
    if context_tokens == 0 {
        return Err(argument("`context`: 0 tokens hold nothing: give 1 or more"));
    }
    let chunk: u32 = options.take("chunk")?.unwrap_or_else(|| step_tokens(&defaults.backend));
    let recent = options.take("recent")?.unwrap_or(defaults.recent);
    let recent = Recent { tokens: recent, sequences: RECENT_SEQUENCES };
    recent.check().map_err(|why| argument(format!("`recent`: {why}")))?;
    let window: Option<u32> = options.take("window")?;
    if window == Some(0) || chunk == 0 {
        return Err(argument("`window` and `chunk` must be at least 1"));
    }
    Ok(CacheConfig {
        backend: options.take("backend")?.unwrap_or_else(|| defaults.backend.clone()),
        kind: kind.to_owned(),
        k,
        v,
        max_step_tokens: chunk.min(context_tokens),
        window,
        sinks: options.take("sinks")?.unwrap_or(0),
        max_rows: options.take("max_rows")?.unwrap_or(1),
        recent,
        ..CacheConfig::new(context_tokens)
    })
}

/// A Python value as JSON.
pub fn to_json(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let text: String = value.py().import("json")?.call_method1("dumps", (value,))?.extract()?;
    serde_json::from_str(&text).map_err(|why| argument(format!("`{name}`: {why}")))
}

/// JSON as a Python value.
pub fn from_json<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}
