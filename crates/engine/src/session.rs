//! A model with its cache. Runs forward passes over any cache kind, dtype and backend.
use crate::channels::channel_order;
use crate::executor::SampledToken;
use crate::keep::Keeping;
use crate::memory::CacheConfig;
use crate::runner::Runner;
use crate::saved::CacheRows;
use crate::speculate::{DraftTree, Speculator, Verified, verify};
use kvist_cache::*;
use kvist_device::{EMBEDDING, Given, KvCounters, Registry, RowResult, StepInputs, WantedRow, compact};
use kvist_model::{Error, Model};
use std::ops::Range;
use std::sync::Arc;

/// The tokens that a pass adds to one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceInput<'a> {
    pub seq: SeqId,
    pub tokens: &'a [u32],
    /// For speculative tokens: the parent node of each token. `None` appends the tokens as a plain continuation.
    pub parents: Option<&'a [Option<NodeId>]>,
}

impl<'a> SequenceInput<'a> {
    pub fn chain(seq: SeqId, tokens: &'a [u32]) -> Self {
        SequenceInput { seq, tokens, parents: None }
    }
    /// Speculative tokens, one parent per token.
    pub fn draft_tree(seq: SeqId, tokens: &'a [u32], parents: &'a [Option<NodeId>]) -> Self {
        SequenceInput { seq, tokens, parents: Some(parents) }
    }
}

/// Watches a prefill; see [`ModelSession::prefill_watched`]. Returns false to stop.
pub type PrefillWatch<'w> = dyn FnMut(&ModelSession, Range<usize>) -> Result<bool, Error> + 'w;

/// Which rows of the batch get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    None,
    /// One row per input, in input order.
    LastOfEach,
    All,
}

