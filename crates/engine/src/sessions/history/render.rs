//! Renders new messages and appends their tokens to a history.
use super::boundaries::BoundaryFinder;
use super::{History, Message, Position, RenderedMessages, TOOLS};
use crate::sessions::SessionError;
use kvist_model::halt;
use kvist_model::template::Conversation;
use kvist_model::tokenizer::Ends;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Renders messages to text, and converts text to tokens and back, for the histories of one model.
pub trait HistoryTokenizer {
    /// What fails here: at least what a session refuses.
    type Error: From<SessionError>;

    /// Renders all messages; with `answer`, followed by the beginning of an assistant message.
    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, Self::Error>;
    /// Tokens of rendered text, with their end positions. `first`: the text is the start of the history. Fails
    /// early if a text of this length cannot fit.
    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, Self::Error>;
    /// Tokens of plain text. `first`: the text is the start of the history.
    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, Self::Error>;
    /// The text of these tokens.
    fn decode(&self, tokens: &[u32]) -> Result<String, Self::Error>;
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
    /// Returns whether the token ends an answer. The history then does without it, because the template writes it.
    fn is_end(&self, token: u32) -> bool {
        let _ = token;
        false
    }
    /// Maximum number of tokens of a history.
    fn max_tokens(&self) -> usize;
}

/// Passes a history's messages to `render` as a conversation. Its tools are the variable [`TOOLS`] of `kwargs`.
/// `answer`: the beginning of an answer follows the messages.
pub fn with_conversation<R>(
    messages: &[Value],
    kwargs: &Map<String, Value>,
    answer: bool,
    render: impl FnOnce(&Conversation<'_>) -> R,
) -> R {
    let Some(tools) = kwargs.get(TOOLS).and_then(Value::as_array) else {
        return render(&Conversation { messages, tools: &[], add_generation_prompt: answer, kwargs });
    };
    let mut kwargs = kwargs.clone();
    kwargs.shift_remove(TOOLS);
    render(&Conversation { messages, tools, add_generation_prompt: answer, kwargs: &kwargs })
}

/// Fails if a history of `n` tokens is too long. `param` names its content in the error.
pub fn check_length<T: HistoryTokenizer>(tokenizer: &T, n: usize, param: &str) -> Result<(), T::Error> {
    let max = tokenizer.max_tokens();
    if n > max {
        return Err(SessionError::TooLong { param: param.into(), tokens: n, max }.into());
    }
    Ok(())
}

impl History {
    /// Appends messages.
    pub fn with_messages<T: HistoryTokenizer>(&self, tokenizer: &T, new: &[Value]) -> Result<Self, T::Error> {
        self.rendered(tokenizer, new, false)
    }

    /// Appends the beginning of the assistant's next answer as an open message.
    pub(crate) fn with_answer<T: HistoryTokenizer>(&self, tokenizer: &T) -> Result<Self, T::Error> {
        self.rendered(tokenizer, &[], true)
    }

    /// The history to use as the prompt of a generation. `answer`: begin an answer of the assistant; by default, if
    /// the history consists of messages and the last one is complete.
    pub fn as_prompt<T: HistoryTokenizer>(
        &self,
        tokenizer: &T,
        answer: Option<bool>,
    ) -> Result<Self, T::Error> {
        let is_complete = self.has_messages() && !self.has_tail() && !self.is_open();
        match answer {
            Some(true) if !self.has_messages() => {
                let message = "this session is not made of messages, so it has no answers of the assistant";
                Err(SessionError::invalid("add_generation_prompt", message).into())
            }
            Some(true) => self.with_answer(tokenizer),
            None if is_complete => self.with_answer(tokenizer),
            _ if is_complete => Ok(self.with_tail()),
            _ => Ok(self.clone()),
        }
    }

    fn rendered<T: HistoryTokenizer>(
        &self,
        tokenizer: &T,
        new: &[Value],
        answer: bool,
    ) -> Result<Self, T::Error> {
        let Some(rendered) = &self.rendered else {
            let message = "this session is made of text or tokens: append `text` or `tokens`";
            return Err(SessionError::invalid("messages", message).into());
        };
        if rendered.tail.is_some() {
            return Err(SessionError::InsideMessage.into());
        }
        let mut bodies: Vec<Value> = rendered.messages.iter().map(|m| m.body.clone()).collect();
        bodies.extend_from_slice(new);
        let full = tokenizer.render(&bodies, &rendered.kwargs, answer)?;
        let stays = full.starts_with(&rendered.text) && !rendered.messages.is_empty();
        let (known, before) = if stays { (rendered.messages.len(), rendered.text.len()) } else { (0, 0) };
        let param = if answer { "session" } else { "messages" };
        let added = tokenizer.encode_rendered(&full[before..], before == 0)?;
        let mut tokens = if stays { self.tokens.to_vec() } else { Vec::new() };
        let base = tokens.len();
        // Check this before the messages are located, which costs more.
        check_length(tokenizer, base + added.tokens.len(), param)?;
        tokens.extend(&added.tokens);
        // The messages without a known position, and the answer after them.
        let indices = known..bodies.len() + usize::from(answer);
        let finder =
            BoundaryFinder { tokenizer, bodies: &bodies, kwargs: &rendered.kwargs, answer, text: &full };
        let bytes = finder.begins(indices, before);
        // Renderings that were cancelled return no positions.
        halt::check().map_err(|_| SessionError::Halted)?;
        // If a token spans a boundary, the boundary is placed before that token.
        let at = added.before(bytes.iter().flatten().map(|byte| byte - before));
        let mut at = at.into_iter();
        let mut places = bytes.into_iter().map(|byte| {
            let place = Position { byte: byte?, token: base + at.next()? };
            Some(place)
        });
        let mut messages = if stays { rendered.messages.clone() } else { Vec::new() };
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
            let content = Position { token: tokens.len(), byte: full.len() };
            messages.push(Message {
                body: json!({"role": "assistant", "content": ""}),
                shown: None,
                begins: places.next().flatten(),
                content: Some((content, None)),
            });
        }
        let rendered =
            RenderedMessages { messages, text: full, kwargs: rendered.kwargs.clone(), tail: None, bytes: 0 };
        let mut history = History { tokens: Arc::new(tokens), rendered: Some(Arc::new(rendered)) };
        history.update_bytes();
        Ok(history)
    }
}
