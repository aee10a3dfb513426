//! Memory for log-probabilities of prompts, which are scored faster than any client reads, and for other long answers
//! until they are read.
use super::request::MAX_TOP;
use crate::error::ApiError;
use crate::memory::{BytePool, Permit};
use kvist_engine::serving::{LogProb, Token};
use std::sync::Arc;
use std::time::Instant;

/// Memory limit for the log-probabilities of prompts, and for long texts and token lists, over all requests. Each of up
/// to [`REQUESTS`] names has a share that no other name can take. With more names, the names take turns.
pub(crate) struct ScoreMemory {
    pool: BytePool,
    /// Largest number of bytes for one request.
    max: usize,
}

/// Smallest value of `max`, in bytes.
const MIN_BYTES: usize = 16 << 20;
/// Number of requests that may take `max` at the same time.
const REQUESTS: usize = 4;

/// Memory of a prompt's token with `top` log-probabilities, in bytes: the token, its text, and the list.
fn bytes_of_token(top: u8) -> usize {
    size_of::<Token>() + 32 + usize::from(top) * size_of::<(u32, f32)>() + size_of::<LogProb>()
}

impl ScoreMemory {
    /// One request may score a whole context.
    pub fn new(context: u32, names: &[Arc<str>]) -> Self {
        let max = (context as usize).saturating_mul(bytes_of_token(MAX_TOP)).max(MIN_BYTES);
        ScoreMemory { pool: BytePool::new(max.saturating_mul(REQUESTS), max, names), max }
    }

    /// Largest number of bytes that one request may take.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Reserve memory for an answer of this many bytes, without waiting.
    pub fn try_take(&self, name: &str, bytes: usize, param: &str) -> Result<Permit, ApiError> {
        if bytes > self.max {
            let message = format!(
                "the answer would take {bytes} bytes of memory, but an answer may take at most {}: send less at a time",
                self.max
            );
            return Err(ApiError::invalid(param, message));
        }
        self.pool.try_take(name, bytes).ok_or_else(ApiError::busy)
    }

    /// Reserve memory for the scores of this many prompt tokens. Waits until the deadline.
    pub async fn take(
        &self,
        name: &str,
        tokens: usize,
        top: u8,
        deadline: Instant,
    ) -> Result<Permit, ApiError> {
        let bytes = tokens.saturating_mul(bytes_of_token(top));
        if bytes > self.max {
            let fit = self.max / bytes_of_token(top);
            let message = format!(
                "`echo` with `logprobs`: the prompts have {tokens} tokens, but one request can score at most {fit} \
                 tokens with {top} log-probabilities each. Send fewer prompts at a time, or a smaller `logprobs`"
            );
            return Err(ApiError::invalid("prompt", message));
        }
        self.wait(name, bytes, deadline).await
    }

    /// Reserve memory to echo prompts of this many bytes. Waits until the deadline.
    pub async fn take_echo(&self, name: &str, bytes: usize, deadline: Instant) -> Result<Permit, ApiError> {
        if bytes > self.max {
            let message = format!(
                "`echo`: the prompts have {bytes} bytes, but those of one request may have at most {}: send fewer \
                 prompts at a time",
                self.max
            );
            return Err(ApiError::invalid("prompt", message));
        }
        self.wait(name, bytes, deadline).await
    }

    async fn wait(&self, name: &str, bytes: usize, deadline: Instant) -> Result<Permit, ApiError> {
        let permit = self.pool.take(name, bytes);
        let permit = tokio::time::timeout_at(deadline.into(), permit).await;
        permit.map_err(|_| ApiError::deadline())?.ok_or_else(|| ApiError::internal("no memory for scores"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_answers_have_a_bound_together() {
        let names: [Arc<str>; 2] = ["a".into(), "b".into()];
        let memory = ScoreMemory::new(1000, &names);
        let take = |name: &str, bytes| memory.try_take(name, bytes, "prompt").map_err(|error| error.code);
        let permit = [take("a", MIN_BYTES).unwrap(), take("a", MIN_BYTES).unwrap()];
        assert_eq!(take("a", 1).err(), Some("server_busy"));
        let other = [take("b", MIN_BYTES).unwrap(), take("b", MIN_BYTES).unwrap()];
        assert_eq!(take("b", MIN_BYTES + 1).err(), Some("invalid_value"));
        drop((permit, other));
        assert!(take("a", MIN_BYTES).is_ok());
    }

    #[tokio::test]
    async fn prompts_that_are_given_back_have_the_same_room() {
        let memory = ScoreMemory::new(1000, &[]);
        let now = Instant::now();
        let code = |taken: Result<Permit, ApiError>| taken.map_err(|error| error.code);
        let all: Vec<Permit> =
            (0..REQUESTS).map(|_| memory.try_take("", MIN_BYTES, "prompt").ok().unwrap()).collect();
        assert_eq!(code(memory.take_echo("", 1, now).await).err(), Some(ApiError::deadline().code));
        assert_eq!(code(memory.take_echo("", MIN_BYTES + 1, now).await).err(), Some("invalid_value"));
        drop(all);
        let later = now + std::time::Duration::from_secs(3600);
        assert!(memory.take_echo("", MIN_BYTES, later).await.is_ok());
    }
}
