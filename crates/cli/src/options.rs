//! Options that several commands share.
mod keep;
mod sampling;
mod saved;
mod speculation;

use crate::memory;
use crate::source::Source;
pub use crate::source::SourceArgs;
use anyhow::{Context, anyhow};
use clap::Args;
pub use keep::KeepArgs;
use kvist_cache::kinds;
use kvist_cpu::arch::Isa;
pub use kvist_device::Bytes;
use kvist_device::{MemoryBudget, Recent, Registry, Storage};
use kvist_engine::devices::{Compute, Place};
use kvist_engine::memory::{CacheConfig, MemoryPlan, RECENT_TOKENS, step_tokens};
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, Opened};
pub use sampling::{SamplingArgs, shipped_defaults};
pub use saved::{Beginning, SavedArgs};
pub use speculation::{LoadedDraft, Mode, SpeculationArgs};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

/// An invalid combination of arguments: exit status 2.
#[derive(Debug)]
pub struct WrongUsage(pub String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for WrongUsage {}

/// True if the error is wrong usage (exit status 2) and not a failure.
pub fn is_wrong_usage(error: &anyhow::Error) -> bool {
    use kvist_device::BuildError::{Kind, Unknown};
    let build = error.downcast_ref::<kvist_engine::Error>();
    let name = error.downcast_ref::<kvist_hub::Error>().is_some_and(kvist_hub::Error::is_wrong_name);
    error.is::<WrongUsage>()
        || name
        || matches!(build, Some(kvist_engine::Error::Build(Unknown { .. } | Kind { .. })))
}

pub fn wrong_usage(what: impl Into<String>) -> anyhow::Error {
    WrongUsage(what.into()).into()
}

/// `512MiB`, `8G`, `100GB`, `1000`: bytes. Units are powers of 1024, except those that end in `B` without an `i`
/// (powers of 1000).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("`{text}` is not a size: write it as 512MiB, 8G or 100GB");
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: f64 = number.parse().map_err(|_| refuse())?;
        let unit = unit.trim().to_ascii_lowercase();
        let (prefix, base) = match unit.as_str() {
            "" | "b" => ("", 1024f64),
            u if u.ends_with("ib") => (&u[..u.len() - 2], 1024.0),
            u if u.ends_with('b') => (&u[..u.len() - 1], 1000.0),
            u => (u, 1024.0),
        };
        let power = ["", "k", "m", "g", "t"].iter().position(|p| *p == prefix).ok_or_else(refuse)?;
        let bytes = number * base.powi(power as i32);
        if bytes.is_finite() && bytes <= u64::MAX as f64 { Ok(Size(bytes as u64)) } else { Err(refuse()) }
    }
}

