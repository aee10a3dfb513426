//! Mooncake's open traces (Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025). Each line is
//! `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}`, with the time in
//! milliseconds and one id per 512 prompt tokens, including the partial last one.
use super::row::{self, Field, RowError, TOKENS, Time};
use super::{Row, RowReader};
use crate::request::Request;
use kvist_cache::Prompt;
use serde::Deserialize;

const TOKENS_PER_ID: u32 = 512;

pub(super) struct Mooncake;

#[derive(Deserialize)]
struct Line {
    timestamp: Time,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

const MS: &str = "milliseconds, at least 0";
const IDS: &str = "a list of whole numbers, one per 512 tokens of `input_length`";
const FIELDS: &[Field] = &[
    ("timestamp", MS, row::is_time),
    ("input_length", TOKENS, row::is_u32),
    ("output_length", TOKENS, row::is_u32),
    ("hash_ids", IDS, row::is_ids),
];

impl RowReader for Mooncake {
    fn row(&mut self, line: &str, id: u64) -> Result<Row, RowError> {
        let line: Line = row::json(line, FIELDS)?;
        let time_ns = line
            .timestamp
            .ns(1_000_000)
            .ok_or_else(|| RowError::new("timestamp", line.timestamp.to_string(), MS))?;
        let n_tokens = row::tokens("input_length", line.input_length)?;
        let output_tokens = row::tokens("output_length", line.output_length)?;
        let n_ids = n_tokens.div_ceil(TOKENS_PER_ID) as usize;
        if line.hash_ids.len() != n_ids {
            let found = format!("{} ids", line.hash_ids.len());
            let expected = format!("{n_ids}, one per 512 of the {n_tokens} tokens of the prompt");
            return Err(RowError::new("hash_ids", found, expected));
        }
        let content = Prompt::Ids { ids: line.hash_ids.into(), tokens_per_id: TOKENS_PER_ID, n_tokens };
        Ok(Row::Request {
            time_ns,
            request: Request { content, ..Request::new(id, 0, n_tokens, output_tokens) },
        })
    }
}
