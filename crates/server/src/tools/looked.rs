//! When a call that was not complete is looked at again. To look takes time for each of its bytes, so a call that comes in
//! many pieces is not looked at with each of them.

/// A call of so many bytes is looked at with every mark. A longer one, of which each bracket of a nested list would have
/// the whole read again, when it has grown by an eighth too, or at the end of the answer.
pub(super) const SHORT_BYTES: usize = 4 << 10;

/// Of a call that was not complete, the bytes that were looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looked(pub usize);

impl Looked {
    /// Is it time, now that `held` bytes are there? `marked`: what came last may complete the call. Without that it is when
    /// they have doubled.
    pub fn is_due(self, held: usize, marked: bool) -> bool {
        let grown = if self.0 > SHORT_BYTES { self.0 / 8 } else { 0 };
        (marked && held >= self.0 + grown) || held >= self.0 * 2
    }
}
