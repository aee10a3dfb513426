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
pub use table::{Grid, MeasuredTable, TableError};

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

/// Longest believable time of a step, 104 days: 2^53 ns, which a float still counts by ones.
pub const LONGEST_STEP_NS: u64 = 1 << 53;

/// A duration in whole nanoseconds: rounded to the nearest, at least 1.
fn whole_ns(ns: f64) -> u64 {
    // A cast saturates, and makes NaN 0.
    (ns.round() as u64).max(1)
}
