//! Runs steps of a given shape through the scheduler, the cache and the executor of the server.
use crate::commands::bench::rig::mix;
use anyhow::{Context, ensure};
use kvist_cache::{PrefixSpec, Step};
use kvist_device::{Recent, Registry, RowOutput, RowResult};
use kvist_engine::executor::{ModelExecutor, PagedConfig, SampledToken, TokenSampler};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::speculate::{Bounds, DraftRequest, Drafter, SpeculationConfig, Speculator};
use kvist_model::{Error, Model};
use kvist_scheduler::{
    Admission, Batch, BatchDrafts, Config, Executor, Iteration, Outcome, Prompt, Request, RequestId,
    Scheduler,
};
use kvist_simulator::cost::BatchShape;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The configuration that is measured.
#[derive(Clone, Debug)]
pub struct Served {
    pub cache: CacheConfig,
    pub block_tokens: u32,
    pub max_batch: u32,
    pub max_batch_tokens: u32,
    /// Length of the longest sequence.
    pub context_tokens: u32,
}

/// Upper limit of extra steps of a decoding batch, until its last prompt has been read.
const SLACK: u32 = 64;

/// Neighbouring blocks of one stream.
const WARM_BLOCKS: u32 = 4;

pub struct Steps {
    scheduler: Scheduler,
    executor: ModelExecutor,
    served: Served,
    vocab: u32,
    started: Instant,
    next_id: u64,
    /// Number of the next stream of new tokens; each is used once.
    next_stream: u64,
    decoding: Vec<RequestId>,
    listeners: Listeners,
}

/// A step that ran: its batch, and the time of the whole scheduler iteration.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    pub shape: BatchShape,
    pub ns: f64,
}

/// Takes the likeliest token and sends it to its listener.
struct Greedy {
    sampler: Sampler,
    listener: UnboundedSender<u32>,
}

impl TokenSampler for Greedy {
    fn row_output(&self) -> RowOutput {
        self.sampler.row_output()
    }
    fn choose(&mut self, row: RowResult<'_>) -> SampledToken {
        // If the logits cannot be sampled, use token 0: the time is the same.
        let token = self.sampler.take(row).unwrap_or(0);
        let _ = self.listener.send(token);
        SampledToken { token, finished: false }
    }
}

/// A thread with a listener for each request's tokens.
struct Listeners(UnboundedSender<UnboundedReceiver<u32>>);

impl Listeners {
    fn new() -> anyhow::Result<Self> {
        let (sender, mut all) = unbounded_channel::<UnboundedReceiver<u32>>();
        let runtime =
            tokio::runtime::Builder::new_current_thread().build().context("cannot start a thread")?;
        // The thread ends when the sender is dropped.
        std::thread::Builder::new()
            .name("kvist-listeners".into())
            .spawn(move || {
                runtime.block_on(async {
                    while let Some(mut one) = all.recv().await {
                        tokio::spawn(async move { while one.recv().await.is_some() {} });
                    }
                });
            })
            .context("cannot start a thread")?;
        Ok(Listeners(sender))
    }

    fn add(&self) -> UnboundedSender<u32> {
        let (sender, tokens) = unbounded_channel();
        let _ = self.0.send(tokens);
        sender
    }
}

/// The executor, with a record of its last batch.
struct Noted<'a> {
    executor: &'a mut ModelExecutor,
    shape: BatchShape,
    failed: bool,
}

impl Executor for Noted<'_> {
    fn draft(&mut self, now_ns: u64, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        self.executor.draft(now_ns, batch, limit, drafts);
    }
    fn execute(&mut self, now_ns: u64, step: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        self.shape = BatchShape::of(&batch);
        self.executor.execute(now_ns, step, batch, out);
        self.failed = out.failed;
    }
}

/// Proposes chains of arbitrary tokens. The time of a step does not depend on what they are.
struct Chains {
    vocab: u32,
}

impl Drafter for Chains {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
        for request in requests {
            let mut last = None;
            for i in 0..request.bounds.tokens.min(request.bounds.depth) {
                let token = token(request.tokens.len() as u64, i, self.vocab);
                last = Some(request.tree.push(last, token, 1.0));
            }
        }
        Ok(())
    }
}

/// The largest measured number of tokens of one sequence in a step with a draft.
const MAX_DRAFT_ROWS: u32 = 32;

