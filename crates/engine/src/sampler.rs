//! Samples a token from logits.
//!
//! Order of the steps, as in llama.cpp's default chain: penalties (repetition, then frequency and presence), top-k,
//! top-p, min-p, temperature, draw. Top-p and min-p use the probabilities before the temperature.
use kvist_device::{HostSampler, NoToken, RowOutput, RowResult, SampleParams};
use kvist_model::Error;
use kvist_model::generation_config::SamplingDefaults;
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

    /// The settings that a model ships, and our own where it ships none: temperature 0.8, top-k 40, top-p 0.95, min-p
    /// 0.05, no penalties.
    pub fn of_model(shipped: &SamplingDefaults, seed: u64) -> Self {
        SamplerConfig {
            temperature: shipped.temperature.unwrap_or(0.8),
            top_k: shipped.top_k.unwrap_or(40),
            top_p: shipped.top_p.unwrap_or(0.95),
            min_p: shipped.min_p.unwrap_or(0.05),
            repetition_penalty: shipped.repetition_penalty.unwrap_or(1.0),
            repetition_window: shipped.repetition_window.unwrap_or(64),
            seed,
            ..SamplerConfig::greedy()
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
    host: HostSampler,
    /// A copy of the logits, with penalties.
    logits: Vec<f32>,
}

impl Sampler {
    pub fn new(config: SamplerConfig) -> Result<Self, Error> {
        let sampler = Sampler {
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
            host: HostSampler::default(),
            logits: Vec::new(),
        };
        sampler.params().check().map_err(|what| Error::Sampling(what.into()))?;
        let check = |good: bool, what: &str| if good { Ok(()) } else { Err(Error::Sampling(what.into())) };
        check(
            config.repetition_penalty.is_finite() && config.repetition_penalty > 0.0,
            "the repetition penalty must be above 0 and finite",
        )?;
        check(config.frequency_penalty.is_finite(), "the frequency penalty must be finite")?;
        check(config.presence_penalty.is_finite(), "the presence penalty must be finite")?;
        Ok(sampler)
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

    /// What a device must compute for the next draw: only the token, unless there are penalties. [`take`](Self::take) accepts
    /// the result.
    pub fn row_output(&self) -> RowOutput {
        match self.params() {
            _ if self.has_penalties() => RowOutput::Logits,
            params if params.temperature == 0.0 => RowOutput::Argmax,
            params => RowOutput::Sample(params),
        }
    }

    /// Returns the next token, from logits or as a device drew it. See [`sample`](Self::sample).
    pub fn take(&mut self, row: RowResult<'_>) -> Result<u32, Error> {
        let token = match row {
            RowResult::Logits(logits) => return self.sample(logits),
            RowResult::Token(token) => Ok(token),
            RowResult::Failed(why) => Err(why),
            // The first of the most likely tokens is not a draw.
            RowResult::TopK(_) => Err(NoToken::NoLogits),
        };
        self.note_draw(token)
    }

    /// Returns the next token. Fails on NaN logits, which mean that an earlier step went wrong.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        let params = self.params();
        let token = if self.has_penalties() {
            self.logits.clear();
            self.logits.extend_from_slice(logits);
            self.penalise();
            // Penalties never turn a number into NaN.
            self.host.sample(&self.logits, &params)
        } else {
            self.host.sample(logits, &params)
        };
        self.note_draw(token)
    }

    /// Notes a draw.
    fn note_draw(&mut self, token: Result<u32, NoToken>) -> Result<u32, Error> {
        let token = token.map_err(|why| Error::Sampling(why.to_string()))?;
        self.draws += u64::from(self.config.temperature != 0.0);
        if self.counts_draws() {
            *self.drawn.entry(token).or_default() += 1;
        }
        Ok(token)
    }

    fn counts_draws(&self) -> bool {
        self.config.frequency_penalty != 0.0 || self.config.presence_penalty != 0.0
    }

    fn has_penalties(&self) -> bool {
        self.config.repetition_penalty != 1.0 || self.counts_draws()
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

    /// The parameters of the next draw.
    fn params(&self) -> SampleParams {
        let SamplerConfig { temperature, top_k, top_p, min_p, .. } = self.config;
        let top_k = u32::try_from(top_k).unwrap_or(u32::MAX);
        SampleParams { temperature, top_k, top_p, min_p, uniform: self.uniform() }
    }

    /// A number in [0, 1), from the seed and the number of draws so far (SplitMix64: Steele et al., 2014).
    fn uniform(&self) -> f32 {
        let draw = self.draws + 1;
        let mut z = self.config.seed.wrapping_add(draw.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
}
