//! How much attention each cell receives in a step: the sum of its softmax weights over layers, query heads and queries.
//!
//! A cell may belong to several sequences, and each of them has its own reasons to keep it. So there is a value for
//! every pair of a sequence and a cell that its queries see, and the values of a sequence do not depend on the others.
//! Memory follows what is seen, not how long the texts are.
use kvist_cache::{GroupId, ReadItem, Reads, SeqId, StepPlan};
use std::ops::Range;

/// Which queries of a step count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MassQueries {
    /// All of them (H2O: Zhang et al., 2023).
    All,
    /// The last ones of every span, at most this many (SnapKV: Li et al., 2024).
    Last(u32),
}

impl MassQueries {
    /// How many of a span's last queries count.
    pub fn of(self, n_tokens: u32) -> u32 {
        match self {
            MassQueries::All => n_tokens,
            MassQueries::Last(n) => n.min(n_tokens),
        }
    }
}

/// The attention that cells receive in one step, in all layers that were added.
#[derive(Clone, Debug, Default)]
pub struct AttentionMass {
    groups: Vec<GroupMass>,
}

/// The cells of a layer group: a value for every read item, sequence of the item, and cell of its run.
#[derive(Clone, Debug, Default)]
pub struct GroupMass {
    /// By query slot: the number of its sequence, counted in the order of slots.
    sequence: Vec<u32>,
    /// The sequences in that order, as indices of spans.
    spans: Vec<usize>,
    /// Runs of slots that count.
    counted: Vec<Range<u32>>,
    /// The first value of every item.
    first: Vec<usize>,
    values: Vec<f32>,
}

impl AttentionMass {
    /// Starts a step: no cell has received anything. The plan must have its reads.
    pub fn begin(&mut self, plan: &StepPlan, queries: MassQueries) {
        self.groups.resize_with(plan.n_groups(), GroupMass::default);
        for (g, group) in self.groups.iter_mut().enumerate() {
            group.begin(plan, &plan.group(GroupId(g as u16)).reads, queries);
        }
    }

    /// What the cells of a layer group have received. For devices. `None` before [`begin`](Self::begin).
    pub fn group_mut(&mut self, group: GroupId) -> Option<&mut GroupMass> {
        self.groups.get_mut(usize::from(group.0))
    }

    /// What every sequence gave to each of its positions in a layer group, in the step of `plan`, which must be the one
    /// that began. A sequence's positions ascend.
    pub fn received<'m>(
        &'m self,
        plan: &'m StepPlan,
        group: GroupId,
    ) -> impl Iterator<Item = (SeqId, u32, f32)> + 'm {
        let mass = self.groups.get(usize::from(group.0));
        let items = &plan.group(group).reads.items;
        mass.into_iter().flat_map(move |mass| {
            items.iter().enumerate().flat_map(move |(i, item)| mass.of_item(plan, i, item))
        })
    }
}

impl GroupMass {
    fn begin(&mut self, plan: &StepPlan, reads: &Reads, queries: MassQueries) {
        let GroupMass { sequence, spans, counted, first, values } = self;
        sequence.clear();
        spans.clear();
        counted.clear();
        first.clear();
        for (slot, token) in reads.order.iter().enumerate() {
            let span = plan.spans().partition_point(|span| span.tokens().end <= *token);
            if spans.last() != Some(&span) {
                spans.push(span);
            }
            sequence.push(spans.len() as u32 - 1);
            let tokens = plan.spans()[span].tokens();
            if tokens.end - token > queries.of(tokens.len() as u32) {
                continue;
            }
            let slot = slot as u32;
            match counted.last_mut() {
                Some(run) if run.end == slot => run.end += 1,
                _ => counted.push(slot..slot + 1),
            }
        }
        let mut n = 0;
        for item in &reads.items {
            first.push(n);
            let last = (item.first_query + item.n_queries - 1) as usize;
            let sequences = sequence[last] - sequence[item.first_query as usize] + 1;
            n += sequences as usize * item.run.len as usize;
        }
        values.clear();
        values.resize(n, 0.0);
    }

    /// Runs of query slots that count, ascending.
    pub fn counted(&self) -> &[Range<u32>] {
        &self.counted
    }
    /// All values, to add to. [`at`](Self::at) finds them.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
    /// Number of values.
    pub fn n_values(&self) -> usize {
        self.values.len()
    }
    /// The value of the first cell of item number `i` for the sequence of a query slot that the item applies to. Those of
    /// the other cells of the run follow.
    pub fn at(&self, i: usize, item: &ReadItem, slot: u32) -> usize {
        let sequence = self.sequence[slot as usize] - self.sequence[item.first_query as usize];
        self.first[i] + sequence as usize * item.run.len as usize
    }
    /// True if two query slots belong to one sequence.
    pub fn same_sequence(&self, a: u32, b: u32) -> bool {
        self.sequence[a as usize] == self.sequence[b as usize]
    }

    fn of_item<'m>(
        &'m self,
        plan: &'m StepPlan,
        i: usize,
        item: &'m ReadItem,
    ) -> impl Iterator<Item = (SeqId, u32, f32)> + 'm {
        let first = self.sequence[item.first_query as usize] as usize;
        let last = self.sequence[(item.first_query + item.n_queries - 1) as usize] as usize;
        let rows = self.values[self.first[i]..].chunks_exact(item.run.len as usize);
        (first..=last).zip(rows).flat_map(move |(sequence, row)| {
            let seq = plan.spans()[self.spans[sequence]].seq;
            (item.first_index..).zip(row).map(move |(position, mass)| (seq, position, *mass))
        })
    }
}
