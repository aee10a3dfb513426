//! Deleting what the cache and the tiers have under a salt.
use super::{Engine, EngineState};
use std::time::Duration;

/// How long [`Engine::forget`] waits for the tiers.
const TOLD_WITHIN: Duration = Duration::from_secs(2);

/// What [`Engine::forget`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Blocks that left the cache.
    pub blocks: usize,
    /// Tiers that could not be told in time. They are told as soon as they work, if this engine still runs then. Until then other
    /// engines, and this one after a restart, find what such a tier has.
    pub untold: Vec<String>,
}

impl EngineState {
    /// Drops what the cache has under a salt, and tells the tiers.
    fn forget(&mut self, salt: &str) -> usize {
        let now = self.now_ns();
        let blocks = self.scheduler.forget(now, salt);
        self.executor.move_tiers(&mut self.scheduler, now);
        blocks
    }
}

impl Engine {
    /// Drops what the cache has under a salt, except blocks that running jobs use. What tiers have under it is not found any more: by
    /// this engine at once, by others when they read the note that is written to each tier. Waits for these notes, two seconds at
    /// most. `None` if the engine thread has ended.
    pub async fn forget(&self, salt: &str) -> Option<Forgotten> {
        let salt = salt.to_owned();
        let forget = move |state: &mut EngineState| {
            let blocks = state.forget(&salt);
            (blocks, state.executor.tiers().map(|tiers| tiers.note_of(&salt)))
        };
        let (blocks, note) = self.inspect(forget).await?;
        let untold = match (&self.shared.tier_stores, note) {
            (Some(stores), Some(note)) => stores.untold(&note, TOLD_WITHIN).await,
            _ => Vec::new(),
        };
        Some(Forgotten { blocks, untold: untold.into_iter().map(str::to_owned).collect() })
    }
}
