//! A prompt's beginning in a file, with its K and V as the pools of a device store them: programs map the file into memory and
//! attend it in place. However many processes use it, there is one copy in memory, and none of them computes it. The caches of one
//! process need no file on a disk for that: a [`SharedPrefix`] lies in memory.
//!
//! Layer groups that see everything are mapped. Of groups with a window the file has the rows that later queries see, in whole
//! blocks, which a prefix index shares; every process copies those. Devices that do not attend files in place, as GPUs, have rows
//! of all groups in their files: they are copied to the device, and not computed there. docs/formats/prefix.md describes the file.
mod file;
mod memory;
mod shared;

pub use file::FrozenPrefix;
pub use shared::{SharedPrefix, share, shared_bytes};

use crate::saved::{CacheRows, GroupRows, Origin, Rows, check_whole, ends, shortest_cut};
use crate::serving::tiers::maker;
use crate::session::ModelSession;
use kvist_cache::kinds::Visibility;
use kvist_cache::{BlockId, GroupId, Moment, Pin, Prompt, Refused, SeqId};
use kvist_device::{DeviceError, Layout, MappedRows, MappedSide, Side};
use kvist_model::Error;
use kvist_model::template::{ChatTemplate, Message};
use kvist_model::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Arc;

/// The beginning of prompts, as it is frozen.
#[derive(Clone, Copy, Debug)]
pub struct FrozenText<'a> {
    pub tokens: &'a [u32],
    /// The system message that the tokens begin a conversation with; `None` for plain text.
    pub system: Option<&'a str>,
}

/// What questions may begin with: a token of the system message that depends on the question is not frozen.
const QUESTIONS: [&str; 5] = ["0", "Z", " a", "\n", "é"];

/// The tokens that every conversation with this system message begins with, to freeze them.
///
/// # Errors
/// The template refuses a system message, or its prompts do not begin with it.
pub fn system_tokens(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    system: &str,
) -> Result<Vec<u32>, Error> {
    let mut common: Option<Vec<u32>> = None;
    for question in QUESTIONS {
        let messages = [Message::new("system", system), Message::new("user", question)];
        let tokens = tokenizer.encode(&template.render(&messages, tokenizer, true)?, false)?;
        let same = common
            .as_ref()
            .map_or(tokens.len(), |common| common.iter().zip(&tokens).take_while(|(a, b)| a == b).count());
        common = Some(tokens[..same].to_vec());
    }
    common.filter(|tokens| !tokens.is_empty()).ok_or_else(|| {
        Error::Usage(
            "this model's prompts do not begin with the system message: freeze plain text (--raw)".into(),
        )
    })
}

/// Images have whole blocks of cells, and files have the rows of whole blocks of positions.
const BLOCK: u32 = 16;

/// Whether the file of a text that ends at `end` has this position before it. It is one that the query there sees, or lies in a block
/// with one: a prefix index shares whole blocks, whose other tokens are seen by queries of shorter texts.
fn is_in_file(visibility: Visibility, end: u32, position: u32) -> bool {
    let begin = position - position % BLOCK;
    visibility.window.is_none_or(|window| {
        let first = (end + 1).saturating_sub(window);
        begin < visibility.sinks || position >= first - first % BLOCK
    })
}

/// The layers of group `g` that own K and V, twice: once for K, once for V.
fn layer_sides(layout: &Layout, g: usize) -> impl Iterator<Item = MappedSide> + '_ {
    let of_group = move |layer: &kvist_device::LayerSpec| usize::from(layer.group.0) == g;
    let owners = layout.owners().filter(move |(_, layer)| of_group(layer));
    owners.flat_map(|(l, _)| {
        let layer = kvist_cache::LayerId(l as u16);
        [Side::K, Side::V].map(|side| MappedSide { layer, side, first: 0, finite: true })
    })
}

/// Whether each layer group is mapped: with `images` those that see all positions, whose pools can begin with a file.
fn maps(rows: &CacheRows<'_>, images: bool) -> Vec<bool> {
    let groups = rows.config.groups(rows.runner.model.config());
    groups.iter().map(|group| images && group.visibility.window.is_none()).collect()
}

