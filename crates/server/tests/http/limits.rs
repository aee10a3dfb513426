//! Limits, deadlines, disconnecting clients, and shutdown.
use crate::server::*;
use serde_json::{Value, json};
use std::io::{BufReader, Read, Write};
use std::time::Duration;

/// Outlasts any test: it would fill the cache, at a token a second. (Beside requests without a pace, or when the server
/// ends, it has full speed.)
fn endless(more: Value) -> Value {
    let n = more["n"].as_u64().unwrap_or(4);
    with(
        json!({
            "prompt": "fn main", "max_tokens": 3900 / n, "ignore_eos": true, "temperature": 1, "n": n,
            "kvist": {"pace": 1},
        }),
        &more,
    )
}

/// Starts a stream and reads its first `events` events.
fn streaming(server: &Server, body: &Value, events: usize) -> BufReader<std::net::TcpStream> {
    let mut stream = server.connect();
    let headers = [("content-type", "application/json")];
    stream.write_all(&request("POST", "/v1/completions", &headers, body.to_string().as_bytes())).unwrap();
    let mut reader = BufReader::new(stream);
    let (status, _) = head(&mut reader);
    assert_eq!(status, 200);
    (0..events).for_each(|_| drop(next_event(&mut reader)));
    reader
}

/// Regression: a server that responded and closed at once reset the connection while the client was still
/// sending, so the client saw a broken pipe instead of 413.
#[test]
fn a_client_that_sends_too_much_hears_of_it() {
    let mut config = config();
    config.limits.max_body_bytes = 4 << 20;
    let server = Server::start(config);
    let body = vec![b' '; 12 << 20];
    let json_type = ("content-type", "application/json");
    let declared = server.send("POST", "/v1/completions", &[json_type], &body);
    assert_eq!((declared.status, declared.error().2.as_str()), (413, "body_too_large"));
    let mut chunks = format!("{:x}\r\n", body.len()).into_bytes();
    chunks.extend_from_slice(&body);
    chunks.extend_from_slice(b"\r\n0\r\n\r\n");
    let headers = [json_type, ("transfer-encoding", "chunked")];
    let chunked = server.send("POST", "/v1/completions", &headers, &chunks);
    assert_eq!((chunked.status, chunked.error().2.as_str()), (413, "body_too_large"));
    // Other rejections do not cut off a sending client either.
    let plain = server.send("POST", "/v1/completions", &[("content-type", "text/plain")], &body);
    assert_eq!((plain.status, plain.error().2.as_str()), (415, "unsupported_media_type"));
    // A client that asks with `expect: 100-continue` is rejected before it sends the body.
    let headers = [json_type, ("content-length", "12000000"), ("expect", "100-continue")];
    let asked = server.send("POST", "/v1/completions", &headers, b"");
    assert_eq!((asked.status, asked.error().2.as_str()), (413, "body_too_large"));
}

#[test]
fn bodies_and_headers_have_limits() {
    let mut config = config();
    config.limits.max_body_bytes = 2000;
    config.limits.max_header_bytes = 8 << 10;
    let server = Server::start(config.clone());
    let json_type = ("content-type", "application/json");
    let body = json!({"prompt": "a ".repeat(2000)}).to_string();
    let declared = server.send("POST", "/v1/completions", &[json_type], body.as_bytes());
    assert_eq!(declared.error().2, "body_too_large");
    assert_eq!(declared.status, 413);
    let chunked: String = (0..100).map(|_| format!("{:x}\r\n{}\r\n", 100, " ".repeat(100))).collect();
    let headers = [json_type, ("transfer-encoding", "chunked")];
    let chunked = server.send("POST", "/v1/completions", &headers, chunked.as_bytes());
    assert_eq!((chunked.status, chunked.error().2.as_str()), (413, "body_too_large"));
    let wide = "x".repeat(10 << 10);
    assert_eq!(server.send("GET", "/health", &[("x-wide", &wide)], b"").status, 431);
    // The body never arrives.
    config.limits.read_timeout_s = 2.0;
    let server = Server::start(config);
    let headers = [json_type, ("content-length", "100")];
    let slow = server.send_until_answered("POST", "/v1/completions", &headers, b"{");
    assert_eq!((slow.status, slow.error().2.as_str()), (408, "body_too_slow"));
    // The headers never arrive: the connection is closed.
    let mut stream = server.connect();
    let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: loc"); // a busy machine may send it too late
    if let Err(e) = stream.read_to_end(&mut Vec::new()) {
        let why = "the server hangs up before the client's own timeout";
        assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{why}");
    }
    assert_eq!(server.send_until_answered("GET", "/health", &[], b"").status, 200);
}

