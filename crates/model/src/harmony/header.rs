//! Parses a message header: role, channel, recipient and content type.
use super::{CHANNEL, CONSTRAIN, Channel};

const ROLE: &str = "assistant";
const RECIPIENT: &str = "to=";
/// The namespace of a request's tools.
const FUNCTIONS: &str = "functions.";
const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Header<'t> {
    pub channel: Channel,
    /// The function that the message calls.
    pub function: Option<&'t str>,
    /// The remainder after the header: text of the message.
    pub rest: &'t str,
    /// A recipient is named.
    addressed: bool,
    /// A channel mark is present.
    marked: bool,
    /// The last channel mark is not followed by a channel name.
    unnamed: bool,
}

/// For text where a header is optional: returns whether it is a header or may become one.
pub(super) fn may_go_on(text: &str) -> bool {
    if text.contains(CHANNEL) || text.contains(CONSTRAIN) {
        return true;
    }
    let begins = |text: &str, word: &str| word.starts_with(text) || text.starts_with(word);
    let text = text.trim_start();
    match text.strip_prefix(ROLE) {
        Some(rest) if rest.starts_with(char::is_whitespace) => begins(rest.trim_start(), RECIPIENT),
        Some(rest) => rest.is_empty(),
        None => begins(text, ROLE) || begins(text, RECIPIENT),
    }
}

/// Splits off the first word, up to white space or a mark.
fn word(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len()))
}

impl<'t> Header<'t> {
    /// `closed`: `<|message|>` follows. Models sometimes omit it; then the message text follows directly.
    pub fn read(text: &'t str, closed: bool) -> Self {
        let mut header = Header::default();
        let (role, channel) = match text.find(CHANNEL) {
            Some(at) => (&text[..at], Some(&text[at..])),
            None => (text, None),
        };
        let after = role.trim_start().strip_prefix(ROLE);
        let after = after
            .filter(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace) || rest.starts_with('<'));
        header.rest = header.addressee(after.unwrap_or(role));
        let Some(channels) = channel else {
            header.content_type(closed);
            // Another role, or none.
            if closed {
                header.rest = "";
            }
            return header;
        };
        header.marked = true;
        for part in channels.split(CHANNEL).skip(1) {
            let part = part.trim_start();
            let name = CHANNELS.into_iter().find(|name| part.starts_with(name));
            header.channel = if name == Some("analysis") { Channel::Reasoning } else { Channel::Content };
            header.unnamed = name.is_none();
            header.rest = match (name, closed) {
                (_, true) => word(part).1,
                (Some(name), false) => &part[name.len()..],
                (None, false) => part,
            };
            header.rest = header.addressee(header.rest);
            header.content_type(closed);
            header.rest = header.addressee(header.rest);
        }
        if closed && header.function.is_some() {
            header.rest = "";
        }
        header
    }

    /// Parses a recipient at the start of a text; returns the rest.
    fn addressee(&mut self, text: &'t str) -> &'t str {
        let Some(rest) = text.trim_start().strip_prefix(RECIPIENT) else { return text };
        let (name, rest) = word(rest);
        self.addressed = true;
        self.function = name.strip_prefix(FUNCTIONS).filter(|name| !name.is_empty());
        rest
    }

    /// Removes the content type from the start of the rest. Without a `<|constrain|>` mark it cannot be distinguished
    /// from message text, unless the header is closed.
    fn content_type(&mut self, closed: bool) {
        let rest = self.rest.trim_start();
        self.rest = match rest.strip_prefix(CONSTRAIN) {
            Some(rest) => word(rest.trim_start()).1,
            None if closed => word(rest).1,
            None => rest,
        };
        if closed {
            self.rest = self.rest.trim_start();
        }
    }

    /// For a header at the end of an answer: true if it stops before any message text. `started`: it follows
    /// `<|start|>`.
    pub fn is_cut(&self, started: bool) -> bool {
        let rest = self.rest.trim();
        let is_word = rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        let begins = |word: &str| word.starts_with(rest);
        let names = self.marked && (begins(RECIPIENT) || (self.unnamed && CHANNELS.into_iter().any(begins)));
        names || (self.addressed && is_word) || (started && !self.marked && ROLE.starts_with(rest))
    }

    /// True if it has a part that occurs only in headers.
    pub fn is_one(&self) -> bool {
        self.marked || self.addressed
    }
}
