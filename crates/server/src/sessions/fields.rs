//! JSON schemas and fields of session requests.
use crate::openai::request::{
    Bounds, boolean, common, integer, message, number_of_tokens, object, or_null, response_format,
    tool_choice, tools,
};
use crate::schema::{FILE_NAME, SESSION_ID};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// One schema per operation that has a body.
pub(crate) struct SessionSchemas {
    pub create: Value,
    pub append: Value,
    pub generate: Value,
    pub fork: Value,
    pub rollback: Value,
    pub keep: Value,
    pub save: Value,
    pub load: Value,
}

/// Maximum number of messages in one request.
const MAX_MESSAGES: u32 = 256;
const MAX_NAME: u32 = 64;

impl SessionSchemas {
    pub fn new(b: &Bounds) -> Self {
        SessionSchemas {
            create: create(b),
            append: append(b),
            generate: generate(b),
            fork: fork(b),
            rollback: object(fields(json!({"to": cut(b, false)})), &["to"], json!({})),
            keep: object(
                fields(json!({"also": or_null(json!({
                    "type": "array", "maxItems": b.max_choices, "items": {"type": "string"},
                    "description": "Siblings to keep as well.",
                }))})),
                &[],
                json!({}),
            ),
            save: object(fields(json!({"file": file()})), &["file"], json!({})),
            load: object(fields(json!({"file": file()})), &["file"], json!({})),
        }
    }

    #[cfg(test)]
    pub fn all(&self) -> [&Value; 8] {
        [
            &self.create,
            &self.append,
            &self.generate,
            &self.fork,
            &self.rollback,
            &self.keep,
            &self.save,
            &self.load,
        ]
    }
}

