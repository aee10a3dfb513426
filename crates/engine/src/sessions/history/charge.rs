//! What a history counts against a quota.
use super::{History, Message};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Minimum charge of a session, even if it is empty: it has a name, a salt, and an entry in a map.
pub(crate) const MIN_CHARGE: u64 = 16;

impl History {
    /// The charge of a session with this history: its number of tokens, or a sixteenth of the bytes stored
    /// besides the tokens, whichever is larger; at least [`MIN_CHARGE`]. Bytes that clones share are charged to
    /// each clone, because any of them may be the last owner.
    pub(crate) fn charge(&self) -> u64 {
        let bytes = self.rendered.as_ref().map_or(0, |rendered| rendered.bytes);
        (self.tokens.len() as u64).max(bytes as u64 / 16).max(MIN_CHARGE)
    }

    pub(super) fn update_bytes(&mut self) {
        if let Some(rendered) = &mut self.rendered {
            let shown = |m: &Message| m.shown.as_ref().map_or(0, heap_bytes);
            let messages =
                rendered.messages.iter().map(|m| size_of::<Message>() + heap_bytes(&m.body) + shown(m));
            let bytes =
                rendered.text.len() + messages.sum::<usize>() + heap_bytes_of_fields(&rendered.kwargs);
            if bytes != rendered.bytes {
                Arc::make_mut(rendered).bytes = bytes;
            }
        }
    }
}

/// Heap bytes of a JSON value.
pub fn heap_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| size_of::<Value>() + heap_bytes(item)).sum(),
        Value::Object(fields) => fields.iter().map(|(name, field)| entry(name, field)).sum(),
        _ => 0,
    }
}

/// Heap bytes of an object's field: the pair, its hash, and its table slot.
fn entry(name: &str, value: &Value) -> usize {
    size_of::<(String, Value)>() + 2 * size_of::<usize>() + name.len() + heap_bytes(value)
}

/// Heap bytes of template variables.
pub fn heap_bytes_of_fields(names: &Map<String, Value>) -> usize {
    names.iter().map(|(name, value)| entry(name, value)).sum()
}
