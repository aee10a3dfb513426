//! The small model inside this program: 7M parameters trained on the documentation of Rust and of crates. Its card, licence and
//! training script are in `tools/tiny-model/`.

/// What it is called.
pub const NAME: &str = "tiny-rust-7m (embedded)";

/// A GGUF file with its tokenizer.
pub static MODEL: &[u8] = include_bytes!("../embedded/tiny-rust-7m.gguf");
