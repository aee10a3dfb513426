//! What a history counts as against a quota.
use super::{History, Message};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What a session counts as, be it empty: it has a name, a salt, and a place in a map.
pub(crate) const MIN_CHARGE: u64 = 16;

impl History {
    /// What a session of it counts as against a quota: its tokens, or a sixteenth of the bytes that are kept beside
    /// them, if that is more; at least [`MIN_CHARGE`]. Bytes that clones share count in each of them: any may be the
    /// last.
    pub fn charge(&self) -> u64 {
        let bytes = self.said.as_ref().map_or(0, |said| said.bytes);
        (self.tokens.len() as u64).max(bytes as u64 / 16).max(MIN_CHARGE)
    }

    pub(super) fn weigh(&mut self) {
        if let Some(said) = &mut self.said {
            let shown = |m: &Message| m.shown.as_ref().map_or(0, weight);
            let messages = said.messages.iter().map(|m| size_of::<Message>() + weight(&m.body) + shown(m));
            let bytes = said.text.len() + messages.sum::<usize>() + weight_of_names(&said.kwargs);
            if bytes != said.bytes {
                Arc::make_mut(said).bytes = bytes;
            }
        }
    }
}

/// Bytes that it has on the heap.
pub(crate) fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| size_of::<Value>() + weight(item)).sum(),
        Value::Object(fields) => fields.iter().map(|(name, field)| entry(name, field)).sum(),
        _ => 0,
    }
}

/// Bytes of a field of an object: the pair, its hash, and its place in the table.
fn entry(name: &str, value: &Value) -> usize {
    size_of::<(String, Value)>() + 2 * size_of::<usize>() + name.len() + weight(value)
}

/// Bytes that names for a template have in memory.
pub(crate) fn weight_of_names(names: &Map<String, Value>) -> usize {
    names.iter().map(|(name, value)| entry(name, value)).sum()
}
