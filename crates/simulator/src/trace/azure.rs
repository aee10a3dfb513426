//! Azure's public traces of LLM inference (Patel et al., "Splitwise", ISCA 2024; Azure/AzurePublicDataset): CSV of
//! `TIMESTAMP,ContextTokens,GeneratedTokens`. Contents are unknown, so nothing ever matches.
use super::row::{Columns, RowError, shortened, tokens};
use super::{Row, RowReader};
use crate::request::Request;
use chrono::NaiveDateTime;

pub(super) struct Azure {
    columns: Columns,
    timestamp: usize,
    context: usize,
    generated: usize,
}

impl Azure {
    pub fn new(header: &str) -> Result<Azure, RowError> {
        let columns = Columns::new(header)?;
        Ok(Azure {
            timestamp: columns.require("TIMESTAMP")?,
            context: columns.require("ContextTokens")?,
            generated: columns.require("GeneratedTokens")?,
            columns,
        })
    }
}

impl RowReader for Azure {
    fn row(&mut self, line: &str, id: u64) -> Result<Row, RowError> {
        let row = self.columns.row(line)?;
        let text = row.text(self.timestamp);
        let time_ns = utc_ns(text).ok_or_else(|| {
            RowError::new("TIMESTAMP", shortened(text), "UTC like 2023-11-16 18:17:03.9799600, from 1970 on")
        })?;
        let prompt_tokens = tokens("ContextTokens", row.count("ContextTokens", self.context)?)?;
        let output_tokens = tokens("GeneratedTokens", row.count("GeneratedTokens", self.generated)?)?;
        Ok(Row::Request { time_ns, request: Request::new(id, 0, prompt_tokens, output_tokens) })
    }

    fn has_header(&self) -> bool {
        true
    }
}

/// Nanoseconds since 1970 of a timestamp such as `2023-11-16 18:17:03.9799600`. `T` may separate date and time, there
/// may be up to nine decimals, and `Z` or `+00:00` may follow (as in the 2024 datasets). Other offsets are not UTC and
/// give `None`.
fn utc_ns(text: &str) -> Option<u64> {
    let text = text.strip_suffix("+00:00").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    if text.split_once('.').is_some_and(|(_, decimals)| decimals.len() > 9) {
        return None;
    }
    let time = NaiveDateTime::parse_from_str(&text.replacen('T', " ", 1), "%Y-%m-%d %H:%M:%S%.f").ok()?;
    u64::try_from(time.and_utc().timestamp_nanos_opt()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        for (text, ns) in [
            ("1970-01-01 00:00:00.0000000", Some(0)),
            ("2023-11-16 18:17:03.9799600", Some(1_700_158_623_979_960_000)),
            ("2024-02-29T23:59:59.123456789Z", Some(1_709_251_199_123_456_789)),
            ("2024-05-10 00:00:00.009930+00:00", Some(1_715_299_200_009_930_000)),
            ("2000-03-01 00:00:00", Some(951_868_800_000_000_000)),
            ("2023-02-29 00:00:00", None),
            ("2023-13-01 00:00:00", None),
            ("2023-11-16 24:00:00", None),
            ("2023-11-16 18:17:03.", None),
            ("2023-11-16 18:17:03.0123456789", None),
            ("2023-11-16 18:17:03+02:00", None),
            ("2023-11-16", None),
            ("+023-11-16 18:17:03", None),
            ("2023-11-16 18:17:0\u{0663}", None),
            ("", None),
        ] {
            assert_eq!(utc_ns(text), ns, "{text}");
        }
    }
}
