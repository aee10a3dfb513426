//! Block tables, read the way a kernel reads them, and a table that stays on a device.
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use std::collections::BTreeMap;

/// The (index, cell) pairs that each query sees according to block tables of blocks of `block` cells, in index order.
/// `positions` are those of the batch ([`StepPlan::positions`]). Panics if a query sees an index without a block.
pub fn visible_pairs(
    tables: &BlockTables,
    block: u32,
    positions: &[u32],
    visibility: Visibility,
) -> Vec<Vec<(u32, u32)>> {
    let mut pairs = Vec::new();
    for (i, &kv_len) in tables.kv_len.iter().enumerate() {
        let (blocks, n_masked) = (tables.blocks_of(i), tables.n_masked(i));
        let first_masked = if n_masked == 0 { kv_len } else { kv_len - n_masked };
        for (query, token) in (0..).zip(tables.query_start[i]..tables.query_start[i + 1]) {
            let sees = |index: u32| match index.checked_sub(first_masked) {
                Some(node) => tables.mask(i, query, node),
                None => visibility.sees(positions[token as usize], index),
            };
            let cell = |index: u32| {
                let at = blocks[(index / block) as usize];
                assert_ne!(at, NO_BLOCK, "index {index} of span {i} is visible and has no block: {tables:?}");
                (index, at * block + index % block)
            };
            pairs.push((0..kv_len).filter(|&index| sees(index)).map(cell).collect());
        }
    }
    pairs
}

/// A block table that stays on a device and takes edits.
#[derive(Debug, Default)]
pub struct DeviceTable {
    epoch: u64,
    entries: BTreeMap<(u32, u32), u32>,
    /// Number of tables that were sent whole, and of those that came as edits.
    pub n_whole: u64,
    /// See `n_whole`.
    pub n_edited: u64,
}

impl DeviceTable {
    /// Takes the edits of a plan that has tables, and compares the rows of its batch with the whole tables. Does nothing
    /// for kinds without block tables of their own. Returns the number of edits.
    pub fn update(&mut self, group: &GroupPlan, tables: &BlockTables) -> usize {
        let Some(epoch) = group.table_epoch() else {
            assert!(group.table_rows().is_empty() && !group.edits_since(self.epoch, &mut Vec::new()));
            return 0;
        };
        let mut edits = Vec::new();
        if group.edits_since(self.epoch, &mut edits) {
            self.n_edited += 1;
        } else {
            self.entries.clear();
            self.n_whole += 1;
        }
        self.epoch = epoch;
        self.entries.extend(edits.iter().map(|edit| ((edit.row, edit.column), edit.block)));
        assert!(group.edits_since(epoch, &mut Vec::new()), "a table is its own successor");
        for (i, &row) in group.table_rows().iter().enumerate() {
            for (column, block) in (0..).zip(tables.blocks_of(i)) {
                let here = self.entries.get(&(row, column));
                assert_eq!(
                    here,
                    Some(block),
                    "column {column} of row {row}, {} edits: {edits:?}",
                    edits.len()
                );
            }
        }
        edits.len()
    }
}