/// In a form that can be typed again: the largest unit that gives a whole number.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TB", 10u64.pow(12)), ("GB", 10u64.pow(9)), ("MB", 10u64.pow(6))];
        let binary = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let whole = |(_, unit): &&(&str, u64)| self.0 > 0 && self.0.is_multiple_of(*unit);
        match units.iter().find(whole).or_else(|| binary.iter().find(whole)) {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

/// `32768`, `32k`, `1m`: tokens, in units of 1024.
pub fn parse_context(text: &str) -> Result<u32, String> {
    let refuse =
        || format!("`{text}` is not a number of tokens: write it as 32768 or 32k, at most {}", u32::MAX);
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match (lower.strip_suffix('k'), lower.strip_suffix('m')) {
        (Some(digits), _) => (digits, 1 << 10),
        (_, Some(digits)) => (digits, 1 << 20),
        _ => (lower.as_str(), 1),
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(refuse());
    }
    let tokens: u32 = digits.parse().map_err(|_| refuse())?;
    match tokens.checked_mul(unit) {
        Some(0) => Err(format!("`{text}` tokens hold nothing: give 1 or more")),
        tokens => tokens.ok_or_else(refuse),
    }
}

/// A rate: a [`Size`], optionally followed by `/s`.
pub fn parse_rate(text: &str) -> Result<Size, String> {
    text.strip_suffix("/s").unwrap_or(text).parse()
}

#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// How the weights of linear layers are stored in memory: as-stored (the file's own encoding), f32, q8_0
    /// (8 bits, a scale per 32 weights), int8 (8 bits, a scale per row: faster prompts and batches, less exact)
    #[arg(long, default_value = "as-stored", value_name = "FORM")]
    pub weights: WeightFormat,
    /// Read weights into memory instead of mapping the file; a mapped file must not change
    #[arg(long)]
    pub no_mmap: bool,
    /// Memory that weights, cache and working buffers may take together; by default what is free in the machine, or on
    /// the GPU if it has its own
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub memory: Option<Size>,
    /// Split text as GPT-2 does if a GGUF file names no pretokenizer, or one that kvist does not know; tokens may then be
    /// wrong
    #[arg(long)]
    pub guess_pretokenizer: bool,
    /// Variables for the chat template, such as '{"enable_thinking": false}'; a request to a server may set others
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub chat_template_kwargs: Option<JsonObject>,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

impl ModelArgs {
    /// What `--memory` says, or what is free where models run.
    ///
    /// # Errors
    /// A GPU has memory of its own and its driver does not say how much, or it has failed.
    pub fn budget(&self) -> anyhow::Result<Arc<MemoryBudget>> {
        let free = match self.memory {
            Some(size) => Some(size.0),
            None => place(&self.compute.get()?).default_memory(memory::available())?,
        };
        Ok(free.map_or_else(MemoryBudget::unlimited, MemoryBudget::new))
    }

    /// Headers, tokenizer and template: enough to refuse what cannot work.
    pub fn open(&self, quiet: bool) -> anyhow::Result<Opened> {
        self.open_at(&self.source.find(quiet)?)
    }

    /// As `open`, for a model that has been found already.
    pub fn open_at(&self, source: &Source) -> anyhow::Result<Opened> {
        let mut opened = Opened::open(&source.file, !self.no_mmap)?;
        if self.guess_pretokenizer {
            opened.guess_pretokenizer();
        }
        if let Some(kwargs) = &self.chat_template_kwargs {
            opened
                .set_template_kwargs(kwargs.clone())
                .map_err(|error| wrong_usage(format!("--chat-template-kwargs: {error}")))?;
        }
        Ok(named(opened, source))
    }

    /// As `open`, for commands that get token ids: a missing or broken tokenizer is ignored.
    pub fn open_without_texts(&self, quiet: bool) -> anyhow::Result<Opened> {
        let source = self.source.find(quiet)?;
        Ok(named(Opened::open_without_texts(&source.file, !self.no_mmap)?, &source))
    }

    /// Refuses a session that will not fit before the weights are read; then reads them, with a progress bar. `min`
    /// is the shortest useful context.
    pub fn load_for(
        &self,
        opened: Opened,
        config: &CacheConfig,
        min: usize,
        quiet: bool,
    ) -> anyhow::Result<(Arc<Model>, MemoryPlan)> {
        let budget = self.budget()?;
        let registry = registry(&self.compute.get()?);
        let plan = MemoryPlan::admit(&opened, self.weights, &registry, config, min, &budget)?;
        let context = Some(config.context_tokens);
        Ok((self.load(opened, context, &budget, quiet)?, plan))
    }

    /// Reads the weights, with a progress bar. `context` is [`LoadOptions::context`].
    pub fn load(
        &self,
        opened: Opened,
        context: Option<u32>,
        budget: &Arc<MemoryBudget>,
        quiet: bool,
    ) -> anyhow::Result<Arc<Model>> {
        let compute = self.compute.get()?;
        let bar = crate::progress::bar("loading", 0, quiet);
        let options =
            LoadOptions { format: self.weights, mmap: !self.no_mmap, context, ..LoadOptions::default() };
        let model = place(&compute).load(opened, &options, budget, &mut |done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        Ok(Arc::new(model?))
    }
}

/// A model that was requested by name keeps that name: its path may be a hash.
fn named(mut opened: Opened, source: &Source) -> Opened {
    if let Some(typed) = &source.typed {
        opened.rename(typed);
    }
    opened
}

/// An object in JSON.
pub type JsonObject = serde_json::Map<String, serde_json::Value>;

fn parse_object(text: &str) -> Result<JsonObject, String> {
    serde_json::from_str(text).map_err(|error| {
        format!("expected an object in JSON, such as {{\"enable_thinking\": false}}: {error}")
    })
}

/// Upper limit for `--threads`. Every thread has a stack and scratch, and if the system refuses a thread the program
/// can only end.
const MAX_THREADS: usize = 1024;

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads) if (1..=MAX_THREADS).contains(&threads) => Ok(threads),
        Ok(0) => Err("nothing computes without a thread: give 1 or more".into()),
        Ok(_) => Err(format!(
            "more than {MAX_THREADS} threads only wait for each other, and the system may refuse them: use one per core"
        )),
        Err(_) => Err(format!("`{text}` is not a number of threads: give 1 to {MAX_THREADS}")),
    }
}

#[derive(Args, Clone, Debug)]
pub struct ComputeArgs {
    /// Compute threads; by default one per core
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Make a text independent of chunks, batches and shared prefixes, to the last bit; a little slower with q8 and
    /// q4 caches, slower with bf16 weights. On GPUs prompts take several times as long
    #[arg(long)]
    pub deterministic: bool,
    /// Compute prompts with fewer bits: attention in bf16 (AMX, AVX-512 with bf16) or words of 16 bits (AVX2), packed weights in bf16
    /// (AMX) or 8 bits (AVX-512). Faster, and less exact; a text may then depend on the chunks and batches in which its prompt was computed
    #[arg(long, conflicts_with = "deterministic")]
    pub fast_prefill: bool,
}

