//! A simple driver for requests that are all known in advance.
use crate::executor::{Clock, Executor};
use crate::iteration::Iteration;
use crate::request::{Ended, Request};
use crate::scheduler::{Duplicate, Scheduler};

/// Serves `arrivals`, which must ascend by `arrival_ns`, until all have ended; calls `ended` once for each. Arrivals
/// reach the scheduler between iterations, in order. The clock is read once per iteration.
pub fn drive(
    scheduler: &mut Scheduler,
    executor: &mut dyn Executor,
    clock: &mut dyn Clock,
    arrivals: impl IntoIterator<Item = Request>,
    mut ended: impl FnMut(Ended),
) -> Result<(), Duplicate> {
    let mut arrivals = arrivals.into_iter().peekable();
    loop {
        let now = clock.now_ns();
        while let Some(request) = arrivals.next_if(|r| r.arrival_ns <= now) {
            scheduler.arrive(now, request)?;
        }
        let iteration = scheduler.iterate(now, executor);
        scheduler.drain_ended().for_each(&mut ended);
        match (iteration, arrivals.peek()) {
            (Iteration::Ran { elapsed_ns, .. }, _) => clock.advance(elapsed_ns),
            (Iteration::NothingToDo, Some(next)) => clock.sleep_until(next.arrival_ns),
            (Iteration::NothingToDo, None) => return Ok(()),
        }
    }
}
