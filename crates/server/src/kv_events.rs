//! KV events for the routers of a fleet: which prefixes this server's cache has, in vLLM's format over ZeroMQ.
//!
//! After each step the engine thread passes on what the prefix index logged, and forgets it. A task turns it into
//! messages and gives them to the socket. Neither waits for consumers.
mod public;
mod publisher;
mod tiers;
mod wire;
mod zmtp;

use crate::config::{EventEndpoint, KvEventsSection};
use kvist_cache::{Cache, GroupId, PrefixEvent};
use kvist_engine::serving::{Engine, EngineState, TierEvent, Watcher};
use public::PublicBlocks;
use publisher::{AskContent, Content, MAX_KEPT_BYTES, Publisher};
use serde_json::{Value, json};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiers::PublicTiers;
pub(crate) use tiers::tier_event_bytes;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use wire::Event;

/// Memory that it takes at most to publish what a cache of so many blocks has: messages for consumers that have missed some, and what
/// consumers know.
pub(crate) fn kept_event_bytes(n_blocks: u64) -> u64 {
    // The content that replays share is counted like messages. A hash table doubles its places when seven eighths are taken.
    2 * MAX_KEPT_BYTES as u64 + n_blocks.saturating_mul(16 * (size_of::<u64>() as u64 + 1)).div_ceil(7)
}

/// Where the events are published, bound before the model is loaded so that a port in use is found early.
pub struct KvEventSockets {
    section: KvEventsSection,
    events: TcpListener,
    replays: Option<TcpListener>,
}

impl KvEventSockets {
    /// `None` if no endpoint is configured.
    ///
    /// # Errors
    /// An address cannot be bound. The error names it.
    pub fn bind(section: &KvEventsSection) -> io::Result<Option<Self>> {
        let Some(endpoint) = &section.endpoint else { return Ok(None) };
        let bind = |endpoint: &EventEndpoint| {
            let bound = TcpListener::bind(endpoint.address());
            bound.map_err(|error| {
                io::Error::new(error.kind(), format!("cannot listen on {endpoint}: {error}"))
            })
        };
        let replays = section.replay_endpoint.as_ref().map(bind).transpose()?;
        Ok(Some(KvEventSockets { section: section.clone(), events: bind(endpoint)?, replays }))
    }
}

/// The publisher of what a cache has.
pub struct KvEvents {
    /// `/kv_event_sources`.
    sources: Value,
    address: SocketAddr,
    publisher: Publisher,
}

/// What the publisher's task reads, and what it writes to.
struct Opened {
    events: KvEvents,
    replays: Option<TcpListener>,
    sender: UnboundedSender<Passed>,
    receiver: UnboundedReceiver<Passed>,
}

impl KvEvents {
    /// Publishes from now on, beginning with what the cache has. `salt` is that of the requests whose blocks are
    /// published. Call it within a tokio runtime, once per engine.
    pub(crate) async fn start(sockets: KvEventSockets, engine: &Engine, salt: Arc<str>) -> io::Result<Self> {
        let with_tiers = sockets.section.tiers;
        let Opened { events, replays, sender, receiver } = KvEvents::open(sockets)?;
        if let Some(replays) = replays {
            events.publisher.serve_replays(replays, ask_content(engine.clone(), sender.clone()))?;
        }
        let tell = with_tiers.then(|| sender.clone());
        let public = engine.inspect(move |state| {
            let cache = state.scheduler.cache_mut();
            let blocks = watch(cache, &salt);
            let block_tokens = cache.paged_spec().map_or(1, |spec| spec.block_tokens);
            let watch_tiers = |sender: UnboundedSender<Passed>| {
                // Without a receiver the server ends.
                state.watch_tiers(&salt, Box::new(move |event| drop(sender.send(Passed::Tier(event)))))
            };
            let stores = tell.map_or(Vec::new(), watch_tiers);
            Public { blocks, tiers: PublicTiers::new(&stores, block_tokens), of_tiers: Vec::new() }
        });
        let public = public.await.ok_or_else(|| io::Error::other("the engine has stopped"))?;
        engine.add_watcher(Box::new(KvEventFeed { sender, events: Vec::new() }));
        tokio::spawn(publish(events.publisher.clone(), public, receiver));
        Ok(events)
    }

