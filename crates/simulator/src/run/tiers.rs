//! Tiers below the KV cache, in virtual time: what is in each, and when transfers end.
//!
//! A block that is copied goes to every tier, as in the server: what a slower tier is larger for is there when a faster one
//! drops it, in its own [order](TierOrder), and other processes find it. A block that is loaded is copied to the faster
//! tiers. Every tier is read and written at its bandwidth, both at the same time, one transfer after the other; a load that
//! needs several tiers reads them at the same time.
//!
//! In a fleet the last tier may be a [store](SharedStore) of all workers. It is not in this struct, but handed to the calls that use
//! it, and it says itself when a transfer is over ([`SimTiers::landed`]).
mod contents;
mod link;
mod shared;

pub use contents::TierOrder;
pub(crate) use contents::{Contents, TierCounts};
pub(crate) use shared::{SharedSpec, SharedStore};

use kvist_cache::Cache;
use kvist_scheduler::{
    FindOrder, LoadOrder, MAX_TIERS, NamedBlock, Order, RequestId, Run, Scheduler, StoreOrder, TransferId,
};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};

/// A tier of the worker's own.
struct OwnTier {
    contents: Contents,
    read_free_ns: u64,
    write_free_ns: u64,
}

/// The store that a worker shares with others, and the worker's number there.
pub(crate) type Shared<'a> = (&'a mut SharedStore, u32);

enum Ended {
    /// A prompt has been looked up.
    Find { request: RequestId, runs: Vec<Run> },
    /// `tiers`: which tier each block came from.
    /// `arrived`: tokens, from the first on.
    Load { id: TransferId, arrived: u32, took_ns: u64, hashes: Vec<u64>, tiers: Vec<usize> },
    /// Blocks have left the cache's memory, and are in the first tier.
    Store { id: TransferId, hashes: Vec<u64> },
    /// Blocks have been written to a slower tier.
    Written { tier: usize, hashes: Vec<u64> },
}

/// A load in flight.
struct Loading {
    /// Its number among the transfers.
    transfer: u64,
    began_ns: u64,
    n_tokens: u32,
    /// From the worker's own tiers.
    reads: Vec<Read>,
}

/// When a tier is read for a load.
struct Read {
    tier: usize,
    from_ns: u64,
    until_ns: u64,
}

/// A prompt that has been looked up.
struct Found {
    /// The number of the first lookup among the transfers. A lookup before it was for another request, which had the same id.
    first: u64,
    /// Hashes of its blocks.
    hashes: Vec<u64>,
}

/// The tiers of a worker.
pub(crate) struct SimTiers {
    config: kvist_scheduler::Tiers,
    /// Its own: all of the configuration, or all but the last.
    tiers: Vec<OwnTier>,
    /// Prompts that have been looked up. Removed when their requests end.
    prompts: HashMap<RequestId, Found, ahash::RandomState>,
    /// Transfers by their end; those that end at the same time, in the order in which they began.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    ended: HashMap<u64, Ended, ahash::RandomState>,
    n_begun: u64,
    /// Loads in flight, by which they are found again.
    loads: HashMap<TransferId, Loading, ahash::RandomState>,
    /// Transfers that the shared store is not done with: when the worker's own tiers are done with them.
    landing: HashMap<u64, u64, ahash::RandomState>,
}

impl SimTiers {
    /// Empty tiers. `capacity_bytes`: of each; `None` has no bound. `orders`: in which each drops its blocks; the default where there is
    /// none. `is_shared`: the last tier is a store of several workers.
    pub fn new(
        config: &kvist_scheduler::Tiers,
        capacity_bytes: &[Option<u64>],
        orders: &[TierOrder],
        is_shared: bool,
    ) -> SimTiers {
        let own = |i: usize| {
            let capacity = capacity_bytes.get(i).copied().flatten();
            let order = orders.get(i).copied().unwrap_or_default();
            let contents = Contents::new(capacity, config.block_bytes, order);
            OwnTier { contents, read_free_ns: 0, write_free_ns: 0 }
        };
        let n_tiers = config.list.len().min(MAX_TIERS);
        SimTiers {
            tiers: (0..n_tiers - usize::from(is_shared)).map(own).collect(),
            config: config.clone(),
            prompts: HashMap::default(),
            ends: BinaryHeap::new(),
            ended: HashMap::default(),
            n_begun: 0,
            loads: HashMap::default(),
            landing: HashMap::default(),
        }
    }

