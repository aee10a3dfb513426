//! Distributes the cells of a plan to its tokens, in batch order.
use crate::run::CellRun;

pub(crate) struct Written<'p> {
    runs: std::slice::Iter<'p, CellRun>,
    rest: CellRun,
}

impl<'p> Written<'p> {
    pub fn new(writes: &'p [CellRun]) -> Self {
        Written { runs: writes.iter(), rest: CellRun { start: 0, len: 0 } }
    }
    /// The next contiguous cells, at most `n`.
    pub fn take(&mut self, n: u32) -> CellRun {
        if self.rest.len == 0 {
            self.rest = *self.runs.next().expect("prepare placed every token");
        }
        let run = CellRun { start: self.rest.start, len: n.min(self.rest.len) };
        self.rest = CellRun { start: run.end(), len: self.rest.len - run.len };
        run
    }
    /// Calls `each` with the runs of the next `n` cells.
    pub fn each(&mut self, mut n: u32, mut each: impl FnMut(CellRun)) {
        while n > 0 {
            let run = self.take(n);
            n -= run.len;
            each(run);
        }
    }
}
