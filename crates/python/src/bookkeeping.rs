//! The bookkeeping of a cache, for engines that keep K and V themselves.
use crate::arguments::from_json;
use crate::errors::{argument, misuse, paged, refused};
use crate::step::Step;
use crate::wait::exclusive;
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use serde_json::json;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Which cell holds which token. Integers only: K and V are the caller's. All operations except `begin` are refused with
/// `Busy` while a step is in flight, and a refusal changes nothing.
///
/// Args:
///     kind: one of `KINDS`.
///     capacity: cells of each layer group; a ring computes its own number.
///     windows: for each layer group the number of positions that a query sees, or None for all. Without it one group.
///     sinks: first positions that stay visible outside a window.
///     max_step_tokens: tokens of the largest step; a ring's size depends on it.
#[pyclass(frozen, module = "kvist.cache")]
pub struct Cache {
    state: Arc<Mutex<State>>,
}

pub struct State {
    pub checked: CheckedCache,
    /// Block size of a paged cache, else the usual one.
    pub block_tokens: u32,
    started: Instant,
}

impl State {
    /// The caller's clock, for policies that rank by time.
    fn now(&self) -> Moment {
        Moment { now_ns: u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX) }
    }
    fn cache(&mut self) -> PyResult<&mut kvist_cache::Cache> {
        self.checked.cache().map_err(misuse)
    }
    fn prefixes(&mut self) -> PyResult<Prefixes<'_>> {
        let prefixes = self.cache()?.prefixes();
        prefixes.ok_or_else(|| argument("this cache has no prefix index: make a Paged with prefix=True"))
    }
    fn sequences(&mut self) -> PyResult<Sequences<'_>> {
        let sequences = self.cache()?.sequences();
        sequences.ok_or_else(|| argument("this kind of cache holds one sequence: use cells, tree or a Paged"))
    }
    fn group(&mut self, group: u16) -> PyResult<GroupId> {
        let n = self.cache()?.n_groups();
        match usize::from(group) < n {
            true => Ok(GroupId(group)),
            false => Err(argument(format!("`group`: {group} does not exist: there are {n}"))),
        }
    }
}

/// The names of all kinds.
pub fn kinds() -> Vec<&'static str> {
    kinds::KINDS.iter().map(|kind| kind.name).collect()
}

/// One group for each window.
fn groups(
    capacity: u32,
    windows: Option<Vec<Option<u32>>>,
    sinks: u32,
    max_step_tokens: u32,
) -> PyResult<Vec<GroupSpec>> {
    let windows = windows.unwrap_or_else(|| vec![None]);
    if windows.is_empty() || windows.contains(&Some(0)) {
        return Err(argument("`windows`: give one for each layer group, None or at least 1"));
    }
    let group = |window: Option<u32>| GroupSpec {
        capacity_tokens: capacity,
        visibility: Visibility { window, sinks: if window.is_some() { sinks } else { 0 } },
        max_step_tokens,
    };
    Ok(windows.into_iter().map(group).collect())
}

impl Cache {
    fn of(cache: kvist_cache::Cache, block_tokens: u32) -> Self {
        let checked = CheckedCache::new(cache, LayerOrder::new([]));
        let state = State { checked, block_tokens, started: Instant::now() };
        Cache { state: Arc::new(Mutex::new(state)) }
    }
    fn state(&self) -> PyResult<MutexGuard<'_, State>> {
        exclusive("cache", &self.state)
    }
}

