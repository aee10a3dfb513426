//! What the tiers below the cache hold and did, for the live view.
use futures_util::stream::{Stream, unfold};
use kvist_engine::serving::{Engine, TierStats};
use serde::Serialize;
use std::time::Duration;

/// Interval between two looks.
const EVERY: Duration = Duration::from_millis(400);

#[derive(Serialize)]
struct TierList {
    /// Fastest first.
    tiers: Vec<ListedTier>,
    /// Bytes on their way from the tiers, and to them.
    load_bytes: u64,
    store_bytes: u64,
}

#[derive(Serialize)]
struct ListedTier {
    name: String,
    /// `null`: the store does not count.
    bytes: Option<u64>,
    capacity_bytes: Option<u64>,
    blocks: Option<u64>,
    /// Since the server began.
    loaded_tokens: u64,
    errors: u64,
}

impl TierList {
    fn of(stats: &TierStats) -> TierList {
        let tiers = stats.stores.iter().zip(stats.counters.loaded_tokens);
        let listed = tiers.map(|(store, loaded_tokens)| ListedTier {
            name: store.name.clone(),
            bytes: store.usage.bytes,
            capacity_bytes: store.usage.capacity_bytes,
            blocks: store.usage.entries,
            loaded_tokens,
            errors: store.errors,
        });
        let (load_bytes, store_bytes) = (stats.load_bytes, stats.store_bytes);
        TierList { tiers: listed.collect(), load_bytes, store_bytes }
    }
}

/// The figures now. `None` without tiers.
async fn now(engine: &Engine) -> Option<TierStats> {
    let stats = engine.stats().tiers?;
    if stats.load_bytes + stats.store_bytes == 0 {
        return Some(stats);
    }
    // An idle engine updates its figures when it is asked something.
    engine.inspect(|_| ()).await;
    engine.stats().tiers
}

/// A stream of the figures as JSON: once at the start, then after every change. Without tiers it ends at once.
pub(crate) fn watch(engine: Engine) -> impl Stream<Item = String> {
    unfold((engine, None), |(engine, before): (Engine, Option<String>)| async move {
        loop {
            if before.is_some() {
                tokio::time::sleep(EVERY).await;
            }
            if !engine.is_alive() {
                return None;
            }
            let now = serde_json::to_string(&TierList::of(&now(&engine).await?)).ok()?;
            if before.as_ref() != Some(&now) {
                return Some((now.clone(), (engine, Some(now))));
            }
        }
    })
}
