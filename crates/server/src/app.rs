//! State that all handlers share.
use crate::auth::{Caller, Keys};
use crate::body::Bodies;
use crate::config::{ConfigError, HttpSection, LimitsSection, ServerConfig};
use crate::connections::Connections;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::openai::request::{Bounds, Schemas};
use crate::openai::scores::ScoreRoom;
use crate::openapi;
use crate::sessions::Store;
use crate::shares::Shares;
use crate::structured::{Compiled, Grammar, GrammarCompiler};
use crate::tools::{ToolFormat, Tooling};
use crate::work::Work;
use crate::worker::Engine;
use kvist_model::generation_config::Shipped;
use kvist_model::tokenizer::Piece;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// The template variable (and request field) that sets how long a model reasons.
pub(crate) const EFFORT: &str = "reasoning_effort";

/// One server: an engine, and everything the HTTP handlers need to serve it.
pub struct App {
    pub(crate) engine: Engine,
    pub(crate) http: HttpSection,
    pub(crate) limits: LimitsSection,
    pub(crate) keys: Keys,
    pub(crate) bodies: Bodies,
    pub(crate) work: Work,
    pub(crate) connections: Arc<Connections>,
    /// Requests that are being read or answered. `limits.max_connections` bounds them, shared among key names.
    pub(crate) under_way: Shares,
    /// Limits the log-probabilities of prompts, which are all held in memory at once.
    pub(crate) scores: ScoreRoom,
    pub(crate) bounds: Bounds,
    pub(crate) schemas: Schemas,
    pub(crate) openapi: String,
    pub(crate) metrics: Metrics,
    /// The model's tool call format; `None` if it has none.
    pub(crate) tools: Option<Tooling>,
    /// The model's answers are messages in channels: [`kvist_model::harmony`].
    pub(crate) channels: bool,
    /// Control tokens that mark tool calls or channels. They are written out as text where answers are parsed.
    pub(crate) marks: Vec<u32>,
    /// Compiler for grammars, built for the first request that needs one: building it takes time and memory.
    grammars: OnceLock<Result<GrammarCompiler, String>>,
    /// Bytes of every token, built when log-probabilities or the longest token are first requested.
    pieces: OnceLock<Option<Vec<Piece>>>,
    longest_token: OnceLock<Option<usize>>,
    /// Start time, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) sessions: Arc<Store>,
    /// Becomes true when the grace period after a signal is over: requests that still run are then notified and ended.
    pub(crate) stopping: watch::Sender<bool>,
    draining: AtomicBool,
}

impl App {
    /// `cache_tokens` is the most tokens that one request can hold in the cache when it runs alone.
    pub fn new(engine: Engine, config: &ServerConfig, cache_tokens: u32) -> Result<Arc<Self>, ConfigError> {
        config.check()?;
        let keys = Keys::new(&config.keys)?;
        let model = engine.model();
        let name = config.model_name(model.name());
        let decoder = model.config();
        let bounds = Bounds::new(&name, decoder.vocab, decoder.context.min(cache_tokens), &config.limits);
        let tools = match (&config.model.tools, model.chat_template()) {
            (_, None) => None,
            (Some(name), _) => Tooling::by_name(name).ok().flatten(),
            (None, Some(_)) if model.harmony().is_some() => {
                Some(Tooling { format: ToolFormat::Harmony, taught: false })
            }
            (None, Some(template)) => Tooling::of_template(template.source(true)),
        };
        // A Harmony model answers in channels even if tools are off.
        let channels = match tools {
            Some(tools) => tools.format == ToolFormat::Harmony,
            None => model.harmony().is_some(),
        };
        let template = model.chat_template().is_some();
        let effort = model.chat_template().is_some_and(|template| template.source(false).contains(EFFORT));
        let sampling = if config.model.ships_sampling() { *model.sampling() } else { Shipped::default() };
        let bounds = Bounds { template, effort, tools: tools.is_some(), sampling, ..bounds };
        let schemas = Schemas::new(&bounds);
        let format = if channels { Some(ToolFormat::Harmony) } else { tools.map(|tools| tools.format) };
        let marks = format.iter().flat_map(|format| format.markers());
        let marks = marks.filter_map(|mark| model.tokenizer()?.token(mark)).collect();
        let openapi = openapi::document(&bounds, &schemas).to_string();
        Ok(Arc::new(App {
            http: config.http.clone(),
            limits: config.limits.clone(),
            scores: ScoreRoom::new(bounds.max_tokens, &keys.names()),
            bodies: Bodies::new(config.limits.max_body_bytes, &keys.names()),
            work: Work::new(config.limits.max_body_bytes, &keys.names()),
            connections: Arc::new(Connections::new(config.limits.max_connections, !keys.is_open())),
            under_way: Shares::new(config.limits.max_connections, &keys.names()),
            keys,
            schemas,
            tools,
            channels,
            marks,
            grammars: OnceLock::new(),
            pieces: OnceLock::new(),
            longest_token: OnceLock::new(),
            openapi,
            metrics: Metrics::new(&name).expect("the metrics have valid names, each once"),
            bounds,
            started: unix_seconds(),
            sessions: Store::new(config.sessions.clone(), config.cache.block_tokens),
            stopping: watch::Sender::new(false),
            draining: AtomicBool::new(false),
            engine,
        }))
    }

