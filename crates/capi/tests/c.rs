//! The C examples and the tests in C, compiled by `cc` against the static library and run.
#![cfg(target_os = "linux")]
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo puts the libraries: beside the folder of the test programs.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("libkvist.a")).find(|path| path.exists());
    found.expect("cargo builds libkvist.a before the tests")
}

/// An empty folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    folder
}

/// Compiles a C file and runs it. Returns what it wrote.
fn run(source: &str, arguments: &[&str]) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The whole path: two sources may have the same name, and run at the same time.
    let name = source.replace(['/', '.'], "-");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let compiled = Command::new(&compiler)
        .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I"])
        .arg(folder.join("include"))
        .arg(folder.join(source))
        .arg(library())
        .args(["-lm", "-lpthread", "-ldl", "-o"])
        .arg(&program)
        .args(std::env::var("KVIST_CFLAGS").unwrap_or_default().split_whitespace())
        .status()
        .unwrap_or_else(|why| panic!("{compiler}: {why}: a C compiler is needed"));
    assert!(compiled.success(), "{source} does not compile");
    let ran = Command::new(&program).args(arguments).output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{source}: {}\n{text}\n{errors}", ran.status);
    text.into_owned()
}

#[test]
fn text_from_the_embedded_model() {
    let text = run("examples/generate.c", &[]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("0: The borrow checker") && lines[0].len() > 40, "{text}");
    assert!(text.contains("\n1: The borrow checker of the compiler"), "{text}");
    assert!(text.contains("sequence 0 has 2 tokens now"), "{text}");
}

#[test]
fn bookkeeping_without_bytes() {
    let text = run("examples/bookkeeping.c", &[]);
    let expected = "a prompt of three tokens\n  sequence 0 reads 100 101 102\none token of each branch\n  sequence 0 reads 100 101 102 200\n  sequence 1 reads 100 101 102 300\n";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn attention_over_rows_of_c() {
    run("examples/attention.c", &[]);
}

#[test]
fn sessions_and_prefixes_in_files() {
    let folder = folder("files-example");
    let [saved, frozen] = ["s.kvs", "p.kvp"].map(|name| folder.join(name).display().to_string());
    let text = run("examples/files.c", &[&saved, &frozen]);
    let of = |what: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(what));
        line.unwrap_or_else(|| panic!("no line `{what}`:\n{text}")).to_owned()
    };
    assert!(of("saved:").len() > 12 && of("computed:").len() > 12, "{text}");
    assert_eq!((of("saved:"), of("computed:")), (of("resumed:"), of("begun:")), "the same text");
    assert!(text.contains(" tokens of the prefix take 0 bytes of this session"), "{text}");
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 2, "no partial file is left");
}

#[test]
fn a_prompt_comes_back_from_a_tier() {
    let text = run("examples/tiers.c", &[]);
    let of = |what: &str| text.lines().filter(|line| line.starts_with(what)).collect::<Vec<_>>();
    let (first, again) = (of("first"), of("again"));
    let generated = |lines: &[&str]| lines[0].split_once(':').unwrap().1.to_owned();
    assert!(generated(&first).len() > 12 && generated(&first) == generated(&again), "{text}");
    assert!(first[1].ends_with(" tokens: 0 from the cache, 0 from the tier"), "{text}");
    let numbers = again[1].split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u32>().ok());
    let [tokens, cached, loaded] = numbers.collect::<Vec<_>>()[..] else { panic!("{text}") };
    // All whole blocks, and a token is always computed.
    assert!(tokens > 128 && (cached, loaded) == (0, (tokens - 1) / 16 * 16), "{text}");
}

#[test]
fn batches_and_their_jobs() {
    assert!(run("tests/c/batch.c", &[&folder("batch").display().to_string()]).ends_with("ok\n"));
}

#[test]
fn batches_and_their_tiers() {
    let folder = folder("batch-tiers").display().to_string();
    let built = [("disk", cfg!(feature = "disk-tier")), ("store", cfg!(feature = "shared-tier"))];
    let built = built.into_iter().filter_map(|(name, is_built)| is_built.then_some(name));
    let arguments: Vec<&str> = [&*folder].into_iter().chain(built).collect();
    assert!(run("tests/c/batch_tiers.c", &arguments).ends_with("ok\n"));
}

#[test]
fn drafts_change_no_text() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model");
    let folder = folder("drafts");
    let [draft, head, other] =
        ["embedded/tiny-rust-draft.gguf", "embedded/tiny-rust-eagle3", "tests/fixtures/parity/llama-gqa"]
            .map(|path| models.join(path).display().to_string());
    assert!(
        run("tests/c/drafts.c", &[&folder.display().to_string(), &draft, &head, &other]).ends_with("ok\n")
    );
}

/// Where a GPU is to be tested, lavapipe too: the library has wgpu in the tests of the whole workspace.
#[test]
fn a_gpu_gives_the_texts_of_the_cpu() {
    if std::env::var("KVIST_REQUIRE_WGPU").is_ok_and(|required| required == "1") {
        let folder = folder("gpu").display().to_string();
        assert!(run("tests/c/gpu.c", &["wgpu", &folder]).ends_with("ok\n"));
    } else {
        eprintln!("SKIPPED, nothing is tested on a GPU: set KVIST_REQUIRE_WGPU=1 to test there");
    }
}

#[test]
fn wrong_uses_are_refused() {
    run("tests/c/refusals.c", &[]);
}

#[test]
fn wrong_files_are_refused() {
    run("tests/c/files.c", &[&folder("files").display().to_string()]);
}

#[test]
fn sessions_leave_nothing_behind() {
    let n = std::env::var("KVIST_SESSIONS").unwrap_or_else(|_| "10000".into());
    run("tests/c/leaks.c", &[&n]);
}

/// The header is also one for C++.
#[test]
fn the_header_compiles_as_cpp() {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/kvist.h");
    let checked = Command::new(&compiler)
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"])
        .arg(header)
        .status()
        .unwrap_or_else(|why| panic!("{compiler}: {why}: a C++ compiler is needed"));
    assert!(checked.success());
}
