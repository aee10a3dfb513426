//! Live view of the engine: an event stream for dashboards, and a recording file.
//!
//! A listener first receives a [`Snapshot`], and then the lines of a recording, in batches of whole steps, at most ten
//! a second, plus one whenever another listener joins. It joins between two steps, so the lines continue the snapshot
//! exactly. The lines contain no tokens of prompts or answers, and no salts. A file receives everything, prompts included,
//! from before the first event, so it can be replayed.
//!
//! Without a listener or file the engine keeps no log. A listener that falls behind is disconnected and may reconnect.
//! A file that falls behind ends. The engine never waits for a listener.
pub(crate) mod below;
mod file;
pub(crate) mod sessions;
pub(crate) mod stream;
mod tiers;

use crate::state::ServerState;
use file::RecordFile;
use kvist_cache::BlockEvent;
use kvist_engine::serving::{Engine, EngineState, JobName, KvBytes, Watcher};
use kvist_scheduler::{Ended, Part, Recording, RequestId, Snapshot};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Largest number of listeners. More are refused.
const MAX_LISTENERS: usize = 16;
/// Time between two batches.
const BATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Largest number of batches that wait for a listener.
const MAX_WAITING_BATCHES: usize = 64;

/// The registry of listeners and the recording file. Cheap to clone.
#[derive(Clone)]
pub struct LiveView {
    registry: Arc<Mutex<Registry>>,
}

#[derive(Default)]
struct Registry {
    recording: Option<Recording>,
    file: Option<RecordFile>,
    listeners: Vec<Sender<Arc<str>>>,
    /// Lines that have not been sent to the listeners yet.
    batch: String,
    /// When the last batch was sent. `None` before the first one.
    sent_at: Option<Instant>,
    /// Runs the task that sends a batch that is not due yet. `None` before the first listener.
    runtime: Option<Handle>,
    /// Such a task is running.
    is_sending_later: bool,
    blocks: Vec<BlockEvent>,
    bytes: KvBytes,
    names: Names,
}

/// Names of the live requests, by engine request id.
#[derive(Default)]
struct Names {
    of: BTreeMap<u64, JobName>,
    /// Requests that have ended, but whose last step has not been reported yet.
    ended: Vec<u64>,
}

impl Names {
    /// Called after the step has been reported.
    fn forget_ended(&mut self) {
        for id in self.ended.drain(..) {
            self.of.remove(&id);
        }
    }
}

/// The first event of a stream.
#[derive(Serialize)]
struct FirstEvent<'a> {
    format: &'static str,
    version: u32,
    /// Names this process: after a restart it is another one.
    instance_id: &'a str,
    model: &'a str,
    /// The engine's clock, in nanoseconds since its start.
    at: u64,
    /// Bytes that K and V of one token take in all layers.
    bytes_per_token: u64,
    /// Largest number of bytes that K and V take.
    bound_bytes: u64,
    #[serde(flatten)]
    snapshot: Snapshot,
    /// Names of the requests in the snapshot.
    names: BTreeMap<u64, Named>,
}

/// The name of a request, as the log and clients see it.
#[derive(Serialize)]
struct Named {
    name: Arc<str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<Arc<str>>,
}

impl From<&JobName> for Named {
    fn from(name: &JobName) -> Named {
        Named { name: name.request.clone(), session: name.session.clone() }
    }
}

/// Why a listener was refused: there are [`MAX_LISTENERS`] already, or the engine has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenError {
    TooMany,
    Stopped,
}

