//! Admission: shares of the queue, idle connections, request heads that are too long, and rejections without
//! delay.
use crate::server::*;
use serde_json::{Value, json};
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

const ANN: &str = "Bearer ann-secret";
const BOB: &str = "Bearer bob-secret";

fn two_keys() -> kvist_server::ServerConfig {
    let mut config = config();
    config.keys = vec![
        key("ann", "ann-secret", false),
        key("bob", "bob-secret", false),
        key("ops", "ops-secret", true),
    ];
    config
}

/// Outlasts any test: it generates one token per second.
fn endless(n: u32) -> Value {
    json!({"prompt": "fn main", "max_tokens": 450, "ignore_eos": true, "temperature": 1, "n": n, "stream": true,
        "kvist": {"pace": 1}})
}

/// Starts a stream; returns the status and the connection.
fn ask(server: &Server, key: &str, body: &Value) -> (u16, BufReader<TcpStream>) {
    let mut stream = server.connect();
    let headers = [("content-type", "application/json"), ("authorization", key)];
    stream.write_all(&request("POST", "/v1/completions", &headers, body.to_string().as_bytes())).unwrap();
    let mut reader = BufReader::new(stream);
    let (status, _) = head(&mut reader);
    (status, reader)
}

/// Regression: `n = 64` from ten threads of one tenant filled the queue, and every other tenant got 429.
#[test]
fn a_name_that_fills_the_queue_leaves_the_others_their_shares() {
    let mut config = two_keys();
    config.scheduler.max_batch = 1;
    config.limits.max_queue = 12; // 2 reserved for each of 3 names, 6 shared
    let server = Server::start(config);
    // The request's other answers take all places that this key can have.
    let mut open = vec![ask(&server, ANN, &endless(64)).1];
    next_event(&mut open[0]);
    let began = Instant::now();
    let refused = loop {
        let (status, reader) = ask(&server, ANN, &endless(1));
        match status {
            429 => break reader,
            _ => open.push(reader),
        }
        assert!(began.elapsed() < PATIENCE, "the queue does not fill");
    };
    let document: Value = serde_json::from_reader(refused).unwrap();
    let message = document["error"]["message"].as_str().unwrap();
    assert_eq!(document["error"]["code"], "queue_full");
    assert!(message.contains("for this key: 8 requests of its name are waiting"), "{message}");
    for _ in 0..2 {
        let (status, reader) = ask(&server, BOB, &endless(1));
        assert_eq!(status, 200, "its share is its own");
        open.push(reader);
    }
    let (status, reader) = ask(&server, BOB, &endless(1));
    let document: Value = serde_json::from_reader(reader).unwrap();
    assert_eq!((status, document["error"]["code"].as_str()), (429, Some("queue_full")));
    let metrics = server.send("GET", "/metrics", &[("authorization", "Bearer ops-secret")], b"").text;
    let line = metrics.lines().find(|line| line.starts_with("kvist_queue_full_total{")).unwrap();
    assert!(line.ends_with(" 2"), "{line}");
    drop(open);
    server.becomes_idle();
    assert_eq!(ask(&server, ANN, &json!({"prompt": "a", "max_tokens": 1})).0, 200);
}

/// A connection with an incomplete request head.
fn dribbler(server: &Server) -> TcpStream {
    let mut stream = server.connect();
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nhost: loc").unwrap();
    stream
}