#[test]
fn a_client_that_goes_away_frees_its_memory() {
    let server = Server::start(config());
    let aborted = || server.metric("vllm:request_success_total", "finished_reason=\"abort\",");
    for events in [0, 1, 5] {
        let reader = streaming(&server, &endless(json!({"stream": true})), events);
        let (paused, before) = (server.pause(), aborted());
        drop(reader);
        server.until("it is noticed", || aborted() > before);
        drop(paused);
        server.becomes_idle();
    }
    // The same for a client that waits for a whole document.
    let mut stream = server.connect();
    let body = endless(json!({})).to_string();
    let headers = [("content-type", "application/json")];
    stream.write_all(&request("POST", "/v1/completions", &headers, body.as_bytes())).unwrap();
    server.until("it runs", || server.live().0 > 0);
    let (paused, before) = (server.pause(), aborted());
    drop(stream);
    server.until("it is noticed", || aborted() > before);
    drop(paused);
    server.becomes_idle();
    assert!(aborted() >= 4.0);
    assert_eq!(server.metric("vllm:request_success_total", "finished_reason=\"length\","), 0.0);
}

#[test]
fn a_full_queue_says_so() {
    let mut config = config();
    config.scheduler.max_batch = 1;
    config.limits.max_queue = 2;
    let server = Server::start(config);
    let one = endless(json!({"stream": true, "n": 1}));
    let mut streams = vec![streaming(&server, &one, 1)];
    let paused = server.pause();
    streams.push(streaming(&server, &one, 0));
    streams.push(streaming(&server, &one, 0));
    let answer = server.post("/v1/completions", &one);
    assert_eq!((answer.status, answer.error().2.as_str()), (429, "queue_full"));
    assert!(answer.header("retry-after").is_some());
    let several = server.post("/v1/completions", &endless(json!({"prompt": ["a", "b"], "n": 1})));
    assert_eq!(several.status, 429);
    assert_eq!(server.get("/health").status, 200);
    drop(streams);
    drop(paused);
    server.becomes_idle();
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).status, 200);
    // Regression: more prompts than there are places were told to try again, forever.
    let error = server.post("/v1/completions", &json!({"prompt": ["a", "b", "c"], "max_tokens": 1})).error();
    assert_eq!((error.0, error.1.as_str(), error.2.as_str()), (400, "prompt", "invalid_value"), "{error:?}");
    assert!(error.3.contains("3 prompts") && error.3.contains("2 places"), "{error:?}");
    assert_eq!(server.post("/v1/completions", &json!({"prompt": ["a", "b"], "max_tokens": 1})).status, 200);
}

/// Regression: requests that waited for memory for their scores were not counted in the queue, and were
/// rejected by it once there was memory. Prompts that are echoed as text needed no memory at all by the
/// server's accounting.
#[test]
fn what_waits_for_room_has_a_place_in_the_queue() {
    const SCORED: usize = 56;
    const ECHOED: usize = 128;
    let mut config = config();
    config.limits.max_queue = 5 * SCORED + ECHOED;
    let server = Server::start(config);
    let paused = server.pause();
    // The scores of each request need nearly a quarter of the memory.
    let prompts = vec![vec![5; 1020]; SCORED];
    let scored = json!({"prompt": prompts, "echo": true, "logprobs": 20, "max_tokens": 0}).to_string();
    let headers = [("content-type", "application/json")];
    let ask = || {
        let mut stream = server.connect();
        stream.write_all(&request("POST", "/v1/completions", &headers, scored.as_bytes())).unwrap();
        stream
    };
    let waiting: Vec<_> = (0..5).map(|_| ask()).collect();
    server.until("the last one waits too", || server.engine.queued() == 5 * SCORED);
    // The engine is paused: a request that reached it would not notice its deadline.
    let pieces = model().tokenizer().unwrap().pieces(model().config().vocab).unwrap();
    let longest = (0..pieces.len()).filter(|i| !pieces[*i].control).max_by_key(|i| pieces[*i].bytes.len());
    let long = longest.unwrap();
    assert!(ECHOED * 1020 * pieces[long].bytes.len() > 2 << 20, "{}", pieces[long].bytes.len());
    let echoed = json!({"prompt": vec![vec![long; 1020]; ECHOED], "echo": true, "kvist": {"timeout_ms": 50}});
    assert_eq!(server.post("/v1/completions", &echoed).error().2, "deadline_exceeded");
    server.until("its places are free again", || server.engine.queued() == 5 * SCORED);
    // A full queue rejects at once, not when memory becomes free.
    let plain = json!({"prompt": vec!["a"; ECHOED], "max_tokens": 1, "stream": true}).to_string();
    let mut last = server.connect();
    last.write_all(&request("POST", "/v1/completions", &headers, plain.as_bytes())).unwrap();
    server.until("the queue is full", || server.engine.queued() == 5 * SCORED + ECHOED);
    let refused = Answer::read(ask());
    assert_eq!((refused.status, refused.error().2.as_str()), (429, "queue_full"));
    drop((waiting, last));
    server.until("they have left", || server.metric("kvist_connections", "") <= 1.0);
    drop(paused);
    server.becomes_idle();
    assert_eq!(server.engine.queued(), 0);
}

