//! Frozen prefixes in memory: what they take is in the budget beforehand, belongs to all users, and is gone with the last one.
//!
//! A program of its own, because it looks at the maps and the open files of its process.
mod common;
#[path = "../../model/tests/common/mod.rs"]
mod models;
use common::*;
use kvist_cache::SeqId;
use kvist_cpu::Cpu;
use kvist_device::{MemoryBudget, Purpose, Storage};
use kvist_engine::Error;
use kvist_engine::frozen::{FrozenText, SharedPrefix, begin_with, share, shared_bytes};
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::Origin;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::weights::WeightFormat;
use kvist_model::{Model, ModelFile, Opened};
use std::sync::Arc;

const ONLY: SeqId = SeqId::ONLY;

/// A model with a budget of its own.
struct Rig {
    model: Arc<Model>,
    budget: Arc<MemoryBudget>,
    opened: Opened,
}

impl Rig {
    fn new(file: &ModelFile) -> Rig {
        let budget = MemoryBudget::new(1 << 40);
        let model = Model::load(file, Cpu::new(compute()), &texts(), &budget, &mut |_, _| {}).unwrap();
        Rig { model: Arc::new(model), budget, opened: Opened::open(file, true).unwrap() }
    }
    fn config(&self, storage: &str) -> CacheConfig {
        let storage: Storage = storage.parse().unwrap();
        CacheConfig { k: storage, v: storage.for_values(), max_rows: 1, ..exact("cells", 256, 32) }
    }
    fn origin(&self, config: &CacheConfig) -> Origin {
        Origin::new(self.opened.fingerprint().unwrap(), WeightFormat::AsStored, config, self.model.config())
    }
    fn tokens(&self, n: u32) -> Vec<u32> {
        (0..n).map(|i| i * 37 % self.model.config().vocab as u32).collect()
    }
    fn filled(&self, config: &CacheConfig, tokens: &[u32]) -> ModelSession {
        let mut session = session(&self.model, config);
        session.prefill(ONLY, tokens, &mut |_| true).unwrap();
        session
    }
    fn begun(&self, config: &CacheConfig, prefix: &SharedPrefix) -> ModelSession {
        let mut session = session(&self.model, config);
        let n = begin_with(&mut session, ONLY, prefix, &self.origin(config), usize::MAX).unwrap();
        assert_eq!(n, prefix.tokens().len());
        session
    }
    fn kv_bytes(&self) -> u64 {
        self.budget.usage().of(Purpose::KvCache)
    }
}

fn text(tokens: &[u32]) -> FrozenText<'_> {
    FrozenText { tokens, system: Some("\"be\\brief\"\n\u{1}é") }
}

fn next(session: &mut ModelSession, token: u32) -> Vec<u32> {
    session.forward(&[SequenceInput::chain(ONLY, &[token])], LogitRows::LastOfEach).unwrap();
    session.logits().iter().map(|x| x.to_bits()).collect()
}

/// How often this process maps the file of a prefix in memory, and whether it has it open.
#[cfg(target_os = "linux")]
fn system_has(prefix: &str) -> (usize, usize) {
    let name = format!("/memfd:{prefix} (deleted)");
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter(|file| {
        let to = std::fs::read_link(file.as_ref().unwrap().path());
        to.is_ok_and(|to| to.as_os_str() == name.as_str())
    });
    (maps.lines().filter(|line| line.ends_with(&name)).count(), open.count())
}

#[test]
fn memory_goes_with_the_last_user() {
    let rig = Rig::new(&ModelFile::Embedded);
    let (tokens, config) = (rig.tokens(70), rig.config("f16"));
    let before = rig.kv_bytes();
    // The handle goes first, last, or between two sessions.
    for handle_goes in 0..3 {
        let mut session = rig.filled(&config, &tokens);
        let prefix = share(&mut session, ONLY, text(&tokens), &rig.origin(&config)).unwrap();
        let expected = next(&mut session, 5);
        drop(session);
        let (name, taken) = (prefix.name(), rig.kv_bytes() - before);
        assert!(taken >= prefix.len(), "{taken} of {}", prefix.len());
        let mut sessions: Vec<_> = (0..2).map(|_| rig.begun(&config, &prefix)).collect();
        assert_eq!(rig.kv_bytes(), before + taken, "it is there once");
        #[cfg(target_os = "linux")]
        assert_eq!(system_has(&name), (2, 1), "a map for each session");
        let mut handle = Some(prefix);
        for gone in 0..3 {
            if gone == handle_goes {
                handle = None;
            } else {
                let mut session = sessions.pop().unwrap();
                assert_eq!(next(&mut session, 5), expected);
            }
            #[cfg(target_os = "linux")]
            assert_eq!(system_has(&name), (sessions.len(), usize::from(handle.is_some())));
            let own: u64 = sessions.iter().map(ModelSession::kv_bytes).sum();
            let left = if gone < 2 { taken } else { 0 };
            assert_eq!(rig.kv_bytes(), before + left + own, "{gone} users are gone");
        }
        let _ = name;
    }
}

