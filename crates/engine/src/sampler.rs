//! Samples a token from logits.
//!
//! Order of the steps, as in llama.cpp's default chain: penalties (repetition, then frequency and presence), top-k,
//! top-p, min-p, temperature, draw. Top-p and min-p use the probabilities before the temperature.
mod candidates;

use candidates::{Candidates, exp_minus, largest};
use kvist_model::Error;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

/// Sampling parameters. [`Sampler::new`] validates them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerConfig {
    /// 0 picks the most likely token.
    pub temperature: f32,
    /// Keep the K most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the most likely tokens that together reach this probability; 1 keeps all (Holtzman et al., 2020).
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 drops none (Nguyen et al., 2024).
    pub min_p: f32,
    /// Divide positive logits of recent tokens by this and multiply negative ones; 1 is off (Keskar et al., 2019).
    pub repetition_penalty: f32,
    /// Number of recent tokens that the repetition penalty covers. `usize::MAX` covers all of them; their order is then
    /// not stored.
    pub repetition_window: usize,
    /// Subtracted from a token's logit once for every time this sampler drew it; 0 is off. Negative values encourage
    /// repetition (OpenAI's API reference, "frequency and presence penalties").
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of every token that this sampler drew; 0 is off. Same source.
    pub presence_penalty: f32,
    pub seed: u64,
}

impl SamplerConfig {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        SamplerConfig {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
        }
    }
}

/// More tokens than any vocabulary has.
const MAX_TOKENS: u32 = 1 << 24;

/// Draws tokens. The same configuration and logits give the same tokens on every machine.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    draws: u64,
    recent: VecDeque<u32>,
    /// How often each token occurs in `recent`.
    penalised: HashMap<u32, u32>,
    /// Without a window: one bit per token, set once the token was observed.
    observed: Vec<u64>,
    /// How often each token was drawn, if a penalty needs it. Each entry changes only its own logit, so the iteration
    /// order does not matter.
    drawn: HashMap<u32, u32>,
    candidates: Candidates,
    logits: Vec<f32>,
}

impl Sampler {
    pub fn new(config: SamplerConfig) -> Result<Self, Error> {
        let check = |good: bool, what: &str| if good { Ok(()) } else { Err(Error::Sampling(what.into())) };
        let c = &config;
        check(c.temperature.is_finite() && c.temperature >= 0.0, "the temperature must be 0 or more")?;
        check(c.top_p > 0.0 && c.top_p <= 1.0, "top-p must lie above 0 and at most at 1")?;
        check((0.0..=1.0).contains(&c.min_p), "min-p must lie between 0 and 1")?;
        check(
            c.repetition_penalty.is_finite() && c.repetition_penalty > 0.0,
            "the repetition penalty must be above 0 and finite",
        )?;
        check(c.frequency_penalty.is_finite(), "the frequency penalty must be finite")?;
        check(c.presence_penalty.is_finite(), "the presence penalty must be finite")?;
        Ok(Sampler {
            config,
            draws: 0,
            recent: VecDeque::new(),
            observed: Vec::new(),
            // A table that is at most half full removes entries in place and never reallocates.
            penalised: HashMap::with_capacity(match config.repetition_window {
                window if config.repetition_penalty != 1.0 && window <= 4096 => 2 * window + 4,
                _ => 0,
            }),
            drawn: HashMap::new(),
            candidates: Candidates::default(),
            logits: Vec::new(),
        })
    }

    /// Adds tokens of the text to the repetition penalty's history. The other two penalties count only drawn tokens and
    /// do not need this call.
    pub fn observe(&mut self, tokens: &[u32]) {
        if self.config.repetition_penalty == 1.0 {
            return;
        }
        if self.config.repetition_window == usize::MAX {
            return self.observe_for_ever(tokens);
        }
        for token in tokens {
            if self.recent.len() >= self.config.repetition_window
                && let Some(old) = self.recent.pop_front()
                && let Entry::Occupied(mut times) = self.penalised.entry(old)
            {
                *times.get_mut() -= 1;
                if *times.get() == 0 {
                    times.remove();
                }
            }
            if self.config.repetition_window > 0 {
                self.recent.push_back(*token);
                *self.penalised.entry(*token).or_default() += 1;
            }
        }
    }

