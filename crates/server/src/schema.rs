//! Checks request bodies against the same schemas that `/openapi.json` shows, so the description is always right. It
//! implements a small part of JSON Schema (2020-12). Errors name the field, what was found and what was expected.
//!
//! Supported: `type` (a name or several), `enum`, `const`, `minimum`, `maximum`, `minLength`, `maxLength`, `pattern`
//! (only [`NATURAL`], [`FILE_NAME`] and [`SESSION_ID`]), `items`, `minItems`, `maxItems`, `properties`, `required`,
//! `additionalProperties`, `propertyNames`, `anyOf`. All other keywords are ignored, and a test rejects schemas that rely on them.
//!
//! `x-kvist-refused` lists fields that OpenAI's API has and kvist does not support. They are refused by name, with the
//! reason, unless they are null. In the schema of a field it is the reason why all but a few values of it are refused.
use crate::error::ApiError;
use kvist_engine::sessions::SessionId;
use serde_json::{Map, Value};

/// A pattern that is checked: a natural number without leading zeros.
pub const NATURAL: &str = "^(0|[1-9][0-9]*)$";

/// A pattern that is checked: a name that stays in its folder, on every system.
pub const FILE_NAME: &str = "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$";

/// A pattern that is checked: the id of a session.
pub const SESSION_ID: &str = "^sess-[0-9a-f]{32}$";

/// Keyword for refused fields: maps their names to the reason.
pub const REFUSED: &str = "x-kvist-refused";

/// Check `value` against `schema`. The error's `param` is the path of the first part that does not match.
pub fn check(schema: &Value, value: &Value) -> Result<(), ApiError> {
    check_at(schema, value, "").map_err(|found| found.error)
}

/// An error and its depth in the value. Of several alternatives, the error of the one that matched deepest is reported.
struct Found {
    depth: usize,
    error: ApiError,
}

impl Found {
    /// Sort key: a wrong value of the right type matched further than a value of the wrong type.
    fn reach(&self) -> (usize, bool) {
        (self.depth, self.error.code != "invalid_type")
    }
}

fn found(path: &str, code: &'static str, message: String) -> Found {
    let depth = path.matches(['.', '[']).count() + usize::from(!path.is_empty());
    let mut error = ApiError::new(axum::http::StatusCode::BAD_REQUEST, code, message);
    if !path.is_empty() {
        error = error.about(path);
    }
    Found { depth, error }
}

fn refused(path: &str, why: &str) -> Found {
    found(path, "unsupported_parameter", format!("`{path}` is not supported: {why}"))
}

fn name_of(path: &str) -> String {
    if path.is_empty() { "the body".into() } else { format!("`{path}`") }
}

fn check_at(schema: &Value, value: &Value, path: &str) -> Result<(), Found> {
    let wrong = |what: String| found(path, "invalid_value", format!("{} {what}", name_of(path)));
    if let Some(types) = schema.get("type") {
        let names: Vec<&str> = match types {
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect(),
        };
        if !names.iter().any(|name| is_of(value, name)) {
            let what = format!("is {}; expected {}", shown(value), names.join(" or "));
            return Err(found(path, "invalid_type", format!("{} {what}", name_of(path))));
        }
    }
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array)
        && !allowed.contains(value)
    {
        let names: Vec<String> = allowed.iter().map(Value::to_string).collect();
        return Err(wrong(format!("is {}; expected one of {}", shown(value), names.join(", "))));
    }
    if let Some(only) = schema.get("const")
        && only != value
    {
        return Err(wrong(format!("is {}; kvist accepts only {only}", shown(value))));
    }
    match value {
        Value::Number(number) => check_number(schema, number.as_f64().unwrap_or(f64::NAN), &wrong)?,
        Value::String(text) => check_text(schema, text, &wrong)?,
        Value::Array(items) => check_items(schema, items, path, &wrong)?,
        Value::Object(fields) => check_fields(schema, fields, path)?,
        _ => {}
    }
    match schema.get("anyOf").and_then(Value::as_array) {
        Some(branches) => check_any(branches, value, path),
        None => Ok(()),
    }
}

