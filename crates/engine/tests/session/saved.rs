//! Sessions in files: a resumed session goes on to the bit as if nothing had happened, or is refused.
use crate::common::*;
use crate::rig::{Rig, go_on};
use kvist_cache::SeqId;
use kvist_engine::Error;
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::{Origin, SavedMessage, SavedSession, SavedText, resume, save};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::ModelFile;
use kvist_testing::SplitMix64;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use std::path::Path;

const KINDS: [&str; 5] = ["contiguous", "ring", "cells", "tree", "paged"];
const STORAGES: [&str; 7] = ["f32", "f16", "bf16", "q8", "q4", "t4", "t4-o"];
const FULL_KINDS: [&str; 4] = ["contiguous", "cells", "tree", "paged"];
const CHUNKS: [u32; 3] = [1, 7, 32];

impl Rig {
    fn text(&self, n: usize) -> Vec<u32> {
        let vocab = self.model.config().vocab as u32;
        text(n).iter().map(|token| token % vocab).collect()
    }
}

/// Tokens of a text that is longer than the ring's window.
fn text(n: usize) -> Vec<u32> {
    let mut random = SplitMix64(3);
    (0..n).map(|_| random.below(4000)).collect()
}

fn seed() -> u64 {
    std::env::var("KVIST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

fn feed(session: &mut ModelSession, tokens: &[u32]) -> Vec<u32> {
    session.prefill(SeqId::ONLY, tokens, &mut |_| true).unwrap();
    session.logits().iter().map(|x| x.to_bits()).collect()
}

fn saved_at(rig: &Rig, config: &CacheConfig, tokens: &[u32], stored: usize, path: &Path) -> ModelSession {
    let mut session = session(&rig.model, config);
    feed(&mut session, &tokens[..stored]);
    let messages = [SavedMessage { role: "user".into(), content: "hello".into() }];
    let text = SavedText { tokens, messages: &messages };
    save(&mut session, SeqId::ONLY, text, &rig.origin(config), path).unwrap();
    session
}

/// Every kind and storage, saved and resumed with every pair of chunks, in the same kind and in another one. Half a minute on two
/// cores.
#[test]
fn a_resumed_session_goes_on_to_the_bit() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let tokens = text(117);
    let (all, more) = tokens.split_at(101);
    for (i, kind) in KINDS.iter().enumerate() {
        for (storage, save_chunk) in STORAGES.iter().flat_map(|storage| CHUNKS.map(|chunk| (*storage, chunk)))
        {
            let config = rig.config(kind, storage, save_chunk);
            let mut before = saved_at(&rig, &config, all, 100, &path);
            let expected = go_on(&mut before, &[&all[100..], more].concat());
            let mut never_saved = session(&rig.model, &config);
            feed(&mut never_saved, &all[..100]);
            assert_eq!(go_on(&mut never_saved, &[&all[100..], more].concat()), expected, "{kind} {storage}");
            let saved = SavedSession::open(&path).unwrap();
            assert_eq!((saved.tokens(), saved.stored(), saved.messages().len()), (all, 100, 1));
            assert_eq!(saved.kind(), Some(*kind));
            // Where the window is the same, another kind too, with one chunk.
            let other = if *kind == "ring" { kind } else { ["cells", "tree", "paged", "contiguous"][i % 4] };
            let same_kind = CHUNKS.map(|chunk| (*kind, chunk));
            for (kind, chunk) in same_kind.into_iter().chain([(other, save_chunk)]) {
                let what = format!("{kind} {storage}, saved with {save_chunk} and resumed with {chunk}");
                let config = rig.config(kind, storage, chunk);
                let mut after = session(&rig.model, &config);
                let n = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), usize::MAX).unwrap();
                assert_eq!(n, 100, "{what}");
                assert_eq!(go_on(&mut after, &[&all[100..], more].concat()), expected, "{what}");
            }
        }
    }
}

