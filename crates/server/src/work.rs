//! Memory that requests take while they are made ready, beside their documents: renderings and tokenizations.
//!
//! It promises that all of them together take no more than [`work_bytes`] says, because each takes its bound before it
//! begins, and waits, oldest first, while there is no room. What could never have room is refused.
use crate::body::bodies_bytes;
use crate::error::ApiError;
use kvist_engine::halt;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A request is made ready (parsed, rendered, tokenized) within this, or refused.
pub(crate) const PREPARATION: Duration = Duration::from_secs(30);

/// Bytes that a rendering of an empty conversation may take, and those for each byte of a conversation, as
/// [`Conversation::rendering_bytes`](kvist_engine::template::Conversation::rendering_bytes) has them.
const RENDERING_BYTES: usize = 32 << 20;
const RENDERING_FACTOR: usize = 16;

/// Bytes for all renderings and tokenizations at a time: room for one of the largest body, be it all of one text.
pub(crate) fn work_bytes(max_body_bytes: usize) -> usize {
    max_body_bytes.saturating_mul(RENDERING_FACTOR).saturating_add(RENDERING_BYTES)
}

/// Threads that make requests ready.
pub(crate) const THREADS: usize = 8;

/// Bytes of memory that all requests together take until they are submitted: bodies and their documents, renderings,
/// tokenizations, and the text that each thread may hold beside them. The sizes of lanes and semaphores enforce it.
pub fn request_bytes(max_body_bytes: usize) -> usize {
    let texts = max_body_bytes.saturating_mul(THREADS);
    bodies_bytes(max_body_bytes).saturating_add(work_bytes(max_body_bytes)).saturating_add(texts)
}

/// Bytes are counted in units, of which there may be as many as a semaphore holds.
const UNIT: usize = 1 << 10;

pub(crate) struct Work {
    left: Arc<Semaphore>,
    units: usize,
}

/// Bytes, until it is dropped.
pub(crate) struct Taken {
    _units: OwnedSemaphorePermit,
}

impl Work {
    pub fn new(max_body_bytes: usize) -> Self {
        let units = (work_bytes(max_body_bytes) / UNIT).min(u32::MAX as usize).min(Semaphore::MAX_PERMITS);
        Work { left: Arc::new(Semaphore::new(units)), units }
    }

    /// Bytes for all.
    pub fn bytes(&self) -> usize {
        self.units * UNIT
    }

    /// Room for work of so many bytes on this thread, one of those that may wait. A thread that holds room must not ask
    /// for more: it would wait for itself.
    pub fn take(&self, bytes: usize, param: &str) -> Result<Taken, ApiError> {
        let units = bytes.div_ceil(UNIT);
        if units > self.units {
            let message = format!(
                "to make this ready takes up to {bytes} bytes of memory; the server has {} for such work: shorten it",
                self.bytes()
            );
            return Err(ApiError::invalid(param, message));
        }
        let taken = Handle::current().block_on(async {
            let taken = self.left.clone().acquire_many_owned(u32::try_from(units).unwrap_or(u32::MAX));
            tokio::time::timeout(PREPARATION, taken).await
        });
        halt::check().map_err(|_| halted())?;
        match taken {
            Ok(Ok(units)) => Ok(Taken { _units: units }),
            _ => Err(halted()),
        }
    }
}

/// The client has left, or its request took too long to be made ready.
pub(crate) fn halted() -> ApiError {
    let message = format!(
        "the request was not ready within {} s: shorten it, or try again when the server is less busy",
        PREPARATION.as_secs()
    );
    ApiError { message, ..ApiError::deadline() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_engine::template::Conversation;

    /// What is set aside is what a rendering may take.
    #[test]
    fn the_largest_conversation_has_room() {
        let kwargs = serde_json::Map::new();
        for bytes in [0, 1000, 4 << 20] {
            let messages = [serde_json::json!({"role": "user", "content": "a".repeat(bytes)})];
            let conversation = Conversation {
                messages: &messages,
                tools: &[],
                add_generation_prompt: true,
                kwargs: &kwargs,
            };
            let rendering = conversation.rendering_bytes();
            assert!(
                rendering >= work_bytes(bytes) && rendering < work_bytes(bytes + 1000),
                "{bytes}: {rendering}"
            );
        }
    }

    /// Eight renderings at once, each within its limits, ended the process: together they were without any.
    #[test]
    fn work_waits_for_work() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let work = Arc::new(Work::new(0));
        let whole = work_bytes(0);
        let (first, second) = (work.clone(), work.clone());
        runtime.block_on(async {
            let refused = tokio::task::spawn_blocking({
                let work = work.clone();
                move || work.take(whole + UNIT, "messages").err().map(|error| error.param)
            });
            assert_eq!(refused.await.unwrap(), Some(Some("messages".to_string())));
            let held = tokio::task::spawn_blocking(move || first.take(whole, "a").unwrap()).await.unwrap();
            let waits = tokio::task::spawn_blocking(move || second.take(UNIT, "b").is_ok());
            tokio::task::yield_now().await;
            assert!(work.left.available_permits() == 0 && !waits.is_finished());
            drop(held);
            assert!(waits.await.unwrap());
            assert_eq!(work.left.available_permits(), work.units);
        });
    }
}
