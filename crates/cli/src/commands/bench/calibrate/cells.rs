//! What is measured: the shapes of steps, and their times.
use super::steps::{Ran, Served, Steps};
use super::uninterrupted;

/// Decode steps that are timed per visit.
const DECODE_STEPS: u32 = 4;

/// The axes of the measured grids.
pub struct Axes {
    pub tokens: Vec<u32>,
    pub prefill_context: Vec<u32>,
    pub sequences: Vec<u32>,
    pub decode_context: Vec<u32>,
    /// Prompt tokens of mixed steps.
    pub mixed_prompts: Vec<u32>,
    /// Index into `decode_context` for mixed steps.
    mixed_at: usize,
    /// Tokens of one sequence in a step: the last known one and its drafts.
    pub draft_rows: Vec<u32>,
}

/// Powers of `factor`, starting at `first`, and `last`.
fn powers(first: u32, factor: u32, last: u32) -> Vec<u32> {
    let mut axis: Vec<u32> =
        std::iter::successors(Some(first), |n| n.checked_mul(factor)).take_while(|n| *n < last).collect();
    axis.push(last);
    axis
}

/// Powers of two up to `last`, and between each two of them one odd number, √2 times the smaller. Kernels work on tiles
/// of a power of two of rows: whole tiles are the cheap case, and counts between them cost more than a line through the
/// powers of two would predict.
fn counts(last: u32) -> Vec<u32> {
    let between = |n: u32| (f64::from(n) * std::f64::consts::SQRT_2) as u32 | 1;
    let powers = std::iter::successors(Some(1u32), |n| n.checked_mul(2));
    let mut axis: Vec<u32> = powers.take_while(|n| *n < last).flat_map(|n| [n, between(n)]).collect();
    axis.push(last);
    axis.retain(|n| *n <= last);
    axis.dedup();
    axis
}

impl Axes {
    pub fn of(served: &Served) -> Axes {
        let context = served.context_tokens;
        // The shortest context at which a full step's sequences still fit into the batch.
        let shortest = served.max_batch_tokens.div_ceil(served.max_batch).max(16).min(context);
        let min = 32.min(context);
        let decode_context = powers(min, 4, context);
        Axes {
            tokens: counts(served.max_batch_tokens),
            prefill_context: powers(shortest, 4, context),
            sequences: counts(served.max_batch),
            mixed_at: decode_context.len() / 2,
            decode_context,
            mixed_prompts: powers(1, 4, (served.max_batch_tokens - served.max_batch).max(1)),
            draft_rows: served.draft_rows().collect(),
        }
    }
}

/// Times of every cell, collected over rounds.
pub struct Samples {
    pub prefill: Vec<Vec<Vec<f64>>>,
    pub decode: Vec<Vec<Vec<f64>>>,
    pub mixed: Vec<Vec<Vec<Ran>>>,
    pub drafts: Vec<Vec<Vec<f64>>>,
}

impl Samples {
    pub fn new(axes: &Axes) -> Samples {
        fn grid<T>(rows: &[u32], columns: &[u32]) -> Vec<Vec<Vec<T>>> {
            rows.iter().map(|_| columns.iter().map(|_| Vec::new()).collect()).collect()
        }
        Samples {
            prefill: grid(&axes.tokens, &axes.prefill_context),
            decode: grid(&axes.sequences, &axes.decode_context),
            mixed: grid(&axes.mixed_prompts, &axes.sequences),
            drafts: grid(&axes.draft_rows, &axes.decode_context),
        }
    }

    /// Visits every cell once. `kept`: record the times.
    pub fn round(&mut self, steps: &mut Steps, axes: &Axes, mixes: bool, kept: bool) -> anyhow::Result<()> {
        // The previous round's last cells have pushed the weights out of the processor's caches; in a running server
        // they would be there. Run one step to load them.
        steps.prefill(axes.tokens[0], axes.prefill_context[0])?;
        for (i, &tokens) in axes.tokens.iter().enumerate() {
            for (j, &context) in axes.prefill_context.iter().enumerate() {
                let ran = steps.prefill(tokens, context)?;
                self.prefill[i][j].extend(ran.filter(|_| kept).map(|ran| ran.ns));
            }
            uninterrupted()?;
        }
        for (i, &sequences) in axes.sequences.iter().enumerate() {
            for (j, &context) in axes.decode_context.iter().enumerate() {
                let n_mixed = if mixes && j == axes.mixed_at { axes.mixed_prompts.len() as u32 } else { 0 };
                if steps.begin_decoding(sequences, context, DECODE_STEPS + 2 * n_mixed)? {
                    for _ in 0..DECODE_STEPS {
                        let ran = steps.decode(0)?;
                        self.decode[i][j].extend(ran.filter(|_| kept).map(|ran| ran.ns));
                    }
                    for (k, &tokens) in axes.mixed_prompts.iter().take(n_mixed as usize).enumerate() {
                        let ran = steps.decode(tokens)?;
                        self.mixed[k][i].extend(ran.filter(|_| kept));
                        let after = steps.decode(0)?;
                        self.decode[i][j].extend(after.filter(|_| kept).map(|ran| ran.ns));
                    }
                }
                steps.end_decoding()?;
            }
            uninterrupted()?;
        }
        for (i, &rows) in axes.draft_rows.iter().enumerate() {
            for (j, &context) in axes.decode_context.iter().enumerate() {
                if steps.begin_decoding(1, context, DECODE_STEPS)? {
                    steps.begin_drafting(rows - 1);
                    for _ in 0..DECODE_STEPS {
                        let ran = steps.verify(rows - 1)?;
                        self.drafts[i][j].extend(ran.filter(|_| kept).map(|ran| ran.ns));
                    }
                    steps.end_drafting();
                }
                steps.end_decoding()?;
            }
            uninterrupted()?;
        }
        Ok(())
    }
}
