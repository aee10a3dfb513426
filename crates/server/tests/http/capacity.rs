//! `POST /v1/cache` changes the capacity while requests run.
use crate::server::*;
use serde_json::{Value, json};
use std::io::Write;

fn capacity(server: &Server) -> u64 {
    server.get("/v1/cache").good()["tokens"].as_u64().unwrap()
}

fn resize(server: &Server, tokens: u32) -> Answer {
    server.post("/v1/cache", &json!({"tokens": tokens}))
}

fn prompt(from: u32) -> Vec<u32> {
    (0..200).map(|i| 300 + (from * 997 + i * 31) % 3000).collect()
}

fn body(from: u32) -> Value {
    json!({"prompt": prompt(from), "max_tokens": 100, "temperature": 0, "ignore_eos": true})
}

fn text(answer: Answer) -> String {
    answer.good()["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[test]
fn texts_stay_the_same_while_the_cache_grows_and_shrinks() {
    let plain = Server::start(config());
    let expected: Vec<String> = (0..6).map(|from| text(plain.post("/v1/completions", &body(from)))).collect();
    let server = Server::start(config());
    std::thread::scope(|scope| {
        let server = &server;
        let asked: Vec<_> = (0..6)
            .map(|from| scope.spawn(move || text(server.post("/v1/completions", &body(from)))))
            .collect();
        // Six requests need 1,824 tokens together.
        for tokens in [512, 304, 8192, 640, 1024, 336, 4096] {
            assert_eq!(resize(server, tokens).good()["tokens"], tokens);
        }
        for (asked, expected) in asked.into_iter().zip(&expected) {
            assert_eq!(&asked.join().unwrap(), expected);
        }
    });
    assert_eq!(capacity(&server), 4096);
}

#[test]
fn a_smaller_cache_returns_memory_and_keeps_what_it_has_room_for() {
    let server = Server::start(config());
    let ask = |from| {
        let body = with(body(from), &json!({"max_tokens": 1}));
        let answer = server.post("/v1/completions", &body).good();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    (0..15).for_each(|from| assert_eq!(ask(from), 0));
    server.becomes_idle();
    let before = server.get("/v1/cache").good();
    let after = resize(&server, 1000).good();
    // Whole blocks of 16.
    assert_eq!(after["tokens"], 1008);
    assert_eq!(server.get("/v1/models").good()["data"][0]["max_model_len"], 1008);
    let per_token = after["bytes_per_token"].as_u64().unwrap();
    server.until("the memory is free", || {
        server.get("/v1/cache").good()["bytes"].as_u64() == Some(1008 * per_token)
    });
    assert!(before["used_tokens"] == 0 && before["evictable_tokens"].as_u64().unwrap() > 1008, "{before}");
    // The last five prompts, of 13 blocks with the first generated token's, are still there.
    for from in [14, 13, 12, 11, 10] {
        assert_eq!(ask(from), 192, "prompt {from}");
    }
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let server = Server::start(config());
    let refused = |body: Value, param: &str, says: &str| {
        let (status, found, code, message) = server.post("/v1/cache", &body).error();
        assert!(
            status == 400 && found == param && message.contains(says),
            "{status} {found} {code} {message}"
        );
    };
    refused(json!({}), "tokens", "missing");
    refused(json!({"tokens": 0}), "tokens", "expected 1 to");
    refused(json!({"tokens": "8k"}), "tokens", "integer");
    refused(json!({"token": 1}), "token", "no field");

    // A request that runs needs 300 tokens. It is so slow that it does not end meanwhile.
    let slow = with(body(0), &json!({"stream": true, "kvist": {"pace": 1}}));
    let mut client = server.connect();
    let headers = [("content-type", "application/json")];
    client.write_all(&request("POST", "/v1/completions", &headers, slow.to_string().as_bytes())).unwrap();
    server.until("the request runs", || server.live().0 == 1);
    let (status, param, code, message) = resize(&server, 256).error();
    assert_eq!((status, &*param, &*code), (409, "tokens", "cache_not_resized"));
    assert!(message.contains("keeps its 4096 tokens") && message.contains("needs 304 tokens"), "{message}");
    drop(client);
    server.becomes_idle();
    assert_eq!(capacity(&server), 4096);

    // Without requests it is accepted. Then an answer ends where the room ends, and a prompt without room is refused.
    resize(&server, 256).good();
    let answer = server.post("/v1/completions", &body(0)).good();
    assert_eq!(
        (&answer["usage"]["completion_tokens"], &answer["choices"][0]["finish_reason"]),
        (&json!(56), &json!("length"))
    );
    let long = json!({"prompt": vec![300; 256], "max_tokens": 1});
    let (status, .., code, message) = server.post("/v1/completions", &long).error();
    assert!(
        (status, &*code) == (400, "context_length_exceeded") && message.contains("at most 256"),
        "{status} {message}"
    );
}

#[test]
fn only_admins_change_the_capacity() {
    let mut config = config();
    config.keys = vec![key("ann", "ann-secret", false), key("bob", "bob-secret", true)];
    let server = Server::start(config);
    let send = |method: &str, key: &str| {
        let key = format!("Bearer {key}-secret");
        let headers = [("content-type", "application/json"), ("authorization", &*key)];
        server.send(method, "/v1/cache", &headers, br#"{"tokens": 512}"#)
    };
    for method in ["GET", "POST"] {
        assert_eq!(send(method, "ann").error().0, 403);
        assert_eq!(send(method, "bob").good()["object"], "cache");
    }
}
