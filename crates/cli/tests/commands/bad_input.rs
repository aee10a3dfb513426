//! Bad input gives an error on stderr and an exit status, never a panic, a signal or a partial answer on stdout.
use crate::program::{self, *};
use std::path::Path;
use std::process::Stdio;

/// One call that must fail.
struct Row {
    args: Vec<String>,
    stdin: Vec<u8>,
    status: i32,
    /// What stderr must contain.
    words: &'static [&'static str],
}

fn row(args: &str, status: i32, words: &'static [&'static str]) -> Row {
    rows(&program::words(args), status, words)
}
fn rows(args: &[&str], status: i32, words: &'static [&'static str]) -> Row {
    Row { args: args.iter().map(|a| a.to_string()).collect(), stdin: Vec::new(), status, words }
}

/// Runs all rows and reports every one that behaves wrongly.
fn check(rows: Vec<Row>) {
    let mut bad = Vec::new();
    for row in &rows {
        let args: Vec<&str> = row.args.iter().map(String::as_str).collect();
        bad.extend(judge(&args.join(" "), &run(&args, &row.stdin), row.status, row.words));
    }
    assert!(bad.is_empty(), "{} complaints in {} rows:\n{}", bad.len(), rows.len(), bad.join("\n"));
}

#[test]
fn arguments() {
    check(vec![
        row("", 2, &["Usage"]),
        row("walk", 2, &["walk"]),
        row("run --wat x", 2, &["--wat"]),
        row("run --quiet --verbose x", 2, &["cannot be used with"]),
        row("run --kind heap x", 2, &["cpu:heap", "cpu:contiguous", "cpu:tree"]),
        row("run --backend tpu x", 2, &["tpu:contiguous", "cpu:contiguous", "reference:ring"]),
        row("run hi --kv q4 --kv-recent 12", 2, &["--kv-recent", "power of two up to 64, or 0"]),
        row("run -q --speculate suffix --no-cache x", 2, &["--speculate", "--no-cache"]),
        row("run --speculate guess x", 2, &["guess", "eagle"]),
        row("run --speculate eagle --draft-model hf:a/b x", 2, &["hf:a/b", "folder"]),
        row("run --speculate suffix --draft-model x x", 2, &["--draft-model", "eagle"]),
        row("run --speculate eagle --draft-depth 0 --draft-model x x", 2, &["--draft-depth"]),
        row("run --kv q5 x", 2, &["`q5` is not a KV dtype", "q4-64"]),
        row("run --kv q8-48 x", 2, &["q8-48"]),
        row("run --kv-v f8 x", 2, &["f8"]),
        row("run --kv t4-rot x", 2, &["t4-rot", "t4-o"]),
        row("run --kv-v t4-o x", 2, &["--kv-v t4-o", "--kv-v t4"]),
        row("run --weights q3 x", 2, &["as-stored"]),
        row("run --kind ring x", 2, &["ring", "--window"]),
        row("chat --kind ring", 2, &["ring", "--window"]),
        row("plan --kind ring", 2, &["ring", "--window"]),
        row("run --sinks 4 x", 2, &["--window"]),
        row("run --sinks -1 --window 8 x", 2, &["-1"]),
        row("run --window 0 x", 2, &["0"]),
        row("run --window -3 x", 2, &["-3"]),
        row("run --context 0 x", 2, &["0"]),
        row("run --context 99999999999 x", 2, &["99999999999"]),
        row("run --chunk 0 x", 2, &["0"]),
        row("run --chunk 70000 x", 2, &["65536"]),
        row("run --threads 0 x", 2, &["--threads", "1 or more"]),
        row("run --threads 1025 x", 2, &["--threads", "1025", "more than 1024 threads"]),
        row("run --threads 99999999999999999999 x", 2, &["--threads", "not a number of threads"]),
        row("run --max-tokens -1 x", 2, &["-1"]),
        row("run --memory lots x", 2, &["`lots` is not a size", "512MiB"]),
        row("run --memory 1QiB x", 2, &["not a size"]),
        row("run --memory 1e999 x", 2, &["not a size"]),
        row("run --memory=-5G x", 2, &["`-5G` is not a size"]),
        row("plan --bandwidth fast", 2, &["fast"]),
        row("plan --bandwidth 1GB/h", 2, &["1GB/h"]),
        row("run --temperature NaN x", 2, &["temperature"]),
        row("run --temperature=-1 x", 2, &["temperature"]),
        row("run --temperature inf x", 2, &["temperature"]),
        row("run --temperature -1 x", 2, &["temperature must be 0 or more"]),
        row("run --memory -1 x", 2, &["`-1` is not a size"]),
        row("run --repeat-penalty inf x", 2, &["finite"]),
        rows(&["run", "--stop", "", "x"], 2, &["--stop", "empty stop string"]),
        row("plan --model a b", 2, &["cannot be used with"]),
        row("run --temperature 1 --greedy x", 2, &["cannot be used with"]),
        row("run --top-p 1.5 x", 2, &["top-p"]),
        row("run --top-p NaN x", 2, &["top-p"]),
        row("run --min-p=-0.1 x", 2, &["min-p"]),
        row("run --repeat-penalty 0 x", 2, &["penalty"]),
        row("run --top-k -1 x", 2, &["-1"]),
        row("run --seed one x", 2, &["one"]),
        row("run --file a b", 2, &["cannot be used with"]),
        row("run --system s x", 2, &["chat template"]),
        row("chat --system s", 2, &["chat template"]),
        row("logits --tokens 1,x", 2, &["`x` is not a token id"]),
        row("logits --tokens 1,-2 --generate 1", 2, &["`-2`"]),
        row("logits --tokens 99999999999 --generate 1", 2, &["99999999999"]),
        row("logits --tokens 1", 2, &["--out"]),
        row("logits --generate 4", 2, &["--tokens"]),
        row("logits --tokens 1 --out f --no-cache", 2, &["--generate"]),
        row("bench", 2, &["ladder"]),
        row("bench ladder --t 1", 2, &["at least 2"]),
        row("bench ladder --t 8 --only v9", 2, &["v0, v1"]),
        row("bench ladder --t 8 --runs 0", 2, &["0"]),
        row("eval", 2, &["--text"]),
        row("run --keep 4 x", 2, &["--keep", "`4` is not NAME=VALUE", "sinks=4,recent=1024,top=2048"]),
        row("run --keep sinks=4 x", 2, &["`recent` is missing"]),
        row("run --keep recent=0 x", 2, &["recent=0", "1 or more"]),
        row("run --keep recent=-4 x", 2, &["recent=`-4`"]),
        row("run --keep recent=4,recent=5 x", 2, &["`recent` is given twice"]),
        row("run --keep recent=4,new=5 x", 2, &["`new`"]),
        row("run --keep recent=4,by=luck x", 2, &["by=`luck`"]),
        row("run --keep recent=4,by=last x", 2, &["by=last", "give top=TOKENS"]),
        row("run --keep recent=9 --kind contiguous x", 2, &["contiguous", "cells, tree or paged"]),
        row("run --keep recent=9 --kind ring --window 5 x", 2, &["ring", "cells, tree or paged"]),
        row("run --keep recent=9 --speculate suffix x", 2, &["--speculate", "--keep"]),
        row("run --keep recent=9 --no-cache x", 2, &["--no-cache", "--keep"]),
        row("run --keep recent=9 --save-session f x", 2, &["--save-session", "--keep"]),
        row("chat --keep recent=9 --resume f", 2, &["--resume", "--keep"]),
        row("chat --keep recent=9 --prefix f", 2, &["--prefix", "--keep"]),
        row("eval --text f --keep recent=9 --speculate suffix", 2, &["--speculate", "--keep"]),
    ]);
}

