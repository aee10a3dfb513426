//! Configuration of a server: one TOML file, and command line flags that override it.
//!
//! Everything has a default. An unknown field is an error, because a misspelt limit would not limit anything.
use crate::auth::{self, Keys};
use crate::tools::Tooling;
use crate::worker::EngineConfig;
use kvist_cache::PrefixSpec;
use kvist_cache::evict::{Parameters, build_for_serving};
use kvist_device::{Recent, Storage};
use kvist_engine::executor::PagedConfig;
use kvist_engine::memory::{CacheConfig, RECENT_TOKENS};
use kvist_model::config::ModelConfig;
use kvist_scheduler::{Admission, Config, LengthSource, Preempted, PrefixOrder};
use serde::{Deserialize, Deserializer};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// `kvist.toml`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    pub model: ModelSection,
    pub cache: CacheSection,
    pub scheduler: SchedulerSection,
    pub http: HttpSection,
    pub limits: LimitsSection,
    pub sessions: SessionsSection,
    /// Without keys every client is served, but only on this machine unless `http.open` is set.
    pub keys: Vec<KeySection>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// A Hugging Face folder, a .gguf file, or a name that the program resolves. Default: the embedded model.
    pub path: Option<PathBuf>,
    /// Model name for clients. Default: the last part of the path.
    pub name: Option<String>,
    /// Tool call format, one of [`Tooling::NAMES`]. Default: the format that the chat template describes.
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
        }
    }
}

/// The configurable part of [`kvist_scheduler::Config`], with batch sizes that suit a CPU.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchedulerSection {
    /// Name of a scheduling policy.
    pub policy: String,
    /// How a policy estimates output lengths: `max_new` or `running_mean`.
    pub lengths: LengthSource,
    /// Largest number of requests in the batch.
    pub max_batch: u32,
    /// Largest number of tokens per step. Longer prompts are computed in chunks beside the decoding requests (chunked
    /// prefill).
    pub max_batch_tokens: u32,
    pub admission: Admission,
    pub preempted: Preempted,
    pub prefix_order: PrefixOrder,
    /// Waiting time, in nanoseconds, that is worth one level of priority under the policy `priority`.
    pub ageing_ns: u64,
}

impl Default for SchedulerSection {
    fn default() -> Self {
        let Config { policy, lengths, admission, preempted, prefix_order, ageing_ns, .. } = Config::default();
        SchedulerSection {
            policy,
            lengths,
            max_batch: 32,
            max_batch_tokens: 256,
            admission,
            preempted,
            prefix_order,
            ageing_ns,
        }
    }
}

impl SchedulerSection {
    fn config(&self) -> Config {
        Config {
            policy: self.policy.clone(),
            lengths: self.lengths,
            max_batch: self.max_batch,
            max_batch_tokens: self.max_batch_tokens,
            admission: self.admission,
            preempted: self.preempted,
            prefix_order: self.prefix_order,
            ageing_ns: self.ageing_ns,
            ..Config::default()
        }
    }
}

fn storage<'de, D: Deserializer<'de>>(from: D) -> Result<Storage, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

