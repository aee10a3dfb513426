//! What every command guarantees to users and to programs, through the real binary: only text on stdout, everything
//! else on stderr, `--json` with the documented fields.
mod program;
use program::*;
use serde_json::Value;
use std::io::Read;
use std::process::Stdio;

/// The fields of a JSON object; dots separate nested names.
fn fields(value: &Value, names: &[&str]) {
    for name in names {
        let found = name.split('.').try_fold(value, |value, name| value.get(name));
        assert!(found.is_some(), "no `{name}` in {value}");
    }
}
fn number(value: &Value, name: &str) -> f64 {
    let found = name.split('.').fold(value, |value, name| &value[name]);
    found.as_f64().unwrap_or_else(|| panic!("`{name}` is no number in {value}"))
}

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
        &[
            "version",
            "model",
            "prompt",
            "text",
            "tokens",
            "finish",
            "seed",
            "prompt_tokens",
            "prefill_seconds",
            "prefill_tokens_per_second",
            "decode_seconds",
            "decode_tokens_per_second",
            "cache.backend",
            "cache.kind",
            "cache.k",
            "cache.v",
            "cache.context_tokens",
            "cache.window",
            "cache.sinks",
            "used.weights",
            "used.kv_cache",
            "used.scratch",
            "used.activations",
            "used.total",
            "bound.total",
            "kv_bytes_read",
            "process_peak_bytes",
        ],
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
        fields(&report, &["version", "tokens", "generated", "likeliest", "out"]);
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
            &[
                "version",
                "model",
                "context_tokens",
                "weight_bytes_on_disk",
                "kv_bytes_per_token",
                "kv_bits_per_value",
                "session_bytes",
                "bytes_read_per_token",
                "bytes_read_per_token_empty",
                "ceiling.bandwidth_bytes_per_second",
                "ceiling.tokens_per_second_empty",
                "ceiling.tokens_per_second_kv_alone",
            ],
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
        &[
            "version",
            "model",
            "text",
            "cache.k",
            "reference.k",
            "kv_bytes_per_token",
            "tokens",
            "perplexity",
            "perplexity_reference",
            "kl_mean",
            "kl_p99",
            "kl_max",
            "top1_agreement",
            "interrupted",
        ],
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

#[test]
fn a_chat_is_driven_from_stdin() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("transcript.txt").display().to_string();
    let script = format!(
        "/help\n\nOwnership is\n/fork other\n and borrowing is\n/branches\n/cache\n/switch main\n/undo\n/undo\n\
         /fork third\n/switch other\n/drop third\n/branches\n/save-transcript {path}\n/quit\n\
         never said\n"
    );
    let args = ["chat", "--greedy", "-n", "6"];
    let (stdout, stderr) = succeed_with(&args, script.as_bytes());
    for word in [
        "no chat template",
        "/save-transcript FILE",
        "on other; 0 B copied",
        "* other (4 messages)",
        "sequences: 2",
        " runs of cells",
        "  main (2 messages)",
        "on main",
        "unsaid",
        "nothing was said here yet",
        "third is gone",
        "wrote ",
        "reused",
    ] {
        assert!(stderr.contains(word), "{word:?} is missing: {stderr}");
    }
    let transcript = std::fs::read_to_string(&path).unwrap();
    assert!(transcript.starts_with("user: Ownership is\n\nassistant: "), "{transcript}");
    assert!(transcript.contains("user:  and borrowing is\n\nassistant: "), "{transcript}");
    assert!(!stdout.contains("user:") && !stdout.contains("reused"), "{stdout}");
    // Only answers are on stdout, and the transcript contains them.
    let answers: Vec<&str> = transcript.split("assistant: ").skip(1).collect();
    for answer in &answers {
        let answer = answer.split("\n\nuser:").next().unwrap().trim_end();
        assert!(stdout.contains(answer), "{answer:?} is not in {stdout:?}");
    }
    // `//` sends a text that begins with a slash.
    let (slash, _) = succeed_with(&args, b"//help\n");
    assert!(!slash.is_empty() && !slash.contains("/save-transcript"), "{slash}");
    // The same as JSON: one line per turn; the second turn reuses what the first left in the cache.
    let json = [&args[..], &["--json", "-q"]].concat();
    let (lines, nothing) = succeed_with(&json, b"Ownership is\n and borrowing is\n");
    assert_eq!(nothing, "");
    let turns: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(turns.len(), 2);
    for turn in &turns {
        let names = ["version", "branch", "user", "text", "finish", "prompt_tokens", "tokens", "kv_bytes"];
        fields(turn, &[&names[..], &["reused_tokens", "decode_tokens_per_second"]].concat());
    }
    assert_eq!(number(&turns[0], "reused_tokens"), 0.0);
    assert!(number(&turns[1], "reused_tokens") >= number(&turns[0], "prompt_tokens"));
    assert!(answers[0].starts_with(turns[0]["text"].as_str().unwrap()));
}

