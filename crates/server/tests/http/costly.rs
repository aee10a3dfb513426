//! Small or valid requests that are designed to cost a lot before they reach the model.
use crate::server::*;
use crate::words::words_with;
use serde_json::{Value, json};

fn is_refused(server: &Server, path: &str, body: &Value, param: &str, code: &str, says: &str) {
    let error = server.post(path, body).error();
    assert_eq!((error.0, error.1.as_str(), error.2.as_str()), (400, param, code), "{path}: {}", error.3);
    assert!(error.3.contains(says), "{path}: {}", error.3);
}

/// Regression: white space was not counted, so 4 MB of it were tokenized: 9 s and 474 MB each, against a limit
/// of 44 MiB.
#[test]
fn white_space_is_refused_before_it_is_tokenized() {
    let server = Server::start(config());
    let blanks = " ".repeat(3 << 20);
    let said = json!([{"role": "user", "content": blanks}]);
    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": blanks}), "prompt"),
        ("/v1/completions", json!({"prompt": ["a", blanks]}), "prompt"),
        ("/v1/chat/completions", json!({"messages": said}), "messages"),
        ("/v1/sessions", json!({"text": blanks}), "text"),
        ("/v1/sessions", json!({"messages": said}), "messages"),
    ] {
        is_refused(&server, path, &body, param, "context_length_exceeded", "besides white space");
    }
    // Any length is accepted if the text can be split.
    is_refused(
        &server,
        "/tokenize",
        &json!({"prompt": blanks}),
        "prompt",
        "invalid_value",
        "in which no word is followed",
    );
    is_refused(
        &server,
        "/tokenize",
        &json!({"prompt": "a".repeat(1 << 20)}),
        "prompt",
        "invalid_value",
        "in which no word is followed",
    );
    let words = server.post("/tokenize", &json!({"prompt": "word after word\n".repeat(100_000)})).good();
    assert_eq!(words["count"], words["tokens"].as_array().unwrap().len());
}

/// Regression: these responses were built at once, and no limit counted them until they were read.
#[test]
fn long_texts_become_tokens_and_texts_again() {
    let server = Server::start(config());
    let text = "a \"word\" after\nanother é 日本 ".repeat(2_000);
    let expected = model().tokenizer().unwrap().encode(&text, false).unwrap();
    let made = server.post("/tokenize", &json!({"prompt": text, "add_special_tokens": false})).good();
    assert!(expected.len() > 10_000, "{}", expected.len());
    assert_eq!((&made["count"], &made["tokens"]), (&json!(expected.len()), &json!(expected)));
    assert!(made["max_model_len"].is_u64());
    let back = server.post("/detokenize", &json!({"tokens": expected})).good();
    assert_eq!(back, json!({"prompt": text}));
}

/// Regression: a document of many values needs a hundred times the bytes of its body, but only the body's bytes
/// were counted.
#[test]
fn documents_of_too_many_values_are_refused_before_they_are_made() {
    let server = Server::start(config());
    for (path, body) in [("/tokenize", "[],".repeat(1 << 20)), ("/detokenize", "5,".repeat(1 << 20))] {
        let body = format!("{{\"tokens\": [{body}5]}}");
        let error =
            server.send("POST", path, &[("content-type", "application/json")], body.as_bytes()).error();
        assert_eq!((error.0, error.2.as_str()), (413, "body_too_large"), "{}", error.3);
    }
    let text = server.post("/detokenize", &json!({"tokens": vec![5; 20_000]})).good();
    assert!(text["prompt"].as_str().unwrap().len() >= 20_000);
}

const TOOLS: &str = "{{ tools | tojson(indent=4) }}{% for m in messages %}{{ m.content }}{% endfor %}";

/// Regression: 62 KB of tools with a deeply nested default, through `tojson(indent=4)`, took 12 s and 0.8 GB;
/// eight such requests at once crashed the server.
#[test]
fn nested_tools_are_refused() {
    let mut config = config();
    config.model.tools = Some("hermes".into());
    let server = Server::start_with(words_with(Some(TOOLS)), config);
    let body = |depth: usize| {
        let default = (0..depth).fold(Value::from(vec![1; 9_000]), |inner, _| json!([inner]));
        let parameters =
            json!({"type": "object", "properties": {"a": {"type": "string", "default": default}}});
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        json!({"messages": [{"role": "user", "content": "w1"}], "max_tokens": 1, "tools": [tool]})
    };
    is_refused(
        &server,
        "/v1/chat/completions",
        &body(90),
        "tools[0]",
        "invalid_value",
        "nested more than 64 levels deep",
    );
    is_refused(&server, "/v1/chat/completions", &body(50), "messages", "context_length_exceeded", "");
    let names = json!({"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": {"a": (0..80).fold(json!(1), |inner, _| json!([inner]))}});
    is_refused(&server, "/v1/chat/completions", &names, "chat_template_kwargs.a", "invalid_value", "nested");
    is_refused(&server, "/v1/sessions", &names, "chat_template_kwargs.a", "invalid_value", "nested");
}

/// Regression: a template that doubles a string a few dozen times aborted the process with its allocation.
#[test]
fn templates_that_grow_fail_their_own_request() {
    let grows = "{% set ns = namespace(x='w1 ') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}";
    let template = format!("{{% if messages[0].content == 'w5' %}}{grows}{{% else %}}w1 w2{{% endif %}}");
    let server = Server::start_with(words_with(Some(&template)), config());
    let said = |what: &str| json!({"messages": [{"role": "user", "content": what}]});
    for path in ["/v1/chat/completions", "/v1/sessions"] {
        is_refused(&server, path, &said("w5"), "messages", "invalid_value", "the template uses more than");
        server.post(path, &said("w1")).good();
    }
}
