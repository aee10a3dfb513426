//! The page at `/`, the live stream, and recordings: a listener's view equals the state of the cache.
use crate::server::*;
use kvist_server::ServerConfig;
use kvist_server::config::LoadRule;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::sync::mpsc::{Receiver, channel};

/// One connection to `/kvist/live`.
struct Listener {
    reader: BufReader<std::net::TcpStream>,
    snapshot: Value,
}

impl Listener {
    fn join(server: &Server) -> Listener {
        let mut stream = server.connect();
        stream.write_all(b"GET /kvist/live HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut listener = Listener { reader: BufReader::new(stream), snapshot: Value::Null };
        let mut line = String::new();
        while !line.starts_with("data:") {
            line.clear();
            assert!(listener.reader.read_line(&mut line).unwrap() > 0, "it ended before the snapshot");
        }
        listener.snapshot = serde_json::from_str(line["data:".len()..].trim()).unwrap();
        listener
    }

    /// All lines from now on, as they arrive. An event is one chunk of the body, so no line is split.
    fn lines(mut self) -> Receiver<Value> {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            while self.reader.read_line(&mut line).is_ok_and(|n| n > 0) {
                if let Some(data) = line.strip_prefix("data:") {
                    let value = serde_json::from_str(data.trim()).unwrap_or_else(|e| panic!("{e} in {data}"));
                    if sender.send(value).is_err() {
                        return; // the test has dropped the receiver
                    }
                }
                line.clear();
            }
        });
        lines
    }
}

/// Naive model of which sequences use which blocks.
#[derive(Debug, Default, PartialEq)]
struct BlockStates {
    users: BTreeMap<(u64, u64), Vec<u64>>,
    evictable: BTreeSet<(u64, u64)>,
    /// Blocks are copied to tiers, which hold them beside sequences. A snapshot tells neither of those that only a copy holds.
    pins: bool,
}

impl BlockStates {
    fn of(snapshot: &Value) -> BlockStates {
        let mut states = BlockStates::default();
        for sequence in snapshot["sequences"].as_array().unwrap() {
            for (group, table) in sequence["tables"].as_array().unwrap().iter().enumerate() {
                for block in table.as_array().unwrap().iter().filter_map(|block| block.as_u64()) {
                    let seq = sequence["seq"].as_u64().unwrap();
                    states.users.entry((group as u64, block)).or_default().push(seq);
                }
            }
        }
        // Blocks that are being loaded are in no table yet.
        for request in snapshot["requests"].as_array().unwrap() {
            for (group, blocks) in request["loading"]["blocks"].as_array().into_iter().flatten().enumerate() {
                for block in blocks.as_array().unwrap() {
                    let users = states.users.entry((group as u64, block.as_u64().unwrap())).or_default();
                    users.push(request["seq"].as_u64().unwrap());
                }
            }
        }
        for (group, blocks) in snapshot["idle"].as_array().unwrap().iter().enumerate() {
            states
                .evictable
                .extend(blocks.as_array().unwrap().iter().map(|b| (group as u64, b.as_u64().unwrap())));
        }
        states
    }

