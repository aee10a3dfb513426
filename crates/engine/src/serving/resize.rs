//! A cache that grows and shrinks while it serves.
use super::Engine;
use kvist_device::DeviceError;
use kvist_scheduler::ResizeRefused;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Why a cache keeps its capacity.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    #[error(transparent)]
    Refused(#[from] ResizeRefused),
    /// The frozen prefix stays in the cache, and a text needs a block behind it.
    #[error(
        "the frozen prefix and a text behind it need {needed} tokens of the cache, and {capacity} are wanted"
    )]
    Prefix {
        /// Tokens of the prefix, and a block.
        needed: u64,
        /// The capacity that was asked for.
        capacity: u64,
    },
    /// The device cannot, or has no memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine thread has ended.
    #[error("the engine has ended")]
    Ended,
}

/// Between two looks whether copies to or from tiers have ended.
const PAUSE: Duration = Duration::from_millis(20);

impl Engine {
    /// Gives the cache room for `tokens` tokens in every layer group, rounded up to whole blocks, between two steps. Running jobs go on and
    /// their texts stay the same: what a smaller cache has no room for is evicted or computed again. Waits up to `patience` for copies
    /// to and from tiers. Returns the new capacity in tokens. If this future is dropped, the cache may have either one.
    ///
    /// # Errors
    /// See [`ResizeError`]. The capacity stays what it was.
    pub async fn resize(&self, tokens: u32, patience: Duration) -> Result<u64, ResizeError> {
        // A time that clocks do not have never comes.
        let until = Instant::now().checked_add(patience);
        loop {
            let shared = Arc::downgrade(&self.shared);
            let resized = self.inspect(move |state| {
                let cache = state.scheduler.cache();
                let whole =
                    |block_tokens: u32| tokens.checked_next_multiple_of(block_tokens).unwrap_or(tokens);
                let capacities: Vec<u32> =
                    cache.occupancy().map(|occupancy| whole(occupancy.block_tokens)).collect();
                for (g, (occupancy, &capacity)) in cache.occupancy().zip(&capacities).enumerate() {
                    let pinned = state.prefix.iter().flat_map(|prefix| prefix.pin.blocks());
                    let n = pinned.filter(|block| usize::from(block.group.0) == g).count() as u64;
                    let needed = (n + 1) * u64::from(occupancy.block_tokens);
                    if n > 0 && needed > u64::from(capacity) {
                        return Err(ResizeError::Prefix { needed, capacity: capacity.into() });
                    }
                }
                let now_ns = state.now_ns();
                state.give_up_imports();
                state.executor.resize(&mut state.scheduler, now_ns, &capacities)?;
                let scheduler = &state.scheduler;
                let capacity = scheduler.used_cells() + scheduler.evictable_cells() + scheduler.free_cells();
                // Here, because the caller may not wait any more: a client that hangs up, Ctrl-C.
                if let Some(shared) = shared.upgrade() {
                    shared.capacity_tokens.store(capacity, SeqCst);
                }
                Ok(capacity)
            });
            match resized.await.ok_or(ResizeError::Ended)? {
                Ok(capacity) => return Ok(capacity),
                Err(ResizeError::Refused(ResizeRefused::InTransfer))
                    if until.is_none_or(|until| Instant::now() < until) =>
                {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(refused) => return Err(refused),
            }
        }
    }
}
