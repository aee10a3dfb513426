//! Converts messages from clients of the OpenAI API into the form that templates expect.
//!
//! As in vLLM: text parts are joined with line breaks, and the arguments of a tool call, a JSON string in the API, are
//! parsed, because templates apply `tojson` to them. All other fields of a message (`name`, `tool_call_id`,
//! `reasoning_content`) are passed through unchanged.
use super::limits::{self, MAX_REQUEST_DEPTH};
use crate::error::Error;
use serde_json::{Map, Value};

/// The input of a template.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Objects with a `role`; `content` is a string, null, or a list of text parts.
    pub messages: &'a [Value],
    /// Each `{"type": "function", "function": {"name", "description", "parameters"}}`; empty for none.
    pub tools: &'a [Value],
    /// End the text where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Additional template variables, such as `enable_thinking`.
    pub kwargs: &'a Map<String, Value>,
}

impl Conversation<'_> {
    /// Maximum bytes that one rendering may use.
    /// [`ChatTemplate::render_conversation`](super::ChatTemplate::render_conversation) fails if the template needs
    /// more.
    pub fn rendering_bytes(&self) -> usize {
        limits::bytes_for(self.bytes())
    }

    /// Approximate size as JSON.
    pub(super) fn bytes(&self) -> usize {
        let lists = self.messages.iter().chain(self.tools).map(weight).sum::<usize>();
        lists + weight_of(self.kwargs)
    }

    /// Fails if part of the conversation is nested too deeply; the error names the place.
    pub(super) fn check_depth(&self) -> Result<(), Error> {
        for (name, list) in [("messages", self.messages), ("tools", self.tools)] {
            for (at, value) in list.iter().enumerate() {
                check_depth(value, &format!("{name}[{at}]"))?;
            }
        }
        Ok(())
    }
}

/// Approximate size as JSON.
pub(super) fn weight_of(kwargs: &Map<String, Value>) -> usize {
    kwargs.iter().map(|(name, value)| name.len() + weight(value)).sum()
}

fn weight(value: &Value) -> usize {
    8 + match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight).sum(),
        Value::Object(fields) => weight_of(fields),
        _ => 0,
    }
}

/// Input JSON is limited to a depth of 128, so recursion is safe.
fn check_depth(value: &Value, place: &str) -> Result<(), Error> {
    fn is_deep(value: &Value, left: usize) -> bool {
        let below = |value: &Value| match left.checked_sub(1) {
            Some(left) => is_deep(value, left),
            None => true,
        };
        match value {
            Value::Array(items) => items.iter().any(below),
            Value::Object(fields) => fields.values().any(below),
            _ => false,
        }
    }
    match is_deep(value, MAX_REQUEST_DEPTH) {
        true => Err(bad(
            place,
            &format!("is nested more than {MAX_REQUEST_DEPTH} levels deep, the limit for chat templates"),
        )),
        false => Ok(()),
    }
}

/// Fails if a template has one of these variables already, or if a value is nested too deeply. The error names the variable.
pub(super) fn check_kwargs(kwargs: &Map<String, Value>) -> Result<(), Error> {
    if let Some(name) = RESERVED.into_iter().find(|name| kwargs.contains_key(*name)) {
        return Err(bad(&format!("chat_template_kwargs.{name}"), "cannot be set: the request sets it"));
    }
    kwargs.iter().try_for_each(|(name, value)| check_depth(value, &format!("chat_template_kwargs.{name}")))
}

/// Variables that every template already has.
const RESERVED: [&str; 7] =
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"];

/// Converts messages for a template. Errors name the place in the request.
pub(super) fn messages(messages: &[Value]) -> Result<Vec<Value>, Error> {
    messages.iter().enumerate().map(|(at, m)| message(m, &format!("messages[{at}]"))).collect()
}

fn bad(place: &str, what: &str) -> Error {
    Error::Usage(format!("`{place}` {what}"))
}

fn message(message: &Value, place: &str) -> Result<Value, Error> {
    let mut out = message.as_object().ok_or_else(|| bad(place, "is not an object"))?.clone();
    match out.get("role") {
        Some(Value::String(_)) => {}
        Some(_) => return Err(bad(&format!("{place}.role"), "is not a string")),
        None => return Err(bad(place, "has no `role`")),
    }
    // Null means "no calls", but templates test whether the key exists.
    if out.get("tool_calls").is_some_and(|calls| calls.is_null() || calls == &Value::Array(vec![])) {
        out.shift_remove("tool_calls");
    }
    if let Some(calls) = out.get_mut("tool_calls") {
        let place = format!("{place}.tool_calls");
        let calls = calls.as_array_mut().ok_or_else(|| bad(&place, "is not a list"))?;
        for (at, call) in calls.iter_mut().enumerate() {
            let place = format!("{place}[{at}].function");
            let function = call.get_mut("function").and_then(Value::as_object_mut);
            let function = function.ok_or_else(|| bad(&place, "is not an object"))?;
            if !function.get("name").is_some_and(Value::is_string) {
                return Err(bad(&format!("{place}.name"), "is not a string"));
            }
            let arguments = arguments(function.get("arguments"), &format!("{place}.arguments"))?;
            function.insert("arguments".into(), arguments);
        }
    }
    let has_calls = out.contains_key("tool_calls");
    let content = content(out.get("content"), has_calls, &format!("{place}.content"))?;
    out.insert("content".into(), content);
    Ok(Value::Object(out))
}

