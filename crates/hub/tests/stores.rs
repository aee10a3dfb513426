//! Creates caches with the layouts of their programs. Every model is listed under a name that resolves to it,
//! and broken ones are reported.
mod loopback;
use kvist_hub::stores::{Found, list};
use kvist_hub::{Hub, Places, Settings};
use loopback::{Heard, alone, sha256};
use serde_json::json;
use std::path::{Path, PathBuf};

fn write(path: PathBuf, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// A blob and its link in a snapshot, as huggingface_hub creates them.
fn snapshot(cache: &Path, repo: &str, commit: &str, file: &str, bytes: &[u8]) {
    let repo = cache.join(format!("models--{}", repo.replace('/', "--")));
    let blob = repo.join("blobs").join(sha256(bytes));
    write(blob.clone(), bytes);
    let place = repo.join("snapshots").join(commit).join(file);
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(blob, place).unwrap();
    #[cfg(not(unix))]
    std::fs::copy(blob, place).unwrap();
}

fn commit(digit: char) -> String {
    digit.to_string().repeat(40)
}

/// A manifest as `ollama pull` writes it.
fn ollama(models: &Path, path: &str, weights: Option<&[u8]>) {
    let config = json!({"model_format": "gguf", "model_family": "llama", "file_type": "Q8_0"}).to_string();
    write(models.join(format!("blobs/sha256-{}", sha256(config.as_bytes()))), &config);
    let layer = |kind: &str, bytes: &[u8]| {
        json!({"mediaType": format!("application/vnd.ollama.image.{kind}"), "digest": format!("sha256:{}", sha256(bytes)),
            "size": bytes.len()})
    };
    let mut layers = vec![layer("template", b"{{ .Prompt }}"), layer("license", b"MIT")];
    if let Some(weights) = weights {
        layers.insert(0, layer("model", weights));
    }
    let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": format!("sha256:{}", sha256(config.as_bytes())), "size": config.len()},
        "layers": layers});
    write(models.join(path), manifest.to_string());
}

fn places(root: &Path) -> Places {
    Places {
        hugging_face: root.join("hub"),
        llama_cpp: Some(root.join("llama.cpp")),
        lm_studio: vec![root.join("lmstudio"), root.join("lm-studio")],
        ollama: vec![root.join("ollama")],
    }
}

