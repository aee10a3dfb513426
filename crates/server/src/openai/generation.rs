//! The answers of one request: prompts × `n` generations, merged into one stream of events.
//!
//! The first answer to each prompt is submitted at once. The others are submitted after its first token, so that they
//! find the prompt in the cache. Dropping [`Answers`] cancels all generations that still run.
use super::fields::{Common, OneOrMore};
use super::sampling::sampling;
use crate::app::App;
use crate::auth::Caller;
use crate::body::Leave;
use crate::error::ApiError;
use crate::job::{Done, Event, Failure, Finish, Job, LogProb, Name, Rejected, Token};
use crate::metrics::Ended;
use crate::shares::Place;
use crate::structured::Compiled;
use crate::worker::Generation;
use axum::http::StatusCode;
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll, unfold};
use kvist_cache::MissReason;
use kvist_engine::sampler::SamplerConfig;
use kvist_engine::text::Stops;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The events of a generation. An error ends the request.
pub(crate) type Told = BoxStream<'static, Result<Event, ApiError>>;

/// Processes the events of a generation before the client gets them. Only for requests with one answer.
pub(crate) type Record = Box<dyn FnOnce(Generation) -> Told + Send>;

/// What one request asks of the engine.
pub(crate) struct Order {
    pub prompts: Vec<Arc<[u32]>>,
    /// Number of answers to each prompt.
    pub n: u32,
    /// Largest number of tokens per answer. Less if prompt and answer would exceed `room`.
    pub max_new: u32,
    /// Largest number of tokens of prompt and answer together.
    pub room: u32,
    pub sampling: SamplerConfig,
    pub logit_bias: Arc<[(u32, f32)]>,
    pub stop: Vec<String>,
    /// The stop strings compiled, from [`Order::admit`] on.
    stops: Arc<Stops>,
    pub ignore_eos: bool,
    pub logprobs: Option<u8>,
    /// Report log-probabilities of the prompts' tokens too.
    pub prompt_logprobs: bool,
    /// The memory permit for log-probabilities of prompts and for echoed prompts.
    pub leave: Option<Leave>,
    pub constraint: Option<Compiled>,
    /// Control tokens to write out by name.
    pub written: Vec<u32>,
    pub salt: Arc<str>,
    pub priority: i32,
    pub deadline: Instant,
    pub explain: bool,
    pub pace: Option<u32>,
    pub record: Option<Record>,
    /// Queue place of each prompt: from when the prompt is ready until its last answer was submitted. The answers use
    /// it one after the other, and other places if there are any.
    places: Vec<Option<Arc<Place>>>,
    /// For the log and the live view.
    pub id: String,
    pub session: Option<Arc<str>>,
    pub endpoint: &'static str,
    pub caller: Caller,
}

