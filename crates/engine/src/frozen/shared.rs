//! Frozen prefixes without a file's name, for the caches of one process.
use super::{BLOCK, FrozenPrefix, FrozenText, collect, image_layout, layer_sides, maps, no_images};
use crate::saved::{CacheRows, Origin, SideSpec, check_whole};
use crate::session::ModelSession;
use kvist_cache::SeqId;
use kvist_device::{MappedRows, Purpose};
use kvist_model::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A prefix that any number of sessions and engines of a process begin with, made by [`share`] or opened from a file. Its memory is
/// freed when the last handle and the last cache that began with it are gone, in any order.
pub type SharedPrefix = Arc<FrozenPrefix>;

/// What the header of the file takes at most, beside its text and its tensors.
const HEADER_BYTES: u64 = 8192;
/// What a tensor takes in the header, at most.
const TENSOR_BYTES: u64 = 512;
/// What a byte of the system message takes in the header, at most: it is escaped twice.
const ESCAPED_BYTES: u64 = 8;

/// Freezes sequence `seq` in the memory of this process, as [`freeze`](super::freeze) does it in a file: sessions that begin with it
/// attend the same bytes. The session may be full; it goes on, and is no user of the prefix.
///
/// The prefix counts in the model's budget as KV cache until its last user is gone. While it is made, one layer's K or V is in memory
/// beside it, and copied rows of layers with a window.
///
/// # Errors
/// As [`freeze`](super::freeze), and the budget or the system has no room: see [`shared_bytes`].
pub fn share(
    session: &mut ModelSession,
    seq: SeqId,
    text: FrozenText<'_>,
    origin: &Origin,
) -> Result<SharedPrefix, Error> {
    check_whole(session.config())?;
    let bytes = shared_bytes(session, text)?;
    let room = session.model().budget().reserve(Purpose::KvCache, bytes)?;
    let writer = collect(session, seq, text, origin)?;
    static MADE: AtomicU64 = AtomicU64::new(1);
    let name = format!("shared prefix {}", MADE.fetch_add(1, Ordering::Relaxed));
    Ok(Arc::new(writer.into_memory(&name, room)?))
}

/// The most bytes that [`share`] needs for `text`, if it is all that a sequence of `session` has: a few KiB more than the prefix keeps.
/// Nothing of it has to be computed yet.
///
/// # Errors
/// The device does not attend images of K and V.
pub fn shared_bytes(session: &mut ModelSession, text: FrozenText<'_>) -> Result<u64, Error> {
    let tokens = u32::try_from(text.tokens.len()).unwrap_or(u32::MAX);
    let rows = session.rows();
    image_layout(&rows).ok_or_else(no_images)?;
    let (config, model) = (rows.config, &rows.runner.model);
    // Words and rows that are copied are in the file, and beside it for those who copy them.
    let twice = |n: u32, sides: &[SideSpec]| {
        let width = 4 + sides.iter().map(|side| side.width() as u64).sum::<u64>();
        (2 * u64::from(n)).saturating_mul(width)
    };
    let mut bytes = twice(tokens, &[]);
    let mut tensors = 1;
    for (g, mapped) in maps(&rows, true).into_iter().enumerate() {
        let (sides, recent) = (rows.sides_of(g), rows.recent_sides_of(g));
        bytes = bytes.saturating_add(if mapped {
            image_bytes(&rows, g, tokens)?
        } else {
            let seen = config.groups(model.config())[g].visibility;
            // In whole blocks: the sinks, and what the last query sees.
            let most = |window: u32| window.saturating_add(seen.sinks).saturating_add(2 * BLOCK).min(tokens);
            let n = seen.window.map_or(tokens, most);
            twice(n, &sides)
        });
        // The f16 rows of the last token's group.
        let group = config.recent.of_storages(config.k, config.v).tokens;
        let newest =
            tokens.checked_sub(1).and_then(|last| last.checked_rem(group)).map_or(0, |before| before + 1);
        bytes = bytes.saturating_add(twice(newest, &recent));
        tensors += 2 + sides.len() + recent.len();
    }
    let system = text.system.map_or(0, |text| text.len() as u64);
    let header = HEADER_BYTES + TENSOR_BYTES * tensors as u64 + system.saturating_mul(ESCAPED_BYTES);
    Ok(bytes.saturating_add(header))
}

/// Images of a layer group, as the file has them.
fn image_bytes(rows: &CacheRows<'_>, g: usize, tokens: u32) -> Result<u64, Error> {
    let cells = tokens.checked_next_multiple_of(BLOCK).unwrap_or(u32::MAX);
    let mut bytes = 0u64;
    for side in layer_sides(rows.runner.model.layout(), g) {
        let image = rows.runner.network.pools().image_bytes(side.layer, side.side, cells)?;
        bytes = bytes.saturating_add(image.saturating_add(MappedRows::ALIGNMENT));
    }
    Ok(bytes)
}
