//! What the engine does, told to whoever listens: dashboards over a stream, and a file.
//!
//! A listener hears a [`Snapshot`] first and then the lines of a recording, in batches of whole turns, ten a second at
//! most. It joins between two turns, so that the snapshot and what follows fit together. The lines tell no token and no
//! salt. A file gets everything, prompts included, from before the first event: it can be replayed.
//!
//! Without listener and file the engine keeps no log. A listener that does not keep up is dropped, and may come again;
//! the engine waits for nobody.
use crate::worker::{Engine, State, Watch};
use kvist_cache::BlockEvent;
use kvist_scheduler::{Ended, Part, Recording, Snapshot};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Listeners at once; more are refused.
pub(crate) const MAX_LISTENERS: usize = 16;
/// Between two batches.
const BATCH_NS: u64 = 100_000_000;
/// Batches that a listener may be behind.
const BEHIND: usize = 64;

/// Where listeners and the file are kept. Cheap to clone.
#[derive(Clone)]
pub struct LiveView {
    desk: Arc<Mutex<Desk>>,
}

#[derive(Default)]
struct Desk {
    recording: Option<Recording>,
    file: Option<BufWriter<File>>,
    listeners: Vec<Sender<Arc<str>>>,
    /// What listeners have not been sent yet.
    batch: String,
    sent_ns: u64,
    blocks: Vec<BlockEvent>,
    bytes: CacheBytes,
}

/// What K and V take, by the plan.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheBytes {
    pub per_token: u64,
    pub bound: u64,
}

/// The first event of a stream.
#[derive(Serialize)]
struct Greeting<'a> {
    format: &'static str,
    version: u32,
    model: &'a str,
    /// The engine's clock, in nanoseconds since its start.
    at: u64,
    /// Bytes that K and V of one token take in all layers.
    bytes_per_token: u64,
    /// Bytes that K and V take at most.
    bound_bytes: u64,
    #[serde(flatten)]
    snapshot: Snapshot,
}

/// There are [`MAX_LISTENERS`], or the engine has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotHeard {
    TooMany,
    Stopped,
}

impl LiveView {
    pub(crate) fn new(bytes: CacheBytes) -> LiveView {
        LiveView { desk: Arc::new(Mutex::new(Desk { bytes, ..Desk::default() })) }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Write everything into `file` from now on: called before the first request, the recording can be replayed. A file
    /// that cannot be written to ends the recording, which the log says, and nothing else.
    ///
    /// Returns whether the engine lives.
    pub async fn record(&self, engine: &Engine, file: File) -> bool {
        let live = self.clone();
        let begun = engine.inspect(move |state| {
            let mut desk = live.desk();
            desk.file = Some(BufWriter::new(file));
            desk.begin(state);
        });
        begun.await.is_some()
    }

    /// A snapshot as JSON, and the batches of lines that follow it.
    pub(crate) async fn listen(
        &self,
        engine: &Engine,
        model: String,
    ) -> Result<(String, Receiver<Arc<str>>), NotHeard> {
        let live = self.clone();
        let joined = engine.inspect(move |state| {
            let mut desk = live.desk();
            let at = state.now_ns();
            desk.listeners.retain(|listener| !listener.is_closed());
            if desk.listeners.len() >= MAX_LISTENERS {
                return Err(NotHeard::TooMany);
            }
            // What happened before is told to those who are there already, and stands in the snapshot.
            desk.begin(state);
            desk.take(at, at, state);
            desk.send(at);
            let (sender, receiver) = channel(BEHIND);
            desk.listeners.push(sender);
            let greeting = Greeting {
                format: "kvist-live",
                version: kvist_scheduler::RECORDING_VERSION,
                model: &model,
                at,
                bytes_per_token: desk.bytes.per_token,
                bound_bytes: desk.bytes.bound,
                snapshot: Snapshot::of(&state.scheduler),
            };
            Ok((serde_json::to_string(&greeting).unwrap_or_default(), receiver))
        });
        joined.await.unwrap_or(Err(NotHeard::Stopped))
    }
}

impl Watch for LiveView {
    fn ended(&mut self, ended: &Ended) {
        if let Some(recording) = &mut self.desk().recording {
            recording.ended(ended);
        }
    }

    fn turn(&mut self, now_ns: u64, end_ns: u64, state: &mut State) {
        let mut desk = self.desk();
        if desk.recording.is_none() {
            return;
        }
        desk.listeners.retain(|listener| !listener.is_closed());
        if desk.file.is_none() && desk.listeners.is_empty() {
            if let Some(recording) = desk.recording.take() {
                recording.end(&mut state.scheduler);
            }
            desk.batch.clear();
            return;
        }
        desk.take(now_ns, end_ns, state);
        // Nobody may come for a while: nothing is held back then.
        let is_idle = state.scheduler.n_running() + state.scheduler.n_waiting() == 0;
        if is_idle || end_ns.saturating_sub(desk.sent_ns) >= BATCH_NS {
            desk.send(end_ns);
        }
    }
}

impl Desk {
    /// Switch the logs on, if they are not.
    fn begin(&mut self, state: &mut State) {
        if self.recording.is_none() {
            let file = &mut self.file;
            let recording = Recording::begin(&mut state.scheduler, &mut |_, lines| write(file, lines));
            self.recording = Some(recording);
        }
    }

    /// What happened in the turn that has just run.
    fn take(&mut self, now_ns: u64, end_ns: u64, state: &mut State) {
        let Desk { recording: Some(recording), file, batch, blocks, .. } = self else { return };
        blocks.clear();
        state.scheduler.cache_mut().drain_events(blocks, &mut Vec::new());
        recording.turn(now_ns, end_ns, &mut state.scheduler, blocks, &mut |part, lines| {
            write(file, lines);
            match part {
                Part::Events => lines.lines().for_each(|line| discreet(line, batch)),
                _ => batch.push_str(lines),
            }
        });
    }

    fn send(&mut self, now_ns: u64) {
        self.sent_ns = now_ns;
        if let Some(file) = &mut self.file
            && file.flush().is_err()
        {
            write_failed(&mut self.file);
        }
        let batch = self.batch.trim_end();
        if !batch.is_empty() && !self.listeners.is_empty() {
            let batch: Arc<str> = batch.into();
            self.listeners.retain(|listener| listener.try_send(batch.clone()).is_ok());
        }
        self.batch.clear();
    }
}

fn write(file: &mut Option<BufWriter<File>>, lines: &str) {
    if file.as_mut().is_some_and(|file| file.write_all(lines.as_bytes()).is_err()) {
        write_failed(file);
    }
}

fn write_failed(file: &mut Option<BufWriter<File>>) {
    tracing::error!(target: "kvist::server", "the recording cannot be written, and ends here: is the disk full?");
    *file = None;
}

/// An event without what somebody asked, and under which name.
fn discreet(line: &str, out: &mut String) {
    if !line.contains("\"arrive\"") {
        out.push_str(line);
        out.push('\n');
        return;
    }
    // What cannot be read is not passed on.
    let Ok(mut event) = serde_json::from_str::<serde_json::Value>(line) else { return };
    if let Some(request) = event.get_mut("arrive").and_then(|request| request.as_object_mut()) {
        request.remove("prompt");
        request.remove("salt");
    }
    out.push_str(&event.to_string());
    out.push('\n');
}
