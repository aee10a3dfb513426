//! Sessions that two servers share through a store: either one continues them.
use crate::server::*;
use kvist_engine::saved::Origin;
use kvist_engine::sessions::SharedStore;
use kvist_model::Fingerprint;
use kvist_model::weights::WeightFormat;
use kvist_server::ServerConfig;
use kvist_store::{BlockStore, Ram};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::runtime::Runtime;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector.";

/// The runtime and the store of a fleet.
struct Fleet {
    runtime: Runtime,
    store: Arc<dyn BlockStore>,
}

impl Fleet {
    fn new() -> Fleet {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Fleet { runtime: runtime.unwrap(), store: Arc::new(Ram::new(64 << 20)) }
    }

    fn start(&self, config: ServerConfig, weights: &str) -> Server {
        let server = Server::start(config.clone());
        let model = server.engine.model().config();
        let print = Fingerprint { weights: weights.into(), tokenizer: "t".into(), config: "c".into() };
        let cache = &config.engine(model).paged.cache;
        let origin = Origin::new(print, WeightFormat::default(), cache, model);
        let (store, runtime) = (self.store.clone(), self.runtime.handle().clone());
        let most_tokens = config.most_taken_over(model.context);
        let store = SharedStore { store, runtime, deadline: PATIENCE, most_tokens };
        server.state.share_sessions(store, &origin).unwrap();
        server
    }
}

fn two() -> (Fleet, Server, Server) {
    let fleet = Fleet::new();
    let [a, b] = [0, 1].map(|_| fleet.start(config(), "w"));
    (fleet, a, b)
}

fn path(id: &str) -> String {
    format!("/v1/sessions/{id}")
}

fn create(server: &Server, body: Value) -> String {
    server.post("/v1/sessions", &body).good()["id"].as_str().unwrap().to_owned()
}

/// The answer's text. Its session is recorded.
fn generate(server: &Server, id: &str, tokens: u32) -> String {
    let body = json!({"max_tokens": tokens, "temperature": 0, "ignore_eos": true});
    let answer = server.post(&(path(id) + "/generate"), &body).good();
    server.state.flush_sessions();
    let choice = &answer["choices"][0];
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned()
}

fn shown(server: &Server, id: &str) -> Value {
    let mut document = server.get(&path(id)).good();
    document.as_object_mut().unwrap().remove("expires");
    document
}

fn delete(server: &Server, id: &str) -> Answer {
    server.send("DELETE", &path(id), &[], b"")
}

/// Text or messages with tools, on whichever server: the documents and the texts are those of one that did it all.
#[test]
fn a_session_goes_from_server_to_server() {
    let (_fleet, a, b) = two();
    let alone = Server::start(config());
    let messages = json!([{"role": "user", "content": "Name a collection."}]);
    for body in [json!({"text": TEXT, "name": "guide", "cache_salt": "s"}), json!({"messages": messages})] {
        let reference = create(&alone, body.clone());
        let id = create(&a, body.clone());
        for server in [&a, &b, &b, &a, &b] {
            assert_eq!(generate(server, &id, 12), generate(&alone, &reference, 12), "{body}");
            if let Some(messages) = body.get("messages") {
                for (server, id) in [(&alone, &reference), (server, &id)] {
                    server.post(&(path(id) + "/append"), &json!({"messages": messages})).good();
                    server.state.flush_sessions();
                }
            }
            let without_id = |mut document: Value| {
                document
                    .as_object_mut()
                    .unwrap()
                    .retain(|name, _| !["id", "created"].contains(&name.as_str()));
                document
            };
            let (here, there) = (shown(&a, &id), shown(&b, &id));
            assert_eq!(here, there);
            assert_eq!(without_id(here), without_id(shown(&alone, &reference)));
        }
    }
    assert!(b.metric("kvist_shared_sessions_adopted_total", "") >= 2.0);
    assert!(a.metric("kvist_shared_sessions_recorded_total", "") >= 4.0);
    for name in ["failed_writes", "unanswered", "conflicts", "lost"] {
        assert_eq!(a.metric(&format!("kvist_shared_sessions_{name}_total"), ""), 0.0, "{name}");
    }
    assert!(!alone.get("/metrics").text.contains("kvist_shared_sessions"));
}

/// Every operation works on a server that has never seen the session.
#[test]
fn every_operation_finds_the_session() {
    let (_fleet, a, b) = two();
    let text = "A vector owns its elements.";
    let operations = [
        ("append", json!({"text": " So"})),
        ("generate", json!({"max_tokens": 2})),
        ("fork", json!({"n": 2})),
        ("rollback", json!({"to": 3})),
    ];
    for (operation, body) in operations {
        let id = create(&a, json!({"text": text}));
        a.state.flush_sessions();
        b.post(&format!("{}/{operation}", path(&id)), &body).good();
    }
    let id = create(&a, json!({"text": text}));
    let forks = a.post(&(path(&id) + "/fork"), &json!({"n": 2})).good();
    let fork = |at: usize| forks["sessions"][at]["id"].as_str().unwrap();
    a.state.flush_sessions();
    assert_eq!(shown(&b, fork(1))["parent"], id.as_str(), "the parent is not here yet");
    assert_eq!(b.post(&(path(fork(0)) + "/keep"), &json!({})).good()["deleted"], json!([fork(1)]));
    delete(&b, &id).good();
    b.state.flush_sessions();
    for gone in [fork(1), &id] {
        assert_eq!(a.get(&path(gone)).status, 404);
    }
    assert_eq!(shown(&a, fork(0))["parent"], Value::Null, "its parent is gone");
}

