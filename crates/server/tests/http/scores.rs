//! Scored prompts: `echo` with `logprobs`, as lm-eval uses it.
use crate::server::*;
use kvist_cache::SeqId;
use kvist_device::Storage;
use kvist_engine::devices;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use serde_json::{Value, json};

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements — é, 日本 — that will be added onto the vector. \
     This is not to be confused with the length of a vector, which specifies the number of actual elements within the \
     vector. If a vector's length exceeds its capacity, its capacity will automatically be increased.";

fn encode(text: &str) -> Vec<u32> {
    model().tokenizer().unwrap().encode(text, true).unwrap()
}

/// Reference from an engine session, with all rows in one pass: for each token except the first, its
/// log-probability and the `n` highest ones at that position.
fn reference(tokens: &[u32], n: usize) -> Vec<(f64, Vec<f64>)> {
    let rows = tokens.len() as u32;
    let config = CacheConfig {
        k: Storage::F32,
        v: Storage::F32,
        max_step_tokens: rows,
        max_rows: rows,
        ..CacheConfig::new(1024)
    };
    let mut session = ModelSession::new(model(), &devices::all(), &config).unwrap();
    session.forward(&[SequenceInput::chain(SeqId::ONLY, tokens)], LogitRows::All).unwrap();
    let score = |at: usize| {
        let row: Vec<f64> = session.logits_row(at - 1).iter().map(|x| f64::from(*x)).collect();
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        let mut best: Vec<f64> = row.iter().map(|x| x - log_sum).collect();
        let own = best[tokens[at] as usize];
        best.sort_by(|a, b| b.total_cmp(a));
        best.truncate(n);
        (own, best)
    };
    (1..tokens.len()).map(score).collect()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 2e-3
}

/// The scores of the prompt equal the reference, and each offset points to the token's text.
fn check(choice: &Value, tokens: &[u32], top: usize, more: usize) {
    let scores = &choice["logprobs"];
    let column =
        |name: &str| scores[name].as_array().unwrap_or_else(|| panic!("no {name} in {choice}")).clone();
    let (names, own, tops, offsets) =
        (column("tokens"), column("token_logprobs"), column("top_logprobs"), column("text_offset"));
    for column in [&names, &own, &tops, &offsets] {
        assert_eq!(column.len(), tokens.len() + more);
    }
    assert!(own[0].is_null() && tops[0].is_null(), "nothing stands before the first token: {}", own[0]);
    for (at, (expected, best)) in (1..).zip(reference(tokens, top)) {
        let found = own[at].as_f64().unwrap();
        assert!(close(found, expected), "token {at} of {}: {found}, expected {expected}", tokens.len());
        let mut values: Vec<f64> =
            tops[at].as_object().unwrap().values().map(|v| v.as_f64().unwrap()).collect();
        values.sort_by(|a, b| b.total_cmp(a));
        assert!(values.len() >= top.min(1) && values.len() <= top + 1, "token {at}: {values:?}");
        // Tokens with the same text share an entry.
        assert!(best.is_empty() || close(values[0], best[0].max(found)), "token {at}: {values:?}, {best:?}");
    }
    let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
    for (at, (name, offset)) in names.iter().zip(&offsets).enumerate() {
        let (name, offset) = (name.as_str().unwrap(), offset.as_u64().unwrap() as usize);
        assert!(offset <= text.len());
        if at > 0 && !name.contains('\u{FFFD}') && name.is_ascii() {
            let there: String = text[offset..].iter().take(name.chars().count()).collect();
            assert_eq!(there, name, "token {at}");
        }
    }
}

fn joined(events: &[Value], index: u64) -> Value {
    let (mut text, mut scores) = (String::new(), json!({}));
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        if choice["index"] != index {
            continue;
        }
        text += choice["text"].as_str().unwrap();
        for (name, column) in choice["logprobs"].as_object().into_iter().flatten() {
            let all = scores.as_object_mut().unwrap().entry(name.clone()).or_insert(json!([]));
            all.as_array_mut().unwrap().extend(column.as_array().unwrap().iter().cloned());
        }
    }
    json!({"text": text, "logprobs": scores})
}

fn ask(prompt: impl Into<Value>, more: Value) -> Value {
    with(
        json!({"prompt": prompt.into(), "echo": true, "logprobs": 3, "max_tokens": 0, "temperature": 0,
        "ignore_eos": true}),
        &more,
    )
}

