//! Runs the real binary.
#![allow(dead_code)] // each test binary uses its part
pub mod server;

use serde_json::{Map, Value};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn kvist() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvist"));
    command.env_remove("KVIST_LOG").env_remove("KVIST_ISA").stdin(Stdio::null());
    command
}

/// Runs the program to its end, with `stdin` piped in.
pub fn run(args: &[&str], stdin: &[u8]) -> Output {
    let mut command = kvist();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The program may have ended without reading its input.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child.wait_with_output().unwrap()
}

/// stdout and stderr of a run that must succeed.
pub fn succeed(args: &[&str]) -> (String, String) {
    succeed_with(args, b"")
}
pub fn succeed_with(args: &[&str], stdin: &[u8]) -> (String, String) {
    let out = run(args, stdin);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(out.stdout), text(out.stderr));
    assert_eq!(out.status.code(), Some(0), "{args:?}: {stderr}");
    (stdout, stderr)
}

/// The differences from the expected result, as text.
pub fn judge(what: &str, out: &Output, status: i32, words: &[&str]) -> Vec<String> {
    let stderr = String::from_utf8_lossy(&out.stderr);
    let mut bad = Vec::new();
    if out.status.code() != Some(status) {
        bad.push(format!("ended with {} for status {status}", out.status));
    }
    if !out.stdout.is_empty() {
        bad.push(format!("wrote {:?} to stdout", String::from_utf8_lossy(&out.stdout)));
    }
    for word in words.iter().filter(|word| !stderr.contains(**word)) {
        bad.push(format!("does not say {word:?}"));
    }
    for word in ["panicked", "RUST_BACKTRACE", "\x1b"].iter().filter(|word| stderr.contains(**word)) {
        bad.push(format!("says {word:?}"));
    }
    bad.iter().map(|bad| format!("{what}: {bad}\n    {}", stderr.trim().replace('\n', "\n    "))).collect()
}

/// What stderr says of a run that must end with `status` and say all of `parts`.
pub fn refused(args: &[&str], status: i32, parts: &[&str]) -> String {
    refused_with(args, b"", status, parts)
}
pub fn refused_with(args: &[&str], stdin: &[u8], status: i32, parts: &[&str]) -> String {
    let out = run(args, stdin);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(status), "{args:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "{args:?}: no {part:?} in {said}");
    }
    assert!(!said.contains("panicked"), "{args:?}: {said}");
    said
}

/// The single JSON document on stdout.
pub fn json(args: &[&str]) -> serde_json::Value {
    let (stdout, _) = succeed(args);
    serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {stdout}"))
}

/// A trace or table of the simulator's tests.
pub fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../simulator/tests/data").join(name).display().to_string()
}

/// The engine's fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures")
}

/// A model without a tokenizer.
pub fn without_tokenizer() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("parity/llama-gqa").join(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// A model whose tokens all but one begin with ESC, and that never ends its text.
pub fn escaping_model() -> tempfile::TempDir {
    let (from, folder) = (fixtures().join("parity/llama-gqa"), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    std::fs::copy(from.join("model.safetensors"), path("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("eos_token_id");
    std::fs::write(path("config.json"), config.to_string()).unwrap();
    // `ě` is how byte-level tokenizers write the byte of ESC.
    let piece = |id: u64| if id == 0 { "x".to_string() } else { format!("ě[{id}C") };
    let n_tokens = config["vocab_size"].as_u64().unwrap();
    let vocab: Map<String, Value> = (0..n_tokens).map(|id| (piece(id), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [], "pre_tokenizer": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    std::fs::write(path("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

/// Arguments, separated by spaces.
pub fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Demands fields of a JSON object: names separated by spaces; dots separate nested ones.
pub fn fields(value: &Value, names: &str) {
    for name in names.split_whitespace() {
        let found = name.split('.').try_fold(value, |value, name| value.get(name));
        assert!(found.is_some(), "no `{name}` in {value}");
    }
}
pub fn number(value: &Value, name: &str) -> f64 {
    let found = name.split('.').fold(value, |value, name| &value[name]);
    found.as_f64().unwrap_or_else(|| panic!("`{name}` is not a number in {value}"))
}
