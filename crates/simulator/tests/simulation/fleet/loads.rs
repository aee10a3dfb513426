//! Random loads and options.
use kvist_cache::Prompt;
use kvist_scheduler::{Admission, Config, POLICIES, Preempted, PrefixOrder, TokenWork};
use kvist_simulator::fleet::{Change, FleetOptions, Policy, WhatChanges};
use kvist_simulator::report::Objectives;
use kvist_simulator::request::Request;
use kvist_simulator::run::Options;
use kvist_testing::SplitMix64 as Random;
use std::sync::Arc;

/// Chats and single requests that share beginnings; some arrive at the same moment. `gap_ns`: the most between two.
pub fn requests(seed: u64, n: u32, gap_ns: u32) -> Vec<Request> {
    let mut random = Random(seed);
    let mut at = 500;
    let mut all: Vec<Request> = Vec::new();
    for id in 0..u64::from(n) {
        at += u64::from(random.below(3)) * u64::from(random.below(gap_ns));
        let mut request = Request::new(100 + id, at, 1 + random.below(120), 1 + random.below(60));
        let family = u64::from(random.below(4)) << 32;
        let n_tokens = request.prompt_tokens + random.below(30);
        let shared = random.below(12);
        // The first ids are shared by the family, the others are the request's own.
        let ids = (0..n_tokens.div_ceil(8)).map(|i| {
            let own = if i < shared { 0 } else { id + 1 };
            family + (own << 10) + u64::from(i)
        });
        request.content = Prompt::Ids { ids: ids.collect(), tokens_per_id: 8, n_tokens };
        request.salt = (random.below(3) == 0).then(|| Arc::from("tenant"));
        request.priority = random.below(3) as i32;
        request.deadline_ns = (random.below(3) > 0).then(|| at + u64::from(random.below(3_000_000)));
        if id > 0 && random.below(3) == 0 {
            request.parent = Some(100 + u64::from(random.below(id as u32)));
            request.think_ns = u64::from(random.below(50_000));
        }
        if random.below(40) == 0 {
            request.prompt_tokens = 2000; // refused: it never fits, or it has less content than tokens
        }
        all.push(request);
    }
    all
}

pub fn config(random: &mut Random) -> Config {
    let policies = POLICIES.len() as u32;
    Config {
        policy: POLICIES[random.below(policies) as usize].0.into(),
        max_batch: 1 + random.below(8),
        max_batch_tokens: 16 + random.below(60),
        admission: match random.below(2) {
            0 => Admission::Conservative,
            _ => Admission::Optimistic { headroom_tokens: random.below(40) },
        },
        preempted: [Preempted::Recompute, Preempted::Kept][random.below(2) as usize],
        prefix_order: [PrefixOrder::Off, PrefixOrder::Ties, PrefixOrder::Window(3)][random.below(3) as usize],
        work: TokenWork { prefill_ns: 10, decode_ns: 1200 },
        ageing_ns: 100_000,
        wait_for_prefix: random.below(2) == 0,
        ..Config::default()
    }
}

/// Options of a fleet without changes, of up to `most` workers.
pub fn options(random: &mut Random, policy: Policy, most: u32) -> FleetOptions {
    FleetOptions {
        run: Options {
            scheduler: config(random),
            max_new: (random.below(2) == 0).then_some(40),
            deadline_ns: (random.below(2) == 0).then_some(1_000_000),
            ..Options::default()
        },
        workers: 1 + random.below(most),
        policy,
        view_delay_ns: [0, 700, 40_000][random.below(3) as usize],
        objectives: Objectives { ttft_s: Some(1e-4), tpot_s: Some(1e-5) },
        rows: true,
        ..FleetOptions::default()
    }
}

/// Failures and joins within `until_ns` that fit the fleet, at any time, several at once among them.
pub fn changes(random: &mut Random, workers: u32, until_ns: u64) -> Vec<Change> {
    let mut alive = vec![true; workers as usize];
    let (mut at_ns, mut changes) = (0, Vec::new());
    for _ in 0..random.below(12) {
        at_ns += u64::from(random.below(3)) * u64::from(random.below((until_ns / 8) as u32));
        let worker = random.below(alive.len() as u32 + 1);
        let what = match alive.get(worker as usize) {
            Some(true) => WhatChanges::Fails,
            _ => WhatChanges::Joins,
        };
        match alive.get_mut(worker as usize) {
            Some(alive) => *alive = what == WhatChanges::Joins,
            None => alive.push(true),
        }
        changes.push(Change { at_ns, worker, what });
        // Often it is back at once, when events of its earlier life are still to come.
        if what == WhatChanges::Fails && random.below(2) == 0 {
            at_ns += u64::from(random.below(3)) * u64::from(random.below(2000));
            alive[worker as usize] = true;
            changes.push(Change { at_ns, worker, what: WhatChanges::Joins });
        }
    }
    changes
}