fn fields(fields: Value) -> Map<String, Value> {
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// The name of a saved session. It never leaves the folder of its owner: it has no `/` and does not begin with a dot.
fn file() -> Value {
    json!({"type": "string", "pattern": FILE_NAME,
        "description": "1 to 64 letters, digits, `-`, `_` and `.`, the first one no `.`."})
}

/// Content to append: one of `messages`, `text` and `tokens`.
fn content(b: &Bounds) -> Map<String, Value> {
    fields(json!({
        "messages": or_null(json!({"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": message(b.template),
            "description": "As in chat completions; formatted by the model's chat template."})),
        "text": or_null(json!({"type": "string", "minLength": 1})),
        "tokens": or_null(json!({"type": "array", "minItems": 1, "maxItems": b.max_tokens, "items": b.tokens()})),
    }))
}

const CONTENT: [&str; 3] = ["messages", "text", "tokens"];

/// Schema that requires the other content fields to be null.
fn alone(name: &str) -> Value {
    let others = CONTENT.iter().filter(|other| **other != name);
    Value::Object(others.map(|other| (other.to_string(), json!({"type": "null"}))).collect())
}

fn create(b: &Bounds) -> Value {
    let mut all = content(b);
    all.extend(fields(json!({
        "model": common(b)["model"],
        "id": or_null(json!({"type": "string", "pattern": SESSION_ID, "description":
            "The session's id, drawn at random by the client, so that a router can place the session by it from the creation on. By \
             default the server draws one."})),
        "name": or_null(json!({"type": "string", "maxLength": MAX_NAME,
            "description": "A label, for the owner of the session."})),
        "cache_salt": or_null(json!({"type": "string", "maxLength": 256, "description":
            "Prefixes are shared only with requests of the same salt. Forks inherit the salt."})),
    })));
    if b.template {
        all.insert(
            "chat_template_kwargs".into(),
            or_null(
                json!({"type": "object", "description": "More variables for the model's chat template."}),
            ),
        );
        all.insert("tools".into(), tools(b));
    }
    let mut schema = object(all, &[], json!({}));
    schema["anyOf"] = CONTENT.iter().map(|name| json!({"properties": alone(name)})).collect();
    schema
}

fn append(b: &Bounds) -> Value {
    let mut schema = object(content(b), &[], json!({}));
    let one = |name: &&str| {
        let mut properties = alone(name);
        properties[name] = json!({"type": if *name == "text" { "string" } else { "array" }});
        json!({"title": format!("`{name}` alone"), "required": [name], "properties": properties})
    };
    schema["anyOf"] = CONTENT.iter().map(one).collect();
    schema
}

fn generate(b: &Bounds) -> Value {
    let mut all = common(b);
    for name in ["n", "cache_salt"] {
        all.shift_remove(name);
    }
    let max = || or_null(number_of_tokens(b));
    all.extend(fields(json!({
        "max_tokens": max(),
        "max_completion_tokens": max(),
        "logprobs": boolean(false, "Return the log-probabilities of the tokens."),
        "top_logprobs": integer(0, 20, "Also return this many most likely tokens; requires `logprobs`."),
        "response_format": response_format(),
        "add_generation_prompt": or_null(json!({"type": "boolean", "description":
            "True begins an answer of the assistant; false continues the tokens as they are. The default is true if \
             the session is made of messages and its last message cannot be continued."})),
    })));
    all.insert("tools".into(), tools(b));
    all.insert("tool_choice".into(), tool_choice(b));
    all.insert("parallel_tool_calls".into(), boolean(true, "If false, an answer has at most one call."));
    let refused = json!({
        "n": "fork the session, and generate in every branch",
        "cache_salt": "it belongs to the session: set it when you create the session",
        "messages": "append them first",
        "prompt": "append it first",
    });
    let mut schema = object(all, &[], refused);
    schema["anyOf"] = json!([
        {"properties": {"top_logprobs": {"type": "null"}}},
        {"required": ["logprobs"], "properties": {"logprobs": {"const": true}}},
    ]);
    schema
}

/// Schema of the position at which a history is truncated.
fn cut(b: &Bounds, optional: bool) -> Value {
    let mut ways = vec![
        json!({"title": "a number of tokens", "type": "integer", "minimum": 0, "maximum": b.max_tokens,
            "description": "Number of tokens to keep."}),
        json!({"title": "{\"message\": N}", "type": "object", "additionalProperties": false, "required": ["message"],
            "properties": {"message": {"type": "integer", "minimum": 0, "maximum": u32::MAX,
                "description": "Number of messages to keep."}}}),
    ];
    if optional {
        ways.push(json!({"title": "null", "type": "null"}));
    }
    json!({"anyOf": ways})
}

fn fork(b: &Bounds) -> Value {
    let mut at = cut(b, true);
    at["description"] = "Where the histories are cut. By default, at the end.".into();
    let all = fields(json!({
        "at": at,
        "n": or_null(json!({"type": "integer", "minimum": 1, "maximum": b.max_choices, "default": 1})),
        "name": or_null(json!({"type": "string", "maxLength": MAX_NAME})),
    }));
    object(all, &[], json!({}))
}

#[derive(Deserialize)]
pub(super) struct Content {
    pub messages: Option<Vec<Value>>,
    pub text: Option<String>,
    pub tokens: Option<Vec<u32>>,
}

#[derive(Deserialize)]
pub(super) struct CreateFields {
    pub id: Option<String>,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    pub tools: Option<Vec<Value>>,
}

#[derive(Deserialize)]
pub(super) struct GenerateFields {
    pub max_tokens: Option<u32>,
    pub max_completion_tokens: Option<u32>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<u8>,
    pub response_format: Option<Value>,
    pub add_generation_prompt: Option<bool>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
pub(super) enum CutField {
    Token(usize),
    Message { message: usize },
}

impl From<CutField> for kvist_engine::sessions::Cut {
    fn from(field: CutField) -> Self {
        match field {
            CutField::Token(token) => Self::Token(token),
            CutField::Message { message } => Self::Message(message),
        }
    }
}

#[derive(Deserialize)]
pub(super) struct ForkFields {
    pub at: Option<CutField>,
    pub n: Option<usize>,
    pub name: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct RollbackFields {
    pub to: CutField,
}

#[derive(Deserialize)]
pub(super) struct KeepFields {
    pub also: Option<Vec<String>>,
}

#[derive(Deserialize)]
pub(super) struct FileFields {
    pub file: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LimitsSection;
    use crate::schema;

    #[test]
    fn one_of_messages_text_and_tokens() {
        let schemas = SessionSchemas::new(&Bounds::new("m", 10, 64, &LimitsSection::default()));
        for schema in schemas.all() {
            schema::known(schema).unwrap_or_else(|e| panic!("{e} in {schema}"));
        }
        let messages = json!([{"role": "user", "content": "a"}]);
        let rows = [
            (json!({}), true, false),
            (json!({"text": "a"}), true, true),
            (json!({"text": "a", "tokens": null}), true, true),
            (json!({"tokens": [1, 9]}), true, true),
            (json!({"messages": messages}), true, true),
            (json!({"text": null}), true, false),
            (json!({"tokens": [10]}), false, false),
            (json!({"text": "a", "tokens": [1]}), false, false),
            (json!({"text": "a", "messages": messages}), false, false),
            (json!({"id": "sess-0123456789abcdef0123456789abcdef"}), true, false),
            (json!({"id": "sess-0123456789ABCDEF0123456789abcdef"}), false, false),
            (json!({"id": "mine"}), false, false),
            (json!({"messages": []}), false, false),
        ];
        for (body, creates, appends) in rows {
            assert_eq!(schema::check(&schemas.create, &body).is_ok(), creates, "create {body}");
            assert_eq!(schema::check(&schemas.append, &body).is_ok(), appends, "append {body}");
        }
    }
}
