//! `--keep`: texts that grow far beyond their cache.
use crate::program::*;
use serde_json::Value;
use std::fs;

/// 40 tokens, and a step of 16 beside them.
const BUDGET: [&str; 4] = ["--keep", "sinks=4,recent=20,top=16", "--chunk", "16"];
const CELLS: u64 = 4 + 20 + 16 + 16;

/// More than ten times the budget.
fn long_text() -> String {
    (0..40).map(|i| format!("{i}. The capacity of a vector is the space for its elements. ")).collect()
}

/// The bytes of a token in the cache of the embedded model: K and V in f16, 8 layers of 2 heads of 64.
const TOKEN_BYTES: u64 = 2 * 2 * 8 * 2 * 64;

/// What the cells take, rounded up to blocks of 16.
const KV_BYTES: u64 = CELLS.next_multiple_of(16) * TOKEN_BYTES;

#[test]
fn a_prompt_of_ten_times_the_budget_runs_in_the_memory_of_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("long.txt");
    fs::write(&file, long_text()).unwrap();
    let file = file.to_str().unwrap();
    for (by, kind) in [("last", "cells"), ("attention", "tree"), ("none", "cells")] {
        let budget = format!("{},by={by}", BUDGET[1]);
        let args = ["run", "-q", "--raw", "--greedy", "--json", "--ignore-eos", "-n", "40", "--file", file];
        let args = [&args[..], &["--kind", kind, "--keep", budget.as_str(), "--chunk", "16"]].concat();
        let report = json(&args);
        let prompt = report["prompt_tokens"].as_u64().unwrap();
        assert!(prompt > 10 * 40, "{prompt}");
        assert_eq!(report["tokens"].as_array().unwrap().len(), 40);
        assert_eq!(report["cache"]["keep"], budget);
        // The last token is not stored.
        let left = prompt + 39 - report["removed_tokens"].as_u64().unwrap();
        assert!((36..=CELLS).contains(&left), "{by}: {left} tokens are left");
        let (used, bound) = (&report["used"]["kv_cache"], &report["bound"]["kv_cache"]);
        assert!(
            used.as_u64().unwrap() <= KV_BYTES && bound.as_u64().unwrap() <= KV_BYTES,
            "{by}: {used} of {bound}"
        );
        assert_eq!(json(&args)["tokens"], report["tokens"], "{by}: the same command, the same text");
    }
}

/// What the process has resident at most, and not only what it counts.
#[cfg(target_os = "linux")]
#[test]
fn a_text_of_ten_times_the_budget_takes_the_memory_of_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let keep = ["--keep", "sinks=4,recent=200,top=196"];
    let peak = |n_sentences: usize, more: &[&str]| {
        let file = folder.path().join("text.txt");
        let text: String =
            (0..n_sentences).map(|i| format!("{i}. The capacity of a vector is its space. ")).collect();
        fs::write(&file, text).unwrap();
        let args = [
            "run",
            "-q",
            "--raw",
            "--greedy",
            "--json",
            "--ignore-eos",
            "-n",
            "8",
            "--context",
            "8192",
            "--file",
        ];
        let args = [&args[..], &[file.to_str().unwrap(), "--kv", "f32", "--chunk", "64"], more].concat();
        let report = json(&args);
        (report["prompt_tokens"].as_u64().unwrap(), report["process_peak_bytes"].as_u64().unwrap())
    };
    let (few, short) = peak(40, &keep);
    let (many, long) = peak(400, &keep);
    assert!((400..800).contains(&few) && many > 10 * 400, "{few} and {many} tokens");
    let (_, whole) = peak(400, &[]);
    // K and V of the tokens that are more take at least so much, in f32.
    let more = (many - few) * 2 * TOKEN_BYTES;
    assert!(long < short + more / 8, "{short} bytes at most for {few} tokens, {long} for {many}");
    assert!(whole > short + more * 3 / 4, "without a budget {whole}, which {more} should be seen in");
}

#[test]
fn a_text_within_the_budget_is_the_whole_one() {
    let args = ["run", "-q", "--raw", "--greedy", "--json", "--ignore-eos", "-n", "20", "The borrow checker"];
    let kept = json(&[&args[..], &BUDGET].concat());
    assert_eq!(kept["removed_tokens"], 0);
    assert_eq!(kept["tokens"], json(&args)["tokens"]);
}

#[test]
fn a_chat_of_ten_times_the_budget_has_a_flat_cache() {
    for more in [&[][..], &["--kind", "paged"]] {
        let args = [&["chat", "-q", "--greedy", "--json", "-n", "12"][..], &BUDGET, more].concat();
        let script: String = (0..20)
            .map(|i| format!("{i}. The capacity of a vector is the space for its elements.\n"))
            .collect();
        let (lines, _) = succeed_with(&args, script.as_bytes());
        let turns: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(turns.len(), 20);
        let count = |turn: &Value, name: &str| turn[name].as_u64().unwrap();
        let said: u64 = turns.iter().map(|turn| count(turn, "prompt_tokens") + count(turn, "tokens")).sum();
        // The last token of an answer is read by the next turn, so it is counted twice.
        let said = said - 20;
        let removed = count(&turns[19], "removed_tokens");
        assert!(said > 10 * 40, "{said} tokens were said");
        // `paged` rounds every part of the budget up to blocks, and its pool too.
        let cells = if more.is_empty() { CELLS } else { 16 + 32 + 16 + 16 };
        assert!(said - removed <= cells, "{said} tokens were said and {removed} removed");
        // Nothing is computed twice, and from the first removal on the cache does not grow.
        let full = turns.iter().skip_while(|turn| count(turn, "removed_tokens") == 0);
        let bytes: Vec<u64> = full.map(|turn| count(turn, "kv_bytes")).collect();
        assert!(bytes.len() > 10, "{bytes:?}");
        assert!(bytes.iter().all(|n| *n == bytes[0]), "{bytes:?}");
        // Pools grow in steps.
        assert!(bytes[0] <= cells.next_power_of_two() * TOKEN_BYTES, "{bytes:?}");
        assert!(
            turns.windows(2).all(|two| count(&two[0], "removed_tokens") <= count(&two[1], "removed_tokens"))
        );
    }
}
