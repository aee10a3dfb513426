//! The sockets: a PUB socket for new messages, and a ROUTER socket that repeats kept ones.
//!
//! A message has three frames: the topic, its number (8 bytes, big endian, from 0) and the batch. A request for a replay
//! is an empty frame and a number; the answer is every kept message from that number on, and then one with the number
//! -1 and an empty topic and batch.
//!
//! There is one log of the newest messages. A subscriber is a place in it, and so is a replay: nothing is queued for a peer,
//! so a peer that does not read takes no memory. What has left the log is lost to it, which it sees by the numbers. A replay that
//! would begin before the log begins with the [`Content`] in their place, so that a router that starts late learns everything:
//! consumers ask for consecutive numbers, so the first numbers have the content, and those after them up to the log have empty batches.
//! Of many lost messages the empty batches are left out, because a consumer would need too long to read them: vllm-router and Dynamo go on
//! behind such a gap.
mod peers;

use super::wire::{self, Event};
use super::zmtp::{self, Received};
use bytes::Bytes;
use peers::{Peer, Peers};
use socket2::{SockRef, TcpKeepalive};
use std::collections::VecDeque;
use std::io;
use std::net;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Most bytes of messages that are kept.
pub(super) const MAX_KEPT_BYTES: usize = 64 << 20;
/// Most peers of each socket. For another one the peer that has been silent longest is closed; if none is silent, it waits.
const MAX_PEERS: usize = 64;
/// After so long without a byte the system asks whether the peer's machine is still there, so often, and closes the connection if it is
/// not: a consumer that loses its machine or its network says nothing.
const ALIVE_AFTER: Duration = Duration::from_secs(60);
const ALIVE_EVERY: Duration = Duration::from_secs(15);
/// How long a peer may take to say what it is.
const HANDSHAKE_TIME: Duration = Duration::from_secs(60);
/// How long a peer may take to read one message. Then its connection is closed, so that it does not keep others out.
const READING_TIME: Duration = Duration::from_secs(60);
/// The wait after a connection could not be accepted, because there are too many files for example.
const ACCEPTING_AGAIN: Duration = Duration::from_millis(100);

/// Most empty batches of a replay. Where there would be more, none is sent.
const MAX_EMPTY: u64 = 1 << 20;
/// How often the content is asked for, if it is out of date when it comes.
const ATTEMPTS: u32 = 3;
/// After the engine has told the content, it is left alone for so many times as long as that took. Any peer may ask for replays, so this
/// bounds what they can take of the engine's time: less than a twentieth.
const PAUSE_FACTOR: u32 = 20;
/// Most events of a message, and most bytes, unless one event has more: vllm-router 0.1.17 refuses more than 4,096 events, and more than
/// 16 MiB.
const MAX_EVENTS: usize = 4_000;
const MAX_BYTES: usize = 12 << 20;
/// Empty batches that are written at a time.
const WRITTEN_AT_ONCE: u64 = 1024;

/// What all messages before a number say together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Content {
    pub until: u64,
    /// Batches, the first of which begins with [`Event::AllBlocksCleared`]. Each says something without those after it: parents come
    /// before their children.
    pub payloads: Vec<Bytes>,
}

impl Content {
    /// Whether it fits into the numbers from `from` on. If not, a consumer that asks for these gets the first messages alone.
    fn fits(&self, from: u64) -> bool {
        self.payloads.len() as u64 <= self.until.saturating_sub(from)
    }
}

/// The content, and for how long the engine thread was kept from its steps to tell it.
pub(super) type Told = (Content, Duration);

/// Asks for the content of now. `None` if the engine has stopped.
pub(super) type AskContent =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Option<Told>> + Send>> + Send + Sync>;

/// The newest messages. Their numbers are consecutive.
struct Kept {
    messages: VecDeque<(u64, Bytes)>,
    bytes: usize,
    most: usize,
    /// As long as the messages after it are kept, for other replays: all of them share its bytes.
    content: Option<Content>,
}

impl Kept {
    fn push(&mut self, number: u64, payload: Bytes) {
        self.bytes += payload.len();
        self.messages.push_back((number, payload));
        while self.messages.len() > self.most || self.bytes > MAX_KEPT_BYTES {
            let Some((_, payload)) = self.messages.pop_front() else { break };
            self.bytes -= payload.len();
        }
        let oldest = self.oldest(number + 1);
        self.content = self.content.take().filter(|content| content.until >= oldest);
    }

