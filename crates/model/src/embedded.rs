//! The small model embedded in this program: 7M parameters, trained on the documentation of Rust and of crates. Its
//! model card, licence and training script are in `tools/tiny-model/`.

/// The model's name.
pub const NAME: &str = "tiny-rust-7m (embedded)";

/// A GGUF file, including its tokenizer.
pub static MODEL: &[u8] = include_bytes!("../embedded/tiny-rust-7m.gguf");

/// A draft model for it, with the same tokenizer: a GGUF file.
pub(crate) static DRAFT: &[u8] = include_bytes!("../embedded/tiny-rust-draft.gguf");

/// Its EAGLE-3 head: config and safetensors.
pub(crate) static HEAD: (&str, &[u8]) = (
    include_str!("../embedded/tiny-rust-eagle3/config.json"),
    include_bytes!("../embedded/tiny-rust-eagle3/model.safetensors"),
);
