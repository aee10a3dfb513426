//! Finds the byte at which each message of a rendered conversation begins.
//!
//! A message begins where the rendering of the messages before it ends, if that rendering is a prefix of the
//! whole text. Rendering every prefix takes quadratic time, so for more than [`MAX_PREFIXES`] messages only some
//! prefixes are rendered. Instead, the conversation is rendered once with a mark inside every message, which
//! shows where the contents end. Pairs of adjacent messages are grouped by shape (roles and field names). For
//! each group, the text that the template writes after a content is learned from the first and the last pair,
//! and from one pair whose content ends in whitespace and one whose content does not. The other pairs of the
//! group use that text if it matches theirs. If the template writes different text for these samples, or does
//! not reproduce the marks, the other messages of the group have no known position. Messages whose content is
//! not shown, or only partly, are rendered individually while the limit permits.
//!
//! This takes at most [`MAX_PREFIXES`] + 1 renderings for any number of messages.
use super::HistoryTokenizer;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Maximum number of prefixes to render.
pub(super) const MAX_PREFIXES: usize = 16;

/// Characters of a private use area; one mark per message.
const MARKS: Range<u32> = 0xF0000..0xFFFFE;

/// The bytes where a content ends: without trailing whitespace (`BARE`), which templates may drop, and with it
/// if the text has it (`KEPT`).
type End = [usize; 2];
const BARE: usize = 0;
const KEPT: usize = 1;

/// Finds the boundaries of a conversation's messages in its rendered text.
pub(super) struct BoundaryFinder<'a, T> {
    pub tokenizer: &'a T,
    pub bodies: &'a [Value],
    pub kwargs: &'a Map<String, Value>,
    /// True if the text ends with the beginning of an answer.
    pub answer: bool,
    pub text: &'a str,
}

