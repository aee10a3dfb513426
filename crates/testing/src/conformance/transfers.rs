//! Cells that are exported and imported: into pools with other content, into empty ones, at other places, and into a cache of
//! another kind.
use super::cases::Case;
use crate::SplitMix64;
use crate::reference::Choices;
use kvist_cache::kinds::{self, GroupSpec, KindEntry, Visibility};
use kvist_cache::*;
use kvist_device::*;
use std::sync::Arc;

/// Where cells come from, and where they go to.
#[derive(Clone, Copy)]
pub struct Ends<'b> {
    pub from: &'b dyn Backend,
    pub to: &'b dyn Backend,
    /// Whether attention gives the same bits in both, over the same cells.
    pub same_bits: bool,
}

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
/// Tokens that are computed after the transfer.
const NEW: u32 = 3;

/// A cache, the pools that execute its steps, and the cells of sequence A.
struct World {
    cache: Cache,
    plan: StepPlan,
    spec: PoolSpec,
    /// Per group, in order of the tokens of A.
    cells: Vec<Vec<u32>>,
}

/// Pools, and what their activations depend on.
type Seeded<'p> = (&'p mut Box<dyn Pools>, u64);

/// Kinds that remove any one position.
const REMOVING: [&str; 2] = ["cells", "tree"];

impl World {
    fn new(case: &Case, kind: &KindEntry, capacity: u32) -> Self {
        // Of a bounded kind a window without end: nothing is overwritten, and every query sees what it sees elsewhere.
        let window = kind.traits.bounded.then_some(capacity);
        let visibility = Visibility { window, sinks: 0 };
        let group = GroupSpec { capacity_tokens: capacity, visibility, max_step_tokens: capacity };
        let build = || (kind.build)(&group).unwrap_or_else(|e| panic!("{} {group:?}: {e}", kind.name));
        let mut cache = Cache::new((0..case.n_groups()).map(|_| build()).collect());
        if let Some(mut sequences) = cache.sequences() {
            [A, B].into_iter().for_each(|seq| sequences.seq_new(seq).expect("it is new"));
        }
        let spec = PoolSpec {
            layout: case.layout(),
            k: case.k,
            v: case.v,
            capacity_cells: cache.capacity_cells(),
            max_step_tokens: capacity,
            budget: MemoryBudget::unlimited(),
            channels: case.channels().map(Arc::new),
            recent: Recent { tokens: case.recent, sequences: 8 },
        };
        World { cache, plan: StepPlan::default(), spec, cells: vec![Vec::new(); case.n_groups()] }
    }

    fn next(&self, seq: SeqId) -> u32 {
        self.cache.next_position(seq).expect("both sequences exist")
    }

    /// Appends tokens to A in chunks, and to B in between, if the kind has several sequences.
    fn fill(
        &mut self,
        case: &Case,
        (length, nan): (u32, Option<u32>),
        choices: &mut Choices<'_>,
        pools: Seeded<'_>,
    ) {
        while self.next(A) < length {
            let b = choices.below(4);
            if b > 0 && self.cache.sequences().is_some() {
                self.step(case, B, b, None, &mut [(&mut *pools.0, pools.1)]);
            }
            let n = (1 + choices.below(length)).min(length - self.next(A));
            self.step(case, A, n, nan, &mut [(&mut *pools.0, pools.1)]);
        }
    }

