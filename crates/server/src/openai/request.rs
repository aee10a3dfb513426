//! The schemas that request bodies are checked against. Bodies that pass are read in [`fields`](super::fields).
use crate::config::LimitsSection;
use crate::schema::{self, NATURAL};
use kvist_model::generation_config::Shipped;
use serde_json::{Map, Value, json};

/// Values of this server that appear in schemas.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub model: String,
    pub vocab: u32,
    /// Largest number of tokens of prompt and answer together.
    pub max_tokens: u32,
    pub max_choices: u32,
    pub max_stop: u32,
    /// The model has a chat template of its own.
    pub template: bool,
    /// The template takes a reasoning effort.
    pub effort: bool,
    /// kvist can parse the model's tool calls.
    pub tools: bool,
    /// Sampling defaults that the model ships.
    pub sampling: Shipped,
}

impl Bounds {
    pub fn new(model: &str, vocab: usize, max_tokens: u32, limits: &LimitsSection) -> Self {
        Bounds {
            model: model.into(),
            vocab: u32::try_from(vocab).unwrap_or(u32::MAX),
            max_tokens,
            max_choices: limits.max_choices,
            max_stop: limits.max_stop,
            template: false,
            effort: false,
            tools: false,
            sampling: Shipped::default(),
        }
    }

    pub fn tokens(&self) -> Value {
        json!({"type": "integer", "minimum": 0, "maximum": self.vocab.saturating_sub(1)})
    }
}

/// Most log-probabilities in addition to a token's own.
pub(crate) const MAX_TOP: u8 = 20;

/// Allow null, which means the same as leaving the field out.
pub(crate) fn or_null(mut schema: Value) -> Value {
    if let Some(name) = schema.get("type").and_then(Value::as_str).map(str::to_string) {
        schema["type"] = json!([name, "null"]);
    }
    schema
}

fn number(least: f64, most: f64, default: f64, about: &str) -> Value {
    or_null(
        json!({"type": "number", "minimum": least, "maximum": most, "default": default, "description": about}),
    )
}

pub(crate) fn integer(least: i64, most: i64, about: &str) -> Value {
    or_null(json!({"type": "integer", "minimum": least, "maximum": most, "description": about}))
}

pub(crate) fn boolean(default: bool, about: &str) -> Value {
    or_null(json!({"type": "boolean", "default": default, "description": about}))
}

fn text(about: &str) -> Value {
    or_null(json!({"type": "string", "description": about}))
}

/// A field that is accepted and has no effect.
fn ignored(schema: Value) -> Value {
    let mut schema = or_null(schema);
    schema["description"] = "Accepted; it has no effect here.".into();
    schema
}

/// A field of vLLM's that kvist does not support. Values that match kvist's behaviour are accepted.
fn neutral(schema: Value, why: &str) -> Value {
    let mut schema = or_null(schema);
    schema["description"] = format!("Other values are refused: {why}.").into();
    schema[schema::REFUSED] = why.into();
    schema
}

/// Largest length of a stop string, in characters. Longer ones are hardly stop strings, and each is searched for at
/// every byte.
const MAX_STOP_CHARS: u32 = 256;

