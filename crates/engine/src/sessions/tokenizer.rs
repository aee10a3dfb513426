//! The tokenizer and template of a model, for histories.
use super::history::with_conversation;
use super::{HistoryTokenizer, SessionError};
use crate::chat_format::{ChatFormat, PromptError};
use kvist_model::tokenizer::Ends;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A [`HistoryTokenizer`] of a model.
#[derive(Clone)]
pub struct ModelTokenizer {
    pub format: Arc<ChatFormat>,
    /// Largest number of tokens of prompt and answer together.
    pub max_tokens: usize,
}

impl From<PromptError> for SessionError {
    fn from(error: PromptError) -> Self {
        match error {
            PromptError::Template(crate::Error::Halted) => SessionError::Halted,
            PromptError::Template(error) => SessionError::from(error),
            other => SessionError::invalid("messages", other.to_string()),
        }
    }
}

impl HistoryTokenizer for ModelTokenizer {
    type Error = SessionError;

    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, SessionError> {
        with_conversation(messages, kwargs, answer, |conversation| {
            self.format.render(conversation, |_| Ok::<(), SessionError>(()))
        })
    }

    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, SessionError> {
        // The model's own template writes the BOS token itself.
        let special = first && self.format.model().chat_template().is_none();
        Ok(self.format.tokenizer()?.encode_with_ends(text, special)?)
    }

    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, SessionError> {
        Ok(self.format.tokenizer()?.encode(text, first)?)
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, SessionError> {
        Ok(self.format.decode_answer(tokens)?)
    }

    fn context(&self, tokens: &[u32]) -> usize {
        self.format.context(tokens)
    }

    fn content(&self, answer: &str) -> String {
        self.format.content(answer)
    }

    fn message(&self, answer: &str) -> Value {
        self.format.message(answer)
    }

    fn is_end(&self, token: u32) -> bool {
        self.format.model().end_tokens().contains(&token)
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }
}
