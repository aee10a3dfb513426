//! The sections of the configuration, with their defaults.
use super::TiersSection;
use kvist_device::{Recent, Storage};
use kvist_engine::keep::KeepConfig;
use kvist_engine::memory::RECENT_TOKENS;
use kvist_engine::sessions::SessionLimits;
use kvist_engine::speculate::{Bounds, DRAFT_TOKENS, step_draft_tokens};
use kvist_scheduler::Config;
use serde::{Deserialize, Deserializer};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// A Hugging Face folder, a .gguf file, or a name that the program resolves. Default: the embedded model.
    pub path: Option<PathBuf>,
    /// Model name for clients. Default: the last part of the path.
    pub name: Option<String>,
    /// Tool call format, one of [`Tooling::NAMES`](kvist_engine::tools::Tooling::NAMES). Default: the format that the
    /// chat template describes.
    pub tools: Option<String>,
    /// Source of sampling defaults. `auto` uses those that the model ships (`generation_config.json`,
    /// `general.sampling.*`), like vLLM. `none` uses OpenAI's.
    pub generation_config: Option<String>,
}

impl ModelSection {
    pub(crate) const GENERATION_CONFIGS: [&str; 2] = ["auto", "none"];

    /// Returns whether the sampling defaults that the model ships apply.
    pub fn ships_sampling(&self) -> bool {
        self.generation_config.as_deref() != Some("none")
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheSection {
    /// Tokens in the cache, over all requests. Default: eight contexts of the model, at most 32,768.
    pub tokens: Option<u32>,
    /// Storage format of K, and of V unless `kv_v` is set.
    #[serde(deserialize_with = "storage")]
    pub kv: Storage,
    #[serde(deserialize_with = "some_storage")]
    pub kv_v: Option<Storage>,
    /// Group size of the newest tokens that packed storage formats keep in f16 as well: a power of two up to 64, or 0.
    /// A group is at most the largest power of two that divides a block.
    pub kv_recent: u32,
    /// Tokens per block. Sharing and eviction work on whole blocks.
    pub block_tokens: u32,
    /// Name of an eviction policy.
    pub eviction: String,
    /// Keep only some tokens of every request that grows beyond this budget. Requests then share no blocks.
    #[serde(deserialize_with = "some_keep")]
    pub keep: Option<KeepConfig>,
    /// A file of `kvist prefix freeze`, whose blocks are in the prefix index from the start. The program opens it.
    pub prefix: Option<PathBuf>,
}

impl CacheSection {
    /// Storage format of V.
    pub fn values(&self) -> Storage {
        self.kv_v.unwrap_or(self.kv.for_values())
    }
    /// Tokens of a group that is kept in f16, limited by the block size. 0 if no storage format is packed.
    pub fn recent_tokens(&self) -> u32 {
        let asked = Recent { tokens: self.kv_recent, sequences: 1 };
        asked.of_storages(self.kv, self.values()).within_blocks(self.block_tokens).tokens
    }
}

impl Default for CacheSection {
    fn default() -> Self {
        CacheSection {
            tokens: None,
            kv: Storage::F16,
            kv_v: None,
            kv_recent: RECENT_TOKENS,
            block_tokens: 16,
            eviction: "lru".into(),
            keep: None,
            prefix: None,
        }
    }
}

fn storage<'de, D: Deserializer<'de>>(from: D) -> Result<Storage, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

fn some_keep<'de, D: Deserializer<'de>>(from: D) -> Result<Option<KeepConfig>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(serde::de::Error::custom)
}

fn some_storage<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Storage>, D::Error> {
    storage(from).map(Some)
}

/// Drafts that a step verifies together with the next tokens. Answers are the same as without them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculationSection {
    /// What proposes drafts: one of [`SpeculationSection::MODES`].
    pub speculate: String,
    /// A smaller model with the same vocabulary: a path, or a name that the program resolves; or the folder of a head. For
    /// `draft`, `eagle` and `auto`.
    pub draft_model: Option<PathBuf>,
    /// Largest number of tokens in the draft of one request.
    pub draft_tokens: u32,
    /// Largest number of tokens on a path of a draft; 8 if it is not set, or 5 with `draft`.
    pub draft_depth: Option<u32>,
    /// Largest number of continuations that a draft proposes after the same token; 1 drafts chains. 4 if it is not set, or 1 with
    /// `draft`.
    pub draft_width: Option<u32>,
}

impl SpeculationSection {
    pub const MODES: [&str; 6] = ["off", "auto", "ngram", "suffix", "draft", "eagle"];

    pub fn is_on(&self) -> bool {
        self.speculate != "off"
    }

    /// Limits of one draft.
    pub fn bounds(&self) -> Bounds {
        Bounds::new(self.draft_tokens, self.draft_depth, self.draft_width, self.speculate == "draft")
    }

    /// Largest number of draft tokens in a step: whole drafts for up to eight requests, and less for each of more.
    pub fn step_tokens(&self, scheduler: &Config) -> u32 {
        if self.is_on() { step_draft_tokens(self.draft_tokens, scheduler) } else { 0 }
    }
}

