//! Frozen prefixes, in files and in memory: what follows is the same to the bit as if the prefix had been computed, or it is refused.
use crate::common::*;
use crate::rig::{Rig, go_on};
use kvist_cache::SeqId;
use kvist_engine::Error;
use kvist_engine::chat::Chat;
use kvist_engine::frozen::{FrozenPrefix, FrozenText, SharedPrefix, begin_with, freeze, share};
use kvist_engine::generate::Limits;
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::saved::SavedSession;
use kvist_engine::session::ModelSession;
use kvist_model::ModelFile;
use kvist_testing::SplitMix64;
use std::path::Path;
use std::sync::Arc;

const STORAGES: [&str; 7] = ["f32", "f16", "bf16", "q8", "q4", "t4", "t4-o"];

impl Rig {
    /// With room for these tokens and one more.
    fn tight(&self, tokens: u32) -> CacheConfig {
        CacheConfig { context_tokens: tokens + 1, ..self.config("contiguous", "f16", 32) }
    }
    fn tokens(&self, n: usize) -> Vec<u32> {
        let (mut random, vocab) = (SplitMix64(3), self.model.config().vocab as u32);
        (0..n).map(|_| random.below(vocab)).collect()
    }
    /// A session with these tokens, and the prefix that it froze: in a file, and in memory.
    fn frozen(&self, config: &CacheConfig, tokens: &[u32]) -> (ModelSession, [SharedPrefix; 2]) {
        let mut session = session(&self.model, config);
        session.prefill(SeqId::ONLY, tokens, &mut |_| true).unwrap();
        let both = self.both(&mut session, FrozenText { tokens, system: Some("be brief") });
        (session, both)
    }
    fn both(&self, session: &mut ModelSession, text: FrozenText) -> [SharedPrefix; 2] {
        let origin = self.origin(session.config());
        freeze(session, SeqId::ONLY, text, &origin, &self.path()).unwrap();
        let file = FrozenPrefix::open(&self.path()).unwrap();
        let memory = share(session, SeqId::ONLY, text, &origin).unwrap();
        assert_eq!((file.path(), memory.path()), (Some(&*self.path()), None));
        assert_eq!((file.len(), file.tokens()), (memory.len(), memory.tokens()));
        [Arc::new(file), memory]
    }
    /// A new session that begins with the prefix, and the tokens that it has.
    fn begun(&self, config: &CacheConfig, prefix: &FrozenPrefix) -> (ModelSession, usize) {
        let mut session = session(&self.model, config);
        let n = begin_with(&mut session, SeqId::ONLY, prefix, &self.origin(config), usize::MAX).unwrap();
        (session, n)
    }
}

/// The process's bytes in anonymous memory are not looked at here: `kv_bytes` counts what the pools allocated.
#[test]
fn a_text_goes_on_to_the_bit_after_a_frozen_prefix() {
    let rig = Rig::embedded();
    let tokens = rig.tokens(130);
    for (i, kind) in ["contiguous", "cells", "tree", "paged", "ring"].into_iter().enumerate() {
        for (j, storage) in STORAGES.into_iter().enumerate() {
            // With and without whole blocks at the end.
            let (all, more) = tokens.split_at([101, 112, 96][j % 3]);
            let (mut before, both) = rig.frozen(&rig.config(kind, storage, 32), all);
            let expected = go_on(&mut before, more);
            let config = rig.config(kind, storage, [1, 7, 32][i % 3]);
            for prefix in both {
                assert_eq!((prefix.tokens(), prefix.system()), (all, Some("be brief")));
                let what = format!("{kind} {storage}, {}", prefix.name());
                let (mut after, n) = rig.begun(&config, &prefix);
                assert_eq!(n, all.len(), "{what}");
                if kind != "ring" {
                    assert_eq!(after.kv_bytes(), 0, "nothing was copied");
                }
                assert_eq!(go_on(&mut after, more), expected, "{what}");
            }
        }
    }
}

