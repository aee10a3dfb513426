//! Prefixes: the beginning of prompts, computed once, in a file or in the memory of this process.
use crate::arguments::{CacheDefaults, Options, Prompt, cache_config, tokenizer};
use crate::errors::{argument, engine};
use crate::model::Model;
use crate::wait::without_gil;
use kvist_cache::SeqId;
use kvist_device::Purpose;
use kvist_engine::frozen::{FrozenText, shared_bytes, system_tokens};
use kvist_engine::saved::Origin;
use kvist_engine::session::ModelSession;
use pyo3::prelude::*;

/// Where a prefix goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    File,
    /// The memory that it takes is asked for before anything is computed.
    Memory,
}

/// The tokens of a prefix, and its system message.
fn tokens_of(model: &Model, prompt: Prompt, system: bool) -> PyResult<(Vec<u32>, Option<String>)> {
    match prompt {
        Prompt::Text(text) if system => {
            let template = model.model.chat_template().ok_or_else(|| {
                argument("this model has no chat template, so it has no system message: leave `system` out")
            })?;
            let tokens = system_tokens(tokenizer(&model.model)?, template, &text).map_err(engine)?;
            Ok((tokens, Some(text)))
        }
        Prompt::Tokens(_) if system => Err(argument("`prompt`: a system message is a string")),
        prompt => Ok((prompt.encode(&model.model, true)?, None)),
    }
}

/// Computes a prefix in a session of its own, which `freeze` gets.
pub fn compute<T: Send>(
    py: Python<'_>,
    model: &Model,
    (prompt, system): (Prompt, bool),
    mut options: Options<'_>,
    place: Place,
    freeze: impl FnOnce(&mut ModelSession, FrozenText<'_>, &Origin) -> PyResult<T> + Send,
) -> PyResult<T> {
    let (tokens, system) = tokens_of(model, prompt, system)?;
    let context = u32::try_from(tokens.len()).unwrap_or(u32::MAX).saturating_add(1);
    let defaults = CacheDefaults::new(context).on(&model.backend);
    let config = cache_config(&mut options, "contiguous", &defaults)?;
    options.end()?;
    kvist_engine::check_prompt(&config, tokens.len()).map_err(engine)?;
    let registry = model.registry();
    without_gil(py, || {
        let text = FrozenText { tokens: &tokens, system: system.as_deref() };
        let mut session = ModelSession::new(&model.model, &registry, &config).map_err(engine)?;
        if place == Place::Memory {
            let bytes = shared_bytes(&mut session, text).map_err(engine)?;
            let room = model.model.budget().reserve(Purpose::KvCache, bytes);
            drop(room.map_err(|refused| engine(refused.into()))?);
        }
        let mut interrupted = None;
        let watched = session.prefill(SeqId::ONLY, &tokens, &mut |_| {
            interrupted = Python::attach(|py| py.check_signals()).err();
            interrupted.is_none()
        });
        watched.map_err(engine)?;
        if let Some(interrupted) = interrupted {
            return Err(interrupted);
        }
        let origin = model.origin.of(&model.model, &config).map_err(engine)?;
        freeze(&mut session, text, &origin)
    })
}
