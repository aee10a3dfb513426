//! A random driver: it moves "bytes" late, not at all, or wrongly, and compares every cell with what it must contain.
use super::{BLOCK, mix};
use kvist_cache::kinds::Visibility;
use kvist_cache::{BlockUse, Cache, Content, GroupId, SeqId, Step};
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;
use std::collections::{BTreeMap, HashMap, HashSet};

/// A transfer that the driver has not reported yet.
enum Moving {
    Load(LoadOrder),
    Store(StoreOrder),
}

/// The blocks of one tier: per block the hashes of its cells, by the hash of all tokens up to its end, and by the group if that has a
/// window.
type Stored = HashMap<(u64, Option<usize>), Vec<u64>>;

pub struct Drive {
    random: Random,
    pub scheduler: Scheduler,
    now: u64,
    /// Per group and cell, the hash of all tokens up to the one it stores.
    cells: Vec<HashMap<u32, u64>>,
    visibility: Vec<Visibility>,
    tiers: Vec<Stored>,
    moving: Vec<Moving>,
    asked: Vec<RequestId>,
    live: BTreeMap<RequestId, Request>,
    /// Tokens generated, by request.
    generated: BTreeMap<RequestId, Vec<u32>>,
    pub ended: Vec<Ended>,
    pub events: String,
    pub decisions: String,
    pub n_loaded: u64,
    n_failed: u64,
    /// Failed loads of which a part was kept.
    pub n_parts: u64,
    pub n_abandoned: u64,
    /// Blocks that moved because the capacity shrank.
    pub n_moved: u64,
    /// Blocks that were written to the tiers since they were cached or looked up there, by hash: with write-through they are not copied
    /// once more when they are victims.
    saved: HashSet<u64>,
    /// Copied with write-through.
    pub n_victims: u64,
}

impl Drive {
    pub fn new(seed: u64, config: Config, cache: Cache) -> Drive {
        let n_groups = cache.n_groups();
        let visibility = cache.paged_spec().unwrap().groups.iter().map(|group| group.visibility).collect();
        let mut scheduler = Scheduler::new(config, cache, None).unwrap();
        scheduler.record();
        Drive {
            random: Random(seed),
            scheduler,
            now: 0,
            cells: vec![HashMap::new(); n_groups],
            visibility,
            tiers: vec![HashMap::new(); 2],
            moving: Vec::new(),
            asked: Vec::new(),
            live: BTreeMap::new(),
            generated: BTreeMap::new(),
            ended: Vec::new(),
            events: String::new(),
            decisions: String::new(),
            n_loaded: 0,
            n_failed: 0,
            n_parts: 0,
            n_abandoned: 0,
            n_moved: 0,
            saved: HashSet::new(),
            n_victims: 0,
        }
    }

    fn tokens(&self, id: RequestId) -> Vec<u32> {
        let mut tokens = self.live[&id].prompt.tokens().unwrap().to_vec();
        tokens.extend(&self.generated[&id]);
        tokens
    }

    /// The hash of each prefix of a request's tokens.
    fn hashes(&self, id: RequestId) -> Vec<u64> {
        let salt = u64::from(self.live[&id].salt.len() as u32);
        let next = |hash: &mut u64, token: u32| {
            *hash = mix(*hash, token);
            Some(*hash)
        };
        self.tokens(id).into_iter().scan(salt + 1, next).collect()
    }

    fn arrive(&mut self, id: u64) {
        // Prompts with common beginnings.
        let n = 1 + self.random.below(60);
        let family = self.random.below(3);
        let split = self.random.below(40);
        let odd = self.random.below(1000);
        let prompt: Vec<u32> = (0..n).map(|i| if i < split { family } else { odd }).collect();
        let mut request = Request::new(id, self.now, n, 1 + self.random.below(20));
        request.prompt = Prompt::Tokens(prompt);
        request.salt = if self.random.below(8) == 0 { "other".into() } else { "".into() };
        request.skip_prefix_cache = self.random.below(16) == 0;
        if self.random.below(4) == 0 {
            let (priority, pin) = (self.random.below(3) as u8, self.random.below(3) == 0);
            request.retain = Some(Retention { ttl_ns: self.random.below(20_000).into(), priority, pin });
        }
        self.live.insert(request.id, request.clone());
        self.generated.insert(request.id, Vec::new());
        self.scheduler.arrive(self.now, request).unwrap();
    }

