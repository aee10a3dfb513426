//! The interfaces that a driver provides: an executor for steps, and a clock.
use crate::drafts::{BatchDrafts, is_chain};
use crate::entry::Entry;
use crate::outcome::Outcome;
use crate::request::RequestId;
use crate::tiers::Order;
use kvist_cache::{NodeId, Step};

/// One request's part of a step: tokens at positions `first..first + n_tokens` of its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The request.
    pub request: RequestId,
    /// Position of the first token.
    pub first: u32,
    /// Number of tokens, at least 1. In a multi-step run: the total over all steps. With a draft: the last known token and
    /// all nodes of the tree.
    pub n_tokens: u32,
    /// True if this part reaches the last known token, so that new tokens are emitted after it.
    pub samples: bool,
    /// True if this is the last known token of a decoding request, with or without drafts after it. All tokens before
    /// it are already computed, by this request or by another one with the same prefix.
    pub decodes: bool,
    pub(crate) index: u32,
}

/// The contents of a step, in the order of the cache's spans.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// One entry per request in the step.
    pub work: &'a [Work],
    /// Number of decode steps executed as one: 1, or the number returned by [`Executor::max_fused_steps`].
    pub steps: u32,
    pub(crate) entries: &'a [Entry],
    pub(crate) drafts: &'a BatchDrafts,
}

impl Batch<'_> {
    /// The token ids to feed for `work[i]`; `None` if they are not known. In a run of several steps this is only the
    /// first token: the others are those that the run samples or drafts.
    pub fn tokens(&self, i: usize) -> Option<&[u32]> {
        let work = &self.work[i];
        let entry = &self.entries[work.index as usize];
        let end = (work.first + work.n_tokens).min(entry.known);
        entry.prompt.tokens()?.get(work.first as usize..end as usize)
    }

    /// The draft tree of `work[i]`, as parents: first that of the last known token (`None`), which is node 0, then those of
    /// the drafts. Empty if nothing is drafted for it.
    pub fn draft(&self, i: usize) -> &[Option<NodeId>] {
        self.drafts.parents(i)
    }

    /// True if the cache takes the draft of `work[i]` as a chain, so that the outcome keeps a length of it
    /// ([`Kept::First`](kvist_cache::Kept::First)). Otherwise it keeps a path ([`Kept::Path`](kvist_cache::Kept::Path)).
    pub fn drafts_chain(&self, i: usize) -> bool {
        is_chain(self.draft(i))
    }

    /// Prompt tokens of the request of `work[i]`.
    pub fn prompt_tokens(&self, i: usize) -> u32 {
        self.entries[self.work[i].index as usize].prompt_tokens
    }

    /// How many tokens the request of `work[i]` may still generate. A tree deeper than one less is of no use.
    pub fn max_new(&self, i: usize) -> u32 {
        let entry = &self.entries[self.work[i].index as usize];
        entry.max_new - entry.generated()
    }

    /// The salt of the request of `work[i]`: what is learned from its tokens may only serve requests with the same salt.
    pub fn salt(&self, i: usize) -> &str {
        &self.entries[self.work[i].index as usize].salt
    }

    /// All known token ids of the request of `work[i]`, prompt and answer, computed or not; `None` if one of them is
    /// not known. A drafter that looks for repetitions searches them.
    pub fn known_tokens(&self, i: usize) -> Option<&[u32]> {
        let entry = &self.entries[self.work[i].index as usize];
        entry.prompt.tokens()?.get(..entry.known as usize)
    }
}

/// Executes steps. Implementations: an engine with real KV pools, a cost model, a test script, a recording.
pub trait Executor {
    /// Returns how many of the next decode steps, at most `limit`, may run as one. Only called when every request in
    /// the batch decodes one token and no scheduling decision can change before the `limit`-th step ends. The executor
    /// returns the number of steps that end before any other event: an arrival, a cancellation, the end of a request.
    ///
    /// The run plans a chain of that many tokens for every request. An executor that submits several decode rounds at
    /// once says in the [`Outcome`] how many of them each request keeps and emits.
    fn max_fused_steps(&mut self, _now_ns: u64, _batch: Batch<'_>, _limit: u32) -> u32 {
        1
    }

    /// Proposes draft tokens for requests of the batch that decode, at most `limit` in all: what the token budget has left
    /// when every request has its tokens. The step then computes each draft tree together with the request's last known token,
    /// and the [`Outcome`] says which of its nodes are kept; the others' cells are free again when the step is completed.
    /// A batch whose drafts do not fit into the cache is placed without them ([`Batch::draft`] is empty then). Drafts may
    /// evict cached blocks; they never preempt.
    fn draft(&mut self, _now_ns: u64, _batch: Batch<'_>, _limit: u32, _drafts: &mut BatchDrafts) {}

    /// Begins transfers to and from the tiers below the cache, so that they run beside the step that is executed next.
    /// Orders that are left are returned by [`Scheduler::drain_orders`](crate::Scheduler::drain_orders). Not called
    /// without tiers.
    fn begin_transfers(&mut self, _now_ns: u64, _orders: &mut Vec<Order>) {}

    /// Executes `step`, and records the outcome in `out`. The scheduler commits it; the executor only drops it.
    /// `step.with_reads()` costs O(context); an executor without KV data need not call it.
    fn execute(&mut self, now_ns: u64, step: Step<'_>, batch: Batch<'_>, out: &mut Outcome);
}

/// The driver's clock. The scheduler never reads a clock; otherwise its decisions could not be replayed.
pub trait Clock {
    /// Nanoseconds since an arbitrary start.
    fn now_ns(&self) -> u64;
    /// Called after a step that took this long. A real-time clock ignores it.
    fn advance(&mut self, elapsed_ns: u64);
    /// Called when there is nothing to do before `at_ns`.
    fn sleep_until(&mut self, at_ns: u64);
}

/// A clock that advances only when its methods are called.
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

/// A scripted executor for tests, made from a closure.
pub struct Script<F>(pub F);

impl<F: FnMut(u64, Batch<'_>, &mut Outcome)> Executor for Script<F> {
    fn execute(&mut self, now_ns: u64, _step: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        (self.0)(now_ns, batch, out);
    }
}