    /// The same for a cache whose owner has a loop of its own instead of an engine, and feeds the events to the publisher. A replay
    /// has only the messages that are kept. Call it within a tokio runtime.
    ///
    /// # Errors
    /// The sockets cannot be used.
    pub fn of_cache(
        sockets: KvEventSockets,
        cache: &mut Cache,
        salt: &str,
    ) -> io::Result<(Self, KvEventFeed)> {
        let Opened { events, replays, sender, receiver } = KvEvents::open(sockets)?;
        if let Some(replays) = replays {
            events.publisher.serve_replays(replays, Arc::new(|| Box::pin(async { None })))?;
        }
        let (blocks, tiers) = (watch(cache, salt), PublicTiers::new(&[], 1));
        let public = Public { blocks, tiers, of_tiers: Vec::new() };
        tokio::spawn(publish(events.publisher.clone(), public, receiver));
        Ok((events, KvEventFeed { sender, events: Vec::new() }))
    }

    fn open(sockets: KvEventSockets) -> io::Result<Opened> {
        let KvEventSockets { section, events, replays } = sockets;
        let address = events.local_addr()?;
        let endpoint = shown(address);
        let replay_endpoint =
            replays.as_ref().map(|listener| listener.local_addr().map(shown)).transpose()?;
        let sources = json!({"0": {
            "enable_kv_cache_events": true, "publisher": "zmq", "encoding": "msgpack", "schema_version": 1,
            "topic": section.topic, "endpoint": endpoint, "replay_endpoint": replay_endpoint,
            "buffer_steps": section.buffer,
        }});
        let publisher = Publisher::new(&section.topic, section.buffer);
        // A consumer may remember an earlier process at this address.
        publisher.publish(&[Event::AllBlocksCleared]);
        publisher.serve_subscribers(events)?;
        let (sender, receiver) = unbounded_channel();
        Ok(Opened { events: KvEvents { sources, address, publisher }, replays, sender, receiver })
    }

    /// Where the events are, as vLLM says it.
    pub(crate) fn sources(&self) -> &Value {
        &self.sources
    }

    /// Where subscribers connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Messages published so far.
    pub fn n_messages(&self) -> u64 {
        self.publisher.n_messages()
    }
}

/// Lets the cache log what its prefix index stores and evicts, from what it has now on.
fn watch(cache: &mut Cache, salt: &str) -> PublicBlocks {
    cache.watch_prefixes(true);
    let block_tokens = cache.paged_spec().map_or(1, |spec| spec.block_tokens);
    PublicBlocks::new(cache.prefix_hash(salt, &[]), routed_group(cache), block_tokens)
}

/// The endpoint as routers take it: they put the worker's host in the place of `*`.
fn shown(address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("tcp://*:{}", address.port()),
        false => format!("tcp://{address}"),
    }
}

/// The group whose blocks decide about a hit: the first without a window. With windows in all layers it is the first.
fn routed_group(cache: &Cache) -> GroupId {
    let n_groups = cache.paged_spec().map_or(1, |spec| spec.groups.len());
    let groups = (0..n_groups).map(|group| GroupId(group as u16));
    groups.clone().find(|group| cache.window(*group).is_none()).unwrap_or(GroupId(0))
}

/// What the engine thread passes on, and what tiers do.
enum Passed {
    /// What has happened in the cache since the last time.
    Events(Vec<PrefixEvent>),
    /// What has happened in a tier.
    Tier(TierEvent),
    /// All that the index has, as an answer.
    Content { events: Vec<PrefixEvent>, answer: oneshot::Sender<Option<Content>> },
}

