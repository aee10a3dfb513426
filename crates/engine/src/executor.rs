//! Executes the scheduler's steps on a model: one forward pass over many sequences of a paged cache.
//!
//! The scheduler owns the bookkeeping and makes the decisions; this module owns the KV bytes. Each request
//! handles its own logits ([`TokenSampler`]), with its sampler, grammar and stop strings.
//!
//! A failed step leaves the cache unchanged. The executor sets its full memory bound aside in the budget when it is
//! created.
mod drafting;
mod paged;

use crate::channels::{channel_order, hash_of};
use crate::keep::{KeepConfig, Keeping};
use crate::memory::CacheConfig;
use crate::runner::Runner;
use crate::saved::CacheRows;
use crate::serving::ResizeError;
use crate::serving::thread::Command;
use crate::serving::tiers::{BlockMemory, BlockParts, Report, Stores, TellTier, TierDriver};
use crate::serving::{TierConfig, TierStats};
use crate::speculate::{Counts, Speculator, Verified, verify};
use drafting::Drafting;
use kvist_cache::kinds::Visibility;
use kvist_cache::{Cache, Kept, SeqId, Step, StepPlan};
use kvist_device::{
    Computed, Given, KvCounters, Registry, RowOutput, RowResult, StepInputs, Transfers, WantedRow,
};
use kvist_model::{Error, Model};
use kvist_scheduler::{
    Advance, Batch, BatchDrafts, Emitted, Executor, Order, Outcome, RequestId, Sampled, Scheduler, Tiers,
};
pub use paged::PagedConfig;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// How a request uses its logits.
pub trait TokenSampler: Send {
    /// What the request needs from the row that it samples from. If a failed step is retried, this is called again.
    fn row_output(&self) -> RowOutput {
        RowOutput::Logits
    }
    /// Picks the next token from `row`, which is what [`row_output`](Self::row_output) asked for, or the logits if
    /// the request has a draft, and says whether it is the last one. An implementation that cannot pick a token
    /// reports the error to its client and returns `finished`.
    fn choose(&mut self, row: RowResult<'_>) -> SampledToken;
    /// The positions, out of those `computed` in this step, whose logits the request needs in addition to the row that
    /// it samples from.
    fn wants(&self, computed: Range<u32>) -> Range<u32> {
        computed.end..computed.end
    }
    /// Receives the logits after the token at `position`, which [`wants`](Self::wants) asked for. Positions come in
    /// order. When a failed step is retried, the same positions come again.
    fn score(&mut self, position: u32, logits: &[f32]) {
        let _ = (position, logits);
    }
    /// The request has ended and no token follows. [`ModelExecutor::unregister`] calls this once.
    fn end(&mut self) {}
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledToken {
    pub token: u32,
    pub finished: bool,
}

/// What a request without a sampler samples: it ends, because nothing can choose its next token.
const ENDED: Sampled = Sampled { token: None, finished: true };

/// Executes steps on the KV bytes of a paged cache.
pub struct ModelExecutor {
    runner: Runner,
    tokens: Vec<u32>,
    rows: Vec<WantedRow>,
    /// Rows to score in addition to the sampled ones: (batch row, index into the batch's work, position).
    scored: Vec<(u32, usize, u32)>,
    /// Looked up by id, never iterated.
    requests: HashMap<RequestId, Box<dyn TokenSampler>>,
    failure: Option<Error>,
    speculation: Option<Drafting>,
    /// Time that the drafts of the step being built took: part of the step.
    drafting: Duration,
    tiers: Option<TierDriver>,
    keeping: Option<Keeping>,
}

impl ModelExecutor {
    /// Creates an empty cache for `model` and the executor of its steps. Fails before it allocates anything if their
    /// memory bound does not fit into the model's budget.
    pub fn new(
        model: &Arc<Model>,
        registry: &Registry,
        config: &PagedConfig,
    ) -> Result<(Cache, ModelExecutor), Error> {
        let cache = config.cache(model.config())?;
        let (_, backend) =
            registry.plan(&config.cache.backend, "paged", &config.cache.groups(model.config()))?;
        let channels = channel_order(model, registry, &config.cache)?;
        let executor = ModelExecutor {
            runner: Runner::open(model, registry, backend, &cache, &config.block_aligned(), channels)?,
            tokens: Vec::new(),
            rows: Vec::new(),
            scored: Vec::new(),
            requests: HashMap::new(),
            failure: None,
            speculation: None,
            drafting: Duration::ZERO,
            tiers: None,
            keeping: None,
        };
        Ok((cache, executor))
    }

    /// The rows of `cache`, which came with this executor.
    pub(crate) fn rows<'c>(
        &'c mut self,
        cache: &'c mut Cache,
        plan: &'c mut StepPlan,
        config: &'c CacheConfig,
    ) -> CacheRows<'c> {
        CacheRows { cache, plan, runner: &mut self.runner, config }
    }

