//! Invalid Hugging Face folders. Each is refused with an error that names the file, mapped or read.
use crate::common::fixtures;
use kvist_cpu::Cpu;
use kvist_device::MemoryBudget;
use kvist_model::{LoadOptions, Model, ModelFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A folder before it is written. Every row of a table changes one thing in a valid one.
struct Folder {
    config: Value,
    tensors: Vec<Tensor>,
    /// Files in addition to, or instead of, those from the fields above. `None` leaves a file out.
    files: BTreeMap<&'static str, Option<Vec<u8>>>,
}

#[derive(Clone)]
struct Tensor {
    name: String,
    shape: Value,
    dtype: &'static str,
    offsets: Option<(Value, Value)>,
}

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Folder {
    /// A loadable Llama with one layer: hidden 8, 2 heads of 4 with 1 KV head, MLP width 12, 5 tokens.
    fn good() -> Self {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 12, "vocab_size": 5, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": true, "rope_theta": 10000.0,
        });
        let layer = |part: &str| format!("model.layers.0.{part}.weight");
        let tensors = [
            ("model.embed_tokens.weight".to_string(), json!([5, 8])),
            ("model.norm.weight".to_string(), json!([8])),
            (layer("input_layernorm"), json!([8])),
            (layer("post_attention_layernorm"), json!([8])),
            (layer("self_attn.q_proj"), json!([8, 8])),
            (layer("self_attn.k_proj"), json!([4, 8])),
            (layer("self_attn.v_proj"), json!([4, 8])),
            (layer("self_attn.o_proj"), json!([8, 8])),
            (layer("mlp.gate_proj"), json!([12, 8])),
            (layer("mlp.up_proj"), json!([12, 8])),
            (layer("mlp.down_proj"), json!([8, 12])),
        ];
        let tensors = tensors.map(|(name, shape)| Tensor { name, shape, dtype: "F32", offsets: None });
        Folder { config, tensors: tensors.to_vec(), files: BTreeMap::new() }
    }

    fn set(&mut self, field: &str, value: Value) {
        self.config[field] = value;
    }
    fn file(&mut self, name: &'static str, contents: &str) {
        self.files.insert(name, Some(contents.as_bytes().to_vec()));
    }
    /// The weights in two shards with an index.
    fn shards(&mut self) -> Value {
        let (first, second) = self.tensors.split_at(4);
        let index: serde_json::Map<String, Value> = self
            .tensors
            .iter()
            .enumerate()
            .map(|(i, t)| (t.name.clone(), json!(["a.safetensors", "b.safetensors"][usize::from(i >= 4)])))
            .collect();
        let (first, second) = (safetensors(first), safetensors(second));
        self.files.extend([(WEIGHTS, None), ("a.safetensors", Some(first)), ("b.safetensors", Some(second))]);
        json!({ "weight_map": index })
    }
    /// The shards with a modified index.
    fn index(&mut self, change: impl FnOnce(&mut Value)) {
        let mut index = self.shards();
        change(&mut index);
        self.file(INDEX, &index.to_string());
    }
    /// The weight file with this header and enough data.
    fn header(&mut self, len: Option<u64>, header: &str) {
        let mut bytes = len.unwrap_or(header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + 64, 0);
        self.files.insert(WEIGHTS, Some(bytes));
    }

    fn write(&self, folder: &Path) {
        let mut files: BTreeMap<&str, Option<Vec<u8>>> = BTreeMap::new();
        files.insert("config.json", Some(self.config.to_string().into_bytes()));
        files.insert(WEIGHTS, Some(safetensors(&self.tensors)));
        files.extend(self.files.iter().map(|(name, contents)| (*name, contents.clone())));
        for (name, contents) in files {
            if let Some(contents) = contents {
                std::fs::write(folder.join(name), contents).unwrap();
            }
        }
    }
}

fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut end = 0u64;
    for tensor in tensors {
        let dims = tensor.shape.as_array().unwrap().iter().filter_map(Value::as_u64);
        let each = if tensor.dtype.ends_with("64") { 8 } else { 4 };
        let start = end;
        end += each * dims.fold(1u64, u64::saturating_mul).min(1 << 12);
        let (from, until) = tensor.offsets.clone().unwrap_or((json!(start), json!(end)));
        let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [from, until] });
        header.insert(tensor.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    for i in 0..end / 4 {
        bytes.extend((0.01 * (i % 37) as f32 - 0.15).to_le_bytes());
    }
    bytes
}

fn load(path: &Path, mmap: bool) -> Result<Model, String> {
    let options = LoadOptions { mmap, ..LoadOptions::default() };
    let file = ModelFile::Path(path.to_path_buf());
    Model::load(&file, Cpu::default(), &options, &MemoryBudget::unlimited(), &mut |_, _| {})
        .map_err(|e| e.to_string())
}

#[test]
fn the_good_folder_loads() {
    for sharded in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut good = Folder::good();
        if sharded {
            good.index(|_| ());
        }
        good.write(folder.path());
        for mmap in [false, true] {
            let model = load(folder.path(), mmap).unwrap();
            assert!(model.tokenizer().is_none() && model.chat_template().is_none(), "the folder has neither");
        }
    }
}

#[test]
fn weights_cut_anywhere_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    Folder::good().write(folder.path());
    let path = folder.path().join(WEIGHTS);
    let good = std::fs::read(&path).unwrap();
    for len in 0..good.len() {
        std::fs::write(&path, &good[..len]).unwrap();
        let Err(error) = load(folder.path(), len % 2 == 0) else { panic!("loads when cut to {len}") };
        assert!(error.contains(WEIGHTS), "cut to {len}: {error}");
    }
}

