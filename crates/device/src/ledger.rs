//! Reserves, logs and releases the KV bytes of one cache. Every backend allocates through it, so all backends log the
//! same events.
//!
//! Events (`tracing`, target `kvist::memory`): `kv_cache.allocate`, `.grow`, `.shrink`, `.free` at INFO, `.refuse` at WARN, with
//! `action`, `target`, `device`, `bytes`, `max_tokens`, `layers`, `error_kind` and a readable sentence.
use crate::budget::*;
use std::sync::Arc;

/// The KV bytes of one cache. Logs their release on drop.
#[derive(Debug)]
pub struct KvLedger {
    reservation: Reservation,
    device: &'static str,
    max_tokens: u32,
    layers: usize,
}

macro_rules! narrate {
    ($level:ident, $name:literal, $ledger:expr, $action:literal, $bytes:expr, $error:expr, $($human:tt)*) => {
        tracing::$level!(
            name: $name,
            target: "kvist::memory",
            event = $name,
            action = $action,
            "target" = "kv-cache",
            device = $ledger.device,
            bytes = $bytes,
            max_tokens = $ledger.max_tokens,
            layers = $ledger.layers,
            error_kind = $error,
            $($human)*
        )
    };
}

impl KvLedger {
    /// Makes a ledger without reserved bytes. `max_tokens` is the capacity of the largest layer group.
    pub fn new(budget: &Arc<MemoryBudget>, device: &'static str, max_tokens: u32, layers: usize) -> Self {
        let reservation = Reservation::empty(budget, Purpose::KvCache);
        KvLedger { reservation, device, max_tokens, layers }
    }

    pub fn bytes(&self) -> u64 {
        self.reservation.bytes()
    }

    /// Reserves `more` bytes, or changes nothing. Call it before allocating them.
    pub fn grow(&mut self, more: u64) -> Result<(), OutOfBudget> {
        let before = self.bytes();
        if let Err(error) = self.reservation.grow(more) {
            let (asked, free) = (Bytes(error.asked), Bytes(error.free));
            narrate!(
                warn,
                "kv_cache.refuse",
                self,
                "refuse",
                more,
                "out_of_budget",
                "KV cache refused: {asked} asked, {free} free"
            );
            return Err(error);
        }
        let (size, now) = (Bytes(more), Bytes(self.bytes()));
        let (tokens, layers) = (self.max_tokens, self.layers);
        if before == 0 {
            narrate!(
                info,
                "kv_cache.allocate",
                self,
                "allocate",
                more,
                "",
                "Allocated {size} of KV cache (at most {tokens} tokens, {layers} layers)"
            );
        } else {
            narrate!(info, "kv_cache.grow", self, "grow", more, "", "Grew the KV cache by {size} to {now}");
        }
        Ok(())
    }

    /// Another capacity of the largest layer group.
    pub fn resize(&mut self, max_tokens: u32) {
        self.max_tokens = max_tokens;
    }

    /// Returns bytes that were freed.
    pub fn release(&mut self, less: u64) {
        self.reservation.shrink(less);
        let (size, now) = (Bytes(less), Bytes(self.bytes()));
        narrate!(info, "kv_cache.shrink", self, "shrink", less, "", "Freed {size} of KV cache, {now} remain");
    }

    /// Returns bytes that were reserved for an allocation which the system then refused.
    pub fn shrink(&mut self, less: u64) {
        self.reservation.shrink(less);
        narrate!(
            warn,
            "kv_cache.refuse",
            self,
            "refuse",
            less,
            "out_of_memory",
            "KV cache refused: the system did not give {}",
            Bytes(less)
        );
    }
}

impl Drop for KvLedger {
    fn drop(&mut self) {
        let bytes = self.bytes();
        if bytes > 0 {
            narrate!(info, "kv_cache.free", self, "free", bytes, "", "Freed {} of KV cache", Bytes(bytes));
        }
    }
}