impl Order {
    /// Create an order from the fields that both endpoints share. The endpoint fills in the rest.
    pub fn new(
        app: &App,
        caller: &Caller,
        common: &Common,
        id: String,
        endpoint: &'static str,
    ) -> Result<Self, ApiError> {
        let kvist = common.kvist.clone().unwrap_or_default();
        if kvist.priority.is_some() && !caller.admin {
            let message = "`kvist.priority` is for admin keys, and this is none";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message).about("kvist.priority"));
        }
        let vocab = app.bounds.vocab;
        let mut logit_bias = Vec::new();
        for (token, bias) in common.logit_bias.iter().flatten() {
            let known = token.parse().ok().filter(|id| *id < vocab);
            let known = known.ok_or_else(|| {
                let param = format!("logit_bias.{token}");
                ApiError::invalid(
                    param,
                    format!("`logit_bias` names the token {token}; the vocabulary has {vocab}"),
                )
            })?;
            logit_bias.push((known, *bias));
        }
        let own = kvist.timeout_ms.map_or(Duration::MAX, Duration::from_millis);
        let timeout = own.min(app.limits.request_timeout());
        Ok(Order {
            prompts: Vec::new(),
            n: common.n.unwrap_or(1),
            max_new: 0,
            room: app.bounds.max_tokens,
            sampling: sampling(common, &app.bounds.sampling),
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
            leave: None,
            constraint: None,
            written: Vec::new(),
            salt: caller.salt(common.cache_salt.as_deref().unwrap_or_default()),
            priority: kvist.priority.unwrap_or(0),
            deadline: caller.arrived + timeout,
            explain: kvist.explain.unwrap_or(false),
            pace: kvist.pace,
            record: None,
            places: Vec::new(),
            id,
            session: None,
            endpoint,
            caller: caller.clone(),
        })
    }

    /// Check that the request can be served. `asked` is the client's limit of new tokens, if any; `param` is the name
    /// of the prompt's field for errors.
    pub fn admit(&mut self, app: &App, asked: Option<u32>, param: &str) -> Result<(), ApiError> {
        let most = app.bounds.max_tokens;
        let choices = self.prompts.len() as u64 * u64::from(self.n);
        if choices > u64::from(app.bounds.max_choices) {
            return Err(too_many(self.prompts.len(), self.n, app.bounds.max_choices));
        }
        for prompt in &self.prompts {
            let tokens = prompt.len() as u64;
            if tokens == 0 {
                return Err(ApiError::invalid(param, "the prompt has no tokens"));
            }
            // If nothing is generated, the answer needs no room.
            if tokens + u64::from(asked != Some(0)) > u64::from(most) {
                let message = format!(
                    "the prompt has {tokens} tokens; prompt and answer together have room for {most}"
                );
                return Err(ApiError::too_long(param, message));
            }
        }
        self.max_new = asked.unwrap_or(most);
        self.stops = Arc::new(Stops::new(&self.stop));
        if self.logprobs.is_some() {
            // Build the table here: it takes a while, and must not run on an async thread.
            app.pieces();
        }
        Ok(())
    }

    /// Reserve a place in the queue for each prompt; from now on the prompts occupy memory. The request may still wait
    /// for something before it is submitted. This wait does not block other requests' places, and a queue that fills up
    /// meanwhile does not refuse the request.
    pub fn queue(&mut self, app: &App) -> Result<(), ApiError> {
        let places = app.engine.reserve(&self.caller.name, self.prompts.len());
        let places = places.map_err(|rejected| {
            self.log(&Figures { ended: "rejected", ..Figures::default() });
            ApiError::of_rejected(rejected, app.retry_after_s())
        })?;
        self.places = places.into_iter().map(Some).collect();
        Ok(())
    }

    /// Returns whether this prompt has a place that no submitted job uses.
    fn has_place(&self, prompt: usize) -> bool {
        self.places[prompt].as_ref().is_some_and(|place| Arc::strong_count(place) == 1)
    }

    /// Write the request's line to the log.
    fn log(&self, figures: &Figures) {
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

    fn job(&self, prompt: usize, choice: u32) -> Job {
        let index = prompt as u64 * u64::from(self.n) + u64::from(choice);
        let sampling = SamplerConfig { seed: self.sampling.seed.wrapping_add(index), ..self.sampling };
        Job {
            prompt: self.prompts[prompt].clone(),
            // An answer ends when the context is full.
            max_new: self.max_new.min(self.room - self.prompts[prompt].len() as u32),
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
            deadline: Some(self.deadline),
            explain: self.explain,
            pace: self.pace,
            name: Name { request: self.id.as_str().into(), session: self.session.clone() },
        }
    }
}

/// Outcome of a request, for the log.
#[derive(Default)]
struct Figures {
    cached_tokens: u64,
    completion_tokens: u64,
    queued: Option<Duration>,
    ttft: Option<Duration>,
    total: Duration,
    ended: &'static str,
}

/// The error for a request with more answers than allowed.
pub(crate) fn too_many(prompts: usize, n: u32, most: u32) -> ApiError {
    let message = format!(
        "the request has {prompts} prompts and n = {n}: {} answers, and `max_choices` allows {most} of one request. \
         Send fewer prompts at a time, or a smaller `n`",
        prompts as u64 * u64::from(n)
    );
    ApiError::invalid(if n > 1 { "n" } else { "prompt" }, message)
}

