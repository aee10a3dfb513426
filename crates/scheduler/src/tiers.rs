//! Tiers below the KV cache: which prompts are loaded from there instead of computed, and which cached blocks are
//! copied there.
//!
//! The scheduler decides, the driver moves bytes. [`Scheduler::drain_orders`] returns what there is to do; the driver
//! reports what became of it with [`found`](Scheduler::found), [`loaded`](Scheduler::loaded) and
//! [`stored`](Scheduler::stored). These reports are events: they are logged, and a replay repeats them. Every order but
//! [`Order::Abandon`] must be answered, in the end, by one report.
//!
//! A request with a prompt of at least one block waits until its prompt has been looked up, at most [`Tiers::grace_ns`].
//! Then, when it fits into memory beside those that come before it, the blocks after its prefix hit are loaded, if that is
//! faster than to compute them (`cost.rs`), in parts of at most [`Tiers::max_load_bytes`]. While they are loaded it is
//! neither waiting nor running. Afterwards it waits with its cells, like a paused request, for the next part or for the
//! batch. If a load fails or is late, the tokens are computed. Requests that wait for memory are looked up again from time to
//! time, without waiting for the answer. A preempted request is looked up like one that arrives, so what it had computed is
//! loaded if the KV cache has dropped it and a tier has it.
//!
//! Copies to the tiers either begin as soon as blocks are in the prefix index ([`Write::Through`]), or when free memory
//! runs low, with the next victims of eviction ([`Write::Back`]). Both pin the blocks. What exceeds
//! [`Tiers::max_store_bytes`] is not copied. With `Through`, what was not copied, or was not written ([`Scheduler::unsaved`]), is copied
//! as with `Back`, when it is a victim. A step that needs memory at once evicts blocks that were not copied.
mod config;
mod copies;
mod cost;
mod find;
mod orders;
mod unsaved;

pub use config::{BadTiers, MAX_TIERS, Recompute, Tier, Tiers, WindowBytes, Write};
pub use orders::{
    CachedTokens, Ends, FindOrder, KeepOrder, LoadOrder, NamedBlock, NotLoaded, Order, Run, StoreOrder,
    TransferId,
};

use crate::config::BadConfig;
use crate::entry::Lower;
use crate::log::Decision;
use crate::memory::{Memory, StepTime};
use crate::scheduler::Scheduler;
use crate::snapshot::LiveLoad;
use cost::Estimates;
use find::may_learn;
use kvist_cache::{BlockId, GroupId, Loading, Pin};
use std::collections::BTreeMap;
use std::sync::Arc;
use unsaved::Unsaved;

/// How many waiting requests are considered for a load, from the first on.
const CONSIDERED: usize = 64;

/// Prompt tokens that a step must have to say something about the time of a token.
const LEARNED_TOKENS: u32 = 32;

/// What tiers have done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TierCounters {
    /// Tokens loaded, by tier.
    pub loaded_tokens: [u64; MAX_TIERS],
    /// Of them, those of preempted requests, which had lost them.
    pub regained_tokens: u64,
    /// Loads that were started.
    pub loads: u64,
    /// Loads whose bytes did not arrive, or were wrong. Late and cancelled ones are not among them.
    pub failed_loads: u64,
    /// Loads that took so long that their tokens were computed instead.
    pub late_loads: u64,
    /// Tokens of failed, late and cancelled loads.
    pub wasted_tokens: u64,
    /// Tokens that a tier had, and that were computed because that was faster.
    pub declined_tokens: u64,
    /// Nanoseconds that loads took, over those that arrived in time, or in part.
    pub load_ns: u64,
    /// Blocks that the driver was told to copy to a tier.
    pub stored_blocks: u64,
    /// Those of them that did not get there.
    pub failed_blocks: u64,
    /// Blocks that were not copied, because too many bytes were on their way already.
    pub skipped_blocks: u64,
}

