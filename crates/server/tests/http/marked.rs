//! The embedded model with other control tokens and another chat template, for formats of answers that it does not know.
use crate::server::*;
use kvist_model::{Model, ModelFile};
use std::path::Path;
use std::sync::Arc;

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn number(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Locates the array under a key of the GGUF file: the offset of its length, and the offsets where its items
/// begin and end.
fn list(bytes: &[u8], key: &str, is_text: bool) -> (usize, Vec<usize>) {
    let key = text(key);
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4 + 4;
    let mut ends = vec![at + 8];
    for _ in 0..number(bytes, at) {
        let last = *ends.last().unwrap();
        ends.push(last + if is_text { 8 + number(bytes, last) } else { 4 });
    }
    (at, ends)
}

/// The embedded model with its last tokens replaced by `marks`, and with this template.
pub fn marked_model<const N: usize>(marks: [&str; N], template: &str) -> Arc<Model> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/embedded/tiny-rust-7m.gguf");
    let mut bytes = std::fs::read(file).unwrap();
    let before = bytes.len();
    // From last to first, so that earlier offsets stay valid.
    let (at, ends) = list(&bytes, "tokenizer.ggml.merges", true);
    let kept = ends.len() - 1 - N;
    bytes.drain(ends[kept]..*ends.last().unwrap());
    bytes[at..at + 8].copy_from_slice(&(kept as u64).to_le_bytes());
    let (_, ends) = list(&bytes, "tokenizer.ggml.token_type", false);
    for at in &ends[ends.len() - 1 - N..ends.len() - 1] {
        bytes[*at..at + 4].copy_from_slice(&3_i32.to_le_bytes());
    }
    let (_, ends) = list(&bytes, "tokenizer.ggml.tokens", true);
    bytes.splice(ends[ends.len() - 1 - N]..*ends.last().unwrap(), marks.map(text).concat());
    let n_keys = number(&bytes, 16) as u64 + 1;
    bytes[16..24].copy_from_slice(&n_keys.to_le_bytes());
    let key = [text("tokenizer.chat_template"), 8_u32.to_le_bytes().to_vec()].concat();
    let mut template = template.to_string();
    // Keep the alignment of the tensors.
    while !(bytes.len() + key.len() + 8 + template.len() - before).is_multiple_of(64) {
        template.insert_str(0, "{#- -#}");
    }
    bytes.splice(24..24, [key, text(&template)].concat());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("marked.gguf");
    std::fs::write(&path, bytes).unwrap();
    load_f32(&ModelFile::Path(path))
}
