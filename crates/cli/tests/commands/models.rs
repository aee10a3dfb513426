//! `--model` with names, and `kvist models`: through the real binary, with a Hub on loopback and caches made by the
//! test.
use crate::loopback::{COMMIT, Hub, sha256};
use crate::program::{fixtures, kvist};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// Runs the program in its own home folder: without this machine's caches, tokens and proxies.
fn at_home(home: &Path, endpoint: &str, args: &[&str]) -> Output {
    let mut command = kvist();
    let variables: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in variables {
        let text = name.to_string_lossy().to_uppercase();
        if ["HF_", "HUGGING", "TRANSFORMERS_", "XDG_", "LLAMA_"].iter().any(|prefix| text.starts_with(prefix))
            || text.ends_with("_PROXY")
        {
            command.env_remove(name);
        }
    }
    command.env("HOME", home).env("OLLAMA_MODELS", home.join("ollama")).env("HF_ENDPOINT", endpoint);
    command.args(args).output().unwrap()
}

/// stdout of a run that must succeed.
fn succeed(home: &Path, endpoint: &str, args: &[&str]) -> String {
    let out = at_home(home, endpoint, args);
    let error = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {error}");
    String::from_utf8(out.stdout).unwrap()
}

/// Exit status and stderr of a run that must fail.
fn fail(home: &Path, endpoint: &str, args: &[&str]) -> (Option<i32>, String) {
    let out = at_home(home, endpoint, args);
    assert!(out.stdout.is_empty(), "{args:?}");
    (out.status.code(), String::from_utf8(out.stderr).unwrap())
}

/// A Hub with a model in shards, and a GGUF one.
fn hub() -> Hub {
    let hub = Hub::start();
    let folder = fixtures().join("parity/llama-gqa-sharded-f16");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let entry = entry.unwrap();
        let (name, bytes) = (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap());
        match name.ends_with(".safetensors") {
            true => hub.large("org/sharded", &name, &bytes),
            false => hub.small("org/sharded", &name, &String::from_utf8(bytes).unwrap()),
        }
    }
    for (name, fixture) in [("m-Q4_K_M.gguf", "llama-q4_k_m"), ("m-Q8_0.gguf", "llama-q8_0")] {
        let bytes = std::fs::read(fixtures().join("gguf").join(fixture).join("model.gguf")).unwrap();
        hub.large("org/m-GGUF", name, &bytes);
    }
    hub
}

const NOWHERE: &str = "http://127.0.0.1:9";

#[test]
fn commands_take_names_of_the_hub() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let home = home.path();
    let out = home.join("logits.safetensors");
    let logits = |model: &str| {
        ["logits", "--tokens", "1,2,3", "--out", out.to_str().unwrap(), "--model", model].map(String::from)
    };
    let words = |args: &[String; 7], more: &[&'static str]| -> Vec<String> {
        args.iter().cloned().chain(more.iter().map(|word| word.to_string())).collect()
    };
    let run = |endpoint: &str, args: &[String]| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        succeed(home, endpoint, &args);
        std::fs::read(&out).unwrap()
    };
    // Sizes need only config.json.
    let plan = succeed(home, &hub.endpoint, &["plan", "hf:org/sharded", "--json"]);
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["model"], "hf:org/sharded");
    let files: Vec<String> = hub.asked().into_iter().map(|asked| asked.path).collect();
    assert!(
        files.iter().all(|file| file.starts_with("/api/") || file.ends_with("/config.json")),
        "{files:?}"
    );
    let (status, said) = fail(home, &hub.endpoint, &["plan", "hf:org/m-GGUF"]);
    assert!(status == Some(1) && said.contains("its sizes are inside a file"), "{said}");

    // The same logits as those of the folder; also the second time, and without a network.
    let folder = fixtures().join("parity/llama-gqa-sharded-f16");
    let expected = run(NOWHERE, &logits(folder.to_str().unwrap()));
    assert_eq!(run(&hub.endpoint, &logits("hf:org/sharded")), expected);
    let read = hub.read().len();
    assert_eq!(run(&hub.endpoint, &logits("hf:org/sharded")), expected);
    assert_eq!(hub.read().len(), read);
    assert_eq!(run(NOWHERE, &words(&logits("hf:org/sharded"), &["--offline"])), expected);
    let snapshot = home.join(".cache/huggingface/hub/models--org--sharded/snapshots").join(COMMIT);
    assert!(snapshot.join("model.safetensors.index.json").is_file());

    // A server's configuration names a model as the flag does; the API reports that name.
    let config = home.join("kvist.toml");
    for (path, name) in [("hf:org/sharded", "sharded"), ("hf:org/m-GGUF:q8_0", "m-Q8_0")] {
        std::fs::write(&config, format!("[model]\npath = \"{path}\"\n")).unwrap();
        let args = ["serve", "--config", config.to_str().unwrap(), "--dry-run", "--json"];
        let plan: Value = serde_json::from_str(&succeed(home, &hub.endpoint, &args)).unwrap();
        assert_eq!(plan["model"], name, "{path}");
    }
}

