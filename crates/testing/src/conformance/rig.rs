//! Drives a session and its reference model together. Stores every row, as it was read back, by the number of its
//! write.
mod checks;
mod place;

use super::cases::Case;
use super::{Options, paths, rows};
use crate::reference::{Choices, Model, Operation, OwnedKept, ReferenceCache, Seen, StepEnd};
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::*;
use place::{Place, lay};
use std::ops::Range;
use std::sync::Arc;

/// The results of one case.
#[derive(Default)]
pub struct Found {
    pub n_steps: usize,
    pub n_outputs: usize,
    pub worst_output: f64,
    pub worst_row: f64,
    /// One line per failure.
    pub bad: Vec<String>,
}

pub fn run(backend: &dyn Backend, case: &Case, options: &Options, number: u64) -> Found {
    let mut rig = Rig::new(backend, case, options, number);
    (case.shape.script)(&mut rig, case.length);
    let Rig { session, spec, mut found, .. } = rig;
    drop(session);
    if spec.budget.usage() != Usage::default() {
        found.bad.push(format!("bytes left in the budget: {:?}", spec.budget.usage()));
    }
    found
}

/// Rows of one owner layer, by the number of their write.
#[derive(Default)]
struct Written {
    k: Vec<Row>,
    v: Vec<Row>,
}

impl Written {
    fn push(&mut self, side: Side, row: Row) {
        match side {
            Side::K => self.k.push(row),
            Side::V => self.v.push(row),
        }
    }
}

/// The rows of all KV heads: `[n_kv_heads * head_dim]`.
struct Row {
    /// The row as it was read back.
    stored: Vec<f32>,
    /// The row as it must be read while it is recent.
    recent: Vec<f32>,
}

impl Row {
    fn read(&self, recent: bool, elements: &Range<usize>) -> &[f32] {
        let row = if recent { &self.recent } else { &self.stored };
        &row[elements.clone()]
    }
}

/// A written token.
#[derive(Clone, Copy)]
struct Token {
    position: u32,
    /// Whether later steps read its row as a recent one.
    kept: bool,
}

/// Slots for recent rows: more than any script fills, so that none is dropped and the rig knows which rows are kept.
const RECENT_ROWS: u32 = 4096;

pub struct Rig<'c> {
    case: &'c Case,
    options: &'c Options,
    backend: &'c dyn Backend,
    spec: PoolSpec,
    groups: Vec<GroupSpec>,
    session: Session,
    reference: ReferenceCache,
    choices: Choices<'static>,
    written: Vec<Written>,
    /// Indexed by the number of the write.
    tokens: Vec<Token>,
    /// Cells that every group was grown to; `None` after a compaction, which may grow the pools further.
    grown: Option<Vec<u32>>,
    /// The most scratch that any capacity so far has allowed: a smaller capacity frees none.
    scratch_bound: u64,
    found: Found,
}

/// Fills outputs and the gaps between input rows before a step.
const POISON: u32 = 0x7fc0_dead; // a NaN

