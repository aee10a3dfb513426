//! Finds the strongest channels of a model's keys by running a short text. A few K channels are many times larger than
//! the others in every token (KVQuant: Hooper et al., 2024); storages with outliers keep these in more bits. Costs one
//! prefill of [`TOKENS`] tokens per model. The order is the same in every process on the same device with the same kvist; another
//! device may round otherwise, and order channels otherwise that are about equally strong. So what is stored in this order is
//! only reused with the order's hash.
use crate::memory::CacheConfig;
use crate::runner::Runner;
use kvist_cache::{LayerId, SeqId, Span, Step, StepPlan, StepRequest};
use kvist_device::*;
use kvist_model::{Error, Model, hash};
use std::sync::Arc;

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

/// A hash that tells this order from another one.
pub(crate) fn hash_of(order: &ChannelOrder) -> String {
    hash(&[&order.to_bytes()])
}

/// Runs a prefill and sums the squares of the stored keys per channel.
fn measure(model: &Arc<Model>, registry: &Registry, wanted: &CacheConfig) -> Result<ChannelOrder, Error> {
    let architecture = model.config();
    let tokens = tokens(model)?;
    let context = CONTEXT.min(architecture.context);
    let config = CacheConfig {
        backend: wanted.backend.clone(),
        // Not `wanted`'s: where rows depend on their batch, the order would depend on `--chunk`.
        max_step_tokens: context,
        ..CacheConfig::new(context)
    };
    let groups = config.groups(architecture);
    let (mut cache, backend) = registry.plan(&config.backend, &config.kind, &groups)?;
    let runner = Runner::open(model, registry, backend, &cache, &config, None);
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
    let channels = |layer: &LayerSpec| vec![0.0; (layer.n_kv_heads * layer.k_dim) as usize];
    let mut sums: Vec<Vec<f64>> = model.layout().layers.iter().map(channels).collect();
    for text in tokens.chunks(context as usize) {
        cache.clear();
        let mut start = 0;
        for tokens in text.chunks(config.max_step_tokens.max(1) as usize) {
            let n_tokens = tokens.len() as u32;
            let spans = [Span::chain(SeqId::ONLY, start, n_tokens)];
            let step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan)?;
            runner
                .run(step, &StepInputs { tokens, rows: &[], taps: &[], given: Given::Nothing, mass: None })?
                .commit();
            start += n_tokens;
        }
        add_energies(runner.network.pools(), model.layout(), start, &mut sums)?;
    }
    let unfit = || Error::Usage("the channels of this model's keys cannot be ranked".into());
    ChannelOrder::of_energies(model.layout(), &sums).ok_or_else(unfit)
}

/// Adds the squares of the keys in the first `n_cells` cells to `sums`: per layer, `[n_kv_heads, head_dim]`.
fn add_energies(
    pools: &dyn Pools,
    layout: &Layout,
    n_cells: u32,
    sums: &mut [Vec<f64>],
) -> Result<(), DeviceError> {
    for (layer, spec) in layout.owners() {
        let mut key = vec![0.0; spec.k_dim as usize];
        for (head, sums) in sums[layer].chunks_exact_mut(key.len()).enumerate() {
            for cell in 0..n_cells {
                pools.inspect(LayerId(layer as u16), Side::K, head as u32, cell, &mut key)?;
                sums.iter_mut().zip(&key).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
            }
        }
    }
    Ok(())
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
