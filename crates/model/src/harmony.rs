//! OpenAI's Harmony format, in which gpt-oss answers: messages in channels, between control tokens.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//! ```
//!
//! The channel `analysis` has the model's reasoning and `final` its answer. `commentary` has function calls, and text
//! before them. The prompt ends with `<|start|>assistant`, so an answer begins inside a header. The recipient of a call
//! may also come before its channel. `<|return|>` and `<|call|>` end an answer; `<|end|>` ends one message of it.
//!
//! The format's control tokens have no text, so the decoder has to write them out by name ([`marks`]). A
//! [`ChannelParser`] then parses the text.
mod header;

use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use header::Header;
use serde::de::IgnoredAny;

pub const START: &str = "<|start|>";
pub const END: &str = "<|end|>";
pub const MESSAGE: &str = "<|message|>";
pub const CHANNEL: &str = "<|channel|>";
pub const CONSTRAIN: &str = "<|constrain|>";
pub const RETURN: &str = "<|return|>";
pub const CALL: &str = "<|call|>";

/// The names of the format's control tokens. None is a prefix of another.
pub const MARKS: [&str; 7] = [START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL];

/// The format's control tokens in a vocabulary. `None` if the model does not use the format: its chat template must
/// write channels, and the control tokens must exist.
pub fn marks(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<Vec<u32>> {
    let writes = template.source(false).contains(CHANNEL) && is_known(tokenizer);
    writes.then(|| MARKS.iter().filter_map(|mark| tokenizer.token(mark)).collect())
}

/// True if the vocabulary has the tokens that every message of the format needs.
fn is_known(tokenizer: &Tokenizer) -> bool {
    [START, END, MESSAGE, CHANNEL].iter().all(|mark| tokenizer.token(mark).is_some())
}

/// Corrects the end tokens of a model with this format: files may omit `<|call|>`, or list `<|end|>`, after which the
/// answer continues.
pub(crate) fn correct_ends(tokenizer: &Tokenizer, ends: &mut Vec<u32>) {
    let answer = [RETURN, CALL].map(|mark| tokenizer.token(mark));
    let [Some(returns), Some(calls)] = answer else { return };
    if is_known(tokenizer) {
        ends.retain(|token| tokenizer.token(END) != Some(*token));
        ends.extend([returns, calls]);
    }
}

/// A final part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Content(String),
    Reasoning(String),
    /// A complete function call. The arguments are a JSON object, as the model wrote it.
    Call {
        name: String,
        arguments: String,
    },
}

/// How a message is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Channel {
    Reasoning,
    /// All other channels, known or not.
    #[default]
    Content,
}

/// Parses an answer that arrives in pieces.
///
/// The result does not depend on how the text is cut. Text is returned as soon as no mark can begin in it. Parsing time
/// is linear in the text's length. The parser buffers incomplete calls, headers and marks; each buffer is bounded. No
/// text is lost: text that matches no known form is content, and so is a call without an object. Messages of one
/// channel are joined with a line break, as in vLLM.
///
/// The parser sees only text: a mark that the model spells with ordinary tokens counts too.
#[derive(Clone, Debug, Default)]
pub struct ChannelParser {
    /// Report calls as [`Delta::Call`]; otherwise their text is content.
    calls: bool,
    /// Text that may become a mark.
    pending: String,
    place: Place,
    /// The text of a header, including its marks.
    header: String,
    /// The header follows `<|start|>`, so it is one whatever its text.
    started: bool,
    channel: Channel,
    /// The call, if the message is one.
    call: Option<Call>,
    /// The message has had text.
    spoken: bool,
    /// This channel had text before.
    content: bool,
    reasoning: bool,
    /// A message or a mark has been seen.
    begun: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// In a header, or before one.
    #[default]
    Header,
    Body,
}

/// An incomplete call.
#[derive(Clone, Debug, Default)]
struct Call {
    name: String,
    body: String,
    /// Its JSON object has begun.
    opened: bool,
}

/// Maximum size of a header in bytes. A longer text is no header, and its rest is message text.
const MAX_HEADER: usize = 512;

/// Maximum size of a call in bytes. A longer one is text.
const MAX_CALL: usize = 4 << 20;

impl ChannelParser {
    pub fn new(calls: bool) -> Self {
        ChannelParser { calls, ..ChannelParser::default() }
    }

    /// Adds the next piece of the answer.
    pub fn push(&mut self, piece: &str, out: &mut Vec<Delta>) {
        let mut text = std::mem::take(&mut self.pending);
        text += piece;
        // Text before `taken` has been consumed; no mark begins between `taken` and `looked`.
        let (mut taken, mut looked) = (0, 0);
        while let Some(at) = text[looked..].find('<').map(|at| looked + at) {
            let rest = &text[at..];
            if let Some(mark) = MARKS.into_iter().find(|mark| rest.starts_with(mark)) {
                self.text(&text[taken..at], out);
                self.mark(mark, out);
                taken = at + mark.len();
                looked = taken;
            } else if MARKS.iter().any(|mark| mark.starts_with(rest)) {
                self.text(&text[taken..at], out);
                self.pending.push_str(rest);
                return;
            } else {
                looked = at + 1;
            }
        }
        self.text(&text[taken..], out);
    }

