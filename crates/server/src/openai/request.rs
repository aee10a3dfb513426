//! The schemas that request bodies are checked against. Bodies that pass are read in [`fields`](super::fields).
use crate::config::LimitsSection;
use crate::schema::{self, NATURAL};
use kvist_model::generation_config::SamplingDefaults;
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
    pub sampling: SamplingDefaults,
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
            sampling: SamplingDefaults::default(),
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

fn number(min: f64, max: f64, default: f64, about: &str) -> Value {
    or_null(
        json!({"type": "number", "minimum": min, "maximum": max, "default": default, "description": about}),
    )
}

pub(crate) fn integer(min: i64, max: i64, about: &str) -> Value {
    or_null(json!({"type": "integer", "minimum": min, "maximum": max, "description": about}))
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
    schema["description"] = "Accepted, but has no effect.".into();
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
            "`{}`, which is also the default. Other names are answered with 404.", b.model)})),
        "temperature": number(0.0, 2.0, default(s.temperature, 1.0), "0 always chooses the most likely token."),
        "top_p": number(0.0, 1.0, default(s.top_p, 1.0), "Sample from the most likely tokens that together reach \
                                                          this probability."),
        "top_k": integer(-1, i64::from(u32::MAX), &format!(
            "Sample from the k most likely tokens; 0 and -1 mean all. The default is {}.", s.top_k.unwrap_or(0))),
        "min_p": number(0.0, 1.0, default(s.min_p, 0.0), "Exclude tokens whose probability is below this fraction \
                                                          of the most likely token's."),
        "repetition_penalty": number(0.01, 100.0, default(s.repetition_penalty, 1.0),
            "For tokens in prompt and answer, positive logits are divided by this and negative ones multiplied."),
        "frequency_penalty": number(-2.0, 2.0, 0.0, "Subtracted from a token's logit for each time it was generated."),
        "presence_penalty": number(-2.0, 2.0, 0.0, "Subtracted from the logits of tokens that were generated at \
                                                    least once."),
        "logit_bias": or_null(json!({
            "type": "object", "description": "Added to the logits of these tokens.",
            "propertyNames": {"pattern": NATURAL},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        })),
        "seed": integer(i64::MIN, i64::MAX, "The same seed gives the same answer. By default, and with -1, the seed \
                                              is random."),
        "n": integer(1, i64::from(b.max_choices), "Number of answers to each prompt."),
        "stop": {
            "description": "Strings that end the answer. They are not part of it.",
            "anyOf": [
                {"title": "null", "type": "null"},
                {"title": "a string", "type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {"title": "a list of strings", "type": "array", "maxItems": b.max_stop,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}},
            ],
        },
        "stop_token_ids": neutral(json!({"type": "array", "maxItems": 0}),
            "an answer ends at the model's own end token or at a `stop` string"),
        "min_tokens": neutral(json!({"type": "integer", "enum": [0, null]}),
            "an answer may end at any length; `ignore_eos` continues up to `max_tokens`"),
        "skip_special_tokens": neutral(json!({"type": "boolean", "enum": [true, null]}),
            "control tokens are not part of the text"),
        "return_token_ids": boolean(false, "Return the tokens of the prompt and of the answer (vLLM)."),
        "ignore_eos": boolean(false, "Continue after the model's end token (vLLM)."),
        "stream": boolean(false, "Send the answer as server-sent events while it is generated."),
        "stream_options": or_null(json!({
            "type": "object", "additionalProperties": false,
            "properties": {
                "include_usage": boolean(false, "Send the usage in a final chunk without choices."),
                "include_obfuscation": ignored(json!({"type": "boolean"})),
                "continuous_usage_stats": neutral(json!({"type": "boolean", "enum": [false, null]}),
                    "the usage is sent only in the final chunk: use `include_usage`"),
            },
        })),
        "cache_salt": or_null(json!({"type": "string", "maxLength": 256, "description":
            "Prefixes are shared only with requests of the same salt, and never with keys of another name."})),
        "kvist": or_null(json!({
            "type": "object", "additionalProperties": false,
            "properties": {
                "explain": boolean(false, "Report under `kvist` how much of each prompt was cached, and why not more."),
                "timeout_ms": integer(1, 1 << 40, "End the request after this time. The server's own limit still \
                                                   applies."),
                "target_ms": integer(1, 1 << 40, "When the answer should be complete, in milliseconds from the request. Ranks it under the \
                    scheduling policies `edf` and `laxity`, and does not end it; for admin keys only."),
                "priority": integer(i64::from(i32::MIN), i64::from(i32::MAX),
                    "A larger number is more urgent. Used by the scheduling policy `priority`; for admin keys only."),
                "cache": or_null(json!({
                    "type": "object", "additionalProperties": false, "description":
                        "Keep the prompt in the cache after this request, while room is left for others; for admin keys only.",
                    "properties": {
                        "pin": boolean(false, "Give it up last, and only for a request that could not be served otherwise."),
                        "ttl_s": integer(1, 2_592_000, "For so many seconds; by default an hour."),
                        "priority": integer(0, 255, "A larger number is given up later; by default 0."),
                    },
                })),
                "pace": integer(1, 1000, "Tokens per second, so that a person can watch. While every request has a `pace`, the \
                    engine waits between its steps to match the fastest of them. As soon as one request has none, \
                    nothing is slowed down."),
            },
        })),
        "user": ignored(json!({"type": "string"})),
    });
    let mut fields = match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    fields.extend(router_fields());
    fields
}

