//! K and V by position: out of a cache, and into one.
use super::seen_by;
use crate::memory::CacheConfig;
use crate::runner::Runner;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, CellRun, GroupId, SeqId, Span, Step, StepPlan, StepRequest};
use kvist_device::{DeviceError, HostBlock, Layout, Storage, Transfer, Transfers, Values};
use kvist_model::Error;

/// The stored positions of a layer group, ascending, and their rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    pub positions: Vec<u32>,
    /// K and V of each layer that owns them, in the order of [`sides`]: `[positions, width]`.
    pub sides: Vec<Vec<u8>>,
}

impl Rows {
    pub fn has(&self, position: u32) -> bool {
        self.positions.binary_search(&position).is_ok()
    }
    /// Whether all that a query at position `at` sees before itself is among them. Otherwise tokens in the middle were removed.
    pub fn have_all_seen_at(&self, at: u32, visibility: Visibility) -> bool {
        seen_by(visibility, at).all(|position| self.has(position))
    }
}

impl GroupRows {
    pub fn has(&self, position: u32) -> bool {
        match self {
            GroupRows::Copied(rows) => rows.has(position),
            GroupRows::InPlace => true,
        }
    }
}

/// Where the rows of a layer group come from.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupRows {
    Copied(Rows),
    /// Every position has the cell of its number, and its rows are there already.
    InPlace,
}

/// K or V of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideSpec {
    pub layer: usize,
    pub keys: bool,
    pub heads: u32,
    /// Elements of a row, and its bytes.
    pub dim: u32,
    pub row_bytes: usize,
}

impl SideSpec {
    /// Bytes of a position.
    pub fn width(&self) -> usize {
        self.heads as usize * self.row_bytes
    }
}

/// What a block of a layer group consists of, in order.
pub fn sides(layout: &Layout, (k, v): (Storage, Storage), group: GroupId) -> Vec<SideSpec> {
    let owners = layout.owners().filter(|(_, layer)| layer.group == group);
    owners
        .flat_map(|(l, layer)| {
            let side = |keys, storage: Storage, dim| SideSpec {
                layer: l,
                keys,
                heads: layer.n_kv_heads,
                dim,
                row_bytes: storage.row_bytes(dim) as usize,
            };
            let values = (layer.values == Values::Stored).then(|| side(false, v, layer.v_dim));
            [Some(side(true, k, layer.k_dim)), values]
        })
        .flatten()
        .collect()
}

/// Neighbouring cells whose rows are neighbours too.
struct Run {
    first_row: usize,
    cells: CellRun,
}

/// Cuts cells, one per row, into runs of at most `most` rows.
fn runs(cells: impl Iterator<Item = (usize, u32)>, most: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (row, cell) in cells {
        match runs.last_mut() {
            Some(Run { first_row, cells })
                if cells.end() == cell
                    && *first_row + cells.len as usize == row
                    && (cells.len as usize) < most =>
            {
                cells.len += 1;
            }
            _ => runs.push(Run { first_row: row, cells: CellRun { start: cell, len: 1 } }),
        }
    }
    runs
}

const NOT_IN_ORDER: &str = "this kind of cache does not store a text's positions in order: use --kind paged";

/// Bytes per transfer: bounds the memory that a copy takes.
const TRANSFER: usize = 4 << 20;

/// Rows of so many bytes per transfer.
fn rows_at_once(width: usize) -> usize {
    (TRANSFER / width.max(1)).clamp(1, 4096)
}

/// The parts of a block that belong to each side: (side, first byte, bytes).
pub fn parts(sides: &[SideSpec], rows: usize) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
    let mut first = 0;
    sides.iter().enumerate().map(move |(i, side)| {
        let part = (i, first, rows * side.width());
        first += part.2;
        part
    })
}

fn wait(transfers: &mut Transfers<'_>, begun: &Transfer) -> Result<HostBlock, DeviceError> {
    loop {
        if let Some(done) = transfers.finished(begun) {
            return done;
        }
        std::thread::yield_now();
    }
}

/// The cache of a session or of the serving engine, with its memory.
pub(crate) struct CacheRows<'c> {
    pub cache: &'c mut Cache,
    pub plan: &'c mut StepPlan,
    pub runner: &'c mut Runner,
    pub config: &'c CacheConfig,
}

