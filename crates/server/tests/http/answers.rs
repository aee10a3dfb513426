//! Answers, as one document and as a stream.
use crate::server::*;
use kvist_device::Storage;
use kvist_engine::devices;
use kvist_engine::generate::{GenerateArgs, Limits, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::ModelSession;
use serde_json::{Value, json};

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector.";

/// The output of `kvist run --greedy`.
fn alone(prompt: &str, max_tokens: usize) -> String {
    let config = CacheConfig { k: Storage::F32, v: Storage::F32, ..CacheConfig::new(1024) };
    let mut session = ModelSession::new(model(), &devices::all(), &config).unwrap();
    let tokenizer = model().tokenizer().unwrap();
    let prompt = tokenizer.encode(prompt, true).unwrap();
    let limits = Limits { max_tokens, stop: Vec::new(), ignore_eos: true, no_cache: false };
    let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
    let what = GenerateArgs {
        session: &mut session,
        seq: kvist_cache::SeqId::ONLY,
        before: &[],
        prompt: &prompt,
        tokenizer: Some(tokenizer),
        sampler: &mut sampler,
        limits: &limits,
        speculation: None,
    };
    generate(what, &mut ()).unwrap().text
}

fn greedy(prompt: impl Into<Value>, max_tokens: u32) -> Value {
    json!({"model": MODEL, "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// Texts and finish reasons of a stream's choices, by index. Checks that each choice ends once and nothing
/// follows its end.
fn spoken(events: &[Value], text: impl Fn(&Value) -> Option<&str>) -> Vec<(String, String)> {
    let mut answers: Vec<(String, String)> = Vec::new();
    for event in events {
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            answers.resize(answers.len().max(index + 1), Default::default());
            assert_eq!(answers[index].1, "", "behind the end: {event}");
            answers[index].0 += text(choice).unwrap_or_default();
            answers[index].1 = choice["finish_reason"].as_str().unwrap_or_default().into();
        }
    }
    answers
}

#[test]
fn the_same_text_as_without_a_server_streamed_or_not() {
    let server = Server::start(config());
    let expected = alone(TEXT, 24);
    for _ in 0..2 {
        let whole = server.post("/v1/completions", &greedy(TEXT, 24)).good();
        assert_eq!(whole["choices"][0]["text"], expected.as_str());
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        assert_eq!(whole["object"], "text_completion");
        assert_eq!(whole["usage"]["completion_tokens"], 24);
        let more = json!({"stream": true, "stream_options": {"include_usage": true}});
        let events = server.post("/v1/completions", &with(greedy(TEXT, 24), more)).events();
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(spoken(chunks, |c| c["text"].as_str()), [(expected.clone(), "length".into())]);
        assert_eq!(last["choices"], json!([]));
        for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][field], whole["usage"][field], "{field}");
        }
        assert!(chunks.iter().all(|c| c["usage"].is_null() && c["id"] == last["id"]));
    }
    server.becomes_idle();
}

