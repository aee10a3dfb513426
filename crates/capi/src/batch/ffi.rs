//! The exported functions of batches.
#![allow(unsafe_code, non_camel_case_types)]
mod job;
mod stats;

use self::job::{kvist_job, kvist_job_options, place_of};
use super::{Batch, Beside};
use crate::drafts::{drafts_of, kvist_draft_options};
use crate::ffi::{free, give, guard, optional_text, out, reference, slice, text};
use crate::handle::SharedHandle;
use crate::model::{kvist_model, model_of};
use crate::session::{kvist_prefix, prefix_of, storages};
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::memory::{CacheConfig, step_tokens};
use kvist_engine::serving::{EngineConfig, LoadRule, TierOptions, WriteTime};
use std::ffi::c_char;
use std::time::Duration;

/// A model that serves many texts at a time, in a thread of its own: continuous batching, chunked prefill, and a paged cache whose prefix
/// index shares equal beginnings. Any number of threads may use it at once. Its jobs outlive it.
pub struct kvist_batch(SharedHandle<Batch>);

/// How a batch stores K and V, what it computes at once, and the tiers below its cache. All zeros and nulls are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_batch_options {
    /// How K is stored, as in `kvist_session_options`; null is "f16", or as in the file of `prefix`.
    pub k: *const c_char,
    /// How V is stored; null is as K.
    pub v: *const c_char,
    /// Tokens that the cache holds, over all texts; 0 is 8192.
    pub context_tokens: u32,
    /// Positions that a query sees, in addition to the model's own windows; 0 is all.
    pub window: u32,
    /// First positions that stay visible outside of the window.
    pub sinks: u32,
    /// Sequences of the largest step; 0 is 32.
    pub max_batch: u32,
    /// Tokens of the largest step; longer prompts are read in chunks. 0 is 512, and over CUDA 1024.
    pub batch_tokens: u32,
    /// Tokens of a block of the cache; 0 is 16.
    pub block_tokens: u32,
    /// Order of the queue: "fcfs" (null), "sjf", "srpt", "edf", "laxity" or "priority".
    pub policy: *const c_char,
    /// Texts that may wait; more are refused with `KVIST_BUSY`. 0 is 4096.
    pub max_queue: usize,
    /// Do not share equal beginnings of prompts.
    pub no_prefix_index: bool,
    /// A prefix that is in the prefix index from the start, in whole blocks, and stays there; null is none.
    pub prefix: *const kvist_prefix,
    /// Which tokens stay of each text, as in `kvist_session_options`; null keeps all. A text may be longer than the cache then. There is no
    /// prefix index: texts share nothing. Not with `prefix` and tiers.
    pub keep: *const c_char,
    /// Bytes of this machine's memory for blocks that the cache evicts; 0 is no such tier. On a CPU a larger `context_tokens` does the same
    /// without copies.
    pub tier_ram_bytes: u64,
    /// Store blocks there as q8, half of what f16 takes. What is loaded is rounded, so texts can differ.
    pub tier_ram_packed: bool,
    /// A directory for blocks, which is created if it is missing; null is no such tier. What it has is found again by later processes. One
    /// batch at a time uses it. `KVIST_UNSUPPORTED` in a library that was built without its feature "disk-tier".
    pub tier_disk_dir: *const c_char,
    /// What the directory takes, all of it at once: at least 128 MiB.
    pub tier_disk_bytes: u64,
    /// The URL of a store that several machines share: redis://HOST:6379/PREFIX, s3://BUCKET/PREFIX?region=REGION or fs:///PATH; null is
    /// none. `KVIST_UNSUPPORTED` in a library that was built without its feature "shared-tier".
    pub tier_store: *const c_char,
    /// Copy blocks to the tiers shortly before they are evicted. Otherwise they are copied as soon as they are computed.
    pub tier_write_back: bool,
    /// Load all that a tier has. Otherwise what comes sooner than it would be computed.
    pub tier_load_always: bool,
    /// Milliseconds that a text waits for a tier to say what it has. A load may take this much longer than four times its estimate; then
    /// its tokens are computed. An operation of a disk or a shared store has as long, 2 s at least and 50 s at most. 0 is 250.
    pub tier_grace_ms: u32,
    /// Drafts: a step verifies whole ones of up to eight texts, and less for each of more. Not with `keep`.
    pub drafts: kvist_draft_options,
}

/// Runs `run` with the batch of a handle.
///
/// # Safety
/// `batch` is null, or came from `kvist_batch_new` and is not freed during the call.
pub(super) unsafe fn with_batch(
    batch: *const kvist_batch,
    run: impl FnOnce(&Batch) -> Outcome<()>,
) -> kvist_status {
    // SAFETY: as the caller promises.
    guard(|| unsafe { reference(batch, "batch") }?.0.with(run))
}

