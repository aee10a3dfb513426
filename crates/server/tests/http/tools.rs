//! Tools in sessions: calls are parsed from what a session generates, and become part of its history.
use crate::server::*;
use kvist_model::{Model, ModelFile};
use kvist_server::ServerConfig;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, OnceLock};

const TEMPLATE: &str = r#"{%- if tools %}[system]Call one of these: {% for tool in tools %}{{ tool | tojson }} {% endfor %}
A call is <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{%- for m in messages %}[{{ m.role }}]{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{%- if add_generation_prompt %}[assistant]{% endif %}"#;

/// Does not know tools, and takes no system message.
const PLAIN_TEMPLATE: &str = r#"{%- for m in messages %}
{%- if m.role not in ["user", "assistant"] %}{{ raise_exception("no role " + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}
{% endfor %}{%- if add_generation_prompt %}[assistant]{% endif %}"#;

/// The embedded model with a chat template added to the metadata of its file.
fn with_template(template: &'static str) -> Arc<Model> {
    static MODELS: [OnceLock<Arc<Model>>; 2] = [const { OnceLock::new() }; 2];
    let model = &MODELS[usize::from(template == PLAIN_TEMPLATE)];
    model.get_or_init(|| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/embedded/tiny-rust-7m.gguf");
        let mut bytes = std::fs::read(file).unwrap();
        let n_keys = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) + 1;
        bytes[16..24].copy_from_slice(&n_keys.to_le_bytes());
        let key = "tokenizer.chat_template";
        let mut template = template.to_string();
        // Keep the alignment of the tensors.
        while !(8 + key.len() + 4 + 8 + template.len()).is_multiple_of(64) {
            template.insert_str(0, "{#- -#}");
        }
        let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let pair = [text(key), 8_u32.to_le_bytes().to_vec(), text(&template)].concat();
        bytes.splice(24..24, pair);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("template.gguf");
        std::fs::write(&path, bytes).unwrap();
        load_f32(&ModelFile::Path(path))
    });
    model.get().unwrap().clone()
}

fn start(format: Option<&str>) -> Server {
    start_with(TEMPLATE, format)
}

fn start_with(template: &'static str, format: Option<&str>) -> Server {
    let mut config: ServerConfig = config();
    config.model.name = Some(MODEL.into());
    config.model.tools = format.map(String::from);
    Server::start_with(with_template(template), config)
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "additionalProperties": false, "required": ["what", "times"],
        "properties": {"what": {"enum": ["Vec", "Box"]}, "times": {"enum": [1, 2, 3]}},
    }}}])
}

fn demand(more: Value) -> Value {
    with(
        json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false,
        "temperature": 0, "max_tokens": 120}),
        &more,
    )
}

const QUESTION: &str = "What is a vector?";

fn begin(server: &Server) -> String {
    let body = json!({"messages": [{"role": "user", "content": QUESTION}]});
    server.post("/v1/sessions", &body).good()["id"].as_str().unwrap().to_string()
}

fn path(id: &str, verb: &str) -> String {
    format!("/v1/sessions/{id}{verb}")
}

/// Regression: these were rejected with "its chat template has no tool call format".
#[test]
fn a_template_without_tools_is_helped_out() {
    let server = start_with(PLAIN_TEMPLATE, None);
    let ask = |messages: Value, more: Value| {
        let mut body = demand(more);
        body["messages"] = messages;
        server.post("/v1/chat/completions", &body)
    };
    let question = json!({"role": "user", "content": QUESTION});
    let answer = ask(json!([question]), json!({})).good();
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "look_up", "{answer}");
    // The template describes the tools, and results of its calls are accepted.
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let without = ask(json!([question]), json!({"tools": null, "tool_choice": null})).good();
    assert!(tokens(&answer) > tokens(&without) + 50, "{answer} {without}");
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "A list that grows."});
    let messages = json!([question, answer["choices"][0]["message"], result]);
    let next = ask(messages, json!({"tool_choice": "auto"})).good();
    assert!(tokens(&next) > tokens(&answer) + 20, "{next}");
    // The same in a session.
    let id = begin(&server);
    let answer = server.post(&path(&id, "/generate"), &demand(json!({}))).good();
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "look_up", "{answer}");
    // What the template rejects for another reason is still rejected.
    let odd = json!([{"role": "system", "content": "S"}, question]);
    assert_eq!(ask(odd, json!({})).error().0, 400);
}

