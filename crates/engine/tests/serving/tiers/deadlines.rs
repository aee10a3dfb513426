//! Deadlines of jobs that wait for a tier, and the pace of those beside them.
use crate::engines::*;
use crate::pace::Starts;
use kvist_engine::serving::*;
use kvist_store::{BlockKey, BlockStore, BoxFuture, Ram, StoreError, StoreOver};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A store whose lookups never end.
struct Silent(Ram);

impl StoreOver for Silent {
    fn below(&self) -> &dyn BlockStore {
        &self.0
    }
    fn lookup<'a>(&'a self, _: &'a [BlockKey], _: Duration) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(std::future::pending())
    }
    fn has(&self, _: &BlockKey) -> Option<bool> {
        None // it would know without asking
    }
}

/// An engine over such a store, which it gives far more time than a test may take.
fn waiting_engine(settings: EngineConfig) -> Engine {
    let tier = TierStore {
        store: Arc::new(Silent(Ram::new(1 << 20))),
        bytes_per_s: u64::MAX,
        latency: Duration::ZERO,
    };
    let grace = Duration::from_secs(24 * 3600);
    let tiers = TierConfig { grace, ..TierConfig::new(vec![tier], b"a model".to_vec()) };
    engine(EngineConfig { tiers: Some(tiers), ..settings })
}

/// Regression: while all jobs waited for a tier, nothing looked at their deadlines.
#[tokio::test]
async fn a_deadline_passes_while_a_tier_is_awaited() {
    let engine = waiting_engine(config(1024));
    let prompt: Vec<u32> = (1..65).collect();
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let mut late = engine.submit(Job { deadline, ..greedy(&prompt, 5) }).unwrap();
    let heard = tokio::time::timeout(Duration::from_secs(600), receive(&mut late)).await.expect("no end");
    assert_eq!(heard.done.unwrap().finish, FinishReason::Deadline);
    assert!(heard.admitted.is_none());
}

/// A pace is kept while another job waits for a tier.
#[tokio::test]
async fn a_job_that_waits_for_a_tier_does_not_end_the_pace() {
    let (starts, mut settings) = (Starts::default(), config(1024));
    settings.watchers.push(Box::new(starts.clone()));
    let engine = waiting_engine(settings);
    let paced =
        |prompt: std::ops::Range<u32>, n| Job { pace: Some(1), ..greedy(&prompt.collect::<Vec<_>>(), n) };
    // Less than a block, so that no tier is asked.
    let mut running = engine.submit(paced(1..9, 2)).unwrap();
    let _waiting = engine.submit(paced(1..65, 1)).unwrap();
    assert_eq!(receive(&mut running).await.tokens.len(), 2);
    let starts = starts.of(&engine).await;
    assert!(starts[1] - starts[0] >= 1_000_000_000, "{starts:?}");
}
