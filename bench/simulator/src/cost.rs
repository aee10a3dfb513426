//! The one model of cost of both sides: so many tokens per millisecond.
//!
//! dynamo-mocker makes a step that decodes take at least 1 ms, whatever its model says; so ours does here too.
//! A model of its own that is as cheap, `Fixed`, runs no faster there than this one, which it calls back.
use dynamo_mocker::common::perf_model::AisCallback;
use kvist_simulator::cost::{BatchShape, StepCost};

/// Tokens per millisecond.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    pub prefill: f64,
    pub decode: f64,
}

impl Rates {
    fn prefill_ms(self, n_tokens: f64) -> f64 {
        n_tokens / self.prefill
    }
    fn decode_ms(self, n_sequences: f64) -> f64 {
        if n_sequences > 0.0 { (n_sequences / self.decode).max(1.0) } else { 0.0 }
    }
}

impl StepCost for Rates {
    fn step_ns(&self, batch: &BatchShape) -> u64 {
        if batch.is_empty() {
            return 0;
        }
        let ms = self.prefill_ms(batch.prefill_tokens as f64) + self.decode_ms(batch.decode_sequences as f64);
        ((ms * 1e6).round() as u64).max(1)
    }
    fn name(&self) -> String {
        format!(
            "{} prompt and {} decoded tokens per ms, a decode step at least 1 ms",
            self.prefill, self.decode
        )
    }
}

/// It is told whole means over the sequences that compute a prompt, so it may miss a token for each of them.
impl AisCallback for Rates {
    fn predict_prefill(&self, batch_size: usize, mean_tokens: usize, _: usize) -> anyhow::Result<f64> {
        Ok(self.prefill_ms((batch_size * mean_tokens) as f64))
    }
    fn predict_decode(&self, batch_size: usize, _: usize, _: usize) -> anyhow::Result<f64> {
        Ok(self.decode_ms(batch_size as f64))
    }
}
