//! Reasoning between `<think>` and `</think>` is separated from answers: documents, streams, sessions, calls.
use crate::marked::marked_model;
use crate::server::*;
use kvist_model::Model;
use kvist_model::thinking::{CLOSE, OPEN};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// Opens or closes the block in the prompt, as Qwen3's templates do, and forgets earlier reasoning.
const TEMPLATE: &str = r#"
{%- for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}
{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>
{%- elif prefilled is defined %}<think>
{%- endif %}
{%- endif %}"#;

fn thinker() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| marked_model([OPEN, CLOSE], TEMPLATE)).clone()
}

fn start() -> Server {
    let mut config = config();
    config.model.name = Some(MODEL.into());
    Server::start_with(thinker(), config)
}

fn encode(text: &str) -> Vec<u32> {
    thinker().tokenizer().unwrap().encode(text, false).unwrap()
}

/// A question whose answer begins with the token of `mark`, if the bias of it is large.
fn ask(kwargs: Value, bias: Value, more: Value) -> Value {
    let body = json!({"messages": [{"role": "user", "content": "What is a vector?"}], "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "chat_template_kwargs": kwargs, "logit_bias": bias});
    with(body, &more)
}

/// Content and reasoning of a document; they are the same in a stream.
fn answer(server: &Server, body: &Value) -> (String, String) {
    let answer = server.post("/v1/chat/completions", body).good();
    let message = &answer["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_string();
    let found = (text("content"), text("reasoning_content"));
    let (mut content, mut reasoning) = (String::new(), String::new());
    for event in server.post("/v1/chat/completions", &with(body.clone(), &json!({"stream": true}))).events() {
        let delta = &event["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
    }
    assert_eq!(found, (content, reasoning));
    found
}

#[test]
fn what_the_prompt_opens_is_reasoning() {
    let server = start();
    let [open, close] = [OPEN, CLOSE].map(|mark| encode(mark)[0].to_string());
    let neither = json!({&open: -100, &close: -100});
    // Without marks: reasoning if the prompt has opened the block, content otherwise.
    let (content, reasoning) = answer(&server, &ask(json!({"prefilled": true}), neither.clone(), json!({})));
    assert!(content.is_empty() && !reasoning.is_empty(), "{content:?}, {reasoning:?}");
    for kwargs in [json!({}), json!({"enable_thinking": false})] {
        let (content, reasoning) = answer(&server, &ask(kwargs, neither.clone(), json!({})));
        assert!(!content.is_empty() && reasoning.is_empty(), "{content:?}, {reasoning:?}");
    }
    // The model opens the block, and never closes it.
    let (content, reasoning) = answer(&server, &ask(json!({}), json!({&open: 100, &close: -100}), json!({})));
    assert_eq!((content.as_str(), reasoning.as_str()), ("", &*OPEN.repeat(11)));
    // It closes the block at once: nothing was thought.
    let (content, reasoning) =
        answer(&server, &ask(json!({"prefilled": true}), json!({&close: 100}), json!({})));
    assert_eq!((content.as_str(), reasoning.as_str()), (&*CLOSE.repeat(11), ""));
    // A grammar allows no reasoning.
    let form = json!({"response_format": {"type": "json_object"}, "max_tokens": 40});
    let (content, reasoning) = answer(&server, &ask(json!({"prefilled": true}), json!({}), form));
    assert!(content.starts_with('{') && reasoning.is_empty(), "{content:?}, {reasoning:?}");
}

fn path(id: &str, verb: &str) -> String {
    format!("/v1/sessions/{id}{verb}")
}

/// Writes a script token by token, one request each. Returns the new parts of content and reasoning, and the last choice.
fn write(server: &Server, id: &str, script: &str, end: bool) -> (String, String) {
    let (mut content, mut reasoning) = (String::new(), String::new());
    let mut tokens = encode(script);
    tokens.extend(end.then(|| thinker().end_tokens()[0]));
    for token in tokens {
        let body = json!({"max_tokens": 1, "temperature": 0, "logit_bias": {token.to_string(): 100}});
        let message = server.post(&path(id, "/generate"), &body).good()["choices"][0]["message"].clone();
        content += message["content"].as_str().unwrap_or_default();
        reasoning += message["reasoning_content"].as_str().unwrap_or_default();
    }
    (content, reasoning)
}

#[test]
fn a_session_keeps_reasoning_apart() {
    let server = start();
    for kwargs in [json!({}), json!({"prefilled": true})] {
        let question =
            json!({"messages": [{"role": "user", "content": "Why?"}], "chat_template_kwargs": kwargs});
        let id = server.post("/v1/sessions", &question).good()["id"].as_str().unwrap().to_string();
        let opened = if kwargs == json!({}) { OPEN } else { "" };
        let parts = write(&server, &id, &format!("{opened}Easy.{CLOSE}Because."), true);
        assert_eq!(parts, ("Because.".to_string(), "Easy.".to_string()));
        let session = server.get(&path(&id, "")).good();
        let whole = json!({"role": "assistant", "content": "Because.", "reasoning_content": "Easy."});
        assert_eq!(session["messages"][1]["message"], whole, "{session}");
        // The template removes it once the user continues.
        server.post(&path(&id, "/append"), &json!({"messages": [{"role": "user", "content": "So?"}]})).good();
        let text = server.get(&path(&id, "")).good()["text"].as_str().unwrap().to_string();
        assert!(text.contains("Because.") && !text.contains("Easy"), "{text}");
    }
    // Nothing was thought: the block is no content either.
    let question = json!({"messages": [{"role": "user", "content": "Why?"}]});
    let id = server.post("/v1/sessions", &question).good()["id"].as_str().unwrap().to_string();
    let parts = write(&server, &id, &format!("{OPEN}{CLOSE}Because."), true);
    assert_eq!(parts, ("Because.".to_string(), String::new()));
    let session = server.get(&path(&id, "")).good();
    assert_eq!(session["messages"][1]["message"], json!({"role": "assistant", "content": "Because."}));
    server.becomes_idle();
}
