//! Downloads from a mock Hub on loopback: complete, interrupted and rejected ones.
mod loopback;
use kvist_hub::{Error, Hub as Resolver, Resolved, Settings};
use loopback::*;
use std::path::{Path, PathBuf};

const REPO: &str = "org/name";
const FOLDER: &str = "models--org--name";

fn resolve(settings: Settings, name: &str) -> (Result<Resolved, Error>, Heard) {
    let mut heard = Heard::default();
    let resolved = Resolver::new(settings).resolve(Path::new(name), &mut heard);
    (resolved, heard)
}
fn path(settings: Settings, name: &str) -> PathBuf {
    let (resolved, heard) = resolve(settings, name);
    resolved.unwrap_or_else(|error| panic!("{name}: {error}; {:?}", heard.notes)).path
}
fn error(settings: Settings, name: &str) -> String {
    resolve(settings, name).0.expect_err(name).to_string()
}

/// All files below a folder except locks.
fn tree(folder: &Path) -> Vec<String> {
    fn walk(folder: &Path, root: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.path() {
                below if below.is_dir() => walk(&below, root, found),
                file => found.push(file.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/")),
            }
        }
    }
    let mut found = Vec::new();
    walk(folder, folder, &mut found);
    found.retain(|file| !file.starts_with(".locks"));
    found.sort();
    found
}

/// A repository of GGUF files.
fn gguf_hub() -> (Hub, tempfile::TempDir) {
    let hub = Hub::start();
    hub.small(REPO, "README.md", "hello");
    hub.large(REPO, "m-Q2_K.gguf", &bytes(1, 1000));
    hub.large(REPO, "m-Q4_K_M.gguf", &bytes(2, 700_000));
    hub.large(REPO, "big-F16-00001-of-00002.gguf", &bytes(3, 3000));
    hub.large(REPO, "big-F16-00002-of-00002.gguf", &bytes(4, 2000));
    (hub, tempfile::tempdir().unwrap())
}

#[test]
fn a_gguf_file_is_downloaded_once() {
    let (hub, cache) = gguf_hub();
    let (resolved, heard) = resolve(hub.settings(cache.path()), "hf:org/name");
    let file = resolved.unwrap().path;
    assert_eq!(file, cache.path().join(FOLDER).join("snapshots").join(COMMIT).join("m-Q4_K_M.gguf"));
    assert_eq!(std::fs::read(&file).unwrap(), bytes(2, 700_000));
    assert_eq!(
        (heard.begun, heard.at, heard.ended),
        (vec![("m-Q4_K_M.gguf".into(), 700_000, 0)], 700_000, 1)
    );
    // This is huggingface_hub's layout, so all its clients find the same file.
    let blob = format!("{FOLDER}/blobs/{}", sha256(&bytes(2, 700_000)));
    let snapshot = format!("{FOLDER}/snapshots/{COMMIT}/m-Q4_K_M.gguf");
    assert_eq!(tree(cache.path()), [blob.clone(), format!("{FOLDER}/refs/main"), snapshot]);
    assert_eq!(std::fs::read_to_string(cache.path().join(FOLDER).join("refs/main")).unwrap(), COMMIT);
    #[cfg(unix)]
    assert_eq!(
        std::fs::read_link(&file).unwrap(),
        Path::new("../..").join(blob.strip_prefix(&format!("{FOLDER}/")).unwrap())
    );

    // The second time, only the newest commit is requested; no file is downloaded.
    let read = hub.read().len();
    assert_eq!(path(hub.settings(cache.path()), "hf:org/name:q4_k_m"), file);
    assert_eq!(hub.read().len(), read);
    // Offline, the Hub is not asked at all.
    let asked = hub.asked().len();
    let offline = || Settings { offline: true, ..hub.settings(cache.path()) };
    for name in ["hf:org/name", "hf:org/name:Q4_K_M", "hf:org/name@main:m-Q4_K_M.gguf"] {
        assert_eq!(path(offline(), name), file, "{name}");
    }
    let refused = error(offline(), "hf:org/name:Q2_K");
    assert!(
        refused.contains("hf:org/name:Q2_K is not in the cache") && refused.contains("Q4_K_M"),
        "{refused}"
    );
    assert!(error(offline(), "hf:org/other").contains("nothing of this repository"));
    assert_eq!(hub.asked().len(), asked);
}

