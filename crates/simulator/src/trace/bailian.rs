//! Qwen-Bailian usage traces (alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., "KVCache Cache in the Wild",
//! USENIX ATC 2025): JSON lines with `chat_id`, `parent_chat_id` (−1 at the start of a chat), `timestamp` in seconds,
//! `input_length`, `output_length`, `type`, `turn`, and `hash_ids`, one per 16 tokens. `type` and `turn` are not used.
use super::row::{self, Field, RowError, TOKENS, Time};
use super::{Row, RowReader};
use crate::request::Request;
use kvist_cache::Prompt;
use serde::Deserialize;
use std::collections::HashMap;

const TOKENS_PER_ID: u32 = 16;

pub(super) struct Bailian {
    follow_parents: bool,
    /// Request ids by `chat_id`. Used for lookups only, never iterated.
    requests: HashMap<i64, u64>,
}

impl Bailian {
    pub fn new(follow_parents: bool) -> Bailian {
        Bailian { follow_parents, requests: HashMap::new() }
    }
}

#[derive(Deserialize)]
struct Line {
    chat_id: i64,
    parent_chat_id: i64,
    timestamp: Time,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

const SECONDS: &str = "seconds, at least 0";
const IDS: &str = "a list of whole numbers, one per 16 tokens of `input_length`";
const FIELDS: &[Field] = &[
    ("chat_id", "a whole number", |v| v.is_i64()),
    ("parent_chat_id", "a whole number, -1 at the beginning of a chat", |v| v.is_i64()),
    ("timestamp", SECONDS, row::is_time),
    ("input_length", TOKENS, row::is_u32),
    ("output_length", TOKENS, row::is_u32),
    ("hash_ids", IDS, row::is_ids),
];

impl RowReader for Bailian {
    fn row(&mut self, line: &str, id: u64) -> Result<Row, RowError> {
        let mut line: Line = row::json(line, FIELDS)?;
        let time_ns = line
            .timestamp
            .ns(1_000_000_000)
            .ok_or_else(|| RowError::new("timestamp", line.timestamp.to_string(), SECONDS))?;
        let prompt_tokens = row::tokens("input_length", line.input_length)?;
        let output_tokens = row::tokens("output_length", line.output_length)?;
        // The publishers guarantee only ids of whole blocks: the partial last one may be missing, and the output may
        // be covered too.
        let total_tokens = u64::from(prompt_tokens) + u64::from(output_tokens);
        let min = u64::from(prompt_tokens / TOKENS_PER_ID);
        let max = total_tokens.div_ceil(u64::from(TOKENS_PER_ID));
        let n_ids = line.hash_ids.len() as u64;
        if n_ids < min || n_ids > max {
            let expected = format!("{min} to {max}, one per 16 of {prompt_tokens} + {output_tokens} tokens");
            return Err(RowError::new("hash_ids", format!("{n_ids} ids"), expected));
        }
        let n_tokens =
            u32::try_from((n_ids * u64::from(TOKENS_PER_ID)).min(total_tokens)).unwrap_or(u32::MAX);
        // One id past the prompt's whole blocks covers the last prompt tokens. How much output it covers is unknown.
        let prompt_ids = prompt_tokens.div_ceil(TOKENS_PER_ID);
        let n_tokens = if n_ids <= u64::from(prompt_ids) { prompt_tokens } else { n_tokens };
        if n_ids < u64::from(prompt_ids) {
            // A prompt is known as a whole. Nothing says that the tokens without an id are those of another request, so
            // they get one of their own: the publishers count ids from 0.
            line.hash_ids.push(u64::MAX - id);
        }
        let parent = if self.follow_parents && line.parent_chat_id >= 0 {
            // A chat that began before the trace has no parent here.
            self.requests.get(&line.parent_chat_id).copied()
        } else {
            None
        };
        self.requests.insert(line.chat_id, id);
        let content = Prompt::Ids { ids: line.hash_ids.into(), tokens_per_id: TOKENS_PER_ID, n_tokens };
        let request = Request { content, parent, ..Request::new(id, 0, prompt_tokens, output_tokens) };
        Ok(Row::Request { time_ns, request })
    }
}