    /// Ends the answer.
    pub fn finish(&mut self, out: &mut Vec<Delta>) {
        let pending = std::mem::take(&mut self.pending);
        self.text(&pending, out);
        if self.place == Place::Header {
            self.give_up_header(true, out);
        }
        self.close(out);
    }

    fn text(&mut self, text: &str, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        if self.place == Place::Body {
            return self.say(text, out);
        }
        // Cuts at the same byte, however the text is split.
        let mut room = MAX_HEADER.saturating_sub(self.header.len()).min(text.len());
        while !text.is_char_boundary(room) {
            room -= 1;
        }
        self.header += &text[..room];
        if room < text.len() || !(self.started || header::may_go_on(&self.header)) {
            self.give_up_header(false, out);
            self.say(&text[room..], out);
        }
    }

    fn mark(&mut self, mark: &'static str, out: &mut Vec<Delta>) {
        match (mark, self.place) {
            (MESSAGE, Place::Header) => {
                let header = std::mem::take(&mut self.header);
                self.open(Header::read(&header, true), out);
            }
            (MESSAGE | CONSTRAIN, Place::Body) => self.say(mark, out),
            (CHANNEL | CONSTRAIN, Place::Header) => {
                // A second channel in a header replaces one without text.
                let continues = mark == CONSTRAIN || Header::read(&self.header, false).rest.trim().is_empty();
                if !continues || self.header.len() + mark.len() > MAX_HEADER {
                    self.end_message(out);
                }
                self.header += mark;
            }
            (CHANNEL, Place::Body) => {
                self.end_message(out);
                self.header += mark;
            }
            (START, _) => {
                self.end_message(out);
                self.started = true;
            }
            _ => self.end_message(out),
        }
        self.begun = true;
    }

    /// Begins a message.
    fn open(&mut self, header: Header<'_>, out: &mut Vec<Delta>) {
        self.place = Place::Body;
        self.channel = header.channel;
        self.spoken = false;
        let name = header.function.filter(|_| self.calls);
        self.call = name.map(|name| Call { name: name.into(), ..Call::default() });
        self.say(header.rest, out);
    }

    /// The text buffered as a header is message text, except for a valid header at its start. `over`: the answer has
    /// ended.
    fn give_up_header(&mut self, over: bool, out: &mut Vec<Delta>) {
        let text = std::mem::take(&mut self.header);
        let mut header = Header::read(&text, false);
        if !self.started && !header.is_one() {
            header.rest = &text;
        }
        // White space between messages belongs to none of them.
        let is_blank = self.begun && header.rest.trim().is_empty();
        if is_blank || (over && header.is_cut(self.started)) {
            header.rest = "";
        }
        self.open(header, out);
    }

    /// Ends the message. The next one begins with a header.
    fn end_message(&mut self, out: &mut Vec<Delta>) {
        if self.place == Place::Header {
            self.give_up_header(false, out);
        }
        self.close(out);
        (self.place, self.started) = (Place::Header, false);
    }

    fn close(&mut self, out: &mut Vec<Delta>) {
        let Some(Call { name, body, .. }) = self.call.take() else { return };
        let arguments = body.trim();
        match arguments.starts_with('{') && serde_json::from_str::<IgnoredAny>(arguments).is_ok() {
            true => out.push(Delta::Call { name, arguments: arguments.into() }),
            false => self.emit(&body, out),
        }
    }

    /// Handles text of a message.
    fn say(&mut self, text: &str, out: &mut Vec<Delta>) {
        let Some(call) = &mut self.call else { return self.emit(text, out) };
        call.body += text;
        let start = text.trim_start();
        let is_call = call.opened || start.is_empty() || start.starts_with('{');
        call.opened |= !start.is_empty();
        if !is_call || call.body.len() > MAX_CALL {
            let body = std::mem::take(&mut call.body);
            self.call = None;
            self.emit(&body, out);
        }
    }

    fn emit(&mut self, text: &str, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        let is_reasoning = self.channel == Channel::Reasoning;
        let before = if is_reasoning { &mut self.reasoning } else { &mut self.content };
        let between = if *before && !self.spoken { "\n" } else { "" };
        (*before, self.spoken, self.begun) = (true, true, true);
        match (out.last_mut(), is_reasoning) {
            (Some(Delta::Reasoning(last)), true) | (Some(Delta::Content(last)), false) => {
                last.push_str(between);
                last.push_str(text);
            }
            (_, true) => out.push(Delta::Reasoning(format!("{between}{text}"))),
            (_, false) => out.push(Delta::Content(format!("{between}{text}"))),
        }
    }
}

/// A complete parsed answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub content: String,
    pub reasoning: String,
    /// Names and arguments.
    pub calls: Vec<(String, String)>,
}

impl Answer {
    /// Parses a complete answer, with the same result as [`ChannelParser`].
    pub fn read(text: &str, calls: bool) -> Self {
        let (mut parser, mut out) = (ChannelParser::new(calls), Vec::new());
        parser.push(text, &mut out);
        parser.finish(&mut out);
        out.into_iter().collect()
    }
}

impl FromIterator<Delta> for Answer {
    fn from_iter<T: IntoIterator<Item = Delta>>(deltas: T) -> Self {
        let mut answer = Answer::default();
        for delta in deltas {
            match delta {
                Delta::Content(text) => answer.content += &text,
                Delta::Reasoning(text) => answer.reasoning += &text,
                Delta::Call { name, arguments } => answer.calls.push((name, arguments)),
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests;
