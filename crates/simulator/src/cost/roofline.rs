//! Step time as the larger of compute time and memory time.
use super::{BatchShape, Hardware, ModelShape, StepCost, whole_ns};

/// The roofline of Williams, Waterman and Patterson (Communications of the ACM 52(4), 2009), for a decoder:
///
/// ```text
/// flops = 2 · multiplied weights · new tokens + 4 · layers · query heads · head dim · (query, key) pairs
/// bytes = weights + KV bytes per token · (context read + new tokens written)
/// time  = max(flops ÷ (peak FLOP/s · efficiency), bytes ÷ (peak bytes/s · efficiency)) + overhead
/// ```
///
/// The output layer is counted for every new token, although a prompt needs it only once. The result is an upper
/// bound: the output layer is 7% of the weights of an 8B model. Every step reads the weights once, which bounds a
/// decode step of one sequence. Activations and network communication between devices are not modelled.
///
/// Layers with a sliding window compute and read only what their window covers. A token computes with the experts that it
/// uses; a step reads those that any of its tokens uses, on average over even and independent choices.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    pub hardware: Hardware,
    pub model: ModelShape,
    /// Fraction of both peaks that kernels reach, above 0 and at most 1.
    pub efficiency: f64,
    /// Added to every step: kernel launches, sampling, scheduling.
    pub overhead_ns: u64,
}

impl Roofline {
    /// At peak performance and without overhead: a lower bound of the time.
    pub fn ideal(hardware: Hardware, model: ModelShape) -> Roofline {
        Roofline { hardware, model, efficiency: 1.0, overhead_ns: 0 }
    }

    /// Floating-point operations of a step. A multiply-add counts as two.
    pub(crate) fn flops(&self, batch: &BatchShape) -> f64 {
        let model = &self.model;
        let multiplied = model.parameters.saturating_sub(model.lookup_parameters) as f64;
        let experts = model.experts.map_or(0.0, |it| it.parameters as f64 * it.used_share());
        let (full, windowed) = model.layers_by_sight();
        let pairs = full * batch.attention_pairs as f64 + windowed * batch.windowed_pairs as f64;
        let per_pair = 4.0 * f64::from(model.query_heads) * f64::from(model.head_dim);
        2.0 * (multiplied + experts) * batch.new_tokens() as f64 + per_pair * pairs
    }

    /// Bytes that a step reads and writes.
    pub fn bytes(&self, batch: &BatchShape) -> f64 {
        let model = &self.model;
        let multiplied = model.parameters.saturating_sub(model.lookup_parameters) as f64;
        let experts = model
            .experts
            .map_or(0.0, |it| it.parameters as f64 * it.bytes_per_weight * it.read_share(batch.new_tokens()));
        let (full, windowed) = model.layers_by_sight();
        let read = full * batch.context_tokens() as f64 + windowed * batch.windowed_context_tokens as f64;
        multiplied * model.bytes_per_weight
            + experts
            + model.layer_kv_bytes() * read
            + model.kv_bytes_per_token() * batch.new_tokens() as f64
    }

    /// Tokens of KV cache that fit in memory next to the weights; 0 if the weights do not fit.
    pub fn cache_tokens(&self) -> u64 {
        let left = self.hardware.memory_bytes as f64 - self.model.weight_bytes();
        (left / self.model.kv_bytes_per_token()).max(0.0) as u64
    }
}

impl StepCost for Roofline {
    fn step_ns(&self, batch: &BatchShape) -> u64 {
        if batch.is_empty() {
            return 0;
        }
        let compute = self.flops(batch) / self.hardware.flops_per_s;
        let memory = self.bytes(batch) / self.hardware.bytes_per_s;
        whole_ns(compute.max(memory) / self.efficiency * 1e9).saturating_add(self.overhead_ns)
    }

    fn window(&self) -> Option<u32> {
        self.model.windowed.map(|windowed| windowed.window)
    }

