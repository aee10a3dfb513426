//! Sessions that keep only some of their tokens: the first, the newest, and those between them that matter most.
//!
//! A session thins a sequence when the next step does not fit into its cells, from up to a chunk above the budget down to
//! the budget. So a text of any length runs in cells for the budget and a chunk, and a removal costs as little per token
//! as the chunk is long. What importance is, is a way ([`KeepBy`]): none, the attention of the last queries, or that of
//! all queries so far. The last two ask the device for the attention that cells receive.
//!
//! The method is approximate: outputs change. Positions do not: the text still ends at the model's context.
use kvist_cache::keep::{Keep, Scored};
use kvist_cache::{Cache, GroupId, Refused, SeqId, StepPlan};
use kvist_device::{AttentionMass, MassQueries};
use kvist_model::Error;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::str::FromStr;

/// What makes a token important.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepBy {
    /// Nothing: the newer of two tokens stays (StreamingLLM: Xiao et al., 2023). Costs nothing.
    None,
    /// The attention of the newest [`OBSERVED`] queries, each token with the neighbours within [`POOLED`] (SnapKV: Li et al.,
    /// 2024).
    Last,
    /// The attention of all queries so far (H2O: Zhang et al., 2023).
    Attention,
}

impl KeepBy {
    pub const ALL: [KeepBy; 3] = [KeepBy::None, KeepBy::Last, KeepBy::Attention];

    pub fn name(self) -> &'static str {
        match self {
            KeepBy::None => "none",
            KeepBy::Last => "last",
            KeepBy::Attention => "attention",
        }
    }

    /// The queries whose attention a step returns.
    fn queries(self) -> Option<MassQueries> {
        match self {
            KeepBy::None => None,
            KeepBy::Last => Some(MassQueries::Last(OBSERVED)),
            KeepBy::Attention => Some(MassQueries::All),
        }
    }
}

/// Queries that [`KeepBy::Last`] observes.
pub const OBSERVED: u32 = 32;
/// With [`KeepBy::Last`], a token is as important as the most important of so many stored tokens before and after it.
pub const POOLED: usize = 3;

/// Which tokens a session keeps: `sinks=4,recent=1024,top=2048,by=last`. Without `by` it is `last`, which measures best at the
/// least cost (docs/quality.md), or `none` if there is no `top`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepConfig {
    pub keep: Keep,
    pub by: KeepBy,
}

impl KeepConfig {
    /// Most tokens that a sequence has after a removal, in a cache with blocks of this many tokens: every part of the budget
    /// is rounded up to whole blocks.
    pub fn budget(&self, block_tokens: u32) -> u32 {
        let Keep { sinks, recent, top_k } = self.keep;
        let rounding = 4u32.saturating_mul(block_tokens.saturating_sub(1));
        sinks.saturating_add(recent.max(1)).saturating_add(top_k).saturating_add(rounding)
    }
}

impl fmt::Display for KeepConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Keep { sinks, recent, top_k } = self.keep;
        write!(f, "sinks={sinks},recent={recent},top={top_k},by={}", self.by.name())
    }
}

impl FromStr for KeepConfig {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str =
            "write it as sinks=4,recent=1024,top=2048 and, if you like, by=last, attention or none";
        let (mut sinks, mut recent, mut top, mut by) = (None, None, None, None);
        for part in text.split(',') {
            let (name, value) = part
                .split_once('=')
                .map(|(name, value)| (name.trim(), value.trim()))
                .ok_or_else(|| format!("`{part}` is not NAME=VALUE: {FORM}"))?;
            let field = match name {
                "sinks" => &mut sinks,
                "recent" => &mut recent,
                "top" => &mut top,
                "by" => {
                    let known = KeepBy::ALL.into_iter().find(|by| by.name() == value);
                    let way = known.ok_or_else(|| format!("by=`{value}` is no importance: {FORM}"))?;
                    if by.replace(way).is_some() {
                        return Err("`by` is given twice".into());
                    }
                    continue;
                }
                _ => return Err(format!("`{name}` is nothing that can be kept: {FORM}")),
            };
            let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            let number = value.parse::<u32>().ok().filter(|n| digits && *n <= MAX_TOKENS);
            let number = number.ok_or_else(|| {
                format!("{name}=`{value}` is not a number of tokens: give 0 to {MAX_TOKENS}")
            })?;
            if field.replace(number).is_some() {
                return Err(format!("`{name}` is given twice"));
            }
        }
        let recent = recent.ok_or_else(|| format!("`recent` is missing: {FORM}"))?;
        let top_k = top.unwrap_or(0);
        if recent == 0 {
            return Err(
                "recent=0 would remove the token that comes just before the next one: give 1 or more".into(),
            );
        }
        if let (0, Some(by @ (KeepBy::Last | KeepBy::Attention))) = (top_k, by) {
            return Err(format!(
                "by={} chooses the top tokens, and there are none: give top=TOKENS",
                by.name()
            ));
        }
        let by = by.unwrap_or(if top_k > 0 { KeepBy::Last } else { KeepBy::None });
        Ok(KeepConfig { keep: Keep { sinks: sinks.unwrap_or(0), recent, top_k }, by })
    }
}

/// Most tokens of each part of a budget.
const MAX_TOKENS: u32 = 1 << 28;

/// What a session knows of the importance of its tokens.
pub(crate) struct Keeping {
    config: KeepConfig,
    sequences: BTreeMap<SeqId, Received>,
    removed: u64,
}

/// The attention that the tokens of one sequence have received: positions, ascending, each with its sum.
#[derive(Default)]
struct Received {
    all: Vec<(u32, f64)>,
    /// The newest steps with how many queries each observed; only for [`KeepBy::Last`].
    steps: VecDeque<(u32, Vec<(u32, f64)>)>,
}

