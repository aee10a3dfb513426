//! Caches and an executor for scheduler tests.
use kvist_cache::kinds::{Cells, GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Vocabulary};
use kvist_scheduler::*;

/// One layer group without a sliding window.
pub fn group(capacity_tokens: u32) -> GroupSpec {
    GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens }
}
pub fn cells(capacity_tokens: u32) -> Cache {
    Cache::new(vec![Box::new(Cells::new(&group(capacity_tokens)))])
}
/// A cache with blocks of four tokens and a prefix index.
pub fn paged(capacity_tokens: u32, vocabulary: Vocabulary) -> Cache {
    let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
    let groups = vec![group(capacity_tokens)];
    Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap()
}

/// An executor under which every request generates `max_new` tokens; each step takes a fixed time.
pub fn machine(step_ns: u64) -> Script<impl FnMut(u64, Batch<'_>, &mut Outcome)> {
    Script(move |_, batch: Batch<'_>, out: &mut Outcome| {
        out.elapsed_ns = step_ns;
        out.sample_each(batch, |_| Sampled { token: None, finished: false });
    })
}