#[test]
fn prompts_of_every_kind() {
    let server = Server::start(config());
    let tokens = model().tokenizer().unwrap().encode(TEXT, true).unwrap();
    let (first, second) = (alone(TEXT, 8), alone("impl Iterator for", 8));
    let echoed = model().tokenizer().unwrap().decode(&tokens).unwrap() + &first;
    let rows = [
        (greedy(TEXT, 8), vec![first.clone()]),
        (greedy(json!([TEXT, "impl Iterator for"]), 8), vec![first.clone(), second]),
        (greedy(json!(tokens), 8), vec![first.clone()]),
        (greedy(json!([tokens, tokens]), 8), vec![first.clone(), first.clone()]),
        (with(greedy(TEXT, 8), json!({"n": 2, "best_of": 1})), vec![first.clone(), first.clone()]),
        (with(greedy(TEXT, 8), json!({"echo": true})), vec![echoed]),
        (with(greedy(TEXT, 8), json!({"top_p": 0, "temperature": 1.5})), vec![first.clone()]),
        (with(greedy(TEXT, 8), json!({"top_k": 1.0, "temperature": 1, "seed": 9, "user": "u"})), vec![first]),
    ];
    for (body, expected) in rows {
        let whole = server.post("/v1/completions", &body).good();
        let texts: Vec<&str> =
            whole["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(texts, expected, "{body}");
        let events = server.post("/v1/completions", &with(body.clone(), json!({"stream": true}))).events();
        let streamed: Vec<String> =
            spoken(&events, |c| c["text"].as_str()).into_iter().map(|(t, _)| t).collect();
        assert_eq!(streamed, expected, "streamed: {body}");
    }
}

#[test]
fn sampling_is_what_was_asked_for() {
    let server = Server::start(config());
    let text = |more: Value| {
        let answer = server.post("/v1/completions", &with(greedy(TEXT, 12), more)).good();
        answer["choices"][0]["text"].as_str().unwrap().to_string()
    };
    let hot = |seed: i64| text(json!({"temperature": 1.2, "seed": seed}));
    assert_eq!(hot(-3), hot(-3));
    assert_ne!(hot(1), hot(2));
    // The `n` answers use different seeds.
    let several = with(greedy(TEXT, 12), json!({"temperature": 1.2, "seed": 4, "n": 3}));
    let several = server.post("/v1/completions", &several).good();
    let texts: Vec<&str> =
        several["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts[0], hot(4));
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    assert_eq!(several["usage"]["completion_tokens"], 36);

    // A bias forces a token; a penalty avoids earlier tokens.
    let comma = model().tokenizer().unwrap().encode("x", false).unwrap()[0];
    let forced = text(json!({"logit_bias": {comma.to_string(): 100}}));
    assert_eq!(forced, model().tokenizer().unwrap().decode(&[comma; 12]).unwrap());
    let body = with(greedy(TEXT, 3), json!({"logit_bias": {comma.to_string(): 100}, "logprobs": 0}));
    let names = server.post("/v1/completions", &body).good()["choices"][0]["logprobs"]["tokens"].clone();
    assert!(names.as_array().unwrap().iter().all(|n| *n == names[0]), "{names}");
    let plain = alone(TEXT, 12);
    assert_ne!(text(json!({"frequency_penalty": 2, "presence_penalty": 2})), plain);
    assert_ne!(text(json!({"repetition_penalty": 2})), plain);

    // The text ends before the stop string.
    let stop: String = plain.chars().skip(4).take(3).collect();
    let cut = &plain[..plain.find(&stop).unwrap()];
    for (given, reason) in
        [(json!(stop), "stop"), (json!(["no such text", stop]), "stop"), (json!(null), "length")]
    {
        let body = with(greedy(TEXT, 12), json!({"stop": given}));
        let whole = server.post("/v1/completions", &body).good();
        let expected = if reason == "stop" { cut } else { plain.as_str() };
        assert_eq!(whole["choices"][0]["text"], expected, "{given}");
        assert_eq!(whole["choices"][0]["finish_reason"], reason, "{given}");
        let events = server.post("/v1/completions", &with(body, json!({"stream": true}))).events();
        assert_eq!(spoken(&events, |c| c["text"].as_str()), [(expected.into(), reason.into())]);
    }
}

#[test]
fn log_probabilities_add_up() {
    let server = Server::start(config());
    let whole = server.post("/v1/completions", &with(greedy(TEXT, 6), json!({"logprobs": 3}))).good();
    let scores = &whole["choices"][0]["logprobs"];
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let joined: String = scores["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(joined, text);
    for i in 0..6 {
        let own = scores["token_logprobs"][i].as_f64().unwrap();
        let top = scores["top_logprobs"][i].as_object().unwrap();
        assert_eq!(top.len(), 3);
        let best = top.values().map(|v| v.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max);
        assert!((own - best).abs() < 1e-6, "greedy takes the likeliest: {own}, {best}");
        assert!(top.values().map(|v| v.as_f64().unwrap().exp()).sum::<f64>() <= 1.0 + 1e-4);
    }
    // The sampled token is always included, even if it is unlikely.
    for seed in 0..8 {
        let hot = json!({"logprobs": 1, "temperature": 2, "seed": seed});
        let whole = server.post("/v1/completions", &with(greedy(TEXT, 6), hot)).good();
        let scores = &whole["choices"][0]["logprobs"];
        for i in 0..6 {
            let top = scores["top_logprobs"][i].as_object().unwrap();
            let own = &top[scores["tokens"][i].as_str().unwrap()];
            assert_eq!(*own, scores["token_logprobs"][i], "{scores}");
            assert!(top.len() <= 2, "{scores}");
        }
    }
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0,
        "logprobs": true, "top_logprobs": 2, "ignore_eos": true});
    let whole = server.post("/v1/chat/completions", &body).good();
    let scores = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(scores.len(), 4);
    let bytes: Vec<u8> = scores
        .iter()
        .flat_map(|s| s["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    // The space that begins the answer has its score, but is no content.
    let text = String::from_utf8(bytes).unwrap();
    assert_eq!(text.trim_start_matches(' '), whole["choices"][0]["message"]["content"].as_str().unwrap());
    let events = server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events();
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed, scores);
}

/// Regression: large documents were built at once on a server thread and took a gigabyte.
#[test]
fn large_documents_come_in_parts_and_are_what_streams_say() {
    let server = Server::start(config());
    let common = json!({"max_tokens": 50, "temperature": 1.3, "seed": 5, "n": 24, "ignore_eos": true});
    let completion = with(common.clone(), json!({"prompt": TEXT, "logprobs": 20}));
    let message = json!([{"role": "user", "content": "Hi"}]);
    let chat = with(common, json!({"messages": message, "logprobs": true, "top_logprobs": 20}));
    let columns: &[(&str, Value, &[&str])] = &[
        ("/v1/completions", completion, &["tokens", "token_logprobs", "top_logprobs", "text_offset"]),
        ("/v1/chat/completions", chat, &["content"]),
    ];
    for (path, body, columns) in columns {
        let answer = server.post(path, body);
        assert_eq!(
            answer.header("transfer-encoding"),
            Some("chunked"),
            "{path}: {} bytes",
            answer.text.len()
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let whole = answer.good();
        assert_eq!(whole["choices"].as_array().unwrap().len(), 24);
        assert!(whole["usage"]["completion_tokens"].as_u64().unwrap() > 0, "{}", whole["usage"]);
        let events = server.post(path, &with(body.clone(), json!({"stream": true}))).events();
        for (i, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["index"], i);
            for column in *columns {
                let of_index = |event: &&Value| event["choices"][0]["index"] == i;
                let streamed: Vec<Value> = events
                    .iter()
                    .filter(of_index)
                    .flat_map(|e| e["choices"][0]["logprobs"][column].as_array().cloned().unwrap_or_default())
                    .collect();
                assert_eq!(choice["logprobs"][column], json!(streamed), "{path} {i} {column}");
            }
        }
    }
}

/// Regression: sequential ids revealed how many requests other clients had sent.
#[test]
fn ids_of_requests_tell_nothing() {
    let server = Server::start(config());
    let ids: Vec<u128> = (0..8)
        .map(|_| {
            let id = server.post("/v1/completions", &greedy("a", 1)).good()["id"].clone();
            u128::from_str_radix(id.as_str().unwrap().strip_prefix("cmpl-").unwrap(), 16).unwrap()
        })
        .collect();
    for (i, one) in ids.iter().enumerate() {
        for other in &ids[..i] {
            for shift in [0, 64] {
                let (a, b) = ((one >> shift) as u64, (other >> shift) as u64);
                assert!(a.abs_diff(b) > 1 << 32 && (a ^ b).count_ones() > 4, "{one:x} beside {other:x}");
            }
        }
    }
}

/// An answer as serialized by `message.model_dump()` of OpenAI's client.
#[test]
fn an_answer_goes_back_with_its_nulls() {
    let server = Server::start(config());
    let said = json!({"content": "Hello.", "refusal": null, "role": "assistant", "annotations": null, "audio": null,
        "function_call": null, "tool_calls": null});
    let ask = |said: Value| {
        let messages = json!([{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "And?"}]);
        server
            .post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 2, "functions": null}))
    };
    ask(said.clone()).good();
    ask(with(said.clone(), json!({"annotations": []}))).good();
    assert_eq!(ask(with(said, json!({"audio": {"id": "a"}}))).error().1, "messages[1].audio");
    let body = with(greedy("a", 1), json!({"suffix": null, "best_of": null}));
    server.post("/v1/completions", &body).good();
}