#[test]
fn only_the_owner_finds_a_session_and_only_with_the_same_model() {
    let fleet = Fleet::new();
    let mut config = config();
    config.keys = vec![key("ann", "ann-secret-key", false), key("bob", "bob-secret-key", false)];
    let [a, b] = [0, 1].map(|_| fleet.start(config.clone(), "w"));
    let other = fleet.start(config, "v");
    let ask = |server: &Server, name: &str, path: &str| {
        let header = format!("Bearer {name}-secret-key");
        server.send("GET", path, &[("authorization", &header)], b"")
    };
    let headers = [("authorization", "Bearer ann-secret-key"), ("content-type", "application/json")];
    let answer = a.send("POST", "/v1/sessions", &headers, json!({"text": TEXT}).to_string().as_bytes());
    let id = answer.good()["id"].as_str().unwrap().to_owned();
    a.state.flush_sessions();
    for server in [&b, &a] {
        assert_eq!(ask(server, "bob", &path(&id)).status, 404);
        assert_eq!(ask(server, "ann", &path(&id)).status, 200);
        assert_eq!(ask(server, "bob", &path(&id)).status, 404);
    }
    assert_eq!(ask(&other, "ann", &path(&id)).status, 404);
}

/// What a client is told about a session that is not here.
#[test]
fn a_refusal_says_what_to_do() {
    let (_fleet, shared, _) = two();
    let alone = Server::start(config());
    let id = format!("sess-{:032x}", 7);
    let (status, _, code, message) = alone.get(&path(&id)).error();
    assert_eq!((status, code.as_str()), (404, "session_not_found"));
    for words in ["in one worker", "x-session-id", "consistent_hash", "--sessions-shared"] {
        assert!(message.contains(words), "{message}");
    }
    let (status, _, code, message) = shared.get(&path(&id)).error();
    assert_eq!((status, code.as_str()), (404, "session_not_found"));
    assert!(message.contains("the shared store has dropped its record"), "{message}");
}

/// A client that draws the id can send it to a router from the creation on, and may try again without making two sessions.
#[test]
fn a_client_may_draw_the_id() {
    let (_fleet, a, b) = two();
    let id = "sess-0123456789abcdef0123456789abcdef";
    assert_eq!(create(&a, json!({"id": id, "text": TEXT})), id);
    a.state.flush_sessions();
    for server in [&a, &b] {
        let (status, param, code, _) = server.post("/v1/sessions", &json!({"id": id})).error();
        assert_eq!((status, param.as_str(), code.as_str()), (409, "id", "session_exists"));
    }
    delete(&a, id).good();
    for server in [&a, &b] {
        a.state.flush_sessions();
        assert_eq!(server.post("/v1/sessions", &json!({"id": id})).status, 409, "its note would remove it");
    }
    let (status, param, ..) = a.post("/v1/sessions", &json!({"id": "mine"})).error();
    assert_eq!((status, param.as_str()), (400, "id"));
    // Without a shared store too.
    let alone = Server::start(config());
    assert_eq!(create(&alone, json!({"id": id})), id);
    assert_eq!(alone.post("/v1/sessions", &json!({"id": id})).status, 409);
    delete(&alone, id).good();
    assert_eq!(create(&alone, json!({"id": id})), id);
}

/// A worker with room for one session continues any number that others made, one after the other. What it made itself leaves no room, and
/// then a session that is elsewhere can still be deleted.
#[test]
fn a_quota_is_no_obstacle_to_sessions_of_others() {
    let fleet = Fleet::new();
    let mut small = config();
    small.sessions.max_sessions = 1;
    let (a, b) = (fleet.start(config(), "w"), fleet.start(small, "w"));
    let ids = [0, 1].map(|_| create(&a, json!({"text": TEXT})));
    a.state.flush_sessions();
    for id in [&ids[0], &ids[1], &ids[0]] {
        assert_eq!(shown(&a, id), shown(&b, id));
        assert_eq!(b.get("/v1/sessions").good()["data"].as_array().unwrap().len(), 1);
    }
    let own = create(&b, json!({"text": TEXT}));
    b.state.flush_sessions();
    let (status, _, code, _) = b.get(&path(&ids[0])).error();
    assert_eq!((status, code.as_str()), (429, "session_quota"));
    assert_eq!(delete(&b, &ids[0]).good()["deleted"], true);
    b.state.flush_sessions();
    assert_eq!(a.get(&path(&ids[0])).status, 404);
    assert_eq!(delete(&b, &ids[0]).status, 404);
    delete(&b, &own).good();
    assert_eq!(shown(&a, &ids[1]), shown(&b, &ids[1]));
}

/// A server that shuts down has recorded everything when it has ended.
#[test]
fn a_server_that_shuts_down_leaves_its_sessions_to_the_others() {
    let (_fleet, mut a, b) = two();
    let id = create(&a, json!({"text": TEXT}));
    let body = json!({"max_tokens": 4, "temperature": 0});
    a.post(&(path(&id) + "/generate"), &body).good();
    let before = shown(&a, &id);
    a.join();
    assert_eq!(shown(&b, &id), before);
}