#[test]
fn what_is_wrong_is_said_before_anything_is_written() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let home = home.path();
    for (model, status, expected) in [
        ("hf:sharded", 2, "has no owner; write hf:ORG/NAME"),
        ("hf:org/m-GGUF:Q5_K_M", 1, "has no quantisation Q5_K_M; there are Q4_K_M, Q8_0"),
        ("hf:org/none", 1, "has no repository org/none"),
        ("ollama:llama3.2:1b", 1, "ollama:llama3.2:1b does not exist"),
        ("org/sharded", 1, "downloads it as hf:org/sharded"),
    ] {
        for command in ["run", "eval", "serve"] {
            let rest: &[&str] = match command {
                "run" => &["text"],
                "eval" => &["--text", "Cargo.toml"],
                _ => &["--dry-run"],
            };
            let args = [&[command, "--model", model], rest].concat();
            let (found, said) = fail(home, &hub.endpoint, &args);
            assert!(found == Some(status) && said.contains(expected), "{args:?}: {said}");
        }
    }
    // For an unsupported family only the config is downloaded, not the weights.
    hub.small(
        "org/mamba",
        "config.json",
        r#"{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}"#,
    );
    hub.large("org/mamba", "model.safetensors", &[0; 1000]);
    let other = tempfile::tempdir().unwrap();
    let (_, said) = fail(other.path(), &hub.endpoint, &["run", "--model", "hf:org/mamba", "text"]);
    assert!(said.contains("Its weights were not downloaded") && said.contains("amba"), "{said}");
    assert!(hub.read().is_empty());
    let (_, said) = fail(home, NOWHERE, &["run", "--model", "hf:org/sharded", "text"]);
    assert!(said.contains("cannot reach") && said.contains("--offline"), "{said}");
    let (_, said) = fail(home, NOWHERE, &["run", "--offline", "--model", "hf:org/sharded", "text"]);
    assert!(said.contains("not in the cache"), "{said}");
    assert!(std::fs::read_dir(home).unwrap().next().is_none(), "a refusal wrote something");
}

#[test]
fn models_are_listed_with_what_fits() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let copy = |from: &str, to: &str| {
        let to = home.join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(fixtures().join(from), to).unwrap();
    };
    let write = |to: &str, bytes: &[u8]| {
        let to = home.join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::write(to, bytes).unwrap();
    };
    let empty = succeed(home, NOWHERE, &["models"]);
    assert!(empty.starts_with("no models in\n") && empty.contains(".cache/huggingface/hub"), "{empty}");

    let snapshot = format!(".cache/huggingface/hub/models--org--qwen/snapshots/{COMMIT}");
    for file in ["config.json", "model.safetensors"] {
        copy(&format!("parity/qwen3/{file}"), &format!("{snapshot}/{file}"));
    }
    copy("gguf/llama-q4_k_m/model.gguf", ".lmstudio/models/org/m-GGUF/m-Q4_K_M.gguf");
    // Files that are broken in different ways, among good ones.
    write(".lmstudio/models/org/m-GGUF/m-Q8_0.gguf", b"GGUF, cut short");
    write(".lmstudio/models/org/m-GGUF/m-F16.gguf", b"");
    let mut other = std::fs::read(fixtures().join("gguf/llama-q8_0/model.gguf")).unwrap();
    let at = other.windows(5).position(|window| window == b"llama").unwrap();
    other[at..at + 5].copy_from_slice(b"mamba");
    write(".lmstudio/models/org/mamba/mamba.gguf", &other);
    let weights = std::fs::read(fixtures().join("gguf/llama-q8_0/model.gguf")).unwrap();
    write(&format!("ollama/blobs/sha256-{}", sha256(&weights)), &weights);
    let layer = json!({"mediaType": "application/vnd.ollama.image.model", "digest": format!("sha256:{}", sha256(&weights))});
    let manifest = json!({"schemaVersion": 2, "layers": [layer]}).to_string();
    write("ollama/manifests/registry.ollama.ai/library/m/latest", manifest.as_bytes());

    let report: Value =
        serde_json::from_str(&succeed(home, NOWHERE, &["models", "--json", "--memory", "1GiB"])).unwrap();
    assert_eq!((&report["version"], &report["memory_bytes"]), (&json!(1), &json!(1u64 << 30)));
    let models = report["models"].as_array().unwrap();
    let of =
        |name: &str| models.iter().find(|model| model["name"] == name).unwrap_or_else(|| panic!("{report}"));
    assert_eq!(models.len(), 6, "{report}");
    let qwen = of("hf:org/qwen");
    assert_eq!(
        (&qwen["family"], &qwen["runs"], &qwen["store"]),
        (&json!("qwen3"), &json!(true), &json!("huggingface"))
    );
    assert_eq!(qwen["context_fits_tokens"], qwen["context_trained_tokens"]);
    assert!(
        of("lmstudio:org/m-GGUF:Q4_K_M")["runs"] == true && of("ollama:m:latest")["quantisation"] == "Q8_0"
    );
    for (name, expected) in [
        ("lmstudio:org/m-GGUF:Q8_0", "GGUF"),
        ("lmstudio:org/m-GGUF:F16", "is empty"),
        ("lmstudio:org/mamba:mamba.gguf", "does not run this family"),
    ] {
        let why = of(name)["why_not"].as_str().unwrap();
        assert!(
            of(name)["runs"] == false && why.contains(expected) && !why.contains(".lmstudio"),
            "{name}: {why}"
        );
    }
    assert_eq!(of("lmstudio:org/mamba:mamba.gguf")["family"], "mamba");

    let text = succeed(home, NOWHERE, &["models", "--memory", "1GiB"]);
    assert_eq!(text.lines().count(), 7, "{text}");
    assert!(text.starts_with("name ") && text.contains("hf:org/qwen ") && text.contains("no: "), "{text}");
    // Too little memory is reported, too.
    let text = succeed(home, NOWHERE, &["models", "--memory", "1KiB"]);
    assert!(text.contains("no: it takes "), "{text}");
}
