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
use std::sync::Arc;

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
    /// Where in these tokens the end begins on which the text of what follows them may depend.
    fn context(&self, tokens: &[u32]) -> usize {
        let _ = tokens;
        0
    }
    /// The content of a message whose answer is this text.
    fn content(&self, answer: &str) -> String;
}

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

/// What a session counts as, be it empty: it has a name, a salt, and a place in a map.
pub(crate) const MIN_CHARGE: u64 = 16;

/// Messages whose places are looked for in one go: each costs a rendering.
const MAX_PLACED: usize = 256;

impl History {
    /// Of a conversation that nobody has begun.
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

    /// What a session of it counts as against a quota: its tokens, or a sixteenth of the bytes that are kept beside
    /// them, if that is more; at least [`MIN_CHARGE`]. Bytes that clones share count in each of them: any may be the
    /// last.
    pub fn charge(&self) -> u64 {
        let bytes = self.said.as_ref().map_or(0, |said| said.bytes);
        (self.tokens.len() as u64).max(bytes as u64 / 16).max(MIN_CHARGE)
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
        let mut tokens = if stays { self.tokens.to_vec() } else { Vec::new() };
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
        let mut history = History { tokens: Arc::new(tokens), said: Some(Arc::new(said)) };
        history.weigh();
        Ok(history)
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

    /// Make `text` of what stands behind token `from`, of which it is a beginning.
    fn shorten(&mut self, scribe: &impl Scribe, from: usize, text: &str) -> Result<(), ApiError> {
        // As it was said: behind what stands before it, or SentencePiece would take its first blank.
        let context = scribe.context(&self.tokens[..from]);
        let before = scribe.decode(&self.tokens[context..from])?;
        let said = |to: usize| {
            let mut all = scribe.decode(&self.tokens[context..to])?;
            match all.starts_with(&before) {
                true => Ok(all.split_off(before.len())),
                false => scribe.decode(&self.tokens[from..to]),
            }
        };
        // The most tokens whose text is a beginning of it: it grows with the tokens, but for a character that is cut.
        let cut = |c| c == char::REPLACEMENT_CHARACTER;
        let (mut fits, mut too_many) = (from, self.tokens.len() + 1);
        while fits + 1 < too_many {
            let middle = fits + (too_many - fits) / 2;
            match text.starts_with(said(middle)?.trim_end_matches(cut)) {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        // Back to where a character is whole.
        let mut shown = said(fits)?;
        while fits > from && !text.starts_with(&shown) {
            fits -= 1;
            shown = said(fits)?;
        }
        let tokens = Arc::make_mut(&mut self.tokens);
        tokens.truncate(fits);
        if let Some(rest) = text.strip_prefix(&shown).filter(|rest| !rest.is_empty()) {
            let rest = scribe.encode(rest, false)?;
            tokens.extend(rest);
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
                message.body["content"] = scribe.content(&answer).into();
            }
        }
        self.weigh();
        Ok(())
    }

    fn weigh(&mut self) {
        if let Some(said) = &mut self.said {
            let messages = said.messages.iter().map(|m| size_of::<Message>() + weight(&m.body));
            let bytes = said.text.len() + messages.sum::<usize>() + weight_of_names(&said.kwargs);
            if bytes != said.bytes {
                Arc::make_mut(said).bytes = bytes;
            }
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
        if token == n_tokens {
            return Ok(history);
        }
        Arc::make_mut(&mut history.tokens).truncate(token);
        let Some(said) = history.said.as_mut().map(Arc::make_mut) else { return Ok(history) };
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

/// Bytes that it has on the heap.
fn weight(value: &Value) -> usize {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// ChatML over bytes: a token for each, and one for each mark. With `forgets`, what the assistant thought earlier is
    /// left out once somebody else has spoken, as templates of thinking models do.
    struct Bytes {
        forgets: bool,
    }

    const MARKS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

    impl Scribe for Bytes {
        fn render(
            &self,
            messages: &[Value],
            _: &Map<String, Value>,
            answer: bool,
        ) -> Result<String, ApiError> {
            let mut text = String::new();
            for (i, message) in messages.iter().enumerate() {
                let content = message["content"].as_str().unwrap();
                let content = match content.split_once("/think>") {
                    Some((_, content)) if self.forgets && i + 1 < messages.len() => content,
                    _ => content,
                };
                text += &format!("<|im_start|>{}\n{content}<|im_end|>\n", message["role"].as_str().unwrap());
            }
            Ok(text + if answer { "<|im_start|>assistant\n" } else { "" })
        }
        fn encode_rendered(&self, text: &str, _: bool) -> Result<Vec<u32>, ApiError> {
            self.encode(text, false)
        }
        fn encode(&self, mut text: &str, _: bool) -> Result<Vec<u32>, ApiError> {
            let mut tokens = Vec::new();
            while let Some(first) = text.bytes().next() {
                let mark = MARKS.iter().position(|mark| text.starts_with(mark));
                tokens.push(mark.map_or(u32::from(first), |mark| 256 + mark as u32));
                text = &text[mark.map_or(1, |mark| MARKS[mark].len())..];
            }
            Ok(tokens)
        }
        fn decode(&self, tokens: &[u32]) -> Result<String, ApiError> {
            Ok(tokens.iter().filter_map(|token| u8::try_from(*token).ok()).map(char::from).collect())
        }
        fn content(&self, answer: &str) -> String {
            answer.into()
        }
    }

    fn message(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    fn bodies(history: &History) -> Vec<Value> {
        history.messages().unwrap().into_iter().map(|m| m["message"].clone()).collect()
    }

    /// Tokens are always those of the template's text, whatever was said, cut and gone on with; a cut at a message is the
    /// history before it; a cut inside an answer leaves its beginning.
    #[test]
    fn histories_and_the_template_itself() {
        let scribe = Bytes { forgets: false };
        let none = Map::new();
        let text_of = |messages: &[Value]| scribe.render(messages, &none, false).unwrap();
        let mut history = History::of_messages(Map::new());
        let mut said: Vec<Value> = Vec::new();
        for turn in 0..4 {
            let new = [message("system", "s"), message("user", &"u".repeat(turn))];
            history = history.with_messages(&scribe, &new).unwrap();
            said.extend(new);
            assert_eq!(*history.tokens, scribe.encode(&text_of(&said), false).unwrap(), "turn {turn}");
            let before = history.clone();
            history = history.with_answer(&scribe).unwrap();
            assert!(history.is_open());
            let from = history.tokens.len();
            Arc::make_mut(&mut history.tokens).extend(scribe.encode("yes, no", false).unwrap());
            // Cut while it is open, as a fork of a running session is.
            let part = history.cut(&scribe, Cut::Token(from + 3), "at").unwrap();
            assert_eq!(bodies(&part).last(), Some(&message("assistant", "yes")));
            assert!(part.is_open());
            // The model's word for the end is the template's to write.
            Arc::make_mut(&mut history.tokens).push(257);
            history.end_answer(&scribe, from, true, None).unwrap();
            said.push(message("assistant", "yes, no"));
            assert_eq!(bodies(&history), said);
            assert!(!history.is_open());
            assert_eq!(history.cut(&scribe, Cut::Message(said.len() - 1), "to").unwrap(), before);
        }
        history = history.with_messages(&scribe, &[message("user", "end")]).unwrap();
        said.push(message("user", "end"));
        for at in 0..=said.len() {
            let cut = history.cut(&scribe, Cut::Message(at), "to").unwrap();
            assert_eq!(bodies(&cut), said[..at]);
            let again = cut.with_messages(&scribe, &said[at..]).unwrap();
            assert_eq!(again.tokens, history.tokens, "message {at}");
        }
        for at in 0..=history.tokens.len() {
            let cut = history.cut(&scribe, Cut::Token(at), "to").unwrap();
            assert_eq!(cut.tokens[..], history.tokens[..at]);
            let whole = bodies(&cut).len() - usize::from(cut.is_open());
            assert_eq!(bodies(&cut)[..whole], said[..whole], "token {at}");
            let begins = cut.cut(&scribe, Cut::Message(whole), "to").unwrap();
            assert_eq!(*begins.tokens, scribe.encode(&text_of(&said[..whole]), false).unwrap(), "token {at}");
            assert!(!begins.has_tail());
            let further = begins.with_messages(&scribe, &said[whole..]).unwrap();
            assert_eq!(further.tokens, history.tokens, "token {at}");
        }
        assert!(history.cut(&scribe, Cut::Token(history.tokens.len() + 1), "to").is_err());
        assert!(history.cut(&scribe, Cut::Message(said.len() + 1), "to").is_err());
    }

    /// A template that rewrites what was said is followed, and it shows.
    #[test]
    fn templates_that_forget_rewrite() {
        let scribe = Bytes { forgets: true };
        let history =
            History::of_messages(Map::new()).with_messages(&scribe, &[message("user", "u")]).unwrap();
        let mut history = history.with_answer(&scribe).unwrap();
        let from = history.tokens.len();
        Arc::make_mut(&mut history.tokens).extend(scribe.encode("<think>hm</think>yes", false).unwrap());
        history.end_answer(&scribe, from, false, None).unwrap();
        let next = history.with_messages(&scribe, &[message("user", "v")]).unwrap();
        assert_eq!(next.in_common(&history), from, "what stood before the answer stays");
        let all = scribe.render(&bodies(&next), &Map::new(), false).unwrap();
        assert_eq!(*next.tokens, scribe.encode(&all, false).unwrap());
        assert!(!all.contains("hm") && bodies(&next)[1] == message("assistant", "<think>hm</think>yes"));
    }

    /// Tokens of bytes, as text that may be cut inside a character; a mark is none of it.
    struct Utf8(Bytes);

    impl Scribe for Utf8 {
        fn render(&self, m: &[Value], kwargs: &Map<String, Value>, answer: bool) -> Result<String, ApiError> {
            self.0.render(m, kwargs, answer)
        }
        fn encode_rendered(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError> {
            self.0.encode(text, first)
        }
        fn encode(&self, _: &str, _: bool) -> Result<Vec<u32>, ApiError> {
            Ok(vec![256])
        }
        fn decode(&self, tokens: &[u32]) -> Result<String, ApiError> {
            let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        }
        fn content(&self, answer: &str) -> String {
            answer.into()
        }
    }

    /// Half a character is no beginning of a text: the search for the last token went astray there, and what had been
    /// drawn was encoded anew. Here encoding anything gives a mark.
    #[test]
    fn answers_of_long_characters_keep_their_tokens() {
        let scribe = Utf8(Bytes { forgets: false });
        let letters = ["a", "é", "漢", "😀", "\u{fffd}"];
        let mut numbers = kvist_cache::twin::SplitMix64(11);
        let mut n = |below: u64| (numbers.next() % below) as usize;
        for _ in 0..2000 {
            let mut word = |most: u64| (0..n(most)).map(|_| letters[n(5)]).collect::<String>();
            let (prompt, kept, rest) = (word(4), word(12), word(6));
            let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
            let mut history = History::of_tokens(tokens(&format!("{prompt}{kept}{rest}")));
            history.end_answer(&scribe, prompt.len(), false, Some(&kept)).unwrap();
            assert_eq!(*history.tokens, tokens(&format!("{prompt}{kept}")), "{prompt:?} {kept:?} {rest:?}");
        }
    }

    #[test]
    fn a_stop_string_is_cut_out_of_a_token() {
        let scribe = Bytes { forgets: false };
        let mut history = History::of_tokens(scribe.encode("ab: one two", false).unwrap());
        history.end_answer(&scribe, 3, false, Some(" one")).unwrap();
        assert_eq!(scribe.decode(&history.tokens).unwrap(), "ab: one");
    }

    /// What is charged is what is there: of a quota's token at most sixteen bytes, whatever they are.
    #[test]
    fn what_no_token_shows_counts_too() {
        let scribe = Bytes { forgets: false };
        assert_eq!(History::of_tokens(vec![1; 70]).charge(), 70);
        assert_eq!(History::default().charge(), MIN_CHARGE);
        let wordy = History::of_messages(Map::new());
        let wordy =
            wordy.with_messages(&scribe, &[json!({"role": "user", "content": "", "name": "n".repeat(1600)})]);
        assert!(wordy.unwrap().charge() >= 100);
        let names = |n: usize| Map::from_iter([("a".to_string(), json!(vec![0; n]))]);
        let named = History::of_messages(names(1000));
        assert!(named.charge() as usize * 16 >= 1000 * size_of::<Value>(), "{}", named.charge());
        let grown = named.with_messages(&scribe, &[message("user", "u")]).unwrap();
        assert!(grown.charge() > named.charge(), "they stay counted");
        // A copy is none until it is changed.
        let copy = grown.clone();
        assert!(Arc::ptr_eq(&copy.tokens, &grown.tokens));
        let (Some(a), Some(b)) = (&copy.said, &grown.said) else { panic!("made of messages") };
        assert!(Arc::ptr_eq(a, b));
        let cut = copy.cut(&scribe, Cut::Message(0), "to").unwrap();
        assert_eq!((cut.tokens.len(), bodies(&grown).len()), (0, 1));
        let Some(of_cut) = &cut.said else { panic!("made of messages") };
        assert!(Arc::ptr_eq(&of_cut.kwargs, &a.kwargs), "names are never copied");
    }
}
