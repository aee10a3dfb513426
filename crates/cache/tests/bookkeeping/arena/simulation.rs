//! The arena compared with a simulated memory.
use super::*;

/// An arena, the memory that a backend would have, and its expected content.
pub(super) struct Simulation {
    pub arena: Arena,
    pub memory: Vec<u64>, // [blocks · block_tokens]
    pub texts: BTreeMap<SeqId, Vec<u64>>,
    /// Least recently used first.
    pub uses: Vec<SeqId>,
    pub n_written: u64,
    /// The owner of each block according to the events, and the events of the last operation.
    pub owners: BTreeMap<u32, SeqId>,
    pub events: Vec<BlockEvent>,
    pub n_moved: u64,
    pub n_steps: u64,
}

impl Simulation {
    pub fn new(allocator: &str, n_blocks: u32, block_tokens: u32) -> Self {
        let mut arena = Arena::new(block_tokens, build(allocator, n_blocks)).unwrap();
        arena.watch(true);
        Simulation {
            arena,
            memory: vec![0; (n_blocks * block_tokens) as usize],
            texts: BTreeMap::new(),
            uses: Vec::new(),
            n_written: 0,
            owners: BTreeMap::new(),
            events: Vec::new(),
            n_moved: 0,
            n_steps: 0,
        }
    }
    pub fn used(&mut self, seq: SeqId) {
        self.uses.retain(|&other| other != seq);
        self.uses.push(seq);
    }
    pub fn lost(&mut self, seq: SeqId) {
        self.uses.retain(|&other| other != seq);
        self.texts.remove(&seq);
    }
    /// Checks that exactly the least recently used sequences were evicted.
    pub fn evicted(&mut self, evicted: &[SeqId], keep: SeqId) {
        let oldest: Vec<SeqId> = self.uses.iter().copied().filter(|&seq| seq != keep).collect();
        assert_eq!(oldest[..evicted.len()], *evicted);
        evicted.iter().for_each(|&seq| self.lost(seq));
    }

    pub fn allocate(
        &mut self,
        seq: SeqId,
        tokens: u32,
        policy: OutOfMemory,
    ) -> Result<Allocated, ArenaRefused> {
        let before = self.arena.report();
        let done = self.arena.allocate_for(seq, tokens, policy);
        match &done {
            Ok(allocated) => {
                self.evicted(&allocated.evicted, seq);
                assert!(allocated.evicted.is_empty() || policy == OutOfMemory::Evict);
                assert!(
                    allocated.tokens == tokens || policy == OutOfMemory::Shrink && allocated.tokens < tokens
                );
                assert!(u64::from(allocated.tokens) <= allocated.handle.tokens(self.arena.block_tokens()));
                self.texts.insert(seq, Vec::new());
                self.used(seq);
            }
            Err(_) => self.unchanged(&before),
        }
        done
    }

    /// Executes and commits the append, or stops after some bytes and drops it.
    pub fn append(
        &mut self,
        seq: SeqId,
        n: u32,
        policy: CapacityExceeded,
        commit: bool,
    ) -> Result<bool, ArenaRefused> {
        let before = self.arena.report();
        let block_tokens = self.arena.block_tokens();
        let (memory, n_written) = (&mut self.memory, &mut self.n_written);
        let append = match self.arena.append(seq, n, policy) {
            Ok(Some(append)) => append,
            Ok(None) => {
                assert_eq!(policy, CapacityExceeded::Halt);
                self.unchanged(&before);
                return Ok(false);
            }
            Err(refused) => {
                self.unchanged(&before);
                return Err(refused);
            }
        };
        if let Some(copy) = append.copy() {
            let from = (copy.from * block_tokens) as usize..((copy.from + copy.len) * block_tokens) as usize;
            memory.copy_within(from, (copy.to * block_tokens) as usize);
        }
        let mut written = Vec::new();
        for cells in append.writes() {
            assert!(cells.offset + cells.len <= block_tokens);
            for i in 0..cells.len {
                *n_written += 1;
                memory[(cells.block * block_tokens + cells.offset + i) as usize] = *n_written;
                written.push(*n_written);
            }
        }
        assert_eq!(written.len() as u32, n);
        let evicted = append.evicted().to_vec();
        if commit {
            append.commit();
            self.n_steps += 1;
            self.texts.get_mut(&seq).unwrap().extend(written);
        } else {
            drop(append);
        }
        self.evicted(&evicted, seq);
        if commit {
            self.used(seq);
        }
        Ok(true)
    }

    pub fn resize(&mut self, n_blocks: u32, commit: bool) -> Result<(), ArenaRefused> {
        let before = self.arena.report();
        let block_tokens = self.arena.block_tokens() as usize;
        let resize = match self.arena.resize(n_blocks) {
            Ok(resize) => resize,
            Err(refused) => {
                self.unchanged(&before);
                let reserved: u32 = before.sequences.iter().map(|s| s.reserved).sum();
                assert!(
                    n_blocks == 0 || reserved > n_blocks,
                    "{reserved} blocks fit in {n_blocks} if packed"
                );
                return Err(refused);
            }
        };
        let mut memory = vec![u64::MAX; n_blocks as usize * block_tokens];
        for (_, copy) in resize.remap() {
            let [from, to, len] = [copy.from, copy.to, copy.len].map(|blocks| blocks as usize * block_tokens);
            memory[to..to + len].copy_from_slice(&self.memory[from..from + len]);
        }
        if commit {
            resize.commit();
            self.n_steps += 1;
            self.memory = memory;
        }
        Ok(())
    }

