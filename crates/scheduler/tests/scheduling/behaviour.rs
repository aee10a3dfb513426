//! Scheduler behaviour in particular cases, mostly as tables.

use crate::common::{cells, group, machine, paged};
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, Vocabulary};
use kvist_scheduler::*;
use std::sync::Arc;

/// Runs until nothing is left; returns the requests in the order in which they ended.
fn finish(scheduler: &mut Scheduler, mut now_ns: u64) -> Vec<Ended> {
    let mut executor = machine(1000);
    while let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now_ns, &mut executor) {
        now_ns += elapsed_ns;
    }
    scheduler.drain_ended().collect()
}

fn ids(ended: &[Ended]) -> Vec<u64> {
    ended.iter().map(|e| e.id.0).collect()
}

#[test]
fn policies_order_as_they_say() {
    // (id, arrival, prompt, max_new, deadline, priority); all have arrived when the first step begins.
    let requests = [
        (0, 0, 40, 10, Some(90_000_000), 0),
        (1, 10, 4, 2, None, 1),
        (2, 20, 60, 5, Some(60_000_000), 3),
        (3, 30, 10, 9, Some(95_000_000), 0),
    ];
    let rows: [(&str, u64, [u64; 4]); 8] = [
        ("fcfs", 0, [0, 1, 2, 3]),
        ("sjf", 0, [1, 2, 3, 0]), // 50 000 a decoded token, 1 000 one of the prompt
        ("srpt", 0, [1, 2, 3, 0]),
        ("edf", 0, [2, 0, 3, 1]),
        ("laxity", 0, [2, 0, 3, 1]),
        ("priority", 0, [0, 1, 2, 3]),    // a level is worth nothing
        ("priority", 8, [2, 0, 1, 3]),    // 0, 10 − 8, 20 − 24, 30
        ("priority", 1000, [2, 1, 0, 3]), // waiting is worth next to nothing
    ];
    let mut bad = Vec::new();
    for (policy, ageing_ns, expected) in rows {
        let config = Config {
            policy: policy.into(),
            max_batch: 1,
            max_batch_tokens: 100,
            ageing_ns,
            work: TokenWork { prefill_ns: 1000, decode_ns: 50_000 },
            ..Config::default()
        };
        let mut scheduler = Scheduler::new(config, cells(1000), None).unwrap();
        for (id, at, prompt, max_new, deadline_ns, priority) in requests {
            let request = Request { deadline_ns, priority, ..Request::new(id, at, prompt, max_new) };
            scheduler.arrive(30, request).unwrap();
        }
        let order = ids(&finish(&mut scheduler, 30));
        if order != expected {
            bad.push(format!("{policy} {ageing_ns}: {order:?}, expected {expected:?}"));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// The lengths of finished answers predict those of the next ones.
#[test]
fn lengths_are_learnt_from_what_finished() {
    for (lengths, expected) in [(LengthSource::RunningMean, [1, 2]), (LengthSource::MaxNew, [2, 1])] {
        let config = Config {
            policy: "sjf".into(),
            lengths,
            max_batch: 1,
            work: TokenWork { prefill_ns: 1000, decode_ns: 50_000 },
            ..Config::default()
        };
        let mut scheduler = Scheduler::new(config, cells(1000), None).unwrap();
        scheduler.arrive(0, Request::new(0, 0, 10, 2)).unwrap();
        assert_eq!(ids(&finish(&mut scheduler, 0)), [0]);
        // Two tokens each by the current estimate; 100 and 3 at most.
        scheduler.arrive(9000, Request::new(1, 9000, 10, 100)).unwrap();
        scheduler.arrive(9000, Request::new(2, 9000, 40, 3)).unwrap();
        assert_eq!(ids(&finish(&mut scheduler, 9000)), expected, "{lengths:?}");
    }
}

/// A turn that runs nothing and ends no request logs no line. One that ends a request logs a line, because a replay
/// could not know the time otherwise.
#[test]
fn an_idle_turn_is_an_event_where_it_ends_a_request() {
    let mut scheduler = Scheduler::new(Config::default(), cells(100), None).unwrap();
    scheduler.record();
    scheduler.arrive(0, Request::new(0, 0, 10, 3)).unwrap();
    finish(&mut scheduler, 0);
    let events = scheduler.events().take();
    assert_eq!(events.lines().count(), 1 + 1 + 3, "a header, an arrival, three steps: {events}");

    // A window group that is smaller than its window: a step that does not fit it when alone never will.
    let windowed = GroupSpec {
        capacity_tokens: 8,
        visibility: Visibility { window: Some(64), sinks: 0 },
        max_step_tokens: 1,
    };
    let cache = || {
        let groups = vec![group(1000), windowed];
        Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix: None }).unwrap()
    };
    let mut scheduler = Scheduler::new(Config::default(), cache(), None).unwrap();
    scheduler.record();
    scheduler.arrive(0, Request::new(0, 0, 20, 3)).unwrap();
    let ended = finish(&mut scheduler, 0);
    assert_eq!(ended[0].end, End::Refused(RefusalReason::CacheFull));
    let (events, decisions) = (scheduler.events().take(), scheduler.decisions().take());
    assert!(events.ends_with("\"idle\":true}\n"), "{events}");
    assert_eq!(replay(events.as_bytes(), cache(), None).unwrap(), decisions);
}

/// Under an endless stream of urgent requests, a request of level 0 waits no longer than the difference in levels is
/// worth.
#[test]
fn ageing_leaves_no_request_behind() {
    let config = Config { policy: "priority".into(), max_batch: 1, ageing_ns: 50_000, ..Config::default() };
    let mut scheduler = Scheduler::new(config, cells(1000), None).unwrap();
    let (mut now_ns, mut executor, mut waited) = (0, machine(1000), None);
    scheduler.arrive(0, Request::new(0, 0, 3, 1)).unwrap();
    for id in 1..2000 {
        let urgent = Request { priority: 4, ..Request::new(id, now_ns, 3, 1) };
        scheduler.arrive(now_ns, urgent).unwrap();
        if let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now_ns, &mut executor) {
            now_ns += elapsed_ns;
        }
        if let Some(ended) = scheduler.drain_ended().find(|e| e.id.0 == 0) {
            waited = ended.admitted_ns;
        }
    }
    // Four levels at 50,000 ns. The stream of one request per step is served as fast as it arrives.
    let waited = waited.expect("it was served");
    assert!((200_000..=202_000).contains(&waited), "it waited {waited} ns");
}

