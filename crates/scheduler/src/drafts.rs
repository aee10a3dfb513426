//! Draft tokens in a batch: speculative tokens that a step verifies together with the last token of a request.
use crate::executor::{Batch, Work};
use crate::log::Decision;
use crate::memory::StepTime;
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use kvist_cache::{NodeId, Refused, Span, StepRequest};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What a driver adds to a batch before the batch is placed in the cache: several decode steps as one, or draft tokens.
pub trait Lookahead {
    /// See [`Executor::max_fused_steps`](crate::Executor::max_fused_steps).
    fn max_fused_steps(&mut self, _batch: Batch<'_>, _limit: u32) -> u32 {
        1
    }
    /// See [`Executor::draft`](crate::Executor::draft).
    fn draft(&mut self, _batch: Batch<'_>, _limit: u32, _drafts: &mut BatchDrafts) {}
}

/// A closure with the signature of [`Executor::max_fused_steps`](crate::Executor::max_fused_steps). Proposes no drafts.
impl<F: FnMut(Batch<'_>, u32) -> u32> Lookahead for F {
    fn max_fused_steps(&mut self, batch: Batch<'_>, limit: u32) -> u32 {
        self(batch, limit)
    }
}

/// The draft trees of a batch, at most one for each request that decodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchDrafts {
    list: Vec<WorkDraft>,
    /// The parents of all trees, as the cache expects them: node 0 of a request is its last known token.
    parents: Vec<Option<NodeId>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct WorkDraft {
    /// Index into the batch.
    work: usize,
    /// Set when the scheduler adds the draft to the batch.
    request: RequestId,
    /// The range of its parents, including that of the last known token.
    parents: Range<usize>,
}

impl BatchDrafts {
    /// No drafts.
    pub(crate) const NONE: &'static BatchDrafts = &BatchDrafts { list: Vec::new(), parents: Vec::new() };

    /// Removes all trees.
    pub fn clear(&mut self) {
        self.list.clear();
        self.parents.clear();
    }
    /// True if there is no draft token.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
    /// Number of draft tokens of all trees.
    pub fn n_tokens(&self) -> u32 {
        (self.parents.len() - self.list.len()) as u32
    }

    /// Proposes a tree for request `work` of the batch. Node `i` continues node `parents[i]`, or the request's last known
    /// token if that is `None`. A tree without nodes is ignored. Requests must come in batch order.
    ///
    /// # Panics
    /// A parent does not precede its node, or the requests are out of order: bugs in the drafter.
    pub fn push(&mut self, work: usize, parents: &[Option<u32>]) {
        assert!(self.list.last().is_none_or(|last| last.work < work), "drafts come in batch order");
        if parents.is_empty() {
            return;
        }
        let first = self.parents.len();
        self.parents.push(None);
        for (i, parent) in parents.iter().enumerate() {
            assert!(parent.is_none_or(|parent| (parent as usize) < i), "node {i} precedes its parent");
            self.parents.push(Some(NodeId(parent.map_or(0, |parent| parent + 1))));
        }
        self.list.push(WorkDraft { work, request: RequestId(0), parents: first..self.parents.len() });
    }

    /// The parents of the tree of request `work`: first that of its last known token (`None`), then those of the drafts.
    /// Empty if nothing is drafted for it.
    pub fn parents(&self, work: usize) -> &[Option<NodeId>] {
        match self.list.binary_search_by_key(&work, |draft| draft.work) {
            Ok(i) => &self.parents[self.list[i].parents.clone()],
            Err(_) => &[],
        }
    }

    /// Checks that each tree belongs to a request of the batch that decodes, and that all of them fit into the budget. `Err`
    /// says what is wrong.
    pub(crate) fn check(&self, batch: Batch<'_>, limit: u32) -> Result<(), String> {
        if self.n_tokens() > limit {
            return Err(format!("{} tokens are drafted, {limit} are allowed", self.n_tokens()));
        }
        let decodes = |draft: &&WorkDraft| batch.work.get(draft.work).is_some_and(|work| work.decodes);
        match self.list.iter().find(|draft| !decodes(draft)) {
            Some(draft) => Err(format!("entry {} of the batch has a draft, but does not decode", draft.work)),
            None => Ok(()),
        }
    }

    /// For the event log.
    pub(crate) fn logged(&self) -> Vec<LoggedDraft> {
        let draft = |draft: &WorkDraft| {
            let parents = &self.parents[draft.parents.start + 1..draft.parents.end];
            let parents = parents.iter().map(|parent| parent.and_then(|NodeId(n)| n.checked_sub(1)));
            LoggedDraft(draft.work, draft.request, parents.collect())
        };
        self.list.iter().map(draft).collect()
    }