    fn take_orders(&mut self) {
        for order in self.scheduler.drain_orders() {
            match order {
                Order::Find(find) => self.asked.push(find.request),
                Order::Load(load) => self.moving.push(Moving::Load(load)),
                Order::Store(store) => {
                    self.note_copied(&store);
                    self.moving.push(Moving::Store(store));
                }
                Order::Abandon { load } => self.abandon(load),
                Order::Forget { .. } | Order::Keep(_) => {}
                Order::Cached(cached) => self.note_cached(&cached),
            }
        }
    }

    /// Stops a load: what has arrived of it is no block's content, and no more comes. Sometimes it takes a while to end.
    fn abandon(&mut self, id: TransferId) {
        let is_it = |moving: &Moving| matches!(moving, Moving::Load(load) if load.id == id);
        let at = self.moving.iter().position(is_it).expect("a load that has not ended is abandoned");
        self.n_abandoned += 1;
        if self.random.below(3) == 0 {
            return;
        }
        if let Moving::Load(load) = self.moving.swap_remove(at) {
            for (g, blocks) in load.blocks.iter().enumerate() {
                let some = self.random.index(blocks.len() + 1);
                for block in blocks[..some].iter().flatten() {
                    self.cells[g].extend((block * BLOCK..(block + 1) * BLOCK).map(|cell| (cell, 0xBAD)));
                }
            }
            assert!(self.scheduler.loaded(self.now, id, false, u64::from(self.random.below(6000))));
        }
    }

    /// The blocks store the tokens that the order says, after those of their parent.
    fn note_cached(&mut self, cached: &CachedTokens) {
        let next = |hash: &mut u64, token: &u32| {
            *hash = mix(*hash, *token);
            Some(*hash)
        };
        cached.blocks.iter().for_each(|block| {
            self.saved.remove(&block.hash);
        });
        let hashes: Vec<u64> = cached.tokens.iter().scan(cached.salt.len() as u64 + 1, next).collect();
        let n = cached.blocks.len() + usize::from(cached.parent.is_some());
        assert!(cached.parent.is_some() || n * BLOCK as usize == cached.tokens.len());
        let blocks = cached.parent.iter().chain(&cached.blocks);
        for (block, hashes) in
            blocks.zip(hashes.chunks(BLOCK as usize).skip(hashes.len() / BLOCK as usize - n))
        {
            for id in &block.blocks {
                let cells = &self.cells[id.group.0 as usize];
                let stored: Vec<u64> =
                    (id.block * BLOCK..(id.block + 1) * BLOCK).map(|cell| cells[&cell]).collect();
                assert_eq!(stored, hashes, "{cached:?} {block:?}");
            }
        }
    }

    /// With write-through, victims are copied only if they were not before.
    fn note_copied(&mut self, store: &StoreOrder) {
        let is_through = self.scheduler.config().tiers.as_ref().unwrap().write == Write::Through;
        if store.request.is_none() && is_through {
            self.n_victims += store.blocks.len() as u64;
            for block in &store.blocks {
                assert!(!self.saved.contains(&block.hash), "{block:?} was copied before");
            }
        }
    }

    /// Answers one lookup or ends one transfer.
    fn report(&mut self) {
        if !self.asked.is_empty() && (self.moving.is_empty() || self.random.below(2) == 0) {
            let id = self.asked.swap_remove(self.random.index(self.asked.len()));
            if !self.live.contains_key(&id) {
                return self.scheduler.found(self.now, id, Vec::new());
            }
            let request = &self.live[&id];
            let tokens = self.tokens(id);
            for hash in self.scheduler.cache().prefix_hashes(&request.salt, &Content::Tokens(&tokens)) {
                self.saved.remove(&hash);
            }
            let hashes = self.hashes(id);
            let mut runs: Vec<Run> = Vec::new();
            for (i, hash) in (1..).zip(hashes.chunks_exact(BLOCK as usize).map(|block| block[3])) {
                let tier = self.tiers.iter().position(|tier| tier.contains_key(&(hash, None)));
                let tier = tier.map(|tier| tier as u8);
                // A tier that no longer has it, or that the driver is wrong about.
                let tier = if self.random.below(40) == 0 { Some(0) } else { tier };
                let ends = self.ends(&hashes, i);
                match runs.last_mut() {
                    Some(run) if run.tier == tier && run.ends == ends && ends != Ends::AtEnd => {
                        run.until = i * BLOCK;
                    }
                    _ => runs.push(Run { tier, until: i * BLOCK, ends }),
                }
            }
            return self.scheduler.found(self.now, id, runs);
        }
        if self.moving.is_empty() {
            return;
        }
        match self.moving.swap_remove(self.random.index(self.moving.len())) {
            Moving::Load(load) => self.end_load(&load),
            Moving::Store(store) => self.end_store(&store),
        }
    }

