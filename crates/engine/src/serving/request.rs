//! One request on the engine thread: samples its tokens from the logits and sends the events to its client.
use super::job::*;
use crate::executor::{SampledToken, TokenSampler};
use crate::sampler::Sampler;
use crate::text::StopMatcher;
use kvist_device::{HostSampler, RowOutput, RowResult, log_sum};
use kvist_model::Model;
use kvist_model::tokenizer::TextState;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc::UnboundedSender;

/// Samples the tokens of one request. Leaves how it ended in `end`.
pub(super) struct RequestSampler {
    model: Arc<Model>,
    sampler: Sampler,
    /// The prompt, until the sampler observes it together with the first token. A waiting request thus needs no memory
    /// beyond its prompt.
    unobserved: Option<Arc<[u32]>>,
    logit_bias: Arc<[(u32, f32)]>,
    constraint: Option<Box<dyn Constraint>>,
    logprobs: Option<u8>,
    /// Finds the most likely tokens.
    finder: HostSampler,
    prompt: Option<PromptScores>,
    /// False if only the prompt is computed.
    generates: bool,
    ignore_eos: bool,
    text: TextState,
    stops: StopMatcher,
    events: UnboundedSender<Event>,
    /// Tokens that were sent and that the client has not received yet.
    unread: Arc<AtomicUsize>,
    end: Arc<Mutex<Ending>>,
}

/// Largest number of tokens that may wait for a client to read them: some megabytes with all log-probabilities. A
/// client that falls behind further is cut off, because nothing else bounds the backlog.
const MAX_UNREAD: usize = 4096;

/// Log-probabilities of the prompt, collected until they are sent.
struct PromptScores {
    prompt: Arc<[u32]>,
    n: u8,
    /// The first position whose logits have not been seen. Positions that are recomputed after a preemption are not
    /// reported again.
    next: u32,
    ready: Vec<LogProb>,
}

/// Log-probabilities per event.
const SCORES_PER_EVENT: usize = 64;

/// How a request ended, as far as its own tokens decide it, and the text that was held back until then.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// [`Event::Admitted`] was sent.
    pub admitted: bool,
    /// Events of the step that admitted the request. They wait until the end of that step, because [`Event::Admitted`]
    /// must come first and is known only then.
    pub early: Vec<Event>,
    pub finish: Option<FinishReason>,
    pub failure: Option<Failure>,
    pub text: String,
}

impl RequestSampler {
    pub fn new(
        model: Arc<Model>,
        sampler: Sampler,
        job: &mut Job,
        events: UnboundedSender<Event>,
        unread: Arc<AtomicUsize>,
        end: Arc<Mutex<Ending>>,
    ) -> Self {
        let text = match model.tokenizer() {
            Some(tokenizer) => TextState::after(tokenizer, &job.prompt, &job.written),
            None => TextState::new(&job.written),
        };
        RequestSampler {
            model,
            sampler,
            unobserved: Some(job.prompt.clone()),
            logit_bias: job.logit_bias.clone(),
            constraint: job.constraint.take(),
            logprobs: job.logprobs,
            finder: HostSampler::default(),
            prompt: job.logprobs.filter(|_| job.prompt_logprobs).map(|n| PromptScores {
                prompt: job.prompt.clone(),
                n,
                next: 0,
                ready: Vec::new(),
            }),
            generates: job.max_new > 0,
            ignore_eos: job.ignore_eos,
            text,
            stops: StopMatcher::of(job.stop.clone()),
            events,
            unread,
            end,
        }
    }

    /// Whether the sampler alone needs the logits.
    fn only_samples(&self) -> bool {
        self.generates && self.logprobs.is_none() && self.constraint.is_none() && self.logit_bias.is_empty()
    }