/// Regression: this was rejected with "prompts are not scored".
#[test]
fn a_prompt_is_scored_whatever_the_cache_knows_of_it() {
    let server = Server::start(config());
    let tokens = encode(TEXT);
    // Longer than one prefill chunk, and than the rows that fit at once.
    assert!(tokens.len() > 80, "{}", tokens.len());
    let plain = |max_tokens: u32| {
        let body = json!({"prompt": TEXT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true});
        server.post("/v1/completions", &body).good()
    };
    let answer = plain(4);
    assert!(
        plain(4)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 16,
        "it is in the cache"
    );
    for max_tokens in [0, 1, 4] {
        let body = ask(TEXT, json!({"max_tokens": max_tokens, "kvist": {"explain": true}}));
        let whole = server.post("/v1/completions", &body).good();
        let choice = &whole["choices"][0];
        check(choice, &tokens, 3, max_tokens);
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(whole["usage"]["completion_tokens"], max_tokens);
        assert_eq!(whole["usage"]["prompt_tokens"], tokens.len());
        // The prefix index has no logits, so a scored prompt gets no prefix hits.
        assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(whole["kvist"]["prompts"][0]["miss"], Value::Null);
        let text = choice["text"].as_str().unwrap();
        let said = answer["choices"][0]["text"].as_str().unwrap();
        assert!(text.starts_with(TEXT) && (TEXT.to_string() + said).starts_with(text), "{text}");
        assert_eq!(max_tokens == 4, text.len() == TEXT.len() + said.len());

        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        streamed["stream_options"] = json!({"include_usage": true});
        let events = server.post("/v1/completions", &streamed).events();
        let joined = joined(&events, 0);
        assert_eq!(joined["text"], choice["text"]);
        for name in ["tokens", "text_offset"] {
            assert_eq!(joined["logprobs"][name], choice["logprobs"][name], "{name}, {max_tokens}");
        }
        check(&joined, &tokens, 3, max_tokens);
        assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], max_tokens);
    }
    // Blocks computed for scores are prefix hits for others.
    assert!(plain(1)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 16);
    server.becomes_idle();
}

#[test]
fn several_prompts_and_several_answers() {
    let server = Server::start(config());
    let (long, short) = (encode(TEXT), encode("impl Iterator for"));
    let prompts = json!([long, short, [short[0]]]);
    for stream in [false, true] {
        let body = ask(prompts.clone(), json!({"n": 2, "max_tokens": 2, "logprobs": 0, "stream": stream}));
        let answer = server.post("/v1/completions", &body);
        let choices: Vec<Value> = match stream {
            true => (0..6).map(|index| joined(&answer.events(), index)).collect(),
            false => answer.good()["choices"].as_array().unwrap().clone(),
        };
        assert_eq!(choices.len(), 6);
        for (choice, tokens) in
            choices.iter().zip([&long, &long, &short, &short, &short[..1].to_vec(), &short[..1].to_vec()])
        {
            check(choice, tokens, 0, 2);
        }
    }
    server.becomes_idle();
}

/// A prompt that fills the context leaves no room for an answer, and needs none.
#[test]
fn a_prompt_as_long_as_the_context() {
    let mut small = config();
    small.cache.tokens = Some(64);
    let server = Server::start(small);
    let tokens = encode(TEXT)[..64].to_vec();
    let whole = server.post("/v1/completions", &ask(tokens.clone(), json!({}))).good();
    check(&whole["choices"][0], &tokens, 3, 0);
    let error = server.post("/v1/completions", &ask(tokens, json!({"max_tokens": 1}))).error();
    assert_eq!((error.0, error.2.as_str()), (400, "context_length_exceeded"));
}

/// All scores of a request are in memory at once, so their number is limited and the error says so.
#[test]
fn more_scores_than_there_is_room_for_are_refused() {
    let server = Server::start(config());
    let many = vec![vec![1; 1000]; 128];
    let error = server.post("/v1/completions", &ask(json!(many), json!({"logprobs": 20}))).error();
    assert_eq!((error.0, error.1.as_str()), (400, "prompt"), "{error:?}");
    assert!(error.3.contains("128000 tokens") && error.3.contains("fewer prompts"), "{error:?}");
    assert_eq!(server.engine.stats().counters.steps, 0);
}

#[test]
fn what_says_nothing_needs_an_echo() {
    let server = Server::start(config());
    for body in
        [json!({"prompt": "a", "max_tokens": 0}), json!({"prompt": "a", "max_tokens": 0, "echo": false})]
    {
        let error = server.post("/v1/completions", &body).error();
        assert_eq!(
            (error.0, error.1.as_str(), error.2.as_str()),
            (400, "max_tokens", "invalid_value"),
            "{error:?}"
        );
    }
    let echoed = server
        .post("/v1/completions", &json!({"prompt": TEXT, "max_tokens": 0, "echo": true, "n": 2}))
        .good();
    for choice in echoed["choices"].as_array().unwrap() {
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(TEXT), &json!("length")));
    }
    assert_eq!(echoed["usage"]["completion_tokens"], 0);
}

/// Regression: for 129 prompts the schema's error came from the branch that matched furthest: that a text is
/// not a list of tokens.
#[test]
fn too_many_prompts_are_told_as_such() {
    let server = Server::start(config());
    for (body, param, said) in [
        (json!({"prompt": vec!["a"; 129]}), "prompt", "129 prompts"),
        (json!({"prompt": vec![vec![1]; 129]}), "prompt", "129 prompts"),
        (json!({"prompt": vec!["a"; 65], "n": 2}), "n", "130 answers"),
        (json!({"prompt": "a", "n": 129}), "n", "128"),
    ] {
        let error = server.post("/v1/completions", &body).error();
        assert_eq!((error.0, error.1.as_str(), error.2.as_str()), (400, param, "invalid_value"), "{error:?}");
        assert!(error.3.contains(said) && error.3.contains("128"), "{error:?}");
    }
    // A list of tokens may be longer.
    server.post("/v1/completions", &json!({"prompt": vec![5; 300], "max_tokens": 1})).good();
}

#[test]
fn the_version_is_told_as_vllm_does() {
    let server = Server::start(config());
    assert_eq!(server.get("/version").good(), json!({"version": env!("CARGO_PKG_VERSION")}));
    let described = server.get("/openapi.json").good();
    assert!(described["paths"]["/version"]["get"].is_object());
}
