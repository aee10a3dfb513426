//! Sessions in files: the tokens of a text with their K and V, and what they depend on.
//!
//! A file is resumed only if everything that K and V depend on is the same ([`Origin`]) and every byte is as it was
//! written. Anything else is refused and says what differs; nothing is ever reused in part.
//!
//! The file has K and V by position and not by cell, so that it can be resumed in another kind of cache. docs/formats/session.md
//! describes it.
mod copy;
mod file;
mod origin;
mod recent;

pub use file::SavedSession;
pub(crate) use file::{
    FileFormat, HEADER, HEADER_HASH, le_bytes, positions_name, recent_name, recent_positions_name, replace,
    side_name, tensor_type, words_of,
};
pub use origin::{CacheOrigin, LateOrigin, Origin};
pub(crate) use recent::{ends, shortest_cut};

use crate::memory::CacheConfig;
use crate::session::ModelSession;
pub(crate) use copy::{CacheRows, GroupRows, Rows, SideSpec};
use kvist_cache::kinds::Visibility;
use kvist_cache::{Refused, SeqId};
use kvist_model::Error;
use kvist_model::template::Message;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Who wrote a message, and what: for models with a chat template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMessage {
    pub role: String,
    pub content: String,
}

impl From<&Message> for SavedMessage {
    fn from(message: &Message) -> Self {
        SavedMessage { role: message.role.clone(), content: message.content.clone() }
    }
}
impl From<&SavedMessage> for Message {
    fn from(message: &SavedMessage) -> Self {
        Message::new(&message.role, &message.content)
    }
}

/// A text as it is saved.
#[derive(Clone, Copy, Debug)]
pub struct SavedText<'a> {
    /// The tokens of the text. The sequence stores K and V of the first of them, of all or of all but the last.
    pub tokens: &'a [u32],
    /// The conversation that the tokens are, if it is one.
    pub messages: &'a [SavedMessage],
}

/// Saves sequence `seq` with its text. Writes to a temporary file beside `path`, which is synced and renamed, so that
/// `path` has either what it had or the whole session. The cache is not changed, and may be full.
///
/// # Errors
/// The sequence does not store the beginning of the text, tokens in its middle were removed
/// or the file cannot be written.
pub fn save(
    session: &mut ModelSession,
    seq: SeqId,
    text: SavedText<'_>,
    origin: &Origin,
    path: &Path,
) -> Result<(), Error> {
    check_whole(session.config())?;
    let stored = session.cache().next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
    if stored as usize > text.tokens.len() || stored == 0 {
        return Err(Error::Usage(format!(
            "the cache stores {stored} positions, and the text has {} tokens: such a session cannot be saved",
            text.tokens.len()
        )));
    }
    let origin = origin.in_cache(session.model(), session.config().k)?;
    let mut rows = session.rows();
    let seen = rows.seen_at_end(seq, stored);
    let groups = seen.iter().enumerate().map(|(g, places)| rows.copy_rows(g, places));
    let groups = groups.collect::<Result<Vec<_>, _>>()?;
    let specs = session.config().groups(session.model().config());
    for (group, rows) in specs.iter().zip(&groups) {
        if !rows.have_all_seen_at(stored, group.visibility) {
            return Err(Error::Usage(
                "tokens in the middle of the text were removed from the cache: such a session cannot be saved".into(),
            ));
        }
    }
    let recent = session.rows().copy_recent(seq, stored)?;
    let layout = session.model().layout().clone();
    let storages = (session.config().k, session.config().v);
    let cache = (session.config().kind.as_str(), stored);
    file::write(path, text, cache, &origin, &layout, storages, (&groups, &recent))
}

/// A thinned text is not the text that a file is of.
pub(crate) fn check_whole(config: &CacheConfig) -> Result<(), Error> {
    match config.keep {
        None => Ok(()),
        Some(keep) => Err(Error::Usage(format!(
            "a session that keeps only {keep} is not saved, resumed or frozen, and begins with no prefix: its text has gaps"
        ))),
    }
}

/// The positions that the query at position `at` sees before itself, ascending.
fn seen_by(visibility: Visibility, at: u32) -> impl Iterator<Item = u32> {
    let first = visibility.window.map_or(0, |window| (at + 1).saturating_sub(window));
    (0..visibility.sinks.min(first)).chain(first..at)
}

/// Puts K and V of a saved session's first positions into the empty sequence `seq`. Returns how many: at most `most`, and as
/// many as can be continued as if they had been computed here. That is all of them, unless the file lacks rows that the next query
/// reads: f16 rows of a packed storage (then it is a multiple of [`Recent::tokens`](kvist_device::Recent)), or positions that a window
/// left behind before the text was shortened to `most` (then it may be 0). The caller computes the tokens after them; who needs logits
/// without adding a token passes one less than the text has. On `Err` the sequence is empty; others are as they were.
///
/// # Errors
/// The session depends on something else ([`SavedSession::check`]), its bytes have changed, or the cache has no room.
pub fn resume(
    session: &mut ModelSession,
    seq: SeqId,
    saved: &SavedSession,
    origin: &Origin,
    most: usize,
) -> Result<usize, Error> {
    saved.check(&origin.in_cache(session.model(), session.config().k)?)?;
    check_whole(session.config())?;
    match session.cache().next_position(seq) {
        Some(0) => {}
        Some(_) => return Err(Error::Usage(format!("sequence {seq} has tokens: resume into an empty one"))),
        None => return Err(Refused::UnknownSequence(seq).into()),
    }
    crate::check_prompt(session.config(), saved.tokens().len())?;
    let layout = session.model().layout().clone();
    let storages = (session.config().k, session.config().v);
    let (stored, recent) = (saved.rows(&layout, storages)?, saved.recent_rows(&layout, storages)?);
    // The next query needs a cell, too.
    let room = session.config().context_tokens.saturating_sub(1);
    let most = (most.min(saved.stored() as usize) as u32).min(room);
    session.check_tokens(&saved.tokens()[..most as usize])?;
    let stored: Vec<GroupRows> = stored.into_iter().map(GroupRows::Copied).collect();
    for n in ends(session.config(), session.model().config(), most, (&stored, &recent)) {
        let mut rows = session.rows();
        let placed =
            rows.place_rows(seq, n, &stored).and_then(|all| Ok(all && rows.place_recent(seq, n, &recent)?));
        if matches!(placed, Ok(true)) {
            let groups = session.config().groups(session.model().config());
            session.cache().set_shortest_cut(seq, shortest_cut(&groups, &stored, n));
            return Ok(n as usize);
        }
        session.truncate(seq, 0)?;
        // Without an error, the device keeps no f16 rows.
        placed?;
    }
    Ok(0)
}