/// Regression: these were rejected with "sessions do not read calls back".
#[test]
fn a_session_calls_tools_and_goes_on_with_their_answers() {
    let server = start(None);
    let id = begin(&server);
    let answer = server.post(&path(&id, "/generate"), &demand(json!({}))).good();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let message = &choice["message"];
    assert_eq!(message["content"], Value::Null);
    let calls = message["tool_calls"].clone();
    assert_eq!(calls.as_array().unwrap().len(), 1);
    assert_eq!(calls[0]["function"]["name"], "look_up");
    let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["Vec", "Box"].contains(&arguments["what"].as_str().unwrap()), "{arguments}");

    // The same prompt and call as a chat completion.
    let chat = demand(json!({"messages": [{"role": "user", "content": QUESTION}]}));
    let chat = server.post("/v1/chat/completions", &chat).good();
    assert_eq!(chat["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens"]);
    assert_eq!(chat["choices"][0]["message"]["tool_calls"][0]["function"], calls[0]["function"]);

    // The message in the history carries the call; its tokens stay as sampled when the result is appended.
    let history = server.get(&path(&id, "")).good();
    assert_eq!(history["messages"][1]["message"]["tool_calls"], calls);
    assert_eq!(history["messages"][1]["message"]["role"], "assistant");
    let n_tokens = history["n_tokens"].as_u64().unwrap();
    let result =
        json!({"messages": [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "A list."}]});
    let grown = server.post(&path(&id, "/append"), &result).good();
    assert_eq!((&grown["kept_tokens"], &grown["n_messages"]), (&json!(n_tokens), &json!(3)));

    // A fork has the call and the tools too; it continues without sending them again.
    let fork = server.post(&path(&id, "/fork"), &json!({})).good()["sessions"][0]["id"].clone();
    let fork = fork.as_str().unwrap();
    let forked = server.get(&path(fork, "")).good();
    assert_eq!(forked["messages"][1]["message"]["tool_calls"], calls);
    let said = json!({"max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let more = server.post(&path(fork, "/generate"), &said).good();
    assert_eq!(more["choices"][0]["finish_reason"], "length");
    let there = server.get(&path(fork, "")).good();
    let text = there["text"].as_str().unwrap();
    assert_eq!(text.matches("Call one of these").count(), 1, "{text}");
    assert!(text.contains("[tool]A list."), "{text}");

    // After a rollback to the question, the session makes the same call again, streamed or not.
    for stream in [false, true] {
        server.post(&path(&id, "/rollback"), &json!({"to": {"message": 1}})).good();
        let body = demand(json!({"stream": stream}));
        let answer = server.post(&path(&id, "/generate"), &body);
        let function = match stream {
            false => answer.good()["choices"][0]["message"]["tool_calls"][0]["function"].clone(),
            true => {
                let events = answer.events();
                let deltas = events.iter().map(|event| &event["choices"][0]);
                let reason = deltas.clone().find_map(|choice| choice["finish_reason"].as_str());
                assert_eq!(reason, Some("tool_calls"));
                deltas.clone().find(|c| c["delta"]["tool_calls"].is_array()).unwrap()["delta"]["tool_calls"]
                    [0]["function"]
                    .clone()
            }
        };
        assert_eq!(function, calls[0]["function"], "streamed: {stream}");
        let history = server.get(&path(&id, "")).good();
        assert_eq!(history["n_tokens"], n_tokens);
        assert_eq!(history["messages"][1]["message"]["tool_calls"][0]["function"], function);
    }
    // A cut inside the call leaves an open answer without a call.
    server.post(&path(&id, "/rollback"), &json!({"to": n_tokens - 3})).good();
    let cut = server.get(&path(&id, "")).good();
    let last = &cut["messages"][1];
    assert!(last["open"] == true && last["message"].get("tool_calls").is_none(), "{last}");
    server.becomes_idle();
}

/// Tools given at creation are in the session's text from the beginning.
#[test]
fn a_session_is_made_with_tools() {
    let server = start(None);
    let body = json!({"messages": [{"role": "user", "content": QUESTION}], "tools": tools()});
    let id = server.post("/v1/sessions", &body).good()["id"].as_str().unwrap().to_string();
    let before = server.get(&path(&id, "")).good();
    assert!(before["text"].as_str().unwrap().contains("look_up"));
    let how = demand(json!({"tools": null}));
    let answer = server.post(&path(&id, "/generate"), &how).good();
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "look_up");
    let after = server.get(&path(&id, "")).good();
    let (before, after) = (before["tokens"].as_array().unwrap(), after["tokens"].as_array().unwrap());
    assert_eq!(&after[..before.len()], before.as_slice(), "nothing was rendered anew");
    // Answers in another format, or without tools, work too.
    for how in [
        json!({"tool_choice": "none", "max_tokens": 3, "ignore_eos": true}),
        json!({"response_format": {"type": "json_object"}, "max_tokens": 3}),
    ] {
        let result = json!({"messages": [{"role": "user", "content": "go on"}]});
        server.post(&path(&id, "/append"), &result).good();
        let answer = server.post(&path(&id, "/generate"), &how).good();
        assert!(answer["choices"][0]["message"].get("tool_calls").is_none(), "{answer}");
    }
}