    /// Of the worker's own tiers.
    pub fn counts(&self) -> impl Iterator<Item = TierCounts> {
        self.tiers.iter().map(|tier| tier.contents.counts)
    }

    /// What a tier of its own has, which is empty then.
    pub fn take_contents(&mut self, tier: usize) -> Option<Contents> {
        let contents = &mut self.tiers.get_mut(tier)?.contents;
        Some(std::mem::replace(contents, Contents::new(None, 1, TierOrder::Lru)))
    }

    /// Gives a tier what it had in an earlier life of the worker.
    pub fn put_contents(&mut self, tier: usize, contents: Contents) {
        if let Some(own) = self.tiers.get_mut(tier) {
            own.contents = contents;
        }
    }

    /// When the next transfer ends.
    pub fn next_ns(&self) -> Option<u64> {
        self.ends.peek().map(|Reverse((at_ns, _))| *at_ns)
    }

    pub fn forget(&mut self, request: RequestId) {
        self.prompts.remove(&request);
    }

    /// Reports every transfer that has ended by `now`.
    pub fn report(&mut self, now: u64, scheduler: &mut Scheduler) {
        while let Some(&Reverse((at_ns, begun))) = self.ends.peek()
            && at_ns <= now
        {
            self.ends.pop();
            match self.ended.remove(&begun) {
                // A request that has ended may have left its id to another one.
                Some(Ended::Find { request, runs }) if self.asked_by(request, begun) => {
                    scheduler.found(now, request, runs);
                }
                Some(Ended::Find { .. }) => {}
                Some(Ended::Load { id, arrived, took_ns, hashes, tiers }) => {
                    let is_whole = self.loads.remove(&id).is_some_and(|load| load.n_tokens == arrived);
                    for tier in 0..if is_whole { self.tiers.len() } else { 0 } {
                        let slower = hashes.iter().zip(&tiers).filter(|(_, from)| **from > tier);
                        let slower: Vec<u64> = slower.map(|(hash, _)| *hash).collect();
                        self.write(tier, at_ns, slower);
                    }
                    scheduler.loaded_part(now, id, arrived, took_ns);
                }
                Some(Ended::Store { id, hashes }) => {
                    self.place(0, &hashes);
                    scheduler.stored(now, id, true);
                }
                Some(Ended::Written { tier, hashes }) => self.place(tier, &hashes),
                None => {}
            }
        }
    }

    /// Whether the request that asked for lookup `begun` is live.
    fn asked_by(&self, request: RequestId, begun: u64) -> bool {
        self.prompts.get(&request).is_some_and(|found| found.first <= begun)
    }

    /// Carries out orders. Those that were given when the step began begin at `now`; copies of what a step has computed
    /// begin at its end, `end_ns`. `shared`: the last tier, if it is a shared store.
    pub fn carry_out(
        &mut self,
        now: u64,
        end_ns: u64,
        scheduler: &mut Scheduler,
        mut shared: Option<Shared<'_>>,
    ) {
        for order in scheduler.drain_orders() {
            match order {
                Order::Find(find) => {
                    let runs = self.find(&find, scheduler.cache(), &mut shared);
                    let latency_ns = self.config.list.iter().map(|tier| tier.latency_ns).max().unwrap_or(0);
                    self.end(now.saturating_add(latency_ns), Ended::Find { request: find.request, runs });
                }
                Order::Load(load) => self.load(now, &load, &mut shared),
                Order::Store(store) => {
                    let from_ns = if store.request.is_some() && !store.is_again { end_ns } else { now };
                    let unwritten = self.store(from_ns, &store, &mut shared);
                    let blocks: Vec<NamedBlock> =
                        unwritten.into_iter().filter_map(|i| scheduler.named(&store.blocks[i])).collect();
                    if !blocks.is_empty() {
                        scheduler.unsaved(now, &blocks);
                    }
                }
                Order::Abandon { load } => self.abandon(now, load, &mut shared),
                // No trace forgets a salt, or retains a prompt.
                Order::Cached(_) | Order::Forget { .. } | Order::Keep(_) => {}
            }
        }
    }

