//! A cache, its reference model, and the memory that a device would have.
use kvist_cache::evict::Parameters;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use kvist_testing::reference::{Choices, DeviceTable};
use std::collections::BTreeMap;

/// Short compared with a drive, so that decay matters.
pub(super) const HALF_LIFE_NS: u64 = 1_000;
/// Later blocks of a prompt cost more than its first ones.
pub(super) const COST: RecomputeCost = RecomputeCost { per_token: 1.0, per_pair: 1.0 };
pub(super) const GARBAGE: u64 = u64::MAX;

/// All prefixes, numbered: each is a salt and a list of tokens, without hashing.
#[derive(Default)]
pub(super) struct Prefixes {
    pub numbers: BTreeMap<(&'static str, Vec<u32>), u64>,
    pub list: Vec<(&'static str, Vec<u32>)>, // by number
}

impl Prefixes {
    pub fn number(&mut self, salt: &'static str, tokens: &[u32]) -> u64 {
        let prefix = (salt, tokens.to_vec());
        *self.numbers.entry(prefix).or_insert_with_key(|prefix| {
            self.list.push(prefix.clone());
            self.list.len() as u64 - 1
        })
    }
    /// Whether prefix `whole` begins with the prefix `beginning`.
    pub fn begins(&self, whole: u64, beginning: u64) -> bool {
        let ((salt, tokens), (its_salt, its_tokens)) =
            (&self.list[whole as usize], &self.list[beginning as usize]);
        salt == its_salt && tokens.starts_with(its_tokens)
    }
}

#[derive(Clone)]
pub(super) struct Sequence {
    pub salt: &'static str,
    pub tokens: Vec<u32>,
    /// Number of leading blocks that were stored in the index, or that it supplied.
    pub stored: usize,
    /// Number of the operation that made or shortened it.
    pub born: u64,
}

/// A prefix of whole blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix {
    pub number: u64,
    /// Number of the prefix one block shorter.
    pub parent: u64,
    pub n_blocks: u32,
}

/// An indexed block with its full history.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub prefix: u64,
    pub parent: u64,
    pub n_blocks: u32,
    /// When it was stored and hit: time, and number of the event.
    pub uses: Vec<(u64, u64)>,
    /// Number of the event at which it last became evictable.
    pub evictable_since: u64,
}

/// A running export.
pub(super) struct Export {
    pub pin: Pin,
    /// The bytes of every block when it was pinned.
    pub bytes: Vec<(BlockId, Vec<u64>)>,
}

/// A running import.
pub(super) struct Import {
    pub loading: Loading,
    /// The history of its sequence at the start of the import, followed by the imported tokens.
    pub whole: Sequence,
    pub start: usize,
}

pub(super) struct Drive {
    pub spec: PagedSpec,
    pub cache: Cache,
    pub plan: StepPlan,
    pub prefixes: Prefixes,
    pub sequences: BTreeMap<SeqId, Sequence>,
    pub memories: Vec<Vec<u64>>,
    /// What the index caches according to its events, by group and block.
    pub known: Vec<BTreeMap<u32, Known>>,
    pub by_hash: BTreeMap<u64, Prefix>, // the prefix stored under each hash
    /// Counts operations.
    pub n_born: u64,
    /// The index version at the last check.
    pub version: u64,
    /// Counts events.
    pub clock: u64,
    pub now_ns: u64,
    /// Running exports.
    pub exports: Vec<Export>,
    /// Running imports.
    pub imports: Vec<Import>,
    /// Number of imports that were appended to their sequences.
    pub n_imported: u32,
    pub n_imported_parts: u32,
    /// By group: a block table that stays on a device, and has missed some plans.
    pub devices: Vec<DeviceTable>,
    /// Number of times that all holders of a block left it in one step and one of them kept it.
    pub n_copies_saved: u32,
    /// Number of commits that moved the bytes of a path.
    pub n_moves: u32,
    /// Number of blocks that moved because the capacity shrank.
    pub n_resized: u32,
    /// By group, according to the events.
    pub counters: Vec<BlockCounters>,
    pub log: Vec<String>,
}

pub(super) const SALTS: [&str; 2] = ["", "tenant"];
impl Drop for Drive {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?}", self.spec);
            for line in self.log.iter().rev().take(25).rev() {
                eprintln!("  {line}");
            }
        }
    }
}
impl Drive {
    pub(super) fn new(choices: &mut Choices<'_>) -> Self {
        let block_tokens = choices.of(&[1, 2, 3, 4, 4, 5, 8]);
        let n_groups = choices.of(&[1, 1, 2, 3]);
        let full_first = choices.below(3);
        let groups = (0..n_groups).map(|g| {
            let windowed = g > 0 || full_first == 0;
            let window = (windowed && !choices.one_in(4)).then(|| 1 + choices.below(14));
            let sinks = if window.is_some() { choices.of(&[0, 0, 1, 5]) } else { 0 };
            let capacity_tokens = choices.of(&[8, 16, 23, 40, 64, 100]);
            GroupSpec { capacity_tokens, visibility: Visibility { window, sinks }, max_step_tokens: 1 }
        });
        let groups: Vec<GroupSpec> = groups.collect();
        let policy = choices.of(&["lru", "fifo", "lfu", "lfu_decay", "cost"]);
        let mut parameters = Parameters::default();
        if ["lfu_decay", "cost"].contains(&policy) {
            parameters.set("half_life", &format!("{HALF_LIFE_NS}ns")).expect("they decay");
        }
        let spec = PagedSpec {
            block_tokens,
            groups,
            rollback_tokens: choices.of(&[0, 0, 1, 6]),
            prefix: Some(PrefixSpec {
                n_ghosts: 8,
                policy: policy.to_owned(),
                parameters,
                cost: COST,
                ..PrefixSpec::default()
            }),
        };
        let mut cache = Cache::paged(&spec).expect("it can be built");
        cache.watch_blocks(true);
        cache.watch_prefixes(true);
        let memories = cache.capacity_cells().iter().map(|&cells| vec![GARBAGE; cells as usize]).collect();
        Drive {
            known: vec![BTreeMap::new(); spec.groups.len()],
            cache,
            plan: StepPlan::default(),
            prefixes: Prefixes::default(),
            sequences: BTreeMap::new(),
            memories,
            by_hash: BTreeMap::new(),
            n_born: 0,
            version: 0,
            clock: 0,
            now_ns: 0,
            exports: Vec::new(),
            imports: Vec::new(),
            n_imported: 0,
            n_imported_parts: 0,
            devices: spec.groups.iter().map(|_| DeviceTable::default()).collect(),
            n_copies_saved: 0,
            n_moves: 0,
            n_resized: 0,
            counters: vec![BlockCounters::default(); spec.groups.len()],
            spec,
            log: Vec::new(),
        }
    }