    /// Registers what the request `id` does with its logits. Call it before the request's first step; it lasts until
    /// [`unregister`](Self::unregister).
    pub fn register(&mut self, id: RequestId, request: Box<dyn TokenSampler>) {
        self.requests.insert(id, request);
    }
    /// Removes a request that has ended.
    pub fn unregister(&mut self, id: RequestId) {
        if let Some(mut request) = self.requests.remove(&id) {
            request.end();
        }
        if let Some(drafting) = &mut self.speculation {
            drafting.end(id);
        }
        if let Some(tiers) = &mut self.tiers {
            tiers.request_ended(id);
        }
    }
    /// From now on, [`thin`](Self::thin) reduces sequences to this budget.
    pub(crate) fn keep(&mut self, config: KeepConfig) {
        self.keeping = Some(Keeping::new(config));
    }
    /// Reduces the sequences of a scheduler that store more than `most` tokens to the budget, between two steps.
    pub(crate) fn thin(&mut self, scheduler: &mut Scheduler, most: u32) -> Result<(), Error> {
        let Some(keeping) = &mut self.keeping else { return Ok(()) };
        let sequences: Vec<SeqId> = scheduler.sequences().map(|(_, seq)| seq).collect();
        keeping.thin(scheduler.cache_mut(), sequences, most)
    }
    /// Tokens that were removed to keep sequences within their budget; `None` if nothing is removed.
    pub(crate) fn removed_tokens(&self) -> Option<u64> {
        self.keeping.as_ref().map(Keeping::removed)
    }
    /// From now on, verifies the drafts of `speculator`; `None` turns drafts off. A step has at most as many draft tokens as
    /// rows are left of the cache configuration's `max_rows`.
    pub fn speculate(&mut self, speculator: impl Into<Option<Speculator>>) {
        self.speculation = speculator.into().map(Drafting::new);
    }
    /// What speculation has achieved, with an entry for each position that a draft can have; `None` if it is off.
    pub fn speculation(&self) -> Option<Counts> {
        let speculator = &self.speculation.as_ref()?.speculator;
        let (mut counts, bounds) = (speculator.counts().clone(), speculator.config().bounds);
        let positions = counts.accepted_per_position.len().max(bounds.depth.min(bounds.tokens) as usize);
        counts.accepted_per_position.resize(positions, 0);
        Some(counts)
    }
    /// The error of the last step, if it failed.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }
    /// From now on, moves K and V to and from tiers. Returns what the scheduler has to know of them.
    pub(crate) fn open_tiers(
        &mut self,
        mut config: TierConfig,
        groups: &[Visibility],
        block_tokens: u32,
        multiply_adds: (f64, f64),
        reports: Sender<Command>,
    ) -> Result<Tiers, Error> {
        // Measured when the cache opened, after the fingerprint was made.
        if let Some(order) = &self.runner.channels {
            config.fingerprint.extend(hash_of(order).into_bytes());
        }
        let transfers = self.runner.transfers();
        let bytes = |group| transfers.block_bytes(group, block_tokens).unwrap_or(0);
        let parts = BlockParts::new(block_tokens, groups, bytes);
        let tiers = config.scheduled(&parts, multiply_adds);
        let memory = BlockMemory::pin(self.runner.network.pools_mut(), config.pinned_bytes);
        let driver = TierDriver::new(config, parts, memory, reports);
        let cannot = |error| Error::Usage(format!("tiers: cannot start their threads: {error}"));
        self.tiers = Some(driver.map_err(cannot)?);
        Ok(tiers)
    }
    /// Carries out what the scheduler asks for, and tells it what has ended. Returns whether anything has.
    pub(crate) fn move_tiers(&mut self, scheduler: &mut Scheduler, now_ns: u64) -> bool {
        let Some(tiers) = &mut self.tiers else { return false };
        let mut has_ended = false;
        loop {
            tiers.carry_out(scheduler.drain_orders(), &mut self.runner.transfers());
            if !tiers.tell(scheduler, now_ns) {
                return has_ended;
            }
            has_ended = true;
        }
    }
    /// Call it after every step.
    pub(crate) fn begin_tier_step(&mut self) {
        if let Some(tiers) = &mut self.tiers {
            tiers.begin_step(&mut self.runner.transfers());
        }
    }
    pub(crate) fn tier_report(&mut self, report: Report, scheduler: &mut Scheduler, now_ns: u64) {
        if let Some(tiers) = &mut self.tiers {
            tiers.report(report, &mut self.runner.transfers(), scheduler, now_ns);
        }
    }
    pub(crate) fn watch_tiers(&mut self, salt: &str, tell: TellTier) -> Vec<String> {
        self.tiers.as_mut().map_or(Vec::new(), |tiers| tiers.watch(salt, tell))
    }
    pub(crate) fn tell_tier_names(&mut self) {
        if let Some(tiers) = &mut self.tiers {
            tiers.tell_names();
        }
    }
    pub(crate) fn is_copying(&self) -> bool {
        self.tiers.as_ref().is_some_and(TierDriver::is_copying)
    }
    /// Changes the capacity of the scheduler's cache to `capacity_tokens`, one per layer group, with its bytes. On `Err` the capacity is
    /// what it was.
    pub(crate) fn resize(
        &mut self,
        scheduler: &mut Scheduler,
        now_ns: u64,
        capacity_tokens: &[u32],
    ) -> Result<(), ResizeError> {
        self.move_tiers(scheduler, now_ns);
        let pools = self.runner.network.pools_mut();
        let before = scheduler.cache().capacity_cells();
        // The larger capacity first: what is refused is refused before anything is evicted.
        let larger: Vec<u32> =
            before.iter().zip(capacity_tokens).map(|(before, tokens)| *before.max(tokens)).collect();
        pools.resize(&larger)?;
        let moved = match scheduler.begin_resize(now_ns, capacity_tokens) {
            Ok(moves) => {
                let relocated = pools.relocate(moves);
                let renamed = moves.renamed();
                scheduler.end_resize(now_ns, relocated.is_ok());
                if let (Ok(()), Some(tiers)) = (&relocated, &mut self.tiers) {
                    tiers.moved(&renamed);
                }
                relocated.map_err(ResizeError::Device)
            }
            Err(refused) => Err(ResizeError::Refused(refused)),
        };
        pools.resize(&scheduler.cache().capacity_cells())?;
        moved
    }
    pub(crate) fn tier_stores(&self) -> Option<Arc<Stores>> {
        self.tiers.as_ref().map(TierDriver::stores)
    }
    pub(crate) fn tiers(&self) -> Option<&TierDriver> {
        self.tiers.as_ref()
    }
    pub(crate) fn tier_stats(&self, scheduler: &Scheduler) -> Option<TierStats> {
        self.tiers.as_ref().map(|tiers| tiers.stats(scheduler))
    }
    /// Bytes that attention has read, written and moved.
    pub fn counters(&self) -> KvCounters {
        self.runner.network.pools().counters()
    }
    /// Transfers of blocks that the cache has pinned or is loading. They follow the last step.
    pub fn transfers(&mut self) -> Transfers<'_> {
        self.runner.transfers()
    }
    /// KV bytes reserved now.
    pub fn kv_bytes(&self) -> u64 {
        self.runner.network.pools().bytes()
    }

    fn forward<'c>(&mut self, step: Step<'c>, batch: Batch<'_>) -> Result<Computed<'c>, Error> {
        let vocab = self.runner.model.config().vocab;
        self.tokens.clear();
        self.rows.clear();
        self.scored.clear();
        for (i, work) in batch.work.iter().enumerate() {
            let unknown = || Error::Usage(format!("request {} has no token ids", work.request));
            let tokens = batch.tokens(i).ok_or_else(unknown)?;
            self.runner.check_tokens(tokens)?;
            let request = self.requests.get(&work.request);
            if let Some(request) = request {
                let (first, end) = (work.first, work.first + tokens.len() as u32);
                let wanted = request.wants(first..end);
                let wanted = wanted.start.max(first)..wanted.end.min(end);
                let row = self.tokens.len() as u32;
                self.scored.extend(wanted.map(|position| (row + position - first, i, position)));
            }
            self.tokens.extend_from_slice(tokens);
            let draft = self.speculation.as_ref().and_then(|drafting| drafting.tree(i, batch));
            if let Some(draft) = draft {
                let first = self.tokens.len() as u32 - 1;
                self.tokens.extend_from_slice(draft.tokens());
                // The rows on the path are known only as the sampler draws, in order.
                self.rows.extend((first..self.tokens.len() as u32).map(WantedRow::logits));
            } else if work.samples {
                let output = request.map_or(RowOutput::Argmax, |request| request.row_output());
                self.rows.push(WantedRow { row: self.tokens.len() as u32 - 1, output });
            }
        }
        // Rows to score are computed in pieces of at most `max_rows`; the rows to sample from come last.
        let rows: &[WantedRow] = if self.scored.is_empty() { &self.rows } else { &[] };
        let taps = self.speculation.as_ref().map_or(&[][..], |drafting| drafting.speculator.taps());
        let mass = self.keeping.as_ref().and_then(Keeping::queries);
        let inputs = StepInputs { tokens: &self.tokens, rows, taps, given: Given::Nothing, mass };
        let computed = self.runner.run(step, &inputs)?;
        if let Some(keeping) = &mut self.keeping {
            keeping.observe(computed.plan(), &self.runner.network.output().mass);
        }
        if self.scored.is_empty() {
            return Ok(computed);
        }
        let max_rows = self.runner.max_rows();
        let network = &mut *self.runner.network;
        let mut piece = Vec::with_capacity(max_rows);
        for scored in self.scored.chunks(max_rows) {
            piece.clear();
            piece.extend(scored.iter().map(|(row, ..)| WantedRow::logits(*row)));
            network.recompute_rows(&piece)?;
            for ((_, i, position), logits) in scored.iter().zip(network.output().logits().chunks_exact(vocab))
            {
                if let Some(request) = self.requests.get_mut(&batch.work[*i].request) {
                    request.score(*position, logits);
                }
            }
        }
        network.recompute_rows(&self.rows)?;
        Ok(computed)
    }

    /// Lets every request that samples draw its tokens, and moves the K and V of accepted paths. The scheduler commits the
    /// step.
    fn draw(&mut self, mut computed: Computed<'_>, batch: Batch<'_>, out: &mut Outcome) -> Result<(), Error> {
        let mut rows = self.runner.network.output_mut().rows();
        let (mut verified, mut path, mut paths) = (Verified::default(), Vec::new(), Vec::new());
        // The rows of kept tokens, for drafters that read the target's hidden states.
        let reads_taps = self.speculation.as_ref().is_some_and(|d| !d.speculator.taps().is_empty());
        let (mut first_row, mut kept_rows) = (0, Vec::new());
        for (i, work) in batch.work.iter().enumerate() {
            let known_rows = first_row..first_row + batch.tokens(i).map_or(0, <[u32]>::len);
            first_row = known_rows.end;
            let mut request = self.requests.get_mut(&work.request);
            let mut choose = |row: Option<RowResult<'_>>| Some(request.as_mut()?.choose(row?));
            let tree = self.speculation.as_ref().and_then(|drafting| drafting.tree(i, batch));
            let Some(tree) = tree else {
                let sampled = work.samples.then(|| match choose(rows.next()) {
                    Some(SampledToken { token, finished }) => Sampled { token: Some(token), finished },
                    None => ENDED,
                });
                out.push_sampled(batch, sampled);
                paths.push(None);
                if reads_taps {
                    kept_rows.push(known_rows.collect());
                }
                if let (Some(drafting), Some(sampled)) = (&mut self.speculation, sampled) {
                    drafting.emitted(batch, i, sampled.token.as_slice());
                }
                continue;
            };
            let (n_rows, mut next) = (tree.len() + 1, 0);
            let mut draw = |row: usize| {
                let result = rows.nth(row - next);
                next = row + 1;
                choose(result).ok_or(())
            };
            let drawn = verify(tree, &mut draw, &mut verified);
            first_row += tree.len();
            if reads_taps {
                let last_known = known_rows.end - 1;
                kept_rows.push(verified.rows().map(|row| last_known + row).collect());
            }
            if next < n_rows {
                let _ = rows.nth(n_rows - next - 1); // skip the rows off the path
            }
            let (emitted, finished) = match drawn {
                Ok(()) => (Emitted::Tokens(&verified.tokens), verified.finished),
                Err(()) => (Emitted::Unknown(1), ENDED.finished),
            };
            match batch.drafts_chain(i) {
                true => {
                    let kept = Kept::First(verified.path.len() as u32 + 1);
                    out.push(Advance { kept, emitted, finished });
                    paths.push(None);
                }
                false => {
                    verified.kept(&mut path);
                    out.push(Advance { kept: Kept::Path(&path), emitted, finished });
                    paths.push(Some(path.clone()));
                }
            }
            if let Some(drafting) = &mut self.speculation {
                drafting.verified(batch, i, &verified);
            }
        }
        drop(rows);
        if paths.iter().any(Option::is_some) {
            let kept: Vec<Kept<'_>> =
                paths.iter().map(|path| path.as_ref().map_or(Kept::All, |path| Kept::Path(path))).collect();
            if let Err(error) = computed.move_kept(&kept, self.runner.network.pools_mut()) {
                // The clients have their tokens already, so the step counts. What was not moved is computed again.
                out.keep_in_place();
                self.end_speculation(&error.into());
            }
        }
        if let Some(drafting) = &mut self.speculation {
            let (taps, hidden) = (&self.runner.network.output().taps, self.runner.model.config().hidden);
            if let Err(error) = drafting.computed(batch, taps, hidden, &kept_rows) {
                self.end_speculation(&error);
            }
        }
        Ok(())
    }
}

