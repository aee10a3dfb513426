//! What every command guarantees to users and to programs, through the real binary: only text on stdout, everything
//! else on stderr, `--json` with the documented fields.
use crate::program::*;
use serde_json::Value;
use std::io::Read;
use std::process::Stdio;

const RUN: [&str; 6] = ["run", "--greedy", "-n", "12", "--ignore-eos", "The borrow checker"];
fn run_with(more: &[&str]) -> (String, String) {
    succeed(&[&RUN, more].concat())
}

#[test]
fn run_writes_text_to_stdout_and_the_summary_to_stderr() {
    let (text, summary) = run_with(&[]);
    assert!(text.starts_with("The borrow checker") && text.ends_with('\n'), "{text}");
    for word in ["prompt", "12 new tokens", "tokens/s", "KV cache", "cpu:contiguous", "bound"] {
        assert!(summary.contains(word) && !text.contains("tokens/s"), "{word}: {summary}");
    }
    let (quiet, nothing) = run_with(&["-q"]);
    assert_eq!((quiet.as_str(), nothing.as_str()), (text.as_str(), ""));
    let (new, _) = run_with(&["--no-echo"]);
    assert_eq!(format!("The borrow checker{new}"), text);
    assert_eq!(
        succeed_with(&["run", "--greedy", "-n", "12", "--ignore-eos", "-q"], b"The borrow checker").0,
        text
    );
    // Regression: unquoted words were "unexpected arguments".
    let words = ["run", "-q", "--greedy", "-n", "12", "--ignore-eos", "The", "borrow", "checker"];
    assert_eq!(succeed(&words).0, text);
    // In f32, so that every kind gives the same text: in f16 two words are almost equally likely.
    let (text, _) = run_with(&["-q", "--kv", "f32"]);
    for more in [
        &["--no-cache"][..],
        &["--kind", "cells"],
        &["--kind", "tree", "--chunk", "1"],
        &["--kind", "ring", "--window", "64"],
        &["--weights", "as-stored", "--threads", "2", "--no-mmap"],
    ] {
        assert_eq!(run_with(&[more, &["-q", "--kv", "f32"]].concat()).0, text, "{more:?}");
    }
    // With `-v` stderr shows memory events.
    assert!(run_with(&["-v"]).1.contains("of KV cache"));
}

#[test]
fn run_as_json() {
    let report = json(&[&RUN[..], &["--json", "--seed", "5", "--kv", "q8", "--kv-v", "q4"]].concat());
    fields(
        &report,
        "version model prompt text tokens finish seed prompt_tokens prefill_seconds \
         prefill_tokens_per_second decode_seconds decode_tokens_per_second cache.backend cache.kind \
         cache.k cache.v cache.context_tokens cache.window cache.sinks used.weights used.kv_cache \
         used.scratch used.activations used.total bound.total kv_bytes_read process_peak_bytes",
    );
    assert_eq!(report["tokens"].as_array().unwrap().len(), 12);
    assert_eq!((&report["finish"], &report["seed"]), (&Value::from("max_tokens"), &Value::from(5)));
    assert_eq!((&report["cache"]["k"], &report["cache"]["v"]), (&Value::from("q8"), &Value::from("q4")));
    assert!(number(&report, "used.total") <= number(&report, "bound.total"));
}

#[test]
fn a_seed_fixes_the_text() {
    let text =
        |seed| succeed(&["run", "-q", "-n", "16", "--temperature", "1.2", "--seed", seed, "A struct"]).0;
    assert_eq!(text("7"), text("7"));
    assert!(["8", "9", "10"].iter().any(|seed| text(seed) != text("7")), "seeds change nothing");
}

#[test]
fn a_stop_string_ends_the_text_and_is_not_part_of_it() {
    let (text, _) = run_with(&["-q", "--no-echo"]);
    // A word from the middle of the answer.
    let word = text.split_whitespace().nth(3).unwrap();
    let expected = &text[..text.find(word).unwrap()];
    let report = json(&[&RUN[..], &["--json", "--stop", "no such text", "--stop", word]].concat());
    assert_eq!(report["text"].as_str().unwrap(), expected, "stopped at {word:?} in {text:?}");
    assert_eq!(report["finish"], "stop");
    assert_eq!(run_with(&["-q", "--no-echo", "--stop", word]).0, format!("{expected}\n"));
}

