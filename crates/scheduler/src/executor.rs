//! What the scheduler asks of the world: to execute a step, and to say what time it is.
use crate::entry::Entry;
use crate::request::RequestId;
use kvist_cache::Step;

/// One request's share of a step: tokens at positions `first..first + n_tokens` of its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Whose.
    pub request: RequestId,
    /// Position of the first token.
    pub first: u32,
    /// Tokens, at least 1. Over a run of steps: in all of them.
    pub n_tokens: u32,
    /// Does this share reach the end of what is known, so that a token is sampled after it?
    pub samples: bool,
    /// Is it the one token of a request that decodes? Then everything before it has been computed before, by this
    /// request or by another with the same prefix.
    pub decodes: bool,
    pub(crate) slot: u32,
}

/// What a step consists of, in the order of the cache's spans.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// Shares of all requests in the step.
    pub work: &'a [Work],
    /// Steps that are run as one: 1, or what the executor foresaw.
    pub steps: u32,
    pub(crate) entries: &'a [Entry],
}

impl Batch<'_> {
    /// The token ids to feed for the `i`-th share, `None` where they are not known.
    pub fn tokens(&self, i: usize) -> Option<&[u32]> {
        let work = &self.work[i];
        let tokens = self.entries[work.slot as usize].prompt.tokens()?;
        tokens.get(work.first as usize..(work.first + work.n_tokens) as usize)
    }
}

/// What came of a step. Recycled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// How long it took, on the driver's clock.
    pub elapsed_ns: u64,
    /// The whole step failed: nothing is committed.
    pub failed: bool,
    /// One for every [`Work::samples`], in batch order; ignored if the step failed. Any other number is a bug of the
    /// executor, and the scheduler says so by a panic.
    pub sampled: Vec<Sampled>,
}

/// A sampled token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// Its id; `None` in a simulation.
    pub token: Option<u32>,
    /// Was it the last one of its request?
    pub finished: bool,
}

/// Executes steps: an engine over pools, a cost model, a script, a recording.
pub trait Executor {
    /// How many of the next decode steps, at most `limit`, may be run as one? Asked only when every share is one
    /// decoded token and no decision of the scheduler can change before the `limit`-th step ends. The executor
    /// answers how many end before anything else can happen: an arrival, a cancellation, the end of a request. An
    /// executor that returns token ids answers 1.
    fn foresee(&mut self, _now_ns: u64, _batch: Batch<'_>, _limit: u32) -> u32 {
        1
    }

    /// Execute `step`. `step.with_reads()` costs O(context); an executor without bytes does not call it.
    fn execute(&mut self, now_ns: u64, step: &mut Step<'_>, batch: Batch<'_>, out: &mut Outcome);
}

/// The driver's clock, never the scheduler's: a scheduler that reads a clock cannot be replayed.
pub trait Clock {
    /// Nanoseconds since some beginning.
    fn now_ns(&self) -> u64;
    /// A step took this long. A clock of the real world knows.
    fn advance(&mut self, elapsed_ns: u64);
    /// Nothing to do before `at_ns`.
    fn sleep_until(&mut self, at_ns: u64);
}

/// A clock that goes where it is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtualClock(pub u64);

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        self.0
    }
    fn advance(&mut self, elapsed_ns: u64) {
        self.0 = self.0.saturating_add(elapsed_ns);
    }
    fn sleep_until(&mut self, at_ns: u64) {
        self.0 = self.0.max(at_ns);
    }
}

/// A scripted executor, for tests: a closure is a script.
pub struct Script<F>(pub F);

impl<F: FnMut(u64, Batch<'_>, &mut Outcome)> Executor for Script<F> {
    fn execute(&mut self, now_ns: u64, _step: &mut Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        (self.0)(now_ns, batch, out);
    }
}
