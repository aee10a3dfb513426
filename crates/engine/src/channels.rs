//! Finds the strongest channels of a model's keys by running a short text. A few K channels are many times larger than
//! the others in every token (KVQuant: Hooper et al., 2024); storages with outliers keep these in more bits. Costs one
//! prefill of [`TOKENS`] tokens per model and always gives the same order.
use crate::memory::CacheConfig;
use crate::runner::Runner;
use kvist_cache::{CellRun, GroupId, LayerId, MovePlan, SeqId, Span, Step, StepPlan, StepRequest};
use kvist_device::*;
use kvist_model::{Error, Model};
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens to measure.
const TOKENS: u32 = 256;
/// Tokens per context. The text is measured in pieces of this length, so that the measurement needs less memory than
/// any cache of practical size.
const CONTEXT: u32 = 16;
/// Prose, numbers and code. The choice of text matters little: strong channels are strong in every text.
const TEXT: &str = include_str!("channels/text.txt");

/// Returns the channel order if `config` stores outliers, else `None`. The first call per model needs memory for a very
/// short cache.
pub(crate) fn channel_order(
    model: &Arc<Model>,
    registry: &Registry,
    config: &CacheConfig,
) -> Result<Option<Arc<ChannelOrder>>, Error> {
    if !config.k.outliers {
        return Ok(None);
    }
    if let Some(found) = model.channels().get() {
        return Ok(Some(found.clone()));
    }
    let begun = std::time::Instant::now();
    let found = Arc::new(measure(model, registry, config)?);
    tracing::info!(target: "kvist::engine", "looked at {TOKENS} keys for the strongest channels in {:.1?}", begun.elapsed());
    Ok(Some(model.channels().get_or_init(|| found).clone()))
}

/// Runs a prefill and sums the squares of the keys per channel.
fn measure(model: &Arc<Model>, registry: &Registry, wanted: &CacheConfig) -> Result<ChannelOrder, Error> {
    let architecture = model.config();
    let tokens = tokens(model)?;
    let context = CONTEXT.min(architecture.context);
    let config = CacheConfig {
        backend: wanted.backend.clone(),
        max_step_tokens: context.min(wanted.max_step_tokens),
        ..CacheConfig::new(context)
    };
    let groups = config.groups(architecture);
    let (mut cache, inner) = registry.plan(&config.backend, &config.kind, &groups)?;
    let backend = KeyEnergies { inner, sums: Arc::default() };
    let runner = Runner::open(model, registry, &backend, &cache, &config, None);
    let mut runner = runner.map_err(|error| match error {
        Error::CacheTooLarge { asked, free, .. } => Error::Usage(format!(
            "{}: some of the model's keys must be computed first, which takes {}; {} are free. Use another dtype, or more memory",
            wanted.k,
            Bytes(asked),
            Bytes(free)
        )),
        error => error,
    })?;
    let mut plan = StepPlan::default();
    for text in tokens.chunks(context as usize) {
        cache.clear();
        let mut start = 0;
        for tokens in text.chunks(config.max_step_tokens.max(1) as usize) {
            let n_tokens = tokens.len() as u32;
            let spans = [Span::chain(SeqId::ONLY, start, n_tokens)];
            let step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan)?;
            runner.run(step, tokens, &[], &[])?.commit();
            start += n_tokens;
        }
    }
    drop(runner);
    let sums = std::mem::take(&mut *backend.sums.lock().unwrap_or_else(PoisonError::into_inner));
    let unfit = || Error::Usage("the channels of this model's keys cannot be ranked".into());
    ChannelOrder::of_energies(model.layout(), &sums).ok_or_else(unfit)
}

/// The sums of the squares of every layer's keys: per layer, `[n_kv_heads, head_dim]`.
type Sums = Arc<Mutex<Vec<Vec<f64>>>>;

/// A backend that also sums the squares of the keys that its pools are given.
struct KeyEnergies<'b> {
    inner: &'b dyn Backend,
    sums: Sums,
}

struct KeyEnergyPools {
    inner: Box<dyn Pools>,
    layout: Layout,
    sums: Sums,
}

impl Backend for KeyEnergies<'_> {
    fn id(&self) -> &'static str {
        self.inner.id()
    }
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, BackendError> {
        let channels = |layer: &LayerSpec| vec![0.0; (layer.n_kv_heads * layer.k_dim) as usize];
        *self.sums.lock().unwrap_or_else(PoisonError::into_inner) =
            spec.layout.layers.iter().map(channels).collect();
        let (layout, sums) = (spec.layout.clone(), self.sums.clone());
        Ok(Box::new(KeyEnergyPools { inner: self.inner.pools(spec)?, layout, sums }))
    }
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        self.inner.usage(spec, cells)
    }
}

impl Pools for KeyEnergyPools {
    fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), BackendError> {
        let layer = usize::from(call.layer.0);
        if let (Some((k, _)), Some(spec)) = (call.kv, self.layout.layers.get(layer)) {
            let d = spec.k_dim as usize;
            let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            for (head, sums) in sums[layer].chunks_exact_mut(d).enumerate() {
                for token in 0..plan.n_tokens() as usize {
                    let row = k.row(token, head, d).iter().map(|x| f64::from(*x));
                    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
                }
            }
        }
        self.inner.attend(plan, call)
    }
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        self.inner.begin(plan)
    }
    fn relocate(&mut self, moves: &MovePlan) -> Result<(), BackendError> {
        self.inner.relocate(moves)
    }
    fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        self.inner.block_bytes(group, cells)
    }
    fn export(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.inner.export(after, group, cells, into)
    }
    fn import(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.inner.import(after, group, cells, from)
    }
    fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, BackendError>> {
        self.inner.finished(transfer)
    }
    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), BackendError> {
        self.inner.inspect(layer, side, kv_head, cell, row)
    }
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn counters(&self) -> KvCounters {
        self.inner.counters()
    }
}

/// The text in the model's own tokens. Without a tokenizer: tokens spread over its vocabulary.
fn tokens(model: &Model) -> Result<Vec<u32>, Error> {
    let config = model.config();
    let mut tokens = match model.tokenizer() {
        Some(tokenizer) => tokenizer.encode(TEXT, true)?,
        None => Vec::new(),
    };
    // The tokenizer may produce tokens outside the model's vocabulary, and the text may be too short in its tokens.
    tokens.retain(|token| (*token as usize) < config.vocab);
    let n = TOKENS as usize;
    let spread = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % config.vocab.max(1) as u32;
    tokens.extend((tokens.len()..n).map(spread));
    tokens.truncate(n);
    Ok(tokens)
}
