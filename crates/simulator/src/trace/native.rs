//! kvist's own format, which can express every field of a [`Request`] and is read back exactly as written. Described
//! in docs/traces.md.
use super::row::{self, Field, RowError, TOKENS, shortened};
use super::{Row, RowReader};
use crate::request::Request;
use kvist_cache::Prompt;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::io::{self, Write};
use std::sync::Arc;

const NAME: &str = "kvist-trace";
const VERSION: u64 = 1;

#[derive(Default)]
pub(super) struct Native {
    has_header: bool,
    /// All ids so far. Used for lookups only, never iterated.
    ids: HashSet<u64>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    version: u64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: u64,
    arrival_ns: u64,
    prompt_tokens: u32,
    output_tokens: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokens: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ids: Option<Vec<u64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokens_per_id: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    known_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    salt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deadline_ns: Option<u64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    priority: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<u64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    think_ns: u64,
}

fn is_zero<T: Default + PartialEq>(n: &T) -> bool {
    *n == T::default()
}

const NS: &str = "whole nanoseconds up to 9223372036854775807";
const FIELDS: &[Field] = &[
    ("id", "a whole number", Value::is_u64),
    ("arrival_ns", NS, Value::is_u64),
    ("prompt_tokens", TOKENS, row::is_u32),
    ("output_tokens", TOKENS, row::is_u32),
    ("tokens", "a list of token ids, or nothing", |v| {
        v.is_null() || v.as_array().is_some_and(|a| a.iter().all(row::is_u32))
    }),
    ("ids", "a list of whole numbers, or nothing", |v| v.is_null() || row::is_ids(v)),
    ("tokens_per_id", TOKENS, |v| v.is_null() || row::is_u32(v)),
    ("known_tokens", TOKENS, |v| v.is_null() || row::is_u32(v)),
    ("salt", "a string, or nothing", |v| v.is_null() || v.is_string()),
    ("deadline_ns", NS, |v| v.is_null() || v.is_u64()),
    ("priority", "a whole number from -2147483648 to 2147483647", |v| {
        v.is_null() || v.as_i64().is_some_and(|n| i32::try_from(n).is_ok())
    }),
    ("parent", "the id of an earlier request, or nothing", |v| v.is_null() || v.is_u64()),
    ("think_ns", NS, |v| v.is_null() || v.is_u64()),
];

const HEADER: &[Field] = &[
    ("format", "\"kvist-trace\" in the first line", Value::is_string),
    ("version", "a whole number", Value::is_u64),
];

impl RowReader for Native {
    fn row(&mut self, line: &str, _: u64) -> Result<Row, RowError> {
        if !self.has_header {
            let header: Header = row::json(line, HEADER)?;
            if header.format != NAME {
                return Err(RowError::new("format", shortened(&header.format), format!("\"{NAME}\"")));
            }
            if header.version != VERSION {
                return Err(RowError::new("version", header.version.to_string(), VERSION.to_string()));
            }
            self.has_header = true;
            return Ok(Row::Header);
        }
        let line: Line = row::json(line, FIELDS)?;
        let request = self.request(line)?;
        self.ids.insert(request.id);
        Ok(Row::Request { time_ns: request.arrival_ns, request })
    }

    fn counts_from_first(&self) -> bool {
        false
    }
}

