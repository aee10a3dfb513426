//! Which of two states of a session is the newer one.
use serde::{Deserialize, Serialize};

/// A state of a session: how many changes it has seen, and which process made the last one.
///
/// A process gives a version once, so two states with the same stamp are one. Versions alone do not do: two workers may both make the
/// sixth change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(in crate::sessions) struct Stamp {
    pub version: u64,
    pub writer: u64,
}

impl Stamp {
    /// Of a session that `writer` creates.
    pub fn first(writer: u64) -> Self {
        Stamp { version: 1, writer }
    }

    /// Whether this state is `other`, or was made from it. `recorded` is the state that the shared store had when this process last
    /// looked: this one was made from it too.
    pub fn includes(self, other: Stamp, recorded: Option<Stamp>) -> bool {
        // What one process does to a session is a chain.
        let same_chain = other.writer == self.writer && other.version <= self.version;
        Some(other) == recorded || same_chain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_includes_what_it_was_made_from() {
        let at = |version, writer| Stamp { version, writer };
        let rows = [
            (at(5, 1), at(5, 1), None, true),
            (at(5, 1), at(4, 1), None, true),
            (at(5, 1), at(6, 1), None, false),
            // Another worker's change, whatever its number is.
            (at(5, 1), at(4, 2), None, false),
            (at(5, 1), at(5, 2), None, false),
            (at(5, 1), at(6, 2), Some(at(4, 2)), false),
            // What this worker took over, and then changed.
            (at(5, 1), at(4, 2), Some(at(4, 2)), true),
        ];
        for (here, there, recorded, expected) in rows {
            assert_eq!(here.includes(there, recorded), expected, "{here:?} {there:?} {recorded:?}");
        }
    }
}
