//! Finds the strongest channels of a model's keys by running a short text. A few K channels are many times larger than
//! the others in every token (KVQuant: Hooper et al., 2024); storages with outliers keep these in more bits. Costs one
//! prefill of [`TOKENS`] tokens per model and always gives the same order.
use crate::memory::CacheConfig;
use crate::session::{LogitRows, ModelSession, SequenceInput};
use kvist_cache::SeqId;
use kvist_device::{Attend, Bytes, ChannelOrder, LayerSpec, Registry};
use kvist_model::Error;
use kvist_model::Model;
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
    let found = Arc::new(look(model, registry, config)?);
    tracing::info!(target: "kvist::engine", "looked at {TOKENS} keys for the strongest channels in {:.1?}", begun.elapsed());
    Ok(Some(model.channels().get_or_init(|| found).clone()))
}

/// Runs a prefill and sums the squares of the keys per channel.
fn look(model: &Arc<Model>, registry: &Registry, wanted: &CacheConfig) -> Result<ChannelOrder, Error> {
    let architecture = model.decoder().config();
    let tokens = tokens(model)?;
    let context = CONTEXT.min(architecture.context);
    let config = CacheConfig {
        backend: wanted.backend.clone(),
        max_step_tokens: context.min(wanted.max_step_tokens),
        ..CacheConfig::new(context)
    };
    let mut session = ModelSession::new(model, registry, &config).map_err(|error| match error {
        Error::CacheTooLarge { asked, free, .. } => Error::Usage(format!(
            "{}: a look at some of the model's keys comes first, and takes {}; {} are free. Take another dtype, or more memory",
            wanted.k,
            Bytes(asked),
            Bytes(free)
        )),
        error => error,
    })?;
    let layout = model.decoder().layout();
    let channels = |layer: &LayerSpec| (layer.n_kv_heads * layer.head_dim) as usize;
    let mut squares: Vec<Vec<f64>> = layout.layers.iter().map(|layer| vec![0.0; channels(layer)]).collect();
    for text in tokens.chunks(context as usize) {
        session.clear()?;
        for step in text.chunks(config.max_step_tokens.max(1) as usize) {
            let mut watch = |call: &Attend<'_>| {
                let layer = call.layer.0 as usize;
                let (Some((k, _)), d) = (call.kv, layout.layers[layer].head_dim as usize) else { return };
                for (head, squares) in squares[layer].chunks_exact_mut(d).enumerate() {
                    for token in 0..step.len() {
                        let row = k.row(token, head, d).iter().map(|x| f64::from(*x));
                        squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
                    }
                }
            };
            session.forward_watched(
                &[SequenceInput::chain(SeqId::ONLY, step)],
                LogitRows::None,
                &mut watch,
            )?;
        }
    }
    let unfit = || Error::Usage("the keys of this model have no order of channels".into());
    ChannelOrder::of_energies(layout, &squares).ok_or_else(unfit)
}

/// The text in the model's own tokens. Without a tokenizer: tokens spread over its vocabulary.
fn tokens(model: &Model) -> Result<Vec<u32>, Error> {
    let config = model.decoder().config();
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
