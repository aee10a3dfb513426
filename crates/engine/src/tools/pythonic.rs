//! Parses calls in Python syntax: `[f(city="Paris", days=3), g()]` (Llama 3.2, Llama 4, ToolACE).
//!
//! Arguments are literals: strings, numbers, True, False, None, lists, tuples and dicts. JSON's `true`, `false`
//! and `null` are accepted too, because models confuse them. With positional arguments, expressions or
//! duplicate names the text is not a list of calls. The parser reads from left to right without backtracking,
//! so that further text does not change earlier decisions.
use super::ToolCall;
use super::call::Found;
use serde_json::value::RawValue;

/// Maximum nesting of lists and dicts.
const MAX_DEPTH: u32 = 64;

/// Parses a list of calls at the start of a text that may be incomplete.
pub(super) fn read(text: &str) -> Found {
    let mut reader = Reader { text, at: 0 };
    match reader.calls() {
        Ok(calls) => Found::Calls(calls, reader.at),
        Err(Stop::End) => Found::Unfinished,
        Err(Stop::Never) => Found::Nothing,
    }
}

/// Converts a single literal to JSON. `None` if the text is anything else.
pub(super) fn literal(text: &str) -> Option<String> {
    // A trailing space marks the end of a number.
    let text = format!("{text} ");
    let (mut reader, mut out) = (Reader { text: &text, at: 0 }, String::new());
    reader.blanks().ok()?;
    reader.value(&mut out, MAX_DEPTH).ok()?;
    text[reader.at..].trim().is_empty().then_some(out)
}

/// Why parsing stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The text ended too early.
    End,
    /// Invalid, whatever follows.
    Never,
}

