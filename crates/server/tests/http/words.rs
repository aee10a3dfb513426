//! A model whose tokens are words with a leading space, as in SentencePiece, and whose tokenizer has one token
//! more than the model's vocabulary.
use crate::server::*;
use kvist_model::{Model, ModelFile};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::{Arc, OnceLock};

const VOCAB: usize = 104;

fn words() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| words_with(None))
}

/// The same with a chat template.
pub fn words_with(template: Option<&str>) -> Arc<Model> {
    words_of("llama-gqa", template)
}

/// With the weights of another fixture.
pub fn words_of(fixture: &str, template: Option<&str>) -> Arc<Model> {
    let folder = tempfile::tempdir().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/parity").join(fixture);
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    let vocab: Map<String, Value> = (0..VOCAB).map(|i| (format!("▁w{i}"), json!(i))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{"id": VOCAB, "content": "<pad>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "▁w2"},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    if let Some(template) = template {
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    }
    load_f32(&ModelFile::Path(folder.path().into()))
}

/// Regression: the token reached a step, which failed three times for all requests in the batch.
#[test]
fn a_token_that_the_model_does_not_know_is_refused_by_name() {
    let server = Server::start_with(words().clone(), config());
    let rows = [
        ("/v1/completions", json!({"prompt": "w1 w2<pad>"}), "prompt"),
        ("/v1/completions", json!({"prompt": ["w1", "<pad>"]}), "prompt"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "<pad>"}]}), "messages"),
        ("/tokenize", json!({"prompt": "w1<pad>"}), "prompt"),
        ("/v1/sessions", json!({"text": "w1 <pad>"}), "text"),
        ("/v1/sessions", json!({"messages": [{"role": "user", "content": "<pad>"}]}), "messages"),
    ];
    for (path, body, param) in rows {
        let error = server.post(path, &body).error();
        assert_eq!((error.0, error.1.as_str(), error.2.as_str()), (400, param, "invalid_value"), "{body}");
        assert!(error.3.contains("<pad>") && error.3.contains("104"), "{error:?}");
    }
    let stats = server.engine.stats();
    assert_eq!((stats.counters.steps, stats.counters.failed_steps), (0, 0));
    server.post("/v1/completions", &json!({"prompt": "w1 w2", "max_tokens": 1})).good();
}

/// The decoder strips the space at the start of a text, but an answer is not the start of a text.
#[test]
fn an_answer_goes_on_where_the_prompt_ends() {
    let server = Server::start_with(words().clone(), config());
    let ask = |more: Value| {
        let mut body = json!({"prompt": "w1 w2 w3", "max_tokens": 6, "temperature": 0, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body)
    };
    let scored = ask(json!({"logprobs": 0})).good();
    let names = scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    let expected: String = names.iter().map(|name| name.as_str().unwrap()).collect();
    assert!(expected.starts_with(" w"), "{expected:?}");
    assert_eq!(scored["choices"][0]["text"], expected);
    assert_eq!(ask(json!({"echo": true})).good()["choices"][0]["text"], format!("w1 w2 w3{expected}"));
    let said = |events: &[Value]| -> String {
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    };
    assert_eq!(said(&ask(json!({"stream": true})).events()), expected);

    // The stream of a session equals its history; a stop string leaves the earlier tokens as sampled.
    let third = expected.match_indices(" w").nth(2).unwrap().0;
    for (stop, expected) in
        [(Value::Null, expected.as_str()), (json!(&expected[third..]), &expected[..third])]
    {
        let id = server.post("/v1/sessions", &json!({"text": "w1 w2 w3"})).good()["id"].clone();
        let path = format!("/v1/sessions/{}", id.as_str().unwrap());
        let body =
            json!({"max_tokens": 6, "temperature": 0, "ignore_eos": true, "stream": true, "stop": stop});
        assert_eq!(said(&server.post(&format!("{path}/generate"), &body).events()), expected);
        let session = server.get(&path).good();
        assert_eq!(session["text"], format!("w1 w2 w3{expected}"));
        assert_eq!(session["n_tokens"].as_u64().unwrap() as usize, 3 + expected.matches(" w").count());
    }
}
