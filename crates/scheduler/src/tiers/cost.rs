//! Whether to load or to compute, and the loads themselves.
use super::{CONSIDERED, Ends, Load, LoadOrder, MAX_TIERS, NotLoaded, Order, Run, TierState, Tiers};
use crate::entry::{Lower, State};
use crate::log::Decision;
use crate::memory::StepTime;
use crate::scheduler::Scheduler;
use kvist_cache::{GroupId, Refused};
use std::ops::Range;

/// How many times slower a tier is than configured, in 1/256: an average that follows what was measured. It recovers
/// while nothing is loaded, because a tier that is never asked would stay slow forever.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimates {
    slowdown: [u64; MAX_TIERS],
    /// How many times slower tokens are computed than configured; `None` before the first measurement.
    compute: Option<f64>,
}

const ONE: u64 = 256;

impl Default for Estimates {
    fn default() -> Self {
        Estimates { slowdown: [ONE; MAX_TIERS], compute: None }
    }
}

impl Estimates {
    fn scaled(&self, tier: usize, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.slowdown[tier]) / u128::from(ONE)).min(u64::MAX.into()) as u64
    }

    /// A load with `tokens` of each tier took `took_ns`. It counts for the slowest tier that it read. `ended_early`: it has failed
    /// or was stopped, so that it may say that the tier is slow, but not that it is fast.
    pub fn observe(&mut self, tokens: &[u32; MAX_TIERS], expected_ns: u64, took_ns: u64, ended_early: bool) {
        let Some(tier) = tokens.iter().rposition(|tokens| *tokens > 0) else { return };
        let measured = u128::from(took_ns) * u128::from(ONE) / u128::from(expected_ns.max(1));
        let measured = (measured.min(u128::from(64 * ONE)) as u64).max(ONE / 16);
        let measured = if ended_early { measured.max(self.slowdown[tier]) } else { measured };
        self.slowdown[tier] = (3 * self.slowdown[tier] + measured).div_ceil(4);
    }

    /// Prompt tokens took `factor` times as long as configured.
    pub fn observe_compute(&mut self, factor: f64) {
        self.compute = Some(self.compute.map_or(factor, |compute| (3.0 * compute + factor) / 4.0));
    }

    /// Nothing was loaded from `tier`, although it had the blocks.
    fn declined(&mut self, tier: usize) {
        let slowdown = &mut self.slowdown[tier];
        if *slowdown > ONE {
            *slowdown -= (*slowdown - ONE).div_ceil(16);
        }
    }
}

/// Nanoseconds to transfer `bytes`.
fn transfer_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)).min(u64::MAX.into()) as u64
}

/// A load that pays: until where, and how long it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Choice {
    runs: Vec<Run>,
    tokens: [u32; MAX_TIERS],
    /// By configuration, beginning now.
    expected_ns: u64,
    /// By what was measured, behind what is in flight.
    estimate_ns: u64,
    /// Nothing is loaded for the request after this.
    is_last: bool,
}

impl TierState {
    /// The time to compute the positions `from..until` of a prompt.
    pub(super) fn compute_ns(config: &Tiers, from: u32, until: u32) -> f64 {
        let (a, b) = (f64::from(from), f64::from(until));
        // Position p sees p + 1 positions.
        let pairs = (b * (b + 1.0) - a * (a + 1.0)) / 2.0;
        config.recompute.per_token_ns * (b - a) + config.recompute.per_pair_ns * pairs
    }

    /// The load that saves most time, for a prompt of which the KV cache has `hit` tokens and of which `end` tokens may be
    /// loaded; with [`Tiers::always`] the longest one. Tiers are read at the same time, so a load takes as long as the slowest
    /// of them. `None` if computing is faster.
    fn choose(&self, runs: &[Run], hit: u32, end: u32) -> Option<Choice> {
        let (mut tokens, mut at) = ([0; MAX_TIERS], hit);
        let (mut taken, mut best) = (Vec::new(), None);
        let mut most_saved = 0.0;
        for run in runs.iter().filter(|run| run.until > hit) {
            let Some(tier) = run.tier else { break };
            let until = run.until.min(end);
            if until <= at {
                break;
            }
            tokens[usize::from(tier)] += until - at;
            at = until;
            taken.push(Run { until, ..*run });
            if !run.may_end_at(until) {
                continue;
            }
            let (mut expected_ns, mut estimate_ns) = (0, 0);
            for (t, tier) in self.config.list.iter().enumerate().filter(|(t, _)| tokens[*t] > 0) {
                let bytes = self.bytes(tokens[t]);
                let alone = tier.latency_ns.saturating_add(transfer_ns(bytes, tier.bytes_per_s));
                let queue = transfer_ns(self.load_bytes[t], tier.bytes_per_s);
                expected_ns = expected_ns.max(alone.saturating_add(queue));
                estimate_ns = estimate_ns.max(self.estimates.scaled(t, alone.saturating_add(queue)));
            }
            let compute_ns = TierState::compute_ns(&self.config, hit, at);
            let saved = compute_ns * self.estimates.compute.unwrap_or(1.0) - estimate_ns as f64;
            if saved > most_saved || self.config.always {
                most_saved = saved;
                best = Some(Choice { runs: taken.clone(), tokens, expected_ns, estimate_ns, is_last: true });
            }
        }
        best
    }

