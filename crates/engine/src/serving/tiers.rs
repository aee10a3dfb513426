//! Moves K and V between the cache and the tiers below it, as the scheduler decides.
//!
//! The engine thread exports and imports blocks; tasks of a small runtime talk to the stores and report to the thread's
//! inbox. A block that comes back was checked by its store, and has the length that the cache expects; otherwise its load
//! fails and the tokens are computed. A store that fails, is full or slow costs hits, never an answer: failures are counted
//! and logged when they begin and when they end.
mod fingerprint;
mod task;

use super::thread::Command;
pub use fingerprint::fingerprint;
use kvist_cache::{BlockId, CellRun, GroupId};
use kvist_device::{HostBlock, Transfer, Transfers};
use kvist_scheduler::{CachedTokens, LoadOrder, Order, Recompute, RequestId, Run, Scheduler, StoreOrder};
use kvist_scheduler::{Tier, TierCounters, Tiers, TransferId, Write};
use kvist_store::{BlockKey, BlockStore, Bytes, KeyChain, Usage};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
pub(crate) use task::Stores;

/// One tier: a store, and how fast it is at first. What loads take is measured from then on.
#[derive(Clone)]
pub struct TierStore {
    pub store: Arc<dyn BlockStore>,
    /// How fast it is read.
    pub bytes_per_s: u64,
    /// Time until the first byte of a read.
    pub latency: Duration,
}

/// Tiers below the KV cache.
#[derive(Clone)]
pub struct TierConfig {
    /// Fastest first.
    pub stores: Vec<TierStore>,
    /// Identifies everything that K and V depend on besides the tokens and the salt: the model, how its weights are
    /// computed with, the storage of K and V. Blocks are only found by engines with the same one.
    pub fingerprint: Vec<u8>,
    pub write: Write,
    /// Bytes that may be on their way from the tiers at a time, and as many to them.
    pub max_bytes_in_flight: u64,
    /// How long a request waits for a lookup, and for a load beyond four times its estimate.
    pub grace: Duration,
    /// Where the stores' tasks run; `None` starts a runtime of two threads that ends with the engine. Stores that were opened on a
    /// runtime need that one.
    pub runtime: Option<tokio::runtime::Handle>,
}

impl TierConfig {
    /// Writes through, 256 MiB in flight, a quarter of a second of grace.
    pub fn new(stores: Vec<TierStore>, fingerprint: Vec<u8>) -> Self {
        let (write, grace) = (Write::Through, Duration::from_millis(250));
        TierConfig { stores, fingerprint, write, max_bytes_in_flight: 256 << 20, grace, runtime: None }
    }

    /// What the scheduler has to know. `multiply_adds`: of a token, and of a token and a position that it sees.
    pub(crate) fn scheduled(&self, block_bytes: u64, multiply_adds: (f64, f64)) -> Tiers {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let tier = |tier: &TierStore| Tier {
            name: tier.store.name().to_owned(),
            bytes_per_s: tier.bytes_per_s.max(1),
            latency_ns: nanoseconds(tier.latency),
        };
        Tiers {
            list: self.stores.iter().map(tier).collect(),
            block_bytes,
            write: self.write,
            max_load_bytes: self.max_bytes_in_flight,
            max_store_bytes: self.max_bytes_in_flight,
            recompute: Recompute {
                per_token_ns: multiply_adds.0 * GUESSED_NS,
                per_pair_ns: multiply_adds.1 * GUESSED_NS,
                learn: true,
            },
            grace_ns: nanoseconds(self.grace),
        }
    }
}

/// Of a multiply-add, until the first prompts have been measured: a few cores.
const GUESSED_NS: f64 = 0.01;

/// What the tiers did, and what they hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierStats {
    pub counters: TierCounters,
    /// Bytes on their way from and to the tiers.
    pub load_bytes: u64,
    pub store_bytes: u64,
    /// Fastest first.
    pub stores: Vec<StoreStats>,
}

/// One store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreStats {
    pub name: String,
    pub usage: Usage,
    /// Operations that failed.
    pub errors: u64,
}

/// What a task reports to the engine thread.
pub(crate) enum Report {
    Found { request: RequestId, runs: Vec<Run>, keys: Vec<BlockKey> },
    Fetched { id: TransferId, blocks: Option<Vec<Bytes>>, took: Duration },
}