    /// The name under which clients address the model.
    pub fn model_name(&self) -> &str {
        &self.bounds.model
    }

    /// Stop accepting requests. Running requests continue.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        self.engine.drain();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Value for `Retry-After` while the server shuts down, in seconds.
    pub(crate) fn retry_after_s(&self) -> u32 {
        self.limits.grace_s.ceil().clamp(1.0, 3600.0) as u32
    }

    pub(crate) fn pieces(&self) -> Option<&[Piece]> {
        let make = || self.engine.model().tokenizer()?.pieces(self.bounds.vocab as usize).ok();
        self.pieces.get_or_init(make).as_deref()
    }

    /// Length of the longest token of the vocabulary, in bytes. `None` if tokens have no bytes of their own.
    pub(crate) fn longest_token(&self) -> Option<usize> {
        let longest = || self.pieces()?.iter().map(|piece| piece.bytes.len()).max();
        *self.longest_token.get_or_init(longest)
    }

    /// Run `work` that renders or tokenizes for a request, off the async threads: [`Work::run`].
    pub(crate) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        caller: &Caller,
        mut work: impl FnMut(&Arc<App>, &Caller) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (app, asks) = (self.clone(), caller.clone());
        self.work.run(&caller.name, move || work(&app, &asks)).await
    }

    /// Compile a grammar. The first call may take some tenths of a second.
    pub(crate) fn compile(&self, grammar: &Grammar) -> Result<Compiled, ApiError> {
        let made = self
            .grammars
            .get_or_init(|| GrammarCompiler::of_model(self.engine.model()).map_err(|e| e.to_string()));
        let compiler = made.as_ref().map_err(|e| ApiError::unsupported("response_format", e.clone()))?;
        Ok(compiler.compile(grammar)?)
    }

    pub(crate) fn new_id(&self, kind: &str) -> String {
        format!("{kind}-{:032x}", crate::openai::random_id())
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

    /// Decode an answer the way it is parsed: with the channel markers as text.
    pub(crate) fn decode_answer(&self, tokens: &[u32]) -> Result<String, ApiError> {
        let tokenizer = self.engine.model().tokenizer().filter(|_| self.channels);
        let Some(tokenizer) = tokenizer else { return self.decode(tokens) };
        let failed = |error: kvist_engine::Error| ApiError::internal(error.to_string());
        let mut stream = tokenizer.stream_with(&self.marks);
        let mut text = String::new();
        for token in tokens {
            text += &stream.push(*token).map_err(failed)?;
        }
        Ok(text + &stream.finish().map_err(failed)?)
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
