//! A model that runs: sessions, sampling, generation and chat over any kvist cache.
//!
//! Load a [`kvist_model::Model`] once, give every conversation a [`session::ModelSession`] with the kind, the dtypes and
//! the backend it wants, and [`generate`](generate::generate). It promises that memory is known before it is taken
//! ([`memory::MemoryPlan`]), and that no file and no text can make it panic.
#![forbid(unsafe_code)]

pub mod answer;
pub mod backends;
mod channels;
pub mod chat;
pub mod divergence;
pub mod executor;
pub mod generate;
pub mod memory;
pub mod sampler;
pub mod session;
pub mod text;

pub use kvist_model::Error;

/// A prompt that the cache cannot hold is refused before any work is done. A ring holds any.
pub fn check_prompt(config: &memory::CacheConfig, tokens: usize) -> Result<(), Error> {
    match tokens {
        0 => Err(Error::EmptyPrompt),
        _ if config.kind != "ring" && tokens > config.context_tokens as usize => {
            Err(Error::PromptTooLong { tokens, context: config.context_tokens })
        }
        _ => Ok(()),
    }
}

/// The example of docs/engine.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/engine.md")]
struct Guide;
