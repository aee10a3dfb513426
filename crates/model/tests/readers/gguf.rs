//! Invalid GGUF files. Each is refused with an error that names the file, without a panic and without allocations sized
//! by the file's claims.
use crate::common::{fixtures, load};
use kvist_model::ModelFile;
use kvist_model::config::ModelConfig;
use kvist_model::tokenizer::Tokenizer;
use kvist_model::weights::Gguf;
use std::path::Path;

const U8: u32 = 0;
const U32: u32 = 4;
pub const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const LIST: u32 = 9;
const U64: u32 = 10;

/// A file before it is written. Every row of the table changes one thing in a valid one.
#[derive(Clone)]
pub struct File {
    magic: [u8; 4],
    version: u32,
    /// Counts to write instead of the true ones.
    n_tensors: Option<u64>,
    n_values: Option<u64>,
    values: Vec<(Vec<u8>, Vec<u8>)>, // key, type and value
    tensors: Vec<Tensor>,
    alignment: usize,
    /// Bytes of data to leave out at the end.
    short_by: usize,
}

#[derive(Clone)]
struct Tensor {
    name: Vec<u8>,
    dims: Vec<u64>, // fastest first, as the file has them
    kind: u32,
    offset: Option<u64>,
}

pub fn text(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}
pub fn typed(kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes(), bytes].concat()
}
pub fn list(kind: u32, n: u64, bytes: &[u8]) -> Vec<u8> {
    typed(LIST, &[&kind.to_le_bytes()[..], &n.to_le_bytes(), bytes].concat())
}
pub fn uint(n: u32) -> Vec<u8> {
    typed(U32, &n.to_le_bytes())
}
fn long(n: u64) -> Vec<u8> {
    typed(10, &n.to_le_bytes())
}
pub fn uints(numbers: &[u32]) -> Vec<u8> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    list(U32, numbers.len() as u64, &bytes)
}
pub fn words(s: &str) -> Vec<u8> {
    typed(TEXT, &text(s.as_bytes()))
}

impl File {
    /// A loadable Llama with one layer: hidden 8, 2 heads of 4 with 1 KV head, MLP width 12, 5 tokens.
    pub fn good() -> Self {
        let mut file = File {
            magic: *b"GGUF",
            version: 3,
            n_tensors: None,
            n_values: None,
            values: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            short_by: 0,
        };
        file.set("general.architecture", words("llama"));
        for (key, n) in [
            ("block_count", 1),
            ("embedding_length", 8),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("feed_forward_length", 12),
            ("context_length", 64),
        ] {
            file.set(&format!("llama.{key}"), uint(n));
        }
        file.set("llama.rope.freq_base", typed(F32, &10_000f32.to_le_bytes()));
        for (name, dims) in [
            ("token_embd.weight", vec![8, 5]),
            ("output_norm.weight", vec![8]),
            ("blk.0.attn_norm.weight", vec![8]),
            ("blk.0.ffn_norm.weight", vec![8]),
            ("blk.0.attn_q.weight", vec![8, 8]),
            ("blk.0.attn_k.weight", vec![8, 4]),
            ("blk.0.attn_v.weight", vec![8, 4]),
            ("blk.0.attn_output.weight", vec![8, 8]),
            ("blk.0.ffn_gate.weight", vec![8, 12]),
            ("blk.0.ffn_up.weight", vec![8, 12]),
            ("blk.0.ffn_down.weight", vec![12, 8]),
        ] {
            file.tensors.push(Tensor { name: name.into(), dims, kind: 0, offset: None });
        }
        file
    }

    pub fn set(&mut self, key: &str, value: Vec<u8>) {
        self.drop_key(key);
        self.values.push((key.into(), value));
    }
    fn drop_key(&mut self, key: &str) {
        self.values.retain(|(k, _)| k != key.as_bytes());
    }
    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name.as_bytes()).expect("a tensor of the good file")
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_values.unwrap_or(self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            out.extend(text(key));
            out.extend(value);
        }
        let mut data = 0u64;
        for tensor in &self.tensors {
            out.extend(text(&tensor.name));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            data = data.next_multiple_of(self.alignment as u64);
            out.extend(tensor.offset.unwrap_or(data).to_le_bytes());
            let elements = tensor.dims.iter().fold(1u64, |n, d| n.saturating_mul(*d)).min(1 << 12);
            data += 4 * elements; // of f32, and enough for any other encoding
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        for i in 0..(data as usize - self.short_by) / 4 {
            out.extend((0.01 * (i % 37) as f32 - 0.15).to_le_bytes());
        }
        out
    }
}