type Row = (&'static str, fn(&mut Folder), &'static [&'static str]);

const WEIGHT_FILES: &[Row] = &[
    ("no weights", |f| _ = f.files.insert(WEIGHTS, None), &["neither model.safetensors nor"]),
    ("an empty file", |f| f.file(WEIGHTS, ""), &[WEIGHTS, "is empty"]),
    ("a header without end", |f| f.header(Some(u64::MAX), "{}"), &[WEIGHTS, "header"]),
    ("a header past the end", |f| f.header(Some(1_000), "{}"), &[WEIGHTS, "header"]),
    ("a header of 99 MB", |f| f.header(Some(99_000_000), "{}"), &[WEIGHTS, "header"]),
    ("a header that ends early", |f| f.header(Some(1), "{}"), &[WEIGHTS]),
    ("a header of no JSON", |f| f.header(None, "nonsense"), &[WEIGHTS, "header"]),
    ("a header of a list", |f| f.header(None, "[1,2]"), &[WEIGHTS]),
    ("a header of brackets", |f| f.header(None, &"[".repeat(100_000)), &[WEIGHTS]),
    (
        "one tensor twice",
        |f| {
            let entry = r#""x":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}"#;
            f.header(None, &format!("{{{entry},{entry}}}"));
        },
        &[WEIGHTS, "`x` twice"],
    ),
    ("offsets of text", |f| f.tensors[3].offsets = Some((json!("0"), json!(32))), &[WEIGHTS]),
    ("offsets below nothing", |f| f.tensors[3].offsets = Some((json!(-32), json!(0))), &[WEIGHTS]),
    ("offsets past the end", |f| f.tensors[10].offsets = Some((json!(1 << 20), json!(2 << 20))), &[WEIGHTS]),
    ("offsets without end", |f| f.tensors[10].offsets = Some((json!(0), json!(u64::MAX))), &[WEIGHTS]),
    ("offsets backwards", |f| f.tensors[10].offsets = Some((json!(64), json!(32))), &[WEIGHTS]),
    ("tensors that overlap", |f| f.tensors[1].offsets = Some((json!(0), json!(32))), &[WEIGHTS]),
    ("a shape that overflows", |f| f.tensors[0].shape = json!([u64::MAX, u64::MAX]), &[WEIGHTS]),
    ("a shape of u64", |f| f.tensors[0].shape = json!([1u64 << 63, 4]), &[WEIGHTS]),
    ("a shape of fractions", |f| f.tensors[0].shape = json!([5.5, 8]), &[WEIGHTS]),
    ("a shape with 0", |f| f.tensors[1].shape = json!([0]), &[WEIGHTS, "model.norm.weight"]),
    ("an unknown dtype", |f| f.tensors[0].dtype = "F33", &[WEIGHTS]),
    ("i64", |f| f.tensors[4].dtype = "I64", &[WEIGHTS, "q_proj", "I64", "f32, f16, bf16, and int8"]),
    ("f64", |f| f.tensors[0].dtype = "F64", &[WEIGHTS, "embed_tokens", "F64", "f32, f16, bf16, and int8"]),
    ("i32", |f| f.tensors[1].dtype = "I32", &[WEIGHTS, "model.norm", "I32"]),
    (
        "a wrong shape",
        |f| f.tensors[5].shape = json!([8, 8]),
        &["model.layers.0.self_attn.k_proj.weight", "[8, 8]", "[4, 8]"],
    ),
    ("a matrix in a row", |f| f.tensors[4].shape = json!([64]), &["q_proj", "[64]", "[8, 8]"]),
    ("a tensor left out", |f| _ = f.tensors.remove(6), &["lacks", "model.layers.0.self_attn.v_proj.weight"]),
    ("no embedding", |f| _ = f.tensors.remove(0), &["lacks", "model.embed_tokens.weight"]),
    ("a head left out", |f| f.set("tie_word_embeddings", json!(false)), &["lacks", "lm_head.weight"]),
];

const INDEXES: &[Row] = &[
    ("an index of no JSON", |f| _ = (f.shards(), f.file(INDEX, "{")), &[INDEX, "not JSON"]),
    ("an index that is a list", |f| _ = (f.shards(), f.file(INDEX, "[]")), &[INDEX, "weight_map"]),
    ("an index of nothing", |f| f.index(|i| i["weight_map"] = json!({})), &[INDEX, "no shard"]),
    ("an index of numbers", |f| f.index(|i| i["weight_map"]["x"] = json!(3)), &[INDEX, "`x`", "no file"]),
    (
        "a shard above",
        |f| f.index(|i| i["weight_map"]["x"] = json!("../a.safetensors")),
        &[INDEX, "../a.safetensors", "outside"],
    ),
    (
        "a shard elsewhere",
        |f| f.index(|i| i["weight_map"]["x"] = json!("/etc/passwd")),
        &[INDEX, "/etc/passwd", "outside"],
    ),
    ("a shard below", |f| f.index(|i| i["weight_map"]["x"] = json!("a/b")), &[INDEX, "a/b", "outside"]),
    ("a shard of no name", |f| f.index(|i| i["weight_map"]["x"] = json!("")), &[INDEX, "outside"]),
    ("a shard of dots", |f| f.index(|i| i["weight_map"]["x"] = json!("..")), &[INDEX, "`..`", "outside"]),
    (
        "a shard that is not there",
        |f| f.index(|i| i["weight_map"]["x"] = json!("c.safetensors")),
        &["c.safetensors", "cannot read"],
    ),
    (
        "a tensor in two shards",
        |f| {
            f.index(|_| ());
            let again = safetensors(&Folder::good().tensors[..5]);
            f.files.insert("a.safetensors", Some(again));
        },
        &["b.safetensors", "q_proj", "another shard"],
    ),
    (
        "a shard cut short",
        |f| {
            f.index(|_| ());
            let cut = f.files["b.safetensors"].as_ref().map(|bytes| bytes[..bytes.len() - 4].to_vec());
            f.files.insert("b.safetensors", cut);
        },
        &["b.safetensors"],
    ),
];

const CONFIGS: &[Row] = &[
    ("no config", |f| _ = f.files.insert("config.json", None), &["config.json", "cannot read"]),
    ("an empty config", |f| f.file("config.json", ""), &["is empty"]),
    ("a config of no JSON", |f| f.file("config.json", "{,}"), &["not JSON"]),
    ("a config of brackets", |f| f.file("config.json", &"[".repeat(100_000)), &["not JSON"]),
    ("a config of no text", |f| _ = f.files.insert("config.json", Some(vec![0xff, 0xfe])), &["UTF-8"]),
    ("a list", |f| f.config = json!([]), &["not a JSON object"]),
    ("null", |f| f.config = json!(null), &["not a JSON object"]),
    ("nothing", |f| f.config = json!({}), &["unknown architecture", "(none named)", "LlamaForCausalLM"]),
    (
        "no architectures",
        |f| (f.set("architectures", json!([])), f.set("model_type", json!("gpt2"))).0,
        &["unknown architecture", "gpt2", "LlamaForCausalLM"],
    ),
    (
        "an unknown architecture",
        |f| f.set("architectures", json!(["MambaForCausalLM"])),
        &["MambaForCausalLM", "Gemma3ForCausalLM, GemmaForCausalLM, GptOssForCausalLM, LlamaForCausalLM"],
    ),
    // Learned absolute positions: behind the window of a ring they would be others.
    (
        "learned positions",
        |f| f.set("architectures", json!(["GPT2LMHeadModel"])),
        &["unknown architecture", "GPT2LMHeadModel"],
    ),
    ("architectures of text", |f| f.set("architectures", json!("Llama")), &["architectures", "a list"]),
    ("no layers given", |f| f.set("num_hidden_layers", json!(null)), &["num_hidden_layers", "missing"]),
    ("no hidden size", |f| f.set("hidden_size", json!(null)), &["hidden_size", "missing"]),
    ("no heads given", |f| f.set("num_attention_heads", json!(null)), &["num_attention_heads", "missing"]),
    ("no width", |f| f.set("intermediate_size", json!(null)), &["intermediate_size", "missing"]),
    ("no vocabulary", |f| f.set("vocab_size", json!(null)), &["vocab_size", "missing"]),
    ("no layers", |f| f.set("num_hidden_layers", json!(0)), &["num_hidden_layers", "is 0"]),
    ("layers below nothing", |f| f.set("num_hidden_layers", json!(-1)), &["num_hidden_layers", "is -1"]),
    ("1e18 layers", |f| f.set("num_hidden_layers", json!(1e18)), &["num_hidden_layers", "a size"]),
    (
        "10^18 layers",
        |f| f.set("num_hidden_layers", json!(1_000_000_000_000_000_000u64)),
        &["num_hidden_layers"],
    ),
    ("layers by text", |f| f.set("num_hidden_layers", json!("1")), &["num_hidden_layers", "a size"]),
    ("half a layer", |f| f.set("num_hidden_layers", json!(0.5)), &["num_hidden_layers", "0.5"]),
    ("60,000 layers", |f| f.set("num_hidden_layers", json!(60_000)), &["lacks", "model.layers.1."]),
    ("no heads", |f| f.set("num_attention_heads", json!(0)), &["num_attention_heads", "is 0"]),
    (
        "heads that do not divide",
        |f| f.set("num_attention_heads", json!(3)),
        &["num_attention_heads", "is 3", "does not divide hidden_size 8"],
    ),
    (
        "KV heads that do not divide",
        |f| f.set("num_key_value_heads", json!(3)),
        &["num_key_value_heads", "is 3", "does not divide the 2"],
    ),
    (
        "a rope for every type of layer",
        |f| f.set("rope_parameters", json!({"full_attention": {"rope_type": "default", "rope_theta": 1e6}})),
        &["rope_parameters", "full_attention", "one RoPE for all layers"],
    ),
    ("no KV heads", |f| f.set("num_key_value_heads", json!(0)), &["num_key_value_heads", "is 0"]),
    ("an odd head", |f| f.set("head_dim", json!(5)), &["head_dim", "is 5", "even"]),
    ("a head of nothing", |f| f.set("head_dim", json!(0)), &["head_dim", "is 0"]),
    ("a head of u64", |f| f.set("head_dim", json!(u64::MAX - 1)), &["head_dim", "which is out of range"]),
    ("a wide model", |f| f.set("hidden_size", json!(1u64 << 62)), &["hidden_size", "which is out of range"]),
    (
        "every word there is",
        |f| f.set("vocab_size", json!(u64::MAX)),
        &["vocab_size", "which is out of range"],
    ),
    ("a larger vocabulary", |f| f.set("vocab_size", json!(6)), &["embed_tokens", "[5, 8]", "[6, 8]"]),
    ("no context", |f| f.set("max_position_embeddings", json!(0)), &["max_position_embeddings", "is 0"]),
    ("an epsilon of text", |f| f.set("rms_norm_eps", json!("small")), &["rms_norm_eps", "a number"]),
    ("an epsilon beyond f32", |f| f.set("rms_norm_eps", json!(1e300)), &["rms_norm_eps", "inf"]),
    ("an epsilon below 0", |f| f.set("rms_norm_eps", json!(-1.0)), &["rms_norm_eps", "-1"]),
    (
        "tied by text",
        |f| f.set("tie_word_embeddings", json!("yes")),
        &["tie_word_embeddings", "true or false"],
    ),
    ("another activation", |f| f.set("hidden_act", json!("gelu")), &["hidden_act", "gelu", "silu"]),
    (
        "packed weights",
        |f| f.set("quantization_config", json!({"bits": 4})),
        &["quantization_config", "original checkpoint", "GGUF"],
    ),
    ("an end of text", |f| f.set("eos_token_id", json!("</s>")), &["eos_token_id", "token ids"]),
    ("an end below nothing", |f| f.set("eos_token_id", json!([1, -1])), &["eos_token_id", "-1"]),
    ("an owner above", |f| f.set("kv_owner_layer", json!([1])), &["kv_owner_layer"]),
    ("an owner of no layer", |f| f.set("kv_owner_layer", json!([u64::MAX])), &["kv_owner_layer"]),
    ("an owner below nothing", |f| f.set("kv_owner_layer", json!([-1])), &["kv_owner_layer", "-1"]),
    ("owners of text", |f| f.set("kv_owner_layer", json!("all")), &["kv_owner_layer", "a list"]),
    ("too many owners", |f| f.set("kv_owner_layer", json!([0, 0])), &["kv_owner_layer", "2 of 1 layers"]),
    (
        "a borrowed owner",
        |f| {
            f.set("num_hidden_layers", json!(3));
            f.set("kv_owner_layer", json!([0, 0, 1]));
        },
        &["kv_owner_layer", "layer 2", "borrow from 1"],
    ),
    (
        "an owner with another window",
        |f| {
            f.set("num_hidden_layers", json!(2));
            f.set("kv_owner_layer", json!([0, 0]));
            f.set("use_sliding_window", json!(true));
            f.set("sliding_window", json!(4));
            f.set("layer_types", json!(["full_attention", "sliding_attention"]));
        },
        &["kv_owner_layer", "another window"],
    ),
    (
        "an unknown layer",
        |f| f.set("layer_types", json!(["linear_attention"])),
        &["layer_types", "linear_attention"],
    ),
    ("layers of numbers", |f| f.set("layer_types", json!([1])), &["layer_types", "1"]),
    ("too few layers", |f| f.set("layer_types", json!([])), &["layer_types", "0 of 1 layers"]),
    (
        "a window of nothing",
        |f| (f.set("use_sliding_window", json!(true)), f.set("sliding_window", json!(0))).0,
        &["sliding_window", "is 0"],
    ),
    ("rope base 0", |f| f.set("rope_theta", json!(0)), &["rope_theta", "is 0"]),
    ("rope base below 0", |f| f.set("rope_theta", json!(-1e4)), &["rope_theta", "-10000"]),
    ("rope of text", |f| f.set("rope_scaling", json!("linear")), &["rope_scaling", "not a JSON object"]),
    (
        "unknown rope",
        |f| f.set("rope_scaling", json!({"type": "su"})),
        &["`su`", "linear, llama3, yarn and longrope"],
    ),
    ("rope without factor", |f| f.set("rope_scaling", json!({"type": "linear"})), &["factor", "missing"]),
    ("rope by 0", |f| f.set("rope_scaling", json!({"type": "linear", "factor": 0})), &["factor", "is 0"]),
    (
        "a ramp backwards",
        |f| {
            let ramp =
                json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1});
            f.set("rope_parameters", ramp);
        },
        &["high_freq_factor", "not above 4"],
    ),
    ("a rope of nothing", |f| f.set("partial_rotary_factor", json!(0)), &["rope dimension", "is 0"]),
    ("a rope beyond", |f| f.set("partial_rotary_factor", json!(1e300)), &["rope dimension"]),
    (
        "a broken generation config",
        |f| f.file("generation_config.json", "[]"),
        &["generation_config.json", "not a JSON object"],
    ),
    ("a broken tokenizer", |f| f.file("tokenizer.json", "{}"), &["tokenizer.json"]),
    (
        "a broken tokenizer config",
        |f| f.file("tokenizer_config.json", "{"),
        &["tokenizer_config.json", "not JSON"],
    ),
    ("a broken template", |f| f.file("chat_template.jinja", "{% for %}"), &["chat_template.jinja", "1"]),
];

