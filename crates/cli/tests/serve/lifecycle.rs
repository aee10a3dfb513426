//! `kvist serve`: the real binary, from its first line to its signal. `endurance.rs` tests being killed, and many
//! clients.

use crate::program::server::Server;
use crate::program::*;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

/// A server on a free port that logs at `level`, to a pipe.
fn logging(level: &str, args: &[&str]) -> Server {
    Server::spawn(kvist().env("KVIST_LOG", level).stderr(Stdio::piped()), &[&["--port", "0"], args])
}

fn start(args: &[&str]) -> Server {
    logging("error", args)
}

const PROMPT: &str = "A trait is";

#[test]
fn serves_what_run_writes_until_it_is_told_to_end() {
    let (expected, _) =
        succeed(&["run", "--greedy", "--raw", "-q", "--max-tokens", "12", "--kv", "f32", PROMPT]);
    let mut server = start(&["--kv", "f32", "--context", "2048", "--grace", "3600"]);
    let request = serde_json::json!({"prompt": PROMPT, "max_tokens": 12, "temperature": 0}).to_string();
    let (_, answer) = server.send("POST", "/v1/completions", &request);
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert!(expected.trim_end().ends_with(text.trim_end()), "{expected:?} does not end with {text:?}");
    // A request that is running when the signal comes is finished.
    let request = serde_json::json!({"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut stream = BufReader::new(server.ask("POST", "/v1/completions", &request.to_string()));
    let mut first = String::new();
    while !first.starts_with("data") {
        first.clear();
        stream.read_line(&mut first).unwrap();
    }
    server.signal("-TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert!(!rest.contains("data: {\"error\""), "{rest}");
    assert_eq!(server.wait().code(), Some(0));
}

/// Regression: `--record` emptied an existing file, and with it the previous day's recording.
#[test]
fn a_recording_that_is_there_is_kept_unless_it_is_said_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("day.jsonl");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "of yesterday\n").unwrap();
    let args = ["serve", "--port", "0", "--context", "512", "--record", path];
    refused(&args, 1, &[path, "--record-overwrite"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "of yesterday\n");
    // A server that does not start leaves the file, too.
    let more = ["--record", path, "--record-overwrite"];
    let out = run(&[&["serve", "--port", "0", "--memory", "14MiB"][..], &more].concat(), b"");
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "of yesterday\n");
    let recorded = |args: &[&str]| {
        let mut server = start(&[&["--context", "512"], args].concat());
        server.signal("-TERM");
        assert_eq!(server.wait().code(), Some(0));
        std::fs::read_to_string(&file).unwrap()
    };
    assert!(recorded(&more).starts_with("{\"format\":\"kvist-recording\""));
    // An empty file may be overwritten.
    std::fs::write(&file, "").unwrap();
    assert!(recorded(&["--record", path]).starts_with("{\"format\":\"kvist-recording\""));
}

/// The scheduler of a running server has the grace of the flag, of the file, or the default. A recording begins with what it has.
#[test]
fn a_server_waits_for_tiers_as_long_as_it_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let (recording, config) = (folder.path().join("run.jsonl"), folder.path().join("s.toml"));
    std::fs::write(&config, "[tiers]\nram_bytes = 67108864\ngrace_ms = 7000\n").unwrap();
    let (record, config) = (recording.to_str().unwrap(), config.to_str().unwrap());
    for (args, milliseconds) in [
        (&["--tier-ram", "64MiB"][..], 250),
        (&["--tier-ram", "64MiB", "--tier-grace", "50ms"], 50),
        (&["--config", config], 7000),
        (&["--config", config, "--tier-grace", "2s"], 2000),
    ] {
        let mut server =
            start(&[&["--context", "512", "--record", record, "--record-overwrite"], args].concat());
        server.signal("-TERM");
        assert_eq!(server.wait().code(), Some(0));
        let text = std::fs::read_to_string(&recording).unwrap();
        let graces: Vec<&str> = text.split("\"grace_ns\":").skip(1).collect();
        let expected = format!("{milliseconds}000000");
        assert!(!graces.is_empty(), "no grace in {text}");
        assert!(
            graces.iter().all(|rest| rest.split([',', '}']).next() == Some(&expected)),
            "{args:?}: {text}"
        );
    }
}

