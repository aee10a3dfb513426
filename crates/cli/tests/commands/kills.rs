//! `kvist run --save-session`, killed while it writes: the file has the old text or the new one, whole.
use crate::program::*;
use kvist_engine::saved::SavedSession;
use kvist_testing::SplitMix64;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Long enough that writing takes a while.
fn prompt(i: usize) -> String {
    let sentence = "The capacity of a vector is the amount of space allocated for any future elements. ";
    format!("{i}. {}", sentence.repeat(12 + 6 * i))
}

fn run_args(file: &str) -> [&str; 12] {
    [
        "run",
        "-q",
        "--raw",
        "--greedy",
        "--no-echo",
        "--ignore-eos",
        "--kv",
        "f32",
        "-n",
        "2",
        "--save-session",
        file,
    ]
}

fn partials(dir: &Path) -> Vec<PathBuf> {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_string_lossy().ends_with(".partial")).collect()
}

/// `KVIST_KILLS=1000` kills more often.
#[test]
fn a_kill_in_mid_save_leaves_the_old_or_the_new_session() {
    let kills =
        std::env::var("KVIST_KILLS").map_or(4, |kills| kills.parse().expect("KVIST_KILLS is a number"));
    let (dir, mut random) = (tempfile::tempdir().unwrap(), SplitMix64(7));
    let path = dir.path().join("s.kvs");
    let file = path.to_str().unwrap();
    let texts = [0, 1].map(|i| {
        succeed(&[&run_args(file)[..], &[&prompt(i)]].concat());
        SavedSession::open(&path).unwrap().tokens().to_vec()
    });
    assert_ne!(texts[0], texts[1]);
    let (mut torn, mut new, mut ended) = (0, 0, 0);
    let mut last = texts[1].clone();
    for kill in 0..kills {
        let next = usize::from(last == texts[0]);
        let mut child = kvist()
            .args(run_args(file))
            .arg(prompt(next))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        loop {
            if child.try_wait().unwrap().is_some() {
                ended += 1;
                break;
            }
            if !partials(dir.path()).is_empty() {
                // Any moment is right.
                std::thread::sleep(Duration::from_micros(random.below(24_000).into()));
                child.kill().unwrap();
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        child.wait().unwrap();
        let saved = SavedSession::open(&path).unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        let found = saved.tokens().to_vec();
        assert!(texts.contains(&found), "kill {kill}: {} tokens", found.len());
        let left = partials(dir.path());
        torn += left.len();
        new += usize::from(left.is_empty());
        assert!(left.is_empty() || found == last, "kill {kill}: an unfinished file is not the session");
        left.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        last = found;
    }
    println!(
        "{kills} kills: {torn} before the new session was in place, {new} after that ({ended} after the end)"
    );
    succeed(&["run", "-q", "--raw", "--greedy", "--kv", "f32", "-n", "3", "--resume", file]);
}
