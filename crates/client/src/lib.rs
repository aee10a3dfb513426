//! A small, blocking, typed client for kvist's server: completions, chat, and sessions that fork.
//!
//! ```no_run
//! use kvist_client::{Client, Content, Cut, Generate, Message};
//!
//! # fn main() -> Result<(), kvist_client::Error> {
//! let client = Client::new("http://127.0.0.1:8080").with_key("a-secret");
//! let trunk = client.create_session(&Content::from([Message::user("Name a colour.")]), &Default::default())?;
//! let branches = client.fork(&trunk.id, None, 2)?;
//! for branch in &branches {
//!     let answer = client.generate(&branch.id, &Generate { max_tokens: Some(16), ..Default::default() })?;
//!     println!("{}", answer.text);
//! }
//! client.keep(&branches[0].id, &[])?; // the other one is deleted
//! client.rollback(&branches[0].id, Cut::Message(1))?;
//! # Ok(()) }
//! ```
//!
//! A request that the server rejects returns [`Error::Api`] with the server's own code and message. Dropping a
//! [`Stream`] ends the generation. The client never retries. `https` needs the feature `tls`.
#![forbid(unsafe_code)]

mod api;
mod stream;

pub use api::*;
pub use stream::Stream;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::io::Read;
use std::time::Duration;
use ureq::http::Response;
use ureq::{Agent, Body};

/// Errors of all calls of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server rejected the request. `status` is 0 if the error arrived inside a stream that had already
    /// started.
    #[error("{status} {code}: {message}")]
    Api {
        status: u16,
        /// Machine-readable: `session_not_found`, `session_busy`, `queue_full`, …
        code: String,
        message: String,
        /// The request field that caused the error.
        param: Option<String>,
        /// Seconds to wait before a retry, from the `retry-after` header.
        retry_after_s: Option<u32>,
    },
    #[error("cannot reach the server: {0}")]
    Transport(#[from] ureq::Error),
    #[error("the answer ended early: {0}")]
    Read(#[from] std::io::Error),
    #[error("cannot parse the server's answer: {0}")]
    Answer(#[from] serde_json::Error),
}

/// A connection to one server, with an optional API key. Cheap to clone; connections are reused.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    base: String,
    key: Option<String>,
}

/// Limit on the size of a response that is read whole, in bytes.
const MAX_ANSWER_BYTES: u64 = 256 << 20;

impl Client {
    /// `url` is the server's address, e.g. `http://127.0.0.1:8080`, with or without `/v1`.
    pub fn new(url: &str) -> Self {
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(10)))
            .build();
        Client { agent: agent.into(), base: base.into(), key: None }
    }

    /// Send this API key with every request.
    pub fn with_key(self, key: &str) -> Self {
        Client { key: Some(key.into()), ..self }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn post(&self, path: &str, body: &impl Serialize) -> Result<Response<Body>, Error> {
        let mut request = self.agent.post(self.url(path)).header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        checked(request.send(&serde_json::to_vec(body)?)?)
    }

    fn call(&self, method: &str, path: &str) -> Result<Response<Body>, Error> {
        let mut request = match method {
            "DELETE" => self.agent.delete(self.url(path)),
            _ => self.agent.get(self.url(path)),
        };
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        checked(request.call()?)
    }

    /// Names of the models that the server serves: always one.
    pub fn models(&self) -> Result<Vec<String>, Error> {
        let list: Value = document(self.call("GET", "/v1/models")?)?;
        let names = list["data"].as_array().into_iter().flatten();
        Ok(names.filter_map(|model| model["id"].as_str().map(str::to_string)).collect())
    }

    /// Completes `prompt`.
    pub fn complete(&self, prompt: &str, how: &Generate) -> Result<Answer, Error> {
        self.answer("/v1/completions", &with(how, json!({ "prompt": prompt }))?)
    }
    /// Like [`Client::complete`], streamed.
    pub fn complete_stream(&self, prompt: &str, how: &Generate) -> Result<Stream, Error> {
        self.stream("/v1/completions", with(how, json!({ "prompt": prompt }))?)
    }
    /// Returns the assistant's next message.
    pub fn chat(&self, messages: &[Message], how: &Generate) -> Result<Answer, Error> {
        self.answer("/v1/chat/completions", &with(how, json!({ "messages": messages }))?)
    }
    /// Like [`Client::chat`], streamed.
    pub fn chat_stream(&self, messages: &[Message], how: &Generate) -> Result<Stream, Error> {
        self.stream("/v1/chat/completions", with(how, json!({ "messages": messages }))?)
    }

    /// Creates a session whose history is `content`.
    pub fn create_session(&self, content: &Content, how: &NewSession) -> Result<Session, Error> {
        document(self.post("/v1/sessions", &with(how, content.fields())?)?)
    }
    /// Lists all sessions of this API key.
    pub fn sessions(&self) -> Result<Vec<Session>, Error> {
        let mut list: Value = document(self.call("GET", "/v1/sessions")?)?;
        Ok(serde_json::from_value(list["data"].take())?)
    }
    /// Returns one session with its history.
    pub fn session(&self, id: &str) -> Result<History, Error> {
        document(self.call("GET", &path(id, ""))?)
    }
    pub fn delete_session(&self, id: &str) -> Result<(), Error> {
        self.call("DELETE", &path(id, ""))?;
        Ok(())
    }
    /// Appends to the history. The server computes no KV for it until the next generation.
    pub fn append(&self, id: &str, content: &Content) -> Result<Session, Error> {
        document(self.post(&path(id, "/append"), &content.fields())?)
    }
    /// Generates from the end of the history. The output becomes part of the history.
    pub fn generate(&self, id: &str, how: &Generate) -> Result<Answer, Error> {
        self.answer(&path(id, "/generate"), &with(how, json!({}))?)
    }
    /// Like [`Client::generate`], streamed. Dropping the stream ends the generation; the tokens generated so
    /// far stay in the history.
    pub fn generate_stream(&self, id: &str, how: &Generate) -> Result<Stream, Error> {
        self.stream(&path(id, "/generate"), with(how, json!({}))?)
    }
    /// Creates `n` sessions that share this session's history up to `at`, or all of it. Works while the session
    /// generates.
    pub fn fork(&self, id: &str, at: Option<Cut>, n: u32) -> Result<Vec<Session>, Error> {
        let mut list: Value = document(self.post(&path(id, "/fork"), &json!({"at": at, "n": n}))?)?;
        Ok(serde_json::from_value(list["sessions"].take())?)
    }
    /// Truncates the history at `to`.
    pub fn rollback(&self, id: &str, to: Cut) -> Result<Session, Error> {
        document(self.post(&path(id, "/rollback"), &json!({ "to": to }))?)
    }
    /// Deletes this session's siblings (the other sessions of the fork call that created it) except those in
    /// `also`, together with all their descendants. Returns the ids of the deleted sessions.
    pub fn keep(&self, id: &str, also: &[&str]) -> Result<Vec<String>, Error> {
        let mut kept: Value = document(self.post(&path(id, "/keep"), &json!({ "also": also }))?)?;
        Ok(serde_json::from_value(kept["deleted"].take())?)
    }

    fn answer(&self, path: &str, body: &Map<String, Value>) -> Result<Answer, Error> {
        let whole: Value = document(self.post(path, body)?)?;
        Ok(Answer::of_document(&whole))
    }

    fn stream(&self, path: &str, mut body: Map<String, Value>) -> Result<Stream, Error> {
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        Ok(Stream::new(self.post(path, &body)?.into_body().into_reader()))
    }
}

