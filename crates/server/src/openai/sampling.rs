//! Sampling parameters of an answer.
use super::fields::Common;
use kvist_engine::random::random_seed;
use kvist_engine::sampler::SamplerConfig;
use kvist_model::generation_config::SamplingDefaults;

/// Parameters come from the request, then from the model's generation config, then from OpenAI's defaults.
pub(crate) fn sampling(common: &Common, shipped: &SamplingDefaults) -> SamplerConfig {
    SamplerConfig {
        temperature: common.temperature.or(shipped.temperature).unwrap_or(1.0),
        // Negative values mean all tokens, like 0.
        top_k: common.top_k.map(|k| usize::try_from(k).unwrap_or(0)).or(shipped.top_k).unwrap_or(0),
        // 0 keeps only the most likely token, like any share that this token reaches by itself.
        top_p: common.top_p.or(shipped.top_p).unwrap_or(1.0).max(f32::MIN_POSITIVE),
        min_p: common.min_p.or(shipped.min_p).unwrap_or(0.0),
        repetition_penalty: common.repetition_penalty.or(shipped.repetition_penalty).unwrap_or(1.0),
        repetition_window: usize::MAX,
        frequency_penalty: common.frequency_penalty.unwrap_or(0.0),
        presence_penalty: common.presence_penalty.unwrap_or(0.0),
        // -1 is random, as in vLLM and llama.cpp.
        seed: common.seed.filter(|seed| *seed != -1).map_or_else(random_seed, |seed| seed as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a request is silent, vLLM samples with the model maker's settings, and its users expect that.
    #[test]
    fn what_a_model_ships_stands_between_a_request_and_the_defaults_of_openai() {
        let with = |body: &str, shipped: &SamplingDefaults| {
            sampling(&serde_json::from_str::<Common>(body).unwrap(), shipped)
        };
        let neutral = with("{}", &SamplingDefaults::default());
        assert_eq!((neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p), (1.0, 0, 1.0, 0.0));
        let shipped = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            ..SamplingDefaults::default()
        };
        let silent = with("{}", &shipped);
        assert_eq!((silent.temperature, silent.top_k, silent.top_p, silent.min_p), (0.6, 20, 0.95, 0.0));
        assert_eq!(silent.repetition_penalty, 1.1);
        let asked = with(r#"{"temperature": 0, "top_k": -1, "top_p": 1, "repetition_penalty": 1}"#, &shipped);
        assert_eq!(
            (asked.temperature, asked.top_k, asked.top_p, asked.repetition_penalty),
            (0.0, 0, 1.0, 1.0)
        );
    }

    /// Regression: -1 was a seed like any other, so every answer was the same.
    #[test]
    fn a_seed_of_minus_one_is_random() {
        let seed = |body: &str| {
            sampling(&serde_json::from_str::<Common>(body).unwrap(), &SamplingDefaults::default()).seed
        };
        assert_eq!((seed(r#"{"seed": 7}"#), seed(r#"{"seed": -2}"#)), (7, -2_i64 as u64));
        let drawn = r#"{"seed": -1}"#;
        assert_ne!(seed(drawn), seed(drawn));
        assert_ne!(seed("{}"), seed("{}"));
    }
}
