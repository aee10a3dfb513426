//! State that all handlers share.
use crate::auth::{Caller, Keys};
use crate::bodies::Bodies;
use crate::config::{ConfigError, HttpSection, LimitsSection, ServerConfig};
use crate::connections::Connections;
use crate::deletions::Deletions;
use crate::error::ApiError;
use crate::kv_events::{KvEventSockets, KvEvents};
use crate::live::LiveView;
use crate::live::below::LastLook;
use crate::live::sessions::SessionListCache;
use crate::metrics::Metrics;
use crate::openai::request::Bounds;
use crate::openai::score_memory::ScoreMemory;
use crate::openapi;
use crate::schemas::Schemas;
use crate::sessions::Unsettled;
use crate::work::WorkMemory;
use kvist_engine::chat_format::ChatFormat;
use kvist_engine::executor::PagedConfig;
use kvist_engine::random::random_id;
use kvist_engine::saved::Origin;
use kvist_engine::serving::{Engine, TenantQuota};
use kvist_engine::sessions::{SessionKeeper, SessionStore, SharedSessions, SharedStore, Timestamp};
use kvist_engine::tools::Tooling;
use kvist_model::generation_config::SamplingDefaults;
use kvist_model::tokenizer::Piece;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// The template variable (and request field) that sets how long a model reasons.
pub(crate) const EFFORT: &str = "reasoning_effort";

/// One server: an engine, and everything the HTTP handlers need to serve it.
pub struct ServerState {
    pub(crate) engine: Engine,
    pub(crate) http: HttpSection,
    pub(crate) limits: LimitsSection,
    /// The name of this process among the workers of a fleet.
    pub(crate) instance_id: String,
    pub(crate) block_tokens: u32,
    /// The cache keeps some tokens of a text (`cache.keep`), so texts may be longer than it is.
    pub(crate) keeps_some: bool,
    pub(crate) keys: Keys,
    pub(crate) bodies: Bodies,
    pub(crate) work: WorkMemory,
    pub(crate) connections: Arc<Connections>,
    /// Requests that are being read or answered. `limits.max_connections` bounds them, shared among key names.
    pub(crate) requests: TenantQuota,
    /// Limits the notes that names without admin rights leave in tiers.
    pub(crate) deletions: Deletions,
    /// Limits the log-probabilities of prompts, which are all kept in memory at once.
    pub(crate) scores: ScoreMemory,
    pub(crate) bounds: Bounds,
    pub(crate) schemas: Schemas,
    pub(crate) openapi: String,
    pub(crate) metrics: Metrics,
    /// How conversations become prompts, and how answers are read.
    pub(crate) chat: ChatFormat,
    /// Bytes of every token, built when log-probabilities or the longest token are first requested.
    pieces: OnceLock<Option<Vec<Piece>>>,
    longest_token: OnceLock<Option<usize>>,
    /// Start time, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) sessions: Arc<SessionStore>,
    /// Generations whose output is not in `sessions` yet.
    pub(crate) unsettled: Unsettled,
    /// Keeps the sessions in a directory, if there is one.
    pub(crate) keeper: OnceLock<SessionKeeper>,
    /// Records the sessions in a store that workers share, if there is one.
    pub(crate) shared_sessions: OnceLock<SharedSessions>,
    /// Most sessions that a key's name saves in files.
    pub(crate) max_session_files: usize,
    /// Tells routers what the cache has, if an endpoint is configured.
    pub(crate) kv_events: OnceLock<KvEvents>,
    pub(crate) live: LiveView,
    pub(crate) session_list: Arc<SessionListCache>,
    pub(crate) below: LastLook,
    /// Becomes true when the grace period after a signal is over: requests that still run are then notified and ended.
    pub(crate) stopping: watch::Sender<bool>,
    draining: AtomicBool,
}

