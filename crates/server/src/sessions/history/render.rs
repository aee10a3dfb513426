//! Messages into text and tokens, behind what is there.
use super::places::Rendered;
use super::{History, Message, Place, Said};
use crate::error::ApiError;
use crate::work::halted;
use axum::http::StatusCode;
use kvist_model::halt;
use kvist_model::tokenizer::Ends;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Turns messages into text, and text into tokens and back.
pub(crate) trait Scribe {
    /// Everything that is said; with `answer`, up to where the assistant's answer begins.
    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, ApiError>;
    /// Tokens of rendered text, and where they end; `first`: nothing stands before it. Refused, before it costs much, if
    /// no tokens of that many bytes fit.
    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, ApiError>;
    /// Tokens of a text by itself; `first`: nothing stands before it.
    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError>;
    fn decode(&self, tokens: &[u32]) -> Result<String, ApiError>;
    /// Where in these tokens the end begins on which the text of what follows them may depend.
    fn context(&self, tokens: &[u32]) -> usize {
        let _ = tokens;
        0
    }
    /// The content of a message whose answer is this text.
    fn content(&self, answer: &str) -> String;
    /// The message whose answer is this text, whole or not.
    fn message(&self, answer: &str) -> Value {
        json!({"role": "assistant", "content": self.content(answer)})
    }
    /// Tokens that a history may have.
    fn room(&self) -> usize;
}

/// Refused if a history of `n` tokens has no room.
pub(crate) fn admit(scribe: &impl Scribe, n: usize, param: &str) -> Result<(), ApiError> {
    let room = scribe.room();
    if n > room {
        let message =
            format!("the session would have {n} tokens; prompt and answer together have room for {room}");
        return Err(ApiError::too_long(param, message));
    }
    Ok(())
}

impl History {
    /// With the messages behind it.
    pub fn with_messages(&self, scribe: &impl Scribe, new: &[Value]) -> Result<Self, ApiError> {
        self.rendered(scribe, new, false)
    }

    /// With the beginning of the assistant's next answer behind it: an open message.
    pub fn with_answer(&self, scribe: &impl Scribe) -> Result<Self, ApiError> {
        self.rendered(scribe, &[], true)
    }

    fn rendered(&self, scribe: &impl Scribe, new: &[Value], answer: bool) -> Result<Self, ApiError> {
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
        // Before places are looked for, which costs more.
        admit(scribe, base + added.tokens.len(), param)?;
        tokens.extend(&added.tokens);
        // Where the messages begin that have no place yet; behind the last one, the answer.
        let wanted = known..bodies.len() + usize::from(answer);
        let rendered = Rendered { scribe, bodies: &bodies, kwargs: &said.kwargs, answer, text: &full };
        let bytes = rendered.begins(wanted, before);
        // Renderings that were ended tell no places.
        halt::check().map_err(|_| halted())?;
        // Where a token reaches over a cut, the cut is before it.
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
            // What was open is closed by the template.
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
