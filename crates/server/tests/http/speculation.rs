//! A server that speculates: the same answers, and what it says about drafts.
use crate::server::*;
use serde_json::{Value, json};

/// The greedy answers of a model this small repeat themselves.
fn body(more: Value) -> Value {
    let prompt = "Returns the number of elements in the vector, also referred to as its length.";
    with(json!({"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": true}), &more)
}

#[test]
fn usage_and_metrics_tell_of_drafts() {
    let (plain, server) = (Server::start(config()), Server::start(speculating(config())));
    let expected = plain.post("/v1/completions", &body(json!({}))).good();
    assert_eq!(expected["usage"]["completion_tokens_details"], Value::Null);
    assert!(!plain.get("/metrics").text.contains("spec_decode"));
    let positions = |i: usize| {
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        server.metric(name, &format!("position=\"{i}\","))
    };
    assert_eq!((positions(0), positions(7)), (0.0, 0.0), "all positions are there from the start");

    let (mut accepted, mut drafted) = (0, 0);
    let mut account = |usage: &Value| {
        assert_eq!(
            usage["total_tokens"],
            json!(usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap())
        );
        let details = &usage["completion_tokens_details"];
        let count = |name: &str| details[name].as_u64().unwrap();
        accepted += count("accepted_prediction_tokens");
        drafted += count("accepted_prediction_tokens") + count("rejected_prediction_tokens");
    };
    let answer = server.post("/v1/completions", &body(json!({}))).good();
    assert_eq!(answer["choices"], expected["choices"]);
    account(&answer["usage"]);
    let both = server.post("/v1/completions", &body(json!({"n": 2, "logprobs": 1}))).good();
    assert_eq!(both["choices"][1]["text"], expected["choices"][0]["text"]);
    account(&both["usage"]);
    let streamed = json!({"stream": true, "stream_options": {"include_usage": true}});
    account(&server.post("/v1/completions", &body(streamed)).events().last().unwrap()["usage"]);

    server.becomes_idle();
    assert!(accepted > 50 && drafted > accepted, "{accepted} of {drafted}");
    let metric = |name: &str| server.metric(&format!("vllm:spec_decode_num_{name}_total"), "");
    assert_eq!((metric("draft_tokens"), metric("accepted_tokens")), (drafted as f64, accepted as f64));
    assert!(metric("drafts") > 0.0 && metric("drafts") <= drafted as f64);
    let by_position: Vec<f64> = (0..8).map(positions).collect();
    assert_eq!(by_position.iter().sum::<f64>(), accepted as f64);
    assert!(
        by_position.is_sorted_by(|a, b| a >= b),
        "a node is accepted only after its parent: {by_position:?}"
    );
    assert_eq!(server.metric("vllm:generation_tokens_total", ""), 480.0);
}