impl CacheRows<'_> {
    pub(crate) fn sides_of(&self, group: usize) -> Vec<SideSpec> {
        let storages = (self.config.k, self.config.v);
        sides(self.runner.model.layout(), storages, GroupId(group as u16))
    }

    /// The positions of `seq` before `end` that `wants` says of a layer group with this visibility, with their cells, ascending; by
    /// layer group. Positions that the cache does not store are not among them.
    pub(crate) fn places(
        &self,
        seq: SeqId,
        end: u32,
        wants: impl Fn(Visibility, u32) -> bool,
    ) -> Vec<Vec<(u32, u32)>> {
        let groups = self.config.groups(self.runner.model.config());
        let of_group = |(g, group): (usize, &GroupSpec)| {
            let stored = self.cache.stored_cells(GroupId(g as u16), seq).into_iter();
            let places = stored.flat_map(|(first, run)| (first..).zip(run.cells()));
            places.filter(|(position, _)| *position < end && wants(group.visibility, *position)).collect()
        };
        groups.iter().enumerate().map(of_group).collect()
    }

    /// What a query at the end of `seq`, at position `end`, sees. A full cache answers, too: no cell is planned for that query.
    pub(crate) fn seen_at_end(&self, seq: SeqId, end: u32) -> Vec<Vec<(u32, u32)>> {
        self.places(seq, end, |visibility, position| visibility.sees(end, position))
    }

    /// Copies the rows of a layer group at these [`places`](Self::places).
    pub(crate) fn copy_rows(&mut self, group: usize, places: &[(u32, u32)]) -> Result<Rows, Error> {
        let sides = self.sides_of(group);
        let width: usize = sides.iter().map(SideSpec::width).sum();
        let mut rows = Rows {
            positions: places.iter().map(|(position, _)| *position).collect(),
            sides: sides.iter().map(|side| vec![0; places.len() * side.width()]).collect(),
        };
        let mut transfers = self.runner.transfers();
        for run in runs(places.iter().map(|(_, cell)| *cell).enumerate(), rows_at_once(width)) {
            let n = run.cells.len as usize;
            let block = HostBlock::new(n * width)?;
            let begun =
                transfers.export(GroupId(group as u16), run.cells, block).map_err(DeviceError::from)?;
            let block = wait(&mut transfers, &begun)?;
            for (i, first, len) in parts(&sides, n) {
                let at = run.first_row * sides[i].width();
                rows.sides[i][at..at + len].copy_from_slice(&block.bytes()[first..first + len]);
            }
        }
        Ok(rows)
    }

    /// Extends the empty sequence `seq` by `n` positions whose rows are given. `false` if later queries would see positions
    /// that are not among the rows; the sequence is then to be cleared. So it is after an `Err`.
    pub(crate) fn place_rows(&mut self, seq: SeqId, n: u32, groups: &[GroupRows]) -> Result<bool, Error> {
        let chunk = self.config.max_step_tokens.max(1);
        for start in (0..n).step_by(chunk as usize) {
            let len = chunk.min(n - start);
            self.place_chunk(seq, start, len, groups)?;
        }
        let needed = self.seen_at_end(seq, n);
        Ok(needed
            .iter()
            .zip(groups)
            .all(|(needed, rows)| needed.iter().all(|(position, _)| rows.has(*position))))
    }

    fn place_chunk(&mut self, seq: SeqId, start: u32, len: u32, groups: &[GroupRows]) -> Result<(), Error> {
        let all_sides: Vec<_> = (0..groups.len()).map(|g| self.sides_of(g)).collect();
        let spans = [Span::chain(seq, start, len)];
        let step = Step::begin(self.cache, &StepRequest { spans: &spans }, self.plan)?;
        let mut transfers = self.runner.transfers();
        for (g, (rows, sides)) in groups.iter().zip(&all_sides).enumerate() {
            let group = GroupId(g as u16);
            let cells: Vec<u32> =
                step.plan().group(group).writes.iter().flat_map(|run| run.cells()).collect();
            let rows = match rows {
                GroupRows::Copied(rows) => rows,
                GroupRows::InPlace if cells.iter().copied().eq(start..start + len) => continue,
                GroupRows::InPlace => return Err(Error::Usage(NOT_IN_ORDER.into())),
            };
            let first = rows.positions.partition_point(|position| *position < start);
            let here = rows.positions[first..].iter().take_while(|position| **position < start + len);
            let places =
                here.enumerate().map(|(i, position)| (first + i, cells[(*position - start) as usize]));
            let width: usize = sides.iter().map(SideSpec::width).sum();
            for run in runs(places, rows_at_once(width)) {
                let n = run.cells.len as usize;
                let mut block = HostBlock::new(n * width)?;
                for (i, first, len) in parts(sides, n) {
                    let at = run.first_row * sides[i].width();
                    block.bytes_mut()[first..first + len].copy_from_slice(&rows.sides[i][at..at + len]);
                }
                let begun = transfers.import(group, run.cells, block).map_err(DeviceError::from)?;
                wait(&mut transfers, &begun)?;
            }
        }
        step.commit();
        Ok(())
    }
}