#[test]
fn what_can_never_be_served_is_refused_on_arrival() {
    let ids: Arc<[u64]> = (0..4).collect();
    let with = |prompt: Prompt| Request { prompt, ..Request::new(1, 0, 10, 5) };
    let rows = [
        (Request::new(1, 0, 0, 5), Some(RefusalReason::EmptyPrompt)),
        (Request::new(1, 0, 5, 0), Some(RefusalReason::NothingToGenerate)),
        (Request::new(1, 0, u32::MAX, 5), Some(RefusalReason::Malformed)),
        (Request::new(1, 0, 60, 6), Some(RefusalReason::NeverFits)), // 65 tokens, and the last is never fed
        (Request::new(1, 0, 60, 5), None),
        (with(Prompt::Tokens(vec![1; 9])), Some(RefusalReason::Malformed)),
        (with(Prompt::Tokens(vec![1; 10])), None),
        (
            with(Prompt::Ids { ids: ids.clone(), tokens_per_id: 4, n_tokens: 10 }),
            Some(RefusalReason::ForeignContent),
        ),
        (with(Prompt::Ids { ids, tokens_per_id: 2, n_tokens: 10 }), Some(RefusalReason::Malformed)),
    ];
    let mut bad = Vec::new();
    for (request, expected) in rows {
        let mut scheduler = Scheduler::new(Config::default(), paged(66, Vocabulary::Tokens), None).unwrap();
        scheduler.arrive(0, request.clone()).unwrap();
        let ended: Vec<Ended> = scheduler.drain_ended().collect();
        let found = ended.first().map(|e| e.end);
        if found != expected.map(End::Refused) {
            bad.push(format!("{request:?}: {found:?}, expected {expected:?}"));
        }
        if found.is_none() {
            assert_eq!(scheduler.arrive(0, request.clone()), Err(Duplicate(request.id)));
            assert_eq!(finish(&mut scheduler, 0)[0].end, End::Finished);
            scheduler.arrive(0, request).unwrap(); // it ended, so the id is free again
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Two answers outgrow the cache: the later request is preempted and recomputes only the tokens it lost.
#[test]
fn preempts_the_lowest_ranked_when_answers_outgrow_the_cache() {
    let config = Config { admission: Admission::Optimistic { headroom_tokens: 0 }, ..Config::default() };
    let mut scheduler = Scheduler::new(config.clone(), cells(40), None).unwrap();
    scheduler.arrive(0, Request::new(0, 0, 10, 20)).unwrap();
    scheduler.arrive(0, Request::new(1, 0, 10, 20)).unwrap();
    let ended = finish(&mut scheduler, 0);
    assert_eq!(ids(&ended), [0, 1]);
    assert_eq!((ended[0].preemptions, ended[1].preemptions), (0, 1));
    // Both have 20 tokens in the cache when it is full.
    assert_eq!((ended[1].lost_tokens, ended[1].computed_tokens), (20, 29 + 20));
    assert_eq!(ended[1].generated, 20);

    let config = Config { admission: Admission::Conservative, ..config };
    let mut scheduler = Scheduler::new(config, cells(40), None).unwrap();
    scheduler.arrive(0, Request::new(0, 0, 10, 20)).unwrap();
    scheduler.arrive(0, Request::new(1, 0, 10, 20)).unwrap();
    let ended = finish(&mut scheduler, 0);
    assert_eq!((ids(&ended), scheduler.counters().preemptions), (vec![0, 1], 0));
}

/// The memory of a cancelled request is available in the next step.
#[test]
fn cancellation_frees_memory_before_the_next_step() {
    let mut scheduler = Scheduler::new(Config::default(), cells(40), None).unwrap();
    scheduler.arrive(0, Request::new(0, 0, 30, 5)).unwrap();
    scheduler.arrive(0, Request::new(1, 0, 35, 5)).unwrap();
    scheduler.iterate(0, &mut machine(1000));
    assert_eq!((scheduler.n_running(), scheduler.n_waiting(), scheduler.used_cells()), (1, 1, 30));
    assert!(scheduler.cancel(1000, RequestId(0)));
    assert!(!scheduler.cancel(1000, RequestId(0)), "it is not live any more");
    assert_eq!(scheduler.used_cells(), 0);
    scheduler.iterate(1000, &mut machine(1000));
    assert_eq!((scheduler.n_running(), scheduler.used_cells()), (1, 35));
}

/// Failed steps change nothing. After `max_failures` in a row, their requests end.
#[test]
fn failing_steps_are_retried_and_given_up() {
    for (fails, end) in [(2, End::Finished), (3, End::Refused(RefusalReason::StepsFailed))] {
        let mut scheduler = Scheduler::new(Config::default(), cells(40), None).unwrap();
        scheduler.arrive(0, Request::new(0, 0, 30, 5)).unwrap();
        let (mut n, mut now_ns) = (0, 0);
        let mut executor = Script(|_, batch: Batch<'_>, out: &mut Outcome| {
            n += 1;
            out.elapsed_ns = 1;
            out.failed = n <= fails;
            if n > fails {
                out.sample_each(batch, |_| Sampled { token: None, finished: false });
            }
        });
        while let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now_ns, &mut executor) {
            now_ns += elapsed_ns;
        }
        let ended: Vec<Ended> = scheduler.drain_ended().collect();
        assert_eq!(ended[0].end, end, "{fails} failures");
        assert_eq!(scheduler.counters().failed_steps, fails, "{fails} failures");
        assert_eq!(scheduler.used_cells(), 0);
    }
}

/// A request that shares a prefix with earlier ones goes first, within limits.
#[test]
fn longer_hits_overtake_within_their_window() {
    let rows = [
        (PrefixOrder::Off, vec![0, 1, 2, 3, 4, 5]),
        (PrefixOrder::Ties, vec![0, 1, 2, 3, 4, 5]), // ranks differ, because arrivals do
        (PrefixOrder::Window(2), vec![0, 1, 3, 4, 2, 5]), // 2 was overtaken twice
        (PrefixOrder::Window(3), vec![0, 3, 4, 5, 1, 2]),
        (PrefixOrder::Window(5), vec![0, 3, 4, 5, 1, 2]),
    ];
    let mut bad = Vec::new();
    for (prefix_order, expected) in rows {
        let config = Config { max_batch: 1, prefix_order, ..Config::default() };
        let mut scheduler = Scheduler::new(config, paged(4000, Vocabulary::Tokens), None).unwrap();
        // 0, 3, 4 and 5 share a prefix; 1 and 2 share one with no other request.
        for (id, family) in [(0, 0), (1, 1), (2, 2), (3, 0), (4, 0), (5, 0)] {
            let tokens = (0..20).map(|i| family * 1000 + i).collect();
            let request = Request { prompt: Prompt::Tokens(tokens), ..Request::new(id, id, 20, 2) };
            scheduler.arrive(10, request).unwrap();
        }
        let ended = finish(&mut scheduler, 10);
        let order = ids(&ended);
        if order != expected {
            bad.push(format!("{prefix_order:?}: {order:?}, expected {expected:?}"));
        }
        let hits: u32 = ended.iter().map(|e| e.hit_tokens).sum();
        assert_eq!(hits, 3 * 16, "whole blocks, and never the last token");
    }
    // Equal ranks: the window covers all requests.
    let config = Config { max_batch: 1, prefix_order: PrefixOrder::Ties, ..Config::default() };
    let mut scheduler = Scheduler::new(config, paged(4000, Vocabulary::Tokens), None).unwrap();
    for (id, family) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
        let tokens = (0..20).map(|i| family * 1000 + i).collect();
        let request = Request { prompt: Prompt::Tokens(tokens), ..Request::new(id, 5, 20, 2) };
        scheduler.arrive(10, request).unwrap();
    }
    let order = ids(&finish(&mut scheduler, 10));
    if order != [0, 3, 1, 2] {
        bad.push(format!("equal ranks: {order:?}"));
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn bad_configurations_say_what_to_try() {
    let bad = |config: Config| match Scheduler::new(config, cells(10), None) {
        Err(e) => e.to_string(),
        Ok(_) => "it was accepted".into(),
    };
    let base = Config::default;
    let rows = [
        (
            bad(Config { policy: "lifo".into(), ..base() }),
            "no scheduling policy \"lifo\": use one of fcfs, sjf",
        ),
        (bad(Config { max_batch: 0, ..base() }), "max_batch is 0"),
        (
            bad(Config { max_batch_tokens: 5, ..base() }),
            "max_batch_tokens is 5: it must be at least max_batch",
        ),
        (bad(Config { max_failures: 0, ..base() }), "max_failures is 0"),
        (bad(Config { lengths: LengthSource::Oracle, ..base() }), "only a simulator knows the true lengths"),
        (bad(Config { prefix_order: PrefixOrder::Window(0), ..base() }), "prefix_order window is 0"),
    ];
    for (found, expected) in rows {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    }
    let one = Cache::new(vec![Box::new(kvist_cache::kinds::Contiguous::new(&group(10)))]);
    let error = Scheduler::new(Config::default(), one, None).err().map(|e| e.to_string());
    assert!(error.is_some_and(|e| e.contains("holds one sequence")));
    let mut used = cells(10);
    used.sequences().unwrap().seq_new(kvist_cache::SeqId(7)).unwrap();
    let error = Scheduler::new(Config::default(), used, None).err().map(|e| e.to_string());
    assert!(error.is_some_and(|e| e.contains("has 1 sequences already")));
    let unknown = Config { policy: "lifo".into(), ..base() };
    assert!(matches!(unknown.check(), Err(BadConfig::UnknownPolicy(..))), "known before work starts");
}

#[test]
fn bad_event_logs_name_the_line() {
    let config = Config { admission: Admission::Optimistic { headroom_tokens: 0 }, ..Config::default() };
    let mut scheduler = Scheduler::new(config, cells(100), None).unwrap();
    scheduler.record();
    scheduler.arrive(0, Request::new(0, 0, 10, 3)).unwrap();
    scheduler.arrive(0, Request::new(1, 0, 10, 3)).unwrap();
    finish(&mut scheduler, 0);
    let good = scheduler.events().take();
    let decisions = scheduler.decisions().take();
    assert_eq!(replay(good.as_bytes(), cells(100), None).unwrap(), decisions);
    let lines: Vec<&str> = good.lines().collect();
    let without = |i: usize| [&lines[..i], &lines[i + 1..]].concat().join("\n");
    let rows = [
        (String::new(), "line 1 of the event log: the log is empty"),
        (lines[1..].join("\n"), "line 1 of the event log: not a header"),
        (good.replace("\"version\":1", "\"version\":9"), "found kvist-events version 9, expected"),
        (without(2), "line 3 of the event log: found event 2, expected 1"),
        (good.replace("\"arrive\"", "\"arrives\""), "line 2 of the event log: not an event"),
        (
            good.replace("\"finished\":[]", "\"finished\":[0,1]"),
            "line 5 of the event log: idle is false in the log, true in the replay",
        ),
        (good.replace("\"steps\":1", "\"steps\":2"), "the log ran 2 steps; in the replay 1"),
        (
            good.replace("\"sampled\":[null,null]", "\"sampled\":[null]"),
            "the log sampled 1 tokens; the replay expects 2",
        ),
        (good.replace("\"id\":1", "\"id\":0"), "request 0 is live"),
    ];
    let mut bad = Vec::new();
    for (text, expected) in rows {
        let found = match replay(text.as_bytes(), cells(100), None) {
            Err(e) => e.to_string(),
            Ok(_) => "it was accepted".into(),
        };
        if !found.contains(expected) {
            bad.push(format!("{found:?} does not say {expected:?}"));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Names in logs and recordings are read by other programs, so this test pins them.
#[test]
fn names_are_what_they_are_listed_as() {
    for (name, _) in POLICIES {
        let policy = build_policy(&Config { policy: (*name).into(), ..Config::default() }).unwrap();
        assert_eq!(policy.name(), *name);
    }
    let reasons = [
        (RefusalReason::EmptyPrompt, "empty_prompt"),
        (RefusalReason::NothingToGenerate, "nothing_to_generate"),
        (RefusalReason::Malformed, "malformed"),
        (RefusalReason::ForeignContent, "foreign_content"),
        (RefusalReason::NeverFits, "never_fits"),
        (RefusalReason::CacheFull, "cache_full"),
        (RefusalReason::StepsFailed, "steps_failed"),
    ];
    for (reason, name) in reasons {
        assert_eq!(reason.name(), name);
    }
    let lengths = [
        (LengthSource::MaxNew, "predicted (max_new)"),
        (LengthSource::RunningMean, "predicted (running_mean)"),
        (LengthSource::Oracle, "oracle"),
    ];
    for (source, name) in lengths {
        assert_eq!(source.name(), name);
    }
    let config = Config { max_batch: 7, ..Config::default() };
    assert_eq!(Scheduler::new(config, cells(10), None).unwrap().config().max_batch, 7);
}

/// A line that is not text is reported by its number, counting from 1.
#[test]
fn a_line_that_cannot_be_read_is_named() {
    let mut scheduler = Scheduler::new(Config::default(), cells(100), None).unwrap();
    scheduler.record();
    let header = scheduler.events().take();
    let log = [header.as_bytes(), &[0xff, b'\n']].concat();
    let error = replay(&log[..], cells(100), None).unwrap_err();
    assert!(error.to_string().contains("line 2"), "{error}");
}
