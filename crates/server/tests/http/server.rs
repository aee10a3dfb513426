//! A server on a free port that runs the embedded model, and a client.
#![allow(dead_code)]
use kvist_device::{Registry, Storage};
use kvist_engine::devices;
use kvist_engine::serving::Engine;
use kvist_engine::speculate::{SpeculationConfig, Speculator, Suffix};
use kvist_model::Model;
use kvist_server::config::{KeySection, OpenTiers};
use kvist_server::{KvEventSockets, ServerConfig, ServerState, serve};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::task::{Context, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Models, as the tests of `kvist-model` have them. F32 weights and an F32 cache, so that generated text depends only
/// on the prompt.
#[path = "../../../model/tests/common/mod.rs"]
mod models;
#[allow(unused_imports)] // `sessions` does not load others
pub use models::{compute, f32_model as model, load as load_model, load_f32};

/// Only ends tests that would hang; nothing is measured against it.
pub const PATIENCE: Duration = Duration::from_secs(600);

pub const MODEL: &str = "tiny-rust-7m";

pub fn config() -> ServerConfig {
    let mut config = ServerConfig::default();
    config.http.port = 0;
    config.cache.kv = Storage::F32;
    config.cache.tokens = Some(4096);
    config.scheduler.max_batch = 8;
    config.scheduler.max_batch_tokens = 64;
    config.limits.grace_s = 3600.0;
    config.limits.read_timeout_s = 3600.0;
    config.limits.header_timeout_s = 3600.0;
    config
}

/// `config`, with drafts from repetitions.
pub fn speculating(mut config: ServerConfig) -> ServerConfig {
    config.speculation.speculate = "suffix".into();
    config
}

pub fn key(name: &str, key: &str, admin: bool) -> KeySection {
    KeySection { name: name.into(), key: Some(key.into()), admin, ..KeySection::default() }
}

pub struct Server {
    pub address: SocketAddr,
    pub engine: Engine,
    pub state: Arc<ServerState>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _tiers: Option<OpenTiers>,
}

impl Server {
    pub fn start(config: ServerConfig) -> Server {
        Server::start_with(model().clone(), config)
    }

    pub fn start_with(model: Arc<Model>, config: ServerConfig) -> Server {
        Server::start_on(model, &devices::all(), "cpu", config)
    }

    /// Over this backend of the registry.
    pub fn start_on(model: Arc<Model>, registry: &Registry, backend: &str, config: ServerConfig) -> Server {
        let mut settings = config.engine(model.config());
        settings.paged.cache.backend = backend.into();
        if config.speculation.is_on() {
            let bounds = config.speculation.bounds();
            let speculation = SpeculationConfig { bounds, adaptive: false };
            settings.speculator = Some(Speculator::new(vec![Box::new(Suffix::default())], speculation));
        }
        let tokens = settings.paged.cache.context_tokens;
        // All in memory, which needs no name for what its blocks depend on.
        let block_bytes = settings.paged.block_bytes(model.config());
        let tiers = config.tiers.open(&config.scheduler, block_bytes, Vec::new()).unwrap();
        settings.tiers = tiers.as_ref().map(OpenTiers::config);
        let engine = Engine::start(model, registry, settings).unwrap();
        let state = ServerState::new(engine.clone(), &config, tokens).unwrap();
        let served = state.clone();
        let sockets = KvEventSockets::bind(&config.kv_events).unwrap();
        let salt = config.kv_events.salt(&config);
        let (stop, stopped) = oneshot::channel();
        let (ready, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            kvist_server::runtime().unwrap().block_on(async {
                if let Some(sockets) = sockets {
                    served.publish_events(sockets, salt.unwrap()).await.unwrap();
                }
                let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
                ready.send(listener.local_addr().unwrap()).unwrap();
                let stopped = async { drop(stopped.await) };
                serve(listener, served, stopped).await.unwrap();
            });
        });
        let address = address.recv().unwrap();
        Server { address, engine, state, stop: Some(stop), thread: Some(thread), _tiers: tiers }
    }

    /// Begins a shutdown, like SIGTERM.
    pub fn stop(&mut self) {
        self.stop.take().map(|stop| stop.send(()));
    }

    /// Waits until the accept loop has ended.
    pub fn join(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    /// Sends a request over its own connection.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(&request(method, path, headers, body)).unwrap();
        Answer::read(stream)
    }

    /// The same for a server that soon hangs up on a client that sends nothing, as one does on a busy machine between
    /// connecting and sending: then it is asked again.
    pub fn send_until_answered(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        let began = Instant::now();
        loop {
            let mut stream = self.connect();
            let sent = stream.write_all(&request(method, path, headers, body));
            if sent.is_ok() && stream.peek(&mut [0]).is_ok_and(|n| n > 0) {
                return Answer::read(stream);
            }
            assert!(began.elapsed() < PATIENCE, "{method} {path} is not answered");
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// The value of a metric. `labels` stand in front of `model_name`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        let text = self.get("/metrics").text;
        let start = format!("{name}{{{labels}model_name=\"{MODEL}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("{start} is not in\n{text}")).parse().unwrap()
    }

    /// Pauses the engine between two turns until the returned value is dropped. Meanwhile no request gets a
    /// token or ends, however busy the machine is; HTTP keeps working.
    pub fn pause(&self) -> Paused {
        let paused = self.pause_later();
        paused.n_waiting();
        paused
    }

    /// Pauses the engine when it has taken all that was submitted until now, before it runs a step. Does not wait.
    fn pause_later(&self) -> Paused {
        let (standing, stands) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let mut pause = Box::pin(self.engine.inspect(move |state| {
            // Both fail if the test has ended.
            let _ = standing.send(state.scheduler.n_waiting());
            let _ = released.recv();
        }));
        // This sends the command.
        let _ = pause.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        Paused { _release: release, stands }
    }

    /// Waits until the engine has taken this many requests, without a step between them: they begin in the same step,
    /// however long they took to arrive. (A request counts as [queued](Engine::queued) before it is submitted.)
    pub fn until_waiting(&self, mut paused: Paused, n: usize) -> Paused {
        let began = Instant::now();
        loop {
            // The engine takes what has arrived meanwhile, and stands again.
            let next = self.pause_later();
            drop(paused);
            let waiting = next.n_waiting();
            if waiting == n {
                return next;
            }
            assert!(began.elapsed() < PATIENCE, "{waiting} of {n} requests wait");
            std::thread::sleep(Duration::from_millis(5));
            paused = next;
        }
    }

    /// Waits until the condition is true.
    pub fn until(&self, what: &str, is_true: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_true() {
            assert!(began.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Running requests, waiting requests, and the KV cells in use, read between two turns. (The engine's
    /// statistics and `/metrics` are those of the last turn and may be older than the test's last action.) Must
    /// not be called while the engine is [paused](Self::pause).
    pub fn live(&self) -> (usize, usize, u64) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let asked = self.engine.inspect(|state| {
            let scheduler = &state.scheduler;
            (scheduler.n_running(), scheduler.n_waiting(), scheduler.used_cells())
        });
        runtime.block_on(asked).unwrap()
    }

    /// Waits until no request runs or waits and no cells are in use.
    pub fn becomes_idle(&self) {
        let began = Instant::now();
        loop {
            let live = self.live();
            if live == (0, 0, 0) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "running, waiting, cells held: {live:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Repeats a round, in which a few small requests were answered beside large ones, until they were more than `n`. If each
/// waited for most of the large ones, no round has as many. On a busy machine the thread that counts may miss one.
pub fn until_a_round_answers_more_than(n: usize, round: impl Fn() -> usize) {
    let began = Instant::now();
    loop {
        let answered = round();
        if answered > n {
            return;
        }
        assert!(
            began.elapsed() < PATIENCE,
            "{answered} small requests beside large ones: each waited for most"
        );
    }
}

/// The fields of `body`, then those of `more`.
pub fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Keeps the engine paused until dropped.
pub struct Paused {
    /// The engine goes on when this is dropped.
    _release: std::sync::mpsc::Sender<()>,
    stands: std::sync::mpsc::Receiver<usize>,
}

impl Paused {
    /// Waits until the engine stands. Returns how many requests wait for their first step. Can be called once.
    fn n_waiting(&self) -> usize {
        self.stands.recv_timeout(PATIENCE).expect("the engine is alive")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.join();
        }
    }
}

pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    let given = |name: &str| headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
    if !given("host") {
        text += "host: localhost\r\n";
    }
    if !given("content-length") && !given("transfer-encoding") {
        text += &format!("content-length: {}\r\n", body.len());
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    let mut bytes = (text + "\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub text: String,
}

impl Answer {
    pub fn read(stream: TcpStream) -> Answer {
        let mut reader = BufReader::new(stream);
        let (status, headers) = head(&mut reader);
        let mut raw = Vec::new();
        let _ = reader.read_to_end(&mut raw); // the server may close before it has read a whole body
        let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
        let body = if chunked { unchunk(&raw) } else { raw };
        Answer { status, headers, text: String::from_utf8(body).unwrap() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The body of a successful response.
    pub fn good(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// The JSON documents of an event stream that ends with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        Self::events_of(&self.text)
    }

    /// The same for a body that was read manually, with or without chunk size lines.
    pub fn events_of(body: &str) -> Vec<Value> {
        let mut data: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{body}");
        data.iter().map(|text| serde_json::from_str(text).unwrap()).collect()
    }

    /// (status, `error.param`, `error.code`, `error.message`)
    pub fn error(&self) -> (u16, String, String, String) {
        let error = self.json()["error"].clone();
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_string();
        let fields = error.as_object().unwrap_or_else(|| panic!("no error: {self:?}"));
        let names: Vec<&str> = fields.keys().map(String::as_str).collect();
        for name in ["message", "type", "param", "code"] {
            assert!(names.contains(&name), "{names:?} lacks {name}");
        }
        assert!(!text("type").is_empty() && !text("message").is_empty(), "{error}");
        (self.status, text("param"), text("code"), text("message"))
    }
}

/// Reads status and headers.
pub fn head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|s| s.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status: {line:?}"));
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { return (status, headers) };
        headers.push((name.to_ascii_lowercase(), value.to_string()));
    }
}

/// Reads lines up to the next event. Between events the server says that it is there, and chunks have a line of their own.
pub fn next_event(reader: &mut impl BufRead) -> String {
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream has ended");
    }
    line
}

fn unchunk(mut raw: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = raw.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&raw[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        raw = &raw[end + 2..];
        body.extend_from_slice(&raw[..size.min(raw.len())]);
        raw = raw.get(size + 2..).unwrap_or_default();
        if size == 0 {
            break;
        }
    }
    body
}
