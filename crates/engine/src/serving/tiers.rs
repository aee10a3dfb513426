//! Moves K and V between the cache and the tiers below it, as the scheduler decides.
//!
//! The engine thread exports and imports blocks; tasks of a small runtime talk to the stores and report to the thread's
//! inbox. A block that comes back was checked by its store, and has the length that the cache expects; otherwise its load
//! fails and the tokens are computed. A store that fails, is full or slow costs hits, never an answer: failures are counted
//! and logged when they begin and when they end.
mod arrived;
mod config;
mod events;
mod find;
mod fingerprint;
mod generations;
mod kept;
mod names;
mod options;
mod packed;
mod parts;
mod pinned;
mod recent;
mod task;
#[cfg(test)]
mod test_store;
mod writes;

use super::thread::Command;
use arrived::{Arrivals, Arrived};
pub use config::{StoreStats, TierConfig, TierStats, TierStore};
pub use events::{TellTier, TierBlock, TierEvent};
use find::Found;
pub use fingerprint::fingerprint;
pub(crate) use fingerprint::maker;
use kvist_cache::{CellRun, GroupId};
use kvist_device::{HostBlock, Transfer, Transfers};
use kvist_scheduler::{LoadOrder, NamedBlock, Order, RequestId, Scheduler, StoreOrder, TransferId};
use kvist_store::{BlockKey, Bytes};
use names::Name;
use options::tier_runtime;
pub use options::{
    LoadRule, OpenTiers, TierOptions, WriteTime, check_shared_store, open_shared_store, store_runtime,
};
pub use packed::PackedStore;
pub(crate) use parts::BlockParts;
use parts::window_key;
pub(crate) use pinned::BlockMemory;
use pinned::PINNED_TIER;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
pub(crate) use task::Stores;
use tokio::task::AbortHandle;
use writes::InText;

/// What a task reports to the engine thread.
pub(crate) enum Report {
    Found {
        request: RequestId,
        found: Found,
    },
    /// Some objects of a load, each with its place in [`Found::wanted`].
    Arrived {
        id: TransferId,
        objects: Vec<(usize, Bytes)>,
    },
    /// No more objects come.
    Fetched {
        id: TransferId,
        took: Duration,
    },
    /// A block that was to be written to a tier was not.
    Unwritten(NamedBlock),
}

/// A load whose bytes are on their way.
struct Load {
    order: LoadOrder,
    /// Of the salt of its prompt.
    note: BlockKey,
    /// Of each object: the block of the load, and its layer groups.
    places: Vec<(usize, Vec<usize>)>,
    blocks: Vec<Arriving>,
    started: Instant,
    task: AbortHandle,
}

/// A block of a load.
#[derive(Default)]
struct Arriving {
    /// Objects of it that have not arrived.
    n_missing: usize,
    /// The copies to the cache's memory that have begun, and not ended.
    parts: Vec<Pending>,
    failed: bool,
}

/// Copies to the cache's memory, or from there.
struct Copies {
    id: TransferId,
    what: Copied,
}

enum Copied {
    /// Blocks of a load of which no more comes, in order. `took`: how long the stores took.
    In { blocks: Vec<Arriving>, note: BlockKey, took: Duration },
    /// What is to be stored. `failed`: something could not be copied.
    Out { objects: Vec<Object>, failed: bool },
}

/// The bytes of a block in some layer groups: what a store has under one key.
struct Object {
    key: BlockKey,
    /// What the scheduler calls the block.
    block: NamedBlock,
    /// Of the salt: its note, and the generation that the key is of.
    of: (BlockKey, u64),
    /// If blocks come in the order of their text.
    at: Option<InText>,
    bytes: usize,
    /// The transfers of its layer groups.
    parts: Vec<Pending>,
    /// What events call the block, until the object is written.
    told: Option<Arc<TierBlock>>,
}

