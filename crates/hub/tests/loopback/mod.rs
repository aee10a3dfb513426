//! A mock Hub on loopback with two servers like the real one: the API, and the storage host.
#![allow(dead_code)] // each test binary uses a part of it
use kvist_hub::{Progress, Settings};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Contents and faults of the mock Hub. Behind a lock, so that a test can change it between two requests.
#[derive(Default)]
pub struct State {
    /// Contents by repository and path. `true`: in large file storage, served by the second server.
    pub files: BTreeMap<(String, String), (Vec<u8>, bool)>,
    /// Responses for paths that contain the key: status and the Hub's error code.
    pub refused: BTreeMap<String, (u16, &'static str)>,
    /// For paths that end in the key: after how many bytes of the body to cut the connection, one entry per
    /// request.
    pub cuts: BTreeMap<String, Vec<usize>>,
    /// Files that are sent with wrong bytes.
    pub damaged: Vec<String>,
    /// Ignore range requests.
    pub no_ranges: bool,
    /// Behave like a mirror whose listings have neither sizes nor hashes.
    pub silent: bool,
    /// All requests so far.
    pub asked: Vec<Asked>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
    /// True for requests to the storage host.
    pub store: bool,
}

pub struct Hub {
    pub state: Arc<Mutex<State>>,
    pub endpoint: String,
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

pub fn git_id(bytes: &[u8]) -> String {
    let hash = Sha1::new_with_prefix(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize();
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

/// Test data without repeated blocks.
pub fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u64 * 31 + i as u64 / 251 + u64::from(seed)) as u8).collect()
}

impl Hub {
    pub fn start() -> Hub {
        let state = Arc::new(Mutex::new(State::default()));
        let [front, store] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let (endpoint, store_address) = (address(&front), address(&store));
        for (listener, is_store) in [(front, false), (store, true)] {
            let (state, store_address) = (state.clone(), store_address.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (state, store_address) = (state.clone(), store_address.clone());
                    std::thread::spawn(move || answer(stream, is_store, &store_address, &state));
                }
            });
        }
        Hub { state, endpoint }
    }

    pub fn with(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// A file in git.
    pub fn small(&self, repo: &str, path: &str, text: &str) {
        self.with(|s| drop(s.files.insert((repo.into(), path.into()), (text.into(), false))));
    }
    /// A file in large file storage.
    pub fn large(&self, repo: &str, path: &str, bytes: &[u8]) {
        self.with(|s| drop(s.files.insert((repo.into(), path.into()), (bytes.into(), true))));
    }

    pub fn settings(&self, cache: &Path) -> Settings {
        Settings { endpoint: self.endpoint.clone(), proxy: false, pause: Duration::ZERO, ..alone(cache) }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.state.lock().unwrap().asked.clone()
    }
    /// Requests to the storage host: paths and ranges.
    pub fn read(&self) -> Vec<(String, Option<String>)> {
        let asked = self.asked().into_iter();
        asked.filter(|a| a.store).map(|a| (a.path.rsplit('/').next().unwrap().into(), a.range)).collect()
    }
}

/// Settings with only this cache and an unreachable Hub.
pub fn alone(cache: &Path) -> Settings {
    let mut settings = Settings::from_env(&|_| None);
    settings.places = kvist_hub::Places { hugging_face: cache.into(), ..Default::default() };
    settings.token = None;
    settings.proxy = false;
    settings.pause = Duration::ZERO;
    settings.free_bytes = |_| None;
    settings
}

