//! `kvist plan` reports exactly the bytes that the budget records. What does not fit is refused before anything is
//! allocated, with valid advice.
use crate::common::{fixtures, session};
use kvist_cache::SeqId;
use kvist_cpu::Cpu;
use kvist_device::{Bytes, Footprint, MemoryBudget, Purpose, Storage, Usage};
use kvist_engine::devices;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::ModelSize;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile, Opened};
use std::sync::Arc;

const KINDS: [&str; 5] = ["contiguous", "ring", "cells", "tree", "paged"];
const DTYPES: [&str; 16] = [
    "f32",
    "f16",
    "bf16",
    "q8",
    "q8-64",
    "q4",
    "q4-64",
    "f32-rot",
    "f16-rot",
    "bf16-rot",
    "q8-rot",
    "q8-64-rot",
    "q4-rot",
    "q4-64-rot",
    "t4",
    "t4-o",
];
const MIB: u64 = 1 << 20;

fn load(file: &ModelFile, format: WeightFormat, budget: &Arc<MemoryBudget>) -> Arc<Model> {
    let options = LoadOptions { format, ..LoadOptions::default() };
    Arc::new(Model::load(file, Cpu::default(), &options, budget, &mut |_, _| {}).unwrap())
}

/// Feeds tokens until the cache is full.
fn fill(session: &mut ModelSession, tokens: usize) {
    let chunk = session.config().max_step_tokens as usize;
    let tokens: Vec<u32> = (0..tokens as u32).map(|i| i % 90).collect();
    for chunk in tokens.chunks(chunk) {
        session.forward(&[SequenceInput::chain(SeqId::ONLY, chunk)], LogitRows::None).unwrap();
    }
}

/// Describes every purpose whose bytes differ.
fn compare(what: &str, plan: &Usage, used: &Usage) -> Vec<String> {
    let differs = |p: &Purpose| plan.of(*p) != used.of(*p);
    let say = |p: Purpose| format!("{what}: {} {} planned, {} recorded", p.name(), plan.of(p), used.of(p));
    Purpose::ALL.into_iter().filter(differs).map(say).collect()
}

fn check(file: ModelFile, pairs: &[(&str, &str)], shapes: &[(u32, u32)]) {
    let registry = devices::all();
    let mut bad = Vec::new();
    for format in [WeightFormat::AsStored, WeightFormat::F32, WeightFormat::Q8_0] {
        let budget = MemoryBudget::unlimited();
        let size = ModelSize::of(&file, &Cpu::default(), format).unwrap();
        let model = load(&file, format, &budget);
        bad.extend(compare(
            &format!("{format}"),
            &Usage::default().with(Purpose::Weights, size.resident_bytes),
            &budget.usage(),
        ));
        // The cache does not depend on the weight form: one form runs with every dtype.
        let pairs = if format == WeightFormat::F32 { pairs } else { &pairs[..1] };
        for (row, (k, v)) in pairs.iter().enumerate() {
            for (column, kind) in KINDS.into_iter().enumerate() {
                let (context, step) = shapes[(row + column) % shapes.len()];
                let config = CacheConfig {
                    kind: kind.into(),
                    k: k.parse().unwrap(),
                    v: v.parse::<Storage>().unwrap().for_values(),
                    max_step_tokens: step,
                    window: (kind == "ring").then_some(context - 5),
                    sinks: if kind == "ring" { 3 } else { 0 },
                    ..CacheConfig::new(context)
                };
                let plan = MemoryPlan::of_session(&size.config, &registry, &config).unwrap();
                let bound = plan.usage.with(Purpose::Weights, size.resident_bytes);
                let what = format!("{format} {kind} K {k} V {v}, {context} tokens by {step}");
                let mut s = session(&model, &config);
                let empty = bound.with(Purpose::KvCache, 0);
                bad.extend(compare(&format!("{what}, empty"), &empty, &budget.usage()));
                let cells = *plan.capacity_cells.iter().max().unwrap();
                fill(&mut s, if kind == "ring" { cells as usize + 17 } else { context as usize });
                bad.extend(compare(&what, &bound, &budget.usage()));
                if plan.capacity_cells.iter().all(|c| *c == cells) {
                    // Pools have whole blocks of 16 cells.
                    let product = plan.kv_bytes_per_token * u64::from(cells.next_multiple_of(16));
                    assert_eq!(
                        plan.usage.of(Purpose::KvCache),
                        product,
                        "{what}: bytes per token are honest"
                    );
                }
                drop(s);
                let left = Usage::default().with(Purpose::Weights, size.resident_bytes);
                bad.extend(compare(&format!("{what}, dropped"), &left, &budget.usage()));
            }
        }
        drop(model);
        assert_eq!(budget.usage(), Usage::default(), "{format}");
    }
    assert!(bad.is_empty(), "{} differ:\n{}", bad.len(), bad.join("\n"));
}