#[test]
fn a_rotation_that_buys_nothing_is_pointed_out() {
    let said = |kv: &str| succeed(&["plan", "--kv", kv]).1;
    assert!(said("f16-rot").contains("only becomes slower"));
    assert_eq!(said("q4-rot"), "");
}

/// The penalty looks at the text that is continued, not at text of other branches or text that was undone.
#[test]
fn what_was_unsaid_leaves_no_trace_in_the_sampler() {
    let args = ["chat", "-q", "--json", "--greedy", "--repeat-penalty", "1.5", "-n", "12"];
    let (lines, _) = succeed_with(&args, b"The\n/undo\nThe\n/undo\n/fork x\nThe\n");
    let texts: Vec<Value> =
        lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["text"].clone()).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
}

/// In a pipe a failed command ends the chat, and the exit status says so.
#[test]
fn a_command_that_fails_in_a_pipe_ends_the_chat() {
    for (line, word) in [
        ("/system be brief", "no chat template and so no system message"),
        ("/switch nowhere", "there is no branch `nowhere`; there are main"),
        ("/drop nowhere", "there is no branch `nowhere`; there are main"),
        ("/drop main", "you are on `main`"),
        ("/fork main", "there is a branch `main` already"),
        ("/wat", "there is no /wat"),
        ("/save-transcript", "/save-transcript FILE"),
        ("/save-transcript /missing/file", "cannot write /missing/file"),
    ] {
        let out = run(&["chat", "-q"], format!("{line}\nnever said\n").as_bytes());
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0), "{line}: {stderr}");
        assert!(stderr.contains(word), "{line}: {stderr}");
    }
    // A kind that the user names is used, with an error for what it does not support.
    let out = run(&["chat", "-q", "--kind", "contiguous"], b"/fork x\n");
    assert!(String::from_utf8_lossy(&out.stderr).contains("--kind cells or tree"));
    succeed_with(&["chat", "-q", "--window", "64"], b"/fork x\n");
}

