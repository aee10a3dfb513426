//! Weights on the device, in their file's encoding.
//!
//! A block's codes, further codes and scales go to regions of their own (`weights.wgsl`), so that codes begin at multiples of 16 bytes
//! and kernels read whole words. Rows of floats are padded to four elements. A matrix that is larger than a binding is split into parts
//! of whole rows.
use crate::driver::Driver;
use crate::kernels::{MATMUL_OUTPUTS, MAX_GROUPS, Routed, encoding_number};
use crate::range;
use kvist_device::weights::{Encoding, WeightFormat};
use kvist_device::{DeviceError, ExpertTensor};
use std::ops::Range;

/// The weights of a linear layer with factor and bias, or an embedding table, or the same linear layer of every expert.
#[derive(Debug)]
pub struct Linear<D: Driver> {
    pub inputs: u32,
    /// Of one expert.
    pub outputs: u32,
    /// The encoding's number in `encodings.wgsl`.
    pub encoding: u32,
    pub factor: f32,
    /// A power of two that brings the weights into the range of f16, see `range::scale`.
    pub scale: f32,
    pub parts: Vec<Part<D>>,
    pub bias: Option<D::Buffer>, // [outputs], or [experts, outputs]
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
        Encoding::Q2K => [0..80, none, 80..84],
        Encoding::Q3K => [0..96, 96..108, 108..110],
        Encoding::Q6K => [0..208, none, 208..210],
        Encoding::Iq4Xs => [8..136, none, 0..8],
        Encoding::Table16 => [36..164, 4..36, 0..4],
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

    /// Writes rows from `first` on to a part in this layout.
    fn arrange(&self, encoding: Encoding, inputs: usize, (first, bytes): (usize, &[u8]), out: &mut [u8]) {
        let (elements, size) = encoding.block();
        if encoding.is_float() {
            let (row, padded) = (inputs * size, self.quads as usize * 4 * size);
            out[first * padded..]
                .chunks_exact_mut(padded)
                .zip(bytes.chunks_exact(row))
                .for_each(|(out, row)| out[..row.len()].copy_from_slice(row));
            return;
        }
        debug_assert!(inputs.is_multiple_of(elements));
        let block = first * (inputs / elements);
        let starts = [0, self.b as usize * 4, self.s as usize * 4];
        for (region, start) in regions(encoding).into_iter().zip(starts) {
            if region.is_empty() {
                continue;
            }
            out[start + block * region.len()..]
                .chunks_exact_mut(region.len())
                .zip(bytes.chunks_exact(size))
                .for_each(|(out, block)| out.copy_from_slice(&block[region.clone()]));
        }
    }
}

/// Rows of a part: a workgroup has [`MATMUL_OUTPUTS`] of them.
const MAX_ROWS: usize = (MAX_GROUPS * MATMUL_OUTPUTS) as usize;

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
        let mut upload = Upload::new(gpu, name, encoding, 1, (outputs, inputs))?;
        upload.push(name, bytes)?;
        let biases = bias.into_iter().flatten().collect();
        upload.finish(factor, biases)
    }
}

/// The layers of all experts as one, whose [`outputs`](Linear::outputs) are those of each expert. Experts are read one by one and
/// uploaded part by part: the host keeps up to one part.
pub fn stack<'t, D: Driver, E: From<DeviceError>>(
    gpu: &D,
    layers: impl ExactSizeIterator<Item = Result<ExpertTensor<'t>, E>>,
    format: WeightFormat,
) -> Result<Linear<D>, E> {
    let (n, mut found, mut biases) = (layers.len(), None, Vec::new());
    for layer in layers {
        let (tensor, bias) = layer?;
        let (shape, factor, name) = ((tensor.n_rows(), tensor.row_len()), tensor.factor, tensor.name);
        let encoding = tensor.encoding.resident(format, shape.1);
        let form = (encoding, shape, factor, bias.as_ref().map(Vec::len));
        let (first, upload) = match &mut found {
            Some(found) => found,
            None => found.insert((form, Upload::new(gpu, name, encoding, n, shape)?)),
        };
        if *first != form {
            let text = |(encoding, (outputs, inputs), factor, biases): (Encoding, _, f32, Option<usize>)| {
                let biases = biases.unwrap_or(0);
                format!("{outputs} rows of {inputs} in {}, times {factor}, {biases} biases", encoding.name())
            };
            let (first, this) = (text(*first), text(form));
            let what = format!(
                "is {this}; the first expert has {first}, and the device {} needs all alike",
                D::NAME
            );
            return Err(DeviceError::Weights { name: name.into(), what }.into());
        }
        upload.push(name, &tensor.encoded(encoding)?)?;
        biases.extend(bias.into_iter().flatten());
    }
    let missing = || DeviceError::Unsupported("a routed layer without experts".into());
    let ((_, _, factor, _), upload) = found.ok_or_else(missing)?;
    Ok(upload.finish(factor, biases)?)
}

