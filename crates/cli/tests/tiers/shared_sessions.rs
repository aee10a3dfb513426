//! `kvist serve --sessions-shared` and `--sessions-store`: two processes over one Redis, one of them killed.
use crate::program::kvist;
use crate::program::server::{PATIENCE, Server};
use crate::serve::settle;
use kvist_testing::servers::Redis;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector.";

const FIXED: [&str; 8] = ["--port", "0", "--kv", "f32", "--weights", "f32", "--context", "2048"];
const LOAD: [&str; 2] = ["--tier-load", "always"];

fn start(args: &[&str]) -> Server {
    Server::spawn(&mut kvist(), &[&FIXED, args])
}

/// Waits for the store as long as it takes, because the machine may be slow.
fn shared(url: &str, more: &[&str]) -> Server {
    start(&[&["--tier-store", url, "--sessions-shared", "--tier-grace", "10m"][..], &LOAD, more].concat())
}

fn send(server: &Server, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let (status, answer) = server.send(method, path, &body.to_string());
    (status, serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

fn post(server: &Server, path: &str, body: &Value) -> Value {
    let (status, answer) = send(server, "POST", path, body);
    assert_eq!(status, 200, "{answer}");
    answer
}

fn path(id: &str) -> String {
    format!("/v1/sessions/{id}")
}

fn create(server: &Server) -> String {
    post(server, "/v1/sessions", &json!({"text": TEXT}))["id"].as_str().unwrap().to_owned()
}

fn generate(server: &Server, id: &str) -> String {
    let body = json!({"max_tokens": 20, "temperature": 0, "ignore_eos": true});
    let answer = post(server, &(path(id) + "/generate"), &body);
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Status and tokens of a session.
fn show(server: &Server, id: &str) -> (u16, Vec<Value>) {
    let (status, answer) = send(server, "GET", &path(id), &json!({}));
    (status, answer["tokens"].as_array().cloned().unwrap_or_default())
}

fn figure(server: &Server, name: &str) -> f64 {
    let (_, text) = server.send("GET", "/metrics", "");
    let name = format!("kvist_shared_sessions_{name}_total{{");
    let line = text.lines().find(|line| line.starts_with(&name)).unwrap_or_else(|| panic!("{text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn until(what: &str, is_true: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_true() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a server has recorded so many states.
fn recorded(server: &Server, states: f64) {
    until("recorded", || figure(server, "recorded") >= states);
}

/// What one server says that does it all.
fn expected(rounds: usize) -> Vec<String> {
    let server = start(&[]);
    let id = create(&server);
    (0..rounds).map(|_| generate(&server, &id)).collect()
}

#[test]
fn a_session_outlives_its_worker() {
    let Some(redis) = Redis::new() else { return };
    let (expected, url) = (expected(4), redis.url("kvist"));
    let dir = tempfile::tempdir().unwrap();
    let dir = ["--sessions-dir", dir.path().to_str().unwrap()];
    let mut a = shared(&url, &dir);
    let b = shared(&url, &[]);
    let id = create(&a);
    assert_eq!(generate(&a, &id), expected[0]);
    recorded(&a, 1.0);
    until("the answer is recorded", || show(&b, &id).1.len() == show(&a, &id).1.len());
    let forks = post(&a, &(path(&id) + "/fork"), &json!({"n": 2}))["sessions"].clone();
    let fork = |at: usize| forks[at]["id"].as_str().unwrap();
    (0..2).for_each(|at| until("the forks are recorded", || show(&b, fork(at)).0 == 200));
    let before = show(&a, &id);
    // Killed in mid-generation: what it had begun is lost, and nothing else.
    let body = json!({
        "max_tokens": 1500, "temperature": 0, "ignore_eos": true, "stream": true, "kvist": {"pace": 4},
    });
    let mut stream = a.ask("POST", &(path(&id) + "/generate"), &body.to_string());
    let mut some = [0; 2000];
    stream.read_exact(&mut some).unwrap();
    assert!(show(&a, &id).1.len() > before.1.len(), "it generates");
    a.signal("-KILL");
    a.wait();
    assert_eq!(show(&b, &id), before);
    assert_eq!(generate(&b, &id), expected[1]);
    assert_eq!(generate(&b, fork(0)), expected[1]);
    assert_eq!(send(&b, "DELETE", &path(fork(1)), &json!({})).0, 200);
    assert_eq!(generate(&b, &id), expected[2]);
    // The worker is back, with its directory: it has what the other made of its sessions.
    let a = shared(&url, &dir);
    for id in [&id, fork(0)] {
        until("what it missed is here", || show(&a, id) == show(&b, id));
    }
    until("the deletion is noted", || show(&a, fork(1)).0 == 404);
    assert_eq!(generate(&a, &id), expected[3]);
    until("the other goes on from there", || show(&b, &id) == show(&a, &id));
    assert_eq!(figure(&a, "lost") + figure(&b, "lost"), 0.0);
}

/// The store goes, and comes back empty: each worker goes on with what it has, and records it again.
#[test]
fn answers_go_on_without_the_store() {
    let Some(redis) = Redis::new() else { return };
    let (expected, url) = (expected(3), redis.url("kvist"));
    let (a, b) = (shared(&url, &[]), shared(&url, &[]));
    let id = create(&a);
    assert_eq!(generate(&a, &id), expected[0]);
    let port = redis.kill();
    assert_eq!(generate(&a, &id), expected[1]);
    assert!(figure(&a, "unanswered") > 0.0);
    let (status, answer) = send(&b, "GET", &path(&id), &json!({}));
    assert_eq!((status, &answer["error"]["code"]), (424, &json!("session_store_unavailable")), "{answer}");
    let Some(_redis) = Redis::again(port) else { return };
    // A store that was down is tried again after a pause.
    until("it is recorded", || show(&b, &id) == show(&a, &id));
    assert_eq!(generate(&b, &id), expected[2]);
}

/// The store has no room and evicts nothing, as it should. After three refusals in a row, as of changes that are made or tried again at the
/// same time, no session of another worker was found.
#[test]
fn a_full_store_is_still_read() {
    let Some(redis) = Redis::new() else { return };
    let url = redis.url("kvist");
    let own = ["--sessions-store", &url, "--tier-grace", "10m"];
    let (a, b) = (start(&own), start(&own));
    let ids: Vec<String> = (0..5).map(|_| create(&a)).collect();
    ids.iter().for_each(|id| until("it is recorded", || show(&b, id).0 == 200));
    let elsewhere = create(&a);
    recorded(&a, 6.0);
    redis.bound(1);
    for id in &ids {
        post(&b, &(path(id) + "/append"), &json!({"text": " more"}));
    }
    // The second time they are tried together.
    until("the store has refused all, twice", || figure(&b, "failed_writes") >= 10.0);
    assert_eq!(show(&b, &elsewhere), show(&a, &elsewhere));
    // A change of this worker is compared with what the store has, and recorded when there is room.
    assert_ne!(show(&a, &ids[0]), show(&b, &ids[0]));
    redis.bound(0);
    ids.iter().for_each(|id| until("it is recorded", || show(&a, id) == show(&b, id)));
    assert_eq!(figure(&a, "unanswered") + figure(&b, "unanswered"), 0.0);
    assert_eq!(figure(&a, "conflicts") + figure(&b, "conflicts"), 0.0);
}

/// Through a folder: what another process changed in a file is not taken for a session.
#[test]
fn a_damaged_record_is_no_session() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("fs://{}", folder.path().display());
    let (a, b) = (shared(&url, &[]), shared(&url, &[]));
    let id = create(&a);
    recorded(&a, 1.0);
    let mut damaged = 0;
    each_file(folder.path(), &mut |path| {
        let mut bytes = std::fs::read(path).unwrap();
        let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        if has("\"owner\"") {
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            std::fs::write(path, bytes).unwrap();
            damaged += 1;
        }
    });
    assert_eq!(damaged, 1);
    let (status, answer) = send(&b, "GET", &path(&id), &json!({}));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 404 && message.contains("damaged"), "{answer}");
    assert_eq!(figure(&b, "lost"), 1.0);
    let length = show(&a, &id).1.len();
    assert!(length > 0);
    generate(&a, &id);
    until("it is recorded anew", || show(&b, &id).1.len() == length + 20);
}

fn each_file(folder: &Path, visit: &mut impl FnMut(&Path)) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => each_file(&path, visit),
            false => visit(&path),
        }
    }
}

/// A store for sessions alone: without tiers, and beside tiers in another one, which then has no record.
#[test]
fn sessions_may_have_a_store_of_their_own() {
    let [sessions, blocks] = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let url = |folder: &tempfile::TempDir| format!("fs://{}", folder.path().display());
    let (of_sessions, of_blocks) = (url(&sessions), url(&blocks));
    let own = ["--sessions-store", &of_sessions, "--tier-grace", "10m"];
    let a = start(&own);
    let b = start(&[&own[..], &["--tier-store", &of_blocks], &LOAD[..]].concat());
    let (expected, id) = (expected(2), create(&a));
    assert_eq!(generate(&a, &id), expected[0]);
    until("the answer is recorded", || show(&b, &id).1.len() == show(&a, &id).1.len());
    assert_eq!(generate(&b, &id), expected[1]);
    until("that is recorded", || show(&a, &id) == show(&b, &id));
    settle(&b, 1.0);
    drop((a, b));
    let has_record = |folder: &Path| {
        let (mut n_files, mut found) = (0, false);
        each_file(folder, &mut |path| {
            let bytes = std::fs::read(path).unwrap();
            n_files += 1;
            found |= bytes.windows(7).any(|window| window == b"\"owner\"");
        });
        assert!(n_files > 0);
        found
    };
    assert!(has_record(sessions.path()) && !has_record(blocks.path()));
}

#[test]
fn it_needs_a_store() {
    let output = kvist().args(["serve", "--port", "0", "--sessions-shared"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    for words in ["--sessions-shared", "--tier-store", "--sessions-store", "redis://HOST:6379/PREFIX"] {
        assert!(text.contains(words), "{text}");
    }
}