#[test]
fn conversations_without_a_template_are_plain() {
    let server = Server::start(config());
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is a trait?"}]},
    ]);
    let prompt = "system: Be brief.\nuser: What is a trait?\nassistant:";
    let expected = alone(prompt, 16);
    let cut = expected.split("\nuser:").next().unwrap().to_string();
    let body = json!({"messages": messages, "max_completion_tokens": 16, "temperature": 0, "ignore_eos": true,
        "metadata": {"a": "b"}, "store": false});
    let whole = server.post("/v1/chat/completions", &body).good();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    // Regression: the space that the model writes after `assistant:` was part of the content. The next prompt had it
    // twice, because the template writes one too, and was not found in the cache behind it.
    let content = cut.strip_prefix(' ').expect("this model writes the space").to_string();
    assert_eq!(whole["choices"][0]["message"]["content"], content.as_str());
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let mut more = messages.clone();
    more.as_array_mut().unwrap().extend([turn("assistant", &content), turn("user", "And?")]);
    let told = |path: &str, messages: &Value, more: Value| {
        server
            .post(
                path,
                &with(
                    json!({"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": true}),
                    more,
                ),
            )
            .good()
    };
    let ids = told("/v1/chat/completions", &messages, json!({"return_token_ids": true}));
    let mut known = ids["prompt_token_ids"].as_array().unwrap().clone();
    known.extend(ids["choices"][0]["token_ids"].as_array().unwrap().iter().cloned());
    let next = told("/v1/chat/completions/render", &more, json!({}))["token_ids"].as_array().unwrap().clone();
    // The tokens around the end may be split in another way.
    assert!(next.starts_with(&known[..known.len() - 4]), "{next:?}, {known:?}");
    let events = server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    let reason = if cut == expected { "length" } else { "stop" };
    assert_eq!(spoken(&events, |c| c["delta"]["content"].as_str()), [(content, reason.into())]);
    // Without a limit the answer continues to the end of the context, or of the text.
    let body = json!({"messages": messages, "temperature": 0});
    let whole = server.post("/v1/chat/completions", &body).good();
    let total = whole["usage"]["total_tokens"].as_u64().unwrap();
    assert!(whole["choices"][0]["finish_reason"] == "stop" || total >= 512, "{whole}");
}

