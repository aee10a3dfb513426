//! Concurrent request bodies: large ones block neither small ones nor large ones of another key.
use crate::server::*;
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;

const LARGEST: usize = 4 << 20;

fn two_keys() -> kvist_server::ServerConfig {
    let mut config = config();
    config.limits.max_body_bytes = LARGEST;
    config.limits.read_timeout_s = 3600.0;
    config.keys = vec![key("ann", "ann-secret", false), key("bob", "bob-secret", false)];
    config
}

fn send(server: &Server, key: &str, path: &str, body: &[u8]) -> Answer {
    let headers = [("content-type", "application/json"), ("authorization", key)];
    server.send("POST", path, &headers, body)
}

const ANN: &str = "Bearer ann-secret";
const BOB: &str = "Bearer bob-secret";

/// A body of the maximum size without its last byte.
fn stalled(server: &Server, key: &str) -> TcpStream {
    let mut stream = server.connect();
    let length = LARGEST.to_string();
    let headers = [("content-type", "application/json"), ("authorization", key), ("content-length", &length)];
    stream.write_all(&request("POST", "/tokenize", &headers, &vec![b' '; LARGEST - 1])).unwrap();
    stream
}

#[test]
fn bodies_that_stay_unfinished_keep_out_large_ones_of_their_own_name_alone() {
    let server = Server::start(two_keys());
    let open: Vec<TcpStream> = (0..16).map(|_| stalled(&server, ANN)).collect();
    let small = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let large = json!({"prompt": "word ".repeat(60_000)}).to_string();
    // The server may not yet have read the last bodies to their end.
    let refused = || send(&server, ANN, "/v1/completions", large.as_bytes()).status == 503;
    server.until("they hold all there is", refused);
    for key in [ANN, BOB] {
        let answer = send(&server, key, "/v1/completions", small.as_bytes());
        assert_eq!(answer.status, 200, "{key}: {}", answer.text);
    }
    let answer = send(&server, BOB, "/v1/completions", large.as_bytes());
    assert_eq!(answer.error().2, "context_length_exceeded");
    drop(open);
}

#[test]
fn small_bodies_do_not_wait_for_large_ones() {
    let server = Server::start(two_keys());
    let large = json!({"prompt": "word after word ".repeat(120_000)}).to_string();
    let small = json!({"prompt": "a", "max_tokens": 1}).to_string();
    std::thread::scope(|scope| {
        let tokenize = || assert_eq!(send(&server, ANN, "/tokenize", large.as_bytes()).status, 200);
        until_a_round_answers_more_than(8, || {
            let senders: Vec<_> = (0..12).map(|_| scope.spawn(tokenize)).collect();
            let mut answered = 0;
            while !senders.iter().all(|sender| sender.is_finished()) {
                for key in [ANN, BOB] {
                    assert_eq!(send(&server, key, "/v1/completions", small.as_bytes()).status, 200);
                    answered += 1;
                }
            }
            answered
        });
    });
}
