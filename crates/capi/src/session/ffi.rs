//! The exported functions of sessions.
#![allow(unsafe_code, non_camel_case_types)]
mod figures;
mod files;

pub(crate) use files::{kvist_prefix, prefix_of};

use super::{Piece, Session, TextConfig, kvist_finish, storages};
use crate::drafts::{drafts_of, kvist_draft_options};
use crate::ffi::{free, give, guard, optional_text, out, reference, slice, text};
use crate::handle::Handle;
use crate::model::{kvist_model, model_of};
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_cache::{NodeId, SeqId};
use kvist_engine::memory::{CacheConfig, step_tokens};
use kvist_engine::sampler::SamplerConfig;
use kvist_engine::session::{LogitRows, SequenceInput};
use std::ffi::{c_char, c_int, c_void};

/// A model with a cache of its own, for one sequence or a batch of them. Different sessions may be used by different threads
/// at once; a second thread that uses this one meanwhile gets `KVIST_BUSY`. Kinds with one sequence call it 0; in the others,
/// sequence 0 exists from the start.
pub struct kvist_session(Handle<Session>);

/// How a session stores K and V. All zeros and nulls are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_session_options {
    /// "contiguous" (default), "ring", "cells", "tree" or "paged".
    pub kind: *const c_char,
    /// How K is stored: "f32", "f16" (default), "bf16", "q8", "q4", "t4", with suffixes as in `kvist run --kv`.
    pub k: *const c_char,
    /// How V is stored; null is as K.
    pub v: *const c_char,
    /// Tokens that the cache holds over all sequences; 0 is 4096. A ring computes its own number.
    pub context_tokens: u32,
    /// Tokens of the largest pass; longer prompts are read in chunks. 0 is 256, and over CUDA 1024.
    pub max_step_tokens: u32,
    /// Rows of logits that one pass computes at most; 0 is 1.
    pub max_rows: u32,
    /// Positions that a query sees, in addition to the model's own windows; 0 is all. A ring needs it.
    pub window: u32,
    /// First positions that stay visible outside of the window.
    pub sinks: u32,
    /// Which tokens stay of a text that outgrows its cache, such as "sinks=4,recent=1024,top=2048"; null keeps all. Others are removed, so
    /// answers change. `context_tokens` is then the longest text, and 0 the model's context. For kinds "cells", "tree" and
    /// "paged" (null is "cells"); the session has one sequence, and neither saves nor resumes.
    pub keep: *const c_char,
    /// Drafts: texts come sooner, and stay the same. A null `kind` is "tree" where drafts are trees. Not with `keep`.
    pub drafts: kvist_draft_options,
}

/// How a text is generated. `kvist_greedy` gives a valid one to start from.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_text_options {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Keep the K most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 drops none.
    pub min_p: f32,
    /// Divides the logits of tokens that the text has already; 1 is off.
    pub repetition_penalty: f32,
    /// The same seed and options give the same text.
    pub seed: u64,
    /// Tokens to generate at most; 0 is no limit.
    pub max_tokens: u32,
    /// Go on after tokens that end a text.
    pub ignore_end: bool,
    /// `n_stop` strings that end the text; null if `n_stop` is 0.
    pub stop: *const *const c_char,
    /// Number of stop strings.
    pub n_stop: usize,
    /// Called after every chunk of the prompt, with the tokens read so far and those of the prompt. 0 stops the prompt. Null
    /// is never called. It must not use the session. Batches never call it.
    pub progress: Option<unsafe extern "C" fn(user: *mut c_void, done: usize, total: usize) -> c_int>,
    /// Passed to `progress`.
    pub user: *mut c_void,
}

/// The next token of a text.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_piece {
    /// The token; only if `has_token`.
    pub token: u32,
    /// Whether there is a token. At the end of a text there may be none.
    pub has_token: bool,
    /// Whether the text has ended, and why.
    pub finish: kvist_finish,
    /// Text that is now final, in UTF-8, `text_bytes` long and followed by a zero byte: whole characters, no part of a stop
    /// string. Often empty. Never null; valid until the next call with this session or job.
    pub text: *const c_char,
    /// Length of `text`.
    pub text_bytes: usize,
}