/// Every dtype for K, and each once for V.
fn all_pairs() -> Vec<(&'static str, &'static str)> {
    let same = DTYPES.iter().map(|d| (*d, *d));
    let turned = DTYPES.iter().zip(DTYPES.iter().cycle().skip(5)).map(|(k, v)| (*k, *v));
    same.chain(turned).collect()
}

#[test]
fn plan_equals_what_the_embedded_model_takes() {
    check(ModelFile::Embedded, &all_pairs(), &[(12, 12), (9, 4)]);
}

#[test]
fn plan_equals_what_a_model_with_two_layer_groups_takes() {
    // One group with a window of 9, one without; contexts around the pools' segments of 256 cells.
    let file = ModelFile::Path(fixtures("parity/qwen2-window-mixed"));
    let options = LoadOptions::default();
    let model =
        Model::load(&file, Cpu::default(), &options, &MemoryBudget::unlimited(), &mut |_, _| {}).unwrap();
    assert_eq!(model.layout().n_groups(), 2);
    check(file, &all_pairs(), &[(256, 64), (290, 100), (511, 256), (17, 1)]);
}

/// A budget for the embedded model plus `session_bytes`.
fn tight(session_bytes: u64) -> (Arc<MemoryBudget>, Arc<Model>) {
    let weights =
        ModelSize::of(&ModelFile::Embedded, &Cpu::default(), WeightFormat::AsStored).unwrap().resident_bytes;
    let budget = MemoryBudget::new(weights + session_bytes);
    let model = load(&ModelFile::Embedded, WeightFormat::AsStored, &budget);
    (budget, model)
}

/// The preceding channel measurement takes less memory.
#[test]
fn a_cache_with_outliers_opens_in_exactly_the_memory_that_is_planned() {
    let registry = devices::all();
    for (kind, context, chunk) in [("contiguous", 64, 16), ("cells", 256, 64), ("paged", 500, 4)] {
        let config = CacheConfig {
            kind: kind.into(),
            k: Storage::T4_O,
            v: Storage::T4,
            max_step_tokens: chunk,
            ..CacheConfig::new(context)
        };
        let bytes = |model: &Arc<Model>| {
            MemoryPlan::of_session(model.config(), &registry, &config).unwrap().session_bound()
        };
        let (_, any) = tight(64 * MIB);
        let (budget, model) = tight(bytes(&any));
        let session = ModelSession::new(&model, &registry, &config);
        assert!(session.is_ok(), "{kind} {context} {chunk}: {}", session.map(drop).unwrap_err());
        drop((session, budget));
        // If not even the channel measurement fits, the error names it.
        let (_, model) = tight(100_000);
        let error = ModelSession::new(&model, &registry, &config).map(drop).unwrap_err().to_string();
        assert!(error.contains("t4-o") && error.contains("keys must be computed"), "{error}");
    }
}

#[test]
fn a_session_that_does_not_fit_is_refused_with_advice_that_holds() {
    let registry = devices::all();
    let mut seen = [0; 3]; // --kv, --context, --chunk
    for (kind, storage, context, session_bytes) in [
        ("contiguous", Storage::F32, 1024, 10 * MIB),
        ("cells", Storage::F16, 1024, 7 * MIB),
        ("tree", Storage::F16, 100_000, 20 * MIB),
        ("contiguous", Storage::Q8, 4096, 9 * MIB),
        ("cells", Storage::Q4, 65_536, 12 * MIB),
        ("contiguous", Storage::F32, 4_000_000_000, 64 * MIB),
        ("cells", Storage::F16, 200, MIB),
    ] {
        let config = CacheConfig { kind: kind.into(), k: storage, v: storage, ..CacheConfig::new(context) };
        let (budget, model) = tight(session_bytes);
        let before = budget.usage();
        let plan = MemoryPlan::of_session(model.config(), &registry, &config).unwrap();
        let error = ModelSession::new(&model, &registry, &config).map(drop).unwrap_err().to_string();
        assert_eq!(budget.usage(), before, "nothing is reserved: {error}");
        for part in [
            format!("context of {context} tokens"),
            Bytes(plan.session_bound()).to_string(),
            format!("{} of {} are free", Bytes(session_bytes), Bytes(budget.total())),
        ] {
            assert!(error.contains(&part), "`{part}` is missing: {error}");
        }
        let advice = error.split("; try ").nth(1).unwrap_or_else(|| panic!("no advice: {error}"));
        for part in advice.split(" or ") {
            let words: Vec<&str> = part.split(' ').collect();
            let mut advised = config.clone();
            for flag in words.chunks(2) {
                match *flag {
                    ["--kv", dtype] => {
                        seen[0] += 1;
                        let storage: Storage = dtype.parse().unwrap();
                        (advised.k, advised.v) = (storage, storage);
                    }
                    ["--context", tokens] => {
                        seen[1] += 1;
                        advised.context_tokens = tokens.parse().unwrap();
                        assert!(advised.context_tokens < context, "{error}");
                        // With the next 256 it would not fit.
                        let more =
                            CacheConfig { context_tokens: advised.context_tokens + 256, ..advised.clone() };
                        assert!(ModelSession::new(&model, &registry, &more).is_err(), "{error}: too modest");
                    }
                    ["--chunk", tokens] => {
                        seen[2] += 1;
                        advised.max_step_tokens = tokens.parse().unwrap();
                        assert!(advised.max_step_tokens < config.max_step_tokens, "as it was: {error}");
                    }
                    _ => assert!(advice.contains("--memory"), "{error}"),
                }
            }
            if advice.contains("--memory") {
                continue;
            }
            let fits = ModelSession::new(&model, &registry, &advised);
            assert!(fits.is_ok(), "advised {part} and refused it: {}", fits.err().unwrap());
        }
    }
    assert!(seen.iter().all(|n| *n > 0), "advice met {seen:?} times");
}