impl<T: HistoryTokenizer> BoundaryFinder<'_, T> {
    /// The bytes at which the messages with these `indices` begin, in order; `None` if unknown. The index after the
    /// last message stands for the answer. No message begins before byte `from`.
    pub fn begins(&self, indices: Range<usize>, from: usize) -> Vec<Option<usize>> {
        let mut found = match indices.len() <= MAX_PREFIXES {
            true => indices.map(|at| self.by_prefix(at)).collect(),
            false => self.by_shape(indices),
        };
        // Drop positions that are not in order.
        let mut last = from;
        for place in &mut found {
            *place = place.filter(|byte| *byte >= last);
            last = place.unwrap_or(last);
        }
        found
    }

    fn by_prefix(&self, at: usize) -> Option<usize> {
        if at == 0 {
            return Some(0);
        }
        let before = self.tokenizer.render(&self.bodies[..at], self.kwargs, false).ok()?;
        self.text.starts_with(&before).then_some(before.len())
    }

    fn by_shape(&self, indices: Range<usize>) -> Vec<Option<usize>> {
        let mut found = vec![None; indices.len()];
        let ends = self.ends(indices.start.saturating_sub(1)).unwrap_or_default();
        let ends = |at: usize| at.checked_sub(1).and_then(|before| *ends.get(before)?);
        // Groups in order of first appearance.
        let mut kinds: Vec<Vec<usize>> = Vec::new();
        let mut known: BTreeMap<(String, Option<String>), usize> = BTreeMap::new();
        let mut single = Vec::new();
        for at in indices.clone() {
            if at == 0 {
                found[0] = Some(0);
                continue;
            }
            if ends(at).is_none() {
                single.push(at);
                continue;
            }
            let kind = (shape(&self.bodies[at - 1]), self.bodies.get(at).map(shape));
            let kind = *known.entry(kind).or_insert(kinds.len());
            if kind == kinds.len() {
                kinds.push(Vec::new());
            }
            kinds[kind].push(at);
        }
        let mut prefixes_left = MAX_PREFIXES;
        for places in kinds {
            let has_blanks = |at: &&usize| ends(**at).is_some_and(|[bare, kept]| bare != kept);
            let blank = places.iter().find(has_blanks);
            let bare = places.iter().find(|at| !has_blanks(at));
            let samples = places.first().into_iter().chain(places.last()).chain(blank).chain(bare);
            let samples: BTreeSet<usize> = samples.copied().collect();
            if prefixes_left < samples.len() {
                continue;
            }
            prefixes_left -= samples.len();
            for at in &samples {
                found[at - indices.start] = self.by_prefix(*at);
            }
            // The text between the end of the content and the next message, if it is the same for all samples.
            // `end_kind` selects [`BARE`] or [`KEPT`].
            let closing = |end_kind: usize| {
                let behind = |at: &usize| self.text.get(ends(*at)?[end_kind]..found[at - indices.start]?);
                let mut all = samples.iter().map(behind);
                let first = all.next()??;
                all.all(|other| other == Some(first)).then_some((end_kind, first))
            };
            let Some((end_kind, closing)) = closing(KEPT).or_else(|| closing(BARE)) else { continue };
            for at in places {
                let end = ends(at).map(|ends| ends[end_kind]).filter(|_| !samples.contains(&at));
                let fits = end.filter(|end| self.text[*end..].starts_with(closing));
                if let Some(end) = fits {
                    found[at - indices.start] = Some(end + closing.len());
                }
            }
        }
        for at in single.into_iter().take(prefixes_left) {
            found[at - indices.start] = self.by_prefix(at);
        }
        found
    }

    /// The ends of the contents in the text for messages from `from` on, `None` for those before. Returns
    /// `None` if the template does not reproduce the marks as part of the content.
    fn ends(&self, from: usize) -> Option<Vec<Option<End>>> {
        let is_mark = |c: &char| MARKS.contains(&u32::from(*c));
        if self.text.chars().any(|c| is_mark(&c)) || self.bodies.len() > MARKS.len() {
            return None;
        }
        let mut bodies = self.bodies.to_vec();
        let mut contents = vec![String::new(); bodies.len()];
        for (at, mark) in MARKS.enumerate().take(bodies.len()).skip(from) {
            let Some(text) = last_text(&mut bodies[at]) else { continue };
            contents[at].clone_from(text);
            let words = text.trim_end();
            if let Some((at, _)) = words.char_indices().last() {
                text.insert(at, char::from_u32(mark).unwrap_or_default());
            }
        }
        let marked = self.tokenizer.render(&bodies, self.kwargs, self.answer).ok()?;
        let mut ends: Vec<Option<End>> = vec![None; bodies.len()];
        let mut odd = Vec::new();
        let mut rest = self.text;
        for c in marked.chars() {
            if !is_mark(&c) {
                rest = rest.strip_prefix(c)?;
                continue;
            }
            // The mark stands before the last character of the content.
            let end = self.text.len() - rest.len() + rest.chars().next().map_or(0, char::len_utf8);
            let message = (u32::from(c) - MARKS.start) as usize;
            let content = contents.get(message)?;
            let words = content.trim_end();
            let blanks = &content[words.len()..];
            let kept = self.text[end..].starts_with(blanks).then_some(end + blanks.len());
            // Skip contents that the template shortens, e.g. by removing reasoning; their ends may differ from
            // the rest of the group.
            let is_whole = self.text[..end].ends_with(words.trim_start());
            if ends[message].replace([end, kept.unwrap_or(end)]).is_some() || !is_whole {
                odd.push(message);
            }
        }
        odd.into_iter().for_each(|message| ends[message] = None);
        rest.is_empty().then_some(ends)
    }
}

/// The last text of a message's content.
fn last_text(body: &mut Value) -> Option<&mut String> {
    let content = body.get_mut("content")?;
    let content = match content {
        Value::Array(parts) => parts.last_mut()?.get_mut("text")?,
        content => content,
    };
    match content {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// The properties of a message that a template usually looks at: its role and field names.
fn shape(body: &Value) -> String {
    let mut names: Vec<&str> =
        body.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    format!("{}: {}", body["role"].as_str().unwrap_or_default(), names.join(" "))
}
