//! `kvist prefix freeze` and `--prefix`.
use crate::program::server::Server;
use crate::program::*;
use serde_json::{Value, json};
use std::fs;

const RULES: &str = "The cache stores the keys and values of every token. The borrow checker";

fn text(args: &[&str]) -> String {
    let (text, _) =
        succeed(&[&["run", "-q", "--raw", "--greedy", "--no-echo", "--ignore-eos"], args].concat());
    text.strip_suffix('\n').unwrap().to_string()
}

#[test]
fn a_prompt_continues_a_frozen_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    fs::write(path("rules.txt"), RULES).unwrap();
    let ways: [&[&str]; 3] = [&[], &["--kv", "q8", "--deterministic"], &["--kv", "f32"]];
    for more in ways {
        let (rules, file) = (path("rules.txt"), path("p.kvp"));
        let freeze = ["prefix", "freeze", "--json", "--text", &rules, "--out", &file];
        let (report, _) = succeed(&[&freeze[..], more].concat());
        let report: Value = serde_json::from_str(&report).unwrap();
        let tokens = report["tokens"].as_u64().unwrap();
        assert_eq!(report["bytes"], fs::metadata(&file).unwrap().len());
        let prompt = format!("{RULES} is a part");
        let whole = text(&[&[prompt.as_str(), "-n", "20"], more].concat());
        for kind in ["contiguous", "cells", "paged"] {
            let run = [&["--prefix", &file, "-n", "20", "--kind", kind, " is a part"], more].concat();
            assert_eq!(text(&run), whole, "{kind} {more:?}");
        }
        // Without a prompt the prefix itself goes on.
        let run = ["run", "-q", "--raw", "--greedy", "--json", "-n", "3", "--prefix", &file];
        let (report, _) = succeed(&[&run[..], more].concat());
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["resumed_tokens"], tokens - 1, "{more:?}");
    }
}

#[test]
fn a_chat_begins_with_a_frozen_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (rules, file) = (path("rules.txt"), path("p.kvp"));
    fs::write(&rules, RULES).unwrap();
    let chat = |more: &[&str], lines: &str| -> Vec<Value> {
        let args = [&["chat", "-q", "--greedy", "--json", "-n", "12"], more].concat();
        let (lines, _) = succeed_with(&args, lines.as_bytes());
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    for more in [&[][..], &["--kv", "f32"], &["--kv", "q8", "--deterministic"]] {
        let report =
            json(&[&["prefix", "freeze", "--json", "--text", &rules, "--out", &file], more].concat());
        let tokens = report["tokens"].as_u64().unwrap();
        let whole = chat(more, &format!("{RULES} is a part\n and then\n"));
        let begun = chat(&[&["--prefix", &file], more].concat(), " is a part\n and then\n");
        assert_eq!((whole.len(), begun.len()), (2, 2));
        for (whole, begun) in whole.iter().zip(&begun) {
            assert_eq!(begun["text"], whole["text"], "{more:?}");
        }
        assert_eq!(begun[0]["reused_tokens"], tokens, "{more:?}");
        let (_, said) =
            succeed_with(&[&["chat", "--greedy", "-n", "3", "--prefix", &file], more].concat(), b"x\n");
        assert!(said.contains(&format!("began with {file}: {tokens} of {tokens} tokens")), "{said}");
    }
}

