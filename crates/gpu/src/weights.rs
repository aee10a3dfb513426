//! Weights on the device, in their file's encoding.
//!
//! A block's codes, further codes and scales go to regions of their own (`weights.wgsl`), so that kernels read
//! whole words. Rows of floats are padded to four elements. A matrix that is larger than a binding is split into parts
//! of whole rows.
use crate::driver::Driver;
use crate::kernels::{MATMUL_OUTPUTS, Routed, encoding_number};
use crate::range;
use kvist_device::DeviceError;
use kvist_device::weights::Encoding;
use std::ops::Range;

/// The weights of a linear layer with factor and bias, or an embedding table.
#[derive(Debug)]
pub struct Linear<D: Driver> {
    pub inputs: u32,
    pub outputs: u32,
    /// The encoding's number in `encodings.wgsl`.
    pub encoding: u32,
    pub factor: f32,
    /// A power of two that brings the weights into the range of f16, see `range::scale`.
    pub scale: f32,
    pub parts: Vec<Part<D>>,
    pub bias: Option<D::Buffer>, // [outputs]
}

/// Consecutive rows of a matrix.
#[derive(Debug)]
pub struct Part<D: Driver> {
    pub buffer: D::Buffer,
    pub first: u32,
    pub rows: u32,
    pub layout: Layout,
}

/// `Form` of `encodings.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub quads: u32,
    pub b: u32,
    pub s: u32,
    pub words: u64,
}

/// The bytes of a block that go to each region: codes, further codes, scales.
fn regions(encoding: Encoding) -> [Range<usize>; 3] {
    let none = 0..0;
    match encoding {
        Encoding::Q8_0 => [2..34, none, 0..2],
        Encoding::Int8 => [4..36, none, 0..4],
        Encoding::Q4_0 | Encoding::Iq4Nl => [2..18, none, 0..2],
        Encoding::Q4_1 => [4..20, none, 0..4],
        Encoding::Q5_0 => [6..22, 2..6, 0..2],
        Encoding::Q5_1 => [8..24, 4..8, 0..4],
        Encoding::Mxfp4 => [1..17, none, 0..1],
        Encoding::Q3K => [0..108, none, 108..110],
        Encoding::Q6K => [0..208, none, 208..210],
        whole => [0..whole.block().1, none.clone(), none],
    }
}

impl Layout {
    /// The layout of `rows` rows of `inputs` elements. `None` if rows are not whole blocks, or on overflow.
    fn new(encoding: Encoding, rows: usize, inputs: usize) -> Option<Layout> {
        let (elements, bytes) = encoding.block();
        let quads = u32::try_from(inputs.div_ceil(4)).ok()?;
        if encoding.is_float() {
            let words = u64::try_from(inputs.div_ceil(4).checked_mul(bytes)?.checked_mul(rows)?).ok()?;
            return Some(Layout { quads, b: 0, s: 0, words });
        }
        if !inputs.is_multiple_of(elements) {
            return None;
        }
        let blocks = (inputs / elements).checked_mul(rows)?;
        let [a, b, s] =
            regions(encoding).map(|region| blocks.checked_mul(region.len()).map(|n| n.div_ceil(4) as u64));
        let (a, b, s) = (a?, b?, s?);
        let words = a.checked_add(b)?.checked_add(s)?;
        Some(Layout { quads, b: u32::try_from(a).ok()?, s: u32::try_from(a + b).ok()?, words })
    }

    /// The rows of a part in this layout.
    fn arrange(&self, encoding: Encoding, inputs: usize, bytes: &[u8]) -> Vec<u8> {
        let (elements, size) = encoding.block();
        let mut out = vec![0u8; self.words as usize * 4];
        if encoding.is_float() {
            let (row, padded) = (inputs * size, self.quads as usize * 4 * size);
            out.chunks_exact_mut(padded)
                .zip(bytes.chunks_exact(row))
                .for_each(|(out, row)| out[..row.len()].copy_from_slice(row));
            return out;
        }
        debug_assert!(inputs.is_multiple_of(elements));
        let starts = [0, self.b as usize * 4, self.s as usize * 4];
        for (region, start) in regions(encoding).into_iter().zip(starts) {
            if region.is_empty() {
                continue;
            }
            out[start..]
                .chunks_exact_mut(region.len())
                .zip(bytes.chunks_exact(size))
                .for_each(|(out, block)| out.copy_from_slice(&block[region.clone()]));
        }
        out
    }
}