#[test]
fn texts_and_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let latin1 = file("latin1.txt", b"caf\xe9 au lait");
    let cut = file("cut.txt", "caf\u{e9}".as_bytes().split_last().unwrap().1);
    let empty = file("empty.txt", b"");
    let ids = file("ids.txt", b"1, 2\n3 four");
    let no_ids = file("no-ids.txt", b" \n,, ");
    let one = file("one.txt", b"a");
    let missing = folder.path().join("missing.txt").display().to_string();
    let long = "word ".repeat(300);
    let here = folder.path().display().to_string();
    check(vec![
        rows(&["run", ""], 2, &["the prompt is empty"]),
        rows(&["run"], 2, &["the prompt is empty"]),
        Row { stdin: b"ab\xff".into(), ..rows(&["run"], 1, &["stdin", "not UTF-8", "byte 2"]) },
        Row { stdin: b"\xff\xfe".into(), ..rows(&["run", "-"], 1, &["not UTF-8"]) },
        Row { stdin: b"\xff\n".into(), ..rows(&["chat", "-q"], 1, &["not UTF-8"]) },
        rows(&["run", "--file", &latin1], 1, &["latin1.txt", "not UTF-8", "byte 3", "iconv"]),
        rows(&["run", "--file", &cut], 1, &["cut.txt", "not UTF-8"]),
        rows(&["run", "--file", &empty], 2, &["the prompt is empty"]),
        rows(&["run", "--file", &missing], 1, &["cannot read", "missing.txt", "No such file"]),
        rows(&["run", "--file", &here], 1, &["cannot read", "directory"]),
        rows(&["eval", "--text", &latin1], 1, &["latin1.txt", "not UTF-8"]),
        rows(&["eval", "--text", &missing], 1, &["cannot read"]),
        rows(&["eval", "-q", "--text", &empty], 2, &["two tokens"]),
        rows(&["eval", "-q", "--text", &one, "--context", "1"], 2, &["two tokens"]),
        rows(&["eval", "-q", "--text", &one, "--plot", "x.svg"], 2, &["--plot", "--speculate"]),
        rows(&["eval", "-q", "--text", &one, "--prompts", "3"], 2, &["--speculate"]),
        rows(&["eval", "-q", "--text", &one, "--tokens", "3"], 2, &["--speculate"]),
        rows(
            &["eval", "-q", "--text", &one, "--speculate", "ngram"],
            2,
            &["--prompt-tokens", "longer --text"],
        ),
        rows(
            &["eval", "-q", "--text", &one, "--speculate", "ngram", "--reference", "f16"],
            2,
            &["--reference"],
        ),
        rows(&["run", "--context", "64", &long], 1, &["the cache holds 64", "--context"]),
        rows(&["run", &long.repeat(5)], 1, &["the cache holds 1024", "--context"]),
        rows(
            &["logits", "--context", "2", "--tokens", "1,2,3", "--generate", "1"],
            1,
            &["3 tokens", "--context 3"],
        ),
        rows(
            &["logits", "--tokens", "1,4294967295", "--generate", "1"],
            1,
            &["token 4294967295", "vocabulary of"],
        ),
        rows(&["logits", "--tokens", "99999999", "--out", &missing], 1, &["token 99999999", "vocabulary"]),
        rows(&["logits", "--tokens", "", "--generate", "1"], 2, &["not a token id"]),
        rows(
            &["logits", "--tokens-file", &ids, "--generate", "1"],
            1,
            &["`four` is not a token id", "ids.txt"],
        ),
        rows(&["logits", "--tokens-file", &no_ids, "--generate", "1"], 1, &["no-ids.txt"]),
        rows(&["logits", "--tokens-file", &missing, "--generate", "1"], 1, &["cannot read"]),
    ]);
    assert!(!Path::new(&missing).exists(), "a failed command leaves no file");
}

