//! What a session has said so far: tokens, and, where it was made of messages, which message begins where.
//!
//! The tokens are the truth: they are what a generation begins with, and what it adds stays as it was drawn, never cut
//! into tokens anew. Messages grow by what the template adds to the text that is there already. A template that writes
//! earlier messages differently once later ones follow (as those of thinking models do) rewrites the history;
//! [`History::in_common`] tells how much of it stayed.
//!
//! Pure: text and tokens come from a [`Scribe`].
use crate::error::ApiError;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};

/// Turns messages into text, and text into tokens and back.
pub(crate) trait Scribe {
    /// Everything that is said; with `answer`, up to where the assistant's answer begins.
    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, ApiError>;
    /// Tokens of rendered text; `first`: nothing stands before it.
    fn encode_rendered(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError>;
    /// Tokens of a text by itself; `first`: nothing stands before it.
    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError>;
    fn decode(&self, tokens: &[u32]) -> Result<String, ApiError>;
    /// The content of a message whose answer is this text.
    fn content(&self, answer: &str) -> String;
}

/// Tokens, and who said what.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct History {
    pub tokens: Vec<u32>,
    /// `None`: of text or tokens, or empty.
    said: Option<Said>,
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    messages: Vec<Message>,
    /// What the template has written of them: the text that the tokens stand for, up to the tail.
    text: String,
    kwargs: Map<String, Value>,
    /// From here on the tokens are no message: a part of one that was cut, or what was generated as it came.
    tail: Option<usize>,
    /// Bytes of messages and text.
    bytes: usize,
}

/// One message, and where it stands.
#[derive(Clone, Debug, PartialEq)]
struct Message {
    body: Value,
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

/// Where a history is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cut {
    /// This many tokens stay.
    Token(usize),
    /// This many messages stay.
    Message(usize),
}

/// Messages whose places are looked for in one go: each costs a rendering.
const MAX_PLACED: usize = 256;

impl History {
    /// Of a conversation that nobody has begun.
    pub fn of_messages(kwargs: Map<String, Value>) -> Self {
        History { tokens: Vec::new(), said: Some(Said { kwargs, ..Said::default() }) }
    }

    pub fn has_messages(&self) -> bool {
        self.said.is_some()
    }

    /// What it counts as against a quota: its tokens, or a sixteenth of the bytes that are kept beside them, if that
    /// is more.
    pub fn charge(&self) -> u64 {
        let bytes = self.said.as_ref().map_or(0, |said| said.bytes);
        (self.tokens.len() as u64).max(bytes as u64 / 16)
    }

    /// Tokens at the beginning that are the same.
    pub fn in_common(&self, other: &History) -> usize {
        // Whole pieces compare at the speed of memory.
        const PIECE: usize = 1024;
        let (a, b) = (&self.tokens, &other.tokens);
        let whole = a.chunks_exact(PIECE).zip(b.chunks_exact(PIECE)).take_while(|(a, b)| a == b).count();
        let from = whole * PIECE;
        from + a[from..].iter().zip(&b[from..]).take_while(|(a, b)| a == b).count()
    }

    /// With the messages behind it.
    pub fn with_messages(&self, scribe: &impl Scribe, new: &[Value]) -> Result<Self, ApiError> {
        self.rendered(scribe, new, false)
    }

    /// With the beginning of the assistant's next answer behind it: an open message.
    pub fn with_answer(&self, scribe: &impl Scribe) -> Result<Self, ApiError> {
        self.rendered(scribe, &[], true)
    }

