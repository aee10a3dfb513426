//! Errors: each names the field and has the same shape.
use crate::server::*;
use serde_json::{Value, json};

#[test]
fn refusals_name_the_field() {
    let server = Server::start(config());
    let long = "word ".repeat(3000);
    let vocab = model().config().vocab;
    let text = |more: Value| ("/v1/completions", with(json!({"prompt": "a"}), &more));
    let chat = |more: Value| {
        ("/v1/chat/completions", with(json!({"messages": [{"role": "user", "content": "a"}]}), &more))
    };
    let rows = [
        (text(json!({"model": "gpt-4"})), "model", "model_not_found", "tiny-rust-7m"),
        (("/v1/completions", json!({})), "prompt", "missing_parameter", "missing"),
        (("/v1/completions", json!([1])), "", "invalid_type", "object"),
        (text(json!({"prompt": ""})), "prompt", "invalid_value", "empty"),
        (text(json!({"prompt": []})), "prompt", "invalid_value", "empty list"),
        (text(json!({"prompt": [vocab]})), "prompt[0]", "invalid_value", "expected 0 to"),
        (text(json!({"prompt": vec![300; 10_000]})), "prompt", "context_length_exceeded", "10000 tokens"),
        (text(json!({"prompt": "x".repeat(1 << 20)})), "prompt", "context_length_exceeded", "1048576 bytes"),
        (text(json!({"prompt": long})), "prompt", "context_length_exceeded", "tokens"),
        (text(json!({"max_tokens": 0})), "max_tokens", "invalid_value", "at least 1"),
        (text(json!({"temperature": 2.1})), "temperature", "invalid_value", "0 to 2"),
        (text(json!({"temperature": "hot"})), "temperature", "invalid_type", "number"),
        (text(json!({"n": 0})), "n", "invalid_value", "1 to"),
        (text(json!({"n": 100, "prompt": ["a", "b"]})), "n", "invalid_value", "200 answers"),
        (text(json!({"best_of": 2})), "best_of", "invalid_value", "expected one of 1"),
        (text(json!({"min_tokens": 2})), "min_tokens", "unsupported_parameter", "ignore_eos"),
        (text(json!({"stop_token_ids": [2]})), "stop_token_ids", "unsupported_parameter", "stop"),
        (text(json!({"skip_special_tokens": false})), "skip_special_tokens", "unsupported_parameter", "text"),
        (
            text(json!({"stream_options": {"continuous_usage_stats": true}})),
            "stream_options.continuous_usage_stats",
            "unsupported_parameter",
            "final chunk",
        ),
        (text(json!({"suffix": "b"})), "suffix", "unsupported_parameter", "gaps"),
        (text(json!({"logprobs": 21})), "logprobs", "invalid_value", "0 to 20"),
        (text(json!({"logit_bias": {"x": 1}})), "logit_bias.x", "invalid_value", "number"),
        (text(json!({"logit_bias": {"99999999": 1}})), "logit_bias.99999999", "invalid_value", "vocabulary"),
        (text(json!({"stop": ["a", ""]})), "stop[1]", "invalid_value", "empty"),
        (text(json!({"stop": "x".repeat(257)})), "stop", "invalid_value", "256 are allowed"),
        (text(json!({"stop": ["a", "é".repeat(300)]})), "stop[1]", "invalid_value", "300 characters"),
        (text(json!({"temprature": 1})), "temprature", "unknown_parameter", "no field"),
        (text(json!({"kvist": {"explian": true}})), "kvist.explian", "unknown_parameter", "no field"),
        (text(json!({"stream_options": {"x": 1}})), "stream_options.x", "unknown_parameter", "no field"),
        (chat(json!({"messages": []})), "messages", "invalid_value", "empty"),
        (
            chat(json!({"messages": [{"role": "wizard", "content": "a"}]})),
            "messages[0].role",
            "invalid_value",
            "expected one of",
        ),
        (
            chat(json!({"messages": [{"role": "user"}]})),
            "messages[0].content",
            "missing_parameter",
            "missing",
        ),
        (
            chat(json!({"messages": [{"role": "user", "content": null}]})),
            "messages[0].content",
            "invalid_type",
            "a string or a list",
        ),
        (
            chat(json!({"messages": [{"role": "tool", "content": "a"}]})),
            "messages[0].role",
            "invalid_value",
            "expected one of",
        ),
        (
            chat(json!({"messages": [{"role": "assistant", "tool_calls": []}]})),
            "messages[0].tool_calls",
            "unsupported_parameter",
            "template",
        ),
        (
            chat(json!({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]})),
            "messages[0].content[0].type",
            "invalid_value",
            "expected one of \"text\"",
        ),
        (chat(json!({"top_logprobs": 2})), "top_logprobs", "invalid_value", "needs"),
        (chat(json!({"store": true})), "store", "invalid_value", "expected one of"),
        (chat(json!({"functions": []})), "functions", "unsupported_parameter", "use `tools`"),
        (chat(json!({"audio": {}})), "audio", "unsupported_parameter", "text"),
        (
            chat(json!({"tools": [{"type": "function", "function": {"name": "f"}}]})),
            "tools",
            "unsupported_parameter",
            "template",
        ),
        (chat(json!({"tool_choice": "required"})), "tool_choice", "invalid_value", "expected one of"),
        (
            chat(json!({"response_format": {"type": "xml"}})),
            "response_format.type",
            "invalid_value",
            "json_schema",
        ),
        (("/tokenize", json!({})), "prompt", "missing_parameter", "missing"),
        (("/detokenize", json!({"tokens": ["a"]})), "tokens[0]", "invalid_type", "integer"),
    ];
    let mut bad = Vec::new();
    for ((path, body), param, code, words) in rows {
        let status = if code == "model_not_found" { 404 } else { 400 };
        let error = server.post(path, &body).error();
        if (error.0, error.1.as_str(), error.2.as_str()) != (status, param, code) || !error.3.contains(words)
        {
            let body: String = body.to_string().chars().take(80).collect();
            bad.push(format!("{path} {body}: {error:?}, expected {status} {param} {code} {words:?}"));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    // None of these requests reached the engine.
    assert_eq!(server.engine.stats().counters.steps, 0);
}

/// `max_tokens` may be too large: an answer ends when the context is full. Fields of vLLM are accepted if their
/// values change nothing here.
#[test]
fn what_changes_nothing_is_taken() {
    let server = Server::start(config());
    let context = model().config().context;
    let prompt = vec![300; context as usize - 3];
    let answer = server.post(
        "/v1/completions",
        &json!({"prompt": prompt, "max_tokens": 1_000_000, "ignore_eos": true, "min_tokens": 0, "stop_token_ids": [],
            "skip_special_tokens": true, "stream_options": {"continuous_usage_stats": false}}),
    );
    let answer = answer.good();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 3);
}