/// Loads these bytes as a user would and returns the error.
fn refused(folder: &Path, bytes: &[u8]) -> Result<(), String> {
    let path = folder.join("hostile.gguf");
    std::fs::write(&path, bytes).unwrap();
    load(ModelFile::Path(path)).map(|_| ()).map_err(|e| e.to_string())
}

#[test]
fn the_good_file_loads() {
    let folder = tempfile::tempdir().unwrap();
    for version in [2, 3] {
        refused(folder.path(), &File { version, ..File::good() }.bytes()).unwrap();
    }
    // One number per layer, all equal, means the same as a single number.
    let mut file = File::good();
    file.set("llama.attention.head_count_kv", uints(&[1]));
    refused(folder.path(), &file.bytes()).unwrap();
}

/// Converters of nvfp4 write a scale next to each weight. Regression: such scales used to be ignored.
#[test]
fn a_scale_beside_a_weight_multiplies_it() {
    let mut file = File::good();
    let plain = Gguf::from_bytes("plain", file.bytes()).unwrap();
    let name = b"blk.0.ffn_up.scale".to_vec();
    file.tensors.push(Tensor { name, dims: vec![1], kind: 0, offset: None });
    let scaled = Gguf::from_bytes("scaled", file.bytes()).unwrap();
    let scale = scaled.tensor("blk.0.ffn_up.scale").unwrap().to_f32().unwrap()[0];
    assert!(scale != 0.0 && scale != 1.0);
    let up = "model.layers.0.mlp.up_proj.weight";
    let bare = plain.find(up).unwrap().to_f32().unwrap();
    let expected: Vec<f32> = bare.iter().map(|x| x * scale).collect();
    let view = scaled.find(up).unwrap();
    assert_eq!(view.to_f32().unwrap(), expected);
    let other = "model.layers.0.mlp.gate_proj.weight";
    assert_eq!(scaled.find(other).unwrap().to_f32().unwrap(), plain.find(other).unwrap().to_f32().unwrap());

    // A device keeps the weight in its encoding and multiplies the outputs.
    assert_eq!(view.tensor().unwrap().factor, scale);
    assert_eq!(plain.find(up).unwrap().tensor().unwrap().factor, 1.0);
    // No device multiplies embeddings.
    file.tensors.push(Tensor { name: b"token_embd.scale".to_vec(), dims: vec![1], kind: 0, offset: None });
    let folder = tempfile::tempdir().unwrap();
    let error = refused(folder.path(), &file.bytes()).unwrap_err();
    assert!(error.contains("token_embd.weight") && error.contains("scale"), "{error}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = File::good().bytes();
    for len in 0..good.len() {
        let Err(error) = refused(folder.path(), &good[..len]) else { panic!("loads when cut to {len}") };
        assert!(error.contains("hostile.gguf"), "cut to {len}: {error}");
    }
}

type Row = (&'static str, fn(&mut File), &'static [&'static str]);

/// The defect, how to create it, words of the error.
const HEADERS: &[Row] = &[
    ("no GGUF", |f| f.magic = *b"GGML", &["not a GGUF file"]),
    ("version 0", |f| f.version = 0, &["version 0;"]),
    ("version 1", |f| f.version = 1, &["version 1", "2 and 3"]),
    ("version 4", |f| f.version = 4, &["version 4", "2 and 3"]),
    ("big endian", |f| f.version = 3u32.swap_bytes(), &["big-endian"]),
    ("tensors without end", |f| f.n_tensors = Some(u64::MAX), &["18446744073709551615", "tensor count"]),
    ("values without end", |f| f.n_values = Some(u64::MAX), &["18446744073709551615", "metadata count"]),
    ("a tensor too many", |f| f.n_tensors = Some(12), &[]),
    ("a value too many", |f| f.n_values = Some(9), &[]),
    ("a value too few", |f| f.n_values = Some(7), &[]),
    ("a text past the end", |f| f.set("a.text", typed(TEXT, &10_000u64.to_le_bytes())), &["a.text", "10000"]),
    ("a text without end", |f| f.set("a.text", typed(TEXT, &u64::MAX.to_le_bytes())), &["a.text"]),
    ("a text that is no text", |f| f.set("a.text", typed(TEXT, &text(b"\xff\xfe"))), &["a.text", "UTF-8"]),
    ("a key that is no text", |f| f.values.push((vec![0xff], uint(1))), &["metadata key", "UTF-8"]),
    ("a tensor name that is no text", |f| f.tensors[3].name = vec![0xc3, 0x28], &["tensor name", "UTF-8"]),
    ("a key of 100 KB", |f| f.values.push((vec![b'k'; 100_000], uint(1))), &["metadata key", "100000"]),
    ("a list past the end", |f| f.set("a.list", list(U32, 100_000, &[])), &["a.list", "100000"]),
    ("a list without end", |f| f.set("a.list", list(U64, u64::MAX, &[])), &["a.list"]),
    ("texts without end", |f| f.set("a.list", list(TEXT, u64::MAX / 8, &[])), &["a.list"]),
    ("a list of lists", |f| f.set("a.list", list(LIST, 1, &list(U8, 1, &[0])[4..])), &["a.list", "type 9"]),
    ("a list of unknown things", |f| f.set("a.list", list(77, 1, &[0])), &["a.list", "type 77"]),
    ("a number beyond i64", |f| f.set("a.list", list(U64, 1, &[0xff; 8])), &["a.list", "too large"]),
    ("an unknown type", |f| f.set("a.key", typed(13, &[0; 8])), &["a.key", "type 13"]),
    ("half a truth", |f| f.set("a.flag", typed(BOOL, &[2])), &["a.flag", "boolean value 2"]),
    ("half truths", |f| f.set("a.flag", list(BOOL, 2, &[1, 9])), &["a.flag", "boolean value 9"]),
    (
        "a key twice",
        |f| f.values.push((b"llama.block_count".into(), uint(1))),
        &["llama.block_count", "twice"],
    ),
    ("a tensor twice", |f| f.tensors.push(f.tensors[3].clone()), &["blk.0.ffn_norm.weight", "twice"]),
    ("alignment 0", |f| f.set("general.alignment", uint(0)), &["alignment of 0"]),
    ("alignment 3", |f| f.set("general.alignment", uint(3)), &["alignment of 3"]),
    (
        "alignment 2^40",
        |f| f.set("general.alignment", typed(U64, &(1u64 << 40).to_le_bytes())),
        &["alignment of 1099511627776"],
    ),
    ("alignment by text", |f| f.set("general.alignment", words("32")), &["general.alignment", "a size"]),
    ("no dimensions", |f| f.tensors[0].dims.clear(), &["token_embd.weight", "0 dimensions"]),
    ("five dimensions", |f| f.tensors[0].dims = vec![8, 5, 1, 1, 1], &["token_embd.weight", "5 dimensions"]),
    ("a zero dimension", |f| f.tensors[0].dims = vec![8, 0], &["token_embd.weight", "impossible shape"]),
    (
        "dimensions that overflow",
        |f| f.tensors[0].dims = vec![1 << 32, 1 << 32, 1 << 32],
        &["token_embd.weight", "impossible size"],
    ),
    ("dimensions of u64", |f| f.tensors[0].dims = vec![u64::MAX, u64::MAX], &["token_embd.weight"]),
    ("a tensor too long", |f| f.tensors[10].dims = vec![12, 1 << 40], &["ffn_down", "ends before"]),
    ("data cut short", |f| f.short_by = 4, &["ffn_down", "ends before"]),
    ("an offset past the end", |f| f.tensors[2].offset = Some(1 << 20), &["attn_norm", "ends before"]),
    (
        "an offset that overflows",
        |f| f.tensors[2].offset = Some(u64::MAX - 31),
        &["attn_norm", "ends before"],
    ),
    (
        "two tensors in one place",
        |f| f.tensors[2].offset = Some(0),
        &["attn_norm", "token_embd.weight", "lies"],
    ),
    ("a crooked offset", |f| f.tensors[2].offset = Some(8), &["attn_norm", "at 8", "aligned to 32"]),
    (
        "half a block",
        |f| f.tensor("blk.0.attn_q.weight").kind = 8,
        &["blk.0.attn_q.weight", "q8_0", "[8, 8]"],
    ),
];

const MODELS: &[Row] = &[
    (
        "a tensor left out",
        |f| f.tensors.retain(|t| t.name != b"blk.0.attn_v.weight"),
        &["blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"],
    ),
    (
        "no embedding",
        |f| f.tensors.retain(|t| t.name != b"token_embd.weight"),
        &["token_embd.weight", "model.embed_tokens.weight"],
    ),
    ("an embedding of one row", |f| f.tensors[0].dims = vec![40], &["token_embd.weight", "[40]", "matrix"]),
    (
        "no last norm",
        |f| f.tensors.retain(|t| t.name != b"output_norm.weight"),
        &["output_norm.weight", "model.norm.weight"],
    ),
    (
        "a wrong shape",
        |f| f.tensor("blk.0.attn_k.weight").dims = vec![8, 8],
        &["blk.0.attn_k.weight", "[8, 8]", "[4, 8]"],
    ),
    ("a transposed one", |f| f.tensors[10].dims = vec![8, 12], &["ffn_down", "[12, 8]", "[8, 12]"]),
    (
        "an unread encoding",
        |f| f.tensor("blk.0.ffn_up.weight").kind = 42,
        &["blk.0.ffn_up.weight", "q2_0", "f32, f16, bf16, f64, q8_0", "q4_K", "iq4_xs", "mxfp4"],
    ),
    (
        "two scales of one tensor",
        |f| {
            let name = b"blk.0.ffn_up.scale".to_vec();
            f.tensors.push(Tensor { name, dims: vec![2], kind: 0, offset: None });
        },
        &["blk.0.ffn_up.scale", "one finite number"],
    ),
    ("an unknown encoding", |f| f.tensor("blk.0.ffn_up.weight").kind = 4_000, &["ggml type 4000"]),
    (
        "an unread embedding",
        |f| f.tensor("token_embd.weight").kind = 26,
        &["token_embd.weight", "whole numbers", "q8_0"],
    ),
    ("no architecture", |f| f.drop_key("general.architecture"), &["general.architecture", "missing"]),
    ("architecture 7", |f| f.set("general.architecture", uint(7)), &["general.architecture", "a string"]),
    (
        "an unknown architecture",
        |f| f.set("general.architecture", words("mamba")),
        &["mamba", "gemma3, gpt-oss, llama, mistral, phi3, qwen2"],
    ),
    ("learned positions", |f| f.set("general.architecture", words("gpt2")), &["gpt2", "gemma3, gpt-oss"]),
    ("no layers given", |f| f.drop_key("llama.block_count"), &["llama.block_count", "missing"]),
    ("no layers", |f| f.set("llama.block_count", uint(0)), &["num_hidden_layers", "0"]),
    ("layers without end", |f| f.set("llama.block_count", uint(u32::MAX)), &["block_count", "4294967295"]),
    (
        "more layers than tensors",
        |f| f.set("llama.block_count", uint(60_000)),
        &["block_count", "11 tensors"],
    ),
    ("layers by text", |f| f.set("llama.block_count", words("1")), &["llama.block_count", "a size"]),
    (
        "layers below nothing",
        |f| f.set("llama.block_count", typed(5, &(-1i32).to_le_bytes())),
        &["block_count", "-1"],
    ),
    (
        "a wide embedding",
        |f| f.set("llama.embedding_length", typed(U64, &[0xff; 8])),
        &["attention.head_count", "18446744073709551615"],
    ),
    ("no heads", |f| f.set("llama.attention.head_count", uint(0)), &["attention.head_count", "is 0"]),
    (
        "heads that do not divide",
        |f| f.set("llama.attention.head_count", uint(3)),
        &["attention.head_count", "is 3", "does not divide 8"],
    ),
    (
        "KV heads that do not divide",
        |f| {
            f.set("llama.attention.head_count", uint(4));
            f.set("llama.attention.head_count_kv", uint(3));
        },
        &["num_key_value_heads", "is 3", "does not divide the 4"],
    ),
    ("more KV heads", |f| f.set("llama.attention.head_count_kv", uint(4)), &["num_key_value_heads", "is 4"]),
    ("no KV heads", |f| f.set("llama.attention.head_count_kv", uint(0)), &["num_key_value_heads", "is 0"]),
    (
        "KV heads that differ by layer",
        |f| f.set("llama.attention.head_count_kv", uints(&[1, 2])),
        &["llama.attention.head_count_kv", "a size"],
    ),
    ("KV heads of no layer", |f| f.set("llama.attention.head_count_kv", uints(&[])), &["head_count_kv"]),
    ("an odd head", |f| f.set("llama.attention.key_length", uint(3)), &["head_dim", "is 3", "even"]),
    (
        "a head of 2^32",
        |f| f.set("llama.attention.key_length", typed(U64, &(1u64 << 32).to_le_bytes())),
        &["head_dim", "4294967296"],
    ),
    ("values unlike keys", |f| f.set("llama.attention.value_length", uint(6)), &["value_length", "4"]),
    ("no context", |f| f.set("llama.context_length", uint(0)), &["max_position_embeddings", "0"]),
    (
        "rope wider than a head",
        |f| f.set("llama.rope.dimension_count", uint(6)),
        &["rope dimension", "6", "4"],
    ),
    ("rope base 0", |f| f.set("llama.rope.freq_base", typed(F32, &[0; 4])), &["rope_theta", "0"]),
    (
        "rope base NaN",
        |f| f.set("llama.rope.freq_base", typed(F32, &f32::NAN.to_le_bytes())),
        &["rope_theta", "NaN"],
    ),
    (
        "experts of which none is used",
        |f| f.set("llama.expert_count", uint(4)),
        &["expert_used_count", "missing"],
    ),
    (
        "more experts than any model has",
        |f| {
            f.set("llama.expert_count", uint(1 << 20));
            f.set("llama.expert_used_count", uint(2));
        },
        &["num_experts", "1048576"],
    ),
    (
        "more used than there are",
        |f| {
            f.set("llama.expert_count", uint(4));
            f.set("llama.expert_used_count", uint(5));
        },
        &["num_experts_per_tok", "5 of 4"],
    ),
    ("unknown rope", |f| f.set("llama.rope.scaling.type", words("longrope")), &["longrope", "yarn"]),
    (
        "yarn without factor",
        |f| f.set("llama.rope.scaling.type", words("yarn")),
        &["scaling.factor", "missing"],
    ),
    (
        "a norm of infinity",
        |f| f.set("llama.attention.layer_norm_rms_epsilon", typed(F32, &f32::INFINITY.to_le_bytes())),
        &["rms_norm_eps", "inf"],
    ),
    ("an owner above", |f| f.set("llama.kv_owner_layer", uints(&[1])), &["kv_owner_layer"]),
    (
        "too many owners",
        |f| f.set("llama.kv_owner_layer", uints(&[0, 0])),
        &["kv_owner_layer", "2 of 1 layers"],
    ),
    (
        "rope factors of a wrong number",
        |f| {
            let (name, dims) = (b"rope_freqs.weight".to_vec(), vec![7]);
            f.tensors.push(Tensor { name, dims, kind: 0, offset: None });
        },
        &["rope_freqs", "7 factors"],
    ),
    ("tokens of numbers", |f| vocabulary(f, "gpt2", uints(&[1])), &["tokenizer.ggml.tokens", "strings"]),
    ("a tokenizer of a kind", |f| vocabulary(f, "wpm", texts(&["a"])), &["wpm", "gpt2 and llama"]),
    ("no merges", |f| vocabulary(f, "gpt2", texts(&["a", "b"])), &["merges"]),
    ("no scores", |f| vocabulary(f, "llama", texts(&["a", "b"])), &["scores"]),
    (
        "a merge of nothing",
        |f| {
            vocabulary(f, "gpt2", texts(&["a", "b", "ab"]));
            f.set("tokenizer.ggml.merges", texts(&["ab"]));
        },
        &["merge", "`ab`"],
    ),
    (
        "a merge of strangers",
        |f| {
            vocabulary(f, "gpt2", texts(&["a", "b", "ab"]));
            f.set("tokenizer.ggml.merges", texts(&["a z"]));
        },
        &["tokenizer"],
    ),
    ("a broken template", |f| f.set("tokenizer.chat_template", words("ok\n{% if %}")), &["template", "2"]),
];

pub fn texts(all: &[&str]) -> Vec<u8> {
    let bytes: Vec<u8> = all.iter().flat_map(|s| text(s.as_bytes())).collect();
    list(TEXT, all.len() as u64, &bytes)
}
pub fn vocabulary(file: &mut File, model: &str, tokens: Vec<u8>) {
    file.set("tokenizer.ggml.model", words(model));
    file.set("tokenizer.ggml.tokens", tokens);
}

#[test]
fn hostile_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut bad = Vec::new();
    for (what, change, expected) in HEADERS.iter().chain(MODELS) {
        let mut file = File::good();
        change(&mut file);
        match refused(folder.path(), &file.bytes()) {
            Ok(()) => bad.push(format!("{what}: loads")),
            Err(error) => {
                for word in expected.iter().chain(&["hostile.gguf"]) {
                    if !error.contains(word) {
                        bad.push(format!("{what}: no `{word}` in: {error}"));
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{} rows:\n{}", bad.len(), bad.join("\n"));
}

/// In a list, a u8 value becomes an i64, and an empty string of 8 bytes a `String` of 24 in a vector that grows by
/// doubling. Nothing may take more, whatever the header claims.
const BYTES_PER_FILE_BYTE: u64 = 32;

#[test]
fn memory_follows_the_file_and_not_its_claims() {
    let mut files: Vec<(&str, Vec<u8>)> = HEADERS
        .iter()
        .map(|(what, change, _)| {
            let mut file = File::good();
            change(&mut file);
            (*what, file.bytes())
        })
        .collect();
    let mut bytes = File::good();
    bytes.set("a.list", list(U8, 100_000, &[7; 100_000]));
    let mut empty = File::good();
    empty.set("a.list", list(TEXT, 10_000, &[0; 80_000]));
    files.extend([("bytes", bytes.bytes()), ("empty texts", empty.bytes())]);
    let mut bad = Vec::new();
    for (what, bytes) in files {
        let len = bytes.len() as u64;
        let used = allocation_counter::measure(|| {
            let _ = std::hint::black_box(Gguf::from_bytes("hostile.gguf", bytes));
        });
        if used.bytes_max > BYTES_PER_FILE_BYTE * len {
            bad.push(format!("{what}: {} bytes for a file of {len}", used.bytes_max));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Every byte of a whole header changed, and real files with bytes overwritten: nothing panics.
#[test]
fn changed_bytes_never_panic() {
    let consider = |bytes: Vec<u8>| {
        if let Ok(gguf) = Gguf::from_bytes("changed.gguf", bytes) {
            let _ = ModelConfig::from_gguf(&gguf);
            if let Ok(Some(tokenizer)) = Tokenizer::from_gguf(&gguf) {
                let _ = tokenizer.encode("two words\n", true).map(|tokens| tokenizer.decode(&tokens));
            }
        }
    };
    let good = File::good().bytes();
    for at in 0..good.len() - 2_176 {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            consider(bytes);
        }
    }
    for case in ["spm", "bpe-qwen2"] {
        let real = std::fs::read(fixtures("tokenizers").join(case).join("model.gguf")).unwrap();
        let mut random = kvist_testing::SplitMix64(0x1234_5678_9abc_def0);
        for _ in 0..60 {
            let mut bytes = real.clone();
            for _ in 0..3 {
                let at = random.index(bytes.len());
                bytes[at] = random.next() as u8;
            }
            consider(bytes);
        }
    }
}

/// The valid file in parts with the given numbers of tensors and the keys that `gguf-split` writes. The first part has
/// the metadata, and no tensors if `n_tensors` begins with 0.
fn parts(n_tensors: &[usize]) -> Vec<File> {
    let whole = File::good();
    let mut tensors = whole.tensors.clone().into_iter();
    let part = |(number, n): (usize, &usize)| {
        let mut part = if number == 0 { whole.clone() } else { File { values: Vec::new(), ..whole.clone() } };
        part.tensors = tensors.by_ref().take(*n).collect();
        part.set("split.no", typed(2, &(number as u16).to_le_bytes()));
        part.set("split.count", typed(2, &(n_tensors.len() as u16).to_le_bytes()));
        part.set("split.tensors.count", typed(5, &(whole.tensors.len() as i32).to_le_bytes()));
        part
    };
    n_tensors.iter().enumerate().map(part).collect()
}

fn write_parts(folder: &Path, parts: &[File]) -> Vec<std::path::PathBuf> {
    let path = |i: usize| folder.join(format!("hostile.gguf-{:05}-of-{:05}.gguf", i + 1, parts.len()));
    (0..parts.len()).for_each(|i| std::fs::write(path(i), parts[i].bytes()).unwrap());
    (0..parts.len()).map(path).collect()
}

#[test]
fn files_in_parts_are_one_model() {
    let folder = tempfile::tempdir().unwrap();
    for n_tensors in [&[4, 5, 2][..], &[0, 11], &[11, 0]] {
        let paths = write_parts(folder.path(), &parts(n_tensors));
        load(ModelFile::Path(paths[0].clone())).unwrap();
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    type Change = fn(&mut Vec<File>);
    let rows: &[(&str, Change, usize, &[&str])] = &[
        ("the second part", |_| (), 1, &["part 2 of 3", "give the first one", "-00001-of-00003.gguf"]),
        ("a part of another number", |p| p[2].set("split.no", uint(1)), 0, &["part 3 of 3", "split.no is 1"]),
        (
            "a part of another split",
            |p| p[1].set("split.count", uint(7)),
            0,
            &["part 2 of 3", "split.count 7"],
        ),
        ("a part that is whole", |p| p[1].drop_key("split.no"), 0, &["part 2 of 3", "split.no is nothing"]),
        (
            "a number that none follows",
            |p| p[0].set("split.no", long(u64::MAX)),
            0,
            &["18446744073709551615"],
        ),
        (
            "a number behind the last",
            |p| p[0].set("split.no", uint(3)),
            0,
            &["one of 3 parts", "from 0 is 3"],
        ),
        ("parts without end", |p| p[0].set("split.count", long(u64::MAX)), 0, &["99999 parts are possible"]),
        ("more parts than names", |p| p[0].set("split.count", uint(100_000)), 0, &["one of 100000 parts"]),
        ("no number", |p| p[0].drop_key("split.no"), 0, &["split.no", "missing"]),
        ("a tensor twice", |p| p[2].tensors = p[1].tensors.clone(), 0, &["holds the tensor", "holds too"]),
        ("a tensor too few", |p| drop(p[2].tensors.pop()), 0, &["11 tensors", "they hold 10"]),
        ("a part cut short", |p| p[2].short_by = 4, 0, &["ends before"]),
        (
            "another count than the name has",
            |p| p[0].set("split.count", uint(4)),
            0,
            &["-00001-of-00004.gguf"],
        ),
    ];
    for (what, change, given, expected) in rows {
        let folder = tempfile::tempdir().unwrap();
        let mut all = parts(&[4, 5, 2]);
        change(&mut all);
        let paths = write_parts(folder.path(), &all);
        let error = load(ModelFile::Path(paths[*given].clone())).expect_err(what).to_string();
        let missing: Vec<_> = expected.iter().filter(|word| !error.contains(**word)).collect();
        assert!(missing.is_empty(), "{what}: no {missing:?} in {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let paths = write_parts(folder.path(), &parts(&[4, 5, 2]));
    std::fs::remove_file(&paths[2]).unwrap();
    let error = load(ModelFile::Path(paths[0].clone())).unwrap_err().to_string();
    assert!(error.contains("-00003-of-00003.gguf is not there"), "{error}");
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let name = std::ffi::OsStr::from_bytes(b"\xff-00001-of-00003.gguf");
        let path = folder.path().join(name);
        std::fs::copy(&paths[0], &path).unwrap();
        // The error advises the name that it already has.
        let error = load(ModelFile::Path(path)).unwrap_err().to_string();
        assert!(error.contains("not UTF-8") && !error.contains("old name"), "{error}");
    }
}
