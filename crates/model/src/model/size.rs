//! Sizes of a model's weights on disk and in a device's memory, before they are loaded.
use super::{ModelFile, Opened, resident_bytes};
use crate::config::{Experts, ModelConfig, Role, TensorSpec};
use crate::error::Error;
use crate::weights::{Encoding, WeightFormat};
use kvist_device::Footprint;
use std::ffi::OsStr;
use std::path::Path;

/// The sizes of a model's weights.
#[derive(Clone, Debug)]
pub struct ModelSize {
    pub name: String,
    pub config: ModelConfig,
    /// Bytes on disk of the tensors that the model needs.
    pub stored_bytes: u64,
    /// Bytes in memory that loading will reserve.
    pub resident_bytes: u64,
    /// Weight bytes that decoding one token reads: all except the other rows of an embedding that is not the output
    /// layer, and unused experts.
    pub read_per_token: u64,
}

impl ModelSize {
    /// Sizes of a `config.json` alone (its `dtype` tells how weights are stored), a folder, a GGUF file or the embedded
    /// model.
    pub fn of(file: &ModelFile, device: &dyn Footprint, format: WeightFormat) -> Result<Self, Error> {
        match file {
            ModelFile::Path(path) if is_config_alone(path) => {
                Self::of(&ModelFile::Path(path.join("config.json")), device, format)
            }
            ModelFile::Path(path) if path.extension().is_some_and(|e| e == "json") => {
                let text = std::fs::read_to_string(path)
                    .map_err(|source| Error::Read { path: path.clone(), source })?;
                let name = path.display().to_string();
                let config = ModelConfig::from_json(&name, &text)?;
                let (stored, linears) = (config.stored_dtype, config.stored_linears);
                let experts = config.stored_experts;
                let of = |spec: &TensorSpec| match spec.role {
                    Role::Expert => experts,
                    Role::Linear if spec.name != "lm_head.weight" => linears,
                    _ => stored,
                };
                Self::sum(name, config, device, format, |spec| Ok(of(spec)))
            }
            _ => Self::of_opened(&Opened::open_without_texts(file, true)?, device, format),
        }
    }

    /// Sizes of an opened model, from the headers already read.
    pub fn of_opened(opened: &Opened, device: &dyn Footprint, format: WeightFormat) -> Result<Self, Error> {
        let encoding = |spec: &TensorSpec| Ok(opened.source.find(spec)?.encoding);
        Self::sum(opened.name.clone(), opened.config.clone(), device, format, encoding)
    }

    fn sum(
        name: String,
        config: ModelConfig,
        device: &dyn Footprint,
        format: WeightFormat,
        encoding: impl Fn(&TensorSpec) -> Result<Encoding, Error>,
    ) -> Result<Self, Error> {
        let mut size = ModelSize { name, stored_bytes: 0, resident_bytes: 0, read_per_token: 0, config };
        for spec in size.config.tensors() {
            let stored = encoding(&spec)?;
            let resident = resident_bytes(device, &spec, stored, format);
            size.stored_bytes =
                size.stored_bytes.saturating_add(stored.stored_bytes(&spec.shape).unwrap_or(0) as u64);
            size.resident_bytes = size.resident_bytes.saturating_add(resident);
            let gathered = spec.role == Role::Embedding && !size.config.tie_embeddings;
            let read = match (spec.role, size.config.experts) {
                // A step with one token reads one embedding row and only the experts that the token uses.
                _ if gathered => resident / spec.shape[0].max(1) as u64,
                (Role::Expert, Some(Experts { routing, .. })) => {
                    resident / routing.n_experts as u64 * routing.used as u64
                }
                _ => resident,
            };
            size.read_per_token = size.read_per_token.saturating_add(read);
        }
        size.resident_bytes = device.all_weight_bytes(size.resident_bytes);
        Ok(size)
    }
}

/// True if the folder has a config.json but no weight files.
fn is_config_alone(folder: &Path) -> bool {
    let is_weights = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
    };
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    folder.join("config.json").is_file() && !files.into_iter().any(|file| is_weights(&file.file_name()))
}