impl<'c> Rig<'c> {
    fn new(backend: &'c dyn Backend, case: &'c Case, options: &'c Options, number: u64) -> Self {
        let (kind, length) = (case.shape.kind, case.length);
        let model = Model::of(kind).unwrap_or_else(|| panic!("the reference knows no kind {kind}"));
        let capacity_tokens = if case.shape.crowded { length.clamp(12, 90) } else { 4 * length + 200 };
        let max_step_tokens = if model == Model::Ring { length / 4 + 1 } else { capacity_tokens };
        let sinks = length % 3 * 2;
        let windows = [
            Visibility { window: Some(length / 3 + 1), sinks },
            Visibility { window: Some(5), sinks: 2 - sinks / 2 },
        ];
        let groups = (0..case.n_groups()).map(|g| {
            let full = g == 0 && !case.shape.windowed;
            let visibility = if full { Visibility::FULL } else { windows[g] };
            GroupSpec { capacity_tokens, visibility, max_step_tokens }
        });
        let groups: Vec<GroupSpec> = groups.collect();
        let spaces = groups.iter().map(|g| kinds::build(kind, g).unwrap_or_else(|e| panic!("{g:?}: {e}")));
        let cache = Cache::new(spaces.collect());
        let spec = PoolSpec {
            layout: case.layout(),
            k: case.k,
            v: case.v,
            capacity_cells: cache.capacity_cells(),
            max_step_tokens,
            budget: MemoryBudget::unlimited(),
            channels: case.channels().map(Arc::new),
            recent: Recent {
                tokens: case.recent,
                sequences: (RECENT_ROWS / case.recent.max(1)).saturating_sub(1),
            },
        };
        let pools = backend.pools(&spec).unwrap_or_else(|e| panic!("no pools: {e}"));
        let session = Session::new(cache, pools, &spec);
        let written = spec.layout.layers.iter().map(|_| Written::default()).collect();
        Rig {
            case,
            options,
            backend,
            reference: ReferenceCache::new(model, &groups),
            grown: Some(vec![0; groups.len()]),
            scratch_bound: 0,
            choices: Choices::from_seed(options.seed ^ (number << 20), u64::MAX),
            groups,
            session,
            written,
            tokens: Vec::new(),
            found: Found::default(),
            spec,
        }
    }

    pub fn max_step_tokens(&self) -> u32 {
        self.spec.max_step_tokens
    }

    fn bad(&mut self, line: String) {
        self.found.bad.push(format!("step {}: {line}", self.found.n_steps));
    }

    /// Runs one step of chains.
    pub fn chains(&mut self, chains: &[(SeqId, u32)]) {
        let spans: Vec<Span<'_>> =
            chains.iter().map(|(seq, n)| Span::chain(*seq, self.next(*seq), *n)).collect();
        self.step(&spans);
    }

    /// Extends `seq` to `length` by chains of up to `max` tokens.
    pub fn chunks(&mut self, seq: SeqId, length: u32, max: u32) {
        let mut left = length.saturating_sub(self.next(seq));
        while left > 0 {
            let n = (1 + self.choices.below(max)).min(left);
            self.chains(&[(seq, n)]);
            left -= n;
        }
    }

    /// Runs one step of chains and random draft trees. Each entry: sequence, tokens of a chain or 0, nodes of a draft
    /// tree.
    pub fn spans(&mut self, spans: &[(SeqId, u32, u32)]) {
        let parents: Vec<Vec<Option<NodeId>>> = spans
            .iter()
            .map(|(seq, _, n_nodes)| {
                let known = self.reference.n_nodes(*seq).unwrap_or(0);
                (known..known + n_nodes)
                    .map(|node| self.choices.below(node + 1).checked_sub(1).map(NodeId))
                    .collect()
            })
            .collect();
        let spans: Vec<Span<'_>> = spans
            .iter()
            .zip(&parents)
            .map(|((seq, chain, _), parents)| {
                let new = if *chain > 0 { New::Chain(*chain) } else { New::Tree(parents) };
                Span { seq: *seq, start: self.next(*seq), new }
            })
            .collect();
        self.step(&spans);
    }

    pub fn fork(&mut self, src: SeqId, dst: SeqId) {
        self.perform(&Operation::Copy { src, dst, from: 0, until: u32::MAX });
    }

    /// Gives every group room for `free` more cells than it uses. Devices that cannot change capacities go on as they are.
    pub fn resize(&mut self, free: u32) {
        let capacities: Vec<u32> =
            self.session.cache.report().iter().map(|group| (group.used_cells + free).max(16)).collect();
        match self.session.resize(&capacities) {
            Ok(()) => {
                self.grown = None;
                self.spec.capacity_cells = self.session.cache.capacity_cells();
            }
            Err(StepError::Device(DeviceError::Unsupported(_))) => {}
            Err(error) => self.bad(format!("another capacity was refused: {error}")),
        }
    }