    /// The fastest tier that has a block.
    fn tier_of(&self, hash: u64, shared: &Option<Shared<'_>>) -> Option<usize> {
        let own = self.tiers.iter().position(|tier| tier.contents.has(hash));
        own.or_else(|| shared.as_ref()?.0.contents.has(hash).then_some(self.tiers.len()))
    }

    fn find(&mut self, find: &FindOrder, cache: &Cache, shared: &mut Option<Shared<'_>>) -> Vec<Run> {
        let hashes = cache.prefix_hashes(&find.salt, &find.prompt.content(find.n_tokens));
        let block_tokens = find.n_tokens / (hashes.len().max(1) as u32);
        let mut runs: Vec<Run> = Vec::new();
        for (i, &hash) in (1..).zip(&hashes) {
            let tier = self.tier_of(hash, shared).map(|tier| tier as u8);
            let until = i * block_tokens;
            match runs.last_mut() {
                Some(run) if run.tier == tier => run.until = until,
                _ => runs.push(Run::new(tier, until)),
            }
        }
        self.tiers.iter_mut().for_each(|tier| tier.contents.look_up(&hashes));
        if let Some((store, _)) = shared {
            store.contents.look_up(&hashes);
        }
        match self.prompts.get_mut(&find.request) {
            Some(found) => found.hashes = hashes,
            None => drop(self.prompts.insert(find.request, Found { first: self.n_begun, hashes })),
        }
        runs
    }

    fn end(&mut self, at_ns: u64, ended: Ended) {
        self.ends.push(Reverse((at_ns, self.n_begun)));
        self.end_later(ended);
    }

    /// Its time is not known yet. Returns the number of the transfer.
    fn end_later(&mut self, ended: Ended) -> u64 {
        self.ended.insert(self.n_begun, ended);
        self.n_begun += 1;
        self.n_begun - 1
    }

    /// The shared store is done with a transfer at `now`, which ends when the worker's own tiers are done with it, too.
    pub fn landed(&mut self, now: u64, transfer: u64) {
        let Some(own_end_ns) = self.landing.remove(&transfer) else { return };
        let end_ns = own_end_ns.max(now);
        if let Some(Ended::Load { id, took_ns, .. }) = self.ended.get_mut(&transfer) {
            *took_ns = self.loads.get(id).map_or(0, |load| end_ns.saturating_sub(load.began_ns));
        }
        self.ends.push(Reverse((end_ns, transfer)));
    }

    fn transfer_ns(&self, tier: usize, n_blocks: u64) -> u64 {
        let bytes = u128::from(n_blocks) * u128::from(self.config.block_bytes) * 1_000_000_000;
        (bytes / u128::from(self.config.list[tier].bytes_per_s.max(1))).min(u64::MAX.into()) as u64
    }

    fn load(&mut self, now: u64, load: &LoadOrder, shared: &mut Option<Shared<'_>>) {
        let n_blocks = load.blocks.first().map_or(0, Vec::len);
        let block_tokens = load.positions.len() / n_blocks.max(1);
        let first = load.positions.start as usize / block_tokens.max(1);
        let hashes =
            self.prompts.get(&load.request).and_then(|found| found.hashes.get(first..first + n_blocks));
        let hashes: Vec<u64> = hashes.unwrap_or_default().to_vec();
        // What was found may have been dropped since; then nothing more is read when that is noticed.
        let (mut ok, mut n_arrived) = (!hashes.is_empty(), 0);
        let (mut end_ns, mut from) = (now, first);
        let (mut tiers, mut reads) = (Vec::with_capacity(hashes.len()), Vec::new());
        let mut from_shared = None;
        for run in &load.runs {
            let until = run.until as usize / block_tokens.max(1);
            let tier = usize::from(run.tier.unwrap_or(0));
            let of_run = hashes.get(from - first..until - first).unwrap_or_default();
            let has = |hash: &&u64| match self.tiers.get(tier) {
                Some(own) => own.contents.has(**hash),
                None => shared.as_ref().is_some_and(|(store, _)| store.contents.has(**hash)),
            };
            let n = if ok { of_run.iter().take_while(has).count() } else { 0 };
            tiers.resize(until - first, tier);
            n_arrived += n;
            ok &= n == until - from;
            let transfer_ns = self.transfer_ns(tier, n as u64);
            match self.tiers.get_mut(tier) {
                Some(own) => {
                    own.contents.read(&of_run[..n]);
                    let begin_ns = own.read_free_ns.max(now);
                    own.read_free_ns = begin_ns.saturating_add(transfer_ns);
                    reads.push(Read { tier, from_ns: begin_ns, until_ns: own.read_free_ns });
                    let latency_ns = self.config.list[tier].latency_ns;
                    end_ns = end_ns.max(own.read_free_ns.saturating_add(latency_ns));
                }
                None => *from_shared.get_or_insert(0) += n,
            }
            from = until;
        }
        let n_tokens = load.positions.len() as u32;
        let arrived = (n_arrived * block_tokens) as u32;
        self.loads.insert(load.id, Loading { transfer: self.n_begun, began_ns: now, n_tokens, reads });
        let took_ns = end_ns - now;
        let ended = Ended::Load { id: load.id, arrived, took_ns, hashes, tiers };
        match from_shared.zip(shared.as_mut()) {
            Some((n_blocks, (store, worker))) => {
                let transfer = self.end_later(ended);
                store.read(now, *worker, transfer, n_blocks);
                self.landing.insert(transfer, end_ns);
            }
            None => self.end(end_ns, ended),
        }
    }