impl Copies {
    /// Looks what has ended. Returns whether all has.
    fn settle(&mut self, transfers: &mut Transfers<'_>) -> bool {
        match &mut self.what {
            Copied::In { blocks, .. } => {
                blocks.iter_mut().for_each(|block| block.settle(transfers));
                blocks.iter().all(|block| block.parts.is_empty())
            }
            Copied::Out { objects, failed } => {
                let parts = objects.iter_mut().flat_map(|object| &mut object.parts);
                parts
                    .map(|part| part.settle(transfers, failed))
                    .filter(|is_on_its_way| *is_on_its_way)
                    .count()
                    == 0
            }
        }
    }
}

impl Arriving {
    fn settle(&mut self, transfers: &mut Transfers<'_>) {
        self.parts.retain_mut(|part| part.settle(transfers, &mut self.failed));
    }

    fn has_arrived(&self) -> bool {
        self.n_missing == 0 && !self.failed
    }
}

enum Pending {
    Begun(Transfer),
    Done(HostBlock),
    Failed,
}

impl Pending {
    /// Looks whether it has ended; `failed` is set if it has failed. Returns whether it is still on its way.
    fn settle(&mut self, transfers: &mut Transfers<'_>, failed: &mut bool) -> bool {
        let Pending::Begun(transfer) = self else { return false };
        *self = match transfers.finished(transfer) {
            None => return true,
            Some(Ok(host)) => Pending::Done(host),
            Some(Err(_)) => {
                *failed = true;
                Pending::Failed
            }
        };
        false
    }
}

/// What the scheduler has to be told.
enum Ended {
    /// So many blocks, from the first on, are in place.
    Load {
        id: TransferId,
        n_blocks: usize,
        took: Duration,
    },
    Store {
        id: TransferId,
        ok: bool,
    },
    /// Blocks that were copied, and not written to a tier.
    Unwritten(Vec<NamedBlock>),
}

/// The tiers of an engine. Lives on the engine thread.
pub(crate) struct TierDriver {
    stores: Arc<Stores>,
    /// Its own, if the configuration has none.
    runtime: Option<tokio::runtime::Runtime>,
    tasks: tokio::runtime::Handle,
    reports: Sender<Command>,
    fingerprint: Arc<[u8]>,
    block_parts: Arc<BlockParts>,
    /// Of the cached blocks, by their number in the naming group. Those that are cached no more may stay until their number is
    /// used again, so there are at most as many as the group has blocks.
    names: HashMap<u32, Name>,
    /// Of blocks that events may tell after the step: those that it has cached.
    new_names: Vec<(BlockKey, Arc<TierBlock>)>,
    /// Of prompts that were looked up, until their request ends ([`TierConfig::request_bytes`]).
    prompts: HashMap<RequestId, Found>,
    /// As many as their bytes may be in flight.
    loads: BTreeMap<TransferId, Load>,
    /// What has been read and waits to be copied to the cache's memory.
    arrived: Arrivals,
    copies: Vec<Copies>,
    ended: Vec<Ended>,
}

