//! Limits for request bodies: their bytes as received, and the documents that are made from them.
//!
//! The bodies of all connections together take a bounded amount of memory ([`bodies_bytes`]). Bytes are counted as they
//! arrive: a client that declares much and sends little takes little. A JSON value may take a hundred times the bytes
//! of its text, so the size of a document is estimated before it is parsed, and few large documents exist at one time.
//! Small bodies ([`SMALL_BYTES`]) do not wait for large ones. For both, every key name has a share that no other name
//! can take.
use crate::memory::{BytePool, Permit};
use std::sync::Arc;

/// Limits for the bytes of bodies, over all connections.
pub(crate) struct Bodies {
    /// Raw bytes as received. Requests never wait for these: a client that sends slowly would block memory that others
    /// need.
    pub raw: BytePool,
    pub small_raw: BytePool,
    /// Parsed documents, until the work on them is done. Requests wait for these, oldest first.
    small: BytePool,
    large: BytePool,
    /// Smallest weight of a large document, because each occupies a thread.
    min: usize,
    /// Largest weight of one document.
    pub max: usize,
}

/// Raw bodies of the largest size that are in memory at one time.
const RAW_BODIES: usize = 16;
/// Memory for all large documents, and for one of them, in bytes per byte of the largest body.
const DOCUMENTS_FACTOR: usize = 24;
const DOCUMENT_FACTOR: usize = 12;
/// Large documents in work at one time, whatever their size: half of the threads for such work.
const LARGE_AT_WORK: usize = 4;

/// Bodies up to this size have a pool of their own.
pub(crate) const SMALL_BYTES: usize = 64 << 10;
/// Raw bytes of small bodies that are in memory at one time.
pub(crate) const SMALL_BODIES_BYTES: usize = 32 << 20;
/// Memory for small documents, in bytes: one of the heaviest, or a hundred texts.
pub(crate) const SMALL_DOCUMENTS_BYTES: usize = 32 << 20;

/// Memory of a document for each byte of its body and for each value in it, in bytes. Includes what is parsed from it
/// and the copies that a template gets.
const BYTE_WEIGHT: usize = 4;
const VALUE_WEIGHT: usize = 320;

/// Upper bound of the memory of all bodies and their documents, in bytes, where one body has at most `max` bytes.
pub(crate) fn bodies_bytes(max: usize) -> usize {
    let raw = max.saturating_mul(RAW_BODIES).saturating_add(SMALL_BODIES_BYTES);
    // Buffers grow by an eighth.
    let raw = raw.saturating_add(raw / 8);
    raw.saturating_add(max.saturating_mul(DOCUMENTS_FACTOR)).saturating_add(SMALL_DOCUMENTS_BYTES)
}

/// Upper bound of the memory of this body's document, in bytes. Commas and brackets outside strings give the number of
/// values.
pub(crate) fn weight(body: &[u8]) -> usize {
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

impl Bodies {
    /// `max` is the largest allowed body in bytes; `names` are the key names of all callers.
    pub fn new(max: usize, names: &[Arc<str>]) -> Self {
        let (large, one) = (max.saturating_mul(DOCUMENTS_FACTOR), max.saturating_mul(DOCUMENT_FACTOR));
        Bodies {
            raw: BytePool::new(max.saturating_mul(RAW_BODIES), max, names),
            small_raw: BytePool::new(SMALL_BODIES_BYTES, SMALL_BYTES, names),
            small: BytePool::new(SMALL_DOCUMENTS_BYTES, weight(&[b','; SMALL_BYTES]), names),
            large: BytePool::new(large, one, names),
            min: large / LARGE_AT_WORK,
            max: one.max(weight(&[b','; SMALL_BYTES])),
        }
    }

    /// Wait for a permit to parse a document of this weight from a body of this many bytes.
    pub async fn document(&self, name: &str, bytes: usize, weight: usize) -> Option<Permit> {
        match bytes <= SMALL_BYTES {
            true => self.small.take(name, weight).await,
            false => self.large.take(name, weight.max(self.min)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a body of 4 MiB of `[[],[],…` became a document of about 300 MB, and only its bytes were counted.
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
        assert!(weight("word, after word. ".repeat(230_000).as_bytes()) > bodies.max);
        assert!(weight(format!("\"{}\"", "word, after word. ".repeat(230_000)).as_bytes()) < bodies.max / 2);
        assert!(
            weight(format!("[{}]", "12345,".repeat(131_072)).as_bytes()) < bodies.max,
            "a prompt of 131,072 tokens"
        );
    }

    /// Regression: with `max_body_bytes` above 683 MiB the smallest weight of a large document did not fit into the 32 bits of a
    /// semaphore's request, so every body of more than 64 KiB was refused with 503.
    #[tokio::test]
    async fn the_largest_bodies_have_documents() {
        for max in [4 << 20, 700 << 20, (1 << 30) - 1, 1 << 30] {
            let bodies = Bodies::new(max, &["a".into(), "b".into()]);
            assert!(bodies.document("a", SMALL_BYTES + 1, SMALL_BYTES).await.is_some(), "{max}");
            let all =
                [bodies.document("a", max, bodies.max).await, bodies.document("b", max, bodies.max).await];
            assert!(all.iter().all(Option::is_some), "{max}");
            let all: Option<Vec<Permit>> = (0..RAW_BODIES).map(|_| bodies.raw.try_take("c", max)).collect();
            assert!(all.is_some() && bodies.raw.try_take("c", max).is_none(), "{max}");
        }
    }
}
