//! Multi-step runs, by example: they continue while no decision is due, and not one step longer.

use crate::common::{cells, paged};
use kvist_cache::{Step, Vocabulary};
use kvist_scheduler::*;

fn config() -> Config {
    Config { admission: Admission::Optimistic { headroom_tokens: 0 }, ..Config::default() }
}

/// An executor that runs as many steps as allowed and does not know when answers end. Only the scheduler limits the
/// run.
#[derive(Default)]
struct Eager {
    /// Per call: number of steps run as one.
    runs: Vec<u32>,
    /// The limit passed to each call of `max_fused_steps`.
    limits: Vec<u32>,
}

impl Executor for Eager {
    fn max_fused_steps(&mut self, _: u64, _: Batch<'_>, limit: u32) -> u32 {
        self.limits.push(limit);
        limit
    }
    fn execute(&mut self, _: u64, _: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        self.runs.push(batch.steps);
        out.elapsed_ns = 10 * u64::from(batch.steps);
        out.sample_each(batch, |_| Sampled { token: None, finished: false });
    }
}

fn drain(scheduler: &mut Scheduler) -> (Eager, Vec<Ended>) {
    let (mut executor, mut now) = (Eager::default(), 0);
    while let Iteration::Ran { elapsed_ns, .. } = scheduler.iterate(now, &mut executor) {
        now += elapsed_ns;
    }
    let ended = scheduler.drain_ended().collect();
    (executor, ended)
}

/// An answer ends at its `max_new`, even if the executor would run on. The first token is sampled after the prompt.
#[test]
fn a_run_ends_where_the_first_answer_does() {
    let mut s = Scheduler::new(config(), cells(1000), None).unwrap();
    s.arrive(0, Request::new(0, 0, 10, 20)).unwrap();
    s.arrive(0, Request::new(1, 0, 7, 5)).unwrap();
    let (executor, ended) = drain(&mut s);
    assert_eq!(executor.runs, [1, 4, 15]);
    assert_eq!(executor.limits, [4, 15], "more was never allowed");
    let lengths: Vec<(u64, u32, u64)> =
        ended.iter().map(|e| (e.id.0, e.generated, e.computed_tokens)).collect();
    assert_eq!(lengths, [(1, 5, 11), (0, 20, 29)]);
    let SchedulerCounters { steps, computed_tokens, sampled_tokens, .. } = *s.counters();
    assert_eq!((steps, computed_tokens, sampled_tokens), (20, 11 + 29, 5 + 20));
}

/// If a trace knows the answer, it goes into the prefix index block by block, before other requests look it up. After
/// the last whole known block no limit applies.
#[test]
fn a_run_ends_where_the_index_is_told() {
    let of = |cached: u32, known: u32, max_new: u32| {
        let ids: std::sync::Arc<[u64]> = (0..16).collect();
        let mut s = Scheduler::new(config(), paged(400, Vocabulary::Ids { tokens_per_id: 4 }), None).unwrap();
        let prompt = Prompt::Ids { ids, tokens_per_id: 4, n_tokens: known };
        s.arrive(0, Request { prompt, ..Request::new(0, 0, cached, max_new) }).unwrap();
        let (executor, ended) = drain(&mut s);
        assert_eq!(ended[0].generated, max_new);
        executor.runs
    };
    assert_eq!(of(10, 10, 20), [1, 19], "nothing is known of the answer");
    assert_eq!(of(10, 30, 20), [1, 2, 4, 4, 4, 4, 1], "blocks end at 12, 16, 20, 24 and 28; 29 are fed");
    assert_eq!(of(10, 30, 40), [1, 2, 4, 4, 4, 4, 21], "the block of 28 to 32 is not known to its end");
    assert_eq!(of(8, 12, 9), [1, 4, 4], "a block that begins with the answer, known to its last token");
    assert_eq!(of(8, 11, 9), [1, 8], "not known to its last token");
}

