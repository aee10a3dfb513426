//! The fields of a request. The body is checked first, against its schema and against rules that a schema cannot
//! express.
use crate::error::ApiError;
use crate::schema;
use kvist_scheduler::Retention;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Fields that both endpoints share, read from a body that passed its schema.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Common {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<String, f32>>,
    pub seed: Option<i64>,
    pub n: Option<u32>,
    pub stop: Option<OneOrMore>,
    pub ignore_eos: Option<bool>,
    pub return_token_ids: Option<bool>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub cache_salt: Option<String>,
    pub kvist: Option<KvistFields>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMore {
    One(String),
    More(Vec<String>),
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamOptions {
    pub include_usage: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct KvistFields {
    pub explain: Option<bool>,
    pub timeout_ms: Option<u64>,
    pub target_ms: Option<u64>,
    pub priority: Option<i32>,
    pub pace: Option<u32>,
    pub cache: Option<CacheFields>,
}

/// How long the prompt stays in the cache.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CacheFields {
    pub pin: Option<bool>,
    pub ttl_s: Option<u32>,
    pub priority: Option<u8>,
}

impl CacheFields {
    pub fn retention(self) -> Retention {
        Retention {
            ttl_ns: u64::from(self.ttl_s.unwrap_or(3600)) * 1_000_000_000,
            priority: self.priority.unwrap_or(0),
            pin: self.pin.unwrap_or(false),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct CompletionFields {
    pub prompt: Prompt,
    pub max_tokens: Option<u32>,
    pub echo: Option<bool>,
    pub logprobs: Option<u8>,
}

/// The prompt as the client sent it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ChatFields {
    pub messages: Vec<Value>,
    pub max_tokens: Option<u32>,
    pub max_completion_tokens: Option<u32>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<u8>,
    pub response_format: Option<Value>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub reasoning_effort: Option<String>,
}

/// Rules between fields that the schema does not express. Checked before the schema.
pub(crate) fn check_together(body: &Value, tools: bool) -> Result<(), ApiError> {
    let given = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
    if given("top_logprobs") && body.get("logprobs") != Some(&Value::Bool(true)) {
        return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true"));
    }
    if !tools && body.get("tools").and_then(Value::as_array).is_some_and(|tools| !tools.is_empty()) {
        let message = "`tools` are not supported with this model: its chat template has no tool call format that \
                       kvist can parse";
        return Err(ApiError::unsupported("tools", message));
    }
    Ok(())
}

/// Check a body's model and fields. Afterwards [`read`] can rely on the schema.
pub(crate) fn check(body: &mut Value, schema: &Value, model: &str) -> Result<(), ApiError> {
    if let Some(asked) = body.get("model").and_then(Value::as_str)
        && asked != model
    {
        let message = format!("there is no model {asked:?} here; this server serves {model:?}");
        let error = ApiError::new(axum::http::StatusCode::NOT_FOUND, "model_not_found", message);
        return Err(error.about("model"));
    }
    schema::check(schema, body)?;
    integers(schema, body);
    Ok(())
}

/// Read the fields of a checked body.
pub(crate) fn read<'a, T: Deserialize<'a>>(body: &'a Value) -> Result<T, ApiError> {
    T::deserialize(body).map_err(|e| {
        ApiError::new(axum::http::StatusCode::BAD_REQUEST, "invalid_value", format!("the body: {e}"))
    })
}

/// JSON Schema accepts `1.0` as an integer, serde does not: convert it. Only where the schema has an integer: what is
/// inside tools, messages and arguments of templates is the client's, and a template would write it otherwise.
fn integers(schema: &Value, value: &mut Value) {
    for branch in schema["anyOf"].as_array().into_iter().flatten() {
        integers(branch, value);
    }
    match value {
        Value::Number(number) if !number.is_i64() && !number.is_u64() => {
            let kinds = &schema["type"];
            let is_integer = kinds == "integer"
                || kinds.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "integer"));
            let whole = number.as_f64().filter(|x| is_integer && x.fract() == 0.0 && x.abs() < 9e15);
            if let Some(whole) = whole {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| integers(&schema["items"], item)),
        Value::Object(fields) => fields.iter_mut().for_each(|(name, field)| {
            let own = schema["properties"].get(name);
            integers(own.unwrap_or(&schema["additionalProperties"]), field);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::integers;
    use serde_json::json;

    /// Regression: every `1.0` of a body became `1`, also in the tools that a template writes into the prompt.
    #[test]
    fn only_integers_of_the_schema_are_converted() {
        let count = json!({"type": ["integer", "null"]});
        let schema = json!({"properties": {
            "n": count, "temperature": {"type": "number"},
            "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]},
            "tools": {"type": "array", "items": {"type": "object"}},
            "kvist": {"properties": {"pace": {"anyOf": [count, {"type": "null"}]}}},
            "more": {"additionalProperties": {"type": "integer"}},
        }});
        let mut body = json!({"n": 2.0, "temperature": 1.0, "prompt": [1.0, [2.0]], "kvist": {"pace": 3.0},
            "tools": [{"n": 1.0}], "more": {"a": 4.0, "b": 4.5}, "other": 1.0});
        integers(&schema, &mut body);
        let converted = json!({"n": 2, "temperature": 1.0, "prompt": [1, [2]], "kvist": {"pace": 3},
            "tools": [{"n": 1.0}], "more": {"a": 4, "b": 4.5}, "other": 1.0});
        assert_eq!(body.to_string(), converted.to_string());
    }
}
