//! Microseconds per decode step to fill the reads, to lower them to whole block tables, and to give the edits of a table
//! that stays on a device. 64 sequences of 32,768 tokens took blocks of 16 in turns, so that no two of a sequence's are
//! neighbours.
//!
//! `cargo run --release -p kvist-cache --example tables`
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use std::time::{Duration, Instant};

const N_SEQUENCES: u32 = 64;
const N_TOKENS: u32 = 32_768;
const BLOCK: u32 = 16;
const N_STEPS: u32 = 320;
const GROUP: GroupId = GroupId(0);

fn main() {
    let capacity_tokens = N_SEQUENCES * (N_TOKENS + 4 * N_STEPS);
    let groups = vec![GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: 1024 }];
    let spec = PagedSpec { block_tokens: BLOCK, groups, rollback_tokens: 0, prefix: None };
    let (mut cache, mut plan) = (Cache::paged(&spec).expect("it can be built"), StepPlan::default());
    for seq in 0..N_SEQUENCES {
        cache.sequences().expect("a kind of many sequences").seq_new(SeqId(seq)).expect("it is new");
    }
    let mut next = 0;
    // Appends `n_tokens` to every sequence, and returns how long `fill` took.
    let mut step = |n_tokens: u32, fill: &mut dyn FnMut(&mut Step<'_>)| -> Duration {
        let spans: Vec<Span<'_>> =
            (0..N_SEQUENCES).map(|seq| Span::chain(SeqId(seq), next, n_tokens)).collect();
        let mut step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).expect("it fits");
        let started = Instant::now();
        fill(&mut step);
        let took = started.elapsed();
        step.commit();
        next += n_tokens;
        took
    };
    (0..N_TOKENS / BLOCK).for_each(|_| _ = step(BLOCK, &mut |_| ()));
    let mut report = |what: &str, fill: &mut dyn FnMut(&mut Step<'_>)| {
        let total: Duration = (0..N_STEPS).map(|_| step(1, fill)).sum();
        println!("{what:<14} {:>8.1} us", (total / N_STEPS).as_secs_f64() * 1e6);
    };
    report("reads", &mut |step| _ = step.with_reads());
    let (mut tables, mut edits, mut epoch) = (BlockTables::default(), Vec::new(), 0);
    report("whole tables", &mut |step| {
        step.with_tables().group(GROUP).tables(BLOCK, &mut tables).expect("blocks of the cache");
    });
    report("edits", &mut |step| {
        let group = step.with_tables().group(GROUP);
        group.lengths(&mut tables).expect("the tables are filled");
        edits.clear();
        group.edits_since(epoch, &mut edits);
        epoch = group.table_epoch().expect("a kind with block tables");
    });
}