/// A load whose bytes are on their way.
struct Load {
    order: LoadOrder,
    abandoned: bool,
}

/// Copies between the cache's memory and the host.
struct Copies {
    id: TransferId,
    /// Per block of the cache: its key, and the transfers of its layer groups.
    blocks: Vec<(BlockKey, Vec<Pending>)>,
    /// How long the store took, for imports; `None` for exports.
    took: Option<Duration>,
    failed: bool,
}

enum Pending {
    Begun(Transfer),
    Done(HostBlock),
    Failed,
}

/// What the scheduler has to be told.
enum Ended {
    Load { id: TransferId, ok: bool, took: Duration },
    Store { id: TransferId, ok: bool },
}

/// The tiers of an engine. Lives on the engine thread.
pub(crate) struct TierDriver {
    stores: Arc<Stores>,
    /// Its own, if the configuration has none.
    runtime: Option<tokio::runtime::Runtime>,
    tasks: tokio::runtime::Handle,
    reports: Sender<Command>,
    fingerprint: Vec<u8>,
    block_tokens: u32,
    /// Of a block, by layer group.
    group_bytes: Vec<usize>,
    /// Of the cached blocks, by their number in the first layer group.
    keys: HashMap<u32, BlockKey>,
    /// Of prompts that were looked up, until their request ends.
    prompts: HashMap<RequestId, Vec<BlockKey>>,
    loads: BTreeMap<TransferId, Load>,
    copies: Vec<Copies>,
    ended: Vec<Ended>,
}

impl TierDriver {
    /// `group_bytes`: of a block in each layer group.
    pub fn new(
        config: TierConfig,
        block_tokens: u32,
        group_bytes: Vec<usize>,
        reports: Sender<Command>,
    ) -> std::io::Result<TierDriver> {
        let (runtime, tasks) = match &config.runtime {
            Some(tasks) => (None, tasks.clone()),
            None => {
                let runtime = tier_runtime()?;
                let tasks = runtime.handle().clone();
                (Some(runtime), tasks)
            }
        };
        Ok(TierDriver {
            stores: Arc::new(Stores::new(&config)),
            tasks,
            runtime,
            reports,
            fingerprint: config.fingerprint,
            block_tokens,
            group_bytes,
            keys: HashMap::new(),
            prompts: HashMap::new(),
            loads: BTreeMap::new(),
            copies: Vec::new(),
            ended: Vec::new(),
        })
    }

    fn block_bytes(&self) -> usize {
        self.group_bytes.iter().sum()
    }

    /// Begins what the scheduler asks for.
    pub fn carry_out(&mut self, orders: impl IntoIterator<Item = Order>, transfers: &mut Transfers<'_>) {
        for order in orders {
            match order {
                Order::Find(find) => {
                    let tokens: Vec<u32> = find.prompt.tokens().unwrap_or_default().to_vec();
                    let chain = KeyChain::root(&self.fingerprint, &find.salt);
                    let lookup = task::Lookup {
                        request: find.request,
                        tokens,
                        chain,
                        block_tokens: self.block_tokens,
                        n_tokens: find.n_tokens,
                        hit_tokens: find.hit_tokens,
                    };
                    self.tasks.spawn(task::find(self.stores.clone(), lookup, self.reports.clone()));
                }
                Order::Load(order) => self.load(order),
                Order::Store(store) => self.export(&store, transfers),
                Order::Cached(cached) => self.name(&cached),
                Order::Remove(blocks) => {
                    let named = blocks.iter().filter_map(|block| block.blocks.first());
                    let keys: Vec<BlockKey> =
                        named.filter_map(|first| self.keys.remove(&first.block)).collect();
                    self.tasks.spawn(task::remove(self.stores.clone(), keys));
                }
                Order::Abandon { load } => {
                    if let Some(load) = self.loads.get_mut(&load) {
                        load.abandoned = true;
                    }
                }
            }
        }
        self.poll(transfers);
    }

