//! Simulated requests.
use kvist_cache::Prompt;
use std::sync::Arc;

/// One request, from a trace or a workload.
///
/// 128 bytes and its ids: a trace of 12,000 requests with 290,000 ids takes about 4 MB.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Unique within a trace; follow-ups refer to it. Readers number requests from 0 in file order.
    pub id: u64,
    /// Arrival in nanoseconds of virtual time. With a parent, the earliest possible arrival.
    pub arrival_ns: u64,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Tokens the model will generate, at least 1. This is the truth, which only an oracle may use.
    pub output_tokens: u32,
    /// Covers at least the prompt, and the output as far as it is known, so that a later turn of the same chat can hit
    /// the tokens generated here.
    pub content: Prompt,
    /// Requests with different salts share nothing. `None` is the same as the empty salt.
    pub salt: Option<Arc<str>>,
    /// Virtual time by which it should be finished.
    pub deadline_ns: Option<u64>,
    /// Larger is more urgent.
    pub priority: i32,
    /// A request that must finish first: if it is refused or cancelled, this one never arrives. Otherwise it arrives at the later of `arrival_ns` and the parent's finish
    /// plus `think_ns`. In a file the parent comes earlier; in a list it may be anywhere.
    pub parent: Option<u64>,
    /// Nanoseconds between the parent's finish and this arrival. Ignored without a parent.
    pub think_ns: u64,
}

impl Request {
    /// A request with unknown content, no salt, no deadline and no parent.
    pub fn new(id: u64, arrival_ns: u64, prompt_tokens: u32, output_tokens: u32) -> Request {
        Request {
            id,
            arrival_ns,
            prompt_tokens,
            output_tokens,
            content: Prompt::Unknown,
            salt: None,
            deadline_ns: None,
            priority: 0,
            parent: None,
            think_ns: 0,
        }
    }

    /// The salt as the prefix index expects it.
    pub fn salt(&self) -> &str {
        self.salt.as_deref().unwrap_or("")
    }

    /// Tokens of the whole sequence when finished.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_stays_small() {
        assert!(size_of::<Request>() <= 128, "{} bytes", size_of::<Request>());
    }
}
