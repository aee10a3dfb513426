//! Sessions in a directory: they survive a restart, with their K and V.
use crate::server::*;
use crate::words::words_of;
use kvist_engine::devices;
use kvist_engine::saved::Origin;
use kvist_model::weights::WeightFormat;
use kvist_model::{Fingerprint, Model, ModelFile};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector.";

fn try_keep(
    server: &Server,
    config: &kvist_server::ServerConfig,
    dir: &Path,
    weights: &str,
    elsewhere: &str,
) -> Result<(), String> {
    let model = server.engine.model().config();
    let settings = config.engine(model);
    let print = Fingerprint { weights: weights.into(), tokenizer: "t".into(), config: "c".into() };
    let format = WeightFormat::default();
    let origin = Origin::new(print, format, &settings.paged.cache, model);
    let numerics = server.engine.model().device().numerics();
    let origin = (&origin, &*(numerics + elsewhere));
    server.state.keep_sessions(dir, origin, &settings.paged).map_err(|error| error.to_string())
}

/// A server whose sessions are kept in `dir`.
fn start(dir: &Path) -> Server {
    start_with(config(), dir)
}

fn start_with(config: kvist_server::ServerConfig, dir: &Path) -> Server {
    start_model(model().clone(), config, dir)
}

fn start_model(model: Arc<Model>, config: kvist_server::ServerConfig, dir: &Path) -> Server {
    let server = Server::start_with(model, config.clone());
    try_keep(&server, &config, dir, "w", "").unwrap();
    server
}

fn restart(mut server: Server, dir: &Path) -> Server {
    server.join();
    drop(server);
    start(dir)
}

fn ok(answer: Answer) -> Value {
    answer.good()
}

fn create(server: &Server, body: Value) -> String {
    ok(server.post("/v1/sessions", &body))["id"].as_str().unwrap().to_owned()
}

fn generate(server: &Server, id: &str, tokens: u32) -> Value {
    let body = json!({"max_tokens": tokens, "temperature": 0, "ignore_eos": true});
    ok(server.post(&format!("/v1/sessions/{id}/generate"), &body))
}

fn text(answer: &Value) -> String {
    let choice = &answer["choices"][0];
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn block_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in fs::read_dir(dir.join("blocks")).unwrap() {
        files.extend(fs::read_dir(folder.unwrap().path()).unwrap().map(|entry| entry.unwrap().path()));
    }
    files.sort();
    files
}

/// The document without the times, which depend on when the test runs.
fn shown(server: &Server, id: &str) -> Value {
    let mut document = ok(server.get(&format!("/v1/sessions/{id}")));
    document.as_object_mut().unwrap().remove("expires");
    document
}

#[test]
fn a_session_goes_on_after_a_restart_as_if_there_had_been_none() {
    let dir = tempfile::tempdir().unwrap();
    // What it would have said in one run.
    let plain = Server::start(config());
    let id = create(&plain, json!({"text": TEXT}));
    let expected: Vec<String> = (0..3).map(|_| text(&generate(&plain, &id, 20))).collect();

    let server = start(dir.path());
    let id = create(&server, json!({"text": TEXT, "name": "guide"}));
    assert_eq!(text(&generate(&server, &id, 20)), expected[0]);
    let before = shown(&server, &id);
    let server = restart(server, dir.path());
    assert_eq!(shown(&server, &id), before);
    let answer = generate(&server, &id, 20);
    assert_eq!(text(&answer), expected[1]);
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    // All full blocks of 16 tokens whose K and V the first run had computed: all but the last token.
    assert_eq!(cached(&answer), (prompt - 1) / 16 * 16);
    let server = restart(server, dir.path());
    assert_eq!(text(&generate(&server, &id, 20)), expected[2]);
}