    /// The drafts of an event log. `Err` says what is wrong with them.
    pub(crate) fn of_log(logged: &[LoggedDraft]) -> Result<BatchDrafts, String> {
        let mut drafts = BatchDrafts::default();
        for LoggedDraft(work, _, parents) in logged {
            let in_order = drafts.list.last().is_none_or(|last| last.work < *work);
            let bad = |(i, parent): (usize, &Option<u32>)| parent.is_some_and(|parent| parent as usize >= i);
            if !in_order || parents.iter().enumerate().any(bad) {
                return Err(format!(
                    "the draft of entry {work} is out of order, or a node precedes its parent"
                ));
            }
            drafts.push(*work, parents);
        }
        Ok(drafts)
    }
}

/// A draft tree in the event log: index in the batch, request, and the parent of each node.
#[derive(Serialize, Deserialize)]
pub(crate) struct LoggedDraft(usize, RequestId, Vec<Option<u32>>);

impl Scheduler {
    /// Asks for drafts, at most as many as the token budget has left, and adds them to the batch. Drafts come last: every
    /// request has its tokens of this step already.
    pub(crate) fn add_drafts(&mut self, lookahead: &mut dyn Lookahead) {
        self.drafts.clear();
        let planned: u32 = self.batch.iter().map(|work| work.n_tokens).sum();
        let limit = self.config.max_batch_tokens.saturating_sub(planned);
        // A step that failed is tried again without drafts: they may be the reason.
        if limit == 0 || self.failures > 0 || !self.batch.iter().any(|work| work.decodes) {
            return;
        }
        let mut drafts = std::mem::take(&mut self.drafts);
        let batch = Batch { work: &self.batch, steps: 1, entries: &self.entries, drafts: BatchDrafts::NONE };
        lookahead.draft(batch, limit, &mut drafts);
        drafts.check(batch, limit).unwrap_or_else(|misfit| panic!("{misfit}"));
        for WorkDraft { work, request, parents } in &mut drafts.list {
            let work = &mut self.batch[*work];
            work.n_tokens = parents.len() as u32;
            *request = work.request;
        }
        self.drafts = drafts;
    }

    /// Places a batch with drafts. Drafts may evict cached blocks that no sequence uses, and nothing else: if they do
    /// not fit, they are removed from the batch, and `false` is returned.
    pub(crate) fn place_drafts(&mut self, now: StepTime) -> bool {
        match self.place() {
            Ok(()) => return true,
            Err(Refused::NoSpace { needed, free, reclaimable, .. })
                if free.saturating_add(reclaimable) >= needed =>
            {
                self.batch_changed = true;
                let freed = self.memory.evict_until_free(needed, now);
                self.counters.evictions += 1;
                self.decide(now, Decision::Evict { needed, freed });
                if self.place().is_ok() {
                    return true;
                }
            }
            Err(_) => {}
        }
        for WorkDraft { work, .. } in &self.drafts.list {
            self.batch[*work].n_tokens = 1;
        }
        self.drafts_dropped = true;
        false
    }

    /// Chooses cells for the batch. Changes nothing but the plan.
    pub(crate) fn place(&mut self) -> Result<(), Refused> {
        let seq = |w: &Work| self.entries[w.index as usize].seq.expect("a running request has a sequence");
        let chain = |w: &Work| Span::chain(seq(w), w.first, w.n_tokens);
        if self.drafts.is_empty() || self.drafts_dropped {
            self.spans.clear();
            self.spans.extend(self.batch.iter().map(chain));
            return self.memory.cache.can_run(&StepRequest { spans: &self.spans }, &mut self.plan);
        }
        let spans: Vec<Span<'_>> = (self.batch.iter().enumerate())
            .map(|(i, w)| match self.drafts.parents(i) {
                parents if is_chain(parents) => chain(w),
                parents => Span { seq: seq(w), start: w.first, new: kvist_cache::New::Tree(parents) },
            })
            .collect();
        self.memory.cache.can_run(&StepRequest { spans: &spans }, &mut self.plan)
    }
}

/// True if each node continues the one before it. The cache then gets a chain, which every kind accepts, and the outcome
/// says how much of it is kept.
pub(crate) fn is_chain(parents: &[Option<NodeId>]) -> bool {
    (0..).zip(parents).all(|(i, parent)| parent.map_or(0, |NodeId(n)| n + 1) == i)
}
