//! Compaction: plans the cell moves after which every sequence lies in one run and the lowest cells are in use.
use crate::plan::CellCopy;
use crate::run::CellRun;

/// Marks a free cell.
const FREE: u32 = u32::MAX;

/// Plans one round towards the target layout: the cells of `wanted`, numbered from 0 in the order of their first
/// mention. `wanted` must name every occupied cell at least once. Copies go to free cells only, so the round may be
/// abandoned. A cell's place in the target layout is its home.
///
/// ```text
/// if any misplaced cell has a free home: move all that have
/// else: the misplaced cells are permuted among themselves. Clear the homes of the first half of them into free
///       cells, so that the next round can move their owners in
/// ```
///
/// It terminates: cells that are home stay, every copy except a clearing one reduces the number of misplaced cells,
/// and after a clearing round every cleared home receives its owner. Without any free cell nothing can be cleared,
/// and the round is empty. O(occupied cells) in time and memory.
pub(super) fn next_round(
    wanted: impl Iterator<Item = CellRun>,
    capacity: u32,
    high_water: u32,
    out: &mut Vec<CellCopy>,
) {
    let mut home = vec![FREE; high_water as usize];
    let mut owner = Vec::new(); // for each home: the cell whose token belongs there
    for cell in wanted.flat_map(|run| run.cells()) {
        if home[cell as usize] == FREE {
            home[cell as usize] = owner.len() as u32;
            owner.push(cell);
        }
    }
    let n_used = owner.len() as u32;
    let occupied = |cell: u32| home[cell as usize] != FREE; // homes lie below the high-water mark
    let misplaced = |to: u32| owner[to as usize] != to;

    for to in (0..n_used).filter(|&to| misplaced(to) && !occupied(to)) {
        push_copy(out, owner[to as usize], to);
    }
    if out.is_empty() {
        // Every home is occupied, so the occupied cells are exactly the homes, and all free cells lie above them.
        let n_misplaced = (0..n_used).filter(|&to| misplaced(to)).count() as u32;
        let clear = (capacity - n_used).min(n_misplaced.div_ceil(2));
        for (i, from) in (0..n_used).filter(|&to| misplaced(to)).take(clear as usize).enumerate() {
            push_copy(out, from, n_used + i as u32);
        }
    }
}

/// Appends the copy of one cell, merging it into the last copy if it continues that one.
fn push_copy(out: &mut Vec<CellCopy>, from: u32, to: u32) {
    match out.last_mut() {
        Some(last) if last.from + last.len == from && last.to + last.len == to => last.len += 1,
        _ => out.push(CellCopy { from, to, len: 1 }),
    }
}
