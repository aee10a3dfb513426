//! The same logits and the same text as Hugging Face transformers, on random small models of every family, and
//! through every kind of cache. The fixtures' generator is `tools/fixtures/`.
mod common;
use common::*;
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightForm;
use kvist_model::{Model, ModelFile};
use std::path::Path;

/// f32 sums of a few hundred terms in another order.
const F32_TOLERANCE: f32 = 1e-3;
/// Two tokens this close may change places when sums are ordered differently.
const NEAR_TIE: f32 = 2e-3;
/// Of all logits together, where weights are packed.
const PACKED_TOLERANCE: f32 = 0.025;
const KINDS: [&str; 5] = ["contiguous", "ring", "cells", "tree", "paged"];

/// The length of the difference over the length of what was expected.
fn relative_difference(found: &[f32], expected: &[f32]) -> f32 {
    let length = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let difference = length(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    difference / length(&mut expected.iter().copied())
}

/// Every bad row of one model, in words.
fn compare(case: &Path, file: ModelFile, tolerance: f32, check_text: bool) -> Vec<String> {
    let name = case.file_name().unwrap().to_string_lossy().into_owned();
    let expected = Expected::read(case);
    // Packed weights are multiplied in another arithmetic; what they mean is compared here.
    let form = if name.contains("mxfp4") { WeightForm::F32 } else { WeightForm::AsStored };
    let model = match load_in(file, form) {
        Ok(model) => model,
        Err(error) => return vec![format!("{name}: {error}")],
    };
    let mut bad = Vec::new();
    let n = expected.tokens.len() as u32;
    for kind in KINDS {
        for chunk in [1, 3, n] {
            let mut session = session(&model, &exact(kind, n + 64, chunk));
            let found = logits(&mut session, &expected.tokens);
            let difference = max_difference(&found, &expected.logits);
            if difference.is_nan() || difference > tolerance {
                bad.push(format!("{name} {kind} chunk {chunk}: logits differ by {difference}"));
            }
        }
        if check_text {
            let mut session = session(&model, &exact(kind, n + 64, 16));
            let found = greedy(&mut session, &expected.tokens, 64, false);
            if let Some(at) = found.iter().zip(&expected.generated).position(|(a, b)| a != b)
                && expected.gaps[at] > NEAR_TIE
            {
                bad.push(format!("{name} {kind}: token {at} differs at a lead of {}", expected.gaps[at]));
            }
            assert_eq!(found.len(), 64, "{name} {kind}");
        }
    }
    bad
}

#[test]
fn every_family_and_rope_variant_agrees_with_transformers() {
    let all = cases("parity");
    let bad: Vec<String> = all
        .iter()
        .flat_map(|case| compare(case, ModelFile::Path(case.clone()), F32_TOLERANCE, true))
        .collect();
    assert!(bad.is_empty(), "{} of {} cases:\n{}", bad.len(), all.len(), bad.join("\n"));
}

/// Large batches of bf16 weights are multiplied in bf16 pairs, where the CPU can: activations keep 8 bits, as they do
/// in a runtime that computes in bf16. Experts in MXFP4 take activations in 8 bits, too, and a token near the border between two
/// experts may go to the other.
#[test]
fn the_fast_products_are_near() {
    for case in cases("parity") {
        let expected = Expected::read(&case);
        let n = expected.tokens.len() as u32;
        let model = Model::load(
            &ModelFile::Path(case.clone()),
            &texts(),
            &kvist_backend::MemoryBudget::unlimited(),
            &mut |_, _| {},
        );
        let mut session = session(&model.unwrap().into(), &exact("contiguous", n, n));
        let found = logits(&mut session, &expected.tokens);
        let spread = expected.logits.iter().fold(0f32, |max, x| max.max(x.abs()));
        let difference = max_difference(&found, &expected.logits);
        let name = case.to_string_lossy();
        let allowed = match () {
            () if name.contains("bf16") => 0.05 * spread,
            () if name.contains("mxfp4") => 0.15 * spread,
            () => F32_TOLERANCE,
        };
        assert!(difference <= allowed, "{case:?}: {difference}, of {spread}");
    }
}

#[test]
fn without_a_cache_the_text_is_the_same() {
    for case in cases("parity") {
        let expected = Expected::read(&case);
        let model = load_in(ModelFile::Path(case.clone()), WeightForm::F32).unwrap();
        let n = expected.tokens.len() as u32;
        let mut session = session(&model, &exact("contiguous", n + 64, n + 64));
        let found = greedy(&mut session, &expected.tokens, 64, true);
        if let Some(at) = found.iter().zip(&expected.generated).position(|(a, b)| a != b) {
            assert!(expected.gaps[at] <= NEAR_TIE, "{case:?}: token {at}, lead {}", expected.gaps[at]);
        }
    }
}

#[test]
fn gguf_files_agree_with_transformers_on_the_same_weights() {
    let mut bad = Vec::new();
    for case in cases("gguf") {
        let name = case.file_name().unwrap().to_string_lossy().into_owned();
        let file = ModelFile::Path(case.join("model.gguf"));
        if name.starts_with("llama-q") {
            // Expected are the dequantised weights. Held as f32 they must agree; packed, the kernels round activations
            // to 8 bits in groups of 32, which is noise of a known size: a wrong scale would be far outside.
            let expected = Expected::read(&case);
            for (form, tolerance) in
                [(WeightForm::F32, F32_TOLERANCE), (WeightForm::AsStored, PACKED_TOLERANCE)]
            {
                let options = kvist_model::LoadOptions { form, ..Default::default() };
                let budget = kvist_backend::MemoryBudget::unlimited();
                let model = kvist_model::Model::load(&file, &options, &budget, &mut |_, _| {}).unwrap();
                let n = expected.tokens.len() as u32;
                let model = model.into();
                for (kind, chunk) in KINDS.into_iter().flat_map(|kind| [(kind, 1), (kind, n)]) {
                    let mut session = session(&model, &exact(kind, n, chunk));
                    let found = logits(&mut session, &expected.tokens);
                    let difference = match form {
                        WeightForm::F32 => max_difference(&found, &expected.logits),
                        _ => relative_difference(&found, &expected.logits),
                    };
                    if difference.is_nan() || difference > tolerance {
                        bad.push(format!(
                            "{name} {form} {kind} by {chunk}: {difference}, allowed {tolerance}"
                        ));
                    }
                }
            }
        } else {
            bad.extend(compare(&case, file, F32_TOLERANCE, true));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn both_spellings_of_a_config_mean_the_same() {
    for case in cases("parity") {
        let old = case.join("config.v4.json");
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        let new = ModelConfig::from_json("config.json", &read(&case.join("config.json"))).unwrap();
        let old = ModelConfig::from_json("config.v4.json", &read(&old)).unwrap();
        assert_eq!(new, old, "{case:?}");
    }
}

/// What transformers 5.23 puts where a config.json is silent: the figures are those its classes print.
#[test]
fn silence_means_what_it_means_to_transformers() {
    let config = |class: &str, more: &str| {
        let text = format!(
            r#"{{"architectures": ["{class}ForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
                "num_hidden_layers": 30, "intermediate_size": 64, "vocab_size": 64{more}}}"#
        );
        ModelConfig::from_json("config.json", &text).unwrap()
    };
    for (class, kv_heads, theta, tied) in [
        ("Llama", 32, 1e4, false),
        ("Mistral", 8, 1e4, false),
        ("Qwen2", 32, 1e4, false),
        ("Qwen3", 32, 1e4, false),
        ("SmolLM3", 4, 2e6, true),
        ("Gemma", 16, 1e4, true),
        ("Gemma2", 4, 1e4, true),
        ("Gemma3", 4, 1e6, true),
        ("Phi3", 32, 1e4, false),
    ] {
        let found = config(class, "");
        assert_eq!(
            (found.n_kv_heads, found.ropes[0].theta, found.tie_embeddings),
            (kv_heads, theta, tied),
            "{class}"
        );
        assert_eq!(config(class, r#", "num_key_value_heads": null"#).n_kv_heads, 32, "{class}");
        let windows = |more: &str| config(class, more).layers.iter().map(|l| l.window).collect::<Vec<_>>();
        let silent = |l: usize| match class {
            "Mistral" => Some(4096),
            "Gemma2" => (!(l + 1).is_multiple_of(2)).then_some(4096),
            "Gemma3" => (!(l + 1).is_multiple_of(6)).then_some(4096),
            _ => None,
        };
        assert_eq!(windows(""), (0..30).map(silent).collect::<Vec<_>>(), "{class}");
        if class.starts_with("Qwen") {
            let late = |l: usize| (l >= 28).then_some(4096);
            assert_eq!(windows(r#", "use_sliding_window": true"#), (0..30).map(late).collect::<Vec<_>>());
        }
    }
    let partial =
        config("Llama", r#", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}"#);
    assert_eq!(partial.ropes[0].dim, 64);
}

#[test]
fn dynamic_rope_is_refused_by_name() {
    let text = std::fs::read_to_string(fixtures("refused/rope-dynamic/config.json")).unwrap();
    let error = ModelConfig::from_json("config.json", &text).unwrap_err().to_string();
    assert!(error.contains("dynamic") && error.contains("yarn"), "{error}");
}
