//! What the tool writes is what kvist reads, and nothing is left of what it refuses.
use kvist_cache::SeqId;
use kvist_device::MemoryBudget;
use kvist_engine::devices;
use kvist_engine::devices::Cpu;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

const TINY: &[&str] = &[
    "--layers",
    "2",
    "--hidden",
    "256",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "64",
    "--ff",
    "512",
    "--vocab",
    "300",
    "--context",
    "128",
    "--seed",
    "7",
];

fn write(args: &[&str], out: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_random-model")).args(TINY).args(args).arg(out).output().unwrap()
}

fn load(path: &Path) -> Arc<Model> {
    let options = LoadOptions { format: WeightFormat::AsStored, ..LoadOptions::default() };
    let file = ModelFile::Path(path.into());
    Arc::new(
        Model::load(&file, Cpu::default(), &options, &MemoryBudget::unlimited(), &mut |_, _| {}).unwrap(),
    )
}

fn logits(path: &Path) -> Vec<f32> {
    let model = load(path);
    let tokenizer = model.tokenizer().expect("has a tokenizer");
    let tokens = tokenizer.encode("a thing", true).unwrap();
    // One merge; all else is bytes.
    assert_eq!(tokens.len(), 1 + "a ".len() + 1 + "ing".len());
    assert_eq!(tokens[0], 0, "starts with bos");
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "a thing");
    let mut session = ModelSession::new(&model, &devices::all(), &CacheConfig::new(128)).unwrap();
    session.forward(&[SequenceInput::chain(SeqId::ONLY, &tokens)], LogitRows::LastOfEach).unwrap();
    session.logits_row(0).to_vec()
}

fn root_mean_square(all: impl Iterator<Item = f32> + Clone) -> f32 {
    let n = all.clone().count() as f32;
    (all.map(|x| x * x).sum::<f32>() / n).sqrt()
}

#[test]
fn every_format_and_encoding_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("gguf", "f32", 0.0),
        ("gguf", "f16", 0.01),
        ("gguf", "bf16", 0.05),
        ("gguf", "q8_0", 0.05),
        ("gguf", "q6_k", 0.1),
        ("gguf", "q4_k", 0.4),
        ("gguf", "q4_0", 0.4),
        ("safetensors", "f32", 1e-4),
        ("safetensors", "f16", 0.01),
        ("safetensors", "bf16", 0.05),
        ("safetensors", "int8", 0.1),
    ];
    let mut exact = Vec::new();
    for (format, dtype, bound) in cases {
        let out = folder.path().join(format!("{format}-{dtype}"));
        let written = write(&["--format", format, "--dtype", dtype], &out);
        assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
        let logits = logits(&out);
        assert_eq!(logits.len(), 300);
        if exact.is_empty() {
            exact = logits.clone();
        }
        let spread = root_mean_square(exact.iter().copied());
        assert!((0.2..5.0).contains(&spread), "logits of a sane size: {spread}");
        let off = root_mean_square(logits.iter().zip(&exact).map(|(a, b)| a - b)) / spread;
        assert!(off <= bound, "{format} {dtype}: {off}");
    }
}

#[test]
fn mixtures_of_experts_load() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for (dtype, used) in [("f32", "2"), ("q8_0", "2"), ("f32", "5")] {
        let out = folder.path().join(format!("{dtype}-{used}"));
        let written = write(&["--dtype", dtype, "--experts", "5", "--experts-used", used], &out);
        assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
        let routing = load(&out).config().experts.expect("a mixture of experts").routing;
        assert_eq!((routing.n_experts, routing.used.to_string(), routing.width), (5, used.to_string(), 512));
        all.push(logits(&out));
    }
    let spread = root_mean_square(all[0].iter().copied());
    let off = |other: &[f32]| root_mean_square(all[0].iter().zip(other).map(|(a, b)| a - b)) / spread;
    assert!(off(&all[1]) < 0.05, "rounding: {}", off(&all[1]));
    assert!(off(&all[2]) > 0.05, "other experts: {}", off(&all[2]));
}

#[test]
fn the_seed_decides() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| folder.path().join(name));
    for (out, seed) in [(&a, "1"), (&b, "1"), (&c, "2")] {
        let sizes = &TINY[..TINY.len() - 2]; // without their seed
        let run = Command::new(env!("CARGO_BIN_EXE_random-model"))
            .args(sizes)
            .args(["--seed", seed])
            .arg(out)
            .output()
            .unwrap();
        assert!(run.status.success());
    }
    let read = |path| std::fs::read(path).unwrap();
    assert!(read(&a) == read(&b), "the same seed, another file");
    assert!(read(&a) != read(&c), "another seed, the same file");
}

#[test]
fn what_is_refused_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = |replace: &[(&str, &str)], more: &[&str]| {
        let mut args: Vec<&str> = TINY.to_vec();
        for (name, value) in replace {
            let at = args.iter().position(|a| a == name).unwrap();
            args[at + 1] = value;
        }
        args.extend(more);
        Command::new(env!("CARGO_BIN_EXE_random-model"))
            .args(&args)
            .arg(folder.path().join("out"))
            .output()
            .unwrap()
    };
    for (replace, more, says) in [
        (("--heads", "3"), &[][..], "no multiple of --kv-heads"),
        (("--head-dim", "63"), &[], "rope turns pairs"),
        (("--vocab", "100"), &[], "the tokenizer needs"),
        (("--layers", "0"), &[], "--layers is 0"),
        (("--hidden", "4000000000"), &[], "taken for a mistake"),
        (("--hidden", "18446744073709551615"), &[], "which no model has"),
        (("--hidden", "48"), &["--dtype", "q8_0"], "blocks of 32"),
        (("--ff", "288"), &["--dtype", "q4_k"], "blocks of 256"),
        (("--seed", "1"), &["--dtype", "q8_0", "--format", "safetensors"], "f32, f16, bf16 or int8"),
        (("--seed", "1"), &["--dtype", "int8"], "--format safetensors"),
        (("--seed", "1"), &["--experts", "4", "--experts-used", "5"], "--experts-used is 5"),
        (("--seed", "1"), &["--experts", "4"], "--experts-used is 0"),
        (
            ("--seed", "1"),
            &["--format", "safetensors", "--experts", "2", "--experts-used", "1"],
            "use --format gguf",
        ),
    ] {
        let run = tiny(&[replace], more);
        let stderr = String::from_utf8_lossy(&run.stderr).into_owned();
        assert_eq!(run.status.code(), Some(1), "{replace:?} {more:?}: {stderr}");
        assert!(stderr.contains(says), "{replace:?} {more:?}: {stderr}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    let there = folder.path().join("there");
    std::fs::write(&there, "mine").unwrap();
    let run = write(&[], &there);
    assert!(String::from_utf8_lossy(&run.stderr).contains("already there"));
    assert_eq!(std::fs::read_to_string(&there).unwrap(), "mine");
    let run = write(&[], &folder.path().join("no/such/folder.gguf"));
    assert_eq!(run.status.code(), Some(1));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