/// Rows of a part: a workgroup has [`MATMUL_OUTPUTS`] of them, and a dispatch 65,535 workgroups per dimension.
const MAX_ROWS: usize = 65_535 * MATMUL_OUTPUTS as usize;

/// Rows of each part, so that no part exceeds a binding. `None` if one row does, or on overflow.
fn split<D: Driver>(
    gpu: &D,
    encoding: Encoding,
    outputs: usize,
    inputs: usize,
) -> Option<Vec<(usize, Layout)>> {
    let one = Layout::new(encoding, 1, inputs)?.words.max(1);
    // A region may end within a word: three words more than the sum of the rows.
    let most = (gpu.limits().max_part_bytes / 4).checked_sub(3)? / one;
    let most = usize::try_from(most).ok()?.min(outputs.max(1)).min(MAX_ROWS);
    if most == 0 {
        return None;
    }
    let firsts = (0..outputs).step_by(most);
    firsts.map(|first| Some((first, Layout::new(encoding, most.min(outputs - first), inputs)?))).collect()
}

/// Bytes that [`Linear::new`] allocates for the weights. `None` if they cannot be kept.
pub fn bytes<D: Driver>(gpu: &D, encoding: Encoding, outputs: usize, inputs: usize) -> Option<u64> {
    let parts = split(gpu, encoding, outputs, inputs)?;
    parts.iter().try_fold(0u64, |sum, (_, layout)| sum.checked_add(layout.words.checked_mul(4)?.max(16)))
}

impl<D: Driver> Linear<D> {
    /// Uploads `bytes`, rows in `encoding`.
    pub fn new(
        gpu: &D,
        name: &str,
        encoding: Encoding,
        (outputs, inputs): (usize, usize),
        bytes: &[u8],
        factor: f32,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, DeviceError> {
        let bad = |what: String| DeviceError::Weights { name: name.into(), what };
        let number = encoding_number(encoding)
            .ok_or_else(|| bad(format!("the device {} has no kernel for {}", D::NAME, encoding.name())))?;
        let parts = split(gpu, encoding, outputs, inputs).ok_or_else(|| {
            bad(format!("{outputs} rows of {inputs} in {} cannot be bound", encoding.name()))
        })?;
        let row = encoding.row_bytes(inputs).filter(|row| row.checked_mul(outputs) == Some(bytes.len()));
        let row =
            row.ok_or_else(|| bad(format!("{} bytes are not {outputs} rows of {inputs}", bytes.len())))?;
        let width = |n: usize| u32::try_from(n).map_err(|_| bad(format!("{n} rows or columns are too many")));
        // Found only for kernels that need it: it reads all scales.
        let halves = gpu.gemm_tile(number, Routed::No, u32::from(u16::MAX), width(outputs)?).halves;
        let scale = if halves { range::scale(encoding, bytes) } else { 1.0 };
        let mut made = Vec::new();
        for (i, (first, layout)) in parts.iter().enumerate() {
            let end = parts.get(i + 1).map_or(outputs, |next| next.0);
            let words = layout.arrange(encoding, inputs, &bytes[first * row..end * row]);
            let buffer = gpu.filled("weights", &words)?;
            made.push(Part { buffer, first: width(*first)?, rows: width(end - first)?, layout: *layout });
        }
        let bias = bias.map(|bias| vector(gpu, &bias)).transpose()?;
        Ok(Linear {
            inputs: width(inputs)?,
            outputs: width(outputs)?,
            encoding: number,
            factor,
            scale,
            parts: made,
            bias,
        })
    }
}

/// Uploads f32 values.
pub fn vector<D: Driver>(gpu: &D, values: &[f32]) -> Result<D::Buffer, DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    gpu.filled("weights", &bytes)
}