/// Packed storages too, with `--deterministic`. Rows of t4-o are reused where the strongest channels of the keys have the same order,
/// and only there.
#[test]
fn packed_sessions_go_on_after_a_restart() {
    for kv in ["q8", "t4-o"] {
        let (dir, model) = (tempfile::tempdir().unwrap(), load_model(ModelFile::Embedded).unwrap());
        let mut packed = config();
        packed.cache.kv = kv.parse().unwrap();
        let start = |model: &Arc<Model>| {
            Server::start_on(model.clone(), &devices::on(&compute()), "cpu", packed.clone())
        };
        let plain = start(&model);
        let id = create(&plain, json!({"text": TEXT}));
        let expected: Vec<String> = (0..2).map(|_| text(&generate(&plain, &id, 20))).collect();
        let start = |model: &Arc<Model>| {
            let server = start(model);
            try_keep(&server, &packed, dir.path(), "w", "").unwrap();
            server
        };
        let stop = |mut server: Server| server.join();

        let server = start(&model);
        let id = create(&server, json!({"text": TEXT}));
        assert_eq!(text(&generate(&server, &id, 20)), expected[0], "{kv}");
        stop(server);
        let server = start(&model);
        let answer = generate(&server, &id, 20);
        let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!((cached(&answer), text(&answer)), ((prompt - 1) / 16 * 16, expected[1].clone()), "{kv}");
        stop(server);

        let other = load_model(ModelFile::Embedded).unwrap();
        other.channels().set(kvist_testing::other_channels(other.layout()).into()).unwrap();
        let server = start(&other);
        let cached = cached(&generate(&server, &id, 20));
        assert_eq!(cached > 0, kv == "q8", "{kv}: {cached} tokens with another order of channels");
    }
}

/// What another machine has computed has other last bits: tiers would give it to others as this machine's.
#[test]
fn what_another_machine_has_computed_is_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    let id = create(&server, json!({"text": TEXT}));
    generate(&server, &id, 20);
    let before = shown(&server, &id);
    server.join();
    drop(server);
    assert!(!block_files(dir.path()).is_empty());
    let server = Server::start_with(model().clone(), config());
    try_keep(&server, &config(), dir.path(), "w", ", of another machine").unwrap();
    assert_eq!(block_files(dir.path()), [] as [PathBuf; 0]);
    assert_eq!(shown(&server, &id), before, "the session is here");
    assert_eq!(cached(&generate(&server, &id, 20)), 0);
    server.state.flush_sessions();
    assert!(!block_files(dir.path()).is_empty(), "and saved again");
}

#[test]
fn branches_survive_and_share_their_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let trunk = create(&server, json!({"text": TEXT}));
    generate(&server, &trunk, 20);
    server.state.flush_sessions();
    let of_trunk = block_files(dir.path()).len();
    assert!(of_trunk >= 3, "{of_trunk}");
    let forks = ok(server.post(&format!("/v1/sessions/{trunk}/fork"), &json!({"n": 3})));
    let forks: Vec<String> = forks["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|fork| fork["id"].as_str().unwrap().to_owned())
        .collect();
    server.state.flush_sessions();
    assert_eq!(block_files(dir.path()).len(), of_trunk, "shared blocks are written once");
    for (fork, word) in forks.iter().zip([" First", " Second", " Third"]) {
        ok(server.post(&format!("/v1/sessions/{fork}/append"), &json!({"text": word})));
        generate(&server, fork, 20);
    }
    let before: Vec<Value> = std::iter::once(&trunk).chain(&forks).map(|id| shown(&server, id)).collect();
    let mut server = restart(server, dir.path());
    let after: Vec<Value> = std::iter::once(&trunk).chain(&forks).map(|id| shown(&server, id)).collect();
    assert_eq!(after, before);
    // Siblings are still siblings.
    ok(server.post(&format!("/v1/sessions/{}/keep", forks[1]), &json!({})));
    assert!(cached(&generate(&server, &forks[1], 4)) > 0);
    for id in [&trunk, &forks[1]] {
        ok(server.send("DELETE", &format!("/v1/sessions/{id}"), &[], b""));
    }
    server.state.flush_sessions();
    assert_eq!(block_files(dir.path()), [] as [PathBuf; 0], "the last session takes its blocks with it");
    server.join();
    assert_eq!(fs::read_dir(dir.path().join("sessions")).unwrap().count(), 0);
}

