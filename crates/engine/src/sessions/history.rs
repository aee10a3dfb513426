//! The history of a session: its tokens and, if it was made from messages, the position of each message.
//!
//! The tokens are authoritative: they are the prompt of a generation, and generated tokens stay as they were
//! sampled; they are never tokenized again. New messages append what the template adds to the existing text.
//! Some templates render earlier messages differently once later ones follow (e.g. those of reasoning models);
//! then the history is rewritten, and [`History::in_common`] returns how much of it is unchanged.
//!
//! Pure functions: rendering and tokenizing are done by a [`HistoryTokenizer`].
mod boundaries;
mod charge;
mod cut;
#[cfg(test)]
mod reference;
mod render;
mod saved;
#[cfg(test)]
mod tests;

use crate::sessions::SessionError;
#[cfg(test)]
pub(crate) use charge::MIN_CHARGE;
pub use charge::{heap_bytes, heap_bytes_of_fields};
pub use cut::Cut;
pub use render::{HistoryTokenizer, check_length, with_conversation};
pub(crate) use saved::SavedHistory;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::sync::Arc;

/// Tokens and messages. Clones share both until one of them is changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    pub tokens: Arc<Vec<u32>>,
    /// `None` for a session made from text or tokens, and for an empty one.
    rendered: Option<Arc<RenderedMessages>>,
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
struct RenderedMessages {
    messages: Vec<Message>,
    /// The rendered text of the messages. It corresponds to the tokens before the tail.
    text: String,
    kwargs: Arc<Map<String, Value>>,
    /// Index of the first token that belongs to no message: part of a truncated message, or text generated
    /// without a message.
    tail: Option<usize>,
    /// Memory use of this struct in bytes.
    bytes: usize,
}

/// A message and its position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Message {
    /// As passed to the template. For a generated message, the content is the text as generated.
    body: Value,
    /// As reported to the client, if different: with the parsed tool calls.
    shown: Option<Value>,
    begins: Option<Position>,
    /// Of a generated message: where its content begins, and the token index where it ends. The end is `None`
    /// while the message is open; it then ends with the history.
    content: Option<(Position, Option<usize>)>,
}

/// The same position in tokens and in the rendered text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Position {
    token: usize,
    byte: usize,
}

/// The template variable that contains the tools. Requests cannot set it through `chat_template_kwargs`.
pub const TOOLS: &str = "tools";

impl History {
    /// A conversation without messages.
    pub fn of_messages(kwargs: Map<String, Value>) -> Self {
        let rendered = RenderedMessages { kwargs: Arc::new(kwargs), ..RenderedMessages::default() };
        let mut history = History { tokens: Arc::default(), rendered: Some(Arc::new(rendered)) };
        history.update_bytes();
        history
    }

    #[cfg(test)]
    pub fn of_tokens(tokens: Vec<u32>) -> Self {
        History { tokens: Arc::new(tokens), rendered: None }
    }

    pub fn has_messages(&self) -> bool {
        self.rendered.is_some()
    }

    /// Length of the common prefix in tokens.
    pub fn in_common(&self, other: &History) -> usize {
        // Comparing whole slices runs at memory speed.
        const PIECE: usize = 1024;
        let (a, b) = (&self.tokens, &other.tokens);
        if Arc::ptr_eq(a, b) {
            return a.len();
        }
        let whole = a.chunks_exact(PIECE).zip(b.chunks_exact(PIECE)).take_while(|(a, b)| a == b).count();
        let from = whole * PIECE;
        from + a[from..].iter().zip(&b[from..]).take_while(|(a, b)| a == b).count()
    }