/// Layers that see everything are mapped, those with a window are copied.
#[test]
fn models_with_windows_have_prefixes() {
    for name in ["gemma3", "gpt-oss", "qwen2-window-mixed", "llama-gqa", "llama-shared-kv"] {
        let rig = Rig::new(&ModelFile::Path(fixtures("parity").join(name)));
        let tokens = rig.tokens(50);
        let (all, more) = tokens.split_at(37);
        for (kind, storage) in
            [("paged", "f16"), ("cells", "f32"), ("tree", "q8"), ("paged", "t4"), ("contiguous", "q4")]
        {
            let config = rig.config(kind, storage, 8);
            let (mut before, both) = rig.frozen(&config, all);
            let expected = go_on(&mut before, more);
            for prefix in both {
                let (mut after, n) = rig.begun(&config, &prefix);
                assert_eq!(n, 37, "{name} {kind}, {}", prefix.name());
                assert_eq!(go_on(&mut after, more), expected, "{name} {kind}, {}", prefix.name());
            }
        }
    }
}

/// Regression: a model without a template forgot the prefix at the first message.
#[test]
fn a_chat_without_a_template_goes_on_after_the_prefix() {
    let rig = Rig::embedded();
    let tokenizer = rig.model.tokenizer().unwrap();
    let rules = "The cache stores the keys and values of every token. The borrow checker";
    let tokens = tokenizer.encode(rules, true).unwrap();
    for (storage, way) in [("f32", 0), ("q8", 0), ("q8", 1)] {
        let config = rig.config("cells", storage, 32);
        let mut frozen = session(&rig.model, &config);
        frozen.prefill(SeqId::ONLY, &tokens, &mut |_| true).unwrap();
        let prefix = &rig.both(&mut frozen, FrozenText { tokens: &tokens, system: None })[way];
        let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
        let limits = Limits { max_tokens: 9, stop: vec![], ignore_eos: true, no_cache: false };
        let mut say = |chat: &mut Chat, text: &str| {
            let turn = chat.send(text, &mut sampler, &limits, &mut ()).unwrap();
            (turn.generation.text, turn.reused_tokens)
        };
        let mut whole = Chat::new(session(&rig.model, &config), None);
        let mut begun = Chat::new(session(&rig.model, &config), None);
        let n = begun.begin_with(prefix, &rig.origin(&config)).unwrap();
        assert_eq!(n, tokens.len());
        let (expected, _) = say(&mut whole, &format!("{rules} is a part"));
        assert_eq!(say(&mut begun, " is a part"), (expected, n), "{storage}");
        assert_eq!(say(&mut begun, " and then").0, say(&mut whole, " and then").0, "{storage}");
        // Nothing that was said is left, and the prefix is.
        assert!(begun.undo() && begun.undo() && !begun.undo());
        let mut again = Chat::new(session(&rig.model, &config), None);
        let (expected, _) = say(&mut again, &format!("{rules} is a tool"));
        assert_eq!(say(&mut begun, " is a tool").0, expected, "{storage}");
        // A saved conversation has the text of the prefix.
        let path = rig.folder.path().join("s.kvs");
        begun.save(&rig.origin(&config), &path).unwrap();
        let saved = SavedSession::open(&path).unwrap();
        let mut resumed = Chat::new(session(&rig.model, &config), None);
        resumed.resume(&saved, &rig.origin(&config)).unwrap();
        assert_eq!(say(&mut resumed, " that").0, say(&mut again, " that").0, "{storage}");
    }
}

