//! Decides when to parse an incomplete call again. Parsing takes time proportional to its length, so a call
//! that arrives in many pieces is not parsed after each of them.

/// A call up to this size in bytes is parsed again at every mark that may complete it. A longer call is parsed
/// again only when it has also grown by an eighth, or at the end of the answer; otherwise each bracket of a
/// nested list would cause the whole call to be parsed.
pub(super) const SHORT_BYTES: usize = 4 << 10;

/// The length in bytes of an incomplete call when it was last parsed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastParse(pub usize);

impl LastParse {
    /// Returns whether to parse again, now that `pending` bytes have arrived. `marked`: the last piece may
    /// complete the call. Without a mark, it is time when the length has doubled.
    pub fn should_parse(self, pending: usize, marked: bool) -> bool {
        let grown = if self.0 > SHORT_BYTES { self.0 / 8 } else { 0 };
        (marked && pending >= self.0 + grown) || pending >= self.0 * 2
    }
}