    /// Whether a load may end after so many blocks: if a tier has what each window sees there.
    fn ends(&self, hashes: &[u64], n_blocks: u32) -> Ends {
        let mut windows = self.visibility.iter().enumerate().filter(|(_, of)| of.window.is_some()).peekable();
        if windows.peek().is_none() {
            return Ends::Anywhere;
        }
        let query = n_blocks * BLOCK;
        let whole = windows.all(|(g, of)| {
            let seen = (0..n_blocks)
                .filter(|block| of.sees(query, block * BLOCK) || of.sees(query, block * BLOCK + BLOCK - 1));
            let mut keys = seen.map(|block| (hashes[(block * BLOCK + BLOCK - 1) as usize], Some(g)));
            keys.all(|key| self.tiers.iter().any(|tier| tier.contains_key(&key)))
        });
        if whole { Ends::AtEnd } else { Ends::Nowhere }
    }

    fn end_load(&mut self, load: &LoadOrder) {
        let mut ok = self.random.below(5) > 0;
        // Whole blocks that arrived before it failed.
        let mut arrived = 0;
        let hashes = self.live.contains_key(&load.request).then(|| self.hashes(load.request));
        let n_blocks = load.positions.len() as u32 / BLOCK;
        assert!(load.runs.is_sorted_by(|a, b| a.until < b.until));
        assert_eq!(load.runs.last().map(|run| run.until), Some(load.positions.end));
        for i in 0..n_blocks {
            let end = load.positions.start + (i + 1) * BLOCK;
            let tier = load.runs.iter().find(|run| run.until >= end).and_then(|run| run.tier).unwrap();
            let key = hashes.as_ref().map_or(0, |hashes| hashes[end as usize - 1]);
            for (g, blocks) in load.blocks.iter().enumerate() {
                let Some(block) = blocks[i as usize] else { continue };
                let content = match self.visibility[g].window {
                    None => self.tiers[usize::from(tier)].get(&(key, None)),
                    Some(_) => self.tiers.iter().find_map(|tier| tier.get(&(key, Some(g)))),
                };
                ok &= content.is_some();
                let content = content.cloned().filter(|_| ok).unwrap_or_else(|| vec![0xBAD; BLOCK as usize]);
                self.cells[g].extend((block * BLOCK..).zip(content));
            }
            arrived += if ok { BLOCK } else { 0 };
            // The link breaks.
            ok &= self.random.below(30) > 0;
        }
        ok &= arrived == load.positions.len() as u32;
        self.n_loaded += u64::from(ok);
        self.n_failed += u64::from(!ok);
        let took_ns = u64::from(self.random.below(6000));
        let before: u64 = self.scheduler.tier_counters().unwrap().loaded_tokens.iter().sum();
        // Some drivers report parts, and not to the block.
        match ok || self.random.below(3) == 0 {
            true => assert!(self.scheduler.loaded(self.now, load.id, ok, took_ns)),
            false => {
                let arrived = arrived + self.random.below(BLOCK);
                assert!(self.scheduler.loaded_part(self.now, load.id, arrived, took_ns));
            }
        }
        let after: u64 = self.scheduler.tier_counters().unwrap().loaded_tokens.iter().sum();
        assert!(after - before <= u64::from(arrived));
        self.n_parts += u64::from(!ok && after > before);
        assert!(!self.scheduler.loaded(self.now, load.id, ok, took_ns), "a load ends once");
    }

