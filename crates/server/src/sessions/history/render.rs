//! Renders new messages and appends their tokens to a history.
use super::places::Rendered;
use super::{History, Message, Place, Said};
use crate::error::ApiError;
use crate::work::halted;
use axum::http::StatusCode;
use kvist_model::halt;
use kvist_model::tokenizer::Ends;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Renders messages to text, and converts text to tokens and back.
pub(crate) trait HistoryTokenizer {
    /// Renders all messages; with `answer`, followed by the beginning of an assistant message.
    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, ApiError>;
    /// Tokens of rendered text, with their end positions. `first`: the text is the start of the history. Fails
    /// early if a text of this length cannot fit.
    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, ApiError>;
    /// Tokens of plain text. `first`: the text is the start of the history.
    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError>;
    fn decode(&self, tokens: &[u32]) -> Result<String, ApiError>;
    /// Start index of the suffix of `tokens` that can affect how following tokens are decoded.
    fn context(&self, tokens: &[u32]) -> usize {
        let _ = tokens;
        0
    }
    /// The message content for this answer text.
    fn content(&self, answer: &str) -> String;
    /// The assistant message for this answer text, complete or not.
    fn message(&self, answer: &str) -> Value {
        json!({"role": "assistant", "content": self.content(answer)})
    }
    /// Maximum number of tokens of a history.
    fn room(&self) -> usize;
}

/// Fails if a history of `n` tokens is too long.
pub(crate) fn admit(scribe: &impl HistoryTokenizer, n: usize, param: &str) -> Result<(), ApiError> {
    let room = scribe.room();
    if n > room {
        let message =
            format!("the session would have {n} tokens; prompt and answer together have room for {room}");
        return Err(ApiError::too_long(param, message));
    }
    Ok(())
}

impl History {
    /// Appends messages.
    pub fn with_messages(&self, scribe: &impl HistoryTokenizer, new: &[Value]) -> Result<Self, ApiError> {
        self.rendered(scribe, new, false)
    }

    /// Appends the beginning of the assistant's next answer as an open message.
    pub fn with_answer(&self, scribe: &impl HistoryTokenizer) -> Result<Self, ApiError> {
        self.rendered(scribe, &[], true)
    }

    fn rendered(
        &self,
        scribe: &impl HistoryTokenizer,
        new: &[Value],
        answer: bool,
    ) -> Result<Self, ApiError> {
        let Some(said) = &self.said else {
            let message = "this session is made of text or tokens: append `text` or `tokens`";
            return Err(ApiError::invalid("messages", message));
        };
        if said.tail.is_some() {
            let message = "the history ends inside a message: roll back to where it begins \
                           (`{\"to\": {\"message\": N}}`), or go on with `text` or `tokens`";
            let error = ApiError::new(StatusCode::CONFLICT, "inside_message", message);
            return Err(error.about("messages"));
        }
        let mut bodies: Vec<Value> = said.messages.iter().map(|m| m.body.clone()).collect();
        bodies.extend_from_slice(new);
        let full = scribe.render(&bodies, &said.kwargs, answer)?;
        let stays = full.starts_with(&said.text) && !said.messages.is_empty();
        let (known, before) = if stays { (said.messages.len(), said.text.len()) } else { (0, 0) };
        let param = if answer { "session" } else { "messages" };
        let added = scribe.encode_rendered(&full[before..], before == 0)?;
        let mut tokens = if stays { self.tokens.to_vec() } else { Vec::new() };
        let base = tokens.len();
        // Check this before the messages are located, which costs more.
        admit(scribe, base + added.tokens.len(), param)?;
        tokens.extend(&added.tokens);
        // The messages without a known position, and the answer after them.
        let wanted = known..bodies.len() + usize::from(answer);
        let rendered = Rendered { scribe, bodies: &bodies, kwargs: &said.kwargs, answer, text: &full };
        let bytes = rendered.begins(wanted, before);
        // Renderings that were cancelled return no positions.
        halt::check().map_err(|_| halted())?;
        // If a token spans a boundary, the boundary is placed before that token.
        let at = added.before(bytes.iter().flatten().map(|byte| byte - before));
        let mut at = at.into_iter();
        let mut places = bytes.into_iter().map(|byte| {
            let place = Place { byte: byte?, token: base + at.next()? };
            Some(place)
        });
        let mut messages = if stays { said.messages.clone() } else { Vec::new() };
        for body in bodies.drain(known..) {
            messages.push(Message { body, shown: None, begins: places.next().flatten(), content: None });
        }
        if stays {
            // The template has closed open answers.
            for message in &mut messages[..known] {
                if let Some((_, ends @ None)) = &mut message.content {
                    *ends = Some(self.tokens.len());
                }
            }
        }
        if answer {
            let content = Place { token: tokens.len(), byte: full.len() };
            messages.push(Message {
                body: json!({"role": "assistant", "content": ""}),
                shown: None,
                begins: places.next().flatten(),
                content: Some((content, None)),
            });
        }
        let said = Said { messages, text: full, kwargs: said.kwargs.clone(), tail: None, bytes: 0 };
        let mut history = History { tokens: Arc::new(tokens), said: Some(Arc::new(said)) };
        history.weigh();
        Ok(history)
    }
}
