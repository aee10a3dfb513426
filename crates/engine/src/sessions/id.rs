//! Ids of sessions.
use crate::random::random_id;
use std::fmt;

/// An id of a session. Drawn at random, so that a client cannot guess the ids of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u128);

impl SessionId {
    pub(super) fn draw() -> Self {
        SessionId(random_id())
    }

    /// `None` if the text is not as [`Display`](fmt::Display) writes it.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sess-")?;
        let canonical = digits.len() == 32 && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        canonical.then(|| u128::from_str_radix(digits, 16).ok().map(SessionId))?
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sess-{:032x}", self.0)
    }
}
