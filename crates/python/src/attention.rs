//! Attention alone, for models of other frameworks: K and V in kvist's storages, kvist's kernels over the caller's arrays.
use crate::arguments::{CacheDefaults, Options, cache_config, from_json};
use crate::errors::{Class, argument, engine, refused};
use crate::ffi::{Read, Write};
use crate::wait::exclusive;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{GroupId, LayerId, PlannedSpan, Refused, SeqId, Span, StepRequest};
use kvist_device::{
    AttendRows, BuildError, LayerSpec, Layout, MemoryBudget, PoolSpec, Session, SessionStep, Side, StepError,
};
use kvist_engine::{Error, devices};
use numpy::PyReadwriteArray4;
use numpy::ndarray::{ArrayViewMut4, Axis, s};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Mutex, MutexGuard};

/// K and V of all layers of a model, and attention over them.
///
/// Args:
///     layers: for each layer its KV heads, the elements of a head, and its window or None.
///     n_heads: query heads.
///     kind, kv, kv_v, recent, sinks: as for `Model.session`.
///     capacity: tokens that the cache can hold, over all sequences. Memory is taken as it fills.
///     max_step_tokens: tokens of the largest step, over all its sequences.
#[pyclass(frozen, module = "kvist._native")]
pub struct Attention {
    session: Mutex<Session>,
    /// Of each layer.
    groups: Vec<GroupId>,
}

fn step_error(error: StepError) -> PyErr {
    engine(Error::from(error))
}

const NO_STEP: &str = "no step is in flight: begin one first";

impl Attention {
    fn session(&self) -> PyResult<MutexGuard<'_, Session>> {
        exclusive("cache", &self.session)
    }
    fn group(&self, layer: LayerId) -> PyResult<GroupId> {
        let group = self.groups.get(usize::from(layer.0)).copied();
        group.ok_or_else(|| argument(format!("layer {} of {}", layer.0, self.groups.len())))
    }
    /// Changes the sequences. A step in flight is abandoned.
    fn sequences<T>(
        &self,
        change: impl FnOnce(&mut kvist_cache::Sequences<'_>) -> Result<T, Refused>,
    ) -> PyResult<T> {
        let mut session = self.session()?;
        let sequences = session.cache.sequences();
        let mut sequences =
            sequences.ok_or_else(|| argument("this kind of cache holds one sequence: use cells"))?;
        change(&mut sequences).map_err(|why| refused(&why))
    }
}

/// Decodes the tokens that precede a step into `past`: `[spans, tokens, heads, dim]`, of each span's sequence the last ones.
fn read_past(
    step: &SessionStep<'_>,
    group: GroupId,
    layer: LayerId,
    side: Side,
    past: &mut ArrayViewMut4<'_, f32>,
) -> PyResult<()> {
    let plan = step.plan();
    let (spans, wanted) = (past.len_of(Axis(0)), past.len_of(Axis(1)));
    if spans != plan.spans().len() {
        let steps = plan.spans().len();
        return Err(argument(format!("arrays for {spans} sequences, and the step has {steps}")));
    }
    let mut filled = vec![0; spans];
    let reads = &plan.group(group).reads;
    // The reads of a span's first token are the tokens before it that are visible, and itself.
    for item in &reads.items {
        for query in 0..item.n_queries {
            let token = reads.order[(item.first_query + query) as usize];
            let first = |span: &PlannedSpan| span.first_token == token;
            let Some(row) = plan.spans().iter().position(first) else { continue };
            let start = plan.spans()[row].start as usize;
            for cell in reads.span_of(item, query).filter(|cell| reads.sees(item, query, *cell)) {
                let position = (item.first_index + cell) as usize;
                let Some(at) = (position + wanted).checked_sub(start) else { continue };
                if position >= start {
                    continue;
                }
                filled[row] += 1;
                let mut token = past.slice_mut(s![row, at, .., ..]);
                for (head, mut out) in (0..).zip(token.outer_iter_mut()) {
                    let out = out.as_slice_mut().ok_or_else(|| argument("rows that are not contiguous"))?;
                    let read = step.pools().inspect(layer, side, head, item.run.start + cell, out);
                    read.map_err(|error| engine(Error::from(error)))?;
                }
            }
        }
    }
    match filled.iter().all(|filled| *filled == wanted) {
        true => Ok(()),
        false => Err(argument(format!("{wanted} tokens before the step, and the layer sees {filled:?}"))),
    }
}

#[pymethods]
impl Attention {
    #[new]
    #[pyo3(signature = (layers, n_heads, *, kind="cells", capacity=1 << 24, max_step_tokens=4096, **options))]
    fn new(
        py: Python<'_>,
        layers: Vec<(u32, u32, Option<u32>)>,
        n_heads: u32,
        kind: &str,
        capacity: u32,
        max_step_tokens: u32,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let mut options = Options::of("Attention", options)?;
        let config = cache_config(&mut options, kind, &CacheDefaults::new(capacity))?;
        options.end()?;
        let mut windows: Vec<Option<u32>> = Vec::new();
        let mut specs = Vec::new();
        for (i, (kv_heads, dim, window)) in layers.into_iter().enumerate() {
            let group = windows.iter().position(|known| *known == window).unwrap_or_else(|| {
                windows.push(window);
                windows.len() - 1
            });
            specs.push(LayerSpec::new(GroupId(group as u16), LayerId(i as u16), kv_heads, dim));
        }
        let sinks = config.sinks;
        let group = |window: &Option<u32>| GroupSpec {
            capacity_tokens: capacity,
            visibility: Visibility { window: *window, sinks: window.map_or(0, |_| sinks) },
            max_step_tokens,
        };
        let groups: Vec<GroupSpec> = windows.iter().map(group).collect();
        if groups.is_empty() {
            return Err(argument("`layers` is empty"));
        }
        let groups_of: Vec<GroupId> = specs.iter().map(|spec| spec.group).collect();
        let layout = Layout { n_heads, layers: specs };
        let spec = PoolSpec { max_step_tokens, ..config.pool_spec(&layout, &MemoryBudget::unlimited()) };
        let session = py.detach(|| devices::all().session(&config.backend, kind, &groups, &spec));
        let mut session = session.map_err(|error: BuildError| engine(Error::from(error)))?;
        if let Some(mut rewinds) = session.cache.rewinds() {
            rewinds.rewind(0).map_err(|why| refused(&why))?; // the only sequence is there, and empty
        }
        Ok(Attention { session: Mutex::new(session), groups: groups_of })
    }