#[test]
fn models() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let whole = std::fs::read(fixtures().join("gguf/llama-gqa-f32/model.gguf")).unwrap();
    let header = write("header.gguf", &whole[..20]);
    let half = write("half.gguf", &whole[..whole.len() / 2]);
    let short = write("short.gguf", &whole[..whole.len() - 1]);
    let nothing = write("nothing.gguf", b"");
    let text = write("text.gguf", b"This is no model at all, but some bytes of text.");
    let parity = fixtures().join("parity/llama-gqa");
    let weights = parity.join("model.safetensors").display().to_string();
    let config = std::fs::read_to_string(parity.join("config.json")).unwrap();
    write("bare/model.safetensors", &std::fs::read(&weights).unwrap());
    write("no-weights/config.json", config.as_bytes());
    let strange = config.replace("\"llama\"", "\"mamba\"").replace("LlamaForCausalLM", "MambaForCausalLM");
    assert_ne!(strange, config);
    write("strange/config.json", strange.as_bytes());
    write("strange/model.safetensors", &std::fs::read(&weights).unwrap());
    write("broken/config.json", b"{\"model_type\": ");
    write("broken/model.safetensors", &std::fs::read(&weights).unwrap());
    let bytes = std::fs::read(&weights).unwrap();
    write("cut/config.json", config.as_bytes());
    write("cut/model.safetensors", &bytes[..bytes.len() / 2]);
    std::fs::create_dir(folder.path().join("empty")).unwrap();

    let mut all = Vec::new();
    for (model, words) in [
        (place("nowhere"), &["nowhere", "not there"][..]),
        (place("empty"), &["empty", "config.json"]),
        (place("bare"), &["bare", "config.json"]),
        (weights.clone(), &["model.safetensors", "folder"]),
        (header, &["header.gguf"]),
        (half, &["half.gguf"]),
        (short, &["short.gguf"]),
        (nothing, &["nothing.gguf"]),
        (text, &["text.gguf", "GGUF"]),
        (
            place("strange"),
            &["unknown architecture `MambaForCausalLM`", "LlamaForCausalLM", "Qwen3ForCausalLM"],
        ),
        (place("broken"), &["config.json"]),
        (place("no-weights"), &["no-weights"]),
        (place("cut"), &["cut"]),
    ] {
        for command in [
            &["logits", "-q", "--tokens", "1", "--generate", "1", "--model"][..],
            &["run", "-q", "x", "--model"],
            &["plan"],
        ] {
            // `plan` needs only a config.json.
            if command == ["plan"] && model == place("no-weights") {
                continue;
            }
            let args: Vec<&str> = command.iter().copied().chain([model.as_str()]).collect();
            all.push(rows(&args, 1, words));
        }
    }
    // A draft head for another model, before any weights are read.
    let target = fixtures().join("eagle3/target").display().to_string();
    for (head, speculate, words) in [
        (
            fixtures().join("eagle3/safeailab").display().to_string(),
            "eagle",
            &["`hidden_size` is 24", "another model"][..],
        ),
        (
            fixtures().join("eagle3/speculators").display().to_string(),
            "auto",
            &["`hidden_size` is 24", "another model"],
        ),
        (place("strange"), "eagle", &["strange", "`MambaForCausalLM`", "eagle3"]),
        (place("nowhere"), "eagle", &["nowhere", "folder"]),
    ] {
        all.push(rows(&["run", "-q", "x", "--speculate", speculate, "--draft-model", &head], 1, words));
    }
    let whole = [
        "logits",
        "--model",
        &target,
        "--tokens",
        "1",
        "--generate",
        "1",
        "--speculate",
        "eagle",
        "--draft-model",
    ];
    all.push(rows(&whole[..whole.len() - 1], 2, &["--speculate eagle", "head", "--draft-model"]));
    let draft = ["logits", "--model", &target, "--tokens", "1", "--generate", "1", "--speculate", "draft"];
    all.push(rows(&draft, 2, &["--speculate draft", "--draft-model"]));
    let words = &["target", "fc.weight"][..];
    all.push(rows(&[&whole[..], &[&target]].concat(), 1, words));
    let head = fixtures().join("eagle3/safeailab").display().to_string();
    let words = &["safeailab", "head", "--speculate eagle"][..];
    all.push(rows(&[&draft[..], &["--draft-model", &head]].concat(), 2, words));
    let out = ["logits", "--model", &target, "--tokens", "1", "--out", "x", "--speculate", "ngram"];
    all.push(rows(&out, 2, &["--speculate", "--generate"]));
    // Room for the model and its cache, and not for the draft model beside them.
    let tight = ["run", "-q", "x", "--speculate", "draft", "--context", "512", "--memory", "16748KiB"];
    all.push(rows(&tight, 1, &["draft model and its cache need", "--context", "--memory"]));
    // If one of our dependencies panics, that becomes an ordinary error, without a panic message before it.
    let tokenizer = r#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "model": {"type": "BPE"}}"#;
    write("charsmap/config.json", config.as_bytes());
    write("charsmap/model.safetensors", &std::fs::read(&weights).unwrap());
    write("charsmap/tokenizer.json", tokenizer.as_bytes());
    all.push(rows(&["run", "-q", "x", "--model", &place("charsmap")], 1, &["tokenizer.json"]));
    let words = r#"{"model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}}"#;
    write("backwards/config.json", config.as_bytes());
    write("backwards/model.safetensors", &std::fs::read(&weights).unwrap());
    write("backwards/tokenizer.json", words.as_bytes());
    write("backwards/chat_template.jinja", b"{{ [][::-1] }}");
    all.push(rows(&["run", "-q", "x", "--model", &place("backwards")], 1, &["template engine"]));
    // A valid model, but without a tokenizer.
    let model = parity.display().to_string();
    for command in [&["run", "-q", "x", "--model"][..], &["chat", "-q", "--model"]] {
        let args: Vec<&str> = command.iter().copied().chain([model.as_str()]).collect();
        all.push(rows(&args, 1, &["no tokenizer"]));
    }
    check(all);
}