    fn rendered(&self, scribe: &impl Scribe, new: &[Value], answer: bool) -> Result<Self, ApiError> {
        let Some(said) = &self.said else {
            let message = "this session is made of text or tokens: append `text` or `tokens`";
            return Err(ApiError::invalid("messages", message));
        };
        if said.tail.is_some() {
            let message = "the history ends inside a message: roll back to where it begins \
                           (`{\"to\": {\"message\": N}}`), or go on with `text` or `tokens`";
            let error = ApiError::new(StatusCode::CONFLICT, "inside_message", message);
            return Err(error.about("messages"));
        }
        let mut bodies: Vec<Value> = said.messages.iter().map(|m| m.body.clone()).collect();
        bodies.extend_from_slice(new);
        let full = scribe.render(&bodies, &said.kwargs, answer)?;
        let stays = full.starts_with(&said.text) && !said.messages.is_empty();
        let (known, before) = if stays { (said.messages.len(), said.text.len()) } else { (0, 0) };
        // Where the messages begin that have no place yet; behind the last one, the answer.
        let wanted = known..bodies.len() + usize::from(answer);
        let mut bytes: Vec<Option<usize>> = Vec::new();
        for at in wanted.clone() {
            let text = match at {
                0 => Some(String::new()),
                _ if wanted.len() > MAX_PLACED => None,
                _ => scribe.render(&bodies[..at], &said.kwargs, false).ok(),
            };
            let last = bytes.iter().flatten().last().copied().unwrap_or(before);
            bytes.push(text.filter(|t| full.starts_with(t.as_str()) && t.len() >= last).map(|t| t.len()));
        }
        let cuts: Vec<usize> = bytes.iter().flatten().map(|byte| byte - before).collect();
        let (added, at) = place(scribe, &full[before..], before == 0, &cuts)?;
        let mut tokens = if stays { self.tokens.clone() } else { Vec::new() };
        let base = tokens.len();
        tokens.extend(added);
        let mut at = at.into_iter();
        let mut places = bytes.into_iter().map(|byte| {
            let place = Place { byte: byte?, token: base + at.next()? };
            Some(place)
        });
        let mut messages = if stays { said.messages.clone() } else { Vec::new() };
        for body in bodies.drain(known..) {
            messages.push(Message { body, begins: places.next().flatten(), content: None });
        }
        if stays {
            // What was open is closed by the template.
            for message in &mut messages[..known] {
                if let Some((_, ends @ None)) = &mut message.content {
                    *ends = Some(self.tokens.len());
                }
            }
        }
        if answer {
            let content = Place { token: tokens.len(), byte: full.len() };
            messages.push(Message {
                body: json!({"role": "assistant", "content": ""}),
                begins: places.next().flatten(),
                content: Some((content, None)),
            });
        }
        let said = Said { messages, text: full, kwargs: said.kwargs.clone(), tail: None, bytes: 0 };
        let mut history = History { tokens, said: Some(said) };
        history.weigh();
        Ok(history)
    }

    /// What follows is none of its messages.
    pub fn with_tail(&self) -> Self {
        let mut history = self.clone();
        if let Some(said) = &mut history.said {
            said.tail.get_or_insert(self.tokens.len());
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
        history.tokens.extend_from_slice(new);
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
            self.tokens.pop();
        }
        if let Some(text) = text {
            self.shorten(scribe, from, text)?;
        }
        self.settle(scribe)?;
        let n_tokens = self.tokens.len();
        if let Some((_, ends)) = self.said.as_mut().and_then(Said::open_mut) {
            *ends = Some(n_tokens);
        }
        Ok(())
    }

