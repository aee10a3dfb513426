//! What the files of models say: weights, configs, tokenizers and chat templates, well-formed and not.
#[path = "../common/mod.rs"]
mod common;

mod empty;
mod gguf;
mod int8;
mod pieces;
mod ropes;
mod safetensors;
mod templates;
mod tokenizer;
mod types;
mod vocabularies;
