//! `quantization_config` of a `config.json`: the packed weights that kvist reads.
//!
//! ```text
//! gpt-oss              quant_method mxfp4                     experts in MXFP4
//! compressed-tensors   format int-quantized, 8 bits, W8A8     linear layers in int8, a scale per row (or one for all)
//! ```
//!
//! compressed-tensors' format is that of `vllm-project/compressed-tensors`, as llm-compressor writes it.
use super::family::Traits;
use super::json::Fields;
use super::*;
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// The experts of gpt-oss.
    Mxfp4,
    /// Linear layers.
    Int8,
}

impl Packing {
    /// How the weights are packed, if they are. `whole` is the file, `fields` are those of the text model.
    pub fn of(whole: &Fields<'_>, fields: &Fields<'_>, traits: &Traits) -> Result<Option<Self>, Error> {
        // Older files of compressed-tensors have the second name.
        let fields_of = |name| whole.get(name).or(fields.get(name)).map(|packed| (name, packed));
        let found = fields_of("quantization_config").or_else(|| fields_of("compression_config"));
        let Some((field, packed)) = found else { return Ok(None) };
        let method = packed.get("quant_method").and_then(Value::as_str).unwrap_or("no quant_method");
        match method {
            "mxfp4" if traits.family == Family::GptOss => Ok(Some(Packing::Mxfp4)),
            "compressed-tensors" => match unreadable(packed) {
                None => Ok(Some(Packing::Int8)),
                Some((part, found)) => {
                    let field = format!("{field}.{part}");
                    Err(fields
                        .bad(&field, format!("is {found}, which kvist does not read: {READS}; {INSTEAD}")))
                }
            },
            _ => {
                let problem = format!(
                    "says that the weights are packed ({method}) in a way kvist does not read: {INSTEAD}"
                );
                Err(fields.bad(field, problem))
            }
        }
    }

    /// The encoding of the experts' weights.
    pub fn encoding(self) -> Encoding {
        match self {
            Packing::Mxfp4 => Encoding::Mxfp4,
            Packing::Int8 => Encoding::Int8,
        }
    }
}

const READS: &str =
    "of compressed-tensors it reads int-quantized weights of 8 bits, symmetric, with a scale per channel";
const INSTEAD: &str = "use the original checkpoint with --weights q8_0 or int8, or a GGUF file";

/// The first setting of compressed-tensors that kvist does not read, and its value. Activations are quantised by kvist
/// itself, whatever the file says of them.
fn unreadable(packed: &Value) -> Option<(String, String)> {
    let text = |value: Option<&Value>| value.map_or("missing".into(), Value::to_string);
    let bad = |part: &str, value: Option<&Value>| Some((part.to_owned(), text(value)));
    let format = packed.get("format");
    if !matches!(format.and_then(Value::as_str), Some("int-quantized" | "naive-quantized")) {
        return bad("format", format);
    }
    // Rotations of activations that run with the model, and pruned weights.
    if let Some(transforms) = packed.pointer("/transform_config/config_groups")
        && transforms.as_object().is_none_or(|groups| !groups.is_empty())
    {
        return bad("transform_config", Some(transforms));
    }
    let sparse = packed.pointer("/sparsity_config/format");
    if !matches!(sparse.map(Value::as_str), None | Some(Some("dense"))) {
        return bad("sparsity_config.format", sparse);
    }
    let groups = packed.get("config_groups").and_then(Value::as_object).filter(|groups| !groups.is_empty());
    let Some(groups) = groups else { return bad("config_groups", packed.get("config_groups")) };
    groups.iter().find_map(|(name, group)| {
        let weights = |key: &str| group.get("weights").and_then(|weights| weights.get(key));
        let reads = |key: &str, known: &[Value]| match weights(key) {
            Some(value) if known.contains(value) => None,
            value => bad(&format!("config_groups.{name}.weights.{key}"), value),
        };
        reads("num_bits", &[8.into()])
            .or_else(|| reads("type", &["int".into()]))
            .or_else(|| reads("symmetric", &[true.into()]))
            .or_else(|| reads("strategy", &["channel".into(), "tensor".into()]))
    })
}
