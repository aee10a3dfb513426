//! Configuration of a server: one TOML file, and command line flags that override it.
//!
//! Everything has a default. An unknown field is an error, because a misspelt limit would not limit anything.
pub(crate) mod sections;

use crate::auth::{self, Keys};
use kvist_cache::PrefixSpec;
use kvist_cache::evict::{Parameters, build_for_serving};
use kvist_device::Recent;
use kvist_engine::executor::PagedConfig;
use kvist_engine::memory::CacheConfig;
use kvist_engine::serving::EngineConfig;
use kvist_engine::tools::Tooling;
use kvist_model::config::ModelConfig;
use kvist_scheduler::LengthSource;
pub use sections::*;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;

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
    use kvist_device::Storage;

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