    /// Notes what cached blocks hold.
    fn name(&mut self, cached: &CachedTokens) {
        let mut chain = match cached.parent {
            None => KeyChain::root(&self.fingerprint, &cached.salt),
            // Without the key of the block before them they have none either, and are not copied.
            Some(parent) => match self.keys.get(&parent) {
                Some(key) => KeyChain::after(*key),
                None => return cached.blocks.iter().for_each(|block| self.forget(block)),
            },
        };
        let tokens = cached.tokens.chunks_exact(self.block_tokens as usize);
        for (block, tokens) in cached.blocks.iter().zip(tokens) {
            let key = chain.next(tokens);
            if let Some(first) = block.blocks.first() {
                self.keys.insert(first.block, key);
            }
        }
    }

    fn forget(&mut self, block: &kvist_cache::CachedBlock) {
        if let Some(first) = block.blocks.first() {
            self.keys.remove(&first.block);
        }
    }

    fn load(&mut self, order: LoadOrder) {
        let block = self.block_tokens;
        let first = (order.positions.start / block) as usize;
        let keys = self.prompts.get(&order.request);
        let keys = keys.and_then(|keys| keys.get(first..(order.positions.end / block) as usize));
        let Some(keys) = keys else {
            return self.ended.push(Ended::Load { id: order.id, ok: false, took: Duration::ZERO });
        };
        let tier_of = |i: usize| {
            let end = order.positions.start + (i as u32 + 1) * block;
            order.runs.iter().find(|run| run.until >= end).and_then(|run| run.tier)
        };
        let wanted = keys.iter().enumerate().map(|(i, key)| (usize::from(tier_of(i).unwrap_or(0)), *key));
        let fetch = task::Fetch { id: order.id, wanted: wanted.collect(), block_bytes: self.block_bytes() };
        self.tasks.spawn(task::fetch(self.stores.clone(), fetch, self.reports.clone()));
        self.loads.insert(order.id, Load { order, abandoned: false });
    }

    fn export(&mut self, store: &StoreOrder, transfers: &mut Transfers<'_>) {
        let mut copy = Copies { id: store.id, blocks: Vec::new(), took: None, failed: false };
        for cached in &store.blocks {
            let key = cached.blocks.first().and_then(|first| self.keys.get(&first.block));
            let (Some(key), true) = (key, cached.blocks.len() == self.group_bytes.len()) else {
                copy.failed = true;
                continue;
            };
            if self.stores.has_written(key) {
                continue;
            }
            let begun = cached.blocks.iter().map(|id| {
                let bytes = self.group_bytes.get(usize::from(id.group.0)).copied().unwrap_or(0);
                let host = HostBlock::new(bytes).ok()?;
                let begun = transfers.export(id.group, cells(id.block, self.block_tokens), host);
                begun.ok().map(Pending::Begun)
            });
            match begun.collect::<Option<Vec<Pending>>>() {
                Some(begun) => copy.blocks.push((*key, begun)),
                None => copy.failed = true,
            }
        }
        self.copies.push(copy);
    }

    /// Takes what a task reports.
    pub fn report(
        &mut self,
        report: Report,
        transfers: &mut Transfers<'_>,
        scheduler: &mut Scheduler,
        now: u64,
    ) {
        match report {
            Report::Found { request, runs, keys } => {
                if scheduler.status(request).is_some() {
                    self.prompts.insert(request, keys);
                }
                scheduler.found(now, request, runs);
            }
            Report::Fetched { id, blocks, took } => {
                let Some(load) = self.loads.remove(&id) else { return };
                match blocks.filter(|_| !load.abandoned) {
                    Some(blocks) => self.import(&load.order, &blocks, took, transfers),
                    None => self.ended.push(Ended::Load { id, ok: false, took }),
                }
            }
        }
        self.poll(transfers);
    }

    fn import(&mut self, order: &LoadOrder, blocks: &[Bytes], took: Duration, transfers: &mut Transfers<'_>) {
        let mut copy = Copies { id: order.id, blocks: Vec::new(), took: Some(took), failed: false };
        let mut begun = Vec::new();
        for (i, bytes) in blocks.iter().enumerate() {
            let mut at = 0;
            for (g, &len) in self.group_bytes.iter().enumerate() {
                let part = bytes.get(at..at + len);
                at += len;
                let block = order.blocks.get(g).and_then(|blocks| blocks.get(i));
                let one = part.zip(block).and_then(|(part, &block)| {
                    let mut host = HostBlock::new(len).ok()?;
                    host.bytes_mut().copy_from_slice(part);
                    transfers.import(GroupId(g as u16), cells(block, self.block_tokens), host).ok()
                });
                match one {
                    Some(one) => begun.push(Pending::Begun(one)),
                    None => copy.failed = true,
                }
            }
        }
        copy.blocks.push((BlockKey::from_bytes([0; 32]), begun));
        self.copies.push(copy);
    }

