//! W8A8 checkpoints of compressed-tensors: what is read, and what is refused. `parity.rs` of `kvist-engine` compares
//! the logits of one.
use crate::common::fixtures;
use kvist_cpu::Cpu;
use kvist_cpu::linear::Matrix;
use kvist_device::Footprint;
use kvist_device::weights::Encoding;
use kvist_model::config::ModelConfig;
use kvist_model::weights::{Source, WeightFormat};
use kvist_model::{ModelFile, ModelSize};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor of a folder before it is written.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    fn f32(shape: Vec<usize>, values: impl IntoIterator<Item = f32>) -> Self {
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Tensor { dtype: Dtype::F32, shape, bytes }
    }
    fn values(&self) -> Vec<f32> {
        self.bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }
}

/// A folder before it is written.
struct Folder {
    config: Value,
    tensors: BTreeMap<String, Tensor>,
}

const Q: &str = "model.layers.1.self_attn.q_proj.weight";

impl Folder {
    fn read(case: &str) -> Self {
        let folder = fixtures("parity").join(case);
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            (name.to_owned(), Tensor { dtype, shape, bytes: view.data().to_vec() })
        });
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        Folder { config, tensors: tensors.collect() }
    }
    fn write(&self, folder: &Path) {
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, tensor)| {
            (name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
        });
        std::fs::write(folder.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    }
    /// Every tensor of the model as f32.
    fn load(&self) -> Result<Vec<Vec<f32>>, String> {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        let load = || -> Result<Vec<Vec<f32>>, kvist_model::Error> {
            let config = ModelConfig::from_folder(folder.path())?;
            let source = Source::folder(folder.path(), false)?;
            config.tensors().iter().map(|spec| source.find(spec)?.to_f32()).collect()
        };
        load().map_err(|error| error.to_string())
    }
    fn scheme(&mut self, part: &str, value: Value) {
        self.config["quantization_config"]["config_groups"]["group_0"]["weights"][part] = value;
    }
    fn packing(&mut self, part: &str, value: Value) {
        self.config["quantization_config"][part] = value;
    }
    fn tensor(&mut self, ending: &str) -> &mut Tensor {
        self.tensors.get_mut(&format!("{Q}{ending}")).unwrap()
    }
}

fn w8a8() -> Folder {
    Folder::read("llama-w8a8")
}

