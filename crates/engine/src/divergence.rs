//! Compares two distributions over the next token: perplexity, Kullback–Leibler divergence and top-1 agreement.
use kvist_model::Error;
use kvist_model::top_two;

/// Accumulates scored tokens.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    loss: f64,
    loss_reference: f64,
    same_top: usize,
    kl: Vec<f64>,
}

/// The metrics over all scored tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub tokens: usize,
    pub perplexity: f64,
    pub perplexity_reference: f64,
    /// KL(reference ‖ under test), in nats.
    pub kl_mean: f64,
    pub kl_p99: f64,
    pub kl_max: f64,
    /// Share of tokens for which both distributions have the same most likely token.
    pub top1_agreement: f64,
}

impl Divergence {
    /// Adds one position: the logits of both models and the actual next token. Fails on NaN logits and on a token
    /// outside the vocabulary.
    pub fn add(&mut self, reference: &[f32], under_test: &[f32], next: u32) -> Result<(), Error> {
        let bad = || Error::Sampling("the model gave NaN logits: its weights or its cache are broken".into());
        let (top, _) = top_two(reference).ok_or_else(bad)?;
        let (other, _) = top_two(under_test).ok_or_else(bad)?;
        let (p, q) = (LogSoftmax::of(reference), LogSoftmax::of(under_test));
        let vocab = reference.len().min(under_test.len());
        if next as usize >= vocab {
            return Err(Error::TokenOutsideVocabulary { token: next, vocab });
        }
        let next = next as usize;
        self.loss_reference -= p.at(reference[next]);
        self.loss -= q.at(under_test[next]);
        self.same_top += usize::from(top == other);
        let kl = reference.iter().zip(under_test).map(|(a, b)| {
            let (a, b) = (p.at(*a), q.at(*b));
            if a.exp() == 0.0 { 0.0 } else { a.exp() * (a - b) }
        });
        self.kl.push(kl.sum::<f64>().max(0.0)); // rounding may give a value slightly below zero
        Ok(())
    }

    /// Returns `None` before the first token.
    pub fn summary(&self) -> Option<Summary> {
        let n = self.kl.len();
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        Some(Summary {
            tokens: n,
            perplexity: (self.loss / n as f64).exp(),
            perplexity_reference: (self.loss_reference / n as f64).exp(),
            kl_mean: sorted.iter().sum::<f64>() / n as f64,
            kl_p99: sorted[(n * 99 / 100).min(n - 1)],
            kl_max: max,
            top1_agreement: self.same_top as f64 / n as f64,
        })
    }
}

struct LogSoftmax {
    log_sum: f64,
}

impl LogSoftmax {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
        LogSoftmax { log_sum: f64::from(max) + sum.ln() }
    }
    fn at(&self, logit: f32) -> f64 {
        f64::from(logit) - self.log_sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let mut d = Divergence::default();
        assert_eq!(d.summary(), None);
        // (1/2, 1/2) against (3/4, 1/4)
        d.add(&[0.0, 0.0], &[3f32.ln(), 0.0], 1).unwrap();
        let s = d.summary().unwrap();
        let kl = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        for (name, found, expected) in [
            ("perplexity", s.perplexity, 4.0),
            ("reference", s.perplexity_reference, 2.0),
            ("mean", s.kl_mean, kl),
            ("max", s.kl_max, kl),
            ("agreement", s.top1_agreement, 1.0),
        ] {
            assert!((found - expected).abs() < 1e-6, "{name}: {found} for {expected}");
        }
        assert!(d.add(&[f32::NAN, 0.0], &[0.0, 0.0], 0).is_err());
    }
}
