//! What is particular at a terminal: a model's text cannot drive it.
#![cfg(target_os = "linux")]
mod program;
use nix::pty::{Winsize, openpty};
use program::*;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;

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