/// Models some of whose layers have windows, and one whose layers share K and V.
#[test]
fn models_with_windows_and_shared_kv_go_on_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.kvs");
    for name in ["gemma3", "gpt-oss", "qwen2-window-mixed", "llama-shared-kv"] {
        let rig = Rig::new(&ModelFile::Path(fixtures("parity").join(name)));
        let tokens = rig.text(70);
        for (kind, storage) in FULL_KINDS.iter().flat_map(|kind| STORAGES.map(|storage| (*kind, storage))) {
            // At the end of a recent group, and in its middle.
            for (stored, save_chunk) in [48, 41].into_iter().zip([5, 16]) {
                let (all, more) = tokens.split_at(stored + 1);
                let mut before = saved_at(&rig, &rig.config(kind, storage, save_chunk), all, stored, &path);
                let expected = go_on(&mut before, &[&all[stored..], more].concat());
                let saved = SavedSession::open(&path).unwrap();
                for chunk in [1, 5, 16] {
                    let what =
                        format!("{name} {kind} {storage}, saved with {save_chunk}, resumed with {chunk}");
                    let config = rig.config(kind, storage, chunk);
                    let mut after = session(&rig.model, &config);
                    let n =
                        resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), usize::MAX).unwrap();
                    assert_eq!(n, stored, "{what}");
                    feed(&mut after, &all[n..]);
                    let mut found = vec![after.logits().iter().map(|x| x.to_bits()).collect()];
                    found.extend(go_on(&mut after, more));
                    assert_eq!(found, expected, "{what}");
                }
            }
        }
    }
}

/// Regression: a text that was resumed and then shortened attended cells whose rows no file had given, because windows had left them behind.
#[test]
fn a_resumed_text_is_shortened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.kvs");
    for (name, has_windows) in [("gemma3", true), ("llama-gqa", false)] {
        let rig = Rig::new(&ModelFile::Path(fixtures("parity").join(name)));
        let tokens = rig.text(70);
        for kind in FULL_KINDS {
            let config = rig.config(kind, "f32", 16);
            saved_at(&rig, &config, &tokens[..61], 60, &path);
            let saved = SavedSession::open(&path).unwrap();
            // By one token, by many, and after it has grown.
            for (more, len) in [(0, 59), (0, 40), (5, 62), (5, 50)] {
                let mut after = session(&rig.model, &config);
                let n = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), usize::MAX).unwrap();
                assert_eq!(n, 60);
                go_on(&mut after, &tokens[60..60 + more]);
                let left = after.truncate(SeqId::ONLY, len as u32).unwrap() as usize;
                let what = format!("{name} {kind}: {len} of {}, {left} left", 60 + more);
                assert_eq!(left, if has_windows && len < 60 { 0 } else { len }, "{what}");
                assert_eq!(after.cache().next_position(SeqId::ONLY), Some(left as u32), "{what}");
                go_on(&mut after, &tokens[left..len]);
                let mut never_saved = session(&rig.model, &config);
                feed(&mut never_saved, &tokens[..len]);
                assert_eq!(
                    go_on(&mut after, &tokens[len..]),
                    go_on(&mut never_saved, &tokens[len..]),
                    "{what}"
                );
            }
        }
    }
}