/// `into += from`, position by position. Both ascend.
fn add(into: &mut Vec<(u32, f64)>, from: &[(u32, f64)]) {
    let mut sum: Vec<(u32, f64)> = Vec::with_capacity(into.len().max(from.len()));
    let mut from = from.iter().copied().peekable();
    for (position, before) in into.iter().copied() {
        sum.extend(std::iter::from_fn(|| from.next_if(|(at, _)| *at < position)));
        let more = from.next_if(|(at, _)| *at == position).map_or(0.0, |(_, more)| more);
        sum.push((position, before + more));
    }
    sum.extend(from);
    *into = sum;
}

impl Received {
    /// Forgets the positions from `end` on: the sequence was shortened, and other tokens come there.
    fn truncate(&mut self, end: u32) {
        let steps = self.steps.iter_mut().map(|(_, step)| step);
        for list in std::iter::once(&mut self.all).chain(steps) {
            list.truncate(list.partition_point(|(position, _)| *position < end));
        }
    }

    /// Adds what a step of `n` queries gave.
    fn observe(&mut self, by: KeepBy, n: u32, step: Vec<(u32, f64)>) {
        if by == KeepBy::Attention {
            return add(&mut self.all, &step);
        }
        self.steps.push_back((n, step));
        let mut observed: u32 = self.steps.iter().map(|(n, _)| n).sum();
        while let Some((n, _)) = self.steps.front().filter(|(n, _)| observed - n >= OBSERVED) {
            observed -= n;
            self.steps.pop_front();
        }
    }

    /// The importance of every position that is stored.
    fn scores(&self, by: KeepBy, stored: &[std::ops::Range<u32>]) -> Vec<Scored> {
        let mut sums = self.all.clone();
        self.steps.iter().for_each(|(_, step)| add(&mut sums, step));
        let mut sums = sums.into_iter().peekable();
        let mut scored: Vec<Scored> = Vec::new();
        for position in stored.iter().cloned().flatten() {
            while sums.next_if(|(at, _)| *at < position).is_some() {}
            let importance = sums.next_if(|(at, _)| *at == position).map_or(0.0, |(_, sum)| sum as f32);
            scored.push(Scored { position, importance });
        }
        if by == KeepBy::Last {
            let single: Vec<f32> = scored.iter().map(|scored| scored.importance).collect();
            for (i, scored) in scored.iter_mut().enumerate() {
                let near = &single[i.saturating_sub(POOLED)..single.len().min(i + POOLED + 1)];
                scored.importance = near.iter().copied().fold(scored.importance, f32::max);
            }
        }
        scored
    }
}

impl Keeping {
    pub fn new(config: KeepConfig) -> Self {
        Keeping { config, sequences: BTreeMap::new(), removed: 0 }
    }

    /// The queries whose attention the next step returns.
    pub fn queries(&self) -> Option<MassQueries> {
        self.config.by.queries()
    }

    /// Tokens removed so far.
    pub fn removed(&self) -> u64 {
        self.removed
    }

    pub fn clear(&mut self) {
        self.sequences.clear();
    }

    /// Adds what a step that was committed gave to the tokens of its sequences.
    pub fn observe(&mut self, plan: &StepPlan, mass: &AttentionMass) {
        let Some(queries) = self.queries() else { return };
        let mut steps: BTreeMap<SeqId, Vec<(u32, f64)>> = BTreeMap::new();
        for g in 0..plan.n_groups() {
            let mut of_group: BTreeMap<SeqId, Vec<(u32, f64)>> = BTreeMap::new();
            let mut last: Option<(SeqId, Vec<(u32, f64)>)> = None;
            // Neighbouring values belong to one sequence.
            for (seq, position, mass) in mass.received(plan, GroupId(g as u16)) {
                if last.as_ref().is_none_or(|(of, _)| *of != seq) {
                    of_group.extend(last.take());
                    last = Some((seq, of_group.remove(&seq).unwrap_or_default()));
                }
                if let Some((_, list)) = &mut last {
                    list.push((position, f64::from(mass)));
                }
            }
            of_group.extend(last);
            for (seq, list) in of_group {
                add(steps.entry(seq).or_default(), &list);
            }
        }
        for span in plan.spans() {
            let received = self.sequences.entry(span.seq).or_default();
            received.truncate(span.start);
            let step = steps.remove(&span.seq).unwrap_or_default();
            received.observe(self.config.by, queries.of(span.n_tokens), step);
        }
    }

    /// Reduces those of `sequences` that store more than `most` tokens to the budget.
    pub fn thin(
        &mut self,
        cache: &mut Cache,
        sequences: impl IntoIterator<Item = SeqId>,
        most: u32,
    ) -> Result<(), Error> {
        let block_tokens = cache.occupancy().map(|group| group.block_tokens).max().unwrap_or(1);
        self.sequences.retain(|seq, _| cache.next_position(*seq).is_some());
        for seq in sequences {
            let Some(next) = cache.next_position(seq) else { continue };
            if cache.seq_len(seq).is_none_or(|stored| stored <= most) {
                continue;
            }
            let mut sequences = cache.sequences().ok_or(Refused::Unsupported(NO_REMOVAL))?;
            let stored = sequences.stored(seq)?;
            let received = self.sequences.entry(seq).or_default();
            let scores = received.scores(self.config.by, &stored);
            let planned = self.config.keep.plan_blocks(next, &scores, block_tokens);
            let removal = planned.map_err(|error| Error::Usage(error.to_string()))?;
            removal.apply(cache, seq)?;
            self.removed += u64::from(removal.n_removed());
        }
        Ok(())
    }
}

const NO_REMOVAL: &str = "this kind of cache removes nothing from the middle: use cells, tree or paged";

#[cfg(test)]
mod tests;
