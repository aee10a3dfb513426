//! Sessions that are saved or frozen where they share cells, are full or were undone: what is in the file is the text's, all of it.
use crate::common::*;
use crate::rig::{Rig, go_on, go_on_in};
use kvist_cache::{Refused, SeqId};
use kvist_engine::chat::Chat;
use kvist_engine::frozen::{FrozenText, freeze};
use kvist_engine::generate::Limits;
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::saved::{SavedSession, SavedText, resume, save};
use kvist_engine::session::ModelSession;
use kvist_model::ModelFile;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

const ONLY: SeqId = SeqId::ONLY;
const FORK: SeqId = SeqId(1);

impl Rig {
    /// The embedded model, and one some of whose layers have windows.
    fn with_and_without_windows() -> [Rig; 2] {
        [Rig::embedded(), Rig::new(&ModelFile::Path(fixtures("parity").join("gemma3")))]
    }
    fn sized(&self, kind: &str, storage: &str, context: u32) -> CacheConfig {
        CacheConfig { context_tokens: context, ..self.config(kind, storage, 32) }
    }
    fn counted(&self, n: u32) -> Vec<u32> {
        (0..n).map(|i| i * 37 % self.model.config().vocab as u32).collect()
    }
    fn filled(&self, config: &CacheConfig, tokens: &[u32]) -> ModelSession {
        let mut session = session(&self.model, config);
        session.prefill(ONLY, tokens, &mut |_| true).unwrap();
        session
    }
    fn saved_tensors(
        &self,
        session: &mut ModelSession,
        seq: SeqId,
        tokens: &[u32],
    ) -> BTreeMap<String, Vec<u8>> {
        let origin = self.origin(session.config());
        save(session, seq, SavedText { tokens, messages: &[] }, &origin, &self.path()).unwrap();
        tensors(&self.path())
    }
    fn frozen_tensors(
        &self,
        session: &mut ModelSession,
        seq: SeqId,
        tokens: &[u32],
    ) -> BTreeMap<String, Vec<u8>> {
        let origin = self.origin(session.config());
        freeze(session, seq, FrozenText { tokens, system: None }, &origin, &self.path()).unwrap();
        tensors(&self.path())
    }
}

fn tensors(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, tensor)| (name, tensor.data().to_vec())).collect()
}

/// Regression: the cells to copy were those that a step at the end would read. In `paged` such a step first copies the tokens in a
/// last block that a fork shares to another block, which was never done: the file had zeros or tokens of another text.
#[test]
fn a_forked_text_is_saved_as_it_is() {
    for rig in Rig::with_and_without_windows() {
        let tokens = rig.counted(80);
        for kind in ["cells", "tree", "paged"] {
            for (storage, n) in [("f16", 37), ("q8", 41), ("f32", 48)] {
                let (all, what) = (&tokens[..n], format!("{kind} {storage} {n}"));
                let mut session = rig.filled(&rig.sized(kind, storage, 128), all);
                let (saved, frozen) =
                    (rig.saved_tensors(&mut session, ONLY, all), rig.frozen_tensors(&mut session, ONLY, all));
                session.cache().sequences().unwrap().fork(ONLY, FORK).unwrap();
                for seq in [ONLY, FORK] {
                    assert!(rig.saved_tensors(&mut session, seq, all) == saved, "{what}: {seq} is saved");
                    assert!(rig.frozen_tensors(&mut session, seq, all) == frozen, "{what}: {seq} is frozen");
                }
                // The other one has gone on behind the tokens that both have.
                go_on_in(&mut session, FORK, &tokens[n..n + 5]);
                assert!(rig.saved_tensors(&mut session, ONLY, all) == saved, "{what}: saved after the fork");
                assert!(
                    rig.frozen_tensors(&mut session, ONLY, all) == frozen,
                    "{what}: frozen after the fork"
                );
            }
        }
    }
}

/// Regression: the last token of a full cache was removed before it was saved. Of a fork that freed no cell: the text was not saved, and
/// had lost a token, or everything.
#[test]
fn a_full_cache_is_saved_and_not_changed() {
    for rig in Rig::with_and_without_windows() {
        let tokens = rig.counted(56);
        for (kind, forks) in [("contiguous", false), ("cells", true), ("tree", true), ("paged", true)] {
            let config = rig.sized(kind, "f32", 48);
            let mut full = rig.filled(&config, &tokens[..48]);
            if forks {
                full.cache().sequences().unwrap().fork(ONLY, FORK).unwrap();
            }
            rig.saved_tensors(&mut full, ONLY, &tokens[..48]);
            for seq in [ONLY, FORK].into_iter().take(1 + usize::from(forks)) {
                assert_eq!(full.cache().next_position(seq), Some(48), "{kind} {seq}");
            }
            let saved = SavedSession::open(&rig.path()).unwrap();
            let larger = rig.sized(kind, "f32", 64);
            let mut after = session(&rig.model, &larger);
            let n = resume(&mut after, ONLY, &saved, &rig.origin(&larger), usize::MAX).unwrap();
            assert_eq!((saved.stored(), n), (48, 48), "{kind}");
            let mut never_saved = rig.filled(&larger, &tokens[..48]);
            let more = &tokens[48..];
            assert_eq!(go_on(&mut after, more), go_on(&mut never_saved, more), "{kind}");
        }
    }
}

