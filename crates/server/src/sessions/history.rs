//! What a session has said so far: tokens, and, where it was made of messages, which message begins where.
//!
//! The tokens are the truth: they are what a generation begins with, and what it adds stays as it was drawn, never cut
//! into tokens anew. Messages grow by what the template adds to the text that is there already. A template that writes
//! earlier messages differently once later ones follow (as those of thinking models do) rewrites the history;
//! [`History::in_common`] tells how much of it stayed.
//!
//! Pure: text and tokens come from a [`Scribe`].
mod cut;
mod places;
mod render;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod twin;
mod weight;

use crate::error::ApiError;
pub(crate) use cut::Cut;
pub(crate) use render::{Scribe, admit};
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::sync::Arc;
#[cfg(test)]
pub(crate) use weight::MIN_CHARGE;
pub(crate) use weight::{weight, weight_of_names};

/// Tokens, and who said what. A clone shares both until one of them is changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct History {
    pub tokens: Arc<Vec<u32>>,
    /// `None`: of text or tokens, or empty.
    said: Option<Arc<Said>>,
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    messages: Vec<Message>,
    /// What the template has written of them: the text that the tokens stand for, up to the tail.
    text: String,
    kwargs: Arc<Map<String, Value>>,
    /// From here on the tokens are no message: a part of one that was cut, or what was generated as it came.
    tail: Option<usize>,
    /// Bytes of all of it in memory.
    bytes: usize,
}

/// One message, and where it stands.
#[derive(Clone, Debug, PartialEq)]
struct Message {
    /// As the template is given it: of a generated one, the content is what was drawn.
    body: Value,
    /// As it is told, if that is another: with the calls of tools that were read from it.
    shown: Option<Value>,
    begins: Option<Place>,
    /// Of a generated one: where its content begins. It goes up to `ends`, which is the history's end while it is open.
    content: Option<(Place, Option<usize>)>,
}

/// The same place in tokens and in the text.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Place {
    token: usize,
    byte: usize,
}

/// The name under which templates know tools. It is none that a request may set by itself.
pub(crate) const TOOLS: &str = "tools";

impl History {
    /// Of a conversation without messages yet.
    pub fn of_messages(kwargs: Map<String, Value>) -> Self {
        let said = Said { kwargs: Arc::new(kwargs), ..Said::default() };
        let mut history = History { tokens: Arc::default(), said: Some(Arc::new(said)) };
        history.weigh();
        history
    }

    #[cfg(test)]
    pub fn of_tokens(tokens: Vec<u32>) -> Self {
        History { tokens: Arc::new(tokens), said: None }
    }

    pub fn has_messages(&self) -> bool {
        self.said.is_some()
    }

    /// Tokens at the beginning that are the same.
    pub fn in_common(&self, other: &History) -> usize {
        // Whole pieces compare at the speed of memory.
        const PIECE: usize = 1024;
        let (a, b) = (&self.tokens, &other.tokens);
        if Arc::ptr_eq(a, b) {
            return a.len();
        }
        let whole = a.chunks_exact(PIECE).zip(b.chunks_exact(PIECE)).take_while(|(a, b)| a == b).count();
        let from = whole * PIECE;
        from + a[from..].iter().zip(&b[from..]).take_while(|(a, b)| a == b).count()
    }

