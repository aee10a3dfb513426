//! Demotion compared with eviction: the same victims in the same order, which are free when their copies have ended.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use kvist_testing::reference::SplitMix64;

const BLOCK: u32 = 4;

fn cache(policy: &str, n_groups: usize) -> Cache {
    let group = GroupSpec { capacity_tokens: 160, visibility: Visibility::FULL, max_step_tokens: 160 };
    let prefix = Some(PrefixSpec { policy: policy.into(), ..PrefixSpec::default() });
    let groups = vec![group; n_groups];
    Cache::paged(&PagedSpec { block_tokens: BLOCK, groups, rollback_tokens: 0, prefix }).unwrap()
}

/// Opens a prompt, computes it, stores it, and removes its sequence in most cases. The same in both caches.
fn run(cache: &mut Cache, seq: SeqId, prompt: &[u32], keep: bool, now_ns: u64) {
    let (content, at) = (Content::Tokens(prompt), Moment { now_ns });
    let hit = cache.prefixes().unwrap().open(seq, "", &content, at).unwrap().hit_tokens;
    let mut plan = StepPlan::default();
    let spans = [Span::chain(seq, hit, prompt.len() as u32 - hit)];
    Step::begin(cache, &StepRequest { spans: &spans }, &mut plan).unwrap().commit();
    cache.prefixes().unwrap().store(seq, &content, at).unwrap();
    if !keep {
        cache.sequences().unwrap().seq_rm(seq, 0, u32::MAX).unwrap();
    }
}

fn removed(cache: &mut Cache) -> Vec<u64> {
    let mut events = Vec::new();
    cache.drain_prefix_events(&mut events);
    let hash = |event| match event {
        PrefixEvent::Removed { group: GroupId(0), hash, .. } => Some(hash),
        _ => None,
    };
    events.into_iter().filter_map(hash).collect()
}

#[test]
fn demotion_takes_the_victims_that_eviction_would_take() {
    for seed in 0..300 {
        let mut random = SplitMix64(seed);
        let policy = ["lru", "fifo", "lfu", "lfu_decay", "cost"][random.index(5)];
        let n_groups = 1 + random.index(2);
        let (mut evicting, mut demoting) = (cache(policy, n_groups), cache(policy, n_groups));
        evicting.watch_prefixes(true);
        demoting.watch_prefixes(true);
        let mut kept: Vec<SeqId> = Vec::new();
        let mut n_demoted = 0;
        for i in 0..60 {
            let (n, split) = (1 + random.below(40), random.below(40));
            let (family, odd) = (random.below(3), random.below(9));
            let prompt: Vec<u32> = (0..n).map(|at| if at < split { family } else { odd }).collect();
            let now_ns = u64::from(i) * 1000;
            let at = Moment { now_ns };
            let wanted = n.next_multiple_of(BLOCK) + BLOCK * random.below(4);
            evicting.prefixes().unwrap().evict_until_free(wanted, at);
            // In two parts: a bound on the number of blocks only ends it early.
            let (first, blocks) = demoting.prefixes().unwrap().demote_until_free(wanted, random.below(3), at);
            let mut victims: Vec<u64> = blocks.iter().map(|block| block.hash).collect();
            let in_use = demoting.cached_blocks(SeqId(0), 0);
            assert!(in_use.iter().all(|block| !victims.contains(&block.hash)));
            demoting.unpin(first);
            let (second, blocks) = demoting.prefixes().unwrap().demote_until_free(wanted, u32::MAX, at);
            victims.extend(blocks.iter().map(|block| block.hash));
            assert!(blocks.iter().all(|block| block.blocks.len() == n_groups));
            if !blocks.is_empty() {
                let free = demoting.occupancy().map(|group| group.free_cells).min().unwrap();
                assert!(free < wanted, "pinned blocks are not free");
            }
            demoting.unpin(second);
            assert_eq!(removed(&mut evicting), victims, "seed {seed}, {policy}");
            removed(&mut demoting);
            n_demoted += victims.len();
            // A demoted block is freed by the end of its copy, which only the counters of the blocks' events tell apart.
            let [a, b] = [&evicting, &demoting].map(|cache| {
                let of_group = |report: Report| {
                    let blocks = report.blocks.unwrap();
                    (report.sequences, report.used_cells, report.high_water, blocks.free, blocks.evictable)
                };
                cache.report().into_iter().map(of_group).collect::<Vec<_>>()
            });
            assert_eq!(a, b, "seed {seed}, {policy}");
            let reports = [&mut evicting, &mut demoting].map(|cache| cache.prefixes().unwrap().report());
            assert_eq!(reports[0], reports[1]);
            let free = evicting.occupancy().map(|group| group.free_cells).min().unwrap();
            if free < n.next_multiple_of(BLOCK) {
                let seq = kept.remove(0);
                for cache in [&mut evicting, &mut demoting] {
                    cache.sequences().unwrap().seq_rm(seq, 0, u32::MAX).unwrap();
                }
                continue;
            }
            let keep = random.below(4) == 0;
            let seq = SeqId(i);
            run(&mut evicting, seq, &prompt, keep, now_ns);
            run(&mut demoting, seq, &prompt, keep, now_ns);
            if keep {
                kept.push(seq);
                let of_cache = demoting.cached_blocks(seq, 0);
                let hashes: Vec<u64> = of_cache.iter().map(|block| block.hash).collect();
                assert_eq!(hashes, demoting.prefix_hashes("", &Content::Tokens(&prompt)));
                let table = demoting.block_table(GroupId(0), seq).unwrap();
                for (cached, block) in of_cache.iter().zip(table) {
                    assert_eq!(Some(cached.blocks[0].block), block);
                }
                assert_eq!(demoting.cached_blocks(seq, BLOCK), of_cache[1.min(of_cache.len())..]);
            }
        }
        assert!(n_demoted > 10, "seed {seed}: {n_demoted}");
    }
}