    /// Tokens whose bytes may be loaded now; `None` if the load has to wait for others.
    fn room_tokens(&self) -> Option<u32> {
        let in_flight: u64 = self.load_bytes.iter().sum();
        let room = self.config.max_load_bytes.saturating_sub(in_flight);
        let room = self.config.blocks_within(room, self.block_tokens);
        let blocks = if in_flight == 0 { room.max(1) } else { room };
        let tokens = blocks.saturating_mul(self.block_tokens.into());
        (blocks > 0).then_some(u32::try_from(tokens).unwrap_or(u32::MAX))
    }
}

/// What became of a request that could be loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    /// It is loading, or is computed, or waits for a prefix: the next one may be considered.
    Decided,
    /// Too many bytes are in flight, or too many requests have cells. It waits for them.
    Held,
    /// Memory is short. It is treated like any request for which memory is short.
    NoMemory,
}

impl Scheduler {
    /// Begins the loads of the first waiting requests. A load begins when there is memory for its request beside those that run
    /// or load, and those that wait before it: otherwise loaded requests would take each other's cells.
    pub(super) fn begin_loads(&mut self, now: StepTime) {
        let may_load = |index: u32| matches!(self.entries[index as usize].lower, Lower::Found { .. });
        let first: Vec<u32> = self.waiting.iter().take(CONSIDERED).map(|key| key.index).collect();
        let last = first.iter().rposition(|&index| may_load(index));
        let Some(tiers) = &mut self.tiers else { return };
        tiers.short = None;
        let Some(last) = last else { return };
        let mut ahead = 0;
        for &index in &first[..=last] {
            let begun = match self.entries[index as usize].lower {
                Lower::Found { .. } => self.begin_load(now, index, ahead),
                _ => Begun::Decided,
            };
            if begun == Begun::NoMemory {
                self.tiers.as_mut().into_iter().for_each(|tiers| tiers.short = Some(index));
            }
            if begun != Begun::Decided {
                return; // those behind it do not overtake it
            }
            if self.entries[index as usize].state != State::Loading {
                ahead += self.demand_of_waiting(index);
            }
        }
    }

    /// Cells that requests before this one whose blocks are being loaded still need for their known tokens, plus one block
    /// each.
    pub(crate) fn demand_of_loads_before(&self, index: u32) -> u64 {
        let Some(tiers) = self.tiers.as_ref().filter(|tiers| !tiers.loading.is_empty()) else { return 0 };
        let key = self.key(index);
        let loads = tiers.loads.values().filter_map(|load| Some((load.index?, load.loading.positions().end)));
        loads
            .filter(|(other, _)| self.key(*other) < key)
            .map(|(other, end)| self.demand_after(other, end))
            .sum()
    }

    /// Begins a load of the request at `index`. `ahead`: memory that others get before it.
    fn begin_load(&mut self, now: StepTime, index: u32, ahead: u64) -> Begun {
        if self.waits_for_prefix(index) {
            return Begun::Decided;
        }
        let choice = match self.choose_load(index) {
            Ok(choice) => choice,
            Err(missed) => {
                self.decline(now, index, missed);
                return Begun::Decided;
            }
        };
        let Some(tiers) = &self.tiers else { return Begun::Decided };
        let with_cells = self.running.len() + tiers.loading.len() + self.paused.len();
        let with_cells = with_cells - usize::from(self.entries[index as usize].seq.is_some());
        if tiers.room_tokens().is_none() || with_cells >= self.config.max_batch as usize {
            return Begun::Held;
        }
        while !self.has_memory(index, ahead) {
            if !self.unretain(now, false) {
                return Begun::NoMemory;
            }
            self.tiers.as_mut().into_iter().for_each(|tiers| tiers.changed = true);
        }
        self.start(now, index, choice);
        Begun::Decided
    }

    /// Begins a load of a request that could also run, because there is memory for it. Returns `false` if nothing is loaded.
    pub(crate) fn loads_instead(&mut self, now: StepTime, index: u32) -> bool {
        match self.entries[index as usize].lower {
            Lower::Found { .. } => {}
            // The cache has evicted some of it since.
            Lower::Declined { hit, .. } if self.has_now(index) < hit => {}
            _ => return false,
        }
        let has_room = self.tiers.as_ref().is_some_and(|tiers| tiers.room_tokens().is_some());
        match self.choose_load(index) {
            Ok(choice) if has_room => self.start(now, index, choice),
            // It runs now, rather than to wait for other loads.
            Ok(_) => self.not_loaded(now, index, NotLoaded::Busy),
            Err(missed) => self.decline(now, index, missed),
        }
        self.entries[index as usize].state == State::Loading
    }