/// Regression: 1,100 connections that sent their headers in small pieces took all places and the reserve.
#[test]
fn connections_that_dribble_keep_no_one_out() {
    for keyed in [false, true] {
        let mut config = if keyed { two_keys() } else { config() };
        config.limits.max_connections = 16;
        config.limits.read_timeout_s = 600.0;
        config.limits.header_timeout_s = 600.0;
        let server = Server::start(config);
        let key = [("authorization", "Bearer ops-secret"), ("content-type", "application/json")];
        // One connection that waits for an answer, and one that has completed a request before.
        let (_, mut running) = ask(&server, "Bearer ops-secret", &endless(1));
        next_event(&mut running);
        let mut kept = server.connect();
        let stays = |stream: &mut TcpStream| {
            let ask =
                "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer ops-secret\r\n\r\n";
            stream.write_all(ask.as_bytes()).unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (status, headers) = head(&mut reader);
            let length =
                headers.iter().find(|(name, _)| name == "content-length").unwrap().1.parse().unwrap();
            reader.read_exact(&mut vec![0; length]).unwrap();
            status
        };
        assert_eq!(stays(&mut kept), 200);
        let mut crowd: Vec<TcpStream> = (0..64).map(|_| dribbler(&server)).collect();
        for _ in 0..20 {
            let answer = server.send("GET", "/v1/models", &key, b"");
            assert_eq!(answer.status, 200, "{}", answer.text);
            assert_eq!(server.get("/health").status, 200);
            crowd.push(dribbler(&server));
        }
        assert_eq!(stays(&mut kept), 200, "a known connection goes behind those that have shown nothing");
        next_event(&mut running);
        let metrics = server.send("GET", "/metrics", &key, b"").text;
        let of = |name: &str| -> f64 {
            let line = metrics.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert!(of("kvist_connections") <= 16.0);
        assert!(of("kvist_connections_known") >= 2.0);
        assert!(of("kvist_connections_displaced_total") >= 64.0);
        // The oldest connections were closed.
        let mut first = &crowd[0];
        assert!(matches!(first.read(&mut [0; 16]), Ok(0) | Err(_)));
        drop((running, crowd));
        server.becomes_idle();
    }
}

#[test]
fn the_head_of_a_request_has_its_time() {
    let mut config = config();
    config.limits.header_timeout_s = 0.2;
    config.limits.read_timeout_s = 600.0;
    let server = Server::start(config);
    let mut slow = dribbler(&server);
    assert_eq!(
        slow.read(&mut [0; 16]).unwrap(),
        0,
        "the connection ends before the client stops waiting for it"
    );
}

/// Regression: heads that arrived in one piece could exceed `max_header_bytes`, and the limit of 100 lines was
/// not documented.
#[test]
fn the_limits_of_heads_are_what_they_say() {
    let mut config = config();
    config.limits.max_header_bytes = 8 << 10;
    let server = Server::start(config);
    let ask = |head: String| {
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        Answer::read(stream).status
    };
    let begin = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    let long = |bytes: usize| {
        let wide = "x".repeat(bytes - begin.len() - "x-wide: \r\n\r\n".len());
        let head = format!("{begin}x-wide: {wide}\r\n\r\n");
        assert_eq!(head.len(), bytes);
        head
    };
    assert_eq!(ask(long(8 << 10)), 200);
    assert_eq!(ask(long((8 << 10) + 1)), 431);
    assert_eq!(ask(long(40_000)), 431);
    let lines = |n: usize| format!("{begin}{}\r\n", "x: y\r\n".repeat(n - 2));
    assert_eq!(ask(lines(100)), 200);
    assert_eq!(ask(lines(101)), 431);
}

/// Regression: 401, 413 and 415 were sent only after the rest of the body, or five seconds later.
#[test]
fn refusals_do_not_wait_for_bodies() {
    let mut config = two_keys();
    config.limits.read_timeout_s = 600.0;
    let server = Server::start(config);
    let json_type = ("content-type", "application/json");
    let length = ("content-length", "4000");
    let key = ("authorization", ANN);
    /// (path, headers, status)
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], u16);
    let rows: [Row; 6] = [
        ("/v1/completions", &[json_type, length], 401),
        ("/v1/completions", &[json_type, key, ("content-length", "40000000")], 413),
        ("/v1/completions", &[json_type, key, length, ("content-encoding", "gzip")], 415),
        ("/v1/completions", &[("content-type", "text/plain"), key, length], 415),
        ("/nowhere", &[json_type, key, length], 404),
        ("/health", &[json_type, key, length], 405),
    ];
    for (path, headers, status) in rows {
        let mut text = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n");
        headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
        let mut stream = server.connect();
        stream.write_all((text + "\r\n{").as_bytes()).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (found, answered) = head(&mut reader);
        assert_eq!(found, status, "{path}");
        // The server does not wait for the rest; the response closes the connection.
        assert!(answered.contains(&("connection".into(), "close".into())), "{path}: {answered:?}");
        let mut body = String::new();
        reader.read_to_string(&mut body).unwrap();
        assert!(body.contains("\"error\""), "{path}: {body}");
        // A client that is still sending is not cut off.
        stream.write_all(&[b' '; 2000]).unwrap();
    }
    // After a complete body the connection stays open.
    let mut stream = server.connect();
    for _ in 0..2 {
        let body = "{\"prompt\": \"a\"}";
        let text = format!(
            "POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: {ANN}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(text.as_bytes()).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (status, headers) = head(&mut reader);
        let length = headers.iter().find(|(name, _)| name == "content-length").unwrap().1.parse().unwrap();
        reader.read_exact(&mut vec![0; length]).unwrap();
        assert_eq!(status, 200);
        assert!(!headers.iter().any(|(name, _)| name == "connection"), "{headers:?}");
    }
}

/// All running requests of one key together leave other keys their share of connections.
#[test]
fn a_name_with_many_requests_under_way_leaves_the_others_theirs() {
    let mut config = two_keys();
    config.limits.max_connections = 12; // 2 reserved for each of 3 names, 6 shared
    config.limits.max_queue = 1000;
    config.limits.read_timeout_s = 600.0;
    let server = Server::start(config);
    let mut open = Vec::new();
    for _ in 0..8 {
        let (status, reader) = ask(&server, ANN, &endless(1));
        assert_eq!(status, 200);
        open.push(reader);
    }
    let (status, reader) = ask(&server, ANN, &endless(1));
    let document: Value = serde_json::from_reader(reader).unwrap();
    assert_eq!((status, document["error"]["code"].as_str()), (503, Some("too_many_connections")));
    let (status, reader) = ask(&server, BOB, &endless(1));
    assert_eq!(status, 200);
    open.push(reader);
    drop(open);
    server.becomes_idle();
}
