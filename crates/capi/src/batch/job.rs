//! A text that a batch generates.
use super::stopped;
use crate::session::{Piece, kvist_finish};
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_scheduler::MAX_TIERS;
use kvist_engine::serving::{self, Canceller, Done, Event, FinishReason, GenerationHandle, ready_within};
use kvist_finish::*;
use std::time::{Duration, Instant};

pub(crate) struct Job {
    /// `None` once the text has ended; dropping it cancels the job.
    handle: Option<GenerationHandle>,
    /// 0: none was asked for.
    max_tokens: u32,
    pub n_prompt: u32,
    pub n_tokens: u32,
    pub admitted: Option<Admitted>,
    /// The text of the last piece.
    pub piece: String,
    end: Option<Outcome<kvist_finish>>,
}

/// What was not computed of a prompt.
#[derive(Clone, Copy, Default)]
pub(crate) struct Admitted {
    pub cached: u32,
    /// Of them, by tier.
    pub loaded: [u32; MAX_TIERS],
}

fn failed(failure: &serving::Failure) -> Failure {
    use serving::Failure::{Engine, Grammar, NeverFits, UnknownToken, Unread};
    let status = match failure {
        NeverFits { .. } => kvist_status::KVIST_CACHE_FULL,
        UnknownToken { .. } => kvist_status::KVIST_INVALID_ARGUMENT,
        Unread(_) => kvist_status::KVIST_STOPPED,
        Grammar(_) | Engine(_) => kvist_status::KVIST_INTERNAL_ERROR,
    };
    Failure::new(status, failure.to_string())
}

impl Job {
    pub fn new(handle: GenerationHandle, n_prompt: u32, max_tokens: u32) -> Self {
        let (admitted, piece) = (None, String::new());
        Job { handle: Some(handle), max_tokens, n_prompt, n_tokens: 0, admitted, piece, end: None }
    }

    pub fn canceller(&self) -> Option<Canceller> {
        self.handle.as_ref().map(GenerationHandle::canceller)
    }

    /// The next token, or the end. Waits for it; when the time is up, there is neither. Its text is in `self.piece`.
    pub fn next(&mut self, limit: Duration) -> Outcome<Piece> {
        self.piece.clear();
        let until = Instant::now().checked_add(limit);
        loop {
            if let Some(end) = &self.end {
                return end.clone().map(|finish| Piece { token: None, finish });
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let handle = self.handle.as_mut().ok_or_else(stopped)?;
            let Some(event) = ready_within(left.unwrap_or(Duration::MAX), handle.next()) else {
                return Ok(Piece { token: None, finish: KVIST_GOES_ON });
            };
            match event {
                Some(Event::Admitted { cached_tokens, loaded_tokens, .. }) => {
                    self.admitted = Some(Admitted { cached: cached_tokens, loaded: loaded_tokens });
                }
                Some(Event::Prompt(_)) => {}
                Some(Event::Token(token)) => {
                    self.n_tokens += 1;
                    self.piece = token.text;
                    return Ok(Piece { token: Some(token.id), finish: KVIST_GOES_ON });
                }
                Some(Event::Done(Done { finish, text, .. })) => {
                    self.piece = text;
                    self.ended(Ok(self.finish(&finish)));
                }
                Some(Event::Failed(failure)) => self.ended(Err(failed(&failure))),
                None => self.ended(Err(stopped())),
            }
        }
    }

    fn finish(&self, reason: &FinishReason) -> kvist_finish {
        match reason {
            FinishReason::EndOfText => KVIST_END_OF_TEXT,
            FinishReason::Stop(_) => KVIST_STOP_STRING,
            FinishReason::Length if self.max_tokens > 0 && self.n_tokens >= self.max_tokens => {
                KVIST_MAX_TOKENS
            }
            FinishReason::Length => KVIST_NO_ROOM,
            FinishReason::Cancelled | FinishReason::Deadline => KVIST_CANCELLED,
        }
    }

    fn ended(&mut self, end: Outcome<kvist_finish>) {
        (self.handle, self.end) = (None, Some(end));
    }
}
