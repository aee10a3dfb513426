//! The exported functions of steps.
#![allow(unsafe_code, non_camel_case_types)]
use crate::cache::ffi::{kvist_cache, kvist_copy, with_cache};
use crate::cache::{Cache, Given};
use crate::ffi::{out, slice};
use crate::session::parents_of;
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_cache::*;

/// New tokens of one sequence in a step.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_span {
    /// The sequence that they extend. A sequence has one span per step.
    pub seq: u32,
    /// Its next position.
    pub start: u32,
    /// At least 1.
    pub n_tokens: u32,
    /// For the nodes of a draft tree: `n_tokens` parents, each an earlier node or -1. Null for plain tokens.
    pub parents: *const i32,
}

/// `len` cells from `start` on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_run {
    /// First cell.
    pub start: u32,
    /// Number of cells.
    pub len: u32,
}

/// Which tokens of a span a commit keeps.
#[repr(C)]
pub enum kvist_keep {
    /// All; the nodes of a draft tree stay speculative, where nodes outlive their step.
    KVIST_KEEP_ALL = 0,
    /// The first `n` of a chain.
    KVIST_KEEP_FIRST = 1,
    /// A path of `n` nodes of the draft tree.
    KVIST_KEEP_PATH = 2,
}

const ALL: u32 = kvist_keep::KVIST_KEEP_ALL as u32;
const FIRST: u32 = kvist_keep::KVIST_KEEP_FIRST as u32;
const PATH: u32 = kvist_keep::KVIST_KEEP_PATH as u32;

/// What a commit keeps of one span.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_kept {
    /// A `kvist_keep`.
    pub keep: u32,
    /// Number of tokens, or of nodes in `path`.
    pub n: u32,
    /// `n` nodes from the root on; for `KVIST_KEEP_PATH` only.
    pub path: *const u32,
}

/// The block tables of one layer group, as paged attention kernels take them. The arrays are valid until the next call with
/// this cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_tables {
    /// `[n_tokens]`: the cell of each new token.
    pub slots: *const u32,
    /// Tokens of the step.
    pub n_tokens: usize,
    /// `[n_spans + 1]`: the first token of each span, then `n_tokens`.
    pub query_start: *const u32,
    /// `[n_spans]`: tokens of each sequence, the new ones included.
    pub kv_len: *const u32,
    /// Spans of the step.
    pub n_spans: usize,
    /// `[n_spans + 1]`: where the blocks of each span start, then their number.
    pub table_start: *const u32,
    /// Blocks in position order; `UINT32_MAX` where no query reads any.
    pub blocks: *const u32,
    /// `[n_spans + 1]`: where the mask of each span starts in `mask_bits`, in bits. Only draft trees have one.
    pub mask_start: *const u32,
    /// Row-major bits `[queries][nodes]`, in words of 32 from the lowest bit on.
    pub mask_bits: *const u32,
}

/// The one window that a step reads, if there is one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_window {
    /// Whether every query sees one stretch of cells in position order with the new ones at its end.
    pub exists: bool,
    /// Whether it is causal, aligned lower right; otherwise its only query sees all of it.
    pub causal: bool,
    /// The cells.
    pub cells: kvist_run,
}

/// # Safety
/// `spans` is null or has `n` elements, each with `n_tokens` parents or none.
unsafe fn with_request(
    cache: *mut kvist_cache,
    spans: *const kvist_span,
    n: usize,
    run: impl FnOnce(&mut Cache, &StepRequest<'_>) -> Outcome<()>,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: as the caller promises.
        let spans = unsafe { slice(spans, n, "spans") }?;
        let mut all_parents = Vec::with_capacity(n);
        for span in spans {
            let n = if span.parents.is_null() { 0 } else { span.n_tokens as usize };
            // SAFETY: as the caller promises.
            all_parents.push(parents_of(unsafe { slice(span.parents, n, "parents") }?)?);
        }
        let span = |(span, parents): (&kvist_span, _)| Span {
            seq: SeqId(span.seq),
            start: span.start,
            new: if span.parents.is_null() { New::Chain(span.n_tokens) } else { New::Tree(parents) },
        };
        let spans: Vec<Span<'_>> =
            spans.iter().zip(all_parents.iter().map(Vec::as_slice)).map(span).collect();
        run(cache, &StepRequest { spans: &spans })
    };
    // SAFETY: the cache is what the caller says.
    unsafe { with_cache(cache, run) }
}

