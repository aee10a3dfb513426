//! Runs random operations on a real cache and its reference model, over a simulated memory, and compares them after
//! each operation.
use super::checks::{check_reads, check_tables};
use super::{Choices, DeviceTable, Model, Operation, ReferenceCache, StepEnd};
use kvist_cache::kinds::{self, GroupSpec, KINDS, Visibility};
use kvist_cache::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Content of a cell that no step has written, or that an abandoned step has written.
const GARBAGE: u64 = u64::MAX;

/// The simulated memory of one layer group: a value per cell.
#[derive(Default)]
pub(super) struct Memory {
    pub cells: Vec<u64>,
    /// The cell of each live value, according to the plans.
    places: BTreeMap<u64, u32>,
    /// For each cell, whether it stores a live value.
    occupied: Vec<bool>,
}

impl Memory {
    fn copy(&mut self, copies: &[CellCopy]) {
        for copy in copies {
            for i in 0..copy.len {
                let (from, to) = ((copy.from + i) as usize, (copy.to + i) as usize);
                assert!(!self.occupied[to], "{copy:?} copies onto occupied cell {to}");
                self.cells[to] = self.cells[from];
            }
        }
    }
}

/// A cache, its reference model, and the memory that a backend would have. Every check is an assertion; on a panic,
/// the last operations are printed.
///
/// After each operation, these are checked: the report's figures equal the model's; a refusal is the one that the rules
/// require, and changed nothing; a step wrote to free cells only; every query saw exactly what the model says, each
/// value once, in sequence order; the fast path, where available, agrees with the explicit mask; no more cells were
/// read than are visible; a dropped step or round of moves changed nothing; a compaction terminates, and leaves the
/// cells dense.
pub struct Drive {
    kind: &'static str,
    model: Model,
    groups: Vec<GroupSpec>,
    cache: Cache,
    plan: StepPlan,
    moves: MovePlan,
    reference: ReferenceCache,
    memories: Vec<Memory>,
    device_tables: Vec<DeviceTable>,
    n_ids: u32,
    /// Sequences share prefixes only. Then every cell is read once, however many sequences see it.
    shares_prefixes: bool,
    last_operations: VecDeque<Operation>,
}

/// Drives the kind `name` until `choices` run out. Returns the number of operations.
pub fn replay(name: &str, choices: &mut Choices<'_>) -> u64 {
    let mut drive = Drive::new(name, choices);
    let mut n_operations = 0;
    while choices.go_on() {
        drive.operate(choices);
        n_operations += 1;
    }
    n_operations
}

impl Drop for Drive {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("a drive of {} over {:?} failed; its last operations:", self.kind, self.groups);
            for operation in &self.last_operations {
                eprintln!("  {operation:?}");
            }
        }
    }
}

impl Drive {
    /// Makes a cache of the kind `name` with one to three small layer groups.
    pub fn new(name: &str, choices: &mut Choices<'_>) -> Self {
        let model = Model::of(name).unwrap_or_else(|| panic!("the reference knows no kind {name}"));
        let capacity_tokens = choices.of(&[8, 12, 16, 17, 31, 40, 64, 100, 128, 200]);
        let max_step_tokens = 1 + choices.below(12);
        let n_groups = choices.of(&[1, 1, 2, 3]);
        let groups: Vec<GroupSpec> = (0..n_groups)
            .map(|_| {
                let windowed = model == Model::Ring || choices.one_in(2);
                let window = windowed.then(|| 1 + choices.below(30));
                let sinks = if windowed { choices.of(&[0, 0, 1, 4, 20]) } else { 0 };
                GroupSpec { capacity_tokens, visibility: Visibility { window, sinks }, max_step_tokens }
            })
            .collect();
        let n_ids = if choices.one_in(16) { 70 } else { 2 + choices.below(6) };
        Drive::over(name, groups, n_ids)
    }

