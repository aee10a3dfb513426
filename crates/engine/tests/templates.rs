//! Conversations with tools, rendered as transformers renders them; which template is taken, and what is refused.
use kvist_engine::Error;
use kvist_engine::template::{ChatTemplate, Conversation};
use kvist_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates")
}

fn tokenizer() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [], "pre_tokenizer": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": false, "vocab": {"<s>": 0, "</s>": 1}, "merges": []}
    });
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let config = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap().unwrap()
}

fn read(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixtures().join(name)).unwrap()).unwrap()
}

fn render(template: &ChatTemplate, request: &Value) -> Result<String, Error> {
    let list = |key: &str| request[key].as_array().cloned().unwrap_or_default();
    let (messages, tools) = (list("messages"), list("tools"));
    let kwargs = request["kwargs"].as_object().cloned().unwrap_or_default();
    let conversation = Conversation {
        messages: &messages,
        tools: &tools,
        add_generation_prompt: request["prompt"].as_bool().unwrap_or(true),
        kwargs: &kwargs,
    };
    template.render_conversation(&conversation, &tokenizer())
}

#[test]
fn conversations_are_rendered_as_transformers_renders_them() {
    let (conversations, expected) = (read("conversations.json"), read("expected.json"));
    let mut bad = Vec::new();
    let mut n = 0;
    for (name, texts) in expected.as_object().unwrap() {
        let source = std::fs::read_to_string(fixtures().join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(name, &source).unwrap();
        for (title, text) in texts.as_object().unwrap() {
            n += 1;
            let rendered = render(&template, &conversations[title]);
            match (text.as_str(), &rendered) {
                (Some(text), Ok(rendered)) if rendered == text => {}
                (None, Err(Error::Template { .. })) => {}
                _ => bad.push(format!("{name}, {title}: {rendered:?} instead of {text:?}")),
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    assert!(n >= 30, "{n} conversations");
}

fn text(messages: Value, tools: Value, template: &ChatTemplate) -> Result<String, Error> {
    render(template, &json!({"messages": messages, "tools": tools}))
}

/// A template that takes the length of a content, and one that asks whether there is one.
#[test]
fn nothing_said_beside_a_call() {
    let messages = json!([{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]);
    for (source, expected) in [
        ("{{ messages[0].content is none }}", "True"),
        ("{{ messages[0].content | length }}", "0"),
        ("{{ 'x' in messages[0].content }}", "False"),
        ("{{ messages[0].content + 'x' }}", "x"),
    ] {
        let template = ChatTemplate::new("t", source).unwrap();
        let rendered = text(messages.clone(), json!([]), &template).unwrap();
        assert_eq!(rendered.to_lowercase(), expected.to_lowercase(), "{source}");
    }
    // What the template says itself is told, not what the second try said.
    let template =
        ChatTemplate::new("t", "{{ raise_exception('no ' ~ (messages[0].content is none)) }}").unwrap();
    let error = text(messages, json!([]), &template).unwrap_err().to_string();
    assert!(error.to_lowercase().contains("no true"), "{error}");
}

#[test]
fn tools_have_a_template_of_their_own_where_there_is_one() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "chat"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]});
    type Row<'t> = (&'t str, &'t [(&'t str, &'t str)], &'t str);
    let files: [Row<'_>; 4] = [
        ("a list", &[("tokenizer_config.json", &config.to_string())], "tools 1"),
        (
            "two files",
            &[("chat_template.jinja", "chat"), ("additional_chat_templates/tool_use.jinja", "tools 1")],
            "tools 1",
        ),
        ("one file", &[("chat_template.jinja", "chat")], "chat"),
        (
            "one of the list",
            &[("tokenizer_config.json", r#"{"chat_template": [{"name": "default", "template": "chat"}]}"#)],
            "chat",
        ),
    ];
    let message = json!([{"role": "user", "content": "x"}]);
    for (name, files, with_tools) in files {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        for (file, text) in files {
            std::fs::write(folder.path().join(file), text).unwrap();
        }
        let template = ChatTemplate::from_folder(folder.path()).unwrap().unwrap();
        assert_eq!(text(message.clone(), json!([]), &template).unwrap(), "chat", "{name}");
        assert_eq!(text(message.clone(), json!([{}]), &template).unwrap(), with_tools, "{name}");
        assert_eq!(template.source(false), "chat", "{name}");
        assert!(template.source(true).starts_with(&with_tools[..4]), "{name}");
    }
}

#[test]
fn what_is_no_conversation_is_refused() {
    let template = ChatTemplate::new("t", "{{ x }}").unwrap();
    let messages = [json!({"role": "user"})];
    let kwargs: Map<String, Value> = [("messages".to_string(), json!([]))].into_iter().collect();
    let conversation =
        Conversation { messages: &messages, tools: &[], add_generation_prompt: true, kwargs: &kwargs };
    let error = template.render_conversation(&conversation, &tokenizer()).unwrap_err();
    assert!(
        matches!(&error, Error::Usage(what) if what.contains("chat_template_kwargs.messages")),
        "{error}"
    );
    let error = text(json!([{"role": "user"}, {"content": "x"}]), json!([]), &template).unwrap_err();
    assert!(matches!(&error, Error::Usage(what) if what.contains("messages[1]")), "{error}");
}