    pub fn unchanged(&self, before: &ArenaReport) {
        let now = self.arena.report();
        assert_eq!((&now.sequences, now.free_blocks), (&before.sequences, before.free_blocks));
    }

    /// Applies the events of the last operation to a map of owners, one by one.
    pub fn follow(&mut self) {
        self.events.clear();
        self.arena.drain_events(&mut self.events);
        assert!(self.events.is_sorted_by_key(|event| event.step));
        let (mut before, mut operation) = (BTreeMap::new(), None);
        for event in &self.events {
            if operation.replace((event.step, event.reason)) != Some((event.step, event.reason)) {
                before = self.owners.clone();
            }
            let BlockEvent { block, seq, change, reason, .. } = *event;
            let seq = seq.expect("every block of an arena belongs to a sequence");
            match change {
                Change::Alloc => assert_eq!(self.owners.insert(block, seq), None, "{event:?}"),
                Change::Free | Change::Evict => {
                    assert_eq!(self.owners.remove(&block), Some(seq), "{event:?}");
                    assert_eq!(change == Change::Evict, reason == ChangeReason::SpaceNeeded, "{event:?}");
                }
                Change::Move { from } => {
                    assert_eq!(before.get(&from), Some(&seq), "{event:?}");
                    assert_eq!(self.owners.insert(block, seq), None, "{event:?}");
                    self.n_moved += u64::from(reason == ChangeReason::Append);
                }
                _ => panic!("{event:?} does not happen in an arena"),
            }
            // The events of a plan are recorded at its commit, and their step does not count that commit.
            let committed = matches!(reason, ChangeReason::Append | ChangeReason::Resize);
            assert!(event.step + u64::from(committed) <= self.n_steps, "{event:?}");
        }
    }

    /// Checks that every token can be read back, no two handles overlap, the figures are right, and the events are
    /// complete.
    pub fn check(&mut self) {
        self.follow();
        let report = self.arena.report();
        assert_eq!(report.counters.blocks_copied, self.n_moved);
        for (block, owner) in (0..).zip(report.block_map()) {
            assert_eq!(self.owners.get(&block).copied(), owner, "block {block}: {:?}", self.events);
        }
        let block_tokens = self.arena.block_tokens();
        assert!(self.arena.sequences().eq(self.texts.keys().copied()));
        let mut map = vec![None; report.total_blocks as usize];
        for row in &report.sequences {
            let text = &self.texts[&row.seq];
            assert_eq!(row.used_tokens as usize, text.len());
            assert!(u64::from(row.used_tokens) <= row.capacity_tokens && row.len <= row.reserved);
            let first = (row.start * block_tokens) as usize;
            assert_eq!(self.memory[first..first + text.len()], text[..], "what {} reads", row.seq);
            for block in row.start..row.start + row.reserved {
                assert_eq!(map[block as usize].replace(row.seq), None, "block {block} belongs to two");
            }
        }
        let n_free = map.iter().filter(|owner| owner.is_none()).count() as u32;
        assert_eq!(report.block_map(), map);
        assert_eq!((report.free_blocks, report.used_blocks), (n_free, report.total_blocks - n_free));
        assert!((0.0..=1.0).contains(&report.external_fragmentation()));
        assert!((0.0..=1.0).contains(&report.internal_fragmentation()));
        if report.allocator == "first_fit" {
            let longest =
                map.chunk_by(|a, b| a == b).filter(|run| run[0].is_none()).map(|run| run.len()).max();
            assert_eq!(report.largest_free_run as usize, longest.unwrap_or(0));
        }
    }
}

#[test]
fn nothing_is_lost_and_nothing_overlaps() {
    const PER_DRIVE: u64 = 500;
    for (name, _) in ALLOCATORS {
        let (mut moved, mut evicted, mut halted, mut refused, mut resized) = (0, 0, 0, 0, 0);
        for seed in 0..N_OPERATIONS / PER_DRIVE {
            let mut choices = Choices::from_seed(seed, PER_DRIVE);
            let n_blocks = 1 + choices.below(40);
            let mut it = Simulation::new(name, n_blocks, 1 + choices.below(5));
            while choices.go_on() {
                let seq = SeqId(choices.below(7));
                let commit = !choices.one_in(5);
                match choices.below(10) {
                    0..=2 => {
                        let policy =
                            choices.of(&[OutOfMemory::Reject, OutOfMemory::Shrink, OutOfMemory::Evict]);
                        _ = it.allocate(seq, choices.below(40), policy);
                    }
                    3..=7 => {
                        let policy = choices.of(&[
                            CapacityExceeded::Halt,
                            CapacityExceeded::EvictLeastRecentlyUsed,
                            CapacityExceeded::Error,
                        ]);
                        _ = it.append(seq, choices.below(12), policy, commit);
                    }
                    8 => match it.arena.free_for(seq) {
                        Ok(_) => it.lost(seq),
                        Err(refused) => assert_eq!(refused, ArenaRefused::UnknownSequence(seq)),
                    },
                    _ if choices.one_in(3) => _ = it.resize(choices.below(48), commit),
                    _ => {
                        if it.arena.touch(seq).is_ok() {
                            it.used(seq);
                        }
                    }
                }
                it.check();
            }
            let counters = it.arena.report().counters;
            moved += counters.blocks_copied;
            evicted += counters.evicted;
            halted += counters.halted;
            refused += counters.refused;
            resized += counters.resized;
        }
        let seen = [moved, evicted, halted, refused, resized];
        assert!(seen.iter().all(|&n| n > 100), "{name}: the drives met too little: {seen:?}");
    }
}