    /// Commits the path to a random node.
    pub fn accept_any(&mut self, seq: SeqId) {
        let parents = self.reference.parents(seq);
        let mut node = Some(NodeId(self.choices.below(parents.len() as u32)));
        let mut accepted = Vec::new();
        while let Some(n) = node {
            accepted.insert(0, n);
            node = parents[n.0 as usize];
        }
        self.perform(&Operation::CommitPath { seq, accepted });
    }

    pub fn random_operation(&mut self) {
        let model = Model::of(self.case.shape.kind).expect("the rig was built with it");
        let n_free = match model {
            Model::Ring => self.spec.max_step_tokens + 1,
            _ => self.spec.capacity_cells[0] - self.session.cache.report()[0].used_cells,
        };
        let operation = Operation::choose(&mut self.choices, model, 6, n_free, &self.reference);
        self.perform(&operation);
    }

    fn next(&self, seq: SeqId) -> u32 {
        self.reference.next_position(seq).unwrap_or_else(|| panic!("there is no sequence {seq}"))
    }

    /// Runs an operation on the cache and on the model. Their answers must match.
    pub fn perform(&mut self, operation: &Operation) {
        let capability = "scripts use only capabilities of their kind";
        let cache = &mut self.session.cache;
        let (found, expected) = match operation {
            Operation::Step { spans, fate, .. } => {
                let spans: Vec<Span<'_>> = spans.iter().map(|span| span.as_span()).collect();
                let request = StepRequest { spans: &spans };
                if self.reference.refusal(&request).is_some() {
                    if self.session.step(&request).is_ok() {
                        self.bad(format!("{operation:?} was accepted"));
                    }
                } else if *fate == StepEnd::Commit {
                    self.step(&spans);
                } else {
                    self.abandon(&spans);
                }
                return;
            }
            Operation::MoveRound { .. } | Operation::Compact => {
                if let Err(error) = self.session.compact() {
                    self.bad(format!("compaction failed: {error}"));
                }
                self.grown = None;
                return;
            }
            Operation::Clear => {
                cache.clear();
                self.reference.clear();
                return;
            }
            Operation::Rewind { len } => {
                (cache.rewinds().expect(capability).rewind(*len), self.reference.rewind(*len))
            }
            Operation::CommitPath { seq, accepted } => (
                cache.trees().expect(capability).commit_path(*seq, accepted),
                self.reference.commit_path(*seq, accepted),
            ),
            many => {
                let mut sequences = cache.sequences().expect(capability);
                match *many {
                    Operation::New { seq } => (sequences.seq_new(seq), self.reference.seq_new(seq)),
                    Operation::Copy { src, dst, from, until } => (
                        sequences.seq_cp(src, dst, from, until),
                        self.reference.seq_cp(src, dst, from, until),
                    ),
                    Operation::Remove { seq, from, until } => {
                        (sequences.seq_rm(seq, from, until), self.reference.seq_rm(seq, from, until))
                    }
                    Operation::Keep { seq, from, until } => {
                        (sequences.seq_keep(seq, from, until), self.reference.seq_keep(seq, from, until))
                    }
                    _ => panic!("{many:?} is no verb"),
                }
            }
        };
        if found != expected {
            self.bad(format!("{operation:?} gave {found:?}, not {expected:?}"));
        }
    }

    /// Makes the activations of a layer in one buffer: q, and k and v if the layer owns them. Most values lie in
    /// ±amplitude, some in six times that, so that quantisation has to handle outliers.
    fn inputs(&mut self, layer: usize, n_tokens: usize) -> (Vec<f32>, Vec<Place>) {
        let spec = self.spec.layout.layers[layer];
        let (kv_heads, head_dim) = (spec.n_kv_heads as usize, spec.k_dim as usize);
        let mut heads = vec![self.case.heads.0 as usize];
        if self.spec.layout.owns(layer) {
            heads.extend([kv_heads, kv_heads]);
        }
        let (mut data, places) = lay(self.case.strides, n_tokens, &heads, head_dim);
        for (i, place) in places.iter().enumerate() {
            let amplitude = if i == 0 { 3.0 } else { 1.0 };
            for token in 0..n_tokens {
                for head in 0..place.n_heads {
                    for x in &mut data[place.row(token, head, head_dim)] {
                        let random = self.choices.below(1 << 26);
                        let unit = (random & 0xf_ffff) as f32 / (1 << 19) as f32 - 1.0;
                        *x = amplitude * unit * if random >> 20 == 0 { 6.0 } else { 1.0 };
                    }
                }
            }
        }
        (data, places)
    }

