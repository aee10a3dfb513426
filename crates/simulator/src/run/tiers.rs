//! Tiers below the KV cache, in virtual time: what is in each, and when transfers end.
//!
//! A block that is copied goes to every tier, as in the server: what a slower tier is larger for is there when a faster one
//! drops it, the least recently used first, and other processes find it. A block that is loaded is copied to the faster
//! tiers. Every tier is read and written at its bandwidth, both at the same time, one transfer after the other; a load that
//! needs several tiers reads them at the same time.
use kvist_cache::Cache;
use kvist_scheduler::{
    FindOrder, LoadOrder, MAX_TIERS, Order, RequestId, Run, Scheduler, StoreOrder, TransferId,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

/// The blocks of one tier, by the hash of the prefix that ends with them.
struct Contents {
    capacity_blocks: u64,
    /// Looked up only, never iterated.
    used_at: HashMap<u64, u64, ahash::RandomState>,
    /// By last use.
    order: BTreeMap<u64, u64>,
    read_free_ns: u64,
    write_free_ns: u64,
    counts: TierCounts,
}

/// What happened to a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TierCounts {
    pub blocks: u64,
    pub peak_blocks: u64,
    pub written_blocks: u64,
    pub dropped_blocks: u64,
}

impl Contents {
    fn has(&self, hash: u64) -> bool {
        self.used_at.contains_key(&hash)
    }
    /// Makes `hash` the most recently used one, and adds it if it is not there.
    fn touch(&mut self, hash: u64, tick: u64) {
        if let Some(before) = self.used_at.insert(hash, tick) {
            self.order.remove(&before);
        }
        self.order.insert(tick, hash);
    }
    /// Drops the least recently used blocks while there are more than fit.
    fn drop_excess(&mut self) {
        while self.order.len() as u64 > self.capacity_blocks
            && let Some((_, hash)) = self.order.pop_first()
        {
            self.used_at.remove(&hash);
            self.counts.dropped_blocks += 1;
        }
        self.counts.blocks = self.order.len() as u64;
        self.counts.peak_blocks = self.counts.peak_blocks.max(self.counts.blocks);
    }
}

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
    reads: Vec<Read>,
}

/// When a tier is read for a load.
struct Read {
    tier: usize,
    from_ns: u64,
    until_ns: u64,
}

/// The tiers of a run.
pub(super) struct SimTiers {
    config: kvist_scheduler::Tiers,
    tiers: Vec<Contents>,
    /// Hashes of the blocks of prompts that have been looked up. Removed when their requests end.
    prompts: HashMap<RequestId, Vec<u64>, ahash::RandomState>,
    /// Transfers by their end; those that end at the same time, in the order in which they began.
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    ended: HashMap<u64, Ended, ahash::RandomState>,
    n_begun: u64,
    /// Loads in flight, by which they are found again.
    loads: HashMap<TransferId, Loading, ahash::RandomState>,
    tick: u64,
}

impl SimTiers {
    pub fn new(config: &kvist_scheduler::Tiers, capacity_bytes: &[Option<u64>]) -> SimTiers {
        let contents = |i: usize| Contents {
            capacity_blocks: capacity_bytes
                .get(i)
                .copied()
                .flatten()
                .map_or(u64::MAX, |bytes| bytes / config.block_bytes.max(1)),
            used_at: HashMap::default(),
            order: BTreeMap::new(),
            read_free_ns: 0,
            write_free_ns: 0,
            counts: TierCounts::default(),
        };
        SimTiers {
            tiers: (0..config.list.len().min(MAX_TIERS)).map(contents).collect(),
            config: config.clone(),
            prompts: HashMap::default(),
            ends: BinaryHeap::new(),
            ended: HashMap::default(),
            n_begun: 0,
            loads: HashMap::default(),
            tick: 0,
        }
    }