    /// The tools that are passed to the template.
    pub fn tools(&self) -> &[Value] {
        let names = self.rendered.as_ref().and_then(|rendered| rendered.kwargs.get(TOOLS));
        names.and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// Sets the tools that are passed to the template, from the next rendering on.
    pub fn with_tools(&self, tools: &[Value]) -> Self {
        let mut history = self.clone();
        if let Some(rendered) = history.rendered.as_mut().filter(|_| self.tools() != tools) {
            let kwargs = &mut Arc::make_mut(rendered).kwargs;
            let mut names = Map::clone(kwargs);
            names.shift_remove(TOOLS);
            if !tools.is_empty() {
                names.insert(TOOLS.into(), tools.into());
            }
            *kwargs = Arc::new(names);
            history.update_bytes();
        }
        history
    }

    /// The text of the last message, if it is an open answer.
    pub(crate) fn open_text(&self) -> Option<&str> {
        let rendered = self.rendered.as_ref().filter(|rendered| rendered.tail.is_none())?;
        let (content, _) = rendered.open()?;
        rendered.text.get(content.byte..)
    }

    /// The number of tokens before the last message, if it is an open answer; otherwise of all.
    pub fn answer_start(&self) -> usize {
        let rendered = self.rendered.as_ref().filter(|rendered| rendered.tail.is_none());
        let open = rendered.and_then(|rendered| rendered.open());
        open.map_or(self.tokens.len(), |(content, _)| content.token)
    }

    /// Sets how the last message, an answer with the text `raw`, is reported. If its tokens do not decode to
    /// `raw` (tool call marks are control tokens), `shown` also replaces the message that the template renders.
    pub(crate) fn show_last(&mut self, tokenizer: &impl HistoryTokenizer, raw: &str, shown: Value) {
        let Some(message) =
            self.rendered.as_mut().and_then(|rendered| Arc::make_mut(rendered).messages.last_mut())
        else {
            return;
        };
        match message.body["content"] == tokenizer.content(raw).as_str() {
            true => message.shown = Some(shown),
            false => message.body = shown,
        }
        self.update_bytes();
    }

    /// Marks everything that follows as not part of a message.
    pub(crate) fn with_tail(&self) -> Self {
        let mut history = self.clone();
        if let Some(rendered) = &mut history.rendered {
            Arc::make_mut(rendered).tail.get_or_insert(self.tokens.len());
        }
        history
    }

    /// Appends text, tokenized by itself. Fails like [`History::with_tokens`].
    pub fn with_text<T: HistoryTokenizer>(&self, tokenizer: &T, text: &str) -> Result<Self, T::Error> {
        let new = tokenizer.encode(text, self.tokens.is_empty())?;
        self.with_tokens(tokenizer, &new, "text")
    }

    /// Appends tokens. `param` is their name in errors. Fails if the last message is complete.
    pub fn with_tokens<T: HistoryTokenizer>(
        &self,
        tokenizer: &T,
        new: &[u32],
        param: &str,
    ) -> Result<Self, T::Error> {
        if let Some(rendered) = &self.rendered
            && rendered.tail.is_none()
            && !self.is_open()
        {
            let message = "this session is made of messages, and its last one is complete: append `messages`";
            return Err(SessionError::invalid(param, message).into());
        }
        let mut history = self.clone();
        Arc::make_mut(&mut history.tokens).extend_from_slice(new);
        history.settle(tokenizer)?;
        Ok(history)
    }

    /// True if the last message is an open answer: it was cut, or ended at the token limit.
    pub fn is_open(&self) -> bool {
        self.rendered.as_ref().is_some_and(|rendered| rendered.tail.is_none() && rendered.open().is_some())
    }

    /// True if the history ends inside text that is not one of `messages`.
    pub fn has_tail(&self) -> bool {
        self.rendered.as_ref().is_some_and(|rendered| rendered.tail.is_some())
    }

    /// Closes the answer that begins at token `from`. `text`, if given, is the part of its text to keep (a stop
    /// string is not part of it). `end` says that the last token is the model's end token, which is removed
    /// because the template writes it itself.
    pub(crate) fn end_answer<T: HistoryTokenizer>(
        &mut self,
        tokenizer: &T,
        from: usize,
        end: bool,
        text: Option<&str>,
    ) -> Result<(), T::Error> {
        if end && self.tokens.len() > from {
            Arc::make_mut(&mut self.tokens).pop();
        }
        if let Some(text) = text {
            self.shorten(tokenizer, from, text)?;
        }
        self.settle(tokenizer)?;
        let n_tokens = self.tokens.len();
        if let Some((_, ends)) =
            self.rendered.as_mut().and_then(|rendered| Arc::make_mut(rendered).open_mut())
        {
            *ends = Some(n_tokens);
        }
        Ok(())
    }

    /// Sets the open message's content to the text of its tokens.
    pub fn settle<T: HistoryTokenizer>(&mut self, tokenizer: &T) -> Result<(), T::Error> {
        let Some(rendered) = &mut self.rendered else { return Ok(()) };
        if rendered.tail.is_some() {
            return Ok(());
        }
        if let Some((content, _)) = rendered.open() {
            let answer = tokenizer.decode(&self.tokens[content.token..])?;
            let rendered = Arc::make_mut(rendered);
            rendered.text.truncate(content.byte);
            rendered.text += &answer;
            if let Some(message) = rendered.messages.last_mut() {
                message.body = tokenizer.message(&answer);
                message.shown = None;
            }
        }
        self.update_bytes();
        Ok(())
    }

    /// All messages as JSON, each with the index of its first token; `open` is true if a generation can
    /// continue it.
    pub fn messages(&self) -> Option<Vec<Value>> {
        self.n_messages().map(|n| (0..n).filter_map(|at| self.message(at)).collect())
    }

    /// One message as JSON, by index.
    pub fn message(&self, at: usize) -> Option<Value> {
        let rendered = self.rendered.as_ref()?;
        let message = rendered.messages.get(at)?;
        Some(json!({
            "message": message.shown.as_ref().unwrap_or(&message.body),
            "begins": message.begins.map(|begins| begins.token),
            "open": at + 1 == rendered.messages.len() && self.is_open(),
        }))
    }

    pub fn n_messages(&self) -> Option<usize> {
        self.rendered.as_ref().map(|rendered| rendered.messages.len())
    }
}

/// A writer that counts bytes.
struct Count(usize);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl History {
    /// Memory use in bytes, without the tokens.
    pub fn message_bytes(&self) -> usize {
        self.rendered.as_ref().map_or(0, |rendered| rendered.bytes)
    }