/// New tokens of one sequence in a pass.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_input {
    /// The sequence that they extend.
    pub seq: u32,
    /// `n_tokens` tokens.
    pub tokens: *const u32,
    /// At least 1.
    pub n_tokens: usize,
    /// For the nodes of a draft tree: the parent of each, an earlier node or -1. Null for plain tokens.
    pub parents: *const i32,
}

/// Which rows of a pass get logits.
#[repr(C)]
pub enum kvist_rows {
    /// None.
    KVIST_NO_ROWS = 0,
    /// The last token of every input.
    KVIST_LAST_ROWS = 1,
    /// Every token.
    KVIST_ALL_ROWS = 2,
}

/// Runs `run` with the session of a handle.
///
/// # Safety
/// `session` is null, or came from `kvist_session_new` and is not freed during the call.
pub(super) unsafe fn with_session(
    session: *const kvist_session,
    run: impl FnOnce(&mut Session) -> Outcome<()>,
) -> kvist_status {
    // SAFETY: as the caller promises.
    guard(|| unsafe { reference(session, "session") }?.0.with(run))
}

/// Parents of draft nodes: -1 is the committed end.
pub(crate) fn parents_of(parents: &[i32]) -> Outcome<Vec<Option<NodeId>>> {
    let parent = |&parent: &i32| match parent {
        -1 => Ok(None),
        node => u32::try_from(node).map(|node| Some(NodeId(node))).map_err(|_| {
            Failure::argument(format!("parents has {node}: a parent is an earlier node, or -1 for none"))
        }),
    };
    parents.iter().map(parent).collect()
}

/// Makes an empty session. Null `options` are the defaults. Its whole memory bound is set aside in the model's budget, so that
/// a session that has started is never refused memory later.
///
/// # Safety
/// `model` came from `kvist_model_open`, `options` is null or valid: its strings are null or null-terminated, and its `draft_model` is null
/// or came from `kvist_model_open`. `session` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_new(
    model: *const kvist_model,
    options: *const kvist_session_options,
    session: *mut *mut kvist_session,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (model, options, session) =
            unsafe { (model_of(model)?, options.as_ref(), out(session, "session")?) };
        let (backend, max_step_tokens) = (model.backend.clone(), step_tokens(&model.backend));
        let mut config = CacheConfig { backend, max_step_tokens, ..CacheConfig::new(4096) };
        let mut drafts = None;
        if let Some(options) = options {
            // SAFETY: valid options hold null-terminated strings or nulls.
            let (kind, k, v, keep) = unsafe {
                let (kind, k) = (optional_text(options.kind, "kind")?, optional_text(options.k, "k")?);
                (kind, k, optional_text(options.v, "v")?, optional_text(options.keep, "keep")?)
            };
            (config.k, config.v) = storages(k, v)?;
            if let Some(keep) = keep {
                let keep = keep.parse().map_err(|why| Failure::argument(format!("keep: {why}")))?;
                (config.keep, config.kind) = (Some(keep), "cells".into());
                config.context_tokens = model.weights.config().context;
            }
            config.kind = kind.unwrap_or(&config.kind).to_owned();
            let or = |n: u32, otherwise: u32| if n == 0 { otherwise } else { n };
            config.context_tokens = or(options.context_tokens, config.context_tokens);
            config.max_step_tokens =
                or(options.max_step_tokens, config.max_step_tokens).min(config.context_tokens);
            config.max_rows = or(options.max_rows, config.max_rows);
            config.window = (options.window > 0).then_some(options.window);
            config.sinks = options.sinks;
            // SAFETY: as above; the caller keeps the contract for `draft_model`.
            drafts = unsafe { drafts_of(&options.drafts) }?;
            if let Some(drafts) = &drafts {
                drafts.prepare(&mut config, kind.is_some())?;
            }
        }
        session.write(give(kvist_session(Handle::new(Session::new(model, &config, drafts)?))));
        Ok(())
    })
}

/// Frees a session; null is nothing. `KVIST_BUSY` if a call is using it: it is not freed then.
///
/// # Safety
/// `session` is null, or came from `kvist_session_new`, was not freed before, and no call with it begins meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_free(session: *mut kvist_session) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { free(session, |session| &session.0) })
}

/// Options that always take the most likely token, without a limit or stop strings.
#[unsafe(no_mangle)]
pub extern "C" fn kvist_greedy() -> kvist_text_options {
    kvist_text_options {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        seed: 0,
        max_tokens: 0,
        ignore_end: false,
        stop: std::ptr::null(),
        n_stop: 0,
        progress: None,
        user: std::ptr::null_mut(),
    }
}