/// The new tokens of a sequence: their number, or for draft trees the parent of each.
#[derive(FromPyObject)]
enum NewTokens {
    Chain(u32),
    Tree(Vec<Option<u32>>),
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (kind, capacity, *, windows=None, sinks=0, max_step_tokens=256))]
    fn new(
        kind: &str,
        capacity: u32,
        windows: Option<Vec<Option<u32>>>,
        sinks: u32,
        max_step_tokens: u32,
    ) -> PyResult<Self> {
        let groups = groups(capacity, windows, sinks, max_step_tokens)?;
        let built = groups.iter().map(|group| kinds::build(kind, group)).collect::<Result<Vec<_>, _>>();
        let built = built.map_err(|why| argument(why.to_string()))?;
        Ok(Cache::of(kvist_cache::Cache::new(built), kinds::BLOCK_TOKENS))
    }

    /// A cache of blocks with reference counts and block tables.
    ///
    /// Args:
    ///     capacity: cells of each layer group, rounded down to whole blocks.
    ///     block_tokens: tokens of a block.
    ///     windows, sinks: as for other kinds.
    ///     prefix: keep full blocks in a prefix index. Sequences are then made by `open`.
    ///     policy: which cached blocks are evicted first: lru, lfu, lfu_decay, fifo or cost; half_life, such as "5m", is a
    ///         parameter of those that decay.
    ///     rollback_tokens: how far a sequence with a window can be rolled back.
    #[staticmethod]
    #[pyo3(signature = (capacity, *, block_tokens=16, windows=None, sinks=0, prefix=true, policy="lru", half_life=None, rollback_tokens=0))]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn paged(
        capacity: u32,
        block_tokens: u32,
        windows: Option<Vec<Option<u32>>>,
        sinks: u32,
        prefix: bool,
        policy: &str,
        half_life: Option<&str>,
        rollback_tokens: u32,
    ) -> PyResult<Self> {
        let mut parameters = evict::Parameters::default();
        if let Some(value) = half_life {
            parameters.set("half_life", value).map_err(|why| argument(why.to_string()))?;
        }
        let prefix =
            prefix.then(|| PrefixSpec { policy: policy.to_owned(), parameters, ..PrefixSpec::default() });
        let groups = groups(capacity, windows, sinks, 1)?;
        let spec = PagedSpec { block_tokens, groups, rollback_tokens, prefix };
        Ok(Cache::of(kvist_cache::Cache::paged(&spec).map_err(paged)?, block_tokens))
    }

    /// Makes an empty sequence.
    fn new_sequence(&self, seq: u32) -> PyResult<()> {
        self.state()?.sequences()?.seq_new(SeqId(seq)).map_err(|why| refused(&why))
    }
    /// Makes a sequence with the cached blocks of a prompt, and returns the number of tokens that need not be computed.
    #[pyo3(signature = (seq, tokens, *, salt=""))]
    fn open(&self, seq: u32, tokens: Vec<u32>, salt: &str) -> PyResult<u32> {
        let mut state = self.state()?;
        let now = state.now();
        let found = state.prefixes()?.open(SeqId(seq), salt, &Content::Tokens(&tokens), now);
        Ok(found.map_err(|why| refused(&why))?.hit_tokens)
    }
    /// The tokens that `open` would find.
    #[pyo3(signature = (tokens, *, salt=""))]
    fn lookup(&self, tokens: Vec<u32>, salt: &str) -> PyResult<u32> {
        Ok(self.state()?.prefixes()?.lookup(salt, &Content::Tokens(&tokens)).hit_tokens)
    }
    /// Why `lookup` finds no more, and at which position.
    #[pyo3(signature = (tokens, *, salt=""))]
    fn explain(&self, tokens: Vec<u32>, salt: &str) -> PyResult<(&'static str, u32)> {
        let mut state = self.state()?;
        let reason = state.prefixes()?.explain(salt, &Content::Tokens(&tokens), Viewer::Operator);
        Ok((reason.name(), reason.position()))
    }
    /// Adds the full blocks of a sequence to the prefix index. `tokens` are those of the sequence, from the first on.
    /// Returns how many blocks were new.
    fn store(&self, seq: u32, tokens: Vec<u32>) -> PyResult<u32> {
        let mut state = self.state()?;
        let now = state.now();
        let stored = state.prefixes()?.store(SeqId(seq), &Content::Tokens(&tokens), now);
        Ok(stored.map_err(|why| refused(&why))?.n_new)
    }
    /// Evicts cached blocks until `tokens` cells are free in every group, or none is left. Returns their number.
    fn evict(&self, tokens: u32) -> PyResult<u32> {
        let mut state = self.state()?;
        let now = state.now();
        Ok(state.prefixes()?.evict_until_free(tokens, now))
    }
    /// Makes `dst` a copy of `src`. No bytes are copied.
    fn fork(&self, src: u32, dst: u32) -> PyResult<()> {
        self.state()?.sequences()?.fork(SeqId(src), SeqId(dst)).map_err(|why| refused(&why))
    }
    /// Removes the positions `start..end` of a sequence, without them the whole sequence.
    #[pyo3(signature = (seq, start=0, end=None))]
    fn remove(&self, seq: u32, start: u32, end: Option<u32>) -> PyResult<()> {
        let mut state = self.state()?;
        state.sequences()?.seq_rm(SeqId(seq), start, end.unwrap_or(u32::MAX)).map_err(|why| refused(&why))
    }
    /// Keeps the first `n` positions of a sequence.
    fn rollback(&self, seq: u32, n: u32) -> PyResult<()> {
        let mut state = self.state()?;
        let cache = state.cache()?;
        let next =
            cache.next_position(SeqId(seq)).ok_or_else(|| refused(&Refused::UnknownSequence(SeqId(seq))))?;
        if n > next {
            return Err(refused(&Refused::CannotGrow { len: next, asked: n }));
        }
        if let Some(mut rewinds) = cache.rewinds() {
            return rewinds.rewind(n).map_err(|why| refused(&why));
        }
        let mut sequences = state.sequences()?;
        sequences.seq_rm(SeqId(seq), n, u32::MAX).map_err(|why| refused(&why))?;
        match n {
            0 => sequences.seq_new(SeqId(seq)).map_err(|why| refused(&why)),
            _ => Ok(()),
        }
    }
    /// Removes every sequence, and what the prefix index caches.
    fn clear(&self) -> PyResult<()> {
        self.state()?.cache().map(kvist_cache::Cache::clear)
    }
    /// Position of the next token of a sequence; `None` if there is no such sequence.
    fn length(&self, seq: u32) -> PyResult<Option<u32>> {
        Ok(self.state()?.cache()?.next_position(SeqId(seq)))
    }
    /// Accepts a path of the draft tree of a sequence in kinds whose nodes outlive their step, and frees the others.
    fn commit_path(&self, seq: u32, path: Vec<u32>) -> PyResult<()> {
        let mut state = self.state()?;
        let trees = state.cache()?.trees();
        let mut trees = trees
            .ok_or_else(|| argument("nodes of this kind do not outlive their step: commit with keep"))?;
        let path: Vec<NodeId> = path.into_iter().map(NodeId).collect();
        trees.commit_path(SeqId(seq), &path).map_err(|why| refused(&why))
    }

    /// The blocks of a sequence, int32 `[blocks]`: -1 where they have left the window.
    #[pyo3(signature = (seq, *, group=0))]
    fn block_table<'py>(&self, py: Python<'py>, seq: u32, group: u16) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let mut state = self.state()?;
        let group = state.group(group)?;
        let table = state.cache()?.block_table(group, SeqId(seq));
        let table = table.ok_or_else(|| argument("there is no such sequence, or the kind has no blocks"))?;
        let entries: Vec<i32> =
            table.into_iter().map(|block| block.map_or(-1, |block| block as i32)).collect();
        Ok(entries.into_pyarray(py))
    }

    /// Begins a step: chooses cells for new tokens. `spans` has a pair for each sequence: its id, and the number of tokens
    /// to append, or for a draft tree the parent of each node (None for the root, else the number of an earlier node).
    ///
    /// Raises:
    ///     NoSpace: too few cells are free: `evict`, or remove sequences, and try again.
    ///     Refused, Busy: nothing has changed.
    fn begin(&self, spans: Vec<(u32, NewTokens)>) -> PyResult<Step> {
        let mut state = self.state()?;
        let parents: Vec<Vec<Option<NodeId>>> = spans
            .iter()
            .map(|(_, new)| match new {
                NewTokens::Chain(_) => Vec::new(),
                NewTokens::Tree(parents) => parents.iter().map(|parent| parent.map(NodeId)).collect(),
            })
            .collect();
        let cache = state.cache()?;
        let span = |((seq, new), parents): (&(u32, NewTokens), &'_ Vec<Option<NodeId>>)| {
            let seq = SeqId(*seq);
            let start = cache.next_position(seq).ok_or(Refused::UnknownSequence(seq));
            start.map(|start| (seq, start, matches!(new, NewTokens::Tree(_)), parents.len()))
        };
        let placed = spans.iter().zip(&parents).map(span).collect::<Result<Vec<_>, _>>();
        let placed = placed.map_err(|why| refused(&why))?;
        let spans: Vec<Span<'_>> = placed
            .iter()
            .zip(&spans)
            .zip(&parents)
            .map(|((&(seq, start, ..), (_, new)), parents)| {
                let new = match new {
                    NewTokens::Chain(n) => New::Chain(*n),
                    NewTokens::Tree(_) => New::Tree(parents),
                };
                Span { seq, start, new }
            })
            .collect();
        let id = state.checked.begin(&StepRequest { spans: &spans }).map_err(misuse)?;
        Ok(Step::new(self.state.clone(), id))
    }

    /// Turns the logs of block and prefix events on or off.
    #[pyo3(signature = (on=true))]
    fn watch(&self, on: bool) -> PyResult<()> {
        let mut state = self.state()?;
        let cache = state.cache()?;
        cache.watch_blocks(on);
        cache.watch_prefixes(on);
        Ok(())
    }

    /// What happened to blocks since the last call, dicts in order.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut state = self.state()?;
        let mut blocks = Vec::new();
        state.cache()?.drain_block_events(&mut blocks);
        let lines: Vec<_> = blocks
            .iter()
            .map(|event| {
                let mut line = json!({
                    "step": event.step, "group": event.group.0, "block": event.block,
                    "seq": event.seq.map(|seq| seq.0), "change": event.change.name(), "reason": event.reason.name(),
                });
                if let Change::CopyOnWrite { from } | Change::Move { from } = event.change {
                    line["from"] = from.into();
                }
                line
            })
            .collect();
        from_json(py, &serde_json::Value::from(lines).to_string())
    }

    /// What the prefix index stored and removed since the last call, dicts in order.
    fn prefix_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut state = self.state()?;
        let mut events = Vec::new();
        state.cache()?.drain_prefix_events(&mut events);
        let lines: Vec<_> = events
            .iter()
            .map(|event| match event {
                PrefixEvent::Stored { group, block, hash, parent_hash, key } => json!({
                    "event": "stored", "group": group.0, "block": block, "hash": hash,
                    "parent_hash": parent_hash, "tokens": key,
                }),
                PrefixEvent::Removed { group, block, hash } => {
                    json!({"event": "removed", "group": group.0, "block": block, "hash": hash})
                }
                PrefixEvent::Moved { group, from, to, hash } => {
                    json!({"event": "moved", "group": group.0, "from": from, "block": to, "hash": hash})
                }
                PrefixEvent::Cleared => json!({"event": "cleared"}),
            })
            .collect();
        from_json(py, &serde_json::Value::from(lines).to_string())
    }

    /// The contents of the cache, a dict for each layer group.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let reports = self.state()?.cache()?.report();
        from_json(py, &report_json(&reports))
    }
    /// Cells that are free at once, in the fullest group.
    #[getter]
    fn free_cells(&self) -> PyResult<u32> {
        Ok(self.state()?.cache()?.occupancy().map(|it| it.free_cells).min().unwrap_or(0))
    }
    /// Cells of each layer group.
    #[getter]
    fn capacity_cells(&self) -> PyResult<Vec<u32>> {
        Ok(self.state()?.cache()?.capacity_cells())
    }
    /// Number of layer groups.
    #[getter]
    fn n_groups(&self) -> PyResult<usize> {
        Ok(self.state()?.cache()?.n_groups())
    }
}

/// Reports as JSON.
pub fn report_json(reports: &[Report]) -> String {
    let sequence = |it: &SequenceReport| json!({"seq": it.seq.0, "length": it.len, "next_position": it.next_position, "nodes": it.n_nodes});
    let group = |it: &Report| {
        let mut line = json!({
            "capacity_cells": it.capacity_cells, "used_cells": it.used_cells, "high_water": it.high_water,
            "sequences": it.sequences.iter().map(sequence).collect::<Vec<_>>(),
        });
        if let Some(blocks) = &it.blocks {
            line["blocks"] = json!({
                "block_tokens": blocks.block_tokens, "total": blocks.total, "free": blocks.free,
                "evictable": blocks.evictable, "unused_cells": blocks.unused_cells,
            });
        }
        line
    };
    serde_json::Value::from(reports.iter().map(group).collect::<Vec<_>>()).to_string()
}
