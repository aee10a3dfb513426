//! Answers in Harmony channels: reasoning, content and calls are separated in documents, streams and sessions.
//!
//! The embedded model knows no channels. Grammars make it write them, or one request per token with a large
//! bias that forces the token.
use crate::marked::marked_model;
use crate::server::*;
use kvist_model::Model;
use kvist_model::harmony::MARKS;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// Renders messages like gpt-oss's template.
const TEMPLATE: &str = r#"<|start|>system<|message|>
{%- if reasoning_effort is defined and reasoning_effort == "high" %}Think about it for a long time before you answer. {% endif %}<|end|>
{%- if tools %}<|start|>developer<|message|>{% for tool in tools %}{{ "// " + tool.function.description + "\ntype " + tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- set called = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == "assistant" %}
{%- if "<|channel|>final<|message|>" in m.content %}{{ raise_exception("channels in a content") }}{% endif %}
{%- if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception("both content and thinking") }}{% endif %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set call = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- set called.name = call.name %}
{%- elif loop.last and not add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- elif m.role == "tool" %}
{%- if called.name is none %}{{ raise_exception("a result without a call") }}{% endif %}<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"#;

/// The embedded model with the format's marks, and with a template that uses them.
fn harmony() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| marked_model(MARKS, TEMPLATE)).clone()
}

fn start() -> Server {
    let mut config = config();
    config.model.name = Some(MODEL.into());
    Server::start_with(harmony(), config)
}

fn token(mark: &str) -> u32 {
    harmony().tokenizer().unwrap().token(mark).unwrap()
}

const QUESTION: &str = "What is a vector?";

/// The bias makes the reasoning end after a while.
fn ask(more: Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "seed": 5,
        "logit_bias": {token("<|end|>").to_string(): 18}}),
        &more,
    )
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "additionalProperties": false, "required": ["what"],
        "properties": {"what": {"enum": ["Vec", "Box"]}},
    }}}])
}

/// The joined texts of a stream, and its calls.
fn streamed(server: &Server, body: &Value) -> (Value, String) {
    let mut body = body.clone();
    body["stream"] = true.into();
    let (mut message, mut reason) =
        (json!({"content": "", "reasoning_content": "", "calls": []}), String::new());
    for event in server.post("/v1/chat/completions", &body).events() {
        let choice = &event["choices"][0];
        for name in ["content", "reasoning_content"] {
            let text = choice["delta"][name].as_str().unwrap_or_default();
            message[name] = format!("{}{text}", message[name].as_str().unwrap()).into();
        }
        let calls = choice["delta"]["tool_calls"].as_array().into_iter().flatten();
        message["calls"].as_array_mut().unwrap().extend(calls.map(|call| call["function"].clone()));
        reason += choice["finish_reason"].as_str().unwrap_or_default();
    }
    (message, reason)
}

#[test]
fn the_format_is_known_by_its_marks() {
    let model = harmony();
    assert_eq!(model.harmony().map(<[u32]>::len), Some(MARKS.len()));
    let ends = model.end_tokens();
    assert!(ends.contains(&token("<|return|>")) && ends.contains(&token("<|call|>")));
    assert!(!ends.contains(&token("<|end|>")));
    assert!(crate::server::model().harmony().is_none());
}