fn path(id: &str, verb: &str) -> String {
    // An invalid id must not change which path is requested.
    let clean: String = id.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    format!("/v1/sessions/{clean}{verb}")
}

/// Merges the fields of both objects and drops nulls.
fn with(fields: &impl Serialize, more: Value) -> Result<Map<String, Value>, Error> {
    let mut all = Map::new();
    for value in [serde_json::to_value(fields)?, more] {
        if let Value::Object(fields) = value {
            all.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
        }
    }
    Ok(all)
}

fn text(response: Response<Body>) -> Result<String, Error> {
    let mut text = String::new();
    let body = response.into_body().into_with_config().limit(MAX_ANSWER_BYTES);
    body.reader().read_to_string(&mut text)?;
    Ok(text)
}

fn document<T: DeserializeOwned>(response: Response<Body>) -> Result<T, Error> {
    Ok(serde_json::from_str(&text(response)?)?)
}

/// Turns every status outside 2xx into an error.
fn checked(response: Response<Body>) -> Result<Response<Body>, Error> {
    let status = response.status().as_u16();
    if (200..300).contains(&status) {
        return Ok(response);
    }
    let retry_after = response.headers().get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok());
    let text = text(response)?;
    let document: Value = serde_json::from_str(&text).unwrap_or_default();
    Err(refused(status, &document, retry_after).unwrap_or_else(|| Error::Api {
        status,
        code: "unknown".into(),
        message: text.chars().take(200).collect(),
        param: None,
        retry_after_s: retry_after,
    }))
}

/// The error that a response body or stream event carries, if it has one.
fn refused(status: u16, document: &Value, retry_after_s: Option<u32>) -> Option<Error> {
    let error = document.get("error")?;
    let field = |name: &str| error[name].as_str().map(str::to_string);
    Some(Error::Api {
        status,
        code: field("code").unwrap_or_default(),
        message: field("message").unwrap_or_default(),
        param: field("param"),
        retry_after_s,
    })
}
