//! The exported functions of saved sessions and frozen prefixes.
#![allow(unsafe_code, non_camel_case_types)]
use super::{kvist_session, kvist_text_options, text_config, with_session};
use crate::ffi::{free, give, guard, out, reference, slice_mut, text};
use crate::handle::Handle;
use crate::session::Session;
use crate::status::{Failure, bad_file, kvist_status};
use kvist_engine::frozen::{FrozenPrefix, SharedPrefix};
use kvist_engine::kvist_cache::SeqId;
use kvist_engine::saved::SavedSession;
use std::ffi::c_char;
use std::path::Path;
use std::sync::Arc;

/// The beginning of texts with its K and V, in a file or in memory. Any number of threads may use it at once, and sessions and batches
/// keep what they need of it: it may be freed before them. A file must not change as long as one of them uses it.
pub struct kvist_prefix {
    prefix: SharedPrefix,
    /// A prefix is never in use; the handle is what `free` asks.
    idle: Handle<()>,
}

/// The prefix of a handle.
///
/// # Safety
/// `prefix` came from `kvist_prefix_open` and is not freed during the call, or is null: then there is none.
pub(crate) unsafe fn prefix_of(prefix: *const kvist_prefix) -> Option<Arc<FrozenPrefix>> {
    // SAFETY: as the caller promises.
    unsafe { prefix.as_ref() }.map(|handle| handle.prefix.clone())
}

/// Copies the tokens that a sequence has in the cache, and writes their number to `n_tokens`. The token that `kvist_session_next` gave
/// last is not among them: it is computed with the next pass. If `capacity` does not hold them all, it fails with
/// `KVIST_INVALID_ARGUMENT` and `n_tokens` says how many there are.
///
/// # Safety
/// `session` came from `kvist_session_new`, `tokens` holds `capacity` elements (null if that is 0), and `n_tokens` is a place
/// for the number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_tokens(
    session: *mut kvist_session,
    seq: u32,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let (tokens, n_tokens) =
            unsafe { (slice_mut(tokens, capacity, "tokens")?, out(n_tokens, "n_tokens")?) };
        let found = session.tokens(SeqId(seq))?;
        n_tokens.write(found.len());
        let Some(place) = tokens.get_mut(..found.len()) else {
            let n = found.len();
            return Err(Failure::argument(format!("the sequence has {n} tokens, tokens holds {capacity}")));
        };
        place.copy_from_slice(found);
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Writes a sequence to a file: its tokens with their K and V, and the token that `kvist_session_next` gave last. `path` has what it had
/// or the whole session afterwards, whatever happens, and a new file can be read by its owner alone. The session goes on.
/// `KVIST_BAD_FILE` if the file cannot be written.
///
/// # Safety
/// `session` came from `kvist_session_new`; `path` is null-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_save(
    session: *mut kvist_session,
    seq: u32,
    path: *const c_char,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    let run = |session: &mut Session| session.save(SeqId(seq), Path::new(unsafe { text(path, "path") }?));
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Goes on where a sequence was saved: puts its tokens into the empty sequence `seq`, and begins a text that `kvist_session_next` or
/// `kvist_session_prompt` continues. The next logits are the same to the bit, on the same machine with the same kvist. `n_resumed`
/// (may be null) gets the number of tokens that were not computed: all but the last (docs/formats/session.md has the exceptions).
/// Null `options` are those of `kvist_greedy`; `progress` is not called. `KVIST_BAD_FILE` if the file is torn, has changed, or
/// was made with other weights or storages: the text names the first difference. On an error the sequence is empty.
///
/// # Safety
/// `session` came from `kvist_session_new`, `path` is null-terminated, `options` is null or valid, `n_resumed` is null or a
/// place for the number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_resume(
    session: *mut kvist_session,
    seq: u32,
    path: *const c_char,
    options: *const kvist_text_options,
    n_resumed: *mut u32,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let (path, (config, _), n_resumed) =
            unsafe { (text(path, "path")?, text_config(options)?, n_resumed.as_mut()) };
        let saved = SavedSession::open(Path::new(path)).map_err(bad_file)?;
        let n = session.resume(SeqId(seq), &saved, config)?;
        if let Some(place) = n_resumed {
            *place = n;
        }
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Writes a sequence to a file that other sessions begin with, see `kvist_prefix_open`. The cache has to store it in order (any kind
/// but "ring"; the first sequence of its session). The session goes on.
///
/// # Safety
/// `session` came from `kvist_session_new`; `path` is null-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_freeze(
    session: *mut kvist_session,
    seq: u32,
    path: *const c_char,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    let run = |session: &mut Session| session.freeze(SeqId(seq), Path::new(unsafe { text(path, "path") }?));
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// As `kvist_session_freeze`, but without a file: sessions of this process that begin with `prefix` share its memory, which is freed when
/// the prefix and the last of them are freed, in any order. Until then it counts as memory of the model; `KVIST_OUT_OF_MEMORY` if there is no
/// room for it, `KVIST_UNSUPPORTED` on a GPU. On an error `prefix` is not written.
///
/// # Safety
/// `session` came from `kvist_session_new`, and `prefix` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_share(
    session: *mut kvist_session,
    seq: u32,
    prefix: *mut *mut kvist_prefix,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let place = unsafe { out(prefix, "prefix")? };
        let prefix = session.share(SeqId(seq))?;
        place.write(give(kvist_prefix { prefix, idle: Handle::new(()) }));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Opens a file of `kvist_session_freeze` or `kvist prefix freeze`. Reads it once and compares every hash; `KVIST_BAD_FILE` if it is
/// torn or has changed.
///
/// # Safety
/// `path` is null-terminated, and `prefix` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_prefix_open(
    path: *const c_char,
    prefix: *mut *mut kvist_prefix,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (path, place) = unsafe { (text(path, "path")?, out(prefix, "prefix")?) };
        let prefix = Arc::new(FrozenPrefix::open(Path::new(path)).map_err(bad_file)?);
        place.write(give(kvist_prefix { prefix, idle: Handle::new(()) }));
        Ok(())
    })
}

/// Frees a prefix. Its sessions go on; null is nothing.
///
/// # Safety
/// `prefix` is null, or came from `kvist_prefix_open` or `kvist_session_share`, was not freed before, and no other thread is using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_prefix_free(prefix: *mut kvist_prefix) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { free(prefix, |prefix| &prefix.idle) })
}

/// Begins the sequence `seq` of a new session with a prefix, which `kvist_session_prompt` continues. Its K and V are attended where they
/// are: all processes that use a file, and all sessions that use a prefix in memory, share one copy, and none computes it. On a GPU a session
/// copies them from a file that was frozen on a GPU. `n_begun` (may be null) gets the number of tokens that were not computed: all
/// (docs/formats/session.md has the exceptions). `KVIST_BAD_FILE` if the prefix was made with other
/// weights or storages. On an error the sequence is empty.
///
/// # Safety
/// `session` came from `kvist_session_new`, `prefix` from `kvist_prefix_open` or `kvist_session_share`; `n_begun` is null or a place for the number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_begin_with(
    session: *mut kvist_session,
    seq: u32,
    prefix: *const kvist_prefix,
    n_begun: *mut u32,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let (prefix, n_begun) = unsafe { (reference(prefix, "prefix")?, n_begun.as_mut()) };
        let n = session.begin_with(SeqId(seq), &prefix.prefix)?;
        if let Some(place) = n_begun {
            *place = n;
        }
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}