/// Check that one of `branches` matches. Object branches are chosen by a field that has an `enum` in all of them, such
/// as `role` in messages. Among other alternatives, the error of the one that matched deepest is reported.
fn check_any(branches: &[Value], value: &Value, path: &str) -> Result<(), Found> {
    if let Some((objects, name, given)) = tag(branches, value) {
        let tags =
            |branch: &Value| branch["properties"][name]["enum"].as_array().cloned().unwrap_or_default();
        if let Some(branch) = objects.iter().find(|branch| tags(branch).contains(given)) {
            return check_at(branch, value, path);
        }
        let all: Vec<Value> = objects.iter().flat_map(|branch| tags(branch)).collect();
        let path = if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        return check_at(&serde_json::json!({ "enum": all }), given, &path);
    }
    let mut furthest: Option<Found> = None;
    let mut expected = Vec::new();
    for branch in branches {
        let Err(error) = check_at(branch, value, path) else { return Ok(()) };
        expected.extend(branch.get("title").and_then(Value::as_str));
        if furthest.as_ref().is_none_or(|f| error.reach() > f.reach()) {
            furthest = Some(error);
        }
    }
    let here = found(path, "", String::new()).depth;
    Err(match furthest {
        Some(furthest) if furthest.reach() > (here, false) || expected.is_empty() => furthest,
        _ => {
            let what = format!("is {}; expected {}", shown(value), expected.join(" or "));
            found(path, "invalid_type", format!("{} {what}", name_of(path)))
        }
    })
}

/// The object branches, the field that distinguishes them, and its value here.
fn tag<'a>(branches: &'a [Value], value: &'a Value) -> Option<(Vec<&'a Value>, &'a str, &'a Value)> {
    let fields = value.as_object()?;
    let objects: Vec<&Value> = branches.iter().filter(|branch| branch.get("properties").is_some()).collect();
    let properties = objects.first()?["properties"].as_object()?;
    let has_enum = |name: &str| objects.iter().all(|branch| branch["properties"][name].get("enum").is_some());
    let name = properties.keys().find(|name| has_enum(name))?;
    Some((objects, name, fields.get(name)?))
}

fn is_of(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        // In JSON Schema 1.0 is an integer.
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        _ => false,
    }
}

fn check_number(schema: &Value, x: f64, wrong: &dyn Fn(String) -> Found) -> Result<(), Found> {
    let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
    let (min, max) = (bound("minimum"), bound("maximum"));
    if min.is_some_and(|min| x < min) || max.is_some_and(|max| x > max) {
        let expected = match (min, max) {
            (Some(min), Some(max)) => format!("{min} to {max}"),
            (Some(min), None) => format!("{min} or more"),
            (_, max) => format!("at most {}", max.unwrap_or(x)),
        };
        return Err(wrong(format!("is {x}; expected {expected}")));
    }
    Ok(())
}

fn check_text(schema: &Value, text: &str, wrong: &dyn Fn(String) -> Found) -> Result<(), Found> {
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
    let length = text.chars().count() as u64;
    if bound("minLength").is_some_and(|min| length < min) {
        return Err(wrong("is empty; expected at least one character".into()));
    }
    if let Some(max) = bound("maxLength")
        && length > max
    {
        return Err(wrong(format!("has {length} characters; {max} are allowed")));
    }
    match schema.get("pattern").and_then(Value::as_str) {
        None => Ok(()),
        Some(FILE_NAME) if is_file_name(text) => Ok(()),
        Some(FILE_NAME) => {
            let shown: String = text.chars().take(80).collect();
            let names = "1 to 64 letters, digits, `-`, `_` and `.`, of which the first one is no `.`";
            Err(wrong(format!("is {shown:?}; expected a name, not a path: {names}")))
        }
        Some(SESSION_ID) if SessionId::parse(text).is_some() => Ok(()),
        Some(SESSION_ID) => {
            let shown: String = text.chars().take(80).collect();
            let expected = "`sess-` and 32 hexadecimal digits in lower case, drawn at random";
            Err(wrong(format!("is {shown:?}; expected {expected}")))
        }
        Some(_) if is_natural(text) => Ok(()),
        Some(_) => Err(wrong(format!("is {text:?}; expected a number"))),
    }
}

