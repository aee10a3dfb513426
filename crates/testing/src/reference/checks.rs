//! What a plan says about its reads, compared with what the reference model sees.
use super::drive::Memory;
use super::{DeviceTable, Seen, n_tokens, visible_pairs};
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use std::collections::BTreeSet;

/// Checks that every query sees `seen`, each value once, in index order, in every form of the reads.
pub(super) fn check_reads(group: &GroupPlan, memory: &Memory, seen: &[Vec<Seen>], request: &StepRequest<'_>) {
    let reads = &group.reads;
    let n_queries = seen.len() as u32;
    let mut got = vec![Vec::new(); seen.len()];
    let sorted = reads.items.is_sorted_by_key(|item| item.first_index);
    assert!(sorted, "items are out of order: {:?}", reads.items);
    for item in &reads.items {
        assert!(item.run.len > 0 && item.n_queries > 0, "an empty item: {item:?}");
        assert!(item.run.end() <= group.cells_end, "{item:?} reads past cell {}", group.cells_end);
        for query in 0..item.n_queries {
            let token = reads.order[(item.first_query + query) as usize] as usize;
            for cell in reads.span_of(item, query).filter(|&cell| reads.sees(item, query, cell)) {
                let value = memory.cells[(item.run.start + cell) as usize];
                got[token].push(Seen { value, index: item.first_index + cell });
            }
        }
    }
    for (query, (got, seen)) in got.iter_mut().zip(seen).enumerate() {
        let ascending = got.is_sorted_by(|a, b| a.index < b.index);
        assert!(ascending, "query {query} meets its cells out of order: {got:?}\n{:?}", reads.items);
        got.sort_unstable();
        assert_eq!(got, seen, "query {query} sees other values than it must\n{:?}", reads.items);
    }

    let mut slots = reads.order.clone();
    slots.sort_unstable();
    assert!(slots.iter().copied().eq(0..n_queries), "query slots {:?}", reads.order);

    let mut first = 0;
    let mut visible = 0; // for each span, the cells that any of its queries sees
    for span in request.spans {
        let n_tokens = match span.new {
            New::Chain(n) => n as usize,
            New::Tree(parents) => parents.len(),
        };
        let values: BTreeSet<u64> = seen[first..first + n_tokens].iter().flatten().map(|s| s.value).collect();
        visible += values.len() as u64;
        first += n_tokens;
    }
    let read = reads.cells_read();
    assert!(read <= visible, "{read} cells are read, {visible} are visible\n{:?}", reads.items);

    let mut explicit = Vec::new();
    reads.explicit(n_queries, group.cells_end, &mut explicit);
    let rows = || explicit.chunks(group.cells_end as usize);
    for (row, seen) in rows().zip(seen) {
        let cells = row.iter().zip(&memory.cells).filter(|(sees, _)| **sees);
        let mut values: Vec<u64> = cells.map(|(_, value)| *value).collect();
        values.sort_unstable();
        assert!(
            values.iter().eq(seen.iter().map(|s| &s.value)),
            "the explicit mask shows {values:?} of {seen:?}"
        );
    }

    if let Some(window) = reads.as_window() {
        assert!(window.causal || n_queries == 1, "{window:?} of {n_queries} queries");
        for (query, (row, seen)) in (0..n_queries).zip(rows().zip(seen)) {
            let end = window.run.end() - (n_queries - 1 - query);
            let in_window = |cell: usize| (window.run.start as usize..end as usize).contains(&cell);
            assert!(
                row.iter().enumerate().all(|(cell, &sees)| sees == in_window(cell)),
                "{window:?} {query}"
            );
            let mut in_order = seen.clone();
            in_order.sort_unstable_by_key(|s| s.index);
            let cells = &memory.cells[window.run.start as usize..end as usize];
            assert!(
                cells.iter().eq(in_order.iter().map(|s| &s.value)),
                "{window:?} is not in position order"
            );
        }
    }
}

/// Checks that block tables of several sizes, where the cells are blocks, show every query `seen`. Blocks of one cell
/// always work, unless a query would see a token that was removed.
pub(super) fn check_tables(
    group: &GroupPlan,
    memory: &Memory,
    device: &mut DeviceTable,
    seen: &[Vec<Seen>],
    request: &StepRequest<'_>,
    visibility: Visibility,
    positions: &[u32],
) {
    let mut tables = BlockTables::default();
    for block in [1, 2, 3, 16] {
        if let Err(why) = group.tables(block, &mut tables) {
            let hides_a_token = request.spans.iter().scan(0, |first, span| {
                let queries = *first..*first + n_tokens(span) as usize;
                *first = queries.end;
                Some(queries.into_iter().any(|query| {
                    let sees = |c: &u32| visibility.sees(positions[query], *c);
                    let stored = seen[query].iter().filter(|seen| seen.index < span.start).count();
                    (0..span.start).filter(sees).count() != stored
                }))
            });
            let hides_a_token = hides_a_token.into_iter().any(|hides| hides);
            match why {
                NotBlocks::Removed { .. } => assert!(hides_a_token, "{why}"),
                NotBlocks::BlockSize { cache, asked } => assert!(!cache.is_multiple_of(asked), "{why}"),
                _ => assert!(block > 1, "{why}"),
            }
            continue;
        }
        let cells: Vec<u32> = group.writes.iter().flat_map(|run| run.cells()).collect();
        assert_eq!(tables.slots, cells);
        // The indices of nodes are their numbers there.
        let committed = request.spans.iter().flat_map(|span| {
            let end = if let New::Tree(_) = span.new { span.start } else { u32::MAX };
            (0..n_tokens(span)).map(move |_| end)
        });
        let pairs = visible_pairs(&tables, block, positions, visibility);
        for ((pairs, seen), end) in pairs.iter().zip(seen).zip(committed) {
            let place = |value: u64, index: u32| (value, (index < end).then_some(index));
            let found = pairs.iter().map(|&(index, cell)| place(memory.cells[cell as usize], index));
            let mut found: Vec<(u64, Option<u32>)> = found.collect();
            found.sort_unstable();
            let seen = seen.iter().map(|seen| place(seen.value, seen.index));
            assert!(seen.eq(found.iter().copied()), "{found:?} in block tables of {block}: {tables:?}");
        }
        if group.tables(16, &mut tables).is_ok() {
            device.update(group, &tables);
        }
    }
}
