//! Configuration of a server: one TOML file, and command line flags that override it.
//!
//! Everything has a default. An unknown field is an error, because a misspelt limit would not limit anything.
mod check;
mod kv_events;
pub(crate) mod sections;
mod tiers;

use crate::auth::{self, Keys};
pub use kv_events::{EventEndpoint, KvEventsSection};
use kvist_cache::PrefixSpec;
use kvist_device::Recent;
use kvist_engine::executor::PagedConfig;
use kvist_engine::memory::CacheConfig;
use kvist_engine::serving::EngineConfig;
use kvist_model::config::ModelConfig;
use kvist_scheduler::Config;
pub use sections::*;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
pub use tiers::{LoadRule, OpenSessions, OpenTiers, TiersSection, WriteTime};

/// `kvist.toml`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    pub model: ModelSection,
    pub cache: CacheSection,
    /// By default with batch sizes that suit a CPU, and requests that wait for a common prefix.
    pub scheduler: Config,
    /// Whether the file has `max_batch_tokens`.
    #[serde(skip)]
    pub has_batch_tokens: bool,
    pub speculation: SpeculationSection,
    pub tiers: TiersSection,
    pub kv_events: KvEventsSection,
    pub http: HttpSection,
    pub limits: LimitsSection,
    pub sessions: SessionsSection,
    /// Without keys every client is served, but only on this machine unless `http.open` is set.
    pub keys: Vec<KeySection>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        let mut config = ServerConfig {
            model: ModelSection::default(),
            cache: CacheSection::default(),
            scheduler: Config::default(),
            has_batch_tokens: false,
            speculation: SpeculationSection::default(),
            tiers: TiersSection::default(),
            kv_events: KvEventsSection::default(),
            http: HttpSection::default(),
            limits: LimitsSection::default(),
            sessions: SessionsSection::default(),
            keys: Vec::new(),
        };
        ServingDefaults::default().apply(&mut config.scheduler);
        config
    }
}

/// What a file sets of the fields whose defaults are a server's own, not the scheduler's.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ServingDefaults {
    max_batch: Option<u32>,
    max_batch_tokens: Option<u32>,
    wait_for_prefix: Option<bool>,
}

impl ServingDefaults {
    fn apply(&self, config: &mut Config) {
        config.max_batch = self.max_batch.unwrap_or(32);
        config.max_batch_tokens = self.max_batch_tokens.unwrap_or(256);
        config.wait_for_prefix = self.wait_for_prefix.unwrap_or(true);
    }
}

