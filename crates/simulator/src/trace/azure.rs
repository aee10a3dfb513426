//! Azure's public traces of LLM inference (Patel et al., "Splitwise", ISCA 2024; Azure/AzurePublicDataset): CSV of
//! `TIMESTAMP,ContextTokens,GeneratedTokens`. Contents are unknown, so nothing ever matches.
use super::row::{Columns, RowError, shortened, tokens};
use super::{Row, RowReader};
use crate::request::Request;

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
}

/// Nanoseconds since 1970 of a timestamp such as `2023-11-16 18:17:03.9799600`. `T` may separate date and time, there
/// may be up to nine decimals, and `Z` or `+00:00` may follow (as in the 2024 datasets). Other offsets are not UTC and
/// give `None`.
fn utc_ns(text: &str) -> Option<u64> {
    let text = text.strip_suffix("+00:00").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let (date, time) = text.split_once([' ', 'T'])?;
    let number = |text: &str, digits: usize| -> Option<u64> {
        let good = text.len() == digits && text.bytes().all(|b| b.is_ascii_digit());
        good.then(|| text.parse().ok()).flatten()
    };
    let mut parts = date.split('-');
    let (year, month, day) =
        (number(parts.next()?, 4)?, number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut clock_parts = clock.split(':');
    let (hour, minute, second) =
        (number(clock_parts.next()?, 2)?, number(clock_parts.next()?, 2)?, number(clock_parts.next()?, 2)?);
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days_in_month = match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    let good = parts.next().is_none()
        && clock_parts.next().is_none()
        && (1970..=2200).contains(&year)
        && (1..=12).contains(&month)
        && (1..=days_in_month).contains(&day)
        && hour < 24
        && minute < 60
        && second < 60
        && (1..=9).contains(&fraction.len());
    if !good {
        return None;
    }
    let ns = number(fraction, fraction.len())? * 10u64.pow(9 - fraction.len() as u32);
    let seconds = (days_since_1970(year, month, day) * 24 + hour) * 3600 + minute * 60 + second;
    Some(seconds * 1_000_000_000 + ns)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar (Hinnant, "chrono-Compatible Low-Level Date Algorithms",
/// `days_from_civil`), for years from 1970 on.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    // Years begin in March, so that the leap day is the last day.
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
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

    /// The reference counts days one by one.
    #[test]
    fn days_against_counting() {
        let mut days = 0;
        for year in 1970..2101u64 {
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let months = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            for (month, n) in (1..).zip(months) {
                for day in 1..=n {
                    assert_eq!(days_since_1970(year, month, day), days, "{year}-{month}-{day}");
                    days += 1;
                }
            }
        }
    }
}