    fn sample(&mut self, mut row: RowResult<'_>) -> Result<SampledToken, Failure> {
        if !self.generates {
            self.lock().finish = Some(FinishReason::Length);
            return Ok(SampledToken { token: 0, finished: true });
        }
        if self.unread.fetch_add(1, SeqCst) >= MAX_UNREAD {
            return Err(Failure::Unread(MAX_UNREAD));
        }
        let mut before = None;
        if let RowResult::Logits(logits) = &mut row {
            // Log-probabilities are of the model's own distribution, so compute them before the logits change.
            before = self.logprobs.map(|n| {
                let changes = !self.logit_bias.is_empty() || self.constraint.is_some();
                (LogProbs::of(logits, n, &mut self.finder), changes.then(|| logits.to_vec()))
            });
            for &(token, bias) in self.logit_bias.iter() {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit += bias;
                }
            }
            if let Some(constraint) = &mut self.constraint {
                constraint.mask(logits).map_err(Failure::Grammar)?;
            }
        }
        if let Some(prompt) = self.unobserved.take() {
            self.sampler.observe(&prompt);
        }
        // Penalties change a copy of the row.
        let (token, row) = match row {
            RowResult::Logits(logits) => (self.sampler.take(RowResult::Logits(&mut *logits)), Some(&*logits)),
            row => (self.sampler.take(row), None),
        };
        let token = token.map_err(engine_failure)?;
        self.sampler.observe(&[token]);
        let complete = match &mut self.constraint {
            Some(constraint) => constraint.accept(token).map_err(Failure::Grammar)?,
            None => false,
        };
        let logprob =
            before.zip(row).map(|((before, raw), row)| before.token(raw.as_deref().unwrap_or(row), token));
        let is_end = self.model.end_tokens().contains(&token) && !self.ignore_eos;
        let mut text = String::new();
        let mut finish = (is_end || complete).then_some(FinishReason::EndOfText);
        // An end token is not part of the text. The last token of a grammar is.
        if let (false, Some(tokenizer)) = (is_end, self.model.tokenizer()) {
            let piece = self.text.push(tokenizer, token).map_err(engine_failure)?;
            if let Some(stop) = self.stops.push(&piece, &mut text) {
                finish = Some(FinishReason::Stop(stop));
            }
        }
        let stopped = matches!(finish, Some(FinishReason::Stop(_)));
        self.send(Event::Token(Token { id: token, text, logprob }));
        let finished = finish.is_some();
        if let Some(finish) = finish {
            self.lock().finish = Some(finish);
            if !stopped {
                self.flush()?;
            }
        }
        Ok(SampledToken { token, finished })
    }

    fn send(&self, event: Event) {
        let mut end = self.lock();
        if end.admitted {
            // If the receiver was dropped, the request is cancelled, but this step had already run.
            let _ = self.events.send(event);
        } else {
            end.early.push(event);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Ending> {
        self.end.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Emit the text that was held back.
    fn flush(&mut self) -> Result<(), Failure> {
        let mut text = String::new();
        if let Some(tokenizer) = self.model.tokenizer() {
            let rest = self.text.finish(tokenizer).map_err(engine_failure)?;
            if self.stops.push(&rest, &mut text).is_none() {
                self.stops.finish(&mut text);
            }
        }
        self.lock().text = text;
        Ok(())
    }
}

fn engine_failure(error: crate::Error) -> Failure {
    Failure::Engine(error.to_string())
}

impl TokenSampler for RequestSampler {
    fn row_output(&self) -> RowOutput {
        if self.only_samples() { self.sampler.row_output() } else { RowOutput::Logits }
    }

    fn choose(&mut self, row: RowResult<'_>) -> SampledToken {
        self.sample(row).unwrap_or_else(|failure| {
            self.lock().failure = Some(failure);
            SampledToken { token: 0, finished: true }
        })
    }

    fn wants(&self, computed: Range<u32>) -> Range<u32> {
        let Some(scores) = &self.prompt else { return computed.end..computed.end };
        // No prompt token follows the last position.
        let end = scores.prompt.len() as u32 - 1;
        computed.start.max(scores.next)..computed.end.min(end)
    }

    fn score(&mut self, position: u32, logits: &[f32]) {
        let Some(scores) = &mut self.prompt else { return };
        let Some(&token) = scores.prompt.get(position as usize + 1).filter(|_| position == scores.next)
        else {
            return;
        };
        scores.next += 1;
        scores.ready.push(LogProbs::of(logits, scores.n, &mut self.finder).token(logits, token));
        if scores.ready.len() == SCORES_PER_EVENT || scores.next as usize + 1 == scores.prompt.len() {
            let ready = std::mem::take(&mut scores.ready);
            self.send(Event::Prompt(ready));
        }
    }

    fn end(&mut self) {
        if self.lock().finish.is_none()
            && let Err(failure) = self.flush()
        {
            self.lock().failure = Some(failure);
        }
    }
}

/// Log-probabilities of one row of logits, taken before the row changes: the log-sum for the sampled token, and the
/// most likely tokens.
struct LogProbs {
    log_sum: f32,
    top: Vec<(u32, f32)>,
}

impl LogProbs {
    fn of(logits: &[f32], n: u8, finder: &mut HostSampler) -> Self {
        let log_sum = log_sum(logits);
        let mut top = Vec::with_capacity(n.into());
        // Of a row with NaN there is none, and its draw fails.
        let _ = finder.top_k(logits, n.into(), &mut top);
        top.iter_mut().for_each(|(_, logit)| *logit -= log_sum);
        LogProbs { log_sum, top }
    }

    /// `logits` must be the row that was passed to `of`.
    fn token(self, logits: &[f32], token: u32) -> LogProb {
        LogProb { logprob: logits[token as usize] - self.log_sum, top: self.top }
    }
}