#[test]
fn lying_folders_are_refused() {
    let mut bad = Vec::new();
    for (what, change, expected) in WEIGHT_FILES.iter().chain(INDEXES).chain(CONFIGS) {
        let folder = tempfile::tempdir().unwrap();
        let mut model = Folder::good();
        change(&mut model);
        model.write(folder.path());
        let name = folder.path().display().to_string();
        for mmap in [false, true] {
            match load(folder.path(), mmap) {
                Ok(_) => bad.push(format!("{what}: loads")),
                Err(error) => {
                    for word in expected.iter().copied().chain([name.as_str()]) {
                        if !error.contains(word) {
                            bad.push(format!("{what}: no `{word}` in: {error}"));
                        }
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{} bad:\n{}", bad.len(), bad.join("\n"));
}

#[test]
fn paths_that_are_no_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("weights.safetensors"), b"").unwrap();
    std::fs::write(path("empty.gguf"), b"").unwrap();
    std::fs::create_dir(path("empty")).unwrap();
    for (name, words) in [
        ("absent", "not there"),
        ("weights.safetensors", "the folder that contains it"),
        ("empty.gguf", "is empty"),
        ("empty", "config.json"),
    ] {
        for mmap in [false, true] {
            let error = load(&path(name), mmap).map(|_| ()).unwrap_err();
            assert!(error.contains(words) && error.contains(name), "{name}: {error}");
        }
    }
}

/// The header of a real file with bytes changed: nothing panics.
#[test]
fn changed_headers_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let real = fixtures("parity/llama-gqa");
    std::fs::copy(real.join("config.json"), folder.path().join("config.json")).unwrap();
    let good = std::fs::read(real.join(WEIGHTS)).unwrap();
    let header = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize + 8;
    for at in (0..header).step_by(3) {
        let mut bytes = good.clone();
        bytes[at] = bytes[at].wrapping_add(1);
        std::fs::write(folder.path().join(WEIGHTS), bytes).unwrap();
        let _ = load(folder.path(), at % 2 == 0);
    }
}