#[test]
fn an_interrupted_download_goes_on_where_it_stopped() {
    let (hub, cache) = gguf_hub();
    // The connection breaks twice and is retried.
    hub.with(|s| drop(s.cuts.insert("m-Q4_K_M.gguf".into(), vec![300_000, 100_000])));
    let file = path(hub.settings(cache.path()), "hf:org/name");
    assert_eq!(std::fs::read(&file).unwrap(), bytes(2, 700_000));
    let range = |from: usize| Some(format!("bytes={from}-"));
    let ranges: Vec<_> = hub.read().into_iter().map(|(_, range)| range).collect();
    assert_eq!(ranges, [None, range(300_000), range(400_000)]);

    // The network stays down: the partial download is kept, without a final name.
    let cache = tempfile::tempdir().unwrap();
    hub.with(|s| drop(s.cuts.insert("m-Q4_K_M.gguf".into(), [vec![300_000], vec![0; 20]].concat())));
    let (broken, heard) = resolve(hub.settings(cache.path()), "hf:org/name");
    let broken = broken.unwrap_err().to_string();
    assert!(broken.contains("broke off after 300000 of 700000 bytes"), "{broken}");
    assert_eq!(heard.ended, 1);
    let part = format!("{FOLDER}/blobs/{}.incomplete", sha256(&bytes(2, 700_000)));
    assert_eq!(tree(cache.path()), [part]);
    let offline = Settings { offline: true, ..hub.settings(cache.path()) };
    assert!(error(offline, "hf:org/name").contains("an incomplete download"));
    // The same call at a later time.
    let before = hub.read().len();
    hub.with(|s| s.cuts.clear());
    let (resolved, heard) = resolve(hub.settings(cache.path()), "hf:org/name");
    assert_eq!(std::fs::read(resolved.unwrap().path).unwrap(), bytes(2, 700_000));
    assert_eq!(hub.read()[before..], [("m-Q4_K_M.gguf".into(), range(300_000))]);
    assert_eq!(heard.begun, [("m-Q4_K_M.gguf".into(), 700_000, 300_000)]);
}

#[test]
fn a_server_without_ranges_sends_all_again() {
    let (hub, cache) = gguf_hub();
    hub.with(|s| {
        s.no_ranges = true;
        s.cuts.insert("m-Q4_K_M.gguf".into(), vec![300_000]);
    });
    let file = path(hub.settings(cache.path()), "hf:org/name");
    assert_eq!(std::fs::read(file).unwrap(), bytes(2, 700_000));
    assert_eq!(hub.read().len(), 2);
}

#[test]
fn what_is_damaged_is_not_kept() {
    let (hub, cache) = gguf_hub();
    hub.with(|s| s.damaged.push("m-Q4_K_M.gguf".into()));
    let refused = error(hub.settings(cache.path()), "hf:org/name");
    assert!(refused.contains("m-Q4_K_M.gguf is damaged: its hash is"), "{refused}");
    assert!(refused.contains(&sha256(&bytes(2, 700_000))), "{refused}");
    assert!(tree(cache.path()).is_empty());
    assert_eq!(hub.read().len(), 1, "damage is not fetched again and again");
    // Small text files are in git and are verified with git hashes.
    hub.small("org/folder", "config.json", "{}");
    hub.large("org/folder", "model.safetensors", &bytes(5, 100));
    hub.with(|s| s.damaged.push("config.json".into()));
    assert!(error(hub.settings(cache.path()), "hf:org/folder").contains("config.json is damaged"));
}

/// Another client may leave a partial file that has holes or belongs to another version.
#[test]
fn a_damaged_beginning_is_fetched_anew() {
    let (hub, cache) = gguf_hub();
    let blobs = cache.path().join(FOLDER).join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&bytes(2, 700_000))));
    for (len, notes) in [(500_000, 1), (700_000, 1), (900_000, 0)] {
        std::fs::write(&part, vec![0; len]).unwrap();
        let (resolved, heard) = resolve(hub.settings(cache.path()), "hf:org/name");
        let file = resolved.unwrap().path;
        assert_eq!(std::fs::read(&file).unwrap(), bytes(2, 700_000), "{len}");
        assert_eq!(heard.notes.len(), notes, "{len}: {:?}", heard.notes);
        std::fs::remove_file(blobs.join(sha256(&bytes(2, 700_000)))).unwrap();
        assert!(!part.exists());
    }
}

#[test]
fn a_full_disk_is_seen_before_anything_is_written() {
    let (hub, cache) = gguf_hub();
    let small = || Settings { free_bytes: |_| Some(699_999), ..hub.settings(cache.path()) };
    let refused = error(small(), "hf:org/name");
    assert!(refused.contains("has 683.6 KiB free; 683.6 KiB more are needed"), "{refused}");
    assert!(hub.read().is_empty() && tree(cache.path()).is_empty());
    // Bytes that are already on disk need no more space.
    let blobs = cache.path().join(FOLDER).join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&bytes(2, 700_000))));
    std::fs::write(part, &bytes(2, 700_000)[..10]).unwrap();
    path(small(), "hf:org/name");
    path(Settings { free_bytes: |_| Some(0), ..hub.settings(cache.path()) }, "hf:org/name");
}