    fn apply(&mut self, line: &Value) {
        for event in line["blocks"].as_array().into_iter().flatten() {
            let at = (event[0].as_u64().unwrap(), event[2].as_u64().unwrap());
            let (change, seq) = (event[1].as_str().unwrap(), event[3].as_u64());
            match change {
                "alloc" | "copy_on_write" | "share" | "hit" => {
                    self.evictable.remove(&at);
                    let users = self.users.entry(at).or_default();
                    assert!(change == "share" || change == "hit" || users.is_empty(), "{event} of {users:?}");
                    users.push(seq.unwrap());
                    users.sort_unstable();
                }
                "idle" | "free" if event[4] == "unpin" => {
                    assert!(self.pins && seq.is_none() && !self.users.contains_key(&at), "{event}");
                    if change == "idle" {
                        self.evictable.insert(at);
                    }
                }
                "release" if event[4] == "unpin" => assert!(self.users.contains_key(&at), "{event}"),
                "idle" | "free" | "release" => {
                    let users =
                        self.users.get_mut(&at).unwrap_or_else(|| panic!("{event}: no sequence uses it"));
                    users.remove(users.iter().position(|&h| Some(h) == seq).unwrap());
                    let ended = change != "release";
                    assert!(
                        users.is_empty() == ended || (self.pins && users.is_empty()),
                        "{event} leaves {users:?}"
                    );
                    if users.is_empty() {
                        self.users.remove(&at);
                    }
                    if change == "idle" {
                        self.evictable.insert(at);
                    }
                }
                "evict" => assert!(self.evictable.remove(&at), "{event}: it was not evictable"),
                "store" => assert!(self.users.contains_key(&at), "{event}: no sequence uses it"),
                other => panic!("{other}"),
            }
        }
    }
}

const TRUNK: &str =
    "Returns the number of elements in the vector, also referred to as its length. The capacity of a vector";

fn load(server: &Server, n: usize, max_tokens: u32) {
    std::thread::scope(|scope| {
        for i in 0..n {
            scope.spawn(move || {
                let prompt = match i % 3 {
                    0 => format!("{TRUNK} is {i}"),
                    1 => format!("{TRUNK} {TRUNK} and {i}"),
                    _ => format!("// {i}: {TRUNK}"),
                };
                let body = json!({
                    "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
                });
                let answer = server.post("/v1/completions", &body);
                assert_eq!(answer.status, 200, "{}", answer.text);
            });
        }
    });
}

/// Causes an event that every listener gets after all earlier ones.
fn nudge(server: &Server) {
    server
        .post(
            "/v1/completions",
            &json!({"prompt": TRUNK, "max_tokens": 1, "temperature": 0, "ignore_eos": true}),
        )
        .good();
}

/// Returns whether the line is later than this moment.
fn is_behind(line: &Value, at: u64) -> bool {
    line["at"].as_u64().is_some_and(|then| then > at)
}

fn narrow() -> ServerConfig {
    let mut config = config();
    config.cache.tokens = Some(448);
    config
}

/// A listener that joins late has the same state as one that was there before.
#[test]
fn lines_and_snapshots_agree() {
    agree(narrow(), &["alloc", "hit", "idle", "release", "evict", "store"]);
}

/// So has one that joins while blocks are loaded from a tier, or copied to it.
#[test]
fn lines_and_snapshots_agree_with_a_tier() {
    agree(tiered(narrow()), &["alloc", "load", "unpin", "evict", "store"]);
}

