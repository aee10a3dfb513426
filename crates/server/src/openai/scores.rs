//! Writes log-probabilities in the formats of the two endpoints, token by token, so that those of a long answer never
//! have to be in memory all at once. They take some hundred bytes for each of up to 21 tokens per position.
//!
//! Prompts are scored faster than any client reads. [`ScoreRoom`] limits how much of this data exists at one time,
//! together with other long answers until they are read.
use super::tokens::name_of;
use crate::app::App;
use crate::body::{BytePool, Leave, busy};
use crate::error::ApiError;
use crate::job::{LogProb, Token};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

/// Most log-probabilities in addition to a token's own.
pub(crate) const MAX_TOP: u8 = 20;

/// Memory limit for the log-probabilities of prompts, and for long texts and token lists, over all requests. Each of up
/// to [`REQUESTS`] names has a share that no other name can take. With more names, the names take turns.
pub(crate) struct ScoreRoom {
    lane: BytePool,
    /// Largest number of bytes for one request.
    most: usize,
}

/// Smallest value of `most`, in bytes.
const MIN_ROOM: usize = 16 << 20;
/// Number of requests that may take `most` at the same time.
const REQUESTS: usize = 4;

/// Memory of a prompt's token with `top` log-probabilities, in bytes: the token, its text, and the list.
fn bytes_of_token(top: u8) -> usize {
    size_of::<Token>() + 32 + usize::from(top) * size_of::<(u32, f32)>() + size_of::<LogProb>()
}

impl ScoreRoom {
    /// One request may score a whole context.
    pub fn new(context: u32, names: &[Arc<str>]) -> Self {
        let most = (context as usize).saturating_mul(bytes_of_token(MAX_TOP)).max(MIN_ROOM);
        ScoreRoom { lane: BytePool::new(most.saturating_mul(REQUESTS), most, names), most }
    }

    /// Largest number of bytes that one request may take.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Reserve memory for an answer of this many bytes, without waiting.
    pub fn try_take(&self, name: &str, bytes: usize, param: &str) -> Result<Leave, ApiError> {
        if bytes > self.most {
            let message = format!(
                "the answer would have {bytes} bytes in memory; one may have {}: send less at a time",
                self.most
            );
            return Err(ApiError::invalid(param, message));
        }
        self.lane.try_take(name, bytes).ok_or_else(busy)
    }

    /// Reserve memory for the scores of this many prompt tokens. Waits until the deadline.
    pub async fn take(
        &self,
        name: &str,
        tokens: usize,
        top: u8,
        deadline: Instant,
    ) -> Result<Leave, ApiError> {
        let bytes = tokens.saturating_mul(bytes_of_token(top));
        if bytes > self.most {
            let fit = self.most / bytes_of_token(top);
            let message = format!(
                "`echo` with `logprobs`: the prompts have {tokens} tokens, and one request may have those of {fit} scored \
                 with {top} log-probabilities each. Send fewer prompts at a time, or a smaller `logprobs`"
            );
            return Err(ApiError::invalid("prompt", message));
        }
        self.wait(name, bytes, deadline).await
    }

    /// Reserve memory to echo prompts of this many bytes. Waits until the deadline.
    pub async fn take_echo(&self, name: &str, bytes: usize, deadline: Instant) -> Result<Leave, ApiError> {
        if bytes > self.most {
            let message = format!(
                "`echo`: the prompts have {bytes} bytes, and those of one request may have {}: send fewer prompts at a \
                 time",
                self.most
            );
            return Err(ApiError::invalid("prompt", message));
        }
        self.wait(name, bytes, deadline).await
    }

    async fn wait(&self, name: &str, bytes: usize, deadline: Instant) -> Result<Leave, ApiError> {
        let leave = self.lane.take(name, bytes);
        let leave = tokio::time::timeout_at(deadline.into(), leave).await;
        leave.map_err(|_| ApiError::deadline())?.ok_or_else(|| ApiError::internal("no room for scores"))
    }
}

/// Writes scores in an endpoint's format: column by column, with one entry per token in each.
#[derive(Clone)]
pub(crate) struct Scorer {
    app: Arc<App>,
    chat: bool,
}

/// The text before, between and after columns.
const CHAT: &[&str] = &["{\"content\":[", "],\"refusal\":null}"];
const TEXT: &[&str] =
    &["{\"tokens\":[", "],\"token_logprobs\":[", "],\"top_logprobs\":[", "],\"text_offset\":[", "]}"];

/// One token's entry in one column.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Scored(Scored<'a>),
    Name(Cow<'a, str>),
    LogProb(Option<f64>),
    Tops(Option<Map<String, Value>>),
    Offset(usize),
}

