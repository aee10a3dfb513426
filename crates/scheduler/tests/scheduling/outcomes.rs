//! Plans and their outcomes: what a request may keep and emit, and what an abandoned or misfitting outcome leaves.

use crate::common::{cells, paged};
use kvist_cache::{Kept, NodeId, Refused, SeqId, Vocabulary};
use kvist_scheduler::*;

fn scheduler() -> Scheduler {
    let config = Config { admission: Admission::Optimistic { headroom_tokens: 0 }, ..Config::default() };
    let mut s = Scheduler::new(config, paged(400, Vocabulary::Tokens), None).unwrap();
    s.record();
    s
}

fn request(id: u64, prompt: std::ops::Range<u32>, max_new: u32) -> Request {
    let n = prompt.len() as u32;
    Request { prompt: Prompt::Tokens(prompt.collect()), ..Request::new(id, 0, n, max_new) }
}

fn advance<'a>(kept: Kept<'a>, tokens: &'a [u32], finished: bool) -> Advance<'a> {
    Advance { kept, emitted: Emitted::Tokens(tokens), finished }
}

fn outcome(advances: &[Advance<'_>]) -> Outcome {
    let mut outcome = Outcome::default();
    outcome.elapsed_ns = 10;
    advances.iter().for_each(|advance| outcome.push(*advance));
    outcome
}

/// Cached and generated tokens of a live request.
fn progress(s: &Scheduler, id: u64) -> (u32, u32) {
    let it = s.status(RequestId(id)).expect("it is live");
    (it.cached_tokens, it.generated)
}

/// The replay of the whole run decides what the run decided.
fn check_replay(s: &mut Scheduler) {
    let (events, decisions) = (s.events().take(), s.decisions().take());
    let replayed = replay(events.as_bytes(), None, None).unwrap_or_else(|e| panic!("{e} in {events}"));
    assert_eq!(replayed, decisions, "{events}");
}

/// Two requests verify drafts of four tokens in one step: one keeps two drafts, the other none. Each emits one token
/// more than it keeps of its drafts, and continues after its last known token.
#[test]
fn drafts_are_kept_up_to_the_first_wrong_one() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..5, 20)).unwrap();
    s.arrive(0, request(1, 100..103, 20)).unwrap();
    let first = [advance(Kept::All, &[50], false), advance(Kept::All, &[60], false)];
    s.plan(0).unwrap().complete(&outcome(&first)).unwrap();
    let planned = s.plan_run(10, &mut |_: Batch<'_>, limit| limit).unwrap();
    // The blocks of four tokens end after 3 and 1 more tokens, so that is what may run as one.
    assert_eq!(
        planned.batch().work.iter().map(|w| (w.first, w.n_tokens)).collect::<Vec<_>>(),
        [(5, 1), (3, 1)]
    );
    let second = [advance(Kept::All, &[51], false), advance(Kept::All, &[61], false)];
    planned.complete(&outcome(&second)).unwrap();
    let planned = s.plan_run(20, &mut |batch: Batch<'_>, limit| {
        assert_eq!((batch.tokens(0), batch.tokens(1)), (Some(&[51][..]), Some(&[61][..])));
        assert_eq!(batch.known_tokens(1), Some(&[100, 101, 102, 60, 61][..]), "what a drafter searches");
        limit
    });
    let planned = planned.unwrap();
    assert_eq!(
        planned.batch().work.iter().map(|w| (w.first, w.n_tokens)).collect::<Vec<_>>(),
        [(6, 2), (4, 2)]
    );
    let third = [advance(Kept::All, &[52, 53], false), advance(Kept::First(1), &[62], false)];
    assert_eq!(planned.complete(&outcome(&third)), Ok(Iteration::Ran { steps: 2, elapsed_ns: 10 }));
    assert_eq!((progress(&s, 0), progress(&s, 1)), ((8, 4), (5, 3)));
    let planned = s.plan(30).unwrap();
    assert_eq!((planned.batch().tokens(0), planned.batch().tokens(1)), (Some(&[53][..]), Some(&[62][..])));
    assert!(planned.batch().work.iter().all(|w| w.decodes));
    let fourth = [advance(Kept::All, &[54], true), advance(Kept::All, &[63], true)];
    planned.complete(&outcome(&fourth)).unwrap();
    let ended: Vec<_> = s.drain_ended().map(|e| (e.id.0, e.generated, e.computed_tokens)).collect();
    // The rejected token was computed, too.
    assert_eq!(ended, [(0, 5, 9), (1, 4, 7)]);
    let kept = kvist_cache::Content::Tokens(&[100, 101, 102, 60, 61, 62, 0, 0]);
    assert_eq!(s.cache().lookup("", &kept).hit_tokens, 4, "the rejected token is not in the index");
    check_replay(&mut s);
}

/// Proposes the same draft for every request that decodes.
struct Propose(Vec<Option<u32>>, u32);
impl Lookahead for Propose {
    fn draft(&mut self, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        self.1 = limit;
        for i in (0..batch.work.len()).filter(|&i| batch.work[i].decodes) {
            drafts.push(i, &self.0);
        }
    }
}