impl LiveView {
    /// Attach a view to the engine. It sees what is submitted from now on.
    pub(crate) fn watch(engine: &Engine) -> LiveView {
        let registry = Registry { bytes: engine.kv_bytes(), ..Registry::default() };
        let view = LiveView { registry: Arc::new(Mutex::new(registry)) };
        engine.add_watcher(Box::new(view.clone()));
        view
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Record everything into `file` from now on. If this is called before the first request, the recording can be
    /// replayed. A separate thread writes the file. If the file cannot be written, or falls 64 MiB behind the engine,
    /// the recording ends and the log says so. Nothing else is affected.
    ///
    /// Returns whether the recording has begun: not if the engine has ended, or the system refuses a thread.
    pub async fn record(&self, engine: &Engine, file: File) -> bool {
        let live = self.clone();
        let Ok(file) = RecordFile::new(file) else { return false };
        let started = engine.inspect(move |state| {
            let mut registry = live.registry();
            registry.file = Some(file);
            registry.begin(state);
        });
        started.await.is_some()
    }

    /// Waits until all past steps are in the file. Returns false if there is no file, or the recording has ended early.
    pub async fn recorded(&self, engine: &Engine) -> bool {
        // Answered after the current step. An engine that has ended has reported everything already.
        engine.inspect(|_| ()).await;
        let written = self.registry().file.as_ref().map(RecordFile::written);
        match written {
            Some(written) => written.await.is_ok(),
            None => false,
        }
    }

    /// Returns a snapshot as JSON, and the batches of lines that follow it.
    pub(crate) async fn listen(
        &self,
        server: &Arc<ServerState>,
    ) -> Result<(String, Receiver<Arc<str>>), ListenError> {
        let live = self.clone();
        let runtime = Handle::current();
        let joined = server.engine.inspect(move |state| {
            let mut registry = live.registry();
            registry.runtime = Some(runtime);
            let at = state.now_ns();
            registry.listeners.retain(|listener| !listener.is_closed());
            if registry.listeners.len() >= MAX_LISTENERS {
                return Err(ListenError::TooMany);
            }
            // Earlier events go to the existing listeners; the snapshot covers them for the new one.
            registry.begin(state);
            registry.take(at, at, state);
            registry.send();
            let (sender, receiver) = channel(MAX_WAITING_BATCHES);
            registry.listeners.push(sender);
            let names = registry.names.of.iter().map(|(id, name)| (*id, name.into())).collect();
            Ok((at, registry.bytes, Snapshot::of(&state.scheduler), names, receiver))
        });
        let (at, bytes, snapshot, names, receiver) = joined.await.unwrap_or(Err(ListenError::Stopped))?;
        // The snapshot of a full cache is long. Neither the engine nor other connections wait for it.
        let server = server.clone();
        let written = tokio::task::spawn_blocking(move || {
            let first = FirstEvent {
                format: "kvist-live",
                version: kvist_scheduler::RECORDING_VERSION,
                instance_id: &server.instance_id,
                model: server.model_name(),
                at,
                bytes_per_token: bytes.per_token,
                bound_bytes: bytes.bound,
                snapshot,
                names,
            };
            serde_json::to_string(&first).unwrap_or_default()
        });
        Ok((written.await.map_err(|_| ListenError::Stopped)?, receiver))
    }

    /// Sends the current batch once it is due.
    async fn send_later(self) {
        loop {
            let wait = self.registry().send_if_due();
            let Some(wait) = wait else { return };
            tokio::time::sleep(wait).await;
        }
    }
}

impl Watcher for LiveView {
    fn arrived(&mut self, id: RequestId, name: &JobName) {
        if !name.request.is_empty() {
            self.registry().names.of.insert(id.0, name.clone());
        }
    }

    fn ended(&mut self, ended: &Ended) {
        let mut registry = self.registry();
        registry.names.ended.push(ended.id.0);
        if let Some(recording) = &mut registry.recording {
            recording.ended(ended);
        }
    }

    fn stepped(&mut self, now_ns: u64, end_ns: u64, state: &mut EngineState) {
        let mut registry = self.registry();
        registry.stepped(now_ns, end_ns, state);
        registry.names.forget_ended();
        // The next step, which would send the batch, may be far away.
        if !registry.batch.is_empty()
            && !registry.is_sending_later
            && let Some(runtime) = registry.runtime.clone()
        {
            registry.is_sending_later = true;
            runtime.spawn(self.clone().send_later());
        }
    }
}

impl Registry {
    fn stepped(&mut self, now_ns: u64, end_ns: u64, state: &mut EngineState) {
        if self.recording.is_none() {
            return;
        }
        self.listeners.retain(|listener| !listener.is_closed());
        if self.file.is_none() && self.listeners.is_empty() {
            if let Some(recording) = self.recording.take() {
                recording.end(&mut state.scheduler);
            }
            self.batch.clear();
            return;
        }
        self.take(now_ns, end_ns, state);
        if self.time_left().is_none() {
            self.send();
        }
    }

    /// The time until the next batch may be sent. `None` if it may be sent now.
    fn time_left(&self) -> Option<Duration> {
        let left = BATCH_INTERVAL.checked_sub(self.sent_at?.elapsed())?;
        (!left.is_zero()).then_some(left)
    }