#[test]
fn what_is_no_request_is_refused_in_the_same_shape() {
    let server = Server::start(config());
    let json_type = ("content-type", "application/json");
    let deep = "[".repeat(1000);
    /// (method, path, headers, body, status, code)
    type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a [u8], u16, &'a str);
    let gzip = ("content-encoding", "gzip");
    let rows: [Row; 16] = [
        ("GET", "/nowhere", &[], b"", 404, "unknown_url"),
        ("GET", "/v1/models/%ff", &[], b"", 400, "invalid_value"),
        ("GET", "/v1/sessions/%ff", &[], b"", 400, "invalid_value"),
        ("GET", "/v1/completions", &[], b"", 405, "method_not_allowed"),
        ("DELETE", "/health", &[], b"", 405, "method_not_allowed"),
        ("POST", "/v1/completions", &[json_type], b"{\"prompt\": ", 400, "invalid_json"),
        ("POST", "/v1/completions", &[json_type], b"\xff\xfe", 400, "invalid_json"),
        ("POST", "/v1/completions", &[json_type], deep.as_bytes(), 400, "invalid_json"),
        ("POST", "/v1/completions", &[json_type], b"", 400, "invalid_json"),
        ("POST", "/v1/completions", &[json_type], b"{\"n\": 1, \"n\": 2}", 400, "invalid_json"),
        ("POST", "/v1/completions", &[("content-type", "text/plain")], b"{}", 415, "unsupported_media_type"),
        ("GET", "/v1/models", &[("host", "evil.example:80")], b"", 403, "unknown_host"),
        // A proxy in front of this server may have used the other one.
        ("GET", "/v1/models", &[("host", "localhost"), ("host", "evil.example")], b"", 400, "invalid_value"),
        ("GET", "/health", &[("host", "localhost"), ("host", "localhost")], b"", 400, "invalid_value"),
        // Regression: this was reported as invalid JSON.
        ("POST", "/v1/completions", &[json_type, gzip], b"\x1f\x8b\x08", 415, "unsupported_media_type"),
        (
            "POST",
            "/tokenize",
            &[json_type, ("content-encoding", "identity, br")],
            b"{}",
            415,
            "unsupported_media_type",
        ),
    ];
    for (method, path, headers, body, status, code) in rows {
        let error = server.send(method, path, headers, body).error();
        assert_eq!((error.0, error.2.as_str()), (status, code), "{method} {path}: {error:?}");
    }
    let compressed = server.send("POST", "/v1/completions", &[json_type, gzip], b"\x1f\x8b\x08").error();
    assert!(compressed.3.contains("gzip") && compressed.3.contains("without compression"), "{compressed:?}");
    let plain = [json_type, ("content-encoding", "identity")];
    assert_eq!(server.send("POST", "/tokenize", &plain, b"{\"prompt\": \"a\"}").status, 200);
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80"] {
        assert_eq!(server.send("GET", "/v1/models", &[("host", host)], b"").status, 200, "{host}");
    }
}