/// What others attend cannot be written to, not even by this process.
#[cfg(target_os = "linux")]
#[test]
fn a_shared_prefix_is_sealed() {
    use std::io::Write;
    let rig = Rig::new(&ModelFile::Embedded);
    let (tokens, config) = (rig.tokens(20), rig.config("f32"));
    let prefix = share(&mut rig.filled(&config, &tokens), ONLY, text(&tokens), &rig.origin(&config)).unwrap();
    let name = format!("/memfd:{} (deleted)", prefix.name());
    let files = std::fs::read_dir("/proc/self/fd").unwrap().map(|file| file.unwrap().path());
    let mut files =
        files.filter(|path| std::fs::read_link(path).is_ok_and(|to| to.as_os_str() == name.as_str()));
    let mut file = std::fs::OpenOptions::new().write(true).open(files.next().unwrap()).unwrap();
    assert!(file.write_all(b"x").is_err() && file.set_len(0).is_err() && file.set_len(1 << 20).is_err());
    rig.begun(&config, &prefix);
}

/// What it takes is known before it is made, and a budget with a byte less refuses it.
#[test]
fn the_budget_is_asked_first() {
    let windows = ModelFile::Path(fixtures("parity").join("gemma3"));
    for (file, n) in [(ModelFile::Embedded, 70), (windows, 50)] {
        let rig = Rig::new(&file);
        let tokens = rig.tokens(n);
        for storage in ["f32", "f16", "q8", "q4", "t4", "t4-o"] {
            let config = rig.config(storage);
            let mut session = rig.filled(&config, &tokens);
            let bytes = shared_bytes(&mut session, text(&tokens)).unwrap();
            let before = rig.kv_bytes();
            let filler = rig.budget.reserve(Purpose::Weights, rig.budget.free() - bytes + 1).unwrap();
            let refused = share(&mut session, ONLY, text(&tokens), &rig.origin(&config)).unwrap_err();
            assert!(matches!(refused, Error::OutOfBudget(_)), "{refused}");
            assert_eq!(rig.kv_bytes(), before, "{storage}: nothing is taken");
            drop(filler);
            let filler = rig.budget.reserve(Purpose::Weights, rig.budget.free() - bytes).unwrap();
            let prefix = share(&mut session, ONLY, text(&tokens), &rig.origin(&config)).unwrap();
            let taken = rig.kv_bytes() - before;
            assert!(taken >= prefix.len() && taken <= bytes, "{storage}: {taken} of {bytes}");
            // What the bound has too much is in the header.
            assert!(bytes - taken < 64 << 10, "{storage}: {taken} of {bytes}");
            drop(filler);
            let expected = next(&mut session, 5);
            assert_eq!(next(&mut rig.begun(&config, &prefix), 5), expected, "{storage}");
        }
    }
}

/// Threads begin with one prefix at the same time.
#[test]
fn threads_share_a_prefix() {
    let rig = Rig::new(&ModelFile::Embedded);
    let (tokens, config) = (rig.tokens(40), rig.config("q8"));
    let mut session = rig.filled(&config, &tokens);
    let prefix = share(&mut session, ONLY, text(&tokens), &rig.origin(&config)).unwrap();
    let expected = next(&mut session, 5);
    let work = || {
        let prefix = prefix.clone();
        for _ in 0..4 {
            let mut session = rig.begun(&config, &prefix);
            assert_eq!(next(&mut session, 5), expected);
            // Written over, in this session alone.
            session.truncate(ONLY, 0).unwrap();
            session.prefill(ONLY, &tokens[20..], &mut |_| true).unwrap();
        }
    };
    std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(work))));
    assert_eq!(next(&mut rig.begun(&config, &prefix), 5), expected);
}
