//! A fleet of one worker gives what a single run gives, and steps that run as one what single steps give.
use super::loads::{config, requests};
use super::{Uneven, cache, fleet, loads, tiers};
use kvist_cache::Cache;
use kvist_simulator::cost::{ConstantRates, StepCost};
use kvist_simulator::fleet::{FleetOptions, POLICIES};
use kvist_simulator::report::{Objectives, Report};
use kvist_simulator::run::{self, Options};
use kvist_testing::SplitMix64;

#[test]
fn one_worker_is_a_single_run() {
    compare(false);
}

/// Tiers of a worker's own are those of a single run.
#[test]
fn one_worker_with_tiers_is_a_single_run() {
    compare(true);
}

fn compare(with_tiers: bool) {
    let mut loaded = 0;
    let rates = ConstantRates::new(3.0, 0.4).unwrap();
    let mut random = SplitMix64(3);
    for round in 0..60 {
        let requests = requests(round, 120, 60_000);
        let cost: &dyn StepCost = if round % 2 == 0 { &Uneven } else { &rates };
        let spec = cache([400, 4000][round as usize % 2]);
        let mut options = FleetOptions {
            policy: POLICIES[round as usize % POLICIES.len()].0,
            objectives: Objectives { ttft_s: Some(1e-4), tpot_s: Some(1e-5) },
            run: Options { scheduler: config(&mut random), max_new: Some(40), ..Options::default() },
            rows: true,
            ..FleetOptions::default()
        };
        if with_tiers {
            tiers::random(&mut random, false, &mut options);
        }
        let single = Cache::paged(&spec).unwrap();
        let single = run::run(&requests, single, cost, &options.run, None, &mut |_| ()).unwrap();
        let of_fleet = fleet(&requests, &spec, cost, &options);
        assert_eq!(of_fleet.rows, single.record.requests, "round {round}");
        let single = Report::of(&single.record, &options.objectives);
        let mut of_fleet = of_fleet.report;
        if with_tiers {
            // After the last request a single run still ends copies, which may evict blocks ahead of a step that never comes.
            let (of_fleet, single) =
                (&mut of_fleet.cache.counts.evicted_blocks, single.cache.counts.evicted_blocks);
            assert!(*of_fleet <= single && single - *of_fleet < 100, "round {round}: {of_fleet} of {single}");
            *of_fleet = single;
        }
        assert_eq!(of_fleet.cache, single.cache, "round {round}");
        assert_eq!(of_fleet.tiers, single.tiers, "round {round}");
        loaded += single.tiers.map_or(0, |tiers| tiers.record.loaded_tokens);
        assert_eq!(of_fleet.steps, single.steps, "round {round}");
        assert_eq!(of_fleet.requests, single.requests, "round {round}");
        assert_eq!(of_fleet.throughput, single.throughput, "round {round}");
        assert_eq!(of_fleet.objectives, single.objectives, "round {round}");
        assert_eq!(of_fleet.latency.itl_s, single.latency.itl_s, "round {round}");
        // Percentiles come from a histogram.
        for (a, b) in [
            (of_fleet.latency.ttft_s, single.latency.ttft_s),
            (of_fleet.latency.end_to_end_s, single.latency.end_to_end_s),
            (of_fleet.latency.queue_s, single.latency.queue_s),
            (of_fleet.latency.tpot_s, single.latency.tpot_s),
        ] {
            let (a, b) = (a.unwrap(), b.unwrap());
            assert_eq!(a.n, b.n);
            assert!((a.mean - b.mean).abs() < 1e-9 + b.mean * 1e-6, "round {round}: {a:?} instead of {b:?}");
        }
    }
    assert_eq!(loaded > 1000, with_tiers, "{loaded} tokens loaded");
}

#[test]
fn steps_that_run_as_one_change_nothing() {
    let mut random = SplitMix64(8);
    for round in 0..60 {
        let requests = requests(round, 150, 15_000);
        let policy = POLICIES[round as usize % POLICIES.len()].0;
        let mut options = loads::options(&mut random, policy, 6);
        options.changes = loads::changes(&mut random, options.workers, 2_000_000);
        let spec = cache([400, 4000][round as usize % 2]);
        let together = fleet(&requests, &spec, &Uneven, &options);
        options.run.one_by_one = true;
        let one_by_one = fleet(&requests, &spec, &Uneven, &options);
        assert_eq!(together.rows, one_by_one.rows, "round {round}");
        assert_eq!(together.report, one_by_one.report, "round {round}");
        assert!(together.turns < one_by_one.turns, "round {round}: nothing ran together");
    }
}
