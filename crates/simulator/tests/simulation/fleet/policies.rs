//! What policies are for.
use super::{Uneven, cache, fleet};
use kvist_cache::Prompt;
use kvist_simulator::fleet::{Change, FleetOptions, FleetRun, POLICIES, Policy, WhatChanges};
use kvist_simulator::request::Request;
use kvist_testing::SplitMix64;

/// Requests of `groups` that begin alike with 160 tokens, one every `gap_ns`, in random order; requests of a group are one
/// chain of parents.
fn groups(n: u64, groups: u32, gap_ns: u64) -> Vec<Request> {
    let mut random = SplitMix64(1);
    let mut last = vec![None; groups as usize];
    (0..n)
        .map(|id| {
            let group = random.below(groups);
            let ids = (0..24).map(|i| u64::from(group) << 32 | if i < 20 { i } else { (id + 1) << 8 | i });
            Request {
                content: Prompt::Ids { ids: ids.collect(), tokens_per_id: 8, n_tokens: 192 },
                parent: last[group as usize].replace(id),
                ..Request::new(id, id * gap_ns, 190, 8)
            }
        })
        .collect()
}

fn serve(requests: &[Request], policy: Policy, workers: u32) -> FleetRun {
    let options = FleetOptions { policy, workers, rows: true, ..FleetOptions::default() };
    fleet(requests, &cache(40_000), &Uneven, &options)
}

/// Without eviction, a policy that keeps a group on one worker computes its beginning once, round robin on every worker. A
/// policy that weighs work against load moves a group now and then.
#[test]
fn prefixes_stay_together() {
    let requests = groups(600, 12, 5_000);
    let once = 600 * 160 - 12 * 160;
    for (policy, name, _) in POLICIES {
        let run = serve(&requests, *policy, 4);
        let hits = run.report.cache.counts.hit_tokens;
        let bounds = match *name {
            "session_hash" => once..=once,
            "prefix_aware" | "cache_aware" | "overlap_cost" => once - 18 * 160..=once,
            _ => 0..=once - 20 * 160,
        };
        assert!(bounds.contains(&hits), "{name}: {hits}, expected {bounds:?}");
        let imbalance = run.report.fleet.imbalance.requests.unwrap();
        match *name {
            "round_robin" => assert_eq!(imbalance, 1.0),
            _ => assert!((1.0..4.0).contains(&imbalance), "{name}: {imbalance}"),
        }
        let credited = run.report.fleet.credited_tokens;
        match *name {
            // With no delay the router knows what is cached; a request may find what is stored while it waits.
            "prefix_aware" | "overlap_cost" => {
                assert!(credited <= hits && credited * 20 > hits * 19, "{name}: {credited} of {hits}");
            }
            "cache_aware" => assert!(credited > hits / 2, "{name}: {credited} of {hits}"),
            _ => assert_eq!(credited, 0, "{name}"),
        }
    }
}

/// A router that learns late sends more requests to workers that compute a prefix again.
#[test]
fn late_views_cost_hits() {
    let mut requests = groups(600, 100, 5_000);
    requests.iter_mut().for_each(|request| request.parent = None);
    let hits: Vec<u64> = [0, 200_000, 10_000_000]
        .map(|view_delay_ns| {
            let policy = Policy::PrefixAware;
            let options = FleetOptions { policy, workers: 4, view_delay_ns, ..FleetOptions::default() };
            fleet(&requests, &cache(40_000), &Uneven, &options).report.cache.counts.hit_tokens
        })
        .to_vec();
    assert!(hits[0] > hits[1] && hits[1] > hits[2], "{hits:?}");
}

/// A failed worker's requests go elsewhere, and a worker that joins gets work.
#[test]
fn changes_are_followed() {
    let requests = groups(1200, 12, 4_000);
    for (policy, name, _) in POLICIES {
        let change = |at_ns, worker, what| Change { at_ns, worker, what };
        let options = FleetOptions {
            policy: *policy,
            workers: 3,
            changes: vec![
                change(1_000_001, 1, WhatChanges::Fails),
                change(2_000_001, 3, WhatChanges::Joins),
                change(4_000_001, 1, WhatChanges::Joins),
            ],
            rows: true,
            ..FleetOptions::default()
        };
        let run = fleet(&requests, &cache(40_000), &Uneven, &options);
        assert_eq!(run.report.requests.finished, 1200, "{name}");
        let list = &run.report.fleet.list;
        assert_eq!(list.len(), 4);
        // A policy that only remembers what it has sent finds all groups on the others, and sends nothing to a new worker
        // while loads are balanced.
        assert_eq!(list[3].requests > 0, *policy != Policy::CacheAware, "{name}");
    }
}