#[test]
fn a_form_is_for_the_final_message() {
    let server = start();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["kind"],
        "properties": {"kind": {"enum": ["list", "tree"]}}});
    let body = ask(
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}),
    );
    // Increase the biases to reason and to end the reasoning. This model rarely gets to an answer once it
    // reasons.
    let thinks = harmony().tokenizer().unwrap().encode("analysis", false).unwrap()[0];
    let (mut thoughtful, mut formed) = (0, 0);
    for round in 0..18 {
        let mut body = body.clone();
        body["seed"] = round.into();
        body["max_tokens"] = 120.into();
        body["logit_bias"] =
            json!({token("<|end|>").to_string(): 7 + round % 6 * 2, thinks.to_string(): round / 3});
        let answer = server.post("/v1/chat/completions", &body).good();
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        let content = message["content"].as_str().unwrap();
        let thought = message["reasoning_content"].as_str().unwrap_or_default();
        assert!(!thought.contains("<|") && !thought.contains("assistant"), "{answer}");
        thoughtful += usize::from(!thought.is_empty());
        if choice["finish_reason"] == "stop" {
            formed += 1;
            let value: Value = serde_json::from_str(content).unwrap();
            assert!(["list", "tree"].contains(&value["kind"].as_str().unwrap()), "{answer}");
        }
        let (told, reason) = streamed(&server, &body);
        assert_eq!((&told["content"], &told["reasoning_content"]), (&json!(content), &json!(thought)));
        assert_eq!(reason, choice["finish_reason"].as_str().unwrap());
    }
    assert!(thoughtful > 0 && formed > 0, "{thoughtful} thoughtful, {formed} formed");
    // Each of several answers is parsed separately.
    let mut body = body;
    body["n"] = 3.into();
    for choice in server.post("/v1/chat/completions", &body).good()["choices"].as_array().unwrap() {
        assert!(choice["message"]["content"].is_string(), "{choice}");
        assert!(!choice["message"].to_string().contains("<|"), "{choice}");
    }
}

#[test]
fn a_demanded_call_is_made_and_answered() {
    let server = start();
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "look_up"}})] {
        let body = ask(json!({"tools": tools(), "tool_choice": choice}));
        let answer = server.post("/v1/chat/completions", &body).good();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let message = &choice["message"];
        let call = &message["tool_calls"][0];
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("look_up")));
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Vec", "Box"].contains(&arguments["what"].as_str().unwrap()), "{answer}");
        let (told, reason) = streamed(&server, &body);
        assert_eq!((&told["calls"], reason.as_str()), (&json!([call["function"]]), "tool_calls"));
        let said = message["content"].as_str().unwrap_or_default();
        assert_eq!(told["content"], said);
        // Send the message back unchanged, with the call's result.
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "A list."});
        let more = json!({"messages": [{"role": "user", "content": QUESTION}, message, result], "tools": tools(), "max_tokens": 2});
        let next = server.post("/v1/chat/completions", &ask(more)).good();
        let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(tokens(&next) > tokens(&answer) + 10, "{next}");
    }
}

/// Text of such a model without channels is content.
#[test]
fn text_without_channels_is_content() {
    let server = start();
    let body = json!({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0, "ignore_eos": true,
        "logit_bias": MARKS.iter().map(|mark| (token(mark).to_string(), json!(-100))).collect::<serde_json::Map<_, _>>()});
    let answer = server.post("/v1/chat/completions", &body).good();
    let message = &answer["choices"][0]["message"];
    assert!(
        !message["content"].as_str().unwrap().is_empty() && message.get("reasoning_content").is_none(),
        "{answer}"
    );
    assert_eq!(streamed(&server, &body).0["content"], message["content"]);
}

#[test]
fn the_effort_reaches_the_template() {
    let server = start();
    let tokens = |more: Value| {
        let mut body = ask(more);
        body["max_tokens"] = 1.into();
        server.post("/v1/chat/completions", &body).good()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let usual = tokens(json!({}));
    assert_eq!(tokens(json!({"reasoning_effort": "low"})), usual);
    assert!(tokens(json!({"reasoning_effort": "high"})) > usual + 5);
    // Template arguments take precedence.
    let both = json!({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}});
    assert_eq!(tokens(both), usual);
    let error = server.post("/v1/chat/completions", &ask(json!({"reasoning_effort": "much"}))).error();
    assert_eq!((error.0, error.1.as_str()), (400, "reasoning_effort"));
}

fn path(id: &str, verb: &str) -> String {
    format!("/v1/sessions/{id}{verb}")
}

