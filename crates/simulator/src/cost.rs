//! How long a step takes, said by a model of cost instead of a machine.
//!
//! A model is a pure function of the [`BatchShape`]: no state, no clock. It refuses to know about requests.
mod constant;
mod presets;
mod roofline;
mod table;

pub use constant::ConstantRates;
pub use presets::{Hardware, ModelShape};
pub use roofline::Roofline;
pub use table::{
    DecodeAxes, Grid, MeasuredTable, PrefillAxes, Range, Setting, SharedAxes, TableError, TableFile,
};

use kvist_cache::RecomputeCost;
use kvist_scheduler::Batch;

/// What a step works on, summed over its sequences: all that any model here needs to know.
///
/// "Context" counts every token whose K and V a query of the step sees, those the step itself adds included, once
/// per sequence. Attention of a token includes the token itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchShape {
    /// Prompt tokens computed in this step (a cached prefix is not computed).
    pub prefill_tokens: u64,
    /// Sequences those tokens belong to.
    pub prefill_sequences: u64,
    /// Context of those sequences at the end of the step.
    pub prefill_context_tokens: u64,
    /// Sequences that add one token each.
    pub decode_sequences: u64,
    /// Context of those sequences at the end of the step.
    pub decode_context_tokens: u64,
    /// (query, key) pairs of the whole step.
    pub attention_pairs: u64,
}

impl BatchShape {
    /// Of a single step, as the scheduler hands it out.
    pub fn of(batch: &Batch<'_>) -> BatchShape {
        let mut shape = BatchShape::default();
        for work in batch.work {
            match work.decodes {
                true => shape.add_decode(work.first.into()),
                false => shape.add_prefill(work.first.into(), work.n_tokens.into()),
            }
        }
        shape
    }

    /// A chunk of `n_tokens` prompt tokens behind `cached_tokens` that are there already.
    pub fn add_prefill(&mut self, cached_tokens: u64, n_tokens: u64) {
        if n_tokens == 0 {
            return;
        }
        self.prefill_tokens += n_tokens;
        self.prefill_sequences += 1;
        self.prefill_context_tokens += cached_tokens + n_tokens;
        self.attention_pairs += n_tokens * cached_tokens + n_tokens * (n_tokens + 1) / 2;
    }

    /// One new token behind `cached_tokens`.
    pub fn add_decode(&mut self, cached_tokens: u64) {
        self.decode_sequences += 1;
        self.decode_context_tokens += cached_tokens + 1;
        self.attention_pairs += cached_tokens + 1;
    }

    /// New tokens of the step.
    pub fn new_tokens(&self) -> u64 {
        self.prefill_tokens + self.decode_sequences
    }

    /// Tokens whose K and V are read.
    pub fn context_tokens(&self) -> u64 {
        self.prefill_context_tokens + self.decode_context_tokens
    }

    /// Does the step nothing?
    pub fn is_empty(&self) -> bool {
        self.new_tokens() == 0
    }

    /// The decode step after this one, if the same sequences go on: each has one token more.
    pub fn next_decode(mut self) -> BatchShape {
        self.decode_context_tokens += self.decode_sequences;
        self.attention_pairs += self.decode_sequences;
        self
    }
}

/// How long steps take.
pub trait StepCost {
    /// Nanoseconds of one step. The same shape always costs the same; a step with work costs at least 1 ns, so that
    /// virtual time goes on.
    fn step_ns(&self, batch: &BatchShape) -> u64;

    /// Nanoseconds of `n_steps` decode steps of the same sequences, the first of shape `first`. Must equal the sum
    /// of [`StepCost::step_ns`] over the shapes; a model that can say so without adding may.
    fn decode_run_ns(&self, first: &BatchShape, n_steps: u64) -> u64 {
        let mut shape = *first;
        let mut total = 0u64;
        for _ in 0..n_steps {
            total = self.step_ns(&shape).saturating_add(total);
            shape = shape.next_decode();
        }
        total
    }

    /// Nanoseconds of each of the decode steps that begin with shape `first`, however many follow, if a model knows that
    /// they cost the same. Then a run of steps needs no walk.
    fn even_decode_ns(&self, _first: &BatchShape) -> Option<u64> {
        None
    }

    /// One line for the report.
    fn name(&self) -> String;
}

/// How deep a chunk lies that shows what attention costs. Tables go on beyond their last measurement.
const DEEP_TOKENS: u64 = 32_768;

/// What eviction policies that weigh it are told of computing tokens anew, in nanoseconds: a line through two steps
/// of `chunk_tokens` prompt tokens, one at the beginning of a prompt and one behind 32,768 tokens.
///
/// Exact where time is a line over both: constant rates (depth costs nothing) and a roofline that arithmetic bounds. A
/// table whose deeper step is the faster one is taken as flat. Never negative.
pub fn recompute_cost(cost: &dyn StepCost, chunk_tokens: u32) -> RecomputeCost {
    let chunk = u64::from(chunk_tokens.max(1));
    let step_ns = |cached_tokens| {
        let mut shape = BatchShape::default();
        shape.add_prefill(cached_tokens, chunk);
        cost.step_ns(&shape) as f64
    };
    let (shallow_ns, deep_ns) = (step_ns(0), step_ns(DEEP_TOKENS));
    let tokens = chunk as f64;
    let per_pair = ((deep_ns - shallow_ns) / (tokens * DEEP_TOKENS as f64)).max(0.0);
    let per_token = (shallow_ns / tokens - per_pair * (tokens + 1.0) / 2.0).max(0.0);
    RecomputeCost { per_token, per_pair }
}

/// Longest believable time of a step, 104 days: 2^53 ns, which a float still counts by ones.
pub const LONGEST_STEP_NS: u64 = 1 << 53;

/// A duration in whole nanoseconds: rounded to the nearest, at least 1.
fn whole_ns(ns: f64) -> u64 {
    // A cast saturates, and makes NaN 0.
    (ns.round() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) -> bool {
        (found - expected).abs() <= 1e-4 * expected
    }

    /// A roofline's two coefficients come back, constant rates have but one, a table has those it was made with.
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
        // 28,626 tokens deep, attention costs what the linear layers do: a block there costs two of the first.
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
        // 1 ms, and 10 ns more for each of 1,024 tokens and token of context.
        let sloped = recompute_cost(&table("[[1e6, 1.65536e6], [1e6, 672088640]]"), 1024);
        assert!(close(sloped.per_pair, 10.0), "{sloped:?}");
        let faster_deeper = recompute_cost(&table("[[2e6, 1e6], [2e6, 1e6]]"), 1024);
        assert!(faster_deeper.per_pair == 0.0 && faster_deeper.per_token > 0.0, "{faster_deeper:?}");
    }
}
