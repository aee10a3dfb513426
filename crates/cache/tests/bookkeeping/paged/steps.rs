//! Steps: what they cost, where they write, and what their queries read.
use super::drive::{Drive, Sequence};
use kvist_cache::*;
use kvist_testing::reference::{Choices, OwnedKept, visible_pairs};
use std::collections::{BTreeMap, BTreeSet};

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
/// Copies and writes as the plan says, and checks that no cell in use is touched. Every token sees itself last, so the
/// last value of its query is what its cell gets.
fn execute(group: &GroupPlan, memory: &mut [u64], queries: &[Vec<u64>], in_use: impl Fn(u32) -> bool) {
    for copy in &group.copies {
        for i in 0..copy.len {
            assert!(!in_use(copy.to + i), "{copy:?} copies onto a cell in use");
            memory[(copy.to + i) as usize] = memory[(copy.from + i) as usize];
        }
    }
    let cells: Vec<u32> = group.writes.iter().flat_map(|run| run.cells()).collect();
    assert_eq!(cells.len(), queries.len(), "a cell for every token");
    for (&cell, seen) in cells.iter().zip(queries) {
        assert!(!in_use(cell), "cell {cell} is written and in use");
        memory[cell as usize] = *seen.last().expect("a token sees itself");
    }
}

/// What each query reads, in order.
fn read(group: &GroupPlan, memory: &[u64], n_queries: usize) -> Vec<Vec<u64>> {
    let mut read = vec![Vec::new(); n_queries];
    for item in &group.reads.items {
        for slot in 0..item.n_queries {
            let query = group.reads.order[(item.first_query + slot) as usize] as usize;
            let cells = group.reads.span_of(item, slot).filter(|&cell| group.reads.sees(item, slot, cell));
            read[query].extend(cells.map(|cell| memory[(item.run.start + cell) as usize]));
        }
    }
    read
}

/// The new tokens of one sequence: a chain, or a draft tree if they have parents.
#[derive(Clone, Debug)]
struct NewTokens {
    seq: SeqId,
    start: u32,
    tokens: Vec<u32>,
    parents: Option<Vec<Option<NodeId>>>,
}

impl NewTokens {
    fn random(choices: &mut Choices<'_>, seq: SeqId, start: u32, block: u32) -> Self {
        let n_tokens = 1 + choices.below(2 * block + 3);
        let tokens = (0..n_tokens).map(|_| choices.below(3)).collect();
        let shape = choices.below(8);
        let parents = (0..n_tokens).map(|i| match shape {
            0 => i.checked_sub(1).map(NodeId),
            1 => i.checked_sub(1 + choices.below(3)).map(NodeId),
            _ => choices.below(i + 1).checked_sub(1).map(NodeId),
        });
        NewTokens { seq, start, tokens, parents: (shape < 4).then(|| parents.collect()) }
    }

    fn span(&self) -> Span<'_> {
        match &self.parents {
            None => Span::chain(self.seq, self.start, self.tokens.len() as u32),
            Some(parents) => Span { seq: self.seq, start: self.start, new: New::Tree(parents) },
        }
    }

    /// The tokens that token `i` comes after, and the token itself.
    fn history(&self, i: usize) -> Vec<usize> {
        let Some(parents) = &self.parents else { return (0..=i).collect() };
        let up = |&node: &usize| parents[node].map(|parent| parent.0 as usize);
        let mut path: Vec<usize> = std::iter::successors(Some(i), up).collect();
        path.reverse();
        path
    }

    /// What a commit may keep: mostly the beginning of a chain or the path to a node.
    fn keep(&self, choices: &mut Choices<'_>) -> OwnedKept {
        let n = choices.below(self.tokens.len() as u32 + 1);
        match &self.parents {
            None => OwnedKept::First(n),
            Some(_) if choices.one_in(40) => OwnedKept::All,
            Some(_) if choices.one_in(40) => OwnedKept::Path(vec![NodeId(n)]),
            Some(_) if n == 0 => OwnedKept::Path(Vec::new()),
            Some(_) => {
                let path = self.history(n as usize - 1).into_iter();
                OwnedKept::Path(path.map(|node| NodeId(node as u32)).collect())
            }
        }
    }

    /// Whether the cache must accept `kept`.
    fn can_keep(&self, kept: &OwnedKept) -> bool {
        match (kept, &self.parents) {
            (OwnedKept::First(_), None) => true,
            (OwnedKept::Path(path), Some(_)) => {
                let Some(last) = path.last() else { return true };
                let last = last.0 as usize;
                last < self.tokens.len()
                    && self.history(last).iter().map(|&node| NodeId(node as u32)).eq(path.iter().copied())
            }
            _ => false,
        }
    }

    fn kept(&self, kept: &OwnedKept) -> Vec<u32> {
        match kept {
            OwnedKept::All => self.tokens.clone(),
            OwnedKept::First(n) => self.tokens[..*n as usize].to_vec(),
            OwnedKept::Path(path) => path.iter().map(|node| self.tokens[node.0 as usize]).collect(),
        }
    }
}