/// Drafts come with one step's plan, beside a prompt, and wherever blocks end. Each request keeps what was right.
#[test]
fn drafts_are_verified_beside_a_prompt() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..5, 20)).unwrap();
    s.plan(0).unwrap().complete(&outcome(&[advance(Kept::All, &[50], false)])).unwrap();
    s.arrive(5, request(1, 100..103, 20)).unwrap();
    let mut propose = Propose(vec![None, Some(0), Some(1), Some(2), Some(3)], 0);
    let planned = s.plan_run(10, &mut propose).unwrap();
    assert_eq!(propose.1, Config::default().max_batch_tokens - 1 - 3, "what the budget has left");
    let batch = planned.batch();
    assert_eq!(batch.work.iter().map(|w| (w.first, w.n_tokens)).collect::<Vec<_>>(), [(5, 6), (0, 3)]);
    assert_eq!((batch.draft(0).len(), batch.draft(1).len(), batch.drafts_chain(0)), (6, 0, true));
    assert_eq!((batch.tokens(0), batch.max_new(0)), (Some(&[50][..]), 19), "drafts are the driver's to know");
    let advances = [advance(Kept::First(4), &[51, 52, 53, 54], false), advance(Kept::All, &[60], false)];
    planned.complete(&outcome(&advances)).unwrap();
    assert_eq!((progress(&s, 0), progress(&s, 1)), ((9, 5), (3, 1)));
    let counters = *s.counters();
    assert_eq!((counters.drafts, counters.draft_tokens, counters.accepted_tokens), (1, 5, 3));
    let events = s.events().take();
    let expected = "\"drafts\":[[0,0,[null,0,1,2,3]]],\"advances\":[{\"kept\":4,";
    assert!(events.contains(expected), "{events}");
    assert_eq!(replay(events.as_bytes(), None, None).unwrap(), s.decisions().take());
}

/// Drafts that do not fit are dropped: they preempt nothing and the step runs as without them, also in the replay.
#[test]
fn drafts_never_preempt() {
    let config = Config { admission: Admission::Optimistic { headroom_tokens: 0 }, ..Config::default() };
    let mut s = Scheduler::new(config, paged(20, Vocabulary::Tokens), None).unwrap();
    s.record();
    s.arrive(0, request(0, 0..5, 4)).unwrap();
    s.arrive(0, request(1, 100..105, 4)).unwrap();
    let first = [advance(Kept::All, &[50], false), advance(Kept::All, &[60], false)];
    s.plan(0).unwrap().complete(&outcome(&first)).unwrap();
    // Each has 3 cells left in its last block, and one block is free: the drafts would need four.
    let planned = s.plan_run(10, &mut Propose((0..8).map(|i: u32| i.checked_sub(1)).collect(), 0)).unwrap();
    let batch = planned.batch();
    assert!(batch.work.iter().all(|w| w.n_tokens == 1) && batch.draft(0).is_empty(), "{:?}", batch.work);
    drop(planned);
    let planned = s.plan_run(20, &mut Propose(vec![None, Some(0)], 0)).unwrap();
    assert!(planned.batch().work.iter().all(|w| w.n_tokens == 3));
    let second = [advance(Kept::First(1), &[51], false), advance(Kept::All, &[61, 62, 63], true)];
    planned.complete(&outcome(&second)).unwrap();
    assert_eq!((progress(&s, 0), s.counters().preemptions), ((6, 2), 0));
    check_replay(&mut s);
}

/// An answer that ends within a run of several decode rounds keeps and emits fewer tokens than its neighbour.
#[test]
fn an_answer_may_end_within_a_run() {
    let mut s = Scheduler::new(Config::default(), cells(1000), None).unwrap();
    s.record();
    s.arrive(0, Request::new(0, 0, 10, 50)).unwrap();
    s.arrive(0, Request::new(1, 0, 10, 50)).unwrap();
    let one = Advance { kept: Kept::All, emitted: Emitted::Unknown(1), finished: false };
    s.plan(0).unwrap().complete(&outcome(&[one, one])).unwrap();
    let planned = s.plan_run(10, &mut |_: Batch<'_>, limit: u32| limit.min(8)).unwrap();
    let ends = Advance { kept: Kept::First(3), emitted: Emitted::Unknown(3), finished: true };
    let goes_on = Advance { kept: Kept::All, emitted: Emitted::Unknown(8), finished: false };
    assert_eq!(planned.complete(&outcome(&[ends, goes_on])), Ok(Iteration::Ran { steps: 8, elapsed_ns: 10 }));
    assert_eq!(s.drain_ended().map(|e| (e.id.0, e.generated)).collect::<Vec<_>>(), [(0, 4)]);
    assert_eq!((progress(&s, 1), s.used_cells()), ((18, 9), 18));
    let events = s.events().take();
    let expected = "\"steps\":8,\"elapsed\":10,\"advances\":[{\"kept\":3,\"emitted\":3,\"finished\":true},{\"emitted\":8}]}";
    assert!(events.trim_end().ends_with(expected), "{events}");
    assert_eq!(replay(events.as_bytes(), cells(1000), None).unwrap(), s.decisions().take());
}

/// A request may emit more tokens than one without a draft, for example where a grammar allows only one text. They
/// are computed in the next step.
#[test]
fn several_tokens_may_follow_a_prompt() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..5, 20)).unwrap();
    s.plan(0).unwrap().complete(&outcome(&[advance(Kept::All, &[7, 8, 9], false)])).unwrap();
    assert_eq!(progress(&s, 0), (5, 3));
    let planned = s.plan(10).unwrap();
    assert_eq!(planned.batch().tokens(0), Some(&[7, 8, 9][..]));
    assert!(planned.batch().work[0].samples);
    planned.complete(&outcome(&[advance(Kept::All, &[10], true)])).unwrap();
    check_replay(&mut s);
}

