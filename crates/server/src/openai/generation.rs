//! The answers of one request: prompts × `n` generations, merged into one stream of events.
//!
//! The first answer to each prompt is submitted at once, the others as soon as the queue has permits. Admission lets
//! them wait until the first has computed the prompt (`scheduler.wait_for_prefix`), so that they find it in the cache.
//! Dropping [`Answers`] cancels all generations that still run.
use super::generation_request::{Figures, GenerationRequest};
use super::merged::MergedEvents;
use crate::error::ApiError;
use crate::memory::Permit;
use crate::metrics::Ended;
use crate::state::ServerState;
use futures_util::StreamExt;
use futures_util::stream::unfold;
use kvist_cache::MissReason;
use kvist_engine::serving::{
    Done, DraftUsage, Event, Failure, FinishReason, GenerationHandle, LogProb, Rejected, Token,
};
use kvist_scheduler::{MAX_TIERS, NotLoaded};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Output of an answer.
pub(crate) enum Output {
    /// Log-probabilities of prompt tokens, from the second on. Only the first answer to a prompt reports them.
    Prompt(Vec<LogProb>),
    Token(Token),
    /// The end of the answer, also of one that was never submitted. After [`FinishReason::Deadline`] and
    /// [`FinishReason::Cancelled`] the client also gets an error.
    Done(Done),
}

/// How much of a prompt the prefix index cached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedPrompt {
    pub cached_tokens: u32,
    /// Those of them that came from each tier below the cache.
    pub loaded_tokens: [u32; MAX_TIERS],
    /// And from the frozen prefix, if the server has one.
    pub frozen_tokens: Option<u32>,
    pub miss: Option<MissReason>,
    /// Why the tiers supplied no more.
    pub not_loaded: Option<NotLoaded>,
}

/// Times of one answer, for metrics.
struct Clock {
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
    open: bool,
}

/// The answers of one request, while they are generated.
pub(crate) struct Answers {
    state: Arc<ServerState>,
    request: GenerationRequest,
    running: MergedEvents,
    /// Answers that are not in the queue yet.
    waiting: VecDeque<usize>,
    clocks: Vec<Clock>,
    /// Per prompt, from its first answer.
    cached: Vec<Option<CachedPrompt>>,
    stopping: watch::Receiver<bool>,
    began: Instant,
    queued: Option<Duration>,
    ttft: Option<Duration>,
    completion_tokens: u64,
    /// Of all answers that have ended; `None` if the engine does not speculate.
    drafts: Option<DraftUsage>,
    ended: Option<&'static str>,
    /// Text of each answer, if answers are logged.
    texts: Vec<String>,
}

/// Interval at which a full queue is tried again for the further answers of a running request.
const ASK_AGAIN: Duration = Duration::from_millis(20);

impl Answers {
    /// Submit the first answer to each prompt. On an error nothing runs.
    pub fn begin(state: &Arc<ServerState>, request: GenerationRequest) -> Result<Self, ApiError> {
        let total = request.prompts.len() * request.n as usize;
        let clock = |_| Clock { first: None, last: None, tokens: 0, open: false };
        let mut answers = Answers {
            state: state.clone(),
            running: MergedEvents::new(request.prompts.len(), request.n as usize, request.prompt_logprobs),
            waiting: VecDeque::new(),
            clocks: (0..total).map(clock).collect(),
            cached: vec![None; request.prompts.len()],
            stopping: state.stopping.subscribe(),
            began: Instant::now(),
            queued: None,
            ttft: None,
            completion_tokens: 0,
            drafts: None,
            ended: Some("rejected"),
            texts: vec![String::new(); if state.http.log_prompts { total } else { 0 }],
            request,
        };
        for prompt in 0..answers.request.prompts.len() {
            let submitted = answers.submit(prompt * answers.request.n as usize);
            submitted.map_err(|r| ApiError::of_rejected(r, answers.state.retry_after_s()))?;
        }
        let n = answers.request.n as usize;
        answers.waiting.extend((0..total).filter(|index| !index.is_multiple_of(n)));
        answers.ended = None;
        Ok(answers)
    }

    /// Number of answers.
    pub fn total(&self) -> usize {
        self.clocks.len()
    }
    pub fn prompts(&self) -> usize {
        self.request.prompts.len()
    }
    /// Take the memory permit for log-probabilities and echoed prompts. The caller drops it.
    pub fn take_memory_permit(&mut self) -> Option<Permit> {
        self.request.memory_permit.take()
    }
    pub fn has_memory_permit(&self) -> bool {
        self.request.memory_permit.is_some()
    }
    /// When the memory of an answer is freed even if the client has not read it.
    pub fn reading_ends(&self) -> Instant {
        Instant::now() + self.state.limits.request_timeout()
    }
    pub fn retry_after_s(&self) -> u32 {
        self.state.retry_after_s()
    }
    pub fn cached(&self, prompt: usize) -> Option<CachedPrompt> {
        self.cached[prompt]
    }
    pub fn explains(&self) -> bool {
        self.request.explain
    }
    /// The names of the tiers below the cache, the fastest first.
    pub fn tier_names(&self) -> Vec<String> {
        let tiers = self.state.engine.stats().tiers;
        tiers.map_or(Vec::new(), |tiers| tiers.stores.into_iter().map(|store| store.name).collect())
    }