fn is_file_name(text: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=64).contains(&text.len()) && text.bytes().all(is_allowed) && !text.starts_with('.')
}

fn is_natural(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'))
}

fn check_items(
    schema: &Value,
    items: &[Value],
    path: &str,
    wrong: &dyn Fn(String) -> Found,
) -> Result<(), Found> {
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
    let n = items.len() as u64;
    if bound("minItems").is_some_and(|min| n < min) {
        return Err(wrong("is an empty list; expected at least one entry".into()));
    }
    if let Some(max) = bound("maxItems")
        && n > max
    {
        return Err(wrong(format!("has {n} entries; {max} are allowed")));
    }
    if let Some(each) = schema.get("items") {
        for (i, item) in items.iter().enumerate() {
            check_at(each, item, &format!("{path}[{i}]"))?;
        }
    }
    Ok(())
}

fn check_fields(schema: &Value, fields: &Map<String, Value>, path: &str) -> Result<(), Found> {
    let inside = |name: &str| if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, value) in fields {
        let path = inside(name);
        if let Some(names) = schema.get("propertyNames") {
            check_at(names, &Value::from(name.as_str()), &path)?;
        }
        if let Some(property) = properties.and_then(|p| p.get(name)) {
            let checked = check_at(property, value, &path);
            checked.map_err(|wrong| match property.get(REFUSED).and_then(Value::as_str) {
                Some(why) => refused(&path, why),
                None => wrong,
            })?;
            continue;
        }
        match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => {
                let why = schema.get(REFUSED).and_then(|r| r.get(name)).and_then(Value::as_str);
                // OpenAI's clients send received messages back with null for absent fields.
                if why.is_some() && value.is_null() {
                    continue;
                }
                return Err(match why {
                    Some(why) => refused(&path, why),
                    None => found(&path, "unknown_parameter", format!("there is no field `{path}`")),
                });
            }
            Some(each) => check_at(each, value, &path)?,
            None => {}
        }
    }
    let required = schema.get("required").and_then(Value::as_array);
    for name in required.into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(name) {
            let path = inside(name);
            return Err(found(&path, "missing_parameter", format!("`{path}` is missing")));
        }
    }
    Ok(())
}