/// Impossible requests are refused from headers alone: the test truncates the weights, so that reading them would fail.
#[test]
fn admission_reads_no_weights() {
    let opened = Opened::open(&ModelFile::Embedded, true).unwrap();
    let registry = devices::all();
    let weights = opened.weight_bytes(&Cpu::default(), WeightFormat::AsStored).unwrap();
    let admit = |kind: &str, min: usize, bytes: u64| {
        let config = CacheConfig { kind: kind.into(), ..CacheConfig::new(1024) };
        let budget = MemoryBudget::new(bytes);
        let plan = MemoryPlan::admit(&opened, WeightFormat::AsStored, &registry, &config, min, &budget);
        assert_eq!(budget.usage(), Usage::default());
        plan.map(|plan| plan.session_bound()).map_err(|error| error.to_string())
    };
    let bound = admit("cells", 0, u64::MAX).unwrap();
    assert_eq!(admit("cells", 0, weights + bound), Ok(bound));
    let refused = |kind, min, bytes| admit(kind, min, bytes).unwrap_err();
    assert!(refused("heap", 0, u64::MAX).contains("cpu:heap"));
    assert!(refused("ring", 0, u64::MAX).contains("--window"));
    assert!(refused("cells", 0, weights - 1).contains("weights"));
    assert!(refused("cells", 0, weights + bound - 1).contains("--context"));
    let useless = refused("cells", 1025, weights + bound - 1);
    assert!(useless.contains("try ") && !useless.contains("--context"), "{useless}");
}

/// A session sets aside its full memory bound when it is created, so that a second session cannot make it fail later.
#[test]
fn two_sessions_that_do_not_fit_together_do_not_both_begin() {
    let registry = devices::all();
    let config = CacheConfig { max_step_tokens: 64, ..CacheConfig::new(512) };
    let plan = {
        let (_, model) = tight(MIB);
        MemoryPlan::of_session(model.config(), &registry, &config).unwrap()
    };
    let (budget, model) = tight(2 * plan.session_bound() - 1);
    let mut first = ModelSession::new(&model, &registry, &config).unwrap();
    let second = ModelSession::new(&model, &registry, &config).map(drop).unwrap_err().to_string();
    assert!(second.contains("context of 512 tokens"), "{second}");
    let weights = model.budget().usage().of(Purpose::Weights);
    assert!(budget.usage().of(Purpose::KvCache) == 0, "a promise is not counted as used");
    fill(&mut first, 512);
    assert_eq!(
        budget.usage(),
        plan.usage.with(Purpose::Weights, weights),
        "it grows as far as it was promised"
    );
    drop(first);
    ModelSession::new(&model, &registry, &config).unwrap();
}

