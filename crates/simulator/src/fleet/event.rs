//! What happens next, and in which order at the same time.
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// In the order in which things of the same time happen: a request that arrives as a step ends finds the worker free, and
/// a worker that fails at that moment has delivered the step's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Something happens in the shared store.
    Store,
    StepEnd,
    Change,
    Arrival,
    /// A worker begins its next step, with all that has arrived.
    Begin,
}

/// The state of a worker that an event was entered for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp {
    /// Of all lives of the workers of the fleet. A worker that fails leaves an event behind, which must not pass for one of
    /// the worker that joins in its place.
    pub life: u64,
    /// How often the worker has changed what it does in this life.
    pub change: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Event {
    pub at_ns: u64,
    pub kind: Kind,
    pub worker: u32,
    /// That of the worker when the event was entered. If the worker's is another one by now, the event is void.
    pub stamp: Stamp,
}

/// The events of workers to come. Each worker has one that is not void.
#[derive(Default)]
pub(super) struct Events(BinaryHeap<Reverse<Event>>);

impl Events {
    pub fn push(&mut self, event: Event) {
        self.0.push(Reverse(event));
    }
    pub fn next(&self) -> Option<Event> {
        self.0.peek().map(|Reverse(event)| *event)
    }
    pub fn pop(&mut self) {
        self.0.pop();
    }
}