    /// Called by the task that sends later. Sends the batch if it is due; otherwise returns the time to wait.
    fn send_if_due(&mut self) -> Option<Duration> {
        let wait = self.time_left().filter(|_| !self.batch.is_empty());
        if wait.is_none() {
            self.send();
            self.is_sending_later = false;
        }
        wait
    }

    /// Start the event logs, unless they are on.
    fn begin(&mut self, state: &mut EngineState) {
        if self.recording.is_none() {
            let file = &mut self.file;
            let header = &mut |_, lines: &str| file.iter_mut().for_each(|file| file.push(lines));
            self.recording = Some(Recording::begin(&mut state.scheduler, header));
        }
    }

    /// Collect the events of the last step.
    fn take(&mut self, now_ns: u64, end_ns: u64, state: &mut EngineState) {
        let Registry { recording: Some(recording), file, listeners, batch, blocks, names, .. } = self else {
            return;
        };
        blocks.clear();
        state.scheduler.cache_mut().drain_block_events(blocks);
        recording.iteration(now_ns, end_ns, &mut state.scheduler, blocks, &mut |part, lines| {
            if let Some(file) = file {
                file.push(lines);
            }
            match part {
                _ if listeners.is_empty() => {}
                Part::Events => lines.lines().for_each(|line| redact(line, names, batch)),
                _ => batch.push_str(lines),
            }
        });
        if file.as_mut().is_some_and(|file| !file.end_step()) {
            *file = None;
        }
    }

    fn send(&mut self) {
        let batch = self.batch.trim_end();
        if !batch.is_empty() && !self.listeners.is_empty() {
            let batch: Arc<str> = batch.into();
            self.listeners.retain(|listener| listener.try_send(batch.clone()).is_ok());
            self.sent_at = Some(Instant::now());
        }
        self.batch.clear();
    }
}

/// Append an event without prompts, answers and salts to `out`. The line is rebuilt from the fields that a listener may
/// know, so a new field of the log stays hidden until it is allowed here. An arrival gets the name of its request.
fn redact(line: &str, names: &Names, out: &mut String) {
    // The header line (the configurations of scheduler and cache) is passed on as it is.
    if line.starts_with("{\"format\":") {
        out.push_str(line);
        out.push('\n');
        return;
    }
    // A line that cannot be parsed is not passed on.
    let Ok(mut event) = serde_json::from_str::<RedactedEvent>(line) else { return };
    if let Some(arrival) = &mut event.arrive {
        arrival.named = names.of.get(&arrival.id).map(Named::from);
    }
    let Ok(event) = serde_json::to_string(&event) else { return };
    out.push_str(&event);
    out.push('\n');
}

/// A draft in the event log: index in the batch, request, and the parent of each node.
type LoggedDraft = (u32, u64, Vec<Option<u32>>);

/// A line of the event log, as listeners receive it.
#[derive(Deserialize, Serialize)]
struct RedactedEvent {
    n: u64,
    at: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    arrive: Option<Arrival>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cancel: Option<u64>,
    /// Another capacity was asked for, and whether it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    resize: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resized: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    elapsed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<bool>,
    /// Only their number.
    #[serde(skip_serializing_if = "Option::is_none")]
    sampled: Option<Number>,
    /// Indices into the sampled tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    finished: Option<Vec<u32>>,
    /// Index in the batch, request, and parents: the shape of a draft without its tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    drafts: Option<Vec<LoggedDraft>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    advances: Option<Vec<RedactedAdvance>>,
}

/// What a request of the batch keeps and how many tokens it emits, without the tokens.
#[derive(Deserialize, Serialize)]
struct RedactedAdvance {
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<Vec<u32>>,
    emitted: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    finished: bool,
}

/// A request, without its prompt and its salt.
#[derive(Deserialize, Serialize)]
struct Arrival {
    id: u64,
    arrival_ns: u64,
    prompt_tokens: u32,
    max_new: u32,
    deadline_ns: Option<u64>,
    priority: i32,
    #[serde(flatten, skip_deserializing)]
    named: Option<Named>,
}

/// Read from a list, written as its length.
#[derive(Deserialize)]
struct Number(Vec<IgnoredAny>);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.0.len() as u64)
    }
}