/// Fields that both endpoints share.
pub(crate) fn common(b: &Bounds) -> Map<String, Value> {
    let s = &b.sampling;
    // Convert through decimal text: the f32 0.6 has no short form as a double.
    let default = |shipped: Option<f32>, otherwise: f64| {
        shipped.and_then(|x| x.to_string().parse().ok()).unwrap_or(otherwise)
    };
    let fields = json!({
        "model": or_null(json!({"type": "string", "enum": [b.model, null], "description": format!(
            "`{}`, which is also the default; any other is answered 404.", b.model)})),
        "temperature": number(0.0, 2.0, default(s.temperature, 1.0), "0 takes the likeliest token."),
        "top_p": number(0.0, 1.0, default(s.top_p, 1.0), "Choose among the likeliest that together reach this probability."),
        "top_k": integer(-1, i64::from(u32::MAX), &format!(
            "Choose among the k likeliest; 0 and -1 are all. {} without it.", s.top_k.unwrap_or(0))),
        "min_p": number(0.0, 1.0, default(s.min_p, 0.0), "Drop what is less likely than this share of the likeliest."),
        "repetition_penalty": number(0.01, 100.0, default(s.repetition_penalty, 1.0),
            "Divides positive and multiplies negative logits of tokens of prompt and answer."),
        "frequency_penalty": number(-2.0, 2.0, 0.0, "Subtracted from a token's logit for each time it was generated."),
        "presence_penalty": number(-2.0, 2.0, 0.0, "Subtracted from the logits of tokens that were generated."),
        "logit_bias": or_null(json!({
            "type": "object", "description": "Added to the logits of these tokens.",
            "propertyNames": {"pattern": NATURAL},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        })),
        "seed": integer(i64::MIN, i64::MAX, "The same seed gives the same answer; without it one is drawn."),
        "n": integer(1, i64::from(b.max_choices), "Answers to each prompt."),
        "stop": {
            "description": "Texts that end the answer and are not part of it.",
            "anyOf": [
                {"title": "null", "type": "null"},
                {"title": "a text", "type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {"title": "a list of texts", "type": "array", "maxItems": b.max_stop,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}},
            ],
        },
        "stop_token_ids": neutral(json!({"type": "array", "maxItems": 0}),
            "an answer ends at the model's own end and at texts: `stop`"),
        "min_tokens": neutral(json!({"type": "integer", "enum": [0, null]}),
            "an answer may end at once; `ignore_eos` goes on as far as `max_tokens`"),
        "skip_special_tokens": neutral(json!({"type": "boolean", "enum": [true, null]}),
            "control tokens are no text, and are not written out"),
        "ignore_eos": boolean(false, "Go on when the model says that it is done (vLLM)."),
        "stream": boolean(false, "Send the answer as server-sent events while it is generated."),
        "stream_options": or_null(json!({
            "type": "object", "additionalProperties": false,
            "properties": {
                "include_usage": boolean(false, "Send the usage in a last chunk without choices."),
                "include_obfuscation": ignored(json!({"type": "boolean"})),
                "continuous_usage_stats": neutral(json!({"type": "boolean", "enum": [false, null]}),
                    "the usage comes in the last chunk: `include_usage`"),
            },
        })),
        "cache_salt": or_null(json!({"type": "string", "maxLength": 256, "description":
            "Prefixes are shared only with requests of the same salt, and always only with those of the same key's name."})),
        "kvist": or_null(json!({
            "type": "object", "additionalProperties": false,
            "properties": {
                "explain": boolean(false, "Say under `kvist` how much of each prompt was cached, and why no more."),
                "timeout_ms": integer(1, 1 << 40, "End the request then; never later than the server's own limit."),
                "priority": integer(i64::from(i32::MIN), i64::from(i32::MAX),
                    "Larger is more urgent, under the scheduling policy `priority`. Admin keys only."),
                "pace": integer(1, 1000, "Tokens per second to write at, so that a person can watch: the engine waits \
                    between its steps while every request has a `pace`, and keeps the fastest of them. As soon as one \
                    has none, nothing is slowed down."),
            },
        })),
        "user": ignored(json!({"type": "string"})),
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

pub(crate) fn object(fields: Map<String, Value>, required: &[&str], refused: Value) -> Value {
    let mut schema = json!({
        "type": "object",
        "additionalProperties": false,
        "required": required,
        "properties": fields,
    });
    schema[schema::REFUSED] = refused;
    schema
}

pub(crate) fn completions(b: &Bounds) -> Value {
    let list =
        |items: Value, most: u32| json!({"type": "array", "minItems": 1, "maxItems": most, "items": items});
    let titled = |title: &str, mut schema: Value| {
        schema["title"] = title.into();
        schema
    };
    let some_text = || json!({"type": "string", "minLength": 1});
    // Their length is checked where the length of texts is, with the error `context_length_exceeded`.
    let tokens = || json!({"type": "array", "minItems": 1, "items": b.tokens()});
    let mut fields = common(b);
    let own = json!({
        "prompt": {
            "description": "What is continued: a text, several, a list of tokens, or several.",
            "anyOf": [
                titled("a text", some_text()),
                titled("a list of texts", list(some_text(), b.max_choices)),
                titled("a list of tokens", tokens()),
                titled("a list of lists of tokens", list(tokens(), b.max_choices)),
            ],
        },
        "max_tokens": or_null(json!({"type": "integer", "minimum": 0, "maximum": u32::MAX, "default": 16,
            "description": "Tokens to generate at most. An answer ends where the context is full. 0 needs `echo`."})),
        "echo": boolean(false, "Give the prompt back before the answer; with `logprobs` those of its tokens too."),
        "best_of": or_null(json!({"type": "integer", "enum": [1, null],
            "description": "kvist does not choose among answers: ask for `n`."})),
        "logprobs": integer(0, i64::from(MAX_TOP),
            "Log-probabilities of the tokens, and of this many of the likeliest."),
    });
    fields.extend(own.as_object().cloned().unwrap_or_default());
    let refused = json!({
        "suffix": "kvist continues a text, and does not fill gaps in one",
    });
    let mut schema = object(fields, &["prompt"], refused);
    // The response must not be empty: at least one new token, or an echo.
    schema["anyOf"] = json!([
        {"properties": {"max_tokens": {"type": ["integer", "null"], "minimum": 1}}},
        {"required": ["echo"], "properties": {"echo": {"const": true}}},
    ]);
    schema
}

pub(crate) fn number_of_tokens(b: &Bounds) -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": u32::MAX, "description": format!(
        "Tokens to generate at most. An answer ends where the context is full: prompt and answer have room for {}.",
        b.max_tokens)})
}

