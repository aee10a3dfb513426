//! The tables of caches with forks, windows and trees: what each query slot visits, from the words alone, is what it sees.
use super::*;
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;

/// The visible cells of every slot in the order in which its partial sums are added up, and the cells that are visited.
struct Walk {
    seen: Vec<Vec<u32>>,
    visited: u64,
    partials: u32,
}

fn sees(tables: &Tables, entry: &[u32], offset: u32, slot: u32) -> bool {
    let i = slot.wrapping_sub(entry[4]);
    if i >= entry[5] & 0xff_ffff {
        return false;
    }
    match entry[5] >> 24 {
        0 => true,
        1 => (entry[6] as i32..entry[7] as i32).contains(&(offset as i32 - i as i32)),
        _ => {
            let bit = entry[6] + i * entry[3] + offset;
            tables.words[(tables.bits + bit / 32) as usize] >> (bit % 32) & 1 == 1
        }
    }
}

/// Walks through the words as the kernels do.
fn walk(tables: &Tables, n_slots: usize) -> Walk {
    let at = |section: u32, i: u32, width: usize| {
        let first = section as usize + i as usize * width;
        &tables.words[first..first + width]
    };
    let mut walk = Walk { seen: vec![Vec::new(); n_slots], visited: 0, partials: 0 };
    let mut partials = vec![Vec::new(); PARTIAL_SLOTS as usize];
    for w in 0..tables.n_work {
        let work = at(tables.work, w, 4);
        let first = at(tables.units, work[0], 4)[0];
        for u in work[0]..work[1] {
            let unit = at(tables.units, u, 4);
            assert_eq!(unit[0], first, "a work item has one tile");
            for e in unit[2]..unit[3] {
                let entry = at(tables.entries, e, ENTRY);
                let len = at(tables.entries, e + 1, ENTRY)[0] - entry[0];
                walk.visited += u64::from(len);
                for (slot, cell) in (0..unit[1]).flat_map(|i| (0..len).map(move |cell| (unit[0] + i, cell))) {
                    if sees(tables, entry, entry[2] + cell, slot) {
                        match work[2] {
                            DIRECT => walk.seen[slot as usize].push(entry[1] + cell),
                            partial => {
                                walk.partials = walk.partials.max(partial + unit[1]);
                                partials[(partial + slot - unit[0]) as usize].push(entry[1] + cell);
                            }
                        }
                    }
                }
            }
        }
    }
    for m in 0..tables.n_merges {
        let merge = at(tables.merges, m, 4);
        for i in 0..merge[2] {
            let partial = tables.words[(tables.lists + merge[1] + i) as usize];
            walk.seen[merge[0] as usize].append(&mut partials[partial as usize]);
        }
    }
    assert!(partials.iter().all(Vec::is_empty), "a partial state is in no merge");
    walk
}

/// What the reads say, per slot.
fn expected(group: &GroupPlan) -> Vec<Vec<u32>> {
    let mut seen = vec![Vec::new(); group.reads.order.len()];
    for item in &group.reads.items {
        for query in 0..item.n_queries {
            let cells = (0..item.run.len).filter(|cell| group.reads.sees(item, query, *cell));
            seen[(item.first_query + query) as usize].extend(cells.map(|cell| item.run.start + cell));
        }
    }
    seen
}

fn cache(kind: &str, capacity: u32, visibility: Visibility) -> Cache {
    let group = GroupSpec { capacity_tokens: capacity, visibility, max_step_tokens: capacity };
    Cache::new(vec![kinds::build(kind, &group).unwrap()])
}

