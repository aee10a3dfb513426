//! Runs a text through a cache under test and a reference cache, token by token, and measures how much their next-token
//! distributions differ.
use crate::interrupt;
use anyhow::Context;
use indicatif::ProgressBar;
use kvist_cache::SeqId;
use kvist_device::{Registry, Storage};
use kvist_engine::divergence::{Divergence, Summary};
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{Model, Opened};
use std::sync::Arc;

/// The tokens of a text; a NUL byte ends a document.
pub fn tokens(opened: &Opened, text: &str) -> anyhow::Result<Vec<u32>> {
    let tokenizer =
        opened.tokenizer().context("this model has no tokenizer (no tokenizer.json next to it)")?;
    let mut tokens = Vec::new();
    for document in text.split('\0').filter(|d| !d.is_empty()) {
        tokens.extend(tokenizer.encode(document, true)?);
        tokens.extend(tokenizer.eos());
    }
    Ok(tokens)
}

/// The reference cache: contiguous, without an extra window, so it sees everything that the model lets it see.
pub fn reference(config: &CacheConfig, storage: Storage) -> CacheConfig {
    CacheConfig {
        kind: "contiguous".into(),
        k: storage,
        v: storage.for_values(),
        window: None,
        sinks: 0,
        keep: None,
        ..config.clone()
    }
}

/// The figures over all tokens, in windows of the cache's context; and whether the run was interrupted before the end.
/// Both caches return a row of logits for every token of a step.
pub fn score(
    model: &Arc<Model>,
    registry: &Registry,
    config: &CacheConfig,
    reference: &CacheConfig,
    tokens: &[u32],
    bar: &ProgressBar,
) -> anyhow::Result<(Summary, bool)> {
    let mut under_test = ModelSession::new(model, registry, config)?;
    let mut expected = ModelSession::new(model, registry, reference)?;
    let mut divergence = Divergence::default();
    let mut stopped = false;
    'text: for window in tokens.chunks(config.context_tokens as usize).filter(|w| w.len() > 1) {
        under_test.clear()?;
        expected.clear()?;
        let mut at = 0;
        for chunk in window.chunks(config.max_step_tokens as usize) {
            under_test.forward(&[SequenceInput::chain(SeqId::ONLY, chunk)], LogitRows::All)?;
            expected.forward(&[SequenceInput::chain(SeqId::ONLY, chunk)], LogitRows::All)?;
            for row in 0..chunk.len() {
                if let Some(next) = window.get(at + row + 1) {
                    divergence.add(expected.logits_row(row), under_test.logits_row(row), *next)?;
                }
            }
            at += chunk.len();
            bar.inc(chunk.len() as u64);
            if interrupt::interrupted() {
                stopped = true;
                break 'text;
            }
        }
    }
    Ok((divergence.summary().context("nothing was scored")?, stopped))
}