/// Random cases: lengths, windows, sizes of recent groups, storages, kinds and chunks. What was never saved goes on likewise, and
/// so does what is saved again after it was resumed.
#[test]
fn packed_caches_are_resumed_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.kvs");
    let mut random = SplitMix64(seed());
    for name in ["gemma3", "qwen2-window-mixed", "llama-shared-kv", "llama-gqa"] {
        let rig = Rig::new(&ModelFile::Path(fixtures("parity").join(name)));
        let tokens = rig.text(90);
        for case in 0..40 {
            let mut of = |list: &[&'static str]| list[random.below(list.len() as u32) as usize];
            let (kind, k) = (of(&KINDS), of(&["q8", "q8-64-rot", "q4", "t4", "f16", "t4-o"]));
            let v = of(&["q8", "q4-rot", "t4", "f32"]);
            let mut config = rig.config(kind, k, 1 + random.below(32));
            config.v = v.parse().unwrap();
            config.recent.tokens = [0, 1, 4, 16, 16, 64][random.below(6) as usize];
            if kind == "ring" || random.below(3) == 0 {
                (config.window, config.sinks) = (Some(1 + random.below(50)), random.below(4));
            }
            let stored = 1 + random.below(85) as usize;
            // The last token may be in the cache, too.
            let (all, more) = tokens.split_at(stored + random.below(2) as usize);
            let rest = [&all[stored..], more].concat();
            let what = format!("{name}, case {case}: {stored} of {} tokens in {config:?}", all.len());
            let mut never_saved = session(&rig.model, &config);
            feed(&mut never_saved, &all[..stored]);
            let expected = go_on(&mut never_saved, &rest);

            let mut before = saved_at(&rig, &config, all, stored, &path);
            for round in 0..2 {
                let saved = SavedSession::open(&path).unwrap();
                let config = CacheConfig { max_step_tokens: 1 + random.below(32), ..config.clone() };
                let mut after = session(&rig.model, &config);
                let n = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), usize::MAX).unwrap();
                assert_eq!(n, stored, "{what}, round {round}");
                let text = SavedText { tokens: all, messages: &[] };
                save(&mut after, SeqId::ONLY, text, &rig.origin(&config), &path).unwrap();
                assert_eq!(go_on(&mut after, &rest), expected, "{what}, round {round}");
            }
            assert_eq!(go_on(&mut before, &rest), expected, "{what}");
        }
    }
}

/// Files of older versions of kvist lack the f16 rows of packed storages: what they would be read for is computed again. They do
/// not say what kind of cache they come from either.
#[test]
fn a_file_of_an_older_version_is_resumed_as_before() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let tokens = text(110);
    let (all, more) = tokens.split_at(100);
    for (kind, expected_n) in [("cells", 96), ("ring", 0)] {
        let config = rig.config(kind, "q8", 32);
        let mut before = saved_at(&rig, &config, all, 100, &path);
        with_other_content(&path, |header, tensors| {
            assert_eq!(header.as_object_mut().unwrap().shift_remove("kind"), Some(kind.into()));
            let n = tensors.len();
            tensors.retain(|name, _| !name.contains("recent"));
            let layers = rig.model.config().layers.len();
            assert_eq!(n - tensors.len(), 2 * layers + 1);
        });
        let saved = SavedSession::open(&path).unwrap();
        assert_eq!(saved.kind(), None);
        let mut after = session(&rig.model, &config);
        let n = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), usize::MAX).unwrap();
        assert_eq!(n, expected_n, "{kind}");
        assert_eq!(after.cache().next_position(SeqId::ONLY), Some(n as u32));
        feed(&mut after, &all[n..]);
        assert_eq!(go_on(&mut after, more), go_on(&mut before, more), "{kind}");
    }
}

/// A full session drops the f16 rows that were read longest ago. They are not in the file then, and are computed again.
#[test]
fn f16_rows_that_the_cache_has_dropped_are_computed_again() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let tokens = text(60);
    let mut config = rig.config("cells", "q8", 32);
    config.recent.sequences = 1;
    let mut before = session(&rig.model, &config);
    feed(&mut before, &tokens[..26]);
    for other in 1..4 {
        let seq = SeqId(other);
        before.cache().sequences().unwrap().seq_new(seq).unwrap();
        before.prefill(seq, &tokens[30..45], &mut |_| true).unwrap();
    }
    let text = SavedText { tokens: &tokens[..26], messages: &[] };
    save(&mut before, SeqId::ONLY, text, &rig.origin(&config), &path).unwrap();
    let saved = SavedSession::open(&path).unwrap();
    let mut after = session(&rig.model, &config);
    let n = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), usize::MAX).unwrap();
    assert_eq!(n, 16, "not 26, as far as the file has packed rows");
    feed(&mut after, &tokens[16..26]);
    let mut fresh = session(&rig.model, &config);
    feed(&mut fresh, &tokens[..26]);
    assert_eq!(go_on(&mut after, &tokens[26..]), go_on(&mut fresh, &tokens[26..]));
}