#[test]
fn logits_are_a_safetensors_file_and_greedy_tokens_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["llama-gqa", "qwen3", "mistral-window"] {
        let model = fixtures().join("parity").join(case);
        let expected = std::fs::read(model.join("expected.safetensors")).unwrap();
        let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
        let ids = |name: &str| -> Vec<i64> {
            let data = expected.tensor(name).unwrap().data().chunks_exact(8);
            data.map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let floats = |data: &[u8]| -> Vec<f32> {
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let tokens = ids("tokens").iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        let (model, out) = (model.display().to_string(), folder.path().join(case).display().to_string());
        let args = ["logits", "-q", "--model", &model, "--kv", "f32", "--tokens", &tokens];
        let generate = ["--chunk", "5", "--generate", "8", "--json", "--out", &out];
        let report = json(&[&args[..], &generate].concat());
        fields(&report, "version tokens generated likeliest out");
        let generated: Vec<i64> =
            report["generated"].as_array().unwrap().iter().map(|t| t.as_i64().unwrap()).collect();
        assert_eq!(generated, ids("generated")[..8], "{case}");
        let file = std::fs::read(&out).unwrap();
        let file = safetensors::SafeTensors::deserialize(&file).unwrap();
        let (found, whole) = (file.tensor("logits").unwrap(), expected.tensor("logits").unwrap());
        let n = ids("tokens").len();
        assert_eq!(found.dtype(), safetensors::Dtype::F32);
        assert_eq!(found.shape(), [n, floats(whole.data()).len() / n], "{case}");
        for (i, (a, b)) in floats(found.data()).iter().zip(floats(whole.data())).enumerate() {
            assert!((a - b).abs() <= 1e-3, "{case}: logit {i} is {a} for {b}");
        }
        let (plain, _) = succeed(&[&args[..], &["--no-cache", "--generate", "3"]].concat());
        let first = ids("generated")[..3].iter().map(i64::to_string).collect::<Vec<_>>().join(",");
        assert_eq!(plain, first + "\n", "{case}");
    }
}

#[test]
fn a_plan_is_the_bound_of_a_run() {
    for cache in [
        &["--kv", "f16"][..],
        &["--kv", "q4-64-rot", "--kv-v", "q8", "--kind", "cells"],
        &["--kv", "t4-o"],
        &["--kind", "ring", "--window", "32", "--sinks", "4", "--chunk", "16"],
        &["--kind", "tree", "--weights", "f32"],
    ] {
        let plan = json(&[&["plan", "--json", "--context", "300", "--bandwidth", "100GB/s"], cache].concat());
        let run = json(&[&RUN[..], &["--json", "--context", "300"], cache].concat());
        assert_eq!(plan["bound"], run["bound"], "{cache:?}");
        assert_eq!(plan["cache"], run["cache"], "{cache:?}");
        fields(
            &plan,
            "version model context_tokens weight_bytes_on_disk kv_bytes_per_token kv_bits_per_value \
             session_bytes bytes_read_per_token bytes_read_per_token_empty \
             ceiling.bandwidth_bytes_per_second ceiling.tokens_per_second_empty \
             ceiling.tokens_per_second_kv_alone",
        );
        // The ceiling includes the weights.
        let ceiling = 100e9 / number(&plan, "bytes_read_per_token");
        assert!((number(&plan, "ceiling.tokens_per_second") - ceiling).abs() < 1e-6 * ceiling);
        assert!(number(&plan, "bytes_read_per_token_empty") > 1e6);
    }
    let (text, _) = succeed(&["plan", "--bandwidth", "100GB/s"]);
    for word in ["weights", "KV cache", "per token      4 KiB", "scratch", "activations", "bound", "ceiling"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn eval_measures_a_cache_against_another() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    let words = "A struct groups values of several types under one name.\0The compiler checks that every reference is \
                 valid for as long as it is used, and that no two of them change the same value.";
    std::fs::write(&text, words).unwrap();
    let text = text.display().to_string();
    let eval = |kv: &str| json(&["eval", "-q", "--json", "--text", &text, "--kv", kv]);
    let (same, q8, q4, t4) = (eval("f32"), eval("q8"), eval("q4"), eval("t4-o"));
    fields(
        &same,
        "version model text cache.k reference.k kv_bytes_per_token tokens perplexity perplexity_reference \
         kl_mean kl_p99 kl_max top1_agreement interrupted",
    );
    for name in ["kl_mean", "kl_p99", "kl_max"] {
        assert_eq!(number(&same, name), 0.0, "{name}: a cache against itself");
        assert!(number(&q4, name) > number(&q8, name), "{name}: q4 {q4} against q8 {q8}");
    }
    // Fewer bits, but a smaller loss.
    let bytes = |report| number(report, "kv_bytes_per_token");
    assert!(bytes(&t4) < bytes(&q4) && number(&t4, "kl_mean") < number(&q4, "kl_mean"), "{t4} against {q4}");
    assert_eq!((&t4["cache"]["k"], &t4["cache"]["v"]), (&Value::from("t4-o"), &Value::from("t4")));
    // The reference can have outliers too.
    let itself = ["eval", "-q", "--json", "--text", &text, "--kv", "t4-o", "--reference", "t4-o"];
    assert_eq!(number(&json(&itself), "kl_mean"), 0.0);
    assert!(number(&q8, "kl_mean") > 0.0 && number(&q4, "kl_mean") < 1.0);
    for (kv, with) in [("q8", &q8), ("q4", &q4)] {
        let without = json(&["eval", "-q", "--json", "--text", &text, "--kv", kv, "--kv-recent", "0"]);
        let [with, without] = [with, &without].map(|found| number(found, "kl_mean"));
        assert!(with < without, "{kv}: recent tokens in f16 bring {without} to {with}");
    }
    assert_eq!(number(&same, "top1_agreement"), 1.0);
    assert_eq!(same["perplexity"], same["perplexity_reference"]);
    assert_eq!(same["perplexity"], q4["perplexity_reference"]);
    assert_eq!(number(&eval("f16"), "kv_bytes_per_token"), 4096.0);
    let (lines, _) = succeed(&["eval", "-q", "--text", &text, "--limit", "10"]);
    assert!(lines.starts_with("10 tokens") && lines.contains("perplexity"), "{lines}");
}

/// The text that the drafters of the embedded model were not trained on.
fn held_out() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/tiny-model/val.txt").into()
}

#[test]
fn eval_counts_accepted_draft_tokens_by_depth() {
    let text = held_out();
    let eval = |mode: &str, more: &[&str]| {
        let args = ["eval", "-q", "--json", "--text", &text, "--speculate", mode, "--prompts", "3"];
        json(&[&args[..], &["--prompt-tokens", "60", "--tokens", "40"], more].concat())
    };
    for (mode, least) in [("suffix", 0.0), ("draft", 0.3), ("eagle", 0.5)] {
        let report = eval(mode, &["--draft-depth", "4"]);
        fields(
            &report,
            "version model text cache.k speculate prompts prompt_tokens tokens tokens_per_pass \
             speculation.drafted depths interrupted",
        );
        assert_eq!((&report["speculate"], number(&report, "tokens")), (&Value::from(mode), 3.0 * 39.0));
        let passes = number(&report, "speculation.target_passes");
        assert!((number(&report, "tokens_per_pass") - 117.0 / passes).abs() < 1e-9, "{report}");
        let depths = report["depths"].as_array().unwrap();
        let sum = |name: &str| depths.iter().map(|depth| number(depth, name)).sum::<f64>();
        assert_eq!(sum("drafted"), number(&report, "speculation.drafted"));
        assert_eq!(sum("accepted"), number(&report, "speculation.accepted"));
        assert!(depths.len() <= 4 && number(&depths[0], "acceptance") >= least, "{report}");
        for (i, depth) in depths.iter().enumerate() {
            assert_eq!(number(depth, "depth"), (i + 1) as f64);
            assert!(number(depth, "accepted") <= number(depth, "reached"), "{report}");
            assert!(i == 0 || number(depth, "reached") <= number(&depths[i - 1], "accepted"), "{report}");
        }
    }
    let chains = eval("suffix", &["--draft-width", "1", "--kind", "contiguous"]);
    assert_eq!(chains["cache"]["kind"], "contiguous");
    let lines = succeed(&["eval", "-q", "--text", &text, "--speculate", "ngram", "--prompts", "2"]).0;
    assert!(lines.starts_with("ngram: 254 tokens after 2 prompts") && lines.contains("depth"), "{lines}");
}

/// With packed caches the newest rows are read in f16; the rows of rejected nodes once displaced them.
#[test]
fn drafts_change_no_text_of_packed_caches() {
    let prompt = "The borrow checker is a part of the compiler. The compiler is a part of Rust, and the borrow checker ";
    let run = |kv: &str, more: &[&str]| {
        let base = ["run", "-q", "--json", "--raw", "--no-echo", "--greedy", "--ignore-eos", "-n", "150"];
        json(&[&base[..], &["--deterministic", "--kind", "tree", "--kv", kv], more, &[prompt]].concat())
    };
    for kv in ["q8", "q4", "t4"] {
        let plain = run(kv, &[]);
        for mode in ["suffix", "eagle", "draft"] {
            for tokens in ["16", "40"] {
                let drafted = run(kv, &["--speculate", mode, "--draft-tokens", tokens]);
                assert_eq!(plain["tokens"], drafted["tokens"], "{kv} {mode} {tokens}");
                assert!(number(&drafted, "speculation.drafted") > 0.0, "{kv} {mode} {tokens}");
            }
        }
    }
}

/// Without `--context` the cache has room for drafts beside the tokens that were asked for.
#[test]
fn short_answers_are_drafted_too() {
    let base = ["run", "-q", "--json", "--raw", "--no-echo", "--greedy", "--ignore-eos", "-n", "16"];
    let run =
        |more: &[&str]| json(&[&base[..], more, &["--speculate", "eagle", "The borrow checker"]].concat());
    let (own, large) = (run(&[]), run(&["--context", "300"]));
    assert_eq!(own["tokens"], large["tokens"]);
    assert_eq!(own["speculation"], large["speculation"]);
}

/// The picture in docs/speculation.md is what its command draws. `KVIST_RENEW=1` draws it again.
#[test]
fn the_picture_of_a_verified_tree_is_current() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    let guide = std::fs::read_to_string(format!("{root}docs/speculation.md")).unwrap();
    let line = guide.lines().find(|line| line.contains("--plot docs/speculation-tree.svg"));
    let line = line.expect("the guide names the command").trim_start_matches("KVIST_ISA=portable kvist ");
    let pinned = format!("{root}docs/speculation-tree.svg");
    let folder = tempfile::tempdir().unwrap();
    let drawn = match std::env::var_os("KVIST_RENEW") {
        Some(_) => pinned.clone().into(),
        None => folder.path().join("tree.svg"),
    };
    let line = line.replace("docs/speculation-tree.svg", &drawn.display().to_string());
    let mut command = kvist();
    let out = command.env("KVIST_ISA", "portable").current_dir(root).args(words(&line)).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let [drawn, pinned] = [drawn, pinned.into()].map(|path| std::fs::read_to_string(path).unwrap());
    assert_eq!(drawn, pinned, "KVIST_RENEW=1 cargo test -p kvist --test commands output:: draws it again");
    for part in ["accepted", "rejected", "one more"] {
        assert!(drawn.contains(part), "{part}");
    }
}