struct Reader<'t> {
    text: &'t str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Result<char, Stop> {
        self.text[self.at..].chars().next().ok_or(Stop::End)
    }
    fn next(&mut self) -> Result<char, Stop> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Ok(c)
    }
    /// Consumes `c` if it comes next; returns whether it did.
    fn takes(&mut self, c: char) -> Result<bool, Stop> {
        let comes = self.peek()? == c;
        self.at += if comes { c.len_utf8() } else { 0 };
        Ok(comes)
    }
    fn expect(&mut self, c: char) -> Result<(), Stop> {
        if self.takes(c)? { Ok(()) } else { Err(Stop::Never) }
    }
    /// Skips whitespace.
    fn blanks(&mut self) -> Result<(), Stop> {
        while self.peek()?.is_whitespace() {
            self.next()?;
        }
        Ok(())
    }
    fn name(&mut self) -> Result<&str, Stop> {
        match self.peek()?.is_numeric() {
            true => Err(Stop::Never),
            false => self.word(&[]),
        }
    }
    /// The name of a function may be any that a tool may have.
    fn function(&mut self) -> Result<&str, Stop> {
        self.word(&['.', '-'])
    }
    /// Letters, digits, `_` and `more`, at least one.
    fn word(&mut self, more: &[char]) -> Result<&str, Stop> {
        let from = self.at;
        while self.peek().map(|c| c.is_alphanumeric() || c == '_' || more.contains(&c))? {
            self.next()?;
        }
        match &self.text[from..self.at] {
            "" => Err(Stop::Never),
            word => Ok(word),
        }
    }

    fn calls(&mut self) -> Result<Vec<ToolCall>, Stop> {
        let mut calls = Vec::new();
        self.expect('[')?;
        loop {
            self.blanks()?;
            if !calls.is_empty() && self.takes(']')? {
                return Ok(calls);
            }
            calls.push(self.call()?);
            self.blanks()?;
            if self.takes(']')? {
                return Ok(calls);
            }
            self.expect(',')?;
        }
    }

    fn call(&mut self) -> Result<ToolCall, Stop> {
        let name = self.function()?.to_string();
        self.expect('(')?;
        let (mut arguments, mut names) = (String::from("{"), std::collections::BTreeSet::new());
        loop {
            self.blanks()?;
            if self.takes(')')? {
                arguments.push('}');
                return Ok(ToolCall { name, arguments });
            }
            if !names.is_empty() {
                arguments += ", ";
            }
            let argument = self.name()?.to_string();
            arguments += &quoted(&argument);
            if !names.insert(argument) {
                return Err(Stop::Never);
            }
            self.blanks()?;
            self.expect('=')?;
            self.blanks()?;
            arguments += ": ";
            self.value(&mut arguments, MAX_DEPTH)?;
            self.blanks()?;
            if self.peek()? != ')' {
                self.expect(',')?;
            }
        }
    }

    /// Parses a value and appends it as JSON.
    fn value(&mut self, out: &mut String, depth: u32) -> Result<(), Stop> {
        match self.peek()? {
            '"' | '\'' => {
                let text = self.string()?;
                *out += &quoted(&text);
                Ok(())
            }
            '[' => self.list(']', out, depth),
            '(' => self.list(')', out, depth),
            '{' => self.dict(out, depth),
            '0'..='9' | '-' | '+' | '.' => self.number(out),
            _ => {
                *out += match self.name()? {
                    "True" | "true" => "true",
                    "False" | "false" => "false",
                    "None" | "null" => "null",
                    _ => return Err(Stop::Never),
                };
                Ok(())
            }
        }
    }

    /// Lists and tuples. A single value in parentheses without a comma is just that value.
    fn list(&mut self, close: char, out: &mut String, depth: u32) -> Result<(), Stop> {
        let depth = depth.checked_sub(1).ok_or(Stop::Never)?;
        self.next()?;
        let from = out.len();
        out.push('[');
        let (mut n, mut commas) = (0, 0);
        loop {
            self.blanks()?;
            if self.takes(close)? {
                break;
            }
            if n > commas {
                return Err(Stop::Never);
            }
            *out += if n > 0 { ", " } else { "" };
            self.value(out, depth)?;
            n += 1;
            self.blanks()?;
            commas += usize::from(self.takes(',')?);
        }
        if close == ')' && n == 1 && commas == 0 {
            out.remove(from);
        } else {
            out.push(']');
        }
        Ok(())
    }

    fn dict(&mut self, out: &mut String, depth: u32) -> Result<(), Stop> {
        let depth = depth.checked_sub(1).ok_or(Stop::Never)?;
        self.next()?;
        out.push('{');
        let mut names = std::collections::BTreeSet::new();
        loop {
            self.blanks()?;
            if self.takes('}')? {
                out.push('}');
                return Ok(());
            }
            *out += if names.is_empty() { "" } else { ", " };
            if !matches!(self.peek()?, '"' | '\'') {
                return Err(Stop::Never);
            }
            let name = self.string()?;
            *out += &quoted(&name);
            if !names.insert(name) {
                return Err(Stop::Never);
            }
            self.blanks()?;
            self.expect(':')?;
            self.blanks()?;
            *out += ": ";
            self.value(out, depth)?;
            self.blanks()?;
            if self.peek()? != '}' {
                self.expect(',')?;
            }
        }
    }

    fn number(&mut self, out: &mut String) -> Result<(), Stop> {
        let from = self.at;
        let mut before = 'e';
        loop {
            let c = self.peek()?;
            let signs = matches!(c, '+' | '-') && matches!(before, 'e' | 'E');
            if !signs && !c.is_ascii_alphanumeric() && c != '_' && c != '.' {
                break;
            }
            before = self.next()?;
        }
        let text = self.text[from..self.at].replace('_', "");
        let (sign, digits) = match text.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("", text.strip_prefix('+').unwrap_or(&text)),
        };
        // Python accepts `.5` and `5.`, JSON does not.
        let zero = if digits.starts_with('.') { "0" } else { "" };
        let mut number = format!("{sign}{zero}{digits}");
        if number.ends_with('.') {
            number.push('0');
        }
        number = number.replacen(".e", ".0e", 1).replacen(".E", ".0E", 1);
        if serde_json::from_str::<&RawValue>(&number).is_err() {
            return Err(Stop::Never);
        }
        *out += &number;
        Ok(())
    }

    fn string(&mut self) -> Result<String, Stop> {
        let quote = self.next()?;
        let mut out = String::new();
        let mut marks = 1;
        if self.takes(quote)? {
            if !self.takes(quote)? {
                return Ok(out);
            }
            marks = 3;
        }
        let mut n_quotes = 0;
        // High surrogate of a character that is written as two escapes.
        let mut high = None;
        loop {
            let c = self.next()?;
            n_quotes = if c == quote { n_quotes + 1 } else { 0 };
            if n_quotes == marks {
                // The first two quotes of the closing three were already appended as text.
                out.truncate(out.len() - (marks - 1));
                if high.is_some() {
                    out.push(char::REPLACEMENT_CHARACTER);
                }
                return Ok(out);
            }
            let unit = if c == '\\' { self.escape(&mut out, &mut high)? } else { Some(u32::from(c)) };
            let Some(unit) = unit else { continue };
            match (high.take(), unit) {
                (Some(high), 0xDC00..=0xDFFF) => {
                    let both = 0x10000 + ((high - 0xD800) << 10) + (unit - 0xDC00);
                    out.push(char::from_u32(both).unwrap_or(char::REPLACEMENT_CHARACTER));
                    continue;
                }
                (Some(_), _) => out.push(char::REPLACEMENT_CHARACTER),
                (None, _) => {}
            }
            match unit {
                0xD800..=0xDBFF => high = Some(unit),
                unit => out.push(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER)),
            }
        }
    }

    /// Parses an escape; returns its code point. An escape that Python does not know is kept as written.
    fn escape(&mut self, out: &mut String, high: &mut Option<u32>) -> Result<Option<u32>, Stop> {
        let c = self.next()?;
        let digits = match c {
            'n' => return Ok(Some(10)),
            't' => return Ok(Some(9)),
            'r' => return Ok(Some(13)),
            'b' => return Ok(Some(8)),
            'f' => return Ok(Some(12)),
            'v' => return Ok(Some(11)),
            'a' => return Ok(Some(7)),
            '\\' | '\'' | '"' => return Ok(Some(u32::from(c))),
            '\n' => return Ok(None),
            '0'..='7' => {
                let mut number = u32::from(c) - 48;
                for _ in 0..2 {
                    let Some(digit) = self.peek()?.to_digit(8) else { break };
                    number = number * 8 + digit;
                    self.next()?;
                }
                return Ok(Some(number));
            }
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => {
                if high.take().is_some() {
                    out.push(char::REPLACEMENT_CHARACTER);
                }
                out.push('\\');
                return Ok(Some(u32::from(other)));
            }
        };
        let mut number: u32 = 0;
        for _ in 0..digits {
            let digit = self.next()?.to_digit(16).ok_or(Stop::Never)?;
            number = number.wrapping_mul(16).wrapping_add(digit);
        }
        Ok(Some(number))
    }
}

