//! Step times from a cost model instead of a real machine.
//!
//! A model is a pure function of the [`BatchShape`]: no state, no clock, and no knowledge of requests.
mod constant;
mod presets;
mod roofline;
mod table;

pub use constant::ConstantRates;
pub use presets::{ExpertShape, Hardware, ModelShape, WindowedLayers};
pub use roofline::Roofline;
pub use table::{
    DecodeAxes, DraftAxes, Grid, MeasuredTable, PrefillAxes, Range, Setting, SharedAxes, TableError,
    TableFile,
};

use kvist_cache::{NodeId, RecomputeCost};
use kvist_scheduler::Batch;

/// The work of a step, summed over its sequences. This is all that the models here need.
///
/// "Context" counts every token whose K and V a query of the step attends to, once per sequence, including the tokens
/// that the step itself adds. A token attends to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchShape {
    /// Prompt tokens computed in this step. Cached prefix tokens are not included.
    pub prefill_tokens: u64,
    /// Number of sequences these tokens belong to.
    pub prefill_sequences: u64,
    /// Context of those sequences at the end of the step.
    pub prefill_context_tokens: u64,
    /// Sequences that decode one token each.
    pub decode_sequences: u64,
    /// Context of those sequences at the end of the step.
    pub decode_context_tokens: u64,
    /// Draft tokens that are verified with those tokens. Their cells are part of `decode_context_tokens`.
    pub draft_tokens: u64,
    /// (query, key) pairs of the whole step.
    pub attention_pairs: u64,
    /// How many positions a query sees in layers with a sliding window, its own included. `None` counts nothing apart for
    /// such layers.
    pub window: Option<u32>,
    /// Tokens whose K and V the queries of the step see through that window. 0 without one.
    pub windowed_context_tokens: u64,
    /// (query, key) pairs within that window. 0 without one.
    pub windowed_pairs: u64,
}

impl BatchShape {
    /// The shape of a single step's batch from the scheduler.
    pub fn of(batch: &Batch<'_>) -> BatchShape {
        BatchShape::of_windowed(batch, None)
    }

    /// As [`of`](Self::of); also counts what layers see through this window.
    pub fn of_windowed(batch: &Batch<'_>, window: Option<u32>) -> BatchShape {
        let mut shape = BatchShape { window, ..BatchShape::default() };
        for (i, work) in batch.work.iter().enumerate() {
            match work.decodes {
                true => shape.add_draft(work.first.into(), batch.draft(i)),
                false => shape.add_prefill(work.first.into(), work.n_tokens.into()),
            }
        }
        shape
    }

    /// Adds a chunk of `n_tokens` prompt tokens after `cached_tokens` cached ones.
    pub fn add_prefill(&mut self, cached_tokens: u64, n_tokens: u64) {
        if n_tokens == 0 {
            return;
        }
        self.prefill_tokens += n_tokens;
        self.prefill_sequences += 1;
        self.prefill_context_tokens += cached_tokens + n_tokens;
        self.attention_pairs += n_tokens * cached_tokens + n_tokens * (n_tokens + 1) / 2;
        if let Some(window) = self.window.map(u64::from) {
            // The first queries see all that is before them, the others a whole window.
            let growing = n_tokens.min(window.saturating_sub(cached_tokens));
            self.windowed_pairs += growing * cached_tokens + growing * (growing + 1) / 2;
            self.windowed_pairs += (n_tokens - growing) * window;
            self.windowed_context_tokens += (cached_tokens + n_tokens).min(window.max(1) - 1 + n_tokens);
        }
    }

    /// Adds what one more query sees through the window, of `visible_tokens` that lie before it or are its own.
    /// `new_tokens` of them were not counted for an earlier query of the same sequence.
    fn add_windowed_query(&mut self, visible_tokens: u64, new_tokens: u64) {
        let Some(window) = self.window.map(u64::from) else { return };
        self.windowed_pairs += visible_tokens.min(window);
        self.windowed_context_tokens += new_tokens.min(window);
    }

    /// Adds one decoded token after `cached_tokens` cached ones.
    pub fn add_decode(&mut self, cached_tokens: u64) {
        self.decode_sequences += 1;
        self.decode_context_tokens += cached_tokens + 1;
        self.attention_pairs += cached_tokens + 1;
        self.add_windowed_query(cached_tokens + 1, cached_tokens + 1);
    }

    /// Adds one decoded token after `cached_tokens` cached ones, and the draft tokens that are verified with it. `parents`
    /// as in [`Batch::draft`]: first that of the decoded token. Empty if nothing is drafted.
    fn add_draft(&mut self, cached_tokens: u64, parents: &[Option<NodeId>]) {
        self.add_decode(cached_tokens);
        let mut depths: Vec<u64> = Vec::with_capacity(parents.len());
        for parent in parents {
            let depth = parent.map_or(0, |NodeId(parent)| depths[parent as usize] + 1);
            depths.push(depth);
            if depth > 0 {
                self.draft_tokens += 1;
                self.decode_context_tokens += 1;
                self.attention_pairs += cached_tokens + 1 + depth;
                self.add_windowed_query(cached_tokens + 1 + depth, 1);
            }
        }
    }

    /// Tokens of decoding sequences that are computed, drafts included.
    pub(crate) fn decode_rows(&self) -> u64 {
        self.decode_sequences + self.draft_tokens
    }

    /// New tokens of the step.
    pub(crate) fn new_tokens(&self) -> u64 {
        self.prefill_tokens + self.decode_rows()
    }

    /// Tokens whose K and V are read.
    pub fn context_tokens(&self) -> u64 {
        self.prefill_context_tokens + self.decode_context_tokens
    }

    /// Returns whether the step has no work.
    pub fn is_empty(&self) -> bool {
        self.new_tokens() == 0
    }

