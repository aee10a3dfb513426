//! A linear layer with its scale and bias.
use crate::Compute;
use crate::linear::{Input, Matrix};

/// `y = scale × x·Wᵀ + b` with `W: [outputs, inputs]`, or an embedding table.
#[derive(Debug)]
pub struct Linear {
    pub(crate) weight: Matrix,
    pub(crate) scale: f32,
    pub(crate) bias: Option<Vec<f32>>, // [outputs]
}

impl Linear {
    pub(crate) fn outputs(&self) -> usize {
        self.weight.outputs()
    }
    pub(crate) fn inputs(&self) -> usize {
        self.weight.inputs()
    }
    /// `x: [n, inputs]`, `out: [n, outputs]`.
    pub(crate) fn multiply(&self, compute: &Compute, x: &mut Input<'_>, out: &mut [f32]) {
        self.weight.multiply(compute, x, out);
        if self.scale != 1.0 {
            out.iter_mut().for_each(|y| *y *= self.scale);
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.outputs()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}