    /// Runs one step in every one of `pools`, and returns the outputs of all layers.
    fn step(
        &mut self,
        case: &Case,
        seq: SeqId,
        n: u32,
        nan: Option<u32>,
        pools: &mut [Seeded<'_>],
    ) -> Vec<Vec<f32>> {
        let start = self.next(seq);
        let spans = [Span::chain(seq, start, n)];
        let request = StepRequest { spans: &spans };
        let mut step = Step::begin(&mut self.cache, &request, &mut self.plan).expect("there is room");
        let plan = step.with_reads();
        let mut outputs = Vec::new();
        for (pools, seed) in pools {
            pools.begin(plan).expect("there is memory");
            let mut all = Vec::new();
            for (l, layer) in self.spec.layout.layers.iter().enumerate() {
                let (heads, kv_heads, d) =
                    (case.heads.0 as usize, layer.n_kv_heads as usize, layer.k_dim as usize);
                let rows = |what: u64, heads: usize| -> Vec<f32> {
                    let row = |position: u32| {
                        let id = u64::from(seq.0) << 40 | u64::from(position) << 16 | what << 8 | l as u64;
                        let mut random = SplitMix64(SplitMix64(id).next() ^ *seed);
                        let bad = what > 0 && nan == Some(position);
                        (0..heads * d).map(move |_| match bad {
                            true => f32::NAN,
                            false => (random.unit() * 2.0 - 1.0) as f32,
                        })
                    };
                    (start..start + n).flat_map(row).collect()
                };
                let (q, k, v) = (rows(0, heads), rows(1, kv_heads), rows(2, kv_heads));
                let mut out = vec![f32::NAN; q.len()];
                let kv = || (Tensor::dense(&k, kv_heads, d), Tensor::dense(&v, kv_heads, d));
                let call = Attend {
                    layer: LayerId(l as u16),
                    q: Tensor::dense(&q, heads, d),
                    kv: self.spec.layout.owns(l).then(kv),
                    out: TensorMut::dense(&mut out, heads, d),
                    scale: 1.0 / (d as f32).sqrt(),
                    softcap: case.softcap,
                    sinks: None,
                };
                pools.attend(plan, call).expect("the call fits");
                all.extend(out);
            }
            outputs.push(all);
        }
        if seq == A {
            for (g, cells) in self.cells.iter_mut().enumerate() {
                cells.extend(plan.group(GroupId(g as u16)).writes.iter().flat_map(|run| run.cells()));
            }
        }
        step.commit();
        outputs
    }

    /// Removes a position of A.
    fn remove(&mut self, position: u32) {
        let mut sequences = self.cache.sequences().expect("a kind that removes has sequences");
        sequences.seq_rm(A, position, position + 1).expect("it removes any range");
    }

    fn can_shorten(&mut self) -> bool {
        self.cache.sequences().is_some() || self.cache.rewinds().is_some()
    }

    /// Makes A end at a position.
    fn shorten(&mut self, length: u32) {
        let done = match self.cache.rewinds() {
            Some(mut rewinds) => rewinds.rewind(length),
            None => self.cache.sequences().expect("it can").seq_rm(A, length, u32::MAX),
        };
        done.expect("A is longer than that");
    }

    /// The longest run of cells that stores tokens of A from `token` on.
    fn run(&self, group: usize, token: usize, max: u32) -> CellRun {
        let cells = &self.cells[group][token..];
        let follow = cells.iter().zip(cells[0]..).take_while(|(cell, next)| *cell == next).count();
        CellRun { start: cells[0], len: max.min(follow as u32) }
    }
}

/// The token of A whose K and V are NaN, in every third case that is long enough. Kernels must not multiply it by a
/// weight of zero once it is removed. Not if one of the kinds cannot remove it.
fn nan_token(case: &Case, length: u32) -> Option<u32> {
    (case.length.is_multiple_of(3) && length > 2).then_some(length / 2)
}

fn block(pools: &dyn Pools, group: GroupId, cells: CellRun) -> HostBlock {
    HostBlock::new(pools.block_bytes(group, cells.len).expect("the group exists")).expect("there is memory")
}

/// Waits for a transfer.
pub fn finish(
    pools: &mut dyn Pools,
    transfer: Result<Transfer, TransferRefused>,
) -> Result<HostBlock, DeviceError> {
    let transfer = transfer?;
    loop {
        if let Some(done) = pools.finished(&transfer) {
            return done;
        }
        std::thread::yield_now();
    }
}

/// Copies A's cells from `exported` into both other pools, in random pieces, and exports them again. One line per failure.
fn transfer_all(
    choices: &mut Choices,
    case: &Case,
    length: u32,
    (source, target): (&World, &World),
    exported: &mut dyn Pools,
    [full, empty]: [&mut dyn Pools; 2],
) -> Vec<String> {
    let mut bad = Vec::new();
    for g in 0..case.n_groups() {
        let (id, mut token, mut spare) = (GroupId(g as u16), 0, None);
        while token < length {
            let max = (1 + choices.below(40)).min(length - token);
            let from = source.run(g, token as usize, max);
            let to = target.run(g, token as usize, from.len);
            let from = CellRun { len: to.len, ..from };
            // A block may be used again.
            let size = exported.block_bytes(id, from.len).unwrap_or(0);
            let into = spare.take().filter(|block: &HostBlock| block.bytes().len() == size);
            let into = into.unwrap_or_else(|| block(exported, id, from));
            let moved = exported.export(Ticket::START, id, from, into);
            let mut moved = finish(exported, moved);
            for pools in [&mut *full, &mut *empty] {
                moved = moved.and_then(|block| {
                    let transfer = pools.import(Ticket::START, id, to, block);
                    finish(pools, transfer)
                });
            }
            let again = full.export(Ticket::START, id, to, block(full, id, to));
            match (moved, finish(full, again)) {
                (Ok(moved), Ok(again)) if moved == again => spare = Some(moved),
                (Ok(_), Ok(_)) => bad.push(format!("group {g}: exported anew, {to:?} has other bytes")),
                (Err(error), _) | (_, Err(error)) => {
                    bad.push(format!("group {g} {from:?} to {to:?}: {error}"))
                }
            }
            token += to.len;
        }
    }
    bad
}

/// Copies the f16 rows of some tokens of A to both other pools, and reads them again. `false` if the source has none. One line per
/// failure.
fn move_recent(
    (source, target): (&World, &World),
    tokens: impl Iterator<Item = u32> + Clone,
    exported: &mut dyn Pools,
    others: [&mut dyn Pools; 2],
    bad: &mut Vec<String>,
) -> bool {
    let mut others = others;
    for g in 0..source.cells.len() {
        let id = GroupId(g as u16);
        let mut rows = vec![0; source.spec.recent_row_bytes(id).expect("the group exists")];
        for position in tokens.clone() {
            let at = |world: &World| CellPosition { cell: world.cells[g][position as usize], position };
            let (from, to) = (at(source), at(target));
            match exported.read_recent(id, from, &mut rows) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => bad.push(format!("group {g}: the f16 rows of {from:?}: {error}")),
            }
            for pools in &mut others {
                let mut again = vec![1; rows.len()];
                let moved = pools.write_recent(id, to, &rows).and_then(|written| {
                    let elsewhere = CellPosition { position: position + 1, ..to };
                    let other = pools.read_recent(id, elsewhere, &mut again)?;
                    Ok(written && !other && pools.read_recent(id, to, &mut again)?)
                });
                if !matches!(moved, Ok(true)) || again != rows {
                    bad.push(format!("group {g}: the f16 rows of {from:?} at {to:?}: {moved:?}"));
                }
            }
        }
    }
    true
}

