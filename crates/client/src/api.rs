//! What is sent, and what comes back.
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One turn of a conversation. What a session gives back is what it was sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// `None` beside calls of tools.
    #[serde(default)]
    pub content: Option<Said>,
    /// Any other field of the API: `name`, `tool_calls`, `tool_call_id`.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Said {
    Text(String),
    /// Parts of text, `{"type": "text", "text": …}`, which the server joins by line breaks.
    Parts(Vec<Value>),
}

impl Said {
    /// As the server reads it.
    pub fn text(&self) -> String {
        match self {
            Said::Text(text) => text.clone(),
            Said::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
                texts.join("\n")
            }
        }
    }
}

impl From<&str> for Said {
    fn from(text: &str) -> Self {
        Said::Text(text.into())
    }
}

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.into(), content: Some(content.into()), more: Map::new() }
    }
    /// What it says; empty beside calls of tools.
    pub fn text(&self) -> String {
        self.content.as_ref().map(Said::text).unwrap_or_default()
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

/// What a session begins with, or grows by.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Content {
    /// A session to be filled later.
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

/// Where a history is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// This many tokens stay.
    Token(u32),
    /// This many messages stay.
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

/// How a session is made.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NewSession {
    pub name: Option<String>,
    /// Its prefixes are shared only with requests of this salt.
    pub cache_salt: Option<String>,
}

/// How tokens are drawn. What is `None` is for the server to say.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Generate {
    /// Tokens at most.
    pub max_tokens: Option<u32>,
    /// 0 takes the likeliest token.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub seed: Option<i64>,
    /// Texts that end the answer and are no part of it.
    pub stop: Option<Vec<String>>,
    pub ignore_eos: Option<bool>,
    /// Of sessions: begin an answer of the assistant, or go on as it is.
    pub add_generation_prompt: Option<bool>,
    /// Any other field of the API.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Generate {
    /// The likeliest tokens, this many at most.
    pub fn greedy(max_tokens: u32) -> Self {
        Generate { max_tokens: Some(max_tokens), temperature: Some(0.0), ..Generate::default() }
    }
}

/// Tokens that an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Of the prompt, found in the cache.
    pub cached_tokens: u64,
}

impl Usage {
    pub(crate) fn of(usage: &Value) -> Self {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        Usage {
            prompt_tokens: count(&usage["prompt_tokens"]),
            completion_tokens: count(&usage["completion_tokens"]),
            cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: String,
    pub usage: Usage,
    /// All that was said, as JSON.
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

/// A piece of an answer on its way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// May be empty.
    pub text: String,
    /// In the last chunk of text.
    pub finish_reason: Option<String>,
    /// In the last chunk.
    pub usage: Option<Usage>,
}

/// A session, without its history.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Session {
    pub id: String,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    /// Seconds since 1970.
    pub created: u64,
    /// When it goes, unless it is used before. Seconds since 1970.
    pub expires: u64,
    pub n_tokens: u64,
    /// `None` if it is made of text or tokens.
    pub n_messages: Option<u64>,
    /// What it was forked from.
    pub parent: Option<String>,
    /// Tokens from the first that its parent has too.
    pub shared_tokens: u64,
    pub children: Vec<String>,
    /// It generates.
    pub running: bool,
    /// After an append or a rollback: tokens of the history before that stayed.
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
    /// `None` if it is made of text or tokens.
    pub messages: Option<Vec<Placed>>,
}

/// A message of a session.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Placed {
    pub message: Message,
    /// Its first token, if the template shows it.
    pub begins: Option<u64>,
    /// An answer that may go on.
    pub open: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a session gives back is read, whatever the server takes, and goes back as it came.
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