/// A JSON string literal.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(text: &str) -> Option<Vec<(String, String)>> {
        match read(text) {
            Found::Calls(calls, len) => {
                assert!(len <= text.len());
                Some(calls.into_iter().map(|call| (call.name, call.arguments)).collect())
            }
            _ => None,
        }
    }

    #[test]
    fn literals_become_json() {
        for (python, json) in [
            (r#""a\"b""#, r#""a\"b""#),
            ("'it\\'s'", "\"it's\""),
            ("'say \"x\"'", r#""say \"x\"""#),
            ("''", "\"\""),
            ("'''a'b''c'''", "\"a'b''c\""),
            ("\"\"\"\"\"\"", "\"\""),
            (
                r"'\n\t\x41\u00e9\U0001F600\101\d\
'",
                r#""\n\tAé😀A\\d""#,
            ),
            (r"'\ud83d\ude00'", "\"😀\""),
            (r"'\ud83d!\ud83d'", "\"\u{FFFD}!\u{FFFD}\""),
            (r"'\ud83d\q'", "\"\u{FFFD}\\\\q\""),
            (r"'\U99999999'", "\"\u{FFFD}\""),
            ("'two\nlines'", r#""two\nlines""#),
            ("3", "3"),
            ("-3", "-3"),
            ("+3", "3"),
            ("1_000", "1000"),
            (".5", "0.5"),
            ("-.5", "-0.5"),
            ("5.", "5.0"),
            ("5.e3", "5.0e3"),
            ("1e-9", "1e-9"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("True", "true"),
            ("false", "false"),
            ("None", "null"),
            ("[]", "[]"),
            ("[1, 'a', [None],]", r#"[1, "a", [null]]"#),
            ("(1, 2)", "[1, 2]"),
            ("(1,)", "[1]"),
            ("(1)", "1"),
            ("{'a': 1, \"b\": {'c': []},}", r#"{"a": 1, "b": {"c": []}}"#),
        ] {
            assert_eq!(literal(python).as_deref(), Some(json), "{python}");
            serde_json::from_str::<serde_json::Value>(json).unwrap();
        }
        for text in [
            "",
            "x",
            "0x10",
            "1 2",
            "007",
            "1 + 1",
            "{1: 2}",
            "{'a': 1, 'a': 2}",
            "[1 2]",
            "f()",
            "'a",
            "'\\xg'",
        ] {
            assert_eq!(literal(text), None, "{text}");
        }
        assert_eq!(literal(&"[".repeat(100_000)), None);
    }

    #[test]
    fn lists_of_calls() {
        let one = |name: &str, arguments: &str| (name.to_string(), arguments.to_string());
        for (text, expected) in [
            ("[f()]", Some(vec![one("f", "{}")])),
            ("[ f( ) , g ( ) ]", None),
            ("[f(), g.h-i(a=1,),]", Some(vec![one("f", "{}"), one("g.h-i", r#"{"a": 1}"#)])),
            (
                "[get_weather(city=\"Paris\", days = 3)]",
                Some(vec![one("get_weather", r#"{"city": "Paris", "days": 3}"#)]),
            ),
            // Regression: a name that tools may have was no function.
            (
                "[3d-view(), -x(a=1), .y()]",
                Some(vec![one("3d-view", "{}"), one("-x", r#"{"a": 1}"#), one(".y", "{}")]),
            ),
            ("[f(1a=1)]", None),
            ("[()]", None),
            ("[1](a=1)", None),
            ("[]", None),
            ("[f]", None),
            ("[f(1)]", None),
            ("[f(a=1, a=2)]", None),
            ("[f(a=g())]", None),
            ("[1, 2]", None),
            ("[link](https://example.org)", None),
        ] {
            assert_eq!(calls(text), expected, "{text}");
        }
        assert_eq!(read("[f(a='"), Found::Unfinished);
        assert_eq!(read("[f(a=1"), Found::Unfinished);
    }
}
