//! Rotary embeddings as checkpoints define them. Computes the frequencies of transformers' `modeling_rope_utils` in the
//! same float width, so that logits agree.

use kvist_device::RopeTable;

/// The frequencies of one rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    /// Rotated elements per head: head_dim, or less for partial rotation.
    pub dim: usize,
    pub scaling: RopeScaling,
}

/// How a model extends its context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor` (Chen et al., 2023).
    Linear {
        factor: f64,
    },
    /// Low frequencies divided, high ones kept, a ramp between (Llama 3.1).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: f64,
    },
    /// The same idea, by number of rotations, with an attention temperature (YaRN; Peng et al., 2023).
    Yarn {
        factor: f64,
        original_context: f64,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: f64,
        /// Round the ends of the ramp outward to whole dimensions.
        truncate: bool,
    },
    /// Every frequency divided by its own factor: `rope_freqs.weight` of a GGUF file.
    Factors(Vec<f32>),
    /// Every frequency divided by its own factor: one set of factors for texts within the original context and one for
    /// longer texts (LongRoPE; Ding et al., 2024).
    Long {
        short: Vec<f32>,
        long: Vec<f32>,
        original_context: f64,
        attention_factor: f64,
    },
}

impl Rope {
    /// The frequencies for texts of up to `context` tokens.
    pub(crate) fn table(&self, context: u32) -> RopeTable {
        let attention_factor = self.attention_factor();
        RopeTable { inverse_frequencies: self.inv_freq(context), attention_factor }
    }

    /// One frequency per pair of elements, for texts of up to `context` tokens: `[dim / 2]`.
    pub fn inv_freq(&self, context: u32) -> Vec<f32> {
        let dim = self.dim as f32;
        let plain = (0..self.dim / 2).map(|i| 1.0 / (self.theta as f32).powf((2 * i) as f32 / dim));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / *factor as f32).collect(),
            RopeScaling::Factors(factors) => plain.zip(factors).map(|(f, by)| f / by).collect(),
            RopeScaling::Long { short, long, original_context, .. } => {
                let factors = if f64::from(context) > *original_context { long } else { short };
                plain.zip(factors).map(|(f, by)| f / by).collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let low_wavelength = (original_context / low_freq_factor) as f32;
                let high_wavelength = (original_context / high_freq_factor) as f32;
                let scale = |f: f32| {
                    let wavelength = 2.0 * std::f32::consts::PI / f;
                    let scaled = f / *factor as f32;
                    if wavelength < high_wavelength {
                        f
                    } else if wavelength > low_wavelength {
                        scaled
                    } else {
                        let turns = *original_context as f32 / wavelength;
                        let smooth =
                            (turns - *low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
                        (1.0 - smooth) * scaled + smooth * f
                    }
                };
                plain.map(scale).collect()
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let dim = self.dim as f64;
                // The dimension that completes `n` rotations over the original context.
                let dimension = |n: f64| {
                    dim * (original_context / (n * 2.0 * std::f64::consts::PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001; // avoids a ramp of zero width
                }
                let ramp = |i: usize| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                plain
                    .enumerate()
                    .map(|(i, f)| {
                        let keep = 1.0 - ramp(i);
                        f / *factor as f32 * (1.0 - keep) + f * keep
                    })
                    .collect()
            }
        }
    }

    /// Multiplies cos and sin of every angle.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.0,
        }
    }

    pub(super) fn check(&self, head_dim: usize) -> Result<(), (&'static str, String)> {
        let positive = |field: &'static str, x: f64| {
            if x.is_finite() && x > 0.0 {
                Ok(())
            } else {
                Err((field, format!("is {x}; it must be above 0")))
            }
        };
        positive("rope_theta", self.theta)?;
        if self.dim == 0 || !self.dim.is_multiple_of(2) || self.dim > head_dim {
            return Err(("rope dimension", format!("is {} in a head of {head_dim}", self.dim)));
        }
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive("original_max_position_embeddings", *original_context)?;
                if high_freq_factor > low_freq_factor {
                    Ok(())
                } else {
                    Err(("high_freq_factor", format!("is {high_freq_factor}, not above {low_freq_factor}")))
                }
            }
            RopeScaling::Yarn {
                factor, original_context, beta_fast, beta_slow, attention_factor, ..
            } => {
                positive("rope factor", *factor)?;
                positive("original_max_position_embeddings", *original_context)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                positive("attention_factor", *attention_factor)
            }
            RopeScaling::Factors(factors) => self.check_factors("rope_freqs", factors),
            RopeScaling::Long { short, long, original_context, attention_factor } => {
                self.check_factors("short_factor", short)?;
                self.check_factors("long_factor", long)?;
                positive("original_max_position_embeddings", *original_context)?;
                positive("attention_factor", *attention_factor)
            }
        }
    }

    fn check_factors(&self, field: &'static str, factors: &[f32]) -> Result<(), (&'static str, String)> {
        if factors.len() != self.dim / 2 {
            return Err((field, format!("has {} factors for {} pairs", factors.len(), self.dim / 2)));
        }
        match factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
            Some(factor) => Err((field, format!("holds {factor}; factors must be above 0"))),
            None => Ok(()),
        }
    }
}

/// LongRoPE's attention factor for a context extension by `factor`, if the config has none.
pub(super) fn longrope_temperature(factor: f64, original_context: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original_context.ln()).sqrt() }
}

/// YaRN's attention factor for a context extension by `factor`, if the config has none.
pub(super) fn yarn_temperature(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