/// Random, so that a client can neither find another client's id by counting nor learn how many ids were drawn between
/// two.
pub(crate) fn random_id() -> u128 {
    let half = || u128::from(random_seed());
    half() << 64 | half()
}

/// A random number from the keys that std draws for its hash maps.
pub(crate) fn random_seed() -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(Instant::now())
}

/// Output of an answer.
pub(crate) enum Said {
    /// Log-probabilities of prompt tokens, from the second on. Only the first answer to a prompt reports them.
    Prompt(Vec<LogProb>),
    Token(Token),
    /// The end of the answer. The client is told about [`Finish::Deadline`] and [`Finish::Cancelled`].
    Done(Done),
}

/// How much of a prompt the prefix index supplied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Supplied {
    pub cached_tokens: u32,
    pub miss: Option<MissReason>,
}

/// Times of one answer, for metrics.
struct Clock {
    /// Start of its wait for the batch, if it first waited for another answer to its prompt.
    due: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
    open: bool,
}

/// The answers of one request, while they are generated.
pub(crate) struct Answers {
    app: Arc<App>,
    order: Order,
    running: SelectAll<BoxStream<'static, (usize, Result<Event, ApiError>)>>,
    /// Answers that may be submitted, because the first answer to their prompt has begun, and that are not in the queue
    /// yet.
    waiting: VecDeque<usize>,
    clocks: Vec<Clock>,
    /// Per prompt, from its first answer.
    supplied: Vec<Option<Supplied>>,
    stopping: watch::Receiver<bool>,
    began: Instant,
    queued: Option<Duration>,
    ttft: Option<Duration>,
    completion_tokens: u64,
    ended: Option<&'static str>,
    /// Text of each answer, if answers are logged.
    texts: Vec<String>,
}

/// Interval at which a full queue is tried again for the further answers of a running request.
const ASK_AGAIN: Duration = Duration::from_millis(20);

impl Answers {
    /// Submit the first answer to each prompt. On an error nothing runs.
    pub fn begin(app: &Arc<App>, order: Order) -> Result<Self, ApiError> {
        let total = order.prompts.len() * order.n as usize;
        let clock = |_| Clock { due: None, first: None, last: None, tokens: 0, open: false };
        let mut answers = Answers {
            app: app.clone(),
            running: SelectAll::new(),
            waiting: VecDeque::new(),
            clocks: (0..total).map(clock).collect(),
            supplied: vec![None; order.prompts.len()],
            stopping: app.stopping.subscribe(),
            began: Instant::now(),
            queued: None,
            ttft: None,
            completion_tokens: 0,
            ended: Some("rejected"),
            texts: vec![String::new(); if app.http.log_prompts { total } else { 0 }],
            order,
        };
        for prompt in 0..answers.order.prompts.len() {
            let submitted = answers.submit(prompt * answers.order.n as usize);
            submitted.map_err(|r| ApiError::of_rejected(r, answers.app.retry_after_s()))?;
        }
        answers.ended = None;
        Ok(answers)
    }

    /// Number of answers.
    pub fn total(&self) -> usize {
        self.clocks.len()
    }
    pub fn prompts(&self) -> usize {
        self.order.prompts.len()
    }
    /// Take the memory permit for log-probabilities and echoed prompts. The caller drops it.
    pub fn take_leave(&mut self) -> Option<Leave> {
        self.order.leave.take()
    }
    pub fn holds_leave(&self) -> bool {
        self.order.leave.is_some()
    }
    /// When the memory of an answer is freed even if the client has not read it.
    pub fn reading_ends(&self) -> Instant {
        Instant::now() + self.app.limits.request_timeout()
    }
    pub fn retry_after_s(&self) -> u32 {
        self.app.retry_after_s()
    }
    pub fn supplied(&self, prompt: usize) -> Option<Supplied> {
        self.supplied[prompt]
    }
    pub fn explains(&self) -> bool {
        self.order.explain
    }