/// The state of the tiers. Only there if tiers are configured.
pub(crate) struct TierState {
    pub config: Tiers,
    block_tokens: u32,
    loads: BTreeMap<TransferId, Load>,
    stores: BTreeMap<TransferId, Store>,
    next_id: u64,
    orders: Vec<Order>,
    estimates: Estimates,
    /// Bytes that are being loaded, by tier, and stored.
    load_bytes: [u64; MAX_TIERS],
    store_bytes: u64,
    /// Indices of requests that wait for a load, in the order in which the loads began.
    pub loading: Vec<u32>,
    /// The first waiting request that would be loaded if there were memory for it: it is admitted like any request for which
    /// memory is short.
    pub short: Option<u32>,
    /// Number of waiting requests that are being looked up.
    n_asked: usize,
    /// Those of them that were asked for since the last plan and are not answered: when the first was, and how many there are.
    just_asked: Option<(u64, usize)>,
    /// True if this call of `plan` decided something that the log must repeat.
    pub changed: bool,
    counters: TierCounters,
    /// A text that the KV cache never evicts, and its salt.
    stays: Option<(Arc<str>, Vec<u32>)>,
    /// With [`Write::Through`], what is to be copied when it is a victim of eviction. Empty otherwise.
    unsaved: Unsaved,
    /// The most tokens of a step: so many cells are kept free while there is something to copy.
    step_tokens: u32,
}

/// A load in flight.
struct Load {
    loading: Loading,
    /// The request that waits for it; `None` once it was cancelled, or waits no more.
    index: Option<u32>,
    /// Tokens by tier.
    tokens: [u32; MAX_TIERS],
    /// Where they are, in order.
    runs: Vec<Run>,
    /// The estimate without what was measured earlier.
    expected_ns: u64,
    deadline_ns: u64,
}

/// A copy to the tiers in flight.
struct Store {
    pin: Pin,
    n_blocks: u64,
    /// The blocks, if they stay in the cache.
    stay: Vec<NamedBlock>,
}

/// Of the first `n_tokens` tokens from `start` on, those that come from each tier.
fn first_tokens(runs: &[Run], start: u32, n_tokens: u32) -> [u32; MAX_TIERS] {
    let (mut tokens, mut at) = ([0; MAX_TIERS], start);
    for run in runs {
        let until = run.until.min(start + n_tokens).max(at);
        if let Some(sum) = run.tier.and_then(|tier| tokens.get_mut(usize::from(tier))) {
            *sum += until - at;
        }
        at = until;
    }
    tokens
}

impl TierState {
    /// `step_tokens`: the most that a step computes.
    pub fn new(config: &Tiers, step_tokens: u32, memory: &Memory) -> Result<TierState, BadConfig> {
        if !memory.shares() {
            return Err(BadTiers::NoIndex.into());
        }
        if memory.naming_group().is_none() {
            return Err(BadTiers::Windows.into());
        }
        config.check()?;
        Ok(TierState {
            block_tokens: memory.block_tokens(),
            loads: BTreeMap::new(),
            stores: BTreeMap::new(),
            next_id: 0,
            orders: Vec::new(),
            estimates: Estimates::default(),
            load_bytes: [0; MAX_TIERS],
            store_bytes: 0,
            loading: Vec::new(),
            short: None,
            n_asked: 0,
            just_asked: None,
            changed: false,
            counters: TierCounters::default(),
            stays: None,
            unsaved: Unsaved::default(),
            step_tokens,
            config: config.clone(),
        })
    }

    pub fn orders_mut(&mut self) -> &mut Vec<Order> {
        &mut self.orders
    }

    fn next_id(&mut self) -> TransferId {
        self.next_id += 1;
        TransferId(self.next_id - 1)
    }

    fn bytes(&self, n_tokens: u32) -> u64 {
        self.config.load_bytes(n_tokens, self.block_tokens)
    }

    /// Whether transfers hold memory that is free when they end.
    pub fn is_busy(&self) -> bool {
        !self.loads.is_empty() || !self.stores.is_empty()
    }

    /// The load that the request at `index` waits for.
    pub fn load_of(&self, index: u32, n_groups: u16) -> Option<LiveLoad> {
        let load = self.loads.values().find(|load| load.index == Some(index))?;
        let blocks = |group| load.loading.blocks(GroupId(group)).flatten().collect();
        let positions = load.loading.positions();
        Some(LiveLoad {
            hit: positions.start,
            tokens: positions.end - positions.start,
            runs: load.runs.clone(),
            blocks: (0..n_groups).map(blocks).collect(),
        })
    }