    /// Size in bytes of the longest message as JSON.
    pub fn longest_message(&self) -> usize {
        let bytes = |message: &Message| {
            let mut count = Count(0);
            // Writing to a counter cannot fail.
            let _ = serde_json::to_writer(&mut count, message.shown.as_ref().unwrap_or(&message.body));
            count.0
        };
        self.rendered.as_ref().and_then(|rendered| rendered.messages.iter().map(bytes).max()).unwrap_or(0)
    }

    /// The tokens that the end of an answer may have to decode, if the first generated token is `from`.
    pub fn unsettled(&self, tokenizer: &impl HistoryTokenizer, from: usize) -> &[u32] {
        let open = self
            .rendered
            .as_ref()
            .filter(|rendered| rendered.tail.is_none())
            .and_then(|rendered| rendered.open());
        let open = open.map_or(from, |(content, _)| content.token);
        let from = from.min(self.tokens.len());
        &self.tokens[tokenizer.context(&self.tokens[..from]).min(open)..]
    }
}

impl RenderedMessages {
    fn open(&self) -> Option<(Position, Option<usize>)> {
        self.messages.last()?.content.filter(|(_, ends)| ends.is_none())
    }
    fn open_mut(&mut self) -> Option<&mut (Position, Option<usize>)> {
        if self.tail.is_some() {
            return None;
        }
        self.messages.last_mut()?.content.as_mut().filter(|(_, ends)| ends.is_none())
    }
}