    /// Usage in OpenAI's format: a prompt counts once, however many answers it has.
    pub fn usage(&self) -> serde_json::Value {
        let prompt: u64 = self.request.prompts.iter().map(|p| p.len() as u64).sum();
        let cached: u64 = self.cached.iter().flatten().map(|s| u64::from(s.cached_tokens)).sum();
        let mut usage = serde_json::json!({
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        });
        if let Some(DraftUsage { draft_tokens, accepted_tokens }) = self.drafts {
            usage["completion_tokens_details"] = serde_json::json!({
                "accepted_prediction_tokens": accepted_tokens,
                "rejected_prediction_tokens": draft_tokens.saturating_sub(accepted_tokens),
            });
        }
        usage
    }

    fn submit(&mut self, index: usize) -> Result<(), Rejected> {
        let n = self.request.n as usize;
        let job = self.request.job(index / n, (index % n) as u32);
        let (engine, prompt) = (&self.state.engine, index / n);
        let own = self.request.queue_permits[prompt].clone().filter(|own| Arc::strong_count(own) == 2);
        // A request that was accepted gets all its answers, even while the server shuts down.
        let generation = match own {
            Some(own) => engine.submit_in(job, own),
            None => engine.submit_sibling(job),
        }?;
        if (index + 1).is_multiple_of(n) {
            // This was the last answer. The permit is free when the job that uses it has been admitted.
            self.request.queue_permits[prompt] = None;
        }
        self.clocks[index].open = true;
        let next = |mut generation: GenerationHandle| async move {
            let event = generation.next().await?;
            Some((Ok(event), generation))
        };
        let events = match self.request.record.take() {
            Some(record) => record(generation),
            None => unfold(generation, next).boxed(),
        };
        self.running.push(index, events);
        Ok(())
    }

    /// The next output, and the index of its answer. `None` when all answers have ended. After an error nothing runs,
    /// and no output follows.
    pub async fn next(&mut self) -> Option<Result<(usize, Output), ApiError>> {
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
                    if let Some(output) = self.account(index, event) {
                        return Some(output.map(|output| (index, output)));
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
            // Wait for a permit before building a job, which has its own copy of the grammar.
            while let Some(index) = self.waiting.front().copied()
                && (self.request.has_queue_permit(index / self.request.n as usize)
                    || self.state.engine.has_room(&self.request.caller.name))
            {
                match self.submit(index) {
                    Ok(()) => drop(self.waiting.pop_front()),
                    Err(Rejected::Full { .. }) => break,
                    Err(rejected) => return Err(ApiError::of_rejected(rejected, self.state.retry_after_s())),
                }
            }
            if self.running.is_empty() && self.waiting.is_empty() {
                return Ok(None);
            }
            let stopped = async {
                // An error means that the sender, and so the server, is gone.
                let _ = self.stopping.wait_for(|stop| *stop).await;
            };
            let deadline = tokio::time::Instant::from_std(self.request.deadline);
            tokio::select! {
                biased; // events before the end are still delivered
                event = self.running.next(), if !self.running.is_empty() => {
                    if let Some((index, event)) = event {
                        return Ok(Some((index, event?)));
                    }
                }
                () = stopped => return Err(ApiError::shutting_down(self.state.retry_after_s())),
                // The engine ends the jobs that it has. Answers that were never submitted end here.
                () = tokio::time::sleep_until(deadline), if self.running.is_empty() => {
                    if let Some(index) = self.waiting.pop_front() {
                        let (finish, text) = (FinishReason::Deadline, String::new());
                        let done = Done { finish, text, usage: Default::default() };
                        return Ok(Some((index, Event::Done(done))));
                    }
                }
                () = tokio::time::sleep(ASK_AGAIN), if !self.waiting.is_empty() => {}
            }
        }
    }

