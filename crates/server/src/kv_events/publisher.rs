//! The sockets: a PUB socket for new messages, and a ROUTER socket that repeats kept ones.
//!
//! A message has three frames: the topic, its number (8 bytes, big endian, from 0) and the batch. A request for a replay
//! is an empty frame and a number; the answer is every kept message from that number on, and then one with the number
//! -1 and an empty topic and batch.
use super::wire::{self, Event};
use bytes::Bytes;
use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};
use tokio::sync::Semaphore;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage, ZmqResult};

/// Most bytes of messages that are kept for replays.
const MAX_KEPT_BYTES: usize = 64 << 20;
/// Replays at the same time. Further requests wait.
const MAX_REPLAYS: usize = 4;
/// How long a consumer may take to read one message of a replay.
const READING_TIME: Duration = Duration::from_secs(10);

/// The newest messages, for consumers that have missed some.
struct Kept {
    messages: VecDeque<(u64, Bytes)>,
    bytes: usize,
    most: usize,
}

impl Kept {
    fn push(&mut self, number: u64, payload: Bytes) {
        self.bytes += payload.len();
        self.messages.push_back((number, payload));
        while self.messages.len() > self.most || self.bytes > MAX_KEPT_BYTES {
            let Some((_, payload)) = self.messages.pop_front() else { return };
            self.bytes -= payload.len();
        }
    }

    /// The oldest kept message with at least this number.
    fn from(&self, number: u64) -> Option<(u64, Bytes)> {
        // The numbers of kept messages are consecutive.
        let oldest = self.messages.front()?.0;
        self.messages.get(usize::try_from(number.saturating_sub(oldest)).ok()?).cloned()
    }
}

/// Sends messages, and keeps them.
pub(super) struct Publisher {
    socket: PubSocket,
    topic: Bytes,
    kept: Arc<Mutex<Kept>>,
    next: Arc<AtomicU64>,
}

fn locked(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(|broken| broken.into_inner())
}

impl Publisher {
    /// `buffer` is the number of messages to keep. `next` counts the messages.
    pub async fn bind(
        listener: TcpListener,
        topic: &str,
        buffer: usize,
        next: Arc<AtomicU64>,
    ) -> ZmqResult<Self> {
        let mut socket = PubSocket::new();
        socket.bind_listener(listener).await?;
        let kept = Kept { messages: VecDeque::new(), bytes: 0, most: buffer };
        Ok(Publisher { socket, topic: topic.to_string().into(), kept: Arc::new(Mutex::new(kept)), next })
    }

    /// Sends the events to whoever listens. Never waits: a consumer that does not read loses messages, which it sees by
    /// their numbers.
    pub async fn publish(&mut self, events: &[Event]) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let payload: Bytes = match wire::batch(now.as_secs_f64(), events) {
            Ok(payload) => payload.into(),
            Err(error) => {
                tracing::error!(target: "kvist::server", "KV events cannot be written: {error}");
                return;
            }
        };
        let number = self.next.fetch_add(1, Relaxed);
        locked(&self.kept).push(number, payload.clone());
        let frames = vec![self.topic.clone(), number_frame(number), payload];
        if let Ok(message) = ZmqMessage::try_from(frames) {
            let _ = self.socket.send(message).await;
        }
    }

    /// Answers requests for replays for as long as the runtime lives.
    pub async fn serve_replays(&self, listener: TcpListener) -> ZmqResult<()> {
        let mut socket = RouterSocket::new();
        socket.bind_listener(listener).await?;
        let (sender, mut requests) = socket.split();
        let (kept, topic) = (self.kept.clone(), self.topic.clone());
        let slots = Arc::new(Semaphore::new(MAX_REPLAYS));
        tokio::spawn(async move {
            loop {
                let Ok(request) = requests.recv().await else { continue };
                let Some((peer, from)) = asked(request) else { continue };
                let Ok(slot) = slots.clone().acquire_owned().await else { return };
                let (mut sender, kept, topic) = (sender.clone(), kept.clone(), topic.clone());
                tokio::spawn(async move {
                    let _slot = slot;
                    let mut next = from;
                    loop {
                        // One at a time: the lock is free while a slow consumer reads.
                        let message = locked(&kept).from(next);
                        let (number, frames) = match message {
                            Some((number, payload)) => {
                                (Some(number), vec![topic.clone(), number_frame(number), payload])
                            }
                            None => (None, vec![Bytes::new(), END.into(), Bytes::new()]),
                        };
                        let frames = [vec![peer.clone(), Bytes::new()], frames].concat();
                        let Ok(message) = ZmqMessage::try_from(frames) else { return };
                        let sent = tokio::time::timeout(READING_TIME, sender.send(message)).await;
                        match (sent, number) {
                            (Ok(Ok(())), Some(number)) => next = number + 1,
                            _ => return,
                        }
                    }
                });
            }
        });
        Ok(())
    }
}

/// The number -1, which ends a replay.
const END: &[u8] = &[0xff; 8];

fn number_frame(number: u64) -> Bytes {
    number.to_be_bytes().to_vec().into()
}

/// The consumer that asks, and the first number that it wants. `None` for a message of another form.
fn asked(request: ZmqMessage) -> Option<(Bytes, u64)> {
    let frames: [Bytes; 3] = request.into_vec().try_into().ok()?;
    let [peer, empty, number] = frames;
    let number: [u8; 8] = number.as_ref().try_into().ok()?;
    empty.is_empty().then_some((peer, u64::from_be_bytes(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(most: usize) -> Kept {
        Kept { messages: VecDeque::new(), bytes: 0, most }
    }

    #[test]
    fn the_newest_messages_are_kept() {
        let mut kept = kept(3);
        assert!(kept.from(0).is_none());
        for number in 0..5 {
            kept.push(number, vec![number as u8].into());
        }
        let numbers = |first: u64| {
            let mut next = first;
            std::iter::from_fn(move || Some(next))
                .map_while(|_| {
                    let (number, payload) = kept.from(next)?;
                    assert_eq!(payload[..], [number as u8]);
                    next = number + 1;
                    Some(number)
                })
                .collect::<Vec<u64>>()
        };
        assert_eq!(numbers(0), [2, 3, 4]);
    }

    /// Large messages do not fill the memory, whatever their number.
    #[test]
    fn kept_bytes_are_bounded() {
        let mut kept = kept(usize::MAX);
        let payload: Bytes = vec![0; MAX_KEPT_BYTES / 4].into();
        for number in 0..9 {
            kept.push(number, payload.clone());
        }
        assert_eq!((kept.messages.len(), kept.bytes), (4, MAX_KEPT_BYTES));
        assert_eq!(kept.from(0).map(|(number, _)| number), Some(5));
        assert!(kept.from(9).is_none() && kept.from(u64::MAX).is_none());
    }

    #[test]
    fn other_requests_are_ignored() {
        let frames = |frames: &[&[u8]]| {
            let frames: Vec<Bytes> = frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect();
            ZmqMessage::try_from(frames).unwrap()
        };
        let number = 7u64.to_be_bytes();
        assert_eq!(asked(frames(&[b"peer", b"", &number])), Some((Bytes::from_static(b"peer"), 7)));
        for other in [&[&b"peer"[..], b"", b"7"][..], &[b"peer", b"x", &number], &[b"peer", &number]] {
            assert_eq!(asked(frames(other)), None);
        }
    }
}
