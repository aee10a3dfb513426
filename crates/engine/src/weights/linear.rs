//! Linear layers and embeddings. candle multiplies; packed kernels of our own will stand beside it.
use super::encoding::{Encoding, WeightForm};
use super::view::Matrix;
use crate::error::Error;
use candle_core::quantized::QMatMul;
use candle_core::{CpuStorage, Device, Module, Storage, Tensor};

/// `y = x·Wᵀ + b` with `W: [out, in]`.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>, // [out]
    inputs: usize,
    outputs: usize,
}

#[derive(Debug)]
enum Weight {
    /// Transposed as a view: `[in, out]`.
    F32(Tensor),
    Packed(QMatMul),
}

impl Linear {
    pub(super) fn new(matrix: Matrix) -> Self {
        let dims = match &matrix {
            Matrix::F32(tensor) => tensor.dims().to_vec(),
            Matrix::Packed(tensor) => tensor.shape().dims().to_vec(),
        };
        let (outputs, inputs) = (dims.first().copied().unwrap_or(0), dims.last().copied().unwrap_or(0));
        let weight = match matrix {
            Matrix::F32(tensor) => Weight::F32(tensor),
            Matrix::Packed(tensor) => Weight::Packed(QMatMul::QTensor(tensor.into())),
        };
        Linear { weight, bias: None, inputs, outputs }
    }

    pub fn with_bias(self, bias: Option<Vec<f32>>) -> Self {
        Linear { bias, ..self }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// `x: [n_tokens, in]`, `out` becomes `[n_tokens, out]`.
    pub fn forward(&self, x: &[f32], n_tokens: usize, out: &mut Vec<f32>) -> Result<(), Error> {
        let x = Tensor::from_slice(x, (n_tokens, self.inputs), &Device::Cpu)?;
        let y = match &self.weight {
            Weight::F32(weight) => x.matmul(&weight.t()?)?,
            Weight::Packed(weight) => weight.forward(&x)?,
        };
        out.clear();
        let (storage, layout) = y.storage_and_layout();
        let offset = layout.start_offset();
        match &*storage {
            Storage::Cpu(CpuStorage::F32(y)) => {
                out.extend_from_slice(&y[offset..offset + n_tokens * self.outputs])
            }
            _ => return Err(Error::Usage("a linear layer gave something other than f32".into())),
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.outputs) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
        Ok(())
    }

    /// Bytes a matrix takes in memory when it is loaded in this form, its bias not counted.
    pub fn resident_bytes(shape: &[usize], stored: Encoding, form: WeightForm) -> u64 {
        let row = shape.last().copied().unwrap_or(0);
        let bytes = stored.resident(form, row).tensor_bytes(shape);
        bytes.map_or(u64::MAX, |bytes| bytes as u64)
    }
}

/// Rows by token, and, where the model ties them, the output layer.
#[derive(Debug)]
pub struct Embedding {
    table: Linear, // [vocab, hidden]
}

impl Embedding {
    pub(super) fn new(matrix: Matrix) -> Self {
        Embedding { table: Linear::new(matrix) }
    }

    /// `out` becomes `[tokens, hidden]`. Tokens must lie inside the vocabulary.
    pub fn gather(&self, tokens: &[u32], out: &mut Vec<f32>) -> Result<(), Error> {
        out.clear();
        let hidden = self.table.inputs;
        match &self.table.weight {
            Weight::F32(table) => {
                let (storage, _) = table.storage_and_layout();
                let Storage::Cpu(CpuStorage::F32(table)) = &*storage else {
                    return Err(Error::Usage("the embedding is not f32".into()));
                };
                for token in tokens {
                    out.extend_from_slice(&table[*token as usize * hidden..(*token as usize + 1) * hidden]);
                }
            }
            Weight::Packed(table) => {
                let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
                let rows = table.embedding(&ids)?;
                out.extend(rows.flatten_all()?.to_vec1::<f32>()?);
            }
        }
        Ok(())
    }

    /// The tied output layer: `x: [n_rows, hidden]`, `out` becomes `[n_rows, vocab]`.
    pub fn logits(&self, x: &[f32], n_rows: usize, out: &mut Vec<f32>) -> Result<(), Error> {
        self.table.forward(x, n_rows, out)
    }

    /// Bytes the table takes in memory; it is never held twice.
    pub fn resident_bytes(shape: &[usize], stored: Encoding, form: WeightForm) -> u64 {
        Linear::resident_bytes(shape, stored, form)
    }
}