/// A plan that is dropped commits nothing, and the next one begins where it did.
#[test]
fn an_abandoned_plan_leaves_the_scheduler_consistent() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..9, 5)).unwrap();
    let mut planned = s.plan(0).unwrap();
    let (batch, step) = planned.split();
    assert_eq!((batch.work[0].n_tokens, step.plan().n_tokens()), (9, 9));
    drop(step);
    drop(planned);
    assert_eq!((progress(&s, 0), s.used_cells(), s.counters().steps), ((0, 0), 0, 0));
    s.arrive(5, request(1, 20..30, 5)).unwrap();
    std::mem::drop(s.plan(5));
    let planned = s.plan(5).unwrap();
    assert_eq!(planned.batch().work.iter().map(|w| w.n_tokens).collect::<Vec<_>>(), [9, 10]);
    let done = [advance(Kept::All, &[1], true), advance(Kept::All, &[2], false)];
    planned.complete(&outcome(&done)).unwrap();
    assert_eq!((progress(&s, 1), s.counters().steps), ((10, 1), 1));
    assert!(s.cancel(20, RequestId(1)));
    assert!(s.plan(20).is_none());
    assert_eq!(s.used_cells(), 0);
    check_replay(&mut s);
}

/// A leaked plan is an abandoned one.
#[test]
fn a_leaked_plan_changes_nothing() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..9, 5)).unwrap();
    std::mem::forget(s.plan(0));
    assert_eq!((progress(&s, 0), s.used_cells()), ((0, 0), 0));
    s.plan(0).unwrap().complete(&outcome(&[advance(Kept::All, &[1], true)])).unwrap();
    assert_eq!(s.used_cells(), 0);
}

/// An outcome that does not fit its batch is refused, and the step is abandoned.
#[test]
fn misfitting_outcomes_are_refused() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..9, 3)).unwrap();
    let id = RequestId(0);
    let ok = advance(Kept::All, &[1], false);
    let cases = [
        (vec![], BadOutcome::Count { requests: 1, got: 0 }),
        (vec![ok, ok], BadOutcome::Count { requests: 1, got: 2 }),
        (vec![advance(Kept::First(8), &[1], false)], BadOutcome::EmitsEarly(id)),
        (vec![advance(Kept::All, &[], false)], BadOutcome::NothingToCompute(id)),
        (vec![advance(Kept::All, &[1; 4], false)], BadOutcome::EmitsTooMany { id, generated: 4, max_new: 3 }),
        (
            vec![advance(Kept::First(10), &[1], false)],
            BadOutcome::Kept(Refused::KeepsMore { seq: SeqId(0), planned: 9, kept: 10 }),
        ),
    ];
    for (advances, expected) in cases {
        assert_eq!(s.plan(0).unwrap().complete(&outcome(&advances)), Err(expected));
        assert_eq!((progress(&s, 0), s.used_cells()), ((0, 0), 0));
    }
    let path = s.plan(0).unwrap().complete(&outcome(&[advance(Kept::Path(&[NodeId(0)]), &[1], false)]));
    assert!(matches!(path, Err(BadOutcome::Kept(Refused::Unsupported(_)))), "{path:?}");
    let mut planned = s.plan(0).unwrap();
    planned.split().1.commit();
    assert_eq!(planned.complete(&outcome(&[ok])), Err(BadOutcome::CacheChanged));
}

/// A chunk of a prompt may be kept in part, and emits nothing.
#[test]
fn a_prompt_may_be_kept_in_part() {
    let mut s = scheduler();
    s.arrive(0, request(0, 0..9, 3)).unwrap();
    s.plan(0).unwrap().complete(&outcome(&[advance(Kept::First(6), &[], false)])).unwrap();
    assert_eq!(progress(&s, 0), (6, 0));
    let planned = s.plan(10).unwrap();
    assert_eq!(planned.batch().tokens(0), Some(&[6, 7, 8][..]));
    planned.complete(&outcome(&[advance(Kept::All, &[1], true)])).unwrap();
    check_replay(&mut s);
}