/// Regression: a model's defaults changed answers, and no output said so.
#[test]
fn the_log_says_which_defaults_of_the_model_count() {
    let folder = escaping_model();
    std::fs::write(folder.path().join("generation_config.json"), r#"{"top_k": 20}"#).unwrap();
    let model = ["--model", folder.path().to_str().unwrap()];
    for (more, expected) in [(&[][..], 1), (&["--generation-config", "none"], 0)] {
        let mut server = logging("info", &[&model, more].concat());
        let mut log = server.child.stderr.take().unwrap();
        server.signal("-TERM");
        assert_eq!(server.wait().code(), Some(0));
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        assert_eq!(text.matches("sampling defaults of the model: top_k 20").count(), expected, "{text}");
    }
}

/// Regression: answers of documents were logged, streamed ones were not.
#[test]
fn the_log_has_prompts_and_streamed_answers_where_that_is_asked() {
    for stream in [false, true] {
        let mut server = logging("info", &["--log-prompts", "--context", "512"]);
        let request =
            serde_json::json!({"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": stream});
        let (_, answer) = server.send("POST", "/v1/completions", &request.to_string());
        assert!(answer.contains("length") || answer.contains("stop"), "{answer}");
        let mut log = server.child.stderr.take().unwrap();
        server.signal("-TERM");
        assert_eq!(server.wait().code(), Some(0));
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        let lines = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        assert!(text.contains(PROMPT), "stream: {stream}: {text}");
        assert_eq!(lines("answer id="), 1, "stream: {stream}: {text}");
    }
}

#[test]
fn the_plan_names_every_purpose_and_is_refused_where_it_does_not_fit() {
    let plan = json(&["serve", "--dry-run", "--json", "--context", "4096", "--kv", "q8"]);
    let bound = &plan["bound"];
    let of = |name: &str| bound[name].as_u64().unwrap_or_else(|| panic!("{name}: {plan}"));
    assert_eq!(of("total"), of("weights") + of("kv_cache") + of("scratch") + of("activations"));
    assert_eq!((plan["cache_tokens"].as_u64(), plan["k"].as_str()), (Some(4096), Some("q8")));
    let twice = json(&["serve", "--dry-run", "--json", "--context", "8192", "--kv", "q8"]);
    assert_eq!(twice["bound"]["kv_cache"].as_u64(), Some(2 * of("kv_cache")));
    const CONTEXT: u64 = 1024; // of the embedded model
    // The formula of docs/serving.md: bodies, and the prompts of the queue and the batch.
    let requests = |max_body_mib: u64, queue: u64, batch: u64, context: u64| {
        let prompts = queue * context * 4 + batch * (context * 17 / 2 + 64);
        Some(((66 * max_body_mib + 133) << 20) + prompts)
    };
    assert_eq!(plan["requests_bytes"].as_u64(), requests(4, 256, 32, CONTEXT));
    assert_eq!(plan["total_bytes"].as_u64(), requests(4, 256, 32, CONTEXT).map(|bytes| bytes + of("total")));
    let small = json(&["serve", "--dry-run", "--json", "--max-body", "1MiB", "--max-batch", "8"]);
    assert_eq!(small["requests_bytes"].as_u64(), requests(1, 256, 8, CONTEXT));
    // No prompt is longer than the cache.
    let narrow = json(&["serve", "--dry-run", "--json", "--context", "64", "--max-queue", "100000"]);
    assert_eq!(narrow["requests_bytes"].as_u64(), requests(4, 100_000, 32, 64));
    // Regression: requests were in the plan but not in the bound: the dry run refused this, and the server started.
    for last in [&["--dry-run"][..], &["--port", "0"]] {
        let said = refused(&[&["serve", "--memory", "300MiB", "--context", "4096"], last].concat(), 1, &[]);
        let parts = ["the cache of 4096 tokens needs", "requests need 398.27 MiB", "--kv q8"];
        assert!(parts.iter().all(|part| said.contains(part)), "{last:?}: {said}");
    }
    let (text, _) = succeed(&["serve", "--dry-run"]);
    assert!(text.contains("bound ") && text.contains("KV cache") && text.contains("requests "), "{text}");
    for args in
        [&["serve", "--dry-run", "--memory", "1MiB"][..], &["serve", "--memory", "14MiB", "--port", "0"]]
    {
        refused(args, 1, &["MiB"]);
    }
}

#[test]
fn files_and_flags_that_cannot_be_served_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvist.toml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "[cache]\ntokens = 512\n[http]\nport = 0\n").unwrap();
    let plan = json(&["serve", "--config", path, "--dry-run", "--json"]);
    assert_eq!(plan["cache_tokens"], 512);
    let plan = json(&["serve", "--config", path, "--context", "1024", "--dry-run", "--json"]);
    assert_eq!(plan["cache_tokens"], 1024, "flags override the file");
    for (text, words) in [
        ("[http]\nprot = 80\n", &["kvist.toml", "line 2", "prot"][..]),
        ("[limits]\nmax_queue = 0\n", &["kvist.toml", "limits.max_queue"]),
        ("[model]\npath = \"no/such.gguf\"\n", &["no/such.gguf"]),
        ("[[keys]]\nname = \"a\"\nkey_file = \"no/such\"\n", &["no/such"]),
    ] {
        std::fs::write(&file, text).unwrap();
        refused(&["serve", "--config", path, "--port", "0"], 1, words);
        // The dry run refuses a configuration that cannot start.
        refused(&["serve", "--config", path, "--dry-run"], 1, &[]);
    }
    for args in
        [&["serve", "--policy", "best"][..], &["serve", "--host", "0.0.0.0"], &["serve", "--eviction", "opt"]]
    {
        refused(args, 2, &[]);
    }
    // A port that is already in use.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let record = folder.path().join("record.jsonl");
    refused(&["serve", "--port", &port, "--record", record.to_str().unwrap()], 1, &[&port]);
    assert!(!record.exists(), "it was found out behind the weights");
}

