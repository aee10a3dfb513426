//! Linear layers and embeddings over packed weights.
use super::encoding::{Encoding, WeightForm};
use kvist_cpu::Compute;
use kvist_cpu::linear::{Input, Matrix};

/// `y = scale × x·Wᵀ + b` with `W: [out, in]`.
#[derive(Debug)]
pub struct Linear {
    weight: Matrix,
    scale: f32,
    bias: Option<Vec<f32>>, // [out]
}

impl Linear {
    pub(super) fn new(weight: Matrix, scale: f32) -> Self {
        Linear { weight, scale, bias: None }
    }

    pub fn with_bias(self, bias: Option<Vec<f32>>) -> Self {
        Linear { bias, ..self }
    }

    pub fn outputs(&self) -> usize {
        self.weight.outputs()
    }

    pub fn inputs(&self) -> usize {
        self.weight.inputs()
    }

    /// `x: [n_tokens, in]`, `out` becomes `[n_tokens, out]`.
    pub fn forward(&self, compute: &Compute, x: &mut Input<'_>, out: &mut Vec<f32>) {
        out.resize(x.n() * self.outputs(), 0.0);
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

    /// Bytes that a matrix takes in memory when loaded in this form, without its bias.
    pub fn resident_bytes(shape: &[usize], stored: Encoding, form: WeightForm) -> u64 {
        let (inputs, rows) = shape.split_last().unwrap_or((&0, &[]));
        let outputs = rows.iter().try_fold(1usize, |n, rows| n.checked_mul(*rows));
        let packing = stored.resident(form, *inputs);
        outputs.and_then(|outputs| packing.resident_bytes(outputs, *inputs)).unwrap_or(u64::MAX)
    }
}

/// Token embeddings. If the model ties them, also the output layer.
#[derive(Debug)]
pub struct Embedding {
    table: Linear, // [vocab, hidden]
}

impl Embedding {
    pub(super) fn new(table: Matrix) -> Self {
        Embedding { table: Linear::new(table, 1.0) }
    }

    /// Copies the rows of `tokens`; `out` becomes `[tokens, hidden]`. Tokens must lie inside the vocabulary.
    pub fn gather(&self, tokens: &[u32], out: &mut Vec<f32>) {
        let hidden = self.table.weight.inputs();
        out.resize(tokens.len() * hidden, 0.0);
        for (token, row) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            self.table.weight.row(*token as usize, row);
        }
    }

    /// The tied output layer: `x: [n_rows, hidden]`, `out` becomes `[n_rows, vocab]`.
    pub fn logits(&self, compute: &Compute, x: &mut Input<'_>, out: &mut Vec<f32>) {
        self.table.forward(compute, x, out);
    }

    /// Bytes the table takes in memory. It is kept only once, even if tied.
    pub fn resident_bytes(shape: &[usize], stored: Encoding, form: WeightForm) -> u64 {
        Linear::resident_bytes(shape, stored, form)
    }
}