/// Writes a script token by token, one request each. Returns the last response's choice.
fn write(server: &Server, id: &str, script: &str, more: &Value) -> Value {
    let mut last = Value::Null;
    for token in harmony().tokenizer().unwrap().encode(script, false).unwrap() {
        let mut body = json!({"max_tokens": 1, "temperature": 0, "logit_bias": {token.to_string(): 100}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        last = server.post(&path(id, "/generate"), &body).good()["choices"][0].clone();
    }
    last
}

#[test]
fn a_session_goes_on_inside_a_channel() {
    let server = start();
    let question = json!({"messages": [{"role": "user", "content": QUESTION}]});
    let id = server.post("/v1/sessions", &question).good()["id"].as_str().unwrap().to_string();
    let last =
        |of: &str| server.get(&path(of, "")).good()["messages"].as_array().unwrap().last().unwrap().clone();
    let cut = write(&server, &id, "<|channel|>analysis<|message|>Easy", &json!({}));
    assert_eq!(cut["finish_reason"], "length");
    // A response has only the new part of a message; the history has all of it.
    assert!("Easy".ends_with(cut["message"]["reasoning_content"].as_str().unwrap()), "{cut}");
    let open = last(&id);
    assert_eq!((&open["open"], &open["message"]["reasoning_content"]), (&json!(true), &json!("Easy")));
    assert_eq!(open["message"]["content"], "");
    let end = write(
        &server,
        &id,
        ".<|end|><|start|>assistant<|channel|>final<|message|>A list.<|return|>",
        &json!({}),
    );
    assert_eq!(end["finish_reason"], "stop", "{end}");
    let whole = json!({"role": "assistant", "content": "A list.", "reasoning_content": "Easy."});
    assert_eq!((&last(&id)["open"], &last(&id)["message"]), (&json!(false), &whole));
    // The template removes the reasoning once the user continues.
    server.post(&path(&id, "/append"), &json!({"messages": [{"role": "user", "content": "Why?"}]})).good();
    let text = server.get(&path(&id, "")).good()["text"].as_str().unwrap().to_string();
    assert!(text.contains("finalA list.") && !text.contains("Easy"), "{text}");
    // `response_format` cannot start inside an answer.
    write(&server, &id, "<|channel|>final<|message|>So", &json!({}));
    let body = json!({"response_format": {"type": "json_object"}});
    assert_eq!(server.post(&path(&id, "/generate"), &body).error().1, "response_format");
    server.becomes_idle();
}

#[test]
fn a_session_calls_a_function_and_goes_on_with_its_result() {
    let server = start();
    let question = json!({"messages": [{"role": "user", "content": QUESTION}], "tools": tools()});
    let id = server.post("/v1/sessions", &question).good()["id"].as_str().unwrap().to_string();
    let script = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.look_up \
                  <|constrain|>json<|message|>{\"what\": \"Vec\"}<|call|>";
    let end = write(&server, &id, script, &json!({}));
    assert_eq!(end["finish_reason"], "tool_calls", "{end}");
    let history = server.get(&path(&id, "")).good();
    let message = &history["messages"][1]["message"];
    assert_eq!(message["reasoning_content"], "Look.");
    let call = &message["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "look_up", "arguments": "{\"what\": \"Vec\"}"}));
    let result = json!({"messages": [{"role": "tool", "tool_call_id": call["id"], "content": "A list."}]});
    server.post(&path(&id, "/append"), &result).good();
    let text = server.get(&path(&id, "")).good()["text"].as_str().unwrap().to_string();
    assert!(text.contains("analysisLook.assistant to=functions.look_upcommentary json"), "{text}");
    assert!(text.ends_with("functions.look_up to=assistantcommentary\"A list.\""), "{text}");
    // If there are no tools, the text of a call is content.
    let question = json!({"messages": [{"role": "user", "content": "a"}]});
    let id = server.post("/v1/sessions", &question).good()["id"].as_str().unwrap().to_string();
    let script = " to=functions.f<|channel|>commentary<|message|>{}<|call|>";
    assert_eq!(write(&server, &id, script, &json!({}))["finish_reason"], "stop");
    let history = server.get(&path(&id, "")).good();
    assert_eq!(history["messages"][1]["message"], json!({"role": "assistant", "content": "{}"}));
    server.becomes_idle();
}
