//! Which blocks of the cache tiers have too, for the live view.
use futures_util::stream::{Stream, unfold};
use kvist_engine::serving::{BlocksBelow, Engine};
use serde::Serialize;
use std::time::Duration;

/// Interval between two looks. The engine copies a name for every cached block when anything has changed: some milliseconds of 100,000.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Below {
    /// The layer group whose block numbers these are.
    group: u16,
    /// For each tier, from the fastest on, runs of blocks that it has: the first block of a run and how many.
    tiers: Vec<Vec<(u32, u32)>>,
}

impl Below {
    fn of(below: &BlocksBelow, n_tiers: usize) -> Below {
        let blocks_of = |tier: usize| {
            let has = below.blocks.iter().filter(move |(_, tiers)| tiers & (1 << tier) != 0);
            has.map(|(block, _)| *block)
        };
        Below { group: below.group.0, tiers: (0..n_tiers).map(|tier| runs(blocks_of(tier))).collect() }
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
pub(crate) fn watch(engine: Engine) -> impl Stream<Item = String> {
    unfold(
        (engine, None, None),
        |(engine, mut seen, sent): (Engine, Option<u64>, Option<String>)| async move {
            loop {
                if seen.is_some() {
                    tokio::time::sleep(EVERY).await;
                }
                if !engine.is_alive() {
                    return None;
                }
                let changes = Some(engine.changes_below()?);
                if changes == std::mem::replace(&mut seen, changes) {
                    continue;
                }
                let n_tiers = engine.stats().tiers?.stores.len();
                let now = serde_json::to_string(&Below::of(&engine.blocks_below().await?, n_tiers)).ok()?;
                if sent.as_ref() != Some(&now) {
                    return Some((now.clone(), (engine, seen, Some(now))));
                }
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_cache::GroupId;

    #[test]
    fn blocks_are_written_as_runs_by_tier() {
        let blocks = vec![(3, 1), (4, 3), (5, 1), (9, 2), (11, 1)];
        let below = Below::of(&BlocksBelow { group: GroupId(2), blocks }, 3);
        let expected = r#"{"group":2,"tiers":[[[3,3],[11,1]],[[4,1],[9,1]],[]]}"#;
        assert_eq!(serde_json::to_string(&below).unwrap(), expected);
    }
}
