//! An interrupted download leaves an empty file. It used to be reported as "not JSON: EOF while parsing", or as a
//! header that is too short.
use crate::common::*;
use kvist_cpu::Cpu;
use kvist_model::{LoadOptions, Model, ModelFile};
use std::path::Path;

fn load(file: &Path, mmap: bool) -> Result<(), String> {
    let options = LoadOptions { mmap, ..LoadOptions::default() };
    let budget = kvist_device::MemoryBudget::unlimited();
    let file = ModelFile::Path(file.to_path_buf());
    Model::load(&file, Cpu::default(), &options, &budget, &mut |_, _| {})
        .map(drop)
        .map_err(|error| error.to_string())
}

#[test]
fn an_empty_file_is_said_to_be_empty() {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/tiny-model/tokenizer.json");
    let mut bad = Vec::new();
    let mut n_files = 0;
    for case in ["llama-gqa", "llama-gqa-sharded-f16"] {
        for mmap in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            for entry in std::fs::read_dir(fixtures("parity").join(case)).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap();
                if name != "expected.safetensors" && name != "config.v4.json" {
                    std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
                }
            }
            std::fs::copy(&tokenizer, folder.path().join("tokenizer.json")).unwrap();
            load(folder.path(), mmap).unwrap();
            for entry in std::fs::read_dir(folder.path()).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap();
                let whole = std::fs::read(&path).unwrap();
                std::fs::write(&path, "").unwrap();
                let said = load(folder.path(), mmap).err().unwrap_or_default();
                if !(said.contains("is empty") && said.contains(name)) {
                    bad.push(format!("{case}/{name}, mmap {mmap}: `{said}`"));
                }
                std::fs::write(&path, whole).unwrap();
                n_files += 1;
            }
            let path = folder.path().join("alone.gguf");
            std::fs::write(&path, "").unwrap();
            let said = load(&path, mmap).unwrap_err();
            if !(said.contains("is empty") && said.contains("alone.gguf")) {
                bad.push(format!("alone.gguf, mmap {mmap}: `{said}`"));
            }
        }
    }
    assert!(n_files >= 12, "{n_files}");
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}