    /// Stops a load: nothing more is read for it, so it ends now. What would have been read later in its place is not moved
    /// forward, unless nothing is, or the tier is a shared store, which says itself when loads end.
    fn abandon(&mut self, now: u64, id: TransferId, shared: &mut Option<Shared<'_>>) {
        let Some(&Loading { transfer, began_ns, ref reads, .. }) = self.loads.get(&id) else { return };
        for read in reads {
            let own = &mut self.tiers[read.tier];
            if own.read_free_ns == read.until_ns {
                own.read_free_ns = read.from_ns.max(now);
            }
        }
        if self.landing.remove(&transfer).is_some()
            && let Some((store, worker)) = shared
        {
            store.stop_read(now, *worker, transfer);
        }
        self.loads.remove(&id);
        self.ended.remove(&transfer);
        self.ends.retain(|Reverse((_, of))| *of != transfer);
        let (hashes, tiers, took_ns) = (Vec::new(), Vec::new(), now.saturating_sub(began_ns));
        self.end(now, Ended::Load { id, arrived: 0, took_ns, hashes, tiers });
    }

    /// Returns which of the order's blocks a slower tier is not given, because too much waits to be written there.
    fn store(
        &mut self,
        from_ns: u64,
        store: &StoreOrder,
        shared: &mut Option<Shared<'_>>,
    ) -> BTreeSet<usize> {
        let id = store.id;
        let hashes: Vec<u64> = store.blocks.iter().map(|block| block.hash).collect();
        if self.tiers.is_empty()
            && let Some((store, worker)) = shared
        {
            let transfer = self.end_later(Ended::Store { id, hashes: Vec::new() });
            self.landing.insert(transfer, from_ns);
            store.write(*worker, from_ns, hashes, Some(transfer));
            return BTreeSet::new();
        }
        let n_new = hashes.iter().filter(|hash| !self.tiers[0].contents.has(**hash)).count() as u64;
        let end_ns = if n_new == 0 { from_ns } else { self.written(0, from_ns, n_new) };
        let mut unwritten = BTreeSet::new();
        for tier in 1..self.tiers.len() {
            let dropped = self.write(tier, from_ns, hashes.clone());
            unwritten
                .extend(hashes.iter().enumerate().filter(|(_, hash)| dropped.contains(hash)).map(|(i, _)| i));
        }
        if let Some((store, worker)) = shared {
            store.write(*worker, from_ns, hashes.clone(), None);
        }
        self.end(end_ns, Ended::Store { id, hashes });
        unwritten
    }

    /// Begins to write blocks to a tier, as far as it does not have them. Too many bytes that wait to be written are not
    /// written, from the last on: returns those blocks.
    fn write(&mut self, tier: usize, from_ns: u64, mut hashes: Vec<u64>) -> HashSet<u64> {
        hashes.retain(|hash| !self.tiers[tier].contents.has(*hash));
        let behind_ns = u128::from(self.tiers[tier].write_free_ns.saturating_sub(from_ns));
        let behind = behind_ns * u128::from(self.config.list[tier].bytes_per_s) / 1_000_000_000;
        let room = u128::from(self.config.max_store_bytes).saturating_sub(behind);
        let room = (room / u128::from(self.config.block_bytes.max(1))).min(hashes.len() as u128) as usize;
        let dropped = hashes.drain(room..).collect();
        if !hashes.is_empty() {
            let end_ns = self.written(tier, from_ns, hashes.len() as u64);
            self.end(end_ns, Ended::Written { tier, hashes });
        }
        dropped
    }

