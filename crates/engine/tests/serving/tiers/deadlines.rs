//! Deadlines of jobs that wait for a tier.
use crate::engines::*;
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

/// Regression: while all jobs waited for a tier, nothing looked at their deadlines.
#[tokio::test]
async fn a_deadline_passes_while_a_tier_is_awaited() {
    let tier = TierStore {
        store: Arc::new(Silent(Ram::new(1 << 20))),
        bytes_per_s: u64::MAX,
        latency: Duration::ZERO,
    };
    // Far longer than the test may take.
    let grace = Duration::from_secs(24 * 3600);
    let tiers = TierConfig { grace, ..TierConfig::new(vec![tier], b"a model".to_vec()) };
    let engine = engine(EngineConfig { tiers: Some(tiers), ..config(1024) });
    let prompt: Vec<u32> = (1..65).collect();
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let mut late = engine.submit(Job { deadline, ..greedy(&prompt, 5) }).unwrap();
    let heard = tokio::time::timeout(Duration::from_secs(600), receive(&mut late)).await.expect("no end");
    assert_eq!(heard.done.unwrap().finish, FinishReason::Deadline);
    assert!(heard.admitted.is_none());
}