#[test]
fn what_kvist_does_not_read_is_refused() {
    type Row = (&'static str, fn(&mut Folder), &'static [&'static str]);
    let rows: &[Row] = &[
        (
            "4 bits",
            |f| f.scheme("num_bits", json!(4)),
            &["config.json", "config_groups.group_0.weights.num_bits", "is 4", "original checkpoint", "GGUF"],
        ),
        ("floats", |f| f.scheme("type", json!("float")), &["weights.type", "\"float\""]),
        ("zero points", |f| f.scheme("symmetric", json!(false)), &["weights.symmetric", "is false"]),
        (
            "groups",
            |f| f.scheme("strategy", json!("group")),
            &["weights.strategy", "\"group\"", "per channel"],
        ),
        ("no strategy", |f| f.scheme("strategy", Value::Null), &["weights.strategy", "null"]),
        ("packed in i32", |f| f.packing("format", json!("pack-quantized")), &["format", "pack-quantized"]),
        ("no format", |f| f.packing("format", Value::Null), &["format", "null"]),
        ("no groups", |f| f.packing("config_groups", json!({})), &["config_groups", "{}"]),
        (
            "rotations",
            |f| f.packing("transform_config", json!({"config_groups": {"R3": {}}})),
            &["transform_config", "R3"],
        ),
        (
            "pruned weights",
            |f| f.packing("sparsity_config", json!({"format": "sparse-24-bitmask"})),
            &["sparsity_config.format", "sparse-24-bitmask"],
        ),
        (
            "an older file",
            |f| {
                let packed = f.config.as_object_mut().unwrap().remove("quantization_config").unwrap();
                f.config["compression_config"] = packed;
                f.config["compression_config"]["format"] = json!("pack-quantized");
            },
            &["compression_config.format", "pack-quantized"],
        ),
        ("another method", |f| f.packing("quant_method", json!("awq")), &["quantization_config", "awq"]),
        (
            "no scales",
            |f| _ = f.tensors.remove(&format!("{Q}_scale")),
            &["model.safetensors", Q, "I8", "q_proj.weight_scale"],
        ),
        (
            "too few scales",
            |f| *f.tensor("_scale") = Tensor::f32(vec![7, 1], [0.1; 7]),
            &["q_proj.weight_scale", "[7, 1]", "[64, 1]"],
        ),
        (
            "scales of bytes",
            |f| f.tensor("_scale").dtype = Dtype::U32,
            &["q_proj.weight_scale", "U32", "f32, f16, bf16"],
        ),
        (
            "a zero point",
            |f| {
                let zero =
                    Tensor { dtype: Dtype::I8, shape: vec![64, 1], bytes: [&[0; 63][..], &[1]].concat() };
                f.tensors.insert(format!("{Q}_zero_point"), zero);
            },
            &[Q, "zero points", "symmetric"],
        ),
        (
            "short rows",
            |f| {
                *f.tensor("") = Tensor { dtype: Dtype::I8, shape: vec![64, 48], bytes: vec![1; 64 * 48] };
            },
            &[Q, "rows of 48", "a multiple of 32"],
        ),
    ];
    for (what, change, parts) in rows {
        let mut folder = w8a8();
        change(&mut folder);
        let Err(error) = folder.load() else { panic!("{what} loads") };
        for part in *parts {
            assert!(error.contains(part), "{what}: {error} lacks {part:?}");
        }
    }
}

#[test]
fn one_scale_for_all_rows_and_zero_points_of_0_are_read() {
    let good = w8a8().load().unwrap();
    let mut folder = w8a8();
    let zeros = Tensor { dtype: Dtype::I8, shape: vec![64, 1], bytes: vec![0; 64] };
    folder.tensors.insert(format!("{Q}_zero_point"), zeros);
    assert_eq!(folder.load().unwrap(), good);

    let mut one = w8a8();
    one.scheme("strategy", json!("tensor"));
    *one.tensor("_scale") = Tensor::f32(vec![1], [0.5]);
    let mut all = w8a8();
    *all.tensor("_scale") = Tensor::f32(vec![64, 1], [0.5; 64]);
    assert_eq!(one.load().unwrap(), all.load().unwrap());
    assert_ne!(all.load().unwrap(), good);
}

/// Phi-3 has q, k and v in one tensor, and gate and up: their parts take their own scales.
#[test]
fn parts_of_a_tensor_take_their_own_scales() {
    let (mut packed, mut floats) = (Folder::read("phi3"), Folder::read("phi3"));
    packed.config["quantization_config"] = w8a8().config["quantization_config"].clone();
    let mut n = 0;
    for (name, tensor) in floats.tensors.clone() {
        if !name.contains("qkv_proj") && !name.contains("gate_up_proj") {
            continue;
        }
        n += 1;
        let row = tensor.shape[1];
        let (mut codes, mut scales, mut back) = (Vec::new(), Vec::new(), Vec::new());
        for x in tensor.values().chunks_exact(row) {
            let scale = x.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
            let row: Vec<i8> = x.iter().map(|x| (x / scale).round() as i8).collect();
            back.extend(row.iter().map(|code| scale * f32::from(*code)));
            codes.extend(row.into_iter().map(i8::cast_unsigned));
            scales.push(scale);
        }
        let scales = Tensor::f32(vec![scales.len(), 1], scales);
        packed.tensors.insert(format!("{name}_scale"), scales);
        let codes = Tensor { dtype: Dtype::I8, shape: tensor.shape.clone(), bytes: codes };
        packed.tensors.insert(name.clone(), codes);
        floats.tensors.insert(name, Tensor::f32(tensor.shape, back));
    }
    assert_eq!(n, 6);
    assert_eq!(packed.load().unwrap(), floats.load().unwrap());
}

#[test]
fn int8_takes_a_byte_per_weight() {
    let path = fixtures("parity").join("llama-w8a8");
    let sizes =
        |path: PathBuf, format| ModelSize::of(&ModelFile::Path(path), &Cpu::default(), format).unwrap();
    let whole = sizes(path.clone(), WeightFormat::AsStored);
    let linear = |encoding, outputs, inputs| Matrix::resident_bytes(encoding, outputs, inputs).unwrap();
    let layer: u64 = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
        .map(|(outputs, inputs)| linear(Encoding::Int8, outputs, inputs))
        .iter()
        .sum();
    assert_eq!(linear(Encoding::Int8, 64, 64), 64 * 64 + 64 * 4);
    let rest = 2 * linear(Encoding::F32, 104, 64) + 7 * 64 * 4;
    let in_memory = |weights| Cpu::default().all_weight_bytes(weights);
    assert_eq!(whole.resident_bytes, in_memory(3 * layer + rest));
    // The same from the config alone; embeddings and the output layer are floats.
    let alone = sizes(path.join("config.json"), WeightFormat::AsStored);
    assert_eq!((alone.resident_bytes, alone.stored_bytes), (whole.resident_bytes, whole.stored_bytes));
    // On request, everything.
    let all = sizes(path, WeightFormat::Int8);
    assert_eq!(all.resident_bytes, in_memory(3 * layer + 2 * linear(Encoding::Int8, 104, 64) + 7 * 64 * 4));
}