/// A matrix on its way to the device.
struct Upload<'g, D: Driver> {
    gpu: &'g D,
    encoding: Encoding,
    number: u32,
    outputs: u32,
    inputs: usize,
    /// First row and layout of the parts that are not made yet.
    left: std::vec::IntoIter<(usize, Layout)>,
    /// Of the next part: first row, rows, layout, bytes.
    next: Option<(usize, usize, Layout, Vec<u8>)>,
    rows: usize,
    pushed: usize,
    /// The smallest one of what was pushed; `None`: no kernel needs it.
    scale: Option<f32>,
    parts: Vec<Part<D>>,
}

impl<'g, D: Driver> Upload<'g, D> {
    /// For `n` layers of `[outputs, inputs]`.
    fn new(
        gpu: &'g D,
        name: &str,
        encoding: Encoding,
        n: usize,
        (outputs, inputs): (usize, usize),
    ) -> Result<Self, DeviceError> {
        let bad = |what: String| DeviceError::Weights { name: name.into(), what };
        let number = encoding_number(encoding)
            .ok_or_else(|| bad(format!("the device {} has no kernel for {}", D::NAME, encoding.name())))?;
        let bindable =
            || bad(format!("{n} x {outputs} rows of {inputs} in {} cannot be bound", encoding.name()));
        let rows = outputs.checked_mul(n).ok_or_else(bindable)?;
        let parts = split(gpu, encoding, rows, inputs).ok_or_else(bindable)?;
        let width = |n: usize| u32::try_from(n).map_err(|_| bad(format!("{n} rows or columns are too many")));
        let (outputs, _, _) = (width(outputs)?, width(inputs)?, width(rows)?);
        // Found only for kernels that need it: it reads all scales.
        let halves = gpu.gemm_tile(number, Routed::No, u32::from(u16::MAX), outputs).halves;
        Ok(Upload {
            gpu,
            encoding,
            number,
            outputs,
            inputs,
            left: parts.into_iter(),
            next: None,
            rows,
            pushed: 0,
            scale: halves.then_some(f32::INFINITY),
            parts: Vec::new(),
        })
    }

    /// Adds the rows of one layer.
    fn push(&mut self, name: &str, bytes: &[u8]) -> Result<(), DeviceError> {
        let (outputs, inputs) = (self.outputs as usize, self.inputs);
        let row = self.encoding.row_bytes(inputs).filter(|row| row.checked_mul(outputs) == Some(bytes.len()));
        let row = row.ok_or_else(|| DeviceError::Weights {
            name: name.into(),
            what: format!("{} bytes are not {outputs} rows of {inputs}", bytes.len()),
        })?;
        if let Some(scale) = &mut self.scale {
            *scale = range::scale(self.encoding, bytes).map_or(*scale, |found| scale.min(found));
        }
        let mut done = 0;
        while done < outputs {
            let (first, rows, layout, words) = match &mut self.next {
                Some(next) => next,
                None => {
                    let Some((first, layout)) = self.left.next() else { break };
                    let end = self.left.as_slice().first().map_or(self.rows, |next| next.0);
                    self.next.insert((first, end - first, layout, vec![0; layout.words as usize * 4]))
                }
            };
            let at = self.pushed - *first;
            let n = (*rows - at).min(outputs - done);
            layout.arrange(self.encoding, inputs, (at, &bytes[done * row..(done + n) * row]), words);
            (done, self.pushed) = (done + n, self.pushed + n);
            if at + n == *rows {
                let buffer = self.gpu.filled("weights", words)?;
                self.parts.push(Part { buffer, first: *first as u32, rows: *rows as u32, layout: *layout });
                self.next = None;
            }
        }
        Ok(())
    }

    /// After all layers were pushed; their biases, if they have any.
    fn finish(self, factor: f32, biases: Vec<f32>) -> Result<Linear<D>, DeviceError> {
        debug_assert_eq!(self.pushed, self.rows, "as many layers as were said");
        let bias = (!biases.is_empty()).then(|| vector(self.gpu, &biases)).transpose()?;
        Ok(Linear {
            inputs: self.inputs as u32,
            outputs: self.outputs,
            encoding: self.number,
            factor,
            scale: self.scale.filter(|scale| scale.is_finite()).unwrap_or(1.0),
            parts: self.parts,
            bias,
        })
    }
}

/// Uploads f32 values.
pub fn vector<D: Driver>(gpu: &D, values: &[f32]) -> Result<D::Buffer, DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    gpu.filled("weights", &bytes)
}