impl ServerConfig {
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::parse(path, &text)
    }

    /// `file` is the name to use in errors.
    pub fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        #[derive(Deserialize)]
        struct Given {
            #[serde(default)]
            scheduler: ServingDefaults,
        }
        let wrong = |e: toml::de::Error| ConfigError::Toml { file: file.into(), what: e.to_string() };
        let mut config: ServerConfig = toml::from_str(text).map_err(wrong)?;
        let given: Given = toml::from_str(text).map_err(wrong)?;
        given.scheduler.apply(&mut config.scheduler);
        config.has_batch_tokens = given.scheduler.max_batch_tokens.is_some();
        Ok(config)
    }

    /// Sets the most tokens of a step, unless the file does. For devices that read long prompts faster in longer steps than a CPU's.
    pub fn suggest_batch_tokens(&mut self, tokens: u32) {
        if !self.has_batch_tokens {
            self.scheduler.max_batch_tokens = tokens.max(self.scheduler.max_batch);
        }
    }

    /// Check that the keys can be read. Reads their files and variables, and starting the server reads them again.
    pub fn check_keys(&self) -> Result<(), ConfigError> {
        Keys::new(&self.keys).map(drop)
    }

    /// Check everything that types cannot express. Call it after flags have been applied.
    pub fn check(&self) -> Result<(), ConfigError> {
        check::model(self)?;
        check::cache_and_scheduler(self)?;
        check::speculation(self)?;
        tiers::check(&self.tiers, [self.cache.kv, self.cache.values()])?;
        self.kv_events.check(self)?;
        check::limits(self)?;
        check::sessions(self)?;
        check::http(self)?;
        check::keys(self)
    }

    /// Cache size in tokens for a model of this context length.
    pub fn cache_tokens(&self, model_context: u32) -> u32 {
        let tokens = self.cache.tokens.unwrap_or_else(|| model_context.saturating_mul(8).min(32_768));
        tokens.max(self.cache.block_tokens)
    }

    /// The longest text of a request, prompt and answer, for a model of this context length.
    pub fn text_tokens(&self, model_context: u32) -> u32 {
        match self.cache.keep {
            None => model_context.min(self.cache_tokens(model_context)),
            Some(_) => model_context, // the cache has a part of it
        }
    }

    /// The tokens that the largest session counts as which is taken over from another worker
    /// ([`SharedStore::most_tokens`](kvist_engine::sessions::SharedStore::most_tokens)), for a model of this context length: a quota has room
    /// for it, and a context or a body may have made it. A conversation counts as a token for 16 bytes in memory, where a body takes several times its length.
    pub fn most_taken_over(&self, model_context: u32) -> u64 {
        let made = u64::from(self.text_tokens(model_context)).max(self.limits.max_body_bytes as u64 / 2);
        self.sessions.max_tokens.min(made)
    }

    /// The names that callers can have, each once.
    fn names(&self) -> Vec<Arc<str>> {
        auth::names(self.keys.iter().map(|key| key.name.as_str()))
    }

    /// Places in the queue: at least one for each name.
    pub(crate) fn queue_places(&self) -> usize {
        self.limits.max_queue.max(self.names().len())
    }

    /// Memory of the host that the tiers take at most below this model's cache, with what routers are told of them.
    pub fn tier_bytes(&self, model: &ModelConfig) -> u64 {
        let paged = self.engine(model).paged;
        let events = if self.kv_events.tiers { tiers::event_bytes(&self.tiers, &paged, model) } else { 0 };
        self.tiers.memory_bytes(&paged, model).saturating_add(events)
    }

    /// The engine configuration for this model, with room for drafts if `speculation` is on. The speculator and the tiers
    /// are added when they are open.
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
            scheduler: self.scheduler.clone(),
            max_queue: self.limits.max_queue,
            tenants: self.names(),
            record: false,
            watchers: Vec::new(),
            max_draft_tokens: self.speculation.step_tokens(&self.scheduler),
            speculator: None,
            tiers: None,
            prefix: None,
            keep: None,
        };
        engine.fit();
        if let Some(keep) = c.keep {
            engine.keep_only(keep);
        }
        engine
    }

    /// The salt of all requests that send none, for a prefix that they share; `None` with keys: names share nothing.
    pub fn common_salt(&self) -> Option<Arc<str>> {
        self.keys.is_empty().then(crate::auth::salt_of_anybody)
    }

    /// Warnings about settings that are valid but may not be intended.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::from_iter(self.kv_events.warning());
        let (asked, recent) = (self.cache.kv_recent, self.cache.recent_tokens());
        if 0 < recent && recent < asked {
            let block = self.cache.block_tokens;
            warnings.push(format!(
                "cache.kv_recent is {asked}, but a block has {block} tokens: groups of {recent} are used; to avoid \
                 this, set block_tokens to a multiple of {asked}"
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
    use kvist_device::Storage;
    use kvist_engine::speculate::Bounds;

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
            [speculation]
            speculate = "draft"
            draft_model = "models/y.gguf"
            draft_depth = 3
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
        let sizes = |config: &ServerConfig| (config.scheduler.max_batch, config.scheduler.max_batch_tokens);
        assert_eq!(
            sizes(&config),
            (8, 256),
            "what the file does not set is the server's, not the scheduler's"
        );
        assert_eq!(sizes(&ServerConfig::default()), (32, 256));
        let suggested = |text: &str| {
            let mut config = ServerConfig::parse(Path::new("k.toml"), text).unwrap();
            config.suggest_batch_tokens(1024);
            sizes(&config)
        };
        assert_eq!(suggested(""), (32, 1024));
        assert_eq!(suggested("[scheduler]\nmax_batch = 2000"), (2000, 2000));
        assert_eq!(suggested("[scheduler]\nmax_batch_tokens = 64"), (32, 64), "the file counts");
        let speculation = &config.speculation;
        assert_eq!((speculation.speculate.as_str(), speculation.is_on()), ("draft", true));
        assert_eq!(speculation.bounds(), Bounds { tokens: 16, depth: 3, width: 1 });
        assert_eq!(speculation.step_tokens(&config.scheduler), 128, "eight requests");
        assert_eq!(ServerConfig::default().speculation.step_tokens(&config.scheduler), 0);
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
            ("[kv_events]\nendpoint = \"localhost:5557\"", "tcp://"),
            ("[kv_events]\nreplay_endpoint = \"tcp://*:5558\"", "kv_events.replay_endpoint"),
            (
                "[kv_events]\nendpoint = \"tcp://*:1\"\nreplay_endpoint = \"tcp://*:1\"",
                "kv_events.replay_endpoint",
            ),
            ("[kv_events]\nendpoint = \"tcp://*:1\"\nbuffer = 0", "kv_events.buffer"),
            ("[kv_events]\nendpoint = \"tcp://*:1\"\nname = \"ann\"", "kv_events.name"),
            ("[cache]\nkeep = \"recent=64\"\n[kv_events]\nendpoint = \"tcp://*:1\"", "cache.keep"),
            ("[cache]\ntokens = 0", "cache.tokens"),
            ("[scheduler]\npolicy = \"best\"", "best"),
            ("[scheduler]\nmax_batch = 0", "max_batch"),
            ("[scheduler]\nlengths = \"oracle\"", "scheduler.lengths"),
            ("[cache]\neviction = \"opt\"", "cache.eviction"),
            ("[cache]\neviction = \"best\"", "cache.eviction"),
            ("[speculation]\nspeculate = \"oracle\"", "speculation.speculate"),
            ("[model]\npath = \"x\"\n[speculation]\nspeculate = \"draft\"", "speculation.draft_model"),
            ("[speculation]\nspeculate = \"ngram\"\ndraft_model = \"x\"", "speculation.draft_model"),
            ("[speculation]\ndraft_tokens = 0", "speculation.draft_tokens"),
            ("[speculation]\ndraft_depth = 1025", "speculation.draft_depth"),
            ("[speculation]\ndraft_width = 65", "speculation.draft_width"),
            ("[speculation]\ndraft_with = 2", "draft_with"),
            ("[limits]\nmax_queue = 0", "limits.max_queue"),
            ("[limits]\nrequest_timeout_s = -1", "limits.request_timeout_s"),
            ("[limits]\ngrace_s = nan", "limits.grace_s"),
            ("[limits]\nheader_timeout_s = 0", "limits.header_timeout_s"),
            ("[sessions]\nidle_s = 0", "sessions.idle_s"),
            ("[sessions]\nmax_sessions = 9999999", "sessions.max_sessions"),
            ("[sessions]\nshared = true", "tiers.store (--tier-store)"),
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
