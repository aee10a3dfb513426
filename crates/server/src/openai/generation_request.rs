//! What one request asks of the engine: prompts, and how to answer them.
use super::fields::{CacheFields, Common, OneOrMore};
use super::sampling::sampling;
use crate::auth::Caller;
use crate::config::LongAnswers;
use crate::error::ApiError;
use crate::memory::Permit;
use crate::state::ServerState;
use axum::http::StatusCode;
use futures_util::stream::BoxStream;
use kvist_engine::grammar::Compiled;
use kvist_engine::sampler::SamplerConfig;
use kvist_engine::serving::{Event, GenerationHandle, Job, JobName, QuotaPermit};
use kvist_engine::text::Stops;
use kvist_scheduler::Retention;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The events of a generation. An error ends the request.
pub(crate) type EventStream = BoxStream<'static, Result<Event, ApiError>>;

/// Processes the events of a generation before the client gets them. Only for requests with one answer.
pub(crate) type Record = Box<dyn FnOnce(GenerationHandle) -> EventStream + Send>;

/// What one request asks of the engine.
pub(crate) struct GenerationRequest {
    pub prompts: Vec<Arc<[u32]>>,
    /// Number of answers to each prompt.
    pub n: u32,
    /// Largest number of tokens per answer. Less if prompt and answer would exceed `max_total`.
    pub max_new: u32,
    /// Largest number of tokens of prompt and answer together.
    pub max_total: u32,
    pub sampling: SamplerConfig,
    pub logit_bias: Arc<[(u32, f32)]>,
    pub stop: Vec<String>,
    /// The stop strings compiled, from [`GenerationRequest::admit`] on.
    stops: Arc<Stops>,
    pub ignore_eos: bool,
    pub logprobs: Option<u8>,
    /// Report log-probabilities of the prompts' tokens too.
    pub prompt_logprobs: bool,
    /// The memory permit for log-probabilities of prompts and for echoed prompts.
    pub memory_permit: Option<Permit>,
    pub constraint: Option<Compiled>,
    /// Control tokens to write out by name.
    pub written: Vec<u32>,
    pub salt: Arc<str>,
    pub priority: i32,
    /// Keeps the prompt in the cache.
    pub retain: Option<Retention>,
    pub deadline: Instant,
    /// The answers should be complete by this time. They go on after it.
    pub target: Option<Instant>,
    pub explain: bool,
    /// The tokens of prompts and answers are part of the response.
    pub return_token_ids: bool,
    pub pace: Option<u32>,
    pub record: Option<Record>,
    /// Queue permit of each prompt: from when the prompt is ready until its last answer was submitted. The answers use
    /// it one after the other, and other permits if there are any.
    pub(super) queue_permits: Vec<Option<Arc<QuotaPermit>>>,
    /// For the log and the live view.
    pub id: String,
    pub session: Option<Arc<str>>,
    pub endpoint: &'static str,
    pub caller: Caller,
}

