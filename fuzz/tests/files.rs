//! The fuzzer's bytes as files of sessions and of frozen prefixes: what was changed is refused. Files whose hashes were made
//! to fit may be used or refused, but nothing panics: a hash says that bytes are as they were written, not what wrote them.
mod changed;

use changed::changed;
use kvist_engine::devices;
use kvist_engine::frozen::{FrozenPrefix, FrozenText, begin_with, freeze};
use kvist_engine::kvist_cache::SeqId;
use kvist_engine::kvist_device::{MemoryBudget, Storage};
use kvist_engine::kvist_model::{LoadOptions, Model, ModelFile, Opened, hash};
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::{LateOrigin, Origin, SavedMessage, SavedSession, SavedText, resume, save};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// Iterations of an ordinary test run; a fuzzing engine sets its own number.
const ITERATIONS: usize = 1_000;
/// Modified copies of a file, with their hashes and without.
const CHANGED: u64 = 400;
const TOKENS: [u32; 20] = [5; 20];

struct Rig {
    model: Arc<Model>,
    config: CacheConfig,
    origin: Origin,
    session: Vec<u8>,
    prefix: Vec<u8>,
}

static RIG: LazyLock<Rig> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // A model with two kinds of layers: rows of those with a window are copied, the others are mapped.
    let file = ModelFile::Path(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/model/tests/fixtures/parity/gemma3"),
    );
    let opened = Opened::open(&file, true).expect("a fixture of the engine");
    let late = LateOrigin::new(&opened, LoadOptions::default().format, None).expect("it has all tensors");
    let compute = devices::Compute::default();
    let budget = MemoryBudget::unlimited();
    let model = devices::load(opened, &compute, &LoadOptions::default(), &budget, &mut |_, _| {});
    let model = Arc::new(model.expect("a small model"));
    // K are packed, so that the files have f16 rows of the newest tokens.
    let config = CacheConfig {
        kind: "paged".into(),
        k: Storage::Q8,
        max_step_tokens: 8,
        max_rows: 1,
        ..CacheConfig::new(64)
    };
    let origin = late.of(&model, &config).expect("it has all tensors");
    let mut of = ModelSession::new(&model, &devices::all(), &config).expect("a small cache");
    of.prefill(SeqId::ONLY, &TOKENS, &mut |_| true).expect("room");
    let messages = [SavedMessage { role: "user".into(), content: "five".into() }];
    let (saved, frozen) = (folder.path().join("s"), folder.path().join("p"));
    save(&mut of, SeqId::ONLY, SavedText { tokens: &TOKENS, messages: &messages }, &origin, &saved)
        .expect("it can be saved");
    freeze(&mut of, SeqId::ONLY, FrozenText { tokens: &TOKENS, system: None }, &origin, &frozen)
        .expect("it can be frozen");
    let read = |path: &PathBuf| std::fs::read(path).expect("it was written");
    Rig { session: read(&saved), prefix: read(&frozen), model, config, origin }
});

/// A file of these bytes, and what is done with it.
struct Used {
    folder: tempfile::TempDir,
}

impl Used {
    fn new() -> Self {
        Used { folder: tempfile::tempdir().expect("a temporary folder") }
    }
    fn file(&self, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join("file");
        std::fs::write(&path, bytes).expect("a temporary file");
        path
    }
    /// True if the file is a session, whatever it says. It is resumed, if it says that it can be.
    fn session(&self, bytes: &[u8]) -> bool {
        let Ok(saved) = SavedSession::open(&self.file(bytes)) else { return false };
        let mut session = session();
        let resumed = resume(&mut session, SeqId::ONLY, &saved, &RIG.origin, usize::MAX);
        go_on(&mut session, resumed.is_ok_and(|n| n > 0));
        true
    }
    fn prefix(&self, bytes: &[u8]) -> bool {
        let Ok(prefix) = FrozenPrefix::open(&self.file(bytes)) else { return false };
        let mut session = session();
        let begun = begin_with(&mut session, SeqId::ONLY, &prefix, &RIG.origin, usize::MAX);
        go_on(&mut session, begun.is_ok_and(|n| n > 0));
        true
    }
}

fn session() -> ModelSession {
    ModelSession::new(&RIG.model, &devices::all(), &RIG.config).expect("a small cache")
}