    /// Makes an empty sequence.
    fn new_sequence(&self, seq: u32) -> PyResult<()> {
        self.sequences(|sequences| sequences.seq_new(SeqId(seq)))
    }
    /// Makes `dst` a copy of `src`, without copying K and V.
    fn fork(&self, src: u32, dst: u32) -> PyResult<()> {
        self.sequences(|sequences| sequences.fork(SeqId(src), SeqId(dst)))
    }
    /// Removes a sequence.
    fn remove(&self, seq: u32) -> PyResult<()> {
        self.sequences(|sequences| sequences.seq_rm(SeqId(seq), 0, u32::MAX))
    }
    /// Keeps the first `n` tokens of a sequence.
    fn truncate(&self, seq: u32, n: u32) -> PyResult<()> {
        self.sequences(|sequences| {
            sequences.seq_rm(SeqId(seq), n, u32::MAX)?;
            if n == 0 { sequences.seq_new(SeqId(seq)) } else { Ok(()) }
        })
    }
    /// Tokens of a sequence; `None` if there is none.
    fn length(&self, seq: u32) -> PyResult<Option<u32>> {
        Ok(self.session()?.cache.next_position(SeqId(seq)))
    }
    /// Bytes of K and V that are reserved now.
    #[getter]
    fn kv_bytes(&self) -> PyResult<u64> {
        Ok(self.session()?.pools().bytes())
    }
    /// The contents of the cache, a dict for each layer group.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let reports = self.session()?.cache.report();
        from_json(py, &crate::bookkeeping::report_json(&reports))
    }

    /// Begins a step that adds tokens to sequences: pairs of a sequence and a number. On an error nothing has changed.
    fn begin(&self, spans: Vec<(u32, u32)>) -> PyResult<()> {
        let mut session = self.session()?;
        let span = |&(seq, n): &(u32, u32)| {
            let start =
                session.cache.next_position(SeqId(seq)).ok_or(Refused::UnknownSequence(SeqId(seq)))?;
            Ok(Span::chain(SeqId(seq), start, n))
        };
        let spans =
            spans.iter().map(span).collect::<Result<Vec<_>, Refused>>().map_err(|why| refused(&why))?;
        session.step(&StepRequest { spans: &spans }).map(drop).map_err(step_error)
    }

    /// Runs a layer of the step: writes K and V, attends, and fills `out`. Arrays are `[batch, tokens, heads, dim]` at any
    /// strides, float32, float16, or bfloat16 as uint16; their tokens are those of the step, in its order. float32 is
    /// neither copied nor converted. On an error the layer has not run.
    #[pyo3(signature = (layer, q, k, v, out, *, scale, softcap=None))]
    #[allow(clippy::too_many_arguments)] // those of attention
    fn attend(
        &self,
        py: Python<'_>,
        layer: u16,
        q: Read<'_>,
        k: Read<'_>,
        v: Read<'_>,
        mut out: Write<'_>,
        scale: f32,
        softcap: Option<f32>,
    ) -> PyResult<()> {
        let call = AttendRows {
            layer: LayerId(layer),
            q: q.rows()?,
            kv: Some((k.rows()?, Some(v.rows()?))),
            out: out.rows()?,
            scale,
            softcap,
            sinks: None,
        };
        py.detach(|| {
            let mut session = self.session()?;
            let mut step = session.resume().ok_or_else(|| Class::Busy.with(NO_STEP))?;
            step.attend_rows(call).map_err(|error| engine(Error::from(error)))
        })
    }

    /// Runs a layer of the step without attention, for models that attend themselves: writes `k` and `v`, and fills `past_k`
    /// and `past_v` with what the layer held before the step, decoded. `past` arrays are float32 `[spans, tokens, heads,
    /// dim]`: of each sequence its last tokens before the step. On an error the layer has not run.
    fn store(
        &self,
        py: Python<'_>,
        layer: u16,
        k: Read<'_>,
        v: Read<'_>,
        mut past_k: PyReadwriteArray4<'_, f32>,
        mut past_v: PyReadwriteArray4<'_, f32>,
    ) -> PyResult<()> {
        let (k, v) = (k.rows()?, v.rows()?);
        let (mut past_k, mut past_v) = (past_k.as_array_mut(), past_v.as_array_mut());
        py.detach(|| {
            let mut session = self.session()?;
            let mut step = session.resume().ok_or_else(|| Class::Busy.with(NO_STEP))?;
            let layer = LayerId(layer);
            for (side, past) in [(Side::K, &mut past_k), (Side::V, &mut past_v)] {
                read_past(&step, self.group(layer)?, layer, side, past)?;
            }
            step.store_rows(layer, k, v).map_err(|error| engine(Error::from(error)))
        })
    }

    /// Applies the step, once every layer has run.
    fn commit(&self) -> PyResult<()> {
        let mut session = self.session()?;
        let step = session.resume().ok_or_else(|| Class::Busy.with(NO_STEP))?;
        step.commit().map_err(|error| engine(Error::from(error)))
    }
}
