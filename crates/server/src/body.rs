//! Request bodies: reading them, parsing them into JSON documents, and work on the documents.
//!
//! Threads that answer health checks neither parse nor tokenize, and the bodies of all connections together take a
//! bounded amount of memory ([`bodies_bytes`]). Bytes are counted as they arrive: a client that declares much and sends
//! little takes little. A JSON value may take a hundred times the bytes of its text, so the size of a document is
//! estimated before it is parsed, and few large documents exist at one time. Small bodies ([`SMALL_BYTES`]) do not wait
//! for large ones. For both, every key name has a share that no other name can take. A body that is refused is refused
//! before the rest of it has arrived: the connection reads the rest and closes (`connection.rs`). A field that appears
//! twice in an object is refused, because one of the two would be ignored.
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::work::{PREPARATION, halted};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kvist_model::halt::Halt;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Limits for the bytes of bodies, over all connections.
pub(crate) struct Bodies {
    /// Raw bytes as received. Requests never wait for these: a client that sends slowly would block memory that others
    /// need.
    raw: BytePool,
    small_raw: BytePool,
    /// Parsed documents, until the work on them is done. Requests wait for these, oldest first.
    small: BytePool,
    large: BytePool,
    /// Smallest weight of a large document, because each occupies a thread.
    least: usize,
    /// Largest weight of one document.
    most: usize,
}

/// Raw bodies of the largest size that are held at one time.
const RAW_BODIES: usize = 16;
/// Memory for all large documents, and for one of them, in bytes per byte of the largest body.
const DOCUMENTS_FACTOR: usize = 24;
const DOCUMENT_FACTOR: usize = 12;
/// Large documents in work at one time, whatever their size: half of the threads for such work.
const LARGE_AT_WORK: usize = 4;

/// Bodies up to this size have a lane of their own.
pub(crate) const SMALL_BYTES: usize = 64 << 10;
/// Raw bytes of small bodies that are held at one time.
const SMALL_BODIES_BYTES: usize = 32 << 20;
/// Memory for small documents, in bytes: one of the heaviest, or a hundred texts.
const SMALL_DOCUMENTS_BYTES: usize = 32 << 20;

/// Memory of a document for each byte of its body and for each value in it, in bytes. Includes what is parsed from it
/// and the copies that a template gets.
const BYTE_WEIGHT: usize = 4;
const VALUE_WEIGHT: usize = 320;

/// Upper bound of the memory of all bodies and their documents, in bytes, where one body has at most `most` bytes.
pub(crate) fn bodies_bytes(most: usize) -> usize {
    let raw = most.saturating_mul(RAW_BODIES).saturating_add(SMALL_BODIES_BYTES);
    // Buffers grow by an eighth.
    let raw = raw.saturating_add(raw / 8);
    raw.saturating_add(most.saturating_mul(DOCUMENTS_FACTOR)).saturating_add(SMALL_DOCUMENTS_BYTES)
}

/// Upper bound of the memory of this body's document, in bytes. Commas and brackets outside strings give the number of
/// values.
fn weight(body: &[u8]) -> usize {
    let (mut values, mut in_text, mut escaped) = (1_usize, false, false);
    for byte in body {
        match (in_text, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_text = !in_text,
            (false, b',' | b'[' | b'{' | b':') => values += 1,
            _ => {}
        }
    }
    body.len().saturating_mul(BYTE_WEIGHT).saturating_add(values.saturating_mul(VALUE_WEIGHT))
}

/// A pool of bytes that all requests share, and the part of it that each name may take. As long as the pool is large
/// enough for the largest request of every name at once, no name can take another's part. With more names, the names
/// take turns.
pub(crate) struct BytePool {
    all: Arc<Semaphore>,
    shares: BTreeMap<Arc<str>, Arc<Semaphore>>,
}

/// Bytes taken from a lane. Dropping it returns them.
pub(crate) struct Leave {
    own: Option<OwnedSemaphorePermit>,
    all: OwnedSemaphorePermit,
}

