//! The program on a GPU through wgpu, or on lavapipe: every command that takes `--backend`, with the texts of the CPU.
//!
//! Tests run where they are asked for ([`kvist_testing::wgpu_adapter`]), on the best adapter whatever `KVIST_WGPU` says.
mod program;
use program::server::Server;
use program::*;
use serde_json::{Value, json};

/// Decoded weights and float caches, so that both devices compute the same up to the order of sums.
const F32: [&str; 4] = ["--weights", "f32", "--kv", "f32"];
const TEXT: &str = "The capacity of a vector is the amount of space allocated for any future elements that will be added \
     onto the vector. This is not to be confused with the length of a vector.";

/// Whether a GPU is tested. Fails if there is no adapter that runs models.
fn gpu() -> bool {
    if kvist_testing::wgpu_adapter().is_none() {
        return false;
    }
    let devices = json(&["devices", "--json"]);
    assert_eq!(devices["gpus"], true, "the tests were built with wgpu and the program was not");
    let all = devices["devices"].as_array().unwrap();
    let works = |device: &&Value| device["adapter"].is_object() && device["adapter"]["why_not"].is_null();
    let device = all.iter().find(works).unwrap_or_else(|| panic!("no adapter runs models: {devices}"));
    fields(
        device,
        "backend name adapter.api adapter.kind adapter.driver adapter.total_bytes adapter.free_bytes",
    );
    true
}

/// A command on the CPU and on the GPU.
fn both(args: &[&str]) -> [String; 2] {
    ["cpu", "wgpu"].map(|backend| succeed(&[args, &F32[..], &["--backend", backend]].concat()).0)
}

#[test]
fn a_run_gives_the_text_of_the_cpu() {
    if !gpu() {
        return;
    }
    for kind in ["contiguous", "paged"] {
        let [cpu, gpu] = both(&["run", "-q", "--greedy", "--ignore-eos", "-n", "48", "--kind", kind, TEXT]);
        assert!(!cpu.trim().is_empty());
        assert_eq!(gpu, cpu, "{kind}");
    }
    // Without --weights and --kv, as the README has it.
    let (text, _) =
        succeed(&["run", "-q", "--greedy", "-n", "8", "--backend", "wgpu:0", "The borrow checker"]);
    assert!(!text.trim().is_empty());
    refused(&["run", "-q", "--backend", "wgpu:99", "x"], 1, &["there is no adapter 99", "kvist devices"]);
    let small =
        ["run", "-q", "--backend", "wgpu", "--context", "1k", "--memory", "36MB", "--weights", "f32", "x"];
    let said = refused(&small, 1, &["--context", "on "]);
    assert!(said.contains("MB") || said.contains("MiB"), "{said}");
}

/// `--deterministic` reaches the GPU: logits of a prompt do not depend on its chunks, which they do without it.
#[test]
fn deterministic_logits_do_not_depend_on_chunks() {
    if !gpu() {
        return;
    }
    let tokens: Vec<String> = (0..40).map(|i| (i * 37 % 500 + 3).to_string()).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().display().to_string();
    let logits = |chunk: &str, more: &[&str]| {
        let args = ["logits", "-q", "--backend", "wgpu", "--chunk", chunk, "--out", &path, "--tokens"];
        succeed(&[&args[..], &[&tokens.join(",")], more].concat());
        std::fs::read(&path).unwrap()
    };
    let flag = ["--deterministic"];
    let alone = logits("1", &flag);
    assert!(alone.len() > 40 && alone == logits("16", &flag));
    assert!(logits("1", &[]) != logits("16", &[]));
}

#[test]
fn a_chat_with_branches_gives_the_text_of_the_cpu() {
    if !gpu() {
        return;
    }
    let talk = |backend: &str| {
        let args =
            [&["chat", "-q", "--json", "--greedy", "-n", "10", "--backend", backend], &F32[..]].concat();
        let (answers, _) = succeed_with(&args, b"fn main\n/fork other\nlet x\n/switch main\nstruct\n");
        let lines = answers.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .map(|line| (line["branch"].clone(), line["text"].clone(), line["reused_tokens"].clone()))
            .collect()
    };
    let (cpu, gpu): (Vec<_>, Vec<_>) = (talk("cpu"), talk("wgpu"));
    assert!(cpu.len() == 3 && cpu[1].2.as_u64() > Some(0), "{cpu:?}");
    assert_eq!(gpu, cpu);
}

#[test]
fn a_prefix_is_frozen_on_the_gpu_and_used_there() {
    if !gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("text"), TEXT).unwrap();
    let run = |backend: &str, prefix: &str| {
        let args = ["run", "-q", "--json", "--greedy", "-n", "24", "--backend", backend, "--prefix", prefix];
        [&args[..], &F32]
            .concat()
            .iter()
            .map(|arg| arg.to_string())
            .chain([" It is".into()])
            .collect::<Vec<_>>()
    };
    let texts = ["cpu", "wgpu"].map(|backend| {
        let (text, prefix) = (path("text"), path(backend));
        let args = ["prefix", "freeze", "-q", "--text", &text, "--out", &prefix, "--backend", backend];
        succeed(&[&args[..], &F32].concat());
        let args = run(backend, &prefix);
        let report = json(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(number(&report, "resumed_tokens") > 20.0, "{report}");
        report["text"].clone()
    });
    assert_eq!(texts[1], texts[0]);
    let args = run("wgpu", &path("cpu"));
    refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1, &["freeze it again", "--backend"]);
}

