//! A message's header: whose it is, its channel, to whom it goes, and what its text is.
use super::{CHANNEL, CONSTRAIN, Channel};

const ROLE: &str = "assistant";
const RECIPIENT: &str = "to=";
/// The namespace of a request's tools.
const FUNCTIONS: &str = "functions.";
const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Header<'t> {
    pub channel: Channel,
    /// The function that it calls.
    pub function: Option<&'t str>,
    /// What of it is no part of a header: text of the message.
    pub rest: &'t str,
    /// The recipient is named.
    addressed: bool,
    /// A channel's mark is there.
    marked: bool,
    /// Behind it a name is to stand where the rest does.
    unnamed: bool,
}

/// Of a text that begins where no header has to: can it be one, or become one?
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

/// The word that a text begins with, up to a blank or a mark, and what follows it.
fn word(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len()))
}

impl<'t> Header<'t> {
    /// `closed`: `<|message|>` stands behind it. Models leave that out at times, and then the text follows at once.
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

    /// Take the recipient from the start of a text.
    fn addressee(&mut self, text: &'t str) -> &'t str {
        let Some(rest) = text.trim_start().strip_prefix(RECIPIENT) else { return text };
        let (name, rest) = word(rest);
        self.addressed = true;
        self.function = name.strip_prefix(FUNCTIONS).filter(|name| !name.is_empty());
        rest
    }

    /// Take what the text of the message is said to be from the start of the rest. Without its mark it can be told from
    /// that text only in a header that is closed.
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

    /// Of a header behind which nothing comes: does it end before the text of its message? `started`: `<|start|>`
    /// stands before it.
    pub fn is_cut(&self, started: bool) -> bool {
        let rest = self.rest.trim();
        let is_word = rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        let begins = |word: &str| word.starts_with(rest);
        let names = self.marked && (begins(RECIPIENT) || (self.unnamed && CHANNELS.into_iter().any(begins)));
        names || (self.addressed && is_word) || (started && !self.marked && ROLE.starts_with(rest))
    }

    /// Is there anything that only a header has?
    pub fn is_one(&self) -> bool {
        self.marked || self.addressed
    }
}