#[test]
fn all_parts_of_a_gguf_come() {
    let (hub, cache) = gguf_hub();
    for name in ["hf:org/name:f16", "hf:org/name:big-F16-00002-of-00002.gguf"] {
        let first = path(hub.settings(cache.path()), name);
        assert!(first.ends_with("big-F16-00001-of-00002.gguf"), "{}", first.display());
        let second = first.with_file_name("big-F16-00002-of-00002.gguf");
        assert_eq!(
            (std::fs::read(first).unwrap(), std::fs::read(second).unwrap()),
            (bytes(3, 3000), bytes(4, 2000))
        );
    }
    // Offline, a model with a missing part is not found.
    let offline = Settings { offline: true, ..hub.settings(cache.path()) };
    path(offline.clone(), "hf:org/name:F16");
    let snapshot = cache.path().join(FOLDER).join("snapshots").join(COMMIT);
    std::fs::remove_file(snapshot.join("big-F16-00002-of-00002.gguf")).unwrap();
    assert!(error(offline, "hf:org/name:F16").contains("not in the cache"));
}

#[test]
fn a_safetensors_repository_comes_with_what_its_index_names() {
    let hub = Hub::start();
    let cache = tempfile::tempdir().unwrap();
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors",
        "c": "model-00001-of-00002.safetensors"}}"#;
    hub.small(REPO, "config.json", "{}");
    hub.small(REPO, "tokenizer_config.json", "{\"bos\": 1}");
    hub.large(REPO, "tokenizer.json", b"{\"large\": true}");
    hub.small(REPO, "model.safetensors.index.json", index);
    hub.large(REPO, "model-00001-of-00002.safetensors", &bytes(1, 5000));
    hub.large(REPO, "model-00002-of-00002.safetensors", &bytes(2, 4000));
    hub.large(REPO, "consolidated.safetensors", &bytes(3, 9000));
    hub.large(REPO, "pytorch_model.bin", &bytes(4, 9000));
    let (resolved, heard) = resolve(hub.settings(cache.path()), "hf:org/name");
    let Resolved { path: folder, title } = resolved.unwrap();
    assert_eq!(title.as_deref(), Some("name"));
    assert_eq!(
        tree(&folder),
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    assert_eq!(heard.begun.len(), 6);
    assert_eq!(std::fs::read(folder.join("model-00002-of-00002.safetensors")).unwrap(), bytes(2, 4000));
    let offline = Settings { offline: true, ..hub.settings(cache.path()) };
    assert_eq!(path(offline.clone(), "hf:org/name"), folder);
    std::fs::remove_file(folder.join("model-00002-of-00002.safetensors")).unwrap();
    assert!(error(offline, "hf:org/name").contains("not in the cache"));

    // Weights of a model that the engine rejects are not downloaded.
    let other = tempfile::tempdir().unwrap();
    let read = hub.read().len();
    let mut heard = Heard { refuses: Some("no such family".into()), ..Heard::default() };
    let refused = Resolver::new(hub.settings(other.path())).resolve(Path::new("hf:org/name"), &mut heard);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("no such family. Its weights were not downloaded"), "{refused}");
    assert!(hub.read()[read..].iter().all(|(file, _)| !file.ends_with(".safetensors")));

    // An index with bad file names creates no files outside the folder.
    for (shard, expected) in [("../../x", "leaves its folder"), ("gone.safetensors", "does not have")] {
        hub.small("org/liar", "config.json", "{}");
        let index = format!("{{\"weight_map\": {{\"a\": \"{shard}\"}}}}");
        hub.small("org/liar", "model.safetensors.index.json", &index);
        let refused = error(hub.settings(cache.path()), "hf:org/liar");
        assert!(refused.contains(expected), "{refused}");
    }
    hub.small("org/liar", "model.safetensors.index.json", "not json");
    assert!(error(hub.settings(cache.path()), "hf:org/liar").contains("not a safetensors index"));
}

