//! The RoPE scaling that files define, in the words of transformers 4 and 5 and of llama.cpp.
use crate::gguf::{F32, File, typed, words};
use kvist_model::config::{ModelConfig, RopeScaling};
use kvist_model::weights::Gguf;
use serde_json::{Value, json};

const LINEAR: RopeScaling = RopeScaling::Linear { factor: 8.0 };

/// The scaling of a GGUF file with these values.
fn of_gguf(factors: &[(&str, f32)], kind: Option<&str>) -> RopeScaling {
    let mut file = File::good();
    for (key, factor) in factors {
        file.set(&format!("llama.rope.{key}"), typed(F32, &factor.to_le_bytes()));
    }
    if let Some(kind) = kind {
        file.set("llama.rope.scaling.type", words(kind));
    }
    let gguf = Gguf::from_bytes("rope.gguf", file.bytes()).unwrap();
    ModelConfig::from_gguf(&gguf).unwrap().ropes[0].scaling.clone()
}

/// Regression: a factor without a type was ignored, and a factor of 0, which means none, was refused.
#[test]
fn a_factor_without_a_type_is_linear() {
    let (new, old) = ("scaling.factor", "scale_linear");
    for (factors, kind, expected) in [
        (&[(new, 8.0)][..], None, LINEAR),
        (&[(new, 8.0)], Some("linear"), LINEAR),
        (&[(old, 8.0)], None, LINEAR),
        (&[(old, 8.0)], Some("linear"), LINEAR),
        (&[(old, 4.0), (new, 8.0)], None, LINEAR),
        (&[(new, 8.0)], Some("none"), RopeScaling::None),
        (&[(new, 0.0)], None, RopeScaling::None),
        (&[(new, 0.0)], Some("linear"), RopeScaling::None),
        (&[(old, 0.0)], None, RopeScaling::None),
        (&[], Some("linear"), RopeScaling::None),
        (&[], None, RopeScaling::None),
    ] {
        assert_eq!(of_gguf(factors, kind), expected, "{factors:?} {kind:?}");
    }
}

/// The theta and the scaling of each rotary embedding of a `config.json` with these fields.
fn of_json(class: &str, fields: &Value) -> Vec<(f64, RopeScaling)> {
    let mut config = json!({"architectures": [class], "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4,
        "num_hidden_layers": 1, "intermediate_size": 12, "vocab_size": 5, "num_key_value_heads": 1});
    let (all, fields) = (config.as_object_mut().unwrap(), fields.as_object().unwrap());
    all.extend(fields.clone());
    let config = ModelConfig::from_json("config.json", &config.to_string()).unwrap();
    config.ropes.into_iter().map(|rope| (rope.theta, rope.scaling)).collect()
}

/// Regression: `rope_scaling`, by which users extend the context, was ignored beside `rope_parameters`. It comes first in
/// transformers 5, unless it is empty.
#[test]
fn rope_scaling_comes_before_rope_parameters() {
    let (linear, plain) =
        (json!({"rope_type": "linear", "factor": 8.0}), json!({"rope_type": "default", "rope_theta": 5e5}));
    for (fields, expected) in [
        (json!({"rope_parameters": plain, "rope_scaling": linear, "rope_theta": 1e6}), (1e6, LINEAR)),
        (json!({"rope_parameters": plain, "rope_scaling": {}}), (5e5, RopeScaling::None)),
        (json!({"rope_parameters": plain, "rope_scaling": null}), (5e5, RopeScaling::None)),
        (json!({"rope_parameters": linear}), (1e4, LINEAR)),
        (json!({"rope_scaling": linear}), (1e4, LINEAR)),
    ] {
        assert_eq!(of_json("LlamaForCausalLM", &fields), [expected], "{fields}");
    }
    // With one set per layer type, it belongs to full attention.
    let both = json!({"rope_scaling": linear, "sliding_window": 4, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}});
    assert_eq!(of_json("Gemma3ForCausalLM", &both), [(2e6, LINEAR), (3e4, RopeScaling::None)]);
    // gpt-oss stretches without saying so.
    let silent = of_json(
        "GptOssForCausalLM",
        &json!({"rope_scaling": {}, "num_local_experts": 2, "num_experts_per_tok": 1}),
    );
    assert!(matches!(silent[0].1, RopeScaling::Yarn { .. }), "{silent:?}");
}
