//! Chooses tokens from a row of logits on the host. A device that chooses tokens itself must choose the same ones.
//!
//! Order of the steps: top-k, top-p, min-p, temperature, draw. Top-p and min-p use the probabilities before the
//! temperature.
mod candidates;

pub use candidates::log_sum;
use candidates::{Candidates, exp_minus, largest};

/// How to draw a token from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// Divides the logits; finite and at least 0. 0 picks the most likely token.
    pub temperature: f32,
    /// Keep the K most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability; above 0, and 1 keeps all (Holtzman et al., 2020).
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one, from 0 to 1; 0 drops none (Nguyen et al., 2024).
    pub min_p: f32,
    /// The random number of this draw, in [0, 1). With the tokens in descending order of probability, it is the share of
    /// the probability that lies before the drawn token.
    pub uniform: f32,
}

impl SampleParams {
    /// Checks the ranges of the fields.
    pub fn check(&self) -> Result<(), &'static str> {
        let SampleParams { temperature, top_p, min_p, uniform, .. } = *self;
        if !temperature.is_finite() || temperature < 0.0 {
            return Err("the temperature must be 0 or more");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err("top-p must lie above 0 and at most at 1");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err("min-p must lie between 0 and 1");
        }
        match (0.0..1.0).contains(&uniform) {
            true => Ok(()),
            false => Err("the random number of a draw must be at least 0 and below 1"),
        }
    }
}

/// Why no token can be drawn from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoToken {
    #[error("there are no logits to sample from")]
    NoLogits,
    /// An earlier computation went wrong.
    #[error("the model gave NaN logits: its weights or its cache are broken")]
    Nan,
    #[error("no token has a probability above 0")]
    Impossible,
}

/// The largest of some logits.
fn max(logits: &[f32]) -> Result<f32, NoToken> {
    match logits {
        [] => Err(NoToken::NoLogits),
        _ => largest(logits).ok_or(NoToken::Nan),
    }
}

/// The most likely token of a row of logits; of several, the lowest.
pub(crate) fn argmax(logits: &[f32]) -> Result<u32, NoToken> {
    let max = max(logits)?;
    Ok(logits.iter().position(|x| *x == max).map_or(0, |first| first as u32))
}

/// Chooses tokens. The same logits and parameters give the same tokens on every machine. Its only state is reusable
/// buffers.
#[derive(Clone, Debug, Default)]
pub struct HostSampler {
    candidates: Candidates,
}

impl HostSampler {
    /// Has memory for draws from this many tokens, so that these allocate nothing.
    pub fn with_capacity(vocab: usize) -> Self {
        HostSampler { candidates: Candidates::with_capacity(vocab) }
    }

    /// The bytes of [`with_capacity`](Self::with_capacity). `None` on overflow.
    pub fn bytes(vocab: usize) -> Option<usize> {
        Candidates::bytes(vocab)
    }

    /// Draws a token from a row of logits.
    pub fn sample(&mut self, logits: &[f32], params: &SampleParams) -> Result<u32, NoToken> {
        if params.temperature == 0.0 {
            return argmax(logits);
        }
        self.candidates.begin(logits, max(logits)?, params.top_k as usize);
        self.keep(logits, params);
        self.draw(logits, params)
    }

    /// Draws a token from the `params.top_k` most likely ones and their logits, in order ([`RowResult::TopK`](crate::RowResult::TopK)): the
    /// one that [`sample`](Self::sample) draws from the whole row.
    pub(crate) fn sample_of(&mut self, top: &[(u32, f32)], params: &SampleParams) -> Result<u32, NoToken> {
        let most_likely = top.first().ok_or(NoToken::NoLogits)?;
        if params.temperature == 0.0 {
            return Ok(most_likely.0);
        }
        self.candidates.begin_with(top);
        self.keep(&[], params);
        self.draw(&[], params)
    }

    /// Appends the `k` most likely tokens of a row and their logits to `out`, the most likely first, equal ones in order
    /// of their ids. Appends all if there are fewer than `k`. On `Err` nothing is appended.
    pub fn top_k(&mut self, logits: &[f32], k: u32, out: &mut Vec<(u32, f32)>) -> Result<(), NoToken> {
        self.candidates.begin(logits, max(logits)?, k as usize);
        let found = (0..k as usize).map_while(|i| self.candidates.get(logits, i));
        out.extend(found.map(|(token, _)| (token, logits[token as usize])));
        Ok(())
    }

    /// Applies top-p and min-p to the candidates.
    fn keep(&mut self, logits: &[f32], params: &SampleParams) {
        let SampleParams { top_p, min_p, .. } = *params;
        if top_p == 1.0 && min_p == 0.0 {
            return;
        }
        let candidates = &mut self.candidates;
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

    fn draw(&mut self, logits: &[f32], params: &SampleParams) -> Result<u32, NoToken> {
        let temperature = params.temperature;
        let mut left = params.uniform * self.candidates.total(logits, temperature);
        let (mut i, mut last) = (0, None);
        while let Some((token, gap)) = self.candidates.get(logits, i) {
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
        last.ok_or(NoToken::Impossible)
    }
}