/// `wanted`: changes of blocks, or reasons for them, that have to be among the lines.
fn agree(config: ServerConfig, wanted: &[&str]) {
    let pins = config.tiers.is_on();
    let server = Server::start(config);
    let first = Listener::join(&server);
    assert_eq!(first.snapshot["groups"], json!([{"block_tokens": 16, "blocks": 28, "window": null}]));
    assert_eq!(first.snapshot["requests"], json!([]));
    let bytes = |name: &str| first.snapshot[name].as_u64().unwrap();
    assert!(bytes("bytes_per_token") > 0 && bytes("bound_bytes") >= 448 * bytes("bytes_per_token"));
    let mut states = BlockStates { pins, ..BlockStates::of(&first.snapshot) };
    let lines = first.lines();
    let (mut changes, mut compared) = (BTreeMap::new(), 0);
    std::thread::scope(|scope| {
        let some = || (0..1 + usize::from(pins)).for_each(|_| load(&server, 12, 60));
        let mut loaded = scope.spawn(some);
        let mut nudges = Vec::new();
        let mut pending: Vec<Value> = Vec::new();
        loop {
            let mut over = loaded.is_finished();
            if over && compared < 2 {
                // On a busy machine it may end before there was anything to compare.
                std::mem::replace(&mut loaded, scope.spawn(some)).join().unwrap();
                over = false;
            }
            if over {
                nudges.drain(..).for_each(|nudged: std::thread::ScopedJoinHandle<()>| nudged.join().unwrap());
                server.becomes_idle();
                settle(&server);
            }
            let late = Listener::join(&server);
            let at = late.snapshot["at"].as_u64().unwrap();
            // Joining flushed earlier events to the other listeners; a later line ends the wait.
            nudges.push(scope.spawn(|| nudge(&server)));
            while !pending.iter().any(|line| is_behind(line, at)) {
                pending.push(lines.recv_timeout(PATIENCE).expect("the line of the nudge"));
            }
            pending.retain(|line| {
                let before = line["at"].as_u64().is_none_or(|then| then <= at);
                if before {
                    for event in line["blocks"].as_array().into_iter().flatten() {
                        for told in [&event[1], &event[4]] {
                            *changes.entry(told.as_str().unwrap().to_owned()).or_insert(0) += 1;
                        }
                    }
                    states.apply(line);
                }
                !before
            });
            let mut there = BlockStates::of(&late.snapshot);
            there.users.values_mut().for_each(|users| users.sort_unstable());
            if pins && !over {
                there.evictable.clone_from(&states.evictable);
            }
            there.pins = pins;
            assert_eq!(states, there, "at {at}");
            for request in late.snapshot["requests"].as_array().unwrap() {
                assert!(request["prompt_tokens"].as_u64().unwrap() > 10, "{request}");
            }
            compared += 1;
            if over {
                assert!(states.users.is_empty() && !states.evictable.is_empty(), "{states:?}");
                break;
            }
        }
        loaded.join().unwrap();
    });
    for change in wanted {
        assert!(changes.contains_key(*change), "no {change} in {changes:?}");
    }
}

/// With room for evicted blocks below the cache, from which all are loaded again.
fn tiered(mut config: ServerConfig) -> ServerConfig {
    config.tiers.ram_bytes = 64 << 20;
    config.tiers.load = LoadRule::Always;
    config.tiers.grace_ms = 600_000; // this machine may be slow
    config
}

/// Waits until nothing is copied to a tier any more.
fn settle(server: &Server) {
    server.until("copies have ended", || {
        server.engine.blocking_inspect(|_| ());
        server.engine.stats().tiers.is_none_or(|tiers| tiers.store_bytes + tiers.load_bytes == 0)
    });
}

