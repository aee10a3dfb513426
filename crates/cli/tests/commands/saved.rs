//! `--save-session` and `--resume`.
use crate::program::*;
use serde_json::Value;
use std::fs;

/// The text that the model writes.
fn text(args: &[&str]) -> String {
    let (text, _) =
        succeed(&[&["run", "-q", "--raw", "--greedy", "--no-echo", "--ignore-eos"], args].concat());
    text.strip_suffix('\n').unwrap().to_string()
}

#[test]
fn a_text_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.kvs");
    let file = file.to_str().unwrap();
    let ways: [&[&str]; 3] = [&[], &["--kv", "q8", "--deterministic"], &["--kind", "paged", "--kv", "f32"]];
    for more in ways {
        let whole = text(&[&["The borrow checker", "-n", "40"], more].concat());
        let first = text(&[&["The borrow checker", "-n", "17", "--save-session", file], more].concat());
        let second = text(&[&["--resume", file, "-n", "23", "--save-session", file], more].concat());
        assert_eq!(first + &second, whole, "{more:?}");
        // What was saved again is the whole text. A prompt is added to it.
        let third = text(&[&["--resume", file, "-n", "9", "\n\nThe"], more].concat());
        let prompt = format!("The borrow checker{whole}\n\nThe");
        assert_eq!(third, text(&[&[prompt.as_str(), "-n", "9"], more].concat()), "{more:?}");
    }
}

#[test]
fn what_cannot_be_resumed_is_refused_before_the_model_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.kvs");
    let path = file.to_str().unwrap();
    text(&["The borrow checker", "-n", "5", "--save-session", path]);
    let run = ["run", "--raw", "-n", "5", "--resume", path];
    refused(&[&run[..], &["--kv", "q8"]].concat(), 1, &["s.kvs", "--kv f16", "q8"]);
    refused(&[&run[..], &["--window", "32"]].concat(), 1, &["s.kvs", "--window"]);
    refused(&[&run[..], &["--weights", "f32"]].concat(), 1, &["s.kvs", "--weights as-stored"]);
    refused(&["run", "x", "--save-session", "/no/such/folder/s.kvs"], 1, &["--save-session", "no folder"]);
    let none = folder.path().join("none");
    refused(&["run", "--resume", none.to_str().unwrap()], 1, &["cannot read", "none"]);
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 4;
    fs::write(&file, &bytes).unwrap();
    refused(&run, 1, &["s.kvs", "torn or has changed"]);
    fs::write(&file, &bytes[..last / 2]).unwrap();
    refused(&run, 1, &["s.kvs"]);
}

/// Regressions: nothing generated could not be saved, nor a full cache; a pipe was not read.
#[test]
fn prompts_alone_full_caches_and_pipes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.kvs");
    let file = file.to_str().unwrap();
    let whole = text(&["The borrow checker", "-n", "12"]);
    text(&["The borrow checker", "-n", "0", "--save-session", file]);
    assert_eq!(text(&["--resume", file, "-n", "12"]), whole);
    text(&["The borrow", "-n", "0", "--save-session", file]);
    let run = ["run", "-q", "--raw", "--greedy", "--no-echo", "--ignore-eos", "-n", "12", "--resume", file];
    assert_eq!(succeed_with(&run, b" checker").0, whole.clone() + "\n");
    let all = text(&["The borrow checker", "-n", "20"]);
    let first = text(&["The borrow checker", "-n", "20", "--context", "12", "--save-session", file]);
    assert!(first.len() < all.len() && all.starts_with(&first), "the cache was full: {first}");
    assert!(all.starts_with(&(first + &text(&["--resume", file, "-n", "5", "--context", "64"]))));
    // The order of channels in t4-o is the same in every process on this machine.
    let outliers = ["The borrow checker", "--kv", "t4-o", "--deterministic"];
    let whole = text(&[&outliers[..], &["-n", "12"]].concat());
    let first = text(&[&outliers[..], &["-n", "5", "--save-session", file]].concat());
    assert_eq!(first + &text(&["--resume", file, "-n", "7", "--kv", "t4-o", "--deterministic"]), whole);
    refused(&["run", "--raw", "--kv", "t4", "-n", "3", "--resume", file, "x"], 1, &["--kv t4-o"]);
}

#[test]
fn a_conversation_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.kvs");
    let path = file.to_str().unwrap();
    let chat = |more: &[&str], lines: &str| -> Vec<Value> {
        let args = [&["chat", "-q", "--greedy", "--json", "-n", "12"], more].concat();
        let (lines, _) = succeed_with(&args, lines.as_bytes());
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let whole = chat(&[], "Hello\nAnd then\n");
    chat(&["--save-session", path], "Hello\n");
    let resumed = chat(&["--resume", path], "And then\n");
    assert_eq!(resumed[0]["text"], whole[1]["text"]);
    assert_eq!(resumed[0]["prompt_tokens"], whole[1]["prompt_tokens"], "nothing before it is computed again");
}

/// A reader that had seen enough left no session, no message and status 0.
#[test]
fn a_text_is_saved_though_stdout_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.kvs");
    let path = file.to_str().unwrap();
    let (reads, writes) = std::io::pipe().unwrap();
    drop(reads);
    let save = |path: &str, stdout: std::io::PipeWriter| {
        let args =
            ["run", "-q", "--raw", "--greedy", "-n", "20", "--save-session", path, "The borrow checker"];
        kvist().args(args).stdout(stdout).stderr(std::process::Stdio::piped()).output().unwrap()
    };
    let out = save(path, writes.try_clone().unwrap());
    assert_eq!((out.status.code(), out.stderr.len()), (Some(0), 0), "{out:?}");
    assert!(!text(&["--resume", path, "-n", "5"]).is_empty());
    // A session that cannot be saved is a failure, also if stdout is closed.
    let long = folder.path().join("x".repeat(255)); // the file that is renamed to it would need a longer name
    let out = save(long.to_str().unwrap(), writes);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("not saved"), "{out:?}");
}

/// What was undone is in no file, and what was said before it is reused.
#[test]
fn what_was_undone_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let chat = |more: &[&str], lines: &str| -> Vec<Value> {
        let args = [&["chat", "-q", "--greedy", "--json", "-n", "12"], more].concat();
        let (lines, _) = succeed_with(&args, lines.as_bytes());
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let n_tokens = |file: &str| {
        let bytes = fs::read(file).unwrap();
        let header = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
        let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        header["tokens"]["shape"][0].as_u64().unwrap()
    };
    let (before, undone) = (path("before.kvs"), path("undone.kvs"));
    let whole = chat(&["--save-session", &before], "Hello\n");
    chat(&["--save-session", &undone], "Hello\nA secret that nothing repeats\n/undo\n");
    let n = n_tokens(&undone);
    assert!(n > 0 && n <= n_tokens(&before), "{n} tokens");
    let next = |file: &str| chat(&["--resume", file], "And then\n")[0]["text"].clone();
    assert_eq!(next(&undone), next(&before));
    assert!(whole[0]["text"].is_string());
    // Nothing is left.
    let args = ["chat", "-q", "--greedy", "-n", "3", "--save-session", &path("none.kvs")];
    let out = run(&args, b"Hello\n/undo\n");
    assert!(String::from_utf8_lossy(&out.stderr).contains("nothing was said"), "{out:?}");
    assert!(!fs::exists(path("none.kvs")).unwrap());
}