    /// The number of the oldest kept message; that of the `next` one if none is kept.
    fn oldest(&self, next: u64) -> u64 {
        self.messages.front().map_or(next, |(number, _)| *number)
    }

    /// The oldest kept message with at least this number.
    fn from(&self, number: u64) -> Option<(u64, Bytes)> {
        let oldest = self.messages.front()?.0;
        self.messages.get(usize::try_from(number.saturating_sub(oldest)).ok()?).cloned()
    }
}

/// What all peers share.
struct Log {
    topic: Bytes,
    kept: Mutex<Kept>,
    /// The number of the next message.
    next: watch::Sender<u64>,
    /// One at a time asks for the content, and not before this moment.
    asking: tokio::sync::Mutex<Instant>,
}

impl Log {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(|broken| broken.into_inner())
    }
    /// In the order in which a message is published: the other one would wait for itself.
    fn kept_and_next(&self) -> (MutexGuard<'_, Kept>, u64) {
        let next = *self.next.borrow();
        (self.kept(), next)
    }
    /// The oldest kept message with at least this number. The lock is free while a peer reads it.
    fn from(&self, number: u64) -> Option<(u64, Bytes)> {
        self.kept().from(number)
    }
    /// What to send in place of the messages from `from` on that are not kept; `None` if all are.
    async fn content(&self, from: u64, ask: &AskContent) -> Option<Content> {
        let kept = || {
            let (kept, next) = self.kept_and_next();
            let oldest = kept.oldest(next);
            let is_lost = from < oldest;
            // What other replays got is of use only where it is not cut short: now there may be more numbers for it.
            (is_lost, kept.content.clone().filter(|content| content.fits(from)))
        };
        let mut asking = match kept() {
            (false, _) => return None,
            (true, Some(content)) => return Some(content),
            (true, None) => self.asking.lock().await,
        };
        // Again if so many messages came meanwhile that there is a gap after the content.
        for _ in 0..ATTEMPTS {
            // Another replay may have asked.
            if let (true, Some(content)) = kept() {
                return Some(content);
            }
            tokio::time::sleep_until(*asking).await;
            let (content, took) = ask().await?;
            *asking = Instant::now() + took.saturating_mul(PAUSE_FACTOR);
            let (mut kept, next) = self.kept_and_next();
            if content.until >= kept.oldest(next) {
                kept.content = Some(content.clone());
                return Some(content);
            }
        }
        None
    }
    fn message(&self, number: u64, payload: &[u8], before: &[&[u8]]) -> Vec<u8> {
        zmtp::message(&[before, &[&self.topic, &number.to_be_bytes(), payload]].concat())
    }
}

/// Sends messages, and keeps them.
#[derive(Clone)]
pub(super) struct Publisher {
    log: Arc<Log>,
}

impl Publisher {
    /// `buffer` is the number of messages to keep.
    pub fn new(topic: &str, buffer: usize) -> Self {
        let kept = Kept { messages: VecDeque::new(), bytes: 0, most: buffer, content: None };
        let (next, asking) = (watch::Sender::new(0), tokio::sync::Mutex::new(Instant::now()));
        let log = Log { topic: topic.to_string().into(), kept: Mutex::new(kept), next, asking };
        Publisher { log: Arc::new(log) }
    }

    /// Messages so far.
    pub fn n_messages(&self) -> u64 {
        *self.log.next.borrow()
    }

    /// Sends the events to all subscribers. Waits for none.
    pub fn publish(&self, events: &[Event]) {
        let payloads = batches(events);
        self.log.next.send_modify(|next| {
            for payload in payloads {
                self.log.kept().push(*next, payload);
                *next += 1;
            }
        });
    }

    /// Serves subscribers for as long as the runtime lives.
    pub fn serve_subscribers(&self, listener: net::TcpListener) -> io::Result<()> {
        let log = self.log.clone();
        accept(listener, move |stream, peer| {
            let log = log.clone();
            async move {
                let (mut reader, mut writer) = stream.into_split();
                greet(&mut reader, &mut writer, "PUB").await?;
                let (sender, wishes) = watch::channel(Wishes::default());
                tokio::select! {
                    read = read_wishes(reader, &log.topic, &peer, sender) => read,
                    written = write_news(writer, &log, wishes) => written,
                }
            }
        })
    }

    /// Events that say the same as all messages so far, for a consumer that has heard none. Call it where the events are published.
    pub fn content(&self, events: &[Event]) -> Content {
        let payloads = batches(&[&[Event::AllBlocksCleared], events].concat());
        Content { until: self.n_messages(), payloads }
    }