/// Free cells limit a run: at the step that does not fit, a request must be preempted. Two answers in 40 cells, 20 of
/// them in use.
#[test]
fn a_run_ends_where_memory_does() {
    let mut s = Scheduler::new(config(), cells(40), None).unwrap();
    s.arrive(0, Request::new(0, 0, 10, 20)).unwrap();
    s.arrive(0, Request::new(1, 0, 10, 20)).unwrap();
    let (executor, ended) = drain(&mut s);
    assert_eq!(
        executor.runs,
        [1, 10, 1, 8, 1, 8],
        "one of them is preempted, and comes back with its prompt"
    );
    assert_eq!(ended.iter().map(|e| (e.id.0, e.preemptions)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);

    // Much less memory than the answers need: 2 steps of two sequences in 5 cells.
    let mut s = Scheduler::new(config(), cells(125), None).unwrap();
    s.arrive(0, Request::new(0, 0, 60, 60)).unwrap();
    s.arrive(0, Request::new(1, 0, 60, 60)).unwrap();
    let (executor, ended) = drain(&mut s);
    assert_eq!(executor.runs[..3], [1, 2, 1]);
    assert_eq!(executor.limits[0], 2);
    assert_eq!(ended.iter().map(|e| e.generated).collect::<Vec<_>>(), [60, 60]);

    // In blocks of 4, beside 32 cells that the prefix index keeps: 20 free, and 3 in the last block.
    let mut s = Scheduler::new(config(), paged(64, Vocabulary::Tokens), None).unwrap();
    let prompt = Prompt::Tokens((0..32).collect());
    s.arrive(0, Request { prompt, ..Request::new(0, 0, 32, 1) }).unwrap();
    drain(&mut s);
    assert_eq!((s.evictable_cells(), s.free_cells()), (32, 32));
    s.arrive(0, Request::new(1, 0, 9, 50)).unwrap();
    let (executor, ended) = drain(&mut s);
    assert_eq!(executor.runs[..3], [1, 23, 1], "the 24th step needs an eviction, which is made for it alone");
    assert_eq!((ended[0].generated, s.counters().evictions > 0), (50, true));
    assert_eq!(executor.runs.iter().sum::<u32>(), 50);
}

/// Decisions are the same whether steps run as one or one by one.
#[test]
fn runs_decide_what_single_steps_decide() {
    let serve = |single: bool| {
        let mut s = Scheduler::new(config(), paged(96, Vocabulary::Ids { tokens_per_id: 4 }), None).unwrap();
        s.record();
        for id in 0..6 {
            let ids: std::sync::Arc<[u64]> = (0..4).chain([100 + id / 2; 8]).collect();
            let prompt = Prompt::Ids { ids, tokens_per_id: 4, n_tokens: 30 };
            s.arrive(0, Request { prompt, ..Request::new(id, 0, 17 + id as u32, 30) }).unwrap();
        }
        let mut now = 0;
        let (mut eager, mut one) = (
            Eager::default(),
            Script(|_, batch: Batch<'_>, out: &mut Outcome| {
                out.elapsed_ns = 10;
                out.sample_each(batch, |_| Sampled { token: None, finished: false });
            }),
        );
        let executor: &mut dyn Executor = if single { &mut one } else { &mut eager };
        while let Iteration::Ran { elapsed_ns, .. } = s.iterate(now, executor) {
            now += elapsed_ns;
        }
        let ended: Vec<Ended> = s.drain_ended().collect();
        (s.decisions().take(), ended, *s.counters(), now, eager.runs.iter().any(|&n| n > 1))
    };
    let (runs, steps) = (serve(false), serve(true));
    assert!(runs.4 && runs.2.preemptions > 0, "{:?}", runs.2);
    assert_eq!(runs.0, steps.0);
    assert_eq!((runs.1, runs.2, runs.3), (steps.1, steps.2, steps.3));
}

/// The decision log has prompt chunks and no decoded tokens.
#[test]
fn the_log_names_chunks_of_prompts_alone() {
    let config = Config { max_batch: 2, max_batch_tokens: 4, ..config() };
    let mut s = Scheduler::new(config, cells(100), None).unwrap();
    s.record();
    s.arrive(0, Request::new(7, 0, 10, 5)).unwrap();
    drain(&mut s);
    let log = s.decisions().take();
    let chunks: Vec<&str> =
        log.lines().filter_map(|line| line.split_once("\"chunk\":").map(|(_, chunk)| chunk)).collect();
    let expected =
        ["7,\"first\":0,\"tokens\":4}", "7,\"first\":4,\"tokens\":4}", "7,\"first\":8,\"tokens\":2}"];
    assert_eq!(chunks, expected, "{log}");
}
