//! Admission with small pools, sliding windows and failed attempts: effects on waiting and on running requests.

use crate::common::machine;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, Change, HitCounts, PagedSpec, PrefixSpec};
use kvist_scheduler::*;

fn group(capacity_tokens: u32, window: Option<u32>) -> GroupSpec {
    GroupSpec { capacity_tokens, visibility: Visibility { window, sinks: 0 }, max_step_tokens: 1 }
}
fn paged(groups: &[GroupSpec], block_tokens: u32, policy: &str) -> Cache {
    let prefix = Some(PrefixSpec { policy: policy.into(), ..PrefixSpec::default() });
    let groups = groups.to_vec();
    Cache::paged(&PagedSpec { block_tokens, groups, rollback_tokens: 0, prefix }).unwrap()
}
/// The same executor, which also records how many tokens each request had in each step.
fn telling(shares: &mut Vec<Vec<u32>>) -> Script<impl FnMut(u64, Batch<'_>, &mut Outcome)> {
    let Script(mut step) = machine(10);
    Script(move |at, batch: Batch<'_>, out: &mut Outcome| {
        shares.push(batch.work.iter().map(|work| work.n_tokens).collect());
        step(at, batch, out);
    })
}
/// A configuration without headroom.
fn tight(policy: &str) -> Config {
    let admission = Admission::Optimistic { headroom_tokens: 0 };
    Config { policy: policy.into(), admission, ..Config::default() }
}
/// A request of `family`; prompts of one family begin with the same tokens.
fn tokens(n: u32, family: u32) -> Prompt {
    Prompt::Tokens((0..n).map(|i| i + family * 10_000).collect())
}
fn due(id: u64, now: u64, prompt: u32, max_new: u32, deadline: u64) -> Request {
    Request { deadline_ns: Some(deadline), ..Request::new(id, now, prompt, max_new) }
}