#[test]
fn deadlines_end_requests() {
    let mut config = config();
    config.scheduler.max_batch = 1;
    let server = Server::start(config);
    // At this pace no request completes before its deadline.
    let late = |ms: u64, stream: bool| {
        endless(json!({"stream": stream, "kvist": {"timeout_ms": ms, "pace": 1}, "n": 1}))
    };
    // On a busy machine no token may arrive within the first of these times; one will within the last.
    let in_time = |stream: bool, said: &dyn Fn(&Answer) -> bool| {
        let ask = |ms| server.post("/v1/completions", &late(ms, stream));
        [150, 2_000, 60_000]
            .into_iter()
            .map(ask)
            .find(|answer| said(answer))
            .expect("a token within a minute")
    };
    // The tokens until then are returned, and the client is told why it ended.
    let said = |answer: &Answer| answer.json()["usage"]["completion_tokens"].as_u64().is_some_and(|n| n > 0);
    let whole = in_time(false, &said).good();
    assert_eq!(whole["kvist"]["ended"], "deadline_exceeded");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert!(whole["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    let events = in_time(true, &|answer| answer.text.contains("\"finish_reason\":\"length\"")).events();
    let (error, chunks) = events.split_last().unwrap();
    assert_eq!(error["error"]["code"], "deadline_exceeded");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    // A request that was never admitted is an error.
    let streams = streaming(&server, &endless(json!({"stream": true, "n": 1})), 1);
    let answer = server.post("/v1/completions", &late(150, false));
    assert_eq!((answer.status, answer.error().2.as_str()), (408, "deadline_exceeded"));
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    drop(streams);
    server.becomes_idle();
}

/// A target does not end a request; whether it was met is counted. At its pace, the second one cannot meet a millisecond.
#[test]
fn targets_are_counted_and_end_nothing() {
    let mut config = config();
    config.scheduler.policy = "edf".into();
    let server = Server::start(config);
    let ask = |fields: Value| {
        let body = json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true, "n": 1, "kvist": fields});
        server.post("/v1/completions", &body).good()["usage"]["completion_tokens"].as_u64()
    };
    let counted =
        |result: &str| server.metric("kvist_latency_targets_total", &format!("result=\"{result}\","));
    assert_eq!(ask(json!({"pace": 1000})), Some(3));
    assert_eq!((counted("met"), counted("missed")), (0.0, 0.0));
    assert_eq!(ask(json!({"target_ms": 1u64 << 40})), Some(3));
    assert_eq!((counted("met"), counted("missed")), (1.0, 0.0));
    assert_eq!(ask(json!({"target_ms": 1, "pace": 20})), Some(3));
    assert_eq!((counted("met"), counted("missed")), (1.0, 1.0));
    server.becomes_idle();
}

/// Regression: one answer that had nothing yet at the deadline discarded what the others had. Answers that the queue had no place
/// for discarded all, too.
#[test]
fn a_deadline_leaves_the_answers_that_have_begun() {
    let mut config = config();
    (config.scheduler.max_batch, config.limits.max_queue) = (1, 2);
    let server = Server::start(config);
    for body in [json!({"prompt": ["a", "b"], "n": 1}), json!({"prompt": "a", "n": 4})] {
        let ask = |ms: u64| {
            let late = json!({"stream": false, "kvist": {"timeout_ms": ms, "pace": 1}});
            server.post("/v1/completions", &endless(with(body.clone(), &late)))
        };
        // On a busy machine the first answer may have no token within the first of these times.
        let whole = [2_000, 60_000].into_iter().map(ask).find(|answer| answer.status == 200);
        let whole = whole.expect("a token within a minute").good();
        assert_eq!(whole["kvist"]["ended"], "deadline_exceeded", "{whole}");
        let choices = whole["choices"].as_array().unwrap();
        assert_eq!(choices.len(), body["prompt"].as_array().map_or(4, Vec::len));
        assert!(choices.iter().all(|choice| choice["finish_reason"] == "length"), "{whole}");
        assert_eq!(choices.last().unwrap()["text"], "", "{whole}");
    }
    server.becomes_idle();
}

