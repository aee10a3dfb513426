//! The format in which an endpoint writes answers, as a stream or as a document.
use super::generation::{Answers, CachedPrompt};
use super::scores::Scorer;
use crate::error::ApiError;
use kvist_engine::serving::{Done, FinishReason, LogProb, Token};
use kvist_scheduler::NotLoaded;
use serde_json::{Value, json};
use std::sync::Arc;

/// Format in which an endpoint writes answers.
pub(crate) trait AnswerWriter: Send + 'static {
    /// The fields around the choices; `streamed` for chunks. Called once for each chunk, in order.
    fn head(&mut self, streamed: bool) -> Value;
    /// Log-probabilities of a prompt have arrived through this answer.
    fn prompt(&mut self, index: usize, scores: Vec<LogProb>) {
        let _ = (index, scores);
    }
    /// The choice of a chunk with the next part of the answer's prompt, before the answer itself. `complete`: no more
    /// log-probabilities of the prompt will arrive.
    fn prompt_chunk(&mut self, index: usize, complete: bool) -> Option<Value> {
        let _ = (index, complete);
        None
    }
    /// The echoed prompt that precedes this answer in a document. Called when the answer is complete.
    fn echoed_prompt(&mut self, index: usize) -> EchoedPrompt {
        let _ = index;
        EchoedPrompt::default()
    }
    /// The choices of the chunks for this token: often one, sometimes none.
    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value>;
    /// The choices that end the answer. The last one has the finish reason.
    fn last(&mut self, index: usize, done: &Done) -> Vec<Value>;
    /// The choice of a complete answer, without its prompt and its log-probabilities, which are null here.
    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value;
    /// The writer of log-probabilities, if they were requested.
    fn scorer(&self) -> Option<Scorer>;
}

/// An echoed prompt. All answers to it share it: it is written for each of them, and kept in memory once.
#[derive(Default)]
pub(crate) struct EchoedPrompt {
    /// As text.
    pub text: Option<Arc<str>>,
    /// Or as scored tokens.
    pub tokens: Arc<Vec<Token>>,
}

/// OpenAI's `finish_reason`.
pub(crate) fn finish_reason(finish: &FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::Stop(_) => "stop",
        FinishReason::Length | FinishReason::Deadline | FinishReason::Cancelled => "length",
    }
}

/// The error if the answer ended for a reason that the client did not request.
pub(crate) fn cut_off(finish: &FinishReason, answers: &Answers) -> Option<ApiError> {
    match finish {
        FinishReason::Deadline => Some(ApiError::deadline()),
        FinishReason::Cancelled => Some(ApiError::shutting_down(answers.retry_after_s())),
        _ => None,
    }
}

/// What each prompt found in the cache.
pub(crate) fn explained(answers: &Answers) -> Value {
    let tiers = answers.tier_names();
    let one = |cached: Option<CachedPrompt>| {
        let Some(CachedPrompt { cached_tokens, loaded_tokens, frozen_tokens, miss, not_loaded }) = cached
        else {
            return Value::Null;
        };
        let mut explained = json!({
            "cached_tokens": cached_tokens,
            "miss": miss.map(|miss| json!({"reason": miss.name(), "position": miss.position()})),
        });
        if let Some(frozen_tokens) = frozen_tokens {
            explained["frozen_tokens"] = frozen_tokens.into();
        }
        if !tiers.is_empty() {
            let loaded = tiers.iter().zip(loaded_tokens).map(|(name, n)| (name.clone(), n.into()));
            explained["loaded_tokens"] = Value::Object(loaded.collect());
            explained["not_loaded"] = not_loaded.map(NotLoaded::name).into();
        }
        explained
    };
    (0..answers.prompts()).map(|p| one(answers.cached(p))).collect()
}