    /// Forgets the bytes of a load that has ended.
    fn take_load(&mut self, id: TransferId) -> Option<Load> {
        let load = self.loads.remove(&id)?;
        for (tier, &tokens) in load.tokens.iter().enumerate() {
            self.load_bytes[tier] -= self.bytes(tokens);
        }
        Some(load)
    }

    /// Cached blocks have other numbers now. `naming`: the group whose numbers name blocks.
    pub fn moved(&mut self, renamed: &BTreeMap<BlockId, BlockId>, naming: GroupId) {
        self.unsaved.moved(renamed, naming);
    }

    /// Cells that must stay free so that a fused run of steps demotes blocks when single steps would.
    pub fn ahead_tokens(&self, capacity: u64) -> u64 {
        let ahead_tokens = match self.config.write {
            Write::Through if self.unsaved.is_empty() => 0,
            Write::Through => self.step_tokens,
            Write::Back { ahead_tokens } => ahead_tokens,
        };
        u64::from(ahead_tokens).min(capacity / 4)
    }
}

impl Scheduler {
    /// What the driver has to do for the tiers, since the last call. Empty without tiers.
    pub fn drain_orders(&mut self) -> Vec<Order> {
        self.tiers.as_mut().map_or(Vec::new(), |tiers| std::mem::take(&mut tiers.orders))
    }

    /// What the tiers have done so far; `None` without tiers.
    pub fn tier_counters(&self) -> Option<TierCounters> {
        self.tiers.as_ref().map(|tiers| tiers.counters)
    }

    /// Bytes on their way from the tiers, and to them.
    pub fn bytes_in_flight(&self) -> (u64, u64) {
        self.tiers.as_ref().map_or((0, 0), |tiers| (tiers.load_bytes.iter().sum(), tiers.store_bytes))
    }

    /// When a request stops waiting for a tier, or is looked up again, if nothing else happens before. A driver that has
    /// nothing to do calls [`plan`](Scheduler::plan) again then. `None` if there is no such request.
    pub fn next_tier_deadline_ns(&self) -> Option<u64> {
        let tiers = self.tiers.as_ref()?;
        let loads = tiers.loads.values().filter(|load| load.index.is_some()).map(|load| load.deadline_ns);
        let asked = || self.waiting.iter().filter_map(|key| self.asked_until(key.index));
        let asked = if tiers.n_asked > 0 { asked().min() } else { None };
        let again = self.first_waiting().filter(|index| may_learn(&self.entries[*index as usize]));
        let again = again.filter_map(|index| self.looked_up_again_ns(tiers, index));
        loads.chain(asked).chain(again).min()
    }

    /// Until when the next step should wait for answers to lookups: a request that has just arrived would miss that step, and tiers that
    /// are in memory, or have an index there, answer at once. `None` if all that was asked since the last [`plan`](Scheduler::plan) is
    /// answered, or if a tier is too far away.
    pub fn lookup_deadline_ns(&self) -> Option<u64> {
        const PATIENCE_NS: u64 = 500_000;
        let tiers = self.tiers.as_ref()?;
        let (first_ns, _) = tiers.just_asked?;
        let are_near = tiers.config.list.iter().all(|tier| tier.latency_ns <= PATIENCE_NS);
        are_near.then(|| first_ns.saturating_add(PATIENCE_NS))
    }

    /// Number of requests whose blocks are being loaded.
    pub fn n_loading(&self) -> usize {
        self.tiers.as_ref().map_or(0, |tiers| tiers.loading.len())
    }

    /// A load has ended: the bytes of all its blocks are in place (`ok`), or the load has failed and nothing will be
    /// written to its blocks any more. `took_ns`: how long the driver worked on it, without the time until it could report.
    /// Call it between iterations. Returns `false`, and does nothing, if there is no such load.
    pub fn loaded(&mut self, now_ns: u64, id: TransferId, ok: bool, took_ns: u64) -> bool {
        self.loaded_part(now_ns, id, if ok { u32::MAX } else { 0 }, took_ns)
    }

