//! The arena: allocators compared with bitmaps, the whole with a simulated memory, and the figures of its source.
use kvist_cache::arena::{self, *};
use kvist_cache::{BlockEvent, Change, Reason, SeqId};
use kvist_testing::reference::Choices;
use std::collections::BTreeMap;

const N_OPERATIONS: u64 = 100_000;
const A: SeqId = SeqId(1);
const B: SeqId = SeqId(2);
const C: SeqId = SeqId(3);

fn build(name: &str, n_blocks: u32) -> Box<dyn Allocator> {
    arena::build(name, n_blocks).expect("an allocator of the table")
}

/// Which blocks are taken, searched linearly.
struct Bitmap {
    buddies: bool,
    taken: Vec<bool>,
}

impl Bitmap {
    fn is_free(&self, start: u64, len: u64) -> bool {
        start + len <= self.taken.len() as u64 && (start..start + len).all(|b| !self.taken[b as usize])
    }
    fn first_free(&self, len: u64, step: u64) -> Option<u64> {
        (0..self.taken.len() as u64).step_by(step as usize).find(|&start| self.is_free(start, len))
    }
    /// The lowest run of `n` blocks. For buddies: the lowest aligned free run of the smallest sufficient size that is
    /// not part of a larger free run.
    fn find(&self, n: u32) -> Option<Handle> {
        let size = u64::from(if self.buddies { n.next_power_of_two() } else { n });
        let handle = |start: u64| Handle { start: start as u32, len: n, reserved: size as u32 };
        if n == 0 {
            return None;
        }
        if !self.buddies {
            return self.first_free(size, 1).map(handle);
        }
        let sizes = std::iter::successors(Some(size), |size| Some(size * 2));
        sizes.take_while(|&size| size <= self.taken.len() as u64).find_map(|size| {
            let mut starts = (0..self.taken.len() as u64).step_by(size as usize);
            let whole = |start: u64| !self.is_free(start / (2 * size) * 2 * size, 2 * size);
            starts.find(|&start| self.is_free(start, size) && whole(start)).map(handle)
        })
    }
    fn largest(&self) -> u32 {
        let n_blocks = self.taken.len() as u32;
        (1..=n_blocks).rev().find(|&n| self.find(n).is_some_and(|h| h.reserved == n)).unwrap_or(0)
    }
    fn extended(&self, handle: Handle, n: u32) -> Option<Handle> {
        let size = if self.buddies { n.next_power_of_two().max(handle.reserved) } else { n };
        let aligned = !self.buddies || handle.start.is_multiple_of(size);
        let (end, more) = (handle.start + handle.reserved, size - handle.reserved);
        (aligned && self.is_free(u64::from(end), u64::from(more))).then_some(Handle {
            len: n,
            reserved: size,
            ..handle
        })
    }
    fn set(&mut self, handle: Handle, taken: bool) {
        for block in handle.start..handle.start + handle.reserved {
            assert_eq!(self.taken[block as usize], !taken, "block {block} of {handle:?}");
            self.taken[block as usize] = taken;
        }
    }
}

fn allocator_agrees(name: &str, n_blocks: u32, seed: u64, n_operations: u64) {
    let mut choices = Choices::from_seed(seed, n_operations);
    let mut clever = build(name, n_blocks);
    let mut model = Bitmap { buddies: name == "buddy", taken: vec![false; n_blocks as usize] };
    let mut live: Vec<Handle> = Vec::new();
    while choices.go_on() {
        match choices.below(8) {
            0..=3 => {
                let up_to = if choices.one_in(8) { n_blocks + 2 } else { 9 };
                let n = choices.below(up_to);
                let found = clever.find(n);
                assert_eq!(found, model.find(n), "{name} of {n_blocks}, seed {seed}: find {n}");
                if let Some(handle) = found {
                    clever.take(handle);
                    model.set(handle, true);
                    live.push(handle);
                }
            }
            4..=5 if !live.is_empty() => {
                let i = choices.below(live.len() as u32) as usize;
                let n = live[i].len + choices.below(9);
                let grown = clever.extended(live[i], n);
                assert_eq!(grown, model.extended(live[i], n), "{name}, seed {seed}: {:?} to {n}", live[i]);
                if let Some(grown) = grown {
                    clever.release(live[i]);
                    clever.take(grown);
                    model.set(live[i], false);
                    model.set(grown, true);
                    live[i] = grown;
                }
            }
            _ if !live.is_empty() => {
                let handle = live.swap_remove(choices.below(live.len() as u32) as usize);
                clever.release(handle);
                model.set(handle, false);
            }
            _ => {}
        }
        let n_free = model.taken.iter().filter(|taken| !**taken).count() as u32;
        assert_eq!(clever.n_free(), n_free);
        assert_eq!(clever.largest_free_run(), model.largest(), "{name} of {n_blocks}, seed {seed}");
    }
    live.drain(..).for_each(|handle| clever.release(handle));
    assert_eq!(clever.largest_free_run(), build(name, n_blocks).largest_free_run(), "{name}: all is merged");
}

