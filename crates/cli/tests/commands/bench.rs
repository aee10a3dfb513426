//! `kvist bench`: every command, on a small shape, gives rows whose counts are right. Times are not checked here.
use crate::program::*;
use serde_json::Value;

fn lines(args: &[&str]) -> Vec<Value> {
    let out = run(args, b"");
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

const SMALL: [&str; 8] = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"];

fn with(first: &[&'static str], rest: &[&'static str]) -> Vec<&'static str> {
    first.iter().chain(SMALL.iter()).chain(rest).copied().collect()
}

fn check_machine(row: &Value) {
    assert_eq!(row["version"], 1);
    let machine = &row["machine"];
    assert!(machine["cores"].as_u64().unwrap() >= 1 && machine["threads"].as_u64().unwrap() >= 1);
    assert!(!machine["isa"].as_str().unwrap().is_empty() && !machine["cpu"].as_str().unwrap().is_empty());
}

fn check_spread(spread: &Value, runs: u64) {
    let ms = |name: &str| spread[name].as_f64().unwrap();
    assert_eq!(spread["runs"], runs);
    assert!(0.0 < ms("min_ms") && ms("min_ms") <= ms("median_ms") && ms("median_ms") <= ms("max_ms"));
}

#[test]
fn attention_reads_what_is_there() {
    let args =
        with(&["bench", "attention"], &["--tokens", "40,700", "--runs", "3", "--threads", "2", "--json"]);
    let rows = lines(&args);
    assert_eq!(rows.len(), 2);
    for (row, tokens) in rows.iter().zip([40u64, 700]) {
        check_machine(row);
        check_spread(row, 3);
        // 2 layers × 2 KV heads × K and V of 32 f16 each.
        assert_eq!(row["bytes_read"].as_u64(), Some(tokens * 2 * 2 * 2 * 64));
        assert!(row["read_limit_gb_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(row["machine"]["threads"], 2);
    }
}

#[test]
fn a_chunk_a_window_branches_and_a_tree() {
    let per_token = 2 * 2 * 2 * 64;
    let one = |rest: &[&'static str]| {
        let args = with(&["bench", "attention", "--tokens", "600", "--runs", "1", "--json"], rest);
        lines(&args).remove(0)["bytes_read"].as_u64().unwrap() / per_token
    };
    assert_eq!(one(&["--queries", "512"]), 600, "a chunk reads its own rows too");
    assert_eq!(one(&["--window", "100"]), 100);
    assert_eq!(one(&["--branches", "5"]), 605, "the trunk is read once");
    assert_eq!(one(&["--tree", "7"]), 607);
    assert_eq!(one(&["--softcap", "30"]), 600);
}

#[test]
fn every_dtype_is_measured() {
    for dtype in ["f32", "f16", "bf16", "q8", "q4-64", "q8-rot"] {
        let args =
            ["bench", "attention", "--tokens", "64", "--runs", "1", "--json", "--layers", "1", "--k", dtype];
        check_spread(&lines(&args)[0], 1);
    }
}

#[test]
fn a_fork_copies_nothing() {
    let args = with(&["bench", "fork"], &["--tokens", "300", "--branches", "4", "--runs", "2", "--json"]);
    let out = run(&args, b"");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    check_machine(&report);
    assert_eq!(report["fork_bytes_copied"], 0);
    let per_token = 2 * 2 * 2 * 64;
    assert_eq!(report["one"]["bytes_read"].as_u64(), Some(301 * per_token));
    assert_eq!(report["all"]["bytes_read"].as_u64(), Some(304 * per_token));
    check_spread(&report["all"], 2);
}

#[test]
fn a_synthetic_cache_tells_how_it_grows() {
    let args = with(&["bench", "synthetic"], &["--prompt", "300", "--generate", "250", "--json"]);
    let rows = lines(&args);
    let (summary, log) = rows.split_last().unwrap();
    check_machine(summary);
    let per_token = 2 * 2 * 2 * 64;
    assert_eq!(summary["bytes_written"].as_u64(), Some(550 * per_token));
    assert_eq!(summary["bytes_in_use"].as_u64(), Some(550 * per_token));
    assert!(log.len() >= 2 && log.iter().all(|event| event["event"] == "grow"));
    let last = log.last().unwrap()["bytes"].as_u64();
    assert_eq!(last, summary["bytes_reserved"].as_u64());
    for pair in log.windows(2) {
        assert_eq!(pair[0]["bytes"], pair[1]["bytes_before"]);
    }
}

#[test]
fn the_embedded_model_decodes_and_prefills() {
    let args = ["bench", "decode", "--depth", "0,40", "--tokens", "4", "--runs", "2", "--json"];
    let rows = lines(&args);
    assert_eq!(rows.iter().map(|row| row["depth"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 40]);
    for row in &rows {
        check_machine(row);
        check_spread(row, 2);
        assert!(
            row["tokens_per_s"].as_f64().unwrap() > 0.0 && row["weight_bytes"].as_u64().unwrap() > 1 << 20
        );
    }
    assert_eq!(rows[0]["kv_bytes"], 0);
    assert!(rows[1]["kv_bytes"].as_u64().unwrap() > 0);
    let args = ["bench", "prefill", "--tokens", "33", "--runs", "1", "--json", "--k", "q8"];
    check_spread(&lines(&args)[0], 1);
}

#[test]
fn linear_layers_of_every_encoding() {
    let args = "bench linear --outputs 512 --inputs 512 --tokens 1,3 --runs 1 --json --weights \
                f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,iq4_nl,mxfp4,q2_K,q3_K,q4_K,q5_K,q6_K,iq4_xs,few,int8";
    let rows = lines(&words(args));
    assert_eq!(rows.len(), 36);
    rows.iter().for_each(check_machine);
    let q8 = rows.iter().find(|row| row["weights"] == "q8_0").unwrap();
    assert_eq!(q8["bytes_read"].as_u64(), Some(512 * 512 / 32 * 34));
}

#[test]
fn layouts_are_compared() {
    let rows = lines(&["bench", "layout", "--size", "4MiB", "--runs", "1", "--json"]);
    assert_eq!(rows.len(), 4);
    rows.iter().for_each(check_machine);
    assert!(rows.iter().all(|row| row["bytes"] == 4 << 20));
    assert!(rows.iter().any(|row| row["order"] == "token-major" && row["huge_pages_asked"] == false));
}

#[test]
fn a_plot_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    let path = path.to_str().unwrap();
    let args = words("bench attention --tokens 64,128 --runs 1 --layers 1 --json --plot");
    lines(&[&args[..], &[path]].concat());
    assert!(std::fs::read_to_string(path).unwrap().contains("<svg"));
}

#[test]
fn a_roofline_counts_operations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    let args =
        "bench roofline --shape a --layers 1 --tokens 64 --queries 16 --branches 3 --runs 1 --json --plot";
    let rows = lines(&[&words(args)[..], &[path.to_str().unwrap()]].concat());
    assert_eq!(rows.len(), 9, "three dtypes, three kinds of work");
    // Pairs of query and position, times 12 heads of 64.
    let pairs = [64, 3 * 65, 16 * 64 - 120];
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(row["operations"].as_u64().unwrap(), 4 * 12 * 64 * pairs[i % 3], "{row}");
        let (bytes, limit) =
            (row["bytes_read"].as_f64().unwrap(), row["read_limit_gb_per_s"].as_f64().unwrap());
        assert!(bytes > 0.0 && limit > 0.0 && row["f32_peak_gflop_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(std::fs::read_to_string(path).unwrap().contains("<svg"));
}

#[test]
fn a_comparison_is_drawn_and_a_broken_one_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (file, plot) = (folder.path().join("rivals.json"), folder.path().join("plot.svg"));
    let draw = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let (file, plot) = (file.to_str().unwrap(), plot.to_str().unwrap());
        run(&["bench", "rivals", file, "--plot", plot], b"")
    };
    let out = draw(r#"[{"title": "work", "times_as_fast": {"slow": 2.5, "fast": 0.5}}]"#);
    assert!(out.status.success(), "{out:?}");
    let drawn = std::fs::read_to_string(&plot).unwrap();
    assert!(drawn.contains("work: slow") && drawn.contains("work: fast"), "every rival has a bar");
    for (text, word) in [
        ("[]", "no comparison"),
        ("{}", "compare.py"),
        (r#"[{"title": "work", "times_as_fast": {"slow": 0.0}}]"#, "above 0"),
    ] {
        let out = draw(text);
        let said = String::from_utf8_lossy(&out.stderr).to_string();
        assert!(!out.status.success() && said.contains(word), "{text}: {said}");
    }
}

#[test]
fn wrong_usage_is_named() {
    for (args, word) in [
        (&["bench", "attention", "--shape", "gpt-9"][..], "llama-3-8b"),
        (&["bench", "attention", "--heads", "7", "--kv-heads", "2"], "7"),
        (&["bench", "attention", "--tokens", "0"], "tokens"),
        (&["bench", "attention", "--tokens", "x"], "x"),
        (&["bench", "attention", "--softcap", "0"], "softcap"),
        (&["bench", "attention", "--queries", "9", "--tokens", "8"], "--tokens 9"),
        (&["bench", "attention", "--head-dim", "65536"], "head-dim"),
        (&["bench", "attention", "--k", "q5"], "q5"),
        (&["bench", "attention", "--threads", "0"], "threads"),
        (&["bench", "linear", "--weights", "q9_1"], "q6_K"),
        (&["bench", "linear", "--weights", "q6_K", "--inputs", "100"], "256"),
        (&["bench", "fork", "--branches", "0"], "branches"),
        (&["bench", "synthetic", "--chunk", "0"], "chunk"),
        (&["bench", "layout", "--heads", "3"], "heads"),
        (&["bench", "decode", "--depth", "deep"], "deep"),
    ] {
        refused(args, 2, &[word]);
    }
}

#[test]
fn an_instruction_set_is_forced_or_refused() {
    let bench = ["bench", "attention", "--tokens", "64", "--runs", "1", "--layers", "1", "--json"];
    let out = kvist().args(bench).env("KVIST_ISA", "portable").output().unwrap();
    let row: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(row["machine"]["isa"], "portable");
    let out = kvist().args(bench).env("KVIST_ISA", "mmx").output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{error}");
    assert!(error.contains("KVIST_ISA") && error.contains("mmx") && error.contains("portable"), "{error}");
}

#[test]
fn a_cache_that_does_not_fit_is_refused() {
    let args = words("bench synthetic --shape llama-3-8b --memory 40MiB --prompt 4096");
    let error = refused(&args, 1, &[]);
    assert!(error.contains("fit") || error.contains("MiB"), "{error}");
}

/// Regression: the load was two seconds long, in which a busy machine served too few requests to judge by. A number of
/// requests does not depend on the clock.
///
/// The test checks that the simulator can read what is measured, and that a served load is replayed to the byte and
/// priced. It does not check the accuracy of the prediction, which depends on the machine's other load.
#[test]
fn a_table_of_step_costs_and_what_it_foretells() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (costs, record, trace) = (path("costs.json"), path("run.jsonl"), path("load.jsonl"));
    let few = ["--max-batch", "4", "--max-batch-tokens", "32", "--context", "200", "--block-tokens", "8"];
    let calibrate =
        [&["bench", "calibrate", "--kv", "q8", "--threads", "1", "--seconds", "0"], &few[..]].concat();
    let summary = json(&[&calibrate[..], &["-o", &costs, "--json"]].concat());
    check_machine(&summary);
    let table: Value = serde_json::from_str(&std::fs::read_to_string(&costs).unwrap()).unwrap();
    assert_eq!(table["setting"], summary["setting"]);
    assert_eq!((&table["setting"]["k"], &table["setting"]["block_tokens"]), (&"q8".into(), &8.into()));
    assert_eq!(table["setting"]["rounds"], 1, "one round in any case");
    // Whole tiles of the kernels, and counts between them.
    let tokens = serde_json::json!([1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 11.0, 16.0, 23.0, 32.0]);
    assert_eq!(table["prefill"]["tokens"], tokens);
    assert_eq!(table["decode"]["sequences"], serde_json::json!([1.0, 2.0, 3.0, 4.0]));
    let of = |grid: &str| {
        table[grid]["ns"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap().clone())
    };
    assert!(of("prefill").chain(of("decode")).all(|ns| ns.as_f64().unwrap() > 1e3), "no step is that fast");
    assert!(of("shared").count() == 4 * 4 && of("shared").all(|ns| ns.as_f64().unwrap() >= 0.0));

    let rows = serde_json::json!([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]);
    assert_eq!(table["drafts"]["rows"], rows);
    assert_eq!(table["drafts"]["context"], table["decode"]["context"]);
    assert!(of("drafts").all(|ns| ns.as_f64().unwrap() > 1e3), "no step is that fast");
    let costs_of_drafts = summary["draft_costs"].as_array().unwrap();
    assert_eq!((costs_of_drafts.len(), &costs_of_drafts[0]["over_one"]), (6, &1.0.into()));

    // Inside the measured range there is no warning; beyond it, one for each limit.
    let simulate = |more: &[&str]| {
        let load = "simulate --requests 5 --contents unknown --capacity-blocks 100 --prompt-tokens \
                    uniform:least=5,most=60 --output-tokens uniform:least=5,most=60 --costs";
        succeed(&[&words(load)[..], &[&costs], more].concat()).1
    };
    assert_eq!(simulate(&["--max-batch", "4", "--batch-tokens", "32", "--block-tokens", "8"]), "");
    let said = simulate(&[]);
    for part in ["up to 4 decoding sequences", "up to 32 prompt tokens", "blocks of 8 tokens"] {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }

    let said = simulate(&["--max-batch", "4", "--block-tokens", "8", "--speculate", "tokens=40,accept=0.5"]);
    for part in ["up to 32 tokens of a sequence", "drafts make it up to 164"] {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }

    let predict = ["bench", "predict", "--costs", &costs, "--requests", "40", "--busy", "0.5"];
    let outputs = ["--threads", "1", "--record", &record, "--trace", &trace, "--json"];
    let prediction = json(&[&predict[..], &outputs].concat());
    let replayed = &prediction["replayed"];
    assert!(replayed["compared"].as_u64().unwrap() > 50, "{replayed}");
    assert_eq!(replayed["compared"], replayed["decisions"]);
    assert_eq!(prediction["requests"], 40);
    assert_eq!(replayed["costs"]["all"]["steps"], replayed["steps"]);
    let figure = |name: &str| {
        prediction["figures"].as_array().unwrap().iter().find(|f| f["figure"] == name).unwrap().clone()
    };
    for name in ["TTFT mean", "TPOT mean", "busy", "steps", "tokens found"] {
        let figure = figure(name);
        assert!(
            figure["served"].as_f64().unwrap() > 0.0 && figure["simulated"].as_f64().unwrap() > 0.0,
            "{figure}"
        );
    }
    // The recording can be replayed, and the trace has the simulated requests.
    assert_eq!(json(&["simulate", "replay", &record, "--json"])["decisions"], replayed["decisions"]);
    let capacity = (8192 / 8).to_string();
    let mut again =
        vec!["simulate", "--trace", &trace, "--costs", &costs, "--capacity-blocks", &capacity, "--json"];
    again.extend(["--max-batch", "4", "--batch-tokens", "32", "--block-tokens", "8"]);
    let again = json(&again);
    assert_eq!(again["steps"]["steps"].as_f64(), figure("steps")["simulated"].as_f64());
    let ttft_ms = again["latency"]["ttft_s"]["mean"].as_f64().unwrap() * 1e3;
    let simulated = figure("TTFT mean")["simulated"].as_f64().unwrap();
    assert!((ttft_ms / simulated - 1.0).abs() < 1e-6, "{ttft_ms} and {simulated}");

    // Too few for a mean.
    refused(&["bench", "predict", "--costs", &costs, "--requests", "5"], 2, &["20..=100000"]);

    a_trace_is_served(&costs, &path("mooncake.jsonl"), &trace);

    // A different model, cache or number of threads is refused, because the table was not measured with it.
    refused(&[&predict[..], &["--threads", "2"]].concat(), 1, &["give --threads 1"]);
    for (args, expected) in [
        (&["--max-batch", "8", "--max-batch-tokens", "4"][..], "at least --max-batch 8"),
        (&["--seconds", "-1"], "--seconds"),
    ] {
        refused(&[&["bench", "calibrate", "-o", &costs], args].concat(), 2, &[expected]);
    }
}

/// A trace of Mooncake's: one token for 64 of its own, so 8 for one of its ids. What is served shares what the ids share, which is
/// what is simulated. `file` and `written` are free names; `costs` is a table for one thread.
fn a_trace_is_served(costs: &str, file: &str, written: &str) {
    let row = |i: u32| {
        let (ids, at) = (format!("[0, {}, {}]", 1 + i % 3, 100 + i), i / 4 * 3000);
        format!(r#"{{"timestamp": {at}, "input_length": 1124, "output_length": 250, "hash_ids": {ids}}}"#)
    };
    std::fs::write(file, (0..30).map(row).collect::<Vec<_>>().join("\n")).unwrap();
    let load = ["bench", "predict", "--costs", costs, "--threads", "1", "--busy", "0.5", "--load", file];
    let few = ["--scale-tokens", "1/64", "--requests", "24", "--trace", written, "--json"];
    let prediction = json(&[&load[..], &few].concat());
    assert_eq!(prediction["requests"], 24);
    let said = prediction["load"].as_str().unwrap();
    assert!(said.contains("the first 24 requests of mooncake.jsonl, one token for 64"), "{said}");
    let figures = prediction["figures"].as_array().unwrap();
    let found = figures.iter().find(|figure| figure["figure"] == "tokens found").unwrap();
    assert!(number(found, "served") > 0.0 && number(found, "simulated") > 0.0, "{found}");
    assert_eq!(prediction["distinct_tokens"], 8 + 3 * 8, "whole blocks; two tokens of each request are left");

    let served = std::fs::read_to_string(written).unwrap();
    let served: Vec<Value> = served.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens = |i: usize| served[i]["tokens"].as_array().unwrap();
    let common = |i: usize, j: usize| tokens(i).iter().zip(tokens(j)).take_while(|(a, b)| a == b).count();
    assert_eq!(served.len(), 24);
    for request in &served {
        assert_eq!((&request["prompt_tokens"], &request["output_tokens"]), (&18.into(), &4.into()));
    }
    assert_eq!((common(0, 1), common(0, 3), common(5, 8)), (8, 16, 16));
    let at = |i: usize| number(&served[i], "arrival_ns");
    assert!(at(3) == 0.0 && at(4) > 0.0 && (at(8) / at(4) - 2.0).abs() < 1e-6, "bursts stay bursts");

    for (args, status, words) in [
        (&["--scale-tokens", "1/3"][..], 2, &["mooncake.jsonl", "512 tokens", "--scale-tokens 1/3"][..]),
        (&["--scale-tokens", "16"], 2, &["--scale-tokens", "1/16"]),
        (&["--requests", "20", "--chats", "4s"], 2, &["--load", "--chats"]),
        (&["--seconds", "4"], 2, &["--load", "--seconds"]),
    ] {
        refused(&[&load[..], args].concat(), status, words);
    }
    let predict = &load[..load.len() - 2];
    refused(&[predict, &["--scale-tokens", "1/4"]].concat(), 2, &["--load"]);
    refused(&[predict, &["--load", "/missing.jsonl"]].concat(), 1, &["/missing.jsonl"]);
    std::fs::write(file, (0..7).map(row).collect::<Vec<_>>().join("\n")).unwrap();
    refused(&load, 1, &["the trace has 7 requests", "20 at least"]);
}
