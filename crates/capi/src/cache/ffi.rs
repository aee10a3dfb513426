//! The exported functions of caches without a model: building them, and sequences between steps.
#![allow(unsafe_code, non_camel_case_types)]
use super::{Bytes, Cache};
use crate::ffi::{free, give, guard, optional_text, out, reference, slice};
use crate::handle::Handle;
use crate::model::{budget, compute};
use crate::session::storages;
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::devices;
use kvist_engine::kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_engine::kvist_cache::{CellCopy, GroupId, LayerId, LayerOrder, NodeId, Refused, SeqId, StepPlan};
use kvist_engine::kvist_device::{LayerSpec, Layout, PoolSpec, Recent};
use kvist_engine::memory::{RECENT_SEQUENCES, RECENT_TOKENS};
use std::ffi::{c_char, c_int, c_void};

/// A cache without a model: which cell holds which token, and with a backend also the K and V, with attention over them. At
/// most one step is in flight; everything else waits until it is committed or dropped. A second thread that uses the cache at
/// the same time gets `KVIST_BUSY`. Kinds with one sequence call it 0; the others start without sequences.
pub struct kvist_cache(Handle<Cache>);

/// One decoder layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_layer {
    /// The layer group whose cells it reads: layers with the same window share one.
    pub group: u16,
    /// The layer whose K and V it reads: itself, or a lower one of the same group.
    pub owner: u16,
    /// Heads of K and V.
    pub n_kv_heads: u32,
    /// Elements of a row of Q, K and V.
    pub head_dim: u32,
}

/// One group of layers, with a cell space of its own.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_group {
    /// Tokens that it holds over all sequences. A ring computes its own number.
    pub capacity_tokens: u32,
    /// Positions that a query sees, its own included; 0 is all.
    pub window: u32,
    /// First positions that stay visible outside of the window.
    pub sinks: u32,
}

/// What a cache is made of.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_cache_options {
    /// "contiguous", "ring", "cells", "tree" or "paged".
    pub kind: *const c_char,
    /// "cpu" or "reference" for attention over K and V that the cache stores; null for bookkeeping alone.
    pub backend: *const c_char,
    /// How K is stored: as in `kvist_session_options`. With a backend only.
    pub k: *const c_char,
    /// How V is stored; null is as K. With a backend only.
    pub v: *const c_char,
    /// `n_layers` layers.
    pub layers: *const kvist_layer,
    /// At least 1.
    pub n_layers: usize,
    /// `n_groups` layer groups.
    pub groups: *const kvist_group,
    /// At least 1.
    pub n_groups: usize,
    /// Heads of Q, a multiple of every layer's KV heads. With a backend only.
    pub n_heads: u32,
    /// Tokens of the largest step; 0 is 256.
    pub max_step_tokens: u32,
    /// Threads that compute; 0 is one per core, shared with everything else that says 0.
    pub threads: u32,
    /// Bytes that K, V and scratch may take; 0 is no limit.
    pub memory_bytes: u64,
    /// Tokens by which the memory of K and V grows at least, up to the capacity: a power of two (others are rounded up), 256 or
    /// more; 0 is 256. With the backend "cpu" only.
    pub min_chunk_tokens: u32,
}

/// Copies `len` cells, from `from` on to `to` on, in every layer of a group. They never overlap.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_copy {
    /// First cell that is read.
    pub from: u32,
    /// First cell that is written.
    pub to: u32,
    /// Number of cells.
    pub len: u32,
}

/// How full a layer group is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_occupancy {
    /// Cells in total.
    pub capacity_cells: u32,
    /// Cells that hold tokens or nodes; in "paged" all cells of blocks in use.
    pub used_cells: u32,
    /// One past the highest cell in use.
    pub high_water: u32,
    /// Cells per block; 0 in kinds without blocks.
    pub block_tokens: u32,
}

/// Runs `run` with the cache of a handle.
///
/// # Safety
/// `cache` is null, or came from `kvist_cache_new` and is not freed during the call.
pub(crate) unsafe fn with_cache(
    cache: *const kvist_cache,
    run: impl FnOnce(&mut Cache) -> Outcome<()>,
) -> kvist_status {
    // SAFETY: as the caller promises.
    guard(|| unsafe { reference(cache, "cache") }?.0.with(run))
}

/// What the options describe, checked.
struct Parts<'a> {
    kind: &'a str,
    backend: Option<&'a str>,
    layers: Vec<LayerSpec>,
    groups: Vec<GroupSpec>,
}