pub(crate) fn chat(b: &Bounds) -> Value {
    let mut fields = common(b);
    let most = number_of_tokens(b);
    let own = json!({
        "messages": {"type": "array", "minItems": 1, "items": message(b.template)},
        "max_tokens": or_null(most.clone()),
        "max_completion_tokens": or_null(most),
        "logprobs": boolean(false, "Log-probabilities of the tokens."),
        "top_logprobs": integer(0, 20, "Of this many of the likeliest tokens too; needs `logprobs`."),
        "response_format": response_format(),
        "tools": tools(b),
        "tool_choice": tool_choice(b),
        "parallel_tool_calls": boolean(true, "False: one call at most."),
        "chat_template_kwargs": or_null(json!({"type": "object", "description":
            "More names for the model's template, such as `enable_thinking` (vLLM)."})),
        "metadata": ignored(json!({"type": "object"})),
        "modalities": or_null(json!({"type": "array", "items": {"type": "string", "enum": ["text"]}})),
        "prompt_cache_key": ignored(json!({"type": "string"})),
        "safety_identifier": ignored(json!({"type": "string"})),
        "service_tier": or_null(json!({"type": "string", "enum": ["auto", "default", null],
            "description": "There is one tier."})),
        "store": or_null(json!({"type": "boolean", "enum": [false, null], "description": "Nothing is stored."})),
    });
    fields.extend(own.as_object().cloned().unwrap_or_default());
    let mut refused = json!({
        "audio": "answers are text",
        "function_call": "it is OpenAI's old name: use `tool_choice`",
        "functions": "it is OpenAI's old name: use `tools`",
        "prediction": "kvist does not take drafts of the answer",
        "reasoning_effort": "the effort of a model is not adjustable here",
        "verbosity": "say it in a message",
        "web_search_options": "kvist searches nothing",
    });
    if b.effort {
        refused.as_object_mut().map(|refused| refused.shift_remove("reasoning_effort"));
        let about = "How long the model is to think: `reasoning_effort` of its template.";
        let effort = json!({"type": "string", "enum": ["low", "medium", "high", null], "description": about});
        fields.insert("reasoning_effort".into(), or_null(effort));
    }
    if !b.template {
        fields.shift_remove("chat_template_kwargs");
        refused["chat_template_kwargs"] = NO_TEMPLATE.into();
    }
    let mut schema = object(fields, &["messages"], refused);
    schema["anyOf"] = json!([
        {"properties": {"top_logprobs": {"type": "null"}}},
        {"required": ["logprobs"], "properties": {"logprobs": {"const": true}}},
    ]);
    schema
}

const NO_TEMPLATE: &str = "this model has no chat template";

/// `template`: the model has a chat template, which may support tools.
pub(crate) fn message(template: bool) -> Value {
    let text_or_parts = || {
        vec![
            json!({"title": "a text", "type": "string"}),
            json!({"title": "a list of parts", "type": "array", "minItems": 1, "items": {
                "type": "object", "additionalProperties": false, "required": ["type", "text"],
                "properties": {
                    "type": {"type": "string", "enum": ["text"], "description": "Images and sound are not understood."},
                    "text": {"type": "string"},
                },
            }}),
        ]
    };
    let content = || json!({"anyOf": text_or_parts()});
    let role = |title: &str, roles: Value, own: Value, required: &[&str]| {
        let mut schema = json!({
            "title": title,
            "type": "object",
            "additionalProperties": false,
            "required": required,
            "properties": {
                "role": {"type": "string", "enum": roles},
                "content": content(),
                "name": text("Passed on to the model's template."),
            },
        });
        for (name, field) in own.as_object().into_iter().flatten() {
            schema["properties"][name] = field.clone();
        }
        schema
    };
    let mut nullable = text_or_parts();
    nullable.push(json!({"title": "null", "type": "null"}));
    let call = json!({
        "type": "object", "additionalProperties": false, "required": ["function"],
        "properties": {
            "id": {"type": "string"},
            "type": {"type": "string", "enum": ["function"]},
            "index": {"type": "integer"},
            "function": {
                "type": "object", "additionalProperties": false, "required": ["name", "arguments"],
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {"type": "string", "description": "A JSON object, as text."},
                },
            },
        },
    });
    let mut assistant = role(
        "what the assistant said",
        json!(["assistant"]),
        json!({
            "content": {"anyOf": nullable},
            "refusal": or_null(json!({"type": "string", "description": "Passed on to the model's template."})),
            "reasoning_content": text("Passed on to the model's template."),
            "reasoning": text("vLLM's newer name. Passed on to the model's template."),
            "tool_calls": or_null(json!({"type": "array", "items": call})),
            "annotations": ignored(json!({"type": "array"})),
        }),
        &["role"],
    );
    assistant[schema::REFUSED] = json!({
        "audio": "answers are text",
        "function_call": "it is OpenAI's old name: use `tool_calls`",
    });
    let user = role("what is asked", json!(["system", "developer", "user"]), json!({}), &["role", "content"]);
    if !template {
        assistant[schema::REFUSED]["tool_calls"] = NO_TEMPLATE.into();
        if let Some(fields) = assistant["properties"].as_object_mut() {
            fields.shift_remove("tool_calls");
        }
        return json!({"anyOf": [user, assistant]});
    }
    json!({"anyOf": [
        user,
        assistant,
        role("what a tool answered", json!(["tool"]), json!({"tool_call_id": {"type": "string"}}),
            &["role", "content", "tool_call_id"]),
    ]})
}

