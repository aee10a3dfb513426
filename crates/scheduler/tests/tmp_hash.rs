//! Temporary: hashes of logs.
use kvist_cache::kinds::{Cells, GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Step};
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;
use std::collections::BTreeMap;

fn cache(shape: u64) -> Cache {
    let cap = 96;
    let full = GroupSpec { capacity_tokens: cap, visibility: Visibility::FULL, max_step_tokens: cap };
    let w = |c, w| GroupSpec {
        capacity_tokens: c,
        visibility: Visibility { window: Some(w), sinks: 2 },
        max_step_tokens: cap,
    };
    let groups = match shape {
        0 => return Cache::new(vec![Box::new(Cells::new(&full))]),
        1 => vec![full],
        2 => vec![w(36, 9), full],
        3 => vec![w(36, 9)],
        4 => vec![full, GroupSpec { capacity_tokens: 60, ..full }],
        _ => vec![full, w(28, 5), w(40, 11)],
    };
    Cache::paged(&PagedSpec {
        block_tokens: 4,
        groups,
        rollback_tokens: 0,
        prefix: Some(PrefixSpec::default()),
    })
    .unwrap()
}

struct M {
    random: Random,
    fuse: bool,
    ids: bool,
    fail: bool,
    sampled: BTreeMap<u64, u32>,
    max_new: BTreeMap<u64, u32>,
}
fn length(id: u64, max_new: u32) -> u32 {
    1 + (Random(id ^ 0xabcd).next() % u64::from(max_new)) as u32
}
impl Executor for M {
    fn max_fused_steps(&mut self, _: u64, batch: Batch<'_>, limit: u32) -> u32 {
        if !self.fuse {
            return 1;
        }
        let left = batch
            .work
            .iter()
            .map(|w| {
                length(w.request.0, self.max_new[&w.request.0])
                    - self.sampled.get(&w.request.0).copied().unwrap_or(0)
            })
            .min()
            .unwrap();
        limit.min(left).min(1 + (batch.work.iter().map(|w| w.first).sum::<u32>() % 13))
    }
    fn execute(&mut self, _: u64, _: &mut Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        out.elapsed_ns = 1000 * u64::from(batch.steps);
        if self.fail && self.random.below(7) == 0 {
            out.failed = true;
            return;
        }
        let M { sampled, max_new, ids, .. } = self;
        let mut one = |w: &Work| {
            let s = sampled.entry(w.request.0).or_default();
            *s += batch.steps;
            let finished = *s == length(w.request.0, max_new[&w.request.0]);
            Sampled { token: ids.then_some(*s % 3), finished }
        };
        out.sample_each(batch, &mut one);
    }
}

#[test]
fn hash() {
    let mut h = 0xcbf29ce484222325u64;
    let mut hash = |s: &str| s.bytes().for_each(|b| h = (h ^ u64::from(b)).wrapping_mul(0x100000001b3));
    let mut bytes = 0;
    for (p, (policy, _)) in POLICIES.iter().enumerate() {
        for seed in 0..std::env::var("SEEDS").unwrap().parse::<u64>().unwrap() {
            if std::env::var("SKIP").unwrap_or_default().split(",").any(|s| s == format!("{policy}{seed}")) {
                continue;
            }
            if std::env::var("TRACE").is_ok() {
                eprintln!("{policy} {seed}");
            }
            let mut r = Random(seed << 8 | p as u64);
            let shape = r.below(6).into();
            let config = Config {
                policy: (*policy).into(),
                lengths: if r.below(2) == 0 { LengthSource::MaxNew } else { LengthSource::RunningMean },
                max_batch: 1 + r.below(6),
                max_batch_tokens: 6 + r.below(40),
                admission: match r.below(3) {
                    0 => Admission::Conservative,
                    1 => Admission::Optimistic { headroom_tokens: 0 },
                    _ => Admission::Optimistic { headroom_tokens: 9 },
                },
                preempted: if r.below(2) == 0 { Preempted::Recompute } else { Preempted::Kept },
                prefix_order: match r.below(3) {
                    0 => PrefixOrder::Off,
                    1 => PrefixOrder::Ties,
                    _ => PrefixOrder::Window(3),
                },
                ageing_ns: 5000,
                ..Config::default()
            };
            let mut s = Scheduler::new(config, cache(shape), None).unwrap();
            s.record();
            let ids = r.below(2) == 0;
            let mut m = M {
                random: Random(seed),
                fuse: !ids && r.below(2) == 0,
                ids,
                fail: r.below(3) == 0,
                sampled: BTreeMap::new(),
                max_new: BTreeMap::new(),
            };
            let (mut now, mut id) = (0, 0);
            for op in 0..150 {
                match r.below(8) {
                    0 | 1 => {
                        let n = 1 + r.below(50);
                        let mut q = Request::new(id, now, n, 1 + r.below(30));
                        q.priority = r.below(5) as i32;
                        q.deadline_ns = (r.below(4) > 0).then(|| now + u64::from(r.below(1 << 20)));
                        let f = r.below(3);
                        if r.below(3) > 0 {
                            q.prompt = Prompt::Tokens((0..n).map(|i| i / 9 * f).collect());
                        }
                        q.fresh = r.below(9) == 0;
                        m.max_new.insert(id, q.max_new);
                        id += 1;
                        s.arrive(now, q).unwrap();
                    }
                    2 if op % 4 == 0 => {
                        s.cancel(now, RequestId(u64::from(r.below(id as u32 + 1))));
                    }
                    _ => {
                        if let Turn::Ran { elapsed_ns, .. } = s.turn(now, &mut m) {
                            now += elapsed_ns
                        }
                    }
                }
            }
            let (e, d) = (s.events().take(), s.decisions().take());
            bytes += e.len() + d.len();
            hash(&e);
            hash(&d);
            hash(&format!("{:?}", s.drain_ended().collect::<Vec<_>>()));
            hash(&format!("{:?}", s.counters()));
        }
    }
    println!("HASH {h:x} of {bytes} bytes");
}
