//! Requests that share an unfinished prompt: the first computes it, the others wait until its blocks are stored.

use crate::common::{machine, paged};
use kvist_cache::Vocabulary;
use kvist_scheduler::*;
use kvist_testing::reference::SplitMix64 as Random;
use std::collections::BTreeMap;

fn scheduler(config: Config) -> Scheduler {
    let mut s = Scheduler::new(config, paged(2000, Vocabulary::Tokens), None).unwrap();
    s.record();
    s
}

fn waiting() -> Config {
    Config { wait_for_prefix: true, max_batch_tokens: 10, max_batch: 8, ..Config::default() }
}

fn request(id: u64, tokens: impl IntoIterator<Item = u32>) -> Request {
    let tokens: Vec<u32> = tokens.into_iter().collect();
    let n = tokens.len() as u32;
    Request { prompt: Prompt::Tokens(tokens), ..Request::new(id, 0, n, 3) }
}

fn drain(s: &mut Scheduler) -> Vec<Ended> {
    let (mut m, mut now) = (machine(10), 0);
    while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut m) {
        now += elapsed_ns;
    }
    let mut ended: Vec<Ended> = s.drain_ended().collect();
    ended.sort_by_key(|e| e.id);
    ended
}

/// Four answers to one prompt of 30 tokens: seven blocks are computed once, and the last two tokens four times.
#[test]
fn one_prompt_is_computed_once() {
    for (wait, computed) in [(true, [32, 4, 4, 4]), (false, [32, 32, 32, 32])] {
        let mut s = scheduler(Config { wait_for_prefix: wait, ..Config::default() });
        (0..4).for_each(|id| s.arrive(0, request(id, 0..30)).unwrap());
        let ended = drain(&mut s);
        assert_eq!(ended.iter().map(|e| e.computed_tokens).collect::<Vec<_>>(), computed, "wait: {wait}");
        let events = s.events().take();
        assert_eq!(events.contains("wait_for_prefix"), wait, "the log names it only when it is set");
        assert_eq!(replay(events.as_bytes(), None, None).unwrap(), s.decisions().take());
    }
}

/// A request with another prompt, or another salt, overtakes those that wait.
#[test]
fn others_are_not_held_up() {
    let mut s = scheduler(Config { max_batch_tokens: 1000, ..waiting() });
    s.arrive(0, request(0, 0..40)).unwrap();
    s.arrive(0, request(1, 0..40)).unwrap();
    s.arrive(0, request(2, 100..105)).unwrap();
    s.arrive(0, Request { salt: "tenant".into(), ..request(3, 0..40) }).unwrap();
    s.arrive(0, Request { skip_prefix_cache: true, ..request(4, 0..40) }).unwrap();
    let ended = drain(&mut s);
    let order: Vec<u64> = {
        let mut by_admission: Vec<(u64, u64)> =
            ended.iter().map(|e| (e.admitted_ns.expect("all were admitted"), e.id.0)).collect();
        by_admission.sort_unstable();
        by_admission.into_iter().map(|(_, id)| id).collect()
    };
    assert_eq!(order, [0, 2, 3, 4, 1]);
    assert_eq!(ended.iter().map(|e| e.hit_tokens).collect::<Vec<_>>(), [0, 36, 0, 0, 0]);
}

/// If the request that computes the prompt is cancelled, a waiting request continues where it stopped.
#[test]
fn a_cancelled_sibling_is_replaced() {
    let mut s = scheduler(waiting());
    (0..3).for_each(|id| s.arrive(0, request(id, 0..40)).unwrap());
    let mut m = machine(10);
    s.iterate(0, &mut m);
    s.iterate(10, &mut m);
    assert_eq!((s.n_running(), s.n_waiting()), (1, 2));
    assert!(s.cancel(15, RequestId(0)));
    s.iterate(20, &mut m);
    assert_eq!((s.n_running(), s.n_waiting()), (1, 1));
    let ended = drain(&mut s);
    assert_eq!(ended.iter().map(|e| e.hit_tokens).collect::<Vec<_>>(), [0, 20, 36]);
}