/// Lets the engine thread pass on all that the index has, in its place among the events.
fn ask_content(engine: Engine, sender: UnboundedSender<Passed>) -> AskContent {
    Arc::new(move || {
        let (engine, sender) = (engine.clone(), sender.clone());
        Box::pin(async move {
            let (answer, content) = oneshot::channel();
            let asked = engine.inspect(move |state| {
                let began = Instant::now();
                let cache = state.scheduler.cache_mut();
                let (mut before, mut events) = (Vec::new(), Vec::new());
                cache.drain_prefix_events(&mut before);
                // A log that is turned on begins with all there is.
                cache.watch_prefixes(false);
                cache.watch_prefixes(true);
                cache.drain_prefix_events(&mut events);
                // Without a receiver the answer is dropped, which its asker sees.
                let _ = sender.send(Passed::Events(before));
                let _ = sender.send(Passed::Content { events, answer });
                began.elapsed()
            });
            let took = asked.await?;
            content.await.ok().flatten().map(|content| (content, took))
        })
    })
}

/// Passes on what a cache has logged, on the thread that owns the cache.
pub struct KvEventFeed {
    sender: UnboundedSender<Passed>,
    /// Reused if there is nothing to pass on.
    events: Vec<PrefixEvent>,
}

impl KvEventFeed {
    /// Passes on what `cache` has logged since the last time, and waits for nothing. If the publisher is gone, the cache stops
    /// logging.
    pub fn pass_on(&mut self, cache: &mut Cache) {
        cache.drain_prefix_events(&mut self.events);
        // The queue stays short: its reader never waits for a consumer.
        if self.events.is_empty() {
            return;
        }
        if self.sender.send(Passed::Events(std::mem::take(&mut self.events))).is_err() {
            cache.watch_prefixes(false);
        }
    }
}

impl Watcher for KvEventFeed {
    fn stepped(&mut self, _now_ns: u64, _end_ns: u64, state: &mut EngineState) {
        self.pass_on(state.scheduler.cache_mut());
    }
}

/// The publisher looks at what was passed on at most so often. To wake its task is a system call on the engine thread, which is most of
/// what publishing costs there: steps that follow each other faster than this share one.
const LOOKS_EVERY: Duration = Duration::from_millis(1);

async fn publish(publisher: Publisher, mut public: Public, mut passed: UnboundedReceiver<Passed>) {
    while let Some(first) = passed.recv().await {
        let mut next = Some(first);
        while let Some(passed_on) = next {
            public.handle(&publisher, passed_on);
            next = passed.try_recv().ok();
        }
        public.publish_tiers(&publisher);
        // What is sent meanwhile wakes nothing.
        tokio::time::sleep(LOOKS_EVERY).await;
    }
}

/// What routers may know.
struct Public {
    blocks: PublicBlocks,
    tiers: PublicTiers,
    /// What tiers did, one block at a time: it becomes one message.
    of_tiers: Vec<Event>,
}

/// Most events that wait for such a message.
const MOST_OF_TIERS: usize = 256;

impl Public {
    fn handle(&mut self, publisher: &Publisher, passed: Passed) {
        match passed {
            Passed::Tier(event) => {
                self.tiers.translate(event, &mut self.of_tiers);
                if self.of_tiers.len() >= MOST_OF_TIERS {
                    self.publish_tiers(publisher);
                }
            }
            Passed::Events(step) => {
                self.publish_tiers(publisher);
                let mut events = self.blocks.translate(&step);
                // Consumers have forgotten the tiers too, which have what they had.
                if events.contains(&Event::AllBlocksCleared) {
                    self.tiers.content(&mut events);
                }
                if !events.is_empty() {
                    publisher.publish(&events);
                }
            }
            Passed::Content { events, answer } => {
                self.publish_tiers(publisher);
                let mut content = self.blocks.anew().translate(&events);
                self.tiers.content(&mut content);
                let _ = answer.send(Some(publisher.content(&content)));
            }
        }
    }

    fn publish_tiers(&mut self, publisher: &Publisher) {
        if !self.of_tiers.is_empty() {
            publisher.publish(&std::mem::take(&mut self.of_tiers));
        }
    }
}