/// Fields that routers add to requests when a client did not set them. Their defaults are what kvist does.
fn router_fields() -> Map<String, Value> {
    let only = |value: bool, why: &str| neutral(json!({"type": "boolean", "enum": [value, null]}), why);
    let nothing = |why: &str| neutral(json!({"type": "null"}), why);
    let fields = json!({
        "no_stop_trim": only(false, "a stop string is never part of the answer"),
        "spaces_between_special_tokens": only(true, "control tokens are not part of the text"),
        "separate_reasoning": only(true, "reasoning is always apart from the content"),
        "stream_reasoning": only(true, "reasoning is streamed as it is generated"),
        "include_reasoning": only(true, "reasoning is part of the answer"),
        "continue_final_message": only(false, "an answer is always a new message; `/v1/completions` continues a text"),
        "return_hidden_states": only(false, "kvist does not return hidden states"),
        "use_beam_search": only(false, "kvist has no beam search"),
        "add_special_tokens": only(true, "a text begins with the tokens that the model expects; send tokens for others"),
        "session_params": nothing("conversations with a state are at `/v1/sessions`"),
        "lora_path": nothing("kvist has no adapters"),
        "rid": nothing("a request's id is chosen by the server"),
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
        |items: Value, max: u32| json!({"type": "array", "minItems": 1, "maxItems": max, "items": items});
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
            "description": "The prompt: a string, a list of strings, a list of tokens, or a list of lists of tokens.",
            "anyOf": [
                titled("a string", some_text()),
                titled("a list of strings", list(some_text(), b.max_choices)),
                titled("a list of tokens", tokens()),
                titled("a list of lists of tokens", list(tokens(), b.max_choices)),
            ],
        },
        "max_tokens": or_null(json!({"type": "integer", "minimum": 0, "maximum": u32::MAX, "default": 16,
            "description": "Maximum number of tokens to generate. An answer ends when the context is full. \
                            0 requires `echo`."})),
        "echo": boolean(false, "Return the prompt before the answer; with `logprobs`, also the log-probabilities of \
                                its tokens."),
        "best_of": or_null(json!({"type": "integer", "enum": [1, null],
            "description": "kvist does not select the best of several answers: use `n`."})),
        "logprobs": integer(0, i64::from(MAX_TOP),
            "Return the log-probabilities of the tokens, and of this many most likely tokens."),
    });
    fields.extend(own.as_object().cloned().unwrap_or_default());
    let refused = json!({
        "suffix": "kvist only continues a text; it cannot fill gaps",
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
        "Maximum number of tokens to generate. An answer ends when the context is full: prompt and answer together \
         have at most {} tokens.",
        b.max_tokens)})
}