#[test]
fn allocators_agree_with_bitmaps() {
    const PER_DRIVE: u64 = 500;
    let sizes = [1, 2, 3, 7, 16, 31, 48, 64];
    for (name, _) in ALLOCATORS {
        for seed in 0..N_OPERATIONS / PER_DRIVE {
            allocator_agrees(name, sizes[seed as usize % sizes.len()], seed, PER_DRIVE);
        }
    }
}

/// An arena, the memory that a backend would have, and its expected content.
struct Simulation {
    arena: Arena,
    memory: Vec<u64>, // [blocks · block_tokens]
    texts: BTreeMap<SeqId, Vec<u64>>,
    /// Least recently used first.
    uses: Vec<SeqId>,
    n_written: u64,
    /// The owner of each block according to the events, and the events of the last operation.
    owners: BTreeMap<u32, SeqId>,
    events: Vec<BlockEvent>,
    n_moved: u64,
    n_steps: u64,
}

impl Simulation {
    fn new(allocator: &str, n_blocks: u32, block_tokens: u32) -> Self {
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
    fn used(&mut self, seq: SeqId) {
        self.uses.retain(|&other| other != seq);
        self.uses.push(seq);
    }
    fn lost(&mut self, seq: SeqId) {
        self.uses.retain(|&other| other != seq);
        self.texts.remove(&seq);
    }
    /// Checks that exactly the least recently used sequences were evicted.
    fn evicted(&mut self, evicted: &[SeqId], keep: SeqId) {
        let oldest: Vec<SeqId> = self.uses.iter().copied().filter(|&seq| seq != keep).collect();
        assert_eq!(oldest[..evicted.len()], *evicted);
        evicted.iter().for_each(|&seq| self.lost(seq));
    }

    fn allocate(&mut self, seq: SeqId, tokens: u32, policy: OutOfMemory) -> Result<Allocated, ArenaRefused> {
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
    fn append(
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

    fn resize(&mut self, n_blocks: u32, commit: bool) -> Result<(), ArenaRefused> {
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

    fn unchanged(&self, before: &ArenaReport) {
        let now = self.arena.report();
        assert_eq!((&now.sequences, now.free_blocks), (&before.sequences, before.free_blocks));
    }

    /// Applies the events of the last operation to a map of owners, one by one.
    fn follow(&mut self) {
        self.events.clear();
        self.arena.drain_events(&mut self.events);
        assert!(self.events.is_sorted_by_key(|event| event.step));
        let (mut before, mut operation) = (BTreeMap::new(), None);
        for event in &self.events {
            if operation.replace((event.step, event.reason)) != Some((event.step, event.reason)) {
                before = self.owners.clone();
            }
            let BlockEvent { block, seq, change, reason, .. } = *event;
            let seq = seq.expect("blocks of an arena are somebody's");
            match change {
                Change::Alloc => assert_eq!(self.owners.insert(block, seq), None, "{event:?}"),
                Change::Free | Change::Evict => {
                    assert_eq!(self.owners.remove(&block), Some(seq), "{event:?}");
                    assert_eq!(change == Change::Evict, reason == Reason::MakeRoom, "{event:?}");
                }
                Change::Move { from } => {
                    assert_eq!(before.get(&from), Some(&seq), "{event:?}");
                    assert_eq!(self.owners.insert(block, seq), None, "{event:?}");
                    self.n_moved += u64::from(reason == Reason::Append);
                }
                _ => panic!("{event:?} does not happen in an arena"),
            }
            // The events of a plan are recorded at its commit, and their step does not count that commit.
            let committed = matches!(reason, Reason::Append | Reason::Resize);
            assert!(event.step + u64::from(committed) <= self.n_steps, "{event:?}");
        }
    }

    /// Checks that every token can be read back, no two handles overlap, the figures are right, and the events are
    /// complete.
    fn check(&mut self) {
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

/// The example of the source: 512 tokens fill 32 blocks of 16, and the token with index 512 goes to the block after
/// the 32nd, not to the second.
#[test]
fn the_513th_token_grows_the_handle_or_is_refused() {
    for (name, _) in ALLOCATORS {
        let mut it = Simulation::new(name, 64, 16);
        let handle = it.allocate(A, 512, OutOfMemory::Reject).unwrap().handle;
        assert_eq!((handle.len, it.arena.is_full(A)), (32, Some(false)), "{name}");
        it.append(A, 512, CapacityExceeded::Error, true).unwrap();
        assert_eq!((it.arena.used_tokens(A), it.arena.is_full(A)), (Some(512), Some(true)));
        assert_eq!((it.arena.room_tokens(A), it.arena.token_offset_in_block(A)), (Some(0), Some(0)));

        let append = it.arena.append(A, 1, CapacityExceeded::Error).unwrap().unwrap();
        let cells: Vec<BlockCells> = append.writes().collect();
        assert_eq!(cells, [BlockCells { block: handle.start + 32, offset: 0, len: 1 }], "{name}");
        assert_eq!(append.copy(), None, "{name}: it grows in place");
        drop(append);
        assert_eq!((it.arena.used_tokens(A), it.arena.handle(A)), (Some(512), Some(handle)), "{name}");

        it.allocate(B, 32 * 16, OutOfMemory::Reject).unwrap();
        let refused = it.append(A, 1, CapacityExceeded::Error, true).unwrap_err();
        assert_eq!(refused, ArenaRefused::NoRoom { needed_blocks: 33, free_blocks: 0, largest_free_run: 0 });
        assert!(refused.to_string().contains("33 neighbouring blocks needed, 0 free"), "{refused}");
        assert!(!it.append(A, 1, CapacityExceeded::Halt, true).unwrap(), "{name}: a halt is an answer");
        assert!(it.arena.is_exhausted());
        it.append(A, 1, CapacityExceeded::EvictLeastRecentlyUsed, true).unwrap();
        assert_eq!(it.arena.sequences().collect::<Vec<_>>(), [A], "{name}: B had to go");
        it.check();
    }
}

/// The source claimed "zero fragmentation". Every second of eight sequences is freed: half of the blocks are free,
/// but no request for more than one sequence's blocks fits. The refusal says so.
#[test]
fn fragmentation_is_measured() {
    let mut it = Simulation::new("first_fit", 64, 16);
    for seq in 0..8 {
        it.allocate(SeqId(seq), 8 * 16, OutOfMemory::Reject).unwrap();
        it.append(SeqId(seq), 6 * 16, CapacityExceeded::Error, true).unwrap();
    }
    (0..8).step_by(2).for_each(|seq| _ = it.arena.free_for(SeqId(seq)));
    let report = it.arena.report();
    assert_eq!((report.free_blocks, report.largest_free_run), (32, 8));
    assert_eq!(report.external_fragmentation(), 0.75);
    assert_eq!(report.internal_fragmentation(), 0.25, "6 of 8 blocks are in use");
    let refused = it.arena.allocate_for(SeqId(9), 9 * 16, OutOfMemory::Reject).unwrap_err();
    assert!(refused.to_string().contains("9 neighbouring blocks needed, 32 free, in pieces of at most 8"));
    let shrunk = it.arena.allocate_for(SeqId(9), 9 * 16, OutOfMemory::Shrink).unwrap();
    assert_eq!((shrunk.tokens, shrunk.handle.len), (128, 8));
}

/// Blocks that the buddy allocator adds by rounding up are reported as waste, and allow growth without a move.
#[test]
fn buddies_reserve_powers_of_two() {
    let mut it = Simulation::new("buddy", 64, 1);
    let handle = it.allocate(A, 5, OutOfMemory::Reject).unwrap().handle;
    assert_eq!((handle.len, handle.reserved), (5, 8));
    it.append(A, 5, CapacityExceeded::Error, true).unwrap();
    assert_eq!(it.arena.report().internal_fragmentation(), 0.375);
    let append = it.arena.append(A, 3, CapacityExceeded::Error).unwrap().unwrap();
    assert_eq!((append.copy(), append.handle().reserved), (None, 8));
    append.commit();
    assert_eq!(it.arena.report().internal_fragmentation(), 0.0);
}

/// A handle that cannot grow in place takes its used blocks along. Until the commit the old blocks stay intact.
#[test]
fn growth_by_a_move_is_a_plan() {
    let mut it = Simulation::new("first_fit", 16, 4);
    it.allocate(A, 8, OutOfMemory::Reject).unwrap();
    it.append(A, 7, CapacityExceeded::Error, true).unwrap();
    it.allocate(B, 4, OutOfMemory::Reject).unwrap();
    let append = it.arena.append(A, 5, CapacityExceeded::Error).unwrap().unwrap();
    assert_eq!(append.copy(), Some(BlockCopy { from: 0, to: 3, len: 2 }));
    let cells: Vec<BlockCells> = append.writes().collect();
    assert_eq!(
        cells,
        [BlockCells { block: 4, offset: 3, len: 1 }, BlockCells { block: 5, offset: 0, len: 4 }]
    );
    drop(append);
    it.check();
    assert_eq!(it.arena.handle(A).unwrap().start, 0);
    it.append(A, 5, CapacityExceeded::Error, true).unwrap();
    it.check();
    assert_eq!(it.arena.handle(A).unwrap().start, 3);
    assert_eq!(it.arena.report().counters.blocks_copied, 2);
}

#[test]
fn resize_remaps_what_does_not_fit_where_it_lies() {
    let mut it = Simulation::new("first_fit", 16, 2);
    for seq in [A, B, C] {
        it.allocate(seq, 8, OutOfMemory::Reject).unwrap();
        it.append(seq, 8, CapacityExceeded::Error, true).unwrap();
    }
    it.arena.free_for(A).unwrap();
    it.lost(A);
    let starts = |it: &Simulation| [B, C].map(|seq| it.arena.handle(seq).unwrap().start);
    it.resize(10, true).unwrap();
    assert_eq!(starts(&it), [4, 0], "C lay at 8..12 and goes where A was");
    it.resize(32, true).unwrap();
    assert_eq!(starts(&it), [4, 0]);
    it.check();
    let refused = it.resize(7, true).unwrap_err();
    assert_eq!(refused, ArenaRefused::NoRoom { needed_blocks: 8, free_blocks: 7, largest_free_run: 7 });
    it.resize(8, true).unwrap();
    assert!(it.arena.is_exhausted());
    it.check();
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut it = Simulation::new("first_fit", 4, 4);
    assert_eq!(Arena::new(0, build("buddy", 4)).err(), Some(ArenaRefused::Empty));
    assert_eq!(Arena::new(4, build("buddy", 0)).err(), Some(ArenaRefused::Empty));
    assert_eq!(it.allocate(A, 0, OutOfMemory::Evict), Err(ArenaRefused::Empty));
    it.allocate(A, 1, OutOfMemory::Reject).unwrap();
    assert_eq!(it.allocate(A, 1, OutOfMemory::Evict), Err(ArenaRefused::SequenceExists(A)));
    let too_much = it.allocate(B, u32::MAX, OutOfMemory::Evict);
    assert!(matches!(too_much, Err(ArenaRefused::NoRoom { needed_blocks: 0x4000_0000, .. })), "{too_much:?}");
    assert!(it.arena.used_tokens(A).is_some(), "nobody is evicted in vain");
    it.append(A, 1, CapacityExceeded::Error, true).unwrap();
    let too_long = it.append(A, u32::MAX, CapacityExceeded::Error, true);
    assert_eq!(too_long, Err(ArenaRefused::TooLong { seq: A, tokens: 1 << 32 }));
    assert_eq!(it.append(A, 0, CapacityExceeded::Halt, true), Err(ArenaRefused::Empty));
    assert_eq!(it.append(B, 1, CapacityExceeded::Halt, true), Err(ArenaRefused::UnknownSequence(B)));
    assert_eq!(it.arena.used_tokens(B), None);
    assert_eq!(it.resize(0, true), Err(ArenaRefused::Empty));
}

const SEVEN_B: Layout = Layout {
    order: BufferOrder::BlockMajor,
    n_layers: 32,
    n_blocks: 2048,
    n_kv_heads: 32,
    block_tokens: 16,
    head_dim: 64,
};

/// The source counted the keys only (8 GiB), and 207,208 elements before block 101.
#[test]
fn sizes_and_offsets_are_right() {
    assert_eq!(SEVEN_B.elements(), Some(2_147_483_648));
    assert_eq!(SEVEN_B.bytes(4), Some(16 << 30));
    let huge = Layout { n_layers: u32::MAX, n_blocks: u32::MAX, ..SEVEN_B };
    assert_eq!((huge.elements(), huge.bytes(2)), (None, None));
    let nearly = Layout {
        n_layers: 1 << 30,
        n_blocks: 1 << 31,
        n_kv_heads: 2,
        block_tokens: 1,
        head_dim: 1,
        ..SEVEN_B
    };
    assert_eq!((nearly.elements(), nearly.bytes(4)), (Some(1 << 62), None));

    let block_101 = Handle { start: 101, len: 1, reserved: 1 };
    assert_eq!(SEVEN_B.keys(0, block_101, 16).unwrap().row(0, 0), Some(3_309_568));
    let from_100 = Handle { start: 100, len: 33, reserved: 33 };
    let keys = SEVEN_B.keys(0, from_100, 513).unwrap();
    assert_eq!(keys.row(0, 512), Some((100 + 32) * 32 * 16 * 64), "index 512 lies in the 33rd block");
    assert_eq!(keys.row(0, 17), Some(3_309_568 + 64));
    assert_eq!((keys.row(32, 0), keys.row(0, 513)), (None, None));
    assert_eq!(SEVEN_B.values(32, from_100, 1), None);
    assert_eq!(SEVEN_B.values(0, from_100, 33 * 16 + 1), None);
    assert_eq!(SEVEN_B.values(0, Handle { start: 2047, len: 2, reserved: 2 }, 1), None);
    assert_eq!(huge.keys(0, block_101, 1), None);
    let absurd =
        Layout { n_blocks: 0, n_kv_heads: u32::MAX, block_tokens: u32::MAX, head_dim: u32::MAX, ..SEVEN_B };
    assert_eq!(absurd.keys(0, Handle { start: 0, len: 0, reserved: 0 }, 0), None);
}

/// Compares views with a walk through the buffer in its own order; every element is visited once.
#[test]
fn views_find_every_element() {
    for order in [BufferOrder::BlockMajor, BufferOrder::HeadMajor] {
        let layout = Layout { order, n_layers: 3, n_blocks: 5, n_kv_heads: 2, block_tokens: 4, head_dim: 3 };
        let [nl, nb, nh, bt, hd] = [3u32, 5, 2, 4, 3];
        let mut place = BTreeMap::new();
        let (mut offset, mut elements) = (0u64, Vec::new());
        match order {
            BufferOrder::BlockMajor => {
                (0..nl).for_each(|l| (0..nb).for_each(|b| (0..nh).for_each(|h| elements.push((l, b, h)))));
            }
            BufferOrder::HeadMajor => {
                (0..nh).for_each(|h| (0..nl).for_each(|l| (0..nb).for_each(|b| elements.push((l, b, h)))));
            }
        }
        for (layer, block, head) in elements {
            for slot in 0..bt {
                place.insert((layer, block, head, slot), offset);
                offset += u64::from(hd);
            }
        }
        assert_eq!(layout.elements(), Some(offset));
        for (start, len) in [(0, 5), (1, 3), (4, 1)] {
            for layer in 0..nl {
                let n_tokens = len * bt - 1;
                let view = layout.values(layer, Handle { start, len, reserved: len }, n_tokens).unwrap();
                for head in 0..nh {
                    let expected = |token: u32| place[&(layer, start + token / bt, head, token % bt)];
                    for token in 0..n_tokens {
                        assert_eq!(view.row(head, token), Some(expected(token)), "{order:?}");
                        if let Some([by_head, by_token, 1]) = view.dense() {
                            let dense = view.first + u64::from(head) * by_head + u64::from(token) * by_token;
                            assert_eq!(dense, expected(token), "{order:?}");
                        }
                    }
                    let mut rows = Vec::new();
                    for (first, n) in view.pieces(head) {
                        rows.extend((0..n).map(|i| first + u64::from(i * hd)));
                    }
                    assert_eq!(rows, (0..n_tokens).map(expected).collect::<Vec<_>>(), "{order:?}");
                }
                assert_eq!(view.dense().is_some(), order == BufferOrder::HeadMajor || len == 1);
            }
        }
    }
}

/// The source's dump: four sequences in 60 blocks. It reported 2048 MB of 8 GB; the correct figures are 480 MiB of 16
/// GiB.
#[test]
fn the_dump_has_right_figures() {
    let mut it = Simulation::new("first_fit", 2048, 16);
    for (seq, tokens) in [(1, 512), (2, 256), (3, 128), (4, 64)] {
        it.allocate(SeqId(seq), tokens, OutOfMemory::Reject).unwrap();
        it.append(SeqId(seq), tokens, CapacityExceeded::Error, true).unwrap();
    }
    let text = it.arena.report().text(Some((&SEVEN_B, 4))).to_string();
    let (head, map) = text.split_at(text.find("block map").unwrap());
    assert_eq!(
        head,
        "blocks: 60 of 2048 used, 1988 free, 16 tokens each (first_fit)\n\
         bytes: 480.00 MiB of 16.00 GiB used, 15.53 GiB free\n\
         fragmentation: external 0.00 (largest free run 1988 of 1988), internal 0.00\n\
         so far: 4 allocated, 0 freed, 0 evicted, 0 refused, 0 halted, 0 grown, 0 blocks copied\n\
         sequences: 4\n  \
           a 1: 512 of 512 tokens, blocks 0..32\n  \
           b 2: 256 of 256 tokens, blocks 32..48\n  \
           c 3: 128 of 128 tokens, blocks 48..56\n  \
           d 4: 64 of 64 tokens, blocks 56..60\n"
    );
    let lines: Vec<&str> = map.lines().collect();
    assert_eq!(lines.len(), 1 + 32);
    let first: String =
        ["a".repeat(32), "b".repeat(16), "c".repeat(8), "d".repeat(4), ".".repeat(4)].concat();
    assert_eq!(lines[1].trim_start(), format!("0 {first}"));
    assert_eq!(lines[32].trim_start(), format!("{} {}", 2048 - 64, ".".repeat(64)));
}

/// A map that would not fit on a page shows groups of blocks. Blocks that a buddy allocator reserves are shown as
/// their sequence's.
#[test]
fn large_maps_are_grouped() {
    let mut it = Simulation::new("buddy", 8192, 1);
    it.allocate(A, 5, OutOfMemory::Reject).unwrap();
    it.allocate(B, 2, OutOfMemory::Reject).unwrap();
    let text = it.arena.report().text(None).to_string();
    assert!(!text.contains("bytes:"), "{text}");
    assert!(text.contains("  a 1: 0 of 5 tokens, blocks 0..5, reserved up to 8\n"), "{text}");
    assert!(text.contains("4 blocks per character"), "{text}");
    let row = text.lines().find(|line| line.trim_start().starts_with("0 ")).unwrap();
    assert_eq!(row.trim_start(), format!("0 aa+{}", ".".repeat(61)));
}

/// Block events are neither reported nor stored unless recording is on.
#[test]
fn the_log_is_off_until_it_is_asked_for() {
    let mut arena = Arena::new(4, build("first_fit", 8)).unwrap();
    let log = |arena: &mut Arena| {
        let mut events = Vec::new();
        arena.drain_events(&mut events);
        events.iter().map(|e| (e.block, e.change.name(), e.reason.name())).collect::<Vec<_>>()
    };
    arena.allocate_for(A, 8, OutOfMemory::Reject).unwrap();
    assert_eq!(log(&mut arena), []);
    arena.watch(true);
    arena.allocate_for(B, 4, OutOfMemory::Reject).unwrap();
    arena.append(A, 5, CapacityExceeded::Error).unwrap().unwrap().commit();
    arena.append(A, 4, CapacityExceeded::Error).unwrap().unwrap().commit();
    assert_eq!(
        log(&mut arena),
        [
            (2, "alloc", "open"),
            (0, "free", "append"),
            (1, "free", "append"),
            (3, "move", "append"),
            (4, "move", "append"),
            (5, "alloc", "append"),
        ]
    );
    arena.watch(false);
    arena.free_for(B).unwrap();
    assert_eq!(log(&mut arena), []);
}
