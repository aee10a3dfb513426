//! Which channels of a model's keys are strongest, found by a look at its keys over a short text. A few channels of K are many
//! times larger than the others in every token (KVQuant: Hooper et al., 2024); storages with outliers keep those in more bits.
//! It takes a prefill of [`TOKENS`] tokens, once per model, and gives the same order every time.
use crate::error::Error;
use crate::memory::CacheConfig;
use crate::model::Model;
use crate::session::{Feed, ModelSession, Want};
use kvist_backend::{Attend, ChannelOrder, Registry, Storage};
use kvist_cache::SeqId;
use std::sync::Arc;

/// Tokens that are looked at.
const TOKENS: u32 = 256;
/// Tokens that are looked at together, each in a context of its own: few, so that the look takes less memory than the cache
/// that it is for.
const CHUNK: u32 = 64;
/// Prose, numbers and code. Which text it is matters little: strong channels are strong in all of them.
const TEXT: &str = include_str!("channels/text.txt");

impl Model {
    /// The order of the channels, for a cache of `config` that asks for one. Needs room for a short cache in f32 while it
    /// looks.
    pub(crate) fn channel_order(
        self: &Arc<Self>,
        registry: &Registry,
        config: &CacheConfig,
    ) -> Result<Option<Arc<ChannelOrder>>, Error> {
        if !config.k.outliers {
            return Ok(None);
        }
        if let Some(found) = self.channels().get() {
            return Ok(Some(found.clone()));
        }
        let found = Arc::new(look(self, registry, &config.backend)?);
        Ok(Some(self.channels().get_or_init(|| found).clone()))
    }
}

/// A prefill in f32 that adds up the squares of the keys.
fn look(model: &Arc<Model>, registry: &Registry, backend: &str) -> Result<ChannelOrder, Error> {
    let architecture = model.decoder().config();
    let tokens = tokens(model)?;
    let config = CacheConfig {
        backend: backend.into(),
        k: Storage::F32,
        v: Storage::F32,
        max_step_tokens: CHUNK,
        ..CacheConfig::new(CHUNK.min(architecture.context))
    };
    let mut session = ModelSession::new(model, registry, &config)?;
    let layout = model.decoder().layout();
    let channels = |layer: &kvist_backend::LayerSpec| (layer.n_kv_heads * layer.head_dim) as usize;
    let mut squares: Vec<Vec<f64>> = layout.layers.iter().map(|layer| vec![0.0; channels(layer)]).collect();
    for chunk in tokens.chunks(config.context_tokens as usize) {
        session.clear()?;
        let mut watch = |call: &Attend<'_>| {
            let layer = call.layer.0 as usize;
            let (Some((k, _)), d) = (call.kv, layout.layers[layer].head_dim as usize) else { return };
            for (head, squares) in squares[layer].chunks_exact_mut(d).enumerate() {
                for token in 0..chunk.len() {
                    let row = k.row(token, head, d).iter();
                    squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
                }
            }
        };
        session.forward_watched(&[Feed::chain(SeqId::ONLY, chunk)], Want::Nothing, &mut watch)?;
    }
    let unfit = || Error::Usage("the keys of this model have no order of channels".into());
    ChannelOrder::of_energies(layout, &squares).ok_or_else(unfit)
}

/// The text in the model's own tokens; of a model without a tokenizer, tokens all over its vocabulary.
fn tokens(model: &Model) -> Result<Vec<u32>, Error> {
    let config = model.decoder().config();
    let mut tokens = match model.tokenizer() {
        Some(tokenizer) => tokenizer.encode(TEXT, true)?,
        None => Vec::new(),
    };
    // A tokenizer may know tokens that the model lacks, and a text may be short in its tokens.
    tokens.retain(|token| (*token as usize) < config.vocab);
    let n = TOKENS as usize;
    let spread = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % config.vocab.max(1) as u32;
    tokens.extend((tokens.len()..n).map(spread));
    tokens.truncate(n);
    Ok(tokens)
}