/// # Safety
/// `options` is null, or valid with all that it points to.
pub(crate) unsafe fn text_config(
    options: *const kvist_text_options,
) -> Outcome<(TextConfig, kvist_text_options)> {
    // SAFETY: as the caller promises.
    let options = unsafe { options.as_ref() }.copied().unwrap_or_else(|| kvist_greedy());
    // SAFETY: as the caller promises.
    let stop = unsafe { slice(options.stop, options.n_stop, "stop") }?;
    // SAFETY: as the caller promises.
    let stop = stop.iter().map(|stop| unsafe { text(*stop, "a stop string") }.map(str::to_owned));
    let sampler = SamplerConfig {
        temperature: options.temperature,
        top_k: options.top_k as usize,
        top_p: options.top_p,
        min_p: options.min_p,
        repetition_penalty: options.repetition_penalty,
        repetition_window: usize::MAX,
        seed: options.seed,
        ..SamplerConfig::greedy()
    };
    let kvist_text_options { max_tokens, ignore_end, .. } = options;
    Ok((TextConfig { sampler, max_tokens, stop: stop.collect::<Result<_, _>>()?, ignore_end }, options))
}

/// Adds tokens to a sequence, and begins a text that `kvist_session_next` continues. If the sequence has a text already, the
/// new one continues it. Null `options` are those of `kvist_greedy`. On an error the sequence is as it was, with two exceptions:
/// after `KVIST_STOPPED` what was read stays; and where a prompt fails behind its first chunk and a window has passed over what was there
/// before it, in rings and paged caches, the sequence is empty, has no text, and the text of the error says so.
///
/// # Safety
/// `session` came from `kvist_session_new`, `tokens` has `n_tokens` elements, `options` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_prompt_tokens(
    session: *mut kvist_session,
    seq: u32,
    tokens: *const u32,
    n_tokens: usize,
    options: *const kvist_text_options,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let (tokens, (config, options)) =
            unsafe { (slice(tokens, n_tokens, "tokens")?, text_config(options)?) };
        session.prompt(SeqId(seq), tokens, config, &mut |done, total| match options.progress {
            // SAFETY: the caller gave a function that takes these arguments.
            Some(progress) => unsafe { progress(options.user, done, total) != 0 },
            None => true,
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// `kvist_session_prompt_tokens` with a text, which is tokenized first. At the start of a sequence it gets the tokens that the
/// model expects there.
///
/// # Safety
/// As `kvist_session_prompt_tokens`; `text` is null-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_prompt(
    session: *mut kvist_session,
    seq: u32,
    text: *const c_char,
    options: *const kvist_text_options,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let (text, (config, options)) = unsafe { (crate::ffi::text(text, "text")?, text_config(options)?) };
        let starts = session.length(SeqId(seq))? == 0;
        let tokens = session.encode(text, starts)?;
        session.prompt(SeqId(seq), &tokens, config, &mut |done, total| match options.progress {
            // SAFETY: the caller gave a function that takes these arguments.
            Some(progress) => unsafe { progress(options.user, done, total) != 0 },
            None => true,
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// A piece for C, whose text lives as long as `text` is not changed.
pub(crate) fn shown(piece: &Piece, text: &mut String) -> kvist_piece {
    let text_bytes = text.len();
    text.push('\0');
    kvist_piece {
        token: piece.token.unwrap_or_default(),
        has_token: piece.token.is_some(),
        finish: piece.finish,
        text: text.as_ptr().cast(),
        text_bytes,
    }
}

/// Generates the next token of a sequence's text. After the text's end it keeps saying why it ended. With drafts a pass may give several
/// tokens: then the next calls compute nothing.
///
/// # Safety
/// `session` came from `kvist_session_new`; `piece` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_next(
    session: *mut kvist_session,
    seq: u32,
    piece: *mut kvist_piece,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let piece = unsafe { out(piece, "piece") }?;
        let next = session.next(SeqId(seq))?;
        piece.write(shown(&next, &mut session.piece));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// One pass over new tokens of any number of sequences, for callers that choose tokens themselves. `rows` says which rows get
/// logits. Texts of these sequences end. On an error the cache is as it was.
///
/// # Safety
/// `session` came from `kvist_session_new`; `inputs` has `n_inputs` elements with valid arrays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_forward(
    session: *mut kvist_session,
    inputs: *const kvist_input,
    n_inputs: usize,
    rows: u32,
) -> kvist_status {
    let run = |session: &mut Session| {
        const NONE: u32 = kvist_rows::KVIST_NO_ROWS as u32;
        const LAST: u32 = kvist_rows::KVIST_LAST_ROWS as u32;
        const ALL: u32 = kvist_rows::KVIST_ALL_ROWS as u32;
        let rows = match rows {
            NONE => LogitRows::None,
            LAST => LogitRows::LastOfEach,
            ALL => LogitRows::All,
            other => return Err(Failure::argument(format!("rows is {other}: use a kvist_rows"))),
        };
        // SAFETY: the caller keeps the contract above.
        let inputs = unsafe { slice(inputs, n_inputs, "inputs") }?;
        let mut all_parents = Vec::with_capacity(inputs.len());
        for input in inputs.iter() {
            let n = if input.parents.is_null() { 0 } else { input.n_tokens };
            // SAFETY: as above; a tree has one parent per token.
            all_parents.push(parents_of(unsafe { slice(input.parents, n, "parents") }?)?);
        }
        let mut sequences = Vec::with_capacity(inputs.len());
        for (input, parents) in inputs.iter().zip(&all_parents) {
            // SAFETY: as above.
            let tokens = unsafe { slice(input.tokens, input.n_tokens, "tokens") }?;
            let parents = (!input.parents.is_null()).then_some(&parents[..]);
            sequences.push(SequenceInput { seq: SeqId(input.seq), tokens, parents });
        }
        session.forward(&sequences, rows)
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// The logits of the last pass: `n_rows` rows of `vocab` values, in the order of the inputs. They are not copied: valid until
/// the next call with this session.
///
/// # Safety
/// `session` came from `kvist_session_new`; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_logits(
    session: *mut kvist_session,
    logits: *mut *const f32,
    n_rows: *mut usize,
    vocab: *mut usize,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let (logits, n_rows, vocab) =
            unsafe { (out(logits, "logits")?, out(n_rows, "n_rows")?, out(vocab, "vocab")?) };
        logits.write(session.session.logits().as_ptr());
        n_rows.write(session.session.n_rows());
        vocab.write(session.session.model().config().vocab);
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}

/// Makes an empty sequence.
///
/// # Safety
/// `session` came from `kvist_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_open(session: *mut kvist_session, seq: u32) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, |session| session.open(SeqId(seq))) }
}

/// Makes `to` a copy of the sequence `from` and of its text. No K and V are copied. `to` must not exist.
///
/// # Safety
/// `session` came from `kvist_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_fork(session: *mut kvist_session, from: u32, to: u32) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, |session| session.fork(SeqId(from), SeqId(to))) }
}

/// Shortens a sequence to its first `n_tokens` and ends its text. Refused by rings, and where tokens that a window would see again are gone:
/// in paged caches, and before the end of what a file has given. To 0 tokens it always works.
///
/// # Safety
/// `session` came from `kvist_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_rollback(
    session: *mut kvist_session,
    seq: u32,
    n_tokens: u32,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, |session| session.rollback(SeqId(seq), n_tokens)) }
}

/// Removes a sequence. Cells that no other sequence uses are free then.
///
/// # Safety
/// `session` came from `kvist_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_remove(session: *mut kvist_session, seq: u32) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, |session| session.remove(SeqId(seq))) }
}

/// Makes a path of the draft nodes of `seq` part of the sequence and frees the other nodes; an empty path discards them all.
/// Only in kind "tree", where nodes outlive their pass.
///
/// # Safety
/// `session` came from `kvist_session_new`; `path` has `n_nodes` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_session_accept(
    session: *mut kvist_session,
    seq: u32,
    path: *const u32,
    n_nodes: usize,
) -> kvist_status {
    let run = |session: &mut Session| {
        // SAFETY: the caller keeps the contract above.
        let path: Vec<NodeId> = unsafe { slice(path, n_nodes, "path") }?.iter().map(|n| NodeId(*n)).collect();
        session.accept(SeqId(seq), &path)
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_session(session, run) }
}
