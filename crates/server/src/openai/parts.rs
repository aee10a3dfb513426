//! Long responses, written in parts as the client reads them.
use crate::auth::Caller;
use crate::error::ApiError;
use crate::state::ServerState;
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{iter, poll_fn};
use serde_json::Value;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Instant;
use tokio::task::AbortHandle;

/// Tokens, and bytes of text, that are written at a time. A response that is no longer than this is sent in one part.
pub(crate) const PART_TOKENS: usize = 8 << 10;
pub(crate) const PART_BYTES: usize = 16 << 10;

/// A long response, written in parts as the client reads them. Its source data takes `bytes`, which count in
/// [`ScoreMemory`](super::score_memory::ScoreMemory) until the client has read them.
pub(crate) fn in_parts(
    state: &ServerState,
    caller: &Caller,
    bytes: usize,
    param: &str,
    parts: impl Iterator<Item = String> + Send + 'static,
) -> Result<Response, ApiError> {
    let permit = state.scores.try_take(&caller.name, bytes, param)?;
    let mut remaining = Some((parts, permit));
    let parts = std::iter::from_fn(move || {
        let part = remaining.as_mut()?.0.next();
        if part.is_none() {
            remaining = None;
        }
        part.map(Ok::<_, Infallible>)
    });
    let body = until(Instant::now() + state.limits.request_timeout(), Body::from_stream(iter(parts)));
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

/// The text between the brackets of a JSON list.
pub(crate) fn items(tokens: impl AsRef<Vec<u32>>) -> impl Iterator<Item = String> {
    let count = tokens.as_ref().len();
    let part = move |at: usize| {
        let mut part = String::new();
        for (index, token) in (at..).zip(tokens.as_ref()[at..].iter().take(PART_TOKENS)) {
            if index > 0 {
                part.push(',');
            }
            part += &token.to_string();
        }
        part
    };
    (0..count).step_by(PART_TOKENS).map(part)
}

/// The text between the quotes of a JSON string.
pub(crate) fn escaped(text: String) -> impl Iterator<Item = String> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let part = part_of(&text, at, PART_BYTES);
        at += part.len();
        (!part.is_empty()).then(|| escape(part))
    })
}

/// Whole characters from byte `at` on, at most `max` bytes.
pub(crate) fn part_of(text: &str, at: usize, max: usize) -> &str {
    let mut end = text.len().min(at + max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[at..end]
}

/// Escaped for JSON, without the quotes.
pub(crate) fn escape(text: &str) -> String {
    let mut text = Value::from(text).to_string();
    text.pop();
    text.remove(0);
    text
}

/// Returns `body` with an expiry time. At `moment` the body is dropped with everything in it, read or not, and
/// the connection breaks off.
pub(crate) fn until(moment: Instant, body: Body) -> Body {
    let shared = Arc::new(Mutex::new((Some(body.into_data_stream()), None::<Waker>)));
    let end = {
        let shared = shared.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(moment.into()).await;
            let (body, reader) = {
                let mut shared = shared.lock().unwrap_or_else(|broken| broken.into_inner());
                (shared.0.take(), shared.1.take())
            };
            drop(body);
            if let Some(reader) = reader {
                reader.wake();
            }
        })
    };
    let end = EndsWith(end.abort_handle());
    Body::from_stream(poll_fn(move |context| {
        let _ = &end;
        let mut shared = shared.lock().unwrap_or_else(|broken| broken.into_inner());
        let Some(body) = &mut shared.0 else {
            return Poll::Ready(Some(Err(axum::Error::new("the answer was not read in time"))));
        };
        let next = body.poll_next_unpin(context);
        shared.1 = next.is_pending().then(|| context.waker().clone());
        next
    }))
}

/// Aborts a task when dropped.
struct EndsWith(AbortHandle);

impl Drop for EndsWith {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::BytePool;
    use std::time::Duration;

    /// Regression: a slow reader kept memory that other requests waited for.
    #[tokio::test]
    async fn what_a_body_holds_is_given_back_unread() {
        let pool = BytePool::new(8, 8, &[]);
        let lend = |permit| {
            let parts = std::iter::from_fn(move || {
                let _permit = &permit;
                Some(Ok::<_, Infallible>("part"))
            });
            Body::from_stream(futures_util::stream::iter(parts))
        };
        let now = Instant::now();
        let body = until(now, lend(pool.take("a", 8).await.unwrap()));
        // The body is not polled, and its memory is free again.
        let permit = pool.take("b", 8).await.unwrap();
        assert!(body.into_data_stream().next().await.unwrap().is_err());
        let mut body = until(now + Duration::from_secs(3600), lend(permit)).into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), "part");
        assert!(pool.try_take("c", 1).is_none());
        drop(body);
        // The task that would have ended it drops it too.
        assert!(pool.take("c", 8).await.is_some());
        // A reader that is waiting for more is woken at the end.
        let silent = Body::from_stream(futures_util::stream::pending::<Result<&str, Infallible>>());
        let mut body = until(Instant::now(), silent).into_data_stream();
        assert!(body.next().await.unwrap().is_err());
    }
}