#[test]
fn every_format_is_demanded_and_read_back() {
    for format in ["llama3", "hermes", "pythonic", "qwen3_coder"] {
        let server = start(Some(format));
        let mut seen = Vec::new();
        for stream in [false, true] {
            let id = begin(&server);
            let answer = server.post(&path(&id, "/generate"), &demand(json!({"stream": stream})));
            if stream {
                answer.events();
            } else {
                assert_eq!(
                    answer.good()["choices"][0]["finish_reason"],
                    "tool_calls",
                    "{format}: {}",
                    answer.text
                );
            }
            let history = server.get(&path(&id, "")).good();
            let call = &history["messages"][1]["message"]["tool_calls"][0]["function"];
            let arguments: Value = serde_json::from_str(
                call["arguments"].as_str().unwrap_or_else(|| panic!("{format}: {history}")),
            )
            .unwrap();
            assert!([1, 2, 3].contains(&arguments["times"].as_u64().unwrap()), "{format}: {call}");
            assert!(arguments["what"].is_string(), "{format}: {call}");
            seen.push(call.clone());
        }
        assert_eq!(seen[0], seen[1], "{format}");
    }
}

#[test]
fn tools_that_cannot_be_are_refused() {
    let server = start(None);
    let text =
        server.post("/v1/sessions", &json!({"text": "fn main"})).good()["id"].as_str().unwrap().to_string();
    let open = begin(&server);
    server
        .post(&path(&open, "/generate"), &json!({"max_tokens": 2, "temperature": 0, "ignore_eos": true}))
        .good();
    let chat = begin(&server);
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    for (path, body, param, said) in [
        (path(&text, "/generate"), demand(json!({})), "tools", "continues as plain text"),
        (path(&open, "/generate"), demand(json!({})), "tools", "cannot change inside an answer"),
        (path(&chat, "/generate"), demand(json!({"tools": null})), "tool_choice", "no tools"),
        (
            path(&chat, "/generate"),
            demand(json!({"tools": tool(json!({"name": "a b"}))})),
            "tools[0].function.name",
            "letters",
        ),
        (
            path(&chat, "/generate"),
            demand(json!({"response_format": {"type": "json_object"}})),
            "response_format",
            "one form",
        ),
        ("/v1/sessions".into(), json!({"text": "a", "tools": tools()}), "tools", "made of messages"),
        (
            "/v1/sessions".into(),
            json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": []}}),
            "chat_template_kwargs",
            "use `tools`",
        ),
        (
            "/v1/sessions".into(),
            json!({"messages": [{"role": "user", "content": "a"}],
                "tools": tool(json!({"name": "f", "description": "x".repeat(300 << 10)}))}),
            "tools",
            "262144 are allowed",
        ),
    ] {
        let error = server.post(&path, &body).error();
        assert_eq!((error.0, error.1.as_str()), (400, param), "{error:?}");
        assert!(error.3.contains(said), "{error:?}");
    }
    // A new answer may have other tools.
    let how = demand(json!({"add_generation_prompt": true}));
    server.post(&path(&open, "/generate"), &how).good();
}
