//! Runs random operations on paged caches with a prefix index, and compares each result with a simple reference
//! model.
//!
//! A cell's bytes are a function of the whole prefix that ends with its token. The memory of this test therefore
//! holds, in each cell, the number of that prefix: reading a wrong block, a false hit, a missing copy, and a write
//! into shared bytes all show as a wrong number.
use kvist_cache::evict::Parameters;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use kvist_testing::reference::Choices;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Short compared with a drive, so that decay matters.
const HALF_LIFE_NS: u64 = 1_000;
/// Later blocks of a prompt cost more than its first ones.
const COST: RecomputeCost = RecomputeCost { per_token: 1.0, per_pair: 1.0 };
const GARBAGE: u64 = u64::MAX;

/// All prefixes, numbered: each is a salt and a list of tokens, without hashing.
#[derive(Default)]
struct Prefixes {
    numbers: BTreeMap<(&'static str, Vec<u32>), u64>,
    list: Vec<(&'static str, Vec<u32>)>, // by number
}

impl Prefixes {
    fn number(&mut self, salt: &'static str, tokens: &[u32]) -> u64 {
        let prefix = (salt, tokens.to_vec());
        *self.numbers.entry(prefix).or_insert_with_key(|prefix| {
            self.list.push(prefix.clone());
            self.list.len() as u64 - 1
        })
    }
    /// Whether prefix `whole` begins with the prefix `beginning`.
    fn begins(&self, whole: u64, beginning: u64) -> bool {
        let ((salt, tokens), (its_salt, its_tokens)) =
            (&self.list[whole as usize], &self.list[beginning as usize]);
        salt == its_salt && tokens.starts_with(its_tokens)
    }
}

#[derive(Clone)]
struct Sequence {
    salt: &'static str,
    tokens: Vec<u32>,
    /// Number of leading blocks that the index was told of, or that it supplied.
    stored: usize,
}

/// A prefix of whole blocks.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    number: u64,
    /// Number of the prefix one block shorter.
    parent: u64,
    n_blocks: u32,
}

/// An indexed block with its full history.
#[derive(Clone, Debug)]
struct Known {
    prefix: u64,
    parent: u64,
    n_blocks: u32,
    /// When it was stored and hit: time, and number of the event.
    uses: Vec<(u64, u64)>,
    /// Number of the event at which it last became idle.
    idle_since: u64,
}

struct Drive {
    spec: PagedSpec,
    cache: Cache,
    plan: StepPlan,
    prefixes: Prefixes,
    sequences: BTreeMap<SeqId, Sequence>,
    memories: Vec<Vec<u64>>,
    /// What the index caches according to its events, by group and block.
    known: Vec<BTreeMap<u32, Known>>,
    by_hash: BTreeMap<u64, Prefix>, // the prefix stored under each hash
    /// The index version at the last check.
    version: u64,
    /// Counts events.
    clock: u64,
    now_ns: u64,
    /// Number of times that all holders of a block left it in one step and one of them kept it.
    n_copies_saved: u32,
    /// By group, according to the events.
    counters: Vec<BlockCounters>,
    log: Vec<String>,
}

const SALTS: [&str; 2] = ["", "tenant"];

/// Partly filled blocks that the spans append to, each with the offsets at which its sequences end.
fn leaving(
    spans: &[Span<'_>],
    tables: &BTreeMap<SeqId, Vec<Option<u32>>>,
    block: u32,
) -> BTreeMap<u32, Vec<u32>> {
    let mut leaving: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for span in spans.iter().filter(|span| !span.start.is_multiple_of(block)) {
        if let Some(Some(tail)) = tables[&span.seq].last() {
            leaving.entry(*tail).or_default().push(span.start % block);
        }
    }
    leaving
}

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
    fn new(choices: &mut Choices<'_>) -> Self {
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
        cache.watch(true);
        let memories = cache.capacity_cells().iter().map(|&cells| vec![GARBAGE; cells as usize]).collect();
        Drive {
            known: vec![BTreeMap::new(); spec.groups.len()],
            cache,
            plan: StepPlan::default(),
            prefixes: Prefixes::default(),
            sequences: BTreeMap::new(),
            memories,
            by_hash: BTreeMap::new(),
            version: 0,
            clock: 0,
            now_ns: 0,
            n_copies_saved: 0,
            counters: vec![BlockCounters::default(); spec.groups.len()],
            spec,
            log: Vec::new(),
        }
    }

    fn block(&self) -> u32 {
        self.spec.block_tokens
    }
    fn is_windowed(&self, g: usize) -> bool {
        self.spec.groups[g].visibility.window.is_some()
    }
    fn tables(&self, g: usize) -> BTreeMap<SeqId, Vec<Option<u32>>> {
        let table = |&seq: &SeqId| (seq, self.cache.block_table(GroupId(g as u16), seq).expect("it is open"));
        self.sequences.keys().map(table).collect()
    }
    fn held(&self, g: usize) -> BTreeMap<u32, u32> {
        let mut held = BTreeMap::new();
        for block in self.tables(g).into_values().flatten().flatten() {
            *held.entry(block).or_default() += 1;
        }
        held
    }

    /// Applies the index events since the last call to the model. Returns the dropped blocks in order: group and
    /// block.
    fn follow(&mut self) -> Vec<(usize, u32)> {
        let (mut blocks, mut events) = (Vec::new(), Vec::new());
        self.cache.drain_events(&mut blocks, &mut events);
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
                Change::Idle => &mut n.fell_idle,
                Change::Release => &mut n.released,
                Change::Move { .. } => panic!("blocks of a paged cache do not move"),
            };
            *counter += 1;
            let Some(known) = self.known[event.group.0 as usize].get_mut(&event.block) else { continue };
            match event.change {
                Change::Idle => known.idle_since = self.clock,
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
                    let (uses, idle_since) = (vec![(self.now_ns, self.clock)], self.clock);
                    let known = Known { prefix, parent, n_blocks, uses, idle_since };
                    let before = self.known[group.0 as usize].insert(block, known);
                    assert!(before.is_none(), "block {block} is stored twice");
                }
                PrefixEvent::Removed { group, block, .. } => removed.push((group.0 as usize, block)),
                PrefixEvent::Cleared => self.known.iter_mut().for_each(BTreeMap::clear),
            }
        }
        removed
    }

    /// What this drive's policy prefers to keep: its value, and the tie-breaker.
    fn worth(&self, known: &Known) -> (f64, u64) {
        let policy = &self.spec.prefix.as_ref().expect("an index").policy;
        let (last_use, block) = (known.uses.last().expect("it was stored").1, f64::from(self.block()));
        let decayed = || -> f64 {
            let age = |&(at, _): &(u64, u64)| (self.now_ns - at) as f64 / HALF_LIFE_NS as f64;
            known.uses.iter().map(|at| 0.5_f64.powf(age(at))).sum()
        };
        // Token by token: position p sees p + 1 positions.
        let cost = || -> f64 {
            let first = f64::from(known.n_blocks - 1) * block;
            (0..self.block()).map(|i| COST.per_token + COST.per_pair * (first + f64::from(i) + 1.0)).sum()
        };
        match &**policy {
            "lru" => (known.idle_since as f64, 0),
            "fifo" => (known.uses[0].1 as f64, 0),
            "lfu" => (known.uses.len() as f64, last_use),
            "lfu_decay" => (decayed(), last_use),
            "cost" => (cost() * decayed(), last_use),
            _ => panic!("no model of {policy}: add one"),
        }
    }

    /// Checks an eviction for `n_tokens`, by ranking every block anew before each eviction. `removed` is what was
    /// really evicted.
    fn evict_until_free(&mut self, n_tokens: u32, removed: &[(usize, u32)]) {
        let mut removed = removed.iter().copied().peekable();
        for g in 0..self.spec.groups.len() {
            let held = self.held(g);
            loop {
                let used: BTreeSet<u32> = held.keys().chain(self.known[g].keys()).copied().collect();
                let free = self.spec.groups[g].capacity_tokens / self.block() - used.len() as u32;
                let idle: Vec<&Known> =
                    self.known[g].iter().filter(|(at, _)| !held.contains_key(at)).map(|(_, k)| k).collect();
                if free * self.block() >= n_tokens || idle.is_empty() {
                    break;
                }
                let is_leaf = |known: &&&Known| self.known[g].values().all(|k| k.parent != known.prefix);
                let lowest = |known: &&&Known| {
                    idle.iter().all(|other| {
                        other.prefix == known.prefix || !self.prefixes.begins(other.prefix, known.prefix)
                    })
                };
                let mut candidates: Vec<&Known> = match self.is_windowed(g) {
                    true => idle.clone(),
                    false => idle.iter().filter(is_leaf).copied().collect(),
                };
                // All idle blocks have blocks below them that a sequence holds as its own copies.
                if candidates.is_empty() {
                    candidates = idle.iter().filter(lowest).copied().collect();
                }
                let worths = candidates.iter().map(|known| self.worth(known));
                let least = worths.min_by(|a, b| a.partial_cmp(b).expect("no NaN")).expect("some are idle");
                // The first removed block is the victim, or lies below it, or is the same prefix in an earlier group.
                let &(first_g, first_at) = removed.peek().expect("idle blocks are kept, and room is wanted");
                let first = &self.known[first_g][&first_at];
                let is_it = |known: &&&Known| match self.is_windowed(g) {
                    true => first_g == g && first.prefix == known.prefix,
                    false => self.prefixes.begins(first.prefix, known.prefix),
                };
                let victim = candidates.iter().find(is_it);
                let victim = victim.unwrap_or_else(|| panic!("{first:?} is none of {candidates:?}"));
                let (worth, tie) = self.worth(victim);
                // Computations by logarithms and by powers differ in their last digits.
                let decays = self.spec.prefix.as_ref().is_some_and(|p| p.parameters.half_life.is_some());
                let close = decays && worth <= least.0 * (1.0 + 1e-9);
                assert!((worth, tie) == least || close, "{victim:?} of {worth} goes before {least:?}");
                // What is dropped with it: all blocks of the prefix and below it, in every group.
                let prefix = victim.prefix;
                let goes = |h: usize, known: &Known| match self.is_windowed(g) {
                    true => h == g && known.prefix == prefix,
                    false => self.prefixes.begins(known.prefix, prefix),
                };
                let all = self.known.iter().enumerate().flat_map(|(h, known)| {
                    let gone = known.iter().filter(move |(_, known)| goes(h, known));
                    gone.map(move |(&at, _)| (h, at))
                });
                let all: BTreeSet<(usize, u32)> = all.collect();
                let went: Vec<(usize, u32)> = removed.by_ref().take(all.len()).collect();
                assert_eq!(went.iter().copied().collect::<BTreeSet<_>>(), all, "what goes with {prefix}");
                for (h, at) in went {
                    let gone = self.known[h].remove(&at).expect("it was known");
                    let child = self.known[h].values().find(|known| known.parent == gone.prefix);
                    assert!(
                        self.is_windowed(h) || child.is_none(),
                        "{gone:?} is forgotten before its child {child:?}"
                    );
                }
            }
        }
        assert_eq!(removed.next(), None, "more was forgotten than room was wanted");
    }

    fn knows(&self, g: usize, prefix: u64) -> bool {
        self.known[g].values().any(|known| known.prefix == prefix)
    }

    /// The largest hit, found by checking every length against the rule.
    fn hit(&mut self, salt: &'static str, tokens: &[u32]) -> u32 {
        let block = self.block();
        let prefix_at: Vec<u64> = (1..=tokens.len() as u32 / block)
            .map(|n| self.prefixes.number(salt, &tokens[..(n * block) as usize]))
            .collect();
        let last = (tokens.len() as u32).saturating_sub(1) / block;
        let fits = |n: u32| {
            (0..self.spec.groups.len()).all(|g| {
                let see = self.spec.groups[g].visibility;
                // Blocks with a position that the next query sees.
                (0..n).all(|i| {
                    let seen = (i * block..(i + 1) * block).any(|p| see.sees(n * block, p));
                    !seen || self.knows(g, prefix_at[i as usize])
                })
            })
        };
        // Groups with a window of 1 need no blocks, but a hit needs a block in at least one group.
        let lies_somewhere =
            |n: u32| (0..self.spec.groups.len()).any(|g| self.knows(g, prefix_at[n as usize - 1]));
        (1..=last).rev().find(|&n| fits(n) && lies_somewhere(n)).unwrap_or(0) * block
    }

    fn write(&mut self, choices: &mut Choices<'_>) {
        let n_spans = 1 + choices.below(4);
        let (mut spans, mut new) = (Vec::new(), Vec::new());
        for _ in 0..n_spans {
            let n = self.sequences.len() as u32;
            let Some((&seq, sequence)) = self.sequences.iter().nth(choices.below(n) as usize) else { return };
            if spans.iter().any(|span: &Span<'_>| span.seq == seq) {
                continue;
            }
            let n_tokens = 1 + choices.below(2 * self.block() + 3);
            spans.push(Span::chain(seq, sequence.tokens.len() as u32, n_tokens));
            new.push((seq, (0..n_tokens).map(|_| choices.below(3)).collect::<Vec<u32>>()));
        }
        let abandon = choices.one_in(6);
        self.log.push(format!("step {new:?}{}", if abandon { ", abandoned" } else { "" }));
        let block = self.block();
        // The expected cost, block by block.
        let mut expected = None;
        let mut expected_copies = vec![0; self.spec.groups.len()];
        for (g, expected_copies) in expected_copies.iter_mut().enumerate() {
            let (held, tables) = (self.held(g), self.tables(g));
            let mut needed = 0;
            let leaving = leaving(&spans, &tables, block);
            for (span, (seq, tokens)) in spans.iter().zip(&new) {
                let table = &tables[seq];
                let end = span.start + tokens.len() as u32;
                needed += end.div_ceil(block) - table.len() as u32;
            }
            for (tail, ends) in &leaving {
                let all_leave = ends.len() as u32 == held[tail] && !self.known[g].contains_key(tail);
                let n_copies = ends.len() as u32 - u32::from(all_leave);
                self.n_copies_saved += u32::from(all_leave && ends.len() > 1);
                *expected_copies += n_copies;
                needed += n_copies;
            }
            let total = self.spec.groups[g].capacity_tokens / block;
            let used: BTreeSet<u32> = held.keys().chain(self.known[g].keys()).copied().collect();
            let idle = self.known[g].keys().filter(|block| !held.contains_key(block)).count() as u32;
            let free = total - used.len() as u32;
            if needed > free {
                let (needed, free, reclaimable) = (needed * block, free * block, idle * block);
                expected = Some(Refused::NoSpace { group: GroupId(g as u16), needed, free, reclaimable });
                break;
            }
        }
        let before = self.cache.report();
        let tables_before: Vec<_> =
            (0..self.spec.groups.len()).map(|g| (self.tables(g), self.held(g))).collect();
        let began = Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut self.plan);
        let mut step = match began {
            Ok(step) => step,
            Err(refused) => {
                assert_eq!(Some(refused), expected);
                assert_eq!(self.cache.report(), before, "a refusal changed something");
                return;
            }
        };
        assert_eq!(expected, None, "a step was accepted that has no room");
        let plan = step.with_reads();
        for (g, memory) in self.memories.iter_mut().enumerate() {
            let group = plan.group(GroupId(g as u16));
            let (tables, held) = &tables_before[g];
            // Behind the ends of all holders of the block, if they all write in this step.
            let leaving = leaving(&spans, tables, block);
            let in_use = |cell: u32| {
                let at = cell / block;
                let private = leaving.get(&at).is_some_and(|ends| {
                    ends.len() as u32 == held[&at] && ends.iter().all(|&end| cell % block >= end)
                });
                let known = self.known[g].contains_key(&at);
                known || held.contains_key(&at) && !private
            };
            assert_eq!(group.copies.len() as u32, expected_copies[g], "copies in group {g}");
            for copy in &group.copies {
                for i in 0..copy.len {
                    assert!(!in_use(copy.to + i), "{copy:?} copies onto a cell in use");
                    memory[(copy.to + i) as usize] = memory[(copy.from + i) as usize];
                }
            }
            let mut cells = group.writes.iter().flat_map(|run| run.cells());
            for (seq, tokens) in &new {
                let mut whole = self.sequences[seq].clone();
                for &token in tokens {
                    whole.tokens.push(token);
                    let cell = cells.next().expect("a cell for every token");
                    assert!(!in_use(cell), "cell {cell} is written and in use");
                    memory[cell as usize] = self.prefixes.number(whole.salt, &whole.tokens);
                }
            }
            assert_eq!(cells.next(), None);
            // What each query sees, in order.
            let see = self.spec.groups[g].visibility;
            let mut query = 0;
            for (seq, tokens) in &new {
                let mut whole = self.sequences[seq].clone();
                for &token in tokens {
                    whole.tokens.push(token);
                    let position = whole.tokens.len() as u32 - 1;
                    let wanted: Vec<u64> = (0..=position)
                        .filter(|&p| see.sees(position, p))
                        .map(|p| self.prefixes.number(whole.salt, &whole.tokens[..=p as usize]))
                        .collect();
                    let mut got = Vec::new();
                    for item in &group.reads.items {
                        for slot in 0..item.n_queries {
                            if group.reads.order[(item.first_query + slot) as usize] == query {
                                let cells = group.reads.span_of(item, slot).map(|cell| item.run.start + cell);
                                got.extend(cells.map(|cell| memory[cell as usize]));
                            }
                        }
                    }
                    assert_eq!(got, wanted, "query {query} of {seq:?} in group {g}\n{:?}", group.reads.items);
                    query += 1;
                }
            }
        }
        if abandon {
            drop(step);
            assert_eq!(self.cache.report(), before, "an abandoned step changed something");
            return;
        }
        if choices.one_in(3) {
            new.iter_mut()
                .for_each(|(_, tokens)| tokens.truncate(choices.below(tokens.len() as u32 + 1) as usize));
            self.log.push(format!("kept {new:?}"));
            let kept: Vec<Kept<'_>> =
                new.iter().map(|(_, tokens)| Kept::First(tokens.len() as u32)).collect();
            step.commit_kept(&kept).expect("no more is kept than was planned");
        } else {
            step.commit();
        }
        for (seq, tokens) in new {
            self.sequences.get_mut(&seq).expect("it is open").tokens.extend(tokens);
        }
    }

    fn prompt(&self, choices: &mut Choices<'_>) -> Vec<u32> {
        let mut tokens = Vec::new();
        let n = self.sequences.len() as u32;
        if let Some(like) = self.sequences.values().nth(choices.below(n.max(1)) as usize)
            && !choices.one_in(3)
        {
            let keep = choices.below(like.tokens.len() as u32 + 1);
            tokens.extend_from_slice(&like.tokens[..keep as usize]);
        }
        tokens.extend((0..choices.below(12)).map(|_| choices.below(3)));
        tokens
    }

    fn operate(&mut self, choices: &mut Choices<'_>) {
        self.now_ns += u64::from(choices.below(20));
        let at = Moment { now_ns: self.now_ns };
        let seq = SeqId(choices.below(6));
        let other = SeqId(choices.below(6));
        match choices.below(16) {
            0..=5 => self.write(choices),
            6 | 7 => {
                let (salt, tokens) = (SALTS[choices.below(2) as usize], self.prompt(choices));
                self.log.push(format!("open {seq} {salt:?} {tokens:?}"));
                let hit = self.hit(salt, &tokens);
                let content = Content::Tokens(&tokens);
                let found = self.cache.lookup(salt, &content);
                assert_eq!(found.hit_tokens, hit);
                let groups = || (0..self.cache.n_groups() as u16).map(GroupId);
                let blocks: Vec<_> =
                    groups().map(|group| self.cache.lookup_blocks(group, salt, &content)).collect();
                let (before, idle) = (self.cache.report(), found.idle_tokens);
                let reason = self.cache.explain(salt, &content, Audience::Tenant);
                assert!(reason.position() >= hit, "{reason:?} of a hit of {hit}");
                let opened = self.cache.prefixes().expect("an index").open(seq, salt, &content, at);
                if let Entry::Vacant(vacant) = self.sequences.entry(seq) {
                    assert_eq!(opened, Ok(Lookup { hit_tokens: hit, idle_tokens: idle }));
                    let idle_of = |report: &Report| report.blocks.map_or(0, |blocks| blocks.idle);
                    let taken =
                        before.iter().zip(&self.cache.report()).map(|(a, b)| idle_of(a) - idle_of(b)).max();
                    assert_eq!(
                        taken.map(|n| n * self.spec.block_tokens),
                        Some(idle),
                        "what the hit takes from the room"
                    );
                    let tables = (0..self.cache.n_groups() as u16)
                        .map(|group| self.cache.block_table(GroupId(group), seq).expect("it was opened"));
                    assert_eq!(tables.collect::<Vec<_>>(), blocks, "it holds what was foretold");
                    let stored = (hit / self.spec.block_tokens) as usize;
                    vacant.insert(Sequence { salt, tokens: tokens[..hit as usize].to_vec(), stored });
                } else {
                    assert_eq!(opened, Err(Refused::SequenceExists(seq)));
                }
            }
            8 | 9 => {
                let Some(sequence) = self.sequences.get(&seq).cloned() else { return };
                self.log.push(format!("store {seq} {:?}", sequence.tokens));
                let block = self.block() as usize;
                for n in 1..=sequence.tokens.len() / block {
                    let prefix = self.prefixes.number(sequence.salt, &sequence.tokens[..n * block]);
                    let parent = self.prefixes.number(sequence.salt, &sequence.tokens[..(n - 1) * block]);
                    let hash = self.cache.prefix_hash(sequence.salt, &sequence.tokens[..n * block]);
                    let whole = Prefix { number: prefix, parent, n_blocks: n as u32 };
                    self.by_hash.insert(hash, whole);
                }
                // A caller that passes wrong content for stored blocks is refused, unless it passes only what follows
                // them.
                let from =
                    if choices.one_in(2) { 0 } else { choices.below(sequence.tokens.len() as u32 + 9) };
                let n_blocks = sequence.tokens.len() / block;
                let mut told = sequence.tokens.clone();
                let lies_in = match sequence.stored {
                    n if n > 0 && choices.one_in(4) => {
                        let place = choices.below((n * block) as u32) as usize;
                        told[place] += 1;
                        Some(place / block).filter(|&i| i >= (from as usize / block).min(n_blocks))
                    }
                    _ => None,
                };
                let content = Content::Tokens(&told);
                let done = self.cache.prefixes().expect("an index").store_from(seq, from, &content, at);
                if let Some(i) = lies_in {
                    assert_eq!(done, Err(Refused::OtherContent { seq, position: (i * block) as u32 }));
                } else {
                    let done = done.expect("it is open");
                    let given = n_blocks - (from as usize / block).min(sequence.stored);
                    assert_eq!((done.n_new + done.n_known) as usize, given, "{done:?}");
                    self.sequences.get_mut(&seq).expect("it is open").stored = n_blocks;
                }
            }
            10 | 11 => {
                self.log.push(format!("fork {seq} {other}"));
                let until = if choices.one_in(2) { u32::MAX } else { choices.below(30) };
                let done = self.cache.sequences().expect("many").seq_cp(seq, other, 0, until);
                match (self.sequences.get(&seq).cloned(), self.sequences.get(&other)) {
                    (None, _) => assert_eq!(done, Err(Refused::UnknownSequence(seq))),
                    (Some(source), there) => {
                        let until = until.min(source.tokens.len() as u32) as usize;
                        let occupied = there.is_some_and(|there| !there.tokens.is_empty());
                        if occupied {
                            assert!(
                                matches!(done, Err(Refused::Occupied { .. } | Refused::WindowGone { .. })),
                                "{done:?}"
                            );
                        } else if done.is_ok() && until == 0 {
                            let empty = Sequence { salt: source.salt, tokens: vec![], stored: 0 };
                            self.sequences.entry(other).or_insert(empty);
                        } else if done.is_ok() {
                            let tokens = source.tokens[..until].to_vec();
                            let stored = source.stored.min(until / self.spec.block_tokens as usize);
                            self.sequences.insert(other, Sequence { salt: source.salt, tokens, stored });
                        } else {
                            assert!(matches!(done, Err(Refused::WindowGone { .. })), "{done:?}");
                            assert!((0..self.spec.groups.len()).any(|g| self.is_windowed(g)));
                        }
                    }
                }
            }
            12 => {
                let Some(sequence) = self.sequences.get(&seq) else { return };
                let len = sequence.tokens.len() as u32;
                let drafted = choices.below(len.min(self.spec.rollback_tokens) + 1);
                let accepted = choices.below(drafted + 2);
                self.log.push(format!("accept {accepted} of {drafted} of {seq}"));
                let done = self.cache.sequences().expect("many").accept(seq, drafted, accepted);
                if accepted > drafted {
                    assert_eq!(done, Err(Refused::AcceptsMore { seq, drafted, accepted }));
                } else {
                    // The number of drafts is within what can always be rolled back.
                    let hit_needed = matches!(done, Err(Refused::WindowGone { .. }));
                    assert!(done.is_ok() || hit_needed, "{done:?}");
                    if done.is_ok() {
                        self.shorten(seq, len - (drafted - accepted), false);
                    }
                }
            }
            13 => {
                let Some(sequence) = self.sequences.get(&seq) else { return };
                let len = sequence.tokens.len() as u32;
                let to = choices.below(len + 1);
                self.log.push(format!("roll {seq} back to {to}"));
                let done = self.cache.sequences().expect("many").seq_rm(seq, to, u32::MAX);
                if done.is_ok() {
                    self.shorten(seq, to, true);
                } else {
                    assert_eq!(done, Err(Refused::WindowGone { seq, position: to }));
                    assert!((0..self.spec.groups.len()).any(|g| self.is_windowed(g)));
                }
            }
            14 => {
                self.log.push(format!("remove {seq}"));
                let done = self.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX);
                assert_eq!(done.is_ok(), self.sequences.remove(&seq).is_some());
            }
            _ => {
                let n_tokens = choices.below(40);
                self.log.push(format!("make room for {n_tokens}"));
                self.cache.prefixes().expect("an index").evict_until_free(n_tokens, at);
                let removed = self.follow();
                self.evict_until_free(n_tokens, &removed);
                for (g, report) in self.cache.report().iter().enumerate() {
                    let blocks = report.blocks.expect("a paged group");
                    let enough = blocks.free * self.block() >= n_tokens;
                    assert!(enough || blocks.idle == 0, "group {g} kept idle blocks: {blocks:?}");
                }
            }
        }
        let removed = self.follow();
        assert!(removed.is_empty(), "{removed:?} were forgotten, and nobody made room");
        self.compare();
    }

    fn shorten(&mut self, seq: SeqId, to: u32, forgets: bool) {
        let block = self.block();
        let sequence = self.sequences.get_mut(&seq).expect("it is open");
        sequence.tokens.truncate(to as usize);
        sequence.stored = sequence.stored.min((to / block) as usize);
        if to == 0 && forgets {
            self.sequences.remove(&seq);
        }
    }

    fn compare(&mut self) {
        for seq in (0..7).map(SeqId) {
            let next = self.sequences.get(&seq).map(|s| s.tokens.len() as u32);
            assert_eq!(self.cache.next_position(seq), next, "next position of {seq}");
        }
        let block = self.block();
        for (g, report) in self.cache.report().into_iter().enumerate() {
            let (held, blocks) = (self.held(g), report.blocks.expect("a paged group"));
            let used: BTreeSet<u32> = held.keys().chain(self.known[g].keys()).copied().collect();
            let idle = self.known[g].keys().filter(|block| !held.contains_key(block)).count() as u32;
            assert_eq!(blocks.total - blocks.free, used.len() as u32, "blocks in use in group {g}");
            assert_eq!(blocks.idle, idle, "idle blocks of group {g}");
            let n = blocks.counters;
            assert_eq!(n, self.counters[g], "counters of group {g}");
            let (came, left) = (n.allocated + n.copied_on_write, n.freed + n.evicted);
            assert_eq!(came - left, u64::from(blocks.total - blocks.free), "{n:?}");
            // Cell by cell: the cells of a block that some sequence has filled, or all of them if the block is
            // cached.
            let mut filled: BTreeSet<(u32, u32)> = BTreeSet::new();
            for (seq, table) in self.tables(g) {
                let len = self.sequences[&seq].tokens.len() as u32;
                for p in 0..len {
                    filled.extend(table[(p / block) as usize].map(|at| (at, p % block)));
                }
            }
            let indexed = self.known[g].keys().filter(|at| held.contains_key(at));
            filled.extend(indexed.flat_map(|&at| (0..block).map(move |i| (at, i))));
            assert_eq!(blocks.unused_cells, held.len() as u32 * block - filled.len() as u32, "in group {g}");
            assert_eq!(blocks.external_fragmentation(), 0.0);
            assert!((0.0..1.0).contains(&blocks.internal_fragmentation()), "{blocks:?}");
            let top = used.last().map_or(0, |top| top + 1);
            assert_eq!(report.high_water, top * block, "high water of group {g}");
            // Every block holds what its sequences and the index claim.
            for (seq, table) in self.tables(g) {
                let sequence = self.sequences[&seq].clone();
                for (i, at) in table.into_iter().enumerate() {
                    let Some(at) = at else { continue };
                    for p in i * block as usize..((i + 1) * block as usize).min(sequence.tokens.len()) {
                        let wanted = self.prefixes.number(sequence.salt, &sequence.tokens[..=p]);
                        let cell = at as usize * block as usize + p % block as usize;
                        assert_eq!(self.memories[g][cell], wanted, "position {p} of {seq} in group {g}");
                    }
                }
            }
            for (at, known) in &self.known[g] {
                let last = (at + 1) as usize * block as usize - 1;
                assert_eq!(self.memories[g][last], known.prefix, "indexed block {at} of group {g}");
            }
        }
    }
}

#[test]
fn paged_caches_agree_with_their_twin() {
    let n_operations: u64 = std::env::var("KVIST_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let first: u64 = std::env::var("KVIST_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let per_drive = 400;
    let mut n_copies_saved = 0;
    for seed in first..first + n_operations.div_ceil(per_drive) {
        let mut choices = Choices::from_seed(seed, per_drive);
        let mut drive = Drive::new(&mut choices);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while choices.go_on() {
                drive.operate(&mut choices);
            }
        }));
        assert!(
            failed.is_ok(),
            "KVIST_SEED={seed} KVIST_OPS=1 repeats it; last: {:#?}",
            drive.log.iter().rev().take(12).rev().collect::<Vec<_>>()
        );
        n_copies_saved += drive.n_copies_saved;
    }
    assert!(n_operations < 100_000 || n_copies_saved > 100, "hardly anybody shared: {n_copies_saved}");
}
