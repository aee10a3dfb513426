//! `kvist chat` through the binary: turns, branches, commands, and how it ends.
use crate::program::*;
use serde_json::Value;
use std::io::Read;
use std::process::Stdio;

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
        "undone",
        "there is nothing to undo",
        "deleted third",
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
        fields(
            turn,
            "version branch user text finish prompt_tokens tokens kv_bytes reused_tokens decode_tokens_per_second",
        );
    }
    assert_eq!(number(&turns[0], "reused_tokens"), 0.0);
    assert!(number(&turns[1], "reused_tokens") >= number(&turns[0], "prompt_tokens"));
    assert!(answers[0].starts_with(turns[0]["text"].as_str().unwrap()));
}

/// The penalty looks at the text that is continued, not at text of other branches or text that was undone.
#[test]
fn what_was_undone_leaves_no_trace_in_the_sampler() {
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
    assert!(String::from_utf8_lossy(&out.stderr).contains("--kind cells, tree or paged"));
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

/// Regression: "The cache is full" said neither how full it was nor what would help.
#[test]
fn a_chat_without_room_says_what_makes_some() {
    let says = |args: &[&str], stdin: &str, status: i32, words: &[&str]| {
        refused_with(&[&["chat", "--greedy"], args].concat(), stdin.as_bytes(), status, words);
    };
    let long = "the borrow checker and the vector ".repeat(20);
    let too_long =
        ["the conversation with this turn has ", "the cache holds 32", "start again with --context "];
    says(&["--context", "32", "-n", "4"], &long, 1, &too_long);
    let full = ["is full (16 of 16 tokens)", "/undo removes", "/fork", "--context 128"];
    says(&["--context", "16", "-n", "100"], "Ownership is\n", 0, &full);
    let beside = "/fork a\nOwnership is\n/switch main\nthe vector and the borrow checker and the trait and the struct and \
                  the enum and the function and the module and the crate and the type and the value of the vector\n";
    let other = ["the cache holds 48 tokens, of which ", "are in use", "/drop deletes one (a)"];
    says(&["--context", "48", "-n", "36"], beside, 1, &other);
}
