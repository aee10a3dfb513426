//! Request bodies: reading them, and parsing them into JSON documents.
//!
//! Threads that answer health checks do not parse, and memory is limited ([`Bodies`]). A body that is refused is
//! refused before the rest of it has arrived: the connection reads the rest and closes (`connection.rs`). A field that
//! appears twice in an object is refused, because one of the two would be ignored.
use crate::blocking::{blocking, keep_document};
use crate::bodies::{Bodies, SMALL_BYTES, weight};
use crate::error::ApiError;
use crate::extract::Call;
use crate::memory::Permit;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Read and parse the body as JSON, within the limits.
pub(crate) async fn json_body(call: &Call, headers: &HeaderMap, body: Body) -> Result<Value, ApiError> {
    let (state, name) = (&call.state, &call.caller.name);
    let max = state.limits.max_body_bytes;
    if state.is_draining() {
        return Err(ApiError::shutting_down(state.retry_after_s()));
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
    if declared.is_some_and(|n| n > max as u64) {
        return Err(too_large(max));
    }
    let read = collect(body, &state.bodies, max, name);
    let read = tokio::time::timeout(state.limits.read_timeout(), read).await;
    let read = read.map_err(|_| {
        let message = format!("the body did not arrive within {} s", state.limits.read_timeout_s);
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
    })?;
    let (bytes, raw) = read?;
    let weight = weight(&bytes);
    if weight > state.bodies.max && bytes.len() > SMALL_BYTES {
        let message = format!(
            "the body has so many values that it would take {weight} bytes of memory; {} are allowed",
            state.bodies.max
        );
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    let permit = state.bodies.document(name, bytes.len(), weight);
    let permit = tokio::time::timeout(state.limits.read_timeout(), permit).await;
    let permit = permit.ok().flatten().ok_or_else(ApiError::busy)?;
    let (document, permit) = blocking(move || {
        let document = serde_json::from_slice::<Document>(&bytes).map_err(|e| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not JSON: {e}"))
        })?;
        drop((bytes, raw));
        Ok((document.0, permit))
    })
    .await?;
    keep_document(permit);
    Ok(document)
}

fn too_large(max: usize) -> ApiError {
    let message = format!("the body has more than {max} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

/// Read at most `max` bytes of the body. Also returns the bytes it took from [`Bodies`].
async fn collect(
    body: Body,
    bodies: &Bodies,
    max: usize,
    name: &str,
) -> Result<(Vec<u8>, Option<Permit>), ApiError> {
    let mut permit: Option<Permit> = None;
    let mut bytes = Vec::new();
    let mut limited = Limited::new(body, max);
    while let Some(frame) = limited.frame().await {
        let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
            true => too_large(max),
            false => ApiError::new(StatusCode::BAD_REQUEST, "bad_body", "the body ended early"),
        })?;
        if let Ok(data) = frame.into_data() {
            let all = bytes.len() + data.len();
            let (pool, new) = match (all > SMALL_BYTES, bytes.len() > SMALL_BYTES) {
                (false, _) => (&bodies.small_raw, data.len()),
                // The body has just become a large one: move it to the other pool.
                (true, false) => {
                    permit = None;
                    (&bodies.raw, all)
                }
                (true, true) => (&bodies.raw, data.len()),
            };
            let more = pool.try_take(name, new).ok_or_else(ApiError::busy)?;
            match &mut permit {
                Some(permit) => permit.merge(more),
                None => permit = Some(more),
            }
            if bytes.capacity() - bytes.len() < data.len() {
                bytes.reserve_exact(data.len().max(bytes.len() / 8));
            }
            bytes.extend_from_slice(&data);
        }
    }
    Ok((bytes, permit))
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
                return Err(A::Error::custom(format_args!("the field {name:?} appears twice")));
            }
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bodies::{SMALL_BODIES_BYTES, SMALL_DOCUMENTS_BYTES, bodies_bytes};
    use std::sync::Arc;

    /// Regression: only the limit of connections bounded bodies up to 64 KiB.
    #[tokio::test]
    async fn small_bodies_are_counted_as_they_come() {
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let bodies = Bodies::new(4 << 20, &[a.clone(), b.clone()]);
        let read = |bytes: usize, name: Arc<str>| {
            let bodies = &bodies;
            async move { collect(Body::from(vec![b' '; bytes]), bodies, 4 << 20, &name).await }
        };
        let left = || (bodies.small_raw.available(), bodies.raw.available());
        let (none, all) = (left(), SMALL_BODIES_BYTES);
        let small = read(SMALL_BYTES, a.clone()).await.unwrap();
        assert_eq!(left(), (all - SMALL_BYTES, none.1));
        let large = read(SMALL_BYTES + 1, a.clone()).await.unwrap();
        assert_eq!(left(), (all - SMALL_BYTES, none.1 - SMALL_BYTES - 1));
        drop((small, large));
        assert_eq!(left(), none);
        // A name has its half, however much the other one uses.
        let mut permits = Vec::new();
        let refused = loop {
            match read(SMALL_BYTES, a.clone()).await {
                Ok(body) => permits.push(body),
                Err(error) => break error,
            }
        };
        assert_eq!((permits.len() * SMALL_BYTES, refused.code), (all / 2, "server_busy"));
        assert!(read(SMALL_BYTES, b).await.is_ok());
        assert!(bodies_bytes(0) >= all + SMALL_DOCUMENTS_BYTES);
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
        assert!(twice.err().unwrap().to_string().contains("\"a\" appears twice"));
    }
}
