//! Distributes the cells of a plan to its tokens, in batch order.
use crate::run::Run;

pub(crate) struct Written<'p> {
    runs: std::slice::Iter<'p, Run>,
    rest: Run,
}

impl<'p> Written<'p> {
    pub fn new(writes: &'p [Run]) -> Self {
        Written { runs: writes.iter(), rest: Run { start: 0, len: 0 } }
    }
    /// The next contiguous cells, at most `n`.
    pub fn take(&mut self, n: u32) -> Run {
        if self.rest.len == 0 {
            self.rest = *self.runs.next().expect("prepare placed every token");
        }
        let run = Run { start: self.rest.start, len: n.min(self.rest.len) };
        self.rest = Run { start: run.end(), len: self.rest.len - run.len };
        run
    }
}
