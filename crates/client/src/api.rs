//! Types of requests and responses.
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One message of a conversation. A session returns a message exactly as it was sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// `None` if the message only carries tool calls.
    #[serde(default)]
    pub content: Option<MessageContent>,
    /// Any other field of the API: `name`, `tool_calls`, `tool_call_id`.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MessageContent {
    Text(String),
    /// Text parts, `{"type": "text", "text": …}`, which the server joins with line breaks.
    Parts(Vec<Value>),
}

impl MessageContent {
    /// The text as the server reads it: parts are joined with line breaks.
    pub fn text(&self) -> String {
        match self {
            MessageContent::Text(text) => text.clone(),
            MessageContent::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
                texts.join("\n")
            }
        }
    }
}

impl From<&str> for MessageContent {
    fn from(text: &str) -> Self {
        MessageContent::Text(text.into())
    }
}

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.into(), content: Some(content.into()), more: Map::new() }
    }
    /// The text of the content; empty if the message only carries tool calls.
    pub fn text(&self) -> String {
        self.content.as_ref().map(MessageContent::text).unwrap_or_default()
    }
    pub fn user(content: &str) -> Self {
        Message::new("user", content)
    }
    pub fn system(content: &str) -> Self {
        Message::new("system", content)
    }
    pub fn assistant(content: &str) -> Self {
        Message::new("assistant", content)
    }
}

/// Initial content of a session, or content to append.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Content {
    /// Creates an empty session.
    #[default]
    Nothing,
    Messages(Vec<Message>),
    Text(String),
    Tokens(Vec<u32>),
}

impl Content {
    pub(crate) fn fields(&self) -> Value {
        match self {
            Content::Nothing => json!({}),
            Content::Messages(messages) => json!({ "messages": messages }),
            Content::Text(text) => json!({ "text": text }),
            Content::Tokens(tokens) => json!({ "tokens": tokens }),
        }
    }
}

impl<const N: usize> From<[Message; N]> for Content {
    fn from(messages: [Message; N]) -> Self {
        Content::Messages(messages.into())
    }
}
impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Content::Text(text.into())
    }
}
impl From<Vec<u32>> for Content {
    fn from(tokens: Vec<u32>) -> Self {
        Content::Tokens(tokens)
    }
}

/// A position at which a history is truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Keep this many tokens.
    Token(u32),
    /// Keep this many messages.
    Message(u32),
}

impl Serialize for Cut {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Cut::Token(token) => token.serialize(to),
            Cut::Message(message) => json!({ "message": message }).serialize(to),
        }
    }
}

/// Options for a new session.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NewSession {
    pub name: Option<String>,
    /// Only requests with the same salt share prefix cache entries with this session.
    pub cache_salt: Option<String>,
}

/// Sampling options. The server chooses the default for each field that is `None`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Generate {
    /// Maximum number of tokens to generate.
    pub max_tokens: Option<u32>,
    /// 0 selects the most likely token.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub seed: Option<i64>,
    /// Strings that end the answer. They are not part of the answer.
    pub stop: Option<Vec<String>>,
    pub ignore_eos: Option<bool>,
    /// Sessions only: `true` starts a new assistant message, `false` continues the tokens as they are.
    pub add_generation_prompt: Option<bool>,
    /// Any other field of the API.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Generate {
    /// Greedy decoding of at most `max_tokens` tokens.
    pub fn greedy(max_tokens: u32) -> Self {
        Generate { max_tokens: Some(max_tokens), temperature: Some(0.0), ..Generate::default() }
    }
}

/// Token counts of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Draft tokens that were accepted and rejected; 0 if the server does not speculate.
    pub accepted_prediction_tokens: u64,
    pub rejected_prediction_tokens: u64,
}

impl Usage {
    pub(crate) fn of(usage: &Value) -> Self {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let completion = &usage["completion_tokens_details"];
        Usage {
            prompt_tokens: count(&usage["prompt_tokens"]),
            completion_tokens: count(&usage["completion_tokens"]),
            cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
            accepted_prediction_tokens: count(&completion["accepted_prediction_tokens"]),
            rejected_prediction_tokens: count(&completion["rejected_prediction_tokens"]),
        }
    }
}

/// A complete answer: of several (`n`), the first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: String,
    pub usage: Usage,
    /// The whole response body, which has the other answers too.
    pub document: Value,
}

impl Answer {
    pub(crate) fn of_document(whole: &Value) -> Self {
        let choice = &whole["choices"][0];
        let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
        Answer {
            text: text.unwrap_or_default().into(),
            finish_reason: choice["finish_reason"].as_str().unwrap_or_default().into(),
            usage: Usage::of(&whole["usage"]),
            document: whole.clone(),
        }
    }
}

/// One event of a streamed answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// The answer that it belongs to: 0, unless the request has several (`n`).
    pub index: usize,
    /// May be empty.
    pub text: String,
    /// Set in the last chunk that carries text.
    pub finish_reason: Option<String>,
    /// Set in the last chunk.
    pub usage: Option<Usage>,
    /// The whole event, with what has no field here: log-probabilities, tool calls, reasoning.
    pub document: Value,
}

/// A session, without its history.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Session {
    pub id: String,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    /// Seconds since 1970.
    pub created: u64,
    /// When the session expires unless it is used before. Seconds since 1970.
    pub expires: u64,
    pub n_tokens: u64,
    /// `None` if the session was made from text or tokens.
    pub n_messages: Option<u64>,
    /// The session that this one was forked from.
    pub parent: Option<String>,
    /// Length of the token prefix that it shares with its parent.
    pub shared_tokens: u64,
    pub children: Vec<String>,
    /// True while a generation runs.
    pub running: bool,
    /// Set after an append or a rollback: number of tokens of the previous history that were kept.
    pub kept_tokens: Option<u64>,
}

/// A session with its history.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct History {
    #[serde(flatten)]
    pub session: Session,
    pub tokens: Vec<u32>,
    /// `None` if the model has no tokenizer.
    pub text: Option<String>,
    /// `None` if the session was made from text or tokens.
    pub messages: Option<Vec<Placed>>,
}

/// A message of a session, with its position.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Placed {
    pub message: Message,
    /// Index of its first token, if it can be determined from the chat template's output.
    pub begins: Option<u64>,
    /// True for an assistant message that a generation can continue.
    pub open: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deserializes every shape of message that the server accepts, and serializes it back unchanged.
    #[test]
    fn messages_of_every_shape() {
        let call = json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
        let rows = [
            (json!({"role": "user", "content": "a"}), "a"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
                "a\nb",
            ),
            (json!({"role": "user", "content": "a", "name": "ann"}), "a"),
            (json!({"role": "assistant", "content": null, "tool_calls": call}), ""),
            (json!({"role": "tool", "content": "1", "tool_call_id": "c"}), "1"),
        ];
        for (value, text) in rows {
            let read: Placed = serde_json::from_value(json!({"message": value, "begins": 3, "open": false}))
                .unwrap_or_else(|e| panic!("{e}: {value}"));
            assert_eq!(read.message.text(), text);
            assert_eq!(serde_json::to_value(&read.message).unwrap(), value);
        }
        let none: Message = serde_json::from_value(json!({"role": "user"})).unwrap();
        assert_eq!((none.content.clone(), none.text()), (None, String::new()));
    }
}