#[test]
fn keys_open_what_they_open() {
    let mut config = config();
    config.keys = vec![key("ann", "ann-secret", false), key("ops", "ops-secret", true)];
    let server = Server::start(config);
    let json_type = ("content-type", "application/json");
    let asked = |path: &str, key: Option<&str>| {
        let mut headers = vec![json_type];
        headers.extend(key.map(|key| ("authorization", key)));
        server.send("GET", path, &headers, b"")
    };
    for (path, key, status) in [
        ("/health", None, 200),
        ("/ready", None, 200),
        ("/openapi.json", None, 200),
        ("/v1/models", None, 401),
        ("/v1/models", Some("Bearer nobodys-key"), 401),
        ("/v1/models", Some("Bearer ann-secret"), 200),
        ("/metrics", None, 401),
        ("/metrics", Some("Bearer ann-secret"), 403),
        ("/metrics", Some("Bearer ops-secret"), 200),
    ] {
        let answer = asked(path, key);
        assert_eq!(answer.status, status, "{path} {key:?}: {}", answer.text);
        if status == 401 {
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            assert_eq!(answer.error().2, "invalid_api_key");
        }
    }
    // A client that is still sending gets the error too.
    let large = vec![b' '; 3 << 20];
    assert_eq!(server.send("POST", "/v1/completions", &[json_type], &large).error().2, "invalid_api_key");
    let body = json!({"prompt": "a", "max_tokens": 1, "kvist": {"priority": 3}}).to_string();
    for (key, status) in [("Bearer ann-secret", 403), ("Bearer ops-secret", 200)] {
        let headers = [json_type, ("authorization", key)];
        assert_eq!(server.send("POST", "/v1/completions", &headers, body.as_bytes()).status, status, "{key}");
    }
}

/// OpenAI's clients retry every 429 and 408, and wait as long as the response says.
#[test]
fn what_stays_refused_is_not_to_be_asked_again() {
    let mut config = config();
    config.sessions.max_sessions = 1;
    let server = Server::start(config);
    let body = json!({"text": "a"});
    server.post("/v1/sessions", &body).good();
    let answer = server.post("/v1/sessions", &body);
    assert_eq!((answer.status, answer.error().2.as_str()), (429, "session_quota"));
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    assert_eq!(server.get("/nowhere").header("x-should-retry"), None);
}

#[test]
fn pages_of_other_origins_may_call_where_that_is_configured() {
    let preflight = [("origin", "https://a.example"), ("access-control-request-method", "POST")];
    let closed = Server::start(config());
    let answer = closed.send("OPTIONS", "/v1/completions", &preflight, b"");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (405, None));
    let mut config = config();
    config.http.cors_origins = vec!["https://a.example".into()];
    let server = Server::start(config);
    let answer = server.send("OPTIONS", "/v1/completions", &preflight, b"");
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, Some("https://a.example"))
    );
    let asks =
        [preflight[0], preflight[1], ("access-control-request-headers", "authorization, x-stainless-lang")];
    let answer = server.send("OPTIONS", "/v1/completions", &asks, b"");
    assert_eq!(answer.header("access-control-allow-headers"), Some("authorization, x-stainless-lang"));
    let answer = server.send("GET", "/v1/models", &[("origin", "https://a.example")], b"");
    assert_eq!(answer.header("access-control-expose-headers"), Some("retry-after,x-should-retry"));
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://a.example"));
    let answer = server.send("GET", "/v1/models", &[("origin", "https://b.example")], b"");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, None));
}

#[test]
fn the_description_is_of_this_server() {
    let mut config = config();
    config.kv_events.endpoint = Some("tcp://127.0.0.1:0".parse().unwrap());
    let server = Server::start(config);
    let document = server.get("/openapi.json").good();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, verbs) in document["paths"].as_object().unwrap() {
        for verb in verbs.as_object().unwrap().keys() {
            // A new session each time, because one of the operations deletes it.
            let session = server.post("/v1/sessions", &json!({"text": "a"})).good();
            let session = session["id"].as_str().unwrap();
            let path = path.replace("{model}", MODEL).replace("{id}", session);
            let answer = match verb.as_str() {
                "post" => server.post(&path, &json!({"nonsense": 1})),
                verb => server.send(&verb.to_ascii_uppercase(), &path, &[], b""),
            };
            let expected = if verb == "post" { 400 } else { 200 };
            assert_eq!(answer.status, expected, "{verb} {path}: {}", answer.text);
            assert!(verbs[verb]["responses"].get(expected.to_string()).is_some(), "{verb} {path}");
            let bad = server.send(&verb.to_ascii_uppercase(), &path.replace(session, "%ff"), &[], b"");
            let described = |status: u16| verbs[verb]["responses"].get(status.to_string()).is_some();
            assert!(described(bad.status), "{verb} {path}: {}", bad.text);
        }
    }
    // Every `$ref` can be resolved.
    let text = document.to_string();
    for part in text.split("\"$ref\":\"#").skip(1) {
        let pointer = part.split('"').next().unwrap();
        assert!(document.pointer(pointer).is_some(), "{pointer}");
    }
}