impl BytePool {
    /// Names share the pool evenly. Each may take at least `most`, however many names there are.
    pub fn new(bytes: usize, most: usize, names: &[Arc<str>]) -> Self {
        let semaphore = |n: usize| Arc::new(Semaphore::new(n.min(Semaphore::MAX_PERMITS)));
        let share = (bytes / names.len().max(1)).max(most);
        let shares = names.iter().map(|name| (name.clone(), semaphore(share))).collect();
        BytePool { all: semaphore(bytes), shares }
    }

    /// `None` if there is no room now.
    pub fn try_take(&self, name: &str, bytes: usize) -> Option<Leave> {
        let n = u32::try_from(bytes).ok()?;
        let own = self.shares.get(name).map(|own| own.clone().try_acquire_many_owned(n)).transpose().ok()?;
        Some(Leave { own, all: self.all.clone().try_acquire_many_owned(n).ok()? })
    }

    /// Waits for room. `None` if that much can never be granted.
    pub async fn take(&self, name: &str, bytes: usize) -> Option<Leave> {
        let n = u32::try_from(bytes).ok()?;
        // First wait in the line of the own name, so that each name stands only once in the common line.
        let own = match self.shares.get(name) {
            Some(own) => Some(own.clone().acquire_many_owned(n).await.ok()?),
            None => None,
        };
        Some(Leave { own, all: self.all.clone().acquire_many_owned(n).await.ok()? })
    }
}

impl Leave {
    fn merge(&mut self, more: Leave) {
        self.all.merge(more.all);
        if let (Some(own), Some(more)) = (&mut self.own, more.own) {
            own.merge(more);
        }
    }
}

impl Bodies {
    /// `most` is the largest allowed body in bytes; `names` are the key names of all callers.
    pub fn new(most: usize, names: &[Arc<str>]) -> Self {
        let (large, one) = (most.saturating_mul(DOCUMENTS_FACTOR), most.saturating_mul(DOCUMENT_FACTOR));
        Bodies {
            raw: BytePool::new(most.saturating_mul(RAW_BODIES), most, names),
            small_raw: BytePool::new(SMALL_BODIES_BYTES, SMALL_BYTES, names),
            small: BytePool::new(SMALL_DOCUMENTS_BYTES, weight(&[b','; SMALL_BYTES]), names),
            large: BytePool::new(large, one, names),
            least: large / LARGE_AT_WORK,
            most: one.max(weight(&[b','; SMALL_BYTES])),
        }
    }

    /// Wait for a permit to parse a document of this weight from a body of this many bytes.
    async fn document(&self, name: &str, bytes: usize, weight: usize) -> Option<Leave> {
        match bytes <= SMALL_BYTES {
            true => self.small.take(name, weight).await,
            false => self.large.take(name, weight.max(self.least)).await,
        }
    }
}

tokio::task_local! {
    /// The permit for a document, on its way from [`json_body`] to the work on the document.
    static DOCUMENT: Cell<Option<Leave>>;
}

/// Scope in which handlers that take bodies run.
pub(crate) async fn with_body<T>(handler: impl Future<Output = T>) -> T {
    DOCUMENT.scope(Cell::new(None), handler).await
}

pub(crate) fn busy() -> ApiError {
    let message = "too many bodies are being read or worked on: try again";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_busy", message).retry_after(1)
}