impl ComputeArgs {
    /// Instruction set and threads. Every call returns the same ones, since threads are created once.
    pub fn get(&self) -> anyhow::Result<Compute> {
        static COMPUTE: OnceLock<Compute> = OnceLock::new();
        if let Some(compute) = COMPUTE.get() {
            return Ok(compute.clone());
        }
        let isa = Isa::from_env().map_err(wrong_usage)?;
        let threads = match self.threads {
            Some(threads) => threads,
            None => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
        };
        let tile_attention = Compute::tile_attention_from_env().map_err(wrong_usage)?;
        let compute =
            Compute::new(isa, threads).deterministic(self.deterministic).tile_attention(tile_attention);
        let compute = compute.fast_prefill(self.fast_prefill);
        Ok(COMPUTE.get_or_init(|| compute).clone())
    }
}

/// Parses a stop string, which must not be empty.
pub fn parse_stop(text: &str) -> Result<String, String> {
    if text.is_empty() {
        Err("an empty stop string matches everywhere: give at least one character".into())
    } else {
        Ok(text.into())
    }
}

/// Parses `--kv-recent`: the group size of tokens kept in f16.
pub fn parse_recent(text: &str) -> Result<u32, String> {
    let tokens = text.parse().map_err(|_| "not a number of tokens".to_string())?;
    Recent { tokens, sequences: 1 }.check().map_err(|e| e.to_string())?;
    Ok(tokens)
}

#[derive(Args, Clone, Debug)]
pub struct CacheArgs {
    /// Where models run and K and V are stored: cpu, reference (slow, for comparison), wgpu or wgpu:N (GPUs), cuda or
    /// cuda:N (NVIDIA GPUs), if this program has them; `kvist devices` lists them
    #[arg(long, default_value = "cpu")]
    pub backend: String,
    /// How cells are allocated: contiguous, ring (needs --window), cells, tree, paged; without it contiguous, in a
    /// chat cells
    #[arg(long)]
    pub kind: Option<String>,
    /// Storage of K and V: f32, f16, bf16, q8, q4, t4; q8-64 and q4-64 share a scale over 64 values; -rot rotates; t4-o
    /// keeps the strongest channels of K in 8 bits (V is t4 then); without it f16
    #[arg(long, value_name = "DTYPE")]
    pub kv: Option<Storage>,
    /// Storage of V, if it differs
    #[arg(long, value_name = "DTYPE")]
    pub kv_v: Option<Storage>,
    /// q8, q4 and t4 also keep the newest tokens in f16, in groups of this many (a power of two up to 64): texts come
    /// closer to those of f16; 0 for none
    #[arg(long, value_name = "TOKENS", default_value_t = RECENT_TOKENS, value_parser = parse_recent)]
    pub kv_recent: u32,
    /// Capacity of the cache in tokens, 32768 or 32k; without it the prompt and --max-tokens, within the model's
    /// context
    #[arg(long, value_name = "TOKENS", value_parser = parse_context)]
    pub context: Option<u32>,
    /// Tokens of one prefill step [default: 256, over CUDA 1024]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub chunk: Option<u32>,
    /// A query sees at most this many positions, its own included
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub window: Option<u32>,
    /// First positions that stay visible in addition to the window
    #[arg(long, default_value_t = 0, value_name = "TOKENS", requires = "window")]
    pub sinks: u32,
}

impl CacheArgs {
    /// Tokens of a prefill step, at most.
    pub fn chunk(&self) -> u32 {
        self.chunk.unwrap_or_else(|| step_tokens(backend_id(&self.backend)))
    }

    /// For commands that want the logits of every token of a step: without --chunk not more than the 256 of a CPU, because each is a row
    /// of the vocabulary in memory.
    pub fn for_all_rows(&self) -> CacheArgs {
        CacheArgs { chunk: Some(self.chunk.unwrap_or_else(|| step_tokens("cpu"))), ..self.clone() }
    }

