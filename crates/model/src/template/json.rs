//! `tojson` as transformers defines it: Python's `json.dumps`, without the HTML escaping of Jinja's own filter.
use super::limits::{SLOT_BYTES, items, refuse, spend, weigh};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::ser::{Serialize, SerializeMap, SerializeSeq};
use serde_json::Serializer;
use serde_json::ser::Formatter;
use std::io::{self, Write};

/// JSON that is charged as it is written.
#[derive(Default)]
struct Paid {
    json: Vec<u8>,
    refused: Option<Error>,
}

impl Write for Paid {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // It grows by doubling, is copied as it grows, and once more when complete.
        match spend(4 * bytes.len()) {
            Ok(()) => {
                self.json.extend_from_slice(bytes);
                Ok(bytes.len())
            }
            Err(error) => {
                self.refused = Some(error);
                Err(io::ErrorKind::OutOfMemory.into())
            }
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The names of the arguments, in transformers' order.
const ARGUMENTS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];

/// # Errors
/// There is an argument that transformers does not have, or one of a wrong type.
pub(super) fn tojson(value: Value, given: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    if given.len() > ARGUMENTS.len() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut values = ARGUMENTS.iter().enumerate().map(|(at, name)| {
        let value = if named.has(name) { Some(named.get::<Value>(name)?) } else { given.get(at).cloned() };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    });
    let mut next = || values.next().unwrap_or(Ok::<_, Error>(None));
    let ascii = next()?.is_some_and(|value| value.is_true());
    let indent = next()?.map(indentation).transpose()?;
    let separators = next()?.map(pair).transpose()?;
    let sorted = next()?.is_some_and(|value| value.is_true());
    named.assert_all_used()?;
    weigh(&value, false)?;
    let (item, key) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.into(), ": ".into())
    });
    let mut paid = Paid::default();
    let style = Style { item, key, indent, ascii, level: 0, is_empty: true };
    let mut serializer = Serializer::with_formatter(&mut paid, style);
    let written = match sorted {
        true => Sorted(&value).serialize(&mut serializer),
        false => value.serialize(&mut serializer),
    };
    if let Some(error) = paid.refused {
        return Err(error);
    }
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Value::from(String::from_utf8_lossy(&paid.json)))
}

/// One level of indentation: a number of spaces, or a text.
fn indentation(value: Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        spend(text.len())?;
        return Ok(text.into());
    }
    // As in Python, `true` is 1, and a negative number means lines without indentation.
    let n = match (value.as_usize(), value.as_i64()) {
        _ if value.kind() == ValueKind::Bool => usize::from(value.is_true()),
        (Some(n), _) => n,
        (None, Some(_)) => 0,
        (None, None) => return Err(refuse("tojson: `indent` must be a whole number or a text")),
    };
    spend(n)?;
    Ok(" ".repeat(n))
}

/// What is written between two items, and after a key.
fn pair(value: Value) -> Result<(String, String), Error> {
    let bad = || refuse("tojson: `separators` must be two texts");
    let texts: Vec<Value> = value.try_iter().map_err(|_| bad())?.take(3).collect();
    match &texts[..] {
        [item, key] => {
            let (item, key) = (item.as_str().ok_or_else(bad)?, key.as_str().ok_or_else(bad)?);
            spend(item.len() + key.len())?;
            Ok((item.into(), key.into()))
        }
        _ => Err(bad()),
    }
}

/// A value whose maps are written in the order of their keys, at every level.
struct Sorted<'v>(&'v Value);

impl Serialize for Sorted<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let failed = |error: Error| serde::ser::Error::custom(error);
        let all = || {
            spend(items(self.0)?.saturating_add(1).saturating_mul(SLOT_BYTES))?;
            Ok(self.0.try_iter()?.collect::<Vec<Value>>())
        };
        match self.0.kind() {
            ValueKind::Map => {
                let mut keys = all().map_err(failed)?;
                keys.sort();
                let mut map = serializer.serialize_map(Some(keys.len()))?;
                for key in &keys {
                    map.serialize_entry(key, &Sorted(&self.0.get_item(key).map_err(failed)?))?;
                }
                map.end()
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let list = all().map_err(failed)?;
                let mut seq = serializer.serialize_seq(Some(list.len()))?;
                list.iter().try_for_each(|item| seq.serialize_element(&Sorted(item)))?;
                seq.end()
            }
            _ => self.0.serialize(serializer),
        }
    }
}

/// How `json.dumps` writes: `{"a": 1, "b": [2, 3]}`, or a line for each item.
struct Style {
    /// Between two items.
    item: String,
    /// After a key.
    key: String,
    /// One level; `None` writes everything into one line.
    indent: Option<String>,
    /// Escape all but ASCII.
    ascii: bool,
    level: usize,
    /// True until the innermost list or map has an item.
    is_empty: bool,
}

impl Style {
    fn line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.level).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.is_empty = true;
        writer.write_all(bracket)
    }
    fn next<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }
    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if !self.is_empty {
            self.line(writer)?;
        }
        self.is_empty = false;
        writer.write_all(bracket)
    }
}

impl Formatter for Style {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }
    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }
    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }
    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }
    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }
    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }
    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    /// A part of a string without quotes, backslashes and control characters below U+0020.
    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, part: &str) -> io::Result<()> {
        let escaped = |c: char| !matches!(c, ' '..='~');
        if !self.ascii {
            return writer.write_all(part.as_bytes());
        }
        let mut rest = part;
        while let Some(at) = rest.find(escaped) {
            let (plain, after) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let mut after = after.chars();
            // Beyond U+FFFF a pair of surrogates.
            for unit in after.next().iter().flat_map(|c| c.encode_utf16(&mut [0; 2]).to_vec()) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = after.as_str();
        }
        writer.write_all(rest.as_bytes())
    }
}