    /// Looks which copies have ended.
    fn poll(&mut self, transfers: &mut Transfers<'_>) {
        let mut copies = std::mem::take(&mut self.copies);
        for copy in &mut copies {
            for (_, parts) in &mut copy.blocks {
                for part in parts {
                    let Pending::Begun(transfer) = part else { continue };
                    match transfers.finished(transfer) {
                        None => {}
                        Some(Ok(host)) => *part = Pending::Done(host),
                        Some(Err(_)) => {
                            copy.failed = true;
                            *part = Pending::Failed;
                        }
                    }
                }
            }
        }
        let is_done = |copy: &Copies| {
            copy.blocks.iter().all(|(_, parts)| parts.iter().all(|part| !matches!(part, Pending::Begun(_))))
        };
        let (done, copies) = copies.into_iter().partition(is_done);
        self.copies = copies;
        let done: Vec<Copies> = done;
        for copy in done {
            let ok = !copy.failed;
            match copy.took {
                Some(took) => self.ended.push(Ended::Load { id: copy.id, ok, took }),
                None => {
                    self.put(copy.blocks);
                    self.ended.push(Ended::Store { id: copy.id, ok });
                }
            }
        }
    }

    /// Writes exported blocks to the stores.
    fn put(&self, blocks: Vec<(BlockKey, Vec<Pending>)>) {
        for (key, parts) in blocks {
            let mut bytes = Vec::with_capacity(self.block_bytes());
            for part in &parts {
                if let Pending::Done(host) = part {
                    bytes.extend_from_slice(host.bytes());
                }
            }
            // A part that failed is missing.
            if bytes.len() == self.block_bytes() && self.stores.may_write(bytes.len() as u64) {
                self.tasks.spawn(task::put(self.stores.clone(), key, Bytes::from(bytes)));
            }
        }
    }

    /// Tells the scheduler what has ended. Returns whether there was anything.
    pub fn tell(&mut self, scheduler: &mut Scheduler, now: u64) -> bool {
        let ended = std::mem::take(&mut self.ended);
        for one in &ended {
            match *one {
                Ended::Load { id, ok, took } => {
                    let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                    scheduler.loaded(now, id, ok, took_ns);
                }
                Ended::Store { id, ok } => {
                    scheduler.stored(now, id, ok);
                }
            }
        }
        !ended.is_empty()
    }

    pub fn request_ended(&mut self, request: RequestId) {
        self.prompts.remove(&request);
    }

    /// Whether copies between the cache's memory and the host are in flight, which nothing reports.
    pub fn is_copying(&self) -> bool {
        !self.copies.is_empty()
    }

    /// What the scheduler knows; the stores know the rest at any time.
    pub fn stats(&self, scheduler: &Scheduler) -> TierStats {
        let (load_bytes, store_bytes) = scheduler.bytes_in_flight();
        let counters = scheduler.tier_counters().unwrap_or_default();
        TierStats { counters, load_bytes, store_bytes, stores: Vec::new() }
    }

    /// Cached blocks have other numbers now.
    pub fn moved(&mut self, renamed: &BTreeMap<BlockId, BlockId>) {
        let of_first_group = renamed.iter().filter(|(from, _)| from.group.0 == 0);
        let moved: Vec<(u32, BlockKey)> = of_first_group
            .filter_map(|(from, to)| Some((to.block, self.keys.remove(&from.block)?)))
            .collect();
        self.keys.extend(moved);
    }

    pub fn stores(&self) -> Arc<Stores> {
        self.stores.clone()
    }
}

impl Drop for TierDriver {
    fn drop(&mut self) {
        // What is being written is given up: a tier may forget any block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A runtime for the tasks that talk to stores: they mostly wait, and check what they read.
///
/// # Errors
/// The system starts no more threads.
pub fn tier_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("kvist-tiers")
        .enable_all()
        .build()
}

fn cells(block: u32, block_tokens: u32) -> CellRun {
    CellRun { start: block * block_tokens, len: block_tokens }
}
