//! The bookkeeping of one model's cache: one cell space per layer group.
use crate::events::BlockEvent;
use crate::ids::*;
use crate::kind::Kind;
use crate::plan::*;
use crate::prefix::{Index, PagedSpec, PrefixEvent};
use crate::report::{BlockUse, Occupancy, Report};
use crate::request::*;
use crate::run::CellRun;
use crate::shortest_cut::ShortestCuts;

/// The cache of one model. A concrete type, so that [`Kind::apply`] stays private to this crate and callers need no
/// generics.
pub struct Cache {
    pub(crate) groups: Vec<Box<dyn Kind>>,
    /// Counts mutations. A plan is applied only if the epoch has not changed since it was prepared.
    pub(crate) epoch: u64,
    /// The prefix index over the full blocks of paged groups.
    pub(crate) index: Option<Index>,
    /// The spec that [`Cache::paged`] was called with.
    pub(crate) spec: Option<PagedSpec>,
    /// Unique in the process, to detect transfers of another cache.
    pub(crate) id: u64,
    /// See [`Cache::set_shortest_cut`].
    pub(crate) shortest_cuts: ShortestCuts,
}

impl Cache {
    /// Makes a cache with one cell space per layer group, in group order. `groups` must not be empty.
    pub fn new(groups: Vec<Box<dyn Kind>>) -> Self {
        assert!(!groups.is_empty(), "a cache needs at least one layer group");
        let (id, shortest_cuts) = (crate::tables::unique(), ShortestCuts::default());
        Cache { groups, epoch: 0, index: None, spec: None, id, shortest_cuts }
    }

    /// The spec from which [`Cache::paged`] makes another, empty cache like this one; `None` if this cache was not
    /// made by [`Cache::paged`].
    pub fn paged_spec(&self) -> Option<&PagedSpec> {
        self.spec.as_ref()
    }

    /// Number of layer groups.
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    /// Cells each group has room for, in group order.
    pub fn capacity_cells(&self) -> Vec<u32> {
        self.groups.iter().map(|g| g.capacity_cells()).collect()
    }

    /// Tokens of `seq` that the first group stores; `None` if there is no such sequence.
    pub fn seq_len(&self, seq: SeqId) -> Option<u32> {
        self.groups[0].seq_len(seq)
    }

    /// Position of the next token of `seq`; `None` if there is no such sequence.
    pub fn next_position(&self, seq: SeqId) -> Option<u32> {
        self.groups[0].next_position(seq)
    }

    /// Whether steps accept draft trees ([`New::Tree`]). Caches that do not verify drafts as chains, of which
    /// [`Step::commit_kept`](crate::Step::commit_kept) keeps the beginning. Whether nodes outlive their step is another
    /// question, which [`trees`](Self::trees) answers.
    pub fn verifies_trees(&self) -> bool {
        self.groups.iter().all(|g| g.verifies_trees())
    }

    /// Speculative nodes of `seq` that are neither accepted nor discarded yet; `None` if there is no such sequence,
    /// or if nodes do not outlive their step.
    pub fn n_nodes(&self, seq: SeqId) -> Option<u32> {
        self.groups[0].n_nodes(seq)
    }

    /// Where `group` stores the committed tokens of `seq`, ascending: the first position of each stretch of consecutive
    /// positions, and its cells. They are at least what a query at the end of `seq` sees, and may be those of other
    /// sequences, too. No step is planned, so a full cache answers as well. Empty if there is no such sequence or group.
    pub fn stored_cells(&self, group: GroupId, seq: SeqId) -> Vec<(u32, CellRun)> {
        let mut cells = Vec::new();
        if let Some(kind) = self.groups.get(usize::from(group.0)) {
            kind.stored_cells(seq, &mut cells);
        }
        cells
    }

    /// Dry run: whether the cache would accept this step. Runs the same code as a real step, so admission and
    /// execution cannot disagree.
    pub fn can_run(&self, request: &StepRequest<'_>, scratch: &mut StepPlan) -> Result<(), Refused> {
        self.prepare(request, scratch)
    }

    /// Removes every sequence, and all that the prefix index caches. No K or V bytes are touched. Blocks in transfer
    /// stay what they are until the transfer ends.
    pub fn clear(&mut self) {
        self.epoch += 1;
        self.groups.iter_mut().for_each(|g| g.clear());
        self.shortest_cuts = ShortestCuts::default();
        if let Some(index) = &mut self.index {
            index.clear();
        }
    }

    /// Turns the log of prefix events on or off. A log that is turned on begins with a [`PrefixEvent::Stored`] for each
    /// block that the index has, parents before their children. It copies block contents. A cache without a prefix
    /// index logs none.
    pub fn watch_prefixes(&mut self, on: bool) {
        if let Some(index) = &mut self.index {
            index.watch(on);
        }
    }

    /// Turns the log of block events on or off. Only kinds that hand out blocks log any.
    pub fn watch_blocks(&mut self, on: bool) {
        for (g, kind) in self.groups.iter_mut().enumerate() {
            if let Some(blocks) = kind.blocks_mut() {
                blocks.events().watch(on.then_some(GroupId(g as u16)));
            }
        }
    }