impl Default for SpeculationSection {
    fn default() -> Self {
        SpeculationSection {
            speculate: "off".into(),
            draft_model: None,
            draft_tokens: DRAFT_TOKENS,
            draft_depth: None,
            draft_width: None,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSection {
    pub host: IpAddr,
    /// 0 picks a free port.
    pub port: u16,
    /// Serve without keys on an address that other machines can reach.
    pub open: bool,
    /// Origins whose pages may call the server. `*` allows every origin. Default: none.
    pub cors_origins: Vec<String>,
    /// Serve `/metrics` without an admin key.
    pub open_metrics: bool,
    /// Write prompts and answers to the log.
    pub log_prompts: bool,
}

impl Default for HttpSection {
    fn default() -> Self {
        HttpSection {
            host: IpAddr::from([127, 0, 0, 1]),
            port: 8080,
            open: false,
            cors_origins: Vec::new(),
            open_metrics: false,
            log_prompts: false,
        }
    }
}

/// What happens to a request that asks for more tokens than fit after its prompt.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum LongAnswers {
    /// Its answer ends where the room ends, with the finish reason `length`, as in llama.cpp.
    Shorten,
    /// It is refused, as in vLLM.
    Reject,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSection {
    /// Largest number of requests that wait for the batch. Further requests get a 429. Half of the slots are divided
    /// evenly among key names, the other half goes to the first that asks. There is at least one slot for each name.
    pub max_queue: usize,
    /// Largest number of connections. A further one replaces a connection on whose client the server waits. If there is
    /// none, it gets a 503, except for health checks.
    pub max_connections: usize,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Largest request line and headers, in bytes. At most 100 header lines are allowed.
    pub max_header_bytes: usize,
    /// Largest number of answers per request: prompts times `n`.
    pub max_choices: u32,
    /// Largest number of stop strings per request.
    pub max_stop: u32,
    /// So many salts may a key's name without admin rights delete in an hour (`DELETE /v1/cache`) of a server with tiers: each
    /// leaves a note there.
    pub max_deletions: u32,
    /// What happens to a request whose prompt and `max_tokens` together exceed the longest text.
    pub long_answers: LongAnswers,
    /// A request ends this many seconds after it arrived.
    pub request_timeout_s: f64,
    /// Seconds from the first to the last byte of a request's head.
    pub header_timeout_s: f64,
    /// Seconds until a request must begin, and then until its body must have arrived. A client that reads nothing of
    /// its answer for this long is disconnected.
    pub read_timeout_s: f64,
    /// Seconds that running requests may continue after SIGTERM.
    pub grace_s: f64,
}

impl Default for LimitsSection {
    fn default() -> Self {
        LimitsSection {
            max_queue: 256,
            max_connections: 1024,
            max_body_bytes: 4 << 20,
            max_header_bytes: 32 << 10,
            max_choices: 128,
            max_stop: 16,
            max_deletions: 1024,
            long_answers: LongAnswers::Shorten,
            request_timeout_s: 600.0,
            header_timeout_s: 10.0,
            read_timeout_s: 30.0,
            grace_s: 30.0,
        }
    }
}

impl LimitsSection {
    pub fn request_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.request_timeout_s)
    }
    pub fn read_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.read_timeout_s)
    }
    pub fn header_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.header_timeout_s)
    }
    pub fn grace(&self) -> Duration {
        Duration::from_secs_f64(self.grace_s)
    }
}

/// Limits for the sessions of one key name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionsSection {
    /// A session expires if it was not changed, forked or generated in for this many seconds.
    pub idle_s: f64,
    /// Largest number of sessions of one name.
    pub max_sessions: usize,
    /// Largest number of tokens in all sessions of one name.
    pub max_tokens: u64,
    /// Where sessions are kept, so that they survive a restart. Without it they are kept in memory alone.
    pub dir: Option<PathBuf>,
    /// Record sessions in `tiers.store`, where the other workers of a fleet find them.
    pub shared: bool,
    /// Record them in this store instead: one that evicts nothing, which a store of blocks may.
    pub store: Option<String>,
}

impl Default for SessionsSection {
    fn default() -> Self {
        SessionsSection {
            idle_s: 3600.0,
            max_sessions: 256,
            max_tokens: 1 << 20,
            dir: None,
            shared: false,
            store: None,
        }
    }
}

impl SessionsSection {
    /// The store in which workers share sessions, if they do.
    pub fn shared_store<'a>(&'a self, tiers: &'a TiersSection) -> Option<&'a str> {
        let of_tiers = tiers.store.as_deref().filter(|_| self.shared);
        self.store.as_deref().or(of_tiers)
    }

    pub fn limits(&self) -> SessionLimits {
        SessionLimits {
            idle: Duration::from_secs_f64(self.idle_s),
            max_sessions: self.max_sessions,
            max_tokens: self.max_tokens,
        }
    }
}

/// An API key. Exactly one of `key`, `key_file` and `key_env` must be set.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeySection {
    /// Owner of the key. Logs show it, and prefixes are shared only among keys of the same name.
    pub name: String,
    pub key: Option<String>,
    pub key_file: Option<PathBuf>,
    /// Name of an environment variable.
    pub key_env: Option<String>,
    /// May read `/metrics`, open the live view and set priorities.
    pub admin: bool,
}

impl std::fmt::Debug for KeySection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeySection")
            .field("name", &self.name)
            .field("admin", &self.admin)
            .finish_non_exhaustive()
    }
}

/// Error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The message has the line, the field, what was found and what was expected.
    #[error("{file}: {what}", file = file.display())]
    Toml { file: PathBuf, what: String },
    #[error("`{field}` is {found}; expected {expected}")]
    Field { field: String, found: String, expected: String },
}