/// How the device stores what files have in place; `None`: it copies rows.
fn image_layout(rows: &CacheRows<'_>) -> Option<&'static str> {
    rows.runner.network.pools().image_layout()
}

/// Freezes sequence `seq`, whose tokens are those of `text`: writes its K and V to `path`, as a whole or not at all. The session may
/// be full.
///
/// # Errors
/// The sequence has other tokens, or gaps that a query at its end sees; its cells are not in order where layers are mapped, or the file
/// cannot be written.
pub fn freeze(
    session: &mut ModelSession,
    seq: SeqId,
    text: FrozenText<'_>,
    origin: &Origin,
    path: &Path,
) -> Result<(), Error> {
    collect(session, seq, text, origin)?.write(path)
}

/// The parts of a prefix, copied out of a cache.
fn collect(
    session: &mut ModelSession,
    seq: SeqId,
    text: FrozenText<'_>,
    origin: &Origin,
) -> Result<file::Writer, Error> {
    check_whole(session.config())?;
    let stored = session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
    if stored as usize != text.tokens.len() || stored == 0 {
        let n = text.tokens.len();
        return Err(Error::Usage(format!(
            "the cache stores {stored} positions, and the prefix has {n} tokens"
        )));
    }
    let (k, v) = (session.config().k, session.config().v);
    let origin = &origin.in_cache(session.model(), k)?;
    let maker = maker(&session.model().device().numerics());
    let mut rows = session.rows();
    let layout = image_layout(&rows);
    let mut writer = file::Writer::new(text, stored, (origin, maker), layout);
    let mapped = maps(&rows, layout.is_some());
    let places = rows.places(seq, stored, |visibility, position| is_in_file(visibility, stored, position));
    let is_in_order = |places: &[(u32, u32)]| places.iter().copied().eq((0..stored).map(|at| (at, at)));
    if places.iter().zip(&mapped).any(|(places, mapped)| *mapped && !is_in_order(places)) {
        return Err(Error::Usage(
            "this cache does not store the prefix in order: freeze it in a new cache of --kind paged".into(),
        ));
    }
    for g in (0..mapped.len()).filter(|g| mapped[*g]) {
        for side in layer_sides(rows.runner.model.layout(), g) {
            let image = rows.runner.network.pools().image(side.layer, side.side, stored);
            writer.image(side, image?);
        }
    }
    let groups = rows.config.groups(rows.runner.model.config());
    for (g, places) in places.iter().enumerate().filter(|(g, _)| !mapped[*g]) {
        let copied = rows.copy_rows(g, places)?;
        if !copied.have_all_seen_at(stored, groups[g].visibility) {
            return Err(Error::Usage(
                "tokens in the middle of the text were removed from the cache: such a text cannot be frozen"
                    .into(),
            ));
        }
        writer.rows(g, &rows.sides_of(g), (k, v), copied);
    }
    for (g, recent) in rows.copy_recent(seq, stored)?.into_iter().enumerate() {
        writer.recent(g, &rows.recent_sides_of(g), recent);
    }
    Ok(writer)
}

fn no_images() -> Error {
    DeviceError::Unsupported(
        "caches on this device cannot share a prefix in memory, because it does not attend K and V of a file in place: freeze \
         it to a file, which is copied to the device, or use the CPU"
            .into(),
    )
    .into()
}

/// Begins the empty sequence `seq` of a new session with a frozen prefix. Returns how many of its tokens need not be computed:
/// at most `most`, and as many as can be continued as if they had been computed here ([`saved::resume`](crate::saved::resume)).
/// On `Err` the session is empty.
///
/// # Errors
/// The prefix depends on something else ([`FrozenPrefix::check`]), the kind of cache does not store positions in order, the
/// cache has no room, or the file cannot be mapped.
pub fn begin_with(
    session: &mut ModelSession,
    seq: SeqId,
    prefix: &FrozenPrefix,
    origin: &Origin,
    most: usize,
) -> Result<usize, Error> {
    prefix.check(&origin.in_cache(session.model(), session.config().k)?)?;
    check_whole(session.config())?;
    match session.cache().next_position(seq) {
        Some(0) => {}
        Some(_) => return Err(Error::Usage(format!("sequence {seq} has tokens: a prefix comes first"))),
        None => return Err(Refused::UnknownSequence(seq).into()),
    }
    // The file takes the place of the first cells, also of those behind the prefix that end its last block.
    if session.report().iter().any(|group| group.used_cells > 0) {
        return Err(Error::Usage("another sequence of this session has tokens: a prefix comes first".into()));
    }
    crate::check_prompt(session.config(), prefix.tokens().len())?;
    session.check_tokens(prefix.tokens())?;
    let most = most.min(prefix.tokens().len()) as u32;
    let mut rows = session.rows();
    let begun = Parts::of(&rows, prefix).and_then(|parts| place(&mut rows, seq, (prefix, &parts), most));
    match begun {
        Ok((n, shortest)) if n > 0 => session.cache().set_shortest_cut(seq, shortest),
        _ => session.clear()?,
    }
    begun.map(|(n, _)| n)
}

/// A prefix that requests of a serving engine may begin with.
pub struct EnginePrefix {
    pub prefix: SharedPrefix,
    /// The salt of these requests: salts share nothing.
    pub salt: Arc<str>,
    /// What the engine's cache depends on.
    pub origin: Origin,
}

/// What the prefix index of an engine has of a frozen prefix.
pub(crate) struct IndexedPrefix {
    pub pin: Pin,
    salt: Arc<str>,
    tokens: Box<[u32]>,
    block_tokens: u32,
}

impl IndexedPrefix {
    /// How many tokens of a prompt with this salt it can supply: whole blocks.
    pub fn supplies(&self, salt: &str, prompt: &[u32]) -> u32 {
        let is_same = |(a, b): &(&u32, &u32)| a == b;
        let common =
            if *self.salt == *salt { self.tokens.iter().zip(prompt).take_while(is_same).count() } else { 0 };
        // No longer than the prefix, whose length is a u32.
        common as u32 / self.block_tokens * self.block_tokens
    }
}

/// Puts the whole blocks of a prefix into the prefix index of an empty cache, for requests with its salt. They are not
/// evicted as long as the returned prefix lives. On `Err` the cache is not to be used.
///
/// # Errors
/// As [`begin_with`]; and the cache has no prefix index, or the prefix has less than a block.
pub(crate) fn index(
    rows: &mut CacheRows<'_>,
    of: &EnginePrefix,
    block_tokens: u32,
) -> Result<IndexedPrefix, Error> {
    let (prefix, seq, at) = (&of.prefix, SeqId(0), Moment { now_ns: 0 });
    prefix.check(&of.origin.in_cache(&rows.runner.model, rows.config.k)?)?;
    let refused = |what: &str| Error::Usage(format!("{}: {what}", prefix.name()));
    crate::check_prompt(rows.config, prefix.tokens().len()).map_err(|error| match error {
        Error::PromptTooLong { tokens, context } => refused(&format!(
            "the prefix has {tokens} tokens and the cache holds {context}: give --context {} or more, with room for prompts",
            tokens + 1
        )),
        other => other,
    })?;
    rows.runner.check_tokens(prefix.tokens())?;
    let n = rows.config.cut_before(prefix.tokens().len() as u32) / block_tokens * block_tokens;
    if n == 0 {
        let len = prefix.tokens().len();
        return Err(refused(&format!("the prefix has {len} tokens, less than a block of {block_tokens}")));
    }
    let prompt = Prompt::Tokens(prefix.tokens()[..n as usize].to_vec());
    let no_index = || refused("the cache has no prefix index");
    rows.cache.prefixes().ok_or_else(no_index)?.open_again(seq, &of.salt, &prompt.content(n), at)?;
    // A paged cache knows by itself what windows have left behind.
    let parts = Parts::of(rows, prefix)?;
    let (placed, _) = place(rows, seq, (prefix, &parts), n)?;
    if placed == 0 {
        let len = prefix.tokens().len();
        return Err(refused(&format!(
            "requests begin with whole blocks of {block_tokens}, and where the last one of these {len} tokens ends, they would see \
             what a window has left behind: freeze a text with so many tokens more or fewer that it ends with a block"
        )));
    }
    if !parts.fill_blocks(rows, seq, block_tokens) {
        return Err(refused(&format!(
            "requests share whole blocks of {block_tokens}, and of some the file lacks tokens that a window has left behind, because an \
             older kvist wrote it, or it is for blocks of {BLOCK}: freeze the text again, and use blocks of {BLOCK}"
        )));
    }
    rows.cache.prefixes().ok_or_else(no_index)?.store(seq, &prompt.content(n), at)?;
    let groups = (0..rows.runner.model.layout().n_groups()).map(|g| GroupId(g as u16));
    let blocks = groups.flat_map(|group| {
        let table = rows.cache.block_table(group, seq).unwrap_or_default();
        table.into_iter().flatten().map(move |block| BlockId { group, block })
    });
    let blocks: Vec<BlockId> = blocks.collect();
    let pin = rows.cache.pin(&blocks)?;
    rows.cache.sequences().ok_or_else(no_index)?.seq_rm(seq, 0, u32::MAX)?;
    let tokens = prefix.tokens()[..n as usize].into();
    Ok(IndexedPrefix { pin, salt: of.salt.clone(), tokens, block_tokens })
}

/// What a prefix has for each layer group.
struct Parts {
    groups: Vec<GroupRows>,
    recent: Vec<Rows>,
    /// Sides that are mapped.
    sides: Vec<MappedSide>,
}

impl Parts {
    fn of(rows: &CacheRows<'_>, prefix: &FrozenPrefix) -> Result<Self, Error> {
        prefix.check_layout(image_layout(rows))?;
        let mut parts = Parts { groups: Vec::new(), recent: Vec::new(), sides: Vec::new() };
        for (g, mapped) in maps(rows, prefix.has_images()).into_iter().enumerate() {
            parts.groups.push(if mapped {
                for side in layer_sides(rows.runner.model.layout(), g) {
                    parts.sides.push(prefix.side(side)?);
                }
                GroupRows::InPlace
            } else {
                GroupRows::Copied(prefix.rows(g, &rows.sides_of(g))?)
            });
            parts.recent.push(prefix.recent_rows(g, &rows.recent_sides_of(g))?);
        }
        Ok(parts)
    }

    /// Whether every block of `seq`, which ends with a block, has the rows of all its tokens.
    fn fill_blocks(&self, rows: &CacheRows<'_>, seq: SeqId, block_tokens: u32) -> bool {
        (0..).zip(&self.groups).all(|(g, group)| {
            let table = rows.cache.block_table(GroupId(g), seq).unwrap_or_default();
            let used = (0..).zip(table).filter(|(_, block)| block.is_some());
            used.flat_map(|(i, _)| i * block_tokens..(i + 1) * block_tokens)
                .all(|position| group.has(position))
        })
    }
}

/// Places the first tokens of a prefix, at most `most`. Returns how many are there, and to how few they can be cut. The sequence is to be
/// cleared if there are none.
fn place(
    rows: &mut CacheRows<'_>,
    seq: SeqId,
    (prefix, parts): (&FrozenPrefix, &Parts),
    most: u32,
) -> Result<(usize, u32), Error> {
    let Parts { groups, recent, sides } = parts;
    let ends = ends(rows.config, rows.runner.model.config(), most, (groups, recent));
    let Some(&n) = ends.first() else { return Ok((0, 0)) };
    if !rows.place_rows(seq, n, groups)? {
        return Ok((0, 0));
    }
    if !sides.is_empty() {
        let mapped = MappedRows {
            file: prefix.file(),
            len: prefix.len(),
            cells: prefix.cells(),
            sides: sides.clone(),
            memory: prefix.memory(),
        };
        rows.runner.network.pools_mut().map(&mapped)?;
    }
    if !rows.place_recent(seq, n, recent)? {
        return Ok((0, 0));
    }
    let specs = rows.config.groups(rows.runner.model.config());
    Ok((n as usize, shortest_cut(&specs, groups, n)))
}