impl Drive {
    /// What a step must cost, block by block: the refusal for lack of space, and the copies in each group.
    fn expected_cost(&mut self, spans: &[Span<'_>]) -> (Option<Refused>, Vec<u32>) {
        let block = self.block();
        let mut expected = None;
        let mut expected_copies = vec![0; self.spec.groups.len()];
        for (g, expected_copies) in expected_copies.iter_mut().enumerate() {
            let (in_use, tables) = (self.in_use(g), self.tables(g));
            let mut needed = 0;
            let leaving = leaving(spans, &tables, block);
            for span in spans {
                let table = &tables[&span.seq];
                let n_tokens = match span.new {
                    New::Chain(n) => n,
                    New::Tree(parents) => parents.len() as u32,
                };
                let end = span.start + n_tokens;
                needed += end.div_ceil(block) - table.len() as u32;
            }
            for (tail, ends) in &leaving {
                let all_leave = ends.len() as u32 == in_use[tail] && !self.known[g].contains_key(tail);
                let n_copies = ends.len() as u32 - u32::from(all_leave);
                self.n_copies_saved += u32::from(all_leave && ends.len() > 1);
                *expected_copies += n_copies;
                needed += n_copies;
            }
            let total = self.spec.groups[g].capacity_tokens / block;
            let used: BTreeSet<u32> = in_use.keys().chain(self.known[g].keys()).copied().collect();
            let evictable = self.known[g].keys().filter(|block| !in_use.contains_key(block)).count() as u32;
            let free = total - used.len() as u32;
            if needed > free {
                let (needed, free, reclaimable) = (needed * block, free * block, evictable * block);
                expected = Some(Refused::NoSpace { group: GroupId(g as u16), needed, free, reclaimable });
                break;
            }
        }
        (expected, expected_copies)
    }

    pub(super) fn write(&mut self, choices: &mut Choices<'_>) {
        let n_spans = 1 + choices.below(4);
        let mut new: Vec<NewTokens> = Vec::new();
        for _ in 0..n_spans {
            let n = self.sequences.len() as u32;
            let Some((&seq, sequence)) = self.sequences.iter().nth(choices.below(n) as usize) else { return };
            if new.iter().all(|new| new.seq != seq) {
                new.push(NewTokens::random(choices, seq, sequence.tokens.len() as u32, self.block()));
            }
        }
        let spans: Vec<Span<'_>> = new.iter().map(NewTokens::span).collect();
        let abandon = choices.one_in(6);
        self.log.push(format!("step {new:?}{}", if abandon { ", abandoned" } else { "" }));
        let block = self.block();
        let (expected, expected_copies) = self.expected_cost(&spans);
        let before = self.cache.report();
        let tables_before: Vec<_> =
            (0..self.spec.groups.len()).map(|g| (self.tables(g), self.in_use(g))).collect();
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
        // Some plans have no tables, and some tables are never shown to the device.
        let (has_tables, is_shown) = (!choices.one_in(6), !choices.one_in(8));
        if has_tables {
            step.with_tables();
        }
        let plan = step.with_reads();
        let (mut positions, mut lowered) = (Vec::new(), BlockTables::default());
        plan.positions(&mut positions);
        if has_tables && is_shown {
            for (g, device) in (0..).zip(&mut self.devices) {
                plan.group(GroupId(g)).tables(block, &mut lowered).expect("blocks of the cache");
                device.update(plan.group(GroupId(g)), &lowered);
            }
        }
        for (g, memory) in self.memories.iter_mut().enumerate() {
            let group = plan.group(GroupId(g as u16));
            let (tables, in_use) = &tables_before[g];
            assert_eq!(group.copies.len() as u32, expected_copies[g], "copies in group {g}");
            let leaving = leaving(&spans, tables, block);
            let in_use = |cell: u32| {
                let at = cell / block;
                // After the ends of all users of the block, if they all write in this step.
                let private = leaving.get(&at).is_some_and(|ends| {
                    ends.len() as u32 == in_use[&at] && ends.iter().all(|&end| cell % block >= end)
                });
                let known = self.known[g].contains_key(&at);
                known || in_use.contains_key(&at) && !private
            };
            // For each token, its prefix, and the prefixes that it sees.
            let see = self.spec.groups[g].visibility;
            let mut queries = Vec::new();
            for new in &new {
                let Sequence { salt, tokens: before, .. } = &self.sequences[&new.seq];
                for i in 0..new.tokens.len() {
                    let mut whole = before.clone();
                    whole.extend(new.history(i).into_iter().map(|i| new.tokens[i]));
                    let position = whole.len() as u32 - 1;
                    let seen = (0..=position).filter(|&p| see.sees(position, p));
                    let seen = seen.map(|p| self.prefixes.number(salt, &whole[..=p as usize]));
                    queries.push(seen.collect::<Vec<u64>>());
                }
            }
            execute(group, memory, &queries, in_use);
            assert_eq!(read(group, memory, queries.len()), queries, "group {g}: {:?}", group.reads.items);
            let size = choices.of(&[block, block, 1]);
            if !has_tables {
                assert_eq!(group.tables(size, &mut lowered), Err(NotBlocks::NotFilled));
                continue;
            }
            group.tables(size, &mut lowered).expect("the cache has blocks of this size, or of a multiple");
            for (i, span) in spans.iter().enumerate().filter(|_| size == block) {
                let full = &tables[&span.seq][..(span.start / block) as usize];
                let full = full.iter().map(|block| block.unwrap_or(NO_BLOCK));
                assert!(full.eq(lowered.blocks_of(i).iter().copied().take((span.start / block) as usize)));
            }
            let pairs = visible_pairs(&lowered, size, &positions, see);
            let bytes =
                |pairs: Vec<(u32, u32)>| pairs.iter().map(|&(_, cell)| memory[cell as usize]).collect();
            let by_table: Vec<Vec<u64>> = pairs.into_iter().map(bytes).collect();
            assert_eq!(by_table, queries, "by the block table of group {g}: {lowered:?}");
        }
        if abandon {
            drop(step);
            assert_eq!(self.cache.report(), before, "an abandoned step changed something");
            return;
        }
        let mut kept: Vec<OwnedKept> = new.iter().map(|_| OwnedKept::All).collect();
        if choices.one_in(3) {
            // A tree of which no path is chosen keeps nothing.
            for (_, kept) in new.iter().zip(&mut kept).filter(|(new, _)| new.parents.is_some()) {
                *kept = OwnedKept::Path(Vec::new());
            }
            step.commit();
        } else {
            kept = new.iter().map(|new| new.keep(choices)).collect();
            self.log.push(format!("kept {kept:?}"));
            let can_keep = new.iter().zip(&kept).all(|(new, kept)| new.can_keep(kept));
            let asked: Vec<Kept<'_>> = kept.iter().map(OwnedKept::as_kept).collect();
            let mut moves = MovePlan::default();
            let moved = step.kept_moves(&asked, &mut moves);
            assert_eq!(moved.is_ok(), can_keep, "{moved:?}");
            if !moves.groups().is_empty() {
                self.n_moves += 1;
            }
            for (group, copies) in moves.groups() {
                let writes = &step.plan().group(*group).writes;
                let is_new = |cell: u32| writes.iter().any(|run| run.contains(cell));
                let memory = &mut self.memories[group.0 as usize];
                for copy in copies {
                    assert!(copy.from.abs_diff(copy.to) >= copy.len, "{copy:?} overlaps itself");
                    for i in 0..copy.len {
                        assert!(
                            is_new(copy.from + i) && is_new(copy.to + i),
                            "{copy:?} leaves the new cells"
                        );
                        memory[(copy.to + i) as usize] = memory[(copy.from + i) as usize];
                    }
                }
            }
            if choices.one_in(12) {
                drop(step);
                assert_eq!(self.cache.report(), before, "a step abandoned after its moves changed something");
                return;
            }
            let done = step.commit_kept(&asked);
            assert_eq!(done.is_ok(), can_keep, "{done:?}");
            if !can_keep {
                assert_eq!(self.cache.report(), before, "a refused commit changed something");
                return;
            }
        }
        for (new, kept) in new.iter().zip(&kept) {
            self.sequences.get_mut(&new.seq).expect("it is open").tokens.extend(new.kept(kept));
        }
    }
}