    /// Usage in OpenAI's format: a prompt counts once, however many answers it has.
    pub fn usage(&self) -> serde_json::Value {
        let prompt: u64 = self.order.prompts.iter().map(|p| p.len() as u64).sum();
        let cached: u64 = self.supplied.iter().flatten().map(|s| u64::from(s.cached_tokens)).sum();
        serde_json::json!({
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    fn submit(&mut self, index: usize) -> Result<(), Rejected> {
        let n = self.order.n as usize;
        let job = self.order.job(index / n, (index % n) as u32);
        let (engine, prompt) = (&self.app.engine, index / n);
        let own = self.order.places[prompt].clone().filter(|own| Arc::strong_count(own) == 2);
        // A request that was accepted gets all its answers, even while the server shuts down.
        let generation = match own {
            Some(own) => engine.submit_in(job, own),
            None => engine.submit_sibling(job),
        }?;
        if (index + 1).is_multiple_of(n) {
            // This was the last answer. The place is free when the job that uses it has been admitted.
            self.order.places[prompt] = None;
        }
        self.clocks[index].open = true;
        let next = |mut generation: Generation| async move {
            let event = generation.next().await?;
            Some((Ok(event), generation))
        };
        let told = match self.order.record.take() {
            Some(record) => record(generation),
            None => unfold(generation, next).boxed(),
        };
        self.running.push(told.map(move |event| (index, event)).boxed());
        Ok(())
    }

    /// The next output, and the index of its answer. `None` when all answers have ended. After an error nothing runs,
    /// and no output follows.
    pub async fn next(&mut self) -> Option<Result<(usize, Said), ApiError>> {
        loop {
            let event = self.event().await;
            match event {
                // Every submitted answer gets an end, unless the engine has died.
                Ok(None) if self.clocks.iter().any(|c| c.open) => {
                    self.abandon();
                    return Some(Err(ApiError::internal("the engine has stopped")));
                }
                Ok(None) => return None,
                Ok(Some((index, event))) => {
                    if let Some(said) = self.note(index, event) {
                        return Some(said.map(|said| (index, said)));
                    }
                }
                Err(error) => {
                    self.abandon();
                    return Some(Err(error));
                }
            }
        }
    }

    async fn event(&mut self) -> Result<Option<(usize, Event)>, ApiError> {
        loop {
            // Wait for a place before building a job, which has its own copy of the grammar.
            while let Some(index) = self.waiting.front().copied()
                && (self.order.has_place(index / self.order.n as usize)
                    || self.app.engine.has_room(&self.order.caller.name))
            {
                match self.submit(index) {
                    Ok(()) => drop(self.waiting.pop_front()),
                    Err(Rejected::Full { .. }) => break,
                    Err(rejected) => return Err(ApiError::of_rejected(rejected, self.app.retry_after_s())),
                }
            }
            if self.running.is_empty() && self.waiting.is_empty() {
                return Ok(None);
            }
            let stopped = async {
                // An error means that the sender, and so the server, is gone.
                let _ = self.stopping.wait_for(|stop| *stop).await;
            };
            let deadline = tokio::time::Instant::from_std(self.order.deadline);
            tokio::select! {
                biased; // events before the end are still delivered
                event = self.running.next(), if !self.running.is_empty() => {
                    if let Some((index, event)) = event {
                        return Ok(Some((index, event?)));
                    }
                }
                () = stopped => return Err(ApiError::shutting_down(self.app.retry_after_s())),
                // The engine ends the jobs that it has. Answers that were never submitted end here.
                () = tokio::time::sleep_until(deadline), if self.running.is_empty() => {
                    return Err(ApiError::deadline());
                }
                () = tokio::time::sleep(ASK_AGAIN), if !self.waiting.is_empty() => {}
            }
        }
    }

    /// Update the metrics, and return the output if the event has any.
    fn note(&mut self, index: usize, event: Event) -> Option<Result<Said, ApiError>> {
        let n = self.order.n as usize;
        let now = Instant::now();
        let since = now.duration_since(self.began);
        match event {
            Event::Admitted { at, cached_tokens, miss } => {
                let prompt_tokens = self.order.prompts[index / n].len() as u64;
                let queued = at.saturating_duration_since(self.clocks[index].due.unwrap_or(self.began));
                self.app.metrics.admitted(queued, prompt_tokens, u64::from(cached_tokens));
                self.queued.get_or_insert(queued);
                if index.is_multiple_of(n) {
                    self.supplied[index / n] = Some(Supplied { cached_tokens, miss });
                }
                None
            }
            Event::Prompt(scores) => Some(Ok(Said::Prompt(scores))),
            Event::Token(token) => {
                let clock = &mut self.clocks[index];
                match clock.last {
                    None => {
                        self.app.metrics.first_token(since);
                        clock.first = Some(now);
                        self.ttft.get_or_insert(since);
                        if index.is_multiple_of(n) {
                            self.wait(index + 1..index + n, now);
                        }
                    }
                    Some(last) => self.app.metrics.next_token(now.duration_since(last)),
                }
                self.clocks[index].last = Some(now);
                self.clocks[index].tokens += 1;
                self.completion_tokens += 1;
                self.app.metrics.generated(1);
                if let Some(text) = self.texts.get_mut(index) {
                    *text += &token.text;
                }
                Some(Ok(Said::Token(token)))
            }
            Event::Done(done) => {
                let how = match done.finish {
                    Finish::EndOfText | Finish::Stop(_) => Ended::Stop,
                    Finish::Length => Ended::Length,
                    Finish::Deadline | Finish::Cancelled => Ended::Abort,
                };
                let clock = &mut self.clocks[index];
                clock.open = false;
                // The token that ends a text may have no event of its own.
                let silent = u64::from(done.usage.completion_tokens.saturating_sub(clock.tokens));
                self.completion_tokens += silent;
                self.app.metrics.generated(silent);
                let decode = clock.first.zip(clock.last).map(|(first, last)| last.duration_since(first));
                self.app.metrics.ended(how, Some(done.usage), since, decode);
                // If the first answer ends before its first token, its end releases the others.
                if index.is_multiple_of(n) && clock.first.is_none() {
                    self.wait(index + 1..index + n, now);
                }
                let name = match done.finish {
                    Finish::EndOfText | Finish::Stop(_) => "stop",
                    Finish::Length => "length",
                    Finish::Deadline => "deadline",
                    Finish::Cancelled => "cancelled",
                };
                self.ended = Some(name);
                if let Some(text) = self.texts.get_mut(index) {
                    *text += &done.text;
                    self.app.log_answer(&self.order.id, index, text);
                }
                Some(Ok(Said::Done(done)))
            }
            Event::Failed(failure) => {
                self.clocks[index].open = false;
                // A failure that the client caused is no server error. It appears only in the request's log line.
                let (how, name) = match &failure {
                    Failure::Engine(what) => {
                        tracing::error!(target: "kvist::server", id = self.order.id, "a request failed: {what}");
                        (Ended::Error, "error")
                    }
                    Failure::Unread(_) => (Ended::Abort, "unread"),
                    Failure::Grammar(_) => (Ended::Abort, "grammar"),
                    Failure::NeverFits { .. } | Failure::UnknownToken { .. } => (Ended::Abort, "rejected"),
                };
                self.app.metrics.ended(how, None, since, None);
                self.abandon();
                self.ended = Some(name);
                Some(Err(ApiError::of_failure(&failure)))
            }
        }
    }

    /// Submit these answers as soon as the queue has places.
    fn wait(&mut self, others: std::ops::Range<usize>, now: Instant) {
        self.clocks[others.clone()].iter_mut().for_each(|clock| clock.due = Some(now));
        self.waiting.extend(others);
    }

    /// Cancel all generations.
    fn abandon(&mut self) {
        self.running.clear();
        self.waiting.clear();
        self.order.places.fill(None);
        for clock in &mut self.clocks {
            if std::mem::take(&mut clock.open) {
                self.app.metrics.ended(Ended::Abort, None, self.began.elapsed(), None);
                self.ended = Some("aborted");
            }
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.abandon();
        self.order.log(&Figures {
            cached_tokens: self.supplied.iter().flatten().map(|s| u64::from(s.cached_tokens)).sum(),
            completion_tokens: self.completion_tokens,
            queued: self.queued,
            ttft: self.ttft,
            total: self.began.elapsed(),
            ended: self.ended.unwrap_or("unknown"),
        });
    }
}