#[test]
fn refusals_say_what_to_do() {
    let (hub, cache) = gguf_hub();
    let settings = || hub.settings(cache.path());
    let with_token = || Settings { token: Some("hf_secret".into()), ..settings() };
    let refuse = |part: &str, status: u16, code: &'static str| {
        hub.with(|s| s.refused = [(part.to_string(), (status, code))].into());
    };
    let has = |said: String, parts: &[&str]| {
        for part in parts {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("hf_secret"), "{said}");
    };
    refuse("/resolve/", 401, "GatedRepo");
    let page = format!("{}/org/name", hub.endpoint);
    has(
        error(settings(), "hf:org/name"),
        &["is gated", "no token is set", &page, "HF_TOKEN", "/settings/tokens"],
    );
    refuse("/resolve/", 403, "GatedRepo");
    has(error(with_token(), "hf:org/name"), &["is gated", "Access to this model is restricted", &page]);
    refuse("/api/", 401, "");
    has(error(with_token(), "hf:org/name"), &["does not accept the token", "HF_TOKEN"]);
    refuse("/api/", 500, "");
    has(error(settings(), "hf:org/name"), &["answered 500", "Access to this model"]);
    hub.with(|s| s.refused.clear());
    has(
        error(settings(), "hf:org/nothing"),
        &["has no repository org/nothing", "or it is private", "set HF_TOKEN"],
    );
    has(error(with_token(), "hf:org/nothing"), &["that the token may read it"]);
    has(error(settings(), "hf:org/name@v9"), &["org/name has no revision v9"]);
    has(
        error(settings(), "hf:org/name:Q4_K_S"),
        &["has no quantisation Q4_K_S; there are Q4_K_M, ", "F16", "Q2_K"],
    );
    has(error(settings(), "hf:org/name:m-Q2.gguf"), &["has no file m-Q2.gguf; there are m-Q2_K.gguf, "]);
    refuse("Q2_K", 404, "EntryNotFound");
    has(error(settings(), "hf:org/name:Q2_K"), &["although its list of files names it"]);
    // None of these errors left complete files.
    let written = tree(cache.path());
    assert!(written.is_empty() || written.iter().all(|f| f.ends_with(".incomplete")), "{written:?}");
}

#[test]
fn a_hub_that_is_away_is_no_reason_not_to_run_what_is_here() {
    let (hub, cache) = gguf_hub();
    let file = path(hub.settings(cache.path()), "hf:org/name");
    // A port that no other test gets.
    let away = || Settings { endpoint: "http://127.0.0.1:1".into(), ..hub.settings(cache.path()) };
    let (resolved, heard) = resolve(away(), "hf:org/name");
    assert_eq!(resolved.unwrap().path, file);
    assert!(
        heard.notes[0].contains("cannot reach") && heard.notes[0].contains("--offline"),
        "{:?}",
        heard.notes
    );
    let refused = error(away(), "hf:org/name:Q2_K");
    assert!(refused.contains("cannot reach") && refused.contains("kvist models"), "{refused}");
    // 5xx counts as unreachable, 404 does not.
    hub.with(|s| s.refused = [("/api/".to_string(), (503, ""))].into());
    assert_eq!(path(hub.settings(cache.path()), "hf:org/name"), file);
    hub.with(|s| s.refused = [("/api/".to_string(), (404, "RepoNotFound"))].into());
    assert!(error(hub.settings(cache.path()), "hf:org/name").contains("has no repository"));
    // A server that responds but is not a Hub.
    let other =
        Settings { endpoint: format!("{}/org/name/resolve/{COMMIT}/README.md?", hub.endpoint), ..away() };
    assert!(error(other, "hf:org/name:Q2_K").contains("is HF_ENDPOINT a Hub?"));
}

/// The token is only for the Hub. The storage host is a different host, reached through a signed URL.
#[test]
fn a_token_goes_to_the_hub_alone() {
    let (hub, cache) = gguf_hub();
    path(Settings { token: Some("hf_secret".into()), ..hub.settings(cache.path()) }, "hf:org/name");
    let asked = hub.asked();
    assert!(asked.len() >= 3);
    for asked in asked {
        let expected = (!asked.store).then(|| "Bearer hf_secret".to_string());
        assert_eq!(asked.token, expected, "{asked:?}");
    }
}

/// Mirrors may omit sizes and hashes in their listings; then a HEAD request gets them.
#[test]
fn a_mirror_that_lists_names_alone_is_asked_for_the_rest() {
    let (hub, cache) = gguf_hub();
    hub.with(|s| s.silent = true);
    let file = path(hub.settings(cache.path()), "hf:org/name");
    assert_eq!(std::fs::read(file).unwrap(), bytes(2, 700_000));
    assert!(hub.asked().iter().any(|asked| asked.method == "HEAD"));
    let blob = cache.path().join(FOLDER).join("blobs").join(sha256(&bytes(2, 700_000)));
    assert!(blob.is_file());
    hub.small("org/folder", "config.json", "{}");
    hub.large("org/folder", "model.safetensors", &bytes(5, 100));
    assert_eq!(
        tree(&path(hub.settings(cache.path()), "hf:org/folder")),
        ["config.json", "model.safetensors"]
    );
}

#[test]
fn two_programs_fetch_a_file_once() {
    let (hub, cache) = gguf_hub();
    let settings = [(); 4].map(|()| hub.settings(cache.path()));
    let fetching = settings.map(|settings| std::thread::spawn(move || path(settings, "hf:org/name")));
    for file in fetching {
        assert_eq!(std::fs::read(file.join().unwrap()).unwrap(), bytes(2, 700_000));
    }
    assert_eq!(hub.read().len(), 1);
}
