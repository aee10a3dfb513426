//! What a shared store has of a session: a small head, which names the newest state, and that state.
//!
//! A state is written under a key of its own, and then the head, so the head never names half a state. Both are objects of a
//! [`BlockStore`](kvist_store::BlockStore), whose frame proves every bit; docs/formats/shared-session.md describes them.
use crate::sessions::store::{SessionRecord, Stamp};
use crate::sessions::{History, SessionId};
use kvist_store::{BlockKey, Bytes};
use serde::{Deserialize, Serialize};

// They contain the version of the format: versions that write other records do not find each other's.
const HEAD: &str = "kvist shared session, version 1, head";
const STATE: &str = "kvist shared session, version 1, state";

/// The newest state of a session, or that it was deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Head {
    #[serde(rename = "state")]
    State(Stamp),
    #[serde(rename = "deleted")]
    Deleted,
}

impl Head {
    pub fn to_bytes(self) -> Bytes {
        // A value of this type is always valid JSON.
        serde_json::to_vec(&self).unwrap_or_default().into()
    }

    /// `None` if the bytes are no head.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

/// Where a session is in the store.
#[derive(Clone)]
pub(super) struct Place {
    fingerprint: Vec<u8>,
    owner: String,
    id: SessionId,
}

impl Place {
    /// `fingerprint`: of the model and of what else sessions depend on. Workers with another one, and other owners, have other places.
    pub fn new(fingerprint: &[u8], owner: &str, id: SessionId) -> Self {
        Place { fingerprint: fingerprint.into(), owner: owner.into(), id }
    }

    pub fn head(&self) -> BlockKey {
        let parts: [&[u8]; 3] = [&self.fingerprint, self.owner.as_bytes(), &self.id.0.to_le_bytes()];
        BlockKey::of_object(HEAD, &parts)
    }

    pub fn state(&self, stamp: Stamp) -> BlockKey {
        let (id, version, writer) =
            (self.id.0.to_le_bytes(), stamp.version.to_le_bytes(), stamp.writer.to_le_bytes());
        let parts: [&[u8]; 5] = [&self.fingerprint, self.owner.as_bytes(), &id, &version, &writer];
        BlockKey::of_object(STATE, &parts)
    }

    /// The state that these bytes are, if they are one of this session, with tokens below `vocab`.
    pub fn read(&self, bytes: &[u8], vocab: usize) -> Option<(SessionRecord, History)> {
        let mut record: SessionRecord = serde_json::from_slice(bytes).ok()?;
        if record.owner != self.owner || SessionId::parse(&record.id) != Some(self.id) {
            return None;
        }
        let history = std::mem::take(&mut record.history).restore(vocab)?;
        Some((record, history))
    }
}

/// The bytes of a state.
pub(super) fn written(record: &SessionRecord) -> Result<Bytes, serde_json::Error> {
    serde_json::to_vec(record).map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Another one's session, another model's, and another state are never found: they have another key.
    #[test]
    fn every_part_has_keys_of_its_own() {
        let (id, other) = (SessionId(7), SessionId(8));
        let places = [
            Place::new(b"model", "ann", id),
            Place::new(b"mode", "lann", id),
            Place::new(b"model", "bob", id),
            Place::new(b"model", "ann", other),
        ];
        let stamps = [(1, 2), (2, 1), (2, 2)].map(|(version, writer)| Stamp { version, writer });
        let keys: Vec<BlockKey> = places
            .iter()
            .flat_map(|at| stamps.map(|stamp| at.state(stamp)).into_iter().chain([at.head()]))
            .collect();
        assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), 16);
    }

    #[test]
    fn a_head_is_read_as_it_is_documented() {
        let stamp = Stamp { version: 6, writer: u64::MAX };
        let text = r#"{"state":{"version":6,"writer":18446744073709551615}}"#;
        assert_eq!(Head::State(stamp).to_bytes(), text);
        assert_eq!(Head::parse(text.as_bytes()), Some(Head::State(stamp)));
        assert_eq!(Head::Deleted.to_bytes(), r#""deleted""#);
        assert_eq!(Head::parse(br#""deleted""#), Some(Head::Deleted));
        for bad in ["", "{}", "null", r#"{"state":{"version":6}}"#, r#"{"state":{"version":-1,"writer":1}}"#]
        {
            assert_eq!(Head::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
