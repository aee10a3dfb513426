//! States that are read and taken over at the same time are bounded, and so is the memory for them.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// States at a time. A read waits for the store, so more than one; each may be as large as it is allowed to be.
const AT_ONCE: usize = 4;
/// Of one owner: another one finds a place, and waits in the line behind so many at most.
const OF_OWNER: usize = AT_ONCE - 1;

/// Bytes of a record for each token: its digits and a comma.
const TOKEN_TEXT_BYTES: u64 = 8;
/// Bytes of a conversation for each token that they [count as](crate::sessions::History::charge).
const CHARGED_BYTES: u64 = 16;

/// Bytes of the longest record of a session that counts as so many tokens. JSON escapes some characters, so a conversation may take
/// twice its bytes.
pub(super) fn most_record_bytes(tokens: u64) -> u64 {
    tokens.saturating_mul(TOKEN_TEXT_BYTES + 2 * CHARGED_BYTES)
}

/// Upper bound of the memory for states that are being taken over, in bytes, if each counts as so many tokens: it is there as a record
/// and as a history, whose lists may have grown to twice of what is in them.
pub fn taking_over_bytes(tokens: u64) -> u64 {
    let history = tokens.saturating_mul(2 * (size_of::<u32>() as u64 + CHARGED_BYTES));
    most_record_bytes(tokens).saturating_add(history).saturating_mul(AT_ONCE as u64)
}

/// The turns to read states.
pub(super) struct Turns {
    all: Arc<Semaphore>,
    /// Each owner has a line of its own, from which at most [`OF_OWNER`] wait in the common one. Owners are the names of keys, so
    /// there are few, and they stay.
    lines: Mutex<BTreeMap<Arc<str>, Arc<Semaphore>>>,
}

/// The turn of one state. Dropping it ends it.
pub(super) struct Turn {
    _own: Option<OwnedSemaphorePermit>,
    _all: Option<OwnedSemaphorePermit>,
}

impl Turns {
    pub fn new() -> Turns {
        Turns { all: Arc::new(Semaphore::new(AT_ONCE)), lines: Mutex::default() }
    }

    /// Waits until a state of this owner may be read.
    pub async fn take(&self, owner: &Arc<str>) -> Turn {
        let line = {
            let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            let line = lines.entry(owner.clone()).or_insert_with(|| Arc::new(Semaphore::new(OF_OWNER)));
            line.clone()
        };
        // Neither is ever closed.
        let own = line.acquire_owned().await.ok();
        Turn { _own: own, _all: self.all.clone().acquire_owned().await.ok() }
    }
}