/// A sequence is resumed beside others, whose texts go on as before.
#[test]
fn others_of_a_session_do_not_notice_a_resume() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let tokens = text(100);
    let config = rig.config("paged", "t4", 16);
    let mut before = saved_at(&rig, &config, &tokens[..41], 40, &path);
    let mut both = session(&rig.model, &config);
    feed(&mut both, &tokens[50..75]);
    let one = |session: &mut ModelSession, seq, token: u32| -> Vec<u32> {
        session.forward(&[SequenceInput::chain(seq, &[token])], LogitRows::LastOfEach).unwrap();
        session.logits().iter().map(|x| x.to_bits()).collect()
    };
    let second = SeqId(1);
    both.cache().sequences().unwrap().seq_new(second).unwrap();
    let saved = SavedSession::open(&path).unwrap();
    assert_eq!(resume(&mut both, second, &saved, &rig.origin(&config), usize::MAX).unwrap(), 40);
    let mut alone = session(&rig.model, &config);
    feed(&mut alone, &tokens[50..75]);
    for i in 0..20 {
        assert_eq!(one(&mut both, second, tokens[40 + i]), one(&mut before, SeqId::ONLY, tokens[40 + i]));
        assert_eq!(one(&mut both, SeqId::ONLY, tokens[75 + i]), one(&mut alone, SeqId::ONLY, tokens[75 + i]));
    }
}

#[test]
fn less_is_resumed_if_less_is_wanted() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let tokens = text(61);
    // The file has the f16 rows of positions 48 to 59.
    let cases = [
        ("f16", [(99, 60), (60, 60), (59, 59), (31, 31), (0, 0)]),
        ("q8", [(99, 60), (59, 59), (49, 49), (48, 48), (47, 32)]),
        ("t4", [(60, 60), (55, 55), (33, 32), (16, 16), (15, 0)]),
    ];
    for (storage, cases) in cases {
        let config = rig.config("cells", storage, 16);
        saved_at(&rig, &config, &tokens[..60], 60, &path);
        let saved = SavedSession::open(&path).unwrap();
        for (most, expected) in cases {
            let mut resumed = session(&rig.model, &config);
            let n = resume(&mut resumed, SeqId::ONLY, &saved, &rig.origin(&config), most).unwrap();
            assert_eq!(n, expected, "{storage}");
            let mut fresh = session(&rig.model, &config);
            assert_eq!(feed(&mut resumed, &tokens[n..]), feed(&mut fresh, &tokens), "{storage} {most}");
        }
    }
}

/// The last token leaves room for the query that goes on.
#[test]
fn a_text_as_long_as_the_cache_is_resumed() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    for (kind, storage) in FULL_KINDS.into_iter().flat_map(|kind| [(kind, "f32"), (kind, "q8")]) {
        let config = rig.config(kind, storage, 16);
        saved_at(&rig, &config, &text(48), 48, &path);
        let saved = SavedSession::open(&path).unwrap();
        let tight = CacheConfig { context_tokens: 48, ..config.clone() };
        let mut after = session(&rig.model, &tight);
        let n = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&tight), usize::MAX).unwrap();
        assert_eq!(n, 47, "{kind} {storage}");
        let mut fresh = session(&rig.model, &config);
        assert_eq!(feed(&mut after, &text(48)[n..]), feed(&mut fresh, &text(48)), "{kind} {storage}");
    }
}