/// Tokens of the cache, and texts that may wait, unless options say otherwise: as for Python's `Batch`.
const CONTEXT_TOKENS: u32 = 8192;
const MAX_QUEUE: usize = 4096;
/// Sequences and tokens of the largest step; on some backends more tokens ([`step_tokens`]).
const MAX_BATCH: u32 = 32;
const BATCH_TOKENS: u32 = 512;

/// # Safety
/// Strings of the options are null or null-terminated, `prefix` is null or came from `kvist_prefix_open`, and `draft_model` is null or
/// came from `kvist_model_open`.
unsafe fn config_of(options: Option<&kvist_batch_options>, backend: &str) -> Outcome<(EngineConfig, Beside)> {
    let mut cache = CacheConfig { backend: backend.into(), ..CacheConfig::new(CONTEXT_TOKENS) };
    let batch_tokens = step_tokens(backend).max(BATCH_TOKENS);
    let mut beside = Beside { keep: None, prefix: None, tiers: TierOptions::default(), drafts: None };
    let Some(options) = options else {
        let mut config = EngineConfig::new(cache);
        (config.scheduler.max_batch, config.scheduler.max_batch_tokens) = (MAX_BATCH, batch_tokens);
        config.max_queue = MAX_QUEUE;
        return Ok((config, beside));
    };
    // SAFETY: as the caller promises.
    let (k, v, policy, keep, dir, store) = unsafe {
        (
            optional_text(options.k, "k")?,
            optional_text(options.v, "v")?,
            optional_text(options.policy, "policy")?,
            optional_text(options.keep, "keep")?,
            optional_text(options.tier_disk_dir, "tier_disk_dir")?,
            optional_text(options.tier_store, "tier_store")?,
        )
    };
    // SAFETY: as the caller promises.
    (beside.prefix, beside.drafts) = unsafe { (prefix_of(options.prefix), drafts_of(&options.drafts)?) };
    let or = |n: u32, otherwise: u32| if n == 0 { otherwise } else { n };
    match (&beside.prefix, k) {
        (Some(prefix), None) => super::as_in_file(&mut cache, prefix),
        _ => (cache.k, cache.v) = storages(k, None)?,
    }
    if let Some(v) = v {
        (_, cache.v) = storages(None, Some(v))?;
    }
    if cache.v.outliers {
        return Err(Failure::argument(format!(
            "v: {} is for keys alone; use {}",
            cache.v,
            cache.v.for_values()
        )));
    }
    cache.context_tokens = or(options.context_tokens, CONTEXT_TOKENS);
    cache.window = (options.window > 0).then_some(options.window);
    cache.sinks = options.sinks;
    let mut config = EngineConfig::new(cache);
    config.paged.block_tokens = or(options.block_tokens, config.paged.block_tokens);
    if options.no_prefix_index {
        config.paged.prefix = None;
    }
    config.scheduler.policy = policy.unwrap_or("fcfs").to_owned();
    config.scheduler.max_batch = or(options.max_batch, MAX_BATCH);
    config.scheduler.max_batch_tokens = or(options.batch_tokens, batch_tokens);
    config.max_queue = if options.max_queue == 0 { MAX_QUEUE } else { options.max_queue };
    let keep = keep.map(|keep| keep.parse().map_err(|why| Failure::argument(format!("keep: {why}"))));
    beside.keep = keep.transpose()?;
    beside.tiers = TierOptions {
        ram_bytes: options.tier_ram_bytes,
        ram_packed: options.tier_ram_packed,
        disk_dir: dir.map(Into::into),
        disk_bytes: options.tier_disk_bytes,
        store: store.map(str::to_owned),
        write: if options.tier_write_back { WriteTime::Back } else { WriteTime::Through },
        load: if options.tier_load_always { LoadRule::Always } else { LoadRule::Auto },
        grace_ms: match options.tier_grace_ms {
            0 => TierOptions::default().grace_ms,
            ms => ms.into(),
        },
    };
    Ok((config, beside))
}

/// Makes a batch and starts its thread. Null `options` are the defaults. What the cache takes at most is set aside in the model's budget, so
/// that no text is refused memory later. `KVIST_OUT_OF_MEMORY` if the cache, what the tiers take of memory, or a draft model does not fit;
/// `KVIST_BAD_FILE` if the prefix or the directory of a tier cannot be used. A shared store that cannot be reached now is no error: it costs
/// hits and no text. On an error nothing is started, but a directory of a tier may have been created.
///
/// # Safety
/// `model` came from `kvist_model_open`, `options` is null or valid: its strings are null or null-terminated, its `prefix` is null or came
/// from `kvist_prefix_open`, and its `draft_model` is null or came from `kvist_model_open`. `batch` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_new(
    model: *const kvist_model,
    options: *const kvist_batch_options,
    batch: *mut *mut kvist_batch,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (model, options, place) = unsafe { (model_of(model)?, options.as_ref(), out(batch, "batch")?) };
        // SAFETY: the caller keeps the contract above.
        let (config, beside) = unsafe { config_of(options, &model.backend) }?;
        let batch = Batch::start(model, config, beside)?;
        place.write(give(kvist_batch(SharedHandle::new(batch))));
        Ok(())
    })
}