/// The schema of a tool. `parameters` is checked when its grammar is compiled.
fn tool() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["type", "function"],
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object", "additionalProperties": false, "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 64, "description":
                        "Letters, digits, underscores, dashes and dots."},
                    "description": text("What the model is told about it."),
                    "parameters": or_null(json!({"type": "object", "description": "A JSON schema of an object."})),
                    "strict": or_null(json!({"type": "boolean"})),
                },
            },
        },
    })
}

pub(crate) fn tools(b: &Bounds) -> Value {
    or_null(json!({"type": "array", "maxItems": if b.tools { 128 } else { 0 }, "items": tool()}))
}

pub(crate) fn tool_choice(b: &Bounds) -> Value {
    if !b.tools {
        return or_null(json!({"type": "string", "enum": ["none", null]}));
    }
    json!({
        "description": "Whether tools are called: `auto` is the default where there are tools.",
        "anyOf": [
            {"title": "null", "type": "null"},
            {"title": "none, auto or required", "type": "string", "enum": ["none", "auto", "required"]},
            {"title": "a function", "type": "object", "additionalProperties": false, "required": ["type", "function"],
                "properties": {
                    "type": {"type": "string", "enum": ["function"]},
                    "function": {"type": "object", "additionalProperties": false, "required": ["name"],
                        "properties": {"name": {"type": "string"}}},
                }},
        ],
    })
}

pub(crate) fn response_format() -> Value {
    let kind = |name: &str, own: Value| {
        let mut required = vec!["type"];
        required.extend(own.as_object().into_iter().flatten().map(|(field, _)| field.as_str()));
        let mut schema = json!({
            "title": name, "type": "object", "additionalProperties": false, "required": required,
            "properties": {"type": {"type": "string", "enum": [name]}},
        });
        for (field, own) in own.as_object().into_iter().flatten() {
            schema["properties"][field] = own.clone();
        }
        schema
    };
    let json_schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "schema"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 64},
            "description": ignored(json!({"type": "string"})),
            "schema": {"type": "object", "description":
                "A JSON schema. What of it cannot be enforced is refused by its path."},
            "strict": boolean(false, "What cannot be enforced is refused in either case."),
        },
    });
    json!({
        "description": "What the answer must look like.",
        "anyOf": [
            kind("text", json!({})),
            kind("json_object", json!({})),
            kind("json_schema", json!({"json_schema": json_schema})),
            {"title": "null", "type": "null"},
        ],
    })
}

pub(crate) fn tokenize(b: &Bounds) -> Value {
    let mut fields = Map::new();
    fields.insert("model".into(), common(b)["model"].clone());
    fields.insert("prompt".into(), json!({"type": "string"}));
    let about = "Add what the model expects at the start of a text.";
    fields.insert("add_special_tokens".into(), boolean(true, about));
    object(fields, &["prompt"], json!({}))
}

pub(crate) fn detokenize(b: &Bounds) -> Value {
    let mut fields = Map::new();
    fields.insert("model".into(), common(b)["model"].clone());
    fields.insert("tokens".into(), json!({"type": "array", "items": b.tokens()}));
    object(fields, &["tokens"], json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_say_only_what_is_checked() {
        for template in [false, true] {
            let bounds = Bounds::new("m", 10, 64, &LimitsSection::default());
            let bounds = Bounds { template, effort: template, tools: template, ..bounds };
            let crate::schemas::Schemas { completions, chat, tokenize, detokenize, .. } =
                crate::schemas::Schemas::new(&bounds);
            for schema in [completions, chat, tokenize, detokenize] {
                schema::known(&schema).unwrap_or_else(|e| panic!("{e} in {schema}"));
            }
        }
    }
}
