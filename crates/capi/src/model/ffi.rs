//! The exported functions of models.
#![allow(unsafe_code, non_camel_case_types)]
use super::Model;
use crate::ffi::{free, give, guard, optional_text, out, reference, slice_mut, text};
use crate::handle::Handle;
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_model::{LoadOptions, ModelFile};
use std::ffi::c_char;
use std::ptr::null;
use std::sync::Arc;

/// A loaded model. It never changes, so any number of threads may use it at once, and sessions keep what they need of it:
/// it may be freed before them.
pub struct kvist_model {
    model: Arc<Model>,
    /// A model is never in use; the handle is what `free` asks.
    idle: Handle<()>,
}

/// The model of a handle.
///
/// # Safety
/// `model` is null, or came from `kvist_model_open` and is not freed during `'a`.
pub(crate) unsafe fn model_of<'a>(model: *const kvist_model) -> Outcome<&'a Arc<Model>> {
    // SAFETY: as the caller promises.
    unsafe { reference(model, "model") }.map(|handle| &handle.model)
}

/// How a model is opened. All zeros are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_model_options {
    /// Threads that compute; 0 is one per core, shared by all models and caches of the process that say 0.
    pub threads: u32,
    /// Tokens of the longest text, for models whose rope depends on it (LongRoPE); 0 is their original context.
    pub context_tokens: u32,
    /// Bytes that the weights, all sessions of the model and its prefixes in memory may take together; 0 is no limit, and on a GPU
    /// what its driver says is free.
    pub memory_bytes: u64,
    /// Read the files instead of mapping them. Mapped files must not change while the model or a session of it is used.
    pub no_mmap: bool,
    /// Where it runs: null is "cpu"; or a GPU, in libraries that are built with the feature: "wgpu", "wgpu:1", "cuda", "cuda:1".
    /// Its sessions and batches are there, too.
    pub backend: *const c_char,
}

/// What a model's files say about it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_model_info {
    /// Tokens of its vocabulary: the length of a row of logits.
    pub vocab: u32,
    /// Decoder layers.
    pub n_layers: u32,
    /// Positions it was trained on.
    pub context_tokens: u32,
    /// Whether it has a tokenizer, so that texts can be used.
    pub has_tokenizer: bool,
}

/// Opens a model: a Hugging Face folder or a `.gguf` file. A null `path` is the small model embedded in the library. Null
/// `options` are the defaults.
///
/// # Safety
/// `path` is null or a null-terminated string, `options` is null or valid: its `backend` is null or a null-terminated string. `model` is
/// a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_model_open(
    path: *const c_char,
    options: *const kvist_model_options,
    model: *mut *mut kvist_model,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (path, options, model) =
            unsafe { (optional_text(path, "path")?, options.as_ref(), out(model, "model")?) };
        let file = path.map_or(ModelFile::Embedded, |path| ModelFile::Path(path.into()));
        let (threads, context, bytes, no_mmap) =
            options.map_or((0, 0, 0, false), |o| (o.threads, o.context_tokens, o.memory_bytes, o.no_mmap));
        // SAFETY: the caller keeps the contract above.
        let backend = unsafe { optional_text(options.map_or(null(), |o| o.backend), "backend")? };
        let load = LoadOptions {
            mmap: !no_mmap,
            context: (context > 0).then_some(context),
            ..LoadOptions::default()
        };
        let opened = Model::open(&file, &load, threads, bytes, backend.unwrap_or("cpu"))?;
        model.write(give(kvist_model { model: Arc::new(opened), idle: Handle::new(()) }));
        Ok(())
    })
}

/// Frees a model. Its sessions go on; null is nothing.
///
/// # Safety
/// `model` is null, or came from `kvist_model_open`, was not freed before, and no other thread is using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_model_free(model: *mut kvist_model) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { free(model, |model| &model.idle) })
}

/// Writes what the files of the model say.
///
/// # Safety
/// `model` came from `kvist_model_open`; `info` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_model_describe(
    model: *const kvist_model,
    info: *mut kvist_model_info,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (model, info) = unsafe { (model_of(model)?, out(info, "info")?) };
        let config = model.weights.config();
        info.write(kvist_model_info {
            vocab: config.vocab as u32,
            n_layers: config.n_layers as u32,
            context_tokens: config.context,
            has_tokenizer: model.weights.tokenizer().is_some(),
        });
        Ok(())
    })
}

/// Tokenizes `text` and writes the number of its tokens to `n_tokens`. Writes the tokens to `tokens` if `capacity` holds them
/// all; otherwise it fails with `KVIST_INVALID_ARGUMENT` and `n_tokens` says how many there are. With `special`, adds the
/// tokens that the model expects at the start of a text.
///
/// # Safety
/// `model` came from `kvist_model_open`, `text` is null-terminated, `tokens` holds `capacity` elements (null if that is 0),
/// and `n_tokens` is a place for the number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_model_tokenize(
    model: *const kvist_model,
    text: *const c_char,
    special: bool,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (model, text, tokens, n_tokens) = unsafe {
            let text = crate::ffi::text(text, "text")?;
            (model_of(model)?, text, slice_mut(tokens, capacity, "tokens")?, out(n_tokens, "n_tokens")?)
        };
        let found = model.tokenizer()?.encode(text, special)?;
        n_tokens.write(found.len());
        let Some(place) = tokens.get_mut(..found.len()) else {
            return Err(Failure::argument(format!(
                "the text has {} tokens, tokens holds {capacity}",
                found.len()
            )));
        };
        place.copy_from_slice(&found);
        Ok(())
    })
}

/// Writes the token of this name, such as `"</s>"`, to `token`. Fails with `KVIST_INVALID_ARGUMENT` if there is none.
///
/// # Safety
/// `model` came from `kvist_model_open`, `name` is null-terminated, and `token` is a place for the token.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_model_token(
    model: *const kvist_model,
    name: *const c_char,
    token: *mut u32,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (model, name, token) = unsafe { (model_of(model)?, text(name, "name")?, out(token, "token")?) };
        let found = model.tokenizer()?.token(name);
        token.write(found.ok_or_else(|| Failure::argument(format!("the vocabulary has no token `{name}`")))?);
        Ok(())
    })
}