/// By the flag and by the configuration file; two servers at a time, and a `run`, use one file.
#[test]
fn a_server_begins_with_a_frozen_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (rules, file, config) = (path("rules.txt"), path("p.kvp"), path("s.toml"));
    let text = format!("{}{RULES}", "A vector owns its elements and drops them. ".repeat(6));
    fs::write(&rules, &text).unwrap();
    let report = json(&["prefix", "freeze", "--json", "--weights", "f32", "--text", &rules, "--out", &file]);
    let blocks = report["tokens"].as_u64().unwrap() / 16 * 16;
    assert!(blocks >= 32, "{report}");
    fs::write(&config, format!("[cache]\nprefix = \"{file}\"\n")).unwrap();
    let start = |more: &[&str]| {
        let args = ["--port", "0", "--weights", "f32", "--context", "1024"];
        Server::spawn(&mut kvist(), &[&args, more])
    };
    let complete = |server: &Server, prompt: &str, salt: Option<&str>| {
        let body = json!({"prompt": prompt, "max_tokens": 20, "temperature": 0, "cache_salt": salt, "kvist": {"explain": true}});
        let (status, answer) = server.send("POST", "/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let explained = &answer["kvist"]["prompts"][0];
        let [cached, frozen] =
            ["cached_tokens", "frozen_tokens"].map(|field| explained[field].as_u64().unwrap());
        (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached, frozen)
    };
    let servers = [start(&["--prefix", &file]), start(&["--config", &config])];
    for server in &servers {
        // The salted request shares nothing with the prefix, so it computes all.
        let prompt = format!("{text} is a part");
        let (expected, cached, frozen) = complete(server, &prompt, Some("alone"));
        assert_eq!((cached, frozen), (0, 0));
        assert_eq!(
            complete(server, &prompt, None),
            (expected, blocks, blocks),
            "the first one that begins with it"
        );
        // The second request has its own blocks too, and one with half of the prefix no more than that.
        let longer = format!(
            "{prompt} of the language, which checks at compile time that references are valid. {RULES}"
        );
        complete(server, &longer, None);
        let (_, cached, frozen) = complete(server, &longer, None);
        assert!(cached >= blocks + 16 && frozen == blocks, "{cached} cached, {frozen} of {blocks} frozen");
        let (_, cached, frozen) = complete(server, &text[..text.len() / 2], None);
        assert!(
            cached >= 16 && frozen == cached && frozen < blocks,
            "{cached} cached, {frozen} of {blocks} frozen"
        );
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (rules, file) = (path("rules.txt"), path("p.kvp"));
    fs::write(&rules, RULES).unwrap();
    let freeze = ["prefix", "freeze", "--text", &rules, "--out", &file];
    succeed(&freeze);
    let run = ["run", "--raw", "-n", "3", "--prefix", &file, "x"];
    refused(&[&run[..], &["--kv", "q8"]].concat(), 1, &["p.kvp", "--kv f16", "q8"]);
    refused(&[&run[..], &["--window", "32"]].concat(), 1, &["p.kvp", "--window"]);
    refused(&[&run[..], &["--context", "8"]].concat(), 1, &["--context"]);
    refused(&[&run[..], &["--resume", &file]].concat(), 2, &["--resume", "--prefix"]);
    refused(&["run", "--resume", &file, "x"], 1, &["p.kvp", "no session"]);
    refused(&["run", "--prefix", &rules, "x"], 1, &["rules.txt", "kvist prefix freeze"]);
    refused(&["run", "--prefix", &path("none"), "x"], 1, &["cannot read", "none"]);
    refused(&["prefix", "freeze", "--text", &path("none"), "--out", &file], 1, &["cannot read", "none"]);
    refused(&["prefix", "freeze", "--text", &rules, "--out", "/no/such/p.kvp"], 1, &["--out", "no folder"]);
    let record = path("r.jsonl");
    refused(&["serve", "--prefix", &file, "--record", &record], 2, &["--prefix", "--record"]);
    let keys = path("s.toml");
    fs::write(&keys, "[[keys]]\nname = \"a\"\nkey = \"0123456789abcdef\"\n").unwrap();
    refused(&["serve", "--config", &keys, "--prefix", &file], 1, &["--prefix", "[[keys]]"]);
    refused(&["serve", "--kv", "q8", "--prefix", &file], 1, &["p.kvp", "--kv f16"]);
    let (text, long) = (path("long.txt"), path("long.kvp"));
    fs::write(&text, RULES.repeat(8)).unwrap();
    json(&["prefix", "freeze", "--json", "--text", &text, "--out", &long]);
    let port = ["serve", "--port", "0"];
    let small = ["--context", "64", "--prefix", &long];
    refused(&[&port[..], &small].concat(), 1, &["the prefix has", "--context"]);
    refused(&[&port[..], &["--sessions-dir", &rules]].concat(), 1, &["rules.txt is not a directory"]);
    fs::write(&keys, format!("[cache]\nprefix = \"{file}\"\n")).unwrap();
    refused(&["serve", "--config", &keys, "--record", &record], 2, &["cache.prefix", "--record"]);
    refused(&["serve", "--config", &keys, "--keep", "recent=64"], 2, &["--prefix", "keep"]);
    refused(&["serve", "--config", &keys, "--kv", "q8"], 1, &["p.kvp", "--kv f16"]);
    fs::write(&keys, "[cache]\nprefix = \"none.kvp\"\n").unwrap();
    refused(&["serve", "--config", &keys], 1, &["cannot read", "none.kvp"]);
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 4;
    fs::write(&file, &bytes).unwrap();
    refused(&run, 1, &["p.kvp", "torn or has changed"]);
    fs::write(&rules, "").unwrap();
    refused(&freeze, 1, &["--text", "empty"]);
    assert_eq!(fs::read(&file).unwrap(), bytes, "a refused freeze leaves the file");
}
