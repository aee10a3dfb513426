//! Calls as Qwen3-Coder writes them:
//!
//! ```text
//! <tool_call>
//! <function=get_weather>
//! <parameter=city>
//! Paris
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! Values are written without quotes; their types come from the tool's schema. A string stays a string, even
//! `3` or `null`. A value of another type is parsed as JSON (or as a Python literal), and becomes a string if
//! that fails. A parameter without a schema is a string. One line break at either end of a value belongs to the
//! format.
use super::ToolCall;
use super::call::Found;
use super::choice::Tool;
use super::pythonic;
use super::types::{MAX_NAME, Types};
use serde_json::Value;
use serde_json::value::RawValue;

pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";

/// Parses what follows `<function=`, including the closing mark.
pub(super) fn read(text: &str, tools: &[Tool]) -> Found {
    let Some(name) = name(text) else { return Found::Nothing };
    let Some((name, mut at)) = name else { return Found::Unfinished };
    let tool = tools.iter().find(|tool| tool.name == name);
    let mut arguments: Vec<(&str, String)> = Vec::new();
    loop {
        at += text[at..].len() - text[at..].trim_start().len();
        let rest = &text[at..];
        if rest.starts_with(FUNCTION_END) {
            at += FUNCTION_END.len();
            break;
        }
        let Some(rest) = rest.strip_prefix(PARAMETER) else {
            let may = FUNCTION_END.starts_with(rest) || PARAMETER.starts_with(rest);
            return if may { Found::Unfinished } else { Found::Nothing };
        };
        let (key, begins) = match self::name(rest) {
            None => return Found::Nothing,
            Some(None) => return Found::Unfinished,
            Some(Some(found)) => found,
        };
        let rest = &rest[begins..];
        let Some(ends) = rest.find(PARAMETER_END) else { return Found::Unfinished };
        let value = &rest[..ends];
        let value = value.strip_prefix("\r\n").or(value.strip_prefix('\n')).unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let value = convert(value, tool.and_then(|tool| Types::of(tool, key)));
        match arguments.iter_mut().find(|(other, _)| *other == key) {
            Some((_, old)) => *old = value,
            None => arguments.push((key, value)),
        }
        at += PARAMETER.len() + begins + ends + PARAMETER_END.len();
    }
    let arguments: Vec<String> =
        arguments.into_iter().map(|(key, value)| format!("{}: {value}", Value::from(key))).collect();
    let arguments = format!("{{{}}}", arguments.join(", "));
    Found::Calls(vec![ToolCall { name: name.into(), arguments }], at)
}

/// Parses a name up to `>`; returns the name and the position after it. `None`: invalid, whatever follows.
/// `Some(None)`: incomplete.
fn name(text: &str) -> Option<Option<(&str, usize)>> {
    let end = text.find(|c: char| c == '>' || c == '<' || c.is_whitespace());
    match end {
        Some(end) if text[end..].starts_with('>') && (1..=MAX_NAME).contains(&end) => {
            Some(Some((&text[..end], end + 1)))
        }
        None if text.len() <= MAX_NAME => Some(None),
        _ => None,
    }
}

/// Converts a value to JSON according to its types.
fn convert(value: &str, types: Option<Types>) -> String {
    let text = || Value::from(value).to_string();
    let Some(types) = types.filter(|types| !types.is_text()) else { return text() };
    let trimmed = value.trim();
    let read = |text: &str| -> Option<String> {
        let raw = serde_json::from_str::<&RawValue>(text).ok()?.get();
        let whole = || {
            let digits = raw.strip_prefix('-').unwrap_or(raw);
            digits.bytes().all(|b| b.is_ascii_digit()) || raw.parse::<f64>().is_ok_and(|x| x.fract() == 0.0)
        };
        let fits = match raw.bytes().next()? {
            b'n' => types.has("null"),
            b't' | b'f' => types.has("boolean"),
            b'[' => types.has("array"),
            b'{' => types.has("object"),
            b'"' => false,
            _ => types.has("number") || (types.has("integer") && whole()),
        };
        fits.then(|| raw.to_string())
    };
    let lower = || trimmed.to_ascii_lowercase();
    let word = matches!(trimmed.len(), 4 | 5).then(lower).filter(|w| w == "true" || w == "false");
    word.and_then(|word| read(&word))
        .or_else(|| read(trimmed))
        .or_else(|| read(&pythonic::literal(trimmed)?))
        .unwrap_or_else(text)
}

#[cfg(test)]
mod tests {
    use super::super::tools_from_json;
    use super::*;
    use serde_json::json;

    fn tools() -> Vec<Tool> {
        let parameters = json!({
            "type": "object",
            "properties": {
                "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"},
                "b": {"type": "boolean"}, "o": {"type": "object"}, "a": {"type": "array"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "null"]},
                "ref": {"$ref": "#/$defs/n"}, "loop": {"$ref": "#/$defs/loop"},
                "enum": {"enum": ["1", "2"]}, "one": {"const": 1}, "any": {},
            },
            "$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
        });
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        tools_from_json(&[tool]).unwrap()
    }

    #[test]
    fn values_are_what_the_schema_says() {
        let tools = tools();
        for (key, value, expected) in [
            ("s", "Paris", "\"Paris\""),
            ("s", "3", "\"3\""),
            ("s", "null", "\"null\""),
            ("s", "a\nb \"c\" <d>", r#""a\nb \"c\" <d>""#),
            ("s", "", "\"\""),
            ("i", "3", "3"),
            ("i", " -3 ", "-3"),
            ("i", "3.0", "3.0"),
            ("i", "3.5", "\"3.5\""),
            ("i", "three", "\"three\""),
            ("i", "123456789012345678901234567890", "123456789012345678901234567890"),
            ("n", "2.5", "2.5"),
            ("n", "2", "2"),
            ("b", "true", "true"),
            ("b", "True", "true"),
            ("b", "yes", "\"yes\""),
            ("o", r#"{"a": [1]}"#, r#"{"a": [1]}"#),
            ("o", "{'a': None}", r#"{"a": null}"#),
            ("o", "{oops", "\"{oops\""),
            ("a", "[1, 2]", "[1, 2]"),
            ("a", "{}", "\"{}\""),
            ("maybe", "null", "null"),
            ("maybe", "None", "null"),
            ("maybe", "7", "7"),
            ("either", "null", "null"),
            ("either", "text", "\"text\""),
            ("ref", "7", "7"),
            ("loop", "7", "\"7\""),
            ("enum", "1", "\"1\""),
            ("one", "1", "1"),
            ("any", "1", "\"1\""),
            ("unknown", "1", "\"1\""),
        ] {
            let text = format!("f>\n<parameter={key}>\n{value}\n</parameter>\n</function>");
            let Found::Calls(calls, len) = read(&text, &tools) else { panic!("{text}") };
            assert_eq!(len, text.len());
            let arguments = format!("{{\"{key}\": {expected}}}");
            assert_eq!(calls, [ToolCall { name: "f".into(), arguments: arguments.clone() }], "{text}");
            serde_json::from_str::<Value>(&arguments).unwrap();
        }
    }
}
