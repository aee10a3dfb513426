//! An engine that keeps only some tokens of every request: prompts longer than the cache are answered, every request stays
//! within its bound, and requests that do not reach their budget get the text that they would get otherwise.
use crate::engines::*;
use kvist_engine::Error;
use kvist_engine::devices;
use kvist_engine::keep::KeepConfig;
use kvist_engine::serving::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Cells of the cache.
const CAPACITY: u32 = 640;
/// The largest prompt chunk of these engines.
const STEP: u32 = 64;

fn budget(by: &str) -> KeepConfig {
    format!("sinks=4,recent=32,top=32,by={by}").parse().unwrap()
}

fn keeping(by: &str) -> EngineConfig {
    let mut config = config(CAPACITY);
    config.keep_only(budget(by));
    config
}

/// Tokens without a meaning.
fn prompt(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (i * i * 7 + i * 13 + (i / 5) * seed) % 900).collect()
}

/// The most tokens that any request stored after a step.
struct Most(Arc<AtomicU32>);

impl Watcher for Most {
    fn stepped(&mut self, _: u64, _: u64, state: &mut EngineState) {
        let cache = state.scheduler.cache();
        for (_, seq) in state.scheduler.sequences() {
            self.0.fetch_max(cache.seq_len(seq).unwrap_or(0), SeqCst);
        }
    }
}

#[tokio::test]
async fn prompts_longer_than_the_cache_are_answered() {
    let long = prompt(1300, 3);
    let failure = receive(&mut engine(config(CAPACITY)).submit(greedy(&long, 8)).unwrap()).await.failure;
    assert!(matches!(failure, Some(Failure::NeverFits { .. })), "{failure:?}");
    for by in ["none", "last", "attention"] {
        let most = Arc::new(AtomicU32::new(0));
        let mut config = keeping(by);
        config.watchers.push(Box::new(Most(most.clone())));
        let engine = engine(config);
        let jobs = [(1300, 40), (900, 90), (20, 200), (1, 300)];
        let mut handles: Vec<_> =
            jobs.iter().map(|&(n, max_new)| engine.submit(greedy(&prompt(n, n), max_new)).unwrap()).collect();
        for (handle, (n, max_new)) in handles.iter_mut().zip(jobs) {
            let received = receive(handle).await;
            assert_eq!(received.failure, None, "{n} tokens by {by}");
            assert_eq!(received.tokens.len() as u32, max_new, "{n} tokens by {by}");
        }
        let bound = budget(by).budget(16) + STEP;
        let most = most.load(SeqCst);
        assert!((bound - STEP / 2..=bound).contains(&most), "{most} tokens of at most {bound} by {by}");
        engine.until_idle().await;
        let cells = engine
            .inspect(|state| (state.scheduler.used_cells(), state.scheduler.evictable_cells()))
            .await
            .expect("the engine runs");
        assert_eq!(cells, (0, 0), "no cell is lost, none is shared");
        let removed = engine.stats().removed_tokens.unwrap();
        assert!(removed > 1300, "{removed} tokens were removed by {by}");
    }
}

#[tokio::test]
async fn a_budget_that_is_not_reached_changes_nothing() {
    for (n, max_new) in [(60, 50), (9, 90)] {
        let prompt = prompt(n, 11);
        let expected = receive(&mut engine(config(CAPACITY)).submit(greedy(&prompt, max_new)).unwrap()).await;
        for by in ["none", "attention"] {
            let engine = engine(keeping(by));
            let received = receive(&mut engine.submit(greedy(&prompt, max_new)).unwrap()).await;
            assert_eq!(received.tokens, expected.tokens, "{n} tokens by {by}");
            assert_eq!(engine.stats().removed_tokens, Some(0));
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let start = |config| {
        let error = Engine::start(model().clone(), &devices::all(), config).map(drop).unwrap_err();
        let Error::Usage(error) = error else { panic!("{error}") };
        error
    };
    let mut indexed = keeping("none");
    indexed.paged.prefix = config(CAPACITY).paged.prefix;
    assert!(start(indexed).contains("a prefix index"));
    let mut recorded = keeping("none");
    recorded.record = true;
    assert!(start(recorded).contains("a recording"));
    let mut small = keeping("none");
    small.paged.cache.context_tokens = 200;
    let error = start(small);
    assert!(error.contains("holds 200 tokens") && error.contains("smaller budget"), "{error}");
    let mut in_the_cache = config(CAPACITY);
    in_the_cache.paged.cache.keep = Some(budget("none"));
    assert!(start(in_the_cache).contains("EngineConfig::keep"));
}
