//! Steps: what they cost, where they write, and what their queries read.
use crate::drive::{Drive, Sequence};
use kvist_cache::*;
use kvist_testing::reference::{Choices, visible_pairs};
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
            let cells = group.reads.span_of(item, slot).map(|cell| item.run.start + cell);
            read[query].extend(cells.map(|cell| memory[cell as usize]));
        }
    }
    read
}

impl Drive {
    /// What a step of chains must cost, block by block: the refusal for lack of space, and the copies in each group.
    fn expected_cost(&mut self, spans: &[Span<'_>]) -> (Option<Refused>, Vec<u32>) {
        let block = self.block();
        let mut expected = None;
        let mut expected_copies = vec![0; self.spec.groups.len()];
        for (g, expected_copies) in expected_copies.iter_mut().enumerate() {
            let (held, tables) = (self.held(g), self.tables(g));
            let mut needed = 0;
            let leaving = leaving(spans, &tables, block);
            for span in spans {
                let table = &tables[&span.seq];
                let New::Chain(n_tokens) = span.new else { panic!("only chains are written") };
                let end = span.start + n_tokens;
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
            let evictable = self.known[g].keys().filter(|block| !held.contains_key(block)).count() as u32;
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
        let (expected, expected_copies) = self.expected_cost(&spans);
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
            let (tables, held) = &tables_before[g];
            assert_eq!(group.copies.len() as u32, expected_copies[g], "copies in group {g}");
            let leaving = leaving(&spans, tables, block);
            let in_use = |cell: u32| {
                let at = cell / block;
                // After the ends of all users of the block, if they all write in this step.
                let private = leaving.get(&at).is_some_and(|ends| {
                    ends.len() as u32 == held[&at] && ends.iter().all(|&end| cell % block >= end)
                });
                let known = self.known[g].contains_key(&at);
                known || held.contains_key(&at) && !private
            };
            // For each token, its prefix, and the prefixes that it sees.
            let see = self.spec.groups[g].visibility;
            let mut queries = Vec::new();
            for (seq, tokens) in &new {
                let Sequence { salt, tokens: mut whole, .. } = self.sequences[seq].clone();
                for &token in tokens {
                    let position = whole.len() as u32;
                    whole.push(token);
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
}