/// Cancels what runs, ends the thread, and writes what is on its way to the tiers, for two seconds at most; then frees the batch. The
/// directory of a tier is free for another one then. Jobs stay: their texts end with `KVIST_CANCELLED`, unless they have ended. Null is
/// nothing. `KVIST_BUSY` if a call is using the batch: it is not freed then, and goes on.
///
/// # Safety
/// `batch` is null, or came from `kvist_batch_new`, was not freed before, and no call with it begins meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_free(batch: *mut kvist_batch) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { free(batch, |batch| &batch.0) })
}

/// Queues a prompt of tokens, and gives a job, whose text `kvist_job_next` returns. Never waits. Null `options` are the defaults.
/// `KVIST_BUSY` if as many texts wait as may. What the cache can never hold is told by `kvist_job_next`.
///
/// # Safety
/// `batch` came from `kvist_batch_new`, `tokens` has `n_tokens` elements, `options` is null or valid with all that it points to, and `job`
/// is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_submit_tokens(
    batch: *const kvist_batch,
    tokens: *const u32,
    n_tokens: usize,
    options: *const kvist_job_options,
    job: *mut *mut kvist_job,
) -> kvist_status {
    let run = |batch: &Batch| {
        // SAFETY: the caller keeps the contract above.
        let (tokens, (text, asked), place) =
            unsafe { (slice(tokens, n_tokens, "tokens")?, place_of(options)?, out(job, "job")?) };
        place.write(give(kvist_job::new(batch.submit(tokens, text, asked)?)?));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_batch(batch, run) }
}

/// `kvist_batch_submit_tokens` with a text, which is tokenized first, with the tokens that the model expects at the start of one.
///
/// # Safety
/// As `kvist_batch_submit_tokens`; `prompt` is null-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_submit(
    batch: *const kvist_batch,
    prompt: *const c_char,
    options: *const kvist_job_options,
    job: *mut *mut kvist_job,
) -> kvist_status {
    let run = |batch: &Batch| {
        // SAFETY: the caller keeps the contract above.
        let (prompt, (config, asked), place) =
            unsafe { (text(prompt, "prompt")?, place_of(options)?, out(job, "job")?) };
        place.write(give(kvist_job::new(batch.submit(&batch.encode(prompt)?, config, asked)?)?));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_batch(batch, run) }
}

/// Drops what the cache has of prompts under a salt, retained ones too; null is "". Blocks that texts use now stay until they are evicted.
/// What tiers have is not found any more: by this batch at once, and by others when they read the note that each tier gets. Waits for these
/// notes, two seconds at most. `deleted_blocks` (may be null) gets the number of blocks that left the cache, `pending_tiers` (may be null)
/// that of tiers that have not got their note yet. They get it when they work again, unless the batch is freed first; then other batches
/// find what such a tier has.
///
/// # Safety
/// `batch` came from `kvist_batch_new`, `salt` is null or null-terminated, the others are null or places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_forget(
    batch: *const kvist_batch,
    salt: *const c_char,
    deleted_blocks: *mut usize,
    pending_tiers: *mut usize,
) -> kvist_status {
    let run = |batch: &Batch| {
        // SAFETY: the caller keeps the contract above.
        let salt = unsafe { optional_text(salt, "salt") }?.unwrap_or_default();
        let (blocks, pending) = batch.forget(salt)?;
        for (place, n) in [(deleted_blocks, blocks), (pending_tiers, pending)] {
            if !place.is_null() {
                // SAFETY: not null; the caller keeps the contract above.
                unsafe { place.write(n) };
            }
        }
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_batch(batch, run) }
}

/// Gives the cache room for another number of tokens over all texts, rounded up to whole blocks, between two steps. Texts that run go on and
/// stay the same: what a smaller cache has no room for is evicted, or computed again. Copies to and from tiers may take `timeout_ms`
/// milliseconds to end. `capacity_tokens` (may be null) gets the new capacity. `KVIST_REFUSED` if a text that waits or runs needs more,
/// or copies took too long, `KVIST_OUT_OF_MEMORY` if the model's budget has no room: the capacity stays what it was.
///
/// # Safety
/// `batch` came from `kvist_batch_new`, `capacity_tokens` is null or a place for the number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_resize(
    batch: *const kvist_batch,
    tokens: u32,
    timeout_ms: u32,
    capacity_tokens: *mut u64,
) -> kvist_status {
    let run = |batch: &Batch| {
        let capacity = batch.resize(tokens, Duration::from_millis(timeout_ms.into()))?;
        if !capacity_tokens.is_null() {
            // SAFETY: not null; the caller keeps the contract above.
            unsafe { capacity_tokens.write(capacity) };
        }
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_batch(batch, run) }
}