/// Files of older versions of kvist lack the f16 rows of packed storages, and another order of channels is refused.
#[test]
fn older_files_and_other_channels() {
    let (rig, other) = (Rig::embedded(), Rig::embedded());
    other.model.channels().set(kvist_testing::other_channels(other.model.layout()).into()).unwrap();
    let tokens = rig.tokens(110);
    let config = rig.config("cells", "t4-o", 16);
    for prefix in rig.frozen(&config, &tokens[..100]).1 {
        let mut begun = session(&other.model, &config);
        let error = begin_with(&mut begun, SeqId::ONLY, &prefix, &other.origin(&config), 99).unwrap_err();
        let expected = format!("{}: it was made with an order of channels of hash", prefix.name());
        assert!(error.to_string().contains(&expected), "{error}");
        assert_eq!(begun.cache().next_position(SeqId::ONLY), Some(0));
    }

    // In a ring every row is copied. Position 100 reads those from 96 on in f16, and position 96 none.
    for (len, expected) in [(100, 0), (96, 96)] {
        let config = rig.config("ring", "q8", 16);
        let (mut before, _) = rig.frozen(&config, &tokens[..len]);
        with_other_tensors(&rig.path(), |tensors| tensors.retain(|name, _| !name.contains("recent")));
        let (mut begun, n) = rig.begun(&config, &FrozenPrefix::open(&rig.path()).unwrap());
        assert_eq!((n, begun.cache().next_position(SeqId::ONLY)), (expected, Some(expected as u32)));
        if n < len {
            begun.prefill(SeqId::ONLY, &tokens[n..len], &mut |_| true).unwrap();
        }
        assert_eq!(go_on(&mut begun, &tokens[len..]), go_on(&mut before, &tokens[len..]));
    }
}

/// Caches that write where the prefix lies change neither the file nor each other.
#[test]
fn users_of_a_prefix_do_not_see_each_other() {
    let rig = Rig::embedded();
    let (tokens, other) = (rig.tokens(120), rig.tokens(60)[20..].to_vec());
    for kind in ["cells", "paged"] {
        let config = rig.config(kind, "f16", 32);
        let (mut before, both) = rig.frozen(&config, &tokens[..100]);
        let file = std::fs::read(rig.path()).unwrap();
        let expected = go_on(&mut before, &tokens[100..]);
        let mut fresh = session(&rig.model, &config);
        fresh.prefill(SeqId::ONLY, &tokens[..3], &mut |_| true).unwrap();
        let written_over = go_on(&mut fresh, &other);
        for prefix in both {
            let what = format!("{kind}, {}", prefix.name());
            let (mut a, _) = rig.begun(&config, &prefix);
            let (mut b, _) = rig.begun(&config, &prefix);
            a.truncate(SeqId::ONLY, 3).unwrap();
            assert_eq!(go_on(&mut a, &other), written_over, "{what}: written over");
            let (mut c, _) = rig.begun(&config, &prefix);
            drop(prefix);
            assert_eq!(go_on(&mut b, &tokens[100..]), expected, "{what}: beside it, when its handle is gone");
            drop(a);
            assert_eq!(go_on(&mut c, &tokens[100..]), expected, "{what}: when another user is gone");
        }
        assert!(std::fs::read(rig.path()).unwrap() == file, "{kind}: the file");
    }
}

#[test]
fn less_is_used_if_less_is_wanted() {
    let rig = Rig::embedded();
    let (tokens, config) = (rig.tokens(60), rig.config("paged", "f16", 16));
    let (_, both) = rig.frozen(&config, &tokens);
    for (most, prefix) in [60, 59, 31, 1, 0].into_iter().flat_map(|most| both.each_ref().map(|it| (most, it)))
    {
        let mut begun = session(&rig.model, &config);
        let n = begin_with(&mut begun, SeqId::ONLY, prefix, &rig.origin(&config), most).unwrap();
        assert_eq!(n, most);
        let mut fresh = session(&rig.model, &config);
        fresh.prefill(SeqId::ONLY, &tokens[..n.max(1)], &mut |_| true).unwrap();
        let rest = [&tokens[n.max(1)..], &[5]].concat();
        if n == 0 {
            begun.prefill(SeqId::ONLY, &tokens[..1], &mut |_| true).unwrap();
        }
        assert_eq!(go_on(&mut begun, &rest), go_on(&mut fresh, &rest));
    }
}