/// Two kinds, the same one in a third of the cases or more. In half of the cases that want to remove a position, both can.
fn kinds_of(choices: &mut Choices<'_>, wants_removal: bool) -> [&'static KindEntry; 2] {
    let removing = wants_removal && choices.one_in(2);
    let all: Vec<&KindEntry> =
        kinds::KINDS.iter().filter(|kind| !removing || REMOVING.contains(&kind.name)).collect();
    let source = choices.below(all.len() as u32) as usize;
    let target = if choices.one_in(3) { source } else { choices.below(all.len() as u32) as usize };
    [all[source], all[target]]
}

/// Runs one case; one line per failure. Attention over the same rows at both ends may differ by `tolerance`.
pub fn run(ends: Ends<'_>, case: &Case, seed: u64, tolerance: f32) -> Vec<String> {
    let mut case = case.clone();
    if seed % 4 == 1 {
        case.head_dim = [1, 7, 33, 65][(seed / 4 % 4) as usize];
    }
    let mut choices = Choices::from_seed(seed, u64::MAX);
    let group = case.recent.max(1);
    let length = (case.length % 90 + 1).next_multiple_of(group);
    // Where cells are elsewhere, the pools are larger, too.
    let elsewhere = choices.one_in(2);
    let capacity = 5 * length + 2 * NEW + 20;
    let kinds = kinds_of(&mut choices, nan_token(&case, length).is_some());
    let nan = nan_token(&case, length).filter(|_| kinds.iter().all(|kind| REMOVING.contains(&kind.name)));
    let mut source = World::new(&case, kinds[0], capacity);
    let mut target = World::new(&case, kinds[1], if elsewhere { capacity + 300 } else { capacity });
    let pools = |backend: &dyn Backend, world: &World| backend.pools(&world.spec).expect("pools");
    let mut exported = pools(ends.from, &source);
    let (mut full, mut empty) = (pools(ends.to, &target), pools(ends.to, &target));
    // The same choices place A in the same cells.
    let script = u64::from(choices.below(u32::MAX));
    source.fill(&case, (length, nan), &mut Choices::from_seed(script, u64::MAX), (&mut exported, 1));
    let script = script + u64::from(elsewhere);
    target.fill(&case, (length, None), &mut Choices::from_seed(script, u64::MAX), (&mut full, 2));
    let names = kinds.map(|kind| kind.name).join(" to ");

    let mut bad = transfer_all(
        &mut choices,
        &case,
        length,
        (&source, &target),
        &mut *exported,
        [&mut *full, &mut *empty],
    );
    if !bad.is_empty() {
        return bad.into_iter().map(|line| format!("{names}: {line}")).collect();
    }
    let worlds = (&source, &target);
    same_rows(&case, worlds, &*exported, &*full, "other content", &mut bad);
    same_rows(&case, worlds, &*exported, &*empty, "no content", &mut bad);

    // A step after the transfer, after the last token or after one in the middle of a recent group.
    let shorter = choices.one_in(3) && length > 1 && source.can_shorten() && target.can_shorten();
    for world in [&mut source, &mut target] {
        if let Some(token) = nan {
            world.remove(token);
        }
        if shorter {
            world.shorten(length - 1);
        }
    }
    // The tokens that the next query reads in f16.
    let recent = (length - 1) / group * group..length - 1;
    let recent = recent.filter(|token| nan != Some(*token));
    let has_recent = shorter
        && choices.one_in(2)
        && move_recent((&source, &target), recent, &mut *exported, [&mut *full, &mut *empty], &mut bad);
    let expected = source.step(&case, A, NEW, None, &mut [(&mut exported, 3)]).remove(0);
    let mut found = target.step(&case, A, NEW, None, &mut [(&mut full, 3), (&mut empty, 3)]);
    let (from_empty, from_full) = (found.remove(1), found.remove(0));
    let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if from_full.iter().chain(&from_empty).any(|x| !x.is_finite()) {
        bad.push("a step sees what it must not see".into());
    }
    let float = !case.k.dtype.is_quantised() && !case.v.dtype.is_quantised();
    if bits(&from_full) != bits(&from_empty) {
        bad.push("attention depends on what was in the cells before".into());
    }
    // The source reads the rows of the last group in f16, if the sequence was shortened.
    let comparable = !shorter || case.recent == 0 || float || has_recent;
    let same_places = !elsewhere && source.cells == target.cells;
    let exact = ends.same_bits && (float || same_places);
    let difference = largest_difference(&expected, &from_full);
    // NaN fails the comparison.
    let near = difference <= tolerance;
    if comparable && (!near || exact && bits(&expected) != bits(&from_full)) {
        bad.push(format!(
            "attention over imported cells differs by {difference:.1e} (same cells: {same_places}, shorter: {shorter}, f16 rows: {has_recent})"
        ));
    }
    bad.into_iter().map(|line| format!("{names}: {line}")).collect()
}