/// Returns strings unchanged and joins text parts. Missing content becomes an empty string; next to tool calls it stays
/// null, because templates test for it.
fn content(content: Option<&Value>, has_calls: bool, place: &str) -> Result<Value, Error> {
    match content {
        None | Some(Value::Null) if has_calls => Ok(Value::Null),
        None | Some(Value::Null) => Ok(Value::String(String::new())),
        Some(Value::String(text)) => Ok(Value::String(text.clone())),
        Some(Value::Array(parts)) => {
            let text = |(at, part): (usize, &Value)| {
                let place = format!("{place}[{at}]");
                match part.get("type").and_then(Value::as_str) {
                    Some("text") => {
                        let text = part.get("text").and_then(Value::as_str);
                        Ok(text.ok_or_else(|| bad(&format!("{place}.text"), "is not a string"))?.to_string())
                    }
                    Some(other) => {
                        Err(bad(&place, &format!("is of the type `{other}`; kvist supports only text")))
                    }
                    None => Err(bad(&place, "has no `type`")),
                }
            };
            let texts = parts.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
            Ok(Value::String(texts.join("\n")))
        }
        Some(_) => Err(bad(place, "must be a string, null or a list of parts")),
    }
}

fn arguments(arguments: Option<&Value>, place: &str) -> Result<Value, Error> {
    match arguments {
        None | Some(Value::Null) => Ok(Value::Object(Map::new())),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(Value::Object(Map::new())),
        Some(Value::String(text)) => {
            let value = serde_json::from_str(text).map_err(|e| bad(place, &format!("is not JSON: {e}")))?;
            check_depth(&value, place)?;
            Ok(value)
        }
        Some(value @ (Value::Object(_) | Value::Array(_))) => Ok(value.clone()),
        Some(_) => Err(bad(place, "must be a string with JSON, or an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::messages;
    use serde_json::{Value, json};

    #[test]
    fn messages_become_what_templates_expect() {
        let call = |arguments: Value| {
            json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}]})
        };
        let table = [
            (json!({"role": "user", "content": "x"}), json!({"role": "user", "content": "x"})),
            (json!({"role": "user"}), json!({"role": "user", "content": ""})),
            (
                json!({"role": "user", "name": "n", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
                json!({"role": "user", "name": "n", "content": "a\nb"}),
            ),
            (
                json!({"role": "tool", "tool_call_id": "call_1", "content": "12"}),
                json!({"role": "tool", "tool_call_id": "call_1", "content": "12"}),
            ),
            (
                json!({"role": "assistant", "content": null, "tool_calls": null}),
                json!({"role": "assistant", "content": ""}),
            ),
            (call(json!(r#"{"b": 1, "a": 2.5}"#)), call(json!({"b": 1, "a": 2.5}))),
            (call(json!("")), call(json!({}))),
            (call(json!(null)), call(json!({}))),
            (call(json!({"a": []})), call(json!({"a": []}))),
        ];
        for (given, expected) in table {
            assert_eq!(messages(std::slice::from_ref(&given)).unwrap(), [expected], "{given}");
        }
    }

    #[test]
    fn errors_name_the_place() {
        let call = |f: Value| json!({"role": "assistant", "tool_calls": [{"function": f}]});
        for (given, place) in [
            (json!("x"), "messages[1]` is not an object"),
            (json!({"content": "x"}), "messages[1]` has no `role`"),
            (json!({"role": 1}), "messages[1].role"),
            (json!({"role": "user", "content": 1}), "messages[1].content"),
            (
                json!({"role": "user", "content": [{"type": "image_url"}]}),
                "messages[1].content[0]` is of the type `image_url`",
            ),
            (json!({"role": "user", "content": [{"text": "x"}]}), "messages[1].content[0]` has no `type`"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
            (json!({"role": "assistant", "tool_calls": {}}), "messages[1].tool_calls` is not a list"),
            (json!({"role": "assistant", "tool_calls": [1]}), "messages[1].tool_calls[0].function"),
            (call(json!({"arguments": "{}"})), "messages[1].tool_calls[0].function.name"),
            (call(json!({"name": "f", "arguments": "{"})), "messages[1].tool_calls[0].function.arguments"),
            (call(json!({"name": "f", "arguments": 1})), "messages[1].tool_calls[0].function.arguments"),
        ] {
            let error =
                messages(&[json!({"role": "user", "content": ""}), given.clone()]).unwrap_err().to_string();
            assert!(error.contains(place), "{given}: {error}");
        }
    }
}
