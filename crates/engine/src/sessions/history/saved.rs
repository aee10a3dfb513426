//! Histories as they are stored in files.
use super::{History, Message, RenderedMessages};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

/// A history with everything that a later turn needs, also what clients do not see.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct SavedHistory {
    pub tokens: Vec<u32>,
    conversation: Option<SavedConversation>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedConversation {
    messages: Vec<Message>,
    text: String,
    kwargs: Map<String, Value>,
    tail: Option<usize>,
}

impl From<&History> for SavedHistory {
    fn from(history: &History) -> Self {
        let conversation = history.rendered.as_ref().map(|rendered| SavedConversation {
            messages: rendered.messages.clone(),
            text: rendered.text.clone(),
            kwargs: Map::clone(&rendered.kwargs),
            tail: rendered.tail,
        });
        SavedHistory { tokens: history.tokens.to_vec(), conversation }
    }
}

impl SavedHistory {
    /// `None` if it is none that this program writes: positions outside the text, tokens outside the vocabulary.
    pub fn restore(self, vocab: usize) -> Option<History> {
        let SavedHistory { tokens, conversation } = self;
        if tokens.iter().any(|token| *token as usize >= vocab) {
            return None;
        }
        let rendered = match conversation {
            None => None,
            Some(saved) => {
                let is_inside = |token: usize| token <= tokens.len();
                let fits = |message: &Message| {
                    let content = message.content;
                    message.begins.into_iter().chain(content.map(|(begins, _)| begins)).all(|position| {
                        is_inside(position.token) && saved.text.is_char_boundary(position.byte)
                    }) && content.and_then(|(_, ends)| ends).is_none_or(is_inside)
                };
                if !saved.messages.iter().all(fits) || !saved.tail.is_none_or(is_inside) {
                    return None;
                }
                Some(Arc::new(RenderedMessages {
                    messages: saved.messages,
                    text: saved.text,
                    kwargs: Arc::new(saved.kwargs),
                    tail: saved.tail,
                    bytes: 0,
                }))
            }
        };
        let mut history = History { tokens: Arc::new(tokens), rendered };
        history.update_bytes();
        Some(history)
    }
}
