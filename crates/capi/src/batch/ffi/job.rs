//! The exported functions of jobs.
#![allow(unsafe_code, non_camel_case_types)]
use crate::batch::job::Job;
use crate::batch::{Place, stopped};
use crate::ffi::{free, guard, optional_text, out, reference};
use crate::handle::Handle;
use crate::session::{TextConfig, kvist_piece, kvist_text_options, shown, text_config};
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_scheduler::{MAX_TIERS, Retention};
use kvist_engine::serving::Canceller;
use std::ffi::c_char;
use std::time::Duration;

/// Most tiers that a batch can have.
pub const KVIST_MAX_TIERS: usize = 4;
const _: () = assert!(KVIST_MAX_TIERS == MAX_TIERS);

/// For timeouts: wait until there is something.
pub const KVIST_FOREVER: u32 = 0xFFFF_FFFF;

/// A text that a batch generates. One thread reads it at a time; any thread may cancel it meanwhile.
pub struct kvist_job {
    canceller: Canceller,
    job: Handle<Job>,
}

impl kvist_job {
    pub(super) fn new(job: Job) -> Outcome<Self> {
        let canceller = job.canceller().ok_or_else(stopped)?;
        Ok(kvist_job { canceller, job: Handle::new(job) })
    }
}

/// What a text asks of its batch. All zeros and nulls are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_job_options {
    /// How the text is generated; null is as `kvist_greedy`. Without `max_tokens` it ends when the cache is full.
    pub text: *const kvist_text_options,
    /// Only prompts with the same salt share cached beginnings; null is "". `kvist_batch_forget` drops what a salt has.
    pub salt: *const c_char,
    /// Larger is more urgent, with the policy "priority".
    pub priority: i32,
    /// Seconds that the prompt stays in the cache after its text has ended, in whole blocks, at most 2592000 (30 days); 0 retains nothing.
    pub retain_s: f64,
    /// Of retained prompts a smaller priority gives way first when room is short. Needs `retain_s`.
    pub retain_priority: u8,
    /// The retained prompt gives way last, and only to a text that could not be generated otherwise. Needs `retain_s`.
    pub retain_pin: bool,
}

/// What is known of a job, as of its last `kvist_job_next`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_job_info {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the text that `kvist_job_next` has returned.
    pub text_tokens: u32,
    /// Whether the batch has begun with it. Before, the figures below are 0.
    pub has_begun: bool,
    /// Tokens of the prompt that were not computed: the prefix index or a tier had them.
    pub cached_tokens: u32,
    /// Those of them that came from each tier, in the order of `kvist_batch_stats.tiers`.
    pub loaded_tokens: [u32; KVIST_MAX_TIERS],
}

/// As for `kvist serve`: 30 days.
const MAX_RETAIN_S: f64 = 2_592_000.0;

fn retention(options: &kvist_job_options) -> Outcome<Option<Retention>> {
    let kvist_job_options { retain_s, retain_priority: priority, retain_pin: pin, .. } = *options;
    match retain_s {
        0.0 if pin || priority > 0 => Err(Failure::argument(
            "retain_pin and retain_priority are about a retained prompt: give retain_s too, seconds",
        )),
        0.0 => Ok(None),
        s if s > 0.0 && s <= MAX_RETAIN_S => Ok(Some(Retention { ttl_ns: (s * 1e9) as u64, priority, pin })),
        s => Err(Failure::argument(format!(
            "retain_s is {s}: give seconds, at most {MAX_RETAIN_S}, or 0 to retain nothing"
        ))),
    }
}

/// # Safety
/// `options` is null, or valid with all that it points to.
pub(super) unsafe fn place_of(options: *const kvist_job_options) -> Outcome<(TextConfig, Place)> {
    // SAFETY: as the caller promises.
    let options = unsafe { options.as_ref() };
    let text = options.map_or(std::ptr::null(), |options| options.text);
    // SAFETY: as the caller promises.
    let (config, _) = unsafe { text_config(text) }?;
    let mut place = Place { salt: "".into(), priority: 0, retain: None };
    if let Some(options) = options {
        // SAFETY: as the caller promises.
        let salt = unsafe { optional_text(options.salt, "salt") }?;
        let retain = retention(options)?;
        place = Place { salt: salt.unwrap_or_default().into(), priority: options.priority, retain };
    }
    Ok((config, place))
}

/// Waits for the next token of a job's text, `timeout_ms` milliseconds at most: 0 looks and does not wait, `KVIST_FOREVER` waits until there
/// is one. A piece without a token and with `KVIST_GOES_ON` says that the time is up. After the text's end it keeps saying why it ended, or
/// why it failed: `KVIST_CACHE_FULL` if the cache can never hold prompt and answer, `KVIST_STOPPED` if too many tokens waited to be read,
/// `KVIST_INTERNAL_ERROR` if the model or the batch has failed. Tokens that are there already come before the end, also after a cancel.
///
/// # Safety
/// `job` came from `kvist_batch_submit` or `kvist_batch_submit_tokens`; `piece` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_job_next(
    job: *mut kvist_job,
    timeout_ms: u32,
    piece: *mut kvist_piece,
) -> kvist_status {
    let limit = match timeout_ms {
        KVIST_FOREVER => Duration::MAX,
        ms => Duration::from_millis(ms.into()),
    };
    let run = |job: &mut Job| {
        // SAFETY: the caller keeps the contract above.
        let piece = unsafe { out(piece, "piece") }?;
        let next = job.next(limit)?;
        piece.write(shown(&next, &mut job.piece));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { reference(job, "job") }?.job.with(run))
}

/// Writes what is known of a job.
///
/// # Safety
/// `job` came from `kvist_batch_submit` or `kvist_batch_submit_tokens`; `info` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_job_describe(
    job: *const kvist_job,
    info: *mut kvist_job_info,
) -> kvist_status {
    let run = |job: &mut Job| {
        // SAFETY: the caller keeps the contract above.
        let info = unsafe { out(info, "info") }?;
        let admitted = job.admitted.unwrap_or_default();
        info.write(kvist_job_info {
            prompt_tokens: job.n_prompt,
            text_tokens: job.n_tokens,
            has_begun: job.admitted.is_some(),
            cached_tokens: admitted.cached,
            loaded_tokens: admitted.loaded,
        });
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { reference(job, "job") }?.job.with(run))
}

/// Cancels a job, from any thread, also while another one waits for its next token: its memory is free before the next step of the batch,
/// and its text ends with `KVIST_CANCELLED`, unless it has ended before. The handle stays, and is to be freed.
///
/// # Safety
/// `job` came from `kvist_batch_submit` or `kvist_batch_submit_tokens`, and is not freed during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_job_cancel(job: *const kvist_job) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        unsafe { reference(job, "job") }?.canceller.cancel();
        Ok(())
    })
}

/// Cancels a job if its text has not ended, and frees it; null is nothing. It may be freed before or after its batch. `KVIST_BUSY` if a
/// thread waits for its next token: it is not freed then. Cancel it first.
///
/// # Safety
/// `job` is null, or came from `kvist_batch_submit` or `kvist_batch_submit_tokens`, was not freed before, and no call with it begins
/// meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_job_free(job: *mut kvist_job) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { free(job, |job| &job.job) })
}
