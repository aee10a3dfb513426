//! Which cached blocks the tiers have, too.
use super::{Engine, EngineState};
use kvist_cache::GroupId;

/// Which cached blocks tiers have, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksBelow {
    /// The layer group whose block numbers these are.
    pub group: GroupId,
    /// Numbers in ascending order, each with its tiers: bit 0 is the fastest one. Blocks that no tier has are left out.
    pub blocks: Vec<(u32, u8)>,
}

impl Engine {
    /// A number that grows whenever [`blocks_below`](Self::blocks_below) may have changed. `None` without tiers.
    pub fn changes_below(&self) -> Option<u64> {
        Some(self.shared.tier_stores.as_ref()?.changes())
    }

    /// Which cached blocks tiers have, as far as this engine has written or read them there; a tier may have dropped some since. The
    /// engine waits while the names of the cached blocks are copied. `None` without tiers, or if the engine thread has ended.
    pub async fn blocks_below(&self) -> Option<BlocksBelow> {
        let stores = self.shared.tier_stores.as_ref()?;
        let named = |state: &mut EngineState| {
            let (cache, tiers) = (state.scheduler.cache(), state.executor.tiers());
            tiers.map(|tiers| (tiers.naming_group(), tiers.named_blocks(cache)))
        };
        let (group, mut named) = self.inspect(named).await??;
        named.sort_unstable_by_key(|(number, _)| *number);
        let tiers = stores.tiers_with(named.iter().map(|(_, key)| key));
        let blocks = named.iter().map(|(number, _)| *number).zip(tiers).filter(|(_, tiers)| *tiers != 0);
        Some(BlocksBelow { group, blocks: blocks.collect() })
    }
}