    /// Answers requests for replays for as long as the runtime lives.
    pub fn serve_replays(&self, listener: net::TcpListener, ask: AskContent) -> io::Result<()> {
        let log = self.log.clone();
        accept(listener, move |stream, peer| {
            let (log, ask) = (log.clone(), ask.clone());
            async move {
                let (mut reader, mut writer) = stream.into_split();
                greet(&mut reader, &mut writer, "ROUTER").await?;
                loop {
                    let received = zmtp::read(&mut reader).await?;
                    if let Some(context) = received.ping() {
                        send(&mut writer, &zmtp::pong(context)).await?;
                    } else if let Some(from) = asked(received) {
                        peer.set_silent(false);
                        replay(&mut writer, &log, from, &ask).await?;
                        peer.set_silent(true);
                    }
                }
            }
        })
    }
}

/// The payload of a message. Failures are logged: they would be defects.
fn batch(events: &[Event]) -> Option<Bytes> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let batch = wire::batch(now.as_secs_f64(), events);
    let failed = |error| tracing::error!(target: "kvist::server", "KV events cannot be written: {error}");
    batch.map_err(failed).ok().map(Bytes::from)
}

/// The payloads of as few messages as events fit into, at least one.
fn batches(events: &[Event]) -> Vec<Bytes> {
    let payload = if events.len() <= MAX_EVENTS { batch(events) } else { None };
    match payload {
        Some(payload) if payload.len() <= MAX_BYTES || events.len() <= 1 => vec![payload],
        None if events.len() <= MAX_EVENTS => Vec::new(),
        _ => {
            let at = if events.len() > MAX_EVENTS { MAX_EVENTS } else { events.len() / 2 };
            let (first, rest) = events.split_at(at);
            [batches(first), batches(rest)].concat()
        }
    }
}

/// Accepts connections, each with a task of its own.
fn accept<F: Future<Output = io::Result<()>> + Send>(
    listener: net::TcpListener,
    serve: impl Fn(TcpStream, Arc<Peer>) -> F + Clone + Send + Sync + 'static,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let peers = Arc::new(Peers::new(MAX_PEERS));
    tokio::spawn(async move {
        loop {
            let Ok((stream, address)) = listener.accept().await else {
                tokio::time::sleep(ACCEPTING_AGAIN).await;
                continue;
            };
            let peer = Arc::new(peers.admit().await);
            let serve = serve.clone();
            tokio::spawn(async move {
                let _ = stream.set_nodelay(true);
                let alive = TcpKeepalive::new().with_time(ALIVE_AFTER).with_interval(ALIVE_EVERY);
                let _ = SockRef::from(&stream).set_tcp_keepalive(&alive);
                let served = tokio::select! {
                    served = serve(stream, peer.clone()) => served,
                    () = peer.closed() => Err(io::Error::other("another one needs its place")),
                };
                if let Err(error) = served {
                    tracing::debug!(target: "kvist::server", peer = %address, "a consumer of KV events is gone: {error}");
                }
            });
        }
    });
    Ok(())
}

async fn greet(reader: &mut OwnedReadHalf, writer: &mut OwnedWriteHalf, socket_type: &str) -> io::Result<()> {
    timeout(HANDSHAKE_TIME, zmtp::handshake(reader, writer, socket_type)).await?
}

async fn send(writer: &mut OwnedWriteHalf, message: &[u8]) -> io::Result<()> {
    timeout(READING_TIME, writer.write_all(message)).await?
}

/// What a subscriber wants.
#[derive(Clone, Default)]
struct Wishes {
    /// Its subscriptions that the topic matches.
    matching: u32,
    /// How often it asked whether this end is alive, and what it said the last time: one answer serves all that were sent meanwhile.
    n_pings: u64,
    context: Vec<u8>,
}