    pub fn counts(&self) -> impl Iterator<Item = TierCounts> {
        self.tiers.iter().map(|tier| tier.counts)
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
                Some(Ended::Find { request, runs }) => scheduler.found(now, request, runs),
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

    /// Carries out orders. Those that were given when the step began begin at `now`; copies of what a step has computed
    /// begin at its end, `end_ns`.
    pub fn carry_out(&mut self, now: u64, end_ns: u64, scheduler: &mut Scheduler) {
        for order in scheduler.drain_orders() {
            match order {
                Order::Find(find) => {
                    let runs = self.find(&find, scheduler.cache());
                    // A step that begins now does not wait for the answer.
                    let latency_ns = self.config.list.iter().map(|tier| tier.latency_ns).max().unwrap_or(0);
                    self.end(now.saturating_add(latency_ns), Ended::Find { request: find.request, runs });
                }
                Order::Load(load) => self.load(now, &load),
                Order::Store(store) => {
                    let from_ns = if store.request.is_some() { end_ns } else { now };
                    self.store(from_ns, store);
                }
                Order::Abandon { load } => self.abandon(now, load),
                // No trace forgets a salt, so nothing is removed from a tier.
                Order::Cached(_) | Order::Forget { .. } => {}
            }
        }
    }

    fn find(&mut self, find: &FindOrder, cache: &Cache) -> Vec<Run> {
        let hashes = cache.prefix_hashes(&find.salt, &find.prompt.content(find.n_tokens));
        let block_tokens = find.n_tokens / (hashes.len().max(1) as u32);
        let mut runs: Vec<Run> = Vec::new();
        for (i, &hash) in (1..).zip(&hashes) {
            let tier = self.tiers.iter().position(|tier| tier.has(hash)).map(|tier| tier as u8);
            let until = i * block_tokens;
            match runs.last_mut() {
                Some(run) if run.tier == tier => run.until = until,
                _ => runs.push(Run::new(tier, until)),
            }
        }
        // A prompt uses its first block most: a block without those before it is of no use.
        for &hash in hashes.iter().rev() {
            self.tick += 1;
            for tier in self.tiers.iter_mut().filter(|tier| tier.has(hash)) {
                tier.touch(hash, self.tick);
            }
        }
        self.prompts.insert(find.request, hashes);
        runs
    }

    fn end(&mut self, at_ns: u64, ended: Ended) {
        self.ends.push(Reverse((at_ns, self.n_begun)));
        self.ended.insert(self.n_begun, ended);
        self.n_begun += 1;
    }

    fn transfer_ns(&self, tier: usize, n_blocks: u64) -> u64 {
        let bytes = u128::from(n_blocks) * u128::from(self.config.block_bytes) * 1_000_000_000;
        (bytes / u128::from(self.config.list[tier].bytes_per_s.max(1))).min(u64::MAX.into()) as u64
    }

    fn load(&mut self, now: u64, load: &LoadOrder) {
        let n_blocks = load.blocks.first().map_or(0, Vec::len);
        let block_tokens = load.positions.len() / n_blocks.max(1);
        let first = load.positions.start as usize / block_tokens.max(1);
        let hashes = self.prompts.get(&load.request).and_then(|hashes| hashes.get(first..first + n_blocks));
        let hashes: Vec<u64> = hashes.unwrap_or_default().to_vec();
        // What was found may have been dropped since; then nothing more is read when that is noticed.
        let (mut ok, mut n_arrived) = (!hashes.is_empty(), 0);
        let (mut end_ns, mut from) = (now, first);
        let (mut tiers, mut reads) = (Vec::with_capacity(hashes.len()), Vec::new());
        for run in &load.runs {
            let until = run.until as usize / block_tokens.max(1);
            let tier = usize::from(run.tier.unwrap_or(0));
            let of_run = hashes.get(from - first..until - first);
            let there = of_run.unwrap_or_default().iter().take_while(|hash| self.tiers[tier].has(**hash));
            let n = if ok { there.count() } else { 0 };
            tiers.resize(until - first, tier);
            n_arrived += n;
            ok &= n == until - from;
            let transfer_ns = self.transfer_ns(tier, n as u64);
            let contents = &mut self.tiers[tier];
            let begin_ns = contents.read_free_ns.max(now);
            contents.read_free_ns = begin_ns.saturating_add(transfer_ns);
            reads.push(Read { tier, from_ns: begin_ns, until_ns: contents.read_free_ns });
            let latency_ns = self.config.list[tier].latency_ns;
            end_ns = end_ns.max(contents.read_free_ns.saturating_add(latency_ns));
            from = until;
        }
        let n_tokens = load.positions.len() as u32;
        let arrived = (n_arrived * block_tokens) as u32;
        self.loads.insert(load.id, Loading { transfer: self.n_begun, began_ns: now, n_tokens, reads });
        self.end(end_ns, Ended::Load { id: load.id, arrived, took_ns: end_ns - now, hashes, tiers });
    }

    /// Stops a load: nothing more is read for it, so it ends now. What would have been read later in its place is not moved
    /// forward, unless nothing is: those loads were told when they end.
    fn abandon(&mut self, now: u64, id: TransferId) {
        let Some(&Loading { transfer, began_ns, ref reads, .. }) = self.loads.get(&id) else { return };
        for read in reads {
            let contents = &mut self.tiers[read.tier];
            if contents.read_free_ns == read.until_ns {
                contents.read_free_ns = read.from_ns.max(now);
            }
        }
        self.loads.remove(&id);
        self.ended.remove(&transfer);
        self.ends.retain(|Reverse((_, of))| *of != transfer);
        let (hashes, tiers, took_ns) = (Vec::new(), Vec::new(), now.saturating_sub(began_ns));
        self.end(now, Ended::Load { id, arrived: 0, took_ns, hashes, tiers });
    }

    fn store(&mut self, from_ns: u64, store: StoreOrder) {
        let hashes: Vec<u64> = store.blocks.iter().map(|block| block.hash).collect();
        let n_new = hashes.iter().filter(|hash| !self.tiers[0].has(**hash)).count() as u64;
        let end_ns = if n_new == 0 { from_ns } else { self.written(0, from_ns, n_new) };
        for tier in 1..self.tiers.len() {
            self.write(tier, from_ns, hashes.clone());
        }
        self.end(end_ns, Ended::Store { id: store.id, hashes });
    }

    /// Begins to write blocks to a tier, as far as it does not have them. Too many bytes that wait to be written are not
    /// written, from the last on.
    fn write(&mut self, tier: usize, from_ns: u64, mut hashes: Vec<u64>) {
        hashes.retain(|hash| !self.tiers[tier].has(*hash));
        let behind_ns = u128::from(self.tiers[tier].write_free_ns.saturating_sub(from_ns));
        let behind = behind_ns * u128::from(self.config.list[tier].bytes_per_s) / 1_000_000_000;
        let room = u128::from(self.config.max_store_bytes).saturating_sub(behind);
        hashes.truncate((room / u128::from(self.config.block_bytes.max(1))).min(usize::MAX as u128) as usize);
        if !hashes.is_empty() {
            let end_ns = self.written(tier, from_ns, hashes.len() as u64);
            self.end(end_ns, Ended::Written { tier, hashes });
        }
    }

    /// When `n_blocks` that begin to be written to a tier at `from_ns` have been written.
    fn written(&mut self, tier: usize, from_ns: u64, n_blocks: u64) -> u64 {
        let transfer_ns = self.transfer_ns(tier, n_blocks);
        let contents = &mut self.tiers[tier];
        contents.counts.written_blocks += n_blocks;
        contents.write_free_ns = contents.write_free_ns.max(from_ns).saturating_add(transfer_ns);
        contents.write_free_ns.saturating_add(self.config.list[tier].latency_ns)
    }

    /// Blocks of one prompt, in order, are in a tier from now on.
    fn place(&mut self, tier: usize, hashes: &[u64]) {
        for &hash in hashes.iter().rev() {
            self.tick += 1;
            self.tiers[tier].touch(hash, self.tick);
        }
        self.tiers[tier].drop_excess();
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
        let mut sim = SimTiers::new(&tiers(), &[None]);
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
        sim.carry_out(0, 0, &mut scheduler);
        sim.report(0, &mut scheduler);
        scheduler.iterate(0, machine);
        sim.carry_out(0, 0, &mut scheduler);
        // 12 bytes at 1,000 bytes/s each, one after the other.
        assert_eq!((scheduler.n_loading(), sim.next_ns()), (2, Some(12_000_000)));
        assert_eq!(sim.tiers[0].read_free_ns, 24_000_000);
        assert!(scheduler.cancel(13_000_000, RequestId(1)));
        sim.carry_out(13_000_000, 13_000_000, &mut scheduler);
        assert_eq!(sim.tiers[0].read_free_ns, 13_000_000);
        sim.report(13_000_000, &mut scheduler);
        assert_eq!((scheduler.bytes_in_flight(), sim.next_ns()), ((0, 0), None));
        let counters = scheduler.tier_counters().unwrap();
        assert_eq!((counters.loaded_tokens[0], counters.wasted_tokens, counters.failed_loads), (12, 12, 0));
    }
}