/// A session that was refused a file is as good as new; one that was given one computes with it.
fn go_on(session: &mut ModelSession, has_tokens: bool) {
    assert!(has_tokens || session.cache().next_position(SeqId::ONLY) == Some(0));
    // K and V may be any numbers, so logits may be none. A full cache refuses the token.
    let _ = session.forward(&[SequenceInput::chain(SeqId::ONLY, &[7])], LogitRows::LastOfEach);
}

/// The table of a file, its header, and the bytes behind it.
fn parts(bytes: &[u8]) -> (Value, String, &[u8]) {
    let end = 8 + bytes[..8].iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte));
    let table: Value = serde_json::from_slice(&bytes[8..end]).expect("a valid file");
    let header = table["__metadata__"]["kvist"].as_str().expect("a header").to_owned();
    (table, header, &bytes[end..])
}

/// A file of these parts, with hashes that fit where the header has its form.
fn joined(mut table: Value, header: &str, data: &[u8]) -> Vec<u8> {
    let mut header = header.to_owned();
    if let Ok(mut fields) = serde_json::from_str::<Value>(&header)
        && fields["blake3"].is_object()
    {
        let tensors = table.as_object().into_iter().flatten().filter(|(name, _)| *name != "__metadata__");
        let hashes: BTreeMap<&String, String> = tensors
            .filter_map(|(name, info)| {
                let end = |i: usize| usize::try_from(info["data_offsets"][i].as_u64()?).ok();
                Some((name, hash(&[data.get(end(0)?..end(1)?)?])))
            })
            .collect();
        fields["blake3"] = serde_json::json!(hashes);
        header = fields.to_string();
    }
    table["__metadata__"] = serde_json::json!({ "kvist": header, "blake3": hash(&[header.as_bytes()]) });
    let mut table = table.to_string();
    // Tensors of prefixes begin at a page.
    table.extend(std::iter::repeat_n(' ', (table.len() + 8).next_multiple_of(4096) - table.len() - 8));
    [&(table.len() as u64).to_le_bytes()[..], table.as_bytes(), data].concat()
}

/// Changes of the header, of the table and of the tensors, each with hashes that fit.
fn with_hashes(real: &[u8], seed: u64) -> Vec<u8> {
    let (mut table, mut header, data) = parts(real);
    let mut data = data.to_vec();
    match seed % 3 {
        0 => header = String::from_utf8_lossy(&changed(header.as_bytes(), seed)).into_owned(),
        1 => {
            let text = changed(table.to_string().as_bytes(), seed);
            table = serde_json::from_slice(&text).ok().filter(Value::is_object).unwrap_or(table);
        }
        _ => data = changed(&data, seed),
    }
    joined(table, &header, &data)
}

fn check(real: &[u8], name: &str, is_used: impl Fn(&[u8]) -> bool) {
    assert!(is_used(real), "{name}: as it was written");
    for seed in 0..CHANGED {
        // Those of the table alone are spaces at its end, which readers skip.
        let bytes = changed(real, seed);
        assert!(!is_used(&bytes) || parts(&bytes) == parts(real), "{name}: seed {seed} was accepted");
        is_used(&with_hashes(real, seed));
    }
    let (table, header, data) = parts(real);
    assert!(is_used(&joined(table, &header, data)), "{name}: hashes that fit");
}

#[test]
fn files_session() {
    let used = Used::new();
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        used.session(bytes);
    });
    check(&RIG.session, "session", |bytes| used.session(bytes));
}

#[test]
fn files_prefix() {
    let used = Used::new();
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        used.prefix(bytes);
    });
    check(&RIG.prefix, "prefix", |bytes| used.prefix(bytes));
}

/// Rewrites the committed corpus: `cargo test -p kvist-fuzz -- --ignored write_files_corpus`.
#[test]
#[ignore = "writes files into the source tree"]
fn write_files_corpus() {
    for (target, bytes) in [("session", &RIG.session), ("prefix", &RIG.prefix)] {
        let dir = format!("{}/tests/__fuzz__/files_{target}/corpus", env!("CARGO_MANIFEST_DIR"));
        std::fs::create_dir_all(&dir).expect("the source tree can be written");
        std::fs::write(format!("{dir}/whole"), bytes).expect("the source tree can be written");
        for seed in 0..3 {
            std::fs::write(format!("{dir}/changed-{seed}"), with_hashes(bytes, seed))
                .expect("the source tree can be written");
        }
    }
}