/// Caches with models of every kind.
fn caches() -> (tempfile::TempDir, Settings) {
    let root = tempfile::tempdir().unwrap();
    let places = places(root.path());
    let hub = &places.hugging_face;
    let (old, new) = (commit('a'), commit('b'));
    for file in ["config.json", "model.safetensors"] {
        snapshot(hub, "Qwen/Qwen3-0.6B", &new, file, format!("{file} {new}").as_bytes());
        snapshot(hub, "Qwen/Qwen3-0.6B", &old, file, format!("{file} {old}").as_bytes());
    }
    write(hub.join("models--Qwen--Qwen3-0.6B/refs/main"), &new);
    for file in ["x-Q4_K_M.gguf", "x-F16-00001-of-00002.gguf", "x-F16-00002-of-00002.gguf", "mmproj-F16.gguf"]
    {
        snapshot(hub, "org/x--GGUF", &old, file, file.as_bytes());
    }
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    snapshot(hub, "org/half", &old, "config.json", b"{}");
    snapshot(hub, "org/half", &old, "model.safetensors.index.json", index.as_bytes());
    snapshot(hub, "org/half", &old, "model-00001-of-00002.safetensors", b"1");
    snapshot(hub, "org/torch", &old, "config.json", b"{}");
    snapshot(hub, "org/torch", &old, "pytorch_model.bin", b"2");
    // Not models: a lone tokenizer, a data set, and unrelated files.
    snapshot(hub, "org/tokenizer", &old, "tokenizer.json", b"{}");
    write(hub.join("datasets--org--data/snapshots/x/config.json"), "{}");
    write(hub.join("models--odd"), "");
    write(hub.join("models--org--empty/refs/main"), "nonsense");
    write(hub.join("version.txt"), "1");

    let llama = places.llama_cpp.as_ref().unwrap();
    write(llama.join("ggml-org_gemma_gemma-Q8_0.gguf"), "1234");
    write(llama.join("ggml-org_gemma_gemma-Q8_0.gguf.json"), "{}");
    write(llama.join("manifest=ggml-org=gemma=latest.json"), "{}");
    write(llama.join("x-00001-of-00002.gguf"), "1");
    snapshot(llama, "org/y", &old, "y-Q4_0.gguf", b"new layout");

    write(places.lm_studio[0].join("org/x-GGUF/x-Q4_K_M.gguf"), "12345");
    write(places.lm_studio[0].join("org/x-GGUF/x-Q8_0.gguf"), "123456");
    write(places.lm_studio[0].join("mlx/z-4bit/config.json"), "{}");
    write(places.lm_studio[0].join("mlx/z-4bit/model.safetensors"), "1");
    write(places.lm_studio[1].join("org/older/older.gguf"), "1");

    let models = &places.ollama[0];
    write(models.join(format!("blobs/sha256-{}", sha256(b"weights"))), "weights");
    ollama(models, "manifests/registry.ollama.ai/library/llama3.2/1b", Some(b"weights"));
    ollama(models, "manifests/registry.ollama.ai/ann/mine/latest", Some(b"weights"));
    ollama(models, "manifests/hf.co/org/x-GGUF/Q8_0", Some(b"weights"));
    ollama(models, "manifests-v2/registry.ollama.ai/library/new/latest", Some(b"weights"));
    ollama(models, "manifests/registry.ollama.ai/library/gone/latest", Some(b"not downloaded"));
    ollama(models, "manifests/registry.ollama.ai/library/tensors/latest", None);
    write(models.join("manifests/registry.ollama.ai/library/broken/latest"), "{");
    let evil =
        json!({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]});
    write(models.join("manifests/registry.ollama.ai/library/evil/latest"), evil.to_string());

    let settings = Settings { places, offline: true, ..alone(&root.path().join("hub")) };
    (root, settings)
}

#[test]
fn every_model_is_listed_under_a_name_that_leads_to_it() {
    let (_root, settings) = caches();
    let found = list(&settings.places);
    let llama = settings.places.llama_cpp.as_ref().unwrap();
    let y = llama.join("models--org--y/snapshots").join(commit('a')).join("y-Q4_0.gguf");
    let said: Vec<(String, u64, Option<String>)> =
        found.iter().map(|f| (f.name.clone(), f.bytes, f.quant.clone())).collect();
    let one =
        |name: &str, bytes: u64, quant: Option<&str>| (name.to_string(), bytes, quant.map(String::from));
    assert_eq!(
        said,
        [
            one("hf:Qwen/Qwen3-0.6B", 58, None),
            one("hf:org/half", 1, None),
            one("hf:org/torch", 1, None),
            one("hf:org/x--GGUF:F16", 50, Some("F16")),
            one("hf:org/x--GGUF:Q4_K_M", 13, Some("Q4_K_M")),
            one("llama.cpp:ggml-org_gemma_gemma-Q8_0.gguf", 4, Some("Q8_0")),
            one("llama.cpp:x-00001-of-00002.gguf", 1, None),
            one(y.to_str().unwrap(), 10, Some("Q4_0")),
            one("lmstudio:mlx/z-4bit", 1, None),
            one("lmstudio:org/x-GGUF:Q4_K_M", 5, Some("Q4_K_M")),
            one("lmstudio:org/x-GGUF:Q8_0", 6, Some("Q8_0")),
            one("lmstudio:org/older:older.gguf", 1, None),
            one("ollama:ann/mine:latest", 7, Some("Q8_0")),
            one("ollama:broken:latest", 0, None),
            one("ollama:evil:latest", 0, None),
            one("ollama:gone:latest", 0, None),
            one("ollama:hf.co/org/x-GGUF:Q8_0", 7, Some("Q8_0")),
            one("ollama:llama3.2:1b", 7, Some("Q8_0")),
            one("ollama:new:latest", 7, Some("Q8_0")),
            one("ollama:tensors:latest", 0, None),
        ]
    );
    // The snapshot that `main` refers to, not the newest one.
    let qwen = settings.places.hugging_face.join("models--Qwen--Qwen3-0.6B/snapshots").join(commit('b'));
    assert_eq!(found[0].path, qwen);

    let hub = Hub::new(settings);
    for Found { name, path, trouble, .. } in &found {
        let resolved = hub.resolve(Path::new(name), &mut Heard::default());
        match trouble {
            None => assert_eq!(&resolved.unwrap().path, path, "{name}"),
            // A file is returned without checks; the engine reports what is wrong with it.
            Some(_) if name.starts_with("llama.cpp:") => assert!(resolved.is_ok(), "{name}"),
            Some(_) => drop(resolved.expect_err(name)),
        }
    }
    let trouble: Vec<(&str, &str)> =
        found.iter().filter_map(|f| Some((f.name.as_str(), f.trouble.as_deref()?))).collect();
    let expected = [
        ("hf:org/half", "model-00002-of-00002.safetensors is missing"),
        ("hf:org/torch", "no weights in safetensors"),
        ("llama.cpp:x-00001-of-00002.gguf", "x-00002-of-00002.gguf is missing"),
        ("ollama:broken:latest", "its manifest cannot be read"),
        ("ollama:evil:latest", "names an invalid blob"),
        ("ollama:gone:latest", "its weights are missing"),
        ("ollama:tensors:latest", "not in one GGUF file"),
    ];
    assert_eq!(trouble.len(), expected.len(), "{trouble:?}");
    for ((name, said), (expected, part)) in trouble.into_iter().zip(expected) {
        assert!(name == expected && said.contains(part), "{name}: {said}");
    }
}

