//! Writes log-probabilities in the formats of the two endpoints, token by token, so that those of a long answer never
//! have to be in memory all at once. They take about a hundred bytes for each of up to 21 tokens per position.
use super::tokens::name_of;
use crate::state::ServerState;
use kvist_engine::serving::Token;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// Writes scores in an endpoint's format: column by column, with one entry per token in each.
#[derive(Clone)]
pub(crate) struct Scorer {
    state: Arc<ServerState>,
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
    pub fn chat(state: &Arc<ServerState>) -> Self {
        Scorer { state: state.clone(), chat: true }
    }
    pub fn text(state: &Arc<ServerState>) -> Self {
        Scorer { state: state.clone(), chat: false }
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
                    let name = name_of(&self.state, id);
                    Named { token: name.text, logprob: Some(logprob), bytes: name.bytes }
                };
                let name = name_of(&self.state, token.id);
                let top_logprobs = top.map(named).collect();
                Entry::Scored(Scored { token: name.text, logprob: own, bytes: name.bytes, top_logprobs })
            }
            0 => Entry::Name(name_of(&self.state, token.id).text),
            1 => Entry::LogProb(own),
            2 => {
                let named =
                    |(id, logprob)| (name_of(&self.state, id).text.into_owned(), Value::from(logprob));
                let mut tops: Map<String, Value> = top.map(named).collect();
                // The token itself is always listed, and replaces another token of the same name.
                tops.insert(name_of(&self.state, token.id).text.into_owned(), own.into());
                // The first token of a prompt has no scores.
                Entry::Tops(token.logprob.is_some().then_some(tops))
            }
            _ => Entry::Offset(offset),
        }
    }
}