/// Begins a step: chooses cells for new tokens of any number of sequences. A refusal changes nothing, and leaves no step in
/// flight.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `spans` has `n_spans` elements with valid parents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_begin(
    cache: *mut kvist_cache,
    spans: *const kvist_span,
    n_spans: usize,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_request(cache, spans, n_spans, |cache, request| cache.begin(request)) }
}

/// Whether `kvist_step_begin` would accept these spans: `KVIST_OK`, or what it would return.
///
/// # Safety
/// As `kvist_step_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_can_begin(
    cache: *mut kvist_cache,
    spans: *const kvist_span,
    n_spans: usize,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_request(cache, spans, n_spans, |cache, request| cache.can_run(request)) }
}

/// Gives the position of every token of the step, for rope. Valid until the next call with this cache.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_positions(
    cache: *mut kvist_cache,
    positions: *mut *const u32,
    n_tokens: *mut usize,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let (positions, n) = unsafe { (out(positions, "positions")?, out(n_tokens, "n_tokens")?) };
        cache.plan(|plan, given| {
            plan.positions(&mut given.numbers);
            positions.write(given.numbers.as_ptr());
            n.write(given.numbers.len());
            Ok(())
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Gives the cell of every token of the step in one layer group, and the number of cells that the memory of the group must have
/// for it. Valid until the next call with this cache.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_writes(
    cache: *mut kvist_cache,
    group: u32,
    cells: *mut *const u32,
    n_tokens: *mut usize,
    cells_end: *mut u32,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let (cells, n, end) =
            unsafe { (out(cells, "cells")?, out(n_tokens, "n_tokens")?, out(cells_end, "cells_end")?) };
        cache.group(group, |_, group, given| {
            given.numbers.clear();
            given.numbers.extend(group.writes.iter().flat_map(|run| run.cells()));
            cells.write(given.numbers.as_ptr());
            n.write(given.numbers.len());
            end.write(group.cells_end);
            Ok(())
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Hands copies to C.
fn give_copies(given: &mut Given, copies: &[CellCopy]) -> (*const kvist_copy, usize) {
    given.copies.clear();
    given.copies.extend(copies.iter().map(|&CellCopy { from, to, len }| kvist_copy { from, to, len }));
    (given.copies.as_ptr(), copies.len())
}

/// Gives the copies that must be made in one layer group before the step's writes. Valid until the next call with this cache.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_copies(
    cache: *mut kvist_cache,
    group: u32,
    copies: *mut *const kvist_copy,
    n_copies: *mut usize,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let (copies, n) = unsafe { (out(copies, "copies")?, out(n_copies, "n_copies")?) };
        cache.group(group, |_, group, given| {
            let (first, len) = give_copies(given, &group.copies);
            copies.write(first);
            n.write(len);
            Ok(())
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Gives a dense mask of one layer group: `mask[token * n_cells + cell]` says whether a token of the step sees a cell.
/// `n_cells` reaches to the highest cell in use, not to the capacity. Valid until the next call with this cache.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_mask(
    cache: *mut kvist_cache,
    group: u32,
    mask: *mut *const bool,
    n_tokens: *mut usize,
    n_cells: *mut usize,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let (mask, n_tokens, n_cells) =
            unsafe { (out(mask, "mask")?, out(n_tokens, "n_tokens")?, out(n_cells, "n_cells")?) };
        cache.group(group, |plan, group, given| {
            group.reads.explicit(plan.n_tokens(), group.cells_end, &mut given.mask);
            mask.write(given.mask.as_ptr());
            n_tokens.write(plan.n_tokens() as usize);
            n_cells.write(group.cells_end as usize);
            Ok(())
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Writes the window that the step reads in one layer group, where a kernel without a mask can be used.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `window` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_window(
    cache: *mut kvist_cache,
    group: u32,
    window: *mut kvist_window,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let place = unsafe { out(window, "window") }?;
        cache.group(group, |_, group, _| {
            let window = group.reads.as_window();
            let run = window.map_or(CellRun { start: 0, len: 0 }, |window| window.run);
            place.write(kvist_window {
                exists: window.is_some(),
                causal: window.is_some_and(|window| window.causal),
                cells: kvist_run { start: run.start, len: run.len },
            });
            Ok(())
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Writes the block tables of one layer group, for blocks of `block_tokens`. For caches without a backend: "paged", whose blocks
/// have 16 tokens or any divisor, and other kinds where the cells of each sequence happen to be whole blocks. Otherwise
/// `KVIST_UNSUPPORTED`.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `tables` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_tables(
    cache: *mut kvist_cache,
    group: u32,
    block_tokens: u32,
    tables: *mut kvist_tables,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let place = unsafe { out(tables, "tables") }?;
        let tables = cache.tables(group, block_tokens)?;
        place.write(kvist_tables {
            slots: tables.slots.as_ptr(),
            n_tokens: tables.slots.len(),
            query_start: tables.query_start.as_ptr(),
            kv_len: tables.kv_len.as_ptr(),
            n_spans: tables.kv_len.len(),
            table_start: tables.table_start.as_ptr(),
            blocks: tables.blocks.as_ptr(),
            mask_start: tables.mask_start.as_ptr(),
            mask_bits: tables.mask_bits.as_ptr(),
        });
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Says that a layer has run in the caller's kernels. For caches without a backend; every layer must, before the commit.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_layer_ran(cache: *mut kvist_cache, layer: u32) -> kvist_status {
    let run = |cache: &mut Cache| match u16::try_from(layer) {
        Ok(layer) => cache.layer_ran(LayerId(layer)),
        Err(_) => Err(Failure::argument(format!("there is no layer {layer}"))),
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// # Safety
/// `kept` is null or has `n` elements with valid paths.
unsafe fn with_kept(
    cache: *mut kvist_cache,
    kept: *const kvist_kept,
    n: usize,
    run: impl FnOnce(&mut Cache, Option<&[Kept<'_>]>) -> Outcome<()>,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        if kept.is_null() && n == 0 {
            return run(cache, None);
        }
        // SAFETY: as the caller promises.
        let kept = unsafe { slice(kept, n, "kept") }?;
        let mut paths = Vec::with_capacity(n);
        for kept in kept {
            let n = if kept.keep == PATH { kept.n as usize } else { 0 };
            // SAFETY: as the caller promises.
            let path = unsafe { slice(kept.path, n, "path") }?;
            paths.push(path.iter().map(|node| NodeId(*node)).collect::<Vec<_>>());
        }
        let mut all = Vec::with_capacity(n);
        for (kept, path) in kept.iter().zip(&paths) {
            all.push(match kept.keep {
                ALL => Kept::All,
                FIRST => Kept::First(kept.n),
                PATH => Kept::Path(path),
                other => return Err(Failure::argument(format!("keep is {other}: use a kvist_keep"))),
            });
        }
        run(cache, Some(&all))
    };
    // SAFETY: the cache is what the caller says.
    unsafe { with_cache(cache, run) }
}

/// Gives the copies that a commit of `kept` needs in one layer group, after every layer has run: the nodes of a kept path move
/// to the cells of a chain. They run in their order. For caches without a backend, kind "paged"; empty elsewhere. Valid until
/// the next call with this cache.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `kept` has `n_kept` elements with valid paths; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_kept_copies(
    cache: *mut kvist_cache,
    kept: *const kvist_kept,
    n_kept: usize,
    group: u32,
    copies: *mut *const kvist_copy,
    n_copies: *mut usize,
) -> kvist_status {
    let run = |cache: &mut Cache, kept: Option<&[Kept<'_>]>| {
        // SAFETY: the caller keeps the contract above.
        let (copies, n) = unsafe { (out(copies, "copies")?, out(n_copies, "n_copies")?) };
        let mut moves = MovePlan::default();
        if let Some(kept) = kept {
            cache.kept_moves(kept, &mut moves)?;
        }
        let of_group = moves.groups().iter().find(|(of, _)| u32::from(of.0) == group);
        let (first, len) = give_copies(&mut cache.given, of_group.map_or(&[], |(_, copies)| copies));
        copies.write(first);
        n.write(len);
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_kept(cache, kept, n_kept, run) }
}

/// Commits the step in flight: its tokens become part of their sequences. `kept` says per span what stays, the rest leaves
/// nothing behind; null with 0 keeps all. Refused with `KVIST_WRONG_ORDER` unless every layer has run. After an error the step
/// is still in flight.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `kept` is null or has `n_kept` elements with valid paths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_commit(
    cache: *mut kvist_cache,
    kept: *const kvist_kept,
    n_kept: usize,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_kept(cache, kept, n_kept, |cache, kept| cache.commit(kept)) }
}

/// Drops the step in flight, if any: the cache is as it was before the step.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_step_drop(cache: *mut kvist_cache) -> kvist_status {
    let run = |cache: &mut Cache| {
        cache.in_flight = false;
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}