/// Describes a value for an error message: short, and never text of the user, because errors are logged.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) => format!("a string of {} characters", text.chars().count()),
        Value::Array(items) => format!("a list of length {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}

/// Checks that the schema uses only keywords that [`check`] supports. Otherwise returns the unknown keyword.
#[cfg(test)]
pub fn known(schema: &Value) -> Result<(), String> {
    const CHECKED: [&str; 17] = [
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "pattern",
        "items",
        "minItems",
        "maxItems",
        "properties",
        "required",
        "additionalProperties",
        "propertyNames",
        "anyOf",
        REFUSED,
    ];
    const SAID: [&str; 4] = ["title", "description", "default", "example"];
    let Some(schema) = schema.as_object() else { return Ok(()) };
    for (key, value) in schema {
        match key.as_str() {
            "properties" => value.as_object().into_iter().flatten().try_for_each(|(_, p)| known(p))?,
            "anyOf" => value.as_array().into_iter().flatten().try_for_each(known)?,
            "items" | "additionalProperties" | "propertyNames" => known(value)?,
            "pattern" if ![NATURAL, FILE_NAME, SESSION_ID].iter().any(|known| value == known) => {
                return Err(format!("the pattern {value}"));
            }
            key if CHECKED.contains(&key) || SAID.contains(&key) => {}
            key => return Err(format!("the keyword `{key}`")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_field_found_and_expected() {
        let schema = json!({
            "type": "object",
            "required": ["prompt"],
            "additionalProperties": false,
            "x-kvist-refused": {"suffix": "kvist only continues"},
            "properties": {
                "prompt": {"anyOf": [
                    {"title": "a string", "type": "string"},
                    {"title": "a list of strings", "type": "array", "minItems": 1, "items": {"type": "string"}},
                ]},
                "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 4},
                "store": {"type": ["boolean", "null"], "enum": [false, null]},
                "bias": {
                    "type": "object",
                    "propertyNames": {"pattern": NATURAL},
                    "additionalProperties": {"type": "number", "minimum": -100},
                },
                "in": {"type": "object", "properties": {"deep": {"type": "string", "maxLength": 2}}},
                "said": {"anyOf": [
                    {"type": "object", "required": ["role", "id"], "properties": {
                        "role": {"type": "string", "enum": ["tool"]}, "id": {"type": "string"}}},
                    {"type": "object", "required": ["role"], "properties": {
                        "role": {"type": "string", "enum": ["user", "system"]}}},
                ]},
            },
        });
        known(&schema).unwrap();
        let table = [
            (json!({"prompt": "a"}), None),
            (json!({"prompt": "a", "n": 2.0, "store": false, "bias": {"0": -1.5, "12": 3}}), None),
            (json!({"prompt": ["a", "b"], "n": null}), None),
            (json!([]), Some(("", "invalid_type", "the body is a list of length 0; expected object"))),
            (json!({}), Some(("prompt", "missing_parameter", "`prompt` is missing"))),
            (
                json!({"prompt": 3}),
                Some(("prompt", "invalid_type", "expected a string or a list of strings")),
            ),
            (
                json!({"prompt": ["a", 3]}),
                Some(("prompt[1]", "invalid_type", "`prompt[1]` is 3; expected string")),
            ),
            (json!({"prompt": []}), Some(("prompt", "invalid_value", "an empty list"))),
            (json!({"prompt": "a", "n": 0}), Some(("n", "invalid_value", "is 0; expected 1 to 4"))),
            (
                json!({"prompt": "a", "n": 1.5}),
                Some(("n", "invalid_type", "is 1.5; expected integer or null")),
            ),
            (
                json!({"prompt": "a", "store": true}),
                Some(("store", "invalid_value", "is true; expected one of")),
            ),
            (
                json!({"prompt": "a", "bias": {"01": 1}}),
                Some(("bias.01", "invalid_value", "expected a number")),
            ),
            (json!({"prompt": "a", "bias": {"1": -101}}), Some(("bias.1", "invalid_value", "-100 or more"))),
            (
                json!({"prompt": "a", "in": {"deep": "abc"}}),
                Some(("in.deep", "invalid_value", "has 3 characters")),
            ),
            (
                json!({"prompt": "a", "suffix": "b"}),
                Some(("suffix", "unsupported_parameter", "only continues")),
            ),
            (json!({"prompt": "a", "suffix": null}), None),
            (json!({"prompt": "a", "sufix": null}), Some(("sufix", "unknown_parameter", "no field `sufix`"))),
            (json!({"prompt": "a", "sufix": "b"}), Some(("sufix", "unknown_parameter", "no field `sufix`"))),
        ];
        let mut bad = Vec::new();
        for (body, expected) in table {
            let error = check(&schema, &body).err();
            let good = match (&error, expected) {
                (None, None) => true,
                (Some(e), Some((param, code, words))) => {
                    e.param.as_deref().unwrap_or("") == param && e.code == code && e.message.contains(words)
                }
                _ => false,
            };
            if !good {
                bad.push(format!("{body}: {error:?}, expected {expected:?}"));
            }
        }
        assert!(bad.is_empty(), "{}", bad.join("\n"));
    }

    #[test]
    fn what_is_not_checked_is_not_known() {
        for bad in [
            json!({"multipleOf": 2}),
            json!({"properties": {"a": {"oneOf": []}}}),
            json!({"anyOf": [{"pattern": "a"}]}),
        ] {
            assert!(known(&bad).is_err(), "{bad}");
        }
    }
}