    fn name(&self) -> String {
        format!(
            "roofline: {} on {} at {:.0}% of its peaks",
            self.model.name,
            self.hardware.name,
            self.efficiency * 100.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ExpertShape, WindowedLayers};
    use super::*;

    fn llama() -> Roofline {
        Roofline::ideal(Hardware::preset("h100-sxm").unwrap(), ModelShape::preset("llama-3.1-8b").unwrap())
    }

    /// The parameter count follows from the shape of the model, so this test catches typing errors in presets.
    #[test]
    fn presets_add_up() {
        // name, vocabulary, hidden, feed-forward, biases of q, k, v
        for (name, vocabulary, hidden, forward, biases) in [
            ("llama-2-7b", 32_000u64, 4_096u64, 11_008u64, false),
            ("llama-3.1-8b", 128_256, 4_096, 14_336, false),
            ("llama-3.1-70b", 128_256, 8_192, 28_672, false),
            ("qwen2.5-7b", 152_064, 3_584, 18_944, true),
            ("qwen2.5-0.5b", 151_936, 896, 4_864, true),
        ] {
            let m = ModelShape::preset(name).unwrap();
            let (q, kv) = (
                u64::from(m.query_heads) * u64::from(m.head_dim),
                u64::from(m.kv_heads) * u64::from(m.head_dim),
            );
            let layer = hidden * q * 2
                + hidden * kv * 2
                + 3 * hidden * forward
                + 2 * hidden
                + if biases { q + 2 * kv } else { 0 };
            let tables = if m.lookup_parameters == 0 { 1 } else { 2 };
            let expected = u64::from(m.layers) * layer + tables * vocabulary * hidden + hidden;
            assert_eq!(m.parameters, expected, "{name}");
            if tables == 2 {
                assert_eq!(m.lookup_parameters, vocabulary * hidden, "{name}");
            }
        }
        assert!(Hardware::names().all(|name| Hardware::preset(name).is_some()));
        assert!(Hardware::preset("abacus").is_none());
    }

    /// A single decoding sequence is memory-bound, a long prompt is compute-bound.
    #[test]
    fn which_roof_bounds() {
        let cost = llama();
        let mut decode = BatchShape::default();
        decode.add_decode(1000);
        let memory_ns: f64 =
            (8_030_261_248.0 - 525_336_576.0) * 2.0 / 3.35e12 * 1e9 + 131_072.0 * 1002.0 / 3.35e3;
        assert_eq!(cost.step_ns(&decode), memory_ns.round() as u64);

        let mut prompt = BatchShape::default();
        prompt.add_prefill(0, 8192);
        let flops: f64 = 2.0 * (8_030_261_248.0 - 525_336_576.0) * 8192.0
            + 4.0 * 32.0 * 32.0 * 128.0 * (8192.0 * 8193.0 / 2.0);
        assert_eq!(cost.step_ns(&prompt), (flops / 989.5e12 * 1e9).round() as u64);
        assert_eq!(cost.model.kv_bytes_per_token(), 131_072.0);
        // 80 GB minus 16.06 GB of weights, at 128 KiB per token.
        assert_eq!(cost.cache_tokens(), 487_819);
    }

    /// Windowed layers cost what a list of queries sees, counted position by position.
    #[test]
    fn windows_bound_what_is_computed_and_read() {
        for window in [1, 5, 16, 1000] {
            for (cached, n_tokens) in [(0, 1), (0, 7), (3, 9), (20, 4), (100, 40)] {
                let mut shape = BatchShape { window: Some(window), ..BatchShape::default() };
                shape.add_prefill(cached, n_tokens);
                let sees = |query: u64, cell: u64| cell <= query && query - cell < u64::from(window);
                let queries = || cached..cached + n_tokens;
                let pairs =
                    queries().map(|query| (0..=query).filter(|&cell| sees(query, cell)).count() as u64);
                let read = (0..cached + n_tokens).filter(|&cell| queries().any(|query| sees(query, cell)));
                let expected = (pairs.sum(), read.count() as u64);
                let found = (shape.windowed_pairs, shape.windowed_context_tokens);
                assert_eq!(found, expected, "window {window}, {n_tokens} tokens after {cached}");

                let mut decode = BatchShape { window: Some(window), ..BatchShape::default() };
                decode.add_decode(cached);
                let visible = (cached + 1).min(window.into());
                assert_eq!((decode.windowed_pairs, decode.windowed_context_tokens), (visible, visible));
            }
        }
        // 24 of 32 layers see 1,000 tokens: of a context of 10,000 they read a tenth.
        let windowed = Some(WindowedLayers { layers: 24, window: 1000 });
        let full = llama();
        let some = Roofline { model: ModelShape { windowed, ..full.model.clone() }, ..full.clone() };
        let mut shape = BatchShape { window: some.window(), ..BatchShape::default() };
        shape.add_decode(9_999);
        let saved = 24.0 * 4096.0 * 9_000.0;
        assert_eq!(full.bytes(&shape) - some.bytes(&shape), saved);
        assert_eq!(full.flops(&shape) - some.flops(&shape), 4.0 * 32.0 * 128.0 * 24.0 * 9_000.0);
    }

    /// A token computes with its own experts; many tokens read all of them.
    #[test]
    fn experts_are_read_as_tokens_choose_them() {
        let dense = llama();
        let experts =
            ExpertShape { parameters: 1_000_000, bytes_per_weight: 0.5, per_layer: 4, per_token: 1 };
        let routed =
            Roofline { model: ModelShape { experts: Some(experts), ..dense.model.clone() }, ..dense.clone() };
        let of = |n: u64| {
            let mut shape = BatchShape::default();
            (0..n).for_each(|_| shape.add_decode(0));
            (routed.flops(&shape) - dense.flops(&shape), routed.bytes(&shape) - dense.bytes(&shape))
        };
        assert_eq!(of(1), (2.0 * 250_000.0, 0.25 * 500_000.0));
        assert_eq!(of(2), (4.0 * 250_000.0, (1.0 - 0.75 * 0.75) * 500_000.0));
        assert!((of(100).1 - 500_000.0).abs() < 1.0);
        assert_eq!(routed.model.weight_bytes() - dense.model.weight_bytes(), 500_000.0);
    }

    #[test]
    fn a_run_of_steps_costs_what_its_steps_cost() {
        let cost = llama();
        let mut first = BatchShape::default();
        first.add_decode(10);
        first.add_decode(5000);
        let (mut one_by_one, mut cached) = (0, [10, 5000]);
        for _ in 0..100 {
            let mut shape = BatchShape::default();
            for context in &mut cached {
                shape.add_decode(*context);
                *context += 1;
            }
            one_by_one += cost.step_ns(&shape);
        }
        assert_eq!(cost.decode_run_ns(&first, 100), one_by_one);
    }
}