#[test]
fn an_answer_has_the_form_that_was_asked_for() {
    let server = Server::start(config());
    let ask = |format: Value, max: u32| {
        // Exclude whitespace, of which such a small model writes a lot.
        let blanks = model().tokenizer().unwrap().pieces(model().config().vocab).unwrap();
        let blanks = blanks.iter().enumerate().filter(|(_, p)| p.bytes.iter().all(u8::is_ascii_whitespace));
        let bias: Value =
            blanks.map(|(id, _)| (id.to_string(), json!(-100))).collect::<serde_json::Map<_, _>>().into();
        let body = json!({"messages": [{"role": "user", "content": "{"}], "max_tokens": max, "temperature": 1,
            "seed": 3, "logit_bias": bias, "response_format": format});
        server.post("/v1/chat/completions", &body)
    };
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}},
        "required": ["ok", "size"], "additionalProperties": false});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    let whole = ask(format, 64).good();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    assert!(value["ok"].is_boolean() && (value["size"] == 1 || value["size"] == 2), "{value}");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let bad =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {"type": "string"}}}});
    let (status, param, ..) = ask(bad, 8).error();
    assert_eq!((status, param.starts_with("response_format.json_schema.schema")), (400, true), "{param}");
}

#[test]
fn prefixes_are_shared_inside_a_salt_and_explained() {
    let mut config = config();
    config.keys = vec![key("ann", "ann-secret", false), key("bob", "bob-secret", true)];
    let server = Server::start(config);
    let ask = |key: &str, prompt: &str, more: Value| {
        let body = with(with(greedy(prompt, 4), json!({"kvist": {"explain": true}})), more).to_string();
        let headers = [("content-type", "application/json"), ("authorization", key)];
        let whole = server.send("POST", "/v1/completions", &headers, body.as_bytes()).good();
        let told = whole["kvist"]["prompts"][0].clone();
        let cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert_eq!(told["cached_tokens"], cached);
        let prompt = whole["usage"]["prompt_tokens"].as_u64().unwrap();
        (cached, told["miss"]["reason"].as_str().unwrap().to_string(), (prompt - 1) / 16 * 16)
    };
    let (ann, bob) = ("Bearer ann-secret", "Bearer bob-secret");
    let none = json!({});
    let (cached, reason, whole_blocks) = ask(ann, TEXT, none.clone());
    assert_eq!((cached, reason.as_str()), (0, "never_seen"));
    assert!(whole_blocks >= 32, "{whole_blocks}");
    let again = ask(ann, TEXT, none.clone());
    assert_eq!((again.0, again.1.as_str()), (whole_blocks, "unaligned_tail"));
    // Nothing is revealed about other keys' prompts, whatever the salt.
    for salt in [json!({}), json!({"cache_salt": "3:ann:"}), json!({"cache_salt": "ann"})] {
        let (cached, reason, _) = ask(bob, TEXT, salt.clone());
        assert_eq!((cached, reason.as_str()), (0, "never_seen"), "{salt}");
    }
    let salted = json!({"cache_salt": "other"});
    assert_eq!(ask(ann, TEXT, salted.clone()).0, 0);
    assert_eq!(ask(ann, TEXT, salted).0, whole_blocks);
    let other = TEXT.replace("elements", "apples");
    assert_eq!(ask(ann, &other, none).1, "diverged");
}