    /// When `n_blocks` that begin to be written to a tier at `from_ns` have been written.
    fn written(&mut self, tier: usize, from_ns: u64, n_blocks: u64) -> u64 {
        let transfer_ns = self.transfer_ns(tier, n_blocks);
        let own = &mut self.tiers[tier];
        own.contents.counts.written_blocks += n_blocks;
        own.write_free_ns = own.write_free_ns.max(from_ns).saturating_add(transfer_ns);
        own.write_free_ns.saturating_add(self.config.list[tier].latency_ns)
    }

    /// Blocks of one prompt, in order, are in a tier of the worker's own from now on.
    fn place(&mut self, tier: usize, hashes: &[u64]) {
        if let Some(own) = self.tiers.get_mut(tier) {
            own.contents.place(hashes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_cache::kinds::{GroupSpec, Visibility};
    use kvist_cache::{PagedSpec, PrefixSpec, Prompt};
    use kvist_scheduler::{Config, Executor, Recompute, Request, Script, Tier, Tiers, Write};

    fn tiers() -> Tiers {
        Tiers {
            list: vec![Tier { name: "disk".into(), bytes_per_s: 1_000, latency_ns: 0 }],
            block_bytes: 4,
            windows: Vec::new(),
            write: Write::Through,
            max_load_bytes: 1 << 20,
            max_store_bytes: 1 << 20,
            recompute: Recompute { per_token_ns: 1e12, per_pair_ns: 0.0, learn: false },
            grace_ns: 1_000,
            always: false,
        }
    }

    /// The load of a cancelled request went on: it held its cells, and the tier was read, as if somebody waited.
    #[test]
    fn an_abandoned_load_ends_now_and_the_tier_is_free() {
        let groups =
            vec![GroupSpec { capacity_tokens: 400, visibility: Visibility::FULL, max_step_tokens: 400 }];
        let spec =
            PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix: Some(PrefixSpec::default()) };
        let config = Config { tiers: Some(tiers()), ..Config::default() };
        let mut scheduler = Scheduler::new(config, Cache::paged(&spec).unwrap(), None).unwrap();
        let mut sim = SimTiers::new(&tiers(), &[None], &[], false);
        let mut machine = Script(|_, _: kvist_scheduler::Batch<'_>, _: &mut kvist_scheduler::Outcome| ());
        let machine: &mut dyn Executor = &mut machine;
        for id in 0..2 {
            let mut request = Request::new(id, 0, 13, 1);
            let first = 100 * id as u32;
            request.prompt = Prompt::Tokens((first..first + 13).collect());
            let hashes = scheduler.cache().prefix_hashes("", &request.prompt.content(12));
            sim.place(0, &hashes);
            scheduler.arrive(0, request).unwrap();
        }
        sim.carry_out(0, 0, &mut scheduler, None);
        sim.report(0, &mut scheduler);
        scheduler.iterate(0, machine);
        sim.carry_out(0, 0, &mut scheduler, None);
        // 12 bytes at 1,000 bytes/s each, one after the other.
        assert_eq!((scheduler.n_loading(), sim.next_ns()), (2, Some(12_000_000)));
        assert_eq!(sim.tiers[0].read_free_ns, 24_000_000);
        assert!(scheduler.cancel(13_000_000, RequestId(1)));
        sim.carry_out(13_000_000, 13_000_000, &mut scheduler, None);
        assert_eq!(sim.tiers[0].read_free_ns, 13_000_000);
        sim.report(13_000_000, &mut scheduler);
        assert_eq!((scheduler.bytes_in_flight(), sim.next_ns()), ((0, 0), None));
        let counters = scheduler.tier_counters().unwrap();
        assert_eq!((counters.loaded_tokens[0], counters.wasted_tokens, counters.failed_loads), (12, 12, 0));
    }
}