    fn end_store(&mut self, store: &StoreOrder) {
        let ok = self.random.below(8) > 0;
        for block in store.blocks.iter().filter(|_| ok) {
            for id in &block.blocks {
                // Pinned: the cells are as they were when the order was given, however late this is.
                let first = id.block * BLOCK;
                let cells = &self.cells[id.group.0 as usize];
                let content: Vec<u64> = (first..first + BLOCK).map(|cell| cells[&cell]).collect();
                let tier = self.random.index(self.tiers.len());
                let window = self.visibility[id.group.0 as usize].window.map(|_| id.group.0 as usize);
                self.tiers[tier].insert((content[BLOCK as usize - 1], window), content);
            }
        }
        let full = self.random.index(self.tiers.len());
        if self.tiers[full].len() > 30 {
            let mut keys: Vec<(u64, Option<usize>)> = self.tiers[full].keys().copied().collect();
            keys.sort_unstable();
            self.tiers[full].remove(&keys[self.random.index(keys.len())]);
        }
        assert!(self.scheduler.stored(self.now, store.id, ok));
        for block in &store.blocks {
            // A salt was forgotten: the same text may be in another block by now, of which the copy says nothing.
            let is_cached =
                block.blocks.iter().all(|id| self.scheduler.cache().hash_of(*id) == Some(block.hash));
            if ok && is_cached {
                self.saved.insert(block.hash);
            } else {
                self.saved.remove(&block.hash);
            }
        }
        // Writes that fail later.
        let unwritten = store.blocks.iter().filter(|_| self.random.below(6) == 0);
        let unwritten: Vec<_> = unwritten.map(|block| self.scheduler.named(block).unwrap()).collect();
        unwritten.iter().for_each(|block| {
            self.saved.remove(&block.hash);
        });
        self.scheduler.unsaved(self.now, &unwritten);
    }

    fn step(&mut self) {
        let Drive { random, scheduler, cells, generated, .. } = self;
        let mut machine = Machine { random, cells, generated };
        let iteration = scheduler.iterate(self.now, &mut machine);
        if let Iteration::Ran { elapsed_ns, .. } = iteration {
            self.now += elapsed_ns;
        }
    }

    /// Every cell of every sequence contains what was computed for exactly these tokens.
    fn check(&mut self) {
        for ended in self.scheduler.drain_ended() {
            self.live.remove(&ended.id);
            self.ended.push(ended);
        }
        let sequences: Vec<(RequestId, SeqId)> = self.scheduler.sequences().collect();
        for (id, seq) in sequences {
            let cached = self.scheduler.status(id).unwrap().cached_tokens;
            let hashes = self.hashes(id);
            for (g, cells) in self.cells.iter().enumerate() {
                let table = self.scheduler.cache().block_table(GroupId(g as u16), seq).unwrap();
                for position in 0..cached {
                    let Some(block) = table[(position / BLOCK) as usize] else {
                        assert!(
                            !self.visibility[g].sees(cached, position),
                            "{id} lacks {position} in group {g}"
                        );
                        continue;
                    };
                    let found = cells.get(&(block * BLOCK + position % BLOCK));
                    assert_eq!(found, Some(&hashes[position as usize]), "{id} at {position} in group {g}");
                }
            }
        }
        self.events.push_str(&self.scheduler.events().take());
        self.decisions.push_str(&self.scheduler.decisions().take());
    }

    pub fn operate(&mut self, next_id: &mut u64) {
        match self.random.below(10) {
            0 | 1 if self.live.len() < 12 => {
                self.arrive(*next_id);
                *next_id += 1;
            }
            2..=4 => self.report(),
            5 if !self.live.is_empty() && self.random.below(6) == 0 => {
                let ids: Vec<RequestId> = self.live.keys().copied().collect();
                let id = ids[self.random.index(ids.len())];
                self.scheduler.cancel(self.now, id);
            }
            5 if self.random.below(8) == 0 => {
                let salt = if self.random.below(3) == 0 { "other" } else { "" };
                self.scheduler.forget(self.now, salt);
            }
            6 if self.random.below(4) == 0 => self.resize(),
            6 => self.now += u64::from(self.random.below(2000)),
            _ => self.step(),
        }
        self.take_orders();
        self.check();
    }