    /// Makes a cache of the kind `name` with these layer groups, driven with sequence ids below `n_ids`.
    pub fn over(name: &str, groups: Vec<GroupSpec>, n_ids: u32) -> Self {
        let model = Model::of(name).unwrap_or_else(|| panic!("the reference knows no kind {name}"));
        let kind = KINDS.iter().find(|kind| kind.name == name).expect("the reference knows only kinds").name;
        let build = |g| kinds::build(kind, g).unwrap_or_else(|e| panic!("{g:?}: {e}"));
        let cache = Cache::new(groups.iter().map(build).collect());
        let memories = cache.report().into_iter().map(|report| Memory {
            cells: vec![GARBAGE; report.capacity_cells as usize],
            places: BTreeMap::new(),
            occupied: vec![false; report.capacity_cells as usize],
        });
        Drive {
            kind,
            model,
            memories: memories.collect(),
            reference: ReferenceCache::new(model, &groups),
            device_tables: groups.iter().map(|_| DeviceTable::default()).collect(),
            groups,
            cache,
            plan: StepPlan::default(),
            moves: MovePlan::default(),
            n_ids,
            shares_prefixes: true,
            last_operations: VecDeque::new(),
        }
    }

    /// The cache, for inspection.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }
    /// The reference model, for inspection.
    pub fn reference(&self) -> &ReferenceCache {
        &self.reference
    }

    /// Chooses an operation and runs it.
    pub fn operate(&mut self, choices: &mut Choices<'_>) {
        let n_free = match self.model {
            Model::Ring => self.groups[0].max_step_tokens + 1,
            _ => self.cache.capacity_cells()[0] - self.cache.report()[0].used_cells,
        };
        let mut operation = Operation::choose(choices, self.model, self.n_ids, n_free, &self.reference);
        operation.choose_kept(choices, &self.reference);
        self.perform(operation);
    }

    /// Runs an operation on cache and model, and compares them.
    pub fn perform(&mut self, operation: Operation) {
        if self.last_operations.len() == 40 {
            self.last_operations.pop_front();
        }
        self.last_operations.push_back(operation.clone());
        let before = self.cache.report();
        let changed = match operation {
            Operation::Step { spans, fate, kept } => {
                let spans: Vec<Span<'_>> = spans.iter().map(|span| span.as_span()).collect();
                let kept: Vec<Kept<'_>> = kept.iter().map(|kept| kept.as_kept()).collect();
                self.step(&StepRequest { spans: &spans }, fate, &kept, &before)
            }
            Operation::MoveRound { fate } => self.move_round(fate),
            Operation::Compact => self.compact(),
            Operation::Clear => {
                self.cache.clear();
                self.reference.clear();
                true
            }
            verb => self.verb(verb),
        };
        if !changed {
            assert_eq!(self.cache.report(), before, "something changed that was refused or dropped");
        }
        if self.reference.sequences().all(|seq| self.reference.seq_len(seq) == Some(0)) {
            self.shares_prefixes = true;
        }
        self.compare();
    }

    fn verb(&mut self, verb: Operation) -> bool {
        let Drive { cache, reference, model, .. } = self;
        assert_eq!(cache.rewinds().is_some(), *model == Model::Contiguous, "whether it rewinds");
        assert_eq!(cache.sequences().is_some(), model.has_many_sequences(), "whether it has sequences");
        assert_eq!(cache.trees().is_some(), *model == Model::Tree, "whether it has trees");
        assert_eq!(
            cache.verifies_trees(),
            matches!(*model, Model::Tree | Model::Paged),
            "whether it verifies them"
        );
        const CHECKED: &str = "the drive asks only for capabilities that its model has";
        let (got, expected) = match &verb {
            Operation::Rewind { len } => {
                (cache.rewinds().expect(CHECKED).rewind(*len), reference.rewind(*len))
            }
            Operation::CommitPath { seq, accepted } => {
                let mut trees = cache.trees().expect(CHECKED);
                assert_eq!(trees.n_nodes(*seq), reference.n_nodes(*seq), "nodes of sequence {seq}");
                (trees.commit_path(*seq, accepted), reference.commit_path(*seq, accepted))
            }
            many => {
                let mut sequences = cache.sequences().expect(CHECKED);
                match *many {
                    Operation::New { seq } => (sequences.seq_new(seq), reference.seq_new(seq)),
                    Operation::Copy { src, dst, from, until } => {
                        self.shares_prefixes &= from == 0;
                        (sequences.seq_cp(src, dst, from, until), reference.seq_cp(src, dst, from, until))
                    }
                    Operation::Remove { seq, from, until } => {
                        let next = reference.next_position(seq).unwrap_or(0);
                        self.shares_prefixes &= until >= next;
                        (sequences.seq_rm(seq, from, until), reference.seq_rm(seq, from, until))
                    }
                    Operation::Keep { seq, from, until } => {
                        self.shares_prefixes &= from == 0;
                        (sequences.seq_keep(seq, from, until), reference.seq_keep(seq, from, until))
                    }
                    ref other => panic!("{other:?} is no verb"),
                }
            }
        };
        assert_eq!(got, expected, "{verb:?}");
        got.is_ok()
    }