#[test]
fn weights_that_do_not_fit_are_refused_by_size() {
    let size = ModelSize::of(&ModelFile::Embedded, &Cpu::default(), WeightFormat::AsStored).unwrap();
    let budget = MemoryBudget::new(size.resident_bytes - 1);
    let options = LoadOptions::default();
    let error = Model::load(&ModelFile::Embedded, Cpu::default(), &options, &budget, &mut |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(error.contains("weights") && error.contains("MiB"), "{error}");
    assert_eq!(budget.usage(), Usage::default());
}

/// A folder with a config.json and no weights counts as a config alone. With weights it is a model, whose tensors must
/// be found.
#[test]
fn a_folder_without_weights_is_its_config() {
    let folder = tempfile::tempdir().unwrap();
    let json = std::fs::read_to_string(fixtures("parity/qwen2-window-mixed/config.json")).unwrap();
    std::fs::write(folder.path().join("config.json"), json).unwrap();
    let of = |path: &std::path::Path| {
        ModelSize::of(&ModelFile::Path(path.into()), &Cpu::default(), WeightFormat::AsStored)
    };
    let (alone, itself) = (of(folder.path()).unwrap(), of(&folder.path().join("config.json")).unwrap());
    assert_eq!((alone.stored_bytes, alone.resident_bytes), (itself.stored_bytes, itself.resident_bytes));
    std::fs::write(folder.path().join("model.safetensors"), "no weights").unwrap();
    assert!(of(folder.path()).is_err(), "weights that are no weights are not passed over");
}

#[test]
fn the_figures_of_llama_7b() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "torch_dtype": "float16"}"#;
    std::fs::write(&path, config).unwrap();
    let size = ModelSize::of(&ModelFile::Path(path), &Cpu::default(), WeightFormat::AsStored).unwrap();
    // 32 layers of 4 projections, 3 matrices of the MLP and 2 norms; two embeddings; a norm.
    let layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096;
    let parameters: u64 = 32 * layer + 2 * 32000 * 4096 + 4096;
    assert_eq!(parameters, 6_738_415_616);
    assert_eq!(size.stored_bytes, 2 * parameters);
    let cache = CacheConfig::new(2048);
    let plan = MemoryPlan::of_session(&size.config, &devices::all(), &cache).unwrap();
    assert_eq!(plan.kv_bytes_per_token, 512 << 10);
    assert_eq!(plan.usage.of(Purpose::KvCache), 1 << 30);
    assert_eq!(plan.kv_bytes_visible(&size.config, &cache), 1 << 30);
    assert_eq!(plan.kv_bits_per_value(&size.config), 16.0);
    // The limit: a token reads its cache and every weight except the embedding, of which it reads one row. Weights are
    // stored in f16, norms as f32.
    let read = size.read_per_token;
    let weights = 2 * parameters + 2 * (32 * 2 + 1) * 4096;
    assert_eq!(size.resident_bytes, Cpu::default().all_weight_bytes(weights));
    assert_eq!(read, weights - (32000 - 1) * 4096 * 2);
    let ceiling = 100e9 / (read + (1 << 30)) as f64;
    let kv_alone = 100e9 / (1u64 << 30) as f64;
    assert!(ceiling < 8.0 && kv_alone > 90.0, "{ceiling} tokens/s with weights, {kv_alone} without");
}

#[test]
fn the_longest_context_is_the_longest() {
    let opened = Opened::open(&ModelFile::Embedded, true).unwrap();
    let (model, registry) = (opened.config(), devices::all());
    let of = |context| CacheConfig { max_step_tokens: 16, ..CacheConfig::new(context) };
    let takes = |context| MemoryPlan::of_session(model, &registry, &of(context)).unwrap().session_bound();
    let longest = |max, free| MemoryPlan::longest_context(model, &registry, &of(max), free);
    // One byte less means one step less. A context that fits completely need not be a multiple of a step.
    assert_eq!([takes(640), takes(640) - 1, takes(704) - 1].map(|free| longest(1000, free)), [640, 576, 640]);
    assert_eq!([takes(1000), takes(1000) - 1].map(|free| longest(1000, free)), [1000, 960]);
    assert_eq!((longest(50, takes(50)), longest(50, takes(50) - 1), longest(1000, 0)), (50, 0, 0));
}

/// Sizes come from an opened file, not from its name.
#[test]
fn a_model_says_its_family_and_how_it_is_stored() {
    for (file, family, stored) in [
        (fixtures("parity").join("qwen3"), "qwen3", "f32"),
        (fixtures("parity").join("llama-gqa-sharded-bf16"), "llama", "bf16"),
        (fixtures("gguf").join("llama-q8_0/model.gguf"), "llama", "Q8_0"),
        (fixtures("gguf").join("llama-gqa-bf16/model.gguf"), "llama", "BF16"),
    ] {
        let mut opened = Opened::open_without_texts(&ModelFile::Path(file.clone()), true).unwrap();
        assert_eq!(opened.config().family.name(), family, "{file:?}");
        assert!(
            opened.stored_as().unwrap().eq_ignore_ascii_case(stored),
            "{file:?}: {:?}",
            opened.stored_as()
        );
        let size = ModelSize::of_opened(&opened, &Cpu::default(), WeightFormat::AsStored).unwrap();
        assert_eq!(
            size.resident_bytes,
            opened.weight_bytes(&Cpu::default(), WeightFormat::AsStored).unwrap(),
            "{file:?}"
        );
        opened.rename("hf:org/name");
        assert_eq!(opened.name(), "hf:org/name");
    }
}