impl Served {
    /// Tokens of one sequence in the measured steps with drafts: powers of two.
    pub fn draft_rows(&self) -> impl Iterator<Item = u32> {
        let last = MAX_DRAFT_ROWS.min(self.max_batch_tokens);
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(move |n| *n <= last)
    }

    /// Batch slots: one more than are served, if a step has room for it, for a prompt in addition to a full decoding
    /// batch.
    fn places(&self) -> u32 {
        (self.max_batch + 1).min(self.max_batch_tokens)
    }

    /// The cache: room for the whole batch at the longest context, and for the prompts in addition.
    pub fn paged(&self) -> anyhow::Result<PagedConfig> {
        let a_sequence = u64::from(self.context_tokens) + u64::from(SLACK) + 2 * u64::from(self.block_tokens);
        let cells = a_sequence * u64::from(self.max_batch) + 8 * u64::from(self.max_batch_tokens);
        let cells = u32::try_from(cells).ok().with_context(|| {
            format!("{cells} tokens are more than a cache counts: give a smaller --context or --max-batch")
        })?;
        let cache = CacheConfig {
            context_tokens: cells,
            max_step_tokens: self.max_batch_tokens,
            max_rows: self.places().max(self.draft_rows().last().unwrap_or(1)),
            recent: Recent { sequences: self.places(), ..self.cache.recent },
            ..self.cache.clone()
        };
        Ok(PagedConfig { cache, block_tokens: self.block_tokens, prefix: Some(PrefixSpec::default()) })
    }
}

impl Steps {
    pub fn new(model: &Arc<Model>, registry: &Registry, served: Served) -> anyhow::Result<Steps> {
        let (cache, executor) = ModelExecutor::new(model, registry, &served.paged()?)?;
        let config = Config {
            max_batch: served.places(),
            max_batch_tokens: served.max_batch_tokens,
            admission: Admission::Optimistic { headroom_tokens: 0 },
            ..Config::default()
        };
        Ok(Steps {
            scheduler: Scheduler::new(config, cache, None)?,
            executor,
            vocab: model.config().vocab as u32,
            served,
            started: Instant::now(),
            next_id: 0,
            next_stream: 1 << 32,
            decoding: Vec::new(),
            listeners: Listeners::new()?,
        })
    }

    /// Stores in the prefix index the streams that measured sequences begin with, so that they need not be computed
    /// again. Streams alternate, some blocks each, so that a stream's blocks are scattered as in a server that has run
    /// for a while. `progress` gets the number of tokens stored of each.
    pub fn warm(&mut self, progress: &mut dyn FnMut(u32) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let slice = WARM_BLOCKS * self.served.block_tokens;
        let mut known = 0;
        while known < self.served.context_tokens {
            known = known.saturating_add(slice).min(self.served.context_tokens);
            for stream in 0..u64::from(self.served.max_batch) {
                self.submit(stream, known, 0, 1)?;
                while self.iterate()?.is_some() {}
            }
            progress(known)?;
        }
        Ok(())
    }

    /// Runs a step of `tokens` prompt tokens, of sequences that then have `context` tokens: several short
    /// sequences, or the end of a long one. `None` if such a step could not be made.
    pub fn prefill(&mut self, tokens: u32, context: u32) -> anyhow::Result<Option<Ran>> {
        // Other cells may have evicted the end of the stream from the index: the first try then computes it again.
        for _ in 0..2 {
            if context > tokens {
                let block = self.served.block_tokens;
                let cached = (context - tokens + block / 2) / block * block;
                self.submit(0, cached.min(self.served.context_tokens / block * block), tokens, 1)?;
            } else {
                let n = (tokens / context.max(1)).clamp(1, self.served.max_batch.min(tokens));
                for i in 0..n {
                    let first = u64::from(i) * u64::from(tokens) / u64::from(n);
                    let end = u64::from(i + 1) * u64::from(tokens) / u64::from(n);
                    self.submit(0, 0, (end - first) as u32, 1)?;
                }
            }
            let ran = self.iterate()?;
            while self.iterate()?.is_some() {}
            let wanted = (u64::from(tokens), 0);
            if ran.is_some_and(|ran| (ran.shape.prefill_tokens, ran.shape.decode_sequences) == wanted) {
                return Ok(ran);
            }
        }
        Ok(None)
    }