pub(crate) fn chat(b: &Bounds) -> Value {
    let mut fields = common(b);
    let max = number_of_tokens(b);
    let own = json!({
        "messages": {"type": "array", "minItems": 1, "items": message(b.template)},
        "max_tokens": or_null(max.clone()),
        "max_completion_tokens": or_null(max),
        "logprobs": boolean(false, "Return the log-probabilities of the tokens."),
        "top_logprobs": integer(0, 20, "Also return this many most likely tokens; requires `logprobs`."),
        "response_format": response_format(),
        "tools": tools(b),
        "tool_choice": tool_choice(b),
        "parallel_tool_calls": boolean(true, "If false, an answer has at most one call."),
        "chat_template_kwargs": or_null(json!({"type": "object", "description":
            "More variables for the model's chat template, such as `enable_thinking` (vLLM)."})),
        "metadata": ignored(json!({"type": "object"})),
        "modalities": or_null(json!({"type": "array", "items": {"type": "string", "enum": ["text"]}})),
        "prompt_cache_key": ignored(json!({"type": "string"})),
        "safety_identifier": ignored(json!({"type": "string"})),
        "service_tier": or_null(json!({"type": "string", "enum": ["auto", "default", null],
            "description": "There is only one tier."})),
        "store": or_null(json!({"type": "boolean", "enum": [false, null],
            "description": "kvist does not store answers."})),
    });
    fields.extend(own.as_object().cloned().unwrap_or_default());
    let mut refused = json!({
        "audio": "kvist answers with text only",
        "function_call": "it is OpenAI's deprecated name: use `tool_choice`",
        "functions": "it is OpenAI's deprecated name: use `tools`",
        "prediction": "kvist does not support predicted outputs",
        "reasoning_effort": "this model's chat template has no reasoning effort",
        "verbosity": "ask for it in a message",
        "web_search_options": "kvist has no web search",
    });
    if b.effort {
        refused.as_object_mut().map(|refused| refused.shift_remove("reasoning_effort"));
        let about = "How long the model should reason: the variable `reasoning_effort` of its chat template.";
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
            json!({"title": "a string", "type": "string"}),
            json!({"title": "a list of parts", "type": "array", "minItems": 1, "items": {
                "type": "object", "additionalProperties": false, "required": ["type", "text"],
                "properties": {
                    "type": {"type": "string", "enum": ["text"], "description": "Images and audio are not supported."},
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
                "name": text("Passed on to the model's chat template."),
            },
        });
        for (name, field) in own.as_object().into_iter().flatten() {
            schema["properties"][name] = field.clone();
        }
        schema
    };
    let mut nullable = text_or_parts();
    nullable.push(json!({"title": "null", "type": "null"}));
    let mut assistant = role(
        "an assistant message",
        json!(["assistant"]),
        json!({
            "content": {"anyOf": nullable},
            "refusal": or_null(json!({"type": "string", "description": "Passed on to the model's chat template."})),
            "reasoning_content": text("Passed on to the model's chat template."),
            "reasoning": text("vLLM's newer name. Passed on to the model's chat template."),
            "tool_calls": or_null(json!({"type": "array", "items": tool_call()})),
            "annotations": ignored(json!({"type": "array"})),
        }),
        &["role"],
    );
    assistant[schema::REFUSED] = json!({
        "audio": "kvist answers with text only",
        "function_call": "it is OpenAI's deprecated name: use `tool_calls`",
    });
    let user = role(
        "a system, developer or user message",
        json!(["system", "developer", "user"]),
        json!({}),
        &["role", "content"],
    );
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
        role("a tool message", json!(["tool"]), json!({"tool_call_id": {"type": "string"}}),
            &["role", "content", "tool_call_id"]),
    ]})
}

/// The schema of a call of a tool, in an assistant message.
fn tool_call() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["function"],
        "properties": {
            "id": {"type": "string"},
            "type": {"type": "string", "enum": ["function"]},
            "index": {"type": "integer"},
            "function": {
                "type": "object", "additionalProperties": false, "required": ["name", "arguments"],
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {"type": "string", "description": "A JSON object, as a string."},
                },
            },
        },
    })
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
                    "description": text("Describes the function to the model."),
                    "parameters": or_null(json!({"type": "object",
                        "description": "The arguments: the JSON schema of an object."})),
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
        "description": "Whether the model calls tools. The default is `auto` if there are tools.",
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
                "A JSON schema. A part that cannot be enforced is refused, with an error that names its path."},
            "strict": boolean(false, "Parts of the schema that cannot be enforced are refused in either case."),
        },
    });
    json!({
        "description": "The required format of the answer.",
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
    let about = "Add the tokens that the model expects at the start of a text.";
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