#[test]
#[cfg(unix)]
fn a_chat_that_waits_ends_at_the_first_signal() {
    let mut child = kvist()
        .args(["chat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The greeting has come: the program reads its input, or is about to, and handles the signal in both cases.
    child.stderr.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    let kill = std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(kill.success());
    // A chat that continued would end at the end of its input, with status 0.
    let mut stdin = child.stdin.take();
    for _ in 0..6000 {
        if let Some(status) = child.try_wait().unwrap() {
            return assert_eq!(status.code(), Some(130));
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    drop(stdin.take());
    child.kill().unwrap();
    panic!("it went on waiting");
}

/// Regression: on an unknown terminal the prompt went to stdout, and a signal at the prompt left the terminal raw.
#[test]
#[cfg(target_os = "linux")]
fn a_terminal_is_left_as_it_was_and_stdout_has_no_prompt() {
    use nix::sys::termios::{LocalFlags, tcgetattr};
    use std::io::Write;
    for term in ["dumb", "xterm"] {
        let pty = nix::pty::openpty(None, None).unwrap();
        let (mut master, slave) = (std::fs::File::from(pty.master), pty.slave);
        let before = tcgetattr(&slave).unwrap().local_flags;
        let terminal = || Stdio::from(slave.try_clone().unwrap());
        let mut command = std::process::Command::new("setsid");
        command.arg("--ctty").arg(kvist().get_program()).args(["chat", "-q", "--no-history"]);
        command.env("TERM", term).stdin(terminal()).stdout(Stdio::piped()).stderr(terminal());
        let mut child = command.spawn().unwrap();
        let mut said = Vec::new();
        while !String::from_utf8_lossy(&said).contains("main> ") {
            let mut some = [0; 256];
            let n = master.read(&mut some).unwrap();
            said.extend(&some[..n]);
        }
        if term == "dumb" {
            master.write_all(b"/quit\n").unwrap();
        } else {
            assert!(
                !tcgetattr(&slave).unwrap().local_flags.contains(LocalFlags::ICANON),
                "it edits no lines"
            );
            let kill = std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap();
            assert!(kill.success());
        }
        let mut stdout = String::new();
        child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        let status = child.wait().unwrap().code();
        assert_eq!((status, stdout.as_str()), (Some(if term == "dumb" { 0 } else { 130 }), ""), "{term}");
        assert_eq!(tcgetattr(&slave).unwrap().local_flags, before, "{term}");
    }
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
    let out = run(&["plan", folder.path().to_str().unwrap()], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("model.safetensors"));
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
    let args = [
        "logits",
        "--model",
        &mixed,
        "--tokens",
        "1,2,3",
        "--generate",
        "80",
        "--kv",
        "f32",
        "--context",
        "100",
    ];
    let written = |more: &[&str]| succeed(&[&args[..], more].concat()).0;
    assert_eq!(written(&["--kind", "ring", "--window", "100"]), written(&[]));
}

/// Regression: `logits` needs no tokenizer, but a broken one stopped it.
#[test]
fn a_broken_tokenizer_is_no_affair_of_logits() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("parity/llama-gqa").join(name), folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let model = folder.path().to_str().unwrap();
    succeed(&["logits", "--model", model, "--tokens", "1,2", "--generate", "2"]);
    let out = run(&["run", "--model", model, "x"], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("tokenizer.json"));
}

/// Regression: one bad field stopped every command, and nothing could switch it off.
#[test]
fn a_default_that_cannot_be_matters_only_where_it_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("parity/llama-gqa").join(name), folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("generation_config.json"), "{\"top_p\": 0}").unwrap();
    let model = folder.path().to_str().unwrap();
    let serve = ["serve", "--dry-run", "--model", model];
    succeed(&[&serve[..], &["--generation-config", "none"]].concat());
    let every = "--temperature 1 --top-k 0 --top-p 1 --min-p 0 --repeat-penalty 1 --repeat-last 0";
    let every: Vec<&str> = every.split(' ').collect();
    let run_it = ["run", "--model", model, "x"];
    for (args, is_told) in [
        (serve.to_vec(), true),
        (run_it.to_vec(), true),
        // These fail because there is no tokenizer.
        ([&run_it[..], &["--greedy"]].concat(), false),
        ([&run_it[..], &every].concat(), false),
    ] {
        let out = run(&args, b"");
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
        assert_eq!(stderr.contains("top_p"), is_told, "{args:?}: {stderr}");
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

/// Regression: "The cache is full" said neither how full it was nor what would help.
#[test]
fn a_chat_without_room_says_what_makes_some() {
    let says = |args: &[&str], stdin: &str, status: i32, words: &[&str]| {
        let out = run(&[&["chat", "--greedy"], args].concat(), stdin.as_bytes());
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(status), "{said}");
        for word in words {
            assert!(said.contains(word), "no {word:?} in {said}");
        }
    };
    let long = "the borrow checker and the vector ".repeat(20);
    let too_long =
        ["the conversation with this turn has ", "the cache holds 32", "start again with --context "];
    says(&["--context", "32", "-n", "4"], &long, 1, &too_long);
    let full = ["is full (16 of 16 tokens)", "/undo takes back", "/fork", "--context 128"];
    says(&["--context", "16", "-n", "100"], "Ownership is\n", 0, &full);
    let beside = "/fork a\nOwnership is\n/switch main\nthe vector and the borrow checker and the trait and the struct and \
                  the enum and the function and the module and the crate and the type and the value of the vector\n";
    let other = ["the cache holds 48 tokens, of which ", "are in use", "/drop gives one up (a)"];
    says(&["--context", "48", "-n", "36"], beside, 1, &other);
}

#[test]
fn the_ladder_as_a_table_a_document_and_a_plot() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("ladder.svg").display().to_string();
    let args = ["bench", "ladder", "-q", "--t", "8,16", "--warmups", "0", "--runs", "1"];
    let report = json(&[&args[..], &["--json", "--svg", &svg]].concat());
    fields(&report, &["version", "machine", "cores", "model", "shared_model", "warmups", "runs", "rows"]);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6 * 2);
    let names = ["step", "what", "tokens", "seconds", "seconds_min", "seconds_max", "tokens_per_second"];
    rows.iter().for_each(|row| fields(row, &[&names[..], &["kv_bytes_per_token", "kv_bytes"]].concat()));
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