impl ServerState {
    /// `text_tokens` is the longest text of one request when it runs alone: what the cache holds, or more with `cache.keep`.
    pub fn new(engine: Engine, config: &ServerConfig, text_tokens: u32) -> Result<Arc<Self>, ConfigError> {
        config.check()?;
        let keys = Keys::new(&config.keys)?;
        let model = engine.model();
        let name = config.model_name(model.name());
        let decoder = model.config();
        let bounds = Bounds::new(&name, decoder.vocab, decoder.context.min(text_tokens), &config.limits);
        let chat = match &config.model.tools {
            Some(name) => ChatFormat::with_tools(model.clone(), Tooling::by_name(name).ok().flatten()),
            None => ChatFormat::new(model.clone()),
        };
        let template = model.chat_template().is_some();
        let effort = model.chat_template().is_some_and(|template| template.source(false).contains(EFFORT));
        let sampling =
            if config.model.ships_sampling() { *model.sampling() } else { SamplingDefaults::default() };
        let bounds = Bounds { template, effort, tools: chat.tools().is_some(), sampling, ..bounds };
        let schemas = Schemas::new(&bounds);
        let sessions = SessionStore::new(config.sessions.limits());
        let openapi = openapi::document(&bounds, &schemas).to_string();
        Ok(Arc::new(ServerState {
            http: config.http.clone(),
            limits: config.limits.clone(),
            instance_id: format!("kvist-{:032x}", random_id()),
            block_tokens: config.cache.block_tokens,
            keeps_some: config.cache.keep.is_some(),
            scores: ScoreMemory::new(bounds.max_tokens, &keys.names()),
            bodies: Bodies::new(config.limits.max_body_bytes, &keys.names()),
            work: WorkMemory::new(config.limits.max_body_bytes, &keys.names()),
            connections: Arc::new(Connections::new(config.limits.max_connections, !keys.is_open())),
            deletions: Deletions::new(config.limits.max_deletions),
            requests: TenantQuota::new(config.limits.max_connections, &keys.names()),
            keys,
            schemas,
            chat,
            pieces: OnceLock::new(),
            longest_token: OnceLock::new(),
            openapi,
            metrics: Metrics::new(&name).expect("the metrics have valid names, each once"),
            bounds,
            started: Timestamp::now().unix_s,
            session_list: SessionListCache::new(engine.clone(), sessions.clone()),
            below: LastLook::default(),
            sessions,
            unsettled: Unsettled::default(),
            keeper: OnceLock::new(),
            shared_sessions: OnceLock::new(),
            kv_events: OnceLock::new(),
            max_session_files: config.sessions.max_sessions,
            live: LiveView::watch(&engine),
            stopping: watch::Sender::new(false),
            draining: AtomicBool::new(false),
            engine,
        }))
    }

    /// Keeps the sessions in `dir` from now on, and adds those that it has. `paged` is the engine's cache, and `origin`
    /// what its K and V depend on. Call it before the server accepts connections.
    ///
    /// # Errors
    /// The directory cannot be used ([`SessionKeeper::open`]).
    pub fn keep_sessions(
        &self,
        dir: &Path,
        (origin, numerics): (&Origin, &str),
        paged: &PagedConfig,
    ) -> Result<(), kvist_engine::Error> {
        let keeper = SessionKeeper::open(dir, &self.engine, &self.sessions, (origin, numerics), paged)?;
        // A second call would find the directory in use.
        let _ = self.keeper.set(keeper);
        Ok(())
    }

    /// Records the sessions in `store` from now on, and continues those that other workers have recorded there. `origin` is what sessions
    /// depend on. Call it once, after [`keep_sessions`](Self::keep_sessions) and before the server accepts connections.
    ///
    /// # Errors
    /// As [`SharedSessions::open`].
    pub fn share_sessions(&self, store: SharedStore, origin: &Origin) -> Result<(), kvist_engine::Error> {
        let vocab = self.engine.model().config().vocab;
        let _ = self.shared_sessions.set(SharedSessions::open(store, &self.sessions, origin, vocab)?);
        Ok(())
    }

    /// Publishes what the cache has, from now on. `salt` is that of the requests whose blocks are published
    /// ([`KvEventsSection::salt`](crate::config::KvEventsSection::salt)). Call it within the server's runtime, once.
    ///
    /// # Errors
    /// The sockets cannot be used, or the engine has stopped.
    pub async fn publish_events(&self, sockets: KvEventSockets, salt: Arc<str>) -> std::io::Result<()> {
        let events = KvEvents::start(sockets, &self.engine, salt).await?;
        let _ = self.kv_events.set(events);
        Ok(())
    }

    /// Waits until all changes of sessions so far are in the directory and in the shared store, if there are such. Blocks this thread.
    pub fn flush_sessions(&self) {
        if let Some(shared) = self.shared_sessions.get() {
            shared.flush();
        }
        if let Some(keeper) = self.keeper.get() {
            keeper.flush();
        }
    }

    /// The live view of the engine: recordings and dashboards.
    pub fn live(&self) -> &LiveView {
        &self.live
    }

    /// How often the blocks of sessions were looked up for dashboards.
    pub fn session_lookups(&self) -> u64 {
        self.session_list.n_lookups()
    }

    /// The name under which clients address the model.
    pub fn model_name(&self) -> &str {
        &self.bounds.model
    }

    /// The longest prompt and answer together. If the cache keeps all tokens of a text, its present capacity is a limit.
    pub(crate) fn max_model_len(&self) -> u32 {
        if self.keeps_some {
            return self.bounds.max_tokens;
        }
        let capacity = u32::try_from(self.engine.capacity_tokens()).unwrap_or(u32::MAX);
        self.bounds.max_tokens.min(capacity)
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
        mut work: impl FnMut(&Arc<ServerState>, &Caller) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (state, caller) = (self.clone(), caller.clone());
        let name = caller.name.clone();
        self.work.run(&name, move || work(&state, &caller)).await
    }

    pub(crate) fn new_id(&self, kind: &str) -> String {
        format!("{kind}-{:032x}", random_id())
    }

    pub(crate) fn now(&self) -> u64 {
        Timestamp::now().unix_s
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