#[test]
fn a_rotation_that_buys_nothing_is_pointed_out() {
    let said = |kv: &str| succeed(&["plan", "--kv", kv]).1;
    assert!(said("f16-rot").contains("would only be slower"));
    assert_eq!(said("q4-rot"), "");
}

/// A partial result must not look like a complete one.
#[test]
fn a_continuation_that_is_cut_short_is_a_failure_and_says_so() {
    let args = ["logits", "--tokens", "1,2,3", "--context", "5", "--generate", "5"];
    let out = run(&[&args[..], &["--json"]].concat(), b"");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("3 of 5 tokens") && stderr.contains("cache is full"), "{stderr}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (report["finish"].as_str(), report["generated"].as_array().unwrap().len()),
        (Some("cache_full"), 3)
    );
    let whole = json(&["logits", "--json", "--tokens", "1,2,3", "--generate", "5"]);
    assert_eq!(whole["finish"], "max_tokens");
}

#[test]
fn a_models_own_window_counts_and_is_reported() {
    let config = fixtures().join("parity/mistral-window/config.json").display().to_string();
    let plan =
        |more: &[&str]| json(&[&["plan", &config, "--json"], more].concat())["cache"]["layer_groups"].clone();
    let native = plan(&[])[0]["window"].as_u64().unwrap();
    let (longer, shorter) = ((native + 5).to_string(), (native - 1).to_string());
    let groups = plan(&["--window", &longer, "--sinks", "2"]);
    assert_eq!((groups[0]["window"].as_u64(), groups[0]["sinks"].as_u64()), (Some(native), Some(0)));
    let groups = plan(&["--window", &shorter, "--sinks", "2"]);
    assert_eq!((groups[0]["window"].as_u64(), groups[0]["sinks"].as_u64()), (Some(native - 1), Some(2)));
    let (_, said) = succeed(&["plan", &config, "--window", &longer]);
    assert!(said.contains("change nothing"), "{said}");
    // `plan` takes its model like the other commands, too.
    assert_eq!(json(&["plan", "--json", &config]), json(&["plan", "--json", "--model", &config]));
}