#[test]
fn memory() {
    check(vec![
        row("run --memory 1MiB x", 1, &["weights", "1 MiB are free", "MiB"]),
        row("run --memory 11MiB --context 1024 x", 1, &["context of 1024 tokens", "are free; try --"]),
        row(
            "run --memory 20MiB --context 4000000000 x",
            1,
            &["context of 4000000000 tokens", "try --context"],
        ),
        row("run --memory 9MiB --context 1024 x", 1, &["KV cache", "try --context", "--chunk 16"]),
        row("run --memory 8.3MiB --context 1024 x", 1, &["KV cache", "try a smaller model, or more memory"]),
        row("run --memory 0 x", 1, &["free"]),
        row("chat --memory 8.5MiB", 1, &["KV cache", "try"]),
        row("logits --tokens 1 --generate 1 --memory 100k", 1, &["weights"]),
    ]);
    // Each of the two caches of `eval` fits alone, but not both together; the suggested flags do fit.
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "Ownership is a set of rules.").unwrap();
    let eval = ["eval", "--kv", "q4", "--memory", "14MiB", "--text", &text.display().to_string()]
        .map(str::to_string);
    let eval: Vec<&str> = eval.iter().map(String::as_str).collect();
    let out = run(&eval, b"");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("the reference") && !said.contains("--kv"), "{said}");
    let advice: Vec<&str> = said.split("try ").nth(1).unwrap().split_whitespace().collect();
    let out = run(&[eval, advice].concat(), b"");
    assert_eq!(out.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&out.stderr));
    // The error must not suggest a context that is too small for the prompt.
    let long = "word ".repeat(300);
    let out = run(&["run", "--memory", "9MiB", &long], b"");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(1) && said.contains("try ") && !said.contains("--context"), "{said}");
    // `plan` prints its result before it refuses.
    let out = run(&["plan", "--memory", "1MiB"], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("1 MiB are available"));
}

