//! The file of a recording. A separate thread writes it, so a slow disk delays no step.
//!
//! Whole steps are handed to that thread and wait in memory until they are written, at most [`MAX_BEHIND_BYTES`] bytes.
//! If the disk is slower than that, is full, or fails, the recording ends with the last step that was written
//! completely, so the file can still be replayed. The log reports it once, and the engine continues.
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use tokio::sync::oneshot;

/// Bytes that may wait to be written.
const MAX_BEHIND_BYTES: usize = 64 << 20;

/// Destination of a recording.
pub(super) trait Sink: Write + Send + 'static {
    /// Discard everything after the first `bytes`.
    fn cut(&mut self, bytes: u64);
}

impl Sink for File {
    fn cut(&mut self, bytes: u64) {
        // This fails on a pipe: its reader already has the bytes.
        let _ = self.set_len(bytes);
    }
}

enum Command {
    /// Whole lines.
    Write(String),
    /// Reply when everything that was sent before is in the file.
    Flush(oneshot::Sender<()>),
}

/// The engine's side. When it is dropped, the thread writes what it has received and ends.
pub(super) struct RecordFile {
    commands: Sender<Command>,
    /// Lines of the current step.
    step: String,
    behind: Arc<AtomicUsize>,
    /// The recording ended early. The log already says so.
    over: Arc<AtomicBool>,
    max: usize,
}

impl RecordFile {
    /// An error if the system refuses a thread.
    pub fn new(file: File) -> std::io::Result<Self> {
        Self::with_limit(file, MAX_BEHIND_BYTES)
    }