/// Regression: a folder with only a config.json was refused for its missing weights, while the file itself was
/// accepted.
#[test]
fn a_plan_needs_no_more_than_a_config() {
    let config = fixtures().join("parity/llama-gqa/config.json");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("config.json");
    std::fs::copy(&config, &copy).unwrap();
    let plan = |path: &std::path::Path| json(&["plan", "--json", path.to_str().unwrap()]);
    assert_eq!(plan(folder.path()), plan(&copy));
    // If weights are there they are checked: an interrupted download is not a folder with only a config.
    std::fs::write(folder.path().join("model.safetensors"), "").unwrap();
    refused(&["plan", folder.path().to_str().unwrap()], 1, &["model.safetensors"]);
}

/// Regression: a model with a window of its own was planned with a cache of its whole context, and no hint that a ring
/// would do.
#[test]
fn a_plan_says_what_a_ring_would_take() {
    let path = |case: &str| fixtures().join("parity").join(case).join("config.json").display().to_string();
    let window = path("mistral-window");
    let (plan, ring) =
        (json(&["plan", "--json", &window]), json(&["plan", "--json", &window, "--kind", "ring"]));
    assert_eq!(plan["ring"]["window_tokens"], 8);
    assert_eq!(plan["ring"]["kv_cache_bytes"], ring["bound"]["kv_cache"]);
    assert!(number(&ring, "bound.kv_cache") < number(&plan, "bound.kv_cache"));
    let (text, _) = succeed(&["plan", &window]);
    assert!(
        text.contains("--kind ring takes")
            && text.contains("8 tokens back, and a ring keeps that and one step"),
        "{text}"
    );
    assert!(ring["ring"].is_null(), "it is one");
    assert!(json(&["plan", "--json", &path("llama-gqa")])["ring"].is_null(), "it sees everything");
}