#[test]
fn a_server_that_ends_lets_requests_finish() {
    let mut server = Server::start(config());
    let body = endless(json!({"stream": true, "n": 1, "max_tokens": 120}));
    let mut reader = streaming(&server, &body, 1);
    let mut other = server.connect();
    let paused = server.pause();
    server.stop();
    // New requests are still accepted and get an error.
    server.until("the signal is heard", || server.get("/ready").status != 200);
    let refused = server.post("/v1/completions", &body);
    assert_eq!((refused.status, refused.error().2.as_str()), (503, "shutting_down"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(server.get("/health").status, 200);
    other.write_all(&request("GET", "/ready", &[], b"")).unwrap();
    assert_eq!(Answer::read(other).status, 503);
    drop(paused);
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    let events = Answer::events_of(&rest);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length", "{rest}");
    // Check the events' field, not the text: an answer may contain "error".
    assert!(events.iter().all(|event| event.get("error").is_none()), "{rest}");
    server.join();
}

#[test]
fn when_the_grace_is_over_requests_are_told() {
    let mut config = config();
    config.limits.grace_s = 0.1;
    let mut server = Server::start(config);
    let mut reader = streaming(&server, &endless(json!({"stream": true, "n": 2, "max_tokens": 990})), 1);
    let body = endless(json!({"n": 2, "max_tokens": 990})).to_string();
    let mut whole = server.connect();
    let headers = [("content-type", "application/json")];
    whole.write_all(&request("POST", "/v1/completions", &headers, body.as_bytes())).unwrap();
    server.until("both run", || server.live().0 >= 3);
    // They would go on at full speed, and might end before they are told.
    let paused = server.pause();
    server.stop();
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    let events = Answer::events_of(&rest);
    let (error, chunks) = events.split_last().unwrap();
    assert_eq!(error["error"]["code"], "shutting_down", "{rest}");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length", "{rest}");
    let answer = Answer::read(whole);
    assert_eq!((answer.status, answer.error().2.as_str()), (503, "shutting_down"));
    drop(paused);
    server.join();
}

/// hyper by itself detects a closed connection only while its read buffer is empty.
#[test]
fn a_client_that_goes_away_is_noticed_behind_what_it_sent() {
    let server = Server::start(config());
    let aborted = || server.metric("vllm:request_success_total", "finished_reason=\"abort\",");
    for behind in ["\r\n", "GET /health HTT"] {
        let mut stream = server.connect();
        let body = endless(json!({})).to_string();
        let headers = [("content-type", "application/json"), ("connection", "keep-alive")];
        let mut bytes = request("POST", "/v1/completions", &headers, body.as_bytes());
        bytes.extend_from_slice(behind.as_bytes());
        stream.write_all(&bytes).unwrap();
        server.until("it runs", || server.live().0 > 0);
        let (paused, before) = (server.pause(), aborted());
        drop(stream);
        server.until("it is noticed", || aborted() > before);
        drop(paused);
        server.becomes_idle();
    }
    assert_eq!(server.metric("vllm:request_success_total", "finished_reason=\"length\","), 0.0);
}

#[test]
fn large_bodies_do_not_stop_health_checks() {
    let mut config = config();
    config.limits.read_timeout_s = 3600.0;
    let server = Server::start(config);
    // The maximum number of values in a document, at the maximum size.
    let body = format!("{{\"prompt\": [0{}]}}", format!(",{:>29}", 0).repeat(100_000));
    let headers = [("content-type", "application/json")];
    let bytes = request("POST", "/v1/completions", &headers, body.as_bytes());
    std::thread::scope(|scope| {
        let send = || {
            let mut stream = server.connect();
            stream.write_all(&bytes).unwrap();
            Answer::read(stream)
        };
        until_a_round_answers_more_than(5, || {
            let senders: Vec<_> = (0..24).map(|_| scope.spawn(send)).collect();
            let mut answered = 0;
            while !senders.iter().all(|sender| sender.is_finished()) {
                assert_eq!(server.get("/health").status, 200);
                answered += 1;
            }
            let mut refused = 0;
            for sender in senders {
                let answer = sender.join().unwrap();
                match answer.status {
                    400 => assert_eq!(answer.error().2, "context_length_exceeded"),
                    503 => {
                        assert_eq!(answer.error().2, "server_busy");
                        assert!(answer.header("retry-after").is_some());
                        refused += 1;
                    }
                    status => panic!("{status}: {}", answer.text),
                }
            }
            assert!(refused < 24, "no request was answered");
            answered
        });
    });
    // Their memory is free again.
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).status, 200);
}