/// Runs a step, checks its tables, and returns the walk.
fn step(cache: &mut Cache, spans: &[Span<'_>], per_kv: u32) -> Walk {
    step_with(cache, spans, per_kv, 8)
}

/// [`step`] with workgroups of so many rows.
fn step_with(cache: &mut Cache, spans: &[Span<'_>], per_kv: u32, rows: u32) -> Walk {
    let mut plan = StepPlan::default();
    let mut step = Step::begin(cache, &StepRequest { spans }, &mut plan).unwrap();
    let plan = step.with_reads();
    let group = plan.group(GroupId(0));
    let mut tables = Tables::default();
    // Fixed splits last, and twice: what a step leaves behind must not matter.
    let mut walked = None;
    for units in [Some([33, 20, 9]), Some([1; 3]), None, None] {
        tables.lower(Lowering { group, spans: plan.spans(), per_kv, rows, units, recent: None });
        let walk = walk(&tables, group.reads.order.len());
        assert_eq!(walk.seen, expected(group), "{spans:?}, units {units:?}");
        walked = Some(walk);
    }
    let walk = walked.unwrap();
    step.commit();
    walk
}

fn forked(kind: &str, trunk: u32, branches: u32) -> Cache {
    let mut cache = cache(kind, trunk + 40 * branches, Visibility::FULL);
    cache.sequences().unwrap().seq_new(SeqId(0)).unwrap();
    step(&mut cache, &[Span::chain(SeqId(0), 0, trunk)], 1);
    for seq in 1..branches {
        cache.sequences().unwrap().seq_cp(SeqId(0), SeqId(seq), 0, trunk).unwrap();
    }
    cache
}

fn ones(branches: u32, at: u32) -> Vec<Span<'static>> {
    (0..branches).map(|seq| Span::chain(SeqId(seq), at, 1)).collect()
}

#[test]
fn a_trunk_is_read_once_for_up_to_eight_branches() {
    for kind in ["cells", "paged"] {
        for trunk in [40, 1023, 1024, 5000] {
            let mut cache = forked(kind, trunk, 8);
            for i in 0..3 {
                let walk = step(&mut cache, &ones(8, trunk + i), 1);
                // Every branch's own tokens, and its last block of the trunk if blocks are copied on write.
                let own = 8 * (u64::from(i) + 1 + 16);
                assert!(walk.visited <= u64::from(trunk) + own, "{kind} {trunk}: {}", walk.visited);
            }
        }
    }
}

#[test]
fn groups_of_query_heads_share_what_saves_work() {
    // Eight heads of a KV head fill a workgroup: sharing does not reduce what it does, and costs nothing.
    let mut cache = forked("cells", 3000, 4);
    let walk = step(&mut cache, &ones(4, 3000), 8);
    assert!(walk.visited < 4 * 3000, "{}", walk.visited);
    // A workgroup of 32 rows has all heads of all four branches.
    let mut cache = forked("cells", 3000, 4);
    let walk = step_with(&mut cache, &ones(4, 3000), 8, 32);
    assert!(walk.visited <= 3000 + 4 * 17, "{}", walk.visited);
}

#[test]
fn many_branches_fold_the_trunk_into_one_partial_state() {
    for branches in [70, 200] {
        let mut cache = forked("cells", 9000, branches);
        let walk = step(&mut cache, &ones(branches, 9000), 4);
        let tiles = u64::from(branches.div_ceil(8));
        assert!(walk.partials <= PARTIAL_SLOTS);
        assert!(walk.visited <= tiles * 9000 + u64::from(branches) * 1024, "{}", walk.visited);
    }
}

#[test]
fn unrelated_sequences_are_not_read_together() {
    let mut cache = cache("cells", 4000, Visibility::FULL);
    for seq in 0..5 {
        cache.sequences().unwrap().seq_new(SeqId(seq)).unwrap();
        step(&mut cache, &[Span::chain(SeqId(seq), 0, 300)], 1);
    }
    assert_eq!(step(&mut cache, &ones(5, 300), 1).visited, 5 * 301);
}

#[test]
fn windows_trees_and_chunks_visit_what_they_see() {
    let windows = [Visibility { window: Some(700), sinks: 4 }, Visibility { window: Some(5), sinks: 0 }];
    for visibility in windows {
        let mut cache = cache("cells", 6000, visibility);
        cache.sequences().unwrap().seq_new(SeqId(0)).unwrap();
        step(&mut cache, &[Span::chain(SeqId(0), 0, 2500)], 2);
        for seq in 1..4 {
            cache.sequences().unwrap().seq_cp(SeqId(0), SeqId(seq), 0, 2500).unwrap();
        }
        let spans: Vec<Span<'_>> = (0..4).map(|seq| Span::chain(SeqId(seq), 2500, 3 + seq * 7)).collect();
        step(&mut cache, &spans, 2);
    }
    let parents: Vec<Option<NodeId>> =
        [None, Some(0), Some(0), Some(1), None].map(|node| node.map(NodeId)).to_vec();
    for visibility in [Visibility::FULL, windows[0]] {
        let mut cache = cache("tree", 3000, visibility);
        cache.sequences().unwrap().seq_new(SeqId(0)).unwrap();
        step(&mut cache, &[Span::chain(SeqId(0), 0, 1200)], 1);
        let tree = Span { seq: SeqId(0), start: 1200, new: New::Tree(&parents) };
        step(&mut cache, &[tree], 1);
    }
}

/// Workgroups of more rows are fewer at a time, so a driver wants fewer units of them.
#[test]
fn rows_of_workgroups_decide_how_many_splits_there_are() {
    for (branches, of_rows) in [(1, 0), (4, 1), (8, 2)] {
        let mut cache = forked("cells", 2000, branches);
        let spans = ones(branches, 2000);
        let mut plan = StepPlan::default();
        let mut step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
        let plan = step.with_reads();
        let work_of = |units: [u32; 3]| {
            let group = plan.group(GroupId(0));
            let mut tables = Tables::default();
            let (spans, units) = (plan.spans(), Some(units));
            tables.lower(Lowering { group, spans, per_kv: 4, rows: 32, units, recent: None });
            tables.n_work
        };
        let (mut many, mut few) = ([1; 3], [10; 3]);
        (many[of_rows], few[of_rows]) = (10, 1);
        let (many, few) = (work_of(many), work_of(few));
        assert!(many >= 10 && few < 10, "{branches} branches: {many} and {few} work items");
        step.commit();
    }
}

/// Two texts that are generated side by side take blocks in turn. A chunk of one of them had more entries than were planned, and was refused.
#[test]
fn blocks_in_turn_fit_into_what_is_planned() {
    const TOKENS: u32 = 4000;
    for chunk in [8, 256, 1000] {
        let capacity = 2 * TOKENS + chunk;
        let mut cache = cache("paged", capacity, Visibility::FULL);
        for seq in 0..2 {
            cache.sequences().unwrap().seq_new(SeqId(seq)).unwrap();
        }
        let mut plan = StepPlan::default();
        let mut run = |spans: &[Span<'_>], units: &[Option<[u32; 3]>]| -> Vec<u64> {
            let mut step = Step::begin(&mut cache, &StepRequest { spans }, &mut plan).unwrap();
            let plan = step.with_reads();
            let group = plan.group(GroupId(0));
            let words = units.iter().map(|&units| {
                let mut tables = Tables::default();
                let (per_kv, rows) = (4, 8);
                tables.lower(Lowering { group, spans: plan.spans(), per_kv, rows, units, recent: None });
                tables.words.len() as u64
            });
            let words = words.collect();
            step.commit();
            words
        };
        for at in (0..TOKENS).step_by(16) {
            run(&[Span::chain(SeqId(0), at, 16)], &[]);
            run(&[Span::chain(SeqId(1), at, 16)], &[]);
        }
        let usual = usual_words(capacity, chunk, 0);
        let all = [None, Some([448; 3]), Some([1; 3])];
        let words = run(&[Span::chain(SeqId(0), TOKENS, chunk)], &all);
        assert!(words.iter().all(|words| *words <= usual), "{words:?} words of {chunk}, {usual} are planned");
    }
}