/// Regression: the hint was missing where some layers see the whole context.
#[test]
fn a_plan_says_what_a_ring_would_take_where_some_layers_have_a_window() {
    let folder = fixtures().join("parity/qwen2-window-mixed");
    let mixed = folder.display().to_string();
    let plan = json(&["plan", "--json", &mixed]);
    assert_eq!((number(&plan, "ring.window_tokens"), number(&plan, "ring.window_flag_tokens")), (9.0, 512.0));
    let ring = json(&["plan", "--json", &mixed, "--kind", "ring", "--window", "512"]);
    assert_eq!(plan["ring"]["kv_cache_bytes"], ring["bound"]["kv_cache"]);
    assert!(number(&ring, "bound.kv_cache") < number(&plan, "bound.kv_cache"));
    let (text, _) = succeed(&["plan", &mixed]);
    assert!(text.contains("--kind ring --window 512 takes") && text.contains("see 9 tokens back"), "{text}");
    // With `--window` the ring uses that window.
    let ours = json(&["plan", "--json", &mixed, "--window", "64"]);
    let ring = json(&["plan", "--json", &mixed, "--window", "64", "--kind", "ring"]);
    assert_eq!(ours["ring"]["kv_cache_bytes"], ring["bound"]["kv_cache"]);
    assert!(ours["ring"].get("window_flag_tokens").is_none(), "{ours}");
    // The logits stay the same.
    let args = words("logits --tokens 1,2,3 --generate 80 --kv f32 --context 100 --model");
    let written = |more: &[&str]| succeed(&[&args[..], &[&mixed], more].concat()).0;
    assert_eq!(written(&["--kind", "ring", "--window", "100"]), written(&[]));
}

/// Regression: `logits` needs no tokenizer, but a broken one stopped it.
#[test]
fn a_broken_tokenizer_is_no_affair_of_logits() {
    let folder = without_tokenizer();
    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let model = folder.path().to_str().unwrap();
    succeed(&["logits", "--model", model, "--tokens", "1,2", "--generate", "2"]);
    refused(&["run", "--model", model, "x"], 1, &["tokenizer.json"]);
}