    /// Moves the block events since the last call to the end of `blocks`, group by group. The two logs are drained
    /// separately, because they have different readers: a recording, and a tier that mirrors the index.
    pub fn drain_block_events(&mut self, blocks: &mut Vec<BlockEvent>) {
        for kind in &mut self.groups {
            if let Some(kind_blocks) = kind.blocks_mut() {
                kind_blocks.events().drain(blocks);
            }
        }
    }

    /// Moves the prefix events since the last call to the end of `prefixes`.
    pub fn drain_prefix_events(&mut self, prefixes: &mut Vec<PrefixEvent>) {
        if let Some(events) = self.index.as_mut().and_then(|index| index.events.as_mut()) {
            prefixes.append(events);
        }
    }

    /// The state of every block of `group`, in order, up to the highest block in use; all blocks above it are free.
    /// Empty if the kind has no blocks.
    pub fn block_uses(&self, group: GroupId) -> impl Iterator<Item = BlockUse> {
        let blocks = self.groups.get(group.0 as usize).and_then(|kind| kind.blocks());
        blocks.into_iter().flat_map(|blocks| blocks.block_uses())
    }

    /// One report per layer group.
    pub fn report(&self) -> Vec<Report> {
        self.groups.iter().map(|g| g.report()).collect()
    }

    /// How full each layer group is. O(1) for kinds with many sequences.
    pub fn occupancy(&self) -> impl Iterator<Item = Occupancy> + '_ {
        self.groups.iter().map(|g| g.occupancy())
    }

    /// Places the request in every group. Takes `&self`, so it cannot change the cache. O(spans + cells placed),
    /// never O(context).
    pub(crate) fn prepare(&self, request: &StepRequest<'_>, plan: &mut StepPlan) -> Result<(), Refused> {
        plan.id += 1;
        plan.epoch = self.epoch;
        plan.has_reads = false;
        plan.has_tables = false;
        plan.n_tokens = 0;
        plan.spans.list.clear();
        plan.spans.parents.clear();
        if request.spans.is_empty() {
            return Err(Refused::Empty);
        }
        // A scheduler usually lists sequences in ascending order; then strict sorting rules out duplicates in
        // O(spans).
        let ascend = request.spans.is_sorted_by(|a, b| a.seq < b.seq);
        for (i, span) in request.spans.iter().enumerate() {
            if !ascend && request.spans[..i].iter().any(|other| other.seq == span.seq) {
                return Err(Refused::TwoSpansOfOneSequence(span.seq));
            }
            let overflow = Refused::PositionOverflow { seq: span.seq };
            let (n_tokens, kind) = match span.new {
                New::Chain(n) => (n, SpanKind::Chain),
                New::Tree(parents) => {
                    let first_parent = plan.spans.parents.len() as u32;
                    plan.spans.parents.extend_from_slice(parents);
                    let n = u32::try_from(parents.len()).map_err(|_| overflow.clone())?;
                    (n, SpanKind::Tree { first_parent })
                }
            };
            if n_tokens == 0 {
                return Err(Refused::Empty);
            }
            span.start.checked_add(n_tokens).ok_or_else(|| overflow.clone())?;
            plan.spans.list.push(PlannedSpan {
                seq: span.seq,
                start: span.start,
                first_token: plan.n_tokens,
                n_tokens,
                kind,
            });
            plan.n_tokens = plan.n_tokens.checked_add(n_tokens).ok_or(overflow)?;
        }
        plan.groups.resize_with(self.groups.len(), GroupPlan::default);
        for (g, (kind, out)) in self.groups.iter().zip(&mut plan.groups).enumerate() {
            out.restart();
            kind.prepare(&plan.spans, GroupId(g as u16), out)?; // a late refusal needs no undo
        }
        Ok(())
    }

    pub(crate) fn fill_reads(&self, plan: &mut StepPlan) {
        if !plan.has_reads {
            for (kind, out) in self.groups.iter().zip(&mut plan.groups) {
                kind.fill_reads(&plan.spans, out);
            }
            plan.has_reads = true;
        }
    }

    pub(crate) fn fill_tables(&self, plan: &mut StepPlan) {
        if plan.has_tables {
            return;
        }
        plan.has_tables = true;
        let mut all_have_rows = true;
        for (kind, out) in self.groups.iter().zip(&mut plan.groups) {
            let has_rows = kind.fill_tables(&plan.spans, out);
            out.tables.fill(&plan.spans, kind.visibility(), has_rows);
            all_have_rows &= has_rows;
        }
        if !all_have_rows {
            self.fill_reads(plan);
        }
    }

    pub(crate) fn apply(&mut self, plan: &StepPlan) {
        assert_eq!(
            plan.epoch, self.epoch,
            "a plan of epoch {} was applied to a cache of {}",
            plan.epoch, self.epoch
        );
        for (kind, out) in self.groups.iter_mut().zip(&plan.groups) {
            kind.apply(&plan.spans, out);
        }
        if let Some(index) = &mut self.index {
            index.rank_newly_evictable(&mut self.groups);
        }
        self.epoch += 1;
    }
}