#[derive(Serialize)]
struct Named<'a> {
    token: Cow<'a, str>,
    logprob: Option<f64>,
    bytes: Option<&'a [u8]>,
}

#[derive(Serialize)]
struct Scored<'a> {
    token: Cow<'a, str>,
    logprob: Option<f64>,
    bytes: Option<&'a [u8]>,
    top_logprobs: Vec<Named<'a>>,
}

impl Scorer {
    pub fn chat(app: &Arc<App>) -> Self {
        Scorer { app: app.clone(), chat: true }
    }
    pub fn text(app: &Arc<App>) -> Self {
        Scorer { app: app.clone(), chat: false }
    }

    /// The text around the columns: one more element than there are columns.
    pub fn frame(&self) -> &'static [&'static str] {
        if self.chat { CHAT } else { TEXT }
    }

    /// Append a token's entry in a column. The token's text begins at the character `offset` of the answer.
    pub fn write(&self, column: usize, token: &Token, offset: usize, out: &mut Vec<u8>) {
        // Writing to memory cannot fail, and neither can serializing an entry.
        let _ = serde_json::to_writer(out, &self.entry(column, token, offset));
    }

    /// All columns of these tokens, as one document.
    pub fn of_tokens(&self, tokens: &[Token], offset: usize) -> Value {
        let column = |column: usize| -> Value {
            let mut offset = offset;
            let entry = |token: &Token| {
                let entry = serde_json::to_value(self.entry(column, token, offset)).unwrap_or_default();
                offset += token.text.chars().count();
                entry
            };
            tokens.iter().map(entry).collect()
        };
        match self.chat {
            true => json!({"content": column(0), "refusal": null}),
            false => json!({
                "tokens": column(0),
                "token_logprobs": column(1),
                "top_logprobs": column(2),
                "text_offset": column(3),
            }),
        }
    }

    fn entry(&self, column: usize, token: &Token, offset: usize) -> Entry<'_> {
        let own = token.logprob.as_ref().map(|l| f64::from(l.logprob));
        let top = token.logprob.iter().flat_map(|l| &l.top).map(|(id, logprob)| (*id, f64::from(*logprob)));
        match column {
            0 if self.chat => {
                let named = |(id, logprob): (u32, f64)| {
                    let name = name_of(&self.app, id);
                    Named { token: name.text, logprob: Some(logprob), bytes: name.bytes }
                };
                let name = name_of(&self.app, token.id);
                let top_logprobs = top.map(named).collect();
                Entry::Scored(Scored { token: name.text, logprob: own, bytes: name.bytes, top_logprobs })
            }
            0 => Entry::Name(name_of(&self.app, token.id).text),
            1 => Entry::LogProb(own),
            2 => {
                let named = |(id, logprob)| (name_of(&self.app, id).text.into_owned(), Value::from(logprob));
                let mut tops: Map<String, Value> = top.map(named).collect();
                // The token itself is always listed, and replaces another token of the same name.
                tops.insert(name_of(&self.app, token.id).text.into_owned(), own.into());
                // The first token of a prompt has no scores.
                Entry::Tops(token.logprob.is_some().then_some(tops))
            }
            _ => Entry::Offset(offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_answers_have_a_bound_together() {
        let names: [Arc<str>; 2] = ["a".into(), "b".into()];
        let room = ScoreRoom::new(1000, &names);
        let take = |name: &str, bytes| room.try_take(name, bytes, "prompt").map_err(|error| error.code);
        let held = [take("a", MIN_ROOM).unwrap(), take("a", MIN_ROOM).unwrap()];
        assert_eq!(take("a", 1).err(), Some("server_busy"));
        let other = [take("b", MIN_ROOM).unwrap(), take("b", MIN_ROOM).unwrap()];
        assert_eq!(take("b", MIN_ROOM + 1).err(), Some("invalid_value"));
        drop((held, other));
        assert!(take("a", MIN_ROOM).is_ok());
    }

    #[tokio::test]
    async fn prompts_that_are_given_back_have_the_same_room() {
        let room = ScoreRoom::new(1000, &[]);
        let now = Instant::now();
        let code = |taken: Result<Leave, ApiError>| taken.map_err(|error| error.code);
        let all: Vec<Leave> =
            (0..REQUESTS).map(|_| room.try_take("", MIN_ROOM, "prompt").ok().unwrap()).collect();
        assert_eq!(code(room.take_echo("", 1, now).await).err(), Some(ApiError::deadline().code));
        assert_eq!(code(room.take_echo("", MIN_ROOM + 1, now).await).err(), Some("invalid_value"));
        drop(all);
        let later = now + std::time::Duration::from_secs(3600);
        assert!(room.take_echo("", MIN_ROOM, later).await.is_ok());
    }
}