/// A listener is told what comes from a tier: for which request, from where, and how much in all.
#[test]
fn the_stream_tells_what_is_below_the_cache() {
    let server = Server::start(tiered(narrow()));
    let listener = Listener::join(&server);
    assert_eq!(listener.snapshot["tiers"], json!(["ram"]));
    let heard = listener.lines();
    let mut told: Vec<Value> = Vec::new();
    let mut until = |done: &dyn Fn(&Value) -> bool| {
        while told.last().is_none_or(|last| !done(last)) {
            told.push(heard.recv_timeout(PATIENCE).expect("a line of the stream"));
        }
        std::mem::take(&mut told)
    };
    let first = until(&|line| !line["tiers"].is_null());
    let expected = json!({"name": "ram", "bytes": 0, "capacity_bytes": 64 << 20, "blocks": 0, "loaded_tokens": 0, "errors": 0});
    let last = first.last().unwrap();
    assert_eq!(*last, json!({"tiers": [expected], "load_bytes": 0, "store_bytes": 0}));

    // Each displaces the one before it.
    let ask = |i: usize| {
        let text = format!("{i}. {TRUNK} {TRUNK} {TRUNK} {TRUNK}");
        let body = json!({
            "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "kvist": {"explain": true},
        });
        let answer = server.post("/v1/completions", &body).good();
        settle(&server);
        answer["kvist"]["prompts"][0]["loaded_tokens"]["ram"].as_u64().unwrap_or(0)
    };
    // A busy machine may find a load late: then the prompt is computed, and it comes again.
    let mut loaded = 0;
    for _ in 0..20 {
        if loaded == 0 {
            loaded = (0..12).map(ask).sum::<u64>();
        }
    }
    assert!(loaded > 0, "nothing was loaded in 20 rounds");
    let mut lines = until(&|line| line["tiers"][0]["loaded_tokens"] == loaded);
    // A busy machine may tell the sums before the last load that they contain.
    let loads = |lines: &[Value]| -> u64 {
        let loads = lines.iter().filter(|line| !line["loaded"].is_null());
        loads.map(|line| line["tokens"].as_u64().unwrap()).sum()
    };
    while loads(&lines) < loaded {
        lines.extend(until(&|line| !line["loaded"].is_null()));
    }
    let (mut arrived, mut allocated) = (0, 0);
    let mut open: BTreeMap<u64, (u64, Value)> = BTreeMap::new();
    for line in &lines {
        if let Some(id) = line["load"].as_u64() {
            let (hit, tokens) = (line["hit"].as_u64().unwrap(), line["tokens"].as_u64().unwrap());
            assert_eq!(line["runs"], json!([{"tier": 0, "until": hit + tokens}]), "{line}");
            open.insert(id, (tokens, line["seq"].clone()));
        }
        if let Some(id) = line["loaded"].as_u64() {
            let (tokens, _) = open.remove(&id).expect("it was begun");
            assert_eq!(line["tokens"], tokens);
            arrived += tokens;
        }
        open.retain(|id, _| line["not_loaded"] != *id);
        for event in line["blocks"].as_array().into_iter().flatten() {
            let is_load = event[1] == "alloc" && event[4] == "load";
            assert!(!is_load || open.values().any(|(_, seq)| *seq == event[3]), "{event} without a load");
            allocated += u64::from(is_load);
        }
    }
    assert!(open.is_empty() && arrived == loaded, "{open:?}, {arrived} of {loaded}");
    assert!(allocated * 16 >= loaded, "{allocated} blocks");
    let last = lines.iter().rfind(|line| !line["tiers"].is_null()).unwrap();
    assert!(
        last["tiers"][0]["bytes"].as_u64().unwrap() > 0 && last["tiers"][0]["blocks"].as_u64().unwrap() > 0
    );
    // Everything is written through, so the tier has what the cache has.
    ask(0);
    let cached = server.engine.stats().evictable_cells / 16;
    assert!(cached > 4, "{cached} blocks");
    let in_runs = |line: &Value| -> u64 {
        let runs = line["runs"][0].as_array().into_iter().flatten();
        runs.map(|run| run[1].as_u64().unwrap()).sum()
    };
    let below = until(&|line| line["group"] == 0 && in_runs(line) == cached);
    assert!(below.last().unwrap()["runs"].as_array().unwrap().len() == 1);

    // Without tiers there is nothing of them.
    let plain = Server::start(narrow());
    let listener = Listener::join(&plain);
    assert!(listener.snapshot["tiers"].is_null());
    let heard = listener.lines();
    load(&plain, 6, 4);
    let mut ends = 0;
    while ends < 6 {
        let line = heard.recv_timeout(PATIENCE).expect("six ends");
        assert!(line["tiers"].is_null() && line["load"].is_null(), "{line}");
        ends += usize::from(!line["end"].is_null());
    }
}