    pub(super) fn block(&self) -> u32 {
        self.spec.block_tokens
    }

    pub(super) fn is_windowed(&self, g: usize) -> bool {
        self.spec.groups[g].visibility.window.is_some()
    }

    pub(super) fn tables(&self, g: usize) -> BTreeMap<SeqId, Vec<Option<u32>>> {
        let table = |&seq: &SeqId| (seq, self.cache.block_table(GroupId(g as u16), seq).expect("it is open"));
        self.sequences.keys().map(table).collect()
    }

    /// For each block that sequences use, their number.
    pub(super) fn used_by_sequences(&self, g: usize) -> BTreeMap<u32, u32> {
        let mut used = BTreeMap::new();
        for block in self.tables(g).into_values().flatten().flatten() {
            *used.entry(block).or_default() += 1;
        }
        used
    }

    pub(super) fn loading(&self, g: usize) -> impl Iterator<Item = u32> {
        self.imports.iter().flat_map(move |import| import.loading.blocks(GroupId(g as u16))).flatten()
    }

    /// For each block in use, its ref_count: sequences, exports and imports.
    pub(super) fn in_use(&self, g: usize) -> BTreeMap<u32, u32> {
        let mut in_use = self.used_by_sequences(g);
        let pinned = self.exports.iter().flat_map(|export| export.pin.blocks());
        let pinned = pinned.filter(|id| id.group.0 as usize == g).map(|id| id.block);
        for block in pinned.chain(self.loading(g)) {
            *in_use.entry(block).or_default() += 1;
        }
        in_use
    }

    pub(super) fn bytes(&self, BlockId { group, block }: BlockId) -> Vec<u64> {
        let cells = block as usize * self.block() as usize..;
        self.memories[group.0 as usize][cells].iter().take(self.block() as usize).copied().collect()
    }

    /// Applies the index events since the last call to the model. Returns the dropped blocks in order: group and
    /// block.
    pub(super) fn follow(&mut self) -> Vec<(usize, u32)> {
        let (mut blocks, mut events) = (Vec::new(), Vec::new());
        self.cache.drain_block_events(&mut blocks);
        self.cache.drain_prefix_events(&mut events);
        for event in &blocks {
            self.clock += 1;
            let n = &mut self.counters[event.group.0 as usize];
            let counter = match event.change {
                Change::Alloc => &mut n.allocated,
                Change::Free => &mut n.freed,
                Change::Evict => &mut n.evicted,
                Change::Share => &mut n.shared,
                Change::CopyOnWrite { .. } => &mut n.copied_on_write,
                Change::Store => &mut n.stored,
                Change::Hit => &mut n.hit,
                Change::Evictable => &mut n.became_evictable,
                Change::Release => &mut n.released,
                Change::Move { .. } => &mut n.moved,
            };
            *counter += 1;
            let Some(known) = self.known[event.group.0 as usize].get_mut(&event.block) else { continue };
            match event.change {
                Change::Evictable => known.evictable_since = self.clock,
                Change::Hit => known.uses.push((self.now_ns, self.clock)),
                _ => {}
            }
        }
        let version = self.cache.prefix_version();
        assert!(events.is_empty() || version != self.version, "{events:?} left the version as it was");
        self.version = version;
        let mut removed = Vec::new();
        for event in events {
            self.clock += 1;
            match event {
                PrefixEvent::Stored { group, block, hash, .. } => {
                    let Prefix { number: prefix, parent, n_blocks } = self.by_hash[&hash];
                    let (uses, evictable_since) = (vec![(self.now_ns, self.clock)], self.clock);
                    let known = Known { prefix, parent, n_blocks, uses, evictable_since };
                    let before = self.known[group.0 as usize].insert(block, known);
                    assert!(before.is_none(), "block {block} is stored twice");
                }
                PrefixEvent::Removed { group, block, .. } => removed.push((group.0 as usize, block)),
                PrefixEvent::Moved { group, from, to, .. } => {
                    let known = &mut self.known[group.0 as usize];
                    let moved = known.remove(&from).expect("it was stored");
                    assert!(known.insert(to, moved).is_none(), "block {to} stores something");
                }
                PrefixEvent::Cleared => self.known.iter_mut().for_each(BTreeMap::clear),
            }
        }
        removed
    }
}
