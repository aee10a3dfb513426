//! Prefix-hit statistics: since the beginning, and over the most recent prompts.
use std::collections::VecDeque;

/// Opened prompts and their prefix hits. Not counted: prompts of unknown content, empty prompts (they cannot hit),
/// and prompts that were opened before ([`open_again`](super::Prefixes::open_again)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitCounts {
    /// Number of prompts.
    pub n_prompts: u64,
    /// Their tokens.
    pub prompt_tokens: u64,
    /// Tokens of these prompts that came from the index.
    pub hit_tokens: u64,
}

impl HitCounts {
    /// Hit ratio: the share of tokens that came from the index; `None` before the first token.
    pub fn ratio(&self) -> Option<f64> {
        (self.prompt_tokens > 0).then(|| self.hit_tokens as f64 / self.prompt_tokens as f64)
    }
    fn add(&mut self, prompt_tokens: u32, hit_tokens: u32) {
        self.n_prompts += 1;
        self.prompt_tokens += u64::from(prompt_tokens);
        self.hit_tokens += u64::from(hit_tokens);
    }
}

/// Number of prompts that [`PrefixReport::recent`](super::PrefixReport::recent) covers. vLLM's hit ratio uses the
/// same number.
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
    /// Counts a prompt. O(1).
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
