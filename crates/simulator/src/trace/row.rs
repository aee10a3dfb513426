//! Shared helpers for row readers: errors that name the field, numbers with units, CSV columns.
use serde::de::{self, DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// The error in a row.
#[derive(Debug, PartialEq)]
pub(super) struct RowError {
    pub field: String,
    pub found: String,
    pub expected: String,
}

impl RowError {
    pub fn new(field: &str, found: impl Into<String>, expected: impl Into<String>) -> RowError {
        RowError { field: field.into(), found: found.into(), expected: expected.into() }
    }
}

/// The beginning of `text`, for error messages.
pub(super) fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    let text = text.trim();
    let mut short: String = text.chars().take(LONGEST).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

/// Expected range of a token count, for error messages: at least 1.
pub(super) const TOKENS: &str = "a whole number from 1 to 4294967295";

pub(super) fn tokens(field: &str, n: u32) -> Result<u32, RowError> {
    if n == 0 { Err(RowError::new(field, "0", TOKENS)) } else { Ok(n) }
}

/// A field of a JSON row: name, expected value as text, and a check. Used to find the field that made parsing fail.
pub(super) type Field = (&'static str, &'static str, fn(&Value) -> bool);

/// Parses a JSON row. The fast path does not check fields; only if it fails are the fields checked to name the bad
/// one.
pub(super) fn json<T: DeserializeOwned>(line: &str, fields: &[Field]) -> Result<T, RowError> {
    serde_json::from_str(line).map_err(|error| {
        let error = shortened(&error.to_string());
        let mut row = serde_json::Deserializer::from_str(line);
        let object =
            match (Known { fields }).deserialize(&mut row).and_then(|object| row.end().map(|()| object)) {
                Ok(object) => object,
                Err(error) => {
                    let found = format!("{} ({})", shortened(line), shortened(&error.to_string()));
                    return RowError::new("(row)", found, "one JSON object per line");
                }
            };
        for (name, expected, is_good) in fields {
            match object.get(*name) {
                None if is_good(&Value::Null) => {}
                None => return RowError::new(name, "nothing", *expected),
                Some(value) if is_good(value) => {}
                Some(value) => return RowError::new(name, shortened(&value.to_string()), *expected),
            }
        }
        RowError::new("(row)", format!("{} ({error})", shortened(line)), "the fields of docs/traces.md")
    })
}

/// Reads the known fields of a row in shortened form, so that reporting a bad row with millions of ids does not take
/// gigabytes.
struct Known<'f> {
    fields: &'f [Field],
}

impl<'de> DeserializeSeed<'de> for Known<'_> {
    type Value = BTreeMap<String, Value>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Known<'_> {
    type Value = BTreeMap<String, Value>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut object = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if self.fields.iter().any(|(known, ..)| *known == name) {
                object.insert(name, map.next_value::<Brief>()?.0);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(object)
    }
}

/// A shortened value: of a list, only the first element and any possibly wrong one are kept.
struct Brief(Value);

impl<'de> Deserialize<'de> for Brief {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Brief, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
                Ok(v.into())
            }
            fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
                Ok(v.into())
            }
            fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
                Ok(v.into())
            }
            fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
                Ok(v.into())
            }
            fn visit_str<E>(self, v: &str) -> Result<Value, E> {
                Ok(v.chars().take(100).collect::<String>().into())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
                let mut kept: Vec<Value> = Vec::new();
                while let Some(Brief(value)) = list.next_element()? {
                    let max = if !value.is_u64() {
                        12
                    } else if !is_u32(&value) {
                        8
                    } else {
                        4
                    };
                    if kept.len() < max {
                        kept.push(value);
                    }
                }
                Ok(kept.into())
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Value::Object(serde_json::Map::new()))
            }
        }
        deserializer.deserialize_any(Any).map(Brief)
    }
}

pub(super) fn is_u32(value: &Value) -> bool {
    value.as_u64().is_some_and(|n| u32::try_from(n).is_ok())
}

pub(super) fn is_time(value: &Value) -> bool {
    value.as_f64().is_some_and(|t| t >= 0.0)
}

pub(super) fn is_ids(value: &Value) -> bool {
    value.as_array().is_some_and(|ids| ids.iter().all(Value::is_u64))
}

/// A number that represents a time, with or without a fraction, in any unit.
#[derive(Clone, Copy)]
pub(super) enum Time {
    Whole(u64),
    Fraction(f64),
}

