//! Behaviour at a terminal: a model's text cannot control it, and an answer can be stopped while the chat continues.
use crate::program::*;
use nix::pty::{Winsize, openpty};
use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Not a criterion: it only ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(600);

/// The output of a reader, which a thread reads to its end.
#[derive(Clone, Default)]
struct Heard(Arc<(Mutex<Vec<u8>>, Condvar)>);

impl Heard {
    fn from(mut reader: impl Read + Send + 'static) -> Heard {
        let heard = Heard::default();
        let said = heard.clone();
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            // Reading fails once the other end of the terminal is closed.
            while let Ok(n @ 1..) = reader.read(&mut some) {
                said.0.0.lock().unwrap().extend(&some[..n]);
                said.0.1.notify_all();
            }
        });
        heard
    }

    fn wait(&self, what: &str, enough: impl Fn(&str) -> bool) {
        let (said, more) = &*self.0;
        let said = said.lock().unwrap();
        let (said, waited) =
            more.wait_timeout_while(said, PATIENCE, |said| !enough(&String::from_utf8_lossy(said))).unwrap();
        assert!(!waited.timed_out(), "no {what} in {}", String::from_utf8_lossy(&said));
    }
}

/// What a program writes to a terminal, on stdout or stderr.
fn told(args: &[&str], stdin: &[u8], stderr: bool) -> (i32, String) {
    let size = Winsize { ws_row: 24, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(Some(&size), None).unwrap();
    let mut command = kvist();
    command.args(args).stdin(Stdio::piped());
    match stderr {
        true => command.stdout(Stdio::null()).stderr(Stdio::from(pty.slave)),
        false => command.stdout(Stdio::from(pty.slave)).stderr(Stdio::null()),
    };
    let mut child = command.spawn().unwrap();
    drop(command); // it keeps the terminal's other end open
    // Writing fails if the program has ended already.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    let (mut master, mut said, mut some) = (File::from(pty.master), Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = master.read(&mut some) {
        said.extend(&some[..n]);
    }
    (child.wait().unwrap().code().unwrap(), String::from_utf8(said).unwrap())
}

fn shown(args: &[&str], stdin: &[u8]) -> String {
    let (status, said) = told(args, stdin, false);
    assert_eq!(status, 0, "{args:?}");
    said
}

/// A GGUF file with one value, the name of an unknown architecture.
fn gguf_of_a_family(family: &str) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut bytes = [b"GGUF".to_vec(), 3_u32.to_le_bytes().to_vec(), [0; 8].to_vec()].concat();
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(text("general.architecture"));
    bytes.extend(8_u32.to_le_bytes());
    bytes.extend(text(family));
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

/// Regression: strings of a file were written to the terminal unchanged: one set its title, and could have done more.
#[test]
fn what_is_said_of_a_file_does_not_drive_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, gguf_of_a_family("\x1b]0;title\x07\u{9b}2J")).unwrap();
    let path = path.to_str().unwrap();
    for args in [vec!["run", "x", "--model", path], vec!["chat", "--model", path], vec!["plan", path]] {
        let piped = run(&args, b"");
        let piped = String::from_utf8(piped.stderr).unwrap();
        assert!(piped.contains("\x1b]0;title"), "{args:?}: {piped:?}");
        let (status, said) = told(&args, b"", true);
        assert_eq!(status, 1, "{args:?}: {said}");
        assert!(said.contains("^[]0;title^G<U+009B>2J") && !said.contains(['\x1b', '\u{9b}']), "{said:?}");
    }
}

/// Regression: a model could clear the screen, or have the terminal type something.
#[test]
fn a_models_text_does_not_drive_the_terminal() {
    let folder = escaping_model();
    let model = ["-q", "--greedy", "-n", "8", "--model", folder.path().to_str().unwrap()];
    for (args, stdin) in [(vec!["run", "x"], &b""[..]), (vec!["chat"], b"x\n")] {
        let args = [&args[..], &model].concat();
        // In a pipe the text is unchanged.
        let (piped, _) = succeed_with(&args, stdin);
        assert!(piped.contains("\x1b["), "{piped:?}");
        let expected = piped.replace('\x1b', "^[").replace('\n', "\r\n");
        assert_eq!(shown(&args, stdin), expected, "{args:?}");
    }
}

/// The answer never ends by itself, so it is stopped in the middle however fast the machine is.
#[test]
fn an_answer_is_stopped_and_the_chat_goes_on() {
    let folder = escaping_model();
    let pty = openpty(None, None).unwrap();
    let mut command = kvist();
    command.args(["chat", "--greedy", "-n", "4294967295", "--kind", "ring", "--window", "16", "--model"]);
    // With `dumb` lines are read without an editor, which would look for the terminal of this test.
    command.arg(folder.path()).env("TERM", "dumb").stdin(Stdio::from(pty.slave.try_clone().unwrap()));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::from(pty.slave)).spawn().unwrap();
    drop(command);
    let mut keys = File::from(pty.master.try_clone().unwrap());
    let (terminal, answers) =
        (Heard::from(File::from(pty.master)), Heard::from(child.stdout.take().unwrap()));
    for turn in 1..=2 {
        let prompts = |said: &str| said.matches("main> ").count() == turn;
        terminal.wait("prompt", prompts);
        keys.write_all(b"x\n").unwrap();
        // An answer ends with a line break, and contains none.
        let begun = |said: &str| said.split('\n').nth(turn - 1).is_some_and(|answer| !answer.is_empty());
        answers.wait("answer", begun);
        let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        terminal.wait("end of the turn", |said| said.matches(" written at ").count() == turn);
    }
    terminal.wait("prompt", |said| said.matches("main> ").count() == 3);
    keys.write_all(b"/help\n").unwrap();
    terminal.wait("prompt", |said| said.matches("main> ").count() == 4);
    // Regression: /help offered line continuation and history on terminals that have neither.
    let said = String::from_utf8(terminal.0.0.lock().unwrap().clone()).unwrap();
    assert!(said.contains("send /TEXT") && !said.contains("continues on the next line"), "{said}");
    keys.write_all(b"/quit\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Regression: a signal at the prompt ended the chat, and the conversation was lost.
#[test]
fn a_signal_at_the_prompt_saves_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.kvs");
    for signal in ["-TERM", "-INT"] {
        let pty = openpty(None, None).unwrap();
        let mut command = kvist();
        command.args(["chat", "--greedy", "-n", "8", "--save-session"]).arg(&file).env("TERM", "dumb");
        command.stdin(Stdio::from(pty.slave.try_clone().unwrap()));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::from(pty.slave)).spawn().unwrap();
        drop(command);
        let mut keys = File::from(pty.master.try_clone().unwrap());
        let terminal = Heard::from(File::from(pty.master));
        terminal.wait("prompt", |said| said.matches("main> ").count() == 1);
        keys.write_all(b"Hello\n").unwrap();
        // The signal comes while a line is waited for, or just before: both end the chat.
        terminal.wait("prompt", |said| said.matches("main> ").count() == 2);
        let kill = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130));
        succeed_with(&["chat", "-q", "-n", "2", "--resume", file.to_str().unwrap()], b"And then\n");
        std::fs::remove_file(&file).unwrap();
    }
}