/// Regression: the last block of an image had the tokens that were removed from the text, or those of other texts.
#[test]
fn a_prefix_has_nothing_but_its_text() {
    for rig in Rig::with_and_without_windows() {
        let tokens = rig.counted(64);
        for storage in ["f32", "f16", "bf16", "q8", "q4", "t4", "t4-o"] {
            let mut session = rig.filled(&rig.sized("cells", storage, 128), &tokens[..37]);
            let alone = rig.frozen_tensors(&mut session, ONLY, &tokens[..37]);
            go_on(&mut session, &tokens[37..52]);
            session.truncate(ONLY, 37).unwrap();
            let mut after = rig.frozen_tensors(&mut session, ONLY, &tokens[..37]);
            // The session has no f16 rows of the recent group any more.
            after.extend(
                alone.iter().filter(|(name, _)| name.contains("recent")).map(|(n, b)| (n.clone(), b.clone())),
            );
            assert!(after == alone, "{storage}");
        }
    }
}

/// Regression: a conversation shorter than a recent group was refused as if its cache could not be rolled back, after an undo.
#[test]
fn a_short_conversation_is_saved_after_an_undo() {
    let rig = Rig::embedded();
    let limits = Limits { max_tokens: 3, stop: vec![], ignore_eos: true, no_cache: false };
    let say = |chat: &mut Chat, text: &str| {
        let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
        chat.send(text, &mut sampler, &limits, &mut ()).unwrap().generation.text
    };
    for kind in ["contiguous", "ring", "cells", "paged"] {
        let config = rig.sized(kind, "q8", 128);
        let (mut undone, mut plain) =
            (Chat::new(session(&rig.model, &config), None), Chat::new(session(&rig.model, &config), None));
        say(&mut plain, "Hello");
        say(&mut undone, "Hello");
        say(&mut undone, " more words");
        assert!(undone.undo());
        undone.save(&rig.origin(&config), &rig.path()).unwrap();
        let saved = SavedSession::open(&rig.path()).unwrap();
        assert!(saved.stored() > 0 && saved.messages().len() == 2, "{kind}: {}", saved.stored());
        let mut resumed = Chat::new(session(&rig.model, &config), None);
        let n = resumed.resume(&saved, &rig.origin(&config)).unwrap();
        assert_eq!(n, saved.stored() as usize, "{kind}");
        let expected = say(&mut plain, " and then");
        assert_eq!(say(&mut undone, " and then"), expected, "{kind}: it goes on");
        assert_eq!(say(&mut resumed, " and then"), expected, "{kind}: it is resumed");
    }
}

/// Regression: where one sequence of a session was resumed, the others could not be shortened any more. Its forks still cannot.
#[test]
fn others_are_shortened_beside_a_resumed_one() {
    let rig = Rig::new(&ModelFile::Path(fixtures("parity").join("gemma3")));
    let (tokens, others) = (rig.counted(60), rig.counted(50));
    for kind in ["cells", "tree"] {
        let config = rig.sized(kind, "f32", 256);
        rig.saved_tensors(&mut rig.filled(&config, &tokens), ONLY, &tokens);
        let saved = SavedSession::open(&rig.path()).unwrap();
        let mut both = rig.filled(&config, &others);
        both.cache().sequences().unwrap().seq_new(FORK).unwrap();
        assert_eq!(resume(&mut both, FORK, &saved, &rig.origin(&config), usize::MAX).unwrap(), 60);
        let forked = SeqId(2);
        both.cache().sequences().unwrap().fork(FORK, forked).unwrap();
        assert_eq!(both.check_cut(ONLY, 20), Ok(()));
        assert_eq!(both.truncate(ONLY, 20).unwrap(), 20, "{kind}");
        let mut alone = rig.filled(&config, &others[..20]);
        let more = &tokens[30..36];
        assert_eq!(go_on(&mut both, more), go_on(&mut alone, more), "{kind}");
        for seq in [FORK, forked] {
            let gone = Refused::WindowGone { seq, position: 20 };
            assert_eq!(both.check_cut(seq, 20), Err(gone.clone()), "{kind}");
            assert_eq!(both.cache().sequences().unwrap().seq_rm(seq, 20, u32::MAX), Err(gone), "{kind}");
            assert_eq!(both.truncate(seq, 20).unwrap(), 0, "{kind}");
        }
        // A sequence that was emptied begins anew.
        both.prefill(FORK, &others, &mut |_| true).unwrap();
        assert_eq!(both.truncate(FORK, 20).unwrap(), 20, "{kind}");
    }
}