    /// The tools that the template is told of.
    pub fn tools(&self) -> &[Value] {
        let names = self.said.as_ref().and_then(|said| said.kwargs.get(TOOLS));
        names.and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// From the next rendering on the template is told of these tools.
    pub fn with_tools(&self, tools: &[Value]) -> Self {
        let mut history = self.clone();
        if let Some(said) = history.said.as_mut().filter(|_| self.tools() != tools) {
            let kwargs = &mut Arc::make_mut(said).kwargs;
            let mut names = Map::clone(kwargs);
            names.shift_remove(TOOLS);
            if !tools.is_empty() {
                names.insert(TOOLS.into(), tools.into());
            }
            *kwargs = Arc::new(names);
            history.weigh();
        }
        history
    }

    /// What its last message says, if that is an answer that may go on.
    pub fn open_text(&self) -> Option<&str> {
        let said = self.said.as_ref().filter(|said| said.tail.is_none())?;
        let (content, _) = said.open()?;
        said.text.get(content.byte..)
    }

    /// The last message, an answer of the text `raw`, is told as `shown`. Where its tokens do not give that text again (the
    /// marks of calls are control tokens), the template is to write the calls.
    pub fn show_last(&mut self, scribe: &impl Scribe, raw: &str, shown: Value) {
        let Some(message) = self.said.as_mut().and_then(|said| Arc::make_mut(said).messages.last_mut())
        else {
            return;
        };
        match message.body["content"] == scribe.content(raw).as_str() {
            true => message.shown = Some(shown),
            false => message.body = shown,
        }
        self.weigh();
    }

    /// What follows is none of its messages.
    pub fn with_tail(&self) -> Self {
        let mut history = self.clone();
        if let Some(said) = &mut history.said {
            Arc::make_mut(said).tail.get_or_insert(self.tokens.len());
        }
        history
    }

    /// With tokens behind it.
    pub fn with_tokens(&self, scribe: &impl Scribe, new: &[u32], param: &str) -> Result<Self, ApiError> {
        if let Some(said) = &self.said
            && said.tail.is_none()
            && !self.is_open()
        {
            let message = "this session is made of messages, and its last one is complete: append `messages`";
            return Err(ApiError::invalid(param, message));
        }
        let mut history = self.clone();
        Arc::make_mut(&mut history.tokens).extend_from_slice(new);
        history.settle(scribe)?;
        Ok(history)
    }

    /// Its last message is an answer that may go on: one that was cut, or ended for its length.
    pub fn is_open(&self) -> bool {
        self.said.as_ref().is_some_and(|said| said.tail.is_none() && said.open().is_some())
    }

    /// It ends inside a message that is none of `messages`.
    pub fn has_tail(&self) -> bool {
        self.said.as_ref().is_some_and(|said| said.tail.is_some())
    }

    /// The answer that begins at token `from` has ended by itself: nothing of it follows. `text` is what of it is to
    /// stay, if that is less than what was drawn (a stop string is no part of it); `end` says that its last token is
    /// the model's word for the end, which the template writes by itself.
    pub fn end_answer(
        &mut self,
        scribe: &impl Scribe,
        from: usize,
        end: bool,
        text: Option<&str>,
    ) -> Result<(), ApiError> {
        if end && self.tokens.len() > from {
            Arc::make_mut(&mut self.tokens).pop();
        }
        if let Some(text) = text {
            self.shorten(scribe, from, text)?;
        }
        self.settle(scribe)?;
        let n_tokens = self.tokens.len();
        if let Some((_, ends)) = self.said.as_mut().and_then(|said| Arc::make_mut(said).open_mut()) {
            *ends = Some(n_tokens);
        }
        Ok(())
    }

    /// Make the open message's content of its tokens.
    pub fn settle(&mut self, scribe: &impl Scribe) -> Result<(), ApiError> {
        let Some(said) = &mut self.said else { return Ok(()) };
        if said.tail.is_some() {
            return Ok(());
        }
        if let Some((content, _)) = said.open() {
            let answer = scribe.decode(&self.tokens[content.token..])?;
            let said = Arc::make_mut(said);
            said.text.truncate(content.byte);
            said.text += &answer;
            if let Some(message) = said.messages.last_mut() {
                message.body = scribe.message(&answer);
                message.shown = None;
            }
        }
        self.weigh();
        Ok(())
    }

    /// The messages, each with the token at which it begins; `open` if it may go on.
    pub fn messages(&self) -> Option<Vec<Value>> {
        self.n_messages().map(|n| (0..n).filter_map(|at| self.message(at)).collect())
    }

    /// The message of this number.
    pub fn message(&self, at: usize) -> Option<Value> {
        let said = self.said.as_ref()?;
        let message = said.messages.get(at)?;
        Some(json!({
            "message": message.shown.as_ref().unwrap_or(&message.body),
            "begins": message.begins.map(|begins| begins.token),
            "open": at + 1 == said.messages.len() && self.is_open(),
        }))
    }

    pub fn n_messages(&self) -> Option<usize> {
        self.said.as_ref().map(|said| said.messages.len())
    }
}

/// Counts bytes.
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
    /// Bytes of memory beside its tokens.
    pub fn said_bytes(&self) -> usize {
        self.said.as_ref().map_or(0, |said| said.bytes)
    }

    /// Bytes of the message that is longest as JSON.
    pub fn longest_message(&self) -> usize {
        let bytes = |message: &Message| {
            let mut count = Count(0);
            // Counting does not fail.
            let _ = serde_json::to_writer(&mut count, message.shown.as_ref().unwrap_or(&message.body));
            count.0
        };
        self.said.as_ref().and_then(|said| said.messages.iter().map(bytes).max()).unwrap_or(0)
    }

    /// The tokens that the end of a generation may decode anew, if its first one is token `from`.
    pub fn unsettled(&self, scribe: &impl Scribe, from: usize) -> &[u32] {
        let open = self.said.as_ref().filter(|said| said.tail.is_none()).and_then(|said| said.open());
        let open = open.map_or(from, |(content, _)| content.token);
        let from = from.min(self.tokens.len());
        &self.tokens[scribe.context(&self.tokens[..from]).min(open)..]
    }
}

impl Said {
    fn open(&self) -> Option<(Place, Option<usize>)> {
        self.messages.last()?.content.filter(|(_, ends)| ends.is_none())
    }
    fn open_mut(&mut self) -> Option<&mut (Place, Option<usize>)> {
        if self.tail.is_some() {
            return None;
        }
        self.messages.last_mut()?.content.as_mut().filter(|(_, ends)| ends.is_none())
    }
}
