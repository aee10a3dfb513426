//! A step of the bookkeeping: what to write where, and what to read.
use crate::bookkeeping::State;
use crate::errors::{Class, argument, misuse, not_blocks};
use crate::wait::exclusive;
use kvist_cache::{BlockTables, GroupId, Kept, MovePlan, NO_BLOCK, NodeId, StepId, StepPlan};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Arc, Mutex};

/// A step in flight. Nothing else can change the cache until it is committed or dropped.
#[pyclass(frozen, module = "kvist.cache")]
pub struct Step {
    state: Arc<Mutex<State>>,
    id: StepId,
    group: GroupId,
    /// False for views of other layer groups, which end no step.
    owns: bool,
}

/// What a span keeps.
#[derive(FromPyObject)]
enum Keep {
    First(u32),
    Path(Vec<u32>),
}

impl Step {
    pub fn new(state: Arc<Mutex<State>>, id: StepId) -> Self {
        Step { state, id, group: GroupId(0), owns: true }
    }

    /// Calls `get` with the state, if this step is still in flight.
    fn with<T>(&self, get: impl FnOnce(&mut State) -> PyResult<T>) -> PyResult<T> {
        let mut state = exclusive("cache", &self.state)?;
        match state.checked.plan().map(StepPlan::id) {
            Ok(id) if id == self.id => get(&mut state),
            _ => Err(Class::Busy.with("this step has ended: it was committed or dropped")),
        }
    }

    fn plan<T>(&self, get: impl FnOnce(&StepPlan) -> T) -> PyResult<T> {
        self.with(|state| Ok(get(state.checked.plan().map_err(misuse)?)))
    }

    /// The lengths and masks of the step; blocks of `block` tokens too, if asked for.
    fn tables(&self, block: Option<Option<u32>>) -> PyResult<BlockTables> {
        self.with(|state| {
            let own = state.block_tokens;
            let plan = state.checked.with_tables().map_err(misuse)?.group(self.group);
            let mut tables = BlockTables::default();
            match block.map(|block| block.unwrap_or(own)) {
                None => plan.lengths(&mut tables),
                Some(0) => return Err(argument("`block_tokens` must be at least 1")),
                Some(block) => plan.tables(block, &mut tables),
            }
            .map_err(not_blocks)?;
            Ok(tables)
        })
    }

    fn is_in_flight(&self) -> bool {
        self.with(|_| Ok(())).is_ok()
    }
}

/// Calls `with` with what each span keeps.
fn kept<T>(keep: Vec<Option<Keep>>, with: impl FnOnce(&[Kept<'_>]) -> T) -> T {
    let paths: Vec<Vec<NodeId>> = keep
        .iter()
        .map(|keep| match keep {
            Some(Keep::Path(path)) => path.iter().copied().map(NodeId).collect(),
            _ => Vec::new(),
        })
        .collect();
    let kept: Vec<Kept<'_>> = keep
        .iter()
        .zip(&paths)
        .map(|(keep, path)| match keep {
            None => Kept::All,
            Some(Keep::First(n)) => Kept::First(*n),
            Some(Keep::Path(_)) => Kept::Path(path),
        })
        .collect();
    with(&kept)
}

/// Rows of three numbers, `[n, 3]`.
fn triples<'py>(py: Python<'py>, rows: Vec<u32>) -> PyResult<Bound<'py, PyArray2<u32>>> {
    let n = rows.len() / 3;
    rows.into_pyarray(py).reshape([n, 3])
}

#[pymethods]
impl Step {
    /// The same step, as another layer group sees it.
    fn group(&self, group: u16) -> PyResult<Step> {
        let n = self.plan(StepPlan::n_groups)?;
        if usize::from(group) >= n {
            return Err(argument(format!("`group`: {group} does not exist: there are {n}")));
        }
        Ok(Step { state: self.state.clone(), id: self.id, group: GroupId(group), owns: false })
    }