impl Time {
    /// Converts to nanoseconds; the number is in units of `unit_ns`. `None` if it is negative, not a number, or more
    /// than 292 years.
    pub fn ns(self, unit_ns: u64) -> Option<u64> {
        const LONGEST: u64 = i64::MAX as u64;
        match self {
            Time::Whole(n) => n.checked_mul(unit_ns).filter(|ns| *ns <= LONGEST),
            Time::Fraction(n) => {
                let ns = (n * unit_ns as f64).round();
                (ns >= 0.0 && ns <= LONGEST as f64).then_some(ns as u64)
            }
        }
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Time::Whole(n) => n.fmt(f),
            Time::Fraction(n) => n.fmt(f),
        }
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Time;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }
            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Time, E> {
                Ok(Time::Whole(n))
            }
            fn visit_f64<E: de::Error>(self, n: f64) -> Result<Time, E> {
                Ok(Time::Fraction(n))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

/// Splits a CSV row into values (RFC 4180, without line breaks inside quotes).
pub(super) fn columns(line: &str) -> Result<Vec<String>, RowError> {
    let mut values = Vec::new();
    let mut rest = line;
    loop {
        let (value, behind) = match rest.trim_start().strip_prefix('"') {
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                (rest[..end].trim().to_string(), &rest[end..])
            }
            Some(quoted) => quoted_value(quoted).ok_or_else(|| {
                let found = shortened(rest);
                RowError::new("(row)", found, "a closing quote, and then a comma or the end of the line")
            })?,
        };
        values.push(value);
        match behind.strip_prefix(',') {
            Some(next) => rest = next,
            None => return Ok(values),
        }
    }
}

/// The text before the closing quote and the text after it.
fn quoted_value(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let end = rest.find('"')?;
        value += &rest[..end];
        rest = &rest[end + 1..];
        match rest.strip_prefix('"') {
            Some(next) => {
                value.push('"');
                rest = next;
            }
            None => {
                let behind = rest.trim_start();
                return (behind.is_empty() || behind.starts_with(',')).then_some((value, behind));
            }
        }
    }
}

/// The column names of a CSV file.
pub(super) struct Columns {
    names: Vec<String>,
}

/// One row of a CSV file.
pub(super) struct CsvRow {
    values: Vec<String>,
}

impl Columns {
    pub fn new(header: &str) -> Result<Columns, RowError> {
        Ok(Columns { names: columns(header)? })
    }

    pub fn find(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|n| n == name)
    }

    pub fn require(&self, name: &str) -> Result<usize, RowError> {
        self.find(name).ok_or_else(|| {
            RowError::new(
                name,
                format!("columns {}", shortened(&self.names.join(","))),
                "a column of this name",
            )
        })
    }

    pub fn row(&self, line: &str) -> Result<CsvRow, RowError> {
        let values = columns(line)?;
        if values.len() == self.names.len() {
            Ok(CsvRow { values })
        } else {
            let found = format!("{} values in {}", values.len(), shortened(line));
            Err(RowError::new("(row)", found, format!("{}, as the header has", self.names.len())))
        }
    }
}

impl CsvRow {
    pub fn text(&self, column: usize) -> &str {
        self.values.get(column).map_or("", String::as_str)
    }

    /// The count in `column`; `field` is its name in errors.
    pub fn count(&self, field: &str, column: usize) -> Result<u32, RowError> {
        let text = self.text(column);
        text.parse().map_err(|_| RowError::new(field, shortened(text), "a whole number from 0 to 4294967295"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv() {
        for (line, values) in [
            ("a,b", Some(vec!["a", "b"])),
            ("", Some(vec![""])),
            ("a,", Some(vec!["a", ""])),
            (" a , b ", Some(vec!["a", "b"])),
            ("\"a,b\",c", Some(vec!["a,b", "c"])),
            ("\"say \"\"x\"\"\" ,c", Some(vec!["say \"x\"", "c"])),
            ("\"open,c", None),
            ("\"a\"b,c", None),
        ] {
            assert_eq!(
                columns(line).ok(),
                values.map(|v| v.into_iter().map(String::from).collect()),
                "{line}"
            );
        }
    }

    #[test]
    fn times() {
        for (time, unit_ns, ns) in [
            (Time::Whole(3000), 1_000_000, Some(3_000_000_000)),
            (Time::Fraction(61.114), 1_000_000_000, Some(61_114_000_000)),
            (Time::Fraction(-0.5), 1_000_000_000, None),
            (Time::Fraction(f64::NAN), 1, None),
            (Time::Fraction(1e30), 1, None),
            (Time::Whole(u64::MAX), 1, None),
            (Time::Whole(u64::MAX), 1000, None),
        ] {
            assert_eq!(time.ns(unit_ns), ns, "{time} of {unit_ns} ns");
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(shortened("  äö "), "\"äö\"");
        assert!(shortened(&"ä".repeat(100)).ends_with("ä…\""));
    }
}
