//! Tokenizes histories within the server's limits: of memory, and of the length of texts.
use crate::error::ApiError;
use crate::openai::chat::render;
use crate::openai::tokens;
use crate::state::ServerState;
use kvist_engine::chat_format::PromptError;
use kvist_engine::sessions::{HistoryTokenizer, with_conversation};
use kvist_model::tokenizer::Ends;
use serde_json::{Map, Value};

impl HistoryTokenizer for ServerState {
    type Error = ApiError;

    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, ApiError> {
        with_conversation(messages, kwargs, answer, |conversation| render(self, conversation))
    }

    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, ApiError> {
        tokens::refuse_long(self, text, "messages")?;
        // The model's own template writes the BOS token itself.
        let special = first && self.engine.model().chat_template().is_none();
        tokens::encode_with_ends(self, text, special, "messages")
    }

    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError> {
        tokens::encode_prompt(self, text, first, "text")
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, ApiError> {
        if tokens.is_empty() {
            return Ok(String::new());
        }
        let _reserved = self.work.take(decoding_memory(self, tokens), "session")?;
        self.chat.decode_answer(tokens).map_err(|error| match error {
            PromptError::NoTokenizer => ApiError::unsupported("tokens", "this model has no tokenizer"),
            error => ApiError::internal(error.to_string()),
        })
    }

    fn context(&self, tokens: &[u32]) -> usize {
        self.chat.context(tokens)
    }

    fn content(&self, answer: &str) -> String {
        self.chat.content(answer)
    }

    fn message(&self, answer: &str) -> Value {
        self.chat.message(answer)
    }

    fn is_end(&self, token: u32) -> bool {
        self.engine.model().end_tokens().contains(&token)
    }

    fn max_tokens(&self) -> usize {
        self.bounds.max_tokens as usize
    }
}

/// Memory in bytes for decoding these tokens, limited to all there is, so that every session that was accepted
/// can also be shown.
pub(super) fn decoding_memory(state: &ServerState, tokens: &[u32]) -> usize {
    tokens::decoding_bytes(state, tokens).min(state.work.bytes())
}