    /// Makes `sequences` sequences decode, each with about `context` tokens, for at least `steps` steps. False if that
    /// state was not reached.
    pub fn begin_decoding(&mut self, sequences: u32, context: u32, steps: u32) -> anyhow::Result<bool> {
        let before = (context.saturating_sub(steps / 2)).max(1);
        for stream in 0..sequences {
            let id = self.submit(stream.into(), before, 0, steps + SLACK)?;
            self.decoding.push(id);
        }
        for _ in 0..SLACK {
            let Some(ran) = self.iterate()? else { return Ok(false) };
            if ran.shape.prefill_tokens == 0 && ran.shape.decode_sequences == u64::from(sequences) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Runs a step of the decoding sequences together with a prompt of `tokens` tokens.
    pub fn decode(&mut self, tokens: u32) -> anyhow::Result<Option<Ran>> {
        if tokens > 0 {
            self.submit(0, 0, tokens, 1)?;
        }
        let wanted = (u64::from(tokens), self.decoding.len() as u64);
        let ran = self.iterate()?;
        Ok(ran.filter(|ran| (ran.shape.prefill_tokens, ran.shape.decode_sequences) == wanted))
    }

    /// Drafts chains of `draft_tokens` tokens from now on.
    pub fn begin_drafting(&mut self, draft_tokens: u32) {
        let bounds = Bounds { tokens: draft_tokens, depth: draft_tokens, width: 1 };
        let chains = Chains { vocab: self.vocab.max(1) };
        let config = SpeculationConfig { bounds, adaptive: false };
        self.executor.speculate(Speculator::new(vec![Box::new(chains)], config));
    }

    /// Runs a step of the decoding sequence with a draft of `draft_tokens` tokens.
    pub fn verify(&mut self, draft_tokens: u32) -> anyhow::Result<Option<Ran>> {
        let ran = self.iterate()?;
        let of = |shape: BatchShape| (shape.prefill_tokens, shape.decode_sequences, shape.draft_tokens);
        Ok(ran.filter(|ran| of(ran.shape) == (0, 1, draft_tokens.into())))
    }

    pub fn end_drafting(&mut self) {
        self.executor.speculate(None);
    }

    pub fn end_decoding(&mut self) -> anyhow::Result<()> {
        let now = self.now_ns();
        for id in std::mem::take(&mut self.decoding) {
            self.scheduler.cancel(now, id);
        }
        while self.iterate()?.is_some() {}
        Ok(())
    }

    /// Submits a request with the first `known` tokens of a stream and `n_new` new tokens.
    fn submit(&mut self, stream: u64, known: u32, n_new: u32, max_new: u32) -> anyhow::Result<RequestId> {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.next_stream += 1;
        let vocab = self.vocab.max(1);
        let of = |stream: u64, n: u32| (0..n).map(move |i| token(stream, i, vocab));
        let prompt: Arc<[u32]> = of(stream, known).chain(of(self.next_stream, n_new)).collect();
        let sampler = Sampler::new(SamplerConfig::greedy())?;
        self.executor.register(id, Box::new(Greedy { sampler, listener: self.listeners.add() }));
        let now = self.now_ns();
        let prompt_tokens = known + n_new;
        let request = Request {
            prompt: Prompt::SharedTokens(prompt),
            ..Request::new(id.0, now, prompt_tokens, max_new)
        };
        self.scheduler.arrive(now, request)?;
        Ok(id)
    }

    /// Runs one iteration of the scheduler. `None` if there was nothing to do.
    fn iterate(&mut self) -> anyhow::Result<Option<Ran>> {
        let now = self.now_ns();
        let mut noted = Noted { executor: &mut self.executor, shape: BatchShape::default(), failed: false };
        let started = Instant::now();
        let iteration = self.scheduler.iterate(now, &mut noted);
        let ns = started.elapsed().as_nanos() as f64;
        let (shape, failed) = (noted.shape, noted.failed);
        for ended in self.scheduler.drain_ended() {
            self.executor.unregister(ended.id);
        }
        if failed {
            let why = self.executor.failure();
            anyhow::bail!(why.map_or("a step failed".to_owned(), |why| format!("a step failed: {why}")));
        }
        ensure!(
            self.scheduler.counters().preemptions == 0,
            "a measured request was preempted: the cache is too small, which is a bug in kvist"
        );
        Ok(matches!(iteration, Iteration::Ran { .. }).then_some(Ran { shape, ns }))
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The `i`-th token of a stream.
pub fn token(stream: u64, i: u32, vocab: u32) -> u32 {
    let counter = (stream.rotate_left(32) ^ u64::from(i)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    (mix(counter) % u64::from(vocab)) as u32
}
