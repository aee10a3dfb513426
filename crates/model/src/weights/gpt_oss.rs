//! The experts of gpt-oss in safetensors: one tensor for all experts of a layer, with gate and up rows alternating.
//!
//! ```text
//! as published    gate_up_proj_blocks [n, 2·width, hidden / 32, 16], …_scales [n, 2·width, hidden / 32]     MXFP4
//! in floats       gate_up_proj        [n, hidden, 2·width], that is turned
//! biases          gate_up_proj_bias   [n, 2·width]
//! ```
//! and `down_proj` likewise, whose rows are its own.
use super::Encoding;
use super::safetensors::Folder;
use super::view::{Order, View};
use crate::config::TensorSpec;
use crate::error::Error;

/// The tensor of one expert, by the name that other families use. `None` if the name is not an expert's, or not in the
/// folder.
pub(super) fn find<'f>(folder: &'f Folder, spec: &TensorSpec) -> Result<Option<View<'f>>, Error> {
    let Some(wanted) = Wanted::parse(folder, spec) else { return Ok(None) };
    if wanted.is_bias {
        return wanted.floats("_bias", &[]);
    }
    match wanted.blocks()? {
        None => wanted.floats("", &spec.shape[1..]),
        blocks => Ok(blocks),
    }
}

/// What `model.layers.0.mlp.experts.3.up_proj.weight` refers to in this layout.
struct Wanted<'f, 'n> {
    folder: &'f Folder,
    spec: &'n TensorSpec,
    /// `model.layers.0.mlp.experts.gate_up_proj`
    whole: String,
    expert: usize,
    /// Its rows in the shared tensor: the first, and the step to the next.
    first: usize,
    step: usize,
    is_bias: bool,
}

impl<'f, 'n> Wanted<'f, 'n> {
    fn parse(folder: &'f Folder, spec: &'n TensorSpec) -> Option<Self> {
        let (experts, rest) = spec.name.split_at(spec.name.find(".experts.")? + ".experts".len());
        let (expert, part) = rest.strip_prefix('.')?.split_once('.')?;
        let (part, kind) = part.split_once('.')?;
        let (whole, first, step) = match part {
            "gate_proj" => ("gate_up_proj", 0, 2),
            "up_proj" => ("gate_up_proj", 1, 2),
            "down_proj" => ("down_proj", 0, 1),
            _ => return None,
        };
        let (whole, expert) = (format!("{experts}.{whole}"), expert.parse().ok()?);
        Some(Wanted { folder, spec, whole, expert, first, step, is_bias: kind == "bias" })
    }

    /// Number of rows of the shared tensor.
    fn columns(&self) -> usize {
        self.spec.shape[0] * self.step
    }

    fn floats(&self, ending: &str, inputs: &[usize]) -> Result<Option<View<'f>>, Error> {
        let name = format!("{}{ending}", self.whole);
        let all = match self.folder.find(&name) {
            Err(Error::MissingTensor { .. }) => return Ok(None),
            found => found?,
        };
        if !all.encoding.is_float() {
            let (file, found) = (self.folder.path().into(), all.encoding.name().into());
            return Err(Error::TensorEncoding { file, name, found, known: "floats and MXFP4 here".into() });
        }
        let bytes = self.part(&name, &all.shape, &[inputs, &[self.columns()]].concat(), all.bytes())?;
        let order = Order::Columns { columns: self.columns(), first: self.first, step: self.step };
        Ok(Some(View::ordered_by(&self.spec.name, self.spec.shape.clone(), all.encoding, bytes, order)))
    }

    fn blocks(&self) -> Result<Option<View<'f>>, Error> {
        let [blocks, scales] = ["_blocks", "_scales"].map(|ending| format!("{}{ending}", self.whole));
        let (Some((shape, codes)), Some((scale_shape, bytes))) =
            (self.folder.bytes(&blocks)?, self.folder.bytes(&scales)?)
        else {
            return Ok(None);
        };
        let inputs = self.spec.shape[1];
        if !inputs.is_multiple_of(32) {
            let what = format!("`{blocks}` has blocks of 32, and rows are {inputs} long");
            return Err(Error::Malformed { file: self.folder.path().into(), what });
        }
        let codes = self.part(&blocks, shape, &[self.columns(), inputs / 32, 16], codes)?;
        let scales = self.part(&scales, scale_shape, &[self.columns(), inputs / 32], bytes)?;
        let order = Order::Scaled { scales, first: self.first, step: self.step };
        let view = View::ordered_by(&self.spec.name, self.spec.shape.clone(), Encoding::Mxfp4, codes, order);
        Ok(Some(view))
    }

    /// The bytes of this expert in a tensor with `n` experts.
    fn part(&self, name: &str, shape: &[usize], each: &[usize], bytes: &'f [u8]) -> Result<&'f [u8], Error> {
        match shape.split_first() {
            Some((n, found)) if found == each && self.expert < *n => {
                let size = bytes.len() / n;
                Ok(&bytes[self.expert * size..(self.expert + 1) * size])
            }
            _ => Err(Error::TensorShape {
                file: self.folder.path().into(),
                name: name.into(),
                found: shape.to_vec(),
                expected: [&[self.expert + 1], each].concat(),
            }),
        }
    }
}