/// # Safety
/// The options are valid with all that they point to.
unsafe fn parts<'a>(options: &kvist_cache_options) -> Outcome<Parts<'a>> {
    let max_step_tokens = max_step_tokens(options);
    // SAFETY: as the caller promises.
    let (kind, backend, layers, groups) = unsafe {
        let kind = crate::ffi::text(options.kind, "kind")?;
        let backend = optional_text(options.backend, "backend")?;
        let layers = slice(options.layers, options.n_layers, "layers")?;
        (kind, backend, layers, slice(options.groups, options.n_groups, "groups")?)
    };
    if groups.is_empty() || layers.is_empty() || u16::try_from(layers.len().max(groups.len())).is_err() {
        return Err(Failure::argument("a cache has 1 to 65535 layers, in 1 to 65535 groups"));
    }
    for (l, layer) in layers.iter().enumerate() {
        if usize::from(layer.group) >= groups.len() {
            let (group, n) = (layer.group, groups.len());
            return Err(Failure::argument(format!("layer {l} is in group {group}, and there are {n}")));
        }
        if usize::from(layer.owner) > l || layers[usize::from(layer.owner)].owner != layer.owner {
            let owner = layer.owner;
            return Err(Failure::argument(format!(
                "layer {l} borrows from {owner}, which is no owner below it"
            )));
        }
    }
    let spec = |layer: &kvist_layer| {
        LayerSpec::new(GroupId(layer.group), LayerId(layer.owner), layer.n_kv_heads, layer.head_dim)
    };
    let group = |group: &kvist_group| GroupSpec {
        capacity_tokens: group.capacity_tokens,
        visibility: Visibility {
            window: (group.window > 0).then_some(group.window),
            sinks: if group.window > 0 { group.sinks } else { 0 },
        },
        max_step_tokens,
    };
    let (layers, groups) = (layers.iter().map(spec).collect(), groups.iter().map(group).collect());
    Ok(Parts { kind, backend, layers, groups })
}

fn max_step_tokens(options: &kvist_cache_options) -> u32 {
    if options.max_step_tokens == 0 { 256 } else { options.max_step_tokens }
}

/// Makes an empty cache.
///
/// # Safety
/// `options` is valid with all that it points to; `cache` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_new(
    options: *const kvist_cache_options,
    cache: *mut *mut kvist_cache,
) -> kvist_status {
    guard(|| {
        // SAFETY: the caller keeps the contract above.
        let (options, cache) = unsafe { (reference(options, "options")?, out(cache, "cache")?) };
        // SAFETY: as above.
        let Parts { kind, backend, layers, groups } = unsafe { parts(options) }?;
        let owners: Vec<LayerId> = layers.iter().map(|layer| layer.owner).collect();
        let bytes = match backend {
            None => {
                let spaces: Result<Vec<_>, _> =
                    groups.iter().map(|group| kinds::build(kind, group)).collect();
                let spaces = spaces.map_err(|why| Failure::argument(why.to_string()))?;
                let cache = kvist_engine::kvist_cache::Cache::new(spaces);
                let order = LayerOrder::new(owners.iter().copied());
                Bytes::Caller { cache, plan: StepPlan::default(), order }
            }
            Some(backend) => {
                // SAFETY: as above.
                let (k, v) = unsafe { (optional_text(options.k, "k")?, optional_text(options.v, "v")?) };
                let (k, v) = storages(k, v)?;
                let many = kinds::traits(kind).is_some_and(|kind| kind.many_sequences);
                let spec = PoolSpec {
                    layout: Layout { n_heads: options.n_heads, layers },
                    k,
                    v,
                    capacity_cells: Vec::new(),
                    max_step_tokens: max_step_tokens(options),
                    budget: budget(options.memory_bytes),
                    channels: None,
                    recent: Recent {
                        tokens: RECENT_TOKENS,
                        sequences: if many { RECENT_SEQUENCES } else { 1 },
                    },
                };
                let registry = devices::growing_by(&compute(options.threads)?, options.min_chunk_tokens);
                Bytes::Pools(registry.session(backend, kind, &groups, &spec)?)
            }
        };
        let made = Cache::new(bytes, owners, options.n_heads as usize);
        cache.write(give(kvist_cache(Handle::new(made))));
        Ok(())
    })
}

/// Frees a cache; null is nothing. `KVIST_BUSY` if a call is using it: it is not freed then.
///
/// # Safety
/// `cache` is null, or came from `kvist_cache_new`, was not freed before, and no call with it begins meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_free(cache: *mut kvist_cache) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    guard(|| unsafe { free(cache, |cache| &cache.0) })
}

/// Makes an empty sequence.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_open(cache: *mut kvist_cache, seq: u32) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, |cache| Ok(cache.sequences()?.seq_new(SeqId(seq))?)) }
}

/// Shares positions `from..until` of `src` with `dst`, without copying a byte; 0 and `UINT32_MAX` fork it. `dst` is made if it
/// does not exist, and continues where the range ends.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_copy(
    cache: *mut kvist_cache,
    src: u32,
    dst: u32,
    from: u32,
    until: u32,
) -> kvist_status {
    let run = |cache: &mut Cache| Ok(cache.sequences()?.seq_cp(SeqId(src), SeqId(dst), from, until)?);
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Removes positions `from..until` of a sequence; with 0 and `UINT32_MAX` the sequence itself.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_remove(
    cache: *mut kvist_cache,
    seq: u32,
    from: u32,
    until: u32,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, |cache| Ok(cache.sequences()?.seq_rm(SeqId(seq), from, until)?)) }
}