/// A long prompt passes through a small sliding window in chunks: no request is ended, and no token is computed twice.
#[test]
fn prompts_longer_than_a_window_group_go_through_in_chunks() {
    let window = group(1024, Some(64));
    let rows: [(&str, &[GroupSpec], u32); 4] = [
        ("a window alone", &[window], 1),
        ("a window beside a full group", &[group(100_000, None), window], 1),
        ("three at once", &[group(100_000, None), window], 3),
        ("a window of four chunks' blocks", &[group(100_000, None), group(128, Some(64))], 1),
    ];
    let mut bad = Vec::new();
    for (name, groups, n) in rows {
        let mut s = Scheduler::new(Config::default(), paged(groups, 16, "lru"), None).unwrap();
        for id in 0..n {
            s.arrive(0, Request::new(id.into(), 0, 2000, 4)).unwrap();
        }
        let (mut m, mut now) = (machine(10), 0);
        while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut m) {
            now += elapsed_ns;
            assert!(now < 100_000, "{name}: it goes in circles");
        }
        for ended in s.drain_ended() {
            if (ended.end, ended.computed_tokens, ended.preemptions) != (End::Finished, 2003, 0) {
                bad.push(format!("{name}: {ended:?}"));
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Blocks that left a window are available memory: the second request does not wait for the end of the first.
#[test]
fn what_a_window_lets_go_of_admits_the_next() {
    let mut s = Scheduler::new(Config::default(), paged(&[group(1024, Some(64))], 16, "lru"), None).unwrap();
    let mut m = machine(10);
    s.arrive(0, Request::new(0, 0, 900, 100_000)).unwrap();
    s.arrive(0, Request::new(1, 0, 600, 10)).unwrap();
    s.iterate(0, &mut m);
    assert_eq!(s.n_waiting(), 1, "both prompts at once do not fit");
    s.iterate(10, &mut m);
    assert_eq!(s.n_waiting(), 0, "{} of 1024 cells held", s.used_cells());
}

/// A driver that waits between its steps asks whether the next plan may admit somebody.
#[test]
fn a_plan_may_admit_who_waits_unless_the_last_one_lacked_memory() {
    let config = Config { max_batch: 2, ..tight("fcfs") };
    let mut s = Scheduler::new(config, paged(&[group(96, None)], 16, "lru"), None).unwrap();
    let (mut m, mut now) = (machine(10), 0);
    assert!(!s.may_admit(), "no request waits");
    s.arrive(now, Request::new(0, now, 56, 5)).unwrap();
    assert!(s.may_admit());
    s.iterate(now, &mut m);
    assert!(!s.may_admit(), "no request waits");
    s.arrive(now, Request::new(1, now, 56, 5)).unwrap();
    assert!(s.may_admit(), "it was not tried");
    while s.n_running() > 0 {
        now += 10;
        s.iterate(now, &mut m);
        let ended = s.drain_ended().count() > 0;
        assert_eq!((s.n_waiting(), s.may_admit()), (1, ended), "at {now}");
    }
    s.iterate(now, &mut m);
    assert_eq!((s.n_running(), s.may_admit()), (1, false));
    s.arrive(now, Request::new(2, now, 4, 5)).unwrap();
    s.iterate(now, &mut m);
    s.arrive(now, Request::new(3, now, 4, 5)).unwrap();
    assert_eq!((s.n_running(), s.n_waiting(), s.may_admit()), (2, 1, false), "the batch is full");
}

/// A request that waits for memory is retried when another request has stored its prefix.
#[test]
fn a_longer_hit_admits_a_request_that_waited_for_memory() {
    let mut s = Scheduler::new(tight("fcfs"), paged(&[group(400, None)], 10, "lru"), None).unwrap();
    let mut m = machine(10);
    for id in 0..2 {
        s.arrive(0, Request { prompt: tokens(300, 1), ..Request::new(id, 0, 300, 50) }).unwrap();
    }
    s.iterate(0, &mut m);
    assert_eq!((s.n_running(), s.n_waiting()), (1, 1));
    s.iterate(10, &mut m);
    assert_eq!((s.n_running(), s.counters().hit_tokens), (2, 290));
}

/// A request that would not fit even if all lower-ranked requests were preempted preempts none of them. A request that
/// fits preempts as few as necessary.
#[test]
fn no_request_makes_way_for_nothing() {
    for preempted in [Preempted::Recompute, Preempted::Kept] {
        for (prompt, preemptions) in [(700, 0), (250, 1), (380, 2)] {
            let config = Config { preempted, ..tight("edf") };
            let mut s = Scheduler::new(config, paged(&[group(1000, None)], 10, "lru"), None).unwrap();
            let mut m = machine(10);
            s.arrive(0, due(0, 0, 500, 50, 1_000)).unwrap();
            s.arrive(0, due(1, 0, 140, 50, 9_000)).unwrap();
            s.arrive(0, due(2, 0, 140, 50, 9_001)).unwrap();
            for now in [0, 10, 20] {
                s.iterate(now, &mut m);
            }
            assert_eq!(s.n_running(), 3);
            s.arrive(30, due(3, 30, prompt, 50, 5_000)).unwrap();
            s.iterate(30, &mut m);
            s.iterate(40, &mut m);
            assert_eq!(s.counters().preemptions, preemptions, "{preempted:?} prompt of {prompt}");
            let entered = s.sequences().any(|(id, _)| id == RequestId(3));
            assert_eq!(entered, preemptions > 0, "{preempted:?} prompt of {prompt}");
        }
    }
}

/// Regression test: a preempted request found its own stored blocks, which was counted as a prefix hit between
/// prompts, and a request that asks for no hit was counted as a miss.
#[test]
fn a_prompt_counts_once_in_the_hit_ratio() {
    let mut s = Scheduler::new(tight("fcfs"), paged(&[group(40, None)], 4, "lru"), None).unwrap();
    for id in [0, 1] {
        let prompt = tokens(10, id);
        s.arrive(0, Request { prompt, ..Request::new(id.into(), 0, 10, 20) }).unwrap();
    }
    let (mut m, mut now) = (machine(10), 0);
    while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut m) {
        now += elapsed_ns;
    }
    s.arrive(now, Request { prompt: tokens(10, 0), skip_prefix_cache: true, ..Request::new(2, now, 10, 1) })
        .unwrap();
    s.iterate(now, &mut m);
    assert_eq!((s.counters().preemptions, s.drain_ended().count()), (1, 3));
    let opened = s.cache_mut().prefixes().unwrap().report().opened;
    assert_eq!(opened, HitCounts { n_prompts: 2, prompt_tokens: 20, hit_tokens: 0 });
}

/// Each token of a scored prompt has a row of logits. The token budget used to ignore them, so such steps took longer
/// than others with the same number of tokens, and requests decoding in the same step waited.
#[test]
fn tokens_of_which_something_is_wanted_count_twice() {
    for (token_budget, skip_prefix_cache, expected) in [
        (8, false, vec![vec![8], vec![2, 6], vec![1, 4]]),
        (8, true, vec![vec![4], vec![4], vec![2, 4], vec![1, 6]]),
        (9, true, vec![vec![5], vec![5], vec![1, 8], vec![1, 2]]),
        (2, true, vec![vec![1]; 9]),
    ] {
        let config = Config { max_batch: 2, max_batch_tokens: token_budget, ..Config::default() };
        let mut s = Scheduler::new(config, paged(&[group(1000, None)], 4, "lru"), None).unwrap();
        let mut shares = Vec::new();
        let mut m = telling(&mut shares);
        s.arrive(0, Request { skip_prefix_cache, ..Request::new(0, 0, 10, 10) }).unwrap();
        s.arrive(0, Request::new(1, 0, 10, 10)).unwrap();
        for turn in 0..expected.len() {
            s.iterate(10 * turn as u64, &mut m);
        }
        drop(m);
        assert_eq!(shares, expected, "{token_budget} tokens, skip_prefix_cache: {skip_prefix_cache}");
    }
}

/// Missing cells are taken from the step's prompt tokens; a decoded token is not a prompt token.
#[test]
fn prompts_are_shortened_by_what_is_missing() {
    let groups = [group(100_000, None), group(60, Some(32))];
    let mut s = Scheduler::new(tight("fcfs"), paged(&groups, 10, "lru"), None).unwrap();
    let mut shares = Vec::new();
    let mut m = telling(&mut shares);
    s.arrive(0, Request::new(0, 0, 20, 10)).unwrap();
    s.iterate(0, &mut m);
    // Four blocks are free. With the one for the decoded token the step needs five.
    s.arrive(10, Request::new(1, 10, 35, 10)).unwrap();
    s.iterate(10, &mut m);
    assert_eq!(s.counters().preemptions, 0);
    drop(m);
    assert_eq!(shares, [vec![20], vec![1, 25]]);
}

/// Beside other requests a prompt chunk is not cut below one block: the others would wait for a chunk that lets no
/// request advance. So one of the requests must be preempted.
#[test]
fn prompts_are_not_shortened_to_less_than_a_block() {
    let groups = [group(100_000, None), group(70, Some(32))];
    let config = Config { max_batch: 4, max_batch_tokens: 26, ..tight("fcfs") };
    let mut s = Scheduler::new(config, paged(&groups, 10, "lru"), None).unwrap();
    let mut m = machine(10);
    s.arrive(0, Request::new(0, 0, 29, 10)).unwrap();
    s.iterate(0, &mut m);
    s.iterate(10, &mut m);
    s.arrive(20, Request::new(1, 20, 45, 10)).unwrap();
    s.iterate(20, &mut m);
    let cached = |s: &Scheduler| [0, 1].map(|id| s.status(RequestId(id)).unwrap().cached_tokens);
    assert_eq!((cached(&s), s.counters().preemptions), ([30, 25], 0));
    // One block of the window group is free, and each request needs one. The prompt's five cells are not enough.
    s.iterate(30, &mut m);
    assert_eq!((cached(&s), s.counters().preemptions), ([31, 0], 1));
}

/// Cells missing in a window group are taken from the prompt chunk. Blocks cached in another group are not evicted for
/// them.
#[test]
fn a_window_that_is_short_evicts_nothing_elsewhere() {
    let groups = [group(70, Some(32)), group(90, None)];
    let config = Config { max_batch: 4, max_batch_tokens: 21, ..tight("fcfs") };
    let mut s = Scheduler::new(config, paged(&groups, 10, "lru"), None).unwrap();
    let mut m = machine(10);
    s.arrive(0, Request { prompt: tokens(20, 1), ..Request::new(9, 0, 20, 1) }).unwrap();
    s.iterate(0, &mut m);
    s.arrive(10, Request::new(0, 10, 29, 10)).unwrap();
    s.iterate(10, &mut m);
    s.iterate(20, &mut m);
    s.arrive(30, Request::new(1, 30, 45, 10)).unwrap();
    s.iterate(30, &mut m);
    let cached = |s: &Scheduler| [0, 1].map(|id| s.status(RequestId(id)).unwrap().cached_tokens);
    assert_eq!((cached(&s), s.evictable_cells(), s.free_cells()), ([30, 20], 20, 20));
    // A step of 1 and 20 tokens needs three blocks in each group: more than the window group has, and one more than
    // are free in the other. The shortened step needs two.
    s.iterate(40, &mut m);
    assert_eq!((cached(&s), s.evictable_cells(), s.free_cells()), ([31, 30], 20, 0));
    assert_eq!(s.counters().preemptions, 0);
}

/// A waiting request that kept its cache is judged like any other. It may cause lower-ranked requests to be dropped
/// but never its own cache, its own cells do not count as available, and requests that rank before the newcomer do not
/// protect those that rank behind it.
///
/// A (deadline 9,000) has computed 100 of 290 tokens when U, which is urgent, takes its memory. V (deadline 9,500)
/// overtakes it with a longer prefix hit, and so does N (deadline 9,200).
#[test]
fn a_request_that_waits_with_a_cache_is_a_victim_in_its_order() {
    const A: u64 = 10;
    const U: u64 = 11;
    const V: u64 = 12;
    const N: u64 = 13;
    let paused = |headroom_tokens, capacity_tokens| {
        let config = Config {
            admission: Admission::Optimistic { headroom_tokens },
            policy: "edf".into(),
            preempted: Preempted::Kept,
            prefix_order: PrefixOrder::Window(8),
            max_batch: 8,
            max_batch_tokens: 100,
            ..Config::default()
        };
        let mut s = Scheduler::new(config, paged(&[group(capacity_tokens, None)], 10, "lru"), None).unwrap();
        let (mut m, mut now) = (machine(10), 0);
        // The common prefix of V and N.
        for (family, prompt) in [(1, 120), (2, 150)] {
            if prompt < capacity_tokens / 3 {
                let known = Request::new(family.into(), now, prompt, 1);
                s.arrive(now, Request { prompt: tokens(prompt, family), ..known }).unwrap();
                while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut m) {
                    now += elapsed_ns;
                }
            }
        }
        s.arrive(now, due(A, now, 290, 50, 9_000)).unwrap();
        s.iterate(now, &mut m);
        s
    };
    let v = || Request { prompt: tokens(125, 1), ..due(V, 110, 125, 50, 9_500) };
    let stands = |s: &Scheduler, id| {
        let it = s.status(RequestId(id)).expect("it is live");
        (it.running, it.cached_tokens)
    };
    let mut m = machine(10);

    // U ends and V arrives. A's missing tokens fit if V is preempted, but not beside V.
    let mut s = paused(0, 400);
    s.arrive(100, due(U, 100, 110, 50, 1_000)).unwrap();
    s.iterate(100, &mut m);
    assert_eq!(stands(&s, A), (false, 100), "it keeps what it has computed");
    s.cancel(110, RequestId(U));
    s.arrive(110, v()).unwrap();
    s.iterate(110, &mut m);
    assert_eq!((stands(&s, A), stands(&s, V)), ((true, 200), (false, 0)));
    assert_eq!(s.counters().lost_tokens, 120, "V's alone");

    // With U running, A does not fit even if V is preempted, so V stays. N needs less and fits.
    let mut s = paused(400, 700);
    s.arrive(100, due(U, 100, 10, 500, 1_000)).unwrap();
    s.iterate(100, &mut m);
    assert_eq!(stands(&s, A), (false, 100));
    s.arrive(110, v()).unwrap();
    s.iterate(110, &mut m);
    assert_eq!((stands(&s, A), stands(&s, V)), ((false, 100), (true, 125)));
    s.arrive(120, Request { prompt: tokens(135, 2), ..due(N, 120, 135, 50, 9_200) }).unwrap();
    s.iterate(120, &mut m);
    assert_eq!((stands(&s, A), stands(&s, V)), ((false, 100), (false, 0)));
    assert_eq!(stands(&s, N), (true, 135));
}

/// Blocks that victims share with a request that stays, or with the newcomer, are not freed by preemption. Blocks that
/// only victims share are.
#[test]
fn shared_blocks_are_room_when_their_last_holder_goes() {
    // Running: an urgent request of 100 tokens, of family 1, and two of 400. Then one with a deadline between them
    // arrives.
    let rows = [
        ("victims share among themselves", 2, 2, (7, 500), Some(2)),
        ("victims share with a request that stays", 1, 1, (7, 500), Some(2)),
        ("blocks of a request that stays are not available", 1, 1, (7, 620), None),
        ("the newcomer shares with the victims, and fits beside them", 2, 2, (2, 500), Some(0)),
        ("what the new request shares is available or a hit, not both", 2, 2, (2, 620), None),
    ];
    let mut bad = Vec::new();
    for (name, first, second, (newcomer, prompt), expected) in rows {
        let mut s = Scheduler::new(tight("edf"), paged(&[group(700, None)], 10, "lru"), None).unwrap();
        let mut m = machine(10);
        let mut now = 0;
        s.arrive(0, Request { prompt: tokens(100, 1), ..due(0, 0, 100, 90, 10) }).unwrap();
        for (id, family) in [(1, first), (2, second)] {
            s.arrive(now, Request { prompt: tokens(400, family), ..due(id, now, 400, 90, 9_000) }).unwrap();
            for _ in 0..2 {
                s.iterate(now, &mut m);
                now += 10;
            }
        }
        assert_eq!(s.n_running(), 3, "{name}");
        s.arrive(now, Request { prompt: tokens(prompt, newcomer), ..due(3, now, prompt, 9, 5_000) }).unwrap();
        s.iterate(now, &mut m);
        let entered = s.sequences().any(|(id, _)| id == RequestId(3));
        if (s.counters().preemptions, entered) != (expected.unwrap_or(0), expected.is_some()) {
            bad.push(format!("{name}: entered {entered}, {:?}", s.counters()));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// A failed admission counts no block use and changes no block's position.
#[test]
fn refused_admissions_leave_no_trace() {
    let mut s = Scheduler::new(tight("fcfs"), paged(&[group(400, None)], 10, "lfu"), None).unwrap();
    let mut m = machine(10);
    s.arrive(0, Request { prompt: tokens(200, 1), ..Request::new(0, 0, 200, 1) }).unwrap();
    s.iterate(0, &mut m);
    assert_eq!((s.n_running(), s.evictable_cells()), (0, 200));
    s.arrive(10, Request { prompt: tokens(150, 2), ..Request::new(1, 10, 150, 100) }).unwrap();
    s.iterate(10, &mut m);
    s.iterate(20, &mut m);
    s.cache_mut().watch_blocks(true);
    // Of its 350 tokens, 200 are in evictable blocks. They are not available any more once it uses them, and 50
    // remain.
    s.arrive(30, Request { prompt: tokens(350, 1), ..Request::new(2, 30, 350, 10) }).unwrap();
    s.iterate(30, &mut m);
    assert_eq!((s.n_running(), s.n_waiting(), s.evictable_cells()), (1, 1, 200));
    let mut blocks = vec![];
    s.cache_mut().drain_block_events(&mut blocks);
    let moved = blocks.iter().filter(|e| matches!(e.change, Change::Hit | Change::Evictable)).count();
    assert_eq!(moved, 0, "{blocks:?}");
}

/// The head is overtaken by longer hits of equal rank 64 times and no more.
#[test]
fn ties_leave_no_request_behind() {
    let config = Config {
        policy: "edf".into(),
        prefix_order: PrefixOrder::Ties,
        max_batch: 1,
        max_batch_tokens: 100,
        ..Config::default()
    };
    let mut s = Scheduler::new(config, paged(&[group(1000, None)], 10, "lru"), None).unwrap();
    let (mut m, mut now) = (machine(10), 0);
    s.arrive(0, Request { prompt: tokens(20, 0), ..Request::new(0, 0, 20, 1) }).unwrap();
    s.iterate(0, &mut m);
    s.arrive(1, Request { prompt: tokens(20, 5), ..Request::new(1, 1, 20, 1) }).unwrap();
    s.drain_ended();
    let mut overtaken = 0;
    for id in 2..200 {
        now += 10;
        s.arrive(now, Request { prompt: tokens(20, 0), ..Request::new(id, now, 20, 1) }).unwrap();
        s.iterate(now, &mut m);
        if s.drain_ended().any(|ended| ended.id.0 == 1) {
            break;
        }
        overtaken += 1;
    }
    assert_eq!(overtaken, 64);
}

/// If an answer differs from the one a trace predicts, the sampled tokens count and the rest of the trace's answer is
/// not indexed. The result does not depend on whether the trace's tokens are shared.
#[test]
fn what_was_sampled_counts_not_what_a_trace_says() {
    let whole: Vec<u32> = (0..60).collect();
    let agrees = |i: u32| 40 + i;
    let differs = |i: u32| 900 + i;
    let mut bad = Vec::new();
    for shared in [false, true] {
        for (answers, says, hit) in
            [("as the trace", agrees as fn(u32) -> u32, 50), ("otherwise", differs as fn(u32) -> u32, 40)]
        {
            let cache = paged(&[group(1000, None)], 10, "lru");
            let mut s = Scheduler::new(Config::default(), cache, None).unwrap();
            let prompt = match shared {
                true => Prompt::SharedTokens(whole.as_slice().into()),
                false => Prompt::Tokens(whole.clone()),
            };
            s.arrive(0, Request { prompt, ..Request::new(0, 0, 40, 15) }).unwrap();
            let mut fed = Vec::new();
            let mut m = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
                out.elapsed_ns = 10;
                let first = batch.work[0].first;
                fed.extend_from_slice(batch.tokens(0).expect("all tokens are known"));
                let token = Some(says(if first == 0 { 0 } else { first - 39 }));
                out.sample_each(batch, |_| Sampled { token, finished: false });
            });
            let mut now = 0;
            while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut m) {
                now += elapsed_ns;
            }
            let expected: Vec<u32> = (0..40).chain((0..14).map(says)).collect();
            let name = format!("shared {shared}, answers {answers}");
            if fed != expected {
                bad.push(format!("{name}: fed {fed:?}"));
            }
            let content = kvist_cache::Content::Tokens(&whole);
            let found = s.cache().lookup("", &content).hit_tokens;
            if found != hit {
                bad.push(format!("{name}: {found} tokens of the trace are indexed, expected {hit}"));
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Regression test: a request that had generated more than expected ranked, once it had lost its cells, before the
/// request that had preempted it. It preempted that one in return, got its cells back from the prefix index, was
/// preempted again, and so on within one iteration without an end.
#[test]
fn two_requests_do_not_preempt_each_other_forever() {
    let work = TokenWork { prefill_ns: 1000, decode_ns: 10_000 };
    let lengths = LengthSource::RunningMean;
    let config = Config { policy: "laxity".into(), lengths, max_batch: 1, work, ..Config::default() };
    let mut s = Scheduler::new(config, paged(&[group(1000, None)], 4, "lru"), None).unwrap();
    let mut m = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
        out.elapsed_ns = 10;
        out.sample_each(batch, |_| Sampled { token: Some(9), finished: false });
    });
    // The first request teaches the scheduler to expect answers of one token.
    s.arrive(0, Request { prompt: tokens(4, 5), ..Request::new(0, 0, 4, 1) }).unwrap();
    s.iterate(0, &mut m);
    let deadline_ns = Some(1_000_000);
    s.arrive(10, Request { deadline_ns, prompt: tokens(10, 1), ..Request::new(1, 10, 10, 50) }).unwrap();
    for i in 1..22 {
        s.iterate(10 * i, &mut m);
    }
    // More urgent than the other was on arrival, and less than the other would be without its cells.
    let deadline_ns = Some(1_000_000 - 15 * 1000);
    s.arrive(220, Request { deadline_ns, prompt: tokens(1, 2), ..Request::new(2, 220, 1, 2) }).unwrap();
    let mut now = 220;
    while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, &mut m) {
        now += elapsed_ns;
    }
    let ended: Vec<_> = s.drain_ended().map(|e| (e.id.0, e.end, e.generated)).collect();
    assert_eq!(ended, [(0, End::Finished, 1), (1, End::Finished, 50), (2, End::Finished, 2)]);
}