impl TierDriver {
    pub fn new(
        config: TierConfig,
        block_parts: BlockParts,
        memory: BlockMemory,
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
            stores: Arc::new(Stores::new(&config).with_memory(memory)),
            tasks,
            runtime,
            reports,
            fingerprint: config.fingerprint.into(),
            block_parts: Arc::new(block_parts),
            names: HashMap::new(),
            new_names: Vec::new(),
            prompts: HashMap::new(),
            loads: BTreeMap::new(),
            arrived: Arrivals::default(),
            copies: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// Begins what the scheduler asks for.
    pub fn carry_out(&mut self, orders: impl IntoIterator<Item = Order>, transfers: &mut Transfers<'_>) {
        for order in orders {
            match order {
                Order::Find(find) => {
                    let tokens: Vec<u32> = find.prompt.tokens().unwrap_or_default().to_vec();
                    let lookup = find::Lookup {
                        request: find.request,
                        tokens,
                        fingerprint: self.fingerprint.clone(),
                        salt: find.salt,
                        block_parts: self.block_parts.clone(),
                        n_tokens: find.n_tokens,
                        hit_tokens: find.hit_tokens,
                    };
                    self.tasks.spawn(find::find(self.stores.clone(), lookup, self.reports.clone()));
                }
                Order::Load(order) => self.load(order),
                Order::Store(store) => self.export(&store, transfers),
                Order::Cached(cached) => self.note(&cached),
                Order::Keep(keep) => self.keep(&keep),
                Order::Forget { salt, blocks } => self.forget_salt(&salt, &blocks),
                Order::Abandon { load: id } => {
                    // Nothing more is read for it, so its cells are free when the copies to them that have begun end.
                    if let Some(load) = self.loads.remove(&id) {
                        load.task.abort();
                        let took = load.started.elapsed();
                        self.end_load(id, load, took);
                    }
                }
            }
        }
        self.poll(transfers);
    }

    fn load(&mut self, order: LoadOrder) {
        let found = self.prompts.get(&order.request);
        match found.and_then(|found| Some((found.note, found.wanted(&order, &self.block_parts)?))) {
            None => self.ended.push(Ended::Load { id: order.id, n_blocks: 0, took: Duration::ZERO }),
            Some((note, wanted)) => {
                let fetch = task::Fetch { id: order.id, wanted };
                let task = self.tasks.spawn(task::fetch(self.stores.clone(), fetch, self.reports.clone()));
                let objects =
                    |i| find::objects_of(&order, &self.block_parts, i).map(move |(groups, _)| (i, groups));
                let n_blocks = order.positions.len() / self.block_parts.block_tokens as usize;
                let places: Vec<(usize, Vec<usize>)> = (0..n_blocks).flat_map(objects).collect();
                let mut blocks: Vec<Arriving> = (0..n_blocks).map(|_| Arriving::default()).collect();
                places.iter().for_each(|(i, _)| blocks[*i].n_missing += 1);
                let (started, task) = (Instant::now(), task.abort_handle());
                let load = Load { order, note, places, blocks, started, task };
                self.loads.insert(load.order.id, load);
            }
        }
    }

    fn export(&mut self, store: &StoreOrder, transfers: &mut Transfers<'_>) {
        let (mut objects, mut failed) = (Vec::new(), false);
        let block_parts = self.block_parts.clone();
        for cached in &store.blocks {
            let Some(&Name { key, parent, note, generation, ref told, .. }) = self.name(cached) else {
                failed = true;
                continue;
            };
            // What was deleted is not written again.
            if generation < self.stores.generation(&note) {
                continue;
            }
            let at = store.request.map(|_| InText { block: key, parent });
            let Some(number) = self.number(cached) else { continue };
            let block = NamedBlock { block: number, hash: cached.hash };
            let whole: Vec<usize> = block_parts.whole().map(|(group, _)| group).collect();
            // A window has some blocks only.
            let parts = block_parts.windows().map(|(group, _)| group);
            let parts = parts.filter(|&group| cached.in_group(GroupId(group as u16)).is_some());
            let parts = parts.map(|group| (window_key(&key, group), vec![group]));
            for (key, groups) in std::iter::once((key, whole)).chain(parts) {
                let bytes = groups.iter().filter_map(|&group| Some(block_parts.part(group)?.bytes)).sum();
                // What was copied before, and a tier that fails cannot say that it has it.
                let may_lack = |tier: &usize| !store.is_again || self.stores.works(*tier);
                let lacks = |tier: &usize| self.stores.lacks(*tier, &key, bytes as u64);
                let lacking: Vec<usize> = (0..self.stores.n()).filter(may_lack).filter(lacks).collect();
                if lacking.is_empty() {
                    continue;
                }
                let is_for_pinned_tier = lacking.contains(&PINNED_TIER);
                let begun = groups.iter().map(|&group| {
                    let bytes = block_parts.part(group)?.bytes;
                    let host = self.stores.memory.block(bytes, is_for_pinned_tier).ok()?;
                    let group = GroupId(group as u16);
                    let cells = cells(cached.in_group(group)?, block_parts.block_tokens);
                    transfers.export(group, cells, host).ok().map(Pending::Begun)
                });
                // If one is refused, the others are still collected when they end: the pools keep their memory until then.
                let parts: Vec<Pending> = begun.map(|begun| begun.unwrap_or(Pending::Failed)).collect();
                failed |= parts.iter().any(|part| matches!(part, Pending::Failed));
                let (of, told) = ((note, generation), told.clone());
                objects.push(Object { key, block, of, at, bytes, parts, told });
            }
        }
        self.copies.push(Copies { id: store.id, what: Copied::Out { objects, failed } });
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
            Report::Found { request, found } => {
                // It may have been looked up before its salt was forgotten.
                let generation = self.stores.generation(&found.note);
                let is_forgotten = found.generation < generation;
                self.stores.events.begin_generation(&found.note, generation);
                let runs = if is_forgotten { Vec::new() } else { found.runs.clone() };
                if scheduler.status(request).is_some() && !is_forgotten {
                    self.prompts.insert(request, found);
                }
                scheduler.found(now, request, runs);
            }
            Report::Arrived { id, objects } => {
                let objects = objects.into_iter().map(|object| Arrived::Object { id, object });
                self.arrived.add(objects);
            }
            Report::Fetched { id, took } => self.arrived.add([Arrived::All { id, took }]),
            Report::Unwritten(block) => self.ended.push(Ended::Unwritten(vec![block])),
        }
        self.import_some(transfers);
        self.poll(transfers);
    }