#[test]
fn short_names_are_understood_and_wrong_ones_are_helped() {
    let (_root, settings) = caches();
    let hub = Hub::new(settings.clone());
    let resolve = |name: &str| hub.resolve(Path::new(name), &mut Heard::default());
    let weights = settings.places.ollama[0].join(format!("blobs/sha256-{}", sha256(b"weights")));
    for (name, title) in [
        ("ollama:llama3.2:1b", "llama3.2:1b"),
        ("ollama:new", "new"),
        ("ollama:library/new", "library/new"),
        ("ollama:ann/mine", "ann/mine"),
        ("ollama:registry.ollama.ai/library/new:latest", "registry.ollama.ai/library/new:latest"),
    ] {
        let resolved = resolve(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((resolved.path, resolved.title.as_deref()), (weights.clone(), Some(title)), "{name}");
    }
    let ends = |name: &str, end: &str| {
        let path = resolve(name).unwrap_or_else(|e| panic!("{name}: {e}")).path;
        assert!(path.ends_with(end), "{name}: {}", path.display());
    };
    ends("lmstudio:org/x-GGUF", "x-Q4_K_M.gguf");
    ends("lmstudio:org/x-GGUF:x-Q8_0.gguf", "x-Q8_0.gguf");
    ends("lmstudio:org/older", "older.gguf");
    ends("llama.cpp:ggml-org_gemma_gemma-Q8_0", "ggml-org_gemma_gemma-Q8_0.gguf");
    ends("hf:org/x--GGUF:f16", "x-F16-00001-of-00002.gguf");
    for (name, expected) in [
        ("ollama:llama3.2", "ollama:llama3.2 does not exist; ollama has llama3.2:1b, "),
        ("ollama:../../x", "does not exist; ollama has "),
        ("ollama:a/b/c/d", "does not exist"),
        ("lmstudio:org/y", "lmstudio has org/older"),
        ("lmstudio:org", "write lmstudio:ORG/NAME"),
        ("lmstudio:org/x-GGUF:F16", "has no quantisation F16; there are Q"),
        ("llama.cpp:gemma.gguf", "llama.cpp has "),
        ("llama.cpp:../hub/version.txt", "does not exist"),
    ] {
        let said = resolve(name).expect_err(name).to_string();
        assert!(said.contains(expected), "{name}: {said}");
    }
}

#[test]
fn a_machine_without_caches_has_an_empty_list() {
    let root = tempfile::tempdir().unwrap();
    assert_eq!(list(&places(root.path())), []);
    assert_eq!(list(&Places::default()), []);
}
