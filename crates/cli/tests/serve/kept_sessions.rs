//! `kvist serve --sessions-dir`, killed at any moment: every session is there as before or after its last change.
use crate::program::kvist;
use crate::program::server::Server;
use kvist_testing::SplitMix64;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements.";

fn start(dir: &Path) -> Server {
    let dir = dir.to_str().unwrap();
    let args = ["--port", "0", "--kv", "f32", "--weights", "f32", "--context", "2048", "--sessions-dir", dir];
    Server::spawn(&mut kvist(), &[&args])
}

fn send(server: &Server, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let (status, answer) = server.send(method, path, &body.to_string());
    (status, serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

fn tokens(server: &Server, id: &str) -> Option<Vec<Value>> {
    let (_, answer) = send(server, "GET", &format!("/v1/sessions/{id}"), &json!({}));
    answer["tokens"].as_array().cloned()
}

/// Whether a file was being written.
fn has_partial(dir: &Path) -> bool {
    let mut entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.any(
        |path| {
            if path.is_dir() { has_partial(&path) } else { path.to_string_lossy().ends_with(".partial") }
        },
    )
}

/// `KVIST_KILLS=100` kills more often.
#[test]
fn a_kill_leaves_the_old_or_the_new_state() {
    let kills =
        std::env::var("KVIST_KILLS").map_or(3, |kills| kills.parse().expect("KVIST_KILLS is a number"));
    let (dir, mut random, mut torn) = (tempfile::tempdir().unwrap(), SplitMix64(11), 0);
    let mut server = start(dir.path());
    let (_, session) = send(&server, "POST", "/v1/sessions", &json!({"text": TEXT}));
    let id = session["id"].as_str().unwrap().to_owned();
    // Waits for the disk: from here on the session exists.
    send(&server, "POST", &format!("/v1/sessions/{id}/save"), &json!({"file": "first"}));
    let path = |verb: &str| format!("/v1/sessions/{id}/{verb}");
    let mut states = vec![Vec::new(), tokens(&server, &id).unwrap()];
    for kill in 0..kills {
        let more = json!({"max_tokens": 18 + kill % 5, "temperature": 0, "ignore_eos": true});
        send(&server, "POST", &path("generate"), &more);
        states.push(tokens(&server, &id).unwrap());
        send(&server, "POST", &path("fork"), &json!({"n": 1}));
        send(&server, "POST", &path("append"), &json!({"text": " and"}));
        states.push(tokens(&server, &id).unwrap());
        // The append, and what is left of the fork, are being written or are written.
        std::thread::sleep(Duration::from_micros(random.below(6_000).into()));
        server.signal("-KILL");
        server.wait();
        torn += usize::from(has_partial(dir.path()));
        server = start(dir.path());
        let found = tokens(&server, &id).expect("a session that was there before is there");
        assert!(states.contains(&found), "kill {kill}: {} tokens", found.len());
        // What one server says after a kill is what another says that never had the blocks.
        let (_, answer) = send(&server, "POST", &path("generate"), &more);
        states.push(tokens(&server, &id).unwrap()); // the next kill may find this one
        let (_, fresh) =
            send(&server, "POST", "/v1/sessions", &json!({"tokens": found, "cache_salt": kill.to_string()}));
        let fresh = format!("/v1/sessions/{}/generate", fresh["id"].as_str().unwrap());
        let (_, expected) = send(&server, "POST", &fresh, &more);
        assert!(answer["choices"][0]["text"].is_string(), "kill {kill}: {answer}");
        assert_eq!(answer["choices"][0]["text"], expected["choices"][0]["text"], "kill {kill}");
        assert_eq!(expected["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        // Not longer with every kill, and not more sessions: the context and the server's limits would end the test.
        let first = states[1].clone();
        send(&server, "POST", &path("rollback"), &json!({"to": first.len()}));
        states.push(first);
        let (_, all) = send(&server, "GET", "/v1/sessions", &json!({}));
        let others = all["data"].as_array().unwrap().iter().filter_map(|one| one["id"].as_str());
        for other in others.filter(|other| *other != id) {
            send(&server, "DELETE", &format!("/v1/sessions/{other}"), &json!({}));
        }
    }
    println!("{kills} kills, {torn} of them while a file was written");
    let (_, loaded) = send(&server, "POST", "/v1/sessions/load", &json!({"file": "first"}));
    assert_eq!(tokens(&server, loaded["id"].as_str().unwrap()).as_ref(), states.get(1));
    let (_, all) = send(&server, "GET", "/v1/sessions", &json!({}));
    assert!(all["data"].as_array().unwrap().iter().any(|one| one["id"] == id.as_str()));
}