    /// No more objects come for a load: it ends when what has come is in the cache's memory.
    fn end_load(&mut self, id: TransferId, load: Load, took: Duration) {
        let Load { blocks, note, .. } = load;
        self.copies.push(Copies { id, what: Copied::In { blocks, note, took } });
    }

    /// Looks which copies have ended.
    fn poll(&mut self, transfers: &mut Transfers<'_>) {
        let copies = std::mem::take(&mut self.copies);
        for mut copy in copies {
            if !copy.settle(transfers) {
                self.copies.push(copy);
                continue;
            }
            let id = copy.id;
            match copy.what {
                Copied::In { blocks, took, .. } => {
                    let n_blocks = blocks.iter().take_while(|block| block.has_arrived()).count();
                    self.ended.push(Ended::Load { id, n_blocks, took });
                }
                Copied::Out { objects, failed } => {
                    let unwritten = self.put(objects);
                    self.ended.push(Ended::Store { id, ok: !failed });
                    if !unwritten.is_empty() {
                        self.ended.push(Ended::Unwritten(unwritten));
                    }
                }
            }
        }
    }

    /// Tells the scheduler what has ended. Returns whether there was anything.
    pub fn tell(&mut self, scheduler: &mut Scheduler, now: u64) -> bool {
        let ended = std::mem::take(&mut self.ended);
        for one in &ended {
            match *one {
                Ended::Unwritten(ref blocks) => scheduler.unsaved(now, blocks),
                Ended::Load { id, n_blocks, took } => {
                    let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                    let n_tokens = u32::try_from(n_blocks).unwrap_or(u32::MAX);
                    let n_tokens = n_tokens.saturating_mul(self.block_parts.block_tokens);
                    scheduler.loaded_part(now, id, n_tokens, took_ns);
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

    /// Whether copies between the cache's memory and the host are in flight, or wait for the next step, which nothing reports.
    pub fn is_copying(&self) -> bool {
        !self.copies.is_empty() || !self.arrived.is_empty()
    }

    /// What the scheduler knows; the stores know the rest at any time.
    pub fn stats(&self, scheduler: &Scheduler) -> TierStats {
        let (load_bytes, store_bytes) = scheduler.bytes_in_flight();
        let counters = scheduler.tier_counters().unwrap_or_default();
        let pinned = self.stores.memory.usage();
        TierStats { counters, load_bytes, store_bytes, pinned, stores: Vec::new() }
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

fn cells(block: u32, block_tokens: u32) -> CellRun {
    CellRun { start: block * block_tokens, len: block_tokens }
}