/// Layers with a window have only the blocks that it covers, and they are of use only together with those of the other layers.
#[test]
fn sessions_of_a_model_with_windows_survive() {
    let text_of =
        |n: u32| (0..n).map(|i| format!("w{}", (i * 37 + i * i) % 100)).collect::<Vec<_>>().join(" ");
    for (fixture, words) in [("gemma3", 61), ("gpt-oss", 75), ("qwen2-window-mixed", 64)] {
        let dir = tempfile::tempdir().unwrap();
        let model = words_of(fixture, None);
        let mut settings = config();
        settings.cache.tokens = Some(1024);
        let plain = Server::start_with(model.clone(), settings.clone());
        let id = create(&plain, json!({"text": text_of(words)}));
        let expected: Vec<String> = (0..4).map(|_| text(&generate(&plain, &id, 21))).collect();

        let start = || start_model(model.clone(), settings.clone(), dir.path());
        let stop = |mut server: Server| server.join();
        let server = start();
        let id = create(&server, json!({"text": text_of(words)}));
        assert_eq!(text(&generate(&server, &id, 21)), expected[0], "{fixture}");
        let before = shown(&server, &id);
        stop(server);
        let server = start();
        assert_eq!(shown(&server, &id), before, "{fixture}");
        let answer = generate(&server, &id, 21);
        assert_eq!(text(&answer), expected[1], "{fixture}");
        assert!(cached(&answer) > 0, "{fixture}: {}", cached(&answer));
        // A branch of a restored session, and its trunk.
        let fork = ok(server.post(&format!("/v1/sessions/{id}/fork"), &json!({"n": 1})));
        let fork = fork["sessions"][0]["id"].as_str().unwrap().to_owned();
        stop(server);
        let server = start();
        for id in [&id, &fork] {
            let answer = generate(&server, id, 21);
            assert_eq!(text(&answer), expected[2], "{fixture}");
            assert!(cached(&answer) > 0, "{fixture}");
        }
        stop(server);
        // Without every third block the rest is of less use, and the text is the same.
        for path in block_files(dir.path()).into_iter().step_by(3) {
            fs::remove_file(path).unwrap();
        }
        let server = start();
        for id in [&id, &fork] {
            assert_eq!(text(&generate(&server, id, 21)), expected[3], "{fixture}");
        }
    }
}

#[test]
fn damaged_blocks_are_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let plain = Server::start(config());
    let id = create(&plain, json!({"text": TEXT}));
    let expected: Vec<String> = (0..2).map(|_| text(&generate(&plain, &id, 20))).collect();
    for kind in ["flip", "cut", "missing", "all"] {
        let dir = dir.path().join(kind);
        let server = start(&dir);
        let id = create(&server, json!({"text": TEXT}));
        assert_eq!(text(&generate(&server, &id, 20)), expected[0]);
        let mut server = server;
        server.join();
        drop(server);
        for (i, path) in block_files(&dir).into_iter().enumerate() {
            let mut bytes = fs::read(&path).unwrap();
            match kind {
                "flip" if i == 0 => {
                    let at = bytes.len() / 2;
                    bytes[at] ^= 4;
                    fs::write(&path, bytes).unwrap();
                }
                "cut" => fs::write(&path, &bytes[..bytes.len() - 1]).unwrap(),
                "missing" if i % 2 == 0 => fs::remove_file(&path).unwrap(),
                "all" => fs::remove_file(&path).unwrap(),
                _ => {}
            }
        }
        let server = start(&dir);
        let answer = generate(&server, &id, 20);
        assert_eq!(text(&answer), expected[1], "{kind}");
        if kind == "cut" || kind == "all" {
            assert_eq!(cached(&answer), 0, "{kind}");
        }
    }
}

#[test]
fn a_damaged_session_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    let ids = [create(&server, json!({"text": TEXT})), create(&server, json!({"text": "Another"}))];
    server.join();
    drop(server);
    let path = dir.path().join(format!("sessions/{}.json", ids[0]));
    let written = fs::read_to_string(&path).unwrap().replacen("\"owner\"", "\"ownex\"", 1);
    fs::write(&path, written).unwrap();
    let server = start(dir.path());
    assert_eq!(server.get(&format!("/v1/sessions/{}", ids[0])).status, 404);
    assert_eq!(server.get(&format!("/v1/sessions/{}", ids[1])).status, 200);
    assert!(path.with_extension("damaged").exists());
}

