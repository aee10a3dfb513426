//! Caches and an executor for tests of the scheduler.
#![allow(dead_code)] // each test binary uses its part
use kvist_cache::kinds::{Cells, GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Vocabulary};
use kvist_scheduler::*;

/// Layers that see everything.
pub fn group(capacity_tokens: u32) -> GroupSpec {
    GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens }
}
pub fn cells(capacity_tokens: u32) -> Cache {
    Cache::new(vec![Box::new(Cells::new(&group(capacity_tokens)))])
}
/// Blocks of four tokens, with an index.
pub fn paged(capacity_tokens: u32, vocabulary: Vocabulary) -> Cache {
    let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
    let groups = vec![group(capacity_tokens)];
    Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap()
}

/// Everybody writes as much as they may; a step takes this long.
pub fn machine(step_ns: u64) -> Script<impl FnMut(u64, Batch<'_>, &mut Outcome)> {
    Script(move |_, batch: Batch<'_>, out: &mut Outcome| {
        out.elapsed_ns = step_ns;
        let samples = batch.work.iter().filter(|w| w.samples);
        out.sampled.extend(samples.map(|_| Sampled { token: None, finished: false }));
    })
}
