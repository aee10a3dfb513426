//! BurstGPT (Wang et al., "BurstGPT: A Real-world Workload Dataset to Optimize LLM Serving Systems", 2024;
//! HPMLL/BurstGPT): CSV of `Timestamp` in seconds, `Model`, `Request tokens`, `Response tokens`, `Total tokens`, `Log
//! Type`, later releases with `Session ID` and `Elapsed time`. A response of 0 tokens is a request that failed.
//! Contents are unknown, so nothing ever matches; model, total, log type and elapsed time are not used.
use super::row::{Columns, RowError, Time, shortened, tokens};
use super::{Row, RowReader};
use crate::request::Request;
use std::collections::HashMap;

pub(super) struct BurstGpt {
    columns: Columns,
    timestamp: usize,
    request: usize,
    response: usize,
    /// The session column, if the file has one and sessions are followed.
    session: Option<usize>,
    /// The last request of each session. Used for lookups only, never iterated.
    last: HashMap<String, u64>,
}

impl BurstGpt {
    pub fn new(header: &str, follow_parents: bool) -> Result<BurstGpt, RowError> {
        let columns = Columns::new(header)?;
        Ok(BurstGpt {
            timestamp: columns.require("Timestamp")?,
            request: columns.require("Request tokens")?,
            response: columns.require("Response tokens")?,
            session: columns.find("Session ID").filter(|_| follow_parents),
            columns,
            last: HashMap::new(),
        })
    }
}

impl RowReader for BurstGpt {
    fn row(&mut self, line: &str, id: u64) -> Result<Row, RowError> {
        let row = self.columns.row(line)?;
        let text = row.text(self.timestamp);
        let time = match text.parse::<u64>() {
            Ok(seconds) => Some(Time::Whole(seconds)),
            Err(_) => text.parse::<f64>().ok().map(Time::Fraction),
        };
        let time_ns = time
            .and_then(|time| time.ns(1_000_000_000))
            .ok_or_else(|| RowError::new("Timestamp", shortened(text), "seconds, at least 0"))?;
        let output_tokens = row.count("Response tokens", self.response)?;
        let prompt_tokens = row.count("Request tokens", self.request)?;
        if output_tokens == 0 {
            return Ok(Row::Failed);
        }
        let mut request = Request::new(id, 0, tokens("Request tokens", prompt_tokens)?, output_tokens);
        if let Some(column) = self.session {
            let session = row.text(column);
            if !session.is_empty() {
                request.parent = self.last.insert(session.to_string(), id);
            }
        }
        Ok(Row::Request { time_ns, request })
    }

    fn has_header(&self) -> bool {
        true
    }
}