    /// The cache configuration for a session of up to `needed` tokens.
    pub fn config(&self, model: &ModelConfig, needed: u64) -> anyhow::Result<CacheConfig> {
        let trained = model.context;
        let kind = self.kind.as_deref().unwrap_or("contiguous");
        let bounded = kinds::traits(kind).is_some_and(|traits| traits.bounded);
        let context = match self.context {
            Some(context) => context,
            None if bounded => u32::try_from(needed).unwrap_or(u32::MAX),
            None => u32::try_from(needed).unwrap_or(u32::MAX).min(trained),
        };
        if context > trained {
            tracing::warn!(target: "kvist::cli", "{context} tokens of context; the model was trained on {trained}");
        }
        self.say_which_windows_count(model);
        for storage in [self.kv, self.kv_v].into_iter().flatten() {
            if storage.rotate && !storage.dtype.is_quantised() {
                tracing::warn!(
                    target: "kvist::cli",
                    "--kv {storage}: a rotation spreads outliers before values are quantised; {} is not quantised, \
                     and would only be slower",
                    storage.dtype.name()
                );
            }
        }
        if let Some(v) = self.kv_v.filter(|v| v.outliers) {
            let known = v.for_values();
            return Err(wrong_usage(format!(
                "--kv-v {v}: only keys have channels that stand out; use --kv-v {known}"
            )));
        }
        let k = self.kv.unwrap_or(Storage::F16);
        Ok(CacheConfig {
            backend: backend_id(&self.backend).into(),
            kind: kind.into(),
            k,
            v: self.kv_v.unwrap_or(k.for_values()),
            max_step_tokens: self.chunk().min(context.max(1)),
            window: self.window,
            sinks: self.sinks,
            recent: Recent { tokens: self.kv_recent, sequences: 1 },
            ..CacheConfig::new(context)
        })
    }

    /// Warns about layers whose own window is shorter: `--window` cannot widen a model's window.
    fn say_which_windows_count(&self, model: &ModelConfig) {
        let Some(window) = self.window else { return };
        let native = model.group_windows().into_iter().flatten().filter(|native| *native <= window).min();
        if let Some(native) = native {
            tracing::warn!(
                target: "kvist::cli",
                "layers of this model have a window of {native}: there --window {window} and --sinks {} change nothing",
                self.sinks
            );
        }
    }
}

/// The GPU that `--backend` names. A process opens it once: its models and sessions share it.
static GPU: OnceLock<Place> = OnceLock::new();

/// Opens the device of `--backend`, before anything is loaded.
pub fn use_backend(backend: &str, compute: &Compute) -> anyhow::Result<()> {
    if ["wgpu", "cuda"].contains(&backend_id(backend)) {
        let _ = GPU.set(open_backend(backend, compute)?); // a second call has the same backend
    }
    Ok(())
}

/// The device that `--backend` names.
pub fn open_backend(backend: &str, compute: &Compute) -> anyhow::Result<Place> {
    Ok(Place::of_backend(backend, compute)?.0)
}

/// The id of the backend that `--backend` names, without the number of an adapter.
pub fn backend_id(backend: &str) -> &str {
    match backend.split_once(':') {
        Some(("wgpu", _)) => "wgpu",
        Some(("cuda", _)) => "cuda",
        _ => backend,
    }
}

/// The device that models run on.
fn place(compute: &Compute) -> Place {
    GPU.get().cloned().unwrap_or_else(|| Place::Cpu(compute.clone()))
}

/// Every backend and kind of this device.
pub fn registry(compute: &Compute) -> Registry {
    place(compute).registry()
}

/// Reads a text file, which must be UTF-8.
pub fn read_text(path: &std::path::Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    utf8(bytes, &path.display().to_string())
}

pub fn utf8(bytes: Vec<u8>, name: &str) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        anyhow!("{name} is not UTF-8 text: byte {at} does not continue a character; convert it first (iconv)")
    })
}

/// `1,2,3`
pub fn parse_tokens(text: &str) -> Result<Vec<u32>, String> {
    let parse = |part: &str| {
        part.trim().parse().map_err(|_| format!("`{}` is not a token id: write them as 1,2,3", part.trim()))
    };
    text.split(',').map(parse).collect()
}

/// Which blocks of a tier are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TierLoad {
    /// Those that come sooner than they would be computed
    Auto,
    /// All that a tier has
    Always,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_context() {
        for (text, expected) in
            [("1", 1), ("32768", 32768), ("32k", 32768), ("128K", 131_072), ("1m", 1 << 20)]
        {
            assert_eq!(parse_context(text), Ok(expected), "{text}");
        }
        for bad in ["", "k", "0", "0k", "-1", "+1", "1.5k", "32q", "32kb", "4m k", "4194304k", "99999999999"]
        {
            assert!(parse_context(bad).is_err_and(|error| error.contains(&format!("`{bad}`"))), "{bad}");
        }
    }

    #[test]
    fn a_size_is_written_so_that_it_can_be_typed_again() {
        for (bytes, text) in [
            (8_000_000_000, "8GB"),
            (8 << 30, "8GiB"),
            (1536 << 20, "1536MiB"),
            (123_456_789, "123456789"),
            (1 << 10, "1KiB"),
            (0, "0"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
    }
}
