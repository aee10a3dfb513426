//! Rotary position embedding (Su et al., 2021), in the half-split form of the Hugging Face checkpoints.
use crate::config::Rope;
use kvist_cpu::{Compute, steps};

/// The angles of one batch: computed once per step and used by every layer.
#[derive(Debug, Default)]
pub struct Angles {
    cos: Vec<f32>, // [n_tokens, dim / 2]
    sin: Vec<f32>,
}

/// The frequencies of one rotary embedding.
#[derive(Debug)]
pub struct RotaryEmbedding {
    inverse_frequencies: Vec<f32>, // [dim / 2]
    /// Multiplies cos and sin (YaRN); 1 otherwise.
    attention_factor: f32,
}

impl RotaryEmbedding {
    /// For texts of up to `context` tokens.
    pub fn new(rope: &Rope, context: u32) -> Self {
        let attention_factor = rope.attention_factor();
        RotaryEmbedding { inverse_frequencies: rope.inv_freq(context), attention_factor }
    }

    /// Fills `angles` for tokens at these positions. Uses f32 throughout, as transformers does.
    pub fn angles(&self, positions: &[u32], angles: &mut Angles) {
        angles.cos.clear();
        angles.sin.clear();
        for &position in positions {
            for frequency in &self.inverse_frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                angles.cos.push(cos * self.attention_factor);
                angles.sin.push(sin * self.attention_factor);
            }
        }
    }

    /// Rotates the rows `x: [n_tokens, n_heads, head_dim]`. Only the first `2 × frequencies` elements of a row are
    /// rotated.
    pub fn apply(&self, compute: &Compute, angles: &Angles, x: &mut [f32], n_heads: usize, head_dim: usize) {
        let half = self.inverse_frequencies.len();
        steps::rotate_pairs(compute, x, n_heads, head_dim, &angles.cos, &angles.sin, half);
    }
}
