//! Compares selective keeping with a model that sorts, on real caches, whose reads show what is stored.
use kvist_cache::keep::*;
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_testing::reference::Choices;
use std::collections::BTreeMap;

const A: SeqId = SeqId(0);

fn build(kind: &str) -> Cache {
    let group = GroupSpec { capacity_tokens: 256, visibility: Visibility::FULL, max_step_tokens: 64 };
    Cache::new(vec![kinds::build(kind, &group).unwrap()])
}

fn grow(cache: &mut Cache, n: u32) {
    let mut plan = StepPlan::default();
    let spans = [Span::chain(A, cache.next_position(A).unwrap(), n)];
    Step::begin(cache, &StepRequest { spans: &spans }, &mut plan).unwrap().commit();
}

/// Past positions that the next token would see.
fn stored(cache: &mut Cache) -> Vec<u32> {
    let mut plan = StepPlan::default();
    let next = cache.next_position(A).unwrap();
    let spans = [Span::chain(A, next, 1)];
    let mut step = Step::begin(cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    let items = &step.with_reads().group(GroupId(0)).reads.items;
    let positions = items.iter().flat_map(|item| item.first_index..item.first_index + item.run.len);
    positions.filter(|&position| position < next).collect()
}

/// Sorts all tokens, and keeps those that a rule covers.
fn model(keep: Keep, next: u32, stored: &[Scored]) -> Vec<u32> {
    let recent = |p: u32| p + keep.recent.max(1) >= next;
    let middle = |s: &&Scored| s.position >= keep.sinks && !recent(s.position);
    let mut by_importance: Vec<&Scored> = stored.iter().filter(middle).collect();
    by_importance.sort_by(|a, b| {
        let order =
            |s: &Scored| (if s.importance.is_nan() { f32::NEG_INFINITY } else { s.importance }, s.position);
        order(b).partial_cmp(&order(a)).unwrap()
    });
    let removed: Vec<u32> = by_importance.iter().skip(keep.top_k as usize).map(|s| s.position).collect();
    stored.iter().map(|s| s.position).filter(|p| !removed.contains(p)).collect()
}

#[test]
fn what_stays_is_what_the_model_keeps() {
    const N_OPERATIONS: u64 = 100_000;
    const PER_DRIVE: u64 = 200;
    for kind in ["cells", "tree"] {
        let mut n_removed = 0;
        for seed in 0..N_OPERATIONS / 2 / PER_DRIVE {
            let mut choices = Choices::from_seed(seed, PER_DRIVE);
            let mut cache = build(kind);
            cache.sequences().unwrap().seq_new(A).unwrap();
            let mut importance: BTreeMap<u32, f32> = BTreeMap::new();
            while choices.go_on() {
                let next = cache.next_position(A).unwrap();
                if choices.one_in(2) && cache.report()[0].used_cells < 240 {
                    let n = 1 + choices.below(10);
                    grow(&mut cache, n);
                    for position in next..next + n {
                        let odd = [f32::NAN, -0.0, 0.0, f32::INFINITY, f32::NEG_INFINITY];
                        let plain = choices.below(40) as f32 / 4.0 - 3.0;
                        let odd = choices.of(&odd);
                        importance.insert(position, if choices.one_in(10) { odd } else { plain });
                    }
                    continue;
                }
                let scores: Vec<Scored> = importance
                    .iter()
                    .map(|(&position, &importance)| Scored { position, importance })
                    .collect();
                let keep =
                    Keep { sinks: choices.below(6), recent: choices.below(40), top_k: choices.below(60) };
                let removal = keep.plan(next, &scores).unwrap();
                let stays = model(keep, next, &scores);
                assert_eq!(removal.n_removed() as usize, scores.len() - stays.len());
                assert_eq!(stored(&mut cache).len(), scores.len(), "a plan changes nothing");
                let ranges = removal.ranges();
                assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
                assert!(ranges.iter().all(|range| range.start < range.end && range.end < next));
                removal.apply(&mut cache, A).unwrap();
                assert_eq!(cache.next_position(A), Some(next), "it goes on where it would have");
                assert_eq!(stored(&mut cache), stays, "{kind}, seed {seed}: {keep:?} of {next}");
                assert_eq!(cache.report()[0].used_cells as usize, stays.len());
                importance.retain(|position, _| stays.contains(position));
                n_removed += removal.n_removed();
            }
        }
        assert!(n_removed > 10_000, "{kind}: the drives removed {n_removed} only");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let score = |position| Scored { position, importance: 1.0 };
    let keep = Keep { sinks: 0, recent: 0, top_k: 0 };
    assert_eq!(keep.plan(9, &[score(3), score(3)]), Err(BadScores::OutOfOrder { position: 3, after: 3 }));
    assert_eq!(keep.plan(3, &[score(3)]), Err(BadScores::BehindTheEnd { position: 3, next_position: 3 }));
    let all: Vec<Scored> = (0..5).map(score).collect();
    let removal = keep.plan(5, &all).unwrap();
    assert_eq!(removal.ranges().first(), Some(&(0..4)), "the newest stays, or it would be a rollback");
    assert_eq!(keep.plan(0, &[]).unwrap().n_removed(), 0);

    let mut cache = build("cells");
    assert_eq!(removal.apply(&mut cache, A), Err(Refused::UnknownSequence(A)));
    cache.sequences().unwrap().seq_new(A).unwrap();
    grow(&mut cache, 6);
    let stale = Refused::NotAtEnd { seq: A, expected: 6, got: 5 };
    assert_eq!(removal.apply(&mut cache, A), Err(stale), "it was planned for a shorter sequence");
    let mut contiguous = build("contiguous");
    grow(&mut contiguous, 5);
    assert!(matches!(removal.apply(&mut contiguous, A), Err(Refused::Unsupported(_))));
}

/// The report of such a sequence as text: its length no longer equals its position.
#[test]
fn the_report_tells_length_from_position() {
    let mut cache = build("cells");
    cache.sequences().unwrap().seq_new(A).unwrap();
    grow(&mut cache, 40);
    let scores: Vec<Scored> = (0..40).map(|position| Scored { position, importance: 0.0 }).collect();
    Keep { sinks: 4, recent: 8, top_k: 0 }.plan(40, &scores).unwrap().apply(&mut cache, A).unwrap();
    let expected = "cells: 12 of 256 used, 244 free, all used ones below 40\n\
                    sequences: 1\n  0: 12 tokens, next position 40, 0 nodes, 2 runs of cells\n";
    assert_eq!(cache.report()[0].to_string(), expected);
}

/// As [`model`], by whole blocks: those with a sink or a recent token stay, and of the others the most important.
fn block_model(keep: Keep, next: u32, stored: &[Scored], block: u32) -> Vec<u32> {
    let mut blocks: BTreeMap<u32, f32> = BTreeMap::new();
    for scored in stored {
        *blocks.entry(scored.position / block).or_insert(0.0) += scored.importance;
    }
    let has_sink = |b: u32| b * block < keep.sinks;
    let has_recent = |b: u32| (b + 1) * block + keep.recent.max(1) > next;
    let mut middle: Vec<(u32, f32)> =
        blocks.iter().map(|(b, sum)| (*b, *sum)).filter(|(b, _)| !has_sink(*b) && !has_recent(*b)).collect();
    middle.sort_by(|a, b| (b.1, b.0).partial_cmp(&(a.1, a.0)).unwrap());
    let removed: Vec<u32> =
        middle.iter().skip(keep.top_k.div_ceil(block) as usize).map(|(b, _)| *b).collect();
    stored.iter().map(|s| s.position).filter(|position| !removed.contains(&(position / block))).collect()
}

/// Blocks leave the middle of sequences that fork, grow and are shortened; what is stored, read and free agrees.
#[test]
fn whole_blocks_leave_a_paged_cache() {
    const BLOCK: u32 = kinds::BLOCK_TOKENS;
    let b = SeqId(1);
    let mut n_removed = 0;
    for seed in 0..300 {
        let mut choices = Choices::from_seed(seed, 200);
        let group = GroupSpec { capacity_tokens: 2048, visibility: Visibility::FULL, max_step_tokens: 64 };
        let mut cache = Cache::new(vec![kinds::build("paged", &group).unwrap()]);
        cache.sequences().unwrap().seq_new(A).unwrap();
        let mut importance: BTreeMap<u32, f32> = BTreeMap::new();
        while choices.go_on() {
            let next = cache.next_position(A).unwrap();
            let what = choices.below(10);
            if what < 5 && cache.report()[0].used_cells < 1500 {
                let n = 1 + choices.below(60);
                grow(&mut cache, n);
                importance.extend((next..next + n).map(|position| (position, choices.below(40) as f32)));
            } else if what < 8 {
                let scores: Vec<Scored> = importance
                    .iter()
                    .map(|(&position, &importance)| Scored { position, importance })
                    .collect();
                let keep =
                    Keep { sinks: choices.below(20), recent: choices.below(80), top_k: choices.below(120) };
                let removal = keep.plan_blocks(next, &scores, BLOCK).unwrap();
                let stays = block_model(keep, next, &scores, BLOCK);
                assert_eq!(removal.n_removed() as usize, scores.len() - stays.len(), "{keep:?} of {next}");
                removal.apply(&mut cache, A).unwrap();
                importance.retain(|position, _| stays.contains(position));
                let budget = keep.sinks + keep.recent.max(1) + keep.top_k;
                assert!(stays.len() as u32 <= budget + 4 * (BLOCK - 1), "{keep:?} of {next}");
                n_removed += removal.n_removed();
            } else if what == 8 {
                if cache.next_position(b).is_some() {
                    cache.sequences().unwrap().seq_rm(b, 0, u32::MAX).unwrap();
                }
                cache.sequences().unwrap().fork(A, b).unwrap();
                let of = |cache: &mut Cache, seq| cache.sequences().unwrap().stored(seq).unwrap();
                assert_eq!(of(&mut cache, A), of(&mut cache, b));
            } else if next > 1 {
                let at = 1 + choices.below(next - 1);
                let rolled = cache.sequences().unwrap().seq_rm(A, at, u32::MAX);
                let is_gone = !at.is_multiple_of(BLOCK) && !importance.contains_key(&(at - 1));
                assert_eq!(rolled.is_err(), is_gone, "seed {seed}: to {at} of {next}: {rolled:?}");
                if rolled.is_ok() {
                    importance.retain(|position, _| *position < at);
                }
            }
            let kept: Vec<u32> = importance.keys().copied().collect();
            let ranges = cache.sequences().unwrap().stored(A).unwrap();
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
            assert_eq!(ranges.into_iter().flatten().collect::<Vec<_>>(), kept, "seed {seed}");
            assert_eq!(stored(&mut cache), kept, "seed {seed}: what the next token sees");
            assert_eq!(cache.seq_len(A), Some(kept.len() as u32), "seed {seed}");
            if cache.next_position(b).is_none() {
                let blocks = |position: &u32| position / BLOCK;
                let mut used: Vec<u32> = kept.iter().map(blocks).collect();
                used.dedup();
                assert_eq!(cache.report()[0].used_cells, used.len() as u32 * BLOCK, "seed {seed}");
            }
        }
        cache.sequences().unwrap().seq_rm(A, 0, u32::MAX).unwrap();
        if cache.next_position(b).is_some() {
            cache.sequences().unwrap().seq_rm(b, 0, u32::MAX).unwrap();
        }
        assert_eq!(cache.report()[0].used_cells, 0, "seed {seed}: no block is lost");
    }
    assert!(n_removed > 10_000, "the drives removed {n_removed} only");
}

/// What would be computed after a removal must not be found under the whole text.
#[test]
fn a_cache_with_a_prefix_index_removes_nothing_from_the_middle() {
    let groups = vec![GroupSpec { capacity_tokens: 256, visibility: Visibility::FULL, max_step_tokens: 64 }];
    let prefix = Some(PrefixSpec { policy: "lru".into(), ..PrefixSpec::default() });
    let spec = PagedSpec { block_tokens: 16, groups, rollback_tokens: 0, prefix };
    for indexed in [true, false] {
        let prefix = spec.prefix.clone().filter(|_| indexed);
        let mut cache = Cache::paged(&PagedSpec { prefix, ..spec.clone() }).unwrap();
        cache.sequences().unwrap().seq_new(A).unwrap();
        grow(&mut cache, 60);
        let removed = cache.sequences().unwrap().seq_rm(A, 16, 32);
        assert_eq!(removed.is_ok(), !indexed, "{removed:?}");
        let misaligned = cache.sequences().unwrap().seq_rm(A, 33, 48);
        assert!(matches!(misaligned, Err(Refused::Unsupported(_))));
        assert_eq!(cache.seq_len(A), Some(if indexed { 60 } else { 44 }));
    }
}
