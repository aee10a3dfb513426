//! Log-probabilities, as the two endpoints write them: token by token, so that a long answer's need not be in memory at
//! once. They are some hundred bytes for each of up to 21 tokens in the place of one.
use super::tokens::name_of;
use crate::app::App;
use crate::job::Token;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// Writes scores for one endpoint: a column of entries after the other, with an entry for each token.
#[derive(Clone)]
pub(crate) struct Scorer {
    app: Arc<App>,
    chat: bool,
}

/// What stands before, between and behind columns.
const CHAT: &[&str] = &["{\"content\":[", "],\"refusal\":null}"];
const TEXT: &[&str] =
    &["{\"tokens\":[", "],\"token_logprobs\":[", "],\"top_logprobs\":[", "],\"text_offset\":[", "]}"];

/// One token's share of one column.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Scored(Scored<'a>),
    Name(Cow<'a, str>),
    LogProb(Option<f64>),
    Tops(Map<String, Value>),
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

    /// One more than there are columns.
    pub fn frame(&self) -> &'static [&'static str] {
        if self.chat { CHAT } else { TEXT }
    }

    /// Append a token's entry in a column; its text begins at the character `offset` of the answer.
    pub fn write(&self, column: usize, token: &Token, offset: usize, out: &mut Vec<u8>) {
        // Writing to memory does not fail, and neither does anything in an entry.
        let _ = serde_json::to_writer(out, &self.entry(column, token, offset));
    }

    /// All of one token's, in a document of its own.
    pub fn of_token(&self, token: &Token, offset: usize) -> Value {
        let entry =
            |column: usize| serde_json::to_value(self.entry(column, token, offset)).unwrap_or_default();
        match self.chat {
            true => json!({"content": [entry(0)], "refusal": null}),
            false => json!({
                "tokens": [entry(0)],
                "token_logprobs": [entry(1)],
                "top_logprobs": [entry(2)],
                "text_offset": [entry(3)],
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
                // The token itself is always among them, and before another one of the same name.
                tops.insert(name_of(&self.app, token.id).text.into_owned(), own.into());
                Entry::Tops(tops)
            }
            _ => Entry::Offset(offset),
        }
    }
}