impl ModelExecutor {
    /// A drafter has failed: this step and all later ones run without drafts.
    fn end_speculation(&mut self, error: &Error) {
        tracing::error!(target: "kvist::engine", "speculation ends: {error}");
        if let Some(drafting) = &mut self.speculation {
            drafting.speculator.stop(error);
        }
    }
}

impl Executor for ModelExecutor {
    fn draft(&mut self, _now_ns: u64, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        let Some(drafting) = &mut self.speculation else { return };
        let rows = batch.work.iter().filter(|work| work.samples).count();
        let limit = limit.min(self.runner.max_rows().saturating_sub(rows) as u32);
        if limit == 0 {
            return;
        }
        let started = Instant::now();
        let vocab = self.runner.model.config().vocab as u32;
        if let Err(error) = drafting.propose(batch, limit, vocab, drafts) {
            self.end_speculation(&error);
        }
        self.drafting = started.elapsed();
    }
    fn begin_transfers(&mut self, _now_ns: u64, orders: &mut Vec<Order>) {
        if let Some(tiers) = &mut self.tiers {
            tiers.carry_out(orders.drain(..), &mut self.runner.transfers());
        }
    }
    fn execute(&mut self, _now_ns: u64, step: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        let started = Instant::now();
        let done = self.forward(step, batch).and_then(|computed| self.draw(computed, batch, out));
        match done {
            Ok(()) => self.failure = None,
            Err(error) => {
                tracing::error!(target: "kvist::engine", "a step of {} requests failed: {error}", batch.work.len());
                self.failure = Some(error);
                out.clear();
                out.failed = true;
            }
        }
        let elapsed = started.elapsed();
        if let Some(drafting) = self.speculation.as_mut().filter(|_| !out.failed) {
            drafting.passed(batch, elapsed);
        }
        let elapsed = elapsed + std::mem::take(&mut self.drafting);
        out.elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
    }
}
