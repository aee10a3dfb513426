//! What all handlers share.
use crate::auth::Keys;
use crate::config::{ConfigError, HttpSection, LimitsSection, ServerConfig};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::openai::request::{Bounds, Schemas};
use crate::openapi;
use crate::worker::Engine;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// One server: an engine, and how it is shown to the world.
pub struct App {
    pub(crate) engine: Engine,
    pub(crate) http: HttpSection,
    pub(crate) limits: LimitsSection,
    pub(crate) keys: Keys,
    pub(crate) bounds: Bounds,
    pub(crate) schemas: Schemas,
    pub(crate) openapi: String,
    pub(crate) metrics: Metrics,
    /// Seconds since 1970.
    pub(crate) started: u64,
    /// Turns true when the grace after a signal is over: whatever still runs is told and ended.
    pub(crate) stopping: watch::Sender<bool>,
    draining: AtomicBool,
    /// Ids of requests: drawn once, then counted, so that none comes twice.
    id: (u64, AtomicU64),
}

impl App {
    /// `cache_tokens` is what one request may hold at most, be it alone.
    pub fn new(engine: Engine, config: &ServerConfig, cache_tokens: u32) -> Result<Arc<Self>, ConfigError> {
        config.check()?;
        let keys = Keys::new(&config.keys)?;
        let model = engine.model();
        let name = config.model_name(model.name());
        let decoder = model.decoder().config();
        let bounds = Bounds::new(&name, decoder.vocab, decoder.context.min(cache_tokens), &config.limits);
        let schemas = Schemas::new(&bounds);
        let openapi = openapi::document(&bounds, &schemas).to_string();
        Ok(Arc::new(App {
            http: config.http.clone(),
            limits: config.limits.clone(),
            keys,
            schemas,
            openapi,
            metrics: Metrics::new(&name),
            bounds,
            started: unix_seconds(),
            stopping: watch::Sender::new(false),
            draining: AtomicBool::new(false),
            id: (crate::openai::random_seed(), AtomicU64::new(0)),
            engine,
        }))
    }

    /// Take no more requests; those that run go on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        self.engine.drain();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// When a server that goes down may be back.
    pub(crate) fn retry_after_s(&self) -> u32 {
        self.limits.grace_s.ceil().clamp(1.0, 3600.0) as u32
    }

    pub(crate) fn new_id(&self, kind: &str) -> String {
        let count = self.id.1.fetch_add(1, Ordering::Relaxed);
        format!("{kind}-{:016x}{count:08x}", self.id.0)
    }

    pub(crate) fn now(&self) -> u64 {
        unix_seconds()
    }

    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String, ApiError> {
        let tokenizer = self.engine.model().tokenizer();
        let tokenizer =
            tokenizer.ok_or_else(|| ApiError::unsupported("tokens", "this model has no tokenizer"))?;
        tokenizer.decode(tokens).map_err(|e| ApiError::internal(e.to_string()))
    }

    pub(crate) fn log_prompts(&self, id: &str, prompts: &[Arc<[u32]>]) {
        if self.http.log_prompts {
            for prompt in prompts {
                let text = self.decode(prompt).unwrap_or_default();
                tracing::info!(target: "kvist::server", id, text, "prompt");
            }
        }
    }

    pub(crate) fn log_answer(&self, id: &str, index: usize, text: &str) {
        if self.http.log_prompts {
            tracing::info!(target: "kvist::server", id, index, text, "answer");
        }
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}