    /// Number of tokens of the batch.
    #[getter]
    fn n_tokens(&self) -> PyResult<u32> {
        self.plan(StepPlan::n_tokens)
    }
    /// The cell of each new token, uint32 `[tokens]`; vLLM's slot_mapping.
    #[getter]
    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let slots = self.plan(|plan| {
            let cells = plan.group(self.group).writes.iter().flat_map(|run| run.cells());
            cells.collect::<Vec<u32>>()
        })?;
        Ok(slots.into_pyarray(py))
    }
    /// The position of each new token, uint32 `[tokens]`.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let mut positions = Vec::new();
        self.plan(|plan| plan.positions(&mut positions))?;
        Ok(positions.into_pyarray(py))
    }
    /// Copies of cells to make before the writes, uint32 `[n, 3]`: from, to, length.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u32>>> {
        let copies = self.plan(|plan| {
            let copies = plan.group(self.group).copies.iter();
            copies.flat_map(|copy| [copy.from, copy.to, copy.len]).collect::<Vec<u32>>()
        })?;
        triples(py, copies)
    }
    /// The size that K and V must have before the writes, in cells.
    #[getter]
    fn cells_end(&self) -> PyResult<u32> {
        self.plan(|plan| plan.group(self.group).cells_end)
    }
    /// The first token of each span, then the number of tokens, uint32 `[spans + 1]`; vLLM's query_start_loc.
    #[getter]
    fn query_start<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        Ok(self.tables(None)?.query_start.into_pyarray(py))
    }
    /// The tokens of each sequence, the new ones included, uint32 `[spans]`; vLLM's seq_lens.
    #[getter]
    fn kv_len<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        Ok(self.tables(None)?.kv_len.into_pyarray(py))
    }
    /// The blocks of each span, int32 `[spans, blocks]`: -1 behind the end, and where no query reads.
    #[pyo3(signature = (block_tokens=None))]
    fn block_tables<'py>(
        &self,
        py: Python<'py>,
        block_tokens: Option<u32>,
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let tables = self.tables(Some(block_tokens))?;
        let n_spans = tables.kv_len.len();
        let width = (0..n_spans).map(|i| tables.blocks_of(i).len()).max().unwrap_or(0);
        let mut rows = vec![-1; n_spans * width];
        for i in 0..n_spans {
            for (entry, &block) in rows[i * width..].iter_mut().zip(tables.blocks_of(i)) {
                *entry = if block == NO_BLOCK { -1 } else { block as i32 };
            }
        }
        rows.into_pyarray(py).reshape([n_spans, width])
    }
    /// Which cells each new token sees, bool `[tokens, cells_end]`.
    fn mask<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<bool>>> {
        let mut mask = Vec::new();
        let (n_tokens, cells) = self.plan(|plan| {
            let group = plan.group(self.group);
            group.reads.explicit(plan.n_tokens(), group.cells_end, &mut mask);
            (plan.n_tokens() as usize, group.cells_end as usize)
        })?;
        mask.into_pyarray(py).reshape([n_tokens, cells])
    }

    /// The copies that a commit of `keep` needs, uint32 `[n, 3]`: from, to, length, one after the other.
    fn moves<'py>(&self, py: Python<'py>, keep: Vec<Option<Keep>>) -> PyResult<Bound<'py, PyArray2<u32>>> {
        let mut moves = MovePlan::default();
        self.with(|state| kept(keep, |kept| state.checked.kept_moves(kept, &mut moves)).map_err(misuse))?;
        let copies = moves.groups().iter().filter(|(group, _)| *group == self.group);
        let copies =
            copies.flat_map(|(_, copies)| copies.iter().flat_map(|copy| [copy.from, copy.to, copy.len]));
        triples(py, copies.collect())
    }

    /// Applies the step. `keep` says for each span what stays: `None` everything, a number the first tokens of a chain, a
    /// list of nodes a path of a draft tree.
    #[pyo3(signature = (keep=None))]
    fn commit(&self, keep: Option<Vec<Option<Keep>>>) -> PyResult<()> {
        self.with(|state| match keep {
            None => state.checked.commit().map_err(misuse),
            Some(keep) => kept(keep, |kept| state.checked.commit_kept(kept)).map_err(misuse),
        })
    }
    /// Leaves the cache as it was before the step. Does nothing if the step has ended.
    #[pyo3(name = "drop")]
    fn abandon(&self) {
        if let Ok(mut state) = exclusive("cache", &self.state)
            && state.checked.plan().is_ok_and(|plan| plan.id() == self.id)
        {
            state.checked.abort();
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }
    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.abandon();
    }
    fn __repr__(&self) -> String {
        let state = if self.is_in_flight() { "in flight" } else { "ended" };
        format!("<kvist.cache.Step {}, {state}>", self.id.0)
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if self.owns {
            self.abandon();
        }
    }
}
