//! What the tiers below the cache have: of the cached blocks, and of what is deleted.
use super::{Engine, EngineState};
use kvist_cache::GroupId;
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

/// Which cached blocks tiers have, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksBelow {
    /// The layer group whose block numbers these are.
    pub group: GroupId,
    /// Numbers in ascending order, each with its tiers: bit 0 is the fastest one. Blocks that no tier has are left out.
    pub blocks: Vec<(u32, u8)>,
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

    /// A number that grows whenever [`blocks_below`](Self::blocks_below) may have changed. `None` without tiers.
    pub fn changes_below(&self) -> Option<u64> {
        Some(self.shared.tier_stores.as_ref()?.changes())
    }

    /// Which cached blocks tiers have, as far as this engine has written or read them there; a tier may have dropped some since. The
    /// engine waits while the names of the cached blocks are copied. `None` without tiers, or if the engine thread has ended.
    pub async fn blocks_below(&self) -> Option<BlocksBelow> {
        let stores = self.shared.tier_stores.as_ref()?;
        let named = |state: &mut EngineState| {
            state.executor.tiers().map(|tiers| (tiers.naming_group(), tiers.named_blocks()))
        };
        let (group, mut named) = self.inspect(named).await??;
        named.sort_unstable_by_key(|(number, _)| *number);
        let tiers = stores.tiers_with(named.iter().map(|(_, key)| key));
        let blocks = named.iter().map(|(number, _)| *number).zip(tiers).filter(|(_, tiers)| *tiers != 0);
        Some(BlocksBelow { group, blocks: blocks.collect() })
    }
}