    /// The same for a load that has failed after its first `n_tokens` tokens: they are kept, up to the last whole block, and the rest is
    /// computed. Layer groups with windows keep nothing of a load that has failed, if a window was to move on in the rest.
    pub fn loaded_part(&mut self, now_ns: u64, id: TransferId, n_tokens: u32, took_ns: u64) -> bool {
        let Some(load) = self.tiers.as_mut().and_then(|tiers| tiers.take_load(id)) else { return false };
        let asked: u32 = load.tokens.iter().sum();
        let arrived = if n_tokens < asked { n_tokens - n_tokens % self.memory.block_tokens() } else { asked };
        let n = self.event();
        self.events.loaded(n, now_ns, id, asked, arrived, took_ns);
        let now = self.timestamp(now_ns);
        self.blocked = None;
        let start = load.loading.positions().start;
        let is_kept = load.index.is_some() && arrived > 0;
        let ended = match is_kept {
            true => self.memory.cache.arrived_in_part(load.loading, arrived),
            false => self.memory.cache.arrived(load.loading, Err(())),
        };
        let arrived = if is_kept && ended.is_ok() { arrived } else { 0 };
        let tokens = first_tokens(&load.runs, start, arrived);
        if let Some(tiers) = &mut self.tiers {
            let is_whole = load.index.is_some() && arrived == asked;
            tiers.estimates.observe(&load.tokens, load.expected_ns, took_ns, !is_whole);
            let counters = &mut tiers.counters;
            counters.load_ns = counters.load_ns.saturating_add(if arrived > 0 { took_ns } else { 0 });
            let sums = counters.loaded_tokens.iter_mut().zip(tokens);
            sums.for_each(|(sum, tokens)| *sum += u64::from(tokens));
            // Late and cancelled loads were counted when they were given up.
            if load.index.is_some() && !is_whole {
                counters.failed_loads += 1;
                counters.wasted_tokens += u64::from(asked - arrived);
            }
        }
        let Some(index) = load.index else { return true };
        if arrived > 0 {
            self.note_loaded(now, index, arrived, tokens);
        }
        if arrived < asked {
            self.set_lower(index, Lower::Done);
            self.not_loaded(now, index, NotLoaded::Failed);
        }
        self.leave(index);
        self.wait(index);
        true
    }

    /// The next `n_tokens` tokens of the request at `index` were loaded, so many of each tier.
    fn note_loaded(&mut self, now: StepTime, index: u32, n_tokens: u32, tokens: [u32; MAX_TIERS]) {
        let entry = &mut self.entries[index as usize];
        let seq = entry.seq.expect("a loading request has a sequence");
        entry.cached += n_tokens;
        entry.not_loaded = None;
        let is_first = entry.admitted_ns.is_none();
        match entry.lost_tokens {
            0 => entry.loaded.iter_mut().zip(tokens).for_each(|(sum, tokens)| *sum += tokens),
            _ => {
                entry.regained_tokens += n_tokens;
                let counters = self.tiers.as_mut().map(|tiers| &mut tiers.counters);
                counters.into_iter().for_each(|counters| counters.regained_tokens += u64::from(n_tokens));
            }
        }
        entry.stored = entry.cached;
        let (from, until) = (entry.cached - n_tokens, entry.cached);
        self.memory.store(seq, &entry.prompt, from, until, now);
        // Why the hit is not longer than what is there now. What a preempted request finds says nothing about its first hit.
        if is_first && entry.miss.is_some() {
            entry.miss = Some(self.memory.explain(&entry.salt, &entry.prompt, entry.wanted_content()));
        }
        self.note_cached(index, from, false);
        self.decide(now, Decision::Loaded { id: self.entries[index as usize].id, tokens: n_tokens });
    }

    /// What tiers do before a batch is built: give up what is late, copy victims, begin loads.
    pub(crate) fn plan_tiers(&mut self, now: StepTime) {
        if let Some(tiers) = &mut self.tiers {
            (tiers.changed, tiers.just_asked) = (false, None);
        }
        self.give_up(now);
        self.demote(now);
        self.look_again(now.now_ns);
        self.begin_loads(now);
    }

