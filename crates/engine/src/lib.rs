//! Runs models: sessions, sampling, generation and chat over any kvist cache.
//!
//! Load a [`kvist_model::Model`] once. Give every conversation a [`session::ModelSession`] with the cache kind, dtypes
//! and backend it needs, then call [`generate`](generate::generate). The crate computes the memory bound before it
//! allocates ([`memory::MemoryPlan`]), and no file or text can make it panic.
#![forbid(unsafe_code)]

pub mod answer;
mod channels;
pub mod chat;
pub mod chat_format;
pub mod devices;
pub mod divergence;
pub mod executor;
pub mod frozen;
pub mod generate;
pub mod grammar;
pub mod keep;
pub mod memory;
pub mod random;
mod runner;
pub mod sampler;
pub mod saved;
pub mod serving;
pub mod session;
pub mod sessions;
pub mod speculate;
pub mod text;
pub mod tools;

pub use kvist_model::Error;
// The types of these crates appear in the interface above: a program that embeds the engine needs no other dependency.
pub use {kvist_cache, kvist_device, kvist_model, kvist_scheduler, kvist_store};

/// Refuses an empty prompt, and a prompt that does not fit into the cache, before any work is done. A ring accepts any
/// length.
pub fn check_prompt(config: &memory::CacheConfig, tokens: usize) -> Result<(), Error> {
    match tokens {
        0 => Err(Error::EmptyPrompt),
        _ if !config.kind_traits().bounded && tokens > config.context_tokens as usize => {
            Err(Error::PromptTooLong { tokens, context: config.context_tokens })
        }
        _ => Ok(()),
    }
}

/// Compiles the example in docs/engine.md as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/engine.md")]
struct Guide;