impl Native {
    fn request(&self, line: Line) -> Result<Request, RowError> {
        let prompt_tokens = row::tokens("prompt_tokens", line.prompt_tokens)?;
        let output_tokens = row::tokens("output_tokens", line.output_tokens)?;
        for (field, ns) in [
            ("arrival_ns", line.arrival_ns),
            ("think_ns", line.think_ns),
            ("deadline_ns", line.deadline_ns.unwrap_or(0)),
        ] {
            if i64::try_from(ns).is_err() {
                return Err(RowError::new(field, ns.to_string(), NS));
            }
        }
        if self.ids.contains(&line.id) {
            return Err(RowError::new("id", line.id.to_string(), "an id that no earlier request has"));
        }
        if let Some(parent) = line.parent.filter(|parent| !self.ids.contains(parent)) {
            return Err(RowError::new("parent", parent.to_string(), "the id of an earlier request"));
        }
        let content = content(&line)?;
        Ok(Request {
            id: line.id,
            arrival_ns: line.arrival_ns,
            prompt_tokens,
            output_tokens,
            content,
            salt: line.salt.map(Arc::from),
            deadline_ns: line.deadline_ns,
            priority: line.priority,
            parent: line.parent,
            think_ns: line.think_ns,
        })
    }
}

fn content(line: &Line) -> Result<Prompt, RowError> {
    let min = u64::from(line.prompt_tokens);
    let max = min + u64::from(line.output_tokens);
    let covers = |field: &str, n: u64| {
        if (min..=max).contains(&n) {
            Ok(())
        } else {
            let expected =
                format!("content of {min} to {max} tokens: the prompt, and the known part of the output");
            Err(RowError::new(field, format!("{n} tokens"), expected))
        }
    };
    match (&line.tokens, &line.ids, line.tokens_per_id) {
        (None, None, None) => Ok(Prompt::Unknown),
        (Some(tokens), None, None) => {
            covers("tokens", tokens.len() as u64)?;
            Ok(Prompt::SharedTokens(tokens.as_slice().into()))
        }
        (None, Some(ids), Some(tokens_per_id)) => {
            let tokens_per_id = row::tokens("tokens_per_id", tokens_per_id)?;
            let n_tokens = line.known_tokens.unwrap_or(line.prompt_tokens);
            covers("known_tokens", u64::from(n_tokens))?;
            let n_ids = n_tokens.div_ceil(tokens_per_id) as usize;
            if ids.len() != n_ids {
                let expected = format!("{n_ids}, one per {tokens_per_id} of {n_tokens} tokens");
                return Err(RowError::new("ids", format!("{} ids", ids.len()), expected));
            }
            Ok(Prompt::Ids { ids: ids.as_slice().into(), tokens_per_id, n_tokens })
        }
        (Some(_), _, _) => Err(RowError::new("tokens", "tokens and ids", "one of `tokens` and `ids`")),
        (None, Some(_), None) => Err(RowError::new("tokens_per_id", "nothing", TOKENS)),
        (None, None, Some(_)) => Err(RowError::new("ids", "nothing", "a list, as `tokens_per_id` is given")),
    }
}

/// Writes `requests` in kvist's own format. [`super::Trace::read`] reads them back unchanged.
///
/// # Errors
/// Only I/O errors of `out`.
pub fn write<'a>(mut out: impl Write, requests: impl IntoIterator<Item = &'a Request>) -> io::Result<()> {
    serde_json::to_writer(&mut out, &Header { format: NAME.into(), version: VERSION })?;
    out.write_all(b"\n")?;
    for request in requests {
        let (mut tokens, mut ids, mut tokens_per_id, mut known_tokens) = (None, None, None, None);
        if let Prompt::Ids { tokens_per_id: per_id, n_tokens, .. } = &request.content {
            ids = request.content.ids(*n_tokens).map(<[u64]>::to_vec);
            tokens_per_id = Some(*per_id);
            known_tokens = Some(*n_tokens).filter(|n| *n != request.prompt_tokens);
        } else {
            tokens = request.content.tokens().map(<[u32]>::to_vec);
        }
        let line = Line {
            id: request.id,
            arrival_ns: request.arrival_ns,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            tokens,
            ids,
            tokens_per_id,
            known_tokens,
            salt: request.salt.as_deref().map(String::from),
            deadline_ns: request.deadline_ns,
            priority: request.priority,
            parent: request.parent,
            think_ns: request.think_ns,
        };
        serde_json::to_writer(&mut out, &line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}
