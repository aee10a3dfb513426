//! Which blocks of the cache tiers have too, for the live view.
use crate::state::ServerState;
use futures_util::stream::{Stream, unfold};
use kvist_engine::serving::{BlocksBelow, Engine};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Interval between two looks. The engine copies the names of the cached blocks when anything has changed: some milliseconds of 100,000.
const EVERY: Duration = Duration::from_secs(1);

/// What was seen last: all listeners share a look.
#[derive(Default)]
pub(crate) struct LastLook(Mutex<Option<Look>>);

struct Look {
    at: Instant,
    changes: u64,
    json: Arc<str>,
}

impl LastLook {
    /// What is below, as JSON, at most [`EVERY`] ago. `None` without tiers, or if the engine has ended.
    async fn now(&self, engine: &Engine) -> Option<Arc<str>> {
        let mut last = self.0.lock().await;
        let changes = engine.changes_below()?;
        if let Some(look) = last.as_ref().filter(|look| look.changes == changes || look.at.elapsed() < EVERY)
        {
            return Some(look.json.clone());
        }
        let n_tiers = engine.stats().tiers?.stores.len();
        let below = Below::of(&engine.blocks_below().await?, n_tiers);
        let json: Arc<str> = serde_json::to_string(&below).ok()?.into();
        *last = Some(Look { at: Instant::now(), changes, json: json.clone() });
        Some(json)
    }
}

#[derive(Serialize)]
struct Below {
    /// The layer group whose block numbers these are.
    group: u16,
    /// For each tier, from the fastest on, runs of blocks that it has: the first block of a run and how many.
    runs: Vec<Vec<(u32, u32)>>,
}

impl Below {
    fn of(below: &BlocksBelow, n_tiers: usize) -> Below {
        let blocks_of = |tier: usize| {
            let has = below.blocks.iter().filter(move |(_, tiers)| tiers & (1 << tier) != 0);
            has.map(|(block, _)| *block)
        };
        Below { group: below.group.0, runs: (0..n_tiers).map(|tier| runs(blocks_of(tier))).collect() }
    }
}

/// Ascending numbers, as runs without a gap.
fn runs(numbers: impl Iterator<Item = u32>) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((first, n)) if *first + *n == number => *n += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

/// A stream of it as JSON: once at the start, then after every change. Without tiers it ends at once.
pub(crate) fn watch(state: Arc<ServerState>) -> impl Stream<Item = Arc<str>> {
    unfold((state, None), |(state, before): (Arc<ServerState>, Option<Arc<str>>)| async move {
        loop {
            if before.is_some() {
                tokio::time::sleep(EVERY).await;
            }
            if !state.engine.is_alive() {
                return None;
            }
            let now = state.below.now(&state.engine).await?;
            if before.as_ref() != Some(&now) {
                return Some((now.clone(), (state, Some(now))));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_cache::GroupId;

    #[test]
    fn blocks_are_written_as_runs_by_tier() {
        let blocks = vec![(3, 1), (4, 3), (5, 1), (9, 2), (11, 1)];
        let below = Below::of(&BlocksBelow { group: GroupId(2), blocks }, 3);
        let expected = r#"{"group":2,"runs":[[[3,3],[11,1]],[[4,1],[9,1]],[]]}"#;
        assert_eq!(serde_json::to_string(&below).unwrap(), expected);
    }
}
