//! Running the real program.
#![allow(dead_code)] // each test binary uses its part
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn kvist() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvist"));
    command.env_remove("KVIST_LOG").env_remove("KVIST_ISA").stdin(Stdio::null());
    command
}

/// Run to the end with `stdin` piped in.
pub fn run(args: &[&str], stdin: &[u8]) -> Output {
    let mut command = kvist();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A program that does not read it may be gone already.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child.wait_with_output().unwrap()
}

/// stdout and stderr of a run that succeeds.
pub fn succeed(args: &[&str]) -> (String, String) {
    succeed_with(args, b"")
}
pub fn succeed_with(args: &[&str], stdin: &[u8]) -> (String, String) {
    let out = run(args, stdin);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(out.stdout), text(out.stderr));
    assert_eq!(out.status.code(), Some(0), "{args:?}: {stderr}");
    (stdout, stderr)
}

/// The one JSON document on stdout.
pub fn json(args: &[&str]) -> serde_json::Value {
    let (stdout, _) = succeed(args);
    serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {stdout}"))
}

/// The engine's fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures")
}
