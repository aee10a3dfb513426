//! Metrics of sessions that workers share.
use super::Reading;
use kvist_engine::sessions::SharedSessionCounts;

/// What the shared store of sessions was asked, and what it answered.
pub fn of_shared_sessions(counts: SharedSessionCounts) -> [Reading; 6] {
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64, Vec::new());
    [
        count(
            "kvist_shared_sessions_adopted_total",
            "States of sessions that other workers recorded and this one took over.",
            counts.adopted,
        ),
        count(
            "kvist_shared_sessions_recorded_total",
            "States of sessions that were recorded in the shared store.",
            counts.recorded,
        ),
        count(
            "kvist_shared_sessions_failed_writes_total",
            "States and deletions of sessions that the shared store did not take; they are tried again.",
            counts.failed_writes,
        ),
        count(
            "kvist_shared_sessions_unanswered_total",
            "Requests for sessions that went on without the shared store, or were refused, because it did not answer in time.",
            counts.unanswered,
        ),
        count(
            "kvist_shared_sessions_conflicts_total",
            "Changes of sessions that were dropped because another worker recorded one at the same time.",
            counts.conflicts,
        ),
        count(
            "kvist_shared_sessions_lost_total",
            "States of sessions that were damaged or missing in the shared store.",
            counts.lost,
        ),
    ]
}