/// The last block of the prefix is the pool's last, and reaches past its capacity.
#[test]
fn a_cache_may_end_with_the_prefix() {
    let rig = Rig::embedded();
    for n in [63, 64, 65, 100] {
        let tokens = rig.tokens(n + 1);
        let config = rig.tight(n as u32);
        let (mut before, both) = rig.frozen(&config, &tokens[..n]);
        let expected = go_on(&mut before, &tokens[n..]);
        for prefix in both {
            let (mut after, begun) = rig.begun(&config, &prefix);
            assert_eq!(begun, n);
            assert_eq!(go_on(&mut after, &tokens[n..]), expected);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let rig = Rig::embedded();
    let (tokens, config) = (rig.tokens(60), rig.config("paged", "f16", 16));
    let (mut used, both) = rig.frozen(&config, &tokens);
    for prefix in &both {
        let refusal = |config: &CacheConfig| {
            let mut begun = session(&rig.model, config);
            let error = begin_with(&mut begun, SeqId::ONLY, prefix, &rig.origin(config), 99).unwrap_err();
            assert_eq!(begun.cache().next_position(SeqId::ONLY), Some(0));
            error.to_string()
        };
        let other = refusal(&rig.config("paged", "q8", 16));
        assert!(other.contains(&prefix.name()) && other.contains("--kv f16"), "{other}");
        assert!(refusal(&CacheConfig { window: Some(9), ..config.clone() }).contains("--window"));
        let small = CacheConfig { k: config.k, v: config.v, ..exact("paged", 32, 16) };
        assert!(refusal(&small).contains("--context"));
        // A sequence that has begun.
        let error = begin_with(&mut used, SeqId::ONLY, prefix, &rig.origin(&config), 99).unwrap_err();
        assert!(error.to_string().contains("comes first"), "{error}");
    }
    // Other tokens than those of the cache.
    let text = FrozenText { tokens: &tokens[..9], system: None };
    let before = std::fs::read(rig.path()).unwrap();
    assert!(matches!(
        freeze(&mut used, SeqId::ONLY, text, &rig.origin(&config), &rig.path()),
        Err(Error::Usage(_))
    ));
    assert!(std::fs::read(rig.path()).unwrap() == before);
    let taken = rig.model.budget().usage();
    assert!(matches!(share(&mut used, SeqId::ONLY, text, &rig.origin(&config)), Err(Error::Usage(_))));
    assert_eq!(rig.model.budget().usage(), taken);
}

#[test]
fn a_newer_version_is_refused() {
    let rig = Rig::embedded();
    rig.frozen(&rig.config("paged", "f16", 16), &rig.tokens(20));
    as_a_newer_version(&rig.path());
    let error = FrozenPrefix::open(&rig.path()).unwrap_err().to_string();
    assert!(error.contains("p.kvp") && error.contains("of format 2"), "{error}");
    assert!(error.contains("this kvist reads 1") && error.contains("use a newer kvist"), "{error}");
}

/// Every changed bit and every cut is refused.
#[test]
fn changed_and_torn_files_are_refused() {
    let rig = Rig::embedded();
    let config = rig.config("paged", "q8", 16);
    rig.frozen(&config, &rig.tokens(20));
    let whole = std::fs::read(rig.path()).unwrap();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let mut random = SplitMix64(number("KVIST_SEED").unwrap_or(1));
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(rig.path(), bytes).unwrap();
        let error = FrozenPrefix::open(&rig.path()).err().unwrap_or_else(|| panic!("{what} was accepted"));
        assert!(error.to_string().contains("p.kvp"), "{error}");
    };
    for i in 0..number("KVIST_FLIPS").unwrap_or(400) {
        let mut bytes = whole.clone();
        let end = if i % 2 == 0 { header } else { bytes.len() };
        let at = random.below(end as u32) as usize;
        bytes[at] ^= 1 << random.below(8);
        refused(&bytes, &format!("a change of byte {at}"));
        let end = random.below(whole.len() as u32) as usize;
        refused(&whole[..end], &format!("a cut at {end}"));
    }
    refused(&[&whole[..], b"more"].concat(), "a longer file");
    refused(b"{}", "no file of tensors");
    assert!(FrozenPrefix::open(Path::new("/no/such.kvp")).unwrap_err().to_string().contains("/no/such.kvp"));
    std::fs::write(rig.path(), &whole).unwrap();
    FrozenPrefix::open(&rig.path()).unwrap();
}