/// The content of prompts is not visible to other users.
#[test]
fn the_stream_is_for_admins_and_tells_no_prompt() {
    let mut config = narrow();
    config.keys = vec![key("ann", "ann-secret", false), key("ops", "ops-secret", true)];
    let server = Server::start(config);
    let bearer = |key: &str| format!("Bearer {key}");
    let status = |headers: &[(&str, &str)]| server.send("GET", "/kvist/live", headers, b"").status;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&[("authorization", &bearer("ann-secret"))]), 403);

    let open = Server::start(narrow());
    let heard = Listener::join(&open).lines();
    load(&open, 4, 8);
    let mut lines: Vec<Value> = Vec::new();
    while lines.iter().filter(|line| !line["end"].is_null()).count() < 4 {
        lines.push(heard.recv_timeout(PATIENCE).expect("four ends"));
    }
    let arrivals: Vec<&Value> = lines.iter().map(|line| &line["arrive"]).filter(|a| !a.is_null()).collect();
    assert_eq!(arrivals.len(), 4);
    for arrival in arrivals {
        assert!(arrival["prompt_tokens"].is_u64() && arrival["max_new"] == 8, "{arrival}");
        assert!(arrival["prompt"].is_null() && arrival["salt"].is_null(), "{arrival}");
    }
}

