//! What the index supplied of the prompts that were opened: since the beginning, and of the last ones.
use std::collections::VecDeque;

/// Prompts that were opened, and what the index supplied of them. Neither a prompt of unknown content is
/// counted nor an empty one, of which nothing could be found, nor one that was opened before
/// ([`open_again`](super::Prefixes::open_again)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitCounts {
    /// Prompts.
    pub n_prompts: u64,
    /// Their tokens.
    pub prompt_tokens: u64,
    /// Of these, tokens that the index supplied.
    pub hit_tokens: u64,
}

impl HitCounts {
    /// The share of the tokens that the index supplied; `None` before there were any.
    pub fn ratio(&self) -> Option<f64> {
        (self.prompt_tokens > 0).then(|| self.hit_tokens as f64 / self.prompt_tokens as f64)
    }
    fn add(&mut self, prompt_tokens: u32, hit_tokens: u32) {
        self.n_prompts += 1;
        self.prompt_tokens += u64::from(prompt_tokens);
        self.hit_tokens += u64::from(hit_tokens);
    }
}

/// Prompts of [`PrefixReport::recent`](super::PrefixReport::recent): as many as vLLM's hit ratio looks back on.
pub const RECENT_PROMPTS: usize = 1_000;

/// Sums over all prompts and over the last [`RECENT_PROMPTS`].
#[derive(Default)]
pub(super) struct Hits {
    pub all: HitCounts,
    pub recent: HitCounts,
    /// Prompt and hit tokens of the prompts in `recent`, the oldest first.
    window: VecDeque<(u32, u32)>,
}

impl Hits {
    /// O(1).
    pub fn count(&mut self, prompt_tokens: u32, hit_tokens: u32) {
        self.all.add(prompt_tokens, hit_tokens);
        self.recent.add(prompt_tokens, hit_tokens);
        if self.window.len() == RECENT_PROMPTS
            && let Some((prompt_tokens, hit_tokens)) = self.window.pop_front()
        {
            self.recent.n_prompts -= 1;
            self.recent.prompt_tokens -= u64::from(prompt_tokens);
            self.recent.hit_tokens -= u64::from(hit_tokens);
        }
        self.window.push_back((prompt_tokens, hit_tokens));
    }
}
