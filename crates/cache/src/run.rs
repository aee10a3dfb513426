//! Runs of neighbouring cells: the unit in which cells are written, read and moved.

/// `len` neighbouring cells from `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First cell.
    pub start: u32,
    /// Cells.
    pub len: u32,
}

impl Run {
    /// One past the last cell.
    pub fn end(self) -> u32 {
        self.start + self.len
    }
    /// Is `cell` one of them?
    pub fn contains(self, cell: u32) -> bool {
        cell >= self.start && cell < self.end()
    }
    /// All of them, ascending.
    pub fn cells(self) -> std::ops::Range<u32> {
        self.start..self.end()
    }
}

/// Append `run`, melting it into a neighbour that ends where it starts.
pub fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.start => last.len += run.len,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::Run;

    #[test]
    fn a_run_contains_its_cells() {
        let run = Run { start: 3, len: 2 };
        let found: Vec<u32> = (0..9).filter(|&cell| run.contains(cell)).collect();
        assert_eq!(found, run.cells().collect::<Vec<_>>());
        assert_eq!(found, [3, 4]);
    }
}