#[test]
#[cfg(target_os = "linux")] // which has /dev/full and /proc
fn outputs() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display().to_string();
    let deep = folder.path().join("missing/logits.safetensors").display().to_string();
    let read_only = "/proc/logits.safetensors";
    let logits = |out: &str| rows(&["logits", "-q", "--tokens", "1,2", "--out", out], 1, &["cannot write"]);
    let ladder = words("bench ladder -q --t 2 --warmups 0 --runs 1 --only v2 --svg");
    let ladder = [&ladder[..], &[&deep]].concat();
    check(vec![
        logits(&deep),
        logits(&here),
        logits("/dev/full"),
        logits(read_only),
        logits("/"),
        rows(&ladder, 1, &["cannot write"]),
    ]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no half-written file stays behind");
}

#[test]
#[cfg(target_os = "linux")] // which has /dev/full
fn a_full_disk_under_stdout() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "Ownership is a set of rules.").unwrap();
    let text = text.display().to_string();
    let calls: [&[&str]; 6] = [
        &["run", "-n", "4", "x"],
        &["run", "-n", "4", "--json", "x"],
        &["plan"],
        &["plan", "--json"],
        &["eval", "-q", "--text", &text],
        &["logits", "--tokens", "1", "--generate", "2"],
    ];
    let mut bad = Vec::new();
    for args in calls {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = kvist().args(args).stdout(full).stderr(Stdio::piped()).output().unwrap();
        bad.extend(judge(&format!("{args:?} > /dev/full"), &out, 1, &["cannot write to stdout", "No space"]));
    }
    // clap prints help and version.
    for args in ["--help", "--version"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = kvist().arg(args).stdout(full).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        if out.status.code().is_none() || stderr.contains("panicked") {
            bad.push(format!("{args} > /dev/full: {} {stderr}", out.status));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Planning an enormous cache is arithmetic only, until it is filled.
#[test]
fn a_plan_of_an_enormous_cache_allocates_none_of_it() {
    let enormous = ["--context", "4294967295", "--kind"];
    for kind in ["contiguous", "cells", "tree"] {
        let plan = json(&[&["plan", "--json"], &enormous[..], &[kind]].concat());
        assert!(plan["bound"]["kv_cache"].as_u64().unwrap() > 1 << 43, "{plan}");
    }
}

#[test]
fn filters_of_the_log() {
    let out = kvist().args(["plan"]).env("KVIST_LOG", "kvist=loud").output().unwrap();
    let bad = judge("KVIST_LOG=kvist=loud", &out, 2, &["KVIST_LOG", "kvist=loud"]);
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn sizes_that_overflow_are_no_small_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    let text = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 268435456,
        "num_hidden_layers": 65535, "num_attention_heads": 1048576, "num_key_value_heads": 1048576,
        "intermediate_size": 268435456, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}"#;
    std::fs::write(&config, text).unwrap();
    check(vec![rows(&["plan", &config.display().to_string()], 1, &["overflow"])]);
}

/// A failed write to stderr must not affect the work.
#[test]
#[cfg(target_os = "linux")] // which has /dev/full
fn a_full_disk_under_stderr() {
    let calls: [(&[&str], i32); 5] = [
        (&["run", "-n", "2", "hi"], 0),
        (&["run", "-vv", "-n", "2", "hi"], 0),
        (&["chat"], 0),
        (&["run", "--file", "/nowhere"], 1),
        (&["run", "--kind", "ring", "x"], 2),
    ];
    for (args, status) in calls {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = kvist().args(args).stdout(Stdio::null()).stderr(full).output().unwrap();
        assert_eq!(out.status.code(), Some(status), "{args:?} 2> /dev/full");
    }
}
