//! Prompts that are retained, story by story. `tiers/` retains and forgets at random and checks every cell.
use crate::common::{machine, paged};
use kvist_cache::Vocabulary;
use kvist_scheduler::*;

/// 16 blocks of 4 tokens.
fn scheduler() -> Scheduler {
    Scheduler::new(Config::default(), paged(64, Vocabulary::Tokens), None).unwrap()
}

/// A prompt of `n` tokens that begins like no other.
fn prompt(first: u32, n: u32) -> Prompt {
    Prompt::Tokens((0..n).map(|i| 1000 * first + i).collect())
}

/// Serves a prompt; returns the tokens that the index supplied.
fn serve(s: &mut Scheduler, now: u64, id: u64, first: u32, n: u32, retain: Option<Retention>) -> u32 {
    let request = Request { prompt: prompt(first, n), retain, ..Request::new(id, now, n, 1) };
    s.arrive(now, request).unwrap();
    while s.iterate(now, &mut machine(1)) != Iteration::NothingToDo {}
    let ended = s.drain_ended().next().unwrap();
    assert_eq!(ended.end, End::Finished, "prompt {first}");
    ended.hit_tokens
}

const LONG: Retention = Retention { ttl_ns: 1_000_000, priority: 0, pin: false };

#[test]
fn a_retained_prompt_outlives_newer_ones() {
    for retain in [None, Some(LONG)] {
        let mut s = scheduler();
        serve(&mut s, 0, 0, 1, 17, retain);
        assert_eq!(s.retained_tokens(), if retain.is_some() { 16 } else { 0 });
        // Three prompts that together need more than the cache.
        for id in 2..5 {
            serve(&mut s, id, id, id as u32, 25, None);
        }
        let hit = serve(&mut s, 9, 9, 1, 17, None);
        assert_eq!(hit, if retain.is_some() { 16 } else { 0 });
    }
}

/// Three retained prompts of 8 tokens; a request of 53 tokens leaves room for one.
#[test]
fn what_gives_way_first() {
    let with = |priority, ttl_ns, pin| Some(Retention { ttl_ns, priority, pin });
    let cases = [
        // the lower priority, then the shorter time, and pins last
        ([with(2, 9000, false), with(1, 9000, false), with(3, 9000, false)], 3),
        ([with(0, 9000, false), with(0, 8000, false), with(0, 7000, false)], 1),
        ([with(0, 9000, true), with(200, 9000, false), with(100, 9000, false)], 1),
        // what has expired goes before all others, a pin too
        ([with(0, 10, true), with(1, 9000, false), with(0, 9000, false)], 2),
    ];
    for (i, (retain, last)) in cases.into_iter().enumerate() {
        let mut s = scheduler();
        for (first, retain) in (1..).zip(retain) {
            serve(&mut s, 0, first.into(), first, 9, retain);
        }
        assert_eq!(s.retained_tokens(), 24);
        serve(&mut s, 100, 10, 10, 53, None);
        assert_eq!(s.retained_tokens(), 8, "case {i}");
        for first in 1..4 {
            let n = s.cache().lookup("", &prompt(first, 9).content(9)).hit_tokens;
            assert_eq!(n, if first == last { 8 } else { 0 }, "case {i}, prompt {first}");
        }
    }
}

/// A request comes before everything that is retained, pinned or not.
#[test]
fn no_request_is_refused_for_a_retained_prompt() {
    let mut s = scheduler();
    for first in 1..4 {
        serve(&mut s, 0, first.into(), first, 9, Some(Retention { pin: true, ..LONG }));
    }
    assert_eq!(serve(&mut s, 1, 9, 9, 63, None), 0);
    assert_eq!(s.retained_tokens(), 0);
    // One that begins like a retained prompt has its blocks already.
    serve(&mut s, 2, 10, 8, 29, Some(Retention { pin: true, ..LONG }));
    assert_eq!(serve(&mut s, 3, 11, 8, 63, None), 28);
}

#[test]
fn at_most_half_of_the_cache_is_retained() {
    let mut s = scheduler();
    serve(&mut s, 0, 1, 1, 61, Some(LONG));
    assert_eq!(s.retained_tokens(), 32, "the beginning of a long prompt");
    serve(&mut s, 1, 2, 1, 61, Some(LONG));
    assert_eq!(s.retained_tokens(), 32, "the same prompt counts once");
    serve(&mut s, 2, 3, 3, 9, Some(Retention { priority: 1, ..LONG }));
    assert_eq!(s.retained_tokens(), 8, "the other one has given way");
    serve(&mut s, 3, 4, 4, 33, Some(LONG));
    assert_eq!(s.retained_tokens(), 8, "it does not displace what has a higher priority");
}

/// Regression: a prompt whose time was over kept others of a lower priority from being retained.
#[test]
fn what_is_over_displaces_nothing() {
    let mut s = scheduler();
    serve(&mut s, 0, 1, 1, 33, Some(Retention { ttl_ns: 10, priority: 200, pin: true }));
    serve(&mut s, 9, 2, 2, 9, Some(LONG));
    assert_eq!(s.retained_tokens(), 32, "the first one is still pinned");
    serve(&mut s, 11, 3, 3, 9, Some(LONG));
    assert_eq!(s.retained_tokens(), 8, "it was, until 10 ns after its end");
}

#[test]
fn what_is_forgotten_is_no_hit() {
    let mut s = scheduler();
    serve(&mut s, 0, 1, 1, 17, Some(Retention { pin: true, ..LONG }));
    serve(&mut s, 0, 2, 2, 9, None);
    assert_eq!(s.forget(1, "another salt"), 0);
    assert_eq!(s.forget(1, ""), 6);
    assert_eq!((s.retained_tokens(), s.free_cells()), (0, 64));
    assert_eq!(serve(&mut s, 2, 3, 1, 17, None), 0);
}