#[test]
fn what_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("photo.jpg"), "").unwrap();
    let mut server = start(dir.path());
    create(&server, json!({"text": TEXT}));
    let second = Server::start(config());
    let refused = |config: kvist_server::ServerConfig, dir: &Path, weights: &str, part: &str| {
        let error = try_keep(&second, &config, dir, weights, "").expect_err(part);
        assert!(error.contains(part), "{error} lacks {part}");
    };
    refused(config(), dir.path(), "w", "another process uses");
    server.join();
    drop(server);
    refused(config(), other.path(), "w", "give an empty directory");
    refused(config(), dir.path(), "v", "weights of hash");
    let mut packed = config();
    packed.cache.kv = "q8".parse().unwrap();
    refused(packed, dir.path(), "w", "--kv");
    try_keep(&second, &config(), dir.path(), "w", "").unwrap();
}

#[test]
fn a_session_is_saved_and_loaded_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config();
    config.keys = vec![key("ann", "ann-secret", false), key("bob", "bob-secret", false)];
    config.sessions.max_sessions = 4;
    let mut server = start_with(config.clone(), dir.path());
    let send = |server: &Server, who: &str, path: &str, body: Value| {
        let bearer = format!("Bearer {who}-secret");
        let headers = [("content-type", "application/json"), ("authorization", bearer.as_str())];
        server.send("POST", path, &headers, body.to_string().as_bytes())
    };
    let id =
        ok(send(&server, "ann", "/v1/sessions", json!({"text": TEXT})))["id"].as_str().unwrap().to_owned();
    let more = json!({"max_tokens": 20, "temperature": 0, "ignore_eos": true});
    ok(send(&server, "ann", &format!("/v1/sessions/{id}/generate"), more.clone()));
    let save = format!("/v1/sessions/{id}/save");
    let saved = ok(send(&server, "ann", &save, json!({"file": "talk"})));
    assert_eq!(saved["n_tokens"].as_u64().unwrap() / 16 * 16, saved["stored_tokens"].as_u64().unwrap());
    let expected = text(&ok(send(&server, "ann", &format!("/v1/sessions/{id}/generate"), more.clone())));

    server.join();
    drop(server);
    let server = start_with(config, dir.path());
    let loaded = ok(send(&server, "ann", "/v1/sessions/load", json!({"file": "talk"})));
    assert_ne!(loaded["id"], id.as_str());
    assert_eq!(
        (&loaded["n_tokens"], &loaded["stored_tokens"]),
        (&saved["n_tokens"], &saved["stored_tokens"])
    );
    let path = format!("/v1/sessions/{}/generate", loaded["id"].as_str().unwrap());
    let answer = ok(send(&server, "ann", &path, more));
    assert_eq!(text(&answer), expected);
    assert!(cached(&answer) >= saved["stored_tokens"].as_u64().unwrap() - 16);

    // Names are the owner's own, and never paths.
    assert_eq!(send(&server, "bob", "/v1/sessions/load", json!({"file": "talk"})).status, 404);
    assert_eq!(send(&server, "bob", &save, json!({"file": "talk"})).status, 404);
    let names = [
        "",
        ".",
        "..",
        "../talk",
        "a/b",
        "/etc/passwd",
        "a\\b",
        ".hidden",
        "a\u{0}",
        "ä",
        "talk.json/..",
        &"a".repeat(65),
    ];
    for name in names {
        for path in [save.as_str(), "/v1/sessions/load"] {
            let answer = send(&server, "ann", path, json!({"file": name}));
            assert_eq!(
                (answer.status, answer.json()["error"]["param"].as_str()),
                (400, Some("file")),
                "{name:?}"
            );
        }
    }
    for name in ["b", "c", "d"] {
        ok(send(&server, "ann", &save, json!({"file": name})));
    }
    assert_eq!(send(&server, "ann", &save, json!({"file": "e"})).status, 429);
    ok(send(&server, "ann", &save, json!({"file": "d"})));
}

#[test]
fn without_a_directory_files_are_refused() {
    let server = Server::start(config());
    let id = create(&server, json!({"text": TEXT}));
    for path in [format!("/v1/sessions/{id}/save"), "/v1/sessions/load".into()] {
        let answer = server.post(&path, &json!({"file": "talk"}));
        assert_eq!(answer.status, 400);
        assert!(answer.text.contains("--sessions-dir"), "{}", answer.text);
    }
}