fn answer(stream: TcpStream, is_store: bool, store: &str, state: &Mutex<State>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, url) = (words.next()?.to_string(), words.next()?.to_string());
    let (mut range, mut token) = (None, None);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.split_once(':') else { break };
        match name.to_lowercase().as_str() {
            "range" => range = Some(value.trim().to_string()),
            "authorization" => token = Some(value.trim().to_string()),
            _ => {}
        }
    }
    let path = url.split('?').next()?.to_string();
    let mut state = state.lock().unwrap();
    state.asked.push(Asked {
        method: method.clone(),
        path: path.clone(),
        range: range.clone(),
        token,
        store: is_store,
    });
    let mut out = stream;
    let mut reply = |status: &str, headers: &[(&str, String)], body: &[u8], cut: usize| {
        let mut head =
            format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        let body = if method == "HEAD" { &[] } else { &body[..cut.min(body.len())] };
        let _ = out.write_all((head + "\r\n").as_bytes()).and_then(|()| out.write_all(body));
    };
    if let Some((status, code)) = state.refused.iter().find(|(part, _)| path.contains(*part)).map(|(_, r)| *r)
    {
        let message = ("X-Error-Message", "Access to this model is restricted.".to_string());
        reply(&format!("{status} No"), &[("X-Error-Code", code.into()), message], b"no", usize::MAX);
        return Some(());
    }
    let nothing = |code: &str| [("X-Error-Code", code.to_string())];
    if let Some(rest) = path.strip_prefix("/api/models/") {
        let (repo, revision) = rest.split_once("/revision/")?;
        let files: Vec<_> = state.files.iter().filter(|((of, _), _)| of == repo).collect();
        if files.is_empty() {
            reply("401 No", &nothing("RepoNotFound"), b"", 0);
        } else if revision != "main" && revision != COMMIT {
            reply("404 No", &nothing("RevisionNotFound"), b"", 0);
        } else {
            let siblings: Vec<Value> = files
                .iter()
                .map(|((_, path), (bytes, large))| match (state.silent, large) {
                    (true, _) => json!({"rfilename": path}),
                    (false, true) => {
                        json!({"rfilename": path, "size": bytes.len(), "blobId": git_id(b"pointer"),
                        "lfs": {"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134}})
                    }
                    (false, false) => {
                        json!({"rfilename": path, "size": bytes.len(), "blobId": git_id(bytes)})
                    }
                })
                .collect();
            let list = json!({"id": repo, "sha": COMMIT, "siblings": siblings}).to_string();
            reply("200 OK", &[], list.as_bytes(), usize::MAX);
        }
        return Some(());
    }
    let (repo, file) = path.trim_start_matches('/').split_once(&format!("/resolve/{COMMIT}/"))?;
    let Some((bytes, large)) = state.files.get(&(repo.to_string(), file.to_string())).cloned() else {
        reply("404 No", &nothing("EntryNotFound"), b"", 0);
        return Some(());
    };
    if large && !is_store {
        let headers = [
            ("Location", format!("{store}{path}")),
            ("X-Linked-Etag", format!("\"{}\"", sha256(&bytes))),
            ("X-Linked-Size", bytes.len().to_string()),
            ("ETag", "\"of-the-redirect\"".into()),
        ];
        reply("302 Found", &headers, b"", 0);
        return Some(());
    }
    let etag = ("ETag", format!("\"{}\"", if large { sha256(&bytes) } else { git_id(&bytes) }));
    let sent = if state.damaged.iter().any(|d| file == d) { vec![0; bytes.len()] } else { bytes };
    let cut = state.cuts.get_mut(file).filter(|c| !c.is_empty()).map_or(usize::MAX, |c| c.remove(0));
    let from = range.and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    match from.filter(|_| !state.no_ranges) {
        Some(from) if from >= sent.len() => reply("416 No", &[], b"", 0),
        Some(from) => {
            let content = ("Content-Range", format!("bytes {from}-{}/{}", sent.len() - 1, sent.len()));
            reply("206 Partial Content", &[content, etag], &sent[from..], cut);
        }
        None => reply("200 OK", &[etag], &sent, cut),
    }
    Some(())
}

/// Records progress.
#[derive(Default)]
pub struct Heard {
    /// File, size, and bytes already on disk.
    pub begun: Vec<(String, u64, u64)>,
    pub at: u64,
    pub ended: usize,
    pub notes: Vec<String>,
    /// The error that `accept` returns, once.
    pub refuses: Option<String>,
}

impl Progress for Heard {
    fn begin(&mut self, file: &str, size: u64, done: u64) {
        self.begun.push((file.into(), size, done));
    }
    fn at(&mut self, done: u64) {
        self.at = done;
    }
    fn end(&mut self) {
        self.ended += 1;
    }
    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }
    fn accept(&mut self, config: &Path) -> Result<(), String> {
        assert!(config.ends_with("config.json") && config.is_file());
        self.refuses.take().map_or(Ok(()), Err)
    }
}