/// Branches of a common trunk wait for the trunk only.
#[test]
fn branches_wait_for_their_trunk_only() {
    let mut s = scheduler(Config { max_batch_tokens: 40, ..waiting() });
    for id in 0..3 {
        let branch = 100 * id as u32;
        s.arrive(0, request(id, (0..20).chain(branch..branch + 30))).unwrap();
    }
    let mut m = machine(10);
    s.iterate(0, &mut m);
    assert_eq!(s.n_running(), 1);
    s.iterate(10, &mut m); // the trunk is stored, and the first prompt leaves 30 more tokens
    assert_eq!(s.n_running(), 2);
    let ended = drain(&mut s);
    assert_eq!(ended.iter().map(|e| e.hit_tokens).collect::<Vec<_>>(), [0, 20, 20]);
}

/// The rule, checked from outside on random prompts of a small vocabulary: an admitted request shares no block with a
/// running request that this one has yet to store, beyond its own hit.
#[test]
fn admissions_obey_the_rule() {
    let (mut admissions, mut waits) = (0, 0);
    for seed in 0..60 {
        let mut random = Random(seed);
        let policy = POLICIES[seed as usize % POLICIES.len()].0;
        let config = Config { policy: policy.into(), max_batch: 4, ..waiting() };
        let mut s = scheduler(config);
        let mut prompts: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        let mut now = 0;
        for _ in 0..200 {
            if random.below(3) == 0 {
                let id = prompts.len() as u64;
                let (n, same) = (1 + random.below(40), random.below(40));
                let tokens: Vec<u32> = (0..n).map(|i| if i < same { 7 } else { random.below(2) }).collect();
                s.arrive(now, request(id, tokens.iter().copied())).unwrap();
                prompts.insert(id, tokens);
            } else if random.below(9) == 0 {
                s.cancel(now, RequestId(u64::from(random.below(1 + prompts.len() as u32))));
            }
            // The running requests and what they have stored, before the iteration.
            let status = |s: &Scheduler| -> BTreeMap<u64, (bool, u32)> {
                let live = prompts.keys().filter_map(|&id| Some((id, s.status(RequestId(id))?)));
                live.map(|(id, it)| (id, (it.running, it.cached_tokens))).collect()
            };
            let before = status(&s);
            s.decisions().take();
            if let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut machine(10)) {
                now += elapsed_ns;
            }
            let log = s.decisions().take();
            let mut running: BTreeMap<u64, u32> = before
                .iter()
                .filter(|(_, (runs, _))| *runs)
                .map(|(id, (_, cached))| (*id, cached / 4 * 4))
                .collect();
            for line in log.lines() {
                let line: serde_json::Value = serde_json::from_str(line).expect("every line is JSON");
                if let Some(id) = line["preempt"].as_u64() {
                    running.remove(&id);
                }
                let Some(id) = line["admit"].as_u64() else { continue };
                let hit = line["hit"].as_u64().expect("an admission has a hit") as u32;
                for (other, stored) in &running {
                    let common =
                        prompts[&id].iter().zip(&prompts[other]).take_while(|(a, b)| a == b).count() as u32;
                    let usable = common.min(prompts[&id].len() as u32 - 1) / 4 * 4;
                    assert!(usable <= hit.max(*stored), "{id} did not wait for {other}; seed {seed}");
                }
                admissions += 1;
                running.insert(id, hit);
            }
            let full = s.n_running() == 4;
            waits += u32::from(s.n_waiting() > 0 && !full);
        }
        drain(&mut s);
        assert_eq!((s.n_running(), s.n_waiting()), (0, 0), "seed {seed}");
    }
    assert!(admissions > 2000 && waits > 300, "{admissions} admissions, {waits} waits");
}