impl GenerationRequest {
    /// Create a request from the fields that both endpoints share. The endpoint fills in the rest.
    pub fn new(
        state: &ServerState,
        caller: &Caller,
        common: &Common,
        id: String,
        endpoint: &'static str,
    ) -> Result<Self, ApiError> {
        let kvist = common.kvist.clone().unwrap_or_default();
        if kvist.priority.is_some() && !caller.admin {
            let message = "`kvist.priority` needs an admin key";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message).about("kvist.priority"));
        }
        if kvist.target_ms.is_some() && !caller.admin {
            let message = "`kvist.target_ms` needs an admin key: it puts the request before others";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message).about("kvist.target_ms"));
        }
        if kvist.cache.is_some() && !caller.admin {
            let message = "`kvist.cache` needs an admin key: what it keeps takes room from all";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message).about("kvist.cache"));
        }
        let vocab = state.bounds.vocab;
        let mut logit_bias = Vec::new();
        for (token, bias) in common.logit_bias.iter().flatten() {
            let known = token.parse().ok().filter(|id| *id < vocab);
            let known = known.ok_or_else(|| {
                let param = format!("logit_bias.{token}");
                ApiError::invalid(
                    param,
                    format!(
                        "`logit_bias` names the token {token}, but the vocabulary has only {vocab} tokens"
                    ),
                )
            })?;
            logit_bias.push((known, *bias));
        }
        let own = kvist.timeout_ms.map_or(Duration::MAX, Duration::from_millis);
        let timeout = own.min(state.limits.request_timeout());
        Ok(GenerationRequest {
            prompts: Vec::new(),
            n: common.n.unwrap_or(1),
            max_new: 0,
            max_total: state.max_model_len(),
            sampling: sampling(common, &state.bounds.sampling),
            logit_bias: logit_bias.into(),
            stop: match common.stop.clone() {
                None => Vec::new(),
                Some(OneOrMore::One(stop)) => vec![stop],
                Some(OneOrMore::More(stops)) => stops,
            },
            stops: Arc::default(),
            ignore_eos: common.ignore_eos.unwrap_or(false),
            logprobs: None,
            prompt_logprobs: false,
            memory_permit: None,
            constraint: None,
            written: Vec::new(),
            salt: caller.salt(common.cache_salt.as_deref().unwrap_or_default()),
            priority: kvist.priority.unwrap_or(0),
            retain: kvist.cache.map(CacheFields::retention),
            deadline: caller.arrived + timeout,
            target: kvist.target_ms.map(|ms| caller.arrived + Duration::from_millis(ms)),
            explain: kvist.explain.unwrap_or(false),
            return_token_ids: common.return_token_ids.unwrap_or(false),
            pace: kvist.pace,
            record: None,
            queue_permits: Vec::new(),
            id,
            session: None,
            endpoint,
            caller: caller.clone(),
        })
    }

    /// Check that the request can be served. `asked` is the client's limit of new tokens, if any; `param` is the name
    /// of the prompt's field for errors.
    pub fn admit(&mut self, state: &ServerState, asked: Option<u32>, param: &str) -> Result<(), ApiError> {
        if self.retain.is_some() && state.keeps_some {
            let message =
                "this server keeps only some tokens of a text (cache.keep), so no prompt stays in its cache";
            return Err(ApiError::unsupported("kvist.cache", message));
        }
        let max = self.max_total;
        let choices = self.prompts.len() as u64 * u64::from(self.n);
        if choices > u64::from(state.bounds.max_choices) {
            return Err(too_many(self.prompts.len(), self.n, state.bounds.max_choices));
        }
        let most = state.engine.most_queued(&self.caller.name);
        if self.prompts.len() > most {
            // The queue would be full for it forever, however often the client tries again.
            let message = format!(
                "the request has {} prompts, each of which needs a place in the queue, but this key can have at most \
                 {most} places (max_queue). Send fewer prompts at a time",
                self.prompts.len()
            );
            return Err(ApiError::invalid(param, message));
        }
        for prompt in &self.prompts {
            let tokens = prompt.len() as u64;
            if tokens == 0 {
                return Err(ApiError::invalid(param, "the prompt has no tokens"));
            }
            // If nothing is generated, the answer needs no room.
            if tokens + u64::from(asked != Some(0)) > u64::from(max) {
                let message = format!(
                    "the prompt has {tokens} tokens, but prompt and answer together can have at most {max}"
                );
                return Err(ApiError::too_long(param, message));
            }
            let asked = asked.filter(|_| state.limits.long_answers == LongAnswers::Reject);
            if let Some(asked) = asked.filter(|&asked| tokens + u64::from(asked) > u64::from(max)) {
                let message = format!(
                    "the prompt has {tokens} tokens and {asked} new ones were asked for, but together they can be at most {max}: \
                     ask for up to {}",
                    u64::from(max) - tokens
                );
                return Err(ApiError::too_long(param, message));
            }
        }
        self.max_new = asked.unwrap_or(max);
        self.stops = Arc::new(Stops::new(&self.stop));
        if self.logprobs.is_some() {
            // Build the table here: it takes a while, and must not run on an async thread.
            state.pieces();
        }
        Ok(())
    }

    /// Reserve a permit in the queue for each prompt; from now on the prompts occupy memory. The request may still wait
    /// for something before it is submitted. This wait does not block other requests' permits, and a queue that fills
    /// up meanwhile does not refuse the request.
    pub fn queue(&mut self, state: &ServerState) -> Result<(), ApiError> {
        let permits = state.engine.reserve(&self.caller.name, self.prompts.len());
        let permits = permits.map_err(|rejected| {
            self.log(&Figures { ended: "rejected", ..Figures::default() });
            ApiError::of_rejected(rejected, state.retry_after_s())
        })?;
        self.queue_permits = permits.into_iter().map(Some).collect();
        Ok(())
    }

    /// Returns whether this prompt has a permit that no submitted job uses.
    pub(super) fn has_queue_permit(&self, prompt: usize) -> bool {
        self.queue_permits[prompt].as_ref().is_some_and(|permit| Arc::strong_count(permit) == 1)
    }

    /// Write the request's line to the log.
    pub(super) fn log(&self, figures: &Figures) {
        let ms = |time: Option<Duration>| time.map_or(-1.0, |t| (t.as_secs_f64() * 1e4).round() / 10.0);
        tracing::info!(
            target: "kvist::server",
            id = self.id,
            key = &*self.caller.name,
            endpoint = self.endpoint,
            answers = self.prompts.len() * self.n as usize,
            prompt_tokens = self.prompts.iter().map(|p| p.len()).sum::<usize>(),
            cached_tokens = figures.cached_tokens,
            completion_tokens = figures.completion_tokens,
            queued_ms = ms(figures.queued),
            ttft_ms = ms(figures.ttft),
            total_ms = ms(Some(figures.total)),
            ended = figures.ended,
            "request"
        );
    }

    pub(super) fn job(&self, prompt: usize, choice: u32) -> Job {
        let index = prompt as u64 * u64::from(self.n) + u64::from(choice);
        let sampling = SamplerConfig { seed: self.sampling.seed.wrapping_add(index), ..self.sampling };
        Job {
            prompt: self.prompts[prompt].clone(),
            // An answer ends when the context is full.
            max_new: self.max_new.min(self.max_total - self.prompts[prompt].len() as u32),
            sampling,
            logit_bias: self.logit_bias.clone(),
            stop: self.stops.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
            // All answers to a prompt share the log-probabilities of the first.
            prompt_logprobs: self.prompt_logprobs && choice == 0,
            constraint: self.constraint.as_ref().map(Compiled::constraint),
            written: self.written.clone(),
            tenant: self.caller.name.clone(),
            salt: self.salt.clone(),
            priority: self.priority,
            retain: self.retain,
            deadline: Some(self.deadline),
            target: self.target,
            explain: self.explain,
            pace: self.pace,
            name: JobName { request: self.id.as_str().into(), session: self.session.clone() },
        }
    }
}

/// Outcome of a request, for the log.
#[derive(Default)]
pub(super) struct Figures {
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub queued: Option<Duration>,
    pub ttft: Option<Duration>,
    pub total: Duration,
    pub ended: &'static str,
}

/// The error for a request with more answers than allowed.
pub(crate) fn too_many(prompts: usize, n: u32, max: u32) -> ApiError {
    let message = format!(
        "the request has {prompts} prompts and n = {n}, which makes {} answers; `max_choices` allows {max} per \
         request. Send fewer prompts at a time, or a smaller `n`",
        prompts as u64 * u64::from(n)
    );
    ApiError::invalid(if n > 1 { "n" } else { "prompt" }, message)
}