/// Regression: one bad field stopped every command, and nothing could switch it off.
#[test]
fn a_default_that_cannot_be_matters_only_where_it_is_asked_for() {
    let folder = without_tokenizer();
    std::fs::write(folder.path().join("generation_config.json"), "{\"top_p\": 0}").unwrap();
    let model = folder.path().to_str().unwrap();
    let serve = ["serve", "--dry-run", "--model", model];
    succeed(&[&serve[..], &["--generation-config", "none"]].concat());
    let every = words("--temperature 1 --top-k 0 --top-p 1 --min-p 0 --repeat-penalty 1 --repeat-last 0");
    let run_it = ["run", "--model", model, "x"];
    for (args, is_told) in [
        (serve.to_vec(), true),
        (run_it.to_vec(), true),
        // These fail because there is no tokenizer.
        ([&run_it[..], &["--greedy"]].concat(), false),
        ([&run_it[..], &every].concat(), false),
    ] {
        let said = refused(&args, 1, &[]);
        assert_eq!(said.contains("top_p"), is_told, "{args:?}: {said}");
    }
}

/// Regression: a model's defaults changed the text, and no output said so.
#[test]
fn a_models_defaults_are_told_once() {
    let folder = escaping_model();
    let model = ["-n", "2", "--model", folder.path().to_str().unwrap()];
    let told = |args: &[&str], stdin: &[u8]| {
        let (_, said) = succeed_with(&[args, &model].concat(), stdin);
        said.lines().filter(|line| line.contains("sampling defaults")).map(String::from).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    assert_eq!(told(&["run", "x"], b""), none, "it ships none");
    std::fs::write(folder.path().join("generation_config.json"), r#"{"temperature": 0.7, "top_p": 0.8}"#)
        .unwrap();
    let line = ["sampling defaults of the model: temperature 0.7, top_p 0.8"];
    assert_eq!(told(&["run", "x"], b""), line);
    assert_eq!(told(&["chat"], b"x\nx\n"), line);
    assert_eq!(told(&["run", "--top-p", "1", "x"], b""), ["sampling defaults of the model: temperature 0.7"]);
    for args in [&["run", "--greedy", "x"][..], &["run", "-q", "x"], &["run", "--json", "x"]] {
        assert_eq!(told(args, b""), none, "{args:?}");
    }
}

#[test]
fn the_ladder_as_a_table_a_document_and_a_plot() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("ladder.svg").display().to_string();
    let args = ["bench", "ladder", "-q", "--t", "8,16", "--warmups", "0", "--runs", "1"];
    let report = json(&[&args[..], &["--json", "--svg", &svg]].concat());
    fields(&report, "version machine cores model shared_model warmups runs rows");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6 * 2);
    let names =
        "step what tokens seconds seconds_min seconds_max tokens_per_second kv_bytes_per_token kv_bytes";
    rows.iter().for_each(|row| fields(row, names));
    let bytes = |step: &str| {
        let row = rows.iter().find(|row| row["step"] == step).unwrap_or_else(|| panic!("no {step}"));
        number(row, "kv_bytes_per_token")
    };
    assert_eq!(bytes("v3") * 2.0, bytes("v1'"), "sharing stores half the layers");
    assert_eq!(bytes("v4") * 2.0, bytes("v2"));
    assert!(bytes("v2") < bytes("v1'") / 3.0, "int8 is about a quarter of f32");
    let plot = std::fs::read_to_string(&svg).unwrap();
    assert!(plot.contains("<svg") && plot.trim_end().ends_with("</svg>"));
    let (table, _) = succeed(&[&args[..], &["--only", "v1',v2"]].concat());
    assert!(table.contains("| 16 | v2 |") && !table.contains("| v3 |"), "{table}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    for args in [
        &["run", "--ignore-eos", "-n", "300", "The borrow checker"][..],
        &["run", "--json", "-n", "4", "x"],
        &["plan", "--json"],
        &["logits", "--tokens", "1,2", "--generate", "4"],
    ] {
        let mut child = kvist().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut five = [0; 5];
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut five).unwrap();
        drop(stdout);
        let out = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(0), "{args:?}: {stderr}");
        for word in ["panicked", "roken pipe", "kvist:"] {
            assert!(!stderr.contains(word), "{args:?}: {stderr}");
        }
    }
}