    /// Returns whether the step was committed. `kept` has one entry per span; if it is empty, all tokens are kept.
    fn step(
        &mut self,
        request: &StepRequest<'_>,
        fate: StepEnd,
        kept: &[Kept<'_>],
        before: &[Report],
    ) -> bool {
        let Drive { cache, plan, reference, memories, device_tables, groups, shares_prefixes, .. } = self;
        let expected = reference.refusal(request);
        assert_eq!(cache.can_run(request, plan).err().map(mark), expected.clone().map(mark), "a dry run");
        let mut step = match Step::begin(cache, request, plan) {
            Err(refused) => {
                assert_eq!(Some(mark(refused)), expected.map(mark), "a refusal");
                return false;
            }
            Ok(step) => step,
        };
        assert_eq!(expected, None, "the step was accepted");
        if fate == StepEnd::Drop {
            return false;
        }
        let new_values = reference.new_values(request);
        let after = reference.executed(request);
        step.with_tables();
        let plan = step.with_reads();
        let mut positions = Vec::new();
        plan.positions(&mut positions);
        assert_eq!(positions, after.positions_of_last(request), "positions of the batch");
        for (g, memory) in memories.iter_mut().enumerate() {
            let group = plan.group(GroupId(g as u16));
            memory.copy(&group.copies);
            let cells: Vec<u32> = group.writes.iter().flat_map(|run| run.cells()).collect();
            let mut written_end = before[g].high_water;
            assert_eq!(cells.len() as u64, new_values.end - new_values.start, "cells written by the batch");
            assert_eq!(cells.iter().collect::<BTreeSet<_>>().len(), cells.len(), "written twice: {cells:?}");
            for (&cell, value) in cells.iter().zip(new_values.clone()) {
                assert!(!memory.occupied[cell as usize], "cell {cell} is written and was not free");
                memory.cells[cell as usize] = value;
                written_end = written_end.max(cell + 1);
            }
            assert_eq!(group.cells_end, written_end, "cells that the pool must hold");
            let seen = after.seen_by_last(request, groups[g].visibility);
            check_reads(group, memory, &seen, request);
            check_tables(
                group,
                memory,
                &mut device_tables[g],
                &seen,
                request,
                groups[g].visibility,
                &positions,
            );
            let alone = request.spans.len() == 1;
            if alone || *shares_prefixes && groups[g].visibility.window.is_none() {
                let bound = u64::from(before[g].used_cells) + cells.len() as u64;
                let read = group.reads.cells_read();
                assert!(read <= bound, "{read} cells are read, {bound} are in use");
            }
            for (&cell, value) in cells.iter().zip(new_values.clone()) {
                if fate == StepEnd::Commit {
                    memory.places.insert(value, cell);
                } else {
                    memory.cells[cell as usize] = GARBAGE;
                }
            }
        }
        if fate != StepEnd::Commit {
            return false;
        }
        if kept.is_empty() {
            step.commit();
            reference.apply(request);
            return true;
        }
        commit_kept(step, reference, request, kept)
    }

    /// Returns whether anything was moved and committed.
    fn move_round(&mut self, fate: StepEnd) -> bool {
        let Some(relocation) = Relocation::begin(&mut self.cache, &mut self.moves) else { return false };
        if fate == StepEnd::Drop {
            return false;
        }
        for (group, copies) in relocation.moves().groups() {
            let memory = &mut self.memories[group.0 as usize];
            let mut touched = BTreeSet::new();
            for copy in copies {
                assert!(copy.len > 0, "an empty copy");
                for i in 0..copy.len {
                    assert!(memory.occupied[(copy.from + i) as usize], "{copy:?} moves a free cell");
                    assert!(touched.insert(copy.from + i), "{copy:?} meets another copy at its source");
                    assert!(touched.insert(copy.to + i), "{copy:?} meets another copy at its target");
                }
            }
            memory.copy(copies);
            if fate == StepEnd::Commit {
                let to = |cell: u32| copies.iter().find(|c| (c.from..c.from + c.len).contains(&cell));
                for cell in memory.places.values_mut() {
                    *cell = to(*cell).map_or(*cell, |copy| copy.to + (*cell - copy.from));
                }
            }
        }
        if fate == StepEnd::Commit {
            relocation.commit();
        }
        fate == StepEnd::Commit
    }

    /// Runs rounds until nothing is left to move.
    fn compact(&mut self) -> bool {
        let most_rounds = self.cache.report().iter().map(|r| 2 * r.used_cells).max().unwrap_or(0);
        let mut n_rounds = 0;
        while self.move_round(StepEnd::Commit) {
            self.compare();
            n_rounds += 1;
            assert!(n_rounds <= most_rounds, "a compaction of {most_rounds}/2 cells takes {n_rounds} rounds");
        }
        for (g, memory) in self.memories.iter().enumerate() {
            let mut next = 0;
            let report = &self.cache.report()[g];
            if report.used_cells == report.capacity_cells {
                continue; // without a free cell, compaction may stop anywhere
            }
            let mut placed = BTreeSet::new();
            for seq in self.reference.sequences() {
                let stored = self.reference.stored(seq, self.groups[g].visibility).unwrap_or_default();
                let nodes = self.reference.node_values(seq);
                for value in stored.into_iter().map(|(_, value)| value).chain(nodes) {
                    if placed.insert(value) {
                        assert_eq!(memory.places[&value], next, "home of value {value} of sequence {seq}");
                        next += 1;
                    }
                }
            }
            assert_eq!(report.high_water, report.used_cells, "the lowest cells are in use");
        }
        n_rounds > 0
    }

    /// Compares every figure that the cache reports with the model.
    fn compare(&mut self) {
        for seq in (0..self.n_ids + 1).map(SeqId) {
            assert_eq!(self.cache.seq_len(seq), self.reference.seq_len(seq), "length of sequence {seq}");
            let next = self.reference.next_position(seq);
            assert_eq!(self.cache.next_position(seq), next, "next position of sequence {seq}");
        }
        for (g, report) in self.cache.report().into_iter().enumerate() {
            let (visibility, memory) = (self.groups[g].visibility, &mut self.memories[g]);
            let live = self.reference.live(visibility);
            memory.places.retain(|value, _| live.contains(value));
            memory.occupied.fill(false);
            memory.places.values().for_each(|&cell| memory.occupied[cell as usize] = true);
            let high_water = memory.occupied.iter().rposition(|&o| o).map_or(0, |cell| cell as u32 + 1);
            let sequences = self.reference.sequences().map(|seq| {
                let stored = self.reference.stored(seq, visibility).expect("it is live");
                let cells = self.cache.stored_cells(GroupId(g as u16), seq).into_iter();
                let cells = cells.flat_map(|(first, run)| (first..).zip(run.cells()));
                let places = stored.iter().map(|(position, value)| (*position, memory.places[value]));
                assert!(cells.eq(places), "cells of sequence {seq} in layer group {g}");
                let mut n_extents = 0;
                let mut after = None;
                for (position, value) in &stored {
                    let cell = memory.places[value];
                    assert_eq!(memory.cells[cell as usize], *value, "bytes of position {position} of {seq}");
                    n_extents += u32::from(after != Some((*position, cell)));
                    after = Some((position + 1, cell + 1));
                }
                SequenceReport {
                    seq,
                    len: stored.len() as u32,
                    next_position: self.reference.next_position(seq).expect("it is live"),
                    n_nodes: self.reference.n_nodes(seq).expect("it is live"),
                    n_extents,
                }
            });
            let expected = Report {
                capacity_cells: memory.cells.len() as u32,
                used_cells: live.len() as u32,
                high_water,
                sequences: sequences.collect(),
                blocks: None,
            };
            assert_eq!(report, expected, "report of layer group {g}");
        }
    }
}

/// Clears the wording of a refusal, so that only its figures are compared.
/// Commits the tokens of `kept` in both, and compares. Returns whether the cache accepted them.
fn commit_kept(
    step: Step<'_>,
    reference: &mut ReferenceCache,
    request: &StepRequest<'_>,
    kept: &[Kept<'_>],
) -> bool {
    let mut after = reference.clone();
    let expected = after.apply_kept(request, kept);
    assert_eq!(step.commit_kept(kept).map_err(mark), expected.clone().map_err(mark), "{kept:?}");
    if expected.is_ok() {
        *reference = after;
    }
    expected.is_ok()
}

fn mark(refused: Refused) -> Refused {
    match refused {
        Refused::Unsupported(_) => Refused::Unsupported(""),
        other => other,
    }
}