/// NaN if the lengths differ or one of the values is NaN.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    let mut largest = if a.len() == b.len() { 0.0f32 } else { f32::NAN };
    for (a, b) in a.iter().zip(b) {
        let difference = (a - b).abs();
        if difference > largest || difference.is_nan() {
            largest = difference;
        }
    }
    largest
}

/// Compares the stored rows of A.
fn same_rows(
    case: &Case,
    (source, target): (&World, &World),
    from: &dyn Pools,
    to: &dyn Pools,
    what: &str,
    bad: &mut Vec<String>,
) {
    for (l, layer) in case.layout().layers.iter().enumerate() {
        let (id, group) = (LayerId(l as u16), usize::from(layer.group.0));
        let mut rows = [vec![0.0f32; layer.k_dim as usize], vec![0.0; layer.k_dim as usize]];
        for (token, (a, b)) in source.cells[group].iter().zip(&target.cells[group]).enumerate() {
            for (side, head) in (0..layer.n_kv_heads).flat_map(|head| [(Side::K, head), (Side::V, head)]) {
                let read = [
                    from.inspect(id, side, head, *a, &mut rows[0]),
                    to.inspect(id, side, head, *b, &mut rows[1]),
                ];
                let equal = rows[0]
                    .iter()
                    .zip(&rows[1])
                    .all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan());
                if !equal || read.iter().any(Result::is_err) {
                    let error = read.into_iter().find_map(Result::err);
                    bad.push(format!("{what}: layer {l} {side:?} head {head} token {token}: {error:?}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn cells_go_from_every_kind_to_every_kind() {
        let drawn = |wants_removal: bool| -> BTreeSet<[&str; 2]> {
            let of = |seed| kinds_of(&mut Choices::from_seed(seed, u64::MAX), wants_removal);
            (0..300).map(|seed| of(seed).map(|kind| kind.name)).collect()
        };
        assert_eq!(drawn(false).len(), kinds::KINDS.len().pow(2));
        let removing = drawn(true).into_iter().filter(|pair| pair.iter().all(|kind| REMOVING.contains(kind)));
        assert_eq!(removing.count(), 4);
    }
}
