//! What is particular at a terminal: a model's text cannot drive it, and an answer is stopped while the chat goes on.
#![cfg(target_os = "linux")]
mod program;
use nix::pty::{Winsize, openpty};
use program::*;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Nothing is judged by it: it ends a test that would wait for ever.
const PATIENCE: Duration = Duration::from_secs(600);

/// What comes from a reader, which is read to its end by a thread of its own.
#[derive(Clone, Default)]
struct Heard(Arc<(Mutex<Vec<u8>>, Condvar)>);

impl Heard {
    fn from(mut reader: impl Read + Send + 'static) -> Heard {
        let heard = Heard::default();
        let said = heard.clone();
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            // A terminal whose other end is closed is an error.
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

/// stdout of a program for which it is a terminal.
fn shown(args: &[&str], stdin: &[u8]) -> String {
    let size = Winsize { ws_row: 24, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(Some(&size), None).unwrap();
    let mut command = kvist();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::from(pty.slave)).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(command); // it holds the terminal's other end open
    child.stdin.take().unwrap().write_all(stdin).unwrap();
    let (mut master, mut said, mut some) = (File::from(pty.master), Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = master.read(&mut some) {
        said.extend(&some[..n]);
    }
    assert!(child.wait().unwrap().success(), "{args:?}");
    String::from_utf8(said).unwrap()
}

/// A model could clear the screen, or have the terminal type something.
#[test]
fn a_models_text_does_not_drive_the_terminal() {
    let folder = escaping_model();
    let model = ["-q", "--greedy", "-n", "8", "--model", folder.path().to_str().unwrap()];
    for (args, stdin) in [(vec!["run", "x"], &b""[..]), (vec!["chat"], b"x\n")] {
        let args = [&args[..], &model].concat();
        // In a pipe it is what the model wrote.
        let (piped, _) = succeed_with(&args, stdin);
        assert!(piped.contains("\x1b["), "{piped:?}");
        let expected = piped.replace('\x1b', "^[").replace('\n', "\r\n");
        assert_eq!(shown(&args, stdin), expected, "{args:?}");
    }
}

/// The answer has no end of its own, so it is stopped in its middle however fast the machine is.
#[test]
fn an_answer_is_stopped_and_the_chat_goes_on() {
    let folder = escaping_model();
    let pty = openpty(None, None).unwrap();
    let mut command = kvist();
    command.args(["chat", "--greedy", "-n", "4294967295", "--kind", "ring", "--window", "16", "--model"]);
    // There lines are read as they are, without an editor, which would look for the terminal of this test.
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
        // An answer ends with a line break, and has none in it.
        let begun = |said: &str| said.split('\n').nth(turn - 1).is_some_and(|answer| !answer.is_empty());
        answers.wait("answer", begun);
        let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        terminal.wait("end of the turn", |said| said.matches(" written at ").count() == turn);
    }
    terminal.wait("prompt", |said| said.matches("main> ").count() == 3);
    keys.write_all(b"/quit\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