    /// Update the metrics, and return the output if the event has any.
    fn account(&mut self, index: usize, event: Event) -> Option<Result<Output, ApiError>> {
        let n = self.request.n as usize;
        let now = Instant::now();
        let since = now.duration_since(self.began);
        match event {
            Event::Admitted { at, cached_tokens, loaded_tokens, frozen_tokens, miss, not_loaded } => {
                let prompt_tokens = self.request.prompts[index / n].len() as u64;
                let queued = at.saturating_duration_since(self.began);
                self.state.metrics.admitted(queued, prompt_tokens, u64::from(cached_tokens));
                self.queued.get_or_insert(queued);
                if index.is_multiple_of(n) {
                    let cached =
                        CachedPrompt { cached_tokens, loaded_tokens, frozen_tokens, miss, not_loaded };
                    self.cached[index / n] = Some(cached);
                }
                None
            }
            Event::Prompt(scores) => Some(Ok(Output::Prompt(scores))),
            Event::Token(token) => {
                let clock = &mut self.clocks[index];
                match clock.last {
                    None => {
                        self.state.metrics.first_token(since);
                        clock.first = Some(now);
                        self.ttft.get_or_insert(since);
                    }
                    Some(last) => self.state.metrics.next_token(now.duration_since(last)),
                }
                self.clocks[index].last = Some(now);
                self.clocks[index].tokens += 1;
                self.completion_tokens += 1;
                self.state.metrics.generated(1);
                if let Some(text) = self.texts.get_mut(index) {
                    *text += &token.text;
                }
                Some(Ok(Output::Token(token)))
            }
            Event::Done(done) => {
                self.end(index, &done, now);
                Some(Ok(Output::Done(done)))
            }
            Event::Failed(failure) => {
                self.clocks[index].open = false;
                // A failure that the client caused is no server error. It appears only in the request's log line.
                let (how, name) = match &failure {
                    Failure::Engine(what) => {
                        tracing::error!(target: "kvist::server", id = self.request.id, "a request failed: {what}");
                        (Ended::Error, "error")
                    }
                    Failure::Unread(_) => (Ended::Abort, "unread"),
                    Failure::Grammar(_) => (Ended::Abort, "grammar"),
                    Failure::NeverFits { .. } | Failure::UnknownToken { .. } => (Ended::Abort, "rejected"),
                };
                self.state.metrics.ended(how, None, since, None);
                self.abandon();
                self.ended = Some(name);
                Some(Err(ApiError::of_failure(&failure)))
            }
        }
    }

    /// Account for the end of an answer.
    fn end(&mut self, index: usize, done: &Done, now: Instant) {
        self.count_target(done, now);
        if !self.clocks[index].open {
            // It was never submitted, so metrics do not count it either.
            self.ended = Some("deadline");
            return;
        }
        let since = now.duration_since(self.began);
        let how = match done.finish {
            FinishReason::EndOfText | FinishReason::Stop(_) => Ended::Stop,
            FinishReason::Length => Ended::Length,
            FinishReason::Deadline | FinishReason::Cancelled => Ended::Abort,
        };
        let clock = &mut self.clocks[index];
        clock.open = false;
        // The token that ends a text may have no event of its own.
        let silent = u64::from(done.usage.completion_tokens.saturating_sub(clock.tokens));
        self.completion_tokens += silent;
        if let Some(of_answer) = done.usage.drafts {
            let drafts = self.drafts.get_or_insert_default();
            drafts.draft_tokens += of_answer.draft_tokens;
            drafts.accepted_tokens += of_answer.accepted_tokens;
        }
        self.state.metrics.generated(silent);
        let decode = clock.first.zip(clock.last).map(|(first, last)| last.duration_since(first));
        self.state.metrics.ended(how, Some(done.usage), since, decode);
        let name = match done.finish {
            FinishReason::EndOfText | FinishReason::Stop(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::Deadline => "deadline",
            FinishReason::Cancelled => "cancelled",
        };
        self.ended = Some(name);
        if let Some(text) = self.texts.get_mut(index) {
            *text += &done.text;
            self.state.log_answer(&self.request.id, index, text);
        }
    }

    /// Count whether an answer met its target. Nothing is known of one that its client gave up.
    fn count_target(&self, done: &Done, now: Instant) {
        let Some(target) = self.request.target else { return };
        match done.finish {
            FinishReason::EndOfText | FinishReason::Stop(_) | FinishReason::Length => {
                self.state.metrics.target_ended(now <= target);
            }
            FinishReason::Deadline => self.state.metrics.target_ended(false),
            FinishReason::Cancelled => {}
        }
    }

    /// Cancel all generations.
    fn abandon(&mut self) {
        self.running.clear();
        self.waiting.clear();
        self.request.queue_permits.fill(None);
        for clock in &mut self.clocks {
            if std::mem::take(&mut clock.open) {
                self.state.metrics.ended(Ended::Abort, None, self.began.elapsed(), None);
                self.ended = Some("aborted");
            }
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.abandon();
        self.request.log(&Figures {
            cached_tokens: self.cached.iter().flatten().map(|s| u64::from(s.cached_tokens)).sum(),
            completion_tokens: self.completion_tokens,
            queued: self.queued,
            ttft: self.ttft,
            total: self.began.elapsed(),
            ended: self.ended.unwrap_or("unknown"),
        });
    }
}