    /// Another capacity, in which every request fits.
    fn resize(&mut self) {
        let least = if self.random.below(8) == 0 { 20 } else { 84 };
        let capacity_tokens: Vec<u32> = self.cells.iter().map(|_| least + self.random.below(60)).collect();
        let before = self.scheduler.cache().capacity_cells();
        let expected: Vec<u32> = match self.scheduler.begin_resize(self.now, &capacity_tokens) {
            Ok(moves) => {
                let moved = self.random.below(4) > 0;
                for (group, copies) in moves.groups().iter().filter(|_| moved) {
                    let cells = &mut self.cells[group.0 as usize];
                    for copy in copies {
                        self.n_moved += 1;
                        for i in 0..copy.len {
                            if let Some(content) = cells.remove(&(copy.from + i)) {
                                cells.insert(copy.to + i, content);
                            }
                        }
                    }
                }
                self.scheduler.end_resize(self.now, moved);
                if moved { capacity_tokens.iter().map(|n| n / BLOCK * BLOCK).collect() } else { before }
            }
            Err(ResizeRefused::NeverFits { id, needed, capacity }) => {
                let request = &self.live[&id];
                let whole =
                    u64::from(request.prompt_tokens + request.max_new - 1).next_multiple_of(BLOCK.into());
                assert!(needed == whole && needed > capacity, "{id} needs {needed} of {capacity}");
                before
            }
            Err(ResizeRefused::InTransfer) => {
                assert!(!self.moving.is_empty(), "nothing is in transfer");
                before
            }
            Err(refused) => panic!("{refused}"),
        };
        assert_eq!(self.scheduler.cache().capacity_cells(), expected);
    }

    /// Nothing arrives any more: everything ends.
    pub fn finish(&mut self) {
        for _ in 0..10_000 {
            if self.live.is_empty() && self.moving.is_empty() {
                break;
            }
            self.step();
            self.take_orders();
            self.report();
            self.take_orders();
            self.now += 10;
            self.check();
        }
        assert!(self.live.is_empty(), "{:?} do not end", self.live.keys());
        assert_eq!((self.scheduler.bytes_in_flight(), self.scheduler.n_loading()), ((0, 0), 0));
        // Nothing else has blocks than the prompts that are retained.
        let capacities = self.scheduler.cache().capacity_cells().into_iter().zip(&self.visibility);
        let least =
            capacities.filter(|(_, visibility)| visibility.window.is_none()).map(|(cells, _)| cells).min();
        assert!(self.scheduler.retained_tokens() * 2 <= least.unwrap().into(), "half of the cache");
        for salt in ["", "other"] {
            self.scheduler.forget(self.now, salt);
        }
        self.check();
        assert_eq!((self.scheduler.retained_tokens(), self.scheduler.evictable_cells()), (0, 0));
        for g in 0..self.cells.len() {
            let in_use = self.scheduler.cache().block_uses(GroupId(g as u16)).filter(|block| match block {
                BlockUse::Free | BlockUse::Evictable => false,
                BlockUse::InUse(_) | BlockUse::InTransfer => true,
            });
            assert_eq!(in_use.count(), 0, "blocks in use, and no request is live");
        }
    }
}

struct Machine<'d> {
    random: &'d mut Random,
    cells: &'d mut Vec<HashMap<u32, u64>>,
    generated: &'d mut BTreeMap<RequestId, Vec<u32>>,
}

impl Executor for Machine<'_> {
    fn execute(&mut self, _: u64, step: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        out.elapsed_ns = 1000;
        let mut rows = Vec::new();
        for (i, work) in batch.work.iter().enumerate() {
            let mut hash = batch.salt(i).len() as u64 + 1;
            let known = batch.known_tokens(i).unwrap();
            for (position, token) in (0..).zip(known) {
                hash = mix(hash, *token);
                if (work.first..work.first + work.n_tokens).contains(&position) {
                    rows.push(hash);
                }
            }
        }
        for (g, cells) in self.cells.iter_mut().enumerate() {
            let writes = step.plan().group(GroupId(g as u16)).writes.iter().flat_map(|run| run.cells());
            cells.extend(writes.zip(rows.iter().copied()));
        }
        out.failed = self.random.below(30) == 0;
        if out.failed {
            return;
        }
        let mut sampling = batch.work.iter().filter(|work| work.samples).map(|work| work.request);
        let (random, generated) = (&mut *self.random, &mut *self.generated);
        out.sample_each(batch, |_| {
            let token = random.below(3);
            generated.get_mut(&sampling.next().unwrap()).unwrap().push(token);
            Sampled { token: Some(token), finished: random.below(12) == 0 }
        });
    }
}
