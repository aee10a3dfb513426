//! The exported functions that tell what a session has.
#![allow(unsafe_code)]
use super::{kvist_session, with_session};
use crate::drafts::{counts_of, kvist_speculation};
use crate::ffi::out;
use crate::session::Session;
use crate::status::kvist_status;
use kvist_engine::kvist_cache::SeqId;
use kvist_engine::speculate::Counts;

/// Writes the number of tokens that a sequence has in the cache. Those that `keep` has removed count.
///
/// # Safety
/// `session` came from `kvist_session_new`; `n_tokens` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_length(
    session: *mut kvist_session,
    seq: u32,
    n_tokens: *mut u32,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        unsafe { out(n_tokens, "n_tokens") }?.write(session.length(SeqId(seq))?);
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Writes the bytes of K and V that the session has reserved now: they follow the tokens in the cache, not its capacity.
///
/// # Safety
/// `session` came from `kvist_session_new`; `bytes` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_kv_bytes(
    session: *mut kvist_session,
    bytes: *mut u64,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        unsafe { out(bytes, "bytes") }?.write(session.session.kv_bytes());
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Writes how many tokens were removed so far because the session keeps only some (`keep`).
///
/// # Safety
/// `session` came from `kvist_session_new`; `n_tokens` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_removed_tokens(
    session: *mut kvist_session,
    n_tokens: *mut u64,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        unsafe { out(n_tokens, "n_tokens") }?.write(session.session.removed_tokens());
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Writes what drafts have achieved so far, over all sequences; all zeros without drafts.
///
/// # Safety
/// `session` came from `kvist_session_new`; `counts` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_speculation(
    session: *mut kvist_session,
    counts: *mut kvist_speculation,
) -> kvist_status {
    let run = |session: &mut Session| {
        let found = session.counts().map_or_else(|| counts_of(&Counts::default()), counts_of);
        // SAFETY: the caller keeps the contract above.
        unsafe { out(counts, "counts") }?.write(found);
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}