/// Reduces sequences to their budget if a step does not fit otherwise.
fn make_room(
    keeping: &mut Keeping,
    cache: &mut Cache,
    plan: &mut StepPlan,
    spans: &[Span<'_>],
    context: u32,
) -> Result<(), Error> {
    for span in spans {
        let New::Chain(n) = span.new else {
            return Err(Error::Usage("a session that keeps only some tokens takes no draft trees".into()));
        };
        let free = context.saturating_sub(span.start);
        if n > free {
            return Err(Refused::NoSpace { group: GroupId(0), needed: n, free, reclaimable: 0 }.into());
        }
    }
    match cache.can_run(&StepRequest { spans }, plan) {
        Err(Refused::NoSpace { .. }) => {
            let report = cache.report();
            let all = report.iter().take(1).flat_map(|group| &group.sequences).map(|sequence| sequence.seq);
            keeping.thin(cache, all.collect::<Vec<_>>(), 0)
        }
        other => Ok(other?),
    }
}

const MISSING_ROW: &str = "the network gave fewer rows than were wanted";

/// A cache for one conversation or a batch of them. All sessions of a model share its weights.
pub struct ModelSession {
    cache: Cache,
    runner: Runner,
    config: CacheConfig,
    plan: StepPlan,
    moves: MovePlan,
    tokens: Vec<u32>,
    rows: Vec<WantedRow>,
    taps: Vec<LayerId>,
    draft_tokens: Vec<u32>,
    parents: Vec<Option<NodeId>>,
    path: Vec<NodeId>,
    keeping: Option<Keeping>,
}

impl ModelSession {
    /// Creates an empty cache for `model`. Fails before it allocates anything if the bound on the session's memory does
    /// not fit into the budget.
    pub fn new(model: &Arc<Model>, registry: &Registry, config: &CacheConfig) -> Result<Self, Error> {
        config.check_keep(registry.device())?;
        let groups = config.groups(model.config());
        let (cache, backend) = registry.plan(&config.backend, &config.kind, &groups)?;
        let channels = channel_order(model, registry, config)?;
        let mut this = ModelSession {
            runner: Runner::open(model, registry, backend, &cache, config, channels)?,
            cache,
            config: config.clone(),
            plan: StepPlan::default(),
            moves: MovePlan::default(),
            tokens: Vec::new(),
            rows: Vec::new(),
            taps: Vec::new(),
            draft_tokens: Vec::new(),
            parents: Vec::new(),
            path: Vec::new(),
            keeping: config.keep.map(Keeping::new),
        };
        this.open_only()?;
        Ok(this)
    }

    /// Creates [`SeqId::ONLY`] in kinds that have named sequences, so that one conversation runs on any kind.
    fn open_only(&mut self) -> Result<(), Error> {
        if let Some(mut sequences) = self.cache.sequences() {
            sequences.seq_new(SeqId::ONLY)?;
        }
        Ok(())
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.runner.model
    }
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }
    /// The cache's bookkeeping. Use it between passes.
    pub fn cache(&mut self) -> &mut Cache {
        &mut self.cache
    }
    pub(crate) fn rows(&mut self) -> CacheRows<'_> {
        let ModelSession { cache, plan, runner, config, .. } = self;
        CacheRows { cache, plan, runner, config }
    }
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        self.runner.check_tokens(tokens)
    }
    /// Cache contents: one report per layer group.
    pub fn report(&self) -> Vec<kvist_cache::Report> {
        self.cache.report()
    }
    /// KV bytes reserved now.
    pub fn kv_bytes(&self) -> u64 {
        self.runner.network.pools().bytes()
    }
    pub fn counters(&self) -> KvCounters {
        self.runner.network.pools().counters()
    }
    /// Tokens that [`CacheConfig::keep`] has removed so far.
    pub fn removed_tokens(&self) -> u64 {
        self.keeping.as_ref().map_or(0, Keeping::removed)
    }
    /// Compacts the cache: updates the bookkeeping and moves the KV bytes.
    pub fn compact(&mut self) -> Result<(), Error> {
        Ok(compact(&mut self.cache, self.runner.network.pools_mut(), &mut self.moves)?)
    }

    /// Removes every sequence and starts again with an empty [`SeqId::ONLY`].
    pub fn clear(&mut self) -> Result<(), Error> {
        self.cache.clear();
        self.keeping.iter_mut().for_each(Keeping::clear);
        self.open_only()
    }

    /// Whether [`truncate`](Self::truncate) can leave `len` tokens of `seq`: a query behind them sees no position whose rows a file has
    /// not given. A ring always begins again.
    ///
    /// # Errors
    /// [`Refused::WindowGone`]; or there is no such sequence.
    pub fn check_cut(&mut self, seq: SeqId, len: u32) -> Result<(), Refused> {
        self.cache.check_cut(seq, len)
    }

    /// Removes the tokens of `seq` from position `len` on. Returns the number of tokens that are left: `len`, or 0 in a
    /// ring, which has overwritten the cells that a rollback needs and starts again from empty. It is 0, too, where a file has not given
    /// what windows would see ([`check_cut`](Self::check_cut)), or a paged cache has released it. The sequence exists afterwards, also if
    /// nothing is left. With packed storages, only [`CacheConfig::cut_before`] says where a sequence continues as if it had never been
    /// longer.
    pub fn truncate(&mut self, seq: SeqId, len: u32) -> Result<u32, Error> {
        let mut len = if let Err(Refused::WindowGone { .. }) = self.check_cut(seq, len) { 0 } else { len };
        if let Some(mut sequences) = self.cache.sequences() {
            if let Err(why) = sequences.seq_rm(seq, len, u32::MAX) {
                let Refused::WindowGone { .. } = why else { return Err(why.into()) };
                len = 0;
                sequences.seq_rm(seq, 0, u32::MAX)?;
            }
            if len == 0 {
                match sequences.seq_new(seq) {
                    Err(Refused::SequenceExists(_)) => {}
                    other => other?,
                }
            }
        } else if let Some(mut rewind) = self.cache.rewinds() {
            rewind.rewind(len)?;
        } else {
            self.clear()?;
            return Ok(0);
        }
        Ok(len)
    }

    /// Keeps the output of these layers from the next pass on; see [`tap`](Self::tap). [`EMBEDDING`] stands for the input of
    /// the first layer.
    pub fn set_taps(&mut self, layers: &[LayerId]) -> Result<(), Error> {
        let n_layers = self.runner.model.layout().layers.len();
        if let Some(layer) = layers.iter().find(|l| l.0 as usize >= n_layers && **l != EMBEDDING) {
            let layer = *layer;
            return Err(kvist_device::DeviceError::UnknownLayer { layer, n_layers }.into());
        }
        self.taps.clear();
        self.taps.extend_from_slice(layers);
        Ok(())
    }
    /// Residual stream after the `i`-th tapped layer in the last pass: `[n_tokens, hidden]`.
    pub fn tap(&self, i: usize) -> &[f32] {
        &self.runner.network.output().taps[i]
    }

    /// Logits of the last pass: `[rows, vocab]`.
    pub fn logits(&self) -> &[f32] {
        self.runner.network.output().logits()
    }
    /// Moves the logits of the last pass out, `[rows, vocab]`, for callers that keep them longer than the session's next
    /// pass. [`logits`](Self::logits) is empty until then.
    pub fn take_logits(&mut self) -> Vec<f32> {
        self.runner.network.output_mut().take_logits()
    }
    /// The logits of the last pass, which a sampler may modify.
    pub(crate) fn logits_mut(&mut self) -> &mut [f32] {
        self.runner.network.output_mut().logits_mut()
    }
    /// One row of [`logits`](Self::logits).
    pub fn logits_row(&self, row: usize) -> &[f32] {
        let vocab = self.runner.model.config().vocab;
        &self.logits()[row * vocab..(row + 1) * vocab]
    }
    pub fn n_rows(&self) -> usize {
        self.logits().len() / self.runner.model.config().vocab
    }

    /// Runs one forward pass over the new tokens of one or more sequences. On `Err` the cache is unchanged, except that
    /// [`CacheConfig::keep`] may have removed tokens to make room.
    pub fn forward(&mut self, inputs: &[SequenceInput<'_>], want: LogitRows) -> Result<(), Error> {
        self.forward_given(inputs, want, Given::Nothing)
    }

    /// [`forward`](Self::forward) for draft heads, with the rows that they read in addition to their tokens.
    pub fn forward_given(
        &mut self,
        inputs: &[SequenceInput<'_>],
        want: LogitRows,
        given: Given<'_>,
    ) -> Result<(), Error> {
        self.gather(inputs, want)?;
        // A pass usually has few inputs: keep up to eight spans on the stack.
        let mut spans = [Span::chain(SeqId::ONLY, 0, 0); 8];
        let mut many = Vec::new();
        let spans = if inputs.len() <= spans.len() {
            &mut spans[..inputs.len()]
        } else {
            many.resize(inputs.len(), spans[0]);
            &mut many[..]
        };
        for (span, input) in spans.iter_mut().zip(inputs) {
            let start = self.cache.next_position(input.seq).ok_or(Refused::UnknownSequence(input.seq))?;
            let new = match input.parents {
                None => New::Chain(input.tokens.len() as u32),
                Some(parents) => New::Tree(parents),
            };
            *span = Span { seq: input.seq, start, new };
        }
        if let Some(keeping) = &mut self.keeping {
            make_room(keeping, &mut self.cache, &mut self.plan, spans, self.config.context_tokens)?;
        }
        let step = Step::begin(&mut self.cache, &StepRequest { spans }, &mut self.plan)?;
        let (tokens, rows, taps) = (&self.tokens, &self.rows, &self.taps);
        let mass = self.keeping.as_ref().and_then(Keeping::queries);
        self.runner.run(step, &StepInputs { tokens, rows, taps, given, mass })?.commit();
        if let Some(keeping) = &mut self.keeping {
            keeping.observe(&self.plan, &self.runner.network.output().mass);
        }
        Ok(())
    }

    /// True if this cache can verify draft trees; otherwise only chains.
    pub fn verifies_trees(&self) -> bool {
        self.cache.verifies_trees()
    }

    /// One pass over `last`, the last known token of `seq`, and a draft of what may follow. `choose` draws the next token
    /// from each row of logits on the accepted path, as in [`verify`]; `verified` gets the result. `last` and the accepted
    /// nodes become part of the sequence, the other nodes leave nothing behind.
    ///
    /// The draft may have at most [`max_rows`](CacheConfig::max_rows) − 1 nodes, and must be a chain unless
    /// [`verifies_trees`](Self::verifies_trees). On `Err` the cache is unchanged.
    pub fn forward_draft(
        &mut self,
        seq: SeqId,
        last: u32,
        draft: &DraftTree,
        choose: &mut dyn FnMut(RowResult<'_>) -> Result<SampledToken, Error>,
        verified: &mut Verified,
    ) -> Result<(), Error> {
        if self.keeping.is_some() {
            // The queries of rejected tokens would count, and removals would fall between other tokens.
            return Err(Error::Usage("a session that keeps only some tokens verifies no drafts".into()));
        }
        let mut tokens = std::mem::take(&mut self.draft_tokens);
        tokens.clear();
        tokens.push(last);
        tokens.extend(draft.tokens());
        let gathered = self.gather(&[SequenceInput::chain(seq, &tokens)], LogitRows::All);
        self.draft_tokens = tokens;
        gathered?;
        draft.span_parents(&mut self.parents);
        let start = self.cache.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        let is_chain = draft.is_chain();
        let new = if is_chain { New::Chain(self.tokens.len() as u32) } else { New::Tree(&self.parents) };
        let spans = &[Span { seq, start, new }];
        let step = Step::begin(&mut self.cache, &StepRequest { spans }, &mut self.plan)?;
        let (tokens, rows, taps) = (&self.tokens, &self.rows, &self.taps);
        let inputs = StepInputs { tokens, rows, taps, given: Given::Nothing, mass: None };
        let computed = self.runner.run(step, &inputs)?;
        let mut rows = self.runner.network.output_mut().rows();
        let mut next = 0;
        let drawn = verify(
            draft,
            |row| {
                // The rows of a path ascend, so earlier ones are not needed any more.
                let result = rows.nth(row - next).ok_or(Error::Usage(MISSING_ROW.into()))?;
                next = row + 1;
                choose(result)
            },
            verified,
        );
        drop(rows);
        drawn?;
        let pools = self.runner.network.pools_mut();
        if is_chain {
            return Ok(computed.commit_kept(&[Kept::First(verified.path.len() as u32 + 1)], pools)?);
        }
        verified.kept(&mut self.path);
        Ok(computed.commit_kept(&[Kept::Path(&self.path)], pools)?)
    }

    /// Passes these rows of the last pass's taps to `speculator`: those of the tokens at positions `first..` of text
    /// `id`, whose tokens are `known`. The taps must be [`Speculator::taps`]. Drafters that read hidden states need
    /// this after every pass that adds tokens to the text, with the rows of those that stay ([`Verified::rows`]).
    ///
    /// # Panics
    /// The last pass had fewer rows.
    pub fn report_features(
        &self,
        (id, first, known): (u64, u32, &[u32]),
        rows: impl Iterator<Item = usize> + Clone,
        speculator: &mut Speculator,
    ) -> Result<(), Error> {
        let hidden = self.runner.model.config().hidden;
        report_features(&self.runner.network.output().taps, hidden, (id, first, known), rows, speculator)
    }

    /// Validates the inputs and flattens them into the batch's tokens and rows.
    fn gather(&mut self, inputs: &[SequenceInput<'_>], want: LogitRows) -> Result<(), Error> {
        self.tokens.clear();
        self.rows.clear();
        for input in inputs {
            self.runner.check_tokens(input.tokens)?;
            if input.parents.is_some_and(|parents| parents.len() != input.tokens.len()) {
                return Err(Error::Usage("a draft tree needs one parent for each of its tokens".into()));
            }
            let first = self.tokens.len() as u32;
            self.tokens.extend_from_slice(input.tokens);
            let end = self.tokens.len() as u32;
            match want {
                LogitRows::None => {}
                LogitRows::LastOfEach => self.rows.extend(end.checked_sub(1).map(WantedRow::logits)),
                LogitRows::All => self.rows.extend((first..end).map(WantedRow::logits)),
            }
        }
        let max_rows = self.runner.max_rows();
        if self.rows.len() > max_rows {
            let wanted = self.rows.len();
            return Err(Error::Usage(format!(
                "{wanted} rows of logits wanted, {max_rows} reserved (max_rows)"
            )));
        }
        let longest = self.config.max_step_tokens;
        if self.tokens.len() > longest as usize {
            let got = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
            return Err(Refused::StepTooLong { max_step_tokens: longest, got }.into());
        }
        Ok(())
    }

    /// Like [`prefill`](Self::prefill), but `progress` gets the session and which of `tokens` the pass computed: row 0 is the
    /// first of them. An error of `progress` ends the prefill; the chunks so far stay in the cache.
    pub fn prefill_watched(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        progress: &mut PrefillWatch<'_>,
    ) -> Result<usize, Error> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        self.check_tokens(tokens)?; // not only when their chunk comes
        let mut done = 0;
        for chunk in tokens.chunks(self.config.max_step_tokens.max(1) as usize) {
            let last = done + chunk.len() == tokens.len();
            let want = if last { LogitRows::LastOfEach } else { LogitRows::None };
            self.forward(&[SequenceInput::chain(seq, chunk)], want)?;
            let computed = done..done + chunk.len();
            done = computed.end;
            if !progress(self, computed)? {
                break;
            }
        }
        Ok(done)
    }

    /// Prefills a long prompt in chunks of at most `max_step_tokens`. Computes logits for the last token only. After
    /// each chunk it calls `progress` with the number of tokens done; if `progress` returns false, prefill stops and
    /// the chunks so far stay in the cache. Returns the number of tokens done.
    pub fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<usize, Error> {
        self.prefill_watched(seq, tokens, &mut |_, computed| Ok(progress(computed.end)))
    }
}

/// Passes rows of `taps`, `[rows, hidden]` each, to `speculator`: those of the tokens at positions `first..` of text
/// `id`, whose tokens are `known`. Does nothing without taps.
pub(crate) fn report_features(
    taps: &[Vec<f32>],
    hidden: usize,
    (id, first, known): (u64, u32, &[u32]),
    rows: impl Iterator<Item = usize> + Clone,
    speculator: &mut Speculator,
) -> Result<(), Error> {
    if taps.is_empty() || rows.clone().next().is_none() {
        return Ok(());
    }
    let kept = |tap: &Vec<f32>| -> Vec<f32> {
        rows.clone().flat_map(|row| &tap[row * hidden..(row + 1) * hidden]).copied().collect()
    };
    let taps: Vec<Vec<f32>> = taps.iter().map(kept).collect();
    let taps: Vec<&[f32]> = taps.iter().map(Vec::as_slice).collect();
    speculator.features(id, first, known, &taps)
}
