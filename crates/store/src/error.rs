//! What can go wrong with a store. A missing or damaged block is no error.

/// Why a store did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be opened as configured.
    #[error("{store}: {problem}. {advice}")]
    Open { store: String, problem: String, advice: String },
    /// The store failed this time; another call may succeed.
    #[error("{store}: cannot {action}: {problem}")]
    Failed { store: String, action: &'static str, problem: String },
    /// No answer within the time limit.
    #[error("{store}: cannot {action}: no answer within {limit_ms} ms")]
    TimedOut { store: String, action: &'static str, limit_ms: u64 },
    /// The store failed repeatedly, so it is not asked for a while.
    #[error(
        "{store}: not asked, because it failed {failures} times in a row; the next attempt is in {retry_ms} ms"
    )]
    Unavailable { store: String, failures: u32, retry_ms: u64 },
    /// Other callers take all of what may be asked at a time. Says nothing about the store.
    #[error("{store}: not asked, because {lookups} other lookups are on their way already")]
    Busy { store: String, lookups: usize },
    /// The store has no room and evicts nothing. It still answers reads, and takes blocks again when something goes.
    #[error(
        "{store}: cannot {action}, because it is full: {problem}. Give it more room, or remove something"
    )]
    Full { store: String, action: &'static str, problem: String },
    /// The block can never fit.
    #[error(
        "{store}: a block of {bytes} bytes does not fit into {capacity_bytes} bytes; give the store more room"
    )]
    TooLarge { store: String, bytes: u64, capacity_bytes: u64 },
}
