//! The layer of a draft head. It differs from a model's layer only in its input:
//!
//! ```text
//! EAGLE-1    x = embedding·Wfc₁ + state·Wfc₂ + b                    state: the target's normed output, or the head's;
//!                                                                   the embedding is perhaps normed
//! EAGLE-3    state = features·Wfc, or the head's                    x = state, perhaps normed
//!            q, k, v = [norm(embedding), norm(state)]·Wqkv
//! ```
use super::decoder::{Decoder, Layer, Loaded, Running};
use super::head::OpenedHead;
use super::load::Loader;
use crate::config::HeadKind;
use crate::error::Error;
use crate::weights::WeightFormat;
use kvist_device::*;
use std::sync::Arc;

/// A loaded model that can take draft heads.
pub(super) trait Weights: LoadedModel {
    /// A head that shares what its file lacks with this model: embedding, output layer.
    fn load_head(
        &self,
        head: &OpenedHead,
        format: WeightFormat,
        context: u32,
    ) -> Result<Box<dyn Weights>, Error>;
}

/// The projection in front of the layer of a draft head.
pub(super) struct DraftInput<D: Device> {
    fc: D::Linear,
    kind: InputKind<D>,
}

enum InputKind<D: Device> {
    Eagle1 {
        /// The target's last norm, which is still to be applied to its features, and its epsilon.
        feature_norm: Option<Arc<D::Vector>>,
        eps: f32,
        embedding_norm: Option<D::Vector>,
    },
    Eagle3 {
        hidden_norm: D::Vector,
        norm_before_residual: bool,
    },
}

impl<D: Device> Weights for Loaded<D> {
    fn load_head(
        &self,
        head: &OpenedHead,
        format: WeightFormat,
        context: u32,
    ) -> Result<Box<dyn Weights>, Error> {
        let (config, target) = (&head.config.layer, &self.decoder);
        let mut loader = Loader {
            device: &*self.device,
            specs: head.specs.clone(),
            source: &head.source,
            format,
            norms_less_one: false,
            context,
            done: 0,
            total: head.specs.len(),
            progress: &mut |_, _| {},
        };
        let embedding = match head.specs.contains_key("model.embed_tokens.weight") {
            true => Arc::new(loader.embedding()?),
            false => target.embedding.clone(),
        };
        let kind = match head.config.kind {
            HeadKind::Eagle1 { .. } => InputKind::Eagle1 {
                feature_norm: target.norm.clone(),
                eps: target.config.norm_eps,
                embedding_norm: loader.norm("embedding_norm")?,
            },
            HeadKind::Eagle3 { norm_before_residual } => {
                InputKind::Eagle3 { hidden_norm: loader.must_norm("hidden_norm")?, norm_before_residual }
            }
        };
        let output = loader.linear("lm_head")?.map(Arc::new);
        let decoder = Decoder {
            config: config.clone(),
            embedding,
            draft: Some(DraftInput { fc: loader.must("fc")?, kind }),
            layers: vec![loader.layer(config, 0)?],
            norm: loader.norm("model.norm")?.map(Arc::new),
            head: Some(output.unwrap_or_else(|| target.head.as_ref().unwrap_or(&target.embedding).clone())),
            ropes: config.ropes.iter().map(|rope| rope.table(context)).collect(),
        };
        Ok(Box::new(Loaded { device: self.device.clone(), decoder: Arc::new(decoder) }))
    }
}

impl<D: Device> Running<D> {
    /// Uploads the given rows of a draft head. Refuses rows of another width, and rows for other models.
    pub(super) fn upload_given(
        &mut self,
        draft: Option<&DraftInput<D>>,
        hidden: usize,
        features: usize,
        inputs: &StepInputs<'_>,
    ) -> Result<(), DeviceError> {
        let Running { device, stream, activations: a, .. } = self;
        let (rows, width, out) = match (draft, inputs.given) {
            (None, Given::Nothing) => return Ok(()),
            (None, _) => return Err(DeviceError::Unsupported("only draft heads are given rows".into())),
            (Some(_), Given::Nothing) => {
                return Err(DeviceError::Unsupported("a draft head needs features or hidden states".into()));
            }
            // The features of EAGLE-1 become hidden states when they are normed.
            (Some(DraftInput { kind: InputKind::Eagle1 { .. }, .. }), Given::Features(rows)) => {
                (rows, hidden, &mut a.state)
            }
            (Some(_), Given::Features(rows)) => (rows, features, &mut a.features),
            (Some(_), Given::States(rows)) => (rows, hidden, &mut a.state),
        };
        let expected = vec![inputs.tokens.len(), width];
        if rows.len() != inputs.tokens.len() * width {
            return Err(DeviceError::Shape { what: "rows of a draft head", expected, elements: rows.len() });
        }
        device.upload(stream, rows, out);
        Ok(())
    }

    /// Queries, keys and values of a draft head's layer, and the residual stream.
    pub(super) fn project_draft(
        &mut self,
        decoder: &Decoder<D>,
        draft: &DraftInput<D>,
        layer: &Layer<D>,
        given: Given<'_>,
    ) {
        let Running { device, stream, activations: a, .. } = self;
        let from_target = matches!(given, Given::Features(_));
        match &draft.kind {
            InputKind::Eagle1 { feature_norm, eps, embedding_norm } => {
                if let Some(weight) = feature_norm.as_ref().filter(|_| from_target) {
                    device.norm_in_place(stream, &mut a.state, Norm { weight, eps: *eps });
                }
                if let Some(norm) = embedding_norm {
                    device.norm_in_place(stream, &mut a.x, decoder.norm(norm));
                }
                device.concat(stream, &a.x, &a.state, &mut a.joined);
                device.matmul(stream, &a.joined, &mut [(&draft.fc, &mut a.x)]);
                self.project(decoder, layer);
            }
            InputKind::Eagle3 { hidden_norm, norm_before_residual } => {
                if from_target {
                    device.matmul(stream, &a.features, &mut [(&draft.fc, &mut a.state)]);
                }
                device.rms_norm(stream, &a.state, decoder.norm(hidden_norm), &mut a.projected);
                if let Some(norm) = &layer.attention_norm {
                    device.norm_in_place(stream, &mut a.x, decoder.norm(norm));
                }
                device.concat(stream, &a.x, &a.projected, &mut a.joined);
                if let Some((k, v)) = &layer.kv {
                    let outs = &mut [(&layer.q, &mut a.q), (k, &mut a.k), (v, &mut a.v)];
                    device.matmul(stream, &a.joined, outs);
                }
                let residual = if *norm_before_residual { &mut a.projected } else { &mut a.state };
                std::mem::swap(&mut a.x, residual);
            }
        }
    }
}