/// Removes every other sequence, and the positions of `seq` outside of `from..until`.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_keep(
    cache: *mut kvist_cache,
    seq: u32,
    from: u32,
    until: u32,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, |cache| Ok(cache.sequences()?.seq_keep(SeqId(seq), from, until)?)) }
}

/// Shortens a sequence to its first `n_tokens`, in every kind that can; a ring only to 0.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_truncate(
    cache: *mut kvist_cache,
    seq: u32,
    n_tokens: u32,
) -> kvist_status {
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, |cache| cache.truncate(SeqId(seq), n_tokens)) }
}

/// Makes a path of the draft nodes of `seq` part of the sequence and frees the other nodes; an empty path discards them all.
/// Only in kind "tree", where nodes outlive their step.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `path` has `n_nodes` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_accept(
    cache: *mut kvist_cache,
    seq: u32,
    path: *const u32,
    n_nodes: usize,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let path = unsafe { slice(path, n_nodes, "path") }?;
        cache.accept(SeqId(seq), &path.iter().map(|node| NodeId(*node)).collect::<Vec<_>>())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Removes every sequence. Kinds with one sequence have it again, empty.
///
/// # Safety
/// `cache` came from `kvist_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_clear(cache: *mut kvist_cache) -> kvist_status {
    let run = |cache: &mut Cache| {
        cache.idle()?.clear();
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Writes the tokens that a sequence holds, and the position of its next token. They differ where tokens were removed from
/// the middle or have left a window.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; the others are places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_length(
    cache: *mut kvist_cache,
    seq: u32,
    n_tokens: *mut u32,
    next_position: *mut u32,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let (n_tokens, next) = unsafe { (out(n_tokens, "n_tokens")?, out(next_position, "next_position")?) };
        let (cache, seq) = (cache.idle()?, SeqId(seq));
        let held = cache.seq_len(seq).zip(cache.next_position(seq)).ok_or(Refused::UnknownSequence(seq))?;
        n_tokens.write(held.0);
        next.write(held.1);
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Writes how full a layer group is.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `occupancy` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_occupancy(
    cache: *mut kvist_cache,
    group: u32,
    occupancy: *mut kvist_occupancy,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let occupancy = unsafe { out(occupancy, "occupancy") }?;
        let reports = cache.idle()?.report();
        let report = reports.get(group as usize).ok_or_else(|| {
            Failure::argument(format!("there is no layer group {group}: there are {}", reports.len()))
        })?;
        occupancy.write(kvist_occupancy {
            capacity_cells: report.capacity_cells,
            used_cells: report.used_cells,
            high_water: report.high_water,
            block_tokens: report.blocks.map_or(0, |blocks| blocks.block_tokens),
        });
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Writes the bytes of K and V that a cache with a backend has reserved now; 0 without one.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `bytes` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_kv_bytes(cache: *mut kvist_cache, bytes: *mut u64) -> kvist_status {
    let run = |cache: &mut Cache| {
        // SAFETY: the caller keeps the contract above.
        let bytes = unsafe { out(bytes, "bytes") }?;
        bytes.write(match &cache.bytes {
            Bytes::Caller { .. } => 0,
            Bytes::Pools(session) => session.pools().bytes(),
        });
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}

/// Makes `n_copies` copies of cells in all layers of a group; 0 stops.
pub type kvist_copy_cells = Option<
    unsafe extern "C" fn(user: *mut c_void, group: u32, copies: *const kvist_copy, n_copies: usize) -> c_int,
>;

/// Moves every sequence into one run of cells, as far as shared cells permit. A cache with a backend moves K and V itself;
/// for one without, `copy` does, round by round, and must not use the cache. If it stops with 0, finished rounds stay, and
/// everything is still readable: `KVIST_STOPPED`.
///
/// # Safety
/// `cache` came from `kvist_cache_new`; `copy` is null or takes these arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_cache_compact(
    cache: *mut kvist_cache,
    copy: kvist_copy_cells,
    user: *mut c_void,
) -> kvist_status {
    let run = |cache: &mut Cache| {
        if copy.is_none() && matches!(cache.bytes, Bytes::Caller { .. }) {
            return Err(Failure::argument("copy is null, and only the caller can copy its K and V"));
        }
        let mut copies = Vec::new();
        cache.compact(|group, cells| {
            copies.clear();
            copies.extend(cells.iter().map(|&CellCopy { from, to, len }| kvist_copy { from, to, len }));
            // SAFETY: the caller gave a function that takes these arguments.
            copy.is_none_or(|copy| unsafe { copy(user, group.0.into(), copies.as_ptr(), copies.len()) != 0 })
        })
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_cache(cache, run) }
}