    fn with_limit(sink: impl Sink, max: usize) -> std::io::Result<Self> {
        let (commands, inbox) = channel();
        let (behind, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let there = (behind.clone(), over.clone());
        let named = std::thread::Builder::new().name("kvist-recording".into());
        named.spawn(move || {
            if let Err(error) = write(sink, &inbox, &there.0)
                && !there.1.swap(true, SeqCst)
            {
                log_end(&format!("it cannot be written ({error})"));
            }
        })?;
        Ok(RecordFile { commands, step: String::new(), behind, over, max })
    }

    /// Add lines to the current step.
    pub fn push(&mut self, lines: &str) {
        self.step.push_str(lines);
    }

    /// Hand the current step over. Returns whether the recording continues; if not, the file has no part of the step.
    pub fn end_step(&mut self) -> bool {
        if self.over.load(SeqCst) {
            return false;
        }
        if self.step.is_empty() {
            return true;
        }
        let step = std::mem::take(&mut self.step);
        let behind = self.behind.fetch_add(step.len(), SeqCst) + step.len();
        if behind > self.max {
            if !self.over.swap(true, SeqCst) {
                let mib = self.max >> 20;
                log_end(&format!("more than {mib} MiB wait to be written: the disk is too slow"));
            }
            return false;
        }
        self.commands.send(Command::Write(step)).is_ok()
    }

    /// Resolves when all steps so far are in the file, or to an error if they never will be.
    pub fn written(&self) -> oneshot::Receiver<()> {
        let (sender, written) = oneshot::channel();
        // A writer thread that has ended drops the sender, which is the error.
        let _ = self.commands.send(Command::Flush(sender));
        written
    }
}

fn log_end(why: &str) {
    tracing::error!(target: "kvist::server", "the recording ends here, after a complete step: {why}");
}

/// The writer thread: runs until the other side is dropped. Flushes whenever it has caught up.
fn write(sink: impl Sink, inbox: &Receiver<Command>, behind: &AtomicUsize) -> std::io::Result<()> {
    let mut file = BufWriter::new(sink);
    // Bytes written, and bytes of whole steps that are certainly in the file.
    let (mut written, mut whole) = (0, 0);
    let mut write_all_commands = || -> std::io::Result<()> {
        loop {
            let command = match inbox.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Disconnected) => return file.flush(),
                Err(TryRecvError::Empty) => {
                    file.flush()?;
                    whole = written;
                    match inbox.recv() {
                        Ok(command) => command,
                        Err(_) => return Ok(()),
                    }
                }
            };
            match command {
                Command::Write(step) => {
                    file.write_all(step.as_bytes())?;
                    written += step.len() as u64;
                    behind.fetch_sub(step.len(), SeqCst);
                }
                Command::Flush(sender) => {
                    file.flush()?;
                    whole = written;
                    let _ = sender.send(());
                }
            }
        }
    };
    let ended = write_all_commands();
    if ended.is_err() {
        // Dropping the buffer must not try to write its contents again.
        let (mut sink, _) = file.into_parts();
        sink.cut(whole);
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Error, ErrorKind};
    use std::sync::Mutex;
    use std::sync::mpsc::SyncSender;

    /// A disk with a capacity of `capacity` bytes. If `go` is set, each write waits for a message on it.
    struct Disk {
        bytes: Arc<Mutex<Vec<u8>>>,
        capacity: usize,
        go: Option<Receiver<()>>,
    }

    impl Write for Disk {
        fn write(&mut self, new: &[u8]) -> std::io::Result<usize> {
            if let Some(go) = &self.go {
                let _ = go.recv();
            }
            let mut bytes = self.bytes.lock().unwrap();
            let n = new.len().min(self.capacity - bytes.len());
            if n == 0 {
                return Err(Error::new(ErrorKind::StorageFull, "no space left"));
            }
            bytes.extend_from_slice(&new[..n]);
            Ok(n)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Sink for Disk {
        fn cut(&mut self, bytes: u64) {
            self.bytes.lock().unwrap().truncate(bytes as usize);
        }
    }

    fn record(capacity: usize, max: usize, slow: bool) -> (RecordFile, Arc<Mutex<Vec<u8>>>, SyncSender<()>) {
        let (sender, go) = std::sync::mpsc::sync_channel(1 << 20);
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let disk = Disk { bytes: bytes.clone(), capacity, go: slow.then_some(go) };
        (RecordFile::with_limit(disk, max).unwrap(), bytes, sender)
    }

    fn step(i: usize) -> String {
        format!("{{\"turn\":{i}}}\n").repeat(1 + i % 3)
    }

    /// Record `n` steps, or as many as the recording accepts. Returns their number.
    fn record_steps(file: &mut RecordFile, n: usize) -> usize {
        (0..n)
            .find(|i| {
                step(*i).lines().for_each(|line| file.push(&format!("{line}\n")));
                !file.end_step()
            })
            .unwrap_or(n)
    }

    fn steps(n: usize) -> String {
        (0..n).map(step).collect()
    }

    #[test]
    fn all_that_was_told_is_there() {
        let (mut file, bytes, _) = record(usize::MAX, MAX_BEHIND_BYTES, false);
        assert_eq!(record_steps(&mut file, 500), 500);
        file.written().blocking_recv().unwrap();
        assert_eq!(String::from_utf8(bytes.lock().unwrap().clone()).unwrap(), steps(500));
        assert_eq!(file.behind.load(SeqCst), 0);
    }

    /// Nothing waits for a disk that accepts nothing. What it accepts in the end is whole steps.
    #[test]
    fn a_slow_disk_ends_the_recording_and_holds_nothing_up() {
        let (mut file, bytes, go) = record(usize::MAX, 20_000, true);
        let n_recorded = record_steps(&mut file, 100_000);
        // The writer thread has a buffer of its own.
        let recorded_bytes = steps(n_recorded).len();
        assert!(
            recorded_bytes <= 30_000 && steps(n_recorded + 1).len() > 20_000,
            "{n_recorded} steps, {recorded_bytes} bytes"
        );
        assert!(!file.end_step(), "it stays over");
        for _ in 0..1000 {
            let _ = go.send(());
        }
        file.written().blocking_recv().unwrap();
        assert_eq!(String::from_utf8(bytes.lock().unwrap().clone()).unwrap(), steps(n_recorded));
    }

    #[test]
    fn a_full_disk_leaves_whole_turns() {
        let (mut file, bytes, _) = record(10_000, MAX_BEHIND_BYTES, false);
        let mut n_recorded = 0;
        // Wait now and then, so that some steps are in the file before it is full.
        while n_recorded < 100_000 {
            file.push(&step(n_recorded));
            if !file.end_step() {
                break;
            }
            n_recorded += 1;
            if n_recorded % 50 == 0 && file.written().blocking_recv().is_err() {
                break;
            }
        }
        assert!(file.written().blocking_recv().is_err(), "it never will be");
        assert!(!file.end_step());
        let text = String::from_utf8(bytes.lock().unwrap().clone()).unwrap();
        assert!(steps(n_recorded).starts_with(&text) && !text.is_empty(), "{text}");
        assert!((0..n_recorded).any(|n| steps(n) == text), "no part of a step: {:?}", text.lines().last());
    }
}