/// A prefix such as `cmpl-`, and 32 hexadecimal digits.
fn is_id(text: &str) -> bool {
    let digits = text.split_once('-').map(|(_, digits)| digits);
    digits.is_some_and(|digits| digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Collects all numbers in a value.
fn numbers(value: &Value, found: &mut BTreeSet<u64>) {
    match value {
        Value::Number(number) => found.extend(number.as_u64()),
        // Ids are random, so their digits reveal nothing.
        Value::String(text) if is_id(text) => {}
        Value::String(text) => {
            let digits = text.split(|c: char| !c.is_ascii_digit());
            found.extend(digits.filter_map(|digits| digits.parse::<u64>().ok()));
        }
        Value::Array(items) => items.iter().for_each(|item| numbers(item, found)),
        Value::Object(fields) => fields.values().for_each(|field| numbers(field, found)),
        _ => {}
    }
}

/// No line of any kind contains a token of a prompt or an answer. A recording contains all of them.
#[test]
fn the_stream_tells_no_token() {
    tells_no_token(narrow(), &[]);
}

/// Nor do lines about drafts, which are shapes of trees and numbers of tokens.
#[test]
fn the_stream_tells_no_token_of_drafts() {
    tells_no_token(speculating(narrow()), &["drafts", "advances"]);
}

/// Nor do the figures of tiers, and events of loads and copies: a listener hears of decisions only.
#[test]
fn the_stream_tells_no_token_of_tiers() {
    tells_no_token(tiered(narrow()), &["tiers"]);
}

/// `more` are fields that lines must have besides those of plain decoding.
fn tells_no_token(config: ServerConfig, more: &[&str]) {
    const PROMPT: [u64; 6] = [1423, 1427, 1429, 1433, 1439, 1447];
    const ANSWER: u64 = 1451;
    let server = Server::start(config);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recording.jsonl");
    let file = std::fs::File::create(&path).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(runtime.block_on(server.state.live().record(&server.engine, file)));
    let listener = Listener::join(&server);
    let mut found = BTreeSet::new();
    numbers(&listener.snapshot, &mut found);
    let heard = listener.lines();
    // The bias allows only this token.
    let bias: serde_json::Map<String, Value> = [(ANSWER.to_string(), json!(100))].into_iter().collect();
    let answered = std::thread::scope(|scope| {
        let ask = || {
            let body = json!({
                "model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": true,
                "logit_bias": bias, "n": 2, "kvist": {"explain": true},
            });
            server.post("/v1/completions", &body).good()
        };
        // The second request gets prefix hits; the third client disconnects.
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(ask)).collect();
        let mut gone = server.connect();
        let body = json!({
            "prompt": PROMPT, "max_tokens": 300, "logit_bias": bias, "ignore_eos": true, "stream": true,
        })
        .to_string();
        gone.write_all(&request(
            "POST",
            "/v1/completions",
            &[("content-type", "application/json")],
            body.as_bytes(),
        ))
        .unwrap();
        assert_eq!(head(&mut BufReader::new(&gone)).0, 200);
        drop(gone);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<Value>>()
    });
    assert_eq!(answered.len(), 2);
    server.post("/v1/sessions", &json!({"tokens": PROMPT, "name": "of 1423"})).good();
    runtime.block_on(server.engine.until_idle());
    // Joining late flushes earlier events to all listeners; the snapshot covers the past.
    let mut late = Listener::join(&server);
    let at = late.snapshot["at"].as_u64().unwrap();
    numbers(&late.snapshot.take(), &mut found);
    nudge(&server);
    let plain =
        ["arrive", "elapsed", "sampled", "finished", "admit", "chunk", "end", "miss", "blocks", "sessions"];
    let mut missing: BTreeSet<&str> = plain.iter().chain(more).copied().collect();
    let (mut nudged, mut sampled) = (false, 0);
    // What is told now and then may come after the line of the nudge.
    while !nudged || !missing.is_empty() {
        let line = heard.recv_timeout(PATIENCE);
        let line = line.unwrap_or_else(|_| panic!("no line of the nudge, or none with {missing:?}"));
        if is_behind(&line, at) {
            nudged = true;
            continue;
        }
        numbers(&line, &mut found);
        sampled += line["sampled"].as_u64().unwrap_or(0);
        let advances = line["advances"].as_array().into_iter().flatten();
        sampled += advances.map(|advance| advance["emitted"].as_u64().unwrap()).sum::<u64>();
        missing.retain(|kind| line.get(*kind).is_none());
    }
    assert!(sampled >= 24, "{sampled} tokens of four answers");
    for token in PROMPT.into_iter().chain([ANSWER]) {
        assert!(!found.contains(&token), "token {token} is told");
    }
    assert!(runtime.block_on(server.state.live().recorded(&server.engine)));
    let recording = std::fs::read_to_string(&path).unwrap();
    let mut written = BTreeSet::new();
    recording.lines().for_each(|line| numbers(&serde_json::from_str(line).unwrap(), &mut written));
    for token in PROMPT.into_iter().chain([ANSWER]) {
        assert!(written.contains(&token), "token {token} is not in the recording, which is to be replayed");
    }
}

/// A restarted server has another id, so a page can tell it from the one that it knew.
#[test]
fn a_snapshot_names_the_process() {
    let ids: Vec<Value> = (0..2)
        .map(|_| {
            let server = Server::start(config());
            let snapshot = Listener::join(&server).snapshot;
            assert_eq!(snapshot["instance_id"], server.get("/get_server_info").json()["instance_id"]);
            snapshot["instance_id"].clone()
        })
        .collect();
    assert!(ids[0].is_string() && ids[0] != ids[1], "{ids:?}");
}

/// Regression: a server that became idle after each of many short requests sent a batch for each.
#[test]
fn short_requests_share_a_batch() {
    let server = Server::start(config());
    let mut reader = Listener::join(&server).reader;
    let begun = std::time::Instant::now();
    const REQUESTS: usize = 40;
    std::thread::scope(|scope| {
        scope.spawn(|| (0..REQUESTS).for_each(|_| nudge(&server)));
        let (mut batches, mut ends, mut line) = (0, 0, String::new());
        while ends < REQUESTS {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended after {ends} requests");
            batches += usize::from(line.trim() == "event: lines");
            ends += usize::from(line.starts_with("data:") && line.contains("\"end\":"));
        }
        // One at once, then ten a second.
        let most = 1 + begun.elapsed().as_millis() as usize / 100;
        assert!(batches <= most, "{batches} batches, not {most} at most");
    });
}

/// Regression: the page showed the engine's internal numbers, which appear in no log or response.
#[test]
fn requests_have_the_names_of_the_log() {
    let server = Server::start(config());
    let heard = Listener::join(&server).lines();
    let body = json!({"model": MODEL, "prompt": TRUNK, "max_tokens": 1, "temperature": 0});
    let answer = server.post("/v1/completions", &body).good();
    let session = server.post("/v1/sessions", &json!({"text": TRUNK})).good();
    let path = format!("/v1/sessions/{}/generate", session["id"].as_str().unwrap());
    // Slow enough to still run when the second listener joins.
    let body = json!({"max_tokens": 2000, "ignore_eos": true, "stream": true, "kvist": {"pace": 1}});
    let mut going = server.connect();
    let headers = [("content-type", "application/json")];
    going.write_all(&request("POST", &path, &headers, body.to_string().as_bytes())).unwrap();
    let mut arrivals = Vec::new();
    while arrivals.len() < 2 {
        let line = heard.recv_timeout(PATIENCE).expect("two arrivals");
        arrivals.extend(line.get("arrive").cloned());
    }
    assert_eq!((&arrivals[0]["name"], &arrivals[0]["session"]), (&answer["id"], &Value::Null));
    assert_eq!(arrivals[1]["session"], session["id"]);
    assert!(is_id(arrivals[1]["name"].as_str().unwrap()), "{}", arrivals[1]);
    let late = Listener::join(&server).snapshot;
    let number = arrivals[1]["id"].to_string();
    let expected = json!({number: {"name": arrivals[1]["name"], "session": session["id"]}});
    assert_eq!(late["names"], expected, "of what has ended no name is kept");
}

/// Regression: the page showed no sessions between two answers, although their blocks were cached.
#[test]
fn sessions_at_rest_are_told_with_what_they_would_find() {
    let server = Server::start(config());
    let heard = Listener::join(&server).lines();
    let until = |is_true: &dyn Fn(&[Value]) -> bool| loop {
        let line = heard.recv_timeout(PATIENCE).expect("news of sessions");
        if let Some(sessions) = line["sessions"].as_array()
            && is_true(sessions)
        {
            return sessions.clone();
        }
    };
    let made = server.post("/v1/sessions", &json!({"text": format!("{TRUNK} {TRUNK}")})).good();
    let seen = until(&|sessions| sessions.len() == 1);
    assert_eq!((&seen[0]["id"], &seen[0]["tokens"]), (&made["id"], &made["n_tokens"]));
    assert_eq!(seen[0]["tables"], json!([[]]), "nothing is computed yet");
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let body = json!({"max_tokens": 8, "ignore_eos": true, "temperature": 0});
    server.post(&format!("{path}/generate"), &body).good();
    let blocks = |session: &Value| session["tables"][0].as_array().map_or(0, Vec::len);
    let tokens = made["n_tokens"].as_u64().unwrap() + 8;
    let seen = until(&|sessions| {
        let session = &sessions[0];
        session["running"] == false && session["tokens"] == tokens && blocks(session) > 0
    });
    // No KV was computed for the last token, so its block is not in the index.
    assert_eq!(blocks(&seen[0]) as u64, (tokens - 1) / 16);
    let evictable = Listener::join(&server).snapshot["idle"][0].as_array().unwrap().clone();
    assert!(
        seen[0]["tables"][0].as_array().unwrap().iter().all(|block| evictable.contains(block)),
        "{seen:?}"
    );
    let forks = server.post(&format!("{path}/fork"), &json!({"n": 2, "at": 33})).good();
    let seen = until(&|sessions| sessions.len() == 3);
    let trunk = &seen.iter().find(|session| session["id"] == made["id"]).unwrap()["tables"][0];
    for fork in forks["sessions"].as_array().unwrap() {
        let fork = seen.iter().find(|session| session["id"] == fork["id"]).unwrap();
        assert_eq!((&fork["parent"], blocks(fork)), (&made["id"], 2), "{fork}");
        assert_eq!(fork["tables"][0][1], trunk[1], "the same blocks");
    }
    assert_eq!(server.send("DELETE", &path, &[], b"").status, 200);
    until(&|sessions| sessions.len() == 2 && sessions[0]["parent"].is_null());
}

/// Regression: every listener caused a lookup of every session on the engine's thread more than twice a second,
/// even if nothing had changed.
#[test]
fn listeners_share_what_is_looked_up() {
    let server = Server::start(config());
    server.post("/v1/sessions", &json!({"text": TRUNK})).good();
    let lookups = || server.state.session_lookups();
    let hears = |heard: &Receiver<Value>, n: usize| {
        while heard.recv_timeout(PATIENCE).expect("news of sessions")["sessions"].as_array().map(Vec::len)
            != Some(n)
        {}
    };
    let first = Listener::join(&server).lines();
    hears(&first, 1);
    assert_eq!(lookups(), 1);
    let mut all: Vec<_> = (0..8).map(|_| Listener::join(&server).lines()).collect();
    all.push(first);
    all[..8].iter().for_each(|heard| hears(heard, 1));
    assert_eq!(lookups(), 1, "nothing has changed since");
    server.post("/v1/sessions", &json!({"text": "another"})).good();
    all.iter().for_each(|heard| hears(heard, 2));
    assert_eq!(lookups(), 2, "for all of them");
    // A change of the prefix index also causes a lookup.
    nudge(&server);
    server.until("the index has changed", || lookups() > 2);
}

/// Replaying a recording gives the same decisions, byte for byte.
#[test]
fn a_recording_replays() {
    let config = narrow();
    let server = Server::start(config.clone());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recording.jsonl");
    let file = std::fs::File::create(&path).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(runtime.block_on(server.state.live().record(&server.engine, file)));
    load(&server, 10, 40);
    runtime.block_on(server.engine.until_idle());
    assert!(runtime.block_on(server.state.live().recorded(&server.engine)));
    let text = std::fs::read_to_string(&path).unwrap();
    let is_event =
        |line: &&str| line.starts_with("{\"n\":") || line.starts_with("{\"format\":\"kvist-events\"");
    let is_decision = |line: &&str| {
        line.starts_with("{\"step\":") && !line.contains("\"blocks\":")
            || line.starts_with("{\"format\":\"kvist-decisions\"")
    };
    let of = |is: &dyn Fn(&&str) -> bool| {
        text.lines().filter(is).map(|line| format!("{line}\n")).collect::<String>()
    };
    let (events, decisions) = (of(&is_event), of(&is_decision));
    let cache = config.engine(model().config()).paged.cache(model().config()).unwrap();
    let again = kvist_scheduler::replay(events.as_bytes(), cache, None).unwrap();
    assert!(again.contains("\"end\":9") && again.contains("\"make_room\":"), "{again}");
    assert_eq!(again, decisions);
    let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&first["format"], &first["groups"][0]["blocks"]), (&json!("kvist-recording"), &json!(28)));
    assert_eq!(text.matches("\"miss\":").count(), 10, "why each prompt was found no further");
}

#[test]
fn the_page_is_there_and_asks_for_nothing_else() {
    let server = Server::start(config());
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert!(page.text.contains("<div id=\"app\">"), "{}", page.text);
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert!(!page.text.contains("http://") && !page.text.contains("https://"), "{}", page.text);
    for (path, kind) in [
        ("/assets/app.js", "text/javascript"),
        ("/assets/index.css", "text/css"),
        ("/favicon.svg", "image/svg+xml"),
    ] {
        let file = server.get(path);
        assert_eq!(file.status, 200, "{path}");
        assert!(file.header("content-type").is_some_and(|found| found.starts_with(kind)), "{path}");
        assert!(page.text.contains(path.trim_start_matches('/')), "{path}");
    }
    for path in ["/assets/no.js", "/assets/..%2findex.html"] {
        assert_eq!(server.get(path).status, 404, "{path}");
    }
}