/// The strongest channels of the keys come first in t4-o. A process that has measured another order takes nothing over, and the same
/// order is measured by each.
#[test]
fn another_order_of_channels_is_refused() {
    let (rig, same, other, folder) =
        (Rig::embedded(), Rig::embedded(), Rig::embedded(), tempfile::tempdir().unwrap());
    other.model.channels().set(kvist_testing::other_channels(other.model.layout()).into()).unwrap();
    let path = folder.path().join("s.kvs");
    let config = rig.config("cells", "t4-o", 16);
    let mut before = saved_at(&rig, &config, &text(41), 40, &path);
    let saved = SavedSession::open(&path).unwrap();
    assert!(saved.origin().cache.channels.is_some());
    // Which order is measured is not known before a cache opens: all else is compared by then.
    saved.check(&other.origin(&config)).unwrap();
    let mut refused = session(&other.model, &config);
    let error = resume(&mut refused, SeqId::ONLY, &saved, &other.origin(&config), 99).unwrap_err();
    assert!(error.to_string().contains("s.kvs: it was made with an order of channels of hash"), "{error}");
    assert_eq!(refused.cache().next_position(SeqId::ONLY), Some(0));

    let mut after = session(&same.model, &rig.config("cells", "t4-o", 7));
    assert_eq!(resume(&mut after, SeqId::ONLY, &saved, &same.origin(&config), 99).unwrap(), 40);
    assert_eq!(go_on(&mut after, &text(60)[40..]), go_on(&mut before, &text(60)[40..]));

    // A storage without outliers does not care.
    for storage in ["q8", "t4"] {
        let config = rig.config("cells", storage, 16);
        saved_at(&rig, &config, &text(41), 40, &path);
        let saved = SavedSession::open(&path).unwrap();
        assert_eq!(saved.origin().cache.channels, None);
        let mut after = session(&other.model, &config);
        assert_eq!(resume(&mut after, SeqId::ONLY, &saved, &other.origin(&config), 99).unwrap(), 40);
    }
}

/// Rows that are not the model's are refused by name, though every hash is right.
#[test]
fn f16_rows_that_do_not_fit_are_refused() {
    type Change = fn(&mut Tensors);
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let config = rig.config("ring", "q8", 16);
    let changes: [Change; 5] = [
        |tensors| drop(tensors.remove("layer.1.v.recent").unwrap()),
        |tensors| drop(tensors.insert("layer.0.k.recent".into(), (Dtype::F16, vec![2], vec![0; 4]))),
        |tensors| tensors.get_mut("group.0.recent").unwrap().2.reverse(), // a large number
        |tensors| {
            drop(tensors.insert("group.0.recent".into(), (Dtype::U32, vec![2], vec![5, 0, 0, 0, 4, 0, 0, 0])))
        },
        |tensors| tensors.get_mut("group.0.recent").unwrap().0 = Dtype::F32,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        saved_at(&rig, &config, &text(101), 100, &path);
        with_other_tensors(&path, change);
        let saved = SavedSession::open(&path).unwrap();
        let mut after = session(&rig.model, &config);
        let error = resume(&mut after, SeqId::ONLY, &saved, &rig.origin(&config), 99).unwrap_err();
        assert!(error.to_string().contains("its tensors do not fit the model"), "{i}: {error}");
        assert_eq!(after.cache().next_position(SeqId::ONLY), Some(0));
    }
}

type Change = fn(&mut Origin);