/// Read and parse the body as JSON, within the limits.
pub(crate) async fn json_body(app: &App, request: Request) -> Result<Value, ApiError> {
    let most = app.limits.max_body_bytes;
    let headers = request.headers();
    if app.is_draining() {
        return Err(ApiError::shutting_down(app.retry_after_s()));
    }
    // A web page of another origin can send forms and plain text without a CORS preflight, but not JSON.
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if kind != "application/json" {
        let message = "the body must be sent with `Content-Type: application/json`";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    }
    let codings = headers.get_all(header::CONTENT_ENCODING).iter().map(|v| v.to_str().unwrap_or("unknown"));
    let codings: Vec<&str> = codings.flat_map(|value| value.split(',')).map(str::trim).collect();
    if let Some(coding) = codings.iter().find(|c| !c.is_empty() && !c.eq_ignore_ascii_case("identity")) {
        let coding: String = coding.chars().take(32).collect();
        let message = format!(
            "the body is sent with `Content-Encoding: {coding}`: send it as it is, without compression"
        );
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    }
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|n| n > most as u64) {
        return Err(too_large(most));
    }
    let name =
        request.extensions().get::<Caller>().map_or_else(Default::default, |caller| caller.name.clone());
    let read = collect(request.into_body(), &app.bodies, most, &name);
    let read = tokio::time::timeout(app.limits.read_timeout(), read).await;
    let read = read.map_err(|_| {
        let message = format!("the body did not come within {} s", app.limits.read_timeout_s);
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
    })?;
    let (bytes, raw) = read?;
    let weight = weight(&bytes);
    if weight > app.bodies.most && bytes.len() > SMALL_BYTES {
        let message = format!(
            "the body has so many values that its document would take {weight} bytes; {} are allowed",
            app.bodies.most
        );
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    let leave = app.bodies.document(&name, bytes.len(), weight);
    let leave = tokio::time::timeout(app.limits.read_timeout(), leave).await;
    let leave = leave.ok().flatten().ok_or_else(busy)?;
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

/// Read at most `most` bytes of the body. Also returns the bytes it took from [`Bodies`].
async fn collect(
    body: Body,
    bodies: &Bodies,
    most: usize,
    name: &str,
) -> Result<(Vec<u8>, Option<Leave>), ApiError> {
    let mut held: Option<Leave> = None;
    let mut bytes = Vec::new();
    let mut limited = Limited::new(body, most);
    while let Some(frame) = limited.frame().await {
        let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
            true => too_large(most),
            false => ApiError::new(StatusCode::BAD_REQUEST, "bad_body", "the body broke off"),
        })?;
        if let Ok(data) = frame.into_data() {
            let all = bytes.len() + data.len();
            let (lane, new) = match (all > SMALL_BYTES, bytes.len() > SMALL_BYTES) {
                (false, _) => (&bodies.small_raw, data.len()),
                // The body has just become a large one: move it to the other lane.
                (true, false) => {
                    held = None;
                    (&bodies.raw, all)
                }
                (true, true) => (&bodies.raw, data.len()),
            };
            let more = lane.try_take(name, new).ok_or_else(busy)?;
            match &mut held {
                Some(held) => held.merge(more),
                None => held = Some(more),
            }
            if bytes.capacity() - bytes.len() < data.len() {
                bytes.reserve_exact(data.len().max(bytes.len() / 8));
            }
            bytes.extend_from_slice(&data);
        }
    }
    Ok((bytes, held))
}

/// Take the permit for the document of the current request. The work drops it after it has dropped the document.
pub(crate) fn take_document() -> Option<Leave> {
    DOCUMENT.try_with(Cell::take).ok().flatten()
}

/// Run work of many milliseconds (parsing, tokenizing, templates) off the threads that answer health checks. The permit
/// for the current request's document stays taken until the work is done, even if the client has disconnected. Work
/// that renders or tokenizes must reserve memory instead: [`Work::run`](crate::work::Work::run).
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let document = take_document();
    let halt = Halt::default();
    // A handler is dropped when its client disconnects.
    let _wanted = Wanted(halt.clone());
    let done = tokio::task::spawn_blocking(move || {
        let done = match halt.is_over() {
            true => Err(halted()),
            false => halt.until(Instant::now() + PREPARATION).during(work),
        };
        drop(document);
        done
    });
    done.await.unwrap_or_else(|_| Err(ApiError::internal("a request could not be prepared")))
}

