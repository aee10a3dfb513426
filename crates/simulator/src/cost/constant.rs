//! A constant number of tokens per millisecond, whatever else is in the batch.
use super::{BatchShape, LONGEST_STEP_NS, StepCost, whole_ns};

/// The time of a step is its prompt tokens ÷ one rate + its decoded and draft tokens ÷ another. Context costs nothing, and
/// batching saves nothing: this is the single server of queueing theory, not a model of a real machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConstantRates {
    prefill_tokens_per_ms: f64,
    decode_tokens_per_ms: f64,
}

impl ConstantRates {
    /// Rates in tokens per millisecond: `10.0` is 10,000 tokens per second. `None` unless both are positive and
    /// finite, and a token takes at most [`LONGEST_STEP_NS`].
    pub fn new(prefill_tokens_per_ms: f64, decode_tokens_per_ms: f64) -> Option<ConstantRates> {
        let usable = |rate: f64| rate.is_finite() && rate > 0.0 && 1e6 / rate <= LONGEST_STEP_NS as f64;
        (usable(prefill_tokens_per_ms) && usable(decode_tokens_per_ms))
            .then_some(ConstantRates { prefill_tokens_per_ms, decode_tokens_per_ms })
    }
}

impl StepCost for ConstantRates {
    fn step_ns(&self, batch: &BatchShape) -> u64 {
        if batch.is_empty() {
            return 0;
        }
        whole_ns(
            batch.prefill_tokens as f64 * (1e6 / self.prefill_tokens_per_ms)
                + batch.decode_rows() as f64 * (1e6 / self.decode_tokens_per_ms),
        )
    }

    fn decode_run_ns(&self, first: &BatchShape, n_steps: u64) -> u64 {
        self.step_ns(first).saturating_mul(n_steps)
    }

    fn even_decode_ns(&self, first: &BatchShape) -> Option<u64> {
        Some(self.step_ns(first))
    }

    fn name(&self) -> String {
        format!(
            "constant rates: {} prompt and {} decoded tokens per ms",
            self.prefill_tokens_per_ms, self.decode_tokens_per_ms
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_over_rate() {
        let cost = ConstantRates::new(10.0, 0.1).unwrap();
        for (prefill, decode, ns) in
            [(0, 0, 0), (1, 0, 100_000), (0, 1, 10_000_000), (50, 0, 5_000_000), (20, 3, 32_000_000)]
        {
            let batch =
                BatchShape { prefill_tokens: prefill, decode_sequences: decode, ..Default::default() };
            assert_eq!(cost.step_ns(&batch), ns, "{prefill} + {decode} tokens");
        }
    }

    #[test]
    fn only_usable_rates() {
        for (prefill, decode) in
            [(0.0, 1.0), (1.0, -1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (1e-300, 1.0)]
        {
            assert!(ConstantRates::new(prefill, decode).is_none(), "{prefill} {decode}");
        }
    }
}