    fn scale(&self, layer: usize) -> f32 {
        1.0 / (self.spec.layout.layers[layer].k_dim as f32).sqrt()
    }

    /// Runs a step in which one layer fails after others have written NaN.
    fn abandon(&mut self, spans: &[Span<'_>]) {
        let before = self.session.cache.report();
        let mut step = match self.session.step(&StepRequest { spans }) {
            Ok(step) => step,
            Err(error) => return self.bad(format!("refused: {error}")),
        };
        note_growth(&mut self.grown, step.plan());
        let n_tokens = step.plan().n_tokens() as usize;
        let n_layers = 1 + self.choices.below(self.spec.layout.layers.len() as u32) as usize;
        let mut failure = None;
        for (l, layer) in self.spec.layout.layers.iter().enumerate().take(n_layers) {
            let (heads, kv_heads) = (self.case.heads.0 as usize, layer.n_kv_heads as usize);
            let head_dim = layer.k_dim as usize;
            let nan = vec![f32::NAN; n_tokens * heads.max(kv_heads) * head_dim];
            let mut out = nan.clone();
            let kv = || (Tensor::dense(&nan, kv_heads, head_dim), Tensor::dense(&nan, kv_heads, head_dim));
            let call = Attend {
                layer: LayerId(l as u16),
                q: Tensor::dense(&nan, heads, head_dim),
                kv: self.spec.layout.owns(l).then(kv),
                out: TensorMut::dense(&mut out, heads, head_dim),
                scale: 1.0,
                softcap: None,
                sinks: None,
            };
            if let Err(error) = step.attend(call) {
                failure = Some(format!("layer {l} failed: {error}"));
            }
        }
        drop(step);
        failure.into_iter().for_each(|line| self.bad(line));
        if self.session.cache.report() != before {
            self.bad("a dropped step changed the cache".into());
        }
    }

    /// Runs one step on session and model, and checks everything.
    fn step(&mut self, spans: &[Span<'_>]) {
        if self.choices.one_in(3) {
            self.abandon(spans);
        }
        self.found.n_steps += 1;
        let request = StepRequest { spans };
        assert_eq!(self.reference.refusal(&request), None, "scripts take only possible steps: {spans:?}");
        let seen: Vec<Vec<Vec<Seen>>> =
            self.groups.iter().map(|group| self.reference.seen(&request, group.visibility)).collect();
        let values = self.reference.new_values(&request);
        let n_tokens = (values.end - values.start) as usize;
        let n_layers = self.spec.layout.layers.len();
        let inputs: Vec<_> = (0..n_layers).map(|layer| self.inputs(layer, n_tokens)).collect();

        let settles = self.session.cache.trees().is_none();
        let read_before = self.session.pools().counters().bytes_read;
        let mut step = match self.session.step(&request) {
            Ok(step) => step,
            Err(error) => return self.bad(format!("refused: {error}")),
        };
        note_growth(&mut self.grown, step.plan());
        let cells: Vec<Vec<u32>> = (0..step.plan().n_groups())
            .map(|g| {
                let writes = &step.plan().group(GroupId(g as u16)).writes;
                writes.iter().flat_map(|run| run.cells()).collect()
            })
            .collect();
        let tokens = tokens_of(step.plan(), self.case.recent);
        let outputs = match attend_all(&mut step, self.case, &self.spec.layout, &inputs, n_tokens) {
            Ok(outputs) => outputs,
            Err(failure) => {
                drop(step);
                return self.bad(failure);
            }
        };
        let stored = rows::stored(step.pools(), &self.spec.layout, |group| &cells[group.0 as usize]);
        let kept = paths::choose(&mut self.choices, spans, settles);
        let committed = match &kept {
            None => step.commit().map_err(StepError::from),
            Some(kept) => step.commit_kept(&kept.iter().map(OwnedKept::as_kept).collect::<Vec<_>>()),
        };
        if let Err(error) = committed {
            return self.bad(format!("not committed: {error}"));
        }
        match &kept {
            None => self.reference.apply(&request),
            Some(kept) => {
                let kept: Vec<Kept<'_>> = kept.iter().map(OwnedKept::as_kept).collect();
                let applied = self.reference.apply_kept(&request, &kept);
                assert_eq!(applied, Ok(()), "the paths are good");
            }
        }
        self.tokens.extend_from_slice(&tokens);

        let stored = match stored {
            Ok(stored) => stored,
            Err(error) => return self.bad(format!("no row: {error}")),
        };
        if let Some(kept) = &kept {
            let (pools, layout) = (self.session.pools(), &self.spec.layout);
            let moved = paths::check_moved(pools, layout, spans, kept, &cells, &stored);
            moved.unwrap_or_else(|line| self.bad(line));
        }
        for ((layer, (data, places)), stored) in inputs.iter().enumerate().zip(stored) {
            if let Some(stored) = stored {
                self.read_back(layer, data, &places[1..], stored);
            }
        }
        for (layer, ((data, places), (out, place))) in inputs.iter().zip(outputs).enumerate() {
            let group = self.spec.layout.layers[layer].group.0 as usize;
            self.check_outputs(layer, (data, &places[0]), (out, place), &seen[group], &tokens);
        }
        if self.session.pools().counters().bytes_read <= read_before {
            self.bad("attention counted no byte read".into());
        }
        self.check_usage();
    }
}

/// Runs every layer on its inputs. Returns the outputs.
fn attend_all(
    step: &mut SessionStep<'_>,
    case: &Case,
    layout: &Layout,
    inputs: &[(Vec<f32>, Vec<Place>)],
    n_tokens: usize,
) -> Result<Vec<(Vec<f32>, Place)>, String> {
    let mut outputs = Vec::new();
    let sinks = case.sinks();
    for (l, (data, places)) in inputs.iter().enumerate() {
        let head_dim = layout.layers[l].k_dim as usize;
        let (mut out, place) = lay(case.strides, n_tokens, &[case.heads.0 as usize], head_dim);
        let kv = |kv: &[Place]| (kv[0].tensor(data), kv[1].tensor(data));
        let call = Attend {
            layer: LayerId(l as u16),
            q: places[0].tensor(data),
            kv: layout.owns(l).then(|| kv(&places[1..])),
            out: TensorMut::strided(&mut out, place[0].token_stride, place[0].head_stride),
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: case.softcap,
            sinks: sinks.as_deref(),
        };
        step.attend(call).map_err(|error| format!("layer {l} failed: {error}"))?;
        outputs.push((out, place[0]));
    }
    Ok(outputs)
}

/// The tokens of a step. Kept rows: those from the start of the last full group on, and those of nodes.
fn tokens_of(plan: &StepPlan, recent: u32) -> Vec<Token> {
    let mut positions = Vec::new();
    plan.positions(&mut positions);
    let mut tokens = Vec::new();
    for span in plan.spans() {
        let end = span.start + span.n_tokens;
        let chain = matches!(span.kind, SpanKind::Chain);
        tokens.extend(span.tokens().map(|token| {
            let position = positions[token as usize];
            let last = end.checked_rem(recent).map_or(0, |rest| (end - rest).saturating_sub(recent));
            Token { position, kept: !chain || position >= last }
        }));
    }
    tokens
}

fn note_growth(grown: &mut Option<Vec<u32>>, plan: &StepPlan) {
    for (g, cells) in grown.iter_mut().flatten().enumerate() {
        *cells = (*cells).max(plan.group(GroupId(g as u16)).cells_end);
    }
}
