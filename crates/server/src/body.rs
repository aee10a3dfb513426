//! Bodies: read, made into documents, and the work on them.
//!
//! It promises that the threads which answer health checks neither parse nor tokenize, and that bodies of all
//! connections together take a bounded amount of memory: their bytes are counted while they come in (a client that
//! declares much and sends little takes little), and documents, which take up to some thirty times as much, are made
//! only for a few large ones at a time. A field that stands twice in an object is refused: one of the two would be
//! ignored.
use crate::app::App;
use crate::error::ApiError;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of bodies that are held, over all connections.
pub(crate) struct Bodies {
    /// As they came. Nobody waits for this: who still sends would hold what others need.
    raw: Arc<Semaphore>,
    /// As documents, until the work on them is done. Whoever wants one waits, oldest first.
    parsed: Arc<Semaphore>,
}

/// Bodies of the largest size that are held as bytes, and as documents.
const RAW_BODIES: usize = 16;
const PARSED_BODIES: usize = 2;

impl Bodies {
    /// `most` is what one body may have.
    pub fn new(most: usize) -> Self {
        let bodies = |n: usize| Arc::new(Semaphore::new(most.saturating_mul(n).min(Semaphore::MAX_PERMITS)));
        Bodies { raw: bodies(RAW_BODIES), parsed: bodies(PARSED_BODIES) }
    }
}

tokio::task_local! {
    /// The leave to hold a document, on its way from [`json_body`] to the work on it.
    static DOCUMENT: Cell<Option<OwnedSemaphorePermit>>;
}

/// Handlers that take bodies run in here.
pub(crate) async fn with_body<T>(handler: impl Future<Output = T>) -> T {
    DOCUMENT.scope(Cell::new(None), handler).await
}

fn busy() -> ApiError {
    let message = "too many large bodies are being read: try again";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_busy", message).retry_after(1)
}

/// The body as JSON, within its limits.
pub(crate) async fn json_body(app: &App, request: Request) -> Result<Value, ApiError> {
    if app.is_draining() {
        return Err(ApiError::shutting_down(app.retry_after_s()));
    }
    let headers = request.headers();
    // Pages of other origins can send forms and plain text without asking; JSON they cannot.
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if kind != "application/json" {
        let message = "the body must be sent with `Content-Type: application/json`";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    }
    let most = app.limits.max_body_bytes;
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    // Who waits for leave to send is refused instead; whoever sends already must be heard out, see `discard`.
    let asks_first = headers.contains_key(header::EXPECT);
    let mut body = request.into_body();
    if declared.is_some_and(|n| n > most as u64) {
        if !asks_first {
            discard(body, most).await;
        }
        return Err(too_large(most));
    }
    let read = tokio::time::timeout(app.limits.read_timeout(), collect(&mut body, app)).await;
    let read = read.map_err(|_| {
        let message = format!("the body did not come within {} s", app.limits.read_timeout_s);
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
    })?;
    let (bytes, raw) = match read {
        Ok(read) => read,
        Err(error) => {
            discard(body, most).await;
            return Err(error);
        }
    };
    let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let leave = app.bodies.parsed.clone().acquire_many_owned(size);
    let leave = tokio::time::timeout(app.limits.read_timeout(), leave).await;
    let leave = leave.ok().and_then(Result::ok).ok_or_else(busy)?;
    let (document, leave) = blocking(move || {
        let document = serde_json::from_slice::<Document>(&bytes).map_err(|e| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not JSON: {e}"))
        })?;
        drop((bytes, raw));
        Ok((document.0, leave))
    })
    .await?;
    let _ = DOCUMENT.try_with(|held| held.set(Some(leave)));
    Ok(document)
}

fn too_large(most: usize) -> ApiError {
    let message = format!("the body has more than {most} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

/// The body's bytes, and what they hold of [`Bodies`].
async fn collect(body: &mut Body, app: &App) -> Result<(Vec<u8>, OwnedSemaphorePermit), ApiError> {
    let raw = &app.bodies.raw;
    let take = |n: u32| raw.clone().try_acquire_many_owned(n).map_err(|_| busy());
    let mut held = take(0)?;
    let mut bytes = Vec::new();
    let mut limited = Limited::new(body, app.limits.max_body_bytes);
    while let Some(frame) = limited.frame().await {
        let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
            true => too_large(app.limits.max_body_bytes),
            false => ApiError::new(StatusCode::BAD_REQUEST, "bad_body", "the body broke off"),
        })?;
        if let Ok(data) = frame.into_data() {
            held.merge(take(u32::try_from(data.len()).unwrap_or(u32::MAX))?);
            bytes.extend_from_slice(&data);
        }
    }
    Ok((bytes, held))
}

/// Take in what a client still sends of a body that is refused. A connection that is closed with bytes unread is reset,
/// and a client that is still sending then never sees its refusal. Bounded: by [`LINGER`], and by four bodies of the
/// size that is allowed.
pub(crate) async fn discard(body: Body, most: usize) {
    let mut body = Limited::new(body, most.saturating_mul(4));
    let read = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = tokio::time::timeout(LINGER, read).await;
}

/// How long a refused body may still come in.
const LINGER: Duration = Duration::from_secs(5);

/// Work of many milliseconds (parsing, tokenizing, templates), away from the threads that answer health checks. The
/// document of the request that is at work counts as held until the work is done, whether or not anybody waits for it.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let document = DOCUMENT.try_with(Cell::take).ok().flatten();
    let done = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(document);
        done
    });
    done.await.unwrap_or_else(|_| Err(ApiError::internal("a request could not be prepared")))
}

/// JSON whose objects have every name once.
struct Document(Value);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reader).map(Document)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Document(item)) = from.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = from.next_key::<String>()? {
            let Document(value) = from.next_value()?;
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format_args!("the field {name:?} stands twice")));
            }
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_those_of_serde_json_but_for_names_that_stand_twice() {
        for text in [
            r#"{"a": [1, -2, 18446744073709551615, 1.5e300, "\u00e9\n", null, true], "b": {"a": {}, "": []}}"#,
            "3",
            "\"x\"",
            "-9223372036854775808",
            "[[[]]]",
        ] {
            let plain: Value = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::from_str::<Document>(text).unwrap().0, plain, "{text}");
        }
        for text in ["", "{", "[1,]", "1e400", "{\"a\": 1} x", "\"\\ud800\""] {
            assert!(serde_json::from_str::<Value>(text).is_err(), "{text}");
            assert!(serde_json::from_str::<Document>(text).is_err(), "{text}");
        }
        let twice = serde_json::from_str::<Document>(r#"{"n": [{"a": 1, "b": 2, "a": 1}]}"#);
        assert!(twice.err().unwrap().to_string().contains("\"a\" stands twice"));
    }
}