    /// Lets requests go on that have waited long enough.
    fn give_up(&mut self, now: StepTime) {
        let Some(tiers) = &mut self.tiers else { return };
        let late = |load: &Load| load.index.is_some() && load.deadline_ns <= now.now_ns;
        let late: Vec<TransferId> =
            tiers.loads.iter().filter(|(_, load)| late(load)).map(|(id, _)| *id).collect();
        for id in late {
            self.tiers.as_mut().into_iter().for_each(|tiers| tiers.counters.late_loads += 1);
            let Some(index) = self.abandon_load(id) else { continue };
            self.set_lower(index, Lower::Done);
            self.not_loaded(now, index, NotLoaded::Late);
            self.leave(index);
            self.wait(index);
        }
        if self.tiers.as_ref().is_some_and(|tiers| tiers.n_asked > 0) {
            let asked = self.waiting.iter().map(|key| key.index);
            let is_late = |index: &u32| self.asked_until(*index).is_some_and(|until| until <= now.now_ns);
            let late: Vec<u32> = asked.filter(is_late).collect();
            for index in late {
                self.set_lower(index, Lower::Done);
                self.entries[index as usize].not_loaded = Some(NotLoaded::Unanswered);
                self.tiers.as_mut().into_iter().for_each(|tiers| tiers.changed = true);
            }
        }
    }

    /// The request at `index` computes what a tier has.
    fn not_loaded(&mut self, now: StepTime, index: u32, why: NotLoaded) {
        let entry = &mut self.entries[index as usize];
        entry.not_loaded = Some(why);
        let id = entry.id;
        self.decide(now, Decision::NotLoaded { id, why: why.name() });
    }

    /// A request enters the batch for the first time. If the cache has all of its prompt by now, nothing had to be loaded.
    pub(crate) fn clear_not_loaded(&mut self, index: u32) {
        let block = self.memory.block_tokens();
        let entry = &mut self.entries[index as usize];
        let last = entry.wanted_content().min(entry.known - 1);
        if entry.admitted_ns.is_none() && entry.cached >= last - last % block {
            entry.not_loaded = None;
        }
    }

    /// No request waits for this load any more. Its blocks are free when the driver reports its end.
    fn abandon_load(&mut self, id: TransferId) -> Option<u32> {
        let tiers = self.tiers.as_mut()?;
        let load = tiers.loads.get_mut(&id)?;
        tiers.counters.wasted_tokens += load.tokens.iter().map(|&tokens| u64::from(tokens)).sum::<u64>();
        tiers.orders.push(Order::Abandon { load: id });
        tiers.changed = true;
        load.index.take()
    }

    /// The request at `index` ends while its blocks are being loaded.
    pub(crate) fn cancel_load(&mut self, index: u32) {
        let Some(tiers) = &self.tiers else { return };
        let load = tiers.loads.iter().find(|(_, load)| load.index == Some(index)).map(|(id, _)| *id);
        load.map(|id| self.abandon_load(id));
    }

    /// Learns from a step how long tokens take, if the configuration says so.
    pub(crate) fn observe_step(&mut self, elapsed_ns: u64) {
        let Some(tiers) = self.tiers.as_mut().filter(|tiers| tiers.config.recompute.learn) else { return };
        let (mut n_prompt, mut n_all, mut expected_ns) = (0, 0, 0.0);
        for work in &self.batch {
            n_all += work.n_tokens;
            if !work.decodes {
                n_prompt += work.n_tokens;
                expected_ns += TierState::compute_ns(&tiers.config, work.first, work.first + work.n_tokens);
            }
        }
        // Short prompts take as long as the weights take to be read, whatever their length.
        if n_prompt >= LEARNED_TOKENS && expected_ns > 0.0 {
            let of_prompts_ns = elapsed_ns as f64 * f64::from(n_prompt) / f64::from(n_all);
            tiers.estimates.observe_compute(of_prompts_ns / expected_ns);
        }
    }
}