#[test]
fn beyond_the_last_connection_health_checks_are_answered() {
    let mut config = config();
    config.limits.max_connections = 2;
    let server = Server::start(config);
    let body = endless(json!({"stream": true, "n": 1, "max_tokens": 1990}));
    let streams = [streaming(&server, &body, 1), streaming(&server, &body, 1)];
    let paused = server.pause();
    let (body, headers) = (body.to_string(), [("content-type", "application/json")]);
    for _ in 0..3 {
        assert_eq!(server.send_until_answered("GET", "/health", &[], b"").status, 200);
        assert_eq!(server.send_until_answered("GET", "/ready", &[], b"").status, 200);
        let answer = server.send_until_answered("POST", "/v1/completions", &headers, body.as_bytes());
        assert_eq!((answer.status, answer.error().2.as_str()), (503, "too_many_connections"));
        assert!(answer.header("retry-after").is_some());
    }
    drop(streams);
    drop(paused);
    server.becomes_idle();
    server.until("places are free", || server.get("/v1/models").status == 200);
}

#[test]
fn a_client_that_does_not_read_is_hung_up_on() {
    let mut config = config();
    config.limits.read_timeout_s = 2.0;
    config.limits.max_connections = 1;
    let server = Server::start(config);
    // More responses than fit into the system's buffers, and the client does not read.
    let mut stream = server.connect();
    let ask = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n";
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let n_taken = (0..10_000).take_while(|_| stream.write_all(&ask.repeat(100)).is_ok()).count();
    assert!(n_taken < 10_000, "everything was taken");
    let is_answered = || server.send_until_answered("GET", "/v1/models", &[], b"").status == 200;
    server.until("the place is free", is_answered);
}

/// The other answers of an accepted request are submitted when its first answer has begun, which may be after
/// the signal.
#[test]
fn a_request_that_was_taken_gets_all_its_answers() {
    let mut config = config();
    config.scheduler.max_batch = 1;
    let mut server = Server::start(config);
    let streams = streaming(&server, &endless(json!({"stream": true, "n": 1})), 1);
    let mut stream = server.connect();
    let body = json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true, "n": 3, "kvist": {"pace": 1}});
    let body = body.to_string();
    let headers = [("content-type", "application/json")];
    stream.write_all(&request("POST", "/v1/completions", &headers, body.as_bytes())).unwrap();
    server.until("it waits", || server.live().1 > 0);
    server.stop();
    server.until("the signal is heard", || server.engine.is_draining());
    drop(streams);
    let document = Answer::read(stream).good();
    assert_eq!(document["choices"].as_array().unwrap().len(), 3);
    assert_eq!(document["usage"]["completion_tokens"], 9);
    server.join();
}

/// By default an answer ends where the room ends; with `long_answers = "reject"` a request that asks for more is refused.
#[test]
fn a_long_answer_is_shortened_or_refused() {
    let mut config = config();
    config.cache.tokens = Some(64);
    let body = |max_tokens: u32| json!({"prompt": vec![300; 40], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true});
    let ended = |answer: Answer| {
        let answer = answer.good();
        let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
        (tokens, answer["choices"][0]["finish_reason"].as_str().unwrap().to_owned())
    };
    let server = Server::start(config.clone());
    assert_eq!(ended(server.post("/v1/completions", &body(1000))), (24, "length".into()));

    config.limits.long_answers = kvist_server::LongAnswers::Reject;
    let server = Server::start(config);
    let refused = server.post("/v1/completions", &body(25));
    let (status, _, code, message) = refused.error();
    assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
    assert!(message.contains("40 tokens and 25 new ones") && message.contains("up to 24"), "{message}");
    assert_eq!(ended(server.post("/v1/completions", &body(24))), (24, "length".into()));
    // Without a limit the answer may take all the room.
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": true});
    assert_eq!(ended(server.post("/v1/chat/completions", &chat)).1, "length");
}
