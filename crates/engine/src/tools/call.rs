//! Parses one tool call in JSON at the start of a text that may be incomplete.
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// A tool call made by the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl ToolCall {
    /// The call in OpenAI's format: call `number` of the answer `index` of the request `id`.
    pub fn to_json(&self, id: &str, index: usize, number: usize) -> Value {
        json!({
            "id": format!("call_{}_{index}_{number}", id.trim_start_matches("chatcmpl-")),
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        })
    }
}

/// What the start of a text contains. The result stays valid when more text follows, except for `Unfinished`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// At least one call, and the length of the calls' text in bytes.
    Calls(Vec<ToolCall>, usize),
    /// The text ends inside what may become a call.
    Unfinished,
    /// Not a call, whatever follows.
    Nothing,
}

/// Both `arguments` and `parameters` are accepted, because models confuse them.
#[derive(Deserialize)]
struct Written<'t> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'t RawValue>,
    #[serde(borrow)]
    parameters: Option<&'t RawValue>,
}

/// Parses `{"name": …, "arguments": {…}}`. Without arguments it is only a call if `bare` says that the text
/// cannot be anything else.
pub(super) fn read(text: &str, bare: bool) -> Found {
    if text.is_empty() {
        return Found::Unfinished;
    }
    if !text.starts_with('{') {
        return Found::Nothing;
    }
    // Check the JSON syntax first: whether an object is a call is decided only when the object is complete.
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    let object = match values.next() {
        Some(Ok(object)) => object.get(),
        Some(Err(error)) if error.is_eof() => return Found::Unfinished,
        _ => return Found::Nothing,
    };
    let Ok(written) = serde_json::from_str::<Written<'_>>(object) else { return Found::Nothing };
    let arguments = match written.arguments.or(written.parameters) {
        None if bare => "{}".to_string(),
        None => return Found::Nothing,
        Some(raw) => match raw.get() {
            // Some models write the arguments as a string that contains JSON, as the API does.
            text if text.starts_with('"') => match serde_json::from_str::<String>(text) {
                Ok(text) if is_object(&text) => text,
                _ => return Found::Nothing,
            },
            text if text.starts_with('{') => text.to_string(),
            "null" if bare => "{}".to_string(),
            _ => return Found::Nothing,
        },
    };
    if written.name.is_empty() {
        return Found::Nothing;
    }
    Found::Calls(vec![ToolCall { name: written.name, arguments }], object.len())
}

fn is_object(text: &str) -> bool {
    serde_json::from_str::<&RawValue>(text).is_ok_and(|raw| raw.get().starts_with('{'))
}