    /// The next decode step of the same sequences: each has one more token. Not for shapes with a window, which stops
    /// growing at another step for each sequence: those steps run one by one.
    pub(crate) fn next_decode(mut self) -> BatchShape {
        debug_assert!(self.window.is_none(), "a window is counted step by step");
        self.decode_context_tokens += self.decode_sequences;
        self.attention_pairs += self.decode_sequences;
        self
    }
}

/// A model of step times.
pub trait StepCost {
    /// Duration of one step in nanoseconds. The same shape always costs the same. A step with work costs at least 1
    /// ns, so that virtual time advances.
    fn step_ns(&self, batch: &BatchShape) -> u64;

    /// Duration in nanoseconds of `n_steps` decode steps of the same sequences; `first` is the shape of the first
    /// step. Must equal the sum of [`StepCost::step_ns`] over the shapes. A model may override this if it can compute
    /// it without the loop.
    fn decode_run_ns(&self, first: &BatchShape, n_steps: u64) -> u64 {
        let mut shape = *first;
        let mut total = 0u64;
        for _ in 0..n_steps {
            total = self.step_ns(&shape).saturating_add(total);
            shape = shape.next_decode();
        }
        total
    }

    /// Duration in nanoseconds of each decode step from shape `first` on, if the model knows that they all cost the
    /// same, however many follow. Callers then need not iterate over the steps.
    fn even_decode_ns(&self, _first: &BatchShape) -> Option<u64> {
        None
    }

    /// The window that shapes must count apart, because layers of the model have one. Steps then run one by one.
    fn window(&self) -> Option<u32> {
        None
    }

    /// One-line description for the report.
    fn name(&self) -> String;
}

/// Context depth of the chunk that shows the cost of attention. Tables extrapolate beyond their last measurement.
const DEEP_TOKENS: u64 = 32_768;

/// The recompute cost in nanoseconds, for eviction policies that use it: a line through two steps of `chunk_tokens`
/// prompt tokens, one at the beginning of a prompt and one after 32,768 tokens.
///
/// Exact if time is linear in both, as with constant rates (depth costs nothing) and a compute-bound roofline. A table
/// whose deeper step is faster is treated as flat. Never negative.
pub fn recompute_cost(cost: &dyn StepCost, chunk_tokens: u32) -> RecomputeCost {
    let chunk = u64::from(chunk_tokens.max(1));
    let step_ns = |cached_tokens| {
        let mut shape = BatchShape { window: cost.window(), ..BatchShape::default() };
        shape.add_prefill(cached_tokens, chunk);
        cost.step_ns(&shape) as f64
    };
    let (shallow_ns, deep_ns) = (step_ns(0), step_ns(DEEP_TOKENS));
    let tokens = chunk as f64;
    let per_pair = ((deep_ns - shallow_ns) / (tokens * DEEP_TOKENS as f64)).max(0.0);
    let per_token = (shallow_ns / tokens - per_pair * (tokens + 1.0) / 2.0).max(0.0);
    RecomputeCost { per_token, per_pair }
}

/// Longest plausible step, 104 days: 2^53 ns, up to which a float represents every integer.
pub const LONGEST_STEP_NS: u64 = 1 << 53;

/// Rounds a duration to whole nanoseconds, at least 1.
fn whole_ns(ns: f64) -> u64 {
    // The cast saturates, and turns NaN into 0.
    (ns.round() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) -> bool {
        (found - expected).abs() <= 1e-4 * expected
    }

    /// The cost of a roofline has its two coefficients, that of constant rates has only one, and that of a table has those
    /// that the table was made with.
    #[test]
    fn what_recomputing_costs() {
        let roofline = Roofline::ideal(
            Hardware::preset("h100-sxm").unwrap(),
            ModelShape::preset("llama-3.1-8b").unwrap(),
        );
        let found = recompute_cost(&roofline, 8192);
        let multiplied = 8_030_261_248.0 - 525_336_576.0;
        let per_pair = 4.0 * 32.0 * 32.0 * 128.0 / 989.5e12 * 1e9;
        assert!(close(found.per_token, 2.0 * multiplied / 989.5e12 * 1e9), "{found:?}");
        assert!(close(found.per_pair, per_pair), "{found:?}");
        // At a depth of 28,626 tokens, attention costs as much as the linear layers, so a block there costs twice the
        // first one.
        let deep = found.of_block(28_626 / 16, 16) / found.of_block(0, 16);
        assert!(close(deep, 2.0) || (deep - 2.0).abs() < 2e-3, "{deep}");

        let constant = ConstantRates::new(10.0, 0.1).unwrap();
        assert_eq!(recompute_cost(&constant, 512), RecomputeCost { per_token: 1e5, per_pair: 0.0 });

        let table = |ns: &str| {
            let grid = format!(
                r#"{{ "format": "kvist-step-cost", "version": 1,
                      "prefill": {{ "tokens": [1, 1024], "context": [0, 65536], "ns": {ns} }},
                      "decode": {{ "sequences": [1], "context": [0], "ns": [[1e6]] }} }}"#
            );
            MeasuredTable::parse("table", &grid).unwrap()
        };
        // 1 ms, plus 10 ns for each of 1,024 tokens and token of context.
        let sloped = recompute_cost(&table("[[1e6, 1.65536e6], [1e6, 672088640]]"), 1024);
        assert!(close(sloped.per_pair, 10.0), "{sloped:?}");
        let faster_deeper = recompute_cost(&table("[[2e6, 1e6], [2e6, 1e6]]"), 1024);
        assert!(faster_deeper.per_pair == 0.0 && faster_deeper.per_token > 0.0, "{faster_deeper:?}");
    }
}