#[test]
fn the_other_answers_of_a_prompt_find_it() {
    let server = Server::start(config());
    server.post("/v1/completions", &with(greedy(TEXT, 4), json!({"n": 4}))).good();
    let tokens = model().tokenizer().unwrap().encode(TEXT, true).unwrap().len() as u64;
    let hits = server.metric("vllm:prefix_cache_hits_total", "");
    assert_eq!(hits as u64, 3 * ((tokens - 1) / 16 * 16));
    assert_eq!(server.metric("vllm:prefix_cache_queries_total", "") as u64, 4 * tokens);
    assert_eq!(server.metric("vllm:generation_tokens_total", ""), 16.0);
    assert_eq!(server.metric("vllm:request_success_total", "finished_reason=\"length\","), 4.0);
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count", ""), 4.0);
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count", ""), 12.0);
    assert_eq!(server.metric("vllm:e2e_request_latency_seconds_count", ""), 4.0);
}

#[test]
fn models_tokens_and_health() {
    let server = Server::start(config());
    let models = server.get("/v1/models").good();
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(server.get(&format!("/v1/models/{MODEL}")).good()["object"], "model");
    assert_eq!(server.get("/v1/models/org/other").error().2, "model_not_found");
    let tokens = server.post("/tokenize", &json!({"prompt": TEXT})).good();
    let expected = model().tokenizer().unwrap().encode(TEXT, true).unwrap();
    assert_eq!(tokens["tokens"], json!(expected));
    assert_eq!(tokens["count"], expected.len());
    let bare = server.post("/tokenize", &json!({"prompt": TEXT, "add_special_tokens": false})).good();
    let text = server.post("/detokenize", &json!({"tokens": bare["tokens"]})).good();
    assert_eq!(text["prompt"], TEXT);
    assert_eq!(server.get("/health").good()["status"], "ok");
    assert_eq!(server.get("/ready").good()["status"], "ready");
}