#[test]
fn speculation_is_planned_refused_early_and_changes_no_answer() {
    let plan = |more: &[&str]| {
        json(&[&["serve", "--dry-run", "--json", "--context", "2048", "--max-batch", "4"], more].concat())
    };
    let number = |plan: &serde_json::Value, path: &str| number(plan, path) as u64;
    let plain = plan(&[]);
    assert!(plain.get("speculation").is_none(), "{plain}");
    let suffix = plan(&["--speculate", "suffix", "--draft-tokens", "8"]);
    assert_eq!(suffix["speculation"], serde_json::json!({"speculate": "suffix", "max_draft_tokens": 32}));
    assert!(number(&suffix, "bound.activations") > number(&plain, "bound.activations"), "{suffix}");
    let kept = number(&suffix, "requests_bytes") - number(&plain, "requests_bytes");
    assert_eq!(kept, 80 * (4 * 1024 + (1 << 18)), "texts of the batch and finished answers");

    // A draft model: here the target itself, and one of another family.
    let folder = escaping_model();
    let model = folder.path().to_str().unwrap();
    let itself = ["--model", model, "--speculate", "draft", "--draft-model", model];
    let draft = plan(&itself);
    let bytes = number(&draft, "speculation.draft_model_bytes");
    assert!(bytes > number(&draft, "bound.weights"), "{draft}");
    let parts = number(&draft, "bound.total") + number(&draft, "requests_bytes") + bytes;
    assert_eq!(number(&draft, "total_bytes"), parts);
    let (text, _) = succeed(&[&["serve", "--dry-run"], &itself[..]].concat());
    assert!(text.contains("speculation      draft, at most 128 draft tokens a step"), "{text}");
    assert!(text.contains("draft model "), "{text}");
    let serve = |more: &[&'static str]| [&["serve", "--port", "0"], more].concat();
    refused(
        &[&serve(&["--speculate", "draft", "--draft-model"])[..], &[model]].concat(),
        1,
        &["same family"],
    );
    let alone = [&serve(&["--speculate", "draft", "--model"])[..], &[model]].concat();
    refused(&alone, 2, &["speculation.draft_model"]);
    refused(&serve(&["--speculate", "suffix", "--draft-model", "x"]), 2, &["speculation.draft_model"]);
    refused(&serve(&["--speculate", "draft", "--draft-model", "no/such"]), 1, &["no/such"]);
    refused(&serve(&["--speculate", "best"]), 2, &["suffix"]);
    let small = ["--speculate", "suffix", "--context", "32", "--draft-tokens", "32"];
    refused(&serve(&small), 2, &["--draft-tokens 32", "--context"]);
    refused(&serve(&["--speculate", "auto", "--draft-depth", "0"]), 2, &["--draft-depth"]);

    // Flags override the file.
    let file = folder.path().join("kvist.toml");
    std::fs::write(
        &file,
        "[speculation]\nspeculate = \"draft\"\ndraft_model = \"no/such\"\ndraft_tokens = 3\n",
    )
    .unwrap();
    let config = ["--config", file.to_str().unwrap()];
    refused(&[&["serve", "--dry-run"], &config[..]].concat(), 1, &["no/such"]);
    assert!(plan(&[&config[..], &["--speculate", "off"]].concat()).get("speculation").is_none());
    let ngram = plan(&[&config[..], &["--speculate", "ngram"]].concat());
    assert_eq!(ngram["speculation"], serde_json::json!({"speculate": "ngram", "max_draft_tokens": 12}));

    let answer = |prompt: &str, args: &[&str]| {
        let mut server = start(&[&["--kv", "f32", "--context", "2048"], args].concat());
        let request =
            serde_json::json!({"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": true});
        let (_, answer) = server.send("POST", "/v1/completions", &request.to_string());
        server.signal("-TERM");
        assert_eq!(server.wait().code(), Some(0));
        serde_json::from_str::<serde_json::Value>(&answer).unwrap()
    };
    let expected = answer(PROMPT, &[])["choices"].clone();
    assert!(expected.is_array(), "{expected}");
    for mode in ["auto", "ngram", "suffix", "draft", "eagle"] {
        let found = answer(PROMPT, &["--speculate", mode]);
        assert_eq!(found["choices"], expected, "{mode}");
        let details = &found["usage"]["completion_tokens_details"];
        assert!(details.is_object(), "{mode}: {found}");
        // The embedded model has a draft model and a head, which are often right.
        if ["draft", "eagle"].contains(&mode) {
            assert!(details["accepted_prediction_tokens"].as_u64() > Some(0), "{mode}: {found}");
        }
    }
    // Its vocabulary has one letter.
    let (plain, found) = (answer("xxxx", &["--model", model]), answer("xxxx", &itself));
    assert_eq!(found["choices"], plain["choices"]);
    let accepted = &found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"];
    assert!(accepted.as_u64().unwrap() > 20, "{found}");
}