/// Reads what a subscriber wants.
async fn read_wishes(
    mut reader: OwnedReadHalf,
    topic: &[u8],
    peer: &Peer,
    wishes: watch::Sender<Wishes>,
) -> io::Result<()> {
    loop {
        let received = zmtp::read(&mut reader).await?;
        if let Some(context) = received.ping() {
            wishes.send_modify(|wishes| {
                wishes.n_pings += 1;
                wishes.context = context.to_vec();
            });
            continue;
        }
        let (is_new, prefix) = match received {
            Received::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                Some((1, prefix)) => (true, prefix.to_vec()),
                Some((0, prefix)) => (false, prefix.to_vec()),
                _ => continue,
            },
            // ZMTP 3.1 has commands for it.
            Received::Command(command) => match command.strip_prefix(b"\x09SUBSCRIBE") {
                Some(prefix) => (true, prefix.to_vec()),
                None => match command.strip_prefix(b"\x06CANCEL") {
                    Some(prefix) => (false, prefix.to_vec()),
                    None => continue,
                },
            },
        };
        if topic.starts_with(&prefix) {
            wishes.send_modify(|Wishes { matching, .. }| {
                *matching = if is_new { matching.saturating_add(1) } else { matching.saturating_sub(1) };
            });
            peer.set_silent(wishes.borrow().matching == 0);
        }
    }
}

/// Sends what is published while the peer has a subscription, and answers its pings.
async fn write_news(
    mut writer: OwnedWriteHalf,
    log: &Log,
    mut wishes: watch::Receiver<Wishes>,
) -> io::Result<()> {
    let closed = |_| io::Error::from(io::ErrorKind::ConnectionAborted);
    let mut news = log.next.subscribe();
    // The number of the next message to send, while there is a subscription.
    let (mut next, mut n_answered) = (None, 0);
    loop {
        let Wishes { matching, n_pings, context } = wishes.borrow_and_update().clone();
        if n_pings != n_answered {
            send(&mut writer, &zmtp::pong(&context)).await?;
            n_answered = n_pings;
        }
        next = match matching {
            0 => None,
            _ => Some(next.unwrap_or_else(|| *news.borrow_and_update())),
        };
        while let Some(number) = next
            && let Some((number, payload)) = log.from(number)
            && !wishes.has_changed().map_err(closed)?
        {
            send(&mut writer, &log.message(number, &payload, &[])).await?;
            next = Some(number + 1);
        }
        tokio::select! {
            changed = wishes.changed() => changed.map_err(closed)?,
            changed = news.changed(), if next.is_some() => changed.map_err(closed)?,
        }
    }
}

/// The number -1, which ends a replay.
const END: [u8; 8] = [0xff; 8];

/// Sends the messages from `from` on that there are when it is asked for. What is not kept any more is replaced by the content.
async fn replay(writer: &mut OwnedWriteHalf, log: &Log, from: u64, ask: &AskContent) -> io::Result<()> {
    let mut next = from;
    if let Some(content) = log.content(from, ask).await {
        if !content.fits(from) {
            tracing::debug!(
                target: "kvist::server",
                "a consumer lost {} KV events, and what the cache has takes {} messages: it gets the first ones",
                content.until - from,
                content.payloads.len()
            );
        }
        let Content { until, payloads } = content;
        let mut empty_from = from;
        for (number, payload) in (from..until).zip(&payloads) {
            send(writer, &log.message(number, payload, &[b""])).await?;
            empty_from = number + 1;
        }
        drop(payloads);
        next = until.max(empty_from);
        if next - empty_from <= MAX_EMPTY {
            send_numbers(writer, log, empty_from..next).await?;
        }
    }
    let end = *log.next.borrow();
    while next < end
        && let Some((number, payload)) = log.from(next)
    {
        // The log has moved on: what follows would say nothing to a consumer that lacks what is lost.
        if number > next {
            break;
        }
        send(writer, &log.message(number, &payload, &[b""])).await?;
        next = number + 1;
    }
    send(writer, &zmtp::message(&[b"", b"", &END, b""])).await
}

/// Sends empty batches under these numbers.
async fn send_numbers(writer: &mut OwnedWriteHalf, log: &Log, numbers: Range<u64>) -> io::Result<()> {
    let nothing = batch(&[]).unwrap_or_default();
    let all = timeout(READING_TIME, async {
        for first in numbers.clone().step_by(WRITTEN_AT_ONCE as usize) {
            let some = first..(first + WRITTEN_AT_ONCE).min(numbers.end);
            let messages: Vec<u8> = some.flat_map(|number| log.message(number, &nothing, &[b""])).collect();
            send(writer, &messages).await?;
        }
        Ok::<(), io::Error>(())
    });
    all.await?
}

/// The first number that is asked for. `None` for a message of another form, or a command.
fn asked(received: Received) -> Option<u64> {
    let Received::Message(frames) = received else { return None };
    let [empty, number] = <[Vec<u8>; 2]>::try_from(frames).ok()?;
    let number: [u8; 8] = number.try_into().ok()?;
    empty.is_empty().then_some(u64::from_be_bytes(number))
}

#[cfg(test)]
mod tests;
