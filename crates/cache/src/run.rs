//! Runs of contiguous cells: the unit in which cells are written, read and moved.

/// `len` contiguous cells from `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellRun {
    /// First cell.
    pub start: u32,
    /// Number of cells.
    pub len: u32,
}

impl CellRun {
    /// One past the last cell.
    pub fn end(self) -> u32 {
        self.start + self.len
    }
    /// Whether `cell` lies in the run.
    pub fn contains(self, cell: u32) -> bool {
        cell >= self.start && cell < self.end()
    }
    /// All cells of the run, ascending.
    pub fn cells(self) -> std::ops::Range<u32> {
        self.start..self.end()
    }
}

/// Appends `run`, merging it into the last run if that one ends where `run` starts.
pub(crate) fn push_run(runs: &mut Vec<CellRun>, run: CellRun) {
    match runs.last_mut() {
        Some(last) if last.end() == run.start => last.len += run.len,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::CellRun;

    #[test]
    fn a_run_contains_its_cells() {
        let run = CellRun { start: 3, len: 2 };
        let found: Vec<u32> = (0..9).filter(|&cell| run.contains(cell)).collect();
        assert_eq!(found, run.cells().collect::<Vec<_>>());
        assert_eq!(found, [3, 4]);
    }
}
