//! One call, read from the start of a text that may go on or be unfinished.
use serde::Deserialize;
use serde_json::value::RawValue;

/// A call that a model made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// What stands at the start of a text. Longer texts with this beginning give the same, unless it is `Unfinished`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Calls, at least one, and their length in bytes.
    Calls(Vec<ToolCall>, usize),
    /// The text ends inside what may become a call.
    Unfinished,
    /// No continuation makes it a call.
    Nothing,
}

/// Either word is taken: models mix them up, and mean the same.
#[derive(Deserialize)]
struct Written<'t> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'t RawValue>,
    #[serde(borrow)]
    parameters: Option<&'t RawValue>,
}

/// Of `{"name": …, "arguments": {…}}`. Without arguments it is a call only where `bare` says that nothing else can
/// be meant.
pub(super) fn read(text: &str, bare: bool) -> Found {
    if text.is_empty() {
        return Found::Unfinished;
    }
    if !text.starts_with('{') {
        return Found::Nothing;
    }
    // The syntax first: an object that is no call must not be told before its end, where it could still break.
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
            // Some models write them as the API has them, as a text.
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