    /// Make `text` of what stands behind token `from`, of which it is a beginning.
    fn shorten(&mut self, scribe: &impl Scribe, from: usize, text: &str) -> Result<(), ApiError> {
        // The most tokens whose text is a beginning of it: it grows with the tokens.
        let (mut fits, mut too_many) = (from, self.tokens.len() + 1);
        while fits + 1 < too_many {
            let middle = fits + (too_many - fits) / 2;
            match text.starts_with(&scribe.decode(&self.tokens[from..middle])?) {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        let shown = scribe.decode(&self.tokens[from..fits])?;
        self.tokens.truncate(fits);
        if let Some(rest) = text.strip_prefix(&shown).filter(|rest| !rest.is_empty()) {
            let rest = scribe.encode(rest, false)?;
            self.tokens.extend(rest);
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
            said.text.truncate(content.byte);
            said.text += &answer;
            if let Some(message) = said.messages.last_mut() {
                message.body["content"] = scribe.content(&answer).into();
            }
        }
        self.weigh();
        Ok(())
    }

    fn weigh(&mut self) {
        if let Some(said) = &mut self.said {
            said.bytes = said.text.len();
            said.bytes += said.messages.iter().map(|m| weight(&m.body)).sum::<usize>();
        }
    }

    /// Up to the cut. A cut inside an answer leaves it open; inside any other message, what stands before the cut is a
    /// beginning of a message that is none yet.
    pub fn cut(&self, scribe: &impl Scribe, cut: Cut, param: &str) -> Result<Self, ApiError> {
        let n_tokens = self.tokens.len();
        let token = match cut {
            Cut::Token(token) if token > n_tokens => {
                let message = format!("`{param}` is token {token}; the session has {n_tokens}");
                return Err(ApiError::invalid(param, message));
            }
            Cut::Token(token) => token,
            Cut::Message(message) => self.begin_of(message, param)?,
        };
        let mut history = self.clone();
        history.tokens.truncate(token);
        let Some(said) = history.said.as_mut().filter(|_| token < n_tokens) else { return Ok(history) };
        match said.tail {
            Some(tail) if token > tail => return Ok(history),
            Some(tail) if token == tail => {
                said.tail = None;
                return Ok(history);
            }
            _ => said.tail = None,
        }
        let is_before = |m: &Message| m.begins.is_some_and(|begins| begins.token <= token);
        let at = said.messages.iter().rposition(is_before).unwrap_or(0);
        let begins = said.messages.get(at).and_then(|m| m.begins);
        match said.messages.get_mut(at).map(|message| (begins, &mut message.content)) {
            Some((Some(begins), _)) if begins.token == token => {
                said.messages.truncate(at);
                said.text.truncate(begins.byte);
            }
            Some((_, Some((content, ends))))
                if content.token <= token && ends.is_none_or(|ends| token <= ends) =>
            {
                *ends = None;
                said.messages.truncate(at + 1);
            }
            _ => {
                let begins = begins.unwrap_or(Place { token: 0, byte: 0 });
                said.messages.truncate(at);
                said.text.truncate(begins.byte);
                said.tail = Some(begins.token);
            }
        }
        history.settle(scribe)?;
        Ok(history)
    }

    /// The token at which message `at` begins; behind the last one, the end.
    fn begin_of(&self, at: usize, param: &str) -> Result<usize, ApiError> {
        let Some(said) = &self.said else {
            return Err(ApiError::invalid(param, "this session has no messages: cut it at a token"));
        };
        let n = said.messages.len();
        match said.messages.get(at) {
            Some(message) => message.begins.map(|begins| begins.token).ok_or_else(|| {
                let message =
                    format!("the model's template does not show where message {at} begins: cut at a token");
                ApiError::invalid(param, message)
            }),
            None if at == n => Ok(said.tail.unwrap_or(self.tokens.len())),
            None => {
                let message = format!("`{param}` is message {at}; the session has {n}");
                Err(ApiError::invalid(param, message))
            }
        }
    }

    /// The messages, each with the token at which it begins; `open` if it may go on.
    pub fn messages(&self) -> Option<Vec<Value>> {
        let said = self.said.as_ref()?;
        let last = said.messages.len().saturating_sub(1);
        let show = |(i, message): (usize, &Message)| {
            json!({
                "message": message.body,
                "begins": message.begins.map(|begins| begins.token),
                "open": i == last && self.is_open(),
            })
        };
        Some(said.messages.iter().enumerate().map(show).collect())
    }

    pub fn n_messages(&self) -> Option<usize> {
        self.said.as_ref().map(|said| said.messages.len())
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

/// Bytes of texts and keys in it.
fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| 8 + weight(item)).sum(),
        Value::Object(fields) => fields.iter().map(|(name, field)| 8 + name.len() + weight(field)).sum(),
        _ => 8,
    }
}

/// Tokens of a text, and where among them its parts begin: at `cuts`, bytes in order.
fn place(
    scribe: &impl Scribe,
    text: &str,
    first: bool,
    cuts: &[usize],
) -> Result<(Vec<u32>, Vec<usize>), ApiError> {
    let whole = scribe.encode_rendered(text, first)?;
    let (mut parts, mut at, mut from) = (Vec::new(), Vec::new(), 0);
    for &cut in cuts {
        parts.extend(match cut > from {
            true => scribe.encode_rendered(&text[from..cut], first && from == 0)?,
            false => Vec::new(),
        });
        at.push(parts.len());
        from = cut;
    }
    if from < text.len() {
        parts.extend(scribe.encode_rendered(&text[from..], first && from == 0)?);
    }
    if parts == whole {
        return Ok((whole, at));
    }
    // A token reaches over a cut: the cut is before it.
    for (at, &cut) in at.iter_mut().zip(cuts) {
        let before = scribe.encode_rendered(&text[..cut], first)?;
        *at = if cut == 0 { 0 } else { before.iter().zip(&whole).take_while(|(a, b)| a == b).count() };
    }
    Ok((whole, at))
}