    /// What to load of the prompt of a waiting request, if anything should be. Otherwise the request is computed: the tiers have
    /// nothing that the cache does not have, or (`Some`) to compute these positions that a tier has is faster.
    fn choose_load(&self, index: u32) -> Result<Choice, Option<(u8, Range<u32>)>> {
        let Some(tiers) = &self.tiers else { return Err(None) };
        let entry = &self.entries[index as usize];
        let Some(runs) = entry.lower.runs() else { return Err(None) };
        let hit = self.has_now(index);
        let block = self.memory.block_tokens();
        let last = entry.wanted_content().min(entry.known - 1);
        let last = last - last % block;
        let end = last.min(hit.saturating_add(tiers.room_tokens().unwrap_or(u32::MAX)));
        let choice = if end > hit { tiers.choose(runs, hit, end) } else { None };
        let Some(choice) = choice else {
            let missed = runs.iter().find(|run| run.until > hit).filter(|_| end > hit);
            return Err(missed.and_then(|run| Some((run.tier?, hit..run.until.min(end)))));
        };
        // What does not fit in flight is decided when this part has arrived.
        let stops_before = choice.runs.last().is_none_or(|run| run.until < end && run.ends == Ends::Anywhere);
        Ok(Choice { is_last: end == last || stops_before, ..choice })
    }

    /// Tokens of a waiting request that need neither be loaded nor computed. It has cells if a part was loaded already.
    fn has_now(&self, index: u32) -> u32 {
        let entry = &self.entries[index as usize];
        if entry.seq.is_some() { entry.cached } else { self.lookup(entry).hit_tokens }
    }

    /// The request is computed from its prefix hit on, unless the cache evicts some of that before it is admitted.
    fn decline(&mut self, now: StepTime, index: u32, missed: Option<(u8, Range<u32>)>) {
        let hit = self.has_now(index);
        let runs = self.entries[index as usize].lower.runs().unwrap_or_default().to_vec();
        self.set_lower(index, Lower::Declined { runs, hit });
        let Some(tiers) = &mut self.tiers else { return };
        tiers.changed = true;
        if let Some((tier, positions)) = missed {
            tiers.estimates.declined(tier.into());
            // A later answer of the tiers may be declined, too.
            let entry = &mut self.entries[index as usize];
            let new = positions.end.saturating_sub(positions.start.max(entry.declined_until));
            entry.declined_until = entry.declined_until.max(positions.end);
            tiers.counters.declined_tokens += u64::from(new);
            self.not_loaded(now, index, NotLoaded::Slower);
        }
    }

    /// Opens the sequence of a waiting request, if it has none, and begins to load. If the blocks do not fit after all, the
    /// request is computed.
    fn start(&mut self, now: StepTime, index: u32, choice: Choice) {
        let Choice { runs, tokens, expected_ns, estimate_ns, is_last } = choice;
        let n_tokens: u32 = tokens.iter().sum();
        let entry = &self.entries[index as usize];
        let hit = if entry.seq.is_some() { entry.cached } else { self.open(now, index) };
        let seq = self.entries[index as usize].seq.expect("it was opened above");
        let free = u32::try_from(self.memory.free()).unwrap_or(u32::MAX);
        if free < n_tokens {
            let freed = self.memory.evict_until_free(n_tokens, now);
            self.counters.evictions += 1;
            self.decide(now, Decision::Evict { needed: n_tokens, freed });
        }
        let mut loading = self.memory.cache.load(seq, n_tokens);
        // Another group may have less room than the counted one, and blocks that can be evicted.
        if let Err(Refused::NoSpace { needed, free, reclaimable, .. }) = &loading
            && free.saturating_add(*reclaimable) >= *needed
        {
            let needed = *needed;
            let freed = self.memory.evict_until_free(needed, now);
            self.counters.evictions += 1;
            self.decide(now, Decision::Evict { needed, freed });
            loading = self.memory.cache.load(seq, n_tokens);
        }
        self.leave(index);
        if is_last || loading.is_err() {
            self.set_lower(index, Lower::Done);
        }
        let Some(tiers) = &mut self.tiers else { return };
        tiers.changed = true;
        let Ok(loading) = loading else {
            self.entries[index as usize].not_loaded = Some(NotLoaded::Busy);
            return self.wait(index);
        };
        let id = tiers.next_id();
        for (tier, &tokens) in tokens.iter().enumerate() {
            tiers.load_bytes[tier] += tiers.bytes(tokens);
        }
        tiers.counters.loads += 1;
        let n_groups = self.memory.cache.n_groups() as u16;
        let blocks = |group| loading.blocks(GroupId(group)).collect();
        let entry = &mut self.entries[index as usize];
        tiers.orders.push(Order::Load(LoadOrder {
            id,
            request: entry.id,
            seq,
            positions: loading.positions(),
            runs: runs.clone(),
            blocks: (0..n_groups).map(blocks).collect(),
        }));
        let patience_ns = estimate_ns.saturating_mul(4).saturating_add(tiers.config.grace_ns);
        let deadline_ns = now.now_ns.saturating_add(patience_ns);
        let load = Load { loading, index: Some(index), tokens, runs: runs.clone(), expected_ns, deadline_ns };
        tiers.loads.insert(id, load);
        tiers.loading.push(index);
        entry.state = State::Loading;
        let request = entry.id;
        self.decide(now, Decision::Load { id: request, seq, hit, tokens: n_tokens, runs: &runs });
    }
}