#[test]
fn another_origin_is_refused_by_name() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let config = rig.config("cells", "f16", 16);
    saved_at(&rig, &config, &text(40), 40, &path);
    let saved = SavedSession::open(&path).unwrap();
    let origin = rig.origin(&config);
    let refused = |origin: &Origin| match saved.check(origin) {
        Err(Error::Malformed { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let changed = |change: Change| {
        let mut origin = origin.clone();
        change(&mut origin);
        origin
    };
    let cases: [(Change, &str); 9] = [
        (|origin| origin.model.weights = "0".repeat(64), "weights"),
        (|origin| origin.model.tokenizer = "0".repeat(64), "tokenizer"),
        (|origin| origin.model.config = "0".repeat(64), "RoPE"),
        (|origin| origin.rope = "0".repeat(64), "--context"),
        (|origin| origin.weights = "f32".into(), "--weights"),
        (|origin| origin.cache.k = "q8".into(), "--kv f16"),
        (|origin| origin.cache.v = "q8".into(), "--kv-v f16"),
        (|origin| origin.cache.recent = 64, "--kv-recent"),
        (|origin| origin.cache.groups = vec![(Some(9), 4)], "--window"),
    ];
    for (change, name) in cases {
        let what = refused(&changed(change));
        assert!(what.contains(name), "{what}");
        let mut session = session(&rig.model, &config);
        assert!(resume(&mut session, SeqId::ONLY, &saved, &changed(change), 9).is_err());
        assert_eq!(session.cache().next_position(SeqId::ONLY), Some(0));
    }
    saved.check(&origin).unwrap();
}

/// Every changed bit and every cut is refused: nothing of the file is reused, and nothing panics.
#[test]
fn changed_and_torn_files_are_refused() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let config = rig.config("paged", "q8", 16);
    saved_at(&rig, &config, &text(20), 20, &path);
    let whole = std::fs::read(&path).unwrap();
    let mut random = SplitMix64(seed());
    let flips: u32 = std::env::var("KVIST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (_, metadata) = SafeTensors::read_metadata(&whole).unwrap();
    let tensors = metadata.tensors();
    let recent = tensors.iter().filter(|(name, _)| name.contains("recent"));
    let recent: Vec<_> =
        recent.map(|(_, info)| (header + info.data_offsets.0)..(header + info.data_offsets.1)).collect();
    for i in 0..flips {
        let mut bytes = whole.clone();
        // A third of the flips is in the header, and one in the f16 rows of the newest tokens: both are small.
        let within = match i % 3 {
            0 => 0..header,
            1 => recent[random.below(recent.len() as u32) as usize].clone(),
            _ => header..bytes.len(),
        };
        let at = within.start + random.below(within.len() as u32) as usize;
        bytes[at] ^= 1 << random.below(8);
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(saved) = SavedSession::open(&path) {
            panic!("byte {at} was changed, and {} tokens were read", saved.tokens().len());
        }
        std::fs::write(&path, &whole[..random.below(whole.len() as u32) as usize]).unwrap();
        assert!(SavedSession::open(&path).is_err(), "a torn file");
    }
    std::fs::write(&path, &whole).unwrap();
    SavedSession::open(&path).unwrap();
}

#[test]
fn a_newer_version_is_refused() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    saved_at(&rig, &rig.config("cells", "f16", 16), &text(20), 20, &path);
    as_a_newer_version(&path);
    let error = SavedSession::open(&path).unwrap_err().to_string();
    assert!(error.contains("s.kvs") && error.contains("a session of format 2"), "{error}");
    assert!(error.contains("this kvist reads 1") && error.contains("use a newer kvist"), "{error}");
}

#[test]
fn a_failed_save_leaves_the_file_as_it_was() {
    let (rig, folder) = (Rig::embedded(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s.kvs");
    let config = rig.config("cells", "f16", 16);
    let tokens = text(20);
    let mut session = saved_at(&rig, &config, &tokens, 20, &path);
    let before = std::fs::read(&path).unwrap();
    // More positions than tokens.
    let text = SavedText { tokens: &tokens[..9], messages: &[] };
    assert!(matches!(
        save(&mut session, SeqId::ONLY, text, &rig.origin(&config), &path),
        Err(Error::Usage(_))
    ));
    let text = SavedText { tokens: &tokens, messages: &[] };
    let nowhere = folder.path().join("no/such/folder/s.kvs");
    let failed = save(&mut session, SeqId::ONLY, text, &rig.origin(&config), &nowhere);
    assert!(matches!(failed, Err(Error::Write { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no partial file is left");
}