/// Cancels the work when its handler is dropped.
pub(crate) struct Wanted(pub Halt);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A JSON value in whose objects every name appears once.
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
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Poll;

    /// Regression: a body of 4 MiB of `[[],[],…` became a document of some 300 MB, and only its bytes were counted.
    #[test]
    fn documents_are_weighed_before_they_are_made() {
        for (body, values) in [
            (r#"{"prompt": "a, [b], {c: \\", "max_tokens": 3}"#, 5),
            ("[[],[],[]]", 7),
            (r#"{"a": "x\",[", "b": [1, 2]}"#, 7),
            ("3", 1),
        ] {
            let expected = body.len() * BYTE_WEIGHT + values * VALUE_WEIGHT;
            assert_eq!(weight(body.as_bytes()), expected, "{body}");
        }
        let bodies = Bodies::new(4 << 20, &[]);
        assert!(weight("word, after word. ".repeat(230_000).as_bytes()) > bodies.most);
        assert!(weight(format!("\"{}\"", "word, after word. ".repeat(230_000)).as_bytes()) < bodies.most / 2);
        assert!(
            weight(format!("[{}]", "12345,".repeat(131_072)).as_bytes()) < bodies.most,
            "a prompt of 131,072 tokens"
        );
    }

    /// Regression: only the limit of connections bounded bodies up to 64 KiB.
    #[tokio::test]
    async fn small_bodies_are_counted_as_they_come() {
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let bodies = Bodies::new(4 << 20, &[a.clone(), b.clone()]);
        let read = |bytes: usize, name: Arc<str>| {
            let bodies = &bodies;
            async move { collect(Body::from(vec![b' '; bytes]), bodies, 4 << 20, &name).await }
        };
        let left = || (bodies.small_raw.all.available_permits(), bodies.raw.all.available_permits());
        let (none, all) = (left(), SMALL_BODIES_BYTES);
        let small = read(SMALL_BYTES, a.clone()).await.unwrap();
        assert_eq!(left(), (all - SMALL_BYTES, none.1));
        let large = read(SMALL_BYTES + 1, a.clone()).await.unwrap();
        assert_eq!(left(), (all - SMALL_BYTES, none.1 - SMALL_BYTES - 1));
        drop((small, large));
        assert_eq!(left(), none);
        // A name has its half, whatever the other one holds.
        let mut held = Vec::new();
        let refused = loop {
            match read(SMALL_BYTES, a.clone()).await {
                Ok(body) => held.push(body),
                Err(error) => break error,
            }
        };
        assert_eq!((held.len() * SMALL_BYTES, refused.code), (all / 2, "server_busy"));
        assert!(read(SMALL_BYTES, b).await.is_ok());
        assert!(bodies_bytes(0) >= all + SMALL_DOCUMENTS_BYTES);
    }

    /// A client disconnects while its work waits for a thread: the work never starts.
    #[test]
    fn work_that_is_not_wanted_any_more_is_not_begun() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().max_blocking_threads(1).build().unwrap();
        for leaves in [true, false] {
            let begun = Arc::new(AtomicBool::new(false));
            let flag = begun.clone();
            runtime.block_on(async {
                let (go, wait) = std::sync::mpsc::channel::<()>();
                let before = tokio::task::spawn_blocking(move || wait.recv().is_ok());
                let mut work = Box::pin(blocking(move || {
                    flag.store(true, Ordering::Relaxed);
                    Ok(())
                }));
                let waits = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx).is_pending()));
                assert!(waits.await);
                let kept = (!leaves).then_some(work); // or dropped, like its handler
                go.send(()).unwrap();
                assert!(before.await.unwrap());
                tokio::task::spawn_blocking(|| ()).await.unwrap(); // runs after it, on the same thread
                drop(kept);
            });
            assert_eq!(begun.load(Ordering::Relaxed), !leaves);
        }
    }

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