    fn observe_for_ever(&mut self, tokens: &[u32]) {
        // Tokens outside every vocabulary change no logit.
        for &token in tokens.iter().filter(|token| **token < MAX_TOKENS) {
            let word = token as usize / 64;
            if word >= self.observed.len() {
                self.observed.reserve_exact(word + 1 - self.observed.len());
                self.observed.resize(word + 1, 0);
            }
            self.observed[word] |= 1 << (token % 64);
        }
    }

    /// Clears the history of observed and drawn tokens. Call it before sampling for another text.
    pub fn forget(&mut self) {
        self.recent.clear();
        self.penalised.clear();
        self.observed.clear();
        self.drawn.clear();
    }

    /// Returns the next token. Fails on NaN logits, which mean that an earlier step went wrong.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        if logits.is_empty() {
            return Err(Error::Sampling("there are no logits to sample from".into()));
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.penalise();
        let token = self.choose()?;
        if self.counts_draws() {
            *self.drawn.entry(token).or_default() += 1;
        }
        Ok(token)
    }

    fn counts_draws(&self) -> bool {
        self.config.frequency_penalty != 0.0 || self.config.presence_penalty != 0.0
    }

    /// Chooses from the penalised logits.
    fn choose(&mut self) -> Result<u32, Error> {
        // Penalties never turn a number into NaN.
        let Some(max) = largest(&self.logits) else {
            return Err(Error::Sampling(
                "the model gave NaN logits: its weights or its cache are broken".into(),
            ));
        };
        if self.config.temperature == 0.0 {
            let first = self.logits.iter().position(|x| *x == max);
            return Ok(first.map_or(0, |first| first as u32));
        }
        self.candidates.begin(&self.logits, max, self.config.top_k);
        self.keep_candidates();
        self.draw()
    }

    fn penalise(&mut self) {
        let penalty = self.config.repetition_penalty;
        let bits = |(word, bits): (usize, &u64)| {
            let bits = *bits;
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word * 64 + bit)
        };
        let observed = self.observed.iter().enumerate().filter(|(_, bits)| **bits != 0).flat_map(bits);
        for token in self.penalised.keys().map(|token| *token as usize).chain(observed) {
            if let Some(x) = self.logits.get_mut(token) {
                *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
            }
        }
        let SamplerConfig { frequency_penalty, presence_penalty, .. } = self.config;
        for (token, times) in &self.drawn {
            if let Some(x) = self.logits.get_mut(*token as usize) {
                // Clamped: a sum of large penalties must not overflow, because ∞ − ∞ is NaN.
                let penalty = *times as f32 * frequency_penalty + presence_penalty;
                *x -= penalty.clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// Applies top-p and min-p to the candidates.
    fn keep_candidates(&mut self) {
        let SamplerConfig { top_p, min_p, .. } = self.config;
        if top_p == 1.0 && min_p == 0.0 {
            return;
        }
        let (logits, candidates) = (&self.logits, &mut self.candidates);
        let total = if top_p < 1.0 { candidates.total(logits, 1.0) } else { 1.0 };
        let (mut kept, mut sum) = (0, 0.0);
        while let Some((_, gap)) = candidates.get(logits, kept) {
            // The most likely token has weight 1 and is always kept.
            let weight = exp_minus(gap);
            if weight < min_p && kept > 0 {
                break;
            }
            kept += 1;
            sum += weight / total;
            if top_p < 1.0 && sum >= top_p {
                break;
            }
        }
        candidates.truncate(kept);
    }

    fn draw(&mut self) -> Result<u32, Error> {
        let temperature = self.config.temperature;
        let mut left = self.uniform() * self.candidates.total(&self.logits, temperature);
        let (mut i, mut last) = (0, None);
        while let Some((token, gap)) = self.candidates.get(&self.logits, i) {
            let weight = exp_minus(gap / temperature);
            if weight == 0.0 {
                break; // all that follow have weight 0 too
            }
            left -= weight;
            if left < 0.0 {
                return Ok(token);
            }
            (i, last) = (i + 1, Some(token));
        }
        // Rounding may leave a remainder: return the last candidate with a weight above 0.
        last.ok_or_else(|| Error::Sampling("no token has a probability above 0".into()))
    }

    /// A number in [0, 1), from the seed and the number of draws so far (SplitMix64: Steele et al., 2014).
    fn uniform(&mut self) -> f32 {
        self.draws += 1;
        let mut z = self.config.seed.wrapping_add(self.draws.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
}