#[test]
fn eval_gives_the_perplexity_of_the_cpu() {
    if !gpu() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), TEXT).unwrap();
    let path = file.path().display().to_string();
    let [cpu, gpu] = both(&["eval", "-q", "--json", "--text", &path])
        .map(|text| serde_json::from_str::<Value>(&text).unwrap());
    let [a, b] = [&cpu, &gpu].map(|report| number(report, "perplexity"));
    assert!((a - b).abs() < 1e-3 * a, "{a} on the CPU, {b} on the GPU");
    assert_eq!(gpu["tokens"], cpu["tokens"]);
}

#[test]
fn bench_decode_measures_the_gpu() {
    if !gpu() {
        return;
    }
    let args = [
        "bench",
        "decode",
        "-q",
        "--json",
        "--backend",
        "wgpu",
        "--tokens",
        "3",
        "--runs",
        "1",
        "--depth",
        "20",
    ];
    let row = json(&args);
    assert!(number(&row, "tokens_per_s") > 0.0 && row["depth"] == 20 && row["tokens"] == 3, "{row}");
    assert!(!row["machine"]["adapter"].as_str().unwrap().is_empty(), "{row}");
}

/// The host's part once had neither the tables of plans nor the buffers of transfers.
#[test]
fn a_plan_splits_the_bound_into_the_memories() {
    if !gpu() {
        return;
    }
    let plan = |backend: &str| json(&[&["plan", "--json", "--backend", backend], &F32[..]].concat());
    let (gpu, cpu) = (plan("wgpu"), plan("cpu"));
    assert!(cpu.get("device").is_none(), "the CPU has one memory");
    let [device, host] = ["device.device_bytes", "device.host_bytes"].map(|name| number(&gpu, name));
    let [weights, kv, scratch, activations] =
        ["weights", "kv_cache", "scratch", "activations"].map(|name| number(&gpu["bound"], name));
    assert_eq!(device + host, number(&gpu, "bound.total"));
    assert!(device >= weights + kv, "weights, K and V are on the device: {gpu}");
    // Blocks of up to 2 MiB wait in four slots, two copies of three on the host; a block of 64 cells of the embedded model has
    // 512 KiB in f32.
    let blocks = 4.0 * 2.0 * 64.0 * number(&gpu, "kv_bytes_per_token");
    assert!(host >= blocks && host <= scratch + activations, "{blocks} bytes of blocks: {gpu}");
    let (text, _) = succeed(&["plan", "--backend", "wgpu"]);
    assert!(text.contains("device memory") && text.contains("host memory"), "{text}");
}

fn serve(backend: &str) -> Server {
    // Small steps, so that a prompt takes several.
    let cache = ["--port", "0", "--context", "1024", "--max-batch-tokens", "64", "--backend", backend];
    Server::spawn(&mut kvist(), &[&cache, &F32])
}

fn post(server: &Server, path: &str, body: &Value) -> Value {
    let (status, answer) = server.send("POST", path, &body.to_string());
    assert!((200..300).contains(&status), "{path} {body}: {answer}");
    serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

/// The text of a stream of events, whose last one is `[DONE]`.
fn streamed(server: &Server, body: &Value) -> String {
    let (status, stream) = server.send("POST", "/v1/completions", &body.to_string());
    assert!(status == 200 && stream.contains("data: [DONE]"), "{status}: {stream}");
    let events = stream.lines().filter_map(|line| line.trim_end().strip_prefix("data: "));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    events.filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned)).collect()
}

/// Everything that a client sees: texts, and how many tokens were found in the cache.
fn visit(server: &Server) -> Vec<(String, u64)> {
    let answer = |document: Value| {
        let text = document["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{document}")).to_owned();
        (text, document["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    let body = |prompt: &str, stream: bool| {
        json!({"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": true,
        "stream": stream})
    };
    let mut seen = vec![answer(post(server, "/v1/completions", &body(TEXT, false)))];
    // The prefix is there now; the stream is the same text.
    seen.push(answer(post(server, "/v1/completions", &body(&format!("{TEXT} See"), false))));
    seen.push((streamed(server, &body(TEXT, true)), 0));
    // A session, its fork, and both continued at the same time.
    let session = post(server, "/v1/sessions", &json!({"text": TEXT}));
    let id = session["id"].as_str().unwrap().to_owned();
    let generate = json!({"max_tokens": 12, "temperature": 0, "ignore_eos": true});
    seen.push(answer(post(server, &format!("/v1/sessions/{id}/generate"), &generate)));
    let forks = post(server, &format!("/v1/sessions/{id}/fork"), &json!({"n": 1}));
    let fork = forks["sessions"][0]["id"].as_str().unwrap_or_else(|| panic!("{forks}")).to_owned();
    post(server, &format!("/v1/sessions/{fork}/append"), &json!({"text": " The length"}));
    let ask = |id: &str| server.ask("POST", &format!("/v1/sessions/{id}/generate"), &generate.to_string());
    for stream in [ask(&id), ask(&fork)] {
        let (status, text) = program::server::answer(stream);
        assert_eq!(status, 200, "{text}");
        seen.push(answer(serde_json::from_str(&text).unwrap()));
    }
    seen
}

#[test]
fn a_server_gives_the_answers_of_the_cpu() {
    if !gpu() {
        return;
    }
    let [cpu, gpu] = ["cpu", "wgpu"].map(|backend| visit(&serve(backend)));
    assert_eq!(gpu, cpu);
    assert_eq!(gpu[2].0, gpu[0].0, "a stream is the same text");
    for (i, (text, cached)) in gpu.iter().enumerate() {
        assert!(!text.is_empty(), "{i}");
        assert!(i == 0 || i == 2 || *cached >= 32, "{i}: {cached} tokens of a shared prefix");
    }
    let mut server = serve("wgpu");
    assert_eq!(server.send("GET", "/ready", "").0, 200);
    server.signal("-TERM");
    assert!(server.wait().success());
}