fn some_storage<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Storage>, D::Error> {
    storage(from).map(Some)
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

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSection {
    /// Largest number of requests that wait for the batch. Further requests get a 429. Half of the places are divided
    /// evenly among key names, the other half goes to the first that asks. There is at least one place for each name.
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
}

impl Default for SessionsSection {
    fn default() -> Self {
        SessionsSection { idle_s: 3600.0, max_sessions: 256, max_tokens: 1 << 20 }
    }
}

impl SessionsSection {
    pub fn idle(&self) -> Duration {
        Duration::from_secs_f64(self.idle_s)
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

fn bad(field: impl Into<String>, found: impl ToString, expected: impl Into<String>) -> ConfigError {
    ConfigError::Field { field: field.into(), found: found.to_string(), expected: expected.into() }
}

impl ServerConfig {
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::parse(path, &text)
    }

    /// `file` is the name to use in errors.
    pub fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|e| ConfigError::Toml { file: file.into(), what: e.to_string() })
    }

    /// Check that the keys can be read. Reads their files and variables, and starting the server reads them again.
    pub fn check_keys(&self) -> Result<(), ConfigError> {
        Keys::new(&self.keys).map(drop)
    }

    /// Check everything that types cannot express. Call it after flags have been applied.
    pub fn check(&self) -> Result<(), ConfigError> {
        if let Some(name) = &self.model.generation_config
            && !ModelSection::GENERATION_CONFIGS.contains(&name.as_str())
        {
            return Err(bad("model.generation_config", format!("{name:?}"), "auto or none"));
        }
        if let Some(name) = &self.model.tools
            && Tooling::by_name(name).is_err()
        {
            return Err(bad("model.tools", format!("{name:?}"), format!("one of {}", Tooling::NAMES)));
        }
        let c = &self.cache;
        if c.tokens == Some(0) {
            return Err(bad("cache.tokens", 0, "at least one block"));
        }
        if c.block_tokens == 0 || c.block_tokens > 4096 {
            return Err(bad("cache.block_tokens", c.block_tokens, "1 to 4096"));
        }
        if (Recent { tokens: c.kv_recent, sequences: 1 }).check().is_err() {
            let expected = format!("a power of two up to {}, or 0", Recent::MOST_TOKENS);
            return Err(bad("cache.kv_recent", c.kv_recent, expected));
        }
        if let Some(v) = c.kv_v.filter(|v| v.outliers) {
            let expected = format!("{}: only keys have channels that stand out", v.for_values());
            return Err(bad("cache.kv_v", v, expected));
        }
        if self.scheduler.lengths == LengthSource::Oracle {
            return Err(bad(
                "scheduler.lengths",
                "oracle",
                "max_new or running_mean: the future is not known here",
            ));
        }
        build_for_serving(&c.eviction, &Parameters::default())
            .map_err(|e| bad("cache.eviction", format!("{:?}", c.eviction), e.to_string()))?;
        self.scheduler
            .config()
            .check()
            .map_err(|e| bad("scheduler", format!("wrong: {e}"), "see docs/scheduler.md"))?;
        let l = &self.limits;
        let seconds = [
            ("request_timeout_s", l.request_timeout_s),
            ("header_timeout_s", l.header_timeout_s),
            ("read_timeout_s", l.read_timeout_s),
            ("grace_s", l.grace_s),
        ];
        for (name, value) in seconds {
            let least = if name == "grace_s" { 0.0 } else { 0.001 };
            if !(least..=1e6).contains(&value) {
                return Err(bad(format!("limits.{name}"), value, format!("{least} to 1000000 seconds")));
            }
        }
        let counts = [
            ("max_queue", l.max_queue, 1, 1 << 20),
            ("max_connections", l.max_connections, 1, 1 << 20),
            ("max_body_bytes", l.max_body_bytes, 1 << 10, 1 << 30),
            ("max_header_bytes", l.max_header_bytes, 8 << 10, 1 << 20),
            ("max_choices", l.max_choices as usize, 1, 1 << 12),
            ("max_stop", l.max_stop as usize, 1, 1 << 8),
        ];
        for (name, value, least, most) in counts {
            if !(least..=most).contains(&value) {
                return Err(bad(format!("limits.{name}"), value, format!("{least} to {most}")));
            }
        }
        let s = &self.sessions;
        if !(0.001..=1e9).contains(&s.idle_s) {
            return Err(bad("sessions.idle_s", s.idle_s, "0.001 to 1000000000 seconds"));
        }
        if s.max_sessions > 1 << 20 {
            return Err(bad("sessions.max_sessions", s.max_sessions, "0 to 1048576"));
        }
        if s.max_tokens > 1 << 40 {
            return Err(bad("sessions.max_tokens", s.max_tokens, "0 to 1099511627776"));
        }
        for origin in &self.http.cors_origins {
            let plain =
                origin.split_once("://").is_some_and(|(_, host)| !host.is_empty() && !host.contains('/'));
            if origin != "*" && !plain {
                return Err(bad(
                    "http.cors_origins",
                    format!("{origin:?}"),
                    "origins as https://example.org, or *",
                ));
            }
        }
        for (i, key) in self.keys.iter().enumerate() {
            let field = format!("keys[{i}]");
            if key.name.is_empty() || key.name.len() > 64 || key.name.chars().any(char::is_control) {
                return Err(bad(format!("{field}.name"), format!("{:?}", key.name), "1 to 64 bytes of text"));
            }
            let given = [key.key.is_some(), key.key_file.is_some(), key.key_env.is_some()];
            if given.iter().filter(|g| **g).count() != 1 {
                return Err(bad(
                    field,
                    "given in no way, or in several",
                    "one of `key`, `key_file`, `key_env`",
                ));
            }
        }
        if self.keys.is_empty() && !self.http.host.is_loopback() && !self.http.open {
            return Err(bad(
                "http.host",
                self.http.host,
                "a loopback address where no [[keys]] are configured; or `http.open = true` (--open) to serve anybody",
            ));
        }
        Ok(())
    }

    /// Cache size in tokens for a model of this context length.
    pub fn cache_tokens(&self, model_context: u32) -> u32 {
        let tokens = self.cache.tokens.unwrap_or_else(|| model_context.saturating_mul(8).min(32_768));
        tokens.max(self.cache.block_tokens)
    }

    /// The names that callers can have, each once.
    fn names(&self) -> Vec<Arc<str>> {
        auth::names(self.keys.iter().map(|key| key.name.as_str()))
    }

    /// Places in the queue: at least one for each name.
    pub(crate) fn queue_places(&self) -> usize {
        self.limits.max_queue.max(self.names().len())
    }

    /// The engine configuration for this model.
    pub fn engine(&self, model: &ModelConfig) -> EngineConfig {
        let c = &self.cache;
        let cache = CacheConfig {
            kind: "paged".into(),
            k: c.kv,
            v: c.values(),
            recent: Recent { tokens: c.kv_recent, sequences: 1 },
            ..CacheConfig::new(self.cache_tokens(model.context))
        };
        let prefix = PrefixSpec { policy: c.eviction.clone(), ..PrefixSpec::default() };
        let mut engine = EngineConfig {
            paged: PagedConfig { cache, block_tokens: c.block_tokens, prefix: Some(prefix) },
            scheduler: self.scheduler.config(),
            max_queue: self.limits.max_queue,
            names: self.names(),
            record: false,
            watchers: Vec::new(),
        };
        engine.fit();
        engine
    }

    /// Warnings about settings that are valid but may not be intended.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let (asked, recent) = (self.cache.kv_recent, self.cache.recent_tokens());
        if 0 < recent && recent < asked {
            let block = self.cache.block_tokens;
            warnings.push(format!(
                "cache.kv_recent is {asked}, but a block has {block} tokens: groups of {recent} are used; take a block_tokens \
                 that is a multiple of {asked}"
            ));
        }
        if self.keys.is_empty() && self.http.cors_origins.iter().any(|origin| origin == "*") {
            let warning = "http.cors_origins has \"*\" and there are no [[keys]]: every page that a browser on this machine \
                           opens can use the model, read and delete sessions, and see the live view; name the origins \
                           that may call, or configure [[keys]]";
            warnings.push(warning.into());
        }
        warnings
    }

    /// The model name for clients, if the model's file is called `file`.
    pub fn model_name(&self, file: &str) -> String {
        match (&self.model.name, &self.model.path) {
            (Some(name), _) => name.clone(),
            (None, Some(path)) => {
                let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
                stem.map_or_else(|| file.into(), |s| s.to_string_lossy().into_owned())
            }
            // "tiny-rust-7m (embedded)"
            (None, None) => file.split_whitespace().next().unwrap_or("embedded").into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_says() {
        let text = r#"
            [model]
            path = "models/x.gguf"
            [cache]
            tokens = 4096
            kv = "q8"
            block_tokens = 32
            [scheduler]
            policy = "srpt"
            max_batch = 8
            [http]
            host = "0.0.0.0"
            port = 9000
            [limits]
            max_queue = 3
            grace_s = 1.5
            [[keys]]
            name = "ann"
            key = "secret"
            [[keys]]
            name = "ops"
            key_env = "OPS_KEY"
            admin = true
        "#;
        let config = ServerConfig::parse(Path::new("k.toml"), text).unwrap();
        config.check().unwrap();
        assert_eq!(config.cache.kv, Storage::Q8);
        assert_eq!((config.scheduler.policy.as_str(), config.scheduler.max_batch), ("srpt", 8));
        assert_eq!((config.http.port, config.limits.max_queue, config.keys.len()), (9000, 3, 2));
        assert_eq!(config.model_name("whatever"), "x");
        assert!(!format!("{config:?}").contains("secret"), "a key must not be printed");
    }

    /// Regression: there was no warning at startup, and any page could read and delete sessions.
    #[test]
    fn pages_of_every_origin_without_keys_are_warned_of() {
        let warned = |text: &str| {
            let config = ServerConfig::parse(Path::new("k.toml"), text).unwrap();
            config.check().unwrap();
            config.warnings()
        };
        let open = warned("[http]\ncors_origins = [\"*\"]");
        assert!(
            open.len() == 1 && open[0].contains("cors_origins") && open[0].contains("[[keys]]"),
            "{open:?}"
        );
        for fine in [
            "",
            "[http]\ncors_origins = [\"https://example.org\"]",
            "[http]\ncors_origins = [\"*\"]\n[[keys]]\nname = \"ann\"\nkey = \"ann-secret\"",
        ] {
            assert_eq!(warned(fine), Vec::<String>::new(), "{fine}");
        }
    }

    #[test]
    fn bad_files_are_told_by_field() {
        let table = [
            ("[http]\nprot = 80", "prot"),
            ("[http]\nport = \"x\"", "port"),
            ("[http]\nport = 70000", "port"),
            ("[http]\nhost = \"localhost\"", "host"),
            ("[cache]\nkv = \"f17\"", "f17"),
            ("[cache]\nblock_tokens = 0", "cache.block_tokens"),
            ("[cache]\nkv_recent = 12", "cache.kv_recent"),
            ("[cache]\nkv_v = \"t4-o\"", "cache.kv_v"),
            ("[cache]\ntokens = 0", "cache.tokens"),
            ("[scheduler]\npolicy = \"best\"", "best"),
            ("[scheduler]\nmax_batch = 0", "max_batch"),
            ("[scheduler]\nlengths = \"oracle\"", "scheduler.lengths"),
            ("[cache]\neviction = \"opt\"", "cache.eviction"),
            ("[cache]\neviction = \"best\"", "cache.eviction"),
            ("[limits]\nmax_queue = 0", "limits.max_queue"),
            ("[limits]\nrequest_timeout_s = -1", "limits.request_timeout_s"),
            ("[limits]\ngrace_s = nan", "limits.grace_s"),
            ("[limits]\nheader_timeout_s = 0", "limits.header_timeout_s"),
            ("[sessions]\nidle_s = 0", "sessions.idle_s"),
            ("[sessions]\nmax_sessions = 9999999", "sessions.max_sessions"),
            ("[http]\ncors_origins = [\"example.org\"]", "http.cors_origins"),
            ("[http]\nhost = \"0.0.0.0\"", "http.open"),
            ("[[keys]]\nname = \"a\"", "keys[0]"),
            ("[[keys]]\nkey = \"a\"", "keys[0].name"),
            ("[[keys]]\nname = \"a\"\nkey = \"a\"\nkey_env = \"B\"", "keys[0]"),
            ("[model]\ntools = \"mistral\"", "model.tools"),
            ("[model]\ngeneration_config = \"vllm\"", "model.generation_config"),
            ("model = 3", "model"),
            ("[model", "line 1"),
        ];
        let mut wrong = Vec::new();
        for (text, words) in table {
            let error = match ServerConfig::parse(Path::new("k.toml"), text) {
                Err(error) => error.to_string(),
                Ok(config) => config.check().map_or_else(|e| e.to_string(), |()| "nothing".into()),
            };
            if !error.contains(words) {
                wrong.push(format!("{text:?}: {error:?} does not say {words:?}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
